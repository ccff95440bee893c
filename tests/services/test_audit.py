"""Audit: what shows between the folders of a cache, what its key ignores, what changes do; and usage."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cachectl.errors import ConfigError, StoreError
from cachectl.services.audit import audit, what_starts_here
from tests.services.caches import DATA, KIND, lay, md5, said, seen, the_one


@pytest.mark.parametrize("name", ["npugraph_ex_static", "npugraph_ex_dynamic", "torchair_ge"])
def test_audit_of_a_whole_cache_finds_nothing(tmp_path: Path, name: str) -> None:
    """An artifact that this process could load: good, exit 0, and its content is told."""
    lay(tmp_path, (DATA / f"{name}.bin").read_bytes())

    report = audit(str(tmp_path), seen())

    assert [] == said(report)
    assert ["good"] == [artifact.state for artifact in report.artifacts]
    content = report.artifacts[0].content
    assert content is not None
    assert all((content.inputs, content.options, content.graph_ops))
    assert (0, 0) == (report.exit_code, report.orphaned_bytes)


def test_audit_tells_what_belongs_to_another_user(tmp_path: Path) -> None:
    """The file would be deleted; the cache directory makes cache_compile raise."""
    lay(tmp_path)

    report = audit(str(tmp_path), seen(uid=os.getuid() + 1))

    assert {("wrong-owner", "deleted"), ("wrong-owner", "crash")} <= set(said(report))


def test_audit_tells_what_can_not_be_written(tmp_path: Path) -> None:
    """A folder without write permission: removing what is broken raises in the first call."""
    folder = lay(tmp_path).parent
    other = os.getuid() or 65534
    if not os.getuid():
        # Root may write anywhere; as another user's, everything is that user's.
        for path in [tmp_path, *tmp_path.rglob("*")]:
            os.chown(path, other, other)
    folder.chmod(0o500)

    assert [("not-writable", "crash")] == said(audit(str(tmp_path), seen(uid=other)))
    folder.chmod(0o700)


def test_audit_tells_folders_without_an_artifact(tmp_path: Path) -> None:
    """What a removed artifact leaves: an empty graph folder, a method folder with other things in it."""
    lay(tmp_path)
    (tmp_path / f"{KIND}_{md5(2)}").mkdir()
    (tmp_path / f"{KIND}_{md5(3)}" / "main_decode").mkdir(parents=True)

    report = audit(str(tmp_path), seen())

    assert [("missing-artifact", "cold")] * 2 == said(report)
    assert 1 == len(report.artifacts)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (range(4), []),
        (range(2, 4), []),
        ([3], []),
        (range(3), [("missing-rank", "cold")]),
        ([0, 3], [("missing-rank", "cold")]),
    ],
)
def test_audit_tells_missing_ranks_but_not_another_nodes(
    tmp_path: Path, pack: Callable[..., bytes], ranks: list[int], expected: list[tuple[str, str]]
) -> None:
    """A whole block of ranks is a node's lawful share of a world; anything else lacks some."""
    for rank in ranks:
        lay(tmp_path, pack(), rank=f"world4global_rank{rank}", number=rank)

    assert expected == said(audit(str(tmp_path), seen()))


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((0, 1, 2, 3), []),
        ((0, 1, 0, 1), []),
        ((0, 0, 0, 0), []),
        ((4, 5, 6, 7), []),
        ((1, 0, 2, 3), [("wrong-place", "wrong")]),
        ((0, 1, 1, 1), [("wrong-place", "wrong")]),
    ],
)
def test_audit_tells_ranks_in_each_others_folders(
    tmp_path: Path, pack: Callable[..., bytes], devices: tuple[int, ...], expected: list[tuple[str, str]]
) -> None:
    """Device numbers repeat with the number of ranks per node; where no number explains them, folders were swapped."""
    for rank, device in enumerate(devices):
        # The stored bytecode moves its inputs to npu:3; marshal writes that number as its only int of value 3.
        code, count = re.subn(
            rb"(?<=[i\xe9])\x03\x00\x00\x00", bytes([device, 0, 0, 0]), (DATA / "bytecode_3_11.bin").read_bytes()
        )
        assert 1 == count
        lay(tmp_path, pack(compiled_fn=code), rank=f"world4global_rank{rank}")

    assert expected == said(audit(str(tmp_path), seen()))


def test_audit_tells_what_a_newer_artifact_left_behind(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    """The same method under another md5: the older one's bytes are orphaned, and what differs is named."""
    signature = "\n".join(
        f"{'-' * 40}{title}{'-' * 40}\n{{}}" for title in ("graph module", "inputs", "compile options")
    )
    old = lay(tmp_path, pack(date="2026-01-01 00:00:00+00:00", signature=signature.format("", "", "capture_limit=64")))
    lay(
        tmp_path,
        pack(date="2026-01-02 00:00:00+00:00", signature=signature.format("", "", "capture_limit=8")),
        number=2,
    )
    (old.parent / "notes").write_bytes(b"123")

    report = audit(str(tmp_path), seen())

    found = the_one(report)
    assert ("orphan", "wasted", f"{KIND}_{md5(1)}/main_decode") == (found.kind, found.effect, found.path)
    assert "capture_limit 64 -> 8" in found.detail
    assert old.stat().st_size + 3 == report.orphaned_bytes
    assert {"orphaned": 1, "good": 1} == {a.state: 1 for a in report.artifacts}


def test_audit_suspects_a_key_that_changes_at_every_start(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    """Several artifacts with equal options for one method: an address in the module's repr, perhaps."""
    for number in range(3):
        lay(tmp_path, pack(date=f"2026-01-0{number + 1} 00:00:00+00:00"), number=number)

    report = audit(str(tmp_path), seen())

    assert [("orphan", "wasted")] * 2 == said(report)
    assert all("at every start" in found.detail for found in report.findings)


@pytest.mark.parametrize("names", [("2026-09-01", "2026-09-02"), ("run_20260901_235959", "run_20260902_000001")])
def test_audit_tells_dated_caches(tmp_path: Path, names: tuple[str, str]) -> None:
    """Yesterday's directory is orphaned whole, today's will be: every midnight starts cold."""
    old, new = (lay(tmp_path / "compile_cache" / name) for name in names)

    report = audit(str(tmp_path / "compile_cache"), seen())

    assert [("orphan", "wasted"), ("dated-cache", "cold")] == said(report)
    assert old.stat().st_size == report.orphaned_bytes
    assert [names[0], names[1]] == [artifact.cache for artifact in report.artifacts]
    assert ["orphaned", "good"] == [artifact.state for artifact in report.artifacts]
    assert new.exists()


def test_audit_leaves_caches_of_several_programs_alone(tmp_path: Path) -> None:
    """The same class in two caches without dates: both may be in use."""
    lay(tmp_path / "one")
    lay(tmp_path / "two", number=2)

    assert [] == said(audit(str(tmp_path), seen()))


def test_audit_tells_strays(tmp_path: Path) -> None:
    """An artifact that lost the folders above it is never found again."""
    lay(tmp_path)
    (tmp_path / "compiled_module").write_bytes(b"12345")

    report = audit(str(tmp_path), seen())

    assert [("stray", "wasted")] == said(report)
    assert 5 == report.orphaned_bytes


def test_audit_shows_what_the_key_ignores_where_it_matters(tmp_path: Path) -> None:
    """Shapes, devices, groups and constants of these artifacts stand beside the general rule."""
    lay(tmp_path, (DATA / "npugraph_ex_rank1.bin").read_bytes(), rank="world2global_rank1")

    here = {gap.name: gap.here for gap in audit(str(tmp_path), seen()).ignored}

    assert any("bfloat16 (2, 16)" in text for text in here["inputs"])
    assert "world2global_rank1: npu:1" in here["ranks"]
    assert any("all_reduce" in text for text in here["ranks"])
    assert ("world2global_rank1: _tensor_constant0",) == here["constants"]
    assert {"sources", "attributes", "guards", "environment", "toolchain", "device", "bytes"} <= set(here)


def test_audit_rehearses_upgrades(tmp_path: Path) -> None:
    """Which wheels read the format, what another CPython does, what another world finds."""
    lay(tmp_path, (DATA / "npugraph_ex_rank1.bin").read_bytes(), rank="world2global_rank1")

    found = {(change.change, change.effect): change.detail for change in audit(str(tmp_path), seen()).changes}

    assert "2.14.0" in found["torch_npu (format 1.0.6 of npugraph_ex)", "deleted"]
    assert {("CPython", "crash"), ("world size", "cold"), ("ranks per node", "unnoticed"), ("SoC", "unnoticed")} <= set(
        found
    )


def test_audit_writes_nothing(tmp_path: Path) -> None:
    """Not a byte, a mode or a time of what it reads changes."""
    lay(tmp_path)
    lay(tmp_path, b"", number=2, mode=0o644)

    def everything() -> list[tuple[str, int, int, int]]:
        return [
            (str(path), found.st_mode, found.st_mtime_ns, found.st_ino)
            for path in [tmp_path, *sorted(tmp_path.rglob("*"))]
            for found in [path.lstat()]
        ]

    before = everything()
    audit(str(tmp_path), seen())

    assert before == everything()


def test_audit_escapes_names_that_are_no_text(tmp_path: Path) -> None:
    """A name on disk is bytes; the document stays JSON."""
    lay(tmp_path, method=os.fsdecode(b"dec\xffode"))

    report = audit(str(tmp_path), seen())

    assert ["dec\\udcffode"] == [artifact.method for artifact in report.artifacts]
    assert report.model_dump_json().encode()


def test_audit_survives_folders_as_deep_as_a_path_can_be(tmp_path: Path) -> None:
    """Depth costs no recursion."""
    folder = str(lay(tmp_path).parent)
    for _ in range(1100):
        folder += "/a"
        os.mkdir(folder)

    report = audit(str(tmp_path), seen())

    os.removedirs(folder)
    assert [] == said(report)


@pytest.mark.parametrize("name", ["nothing-here", "file", "empty", "artifacts"])
def test_audit_of_what_is_no_cache_is_a_usage_error(tmp_path: Path, name: str) -> None:
    """No folder, a file, an empty folder, a folder of other things: exit 2, with what the folders are called."""
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    shutil.copytree(DATA, tmp_path / "artifacts")

    with pytest.raises(ConfigError) as raised:
        audit(str(tmp_path / name), seen())

    assert 2 == raised.value.exit_code


def test_what_starts_here_is_this_user_and_interpreter_unless_told() -> None:
    """Wheels belong to an interpreter: with another one named, nothing is claimed of them."""
    assert (7, "3.9", None, None) == (
        (other := what_starts_here(uid=7, python="3.9", environ={})).uid,
        other.python,
        other.npugraph_ex,
        other.cann,
    )
    assert os.getuid() == what_starts_here(environ={}).uid


def test_what_starts_here_reads_the_toolkits_version(tmp_path: Path) -> None:
    """CANN is what ASCEND_HOME_PATH says."""
    info = tmp_path / "share" / "info" / "runtime" / "version.info"
    info.parent.mkdir(parents=True)
    info.write_text("Version=8.5.0\n")

    assert "8.5.0" == what_starts_here(environ={"ASCEND_HOME_PATH": str(tmp_path)}).cann


def test_audit_walks_past_links_that_lead_to_themselves(tmp_path: Path) -> None:
    """A loop of links is no folder to anybody: what lies beside it is read, and nothing fails."""
    lay(tmp_path)
    graph = tmp_path / f"{KIND}_{md5(1)}"
    (tmp_path / f"{KIND}_{md5(9)}").symlink_to(f"{KIND}_{md5(9)}")
    (graph / "selfie").symlink_to("selfie")
    (tmp_path / "top").symlink_to(tmp_path)

    report = audit(str(tmp_path), seen())

    assert ["good"] == [artifact.state for artifact in report.artifacts]


def test_audit_does_not_call_what_it_cannot_list_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method folder that can't be listed is unreadable; whether an artifact is missing in it, nobody knows."""
    closed = lay(tmp_path).parent
    scandir = os.scandir

    def refusing(path: str) -> object:
        if path == str(closed):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)

    assert [("unreadable", "cold")] == said(audit(str(tmp_path), seen()))


def test_audit_of_what_it_may_not_read_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint is about the program's user: an audit has no store."""

    def refusing(path: str) -> object:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refusing)

    with pytest.raises(StoreError, match="Permission denied") as raised:
        audit(str(tmp_path), seen())
    assert raised.value.hint is not None
    assert "store" not in raised.value.hint


def test_audit_tells_ranks_that_a_world_lacks(tmp_path: Path) -> None:
    """Rank 9 of 4 is none whose folder a start looks for, and no gap among the ranks."""
    lay(tmp_path, rank="world4global_rank9")
    lay(tmp_path, rank="world0global_rank0", number=2)

    assert [("stray", "wasted"), ("stray", "wasted")] == said(audit(str(tmp_path), seen()))


def test_audit_calls_neither_of_two_artifacts_of_one_time_left_behind(tmp_path: Path) -> None:
    """Made in the same second, as copies are: none of them is the older one."""
    lay(tmp_path)
    lay(tmp_path, number=2)

    assert [] == said(audit(str(tmp_path), seen()))
