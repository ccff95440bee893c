"""Classes told apart without running them: what they inherit, what was patched into torch's, what instances lack."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest

from cachectl.identity.guard_classes import is_known, lineage, own_members, patched_members, unset_slot
from cachectl.identity.source_digest import code_digest


class First:
    def step(self) -> int:
        return 1


class Second(First):
    pass


class Slotted:
    __slots__ = ("filled", "left")

    def __init__(self) -> None:
        self.filled = 1


class Guarded:
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("ran")


class Renamed:
    __dict__ = 7  # type: ignore[assignment]


def vendor(**members: Any) -> type:
    """Return a class of torch's with these members."""
    return type("Module", (), {"__module__": "torch.nn.modules.module", **members})


def of_torch() -> Any:
    """Return a function as torch's own modules define them."""
    namespace: dict[str, Any] = {"__name__": "torch.nn.modules.module", "functools": functools}
    exec("def call(self, x=1):\n    return x\n", namespace)
    return namespace["call"]


def patch(self: Any) -> int:
    return 2


def test_lineage_names_what_is_inherited() -> None:
    """Bases of a program's class, in their order; nothing of the standard library's own classes."""
    here = __name__
    assert [] == lineage(dict)
    assert [] == lineage(functools.partial)
    assert [] == lineage(First)
    assert [f"{here}.First"] == lineage(Second)
    assert ["builtins.int"] == lineage(type("Count", (int,), {}))


def test_lineage_of_torch_is_in_the_toolchain_unless_patched() -> None:
    """A class of torch's says nothing until somebody puts a function into it or a base under it."""
    base = vendor(call=of_torch())
    assert [] == lineage(base)
    assert [] == lineage(type("Linear", (base,), {"__module__": "torch.nn"}))
    assert ["torch.nn.modules.module.Module"] == lineage(type("Mine", (base,), {}))

    setattr(base, "call", patch)  # noqa: B010 -- patched as a program does

    (line,) = lineage(base)
    assert line.startswith("torch.nn.modules.module.Module.call=patch:sha256:")
    assert ["torch.nn.modules.module.Module", line] == lineage(type("Mine", (base,), {}))
    assert [f"{__name__}.First"] == lineage(type("Linear", (First,), {"__module__": "torch.nn"}))


@pytest.mark.parametrize("name", ["call", "other", "new"])
def test_patch_into_a_class_that_was_looked_at_is_seen_and_gone_with_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member replaced, or one added: what was found before says nothing of another object."""
    kind = vendor(call=of_torch(), other=of_torch())
    before = [patched_members(kind), patched_members(kind)]

    with monkeypatch.context() as patching:
        patching.setattr(kind, name, patch, raising=False)
        during = [patched_members(kind), patched_members(kind)]

    assert [[], []] == before
    assert [[f"torch.nn.modules.module.Module.{name}=patch:{code_digest(patch.__code__)}"]] * 2 == during
    assert [] == patched_members(kind)


def test_patch_is_seen_by_the_name_that_it_has_now() -> None:
    """Renamed, and removed while another one takes its place in the class."""
    kind = vendor(call=of_torch(), step=patch)
    digest = code_digest(patch.__code__)
    found = [patched_members(kind)]

    for gone, come, member in (("step", "later", patch), ("later", "own", of_torch()), ("own", "own", patch)):
        delattr(kind, gone)
        setattr(kind, come, member)
        found.append(patched_members(kind))

    names = [[line.removeprefix("torch.nn.modules.module.Module.") for line in lines] for lines in found]
    assert [[f"step=patch:{digest}"], [f"later=patch:{digest}"], [], [f"own=patch:{digest}"]] == names


def test_patch_into_torchs_own_class_is_seen_after_it_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class itself, by what is found now, and as before when the patch is taken back."""
    linear = pytest.importorskip("torch").nn.Linear
    before = [patched_members(linear), patched_members(linear)]

    with monkeypatch.context() as patching:
        patching.setattr(linear, "forward", patch)
        during = patched_members(linear)

    assert [[], []] == before
    assert [f"torch.nn.modules.linear.Linear.forward=patch:{code_digest(patch.__code__)}"] == during
    assert [] == patched_members(linear)


def wrapped_in_torch() -> Any:
    """Return a function of torch's that wraps one of ours, as its decorators do."""
    inner = of_torch()
    return functools.update_wrapper(inner, patch)


@pytest.mark.parametrize(
    "member",
    [
        patch,
        staticmethod(patch),
        classmethod(patch),
        property(patch),
        property(of_torch(), patch),
        functools.partial(patch),
        functools.partialmethod(patch),
        functools.cached_property(patch),
        functools.lru_cache(patch),
        wrapped_in_torch(),
    ],
)
def test_patch_shows_through_what_it_is_wrapped_in(member: Any) -> None:
    """By its globals, which functools.wraps leaves alone."""
    (line,) = patched_members(vendor(step=member, own=of_torch()))

    assert line.startswith("torch.nn.modules.module.Module.step=patch:")


def endless() -> Any:
    function = of_torch()
    function.__wrapped__ = function
    return function


@pytest.mark.parametrize(
    "member", [of_torch(), property(of_torch()), functools.partial(of_torch()), 7, len, object(), endless(), "text"]
)
def test_members_of_torch_itself_are_no_patch(member: Any) -> None:
    """Its own functions, whatever holds them, and values."""
    assert [] == patched_members(vendor(step=member))


def test_other_classes_are_not_looked_through() -> None:
    """A program's class is told by its source and by the methods that were traced."""
    assert [] == patched_members(First)


@pytest.mark.parametrize(
    ("module", "known"),
    [("torch.nn", True), ("torch_npu", True), ("collections", True), ("model", False), ("torchvision", False)],
)
def test_known_modules_are_those_of_the_toolchain(module: str, known: bool) -> None:
    """Whose functions no sheet has to say."""
    assert known is is_known(module)


def test_own_members_runs_nothing() -> None:
    """An instance's dict, past its class's own lookup; empty where there is none or where it is something else."""
    assert {} == own_members(Guarded())
    assert {} == own_members(Slotted())
    assert {} == own_members(Renamed())
    assert {"name": 1} == own_members(types.SimpleNamespace(name=1))


def test_unset_slot_is_told_from_a_filled_one() -> None:
    """A slot without a value is an attribute that is not there."""
    slotted = Slotted()

    assert unset_slot(slotted, Slotted.__dict__["left"])
    assert not unset_slot(slotted, Slotted.__dict__["filled"])
    assert not unset_slot(slotted, First.__dict__["step"])
