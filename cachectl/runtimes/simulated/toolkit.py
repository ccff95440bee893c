"""Lays out a CANN toolkit directory that carries one version, beside a build of the libraries. Standard library only.

    <build>/cann-<version>/                       $ASCEND_HOME_PATH
        lib64 -> ../lib64
        share/info/<package>/version.info         Version=<version>, one for each package that is asked for
        <machine>-linux/ascend_toolkit_install.info
        runtime/ compiler/ opp/                   looked for by torch_npu when it is imported; opp is $ASCEND_OPP_PATH

What is read there: `_cann_package_check` and `collect_env.get_cann_version` of torch_npu 2.13.0; version.info is where
`share/info` keeps CANN (runtime), compiler, HCCL and OPP versions.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cachectl.errors import SimulationError
from cachectl.runtimes.simulated.library import ensure_build
from cachectl.runtimes.simulated.settings import SimulatedDevice

__all__ = ["PACKAGES", "Toolkit", "ensure"]

PACKAGES = ("runtime", "bisheng-compiler", "hccl", "ops-legacy")


@dataclass(frozen=True)
class Toolkit:
    """A simulated CANN installation: `home` is its $ASCEND_HOME_PATH, `cann` the version of every package in it."""

    home: Path
    cann: str

    @property
    def libraries(self) -> Path:
        """Directory of the shared libraries: first on LD_LIBRARY_PATH."""
        return self.home / "lib64"

    @property
    def operators(self) -> Path:
        """The operator package directory: $ASCEND_OPP_PATH."""
        return self.home / "opp"


def ensure(cann: str | None = None, *, environ: Mapping[str, str] | None = None) -> Toolkit:
    """Return a simulated CANN of version `cann`, compiled and laid out in the user's cache when it is not there yet.

    Safe for several processes at once, never half-written, and it costs one `cc --version` when all is there.

    Args:
        cann: version that it reports; None takes CACHECTL_SIM_CANN, else 8.5.0.
        environ: where CACHECTL_SIM_CANN, CC, PATH, XDG_CACHE_HOME and HOME are read; None is this process's own.

    Raises:
        ConfigError: `cann` is not a version.
        SimulationError: no compiler, it failed, or the cache directory can't be written.
    """
    environ = os.environ if environ is None else environ
    version = SimulatedDevice.chosen(environ, cann=cann, devices=1).cann
    build = ensure_build(environ)
    home = build / f"cann-{version}"
    if not home.is_dir():
        try:
            _lay_out(home, version)
        except OSError as error:
            raise SimulationError(f"can't lay out {home}: {error.strerror}", hint="set XDG_CACHE_HOME") from error
    return Toolkit(home, version)


def _lay_out(home: Path, version: str) -> None:
    with tempfile.TemporaryDirectory(prefix=".making-", dir=home.parent) as scratch:
        made = Path(scratch) / "home"
        for package in PACKAGES:
            info = made / "share" / "info" / package
            info.mkdir(parents=True)
            (info / "version.info").write_text(f"Version={version}\nversion_dir={version}\n", encoding="ascii")
        for name in ("runtime", "compiler", "opp"):
            (made / name).mkdir()
        machine = os.uname().machine
        install = made / f"{machine}-linux"
        install.mkdir()
        (install / "ascend_toolkit_install.info").write_text(
            f"package_name=cachectl-simulated-cann\nversion={version}\narch={machine}\nos=linux\npath={home}\n",
            encoding="utf-8",
        )
        (made / "lib64").symlink_to("../lib64")
        try:
            os.rename(made, home)
        except OSError:
            # ENOTEMPTY: another process was first; the trees are equal.
            if not home.is_dir():
                raise
