"""The revisions: they lead to exactly the tables the program works with, and back, and keep what a database holds."""

from __future__ import annotations

import sqlite3
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy.schema import CreateIndex, CreateTable

import cachectl.migrations
from cachectl.errors import ManifestError, SchemaBehindError
from cachectl.schemas.canonical import digest_of
from cachectl.schemas.tables import SCHEMA_REVISION, metadata
from cachectl.store.engine import check_schema, migrating, open_engine, reading, upgrade, writing
from cachectl.store.manifest import ManifestRepo
from tests.store.manifest_samples import RECIPE_DIGEST, new_entry, new_set

SCRIPTS = Path(str(cachectl.migrations.__file__)).parent
# One database for each revision there ever was, as SQL (sqlite3.Connection.iterdump), with what the test looks for. A
# new revision adds one, written by the program of that revision.
STORED = Path(__file__).parent / "databases"
REVISIONS = [script.revision for script in ScriptDirectory(str(SCRIPTS)).walk_revisions()]


@pytest.fixture
def engine(database: str) -> Iterator[sa.Engine]:
    """An engine for an up-to-date, empty database of each kind."""
    opened = open_engine(database, create=True)
    upgrade(opened)
    yield opened
    opened.dispose()


def _downgrade(engine: sa.Engine, revision: str) -> None:
    with migrating(engine) as config:
        command.downgrade(config, revision)


def _with_large_parts(path: Path) -> int:
    """Make a database of r0001 whose parts are nearly all of it; return its file's bytes."""
    with ManifestRepo.open(path, create=True) as repo:
        repo.publish([new_entry(str(number)) for number in range(50)])
        _downgrade(repo.engine, "r0001")
        with writing(repo.engine) as connection:
            connection.execute(sa.text("UPDATE entry_parts SET document = :text"), {"text": "x" * 10_000})
    return path.stat().st_size


def _shape(connection: sa.Connection) -> dict[str, Any]:
    """Return all that the database says of its own tables, but for the order of constraints."""
    inspector = sa.inspect(connection)
    shape = {}
    for table in sorted(set(inspector.get_table_names()) - {"alembic_version"}):
        shape[table] = {
            "columns": [{**column, "type": str(column["type"])} for column in inspector.get_columns(table)],
            "primary key": inspector.get_pk_constraint(table),
            "foreign keys": sorted(map(str, inspector.get_foreign_keys(table))),
            "unique": sorted(map(str, inspector.get_unique_constraints(table))),
            "check": sorted(map(str, inspector.get_check_constraints(table))),
            "indices": sorted(map(str, inspector.get_indexes(table))),
        }
    return shape


def test_versions_head_is_the_programs_revision() -> None:
    """The constant that spares loading Alembic names the newest revision, and there is one line of them."""
    assert [SCHEMA_REVISION] == list(ScriptDirectory(str(SCRIPTS)).get_heads())


def test_versions_import_nothing_of_ours() -> None:
    """A revision must mean the same for ever, so it may not follow the program's tables."""
    files = sorted((SCRIPTS / "versions").glob("r*.py"))

    assert len(REVISIONS) == len(files)
    assert [] == [path.name for path in files if "cachectl" in path.read_text(encoding="utf-8")]


def test_upgrade_schema_has_no_drift(engine: sa.Engine) -> None:
    """Alembic finds nothing to do between the migrated database and the tables."""
    with reading(engine) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})

        assert [] == compare_metadata(context, metadata)


def test_upgrade_schema_equals_the_tables_in_all_that_can_be_asked(engine: sa.Engine) -> None:
    """Constraints, their names and ON DELETE too, which Alembic does not compare."""
    with reading(engine) as connection:
        migrated = _shape(connection)
    _downgrade(engine, "base")
    with writing(engine) as connection:
        for table in metadata.sorted_tables:
            connection.execute(CreateTable(table))
            for index in table.indexes:
                connection.execute(CreateIndex(index))
    with reading(engine) as connection:
        declared = _shape(connection)

    assert set(metadata.tables) == set(migrated)
    assert declared == migrated


def test_downgrade_to_base_drops_all_and_can_be_upgraded_again(database: str) -> None:
    """Every revision goes back, with rows in its tables, and forth again."""
    with ManifestRepo.open(database, create=True) as repo:
        repo.publish([new_entry()], new_set(new_entry()))
        _downgrade(repo.engine, "base")
        with reading(repo.engine) as connection:
            assert ["alembic_version"] == sa.inspect(connection).get_table_names()
        with pytest.raises(SchemaBehindError):
            check_schema(repo.engine)

        upgrade(repo.engine)

        assert 1 == repo.publish([new_entry()], new_set(new_entry()))


@pytest.mark.parametrize("revision", REVISIONS)
def test_upgrade_stored_database_keeps_what_it_holds(tmp_path: Path, revision: str) -> None:
    """A database written at each past revision is upgraded, read and written."""
    path = tmp_path / "manifest.db"
    connection = sqlite3.connect(path)
    connection.executescript((STORED / f"{revision}.sql").read_text(encoding="utf-8"))
    connection.close()
    engine = open_engine(path)
    upgrade(engine)
    engine.dispose()

    with ManifestRepo.open(path) as repo:
        first, second = (new_entry("stored", rank=rank, world_size=2) for rank in range(2))
        assert {first.manifest: first.key, second.manifest: second.key} == dict(repo.known_manifests())
        assert first.files == repo.files(repo.entry(first.key))
        alike = repo.entries_of_model(digest_of(first.parts["model"]), limit=9)
        assert {first.key, second.key} == {row.key for row in alike}
        assert [new_set(first, second).warm_set] == [row.warm_set for row in repo.warm_sets(RECIPE_DIGEST)]
        assert [("quarantined", "died twice")] == [
            (row.state, row.state_reason) for row in repo.entries(state="quarantined")
        ]
        assert 1 == len(repo.failures())
        assert 2 == repo.next_sequence(RECIPE_DIGEST)


def test_upgrade_parts_leave_the_database_and_what_finds_entries_stays(database: str) -> None:
    """From r0001 on both kinds: the model's digest stays, the documents are the manifests' alone; back and forth."""
    new, bare = new_entry("a"), new_entry("bare", rank=1, parts={})
    with ManifestRepo.open(database, create=True) as repo:
        repo.publish([new, bare], new_set(new, bare))
        _downgrade(repo.engine, "r0001")
        with writing(repo.engine) as connection:
            rows = connection.execute(sa.text("SELECT entry_id, part, digest FROM entry_parts")).all()
            connection.execute(
                sa.text("INSERT INTO entry_parts VALUES (:entry, 'toolchain', :digest, '{}')"),
                {"entry": rows[0].entry_id, "digest": digest_of({})},
            )
        assert [("model", digest_of(new.parts["model"]))] == [(row.part, row.digest) for row in rows]

        upgrade(repo.engine)

        assert [new.key] == [row.key for row in repo.entries_of_model(digest_of(new.parts["model"]), limit=9)]
        assert [new_set(new, bare).warm_set] == [row.warm_set for row in repo.warm_sets(RECIPE_DIGEST)]
        with reading(repo.engine) as connection:
            assert "entry_parts" not in sa.inspect(connection).get_table_names()


def test_upgrade_file_of_sqlite_gives_its_free_pages_back(tmp_path: Path) -> None:
    """What a revision drops leaves the file too."""
    path = tmp_path / "manifest.db"
    large = _with_large_parts(path)
    engine = open_engine(path)
    upgrade(engine)
    engine.dispose()

    assert large > 500_000
    assert path.stat().st_size < large / 3
    with ManifestRepo.open(path) as repo:
        assert 50 == repo.stats().entries


def test_upgrade_beside_a_writer_leaves_the_free_pages_in_the_file(tmp_path: Path) -> None:
    """Who writes right after the migration is not waited for, and the upgrade is done all the same."""
    path = tmp_path / "manifest.db"
    large = _with_large_parts(path)
    engine = open_engine(path, timeout_s=0.1)
    other = sqlite3.connect(path, isolation_level=None)

    def write(_connection: object, _record: object) -> None:
        if not other.in_transaction:
            other.execute("BEGIN IMMEDIATE")

    sa.event.listen(engine, "checkin", write)
    upgrade(engine)
    sa.event.remove(engine, "checkin", write)
    check_schema(engine)
    assert other.in_transaction
    other.close()
    engine.dispose()

    assert path.stat().st_size >= large


def test_env_database_of_a_developer_is_migrated(tmp_path: Path) -> None:
    """Alembic's own command works with `-x database=URL`, to draft and check revisions."""
    config = _config("database=sqlite:///" + str(tmp_path / "draft.db"))
    command.upgrade(config, "head")
    command.check(config)
    engine = open_engine(tmp_path / "draft.db")

    check_schema(engine)
    engine.dispose()


def test_env_without_database_says_how_to_name_one() -> None:
    """Nothing is migrated by accident: a database has to be named."""
    with pytest.raises(ManifestError, match=r"cachectl db upgrade.*-x database=URL"):
        command.upgrade(_config(), "head")


def test_env_offline_mode_is_refused(tmp_path: Path) -> None:
    """SQL that is only printed would be run without the migration lock."""
    with pytest.raises(ManifestError, match="no database to migrate"):
        command.upgrade(_config("database=sqlite:///" + str(tmp_path / "draft.db")), "head", sql=True)


def test_script_template_draft_is_a_revision(tmp_path: Path) -> None:
    """A draft from the template is valid Python in the house's form, named as the others are."""
    scripts = tmp_path / "migrations"
    (scripts / "versions").mkdir(parents=True)
    for path in [*SCRIPTS.glob("*.*"), *SCRIPTS.glob("versions/*.py")]:
        (scripts / path.relative_to(SCRIPTS)).write_bytes(path.read_bytes())
    config = Config()
    config.set_main_option("script_location", str(scripts))
    config.set_main_option("path_separator", "os")
    command.revision(config, "Say who built", rev_id="r9999")
    draft = scripts / "versions" / "r9999_say_who_built.py"

    assert draft.read_text(encoding="utf-8").startswith('"""Say who built."""\n\nfrom __future__ import annotations\n')
    assert "r9999" == ScriptDirectory(str(scripts)).get_current_head()


def test_migrating_unknown_revision_is_a_manifest_error(engine: sa.Engine) -> None:
    """Alembic's own failures come out as ours."""
    with pytest.raises(ManifestError, match="can't be migrated") as raised:
        _downgrade(engine, "r4711")

    assert isinstance(raised.value.__cause__, CommandError)


def _config(*arguments: str) -> Config:
    # What `alembic -x ...` makes of its command line.
    config = Config(cmd_opts=Namespace(x=list(arguments)))
    config.set_main_option("script_location", str(SCRIPTS))
    config.set_main_option("path_separator", "os")
    return config
