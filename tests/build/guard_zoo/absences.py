"""Models whose graph depends on what was not there, and on what classes inherit: torch guards neither in full.

Every change that starts another trace says so with `ours=False`; torch's own guards pass most of them.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import enum
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from models import NOTHING, Animal, Change, _restored, assign, vector
from torch import nn
from torch.nn.attention import SDPBackend

__all__ = ["ABSENCES"]

GONE = object()


class Answering:
    """Answers names that nobody has set."""

    def __init__(self) -> None:
        self.values = {"gain": 2.0}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["values"].get(name, 1.0)


class Fallback:
    def __init__(self) -> None:
        self.first = 2.0

    def __getattribute__(self, name: str) -> Any:
        try:
            return super().__getattribute__(name)
        except AttributeError:
            return 5.0


class Slots:
    __slots__ = ("first", "second")

    def __init__(self) -> None:
        self.first = 1.0


class Plain:
    def __init__(self) -> None:
        self.first = 1.0


class Answered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.answering, self.fallback, self.slots = Answering(), Fallback(), Slots()
        self.inner = nn.Linear(4, 4)

    def __getattr__(self, name: str) -> Any:
        return 2.0 if name == "gain" else super().__getattr__(name)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x) * self.answering.gain + self.answering.missing
        return x * self.gain + self.fallback.first + self.fallback.second + getattr(self.slots, "second", 7.0)


class Sought(nn.Module):
    """Looks for names in every way there is, and finds none."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.table = Plain(), {"first": 1.0}
        self.chain = collections.ChainMap({}, {"last": 2.0})

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        if "a" in self.plain.__dict__ or "b" in vars(self.plain) or hasattr(self.plain, "c") or "d" in self.__dict__:
            x = x * 2
        x = x + self.plain.__dict__.get("e", 1.0) + getattr(self.plain, "f", 2.0)
        try:
            x = x * self.plain.g
        except AttributeError:
            x = x + 1
        try:
            x = x * self.table["h"]
        except KeyError:
            x = x + 1
        return x + self.table.get("i", 3.0) + self.chain["last"]


class Walked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = Plain()

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        for name in vars(self.plain):
            x = x * 2 + len(name)
        return x


def weighed(x: torch.Tensor, **terms: float) -> torch.Tensor:
    for place, term in enumerate(terms.values()):
        x = x * (place + 1) + term
    return x


class Unpacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.terms = {"a": 1.0, "b": 2.0}

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return weighed(x, **self.terms)


class First:
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Second:
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


class Heir(First):
    pass


class OtherModule(nn.Module):
    pass


class Inherits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heir = Heir()
        self.linear = nn.Linear(4, 4)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.heir.scaled(x)) + x.relu()


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2


class Enumerations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backend, self.key, self.level = SDPBackend.MATH, torch._C.DispatchKey.CPU, Level.LOW
        self.form = torch.contiguous_format

    def decode(self, x: torch.Tensor, level: Level) -> torch.Tensor:
        if self.backend == SDPBackend.MATH and self.key == torch._C.DispatchKey.CPU:
            x = x * 2
        if self.level is Level.LOW and level is Level.HIGH and self.form == torch.contiguous_format:
            x = x + 1
        return x


def weighted(weight: float) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        def run(self: Any, x: torch.Tensor) -> torch.Tensor:
            return function(self, x) * weight

        return run

    return decorate


class MadeBase:
    def __init__(self, gain: float = 2.0, *, shift: float = 1.0) -> None:
        self.gain, self.shift = gain, shift


class Made(MadeBase):
    def __init__(self) -> None:
        super().__init__()

    @weighted(3.0)
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + self.shift


@dataclasses.dataclass
class Output:
    value: Any = None
    gain: float = 2.0
    parts: list[float] = dataclasses.field(default_factory=list)


class Makes(nn.Module):
    """Makes objects of its own: their functions' defaults and closures have no place that torch could guard."""

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        output = Output(Made().scaled(x))
        return output.value * output.gain + len(output.parts)


class Quiet:
    """Has none of the methods that Python looks for by itself."""


class Mark(abc.ABC):
    @abc.abstractmethod
    def marked(self) -> bool:
        """Say so; what is registered need not."""


class Mask(Mark):
    pass


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quiet, self.first, self.second = Quiet(), Quiet(), Quiet()

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if self.quiet else x * 3
        if self.first == self.second:
            x = x + 1
        if isinstance(self.quiet, Mark) or issubclass(type(self.first), (int, Mask)):
            x = x + 2
        return x


class Plugged(nn.Module):
    def decode(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(types, "fused") or hasattr(torch.ops.aten, "no_such_operator"):
            x = x * 2
        return x * getattr(plug, "gain", 3.0) + len(Base.__subclasses__())


def plug(x: torch.Tensor) -> torch.Tensor:
    return x


class Base:
    pass


class Only(Base):
    pass


class Lean:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 2.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class Kept(nn.Module):
    """What other processes find as it was: an object of slots, and items under members of an enumeration."""

    def __init__(self) -> None:
        super().__init__()
        self.lean = Lean()
        self.table = {Kind.FULL: 2.0}

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.lean.scaled(x) * self.table[Kind.FULL] + (1 if Kind.SPARSE in self.table else 2)


class Kind(enum.Enum):
    FULL = "full"
    SPARSE = "sparse"


def defaults_of(function: Any, **values: Any) -> Callable[[Any, dict[str, Any]], AbstractContextManager[Any]]:
    def apply(model: Any, call: dict[str, Any]) -> AbstractContextManager[Any]:
        old = function.__defaults__, function.__kwdefaults__
        wanted = values.get("defaults", old[0]), values.get("keywords", old[1])

        def put(held: tuple[Any, Any]) -> None:
            function.__defaults__, function.__kwdefaults__ = held

        return _restored(lambda: put(wanted), lambda: put(old))

    return apply


def other_weight(model: Any, call: dict[str, Any]) -> AbstractContextManager[Any]:
    run: Any = vars(Made)["scaled"]
    cell = run.__closure__[run.__code__.co_freevars.index("weight")]
    return _restored(lambda: setattr(cell, "cell_contents", 5.0), lambda: setattr(cell, "cell_contents", 3.0))


def one_more_subclass(model: Any, call: dict[str, Any]) -> None:
    # Held by nobody but the model: gone with it.
    model.late = type("Late", (Base,), {})


def inherits(kind: type, *bases: type) -> Callable[[Any, dict[str, Any]], AbstractContextManager[Any]]:
    def apply(model: Any, call: dict[str, Any]) -> AbstractContextManager[Any]:
        old = kind.__bases__
        return _restored(lambda: setattr(kind, "__bases__", bases), lambda: setattr(kind, "__bases__", old))

    return apply


def patched(kind: type, name: str, value: Any) -> Callable[[Any, dict[str, Any]], AbstractContextManager[Any]]:
    def apply(model: Any, call: dict[str, Any]) -> AbstractContextManager[Any]:
        old = vars(kind).get(name, GONE)
        leave = (lambda: delattr(kind, name)) if old is GONE else (lambda: setattr(kind, name, old))
        return _restored(lambda: setattr(kind, name, value), leave)

    return apply


def reordered(model: Any, call: dict[str, Any]) -> None:
    model.terms["a"] = model.terms.pop("a")


UNPLACED = "a function of an object that the traced code made has no place, and torch guards no default or cell of it"
NATIVE = "Dynamo asks Python, and guards the class's address"
NO_NAME = "torch guards no name that a module or a function lacks"
MODULE_CALL = nn.Module.__call__
MODULE_GETATTR = nn.Module.__getattr__
SHADOWS = "what a class's __getattr__ answered is set now, and torch guards no absence"
BASES = "torch compares a class by its address and not by what it inherits"
TORCH = "torch trusts its own classes"


def _refused(apply: Callable[[Any, dict[str, Any]], Any], why: str) -> Change:
    return Change(apply, False, why)


ABSENCES: dict[str, Animal] = {
    "answered": Animal(
        Answered,
        vector,
        {
            "unchanged": NOTHING,
            "answer": lambda m, c: m.answering.values.update(gain=3.0),
            "unread name": assign("answering.unread", 1.0),
            "unread name of the module": assign("unread", 1.0),
            "shadowed": _refused(assign("answering.gain", 4.0), SHADOWS),
            "shadowed default": _refused(assign("answering.missing", 4.0), SHADOWS),
            "shadowed by the class": _refused(patched(Answering, "gain", 9.0), SHADOWS),
            "shadowed in the module": _refused(assign("gain", 4.0), SHADOWS),
            "shadowed child": _refused(lambda m, c: m.__dict__.update(inner=nn.Identity()), SHADOWS),
            "set after all": _refused(assign("fallback.second", 4.0), SHADOWS),
            "slot filled": assign("slots.second", 4.0),
        },
    ),
    "sought": Animal(
        Sought,
        vector,
        {
            "unchanged": NOTHING,
            "unread attribute": assign("plain.unread", 1.0),
            "unread key": lambda m, c: m.table.update(unread=1.0),
            **{
                f"attribute {name}": _refused(assign(f"plain.{name}", 4.0), "looked for in the instance's dict")
                for name in "abeg"
            },
            "attribute c": assign("plain.c", 4.0),
            "attribute f": assign("plain.f", 4.0),
            "attribute of the module": _refused(assign("d", 4.0), "looked for in the instance's dict"),
            "class attribute": patched(Plain, "f", 9.0),
            "caught key": _refused(lambda m, c: m.table.update(h=4.0), "a KeyError was caught"),
            "key with a default": lambda m, c: m.table.update(i=4.0),
            "first map": _refused(lambda m, c: m.chain.maps[0].update(last=4.0), "a KeyError was caught"),
        },
    ),
    "walked": Animal(Walked, vector, {"unchanged": NOTHING, "one more": assign("plain.late", 4.0)}),
    "unpacked": Animal(
        Unpacked,
        vector,
        {
            "unchanged": NOTHING,
            "value": lambda m, c: m.terms.update(a=3.0),
            "order": _refused(reordered, "torch compares the keys and not their order"),
        },
    ),
    "inherits": Animal(
        Inherits,
        vector,
        {
            "unchanged": NOTHING,
            "bases": _refused(inherits(Heir, Second), BASES),
            "one base more": _refused(inherits(Heir, First, Second), BASES),
            "bases of the module": _refused(inherits(Inherits, OtherModule), BASES),
            "tensor operator": _refused(patched(torch.Tensor, "__add__", lambda a, b: torch.sub(a, b) + 0), TORCH),
            "tensor method": _refused(patched(torch.Tensor, "relu", lambda a: a * 2), TORCH),
            "module call": _refused(
                patched(nn.Module, "__call__", lambda self, *a, **k: MODULE_CALL(self, *a, **k) * 2), TORCH
            ),
            "module attributes": _refused(
                patched(nn.Module, "__getattr__", lambda self, name: MODULE_GETATTR(self, str(name))), TORCH
            ),
            "attributes of a linear": _refused(
                patched(nn.Linear, "__getattr__", lambda self, name: MODULE_GETATTR(self, str(name))), TORCH
            ),
        },
    ),
    "makes": Animal(
        Makes,
        vector,
        {
            "unchanged": NOTHING,
            "default": _refused(defaults_of(MadeBase.__init__, defaults=(4.0,)), UNPLACED),
            "keyword default": _refused(defaults_of(MadeBase.__init__, keywords={"shift": 4.0}), UNPLACED),
            "closure": _refused(other_weight, UNPLACED),
            "field": _refused(
                defaults_of(Output.__init__, defaults=(None, 4.0, *Output.__init__.__defaults__[2:])), UNPLACED
            ),
        },
    ),
    "decides": Animal(
        Decides,
        vector,
        {
            "unchanged": NOTHING,
            "unread method": patched(Quiet, "other", lambda self: False),
            "truth": _refused(patched(Quiet, "__bool__", lambda self: False), NATIVE),
            "length": _refused(patched(Quiet, "__len__", lambda self: 0), NATIVE),
            "equality": _refused(patched(Quiet, "__eq__", lambda self, other: True), NATIVE),
            "same object": _refused(lambda m, c: setattr(m, "second", m.first), "torch tells tensors apart only"),
            "other object": assign("second", Quiet()),
            # For good: this is the last change.
            "what it counts as": _refused(lambda m, c: Mask.register(Quiet) and None, NATIVE),
        },
    ),
    "plugged": Animal(
        Plugged,
        vector,
        {
            "unchanged": NOTHING,
            "unread name": patched(types, "unread", 1),
            "name of a module": _refused(patched(types, "fused", 1), NO_NAME),
            "operator": _refused(patched(torch.ops.aten, "no_such_operator", 1), NO_NAME),
            "name of a function": _refused(patched(plug, "gain", 5.0), NO_NAME),
            "one more subclass": one_more_subclass,
        },
    ),
    "kept": Animal(
        Kept,
        vector,
        {
            "unchanged": NOTHING,
            "slot": assign("lean.gain", 3.0),
            "item": lambda m, c: m.table.update({Kind.FULL: 3.0}),
            "late item": lambda m, c: m.table.update({Kind.SPARSE: 3.0}),
        },
    ),
    "enumerations": Animal(
        Enumerations,
        lambda: {"x": torch.zeros(2, 4), "level": Level.HIGH},
        {
            "unchanged": NOTHING,
            "backend": assign("backend", SDPBackend.FLASH_ATTENTION),
            "dispatch key": assign("key", torch._C.DispatchKey.CUDA),
            "flag": assign("level", Level.LOW | Level.HIGH),
            "flag as int": assign("level", 1),
            "memory format": assign("form", torch.channels_last),
            "argument": lambda m, c: c.update(level=Level.LOW),
        },
    ),
}
