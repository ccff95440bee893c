"""The toolchain part: interpreter, torch, torch_npu, runtime formats, CANN packages, driver, architecture.

Owns where each version is read without importing torch, and compares with what a running process sees. Versions are
compared for equality; an empty or unreadable version is never equal to anything, it is a reason.

Where the facts come from: torch writes `torch/version.py` and torch_npu `torch_npu/version.py` (both with
`git_version`); package metadata can lie after an in-place downgrade, so the imported files are read, not the metadata.
The artifact formats are class constants `CompiledModel.VERSION` in the runtimes' `_cache_compiler.py`. CANN keeps
`share/info/<package>/version.info` with a line `Version=` below $ASCEND_HOME_PATH (torch_npu reads the same files), the
driver `/etc/ascend_install.info`, whose `Driver_Install_Path_Param` names a folder with `driver/version.info`;
containers often have its default folder mounted without that file. Where there is neither, a node's label may name its
driver.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from cachectl.identity.device import in_simulation
from cachectl.identity.node_labels import labelled_driver, read_labels
from cachectl.schemas.boot import Reason

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "CANN_PACKAGES",
    "DEFAULT_SIM_CANN",
    "package_folder",
    "process_toolchain",
    "read_cann",
    "read_driver",
    "simulated_cann",
    "toolchain_part",
]

DEFAULT_SIM_CANN = "8.5.0"

# What torch_npu calls a module, and the package whose version.info answers for it.
CANN_PACKAGES = {"CANN": "runtime", "COMPILER": "bisheng-compiler", "HCCL": "hccl", "OPP": "ops-legacy"}

_FORMATS = {
    "npugraph_ex": "dynamo/npugraph_ex/inference/_cache_compiler.py",
    "torchair": "dynamo/torchair/inference/_cache_compiler.py",
}
_DRIVER_INFO = Path("/etc/ascend_install.info")
_DRIVER_FOLDER = Path("/usr/local/Ascend")


def toolchain_part(
    environ: Mapping[str, str], *, simulated: bool, search_path: list[str] | None = None
) -> tuple[dict[str, Any], list[Reason]]:
    """Return the toolchain document as files tell it, without importing torch.

    Args:
        environ: the environment the program will have; ASCEND_HOME_PATH names the toolkit.
        simulated: whether the recipe asks for the simulated CANN; outside of the simulation its versions are known.
        search_path: where to look for torch and torch_npu; None for this interpreter's sys.path.

    Returns:
        The document, and one reason (kind `absent`) for each version that can't be read.
    """
    reasons: list[Reason] = []
    torch_folder = package_folder("torch", search_path)
    npu_folder = package_folder("torch_npu", search_path)
    document = {
        "python": _python(),
        "torch": _version_file("torch", torch_folder, reasons),
        "torch_npu": _version_file("torch_npu", npu_folder, reasons),
        "formats": _formats(npu_folder),
        "cann": _cann(environ, simulated, reasons),
        "driver": None
        if simulated or in_simulation(environ)
        else read_driver() or labelled_driver(read_labels(environ)),
        "arch": os.uname().machine,
    }
    return document, reasons


def process_toolchain(document: Mapping[str, Any], torch: Any, torch_npu: Any) -> list[Reason]:
    """Compare a toolchain document with the modules a process has imported; what they say is the truth.

    Returns:
        One reason for each difference: `stored` is what the document says, `wanted` what runs here.
    """
    seen = {
        ("python", "implementation"): sys.implementation.name,
        ("python", "minor"): f"{sys.version_info[0]}.{sys.version_info[1]}",
        ("python", "magic"): importlib.util.MAGIC_NUMBER.hex(),
        ("torch", "version"): str(torch.__version__),
        ("torch", "git"): _text(torch.version.git_version),
        ("torch_npu", "version"): str(torch_npu.__version__),
        ("torch_npu", "git"): _text(torch_npu.version.git_version),
    }
    reasons = []
    for (name, field), wanted in seen.items():
        stored = (document.get(name) or {}).get(field)
        if stored != wanted or (field == "version" and not wanted):
            reasons.append(Reason("toolchain", f"{name}.{field}", stored, wanted, hint="run: cachectl build"))
    return reasons


def _text(value: object) -> str | None:
    # A build from an archive has no revision: its version stands alone, in the file and in the module.
    return str(value) if value else None


def read_cann(home: Path) -> dict[str, str | None]:
    """Return the version of each CANN package below a toolkit's home; None where it can't be read or is empty."""
    return {name: _version_info(home, package) for name, package in CANN_PACKAGES.items()}


def simulated_cann(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return what the simulated toolkit's version files say, without making the toolkit."""
    version = environ.get("CACHECTL_SIM_CANN") or DEFAULT_SIM_CANN
    return dict.fromkeys(CANN_PACKAGES, version)


def read_driver(info: Path = _DRIVER_INFO, default: Path = _DRIVER_FOLDER) -> str | None:
    """Return the driver's version, or None where none is installed (an init container sees none).

    Args:
        info: the installer's note of where it put the driver.
        default: where it puts it unless told otherwise; looked at where there is no note.
    """
    try:
        match = re.search(r"^Driver_Install_Path_Param=(.+)$", info.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        match = None
    folder = Path(match.group(1).strip()) if match else default
    return _read_version(folder / "driver" / "version.info")


def _python() -> dict[str, str]:
    return {
        "implementation": sys.implementation.name,
        "minor": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "magic": importlib.util.MAGIC_NUMBER.hex(),
    }


def package_folder(name: str, search_path: list[str] | None = None) -> Path | None:
    """Return the folder that `import name` would take, without importing it; None where there is none."""
    # PathFinder reads directories only; importlib.util.find_spec would take an already imported module's word.
    spec = importlib.machinery.PathFinder.find_spec(name, search_path)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _version_file(name: str, folder: Path | None, reasons: list[Reason]) -> dict[str, str | None]:
    found: dict[str, str | None] = {"version": None, "git": None}
    if folder is not None:
        try:
            text = (folder / "version.py").read_text(errors="replace")
        except OSError:
            text = ""
        for field, variable in (("version", "__version__"), ("git", "git_version")):
            match = re.search(rf"^{variable}\s*(?::[^=]+)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
            found[field] = match.group(1) if match else None
    if not found["version"]:
        reasons.append(
            Reason("toolchain", name, kind="absent", hint=f"install {name} for this interpreter ({sys.executable})")
        )
    return found


def _formats(npu_folder: Path | None) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for runtime, place in _FORMATS.items():
        try:
            text = (npu_folder / place).read_text(errors="replace") if npu_folder is not None else ""
        except OSError:
            text = ""
        match = re.search(r"^\s+VERSION\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        found[runtime] = match.group(1) if match else None
    return found


def _cann(environ: Mapping[str, str], simulated: bool, reasons: list[Reason]) -> dict[str, str | None]:
    if simulated and not in_simulation(environ):
        return simulated_cann(environ)
    home = environ.get("ASCEND_HOME_PATH", "")
    if not home:
        reasons.append(
            Reason(
                "toolchain", "cann", kind="absent", hint="ASCEND_HOME_PATH is not set: source CANN's set_env.sh first"
            )
        )
        return dict.fromkeys(CANN_PACKAGES)
    versions = read_cann(Path(home))
    for name, package in CANN_PACKAGES.items():
        # Two empty versions are equal to each other and say nothing: never a match. A toolkit without its runtime is
        # none; any other package may be missing, but not be there without a version.
        file = _version_file_of(Path(home), package)
        # Not by `file.exists()`, which raises where the folder can't be entered.
        if not versions[name] and (name == "CANN" or os.path.exists(file)):
            hint = f"no Version= in {file}: mend the installation of CANN"
            reasons.append(Reason("toolchain", f"cann.{name}", kind="absent", hint=hint))
    return versions


def _version_info(home: Path, package: str) -> str | None:
    return _read_version(_version_file_of(home, package))


def _version_file_of(home: Path, package: str) -> Path:
    return home / "share" / "info" / package / "version.info"


def _read_version(path: Path) -> str | None:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"^Version=(\S+)", text, re.MULTILINE)
    return match.group(1) if match else None
