"""Small models, one for each thing that Dynamo guards, and what a program may change about each before its first call.

`ZOO` maps a model's name to its `Animal`: how to build it and its call, whether shapes are dynamic, and its changes.
A change gets the model and the call's keyword arguments, alters either in place, and may return a context manager to
prove under. Whether torch refuses it is asked of torch; only where we differ on purpose does a change say so.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

__all__ = ["ZOO", "Animal", "Change"]

GAIN = 2.0
SWITCH = "on"
TABLE = {"bias": 0.5, "steps": 3}
PLUGIN: Any = None


def helper(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def other_helper(x: torch.Tensor) -> torch.Tensor:
    return x + 2


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2


@dataclasses.dataclass
class Config:
    width: int = 8
    gain: float = 1.5
    kind: str = "plain"
    inner: Any = None


@dataclasses.dataclass
class Batch:
    tokens: torch.Tensor
    scale: float


class Point(collections.namedtuple("Point", "x y")):  # noqa: PYI024 -- the untyped form is the one met in models
    __slots__ = ()


class TaggedInt(int):
    pass


@dataclasses.dataclass(frozen=True)
class Change:
    """One change; `ours` is our verdict where it differs from torch's on purpose, with the reason in `why`."""

    apply: Callable[[Any, dict[str, Any]], AbstractContextManager[Any] | None]
    ours: bool | None = None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Animal:
    """A model with its call and its changes."""

    build: Callable[[], nn.Module]
    call: Callable[[], dict[str, Any]]
    changes: dict[str, Change | Callable[[Any, dict[str, Any]], Any]]
    dynamic: bool = False


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 4
        self.scale = 0.25
        self.layout = "BNSD"
        self.window = (2, 3)
        self.mode = Mode.FAST
        self.flag = True
        self.nothing = None
        self.nan = float("nan")
        self.zero = 0.0
        self.kind = torch.float32
        self.place = torch.device("cpu")
        self.shape = torch.Size([2, 4])
        self.raw = b"ab"
        self.nested = ((1, 2), ("a", None))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        if self.layout == "BNSD" and self.flag and self.nothing is None and self.raw == b"ab":
            x = x * self.scale + self.count + self.window[1]
        if self.mode is Mode.FAST and self.nested == ((1, 2), ("a", None)):
            x = x + 1
        if self.nan != self.nan and self.zero == 0.0:
            x = x - 1
        if self.shape == (2, 4):
            x = x * 2
        return x.to(self.kind).to(self.place)


def assign(name: str, value: Any) -> Callable[[Any, dict[str, Any]], None]:
    def apply(model: Any, call: dict[str, Any]) -> None:
        owner = model
        *path, last = name.split(".")
        for step in path:
            owner = getattr(owner, step)
        made = isinstance(value, types.FunctionType) and value.__name__ == "<lambda>"
        setattr(owner, last, value() if made else value)

    return apply


def argument(name: str, value: Callable[[], Any]) -> Callable[[Any, dict[str, Any]], None]:
    def apply(model: Any, call: dict[str, Any]) -> None:
        call[name] = value()

    return apply


def rebind(name: str, value: Any) -> Callable[[Any, dict[str, Any]], AbstractContextManager[Any]]:
    """Change a global of this module while the verdicts are asked."""

    def apply(model: Any, call: dict[str, Any]) -> AbstractContextManager[Any]:
        return _patched(name, value)

    return apply


class _patched:  # noqa: N801 -- a context manager named as one
    def __init__(self, name: str, value: Any, owner: Any = None) -> None:
        self.name, self.value, self.owner = name, value, owner

    def __enter__(self) -> None:
        names = globals() if self.owner is None else None
        self.old = names[self.name] if names is not None else self.owner.__dict__[self.name]
        self._set(self.value)

    def __exit__(self, *error: object) -> None:
        self._set(self.old)

    def _set(self, value: Any) -> None:
        if self.owner is None:
            globals()[self.name] = value
        else:
            setattr(self.owner, self.name, value)


class _restored:  # noqa: N801 -- as above
    """Run `enter`, and `leave` at the end."""

    def __init__(self, enter: Callable[[], Any], leave: Callable[[], Any]) -> None:
        self.enter, self.leave = enter, leave

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *error: object) -> None:
        self.leave()


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config(inner=Config(width=4))
        self.options = {"gain": 2.0, "names": ["a", "b"]}
        self.space = types.SimpleNamespace(eps=1e-6, sub=types.SimpleNamespace(depth=2))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.config.gain + self.config.inner.width
        if self.config.kind == "plain" and "extra" not in self.options:
            x = x + self.options["gain"] + len(self.options["names"])
        if hasattr(self.space, "late"):
            x = x * 0
        return x + self.space.eps * self.space.sub.depth


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))
        self.drop = nn.Dropout(0.1)
        self.parts = nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4, bias=False)})
        self.eval()

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        for name, part in self.parts.items():
            x = part(x) + len(name)
        return self.drop(x)


class WiderNorm(nn.LayerNorm):
    pass


def swap_norm(model: Any, call: dict[str, Any]) -> None:
    model.layers[1][1] = WiderNorm(4)


def instance_forward(model: Any, call: dict[str, Any]) -> None:
    model.layers[0][0].forward = lambda x: x


def class_forward(model: Any, call: dict[str, Any]) -> AbstractContextManager[Any]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    return _patched("forward", forward, nn.Linear)


def hook_added(model: Any, call: dict[str, Any]) -> None:
    model.layers[0][0].register_forward_hook(lambda module, args, output: output * 2)


def buffer_added(model: Any, call: dict[str, Any]) -> None:
    model.layers[0][0].register_buffer("late", torch.zeros(1))


def one_layer_less(model: Any, call: dict[str, Any]) -> None:
    del model.layers[2]


def one_layer_more(model: Any, call: dict[str, Any]) -> None:
    model.layers.append(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))


def part_order(model: Any, call: dict[str, Any]) -> None:
    up = model.parts.pop("up")
    model.parts["up"] = up


def weights_changed(model: Any, call: dict[str, Any]) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def gradient(model: Any, call: dict[str, Any]) -> None:
    model.layers[0][0].weight.requires_grad_(False)


def half_precision(model: Any, call: dict[str, Any]) -> None:
    model.layers[0][0].to(torch.float16)


class Outer(nn.Module):
    def decode(self, x: torch.Tensor, y: torch.Tensor | None = None, *, twice: bool = False) -> torch.Tensor:
        x = helper(x) * GAIN + TABLE["bias"]
        if SWITCH == "on":
            x = x + 1
        if PLUGIN is not None:
            x = PLUGIN(x)
        for _ in range(TABLE["steps"]):
            x = x + 1
        return x * 2 if twice else x


def changed_default(model: Any, call: dict[str, Any]) -> AbstractContextManager[Any]:
    def set_default(value: bool) -> None:
        Outer.decode.__kwdefaults__["twice"] = value

    return _restored(lambda: set_default(True), lambda: set_default(False))


def scaled_by(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    return scaled


def with_default(x: torch.Tensor, factor: float = 3.0, *, shift: int = 1) -> torch.Tensor:
    return x * factor + shift


class Closures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function = scaled_by(2.0)
        self.partial = functools.partial(with_default, factor=2.0)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.partial(with_default(self.function(x)))


def default_of_helper(model: Any, call: dict[str, Any]) -> AbstractContextManager[Any]:
    def set_default(value: float) -> None:
        with_default.__defaults__ = (value,)

    return _restored(lambda: set_default(4.0), lambda: set_default(3.0))


def keyword_default_of_helper(model: Any, call: dict[str, Any]) -> AbstractContextManager[Any]:
    def set_default(value: int) -> None:
        with_default.__kwdefaults__ = {"shift": value}

    return _restored(lambda: set_default(2), lambda: set_default(1))


class Tensors(nn.Module):
    def decode(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(4, 8, 4))
        self.register_buffer("values", torch.zeros(4, 8, 4))
        self.table = torch.arange(8)

    def decode(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        self.keys.index_copy_(1, place, x[:, None])
        self.values.index_copy_(1, place, x[:, None])
        return (self.keys + self.values).sum(1) + self.table[:4]


def caches_tied(model: Any, call: dict[str, Any]) -> None:
    model.values = model.keys


def caches_overlap(model: Any, call: dict[str, Any]) -> None:
    model.values = model.keys.view(4, 8, 4)


def caches_of_one_block(model: Any, call: dict[str, Any]) -> None:
    block = torch.zeros(2, 4, 8, 4)
    model.keys, model.values = block[0], block[1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.mask = torch.ones(4)
        self.layers = nn.ModuleList(Masked(self.mask) for _ in range(3))

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.mask
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Masked(nn.Module):
    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mask


def untied(model: Any, call: dict[str, Any]) -> None:
    model.head.weight = nn.Parameter(torch.ones(8, 4))


class Untied(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.ones(8, 4))


def tied(model: Any, call: dict[str, Any]) -> None:
    model.head.weight = model.embedding.weight


class Inputs(nn.Module):
    def decode(
        self, batch: Batch, lengths: list[int], extra: dict[str, Any], point: Point, maybe: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = batch.tokens * batch.scale + lengths[0] + extra["shift"] + point.x
        if maybe is not None:
            x = x + maybe
        return x + len(lengths) + (1 if "late" in extra else 0)


def inputs_call() -> dict[str, Any]:
    return {
        "batch": Batch(torch.zeros(2, 4), 0.5),
        "lengths": [3, 4],
        "extra": {"shift": torch.ones(4), "name": "x"},
        "point": Point(1, 2),
        "maybe": None,
    }


class Lengths(nn.Module):
    def decode(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        for length in lengths:
            x = x + length
        return x


class Dynamic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 2.0
        self.step = 3

    def decode(self, x: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
        if x.shape[0] < 16 and count < 100:
            x = self.linear(x) * self.scale
        return x + y[: x.shape[0]] + count + self.step


class Branching(nn.Module):
    def decode(self, x: torch.Tensor, limit: int) -> torch.Tensor:
        return x * 2 if limit > 10 and limit % 2 == 0 and x.shape[0] * x.shape[1] <= limit else x


class Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.skipped = {1, 3}
        self.names = frozenset({"a", "b"})
        self.window = range(2, 8, 2)
        self.slice = slice(1, 3)
        self.queue = collections.deque([1, 2, 3])
        self.ordered = collections.OrderedDict(a=1.0, b=2.0)
        self.defaults = collections.defaultdict(float, a=1.0)
        self.tagged = TaggedInt(5)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.window:
            x = x + number
        if 2 not in self.skipped and "a" in self.names:
            x = x * 2
        for value in self.ordered.values():
            x = x + value
        x = x + self.defaults["a"] + len(self.queue) + self.tagged
        return x[self.slice]


class Ambient(nn.Module):
    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.T + torch.zeros(2)


def set_and_restore(setter: Callable[[Any], Any], value: Any, old: Any) -> Callable[[Any, dict[str, Any]], Any]:
    def apply(model: Any, call: dict[str, Any]) -> AbstractContextManager[Any]:
        return _restored(lambda: setter(value), lambda: setter(old))

    return apply


class Iterators(nn.Module):
    def decode(self, x: torch.Tensor, numbers: Any, pairs: Any, ticks: Any) -> torch.Tensor:
        for number in numbers:
            x = x + number
        for pair in pairs:
            x = x * pair
        return x + next(ticks)


class Walks(nn.Module):
    """Reads its own parameters and children by walking them, so that their order counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        for name, parameter in self.named_parameters():
            x = x + parameter.sum() * len(name)
        for child in self.children():
            x = child(x)
        return x


def child_added(model: Any, call: dict[str, Any]) -> None:
    model.third = nn.Linear(4, 4)


def children_swapped(model: Any, call: dict[str, Any]) -> None:
    first = model._modules.pop("first")
    model._modules["first"] = first


class Base(nn.Module):
    bonus = 1.0

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.bonus


class Derived(Base):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return super().scale(x) + 1

    @property
    def doubled(self) -> float:
        return self.bonus * 2

    @staticmethod
    def shift(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @classmethod
    def factor(cls) -> float:
        return cls.bonus

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift(self.scale(x)) * self.doubled * self.factor()


def class_bonus(model: Any, call: dict[str, Any]) -> AbstractContextManager[Any]:
    return _patched("bonus", 2.0, Base)


class WithExtras(nn.Module):
    def decode(self, x: torch.Tensor, *more: torch.Tensor, **named: Any) -> torch.Tensor:
        for item in more:
            x = x + item
        return x + named.get("shift", 0)


class Shadowed(nn.Module):
    """Reads an attribute that its class gives through __getattr__."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Proxy({"gain": 2.0})

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.settings.gain


class Proxy:
    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None


def proxied(model: Any, call: dict[str, Any]) -> None:
    model.settings.values["gain"] = 3.0


def vector() -> dict[str, Any]:
    return {"x": torch.zeros(2, 4)}


NOTHING = Change(lambda model, call: None)
MONKEYPATCH = "a trace would go through the new method; torch doesn't look at a class again"
STRICTER = "a value that torch's == takes for equal gives another graph"

ZOO: dict[str, Animal] = {
    "attributes": Animal(
        Attributes,
        vector,
        {
            "unchanged": NOTHING,
            "int": assign("count", 5),
            "int as float": assign("count", 4.0),
            "int as bool": assign("count", True),
            "float": assign("scale", 0.5),
            "str": assign("layout", "BSND"),
            "tuple": assign("window", (2, 4)),
            "tuple as list": assign("window", [2, 3]),
            "enum": assign("mode", Mode.SLOW),
            "bool": assign("flag", False),
            "bool as int": assign("flag", 1),
            "none": assign("nothing", 0),
            "nan": assign("nan", 1.0),
            "other nan": assign("nan", float("nan")),
            "negative zero": Change(assign("zero", -0.0), False, STRICTER),
            "dtype": assign("kind", torch.float16),
            "device": assign("place", torch.device("meta")),
            "size": assign("shape", torch.Size([2, 5])),
            "bytes": assign("raw", b"ac"),
            "nested": assign("nested", ((1, 2), ("b", None))),
            "nested bool": Change(assign("nested", ((True, 2), ("a", None))), False, STRICTER),
            "gone": lambda model, call: model.__delattr__("scale"),
            "unread attribute": assign("log_level", 3),
        },
    ),
    "configured": Animal(
        Configured,
        vector,
        {
            "unchanged": NOTHING,
            "field": assign("config.gain", 2.0),
            "nested field": assign("config.inner.width", 5),
            "text field": assign("config.kind", "fancy"),
            "unread field": assign("config.width", 9),
            "another config": assign("config", lambda: Config(inner=Config(width=4))),
            "another class": assign("config", lambda: types.SimpleNamespace(**vars(Config(inner=Config(width=4))))),
            "dict value": lambda model, call: model.options.update(gain=3.0),
            "dict key": lambda model, call: model.options.update(extra=1),
            "list length": lambda model, call: model.options["names"].append("c"),
            "late attribute": assign("space.late", True),
            "deep attribute": assign("space.sub.depth", 3),
        },
    ),
    "layers": Animal(
        Layers,
        vector,
        {
            "unchanged": NOTHING,
            "one less": one_layer_less,
            "one more": one_layer_more,
            "submodule class": swap_norm,
            "submodule attribute": lambda m, c: setattr(m.layers[1][1], "eps", 1e-3),
            "instance forward": instance_forward,
            "class forward": Change(class_forward, False, MONKEYPATCH),
            "hook": Change(hook_added, False, "torch skips hook guards by default and would run the old graph"),
            "global hook": Change(lambda m, c: _global_hook(), False, "as with the hooks of one module"),
            "buffer added": buffer_added,
            "part order": part_order,
            "training": lambda model, call: model.drop.train() and None,
            "weights": weights_changed,
            "gradient": gradient,
            "dtype": half_precision,
            "bias gone": lambda m, c: setattr(m.layers[0][0], "bias", None),
            "batch": argument("x", lambda: torch.zeros(3, 4)),
        },
    ),
    "outer": Animal(
        Outer,
        lambda: {"x": torch.zeros(2, 4)},
        {
            "unchanged": NOTHING,
            "global float": rebind("GAIN", 3.0),
            "global str": rebind("SWITCH", "off"),
            "global dict": lambda m, c: _restored(lambda: TABLE.update(bias=1.0), lambda: TABLE.update(bias=0.5)),
            "global steps": lambda m, c: _restored(lambda: TABLE.update(steps=4), lambda: TABLE.update(steps=3)),
            "helper": rebind("helper", other_helper),
            "plugin": rebind("PLUGIN", helper),
            "shadowed builtin": lambda m, c: _restored(
                lambda: globals().update(range=lambda n: [0] * n), lambda: globals().pop("range")
            ),
            "optional given": argument("y", lambda: torch.zeros(1)),
            "keyword given": argument("twice", lambda: True),
            "keyword default": Change(changed_default),
            "unread global": rebind("Config", None),
        },
    ),
    "closures": Animal(
        Closures,
        vector,
        {
            "unchanged": NOTHING,
            "cell": assign("function", lambda: scaled_by(3.0)),
            "equal cell": assign("function", lambda: scaled_by(2.0)),
            "another function": assign("function", other_helper),
            "default": default_of_helper,
            "keyword default": keyword_default_of_helper,
            "partial": assign("partial", lambda: functools.partial(with_default, factor=4.0)),
            "equal partial": assign("partial", lambda: functools.partial(with_default, factor=2.0)),
        },
    ),
    "tensors": Animal(
        Tensors,
        lambda: {"x": torch.zeros(4, 4), "y": torch.ones(4, 4)},
        {
            "unchanged": NOTHING,
            "values": argument("x", lambda: torch.ones(4, 4)),
            "batch": argument("x", lambda: torch.zeros(1, 4)),
            "rank": argument("x", lambda: torch.zeros(1, 4, 4)),
            "stride": argument("x", lambda: torch.zeros(4, 4).T),
            "padded": argument("x", lambda: torch.zeros(4, 8)[:, :4]),
            "offset": argument("x", lambda: torch.zeros(8, 4)[4:]),
            "dtype": argument("x", lambda: torch.zeros(4, 4, dtype=torch.float64)),
            "gradient": argument("x", lambda: torch.zeros(4, 4, requires_grad=True)),
            "parameter": argument("x", lambda: nn.Parameter(torch.zeros(4, 4))),
            "none": argument("x", lambda: None),
            "number": argument("x", lambda: 1.0),
            "aliased": lambda model, call: call.update(y=call["x"]),
            "conjugate": argument("x", lambda: torch.zeros(4, 4, dtype=torch.complex64).conj()),
            "sparse": argument("x", lambda: torch.zeros(4, 4).to_sparse()),
            "inference tensor": lambda model, call: call.update(x=_inference_tensor()),
            "inference mode": lambda model, call: torch.inference_mode(),
            "marked dynamic": lambda model, call: torch._dynamo.mark_dynamic(call["x"], 0),
            "marked static": lambda model, call: torch._dynamo.mark_static(call["x"], 0),
            "meta": argument("x", lambda: torch.zeros(4, 4, device="meta")),
        },
    ),
    "aliased tensors": Animal(
        Tensors,
        lambda: dict.fromkeys("xy", torch.zeros(4, 4)),
        {"unchanged": NOTHING, "apart": argument("y", lambda: torch.zeros(4, 4))},
    ),
    "overlapping tensors": Animal(
        Tensors,
        lambda: dict(zip("xy", _views(), strict=True)),
        {
            "unchanged": NOTHING,
            "other views": lambda model, call: call.update(zip("xy", _views(), strict=True)),
            "apart": Change(
                argument("y", lambda: torch.zeros(4, 4)),
                False,
                "whether two tensors share memory is compared though the compiler asked for no guard",
            ),
        },
    ),
    "size one": Animal(
        Tensors,
        lambda: {"x": torch.zeros(1, 4), "y": torch.ones(1, 4)},
        {
            "unchanged": NOTHING,
            "stride of one row": argument("x", lambda: torch.zeros(1, 8)[:, :4]),
            "two": argument("x", lambda: torch.zeros(2, 4)),
        },
    ),
    "caches": Animal(
        Cached,
        lambda: {"x": torch.ones(4, 4), "place": torch.tensor([2])},
        {
            "unchanged": NOTHING,
            "size": assign("keys", lambda: torch.zeros(4, 16, 4)),
            "both sizes": lambda m, c: [setattr(m, name, torch.zeros(4, 16, 4)) for name in ("keys", "values")],
            "dtype": assign("keys", lambda: torch.zeros(4, 8, 4, dtype=torch.float64)),
            "tied": caches_tied,
            "overlapping": Change(
                caches_overlap, False, "writing one would change the other; torch looks at whole tensors only"
            ),
            "of one block": caches_of_one_block,
            "fresh": assign("keys", lambda: torch.zeros(4, 8, 4)),
            "table": assign("table", lambda: torch.arange(9)),
        },
    ),
    "tied": Animal(
        Tied,
        lambda: {"tokens": torch.tensor([1, 2])},
        {
            "unchanged": NOTHING,
            "untied": untied,
            "one mask apart": lambda m, c: setattr(m.layers[1], "mask", torch.ones(4)),
            "weights": weights_changed,
        },
    ),
    "untied": Animal(Untied, lambda: {"tokens": torch.tensor([1, 2])}, {"unchanged": NOTHING, "tied": tied}),
    "inputs": Animal(
        Inputs,
        inputs_call,
        {
            "unchanged": NOTHING,
            "batch": lambda m, c: setattr(c["batch"], "tokens", torch.zeros(3, 4)),
            "scale": lambda m, c: setattr(c["batch"], "scale", 0.75),
            "another batch": lambda m, c: c.update(batch=Batch(torch.zeros(2, 4), 0.5)),
            "length value": lambda m, c: c.update(lengths=[5, 4]),
            "unread length": lambda m, c: c.update(lengths=[3, 9]),
            "more lengths": lambda m, c: c.update(lengths=[3, 4, 5]),
            "lengths as tuple": lambda m, c: c.update(lengths=(3, 4)),
            "unread dict value": lambda m, c: c["extra"].update(name="y"),
            "late key": lambda m, c: c["extra"].update(late=1),
            "dict tensor": lambda m, c: c["extra"].update(shift=torch.ones(1)),
            "key gone": lambda m, c: c["extra"].__delitem__("shift"),
            "point": lambda m, c: c.update(point=Point(2, 2)),
            "unread coordinate": lambda m, c: c.update(point=Point(1, 3)),
            "maybe": lambda m, c: c.update(maybe=torch.zeros(1)),
            "left out": lambda m, c: c.pop("maybe"),
        },
    ),
    "static lengths": Animal(
        Lengths,
        lambda: {"x": torch.zeros(2, 4), "lengths": [5, 6, 9]},
        {
            "unchanged": NOTHING,
            "value": lambda m, c: c.update(lengths=[5, 6, 10]),
            "fewer": lambda m, c: c.update(lengths=[5, 6]),
        },
    ),
    "dynamic lengths": Animal(
        Lengths,
        lambda: {"x": torch.zeros(2, 4), "lengths": [5, 6, 9]},
        {
            "unchanged": NOTHING,
            "values": lambda m, c: c.update(lengths=[6, 7, 10]),
            "zero": lambda m, c: c.update(lengths=[0, 7, 10]),
            "one": lambda m, c: c.update(lengths=[1, 7, 10]),
            "negative": lambda m, c: c.update(lengths=[-3, 7, 10]),
            "equal": lambda m, c: c.update(lengths=[7, 7, 7]),
            "huge": lambda m, c: c.update(lengths=[2**62, 7, 10]),
            "float": lambda m, c: c.update(lengths=[6.0, 7, 10]),
            "bool": lambda m, c: c.update(lengths=[True, 7, 10]),
            "fewer": lambda m, c: c.update(lengths=[6, 7]),
            "more": lambda m, c: c.update(lengths=[6, 7, 8, 9]),
            "batch": lambda m, c: c.update(x=torch.zeros(3, 4)),
            "batch of one": lambda m, c: c.update(x=torch.zeros(1, 4)),
            "empty batch": lambda m, c: c.update(x=torch.zeros(0, 4)),
            "transposed": lambda m, c: c.update(x=torch.zeros(4, 2).T),
            "dtype": lambda m, c: c.update(x=torch.zeros(2, 4, dtype=torch.float16)),
        },
        dynamic=True,
    ),
    "one in lengths": Animal(
        Lengths,
        lambda: {"x": torch.zeros(2, 4), "lengths": [1, 0, 9]},
        {
            "unchanged": NOTHING,
            "value": lambda m, c: c.update(lengths=[1, 0, 10]),
            "not one": lambda m, c: c.update(lengths=[2, 0, 9]),
            "not zero": lambda m, c: c.update(lengths=[1, 2, 9]),
        },
        dynamic=True,
    ),
    "dynamic": Animal(
        Dynamic,
        lambda: {"x": torch.zeros(4, 4), "y": torch.zeros(8, 4), "count": 7},
        {
            "unchanged": NOTHING,
            "batch": lambda m, c: c.update(x=torch.zeros(5, 4)),
            "batch at the branch": lambda m, c: c.update(x=torch.zeros(15, 4), y=torch.zeros(20, 4)),
            "batch past the branch": lambda m, c: c.update(x=torch.zeros(16, 4), y=torch.zeros(20, 4)),
            "y too short": lambda m, c: c.update(y=torch.zeros(3, 4)),
            "one row": lambda m, c: c.update(x=torch.zeros(1, 4)),
            "width": lambda m, c: c.update(x=torch.zeros(4, 8)),
            "count": lambda m, c: c.update(count=99),
            "count past the branch": lambda m, c: c.update(count=100),
            "attribute float": assign("scale", 3.0),
            "attribute nan": assign("scale", float("nan")),
            "attribute int": assign("step", 4),
            "attribute one": assign("step", 1),
            "weights": weights_changed,
        },
        dynamic=True,
    ),
    "branching": Animal(
        Branching,
        lambda: {"x": torch.zeros(2, 4), "limit": 20},
        {
            "unchanged": NOTHING,
            "other limit": lambda m, c: c.update(limit=22),
            "odd limit": lambda m, c: c.update(limit=21),
            "small limit": lambda m, c: c.update(limit=8),
            "larger x": lambda m, c: c.update(x=torch.zeros(5, 4)),
            "too large x": lambda m, c: c.update(x=torch.zeros(6, 4)),
        },
        dynamic=True,
    ),
    "sets": Animal(
        Sets,
        lambda: {"x": torch.zeros(8, 4)},
        {
            "unchanged": NOTHING,
            "member": lambda m, c: m.skipped.add(2),
            "unread member": lambda m, c: m.skipped.add(9),
            "name": assign("names", frozenset({"b"})),
            "range": assign("window", range(2, 10, 2)),
            "equal range": assign("window", range(2, 7, 2)),
            "slice": assign("slice", slice(1, 4)),
            "queue": lambda m, c: m.queue.append(4),
            "ordered value": lambda m, c: m.ordered.update(a=3.0),
            "order": Change(
                lambda m, c: m.ordered.move_to_end("a"), False, "torch looks at the dict below, which keeps its order"
            ),
            "plain dict": assign("ordered", {"a": 1.0, "b": 2.0}),
            "default dict value": lambda m, c: m.defaults.update(a=2.0),
            "default dict key gone": lambda m, c: m.defaults.__delitem__("a"),
            "subclass value": assign("tagged", TaggedInt(6)),
            "plain value": assign("tagged", 5),
        },
    ),
    "ambient": Animal(
        Ambient,
        lambda: {"x": torch.zeros(2, 4)},
        {
            "unchanged": NOTHING,
            "grad mode": lambda m, c: torch.enable_grad(),
            "inference mode": lambda m, c: torch.inference_mode(),
            "autocast": lambda m, c: torch.autocast("cpu", torch.bfloat16),
            "autocast off": lambda m, c: torch.autocast("cpu", enabled=False),
            "deterministic": set_and_restore(torch.use_deterministic_algorithms, True, False),
            "default dtype": set_and_restore(torch.set_default_dtype, torch.float64, torch.float32),
            "default device": lambda m, c: torch.device("meta"),
            "threads": Change(
                set_and_restore(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
                True,
                "the number of threads is placement: torchrun sets it to one",
            ),
            "tf32": set_and_restore(functools.partial(setattr, torch.backends.cuda.matmul, "allow_tf32"), True, False),
            "function mode": lambda m, c: _mode(),
            "no torch function": lambda m, c: torch._C.DisableTorchFunctionSubclass(),
        },
    ),
    "iterators": Animal(
        Iterators,
        lambda: {
            "x": torch.zeros(2, 4),
            "numbers": iter(range(3, 9, 2)),
            "pairs": iter((2, 3)),
            "ticks": itertools.count(3),
        },
        {
            "unchanged": NOTHING,
            "range": lambda m, c: c.update(numbers=iter(range(3, 11, 2))),
            "range moved": lambda m, c: next(c["numbers"]) and None,
            "tuple": lambda m, c: c.update(pairs=iter((2, 3, 4))),
            "tuple value": lambda m, c: c.update(pairs=iter((2, 4))),
            "tuple moved": lambda m, c: next(c["pairs"]) and None,
            "count": lambda m, c: c.update(ticks=itertools.count(4)),
            "count step": lambda m, c: c.update(ticks=itertools.count(3, 2)),
        },
    ),
    "walks": Animal(
        Walks,
        vector,
        {
            "unchanged": NOTHING,
            "child added": child_added,
            "children swapped": children_swapped,
            "parameter shape": lambda m, c: setattr(m, "second", nn.Linear(4, 4, bias=False)),
            "weights": weights_changed,
        },
    ),
    "derived": Animal(
        Derived,
        vector,
        {
            "unchanged": NOTHING,
            "class attribute": class_bonus,
            "instance attribute": assign("bonus", 2.0),
            "base method": lambda m, c: _patched("scale", lambda self, x: x, Base),
            "derived method": lambda m, c: _patched("scale", lambda self, x: x, Derived),
            "instance method": assign("scale", helper),
            "static method": lambda m, c: _patched("shift", staticmethod(helper), Derived),
        },
    ),
    "extras": Animal(
        WithExtras,
        lambda: {"x": torch.zeros(2, 4), "more": (torch.ones(4), torch.ones(1)), "named": {"shift": 2}},
        {
            "unchanged": NOTHING,
            "fewer": lambda m, c: c.update(more=(torch.ones(4),)),
            "shape": lambda m, c: c.update(more=(torch.ones(4), torch.ones(4))),
            "keyword": lambda m, c: c.update(named={"shift": 3}),
            "no keyword": lambda m, c: c.update(named={}),
        },
    ),
    "shadowed": Animal(Shadowed, vector, {"unchanged": NOTHING, "through __getattr__": proxied}),
}


def _views() -> tuple[torch.Tensor, torch.Tensor]:
    block = torch.zeros(6, 4)
    return block[:4], block[2:]


def _inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 4)


class _Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _mode() -> AbstractContextManager[Any]:
    return _Doubling()


class _global_hook:  # noqa: N801 -- as above
    def __enter__(self) -> None:
        self.handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)

    def __exit__(self, *error: object) -> None:
        self.handle.remove()
