"""The hook on damaged stores and failing machines, in real processes: cold with the reason, and never worse."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cachectl.schemas.canonical import digest_bytes
from tests.boot.hook_stores import handouts, manifest_of, overwrite, record_of, uid_of_nobody
from tests.stores import MadeStore, make_store

# Runs the hook as another user. The interpreter itself may lie where that user can't look, so all is imported before.
AS_UID = """
import os, sys
from cachectl.boot import hook
uid, program, arguments = int(os.environ["TEST_UID"]), sys.argv[1], sys.argv[2:]
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
sys.exit(hook.main(arguments))
"""
NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")


# Damaged stores are cold


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    overwrite(path, bytes(data))


def truncate(path: Path) -> None:
    overwrite(path, path.read_bytes()[: path.stat().st_size // 2])


def cut_one_byte(path: Path) -> None:
    overwrite(path, path.read_bytes()[:-1])


def grow(path: Path) -> None:
    overwrite(path, path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    overwrite(path, b"")


def remove(path: Path) -> None:
    path.unlink()


def plant_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def plant_link(path: Path) -> None:
    kept = path.with_name("kept")
    path.rename(kept)
    path.symlink_to(kept)


def plant_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (flip_a_bit, "corrupt"),
    (truncate, "corrupt"),
    (cut_one_byte, "corrupt"),
    (grow, "corrupt"),
    (empty, "corrupt"),
    (remove, "absent"),
    (plant_fifo, "corrupt"),
    (plant_link, "corrupt"),
    (plant_folder, "corrupt"),
]
each_damage = pytest.mark.parametrize(("damage", "kind"), DAMAGES, ids=lambda value: getattr(value, "__name__", ""))


@each_damage
def test_hook_damaged_blob_cold(made: MadeStore, damage: Callable[[Path], None], kind: str) -> None:
    """Bytes that aren't what was published are never handed out, and nothing hangs (field reports D4, D6, D8, P9)."""
    damage(made.blob())

    hooked = made.hook()

    assert ("cold", kind, 0) == (hooked.outcome, hooked.against[0][2], hooked.returncode)
    assert 1 == len(hooked.against)
    assert hooked.report["reasons"][0]["stored"]
    assert [] == handouts(made.warm_dir)
    assert {} == hooked.report["env"]


@each_damage
def test_hook_damaged_manifest_cold(made: MadeStore, damage: Callable[[Path], None], kind: str) -> None:
    """A manifest is what the digest in its name says, or the set is not used."""
    damage(manifest_of(made))

    hooked = made.hook()

    assert ("cold", [kind]) == (hooked.outcome, [kind for _, _, kind in hooked.against])
    assert [] == handouts(made.warm_dir) if made.warm_dir.exists() else True


@pytest.mark.parametrize("damage", [truncate, empty, plant_fifo, plant_link, plant_folder])
@pytest.mark.parametrize("which", ["record", "pointer", "mark"])
def test_hook_damaged_record_cold(made: MadeStore, which: str, damage: Callable[[Path], None]) -> None:
    """A boot record, pointer or mark that can't be read is cold, without a hang or a trace."""
    record = record_of(made)[0]
    pointer = made.layout.raw_recipe(digest_bytes(made.recipe.read_bytes()))
    path = {"record": record, "pointer": pointer, "mark": made.layout.mark}[which]
    damage(path)

    hooked = made.hook()

    assert ("cold", 0) == (hooked.outcome, hooked.returncode)
    assert 1 == len(hooked.against)
    assert "store" == hooked.against[0][0]
    assert "Traceback" not in hooked.stderr


@pytest.mark.parametrize(
    "change",
    [
        b'{"schema":"cachectl/boot-record/v2"}',
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"schema":"cachectl/boot-record/v1","sets":7}',
        b"null",
    ],
    ids=["newer", "list", "no text", "deep", "mistyped", "null"],
)
def test_hook_strange_record_cold(made: MadeStore, change: bytes) -> None:
    """A record of a newer program, or of none, is refused in words."""
    overwrite(record_of(made)[0], change)

    hooked = made.hook()

    assert ("cold", [("store", "document", "corrupt")]) == (hooked.outcome, hooked.against)
    assert hooked.report["reasons"][0]["hint"]


def test_hook_newer_store_cold(made: MadeStore) -> None:
    """A store of another schema is refused, not read wrong."""
    overwrite(made.layout.mark, b'{"schema":"cachectl/store/v2"}')

    hooked = made.hook()

    assert ("cold", [("store", "document", "corrupt")]) == (hooked.outcome, hooked.against)
    assert "cachectl/store/v2" in hooked.report["reasons"][0]["stored"]


def test_hook_manifest_of_another_key_cold(made: MadeStore) -> None:
    """Neither another entry's bytes under this name nor its name under this key are taken."""
    b4, b2 = manifest_of(made, "b4"), manifest_of(made, "b2")
    overwrite(b4, b2.read_bytes())
    swapped = made.hook()
    path, record = record_of(made)
    first, second = record.sets[0].members
    renamed = (replace(first, manifest=second.manifest), second)
    shutil.copy(made.layout.manifest(second.key, second.manifest), made.layout.manifest(first.key, second.manifest))
    overwrite(path, replace(record, sets=(replace(record.sets[0], members=renamed),)).to_bytes())
    pointed = made.hook()

    assert ("cold", [("artifact", "digest", "corrupt")]) == (swapped.outcome, swapped.against)
    assert ("cold", [("artifact", "digest", "corrupt")]) == (pointed.outcome, pointed.against)


def test_hook_record_with_other_members_cold(made: MadeStore) -> None:
    """A warm set's id is that of its members: one left out is noticed (field report D8)."""
    path, record = record_of(made)
    overwrite(path, replace(record, sets=(replace(record.sets[0], members=record.sets[0].members[:1]),)).to_bytes())

    hooked = made.hook()

    assert ("cold", [("store", "document", "corrupt")]) == (hooked.outcome, hooked.against)


@pytest.mark.parametrize("part", ["toolchain", "device", "options", "environment"])
def test_hook_record_request_unlike_its_entries_cold(made: MadeStore, part: str) -> None:
    """What the record says of its entries is compared with what they say themselves (field report W19)."""
    path, record = record_of(made)
    request = record.sets[0].request
    # A record that was rewritten to fit this machine, over entries that were built for another.
    made.publish("b", request={part: {**request[part], "other": 1}})
    path, record = record_of(made)
    lying = replace(record.sets[0], request=request)
    overwrite(path, replace(record, sets=(lying,)).to_bytes())

    hooked = made.hook()

    assert ("cold", [("artifact", "digest", "corrupt")]) == (hooked.outcome, hooked.against)
    assert f"{part}.other" in hooked.report["reasons"][0]["stored"]


@pytest.mark.parametrize("damaged", ["blob", "manifest", "members"])
def test_hook_damaged_newest_set_older_one_warm(made: MadeStore, damaged: str) -> None:
    """The older set that is whole is handed out, and the damage is told beside it."""
    newest = made.publish("newer")
    if damaged == "blob":
        flip_a_bit(made.blob("newer"))
    elif damaged == "manifest":
        manifest_of(made).unlink()
    else:
        path, record = record_of(made)
        overwrite(path, replace(record, sets=(replace(record.sets[0], members=()), *record.sets[1:])).to_bytes())

    hooked = made.hook("--strict")

    assert ("warm", 0) == (hooked.outcome, hooked.returncode)
    assert newest.warm_set != hooked.report["warm_set"]
    assert 2 == len(hooked.report["entries"])
    assert 1 == len(hooked.against)
    assert 1 == len(list((made.warm_dir / "handouts").iterdir()))


# So are store, warm dir and machine where they fail


def test_hook_store_is_a_file_cold(made: MadeStore) -> None:
    """A file where the store should be is said to be one."""
    shutil.rmtree(made.layout.root)
    made.layout.root.write_text("no store")

    hooked = made.hook()

    assert ("cold", "store", 0) == (hooked.outcome, hooked.against[0][0], hooked.returncode)
    assert "is a file" in hooked.report["reasons"][0]["stored"]


def test_hook_store_missing_cold(made: MadeStore) -> None:
    """No store is made by looking for one (field report P2)."""
    hooked = made.hook("--store", made.folder / "nowhere")

    assert ("cold", [("store", "store", "absent")]) == (hooked.outcome, hooked.against)
    assert f"run: cachectl init --store {made.folder / 'nowhere'}" == hooked.report["reasons"][0]["hint"]
    assert not (made.folder / "nowhere").exists()


def test_hook_no_store_named_and_no_home_cold(made: MadeStore) -> None:
    """Without HOME and CACHECTL_STORE there is no default, and that is said (field report P4)."""
    hooked = made.hook(environ={"CACHECTL_STORE": None, "HOME": None})

    assert ("cold", [("store", "store", "absent")]) == (hooked.outcome, hooked.against)
    assert "pass --store DIR or set CACHECTL_STORE" == hooked.report["reasons"][0]["hint"]


def as_uid(made: MadeStore, uid: int, *arguments: str | Path, **environ: str | None) -> tuple[str, list[str], str]:
    """Run the hook as another user; return outcome, reasons' names and the folder."""
    hooked = made.hook(*arguments, program=("-c", AS_UID), environ={"TEST_UID": str(uid), **environ})
    assert 0 == hooked.returncode, hooked.stderr
    return hooked.outcome, [name for _, name, _ in hooked.against], str(hooked.report["cache_dir"])


@needs_root
@pytest.mark.parametrize("place", ["", "boot", "entries", "blobs"])
def test_hook_store_unreadable_cold(open_made: MadeStore, place: str) -> None:
    """A store that this user may not read is denied, not missing (field reports D5, F12)."""
    own = open_made.folder / "own"
    own.mkdir()
    os.chown(own, NOBODY, NOBODY)
    warm = {"CACHECTL_WARM_DIR": str(own / "warm")}
    before = as_uid(open_made, NOBODY, **warm)
    (open_made.layout.root / place).chmod(0o000)

    after = as_uid(open_made, NOBODY, **warm)

    assert "warm" == before[0]
    assert ("cold", ["permission"]) == after[:2]


@needs_root
def test_hook_uid_without_passwd_entry_and_home_warm(open_made: MadeStore) -> None:
    """A random container uid gets its own folder below /var/tmp, named by its number (field reports P4, P6)."""
    uid = uid_of_nobody()
    folder = Path(f"/var/tmp/cachectl-{uid}")
    try:
        outcome, against, cache_dir = as_uid(open_made, uid, HOME=None, CACHECTL_WARM_DIR=None)

        assert ("warm", []) == (outcome, against)
        assert folder in Path(cache_dir).parents
        assert {(uid, 0o700)} == {
            (path.stat().st_uid, path.stat().st_mode & 0o777) for path in [folder, *folder.rglob("*")] if path.is_dir()
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@needs_root
def test_hook_two_uids_one_store_both_warm(open_made: MadeStore) -> None:
    """Whoever comes first owns nothing of the other's (field report P6)."""
    folders = []
    for uid in (NOBODY, 12345):
        own = open_made.folder / str(uid)
        own.mkdir()
        os.chown(own, uid, uid)
        outcome, _, cache_dir = as_uid(open_made, uid, HOME=str(own), CACHECTL_WARM_DIR=None)
        folders.append(cache_dir)
        assert "warm" == outcome

    assert 2 == len(set(folders))


@needs_root
def test_hook_warm_dir_of_another_uid_cold(made: MadeStore) -> None:
    """A folder that another user owns is not used, though root could write it."""
    made.warm_dir.mkdir(mode=0o777)
    os.chown(made.warm_dir, 1234, 1234)

    hooked = made.hook()

    assert ("cold", [("store", "warm dir", "policy")]) == (hooked.outcome, hooked.against)
    assert "owned by uid 1234" in hooked.report["reasons"][0]["stored"]
    assert [] == list(made.warm_dir.iterdir())


@needs_root
def test_hook_warm_dir_not_writable_cold(open_made: MadeStore) -> None:
    """A folder below one that this user may not write can't be made."""
    outcome, against, _ = as_uid(open_made, NOBODY, "--warm-dir", open_made.folder / "closed")

    assert ("cold", ["warm dir"]) == (outcome, against)
    assert not (open_made.folder / "closed").exists()


def test_hook_warm_dir_is_a_link_cold(made: MadeStore) -> None:
    """A link could be turned to another folder after the check (field report P9)."""
    (made.folder / "elsewhere").mkdir()
    made.warm_dir.symlink_to(made.folder / "elsewhere")

    hooked = made.hook()

    assert ("cold", [("store", "warm dir", "policy")]) == (hooked.outcome, hooked.against)
    assert "a symbolic link" == hooked.report["reasons"][0]["stored"]
    assert [] == list((made.folder / "elsewhere").iterdir())


def test_hook_warm_dir_is_a_file_cold(made: MadeStore) -> None:
    """A file is no folder, and stays."""
    made.warm_dir.write_text("mine")

    hooked = made.hook()

    assert ("cold", [("store", "warm dir", "policy")]) == (hooked.outcome, hooked.against)
    assert "mine" == made.warm_dir.read_text()


def test_hook_planted_link_inside_warm_dir_cold(made: MadeStore) -> None:
    """A folder that was open to others may hold their links; nothing is written through them (field report P9)."""
    made.warm_dir.mkdir()
    (made.folder / "elsewhere").mkdir()
    (made.warm_dir / "handouts").symlink_to(made.folder / "elsewhere")

    hooked = made.hook()

    assert ("cold", [("store", "warm dir", "policy")]) == (hooked.outcome, hooked.against)
    assert [] == list((made.folder / "elsewhere").iterdir())


def test_hook_full_disk_cold_leaves_nothing(made: MadeStore, small_disk: Path) -> None:
    """A hand-out that does not fit is removed whole, and the next one that fits is warm (field report F10)."""
    made.publish("large", size_bytes=200_000)

    large = made.hook("--warm-dir", small_disk / "warm")

    assert ("cold", ("store", "store", "absent")) == (large.outcome, large.against[0]) or "warm" == large.outcome
    if "warm" == large.outcome:
        # The older set fits; the reason tells what became of the newest.
        assert "No space left on device" in large.report["reasons"][0]["stored"]
    left = [path for path in handouts(small_disk / "warm") if "large" in path.name]
    assert [] == left


def test_hook_full_disk_without_older_set_cold(tmp_path: Path, small_disk: Path) -> None:
    """With no set that fits the start is cold, says where room is wanted, and leaves no file behind."""
    made = make_store(tmp_path / "made")
    made.publish("large", size_bytes=200_000)

    hooked = made.hook("--warm-dir", small_disk / "warm")

    assert ("cold", 0) == (hooked.outcome, hooked.returncode)
    assert "No space left on device" in hooked.report["reasons"][0]["stored"]
    assert "--warm-dir" in hooked.report["reasons"][0]["hint"]
    assert [] == handouts(small_disk / "warm")


def test_hook_deadline_passed_cold(tmp_path: Path) -> None:
    """What can't be done in time is not done (field report C10)."""
    made = make_store(tmp_path / "made")
    made.publish(size_bytes=48 << 20)

    hooked = made.hook("--deadline", "0.01")

    assert ("cold", [("policy", "deadline", "policy")]) == (hooked.outcome, hooked.against)
    # One that was too slow even to tidy up was killed; what it left is half of a hand-out, and the next sweep's.
    assert [] == list(made.warm_dir.glob("handouts/*/handout.json"))
    assert "warm" == made.hook().outcome


def test_hook_fifo_as_recipe_cold(made: MadeStore) -> None:
    """Nobody writes into it; the hook doesn't wait."""
    plant_fifo(made.recipe)

    hooked = made.hook()

    assert ("cold", [("policy", "recipe", "absent")]) == (hooked.outcome, hooked.against)


@pytest.mark.parametrize(
    "place", ["nowhere.yaml", "recipe", "recipe/recipe.yaml/x"], ids=["missing", "folder", "below"]
)
def test_hook_no_recipe_file_cold(made: MadeStore, place: str) -> None:
    """A path that is no recipe file is told, with the path."""
    hooked = made.hook(recipe=made.folder / place)

    assert ("cold", [("policy", "recipe", "absent")]) == (hooked.outcome, hooked.against)
    assert str(made.folder / place) == hooked.report["reasons"][0]["stored"]


def test_hook_working_folder_gone_cold(made: MadeStore) -> None:
    """A relative recipe in a folder that no longer is there is cold, not a trace."""
    gone = made.folder / "gone"
    gone.mkdir()
    script = 'rmdir "$PWD"; exec "$@"'

    hooked = made.hook(python=("/bin/sh", "-c", script, "sh", sys.executable), recipe=Path("recipe.yaml"), cwd=gone)

    assert ("cold", 0) == (hooked.outcome, hooked.returncode)
    assert "Traceback" not in hooked.stderr
