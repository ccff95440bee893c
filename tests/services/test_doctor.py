"""Doctor: one check for each thing a build or a start needs, with the way out, whatever is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cachectl.schemas.report import DoctorCheck
from cachectl.services.doctor import doctor
from cachectl.store.layout import StoreLayout
from tests.stores import MadeStore

NAMES = {
    *("python", "torch", "torch_npu", "npugraph_ex", "cann", "device"),
    *("simulation", "store", "database", "free space", "warm dir"),
}


@pytest.fixture
def made(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> MadeStore:
    """A store, with its toolchain where this interpreter finds it."""
    monkeypatch.syspath_prepend(str(made.site))
    return made


def checks(layout: StoreLayout, **environ: str) -> dict[str, DoctorCheck]:
    """Return doctor's checks by name, under an environment with little in it."""
    report = doctor(layout, {"PATH": os.environ["PATH"], **environ})
    return {check.name: check for check in report.checks}


def test_doctor_with_everything_there_fails_nothing(made: MadeStore, tmp_path: Path) -> None:
    """Each check once; what is not ok says what mends it."""
    found = checks(made.layout, CACHECTL_WARM_DIR=str(tmp_path / "warm"), HOME=str(tmp_path))

    assert set(found) == NAMES
    assert [] == [check for check in found.values() if check.state == "fail"]
    assert all(check.hint for check in found.values() if check.state != "ok")
    assert ("2.13.0+cpu", "2.13.0") == (found["torch"].detail, found["torch_npu"].detail)


def test_doctor_without_a_store_says_how_to_make_one(tmp_path: Path) -> None:
    """Store and database fail, with the command; the rest is checked all the same."""
    found = checks(StoreLayout(tmp_path / "nowhere" / "store"), HOME=str(tmp_path))

    assert ("fail", "fail") == (found["store"].state, found["database"].state)
    assert "cachectl init" in found["store"].hint
    assert set(found) == NAMES


def test_doctor_with_a_damaged_database_names_it(made: MadeStore, tmp_path: Path) -> None:
    """A database that is none is a failed check, not a traceback."""
    made.layout.database.write_bytes(b"not a database" * 100)

    found = checks(made.layout, HOME=str(tmp_path))

    assert ("ok", "fail") == (found["store"].state, found["database"].state)
    assert found["database"].hint


def test_doctor_with_a_warm_dir_that_is_no_folder_says_so(made: MadeStore, tmp_path: Path) -> None:
    """What CACHECTL_WARM_DIR names is a file: the hook would be cold, and doctor says it before."""
    (tmp_path / "file").write_text("")

    found = checks(made.layout, CACHECTL_WARM_DIR=str(tmp_path / "file"))

    assert "fail" == found["warm dir"].state
    assert str(tmp_path / "file") in found["warm dir"].hint


def test_doctor_without_torch_fails_it_with_what_to_install(
    made: MadeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No wheels on the path: each is named, and nothing is imported to find out."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])

    found = checks(made.layout, HOME=str(tmp_path))

    assert {"torch": "fail", "torch_npu": "fail", "npugraph_ex": "fail"} == {
        name: found[name].state for name in ("torch", "torch_npu", "npugraph_ex")
    }
    assert all(found[name].hint for name in ("torch", "torch_npu", "npugraph_ex"))
