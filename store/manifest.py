"""The manifest database: everything that is asked of it.

Owns publishing a build, finding the entries of a request line, invalidating, pinning, pruning, rebuilding. The database
is an index over entry manifests and boot records in the store's files, which are the truth; boots never read it. Its
rows are described in store/manifest_rows.py, and what a transaction changes in store/manifest_changes.py. Files are
neither read nor written here.

Newest means created last, by the manifest's own time, so that a rebuilt database answers as the old one did.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import sqlalchemy as sa

from cachectl.errors import ConfigError, ManifestConflictError, ManifestError
from cachectl.schemas.boot import ArtifactFile, BootRecord
from cachectl.schemas.canonical import DIGEST_PREFIX
from cachectl.schemas.tables import build_failures, entries, entry_files
from cachectl.store import engine as database_engine
from cachectl.store import manifest_changes as changes
from cachectl.store.manifest_queries import (
    ENTRIES,
    FAILURES,
    chunks,
    entry_row,
    equal,
    named,
    read_stats,
    read_warm_sets,
)
from cachectl.store.manifest_rows import (
    EntryRow,
    FailureRow,
    NewEntry,
    NewWarmSet,
    ReindexResult,
    Stats,
    WarmSetRow,
)

__all__ = ["ManifestRepo"]

_Result = TypeVar("_Result")
_ATTEMPTS = 6
_CANDIDATES_SHOWN = 5


class ManifestRepo:
    """The database over one store. A context manager: leaving it closes the connections.

    Safe for threads and between processes. Every method is one transaction, and raises ManifestError or StoreError
    where the database fails, StoreReadOnlyError where it was opened to be read.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    @classmethod
    def open(
        cls,
        database: str | Path,
        *,
        create: bool = False,
        read_only: bool = False,
        timeout_s: float = database_engine.BUSY_TIMEOUT_S,
    ) -> ManifestRepo:
        """Open a database whose schema is this program's.

        Args:
            database: a SQLite file or a PostgreSQL URL, as for `open_engine`.
            create: make the file and the tables where there are none; an older schema is not touched.
            read_only: never write, as for `open_engine`.
            timeout_s: how long to wait for another writer.

        Raises:
            SchemaBehindError: the schema is older, or there are no tables; run `cachectl db upgrade`.
            SchemaAheadError: the schema is newer.
            ManifestError: it can't be reached, is not a database, or is another program's.
        """
        engine = database_engine.open_engine(database, create=create, read_only=read_only, timeout_s=timeout_s)
        try:
            if create and database_engine.current_revision(engine) is None:
                with database_engine.reading(engine) as connection:
                    foreign = [name for name in sa.inspect(connection).get_table_names() if name != "alembic_version"]
                if foreign and database_engine.current_revision(engine) is None:
                    where = database_engine.location(engine)
                    raise ManifestError(
                        f"{where} is another program's database: it has the table {foreign[0]}",
                        hint="name an empty one",
                    )
                database_engine.upgrade(engine)
            database_engine.check_schema(engine)
        except BaseException:
            engine.dispose()
            raise
        return cls(engine)

    @property
    def engine(self) -> sa.Engine:
        """The engine below, for `upgrade` and `check_schema`."""
        return self._engine

    def close(self) -> None:
        """Close the connections; the last one out merges SQLite's log into the file."""
        self._engine.dispose()

    def __enter__(self) -> ManifestRepo:  # noqa: PYI034 (typing.Self came with Python 3.11)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Publishing

    def publish(self, new: Sequence[NewEntry], warm_set: NewWarmSet | None = None, *, after: int = 0) -> int:
        """Add entries and the warm set they complete, and hand out the sequence for the boot record to be written next.

        All or nothing. Idempotent: an entry whose manifest is known stays as it is, and a warm set of the same members
        gets the new sequence instead of a second row. Sequences of a recipe grow strictly, in the order of the commits,
        between processes and machines too. A recorded failure of what is published here is forgotten.

        Args:
            new: the entries; their manifests and blobs are in the store already.
            warm_set: its members may be entries published before. None publishes entries only.
            after: the sequence of the boot record on disk, 0 where there is none: the new one is greater, also when the
                database was lost and rebuilt since.

        Returns:
            The sequence; 0 where no warm set was given.

        Raises:
            ManifestConflictError: a member is unknown, has another key, or is not ready (any more).
        """

        def write(connection: sa.Connection) -> int:
            changes.add_entries(connection, new)
            changes.forget_failures_of(connection, new)
            if warm_set is None:
                return 0
            members = changes.members_to_publish(connection, warm_set.warm_set)
            sequence = changes.next_sequence(connection, warm_set.recipe_digest, after)
            changes.add_warm_set(connection, warm_set, members, sequence)
            return sequence

        return self._write(write)

    def next_sequence(self, recipe_digest: str, *, after: int = 0) -> int:
        """Hand out a sequence for a boot record without a new set, as invalidating writes; `after` as in `publish`."""
        return self._write(lambda connection: changes.next_sequence(connection, recipe_digest, after))

    # Reading entries

    def entries(
        self,
        *,
        recipe: str | None = None,
        method: str | None = None,
        case: str | None = None,
        rank: int | None = None,
        state: str | None = None,
        limit: int | None = None,
    ) -> Iterator[EntryRow]:
        """Yield the entries that fit what is given, newest first.

        One state of the database is seen until the iterator ends, and only a page of rows is held in memory.
        """
        query = ENTRIES.where(
            *equal(
                (entries.c.recipe, recipe),
                (entries.c.method, method),
                (entries.c.case_name, case),
                (entries.c.rank, rank),
                (entries.c.state, state),
            )
        ).limit(limit)
        for row in self._stream(query):
            yield entry_row(row)

    def entry(self, key_or_prefix: str) -> EntryRow:
        """Return the newest entry of a key, which its first digits name, with or without `sha256:`.

        Raises:
            ConfigError: no key begins so, or more than one.
        """
        digits = key_or_prefix.removeprefix(DIGEST_PREFIX)
        if not digits or len(digits) > 64 or not set(digits) <= set("0123456789abcdef"):
            raise ConfigError(
                f"{key_or_prefix!r} is no key nor the beginning of one", hint="run `cachectl ls` to see the keys"
            )
        # A range of the index, where LIKE would read them all: "g" follows the last hex digit.
        begin = DIGEST_PREFIX + digits
        matches = sa.select(entries.c.key).where(entries.c.key >= begin, entries.c.key < begin + "g").distinct()
        with database_engine.reading(self._engine) as connection:
            keys = connection.scalars(matches.order_by(entries.c.key).limit(_CANDIDATES_SHOWN + 1)).all()
            if not keys:
                raise ConfigError(f"no entry's key begins with {digits!r}", hint="run `cachectl ls` to see the keys")
            if len(keys) > 1:
                shown = ", ".join(keys[:_CANDIDATES_SHOWN]) + (", ..." if len(keys) > _CANDIDATES_SHOWN else "")
                raise ConfigError(f"{digits!r} begins more than one key: {shown}", hint="give more digits")
            return entry_row(connection.execute(ENTRIES.where(entries.c.key == keys[0]).limit(1)).one())

    def line(self, recipe: str, method: str, case: str, rank: int, *, limit: int | None = None) -> tuple[EntryRow, ...]:
        """Return the entries of one request line, of every state, newest first; their parts are in their manifests."""
        query = ENTRIES.where(
            entries.c.recipe == recipe,
            entries.c.method == method,
            entries.c.case_name == case,
            entries.c.rank == rank,
        ).limit(limit)
        with database_engine.reading(self._engine) as connection:
            return tuple(entry_row(row) for row in connection.execute(query))

    def entries_of_model(self, digest: str, *, limit: int) -> tuple[EntryRow, ...]:
        """Return the newest entries whose model part has this digest: a renamed recipe's, another world size's."""
        query = ENTRIES.where(entries.c.model == digest).limit(limit)
        with database_engine.reading(self._engine) as connection:
            return tuple(entry_row(row) for row in connection.execute(query))

    def files(self, entry: EntryRow) -> tuple[ArtifactFile, ...]:
        """Return an entry's files in the order of their paths."""
        query = sa.select(entry_files.c.path, entry_files.c.digest, entry_files.c.size_bytes, entry_files.c.mode).where(
            entry_files.c.entry_id == entry.id
        )
        with database_engine.reading(self._engine) as connection:
            return tuple(sorted((ArtifactFile(*row) for row in connection.execute(query)), key=lambda file: file.path))

    def entries_holding(self, digest: str) -> tuple[EntryRow, ...]:
        """Return the entries that have a file of this digest, newest first."""
        holders = sa.select(entry_files.c.entry_id).where(entry_files.c.digest == digest)
        with database_engine.reading(self._engine) as connection:
            return tuple(entry_row(row) for row in connection.execute(ENTRIES.where(entries.c.id.in_(holders))))

    def known_manifests(self) -> Iterator[tuple[str, str]]:
        """Yield (manifest, key) of every entry, in the order of the manifests."""
        for row in self._stream(sa.select(entries.c.manifest, entries.c.key).order_by(entries.c.manifest)):
            yield row.manifest, row.key

    def blob_digests(self) -> Iterator[str]:
        """Yield the digest of every file of every entry once, in order: what prune must keep."""
        for row in self._stream(sa.select(entry_files.c.digest).distinct().order_by(entry_files.c.digest)):
            yield row.digest

    # Reading warm sets

    def warm_sets(
        self,
        recipe_digest: str | None = None,
        *,
        keys: Collection[str] | None = None,
        state: str | None = None,
        limit: int | None = None,
    ) -> tuple[WarmSetRow, ...]:
        """Return warm sets with their members, newest first.

        Args:
            recipe_digest: only those of this recipe.
            keys: only those that hold one of these entries, by key or by manifest.
            state: only those in this state.
            limit: at most so many.
        """
        with database_engine.reading(self._engine) as connection:
            return read_warm_sets(connection, recipe_digest, keys, state, limit)

    # Changing entries

    def invalidate(self, keys: Collection[str], reason: str) -> int:
        """Mark entries invalid, and the warm sets that hold them; write the boot records first.

        Args:
            keys: keys, which stand for all their manifests, or manifests.
            reason: what the entry shows from now on.

        Returns:
            How many entries were not invalid before.
        """
        return self._write(lambda connection: changes.withdraw(connection, keys, "invalid", reason))

    def quarantine(self, keys: Collection[str], reason: str) -> int:
        """Mark ready entries as quarantined, and the warm sets that hold them invalid, until `release`."""
        return self._write(lambda connection: changes.withdraw(connection, keys, "quarantined", reason))

    def release(self, keys: Collection[str]) -> int:
        """Make quarantined entries ready again, and the warm sets that are whole again; return how many entries."""
        return self._write(lambda connection: changes.release(connection, keys))

    def pin(self, keys: Collection[str]) -> int:
        """Keep entries (by key or manifest) from being forgotten; return how many were not pinned before."""
        return self._update(keys, entries.c.pinned.is_(False), pinned=True)

    def unpin(self, keys: Collection[str]) -> int:
        """Let entries (by key or manifest) be forgotten again; return how many were pinned before."""
        return self._update(keys, entries.c.pinned.is_(True), pinned=False)

    def touch(self, keys: Collection[str], when: datetime) -> int:
        """Note that entries (by key or manifest) were used; an earlier time than the noted one changes nothing."""
        older = sa.or_(entries.c.last_used_at.is_(None), entries.c.last_used_at < when)
        return self._update(keys, older, last_used_at=when)

    def forget(self, manifests: Collection[str]) -> tuple[str, ...]:
        """Delete entries by manifest, and the warm sets that hold them; pinned ones stay.

        Call it before their manifests and blobs are deleted.

        Returns:
            The manifests of the entries that were deleted.
        """
        return self._write(lambda connection: changes.forget(connection, manifests))

    # Build failures

    def record_failure(self, failure: FailureRow) -> None:
        """Keep a failed build until it expires, in place of an older one of the same line and toolchain."""
        self._write(lambda connection: changes.record_failure(connection, failure))

    def failures(
        self,
        *,
        recipe: str | None = None,
        method: str | None = None,
        case: str | None = None,
        rank: int | None = None,
        toolchain: str | None = None,
        now: datetime | None = None,
    ) -> tuple[FailureRow, ...]:
        """Return failed builds, newest first; with `now`, only those that have not expired then."""
        query = FAILURES.where(
            *equal(
                (build_failures.c.recipe, recipe),
                (build_failures.c.method, method),
                (build_failures.c.case_name, case),
                (build_failures.c.rank, rank),
                (build_failures.c.toolchain, toolchain),
            )
        )
        if now is not None:
            query = query.where(build_failures.c.expires_at > now)
        with database_engine.reading(self._engine) as connection:
            return tuple(FailureRow(*row) for row in connection.execute(query))

    def forget_expired_failures(self, now: datetime) -> int:
        """Delete the failures that have expired at `now`; return how many."""
        statement = sa.delete(build_failures).where(build_failures.c.expires_at <= now)
        return self._write(lambda connection: connection.execute(statement).rowcount)

    # The whole database

    def reindex(self, new: Iterable[NewEntry], records: Iterable[BootRecord]) -> ReindexResult:
        """Make the database say what the store's files say, in one transaction.

        An entry that is known keeps its state, pin and last use; one whose manifest is not among `new` goes. All warm
        sets are taken from the boot records again. Sequences never fall. Both iterables are consumed inside the
        transaction and not kept in memory, so a publish that waits meanwhile adds its rows afterwards and can't be
        taken for a leftover; its writer may time out and has to run again.

        Args:
            new: all entries whose manifests are in the store.
            records: all boot records in the store.
        """
        with database_engine.writing(self._engine) as connection:
            return changes.reindex(connection, new, records)

    def stats(self) -> Stats:
        """Return counts over the whole database."""
        with database_engine.reading(self._engine) as connection:
            return read_stats(connection)

    # Inside

    def _write(self, write: Callable[[sa.Connection], _Result]) -> _Result:
        # PostgreSQL ends one of two transactions that wait for each other; run again it finds the way free.
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with database_engine.writing(self._engine) as connection:
                    return write(connection)
            except ManifestConflictError as error:
                if attempt == _ATTEMPTS or not database_engine.is_retryable(error):
                    raise
                time.sleep(random.uniform(0.01, 0.05) * attempt)
        raise AssertionError("the last attempt returns or raises")

    def _stream(self, query: sa.Select[Any]) -> Iterator[Any]:
        with (
            database_engine.reading(self._engine) as connection,
            connection.execution_options(yield_per=1000).execute(query) as rows,
        ):
            yield from rows

    def _update(self, keys: Collection[str], where: sa.ColumnElement[bool], **values: object) -> int:
        def write(connection: sa.Connection) -> int:
            return sum(
                connection.execute(sa.update(entries).where(*named(chunk), where).values(**values)).rowcount
                for chunk in chunks(keys)
            )

        return self._write(write)
