"""init, db, ls, show, verify, plan, inspect and doctor on real stores: what they say and how they exit."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cachectl.schemas.report import DoctorReport, LsReport, PlanReport, VerifyReport

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# Verbs that read a store, with what they need to get that far.
READERS = [("ls",), ("show", "00"), ("inspect", "00"), ("verify",), ("db", "check"), ("db", "upgrade")]


@pytest.fixture
def made(cachectl: Run, store: Path) -> Path:
    """A store that `cachectl init` made."""
    assert 0 == cachectl("init").returncode
    return store


@pytest.fixture
def recipe(repository: Path) -> str:
    """The example's recipe, for the simulated device."""
    return str(repository / "examples" / "tiny-decoder" / "recipe.yaml")


def test_init_makes_a_store_once(cachectl: Run, store: Path) -> None:
    """The first init makes the store, the second finds it."""
    first, second = cachectl("init", "--json"), cachectl("init", "--json")

    assert {"store": str(store), "created": True} == json.loads(first.stdout)
    assert {"store": str(store), "created": False} == json.loads(second.stdout)
    assert (0, 0) == (first.returncode, second.returncode)


def test_init_option_wins_over_the_variable(cachectl: Run, store: Path, tmp_path: Path) -> None:
    """--store says where, whatever CACHECTL_STORE says."""
    result = cachectl("init", "--store", str(tmp_path / "other"))

    assert f"made the store {tmp_path / 'other'}\n" == result.stdout
    assert not store.exists()


def test_init_without_store_uses_the_user_data_dir(cachectl: Run, tmp_path: Path) -> None:
    """With neither option nor variable the store is the user's own."""
    result = cachectl("init", "-v", environ={"CACHECTL_STORE": "", "XDG_DATA_HOME": str(tmp_path / "data")})

    assert f"made the store {tmp_path / 'data' / 'cachectl' / 'store'}\n" == result.stdout


def test_init_foreign_folder_exits_3(cachectl: Run, store: Path) -> None:
    """A folder with other people's files does not become a store."""
    store.mkdir()
    (store / "thesis.tex").touch()

    result = cachectl("init")

    assert (3, "") == (result.returncode, result.stdout)
    assert f"{store} is not empty" in result.stderr


@pytest.mark.parametrize("verb", READERS, ids=" ".join)
def test_reader_no_store_exits_3_and_says_init(cachectl: Run, store: Path, verb: tuple[str, ...]) -> None:
    """A store that isn't there is told on two lines, with the command that makes it; nothing is made."""
    result = cachectl(*verb)

    assert (3, "") == (result.returncode, result.stdout)
    assert f"cachectl: no store at {store}; run: cachectl init --store {store}\n" == result.stderr
    assert not store.exists()


@pytest.mark.parametrize("verb", [*READERS, ("init",), ("plan", "RECIPE")], ids=" ".join)
def test_store_is_a_file_exits_3(cachectl: Run, store: Path, recipe: str, verb: tuple[str, ...]) -> None:
    """A store that is a file is an environment error."""
    store.write_text("a file")

    result = cachectl(*(recipe if word == "RECIPE" else word for word in verb))

    assert (3, "") == (result.returncode, result.stdout)
    assert f"store {store} is a file" in result.stderr


def test_ls_empty_store_lists_nothing(cachectl: Run, made: Path) -> None:
    """An empty store is no finding."""
    document, text, quiet = cachectl("ls", "--json"), cachectl("ls"), cachectl("ls", "-q")

    assert LsReport(entries=()) == LsReport.model_validate_json(document.stdout)
    assert "0 entries, 0 B\n" == text.stdout
    assert ("", "") == (quiet.stdout, quiet.stderr)
    assert [0, 0, 0] == [document.returncode, text.returncode, quiet.returncode]


@pytest.mark.parametrize("verb", ["show", "inspect", "verify"])
@pytest.mark.parametrize("key", ["abcd", "not-a-key"])
def test_unknown_key_exits_2(cachectl: Run, made: Path, verb: str, key: str) -> None:
    """A key that no entry has is the caller's mistake."""
    result = cachectl(verb, key)

    assert (2, "") == (result.returncode, result.stdout)
    assert f"'{key}'" in result.stderr
    assert "; run `cachectl ls`" in result.stderr


def test_verify_empty_store_finds_nothing(cachectl: Run, made: Path) -> None:
    """Nothing stored, nothing wrong."""
    result = cachectl("verify", "--json")

    assert VerifyReport(checked=0, findings=()) == VerifyReport.model_validate_json(result.stdout)
    assert 0 == result.returncode


def test_plan_nothing_built_is_missing_and_exits_1(cachectl: Run, made: Path, recipe: str) -> None:
    """Work to do is exit code 1, and each entry says what to run."""
    result = cachectl("plan", recipe, "--json")

    report = PlanReport.model_validate_json(result.stdout)
    assert 1 == result.returncode
    assert {"missing"} == {entry.state for entry in report.entries}
    assert all("cachectl build" in entry.reasons[-1].hint for entry in report.entries)


@pytest.mark.parametrize("verb", ["plan", "build"])
def test_recipe_not_there_exits_2(cachectl: Run, made: Path, verb: str) -> None:
    """A recipe that isn't there is the caller's mistake."""
    result = cachectl(verb, "no-such-recipe.yaml")

    assert (2, "") == (result.returncode, result.stdout)
    assert "no-such-recipe.yaml" in result.stderr


def test_db_upgrade_of_a_new_store_changes_nothing(cachectl: Run, made: Path) -> None:
    """init makes the database at the newest schema."""
    result = cachectl("db", "upgrade", "--json")
    check = cachectl("db", "check", "--json")

    document = json.loads(result.stdout)
    assert document["before"] == document["revision"] == json.loads(check.stdout)["revision"]
    assert [0, 0] == [result.returncode, check.returncode]


def test_db_check_newer_database_exits_3_and_is_refused(cachectl: Run, made: Path) -> None:
    """A database of a newer version is told as such, and not touched by upgrade."""
    with sqlite3.connect(made / "manifest.db") as database:
        database.execute("UPDATE alembic_version SET version_num = 'r9999'")
    database.close()

    for result in (cachectl("db", "check"), cachectl("db", "upgrade"), cachectl("ls")):
        assert (3, "") == (result.returncode, result.stdout)
        assert "r9999" in result.stderr
        assert "; use the cachectl that wrote it" in result.stderr


def test_db_check_database_without_tables_says_upgrade(cachectl: Run, made: Path) -> None:
    """A database that is behind is told with the command that mends it, which does."""
    (made / "manifest.db").unlink()
    sqlite3.connect(made / "manifest.db").close()
    (made / "manifest.db").touch()

    before, upgraded, after = cachectl("db", "check"), cachectl("db", "upgrade"), cachectl("db", "check")

    assert 3 == before.returncode
    assert "cachectl db upgrade" in before.stderr
    assert "upgraded from nothing to r" in upgraded.stdout
    assert 0 == after.returncode


def test_db_without_subcommand_is_a_usage_error(cachectl: Run) -> None:
    """db alone does nothing."""
    result = cachectl("db")

    assert (2, "cachectl: Missing command.; run: cachectl db --help\n") == (result.returncode, result.stderr)


def test_doctor_tells_each_check(cachectl: Run, made: Path) -> None:
    """doctor's document has a state for each check; the store that was just made is ok."""
    result = cachectl("doctor", "--json")

    report = DoctorReport.model_validate_json(result.stdout)
    states = {check.name: check.state for check in report.checks}
    assert report.exit_code == result.returncode
    assert ("ok", "ok") == (states["store"], states["database"])
    assert all(check.hint for check in report.checks if check.state == "fail")
