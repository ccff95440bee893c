"""Doctor: whether this machine can build, and whether its store can be used; each check with what mends it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from cachectl.boot.warmdir import WarmDir, choose_warm_dir
from cachectl.errors import CachectlError
from cachectl.identity.device import device_part, in_simulation
from cachectl.identity.toolchain import toolchain_part
from cachectl.runtimes import simulated
from cachectl.schemas.report import DoctorCheck, DoctorReport
from cachectl.store.layout import StoreLayout
from cachectl.store.manifest import ManifestRepo

__all__ = ["doctor"]

_LOW_SPACE_BYTES = 1 << 30


def doctor(layout: StoreLayout, environ: Mapping[str, str] | None = None) -> DoctorReport:
    """Check interpreter, wheels, CANN, device, simulation, store, database and warm dir; raises nothing of its own."""
    environ = os.environ if environ is None else environ
    toolchain, missing = toolchain_part(environ, simulated=False)
    absent = {reason.name.partition(".")[0]: reason.hint for reason in missing}
    checks = [
        _check(
            "python",
            sys.implementation.name == "cpython",
            f"{sys.implementation.name} {sys.version.split()[0]}",
            "use CPython",
        ),
        *(
            _check(name, toolchain[name]["version"] is not None, str(toolchain[name]["version"]), absent.get(name, ""))
            for name in ("torch", "torch_npu")
        ),
        _check(
            "npugraph_ex",
            toolchain["formats"]["npugraph_ex"] is not None,
            f"artifact format {toolchain['formats']['npugraph_ex']}",
            "install torch_npu 2.10.0 or newer",
        ),
        _cann(environ, toolchain, absent),
        _device(environ),
        _guarded("simulation", lambda: str(simulated.ensure().home), "needed only for `device: simulated`", warn=True),
        _guarded("store", lambda: _store(layout), f"run: cachectl init --store {layout.root}"),
        _guarded("database", lambda: _database(layout), f"run: cachectl db upgrade --store {layout.root}"),
        _space(layout),
        _warm_dir(environ),
    ]
    return DoctorReport(checks=tuple(checks))


def _check(name: str, good: bool, detail: str, hint: str, *, warn: bool = False) -> DoctorCheck:
    state = "ok" if good else ("warn" if warn else "fail")
    return DoctorCheck.model_validate({"name": name, "state": state, "detail": detail, "hint": "" if good else hint})


def _guarded(name: str, find: Callable[[], str], hint: str, *, warn: bool = False) -> DoctorCheck:
    try:
        return _check(name, True, find(), hint)
    except CachectlError as error:
        return _check(name, False, error.message, error.hint or hint, warn=warn)


def _cann(environ: Mapping[str, str], toolchain: Mapping[str, object], absent: Mapping[str, str]) -> DoctorCheck:
    versions = toolchain["cann"]
    detail = (
        ", ".join(f"{name} {version}" for name, version in versions.items()) if isinstance(versions, Mapping) else ""
    )
    # Without an NPU the simulation stands in, so a missing toolkit is worth saying and no failure.
    return _check("cann", "cann" not in absent, detail, absent.get("cann", ""), warn=True)


def _device(environ: Mapping[str, str]) -> DoctorCheck:
    found, unknown = device_part("npu", environ)
    kind = " (simulated)" if in_simulation(environ) else ""
    return _check("device", not unknown, f"{found['soc']}{kind}", unknown[0].hint if unknown else "", warn=True)


def _store(layout: StoreLayout) -> str:
    layout.check()
    return str(layout.root)


def _database(layout: StoreLayout) -> str:
    layout.check()
    with ManifestRepo.open(layout.database, read_only=True) as repo:
        stats = repo.stats()
        return f"{stats.entries} entries, {stats.warm_sets} warm sets, {stats.blob_bytes} bytes in {stats.blobs} blobs"


def _space(layout: StoreLayout) -> DoctorCheck:
    folder = _existing(layout.root)
    free_bytes = shutil.disk_usage(folder).free
    found = os.statvfs(folder)
    # Inodes run out long before bytes where files are many and small (field report F9).
    inodes = f", {found.f_favail} inodes" if found.f_files else ""
    good = free_bytes > _LOW_SPACE_BYTES and (not found.f_files or found.f_favail > 1000)
    return _check(
        "free space", good, f"{free_bytes} bytes{inodes} at {folder}", "free some, or pass another --store", warn=True
    )


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _warm_dir(environ: Mapping[str, str]) -> DoctorCheck:
    found = choose_warm_dir(None, environ)
    if isinstance(found, WarmDir):
        return _check("warm dir", True, str(found.root), "")
    return _check("warm dir", False, str(found.stored), found.hint)
