"""Which part of a build is this process's: a shard of the cases, or one rank of a world that a launcher started.

Also in which cut into nodes a build from here is made, which the same variables say. Owns no building. Reads a
launcher's variables, and nothing else of the environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from cachectl.errors import ConfigError
from cachectl.identity.node_cut import ranks_per_node
from cachectl.services.request import RecipeRequest

__all__ = ["dealt", "in_own_cut", "launched_rank"]


def launched_rank(environ: Mapping[str, str], request: RecipeRequest) -> int | None:
    """Return the rank that a launcher started this very process as, to build that rank only; None where none did.

    Raises:
        ConfigError: it started another number of ranks than the recipe has.
    """
    numbers = {name: environ.get(name, "").strip() for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    if request.world_size == 1 or not all(text.isascii() and text.isdecimal() for text in numbers.values()):
        return None
    rank, size = int(numbers["RANK"]), int(numbers["WORLD_SIZE"])
    if size == 1:
        return None
    if size != request.world_size or rank >= size:
        raise ConfigError(
            f"{request.loaded.path.name}: topology.world_size {request.world_size}: this is rank {rank} of {size}",
            hint="start as many ranks, or unset RANK, LOCAL_RANK and WORLD_SIZE to have them started here",
        )
    return rank


def in_own_cut(request: RecipeRequest, environ: Mapping[str, str]) -> RecipeRequest:
    """Return a request that asks for entries of the cut into nodes in which a build from here is made.

    A build starts all ranks on this node, unless a launcher started it as one of them.
    """
    if request.world_size == 1:
        return request
    try:
        alone = launched_rank(environ, request) is None
    except ConfigError:
        return request  # Of another world; a build says so.
    each = request.world_size if alone else ranks_per_node(environ, request.world_size)
    return replace(request, ranks_per_node=each)


def dealt(requests: Sequence[RecipeRequest], shard: tuple[int, int] | None) -> Iterator[frozenset[int] | None]:
    """Yield for each recipe the indices of the cases that are this shard's; None for all."""
    number = 0
    for request in requests:
        mine = set()
        for case in request.cases():
            if shard is not None and number % shard[1] == shard[0] % shard[1]:
                mine.add(case.index)
            number += 1
        yield frozenset(mine) if shard is not None else None
