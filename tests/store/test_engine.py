"""The database's engine: how it opens, what it refuses, the schema's lock and version, and its errors."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext

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
from cachectl.schemas.tables import SCHEMA_REVISION, boot_sequences
from cachectl.store import engine as database_engine
from cachectl.store.engine import (
    check_schema,
    current_revision,
    database_errors,
    file_system_type,
    location,
    migrating,
    open_engine,
    reading,
    upgrade,
    writing,
)
from cachectl.store.manifest import ManifestRepo
from tests.store.manifest_samples import new_entry

MOUNTS = """\
/dev/vda / ext4 rw 0 0
server:/share /srv/models nfs4 rw 0 0
/dev/vdb /srv/models/local xfs rw 0 0
server:/old /srv/with\\040blank nfs rw 0 0
bucket /srv/twice fuse.s3fs rw 0 0
/dev/vdc /srv/twice ext4 rw 0 0
"""

# Imports what is needed, then gives up root, if it is root: the checkout need not be readable by others.
UNPRIVILEGED = """
import os, sys
from cachectl.errors import CachectlError
from cachectl.store.manifest import ManifestRepo
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    with ManifestRepo.open(sys.argv[1], read_only=sys.argv[2] == "ro") as repo:
        print(*(row.method for row in repo.entries()))
except CachectlError as error:
    print(type(error).__name__, error)
"""

UPGRADE = """
import sys
from cachectl.store.engine import check_schema, open_engine, upgrade
engine = open_engine(sys.argv[1], create=True, timeout_s=200.0)
upgrade(engine)
check_schema(engine)
engine.dispose()
"""

UPGRADE_KILLED = """
import os, signal, sys
import sqlalchemy as sa
from cachectl.store.engine import open_engine, upgrade
engine = open_engine(sys.argv[1], create=True)
@sa.event.listens_for(engine, "after_cursor_execute")
def kill(connection, cursor, statement, *rest):
    if "CREATE TABLE warm_sets" in statement:
        os.kill(os.getpid(), signal.SIGKILL)
upgrade(engine)
"""


def _child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=200, check=False
    )


@pytest.fixture
def engine(database: str) -> Iterator[sa.Engine]:
    """An engine for an empty database of each kind."""
    opened = open_engine(database, create=True)
    yield opened
    opened.dispose()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, with a database that holds one entry; pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="cachectl-test-"))
    folder.chmod(0o755)
    with ManifestRepo.open(folder / "manifest.db", create=True) as repo:
        repo.publish([new_entry(method="main_decode")])
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("database", ["mysql://host/name", "sqlite://", "sqlite:///:memory:", "://", "what://"])
def test_open_engine_other_kind_of_database_is_a_config_error(database: str) -> None:
    """Only SQLite files and PostgreSQL are known; anything else is the caller's mistake."""
    with pytest.raises(ConfigError, match="database"):
        open_engine(database)


def test_open_engine_unknown_url_with_password_does_not_show_it() -> None:
    """A password in a URL stays out of the message."""
    with pytest.raises(ConfigError) as raised:
        open_engine("mysql://builder:hunter2@host/name")

    assert "hunter2" not in str(raised.value)
    assert "builder" in str(raised.value)


def test_open_engine_sqlite_sets_wal_foreign_keys_and_full_sync(tmp_path: Path) -> None:
    """Every connection waits half a minute, checks foreign keys, and syncs each commit of the log."""
    engine = open_engine(tmp_path / "manifest.db", create=True)
    with reading(engine) as connection:
        settings = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "foreign_keys", "synchronous", "busy_timeout")
        ]
    engine.dispose()

    assert ["wal", 1, 2, 30_000] == settings


def test_open_engine_path_with_url_characters_opens_that_file(tmp_path: Path) -> None:
    """Characters that mean something in a URI are part of the name."""
    path = tmp_path / "a?b#c%20d" / "manifest.db"
    path.parent.mkdir()
    with ManifestRepo.open(path, create=True):
        pass

    assert path.is_file()


def test_open_engine_missing_file_names_the_command_that_makes_it(tmp_path: Path) -> None:
    """Without `create` nothing is made."""
    with pytest.raises(ManifestError, match=r"no database .*cachectl init"):
        open_engine(tmp_path / "manifest.db")

    assert [] == list(tmp_path.iterdir())


def test_open_engine_missing_folder_is_a_manifest_error(tmp_path: Path) -> None:
    """The folder is the store's to make."""
    with pytest.raises(ManifestError, match="no folder"):
        open_engine(tmp_path / "store" / "manifest.db", create=True)


def test_open_engine_folder_as_database_is_a_manifest_error(tmp_path: Path) -> None:
    """A folder is not taken for a file."""
    with pytest.raises(ManifestError, match="is a folder"):
        open_engine(tmp_path)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/x", "ext4"),
        ("/srv/models/manifest.db", "nfs4"),
        ("/srv/models/local/manifest.db", "xfs"),
        ("/srv/models-of-others/x", "ext4"),
        ("/srv/with blank/x", "nfs"),
        ("/srv/twice/x", "ext4"),
    ],
)
def test_file_system_type_path_below_mounts_is_that_of_the_nearest(tmp_path: Path, path: str, kind: str) -> None:
    """The longest mount point wins, by whole steps, and of two on one place the later."""
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)

    assert kind == file_system_type(Path(path), mounts)


def test_file_system_type_no_table_is_unknown(tmp_path: Path) -> None:
    """Where the system shows no mounts nobody can tell."""
    assert file_system_type(tmp_path, tmp_path / "absent") is None


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "ceph", "lustre", "fuse.s3fs"])
def test_open_engine_network_file_system_is_refused(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """WAL needs one kernel under all processes, so a remote file system is refused before the file is made."""
    monkeypatch.setattr(database_engine, "file_system_type", lambda path: kind)

    with pytest.raises(StoreError, match=rf"{kind} file system.*PostgreSQL"):
        open_engine(tmp_path / "manifest.db", create=True)

    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["ext4", "overlay", "fuse.fuse-overlayfs", None])
def test_open_engine_local_file_system_is_taken(
    tmp_path: Path, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local and unknown file systems are taken, a rootless container's too."""
    monkeypatch.setattr(database_engine, "file_system_type", lambda path: kind)

    with ManifestRepo.open(tmp_path / "manifest.db", create=True) as repo:
        assert 0 == repo.stats().entries


def test_check_schema_garbage_file_is_a_manifest_error(tmp_path: Path) -> None:
    """A file that is no database is named as such, and left alone."""
    path = tmp_path / "manifest.db"
    path.write_bytes(b"this is not a database, whatever its name says. " * 100)
    before = path.read_bytes()
    engine = open_engine(path)

    with pytest.raises(ManifestError, match=r"not a SQLite database.*reindex"):
        check_schema(engine)

    assert before == path.read_bytes()


def test_check_schema_empty_database_is_behind(engine: sa.Engine) -> None:
    """Without tables the database is behind, and the hint names the upgrade."""
    with pytest.raises(SchemaBehindError, match=r"no tables.*cachectl db upgrade") as raised:
        check_schema(engine)

    assert (None, SCHEMA_REVISION) == (raised.value.current, raised.value.head)


def test_check_schema_older_revision_is_behind_until_upgraded(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revision that this program knows and that is not its own is behind."""
    upgrade(engine)
    check_schema(engine)
    monkeypatch.setattr(database_engine, "SCHEMA_REVISION", "r9999")

    with pytest.raises(SchemaBehindError, match=f"has the schema {SCHEMA_REVISION}, this program works with r9999"):
        check_schema(engine)


def test_check_schema_newer_revision_is_refused(engine: sa.Engine) -> None:
    """A revision nobody here knows is newer: neither used nor migrated."""
    upgrade(engine)
    with writing(engine) as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = 'r9999'"))

    for act in (check_schema, upgrade):
        with pytest.raises(SchemaAheadError, match="r9999, which this program does not know"):
            act(engine)
    assert "r9999" == current_revision(engine)


def test_upgrade_done_twice_changes_nothing(engine: sa.Engine) -> None:
    """Upgrading what is up to date is good, and keeps its rows."""
    upgrade(engine)
    with writing(engine) as connection:
        connection.execute(sa.insert(boot_sequences).values(recipe_digest="sha256:" + 64 * "0", sequence=7))

    upgrade(engine)

    with reading(engine) as connection:
        assert 7 == connection.scalar(sa.select(boot_sequences.c.sequence))


def test_upgrade_by_several_processes_at_once_succeeds_in_all(database: str) -> None:
    """One process migrates, the others wait and find it done."""
    children = [
        subprocess.Popen([sys.executable, "-c", UPGRADE, database], stderr=subprocess.PIPE, text=True) for _ in range(4)
    ]
    ended = [(child.communicate(timeout=250)[1], child.returncode) for child in children]

    assert [("", 0)] * 4 == ended


def test_upgrade_killed_between_tables_leaves_none(tmp_path: Path) -> None:
    """The migration is one transaction: kill -9 in the middle leaves the schema as it was."""
    path = tmp_path / "manifest.db"
    ended = _child(UPGRADE_KILLED, str(path))
    assert -9 == ended.returncode, ended.stderr

    engine = open_engine(path)
    with reading(engine) as connection:
        assert [] == sa.inspect(connection).get_table_names()
    upgrade(engine)
    check_schema(engine)
    engine.dispose()


def test_migrating_rebuilt_table_keeps_its_children(tmp_path: Path) -> None:
    """SQLite rebuilds a table by dropping it, which must not take along what refers to it."""
    with ManifestRepo.open(tmp_path / "manifest.db", create=True) as repo:
        repo.publish([new_entry()])
        with migrating(repo.engine) as config:
            operations = Operations(MigrationContext.configure(config.attributes["connection"]))
            with operations.batch_alter_table("entries", recreate="always") as batch:
                batch.alter_column("rank", nullable=True)

        assert 2 == len(repo.files(next(repo.entries())))
        with writing(repo.engine) as connection:
            assert 1 == connection.exec_driver_sql("PRAGMA foreign_keys").scalar()


def test_migrating_that_leaves_orphans_is_undone(tmp_path: Path) -> None:
    """A migration that would leave rows without what they refer to is refused whole."""
    with ManifestRepo.open(tmp_path / "manifest.db", create=True) as repo:
        repo.publish([new_entry()])

        with pytest.raises(ManifestError, match="without what they refer to"), migrating(repo.engine) as config:
            config.attributes["connection"].execute(sa.text("DELETE FROM entries"))

        assert 1 == repo.stats().entries


def test_writing_while_another_writes_waits_for_it(tmp_path: Path) -> None:
    """A writer that holds the lock for 2 s delays another one, and does not fail it."""
    path = tmp_path / "manifest.db"
    with ManifestRepo.open(path, create=True, timeout_s=200.0) as repo:
        holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        holder.execute("BEGIN IMMEDIATE")
        commits = threading.Event()

        def commit() -> None:
            commits.set()
            holder.commit()

        release = threading.Timer(2.0, commit)
        release.start()
        repo.publish([new_entry()])
        waited = commits.is_set()
        release.join()
        holder.close()

        assert waited
        assert 1 == repo.stats().entries


def test_writing_while_another_writes_for_too_long_is_a_lock_timeout(tmp_path: Path) -> None:
    """After the time given the error says what is locked and for how long it was waited; reading goes on."""
    path = tmp_path / "manifest.db"
    with ManifestRepo.open(path, create=True, timeout_s=0.2) as repo:
        holder = sqlite3.connect(path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")

        with pytest.raises(StoreLockTimeoutError, match=r"manifest.db is locked .* 0.2 s; run it again") as raised:
            repo.publish([new_entry()])

        assert (path, 0.2) == (raised.value.lock_path, raised.value.timeout_s)
        assert 0 == repo.stats().entries
        holder.close()


def test_writing_without_space_is_a_store_error_and_writes_nothing(tmp_path: Path) -> None:
    """A full disk ends the transaction with one clear line."""
    with ManifestRepo.open(tmp_path / "manifest.db", create=True) as repo:
        with reading(repo.engine) as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        with writing(repo.engine) as connection:
            connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")

        with pytest.raises(StoreError, match="no space left for the database"):
            repo.publish([new_entry(recipe="x" * 100_000)])

        assert 0 == repo.stats().entries


def test_reading_damaged_file_is_a_manifest_error(tmp_path: Path) -> None:
    """A database whose pages were overwritten says so, and how to rebuild it."""
    path = tmp_path / "manifest.db"
    with ManifestRepo.open(path, create=True) as repo:
        repo.publish([new_entry(str(number)) for number in range(50)])
    data = bytearray(path.read_bytes())
    data[8192:] = b"\xa5" * (len(data) - 8192)
    path.write_bytes(data)

    with (
        pytest.raises(ManifestError, match=r"is damaged; .*reindex"),
        ManifestRepo.open(path, read_only=True) as repo,
    ):
        list(repo.entries())


def test_writing_constraint_broken_is_a_conflict(engine: sa.Engine) -> None:
    """A row that a constraint refuses is a conflict, on both kinds of database."""
    upgrade(engine)
    row = {"recipe_digest": "sha256:" + 64 * "0", "sequence": 1}

    with pytest.raises(ManifestConflictError, match="refuses a row"), writing(engine) as connection:
        connection.execute(sa.insert(boot_sequences).values([row, row]))


def test_database_errors_table_missing_names_the_upgrade(engine: sa.Engine) -> None:
    """A query on a table that is not there hints at the upgrade."""
    with pytest.raises(ManifestError, match="cachectl db upgrade"), reading(engine) as connection:
        connection.execute(sa.select(boot_sequences))


def test_database_errors_failure_of_sqlalchemy_itself_is_a_manifest_error(engine: sa.Engine) -> None:
    """What no driver raised is wrapped too."""
    with pytest.raises(ManifestError, match="the query was wrong"), database_errors(engine):
        raise sa.exc.InvalidRequestError("the query was wrong")


def test_open_read_only_refuses_to_write(database: str) -> None:
    """A database opened to be read answers, and refuses every write with the same error on both kinds."""
    with ManifestRepo.open(database, create=True) as repo:
        repo.publish([new_entry()])

    with ManifestRepo.open(database, read_only=True) as repo:
        assert 1 == repo.stats().entries
        with pytest.raises(StoreReadOnlyError, match="for reading only"):
            repo.pin([new_entry().key])


def test_open_read_only_in_unwritable_folder_reads(open_folder: Path) -> None:
    """Where SQLite can't make its own files a database at rest is read all the same."""
    open_folder.chmod(0o555)
    ended = _child(UNPRIVILEGED, str(open_folder / "manifest.db"), "ro")

    assert ("main_decode\n", "") == (ended.stdout, ended.stderr)


def test_open_read_only_beside_a_writer_sees_its_commits(open_folder: Path) -> None:
    """While its owner has the database open, another user reads the log too."""
    with ManifestRepo.open(open_folder / "manifest.db") as repo:
        repo.publish([new_entry(method="mtp_decode", minutes=1)])
        assert (open_folder / "manifest.db-wal").stat().st_size > 0
        open_folder.chmod(0o555)
        ended = _child(UNPRIVILEGED, str(open_folder / "manifest.db"), "ro")

    assert ("mtp_decode main_decode\n", "") == (ended.stdout, ended.stderr)


def test_open_read_only_last_one_out_merges_the_log(open_folder: Path) -> None:
    """A reader that outlasts the writer, or comes after a killed one, leaves the database's one file behind."""
    path = open_folder / "manifest.db"
    with ManifestRepo.open(path, read_only=True) as reader:
        before = reader.stats().entries
        with ManifestRepo.open(path) as writer:
            writer.publish([new_entry("b", minutes=1)])
        assert path.with_name("manifest.db-wal").stat().st_size > 0

    assert [path] == list(open_folder.iterdir())
    with ManifestRepo.open(path, read_only=True) as repo:
        assert before + 1 == repo.stats().entries
    assert [path] == list(open_folder.iterdir())


def test_open_read_only_with_log_left_behind_is_refused(open_folder: Path) -> None:
    """A log that nobody can merge here holds commits: leaving it out would show an older state as the present one."""
    copy = open_folder / "copy"
    copy.mkdir()
    with ManifestRepo.open(open_folder / "manifest.db") as repo:
        repo.publish([new_entry("b")])
        for name in ("manifest.db", "manifest.db-wal"):
            shutil.copy(open_folder / name, copy / name)
    copy.chmod(0o555)
    ended = _child(UNPRIVILEGED, str(copy / "manifest.db"), "ro")

    assert ended.stdout.startswith("StoreReadOnlyError")
    assert "unmerged writes in manifest.db-wal" in ended.stdout


def test_open_to_write_without_permission_is_read_only(open_folder: Path) -> None:
    """A user who may not write is told so at once."""
    open_folder.chmod(0o555)
    ended = _child(UNPRIVILEGED, str(open_folder / "manifest.db"), "rw")

    assert ended.stdout.startswith("StoreReadOnlyError")
    assert "can't be written by this user" in ended.stdout


def test_open_engine_without_psycopg_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL's driver is an extra; its absence is a fault of the environment."""
    monkeypatch.setitem(sys.modules, "psycopg", None)

    with pytest.raises(EnvironmentFault, match=r"psycopg.*pip install"):
        open_engine("postgresql://host/name")


def test_open_engine_old_sqlite_is_an_environment_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SQLite that can't do what the queries need is refused by its version."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 31, 1))

    with pytest.raises(EnvironmentFault, match=r"3\.35\.0 is needed"):
        open_engine(tmp_path / "manifest.db", create=True)


def test_check_schema_server_away_names_the_server_without_password(tmp_path: Path) -> None:
    """A server that does not answer is one line with its address; the password is not in it."""
    engine = open_engine(f"postgresql://builder:hunter2@/cachectl?host={tmp_path}")

    with pytest.raises(ManifestError, match="can't be reached") as raised:
        check_schema(engine)

    assert "hunter2" not in str(raised.value)
    assert "\n" not in str(raised.value)
    assert location(engine).startswith("postgresql://builder:***@")


@pytest.mark.postgres
def test_writing_row_locked_for_too_long_is_a_conflict(postgres_url: str) -> None:
    """On PostgreSQL too a writer waits only so long."""
    with ManifestRepo.open(postgres_url, create=True) as holder, ManifestRepo.open(postgres_url, timeout_s=0.2) as repo:
        holder.publish([new_entry()])
        with writing(holder.engine) as connection:
            connection.execute(sa.text("UPDATE entries SET pinned = true"))
            with pytest.raises(ManifestConflictError, match=r"locked by another process for more than 0.2 s"):
                repo.invalidate([new_entry().key], "stale")


def test_open_failed_leaves_no_connection(tmp_path: Path) -> None:
    """A database that was refused is not kept open: its file can be replaced at once."""
    path = tmp_path / "manifest.db"
    engine = open_engine(path, create=True)
    current_revision(engine)
    engine.dispose()

    with pytest.raises(CachectlError):
        ManifestRepo.open(path)

    assert [str(path)] == [str(entry) for entry in tmp_path.iterdir()]
    assert not [link for link in Path("/proc/self/fd").iterdir() if str(path) in _target(link)]


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
