"""A model whose methods take, change and return what models do, one peculiarity each; and a call for each method."""

from __future__ import annotations

import dataclasses
import enum
import types
from typing import Any, NamedTuple

import torch
from torch import nn

ROWS, WIDTH = 2, 4


class Kind(enum.Enum):
    """An enum among the inputs."""

    ADD = 1


class Pair(NamedTuple):
    """A named tuple among the inputs."""

    one: torch.Tensor
    other: torch.Tensor


@dataclasses.dataclass
class Meta:
    """A dataclass among the inputs."""

    lengths: torch.Tensor
    causal: bool = True


@dataclasses.dataclass
class Result:
    """A dataclass that is returned."""

    logits: torch.Tensor
    count: int


@dataclasses.dataclass
class Cache:
    """A cache in an object of its own."""

    keys: list[torch.Tensor]


class Inner(nn.Module):
    """A module inside a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Model(nn.Module):
    """One method a peculiarity."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.low = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)
        self.dropout = nn.Dropout(0.5)
        self.nested = Inner()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("steps", torch.zeros(ROWS, WIDTH))
        self.kv_list = [torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)]
        self.kv_dict = {"k": torch.zeros(ROWS, WIDTH)}
        self.kv_object = Cache([torch.zeros(ROWS, WIDTH)])
        block = torch.zeros(2, ROWS, WIDTH)
        self.kv_views = [block[0], block[1]]
        self.count = 1
        self.last: torch.Tensor | None = None
        self.kv_bound = torch.zeros(ROWS, WIDTH)

    # State.

    def buffer(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(x)
        return self.steps * 2

    def cache_in_list(self, x: torch.Tensor) -> torch.Tensor:
        self.kv_list[0].add_(x)
        self.kv_list[1].copy_(x * 2)
        return self.kv_list[0] + self.kv_list[1]

    def cache_in_dict(self, x: torch.Tensor) -> torch.Tensor:
        self.kv_dict["k"].mul_(0.5).add_(x)
        return self.kv_dict["k"] + 1

    def cache_in_object(self, x: torch.Tensor) -> torch.Tensor:
        self.kv_object.keys[0].add_(x)
        return self.kv_object.keys[0] + 1

    def caches_of_one_block(self, x: torch.Tensor) -> torch.Tensor:
        self.kv_views[0].add_(x)
        self.kv_views[1].sub_(x)
        return self.kv_views[0] - self.kv_views[1]

    def cache_by_index(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.kv_list[1].index_copy_(0, rows, x)
        return self.kv_list[1] + 0

    def cache_through_a_view(self, x: torch.Tensor) -> torch.Tensor:
        self.kv_list[0][:1].add_(x[:1])
        return x * 2

    def cache_of_the_model_passed_in(self, x: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        kv.add_(x)
        return kv * 2

    def cache_of_the_model_only_read(self, x: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return kv * 2 + x

    def argument_written(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return total * 2

    def attribute_kept(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x + 1
        return x * 2

    # Inputs.

    def plain_values(self, x: torch.Tensor, flag: bool, name: str, none: None, n: int) -> torch.Tensor:
        result = x * n if flag else x
        if name == "negative":
            result = -result
        return result if none is None else x

    def named_tuple(self, pair: Pair) -> torch.Tensor:
        return pair.one + pair.other

    def nested_tuples(self, xs: Any) -> torch.Tensor:
        return xs[0] + xs[1][0] * xs[1][1][0]

    def dataclass_in(self, x: torch.Tensor, meta: Meta) -> torch.Tensor:
        return x * meta.lengths if meta.causal else x

    def bfloat16(self, x: torch.Tensor) -> torch.Tensor:
        return self.low(x)

    def float16(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def integers(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    def empty(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def zero_dim(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x * factor

    def strided(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def expanded(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def view_of_another(self, x: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        return x + view.sum()

    def same_twice(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y * 2

    def requires_grad(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2

    def of_inference_mode(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def parameter_passed_in(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * w

    def extra_keywords(self, x: torch.Tensor, **extra: torch.Tensor) -> torch.Tensor:
        return x + extra["z"]

    def keyword_only(self, x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        return x * scale

    def defaults(self, x: torch.Tensor, y: None = None, n: int = 3) -> torch.Tensor:
        return x * n

    def other_receiver(this, x: torch.Tensor) -> torch.Tensor:  # noqa: N805 - the runtime has to cope with the name
        return this.linear(x)

    # Insides.

    def dropout_in_eval(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x))

    def submodule(self, x: torch.Tensor) -> torch.Tensor:
        return self.nested(x)

    def autocast_inside(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(x)

    # Outputs.

    def returns_none(self, x: torch.Tensor) -> None:
        self.steps.add_(x)

    def returns_tuple(self, x: torch.Tensor) -> Any:
        return x + 1, (x + 2, 3), None, True, "text"

    def returns_dict(self, x: torch.Tensor) -> Any:
        return {"a": x + 1, "b": [x * 2]}

    def returns_dataclass(self, x: torch.Tensor) -> Any:
        return {"result": Result(self.linear(x), 3)}

    def returns_booleans(self, x: torch.Tensor) -> torch.Tensor:
        return x > 0.5

    def returns_nan_and_inf(self, x: torch.Tensor) -> Any:
        return (x - x) / (x - x), x / 0

    def returns_complex(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1j

    def returns_its_input(self, x: torch.Tensor) -> Any:
        return x, x[:1]

    def returns_its_cache(self, x: torch.Tensor) -> torch.Tensor:
        self.kv_list[0].add_(x)
        return self.kv_list[0]

    def enumeration(self, x: torch.Tensor, kind: Kind) -> torch.Tensor:
        return x if kind is Kind.ADD else -x

    # What can't be cached.

    def bad_parameter_written(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.add_(1.0)
        return x * self.weight

    def bad_object(self, x: torch.Tensor, options: Any) -> torch.Tensor:
        return x * options.scale

    def bad_counter(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return x * self.count

    def bad_cache_bound_anew(self, x: torch.Tensor) -> torch.Tensor:
        self.kv_bound = self.kv_bound + x
        return self.kv_bound * 2

    def bad_view_written(self, x: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        view.add_(1.0)
        return x * 2

    def bad_no_graph(self, x: torch.Tensor) -> int:
        return 3


def build() -> Model:
    """Return the model, the same in each process."""
    torch.manual_seed(0)
    return Model().requires_grad_(False).eval()


def rows() -> torch.Tensor:
    """Return a tensor of the usual shape."""
    return torch.arange(float(ROWS * WIDTH)).reshape(ROWS, WIDTH) / 8 + 0.1


def _tensor_and_view() -> dict[str, Any]:
    x = rows()
    return {"x": x, "view": x[:1]}


def _same_twice() -> dict[str, Any]:
    x = rows()
    return {"x": x, "y": x}


def _of_inference_mode() -> dict[str, Any]:
    with torch.inference_mode():
        return {"x": rows()}


def inputs(model: Model, rank: int, method: str) -> dict[str, Any]:
    """Return a call of a method."""
    other = rows() + 1
    calls = {
        "cache_by_index": lambda: {"x": rows(), "rows": torch.tensor([1, 0])},
        "cache_of_the_model_passed_in": lambda: {"x": rows(), "kv": model.kv_list[0]},
        "cache_of_the_model_only_read": lambda: {"x": rows(), "kv": model.kv_list[0]},
        "argument_written": lambda: {"x": rows(), "total": other},
        "plain_values": lambda: {"x": rows(), "flag": True, "name": "negative", "none": None, "n": 3},
        "named_tuple": lambda: {"pair": Pair(rows(), other)},
        "nested_tuples": lambda: {"xs": (rows(), (other, [other + 1]))},
        "dataclass_in": lambda: {"x": rows(), "meta": Meta(other)},
        "bfloat16": lambda: {"x": rows().bfloat16()},
        "float16": lambda: {"x": rows().half()},
        "integers": lambda: {"x": torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH)},
        "empty": lambda: {"x": torch.zeros(0, WIDTH)},
        "zero_dim": lambda: {"x": rows(), "factor": torch.tensor(2.0)},
        "strided": lambda: {"x": torch.arange(16.0).reshape(ROWS, 8)[:, ::2]},
        "expanded": lambda: {"x": torch.ones(WIDTH).expand(ROWS, WIDTH)},
        "view_of_another": _tensor_and_view,
        "same_twice": _same_twice,
        "requires_grad": lambda: {"x": rows().requires_grad_(True)},
        "of_inference_mode": _of_inference_mode,
        "parameter_passed_in": lambda: {"x": rows(), "w": model.weight},
        "extra_keywords": lambda: {"x": rows(), "z": other},
        "enumeration": lambda: {"x": rows(), "kind": Kind.ADD},
        "bad_object": lambda: {"x": rows(), "options": types.SimpleNamespace(scale=2.0)},
        "bad_view_written": _tensor_and_view,
    }
    call = calls.get(method)
    return call() if call is not None else {"x": rows()}


METHODS = tuple(name for name, member in vars(Model).items() if callable(member) and not name.startswith("_"))
GOOD = tuple(name for name in METHODS if not name.startswith("bad_"))
BAD = tuple(name for name in METHODS if name.startswith("bad_"))
