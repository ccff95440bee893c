"""The boot path's dataclasses, held against the standard library's."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachectl import values

ROOT = Path(__file__).resolve().parents[1]


def classes(module: Any) -> tuple[type[Any], type[Any]]:
    """Return a frozen class and one that is not, made by either module."""

    @module.dataclass(frozen=True)
    class Frozen:
        name: str
        count: int = 3
        found: list[int] = module.field(default_factory=list)

        @property
        def twice(self) -> int:
            return self.count * 2

    @module.dataclass
    class Open:  # noqa: PLW1641 - that it has no hash is what is looked at
        name: str = "a"
        hidden: bool = module.field(default=True, repr=False)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Open) and self.name == other.name

    return Frozen, Open


OURS, THEIRS = classes(values), classes(dataclasses)

USES: dict[str, Callable[[type[Any], type[Any]], Any]] = {
    "positional": lambda frozen, _: vars(frozen("n", 4, [1])),
    "named": lambda frozen, _: list(vars(frozen(found=[1], name="n"))),
    "property": lambda frozen, _: frozen("n", 5).twice,
    "own list each": lambda frozen, _: frozen("n").found is frozen("n").found,
    "repr": lambda frozen, free: (repr(frozen("n")).rpartition(".")[2], repr(free()).rpartition(".")[2]),
    "equal": lambda frozen, _: (frozen("n") == frozen("n"), frozen("n") == frozen("m"), frozen("n") == "n"),
    "own equality": lambda _, free: free("a", False) == free("a", True),
    "hash": lambda frozen, _: len({frozen("n", 1, ()), frozen("n", 1, ())}),
    "hash of an open one": lambda _, free: hash(free()),
    "default on the class": lambda frozen, free: (frozen.count, free.hidden),
    "no default on the class": lambda frozen, _: hasattr(frozen, "found"),
    "match": lambda frozen, _: frozen.__match_args__,
    "missing": lambda frozen, _: frozen(),
    "too many": lambda frozen, _: frozen(1, 2, 3, 4),
    "twice": lambda frozen, _: frozen("n", name="m"),
    "unknown": lambda frozen, _: frozen("n", other=1),
    "assigned": lambda frozen, _: setattr(frozen("n"), "name", "m"),
    "deleted": lambda frozen, _: delattr(frozen("n"), "name"),
    "set on an open one": lambda _, free: setattr(free(), "name", "m"),
    "is_dataclass": lambda frozen, free: (dataclasses.is_dataclass(frozen), dataclasses.is_dataclass(free())),
    "fields": lambda frozen, _: [item.name for item in dataclasses.fields(frozen)],
    "asdict": lambda frozen, _: dataclasses.asdict(frozen("n")),
    "standard replace": lambda frozen, _: vars(dataclasses.replace(frozen("n", 1, [2]), name="m")),
    "our replace": lambda frozen, _: vars(values.replace(frozen("n", 1, [2]), name="m")),
    "replace unknown": lambda frozen, _: values.replace(frozen("n"), other=1),
    "copy": lambda frozen, _: vars(copy.deepcopy(frozen("n", 1, [2]))),
}


@pytest.mark.parametrize("use", USES)
def test_dataclass_is_used_like_the_standard_one(use: str) -> None:
    """Whatever is done with a class of ours gives what the standard one gives, or raises what it raises."""
    assert outcome(USES[use], THEIRS) == outcome(USES[use], OURS)


def test_dataclass_refuses_inherited_fields() -> None:
    """What the small one can't do as the standard one does is an error where the class is made."""
    with pytest.raises(TypeError, match="Below inherits fields"):

        @values.dataclass
        class Below(OURS[1]):  # type: ignore[misc,name-defined]
            more: int = 0


def test_dataclass_of_a_module_can_be_pickled() -> None:
    """A value travels between processes as any object does."""
    from cachectl.schemas.boot import Reason

    reason = Reason("store", "name", hint="run: cachectl verify")
    assert reason == pickle.loads(pickle.dumps(reason))


def test_hook_imports_nothing_dear_at_its_start() -> None:
    """What a hook imports has neither dataclasses nor typing in it: together they were half of its start."""
    script = "import sys; sys.path.insert(0, sys.argv[1]); import cachectl.boot.hook; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", script, str(ROOT)], capture_output=True, check=True, text=True
    )
    dear = {"dataclasses", "inspect", "ast", "typing", "signal", "threading", "shlex", "tempfile", "importlib.metadata"}
    assert set() == dear & set(done.stdout.split())


def outcome(use: Callable[[type[Any], type[Any]], Any], made: tuple[type[Any], type[Any]]) -> Any:
    try:
        return use(*made)
    except (TypeError, AttributeError) as error:
        return type(error)
