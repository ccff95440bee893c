"""Real artifacts from `data/`, and a pickler that makes others in the runtime's form."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"
MODULE = "npugraph_ex.inference._cache_compiler"
Pack = Callable[..., bytes]


@pytest.fixture(scope="session")
def artifact_bytes() -> Callable[[str], bytes]:
    """Return a reader of the stored artifacts, by the file's stem."""

    def read(name: str) -> bytes:
        return (DATA / f"{name}.bin").read_bytes()

    return read


@pytest.fixture(scope="session")
def interpreter() -> Callable[[str], str]:
    """Return a finder of CPython by minor, on PATH or among pyenv's versions; without one the test is skipped."""

    def find(minor: str) -> str:
        found = shutil.which(f"python{minor}")
        # pyenv's shim is there for every version it ever had, and fails for those not switched on.
        if found and subprocess.run([found, "-c", ""], check=False, capture_output=True).returncode == 0:
            return found
        versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        for candidate in sorted(versions.glob(f"{minor}.*/bin/python")):
            return str(candidate)
        pytest.skip(f"no CPython {minor} here")

    return find


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch) -> Pack:
    """Return a maker of artifacts: keyword arguments replace fields, `module` the module the classes stand in."""

    def make(*, module: str = MODULE, protocol: int = 4, **fields: Any) -> bytes:
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        classes = {name: type(name, (), {"__module__": module}) for name in _CLASSES}
        for name, kind in classes.items():
            setattr(sys.modules[module], name, kind)
        values = {
            "name": "Decoder.main_decode(x, kv)",
            "date": "2026-01-02 03:04:05.678901+00:00",
            "version": "1.0.6",
            "compiled_fn": (DATA / "bytecode_3_11.bin").read_bytes(),
            "signature": "",
            "py_code": "",
            "input_parameters": [],
            **fields,
        }

        def record(kind: str, **state: Any) -> Any:
            instance = classes[kind]()
            instance.__dict__.update(state)
            return instance

        meta = record("ModelCacheMeta", **{name: values.pop(name) for name in ("name", "date", "version")})
        compiled_fn = values.pop("compiled_fn")
        compiled_fx = record("CompiledFX", **values)
        artifact = record("ModelCacheArtifact", meta=meta, compiled_fn=compiled_fn, compiled_fx=compiled_fx)
        return pickle.dumps(artifact, protocol=protocol)

    return make


_CLASSES = ("ModelCacheArtifact", "ModelCacheMeta", "CompiledFX")
