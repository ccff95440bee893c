"""The topology part: how many ranks, which one, and how the model is split over them.

`rank` is the global rank, counted over all nodes; which one a start is about says identity/ranks.py. Standard library
only.
"""

from __future__ import annotations

from collections.abc import Mapping

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = ["asked_topology", "rank_topology", "topology_part"]

SIZES = (
    "world_size",
    "tensor_parallel",
    "pipeline_parallel",
    "expert_parallel",
    "data_parallel",
    "context_parallel",
)


def topology_part(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the set-wide topology document of a recipe document: every size, defaults filled in."""
    sizes = recipe.get("topology") or {}
    return {name: int(sizes.get(name, 1)) for name in SIZES}


def rank_topology(topology: Mapping[str, Any], rank: int, found: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return one entry's topology document: the set's sizes and the global rank.

    Args:
        found: what building found in the artifact of its place in the world, no name where it holds nothing of it:

            {"groups": {name or tag: [ranks, ...]},       process groups that the graph's collectives name
             "device_index": n,                           the device that it names by number
             "local_rank": text, "local_world_size": text, "node_rank": text}      where model code read them
    """
    return {**topology, "rank": rank, **({"found": dict(found)} if found else {})}


def asked_topology(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry's topology document without what building found: as it can be asked for before."""
    return {name: value for name, value in part.items() if name != "found"}
