"""Compiles the simulated CANN's C source into the user's cache, once per source and compiler. Standard library only.

<cache>/cachectl/simulated/<digest>/
lib64/libcachectl_cann.so      every function
lib64/lib<facade>.so           the names torch_npu links against; each needs only the library above
complete.json                  size of each library: what a whole build looks like
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cachectl.errors import SimulationError
from cachectl.runtimes.simulated.settings import DEFAULT_CANN, DEFAULT_DEVICES, DEFAULT_SOC

__all__ = ["FACADES", "SIMULATION_VERSION", "cache_root", "ensure_build"]

SIMULATION_VERSION = "1"

# DT_NEEDED of libtorch_npu.so, libtensorpipe.so and _C of torch_npu 2.13.0, then what it opens by name: super kernels
# and the dump of operators that static kernels are compiled from.
FACADES = (
    "ascendcl",
    "acl_op_compiler",
    "acl_tdt_channel",
    "ge_runner",
    "graph",
    "hccl",
    "ascendsk",
    "ascend_dump",
)

_NATIVE = Path(__file__).resolve().parent / "native"
_FLAGS = (
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O1",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    f'-DSIM_VERSION="{SIMULATION_VERSION}"',
    f'-DSIM_DEFAULT_SOC="{DEFAULT_SOC}"',
    f'-DSIM_DEFAULT_CANN="{DEFAULT_CANN}"',
    f"-DSIM_DEFAULT_DEVICES={DEFAULT_DEVICES}",
)
# A second or two where nothing else runs; builds share their machines.
_COMPILE_TIMEOUT_S = 900
_IMPLEMENTATION = "libcachectl_cann.so"
_STAMP = "complete.json"


def cache_root(environ: Mapping[str, str]) -> Path:
    """Return the directory that holds builds, made if need be: XDG_CACHE_HOME, else HOME, else /var/tmp when ours.

    Raises:
        SimulationError: the one that applies can't be written, or /var/tmp/cachectl-<uid> belongs to someone else.
    """
    xdg, home = environ.get("XDG_CACHE_HOME"), environ.get("HOME")
    if xdg and os.path.isabs(xdg):  # the XDG rules say that a relative path is to be ignored
        return _private(Path(xdg) / "cachectl" / "simulated")
    if home and os.path.isabs(home) and os.access(home, os.W_OK | os.X_OK):
        return _private(Path(home) / ".cache" / "cachectl" / "simulated")
    shared = Path("/var/tmp") / f"cachectl-{os.geteuid()}"  # checked for owner and mode right below
    _private(shared)
    state = shared.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) != 0o700:
        raise SimulationError(f"{shared} is not a directory of ours with mode 0700", hint="set XDG_CACHE_HOME")
    return _private(shared / "simulated")


def _private(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SimulationError(
            f"can't make the cache directory {path}: {error.strerror}", hint="set XDG_CACHE_HOME to a writable one"
        ) from error
    return path


def ensure_build(environ: Mapping[str, str]) -> Path:
    """Return the directory of a whole build, compiling it when there is none.

    Safe for several processes at once: each compiles in a directory of its own and the first rename wins. A build
    that lost a file is put aside and made anew.

    Raises:
        SimulationError: no compiler, it failed (its first error is in the message), or the cache can't be written.
    """
    compiler = _compiler(environ)
    build = cache_root(environ) / _digest(_version(compiler))
    if _is_whole(build):
        return build
    try:
        _publish(compiler, build)
    except OSError as error:
        raise SimulationError(
            f"can't write the simulated CANN to {build.parent}: {error.strerror}", hint="set XDG_CACHE_HOME"
        ) from error
    if not _is_whole(build):
        raise SimulationError(f"{build} is not a whole build", hint=f"remove {build} and run again")
    return build


def _publish(compiler: list[str], build: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".making-", dir=build.parent) as scratch:
        made = Path(scratch) / "build"
        _compile(compiler, made / "lib64")
        sizes = {path.name: path.stat().st_size for path in sorted((made / "lib64").iterdir())}
        (made / _STAMP).write_text(json.dumps(sizes, sort_keys=True), encoding="utf-8")
        if build.exists() and not _is_whole(build):
            os.rename(build, Path(scratch) / "damaged")  # removed with the scratch directory
        try:
            os.rename(made, build)
        except OSError:
            # ENOTEMPTY or EEXIST: another process was first, and what it made is the same.
            if not build.is_dir():
                raise


def _compiler(environ: Mapping[str, str]) -> list[str]:
    command = (environ.get("CC") or "cc").split()
    found = shutil.which(command[0], path=environ.get("PATH"))
    if found is None:
        raise SimulationError(
            f"no C compiler: {command[0]} is not on PATH", hint="install gcc, or set CC to a C compiler"
        )
    return [found, *command[1:]]


def _version(compiler: list[str]) -> str:
    done = _run([*compiler, "--version"])
    return done.stdout.partition("\n")[0]


def _digest(compiler_version: str) -> str:
    digest = hashlib.sha256()
    for part in (compiler_version, os.uname().machine, *_FLAGS, *FACADES):
        digest.update(part.encode() + b"\0")
    for source in sorted(_NATIVE.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _is_whole(build: Path) -> bool:
    try:
        if build.lstat().st_uid != os.geteuid():
            return False
        sizes = json.loads((build / _STAMP).read_text(encoding="utf-8"))
        return bool(sizes) and all((build / "lib64" / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _compile(compiler: list[str], into: Path) -> None:
    into.mkdir(mode=0o700, parents=True)
    sources = [str(path) for path in sorted(_NATIVE.glob("*.c")) if path.name != "facade.c"]
    _run(
        [*compiler, *_FLAGS, f"-Wl,-soname,{_IMPLEMENTATION}", "-o", str(into / _IMPLEMENTATION), *sources, "-lpthread"]
    )
    for facade in FACADES:
        # as-needed would drop the very dependency that gives a facade its symbols.
        _run(
            [
                *compiler,
                *_FLAGS,
                f"-Wl,-soname,lib{facade}.so",
                "-Wl,-rpath,$ORIGIN",
                "-Wl,--no-as-needed",
                "-o",
                str(into / f"lib{facade}.so"),
                str(_NATIVE / "facade.c"),
                f"-L{into}",
                "-lcachectl_cann",
            ]
        )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SimulationError(f"the C compiler {command[0]} can't be run: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).splitlines()
        first = next((line for line in said if "error" in line), said[0] if said else f"exit status {done.returncode}")
        raise SimulationError(
            f"{command[0]} failed on the simulated CANN: {first.strip()}", hint="set CC to another compiler"
        )
    return done
