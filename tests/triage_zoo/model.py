"""A model that is broken at each stage of triage's ladder, one method a fault."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

ROWS, WIDTH, SLOTS = 2, 8, 6
_READS = itertools.count()


class Model(nn.Module):
    """One linear layer and a cache; `good` is a decode step as it should be."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cache", torch.zeros(SLOTS, WIDTH))
        self.register_buffer("rows", torch.arange(ROWS))
        self.steps = 1
        self.history: list[int] = []
        self.past = torch.zeros(ROWS, 1)
        self.address, self.owner = address, object()

    def extra_repr(self) -> str:
        """Return what str(model) shows; with an address it is another text in each process, or each time."""
        owner = next(_READS) if self.address == "each time" else self.owner
        return f"owner={owner!r}" if self.address else ""

    def good(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.linear(x))
        self.cache[self.rows] = self.cache[self.rows] + y
        return y + self.cache.sum(0)

    def raises(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, :3])

    def not_a_number(self, x: torch.Tensor) -> torch.Tensor:
        empty = torch.full_like(x, float("-inf"))
        return x + torch.softmax(empty, dim=-1)

    def draws(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)

    def prints(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        print("y", y.shape)  # noqa: T201 - the fault
        if y.sum() > 0:
            y = y + 1
        return y

    def counts(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x * self.steps

    def grows(self, x: torch.Tensor) -> torch.Tensor:
        self.history.append(1)
        return x * len(self.history)

    def concatenates(self, x: torch.Tensor) -> torch.Tensor:
        self.past = torch.cat((self.past, x), dim=1)
        return self.past.sum(1)

    def reads(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.max().item()

    def lengths(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, actual_seq_lengths_kv: Any) -> torch.Tensor:
        return torch.ops.npu.npu_fused_infer_attention_score(
            q, k, v, actual_seq_lengths_kv=actual_seq_lengths_kv, num_heads=2, input_layout="BSH", scale=0.5
        )[0]

    def widens(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def scaled_by(self, x: torch.Tensor, actual_lengths: list[int]) -> torch.Tensor:
        return x * actual_lengths[0]

    def decomposed(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.hardswish(self.linear(x))

    def fused(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) * torch.cos(x + 1)

    def nothing(self, x: torch.Tensor) -> int:
        return 3

    def writes_a_view(self, x: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        view.add_(1.0)
        return x * 2


def build(address: str = "") -> Model:
    """Return the model, the same in each process."""
    torch.manual_seed(0)
    return Model(address).requires_grad_(False).eval()


def fails() -> Model:
    """Raise, as a factory does whose checkpoint is not there."""
    raise FileNotFoundError("no checkpoint")


def inputs(
    model: Model, rank: int, method: str = "good", tensor: bool = False, lengths: bool = False
) -> dict[str, Any]:
    """Return a step's arguments."""
    x = torch.arange(float(ROWS * WIDTH)).reshape(ROWS, WIDTH) / 8 - 0.7
    if method == "lengths":
        keys = torch.randn(ROWS, SLOTS, WIDTH, generator=torch.Generator().manual_seed(1))
        used = [1, 2]
        return {
            "q": x[:, None],
            "k": keys,
            "v": keys + 1,
            "actual_seq_lengths_kv": torch.tensor(used) if tensor else used,
        }
    if lengths:
        return {"x": x, "actual_lengths": [3, 4]}
    if method == "writes_a_view":
        return {"x": x, "view": x.view(-1)[:4]}
    return {"x": x}


def by_step(model: Model, rank: int, step: int = 0) -> dict[str, Any]:
    """Return the arguments of one step, as serving gives them: what is not the same each time."""
    return {"x": torch.full((ROWS, WIDTH + step), 0.5)}


def wrong_decomposition() -> None:
    """Register a decomposition that is not what the operator computes."""
    from npugraph_ex import _utils

    right = _utils.get_npu_default_decompositions

    def with_wrong() -> dict[Any, Any]:
        return {**right(), torch.ops.aten.hardswish.default: lambda x: x * 2}

    _utils.get_npu_default_decompositions = with_wrong
    from npugraph_ex import npu_fx_compiler

    npu_fx_compiler.get_npu_default_decompositions = with_wrong


def wrong_pass(graph_module: Any, example_inputs: Any = None, config: Any = None) -> None:
    """Replace relu by tanh: a custom pass that changes what the graph computes."""
    for node in graph_module.graph.nodes:
        if node.target == torch.ops.aten.relu.default:
            node.target = torch.ops.aten.tanh.default


def wrong_pattern() -> None:
    """Register a fusion that is not what it replaces."""

    def search(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.sin(a) * torch.cos(b)

    def replace(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.sin(a) + torch.cos(b)

    example = [torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)]
    torch.npu.npugraph_ex.register_replacement(search, replace, example)
