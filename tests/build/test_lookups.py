"""What differs from process to process is refused while tracing, and recording leaves Dynamo as it was."""

from __future__ import annotations

from typing import Any

import pytest

from cachectl.build.guards import GuardRecorder
from cachectl.build.lookups import LookupRecorder
from cachectl.errors import BuildError

pytestmark = [pytest.mark.real, pytest.mark.slow]

PREFIX = """import torch
from torch import nn

TABLE = {"a": 1.0, "b": 2.0, "c": 3.0}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.names, self.numbers, self.frozen = {"a", "b", "c"}, {1, 2, 3}, frozenset({"a", "b"})

    def decode(self, x):
"""
LOOP = "        for name in {}:\n            x = x * 2 + TABLE.get(name, 4.0)\n        return x\n"


def unrepresented(body: str, tmp_path: Any) -> list[str]:
    """Compile a method of this body and return what its sheet can't hold."""
    import torch

    path = tmp_path / "sets.py"
    path.write_text(PREFIX + body)
    namespace: dict[str, Any] = {"__name__": "sets"}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    model = namespace["Model"]()
    torch._dynamo.reset()
    with torch.no_grad(), GuardRecorder(type(model).decode.__code__) as recorder:
        torch.compile(model.decode, backend="eager", fullgraph=True)(torch.zeros(2, 4))
    return recorder.recorded().unrepresented


@pytest.mark.parametrize(
    "body",
    [
        *(
            LOOP.format(walked)
            for walked in (
                "self.names",
                "self.frozen",
                "{'a', 'b'}",
                "list(self.names)",
                "[*self.names]",
                "sorted(self.names, key=len)",
                "self.names & {'a', 'b'}",
                "{name: 1 for name in self.names}",
                "dict.fromkeys(self.names)",
                "(name for _, name in enumerate(self.names))",
            )
        ),
        "        first, second = self.frozen\n        return x + len(first + second)\n",
        "        return x + len(set(self.names).pop())\n",
        "        return x * len(', '.join(self.names))\n",
        "        return x * (hash('abc') % 7)\n",
    ],
)
def test_order_of_text_in_sets_is_refused(body: str, tmp_path: Any) -> None:
    """Text hashes otherwise in every process, so such a graph is right in some and wrong in others."""
    (line,) = unrepresented(body, tmp_path)

    assert "differs from process to process: use " in line
    assert "in decode)" in line or "in enumerate)" in line


@pytest.mark.parametrize(
    "body",
    [
        *(LOOP.format(walked) for walked in ("sorted(self.names)", "self.numbers", "list({1, 2})", "TABLE")),
        "        return x + len(self.names) + ('a' in self.names) + (self.names > {'a'})\n",
        "        return x + len(self.names | {'d'}) + len(set(self.names) - {'a'}) + len(frozenset(self.names))\n",
        "        return x + len(min(self.names)) + hash(5) % 3\n",
        "        late = set(self.names)\n        late.add('z')\n        late -= {'a'}\n        return x + len(late)\n",
    ],
)
def test_what_no_order_changes_is_kept(body: str, tmp_path: Any) -> None:
    """Numbers, sorted text and questions about a whole set are the same everywhere."""
    assert [] == unrepresented(body, tmp_path)


def test_recorder_leaves_dynamo_as_it_was() -> None:
    """Every wrapper is taken off again, also after an error."""
    from torch._dynamo.variables.dicts import ConstDictVariable, SideEffectsProxyDict
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    def held() -> list[Any]:
        kinds = (ConstDictVariable, SideEffectsProxyDict, UserDefinedObjectVariable)
        return [dict(vars(kind)) for kind in kinds]

    before = held()
    recorder = LookupRecorder()
    with recorder:
        assert before != held()
    assert before == held()
    with pytest.raises(KeyError), recorder:
        raise KeyError

    assert before == held()


def test_recorder_on_an_unknown_torch_is_a_build_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Dynamo looks names up elsewhere, their absence can't be recorded, and the build says so."""
    from torch._dynamo.variables import user_defined

    class Other:
        pass

    monkeypatch.setattr(user_defined, "UserDefinedObjectVariable", Other)

    with pytest.raises(BuildError, match=r"no Other\.var_getattr"), LookupRecorder():
        raise AssertionError("entered")


def test_recorder_that_can_not_be_entered_leaves_dynamo_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was wrapped before the missing name is unwrapped: under exec the program goes on compiling."""
    from torch._dynamo.variables import dicts, user_defined

    class Other:
        pass

    monkeypatch.setattr(dicts, "ConstDictVariable", Other)
    before = dict(vars(user_defined.UserDefinedObjectVariable))

    with pytest.raises(BuildError, match=r"no Other\.__contains__"):
        LookupRecorder().__enter__()

    assert before == dict(vars(user_defined.UserDefinedObjectVariable))


def test_looking_that_fails_is_told_when_guards_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A fault of the recorder's is no fault of the program's compile, and no sheet is made of what is left."""

    def fail(self: Any, *args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(LookupRecorder, "_attribute", fail)

    with pytest.raises(ZeroDivisionError):
        unrepresented("        return x + len(self.names)\n", tmp_path)


def test_function_of_a_class_made_by_a_function_is_found(tmp_path: Any) -> None:
    """A class without a name of its own is told by where the traced code found it, its functions with it."""
    body = """        return Holder.kinds[0]().scaled(x)


def make(gain):
    class Made:
        def scaled(self, x, gain=gain):
            return x * gain

    return Made


class Holder:
    kinds = [make(2.0)]
"""
    assert [] == unrepresented(body, tmp_path)


def test_hash_is_found_in_every_compile_and_not_for_keys(tmp_path: Any) -> None:
    """Dynamo keeps the methods of its builtins from compile to compile; a key's hash changes nothing in a graph."""
    asked = "        return x * (hash('abc') % 7)\n"
    keyed = """        return x * KINDS[Kind.FULL]


import enum


class Kind(enum.Enum):
    FULL = "full"


KINDS = {Kind.FULL: 2.0}
"""

    assert [1, 1, 0, 1] == [len(unrepresented(body, tmp_path)) for body in (asked, asked, keyed, asked)]
