"""The hook and what storage does to a store: database, clocks, stray files, other file systems. Real processes."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.boot.hook_stores import handouts
from tests.stores import MadeStore

FUTURE_S = 4_000_000_000.0


@pytest.fixture(params=["locked", "garbled", "gone", "a folder", "a full log"])
def unwell(made: MadeStore, request: pytest.FixtureRequest) -> Iterator[MadeStore]:
    """A store whose database is of no use; its files are whole."""
    database = made.layout.database
    held = None
    if request.param == "locked":
        held = sqlite3.connect(database, isolation_level=None)
        held.execute("BEGIN EXCLUSIVE")
    elif request.param == "garbled":
        database.write_bytes(b"\0" * 4096)
    elif request.param == "a full log":
        database.with_name(database.name + "-wal").write_bytes(os.urandom(1 << 20))
    else:
        database.unlink()
        if request.param == "a folder":
            database.mkdir()
    yield made
    if held is not None:
        held.close()


def test_hook_needs_no_database(unwell: MadeStore) -> None:
    """The database is an index: locked, garbled or gone, a boot neither waits for it nor misses it (F7, F8)."""
    hooked = unwell.hook()

    assert ("warm", []) == (hooked.outcome, hooked.against)


@pytest.mark.parametrize("when_s", [0.0, FUTURE_S], ids=["1970", "2096"])
def test_hook_times_of_files_say_nothing(made: MadeStore, when_s: float) -> None:
    """Digests say what is valid: a store, a recipe and sources of another age are the same (field report F15)."""
    for folder in (made.layout.root, made.recipe.parent):
        for path in [folder, *folder.rglob("*")]:
            os.utime(path, (when_s, when_s), follow_symlinks=False)

    assert "warm" == made.hook().outcome
    # With a warm dir of that age in its way, too.
    for path in [made.warm_dir, *made.warm_dir.rglob("*")]:
        os.utime(path, (when_s, when_s), follow_symlinks=False)
    again = made.hook()
    assert ("warm", True) == (again.outcome, Path(again.report["env"]["CACHECTL_HANDOUT"]).is_file())


def test_hook_newer_file_of_other_content_is_not_taken_for_the_old_one(made: MadeStore) -> None:
    """A source with the old file's time and size and other content is cold (field report F15)."""
    before = made.source.stat()
    made.source.write_text(made.source.read_text().replace("SCALE = 2", "SCALE = 3"))
    os.utime(made.source, ns=(before.st_atime_ns, before.st_mtime_ns))

    hooked = made.hook()

    assert before.st_size == made.source.stat().st_size
    assert ("cold", "sources") == (hooked.outcome, hooked.against[0][0])


def test_hook_stray_files_in_the_store_reach_no_handout(made: MadeStore) -> None:
    """What lies in a store and is in no manifest is nobody's: temp files, links, strangers (field reports C6, S17)."""
    whole = made.hook()
    before = {path.name for path in handouts(made.warm_dir) if path.is_file()}
    shutil.rmtree(made.warm_dir)
    for folder in [path for path in made.layout.root.rglob("*") if path.is_dir()]:
        (folder / ".stray.tmp.1").write_bytes(b"half")
        (folder / "compiled_module").write_bytes(b"stray")
        (folder / "link").symlink_to("/etc/passwd")

    hooked = made.hook()

    assert ("warm", whole.report["warm_set"]) == (hooked.outcome, hooked.report["warm_set"])
    assert before == {path.name for path in handouts(made.warm_dir) if path.is_file()}


def test_hook_temporary_folder_elsewhere_or_gone_is_none_of_its_business(made: MadeStore, tmp_path: Path) -> None:
    """Files are made where they stay: TMPDIR may be missing, a file, or full (field report F11)."""
    (tmp_path / "file").touch()
    places = [tmp_path / "missing", tmp_path / "file", Path("/dev/full")]

    assert {"warm"} == {made.hook(environ={"TMPDIR": str(place)}).outcome for place in places}


def test_hook_warm_dirs_of_two_nodes_are_filled_each(made: MadeStore) -> None:
    """What one node holds says nothing of another: each node's hook fills its own folder (field report T10)."""
    folders = [made.folder / "node0", made.folder / "node1"]
    reports = [made.hook("--warm-dir", folder).report for folder in folders]

    assert ["warm", "warm"] == [report["outcome"] for report in reports]
    for folder, report in zip(folders, reports, strict=True):
        assert all(Path(entry["path"]).is_relative_to(folder) for entry in report["entries"])


# Runs the hook as another user with groups; all is imported before, as the interpreter may lie where they can't look.
AS_USER_OF_GROUPS = """
import os, sys
from cachectl.boot import hook
uid, groups = int(sys.argv[1]), [int(word) for word in sys.argv[2].split(",") if word]
os.setgroups(groups)
os.setgid(uid)
os.setuid(uid)
sys.exit(hook.main(sys.argv[3:]))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize(("groups", "wanted"), [("4711", ("warm", [])), ("", ("cold", [("store", "policy")]))])
def test_hook_store_of_a_group_only(open_made: MadeStore, groups: str, wanted: tuple[str, list[Any]]) -> None:
    """Group bits are enough: a store that only its group may read serves its members, and denies others in words."""
    for path in [open_made.layout.root, *open_made.layout.root.rglob("*")]:
        os.chown(path, 0, 4711, follow_symlinks=False)
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o770)
    warm = open_made.folder / "user"
    warm.mkdir()
    os.chown(warm, 65534, 65534)
    done = subprocess.run(
        [sys.executable, "-c", AS_USER_OF_GROUPS, "65534", groups, str(open_made.recipe), "--warm-dir", str(warm)],
        env=open_made.hook_environ(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    report = json.loads(done.stdout)

    assert wanted == (report["outcome"], [(reason["part"], reason["kind"]) for reason in report["reasons"]])
    assert 0 == done.returncode
