"""`cachectl release`: what died is forgotten on this node, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cachectl.boot.starts import Death, Starts

Run = Callable[..., "subprocess.CompletedProcess[str]"]

KEYS = ["sha256:aa11" + "0" * 60, "sha256:aa22" + "0" * 60, "sha256:bb33" + "0" * 60]


@pytest.fixture
def warm_dir(tmp_path: Path) -> Path:
    """A warm dir in which starts died of three entries, two of one key: it was built anew."""
    folder = tmp_path / "warm"
    folder.mkdir(mode=0o700)
    for name, key in [("1", KEYS[0]), ("2", KEYS[1]), ("3", KEYS[2]), ("4", KEYS[2])]:
        for start in "xy":
            Starts.of(folder).note_death((name, key, f"decode/b{name} rank 0"), Death(start, 1.8e9, "exit code 139"))
    return folder


def left(warm_dir: Path) -> list[str]:
    """Return the keys of which starts died."""
    return sorted(item["key"] for item in Starts.of(warm_dir).quarantined())


def test_release_forgets_a_key_and_all_of_its_artifacts(cachectl: Run, warm_dir: Path) -> None:
    """The first digits are enough, the reason is printed, the others stay."""
    done = cachectl("release", "bb33", KEYS[0], "--warm-dir", str(warm_dir), "--reason", "driver mended")

    assert (0, "") == (done.returncode, done.stderr)
    assert [KEYS[1]] == left(warm_dir)
    assert 3 == done.stdout.count("driver mended")
    assert "starts died at 2027-01-15T08:00:00Z (exit code 139)" in done.stdout


def test_release_json_and_dry_run(cachectl: Run, warm_dir: Path) -> None:
    """What would be done is the same document, and nothing is done; the variable names the warm dir, too."""
    environ = {"CACHECTL_WARM_DIR": str(warm_dir)}
    dry = json.loads(cachectl("release", "aa1", "--dry-run", "--json", environ=environ).stdout)
    done = json.loads(cachectl("release", "aa1", "--json", environ=environ).stdout)

    assert dry == {**done, "dry_run": True}
    (item,) = done["released"]
    assert (KEYS[0], "decode/b1 rank 0", str(warm_dir)) == (item["key"], item["name"], item["warm_dir"])
    assert ["exit code 139"] * 2 == [death["how"] for death in item["deaths"]]
    assert KEYS[1:] + KEYS[2:] == left(warm_dir)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("aa",), "begins more than one key"),
        (("cc",), "no start on this node died of an entry 'cc'"),
        (("bb33", "cc"), "no start on this node died of an entry 'cc'"),
        (("",), "no start on this node died of an entry ''"),
        (("aa11", "--uid", "4294967295"), "--uid 4294967295"),
    ],
)
def test_release_of_what_is_not_known_is_an_error(
    cachectl: Run, warm_dir: Path, words: tuple[str, ...], said: str
) -> None:
    """One line, and nothing is released."""
    done = cachectl("release", *words, "--warm-dir", str(warm_dir))

    assert 2 == done.returncode
    assert said in done.stderr
    assert 1 == done.stderr.count("\n")
    assert 4 == len(left(warm_dir))


def test_release_without_a_warm_dir_makes_none(cachectl: Run, tmp_path: Path) -> None:
    """Looking leaves nothing behind."""
    done = cachectl("release", "aa", "--warm-dir", str(tmp_path / "nowhere"))

    assert 2 == done.returncode
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act for another user")
def test_release_for_another_user(cachectl: Run, warm_dir: Path) -> None:
    """As root, in the private folder on a volume's mount."""
    uid = 12345
    # pytest's own folders are this user's only.
    mount = Path(tempfile.mkdtemp(prefix="cachectl-test."))
    try:
        mount.chmod(0o777)
        own = Path(shutil.copytree(warm_dir, mount / f"cachectl-{uid}"))
        for path in [own, *own.rglob("*")]:
            os.chown(path, uid, uid)

        done = cachectl("release", "aa11", "--warm-dir", str(mount), "--uid", str(uid))

        assert (0, "") == (done.returncode, done.stderr)
        assert KEYS[1:] + KEYS[2:] == left(own)
        assert {uid} == {path.stat().st_uid for path in own.rglob("*")}
    finally:
        shutil.rmtree(mount)
