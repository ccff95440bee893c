"""Stores made by earlier versions: every later version opens them, reads all of them, and damages nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from cachectl.schemas.keying import KEY_VERSION

STORES = sorted((Path(__file__).resolve().parents[1] / "fixtures").glob("store-*.tar.gz"))


@pytest.fixture(params=STORES, ids=lambda path: path.name.removesuffix(".tar.gz"))
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An unpacked store of an earlier version, with the program that it was built from beside it."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def _cachectl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cachectl", *arguments],
        cwd=folder / "tiny-decoder",
        env={**os.environ, "CACHECTL_STORE": str(folder / "store"), "CACHECTL_WARM_DIR": str(folder / "warm")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_there_is_a_store_of_the_first_version() -> None:
    """The oldest store is kept."""
    assert "store-0.1.0.tar.gz" in {path.name for path in STORES}


def test_earlier_store_is_upgraded_and_whole(earlier: Path) -> None:
    """The database upgrades, every entry is listed, and verify reads every byte without a finding."""
    upgraded = _cachectl(earlier, "db", "upgrade")
    listed = json.loads(_cachectl(earlier, "ls", "--json").stdout)
    verified = _cachectl(earlier, "verify", "--json")

    assert 0 == upgraded.returncode, upgraded.stderr
    assert {("main_decode", "b2"), ("main_decode", "b4")} == {(e["method"], e["case"]) for e in listed["entries"]}
    assert [] == json.loads(verified.stdout)["findings"]


def test_earlier_store_is_not_upgraded_by_who_only_asks(earlier: Path) -> None:
    """A command that needs the database names the one that upgrades it; the hook needs none."""
    database = (earlier / "store" / "manifest.db").read_bytes()

    listed = _cachectl(earlier, "ls")
    hooked = _cachectl(earlier, "hook", "recipe.yaml")

    assert (3, True) == (listed.returncode, "cachectl db upgrade" in listed.stderr)
    assert 0 == hooked.returncode
    assert database == (earlier / "store" / "manifest.db").read_bytes()


def test_earlier_store_serves_the_hook_or_says_why(earlier: Path) -> None:
    """The hook reads record and manifests; if it goes cold, it is for what the entries are, not how they are kept."""
    done = _cachectl(earlier, "hook", "recipe.yaml")
    document = json.loads(done.stdout)

    assert 0 == done.returncode
    assert document["outcome"] in ("warm", "cold")
    assert not {"store", "artifact", "trust"} & {reason["part"] for reason in document["reasons"]}, document["reasons"]


def test_earlier_store_of_another_key_version_is_never_used(earlier: Path) -> None:
    """What version 1 did not see may have changed: the hook goes cold and says what to run."""
    hooked = json.loads(_cachectl(earlier, "hook", "recipe.yaml").stdout)

    assert [("policy", "key_version", 1, KEY_VERSION)] == [
        (reason["part"], reason["name"], reason["stored"], reason["wanted"]) for reason in hooked["reasons"]
    ]
    assert "run: cachectl build" == hooked["reasons"][0]["hint"]


def test_earlier_store_is_reindexed_after_its_database_was_lost(earlier: Path) -> None:
    """Entries and warm sets come back from the files; verify then finds no drift."""
    (earlier / "store" / "manifest.db").unlink()

    done = _cachectl(earlier, "db", "reindex", "--json")
    verified = _cachectl(earlier, "verify", "--json")

    document = json.loads(done.stdout)
    assert (0, 2, 1, []) == (done.returncode, document["added"], document["warm_sets"], document["unreadable"])
    assert [] == json.loads(verified.stdout)["findings"]


def test_earlier_store_reindex_leaves_a_damaged_manifest_out_and_says_so(earlier: Path) -> None:
    """One bit of one manifest: exit 1, the other entry is kept, the damaged one is named."""
    _cachectl(earlier, "db", "upgrade")
    victim = next((earlier / "store" / "entries").rglob("*.json"))
    victim.chmod(0o644)
    victim.write_bytes(victim.read_bytes()[:-1])

    document = json.loads((done := _cachectl(earlier, "db", "reindex", "--json")).stdout)

    assert (1, 1, 1) == (done.returncode, document["kept"], len(document["unreadable"]))
    assert victim.name in document["unreadable"][0]


def test_earlier_store_entries_are_shown_and_inspected(earlier: Path) -> None:
    """Each entry's manifest and artifact can be read."""
    _cachectl(earlier, "db", "upgrade")
    for entry in json.loads(_cachectl(earlier, "ls", "--json").stdout)["entries"]:
        shown = _cachectl(earlier, "show", entry["key"], "--json")
        inspected = _cachectl(earlier, "inspect", entry["key"], "--json")

        assert (0, 0) == (shown.returncode, inspected.returncode), shown.stderr + inspected.stderr
        assert entry["key"] == json.loads(shown.stdout)["key"] == json.loads(inspected.stdout)["key"]
