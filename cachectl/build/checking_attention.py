"""What a traced graph does again in every layer, or in parts, that the NPU has one operator or one lookup for.

Owns finding them in a graph that was read; which rule they break and how grave that is stands in checking_rules.py.
Rank processes only: imports torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from cachectl.build.checking_graph import GraphReading, Operation, storage_of

__all__ = ["Repeated", "attention_in_parts", "repeated_lookups"]

_LOOKUPS = {"index_select": "index", "index": "indices", "embedding": "indices", "gather": "index"}
_TABLE = re.compile(r"(^|[._])(cos|sin|rope|rotary|freqs?)([._]|$)", re.IGNORECASE)
_PRODUCTS = ("bmm", "baddbmm", "matmul")
# What scores and weights go through without becoming something else.
_KEEPS = frozenset(
    {"_to_copy", "add", "clone", "div", "expand", "masked_fill", "mul", "native_dropout", "sub", "view", "where"}
)
_FUSED = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Repeated:
    """A table that is looked up several times at the same positions; `node` is the first lookup."""

    table: str
    times: int
    node: fx.Node


def repeated_lookups(reading: GraphReading, name_of: Callable[[int], str | None]) -> Iterator[Repeated]:
    """Yield the tables of cos and sin that a graph looks up more than once at the same positions.

    Tables of several layers are one, by their names without numbers: what they hold is the same.

    Args:
        reading: the graph.
        name_of: the name of the model's tensor that a graph input is, None for what is none.
    """
    nodes: dict[tuple[str, int], fx.Node] = {}
    times: Counter[tuple[str, int]] = Counter()
    for operation in reading.operations:
        if (place := _lookup(operation, reading, name_of)) is not None:
            nodes.setdefault(place, operation.node)
            times[place] += 1
    for place, count in times.items():
        if count > 1:
            yield Repeated(place[0].replace("*", "N"), count, nodes[place])


def _lookup(
    operation: Operation, reading: GraphReading, name_of: Callable[[int], str | None]
) -> tuple[str, int] | None:
    """Return which table an operator looks up, and at which positions; None for anything else."""
    argument = _LOOKUPS.get(operation.name)
    table = operation.arguments.get("weight" if operation.name == "embedding" else "self")
    if argument is None or not isinstance(table, torch.Tensor):
        return None
    places = operation.arguments.get(argument)
    members = [item for item in (places if isinstance(places, (list, tuple)) else [places]) if item is not None]
    index = reading.owner(table)
    name = name_of(index) if index is not None else None
    if name is None or not _TABLE.search(name) or len(members) != 1 or not isinstance(members[0], torch.Tensor):
        return None
    return re.sub(r"\d+", "*", name), storage_of(members[0])


def attention_in_parts(reading: GraphReading) -> list[fx.Node]:
    """Return the products that end an attention of parts: scores by a batched product, softmax, a second product."""
    scores: set[int] = set()
    weights: set[int] = set()
    found: list[fx.Node] = []
    for operation in reading.operations:
        given = {storage_of(tensor) for _, tensor in operation.tensors()}
        made = {storage_of(tensor) for tensor in operation.results}
        if operation.name in _PRODUCTS:
            if given & weights and _FUSED not in str(operation.node.target):
                found.append(operation.node)
            scores |= made
        elif operation.name == "_softmax" and given & scores:
            weights |= made
        elif operation.name in _KEEPS:
            scores |= made if given & scores else set()
            weights |= made if given & weights else set()
    return found
