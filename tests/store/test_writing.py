"""Publishing: a crash, a full disk or another publisher leaves old sets or the new one, never half of one."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachectl.boot.hook import HookOptions, run_hook
from cachectl.errors import ArtifactNotFoundError, CachectlError, StoreError
from cachectl.schemas.boot import BootRecord
from cachectl.schemas.canonical import digest_bytes
from cachectl.store import writing
from cachectl.store.blobs import BlobStore
from cachectl.store.layout import StoreLayout
from cachectl.store.manifest import ManifestRepo
from cachectl.store.reading import read_boot_record, read_manifest, stored_manifests
from cachectl.store.writing import add_artifact, name_recipe
from tests.stores import MadeStore, make_store, tree, write_artifact


@pytest.fixture(scope="module")
def _template(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    return make_store(tmp_path_factory.mktemp("template") / "made")


@pytest.fixture
def made(_template: MadeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeStore:
    """An empty store; its toolchain is this process's, so that `hook` below finds it."""
    made = _template.copy(tmp_path / "made")
    monkeypatch.syspath_prepend(str(made.site))
    return made


def record_of(made: MadeStore) -> BootRecord | None:
    """Return a made store's boot record."""
    return read_boot_record(made.layout, raw_digest=digest_bytes(made.recipe.read_bytes()))


def handed_out(made: MadeStore) -> str | None:
    """Return the warm set that a hook hands out here, every byte verified; None when it is cold."""
    handout = run_hook(HookOptions(recipe=str(made.recipe)), made.hook_environ())
    if handout.outcome != "warm":
        assert "please report" not in str([reason.hint for reason in handout.reasons])
        return None
    assert 2 == len(handout.entries)
    assert handout.folder is not None
    shutil.rmtree(handout.folder)
    return handout.warm_set


def fork(action: Callable[[], object]) -> int:
    """Run an action in a process of its own; return the exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:  # noqa: BLE001 - the child must not go on as a second pytest
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


STEPS = [(os, "replace"), (os, "fsync"), (os, "mkdir"), (os, "open"), (os, "unlink"), (ManifestRepo, "publish")]


def stop_at(made: MadeStore, step: int, stop: Callable[[], object], *, after: bool = False) -> list[int]:
    """Let the step-th call that publishing makes on its store do `stop`, before or after it; return the count."""
    count = [0]
    root = str(made.layout.root)

    def on_store(target: object) -> bool:
        if isinstance(target, int):
            target = os.readlink(f"/proc/self/fd/{target}")
        return isinstance(target, ManifestRepo) or str(target).startswith(root)

    def wrap(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            count[0] += on_store(arguments[0])
            due = count[0] == step and on_store(arguments[0])
            if due and not after:
                stop()
            try:
                return real(*arguments, **named)
            finally:
                if due and after:
                    stop()

        setattr(owner, name, call)

    for owner, name in STEPS:
        wrap(owner, name)
    return count


def count_steps(made: MadeStore, name: str) -> int:
    """Return how many calls one publishing makes."""
    spare = made.copy(made.folder.parent / "counted")
    report = made.folder / "count"

    def run() -> None:
        count = stop_at(spare, 0, lambda: None)
        spare.publish(name)
        report.write_text(str(count[0]))

    assert 0 == fork(run)
    return int(report.read_text())


# In order


def test_publish_first_set_is_handed_out(made: MadeStore) -> None:
    """What was published is what the hook finds."""
    warm_set = made.publish()

    assert warm_set.warm_set == handed_out(made)
    record = record_of(made)
    assert record is not None
    assert (("made-up", (".",)), [warm_set]) == ((record.recipe, record.paths), list(record.sets))


def test_publish_twice_is_one_set_with_a_newer_record(made: MadeStore) -> None:
    """Publishing the same again changes no entry, no blob's bytes, and only raises the sequence."""
    first = made.publish()
    before, names = record_of(made), sorted(path.name for path in made.layout.root.rglob("*"))
    again = made.publish()
    after = record_of(made)

    assert first == again
    assert before is not None
    assert after is not None
    assert (before.sets, names) == (after.sets, sorted(path.name for path in made.layout.root.rglob("*")))
    assert before.sequence < after.sequence
    with ManifestRepo.open(made.layout.database) as repo:
        assert 2 == repo.stats().entries


def test_publish_after_the_database_was_lost_goes_on_counting(made: MadeStore) -> None:
    """A hook refuses a lower sequence than its node has seen, so a rebuilt database must not begin at one (F7)."""
    for name in ("a", "b"):
        made.publish(name)
    for path in made.layout.root.glob("manifest.db*"):
        path.unlink()
    ManifestRepo.open(made.layout.database, create=True).close()

    made.publish("c")

    record = record_of(made)
    assert record is not None
    assert (3, 3) == (record.sequence, len(record.sets))


def test_publish_newer_set_comes_first_and_older_stays(made: MadeStore) -> None:
    """A rolled back deployment is warm again, so older sets stay."""
    older, newer = made.publish("older"), made.publish("newer")

    record = record_of(made)
    assert record is not None
    assert [newer.warm_set, older.warm_set] == [item.warm_set for item in record.sets]
    assert newer.warm_set == handed_out(made)


def test_publish_files_are_read_only_for_all(made: MadeStore) -> None:
    """Blobs, manifests, records and pointers are 0444, whatever the umask (field report P7)."""
    before = os.umask(0o077)
    try:
        made.publish()
    finally:
        os.umask(before)

    files = [path for name in ("blobs", "entries", "boot") for path in (made.layout.root / name).rglob("*")]
    assert {0o444} == {path.stat().st_mode & 0o7777 for path in files if path.is_file()}
    assert {0o755} == {path.stat().st_mode & 0o7777 for path in files if path.is_dir()}
    assert [] == list(made.layout.tmp.iterdir())


def test_publish_equal_files_of_entries_are_stored_once(made: MadeStore) -> None:
    """The kernel that both entries hold is one blob (field report F9)."""
    made.publish()

    assert 3 == len(list(BlobStore(made.layout).all()))


@pytest.mark.parametrize("which", ["blob", "size"])
def test_publish_without_all_blobs_refused(made: MadeStore, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that names a file the store lacks never becomes visible (field report D8)."""
    real = writing.publish

    def lose_one(*arguments: Any) -> Any:
        blob = made.blob()
        if which == "blob":
            blob.unlink()
        else:
            blob.chmod(0o600)
            blob.write_bytes(b"short")
        return real(*arguments)

    monkeypatch.setattr("tests.stores.publish", lose_one)

    with pytest.raises(ArtifactNotFoundError, match="compiled_module"):
        made.publish()

    assert (None, None) == (record_of(made), handed_out(made))
    with ManifestRepo.open(made.layout.database) as repo:
        assert 0 == repo.stats().entries


def test_publish_reused_member_without_its_files_refused(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries that were there before have to be whole, too (field report D8)."""
    first = made.publish()
    made.blob("a", "b2").unlink()
    real = writing.publish

    def reuse(layout: StoreLayout, repo: ManifestRepo, publication: writing.Publication) -> Any:
        return real(layout, repo, replace(publication, manifests=(), reused=first.members))

    monkeypatch.setattr("tests.stores.publish", reuse)
    monkeypatch.setattr("tests.stores.add_artifact", lambda layout, folder: read_files(made, folder))

    with pytest.raises(ArtifactNotFoundError, match=r"main_decode \[b2\]"):
        made.publish()


def read_files(made: MadeStore, folder: Path) -> list[dict[str, Any]]:
    """Return an artifact's file list without storing it anew."""
    spare = made.copy(made.folder.parent / f"spare-{folder.name}")
    return add_artifact(spare.layout, folder)


def test_add_artifact_lists_files_by_path_with_modes(made: MadeStore) -> None:
    """Paths are relative and sorted, and what runs keeps its x bit (field report K10)."""
    write_artifact(made.folder / "artifact", 100)

    files = add_artifact(made.layout, made.folder / "artifact")

    assert [("compiled_module", "0600", 100), ("kernels/common.run", "0700", 10)] == [
        (item["path"], item["mode"], item["size_bytes"]) for item in files
    ]
    for item in files:
        assert digest_bytes((made.folder / "artifact" / item["path"]).read_bytes()) == item["digest"]


@pytest.mark.parametrize("target", ["compiled_module", "kernels", "nowhere"])
def test_add_artifact_with_a_link_refused(made: MadeStore, target: str) -> None:
    """A link could lead anywhere when it is copied back (field report P9)."""
    write_artifact(made.folder / "artifact", 100)
    (made.folder / "artifact" / "link").symlink_to(target)

    with pytest.raises(StoreError, match="link"):
        add_artifact(made.layout, made.folder / "artifact")


def test_name_recipe_corrects_an_older_meaning(made: MadeStore) -> None:
    """Bytes that an older program gave another meaning lead to the new record from now on."""
    raw, old, new = digest_bytes(b"raw"), digest_bytes(b"old"), digest_bytes(b"new")
    name_recipe(made.layout, raw, old)
    name_recipe(made.layout, raw, new)
    before = tree(made.layout.root)
    name_recipe(made.layout, raw, new)

    assert f"{new}\n" == made.layout.raw_recipe(raw).read_text()
    assert before == tree(made.layout.root)


def test_name_recipe_mends_an_empty_pointer(made: MadeStore) -> None:
    """A pointer that lost its bytes is written again by the next build."""
    made.publish()
    pointer = made.layout.raw_recipe(digest_bytes(made.recipe.read_bytes()))
    pointer.chmod(0o600)
    pointer.write_bytes(b"")

    warm_set = made.publish()

    assert warm_set.warm_set == handed_out(made)


# Killed


@pytest.mark.parametrize(
    ("older", "after"),
    [
        pytest.param(True, False, id="second set, before"),
        pytest.param(True, True, id="second set, after", marks=pytest.mark.slow),
        pytest.param(False, False, id="first set, before", marks=pytest.mark.slow),
        pytest.param(False, True, id="first set, after", marks=pytest.mark.slow),
    ],
)
def test_publish_killed_at_any_call_leaves_old_or_new(made: MadeStore, older: bool, after: bool) -> None:
    """kill -9 before or after each call of publishing: the hook is as before or has the new set, and the next
    publishing succeeds (field reports C4, D16).
    """
    old = made.publish("old").warm_set if older else None
    steps = count_steps(made, "new")
    seen = set()

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(1, steps + 1):
        crashed = made.copy(made.folder.parent / f"step-{step}")

        def run(crashed: MadeStore = crashed, step: int = step) -> None:
            stop_at(crashed, step, die, after=after)
            crashed.publish("new")

        assert -signal.SIGKILL == fork(run)
        found = handed_out(crashed)
        seen.add(found)
        for path in stored_manifests(crashed.layout):
            # What is visible is whole, also where no record names it yet.
            read_manifest(crashed.layout, f"sha256:{path.parent.name}", f"sha256:{path.stem}")
        new = crashed.publish("new").warm_set
        assert found in (old, new)
        assert new == handed_out(crashed)
        shutil.rmtree(crashed.folder)

    assert steps > 20
    assert {old, new} == seen


# At once


@pytest.mark.parametrize("same", [False, True], ids=["eight sets", "one set"])
def test_publish_eight_at_once_keeps_all_sets(made: MadeStore, same: bool) -> None:
    """Publishers of one recipe lose nothing of each other's (field reports C1, C3, C13)."""
    names = ["same"] * 8 if same else [f"set-{number}" for number in range(8)]
    children = []
    for name in names:
        child = os.fork()
        if child == 0:
            try:
                made.publish(name)
                os._exit(0)
            except BaseException:  # noqa: BLE001 - as in fork()
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

    record = record_of(made)
    assert [0] * 8 == codes
    assert record is not None
    assert (1 if same else 8) == len({item.warm_set for item in record.sets}) == len(record.sets)
    assert 8 == record.sequence
    for number in range(len(record.sets)):
        # Each set is whole: the newest is taken away until the last one is handed out.
        assert record.sets[number].warm_set == handed_out(made)
        path = made.layout.boot_record(record.recipe_digest)
        path.unlink()
        path.write_bytes(replace(record, sets=record.sets[number + 1 :]).to_bytes())


def test_publish_while_hooks_run_is_never_seen_half(made: MadeStore) -> None:
    """Hooks during a dozen publishings hand out one whole set each (field reports C2, C8)."""
    sets = {made.publish("0").warm_set}

    def watch() -> None:
        for _ in range(60):
            assert handed_out(made) is not None

    child = os.fork()
    if child == 0:
        try:
            watch()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - as in fork()
            traceback.print_exc()
            os._exit(1)
    for number in range(1, 13):
        sets.add(made.publish(str(number)).warm_set)

    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert handed_out(made) in sets


# Full or broken disks


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.slow)], ids=["ENOSPC", "EIO"]
)
def test_publish_failing_at_any_call_shows_nothing_new(made: MadeStore, number: int) -> None:
    """Whichever call fails, the error has exit code 3 and the hook is as before (field reports F1, F10)."""
    old = made.publish("old").warm_set
    steps = count_steps(made, "new")
    outcomes = []

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    for step in range(1, steps + 1):
        broken = made.copy(made.folder.parent / f"step-{step}")

        def run(broken: MadeStore = broken, step: int = step) -> None:
            stop_at(broken, step, fail)
            try:
                broken.publish("new")
            except CachectlError as error:
                os._exit(9 if (error.exit_code, os.strerror(number) in str(error)) == (3, True) else 8)

        code = fork(run) if step not in database_steps(made, steps) else 9
        found = handed_out(broken)
        # A call whose failure is borne, such as the note of a lock's holder, does no harm.
        assert code in (0, 9)
        outcomes.append(code)
        if code == 9:
            new = broken.publish("new").warm_set
            assert found in (old, new)
        shutil.rmtree(broken.folder)

    assert outcomes.count(9) > 20


def database_steps(made: MadeStore, steps: int) -> set[int]:
    """Return the steps at which the database itself is called, whose failures tests/store/test_manifest.py shows."""
    report = made.folder / "database-steps"
    if not report.exists():
        spare = made.copy(made.folder.parent / "located")

        def run() -> None:
            count = stop_at(spare, 0, lambda: None)
            real = ManifestRepo.publish
            found = []

            def publish(*arguments: Any, **named: Any) -> int:
                found.append(count[0] + 1)
                return real(*arguments, **named)

            ManifestRepo.publish = publish  # type: ignore[method-assign]
            spare.publish("new")
            report.write_text("\n".join(map(str, found)))

        assert 0 == fork(run)
    return {int(line) for line in report.read_text().split()}


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Make file systems of some KiB below the test's folder."""
    folders = []

    def mount(size_kib: int) -> Path:
        folder = tmp_path / f"disk-{size_kib}"
        folder.mkdir()
        options = f"size={size_kib}k,mode=0755"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_publish_on_a_disk_that_fills_shows_nothing_half(
    made: MadeStore, mounted: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On real file systems that are too small by more and less nothing new is visible until all of it fits (F10)."""
    needed = sum(path.stat().st_size for path in made.layout.root.rglob("*") if path.is_file()) // 1024
    seen = set()
    for size_kib in range(needed + 40, needed + 500, 40):
        folder = mounted(size_kib)
        shutil.copytree(made.layout.root, folder / "store")
        small = made.copy(made.folder.parent / f"small-{size_kib}")
        shutil.rmtree(small.layout.root)
        small.layout.root.symlink_to(folder / "store")

        def run(small: MadeStore = small) -> None:
            try:
                small.publish("new", size_bytes=60_000)
            except CachectlError as error:
                os._exit(9 if error.exit_code == 3 else 8)

        code = fork(run)
        assert code in (0, 9)
        assert (code == 0) == (handed_out(small) is not None)
        assert [] == [path.name for path in small.layout.tmp.iterdir()]
        seen.add(code)

    assert {0, 9} == seen
