"""What runs while a graph is made and is not traced: its code is in `sources`, what it reads in the guard sheet."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachectl.boot.proof import prove
from cachectl.build.guards import GuardRecorder
from cachectl.build.kernels import watch_kernels
from cachectl.build.sources import SourceRecorder
from cachectl.build.untraced import UntracedRecorder
from cachectl.errors import BuildError
from cachectl.identity.sources import check_files
from cachectl.schemas.canonical import canonical_bytes

pytestmark = [pytest.mark.real, pytest.mark.slow]

MODEL = """import functools
import logging
import os
import threading

import torch
from torch import nn

from untraced{number} import settings

LOG = logging.getLogger(__name__)
LOCK = threading.Lock()
SCALE = 2.0
TABLE = {{"a": [1.0, 2.0], "b": (3, None)}}
WEIGHT = torch.ones(2)
OPEN = [1]
OPEN.append(OPEN)
API_KEY = "s3cr3t"
lib = torch.library.Library("untraced{number}", "DEF")


class Options:
    shift = 0.5

    def __init__(self, gain):
        self.gain = gain

    @property
    def doubled(self):
        return self.gain * 2

    def scaled(self, x):
        return x * self.gain

    @staticmethod
    def moved(x):
        return x + SCALE


OPTIONS = Options(4.0)


class Opaque:
    __slots__ = ("held",)


OPAQUE = Opaque()


def helper(x):
    return x * SCALE


def fake(x):
    return torch.empty_like(x)


def operator(name, *, cpu=True):
    lib.define(f"{{name}}(Tensor x) -> Tensor")
    if cpu:
        lib.impl(name, lambda x: x * 7, "CPU")
        torch.library.register_fake(f"untraced{number}::{{name}}", fake, lib=lib)
    return getattr(torch.ops.untraced{number}, name)


implicit, autograd, explicit, called = (
    operator(name, cpu=False) for name in ("implicit", "autograd", "explicit", "called")
)
functional, table = operator("functional"), operator("table")


@torch.library.impl(lib, "implicit", "CompositeImplicitAutograd")
def implicit_kernel(x):
    return helper(x) + 1


@torch.library.impl(lib, "autograd", "Autograd")
def autograd_kernel(x):
    return x * SCALE


@torch.library.impl(lib, "explicit", "CompositeExplicitAutograd")
def explicit_kernel(x):
    return x.sin()


def called_kernel(x):
    return x * 11


lib.impl("called", called_kernel, "CompositeImplicitAutograd")


@functional.default.py_functionalize_impl
def functional_kernel(mode, x):
    return mode.wrap_tensors(mode.unwrap_tensors(x) * 5)


@table.default.py_impl(torch._C.DispatchKey.Autograd)
def table_kernel(x):
    return x * 3


@torch.compiler.allow_in_graph
def allowed(x):
    return helper(x)


@torch._dynamo.nonstrict_trace
def nonstrict(x):
    return helper(x)


@torch._dynamo.assume_constant_result
def constant():
    LOG.debug("read")
    with LOCK:
        return SCALE + TABLE["a"][1] + settings.DEPTH + OPTIONS.gain + OPTIONS.doubled + Options.shift


@torch._dynamo.assume_constant_result
def by_default(extra=settings.DEPTH, *, more=1.0):
    return extra + more


@torch.compiler.allow_in_graph
def through_object(x):
    return Options.moved(OPTIONS.scaled(x))


@torch._dynamo.assume_constant_result
def through_class():
    return Options(SCALE).gain


def made(factor):
    @torch._dynamo.assume_constant_result
    def inner():
        return factor

    return inner


enclosed = made(2.0)


@torch._dynamo.assume_constant_result
def of_weight():
    return float(WEIGHT.sum())


@torch._dynamo.assume_constant_result
def of_opaque():
    return 1.0 if OPAQUE is None else 2.0


@torch._dynamo.assume_constant_result
def of_open():
    return float(len(OPEN))


@torch._dynamo.assume_constant_result
def of_secret():
    return float(len(API_KEY))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.depth = 3.0

    @torch._dynamo.assume_constant_result
    def own(self):
        return self.depth + 1

    def decode(self, x):
        return {body}
"""
OPERATORS = {
    "implicit": "implicit_kernel",
    "autograd": "autograd_kernel",
    "explicit": "explicit_kernel",
    "called": "called_kernel",
    "functional": "functional_kernel",
    "table": "table_kernel",
    "allowed": "allowed",
    "nonstrict": "nonstrict",
}
NUMBERS = iter(range(1000))


class Recorded:
    """One compile of a model whose method returns `body`, with what was recorded."""

    def __init__(self, folder: Path, body: str, *, watched: bool = True) -> None:
        import torch

        self.number = next(NUMBERS)
        self.package = folder / f"untraced{self.number}"
        self.package.mkdir(parents=True)
        (self.package / "__init__.py").write_text("")
        (self.package / "settings.py").write_text("DEPTH = 1.0\n")
        (self.package / "model.py").write_text(MODEL.format(number=self.number, body=body))
        self.folder = folder
        if watched:
            watch_kernels()
        self.module: Any = importlib.import_module(f"untraced{self.number}.model")
        self.model = self.module.Model()
        self.x = torch.ones(2)
        torch._dynamo.reset()
        torch._dynamo.utils.orig_code_map.clear()
        with torch.no_grad(), GuardRecorder(type(self.model).decode.__code__) as guards, SourceRecorder() as sources:
            torch.compile(self.model.decode, backend="aot_eager", fullgraph=True)(self.x)
        self.guards = guards.recorded()
        self.document, self.raw = sources.document({"path:0": folder})

    def failed(self) -> list[str]:
        """Return what the proof finds changed."""
        import torch

        sheet = json.loads(canonical_bytes(self.guards.sheet))
        with torch.no_grad():
            proof = prove(sheet, arguments={"self": self.model, "x": self.x}, function=self.model.decode, torch=torch)
        return [reason.name for reason in proof.failed]

    def edited(self, old: str, new: str) -> list[str]:
        """Return what a check of the files finds changed after an edit."""
        path = self.package / "model.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        found = [reason.name.partition(": ")[2] for reason in check_files(self.document, self.raw, self.roots)]
        path.write_text(text)
        return found

    @property
    def roots(self) -> dict[str, Path]:
        return {"path:0": self.folder}

    @property
    def definitions(self) -> set[str]:
        entry = next(entry for entry in self.document["files"] if entry["path"].endswith("model.py"))
        return set(entry["definitions"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    importlib.invalidate_caches()


@pytest.mark.parametrize("name", OPERATORS)
def test_body_that_no_trace_shows_is_in_sources(folder: Path, name: str) -> None:
    """A kernel or function that the compiler goes through counts with what it calls; others of the file don't."""
    found = Recorded(folder, f"{name}(x)")

    assert [] == found.guards.unrepresented
    assert [] == found.failed()
    # One that a statement registers counts with its whole file, see below.
    assert OPERATORS[name] in found.definitions or name == "called"
    if name in ("implicit", "allowed", "nonstrict"):
        assert "helper" in found.definitions
        assert "helper" in found.edited("return x * SCALE", "return x / SCALE")
    if name != "called":
        assert [] == found.edited("float(WEIGHT.sum())", "float(WEIGHT.max())")


def test_kernel_that_a_statement_registers_counts_with_its_file(folder: Path) -> None:
    """`lib.impl(name, function)` has no name of its own: putting another function there changes the graph."""
    found = Recorded(folder, "called(x)")

    assert ["called_kernel is a kernel of"] == [note.partition("counts whole: ")[2][:28] for note in found.raw["notes"]]
    assert found.edited('lib.impl("called", called_kernel', 'lib.impl("called", explicit_kernel') == [""]


@pytest.mark.parametrize(
    ("body", "change", "wanted"),
    [
        ("implicit(x)", "SCALE", ["model.SCALE"]),
        ("autograd(x)", "SCALE", ["model.SCALE"]),
        ("allowed(x)", "SCALE", ["model.SCALE"]),
        ("nonstrict(x)", "SCALE", ["model.SCALE"]),
        ("x * constant()", "SCALE", ["model.SCALE"]),
        ("x * constant()", "DEPTH", ["settings.DEPTH"]),
        ("x * constant()", "TABLE", ["model.TABLE['a'][1]"]),
        ("x * constant()", "OPTIONS", ["model.OPTIONS.gain"]),
        ("x * constant()", "shift", ["model.Options.shift"]),
        ("x * constant()", "helper", []),
        ("x * by_default()", "defaults", ["model.by_default.__defaults__[0]"]),
        ("through_object(x)", "OPTIONS", ["model.OPTIONS.gain"]),
        ("through_object(x)", "SCALE", ["model.SCALE"]),
        ("x * through_class()", "SCALE", ["model.SCALE"]),
        ("allowed(x)", "helper", ["model.helper"]),
        ("x * self.own()", "depth", ["self.depth"]),
        ("explicit(x)", "SCALE", []),
    ],
)
def test_what_it_reads_is_proved(folder: Path, body: str, change: str, wanted: list[str]) -> None:
    """A global, a table's item, another module's name, an object's attribute that the program changes is seen."""
    found = Recorded(folder, body)
    module = found.module
    assert [] == found.guards.unrepresented
    assert [] == found.failed()
    changes: dict[str, Any] = {
        "SCALE": lambda: setattr(module, "SCALE", 3.0),
        "DEPTH": lambda: setattr(module.settings, "DEPTH", 3.0),
        "TABLE": lambda: module.TABLE["a"].__setitem__(1, 3.0),
        "OPTIONS": lambda: setattr(module.OPTIONS, "gain", 3.0),
        "shift": lambda: setattr(module.Options, "shift", 3.0),
        "helper": lambda: setattr(module, "helper", lambda x: x),
        "defaults": lambda: setattr(module.by_default, "__defaults__", (3.0,)),
        "depth": lambda: setattr(found.model, "depth", 5.0),
    }
    changes[change]()

    assert wanted == [name.replace(f"untraced{found.number}.", "") for name in found.failed()]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("x * enclosed()", "reads factor: which no other process finds again"),
        ("x * of_weight()", "reads WEIGHT.sum: a tensor, whose values would be in the graph"),
        ("x * of_opaque()", "reads OPAQUE: "),
        ("x * of_open()", "holds more than is compared"),
        ("x * of_secret()", "a string that may be a secret"),
    ],
)
def test_what_can_not_be_compared_is_refused(folder: Path, body: str, words: str) -> None:
    """What went into the graph and can't be found or said in another process fails the build by name and line."""
    lines = Recorded(folder, body).guards.unrepresented

    assert any(words in line for line in lines), lines
    assert all("model.py:" in line and "ran while the graph was made" in line for line in lines)
    assert "s3cr3t" not in str(lines)


def test_kernel_of_before_the_watch_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives no kernel back: one that was registered unseen can't be recorded."""
    import torch

    monkeypatch.setattr(torch.library.Library, "impl", torch.library.Library.impl.__wrapped__, raising=True)
    found = Recorded(folder, "implicit(x)", watched=False)

    (line,) = found.guards.unrepresented
    assert line.startswith(
        f"untraced{found.number}::implicit has a Python kernel for CompositeImplicitAutograd that was"
    )


def test_untraced_outside_of_the_recipe_is_a_build_error(folder: Path) -> None:
    """A function whose module belongs to nobody has no source to compare."""
    import torch

    namespace: dict[str, Any] = {"__name__": "nowhere", "torch": torch}
    exec("@torch.compiler.allow_in_graph\ndef f(x):\n    return x + 1\n\ndef call(x):\n    return f(x)\n", namespace)
    torch._dynamo.reset()
    with torch.no_grad(), SourceRecorder() as recorder:
        torch.compile(namespace["call"], backend="aot_eager", fullgraph=True)(torch.ones(2))

    with pytest.raises(BuildError, match=r"f ran while the graph was made \(allow_in_graph\)"):
        recorder.document({"path:0": folder})


def test_recorder_on_an_unknown_torch_is_a_build_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch, which compiles in another way, is refused by name."""
    from torch._dynamo import output_graph

    class Other:
        pass

    monkeypatch.setattr(output_graph, "OutputGraph", Other)

    with pytest.raises(BuildError, match=r"no OutputGraph\.call_user_compiler"), UntracedRecorder():
        raise AssertionError("entered")
