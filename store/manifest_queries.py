"""What more than one query of the manifest database says, and rows read as values.

SQL stands in store/engine.py and in this family: store/manifest.py, manifest_queries.py, manifest_changes.py.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import sqlalchemy as sa

from cachectl.schemas.boot import Member, WarmSet
from cachectl.schemas.canonical import canonical_bytes
from cachectl.schemas.tables import build_failures, entries, entry_files, warm_set_members, warm_sets
from cachectl.store.manifest_rows import EntryRow, Stats, WarmSetRow, time_text

_Item = TypeVar("_Item")
# SQLite before 3.32 takes 999 values in one statement; the widest statement here binds each twice.
_CHUNK = 400

ENTRIES = sa.select(
    entries.c.id,
    entries.c.key,
    entries.c.manifest,
    entries.c.recipe,
    entries.c.recipe_digest,
    entries.c.method,
    entries.c.case_name,
    entries.c.rank,
    entries.c.world_size,
    entries.c.state,
    entries.c.state_reason,
    entries.c.size_bytes,
    entries.c.cold_seconds,
    entries.c.warm_seconds,
    entries.c.created_at,
    entries.c.last_used_at,
    entries.c.pinned,
    entries.c.evidence,
).order_by(entries.c.created_at.desc(), entries.c.id.desc())

MEMBERS = (
    sa.select(
        warm_set_members.c.warm_set_id,
        entries.c.key,
        entries.c.manifest,
        entries.c.method,
        entries.c.case_name,
        entries.c.rank,
    )
    .join(entries, entries.c.id == warm_set_members.c.entry_id)
    .order_by(entries.c.rank, entries.c.method, entries.c.case_name, entries.c.key)
)

FAILURES = sa.select(
    build_failures.c.recipe,
    build_failures.c.method,
    build_failures.c.case_name,
    build_failures.c.rank,
    build_failures.c.toolchain,
    build_failures.c.error,
    build_failures.c.log_path,
    build_failures.c.failed_at,
    build_failures.c.expires_at,
).order_by(build_failures.c.failed_at.desc(), build_failures.c.id.desc())


def chunks(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    """Yield items in lists that one statement can take."""
    iterator = iter(items)
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk


def equal(*pairs: tuple[sa.ColumnElement[Any], object]) -> list[sa.ColumnElement[bool]]:
    """Return the conditions of those pairs whose value is given."""
    return [column == value for column, value in pairs if value is not None]


def named(digests: Sequence[str]) -> tuple[sa.ColumnElement[bool]]:
    """Return the condition of entries that are named by key or by manifest."""
    return (sa.or_(entries.c.key.in_(digests), entries.c.manifest.in_(digests)),)


def sets_with(where: tuple[sa.ColumnElement[bool], ...]) -> sa.Select[tuple[int]]:
    """Select the ids of the warm sets that hold such entries."""
    return sa.select(warm_set_members.c.warm_set_id).join(entries).where(*where)


def entry_row(row: Any) -> EntryRow:
    """Read a row of ENTRIES."""
    return EntryRow(*row)


def json_text(document: Any) -> str:
    """Return a document as the text that both databases take."""
    # Plain ASCII: neither database takes a lone surrogate, and PostgreSQL no NUL, outside an escape.
    return json.dumps(json.loads(canonical_bytes(document)), sort_keys=True, separators=(",", ":"))


def storable(text: str) -> str:
    """Return text as both databases take it."""
    # What a compiler printed may be anything; see json_text.
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\N{REPLACEMENT CHARACTER}")


def _warm_set_row(row: Any, members: list[Member]) -> WarmSetRow:
    return WarmSetRow(
        recipe=row.recipe,
        recipe_digest=row.recipe_digest,
        sequence=row.sequence,
        state=row.state,
        created_at=row.created_at,
        warm_set=WarmSet(row.warm_set, time_text(row.created_at), json.loads(row.request), tuple(members)),
    )


def read_warm_sets(
    connection: sa.Connection,
    recipe_digest: str | None,
    keys: Collection[str] | None,
    state: str | None,
    limit: int | None,
) -> tuple[WarmSetRow, ...]:
    """Return warm sets with their members, newest first, as `ManifestRepo.warm_sets` describes them."""
    query = (
        sa.select(warm_sets)
        .where(*equal((warm_sets.c.recipe_digest, recipe_digest), (warm_sets.c.state, state)))
        .order_by(warm_sets.c.sequence.desc(), warm_sets.c.id.desc())
        .limit(limit)
    )
    if keys is None:
        rows = list(connection.execute(query))
    else:
        found = {
            row.id: row
            for chunk in chunks(keys)
            for row in connection.execute(query.where(warm_sets.c.id.in_(sets_with(named(chunk)))))
        }
        rows = sorted(found.values(), key=lambda row: (row.sequence, row.id), reverse=True)[:limit]
    members: dict[int, list[Member]] = {row.id: [] for row in rows}
    for ids in chunks(members):
        for set_id, *member in connection.execute(MEMBERS.where(warm_set_members.c.warm_set_id.in_(ids))):
            members[set_id].append(Member(*member))
    return tuple(_warm_set_row(row, members[row.id]) for row in rows)


def read_stats(connection: sa.Connection) -> Stats:
    """Return counts over the whole database."""
    count = sa.func.count()
    distinct = sa.select(entry_files.c.digest, entry_files.c.size_bytes).distinct().subquery()
    by_state = connection.execute(sa.select(entries.c.state, count).group_by(entries.c.state))
    states: dict[str, int] = {row[0]: row[1] for row in by_state}
    total = sa.func.coalesce(sa.func.sum(entries.c.size_bytes), 0)
    blobs, blob_bytes = connection.execute(
        sa.select(count, sa.func.coalesce(sa.func.sum(distinct.c.size_bytes), 0)).select_from(distinct)
    ).one()
    return Stats(
        entries=sum(states.values()),
        ready=states.get("ready", 0),
        invalid=states.get("invalid", 0),
        quarantined=states.get("quarantined", 0),
        pinned=connection.scalar(sa.select(count).where(entries.c.pinned.is_(True))) or 0,
        size_bytes=int(connection.scalar(sa.select(total)) or 0),
        blobs=blobs,
        blob_bytes=int(blob_bytes),
        warm_sets=connection.scalar(sa.select(count).select_from(warm_sets)) or 0,
        failures=connection.scalar(sa.select(count).select_from(build_failures)) or 0,
    )
