"""Boot records as values: how a new warm set joins a record, and which member serves which rank.

Owns the order inside a record. Standard library only; the bytes are read in `reading` and written in `writing`.
"""

from __future__ import annotations

from collections.abc import Collection

from cachectl.schemas.boot import BootRecord, Member, WarmSet

__all__ = ["SETS_KEPT", "members_of_ranks", "with_warm_set"]

# One per toolchain a fleet is moving between, with room: the hook reads the record at every start.
SETS_KEPT = 16


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
    """
    older = tuple(item for item in (record.sets if record is not None else ()) if item.warm_set != warm_set.warm_set)
    return BootRecord(
        recipe=recipe,
        recipe_digest=recipe_digest,
        sequence=sequence,
        created_at=warm_set.created_at,
        paths=paths,
        sets=(warm_set, *older)[:SETS_KEPT],
    )


def members_of_ranks(warm_set: WarmSet, ranks: Collection[int] | None) -> tuple[Member, ...]:
    """Return the members that these global ranks need, in the set's order; all of them for None."""
    return tuple(member for member in warm_set.members if ranks is None or member.rank in ranks)
