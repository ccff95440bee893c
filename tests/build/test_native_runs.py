"""What Python runs by itself while Dynamo traces: its code is in `sources`, what it reads in the guard sheet."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachectl.boot.proof import prove
from cachectl.build.guards import GuardRecorder
from cachectl.build.native_runs import NativeRuns
from cachectl.build.sources import SourceRecorder
from cachectl.build.untraced import UntracedRecorder
from cachectl.errors import BuildError
from cachectl.identity.sources import check_files
from cachectl.schemas.canonical import canonical_bytes

pytestmark = [pytest.mark.real, pytest.mark.slow]

MODEL = """import enum

import torch
from torch import nn

FALLBACK = "BLUE"
SCALE = 3.0
NAME = "abc"
WEIGHT = torch.ones(2)


def helper(key):
    return key * SCALE


def unread(key):
    return key * SCALE


class Color(enum.Enum):
    RED = 1
    BLUE = 2

    def __init__(self, number):
        self.size = number * 2.0

    @classmethod
    def _missing_(cls, value):
        return cls[FALLBACK]

    @property
    def doubled(self):
        return self.size * 2

    def __str__(self):
        return NAME


class Kept(enum.Enum):
    ONE = 1
    TWO = 2

    @classmethod
    def _missing_(cls, value):
        return cls.TWO


class Base(enum.Enum):
    @classmethod
    def _missing_(cls, value):
        return cls(1 if helper(1) > 2 else 2)


class Derived(Base):
    ONE = 1
    TWO = 2

    @classmethod
    def _missing_(cls, value):
        return super()._missing_(value)


class Bits(enum.Flag):
    X = 1
    Y = 2

    @classmethod
    def _missing_(cls, value):
        helper(2)
        return super()._missing_(value)


class Keyed:
    def __class_getitem__(cls, key):
        return helper(key)


class Meta(type):
    def __getitem__(cls, key):
        return helper(key)


class Subscripted(metaclass=Meta):
    pass


class Weighed:
    def __class_getitem__(cls, key):
        return float(WEIGHT.sum())


def made():
    class Local(enum.Enum):
        ONE = 1

    return Local


Local = made()
Other = Local
del Local


class Plain(enum.Enum):
    ONE = 1


class Model(nn.Module):
    def decode(self, x):
        return {body}
"""
NUMBERS = iter(range(1000))


class Recorded:
    """One compile of a model whose method returns `body`, with what was recorded."""

    def __init__(self, folder: Path, body: str) -> None:
        import torch

        number = next(NUMBERS)
        self.path = folder / f"native{number}.py"
        self.path.write_text(MODEL.format(body=body))
        self.folder = folder
        self.module: Any = importlib.import_module(f"native{number}")
        self.model = self.module.Model()
        self.x = torch.ones(2)
        torch._dynamo.reset()
        torch._dynamo.utils.orig_code_map.clear()
        with torch.no_grad(), GuardRecorder(type(self.model).decode.__code__) as guards, SourceRecorder() as sources:
            torch.compile(self.model.decode, backend="eager", fullgraph=True)(self.x)
        assert sys.getprofile() is None
        self.guards = guards.recorded()
        self.sources = sources

    def failed(self) -> list[str]:
        """Return what the proof finds changed."""
        import torch

        sheet = json.loads(canonical_bytes(self.guards.sheet))
        with torch.no_grad():
            proof = prove(sheet, arguments={"self": self.model, "x": self.x}, function=self.model.decode, torch=torch)
        return [reason.name.removeprefix(f"{self.module.__name__}.") for reason in proof.failed]

    def edited(self, old: str, new: str) -> list[str]:
        """Return what a check of the files finds changed after an edit."""
        document, raw = self.sources.document({"path:0": self.folder})
        text = self.path.read_text()
        assert old in text
        self.path.write_text(text.replace(old, new))
        found = check_files(document, raw, {"path:0": self.folder})
        self.path.write_text(text)
        return [reason.name.partition(": ")[2] for reason in found]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    importlib.invalidate_caches()


EDITS = {
    "_missing_": ("x * Kept(9).value", "return cls.TWO", "return cls.ONE", ["Kept._missing_"]),
    "_missing_ that another one calls": (
        "x * Derived(9).value",
        "helper(1) > 2",
        "helper(1) < 2",
        ["Base._missing_"],
    ),
    "what _missing_ calls": (
        "x * Derived(9).value",
        "def helper(key):\n    return key *",
        "def helper(key):\n    return key /",
        ["helper"],
    ),
    "__class_getitem__": (
        "x * Keyed[3]",
        "cls, key):\n        return helper(key)\n\n\nclass Meta",
        "cls, key):\n        return 1\n\n\nclass Meta",
        ["Keyed.__class_getitem__"],
    ),
    "metaclass's __getitem__": (
        "x * Subscripted[3]",
        "class Meta(type):\n    def __getitem__(cls, key):\n        return helper(key)",
        "class Meta(type):\n    def __getitem__(cls, key):\n        return helper(2)",
        ["Meta.__getitem__"],
    ),
    "__str__": ("x * len(f'{{Color.RED}}')", "return NAME", "return NAME + NAME", ["Color.__str__"]),
    "flag": ("x * Bits(3).value", "helper(2)", "helper(3)", ["Bits._missing_"]),
}


@pytest.mark.parametrize("name", EDITS)
def test_code_that_python_ran_is_in_sources(folder: Path, name: str) -> None:
    """An edited function of a class that Python ran itself is seen, and one that nobody ran is not."""
    body, old, new, wanted = EDITS[name]
    found = Recorded(folder, body.replace("{{", "{").replace("}}", "}"))

    assert [] == found.guards.unrepresented
    assert [] == found.failed()
    assert set(wanted) <= set(found.edited(old, new))
    assert [] == found.edited("def unread(key):\n    return key *", "def unread(key):\n    return key /")


def set_in(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda module: setattr(module, name, value)


READS: dict[str, tuple[str, Callable[[Any], Any], list[str]]] = {
    "global of _missing_": ("x * Color(9).value", set_in("FALLBACK", "RED"), ["FALLBACK"]),
    "global of what it calls": ("x * Derived(9).value", set_in("SCALE", 2.0), ["SCALE"]),
    "global of __class_getitem__": ("x * Keyed[3]", set_in("SCALE", 2.0), ["SCALE"]),
    "global of a metaclass": ("x * Subscripted[3]", set_in("SCALE", 2.0), ["SCALE"]),
    "global of __str__": ("x * len(f'{Color.RED}')", set_in("NAME", "abcd"), ["NAME"]),
    "global of a flag's": ("x * (Bits.X | Bits.Y).value", set_in("SCALE", 2.0), ["SCALE"]),
    "member": (
        "x * Color(9).value",
        lambda module: setattr(module.Color.BLUE, "_value_", 7),
        ["Color._member_map_['BLUE']"],
    ),
    "member that was added": (
        "x * len(Color)",
        lambda module: module.Color._member_map_.update(GREEN=module.Color.RED),
        ["Color._member_map_"],
    ),
    "member that was renamed": (
        "x * Color['RED'].value",
        lambda module: module.Color._member_map_.update(RED=module.Color.BLUE),
        ["Color._member_map_['RED']"],
    ),
    "attribute of a member": (
        "x * Color(2).size",
        lambda module: setattr(module.Color.BLUE, "size", 7.0),
        ["Color._member_map_['BLUE'].size"],
    ),
    "attribute through a property": (
        "x * Color(2).doubled",
        lambda module: setattr(module.Color.BLUE, "size", 7.0),
        ["Color._member_map_['BLUE'].size"],
    ),
    "attribute that nobody took": ("x * Color(2).value", lambda module: setattr(module.Color.BLUE, "size", 7.0), []),
}


@pytest.mark.parametrize("name", READS)
def test_what_it_reads_is_proved(folder: Path, name: str) -> None:
    """What such a function reads, and which members an enumeration has, is compared as it is at start."""
    body, change, wanted = READS[name]
    found = Recorded(folder, body)
    assert [] == found.guards.unrepresented
    assert [] == found.failed()
    change(found.module)

    assert set(wanted) <= set(found.failed())
    assert bool(wanted) == bool(found.failed())


def test_plain_members_bring_nothing_along(folder: Path) -> None:
    """An enumeration whose members are only named is not looked through."""
    found = Recorded(folder, "x * Plain.ONE.value if isinstance(self, nn.Module) else x")

    assert [] == found.sources._untraced.functions()
    assert {} == found.sources._untraced.enumerations()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("x * Weighed[3]", "Weighed.__class_getitem__ (native{number}.py:"),
        ("x * Other(1).value", "the class: which no other process finds again"),
    ],
)
def test_what_can_not_be_compared_is_refused(folder: Path, body: str, words: str) -> None:
    """A tensor that such a function reads, and a class that no name leads to, fail the build by name."""
    found = Recorded(folder, body)
    words = words.format(number=found.module.__name__.removeprefix("native"))

    assert any(words in line for line in found.guards.unrepresented), found.guards.unrepresented


def test_profile_of_the_program_goes_on(folder: Path) -> None:
    """A profile function that the program has set sees what it saw, and is there again afterwards."""
    seen = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            seen.append(frame.f_code.co_name)

    def looked_up(variable: Any, tx: Any) -> Any:
        return Kind(3)

    import enum

    class Kind(enum.Enum):
        ONE = 1

        @classmethod
        def _missing_(cls, value: Any) -> Any:
            return cls.ONE

    runs = NativeRuns()
    wrapped = runs._wrapped(looked_up, lambda variable: [Kind])
    outer = sys.getprofile()
    sys.setprofile(profile)
    try:
        assert Kind.ONE is wrapped(None, None)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(outer)

    assert "_missing_" in seen
    assert ["by Python itself, for test_profile_of_the_program_goes_on.<locals>.Kind"] == [
        why for _, why in runs.functions.values()
    ]


def test_recorder_on_an_unknown_torch_is_a_build_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that runs it in another way is refused by name, and gets back what was wrapped before."""
    from torch._dynamo import output_graph
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    before = output_graph.OutputGraph.call_user_compiler
    monkeypatch.delattr(UserDefinedClassVariable, "call_function")

    with pytest.raises(BuildError, match=r"no UserDefinedClassVariable\.call_function"), UntracedRecorder():
        raise AssertionError("entered")
    assert before is output_graph.OutputGraph.call_user_compiler
