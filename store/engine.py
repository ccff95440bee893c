"""Opens the database over the store, keeps its schema, and turns database errors into cachectl's own.

Owns how SQLite and PostgreSQL are opened, the migration lock, and the one place where SQLAlchemy and driver errors are
wrapped. It holds no query about entries; those are in store/manifest*.py. Nothing is opened or created at import time,
and boots never come here.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

import cachectl.migrations
from cachectl.errors import (
    CachectlError,
    ConfigError,
    EnvironmentFault,
    ManifestConflictError,
    ManifestError,
    SchemaAheadError,
    SchemaBehindError,
    StoreError,
    StoreLockTimeoutError,
    StoreReadOnlyError,
)
from cachectl.schemas.tables import SCHEMA_REVISION

if TYPE_CHECKING:
    from alembic.config import Config

__all__ = [
    "check_schema",
    "current_revision",
    "database_errors",
    "file_system_type",
    "is_retryable",
    "location",
    "migrating",
    "open_engine",
    "reading",
    "upgrade",
    "writing",
]

# Writers come many at a time, ranks and shards; one of them may be stopped for seconds on a machine out of memory.
BUSY_TIMEOUT_S = 30.0
_MIGRATION_TIMEOUT_S = 60.0
# `INSERT ... RETURNING` came with 3.35; the sqlite3 of a distribution's Python may be older than Python itself.
_MIN_SQLITE = (3, 35, 0)
_WRITES = "cachectl_writes"
_TIMEOUT = "cachectl_timeout_s"
# One number for all of cachectl in a PostgreSQL database: whoever migrates holds it (pg_advisory_xact_lock).
_MIGRATION_LOCK = 0x6361636865_63746C
# WAL keeps its index in memory shared through the file, so every process must sit on the same kernel
# (https://sqlite.org/wal.html). These are files of another machine.
_NETWORK_TYPES = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs", "virtiofs")
)
# A FUSE file system is mostly a remote one (s3fs, sshfs, juicefs, ceph-fuse). Rootless containers' own layer is not.
_LOCAL_FUSE_TYPES = frozenset({"fuse.fuse-overlayfs"})


def open_engine(
    database: str | Path, *, create: bool = False, read_only: bool = False, timeout_s: float = BUSY_TIMEOUT_S
) -> sa.Engine:
    """Return an engine for a database; connections are made when first used, and `reading` and `writing` use them.

    SQLite runs in WAL mode with foreign keys, and with synchronous=FULL: a boot record is written after the commit and
    fsynced, and with NORMAL a power cut could lose the commit under it, so that the next publish would hand out a
    sequence that nodes have already seen.

    Args:
        database: a SQLite file (a path or `sqlite:///path`), or a `postgresql://` URL.
        create: make the SQLite file where there is none; its folder must exist. `upgrade` makes the tables.
        read_only: change nothing; the last one out still merges SQLite's log, where this user may. A SQLite file in a
            folder that can't be written is opened as immutable: nothing locks it, and it must not be written by others
            meanwhile.
        timeout_s: how long to wait for another writer.

    Raises:
        ConfigError: a URL of another kind of database, or one that can't be read.
        ManifestError: there is no such SQLite file.
        StoreError: the file lies where WAL can't work (a network file system).
        StoreReadOnlyError: it is to be written, and this user may not.
        EnvironmentFault: this Python's SQLite is too old.
    """
    path = _sqlite_path(database)
    if path is None:
        return _open_postgresql(str(database), read_only, timeout_s)
    return _open_sqlite(path, create, read_only, timeout_s)


def location(engine: sa.Engine) -> str:
    """Return where an engine's database is, for messages: a path, or a URL without its password."""
    if engine.dialect.name == "sqlite":
        return str(engine.url.database)
    return engine.url.set(drivername="postgresql").render_as_string(hide_password=True)


@contextmanager
def reading(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Give a connection in a transaction that sees one state of the database and holds up no writer."""
    with database_errors(engine), engine.connect() as connection, connection.begin():
        yield connection


@contextmanager
def writing(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Give a connection in a transaction that is committed at the end, or rolled back whole.

    On SQLite the write lock is taken at the start (BEGIN IMMEDIATE): a transaction that reads first and asks for the
    lock later fails at once when another has written in between, however long it would have waited.
    """
    with database_errors(engine), engine.execution_options(**{_WRITES: True}).begin() as connection:
        yield connection


@contextmanager
def database_errors(engine: sa.Engine) -> Iterator[None]:
    """Turn SQLAlchemy's and the drivers' errors inside into cachectl's, each with one clear line."""
    try:
        yield
    except SQLAlchemyError as error:
        raise _translated(engine, error) from error


def is_retryable(error: BaseException) -> bool:
    """Say whether a transaction that ended in `error` may succeed when run again (PostgreSQL: 40001, 40P01)."""
    cause = error.__cause__
    return isinstance(cause, DBAPIError) and getattr(cause.orig, "sqlstate", None) in ("40001", "40P01")


def current_revision(engine: sa.Engine) -> str | None:
    """Return the revision a database's schema is at; None where no cachectl has made tables yet."""
    with reading(engine) as connection:
        if not sa.inspect(connection).has_table("alembic_version"):
            return None
        revision = connection.scalar(sa.text("SELECT version_num FROM alembic_version"))
        return None if revision is None else str(revision)


def check_schema(engine: sa.Engine) -> None:
    """Return if the database has exactly this program's schema.

    Raises:
        SchemaBehindError: older, or without tables; `cachectl db upgrade` mends it.
        SchemaAheadError: written by a newer cachectl, which this one must not touch.
    """
    current = current_revision(engine)
    if current == SCHEMA_REVISION:
        return
    if current is None or current in _known_revisions():
        found = "has no tables yet" if current is None else f"has the schema {current}"
        raise SchemaBehindError(
            f"the database {location(engine)} {found}, this program works with {SCHEMA_REVISION}",
            current=current,
            head=SCHEMA_REVISION,
            hint="run `cachectl db upgrade`",
        )
    raise _ahead(engine, current)


def upgrade(engine: sa.Engine) -> None:
    """Bring the database to this program's schema, making the tables where there are none.

    One transaction: a crash leaves the schema as it was. Safe when several processes do it at once: one migrates, the
    others wait and find it done. A SQLite file becomes smaller where that left much of it free.

    Raises:
        SchemaAheadError: the database is newer than this program.
    """
    # Imported here: it takes longer to load than most commands to run, and an up-to-date database does not need it.
    from alembic import command

    with migrating(engine) as config:
        command.upgrade(config, "head")
    if engine.dialect.name == "sqlite":
        _give_back_pages(engine)


@contextmanager
def migrating(engine: sa.Engine) -> Iterator[Config]:
    """Hold the migration lock and give Alembic's configuration for the connection that holds it.

    Everything inside is one transaction. On SQLite foreign keys are off meanwhile, because rebuilding a table drops the
    old one and ON DELETE CASCADE would take its children; they are checked before the commit.

    Raises:
        SchemaAheadError: the database holds a revision this program does not know.
        ManifestError: a revision can't be run, or leaves rows without what they refer to.
    """
    from alembic.config import Config
    from alembic.util.exc import CommandError

    config = Config()
    # Config interpolates like an ini file: a percent sign in the path has to be doubled.
    config.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with database_errors(engine), engine.execution_options(**{_WRITES: True}).connect() as connection:
        driver: Any = connection.connection.driver_connection
        sqlite = engine.dialect.name == "sqlite"
        if sqlite:
            # Neither can be changed inside a transaction, so both go around SQLAlchemy's.
            driver.execute("PRAGMA foreign_keys=OFF")
            driver.execute(f"PRAGMA busy_timeout={_MIGRATION_TIMEOUT_S * 1000:.0f}")
        try:
            with connection.begin():
                if not sqlite:
                    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_MIGRATION_TIMEOUT_S:.0f}s'")
                    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
                _refuse_unknown_revision(engine, connection)
                config.attributes["connection"] = connection
                try:
                    yield config
                except CommandError as error:
                    raise ManifestError(f"the database {location(engine)} can't be migrated: {error}") from error
                if sqlite:
                    _refuse_orphans(engine, connection)
        finally:
            if sqlite:
                driver.execute("PRAGMA foreign_keys=ON")
                driver.execute(f"PRAGMA busy_timeout={_timeout_s(engine) * 1000:.0f}")


def file_system_type(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """Return the type of the file system that holds `path` (which need not exist); None where nobody can tell.

    Args:
        path: an absolute path without symbolic links.
        mounts: a table in the form of fstab(5), as Linux shows it.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    kind: str | None = None
    longest = -1
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        # Blanks, tabs, line breaks and backslashes stand as octal escapes.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1])
        # Of two mounts on one place the later hides the earlier.
        if path.is_relative_to(point) and len(point) >= longest:
            kind, longest = fields[2], len(point)
    return kind


def _sqlite_path(database: str | Path) -> Path | None:
    if isinstance(database, Path) or "://" not in database:
        return Path(database)
    try:
        url = sa.make_url(database)
    except ArgumentError as error:
        raise ConfigError(
            f"the database URL {_without_password(database)!r} can't be read",
            hint="write a path or postgresql://user@host/name",
        ) from error
    if url.get_backend_name() == "sqlite" and url.database and url.database != ":memory:":
        return Path(url.database)
    if url.get_backend_name() in ("postgresql", "postgres"):
        return None
    raise ConfigError(
        f"no database can be kept in {_without_password(database)!r}",
        hint="write the path of a SQLite file or a postgresql:// URL",
    )


def _without_password(url: str) -> str:
    return re.sub(r"(://[^:/@]*):.*@", r"\1:***@", url)


def _open_sqlite(path: Path, create: bool, read_only: bool, timeout_s: float) -> sa.Engine:
    if sqlite3.sqlite_version_info < _MIN_SQLITE:
        wanted = ".".join(str(number) for number in _MIN_SQLITE)
        raise EnvironmentFault(
            f"this Python has SQLite {sqlite3.sqlite_version}, {wanted} is needed",
            hint="use a Python with a newer SQLite, or a PostgreSQL database",
        )
    path = path.resolve()
    kind = file_system_type(path)
    if kind is not None and _is_remote(kind):
        raise StoreError(
            f"the database {path} would lie on a {kind} file system, where SQLite's WAL mode loses or tears writes",
            hint="keep it on a local disk, or use a PostgreSQL database",
        )
    if path.is_dir():
        raise ManifestError(f"the database {path} is a folder", hint="name the file in it")
    if not path.exists():
        if not path.parent.is_dir():
            raise ManifestError(f"there is no folder {path.parent} for a database", hint="run `cachectl init`")
        if read_only or not create:
            raise ManifestError(
                f"there is no database {path}",
                hint="run `cachectl init`, or `cachectl db reindex` where the store holds entries already",
            )
    if not read_only and not _is_writable(path):
        raise StoreReadOnlyError(f"the database {path} can't be written by this user (uid {os.geteuid()})")

    def connect() -> sqlite3.Connection:
        return _connect_sqlite(path, create, read_only, timeout_s)

    engine = sa.create_engine(
        sa.URL.create("sqlite", database=str(path)),
        creator=connect,
        poolclass=QueuePool,
        execution_options={_TIMEOUT: timeout_s},
    )
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _is_remote(kind: str) -> bool:
    return kind in _NETWORK_TYPES or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE_TYPES)


def _is_writable(path: Path) -> bool:
    return os.access(path.parent, os.W_OK) and (not path.exists() or os.access(path, os.W_OK))


def _connect_sqlite(path: Path, create: bool, read_only: bool, timeout_s: float) -> sqlite3.Connection:
    # Whoever closes the database last merges the log and deletes it, but not through mode=ro: a log of any size would
    # stay behind a reader. So a reader who may write asks SQLite to let no statement do it instead.
    only_queries = read_only and _is_writable(path)
    if read_only and not only_queries:
        mode = "mode=ro&immutable=1" if _must_be_immutable(path) else "mode=ro"
    else:
        mode = "mode=rwc" if create and not read_only else "mode=rw"
    # isolation_level None: Python's sqlite3 opens no transaction of its own, so that ours can begin as we say.
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?{mode}", uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA synchronous=FULL")
        if only_queries:
            connection.execute("PRAGMA query_only=ON")
        if not read_only:
            _set_wal_mode(connection, path, timeout_s)
    except BaseException:
        connection.close()
        raise
    return connection


def _must_be_immutable(path: Path) -> bool:
    # A WAL database needs its -shm file, which SQLite makes in the folder. Where it can't, an open writer's own may do.
    if os.access(path.parent, os.W_OK):
        return False
    wal, shared = (path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))
    if not wal.exists() or wal.stat().st_size == 0:
        return True
    if shared.exists():
        return False
    raise StoreReadOnlyError(
        f"the database {path} has unmerged writes in {wal.name}, and its folder can't be written by this user",
        hint="open it once as its owner, or copy the folder",
    )


def _set_wal_mode(connection: sqlite3.Connection, path: Path, timeout_s: float) -> None:
    # The mode is kept in the file. Setting it takes an exclusive lock, for which SQLite does not always wait.
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
            if mode != "wal":
                (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
            break
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    if mode != "wal":
        raise StoreError(
            f"SQLite can't use WAL mode for {path} (it stays in {mode!r} mode)",
            hint="keep the database on a local disk, or use a PostgreSQL database",
        )


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _open_postgresql(database: str, read_only: bool, timeout_s: float) -> sa.Engine:
    try:
        engine = sa.create_engine(
            sa.make_url(database).set(drivername="postgresql+psycopg"),
            pool_pre_ping=True,
            connect_args={"connect_timeout": max(2, round(timeout_s)), "application_name": "cachectl"},
            execution_options={_TIMEOUT: timeout_s},
        )
    except ImportError as error:
        raise EnvironmentFault(
            "a PostgreSQL database needs psycopg, which is not installed", hint="run `pip install 'psycopg[binary]'`"
        ) from error

    def set_session(connection: Any, _record: object) -> None:
        with closing(connection.cursor()) as cursor:
            cursor.execute(f"SET lock_timeout = {round(timeout_s * 1000)}")
            cursor.execute("SET TIME ZONE 'UTC'")
            if read_only:
                cursor.execute("SET default_transaction_read_only = on")
        connection.commit()

    sa.event.listen(engine, "connect", set_session)
    return engine


def _timeout_s(engine: sa.Engine) -> float:
    return float(engine.get_execution_options()[_TIMEOUT])


def _scripts() -> Path:
    return Path(str(cachectl.migrations.__file__)).parent


def _known_revisions() -> frozenset[str]:
    from alembic.script import ScriptDirectory

    return frozenset(script.revision for script in ScriptDirectory(str(_scripts())).walk_revisions())


def _refuse_unknown_revision(engine: sa.Engine, connection: sa.Connection) -> None:
    from alembic.runtime.migration import MigrationContext

    for revision in MigrationContext.configure(connection).get_current_heads():
        if revision not in _known_revisions():
            raise _ahead(engine, revision)


def _ahead(engine: sa.Engine, current: str) -> SchemaAheadError:
    return SchemaAheadError(
        f"the database {location(engine)} has the schema {current}, which this program does not know (its own is"
        f" {SCHEMA_REVISION})",
        current=current,
        hint="use the cachectl that wrote it, or a newer one",
    )


def _give_back_pages(engine: sa.Engine) -> None:
    with database_errors(engine), engine.connect() as connection:
        # VACUUM can't run inside a transaction, so this goes around SQLAlchemy's.
        driver: Any = connection.connection.driver_connection
        (free,), (pages,) = (driver.execute(f"PRAGMA {name}").fetchone() for name in ("freelist_count", "page_count"))
        if 4 * free > pages:
            # Another writer, or no room for the copy: the pages stay in the file, and later rows take them.
            with suppress(sqlite3.OperationalError):
                driver.execute("VACUUM")


def _refuse_orphans(engine: sa.Engine, connection: sa.Connection) -> None:
    orphans = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
    if orphans:
        tables = ", ".join(sorted({str(orphan[0]) for orphan in orphans}))
        raise ManifestError(
            f"migrating {location(engine)} would leave {len(orphans)} rows in {tables} without what they refer to",
            hint="nothing was changed; move the database away and run `cachectl db reindex`",
        )


def _translated(engine: sa.Engine, error: SQLAlchemyError) -> CachectlError:
    origin = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(origin, sqlite3.Error):
        return _sqlite_error(engine, str(origin))
    text = (str(origin).strip().splitlines() or [type(origin).__name__])[0]
    if isinstance(error, DBAPIError):
        return _postgresql_error(engine, getattr(origin, "sqlstate", None), text)
    return ManifestError(f"the database {location(engine)} failed: {text}")


def _sqlite_error(engine: sa.Engine, text: str) -> CachectlError:
    # By text, since sqlite3 tells the error code only from Python 3.11 on; these texts are SQLite's own constants.
    path = Path(location(engine))
    rebuild = "move it away and run `cachectl db reindex`"
    if "locked" in text:
        return StoreLockTimeoutError(
            f"the database {path} is locked by another process for more than {_timeout_s(engine):g} s",
            lock_path=path,
            timeout_s=_timeout_s(engine),
            hint="run it again when the other cachectl command is done",
        )
    if "disk is full" in text:
        return StoreError(f"no space left for the database {path}", hint="free space there; nothing was published")
    if "not a database" in text:
        return ManifestError(f"{path} is not a SQLite database", hint=rebuild)
    if "malformed" in text:
        return ManifestError(f"the database {path} is damaged", hint=rebuild)
    if "readonly" in text:
        return StoreReadOnlyError(f"the database {path} is open for reading only")
    if "unable to open" in text:
        return StoreError(f"the database {path} can't be opened", hint="check that this user may write its folder")
    if "no such table" in text or "no such column" in text:
        return ManifestError(f"the database {path} lacks a table or column: {text}", hint="run `cachectl db upgrade`")
    if "constraint failed" in text:
        return ManifestConflictError(f"the database {path} refuses a row: {text}")
    return ManifestError(f"the database {path} failed: {text}")


def _postgresql_error(engine: sa.Engine, state: str | None, text: str) -> CachectlError:
    where = location(engine)
    if state in ("40001", "40P01"):
        return ManifestConflictError(f"another writer won a race in the database {where}: {text}", hint="run it again")
    if state == "55P03":
        return ManifestConflictError(
            f"rows of the database {where} are locked by another process for more than {_timeout_s(engine):g} s",
            hint="run it again when the other cachectl command is done",
        )
    if state is not None and state.startswith("23"):
        return ManifestConflictError(f"the database {where} refuses a row: {text}")
    if state == "53100":
        return StoreError(f"no space left for the database {where}", hint="free space on its server")
    if state == "25006":
        return StoreReadOnlyError(f"the database {where} is open for reading only")
    if state in ("42P01", "42703"):
        return ManifestError(f"the database {where} lacks a table or column: {text}", hint="run `cachectl db upgrade`")
    if state is None:
        return ManifestError(f"the database {where} can't be reached: {text}", hint="check the server and the URL")
    return ManifestError(f"the database {where} failed: {text} (SQLSTATE {state})")
