"""What publishing, withdrawing and rebuilding change in the manifest database.

Each function works inside the transaction of the connection it is given: all of it is seen, or nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from cachectl.errors import ManifestConflictError
from cachectl.schemas.boot import BootRecord, WarmSet
from cachectl.schemas.canonical import digest_of
from cachectl.schemas.tables import (
    boot_sequences,
    build_failures,
    entries,
    entry_files,
    warm_set_members,
    warm_sets,
)
from cachectl.store.manifest_queries import chunks, json_text, named, sets_with, storable
from cachectl.store.manifest_rows import FailureRow, NewEntry, NewWarmSet, ReindexResult, time_of

_FORGET_FAILURE = sa.delete(build_failures).where(
    build_failures.c.recipe == sa.bindparam("of_recipe"),
    build_failures.c.method == sa.bindparam("of_method"),
    build_failures.c.case_name == sa.bindparam("of_case"),
    build_failures.c.rank == sa.bindparam("of_rank"),
    build_failures.c.toolchain == sa.bindparam("of_toolchain"),
)

# After a rebuild: the recipe an entry was built from is one whose boot record names it.
_NAME_RECIPES = (
    sa.update(entries)
    .where(entries.c.recipe_digest.is_(None))
    .values(
        recipe_digest=sa.select(sa.func.min(warm_sets.c.recipe_digest))
        .where(warm_sets.c.id == warm_set_members.c.warm_set_id, warm_set_members.c.entry_id == entries.c.id)
        .correlate(entries)
        .scalar_subquery()
    )
)

# The manifests that a rebuild has met; lives in the transaction only.
_SEEN = sa.Table(
    "reindex_seen", sa.MetaData(), sa.Column("manifest", sa.String(71), primary_key=True), prefixes=["TEMPORARY"]
)


def _insert(connection: sa.Connection, table: sa.Table) -> Any:
    # Either has on_conflict_do_update; they share no base class that does.
    return (sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert)(table)


def add_entries(connection: sa.Connection, new: Sequence[NewEntry]) -> int:
    """Add the entries whose manifests are not known; return how many."""
    # In one order for all writers, so that two of them with common entries don't wait for each other.
    by_manifest = {entry.manifest: entry for entry in sorted(new, key=lambda entry: entry.manifest)}
    added = 0
    statement = (
        _insert(connection, entries)
        .on_conflict_do_nothing(index_elements=["manifest"])
        .returning(entries.c.id, entries.c.manifest)
    )
    for chunk in chunks(by_manifest.values()):
        inserted = connection.execute(statement, [_entry_values(entry) for entry in chunk]).all()
        added += len(inserted)
        files = [values for row in inserted for values in _file_values(row.id, by_manifest[row.manifest])]
        if files:
            connection.execute(sa.insert(entry_files), files)
    return added


def forget_failures_of(connection: sa.Connection, new: Sequence[NewEntry]) -> None:
    """Delete the recorded failures of what is published."""
    lines = [
        {
            "of_recipe": entry.recipe,
            "of_method": entry.method,
            "of_case": entry.case,
            "of_rank": entry.rank,
            "of_toolchain": digest_of(entry.parts["toolchain"]),
        }
        for entry in sorted(new, key=lambda entry: (entry.recipe, entry.method, entry.case, entry.rank))
        if "toolchain" in entry.parts
    ]
    if lines:
        connection.execute(_FORGET_FAILURE, lines)


def members_to_publish(connection: sa.Connection, warm_set: WarmSet) -> list[int]:
    """Return the ids of a set's members; raises ManifestConflictError where one is unknown or not ready."""
    wanted = {member.manifest: member for member in warm_set.members}
    found: dict[str, Any] = {}
    for chunk in chunks(sorted(wanted)):
        query = sa.select(entries.c.id, entries.c.manifest, entries.c.key, entries.c.state, entries.c.state_reason)
        # FOR SHARE: nobody invalidates a member between this look and the commit. SQLite has one writer anyway.
        query = query.where(entries.c.manifest.in_(chunk)).order_by(entries.c.id).with_for_update(read=True)
        found.update((row.manifest, row) for row in connection.execute(query))
    for manifest, member in wanted.items():
        row = found.get(manifest)
        where = f"member {member.method}/{member.case}/{member.rank} of the warm set {warm_set.warm_set}"
        if row is None or row.key != member.key:
            raise ManifestConflictError(
                f"{where} has the manifest {manifest} and the key {member.key}, which no entry has",
                hint="run `cachectl db reindex`, then build again",
            )
        if row.state != "ready":
            because = f": {row.state_reason}" if row.state_reason else ""
            raise ManifestConflictError(
                f"{where} is {row.state}{because}", hint="run `cachectl build --force` to build it anew"
            )
    return sorted(row.id for row in found.values())


def next_sequence(connection: sa.Connection, recipe_digest: str, after: int) -> int:
    """Hand out the sequence after the last one, and after `after`."""
    # The row stays locked until the commit: sequences become visible in their order.
    last = boot_sequences.c.sequence
    statement = (
        _insert(connection, boot_sequences)
        .values(recipe_digest=recipe_digest, sequence=after + 1)
        .on_conflict_do_update(
            index_elements=["recipe_digest"], set_={"sequence": sa.case((last > after, last), else_=after) + 1}
        )
        .returning(last)
    )
    return int(connection.execute(statement).scalar_one())


def add_warm_set(
    connection: sa.Connection, new: NewWarmSet, members: list[int], sequence: int, state: str = "ready"
) -> None:
    """Add a set, or give the one with the same members the new sequence and state."""
    same = sa.select(warm_sets.c.id, warm_set_members.c.entry_id).join(warm_set_members)
    same = same.where(warm_sets.c.warm_set == new.warm_set.warm_set, warm_sets.c.recipe_digest == new.recipe_digest)
    known: dict[int, set[int]] = {}
    for set_id, entry_id in connection.execute(same):
        known.setdefault(set_id, set()).add(entry_id)
    for set_id, ids in known.items():
        if ids == set(members):
            again = sa.update(warm_sets).where(warm_sets.c.id == set_id)
            connection.execute(again.values(sequence=sequence, state=state))
            return
    values = {
        "warm_set": new.warm_set.warm_set,
        "recipe": new.recipe,
        "recipe_digest": new.recipe_digest,
        "sequence": sequence,
        "request": json_text(new.warm_set.request),
        "state": state,
        "created_at": time_of(new.warm_set.created_at),
    }
    set_id = connection.execute(sa.insert(warm_sets).values(values).returning(warm_sets.c.id)).scalar_one()
    if members:
        connection.execute(
            sa.insert(warm_set_members), [{"warm_set_id": set_id, "entry_id": entry_id} for entry_id in members]
        )


def withdraw(connection: sa.Connection, keys: Collection[str], state: str, reason: str) -> int:
    """Mark ready entries, and the warm sets that hold them; return how many entries."""
    # What may be withdrawn from where: an invalid entry is never made quarantined, since release would revive it.
    before = ("ready",) if state == "quarantined" else ("ready", "quarantined")
    withdrawn = 0
    for chunk in chunks(keys):
        # Entries first: a publisher holds its members (FOR SHARE), so its set is there when sets are marked.
        withdrawn += connection.execute(
            sa.update(entries)
            .where(*named(chunk), entries.c.state.in_(before))
            .values(state=state, state_reason=storable(reason))
        ).rowcount
        not_ready = (*named(chunk), entries.c.state != "ready")
        connection.execute(sa.update(warm_sets).where(warm_sets.c.id.in_(sets_with(not_ready))).values(state="invalid"))
    return withdrawn


def release(connection: sa.Connection, keys: Collection[str]) -> int:
    """Make quarantined entries ready again, and the warm sets that are whole again; return how many entries."""
    released = 0
    for chunk in chunks(keys):
        where = (*named(chunk), entries.c.state == "quarantined")
        ids = connection.scalars(sa.select(entries.c.id).where(*where).with_for_update()).all()
        connection.execute(sa.update(entries).where(entries.c.id.in_(ids)).values(state="ready", state_reason=None))
        broken = sa.exists().where(
            warm_set_members.c.warm_set_id == warm_sets.c.id,
            warm_set_members.c.entry_id == entries.c.id,
            entries.c.state != "ready",
        )
        whole = (warm_sets.c.id.in_(sets_with((entries.c.id.in_(ids),))), ~broken)
        connection.execute(sa.update(warm_sets).where(*whole).values(state="ready"))
        released += len(ids)
    return released


def forget(connection: sa.Connection, manifests: Collection[str]) -> tuple[str, ...]:
    """Delete entries that are not pinned, and the warm sets that hold them; return their manifests."""
    forgotten: list[str] = []
    for chunk in chunks(manifests):
        query = sa.select(entries.c.id, entries.c.manifest).where(
            entries.c.manifest.in_(chunk), entries.c.pinned.is_(False)
        )
        rows = connection.execute(query.order_by(entries.c.id).with_for_update()).all()
        unpinned = (entries.c.id.in_([row.id for row in rows]),)
        connection.execute(sa.delete(warm_sets).where(warm_sets.c.id.in_(sets_with(unpinned))))
        connection.execute(sa.delete(entries).where(*unpinned))
        forgotten.extend(row.manifest for row in rows)
    return tuple(forgotten)


def record_failure(connection: sa.Connection, failure: FailureRow) -> int:
    """Keep a failed build in place of an older one of the same line and toolchain; return how many rows."""
    values = {
        "recipe": failure.recipe,
        "method": failure.method,
        "case_name": failure.case,
        "rank": failure.rank,
        "toolchain": failure.toolchain,
        "error": storable(failure.error),
        "log_path": failure.log_path,
        "failed_at": failure.failed_at,
        "expires_at": failure.expires_at,
    }
    news = {name: values[name] for name in ("error", "log_path", "failed_at", "expires_at")}
    statement = (
        _insert(connection, build_failures)
        .values(values)
        .on_conflict_do_update(index_elements=["recipe", "method", "case_name", "rank", "toolchain"], set_=news)
    )
    return connection.execute(statement).rowcount


def reindex(connection: sa.Connection, new: Iterable[NewEntry], records: Iterable[BootRecord]) -> ReindexResult:
    """Make the database say what the given entries and records say."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("LOCK TABLE entries, warm_sets IN SHARE ROW EXCLUSIVE MODE")
    _SEEN.create(connection)
    added = kept = 0
    for chunk in chunks(new):
        seen = _insert(connection, _SEEN).on_conflict_do_nothing()
        connection.execute(seen, [{"manifest": entry.manifest} for entry in chunk])
        fresh = add_entries(connection, chunk)
        added += fresh
        kept += len({entry.manifest for entry in chunk}) - fresh
    connection.execute(sa.delete(warm_sets))
    gone = ~sa.exists().where(_SEEN.c.manifest == entries.c.manifest)
    removed = connection.execute(sa.delete(entries).where(gone)).rowcount
    _SEEN.drop(connection)
    restored, incomplete = _restore_warm_sets(connection, records)
    connection.execute(_NAME_RECIPES)
    return ReindexResult(added, removed, kept, restored, tuple(incomplete))


def _restore_warm_sets(connection: sa.Connection, records: Iterable[BootRecord]) -> tuple[int, list[str]]:
    restored = 0
    incomplete: list[str] = []
    for record in records:
        last = boot_sequences.c.sequence
        floor = _insert(connection, boot_sequences).values(recipe_digest=record.recipe_digest, sequence=record.sequence)
        connection.execute(
            floor.on_conflict_do_update(
                index_elements=["recipe_digest"],
                set_={"sequence": floor.excluded.sequence},
                where=last < floor.excluded.sequence,
            )
        )
        # The record has its newest set first; ids grow in the order of publishing.
        for content in reversed(record.sets):
            manifests = {member.manifest for member in content.members}
            rows = [
                row
                for chunk in chunks(sorted(manifests))
                for row in connection.execute(
                    sa.select(entries.c.id, entries.c.state).where(entries.c.manifest.in_(chunk))
                )
            ]
            if len(rows) != len(manifests):
                incomplete.append(content.warm_set)
                continue
            state = "ready" if all(row.state == "ready" for row in rows) else "invalid"
            new = NewWarmSet(record.recipe, record.recipe_digest, content)
            add_warm_set(connection, new, [row.id for row in rows], record.sequence, state)
            restored += 1
    return restored, incomplete


def _entry_values(entry: NewEntry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "manifest": entry.manifest,
        "recipe": entry.recipe,
        "recipe_digest": entry.recipe_digest,
        "method": entry.method,
        "case_name": entry.case,
        "rank": entry.rank,
        "world_size": entry.world_size,
        "state": entry.state,
        "state_reason": entry.state_reason,
        "size_bytes": sum(file.size_bytes for file in entry.files),
        "cold_seconds": entry.cold_seconds,
        "warm_seconds": entry.warm_seconds,
        "created_at": entry.created_at,
        "last_used_at": None,
        "pinned": False,
        "evidence": entry.evidence,
        "model": digest_of(entry.parts["model"]) if "model" in entry.parts else None,
    }


def _file_values(entry_id: int, entry: NewEntry) -> Iterator[dict[str, Any]]:
    for file in entry.files:
        yield {
            "entry_id": entry_id,
            "path": file.path,
            "digest": file.digest,
            "size_bytes": file.size_bytes,
            "mode": file.mode,
        }
