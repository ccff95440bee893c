"""Boot records as values: how a new warm set joins a record, which of many stay, and which member serves which rank.

Owns the order inside a record. Standard library only; the bytes are read in `reading` and written in `writing`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from cachectl.schemas.boot import BootRecord, Member, WarmSet
from cachectl.schemas.canonical import canonical_bytes

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = ["SETS_KEPT", "TIES", "members_of_ranks", "tied_to_cut", "with_warm_set"]

# One per toolchain and node cut a fleet is moving between, with room: the hook reads the record at every start.
SETS_KEPT = 16
# What of a topology part's `found` is another in another cut into nodes.
TIES = ("device_index", "local_rank", "local_world_size", "node_rank")


def with_warm_set(
    record: BootRecord | None,
    warm_set: WarmSet,
    *,
    recipe: str,
    recipe_digest: str,
    paths: tuple[str, ...],
    sequence: int,
) -> BootRecord:
    """Return the record with `warm_set` as its newest; its own earlier build gives way to it.

    Older sets of the same request stay: they were built from other sources, and a rolled back deployment is warm again.
    Where there are too many, the oldest goes of which there is a newer one for the same toolchain, device and node cut:
    who builds often for one of them takes no other's only set.
    """
    older = tuple(item for item in (record.sets if record is not None else ()) if item.warm_set != warm_set.warm_set)
    return BootRecord(
        recipe=recipe,
        recipe_digest=recipe_digest,
        sequence=sequence,
        created_at=warm_set.created_at,
        paths=paths,
        sets=_kept((warm_set, *older)),
    )


def _kept(sets: Sequence[WarmSet]) -> tuple[WarmSet, ...]:
    """Return the sets that stay of these, in their order."""
    if len(sets) <= SETS_KEPT:
        return tuple(sets)
    newest: dict[bytes, int] = {}
    for index, item in enumerate(sets):
        newest.setdefault(_serves(item), index)
    first = set(newest.values())
    kept = sorted(range(len(sets)), key=lambda index: (index not in first, index))[:SETS_KEPT]
    return tuple(sets[index] for index in sorted(kept))


def _serves(warm_set: WarmSet) -> bytes:
    request = warm_set.request
    return canonical_bytes([request.get("toolchain"), request.get("device"), warm_set.ranks_per_node])


def tied_to_cut(topology: Mapping[str, Any]) -> bool:
    """Say whether an entry with this topology part fits some cuts into nodes only; without it, it fits each."""
    return any(name in (topology.get("found") or {}) for name in TIES)


def members_of_ranks(warm_set: WarmSet, ranks: Collection[int] | None) -> tuple[Member, ...]:
    """Return the members that these global ranks need, in the set's order; all of them for None."""
    return tuple(member for member in warm_set.members if ranks is None or member.rank in ranks)
