"""Scripts run as a recipe's model in this process, with a made-up runtime; everything of the process is put back."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch

from cachectl import programs

__all__ = ["HEAD", "Run", "called", "run"]

# What every script here begins with. The runtime's own cache_compile must not run in a rank process.
HEAD = """\
import os, sys, threading
import torch
from npugraph_ex.inference import cache_compile

class Model(torch.nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale
        self.register_buffer("seen", torch.zeros(4))
        self.cache = [torch.zeros(4)]

    def main_decode(self, x, lengths=None, *, cache=None):
        self.seen += x.sum(0)
        return x * self.scale

class Draft(Model):
    def mtp_decode(self, x):
        return x + 1

"""

Run = Callable[..., programs.ProgramModel]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a script as a model in a folder of its own; everything of this process is put back."""
    runtime = types.ModuleType("npugraph_ex.inference")

    def cache_compile(*_: Any, **__: Any) -> Any:
        raise AssertionError("the runtime compiles")

    vars(runtime)["cache_compile"] = cache_compile
    monkeypatch.setitem(sys.modules, "npugraph_ex", types.ModuleType("npugraph_ex"))
    monkeypatch.setitem(sys.modules, "npugraph_ex.inference", runtime)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(programs, "_folder", tmp_path)
    before, dtype = (torch.compile, Path.cwd()), torch.get_default_dtype()

    def run_text(text: str, *methods: str, command: tuple[str, ...] = ("python", "script.py"), **config: Any) -> Any:
        (tmp_path / "script.py").write_text(HEAD + text)
        return programs.model(list(command), list(methods) or ["main_decode"], **config)

    yield run_text
    torch.set_default_dtype(dtype)
    assert before == (torch.compile, Path.cwd())
    assert runtime.cache_compile is cache_compile


def called(model: programs.ProgramModel, method: str = "main_decode", number: int = 0) -> dict[str, Any]:
    return programs.call(model, 0, method, number)
