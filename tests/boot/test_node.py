"""The node copy: one verified file per blob, laid down once, bounded, and never trusted unread."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cachectl.boot import node as node_module
from cachectl.boot.materialize import Timing, lay_down
from cachectl.boot.node import NODE_DAYS_KEPT, NodeCopy, node_copy
from cachectl.errors import ArtifactCorruptedError
from cachectl.schemas.boot import ArtifactFile, StoredEntry
from cachectl.schemas.canonical import digest_bytes
from cachectl.store.blobs import BlobStore
from tests.stores import MadeStore, blobs_of

DATA = {"compiled_module": b"code" * 100_000, "static/ts1/x.run": b"#!/bin/sh\n"}
ALWAYS = {"CACHECTL_NODE_COPY": "always"}
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount")


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    """A store that holds the entry's files."""
    return blobs_of(tmp_path / "store", DATA.values())


@pytest.fixture
def entry() -> StoredEntry:
    """An entry of two files."""
    files = tuple(ArtifactFile(path, digest_bytes(data), len(data), 0o700) for path, data in DATA.items())
    return StoredEntry(digest_bytes(b"key"), "r", "decode", "b4", 0, {}, "npugraph_ex", "1", "Model/decode", files)


@pytest.fixture
def node(tmp_path: Path, blobs: BlobStore) -> NodeCopy:
    """An empty node copy."""
    (tmp_path / "warm").mkdir(mode=0o700)
    made = node_copy(tmp_path / "warm", blobs.layout.blobs, ALWAYS)
    assert made is not None
    return made


@pytest.fixture
def lay(blobs: BlobStore, entry: StoredEntry, node: NodeCopy, tmp_path: Path) -> Any:
    """Lay the entry down in a new folder; its files have to be right, private, and nobody else's."""

    def laid(within_s: float = 200.0) -> Path:
        folder = tmp_path / "handouts" / os.urandom(4).hex()
        folder.mkdir(parents=True)
        place = lay_down(blobs, entry, folder, deadline_s=time.monotonic() + within_s, timing=Timing(), node=node)
        found = {path: (place / path).read_bytes() for path in DATA}
        assert found == DATA
        assert {1} == {(place / path).stat().st_nlink for path in DATA}
        return place

    return laid


def kept(node: NodeCopy) -> list[str]:
    """Return the names of the files in a node copy."""
    return sorted(path.name for path in (node.root / "blobs").rglob("*") if path.is_file())


NAMES = sorted(digest_bytes(data).removeprefix("sha256:") for data in DATA.values())


def test_lay_down_fills_the_node_copy_once(lay: Any, node: NodeCopy, blobs: BlobStore) -> None:
    """Each blob once, 0400; the second hand-out reads nothing from the store (field report F2)."""
    lay()
    for data in DATA.values():
        blobs.layout.blob(digest_bytes(data)).unlink()
    lay()

    assert NAMES == kept(node)
    assert {0o400} == {node.path(f"sha256:{name}").stat().st_mode & 0o777 for name in NAMES}
    assert [] == node.told


@pytest.mark.parametrize("rot", [b"", b"code" * 99_999 + b"kode", b"code" * 100_001], ids=len)
def test_lay_down_rotten_node_copy_is_mended_and_told(lay: Any, node: NodeCopy, rot: bytes) -> None:
    """The bytes are hashed again; what is wrong is dropped and read from the store (field reports D6, D15)."""
    lay()
    path = node.path(digest_bytes(DATA["compiled_module"]))
    path.chmod(0o600)
    path.write_bytes(rot)

    lay()

    assert DATA["compiled_module"] == path.read_bytes()
    assert [("artifact", "node copy", "corrupt")] == [(told.part, told.name, told.kind) for told in node.told]
    assert str(path) == node.told[0].stored


def test_lay_down_damaged_blob_is_not_kept(lay: Any, node: NodeCopy, blobs: BlobStore) -> None:
    """What the store has wrong does not reach the node copy under a right name."""
    path = blobs.layout.blob(digest_bytes(DATA["compiled_module"]))
    path.unlink()
    path.write_bytes(b"other")

    with pytest.raises(ArtifactCorruptedError):
        lay()
    assert [] == kept(node)


@pytest.mark.parametrize("kind", ["link", "folder", "fifo", "foreign"])
def test_lay_down_planted_node_file_is_not_followed(lay: Any, node: NodeCopy, kind: str, tmp_path: Path) -> None:
    """Whatever stands where a blob should be, the hand-out is right (field report P9)."""
    path = node.path(digest_bytes(DATA["compiled_module"]))
    path.parent.mkdir()
    if kind == "link":
        (tmp_path / "victim").write_bytes(DATA["compiled_module"])
        path.symlink_to(tmp_path / "victim")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(b"theirs")
        if os.getuid() == 0:
            os.chown(path, 1234, 1234)

    lay()

    assert not (tmp_path / "victim").exists() or DATA["compiled_module"] == (tmp_path / "victim").read_bytes()


def test_lay_down_leftover_of_a_killed_hook_is_replaced(lay: Any, node: NodeCopy) -> None:
    """Half a blob lies under another name, and is not read."""
    path = node.path(digest_bytes(DATA["compiled_module"]))
    path.parent.mkdir()
    path.with_name(f".{path.name}").write_bytes(b"code")

    lay()

    assert NAMES == kept(node)


def test_lay_down_lock_held_for_good_reads_from_the_store(
    lay: Any, node: NodeCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the time that is left is waited, then it goes without (field report C10)."""
    held = []
    for name in NAMES:
        held.append(os.open(node.root / "locks" / name[:2], os.O_RDWR | os.O_CREAT))
        fcntl.flock(held[-1], fcntl.LOCK_EX)
    waited_s, clock = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + sum(waited_s))
    monkeypatch.setattr(time, "sleep", waited_s.append)

    lay(within_s=100.0)

    monkeypatch.undo()
    # Half of it for the first blob, and half of the rest for the second.
    assert 50.0 < sum(waited_s) < 80.0
    assert [] == kept(node)
    for descriptor in held:
        os.close(descriptor)


@pytest.mark.parametrize("call", ["flock", "mkdir", "rename", "statvfs"])
def test_lay_down_node_copy_that_fails_is_done_without(
    lay: Any, node: NodeCopy, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that goes wrong with the node copy keeps a hand-out from being made (field reports F5, F9, F10)."""
    module: Any = fcntl if call == "flock" else os
    plain = getattr(module, call)

    def fail(*arguments: Any, **named: Any) -> Any:
        if call == "flock" or str(node.root) in str(arguments[0]):
            raise OSError(errno.ENOSPC if call == "mkdir" else errno.ENOSYS, "no")
        return plain(*arguments, **named)

    monkeypatch.setattr(module, call, fail)
    lay()
    monkeypatch.undo()

    assert [] == kept(node)


def test_lay_down_no_room_for_both_goes_without(lay: Any, node: NodeCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hand-out comes first."""
    monkeypatch.setattr(node_module, "_SPARE_BYTES", 1 << 60)

    lay()

    assert [] == kept(node)


def test_lay_down_full_disk_takes_the_node_copys_room(
    lay: Any, node: NodeCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the node keeps is for speed; the hand-out is for this boot (field report F10)."""
    lay()
    plain, full = os.write, [True]

    def write(descriptor: int, data: Any) -> int:
        if full.pop() if full else False:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    lay()
    monkeypatch.undo()

    assert digest_bytes(DATA["compiled_module"]).removeprefix("sha256:") not in kept(node)


def test_make_room_takes_what_is_being_laid_down(node: NodeCopy) -> None:
    """Its room is free before its writer is done, which writes no more of it and keeps nothing."""
    data = b"x" * (1 << 20)
    with node.adding(digest_bytes(data), len(data), time.monotonic() + 200.0) as pending:
        assert pending is not None
        pending.write(memoryview(data)[: 1 << 19])
        made = node.make_room()
        sizes = [os.fstat(pending.descriptor).st_size]
        pending.write(memoryview(data)[1 << 19 :])
        sizes.append(os.fstat(pending.descriptor).st_size)
        node.keep(digest_bytes(data), pending, len(data))

    assert (True, [0, 0], []) == (made, sizes, kept(node))


def test_make_room_that_nobody_can_make_ends(node: NodeCopy, lay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be removed makes no room; others' is waited for a few times, whichever files ask."""
    lay()

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "denied", str(path))

    monkeypatch.setattr(os, "unlink", refuse)
    waited = sum(1 for _ in range(100) if node.make_room())

    assert (0 < waited < 20, False) == (True, node.make_room())


def test_adding_a_forked_process_keeps_no_lock(node: NodeCopy) -> None:
    """A program that forks while a thread of it lays a blob down: others can lay down the next one at once."""
    digests = ["sha256:ab" + "0" * 62, "sha256:ab" + "1" * 62]
    reading, writing = os.pipe()
    with node.adding(digests[0], 1, time.monotonic() + 200.0):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
    try:
        with node.adding(digests[1], 1, time.monotonic()) as pending:
            found = pending is not None
    finally:
        os.close(writing)
        os.waitpid(child, 0)
        os.close(reading)

    assert found


def test_lay_down_clones_where_the_file_system_can(lay: Any, node: NodeCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone is hashed as it lies there; a file system that refuses is asked once (stands for btrfs, XFS)."""
    lay()
    cloned = []

    def clone(target: int, request: int, source: int) -> int:
        assert 0x40049409 == request
        cloned.append(os.pwrite(target, os.pread(source, 1 << 20, 0), 0))
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)
    lay()
    path = node.path(digest_bytes(DATA["compiled_module"]))
    path.chmod(0o600)
    path.write_bytes(b"rot")
    lay()

    assert [len(data) for data in DATA.values()] == cloned[:2]
    assert 1 == len(node.told)


def test_forget_old_bounds_age_and_count(lay: Any, node: NodeCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest unused goes first, and who reads one goes on reading it."""
    lay()
    first, second = (node.path(f"sha256:{name}") for name in NAMES)
    os.utime(first, (time.time() - (NODE_DAYS_KEPT + 1) * 86400,) * 2)
    opened = node.open(f"sha256:{NAMES[1]}")
    assert opened is not None

    assert 1 == node.forget_old()
    assert (False, True) == (first.exists(), second.exists())
    monkeypatch.setattr(node_module, "NODE_FILES_KEPT", 0)
    assert 1 == node.forget_old()
    with opened:
        assert NAMES[1] == digest_bytes(opened.read()).removeprefix("sha256:")


def test_open_used_blob_is_young_again(lay: Any, node: NodeCopy) -> None:
    """By its last use it is known which is the oldest."""
    lay()
    path = node.path(f"sha256:{NAMES[0]}")
    os.utime(path, (0, 0))

    lay()

    assert time.time() - path.stat().st_mtime < 3600


def test_node_copy_same_file_system_none(tmp_path: Path) -> None:
    """It would be a second write of the same bytes; the variable overrules."""
    found = {how: node_copy(tmp_path, tmp_path, {"CACHECTL_NODE_COPY": how}) for how in ("auto", "always", "never")}

    assert {"auto": False, "always": True, "never": False} == {how: made is not None for how, made in found.items()}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs")
def test_node_copy_other_file_system_kept_unless_in_memory(tmp_path: Path) -> None:
    """A store on another device is read once; a warm dir in memory would hold everything twice."""
    shm = Path("/dev/shm")

    assert node_copy(tmp_path, shm, {}) is not None
    assert node_copy(shm, tmp_path, {}) is None


@pytest.mark.parametrize("planted", ["node", "node/blobs", "node/locks"])
@pytest.mark.parametrize("kind", ["link", "file"])
def test_node_copy_planted_folder_none(tmp_path: Path, planted: str, kind: str) -> None:
    """Nothing is laid down through a link."""
    (tmp_path / "elsewhere").mkdir()
    root = tmp_path / "warm"
    (root / planted).parent.mkdir(parents=True)
    (root / planted).symlink_to(tmp_path / "elsewhere") if kind == "link" else (root / planted).touch()

    assert node_copy(root, tmp_path, ALWAYS) is None
    assert [] == list((tmp_path / "elsewhere").iterdir())


def test_hook_eight_at_once_on_an_empty_node_lay_down_once(made: MadeStore) -> None:
    """All are warm, and no blob is written twice (field reports C9, C14)."""
    made.publish("large", size_bytes=4 << 20)
    command = [sys.executable, "-m", "cachectl", "hook", str(made.recipe), "-q", "--format", "env", "--deadline", "200"]
    processes = [subprocess.Popen(command, env=made.hook_environ(ALWAYS), stdout=subprocess.PIPE) for _ in range(8)]
    outputs = [process.communicate(timeout=250)[0] for process in processes]

    assert all(b"CACHECTL_HANDOUT=" in output for output in outputs)
    blobs = [path for path in (made.warm_dir / "node" / "blobs").rglob("*") if path.is_file()]
    assert {digest_bytes(path.read_bytes()).removeprefix("sha256:") for path in blobs} == {path.name for path in blobs}
    # Three files an entry set: two modules and the kernel that both share.
    assert 3 == len(blobs)


@needs_root
def test_hook_store_on_another_device_is_read_once(made: MadeStore, tmp_path: Path) -> None:
    """With the store on a volume of its own, as NFS or an image volume, the second hook reads no blob of it."""
    volume = tmp_path / "volume"
    volume.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(volume)], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        store = volume / "store"
        subprocess.run(["cp", "-a", str(made.layout.root), str(store)], check=True)
        outcomes = [made.hook("--store", store).outcome]
        for path in (store / "blobs").rglob("*"):
            if path.is_file():
                path.unlink()
        outcomes.append(made.hook("--store", store).outcome)
    finally:
        subprocess.run(["umount", "--lazy", str(volume)], check=True)

    assert ["warm", "warm"] == outcomes


def test_hook_rotten_node_copy_is_warm_and_told(made: MadeStore) -> None:
    """The report says that this node's disk has lost a file."""
    made.hook(environ=ALWAYS)
    for path in (made.warm_dir / "node" / "blobs").rglob("*"):
        if path.is_file():
            path.chmod(0o600)
            path.write_bytes(b"rot")

    hooked = made.hook("--strict", environ=ALWAYS)

    assert ("warm", {("artifact", "node copy", "corrupt")}) == (hooked.outcome, set(hooked.against))
    assert ("warm", []) == ((again := made.hook(environ=ALWAYS)).outcome, again.against)


@needs_root
@pytest.mark.parametrize("options", ["size=1m", "size=8m,nr_inodes=40"])
def test_hook_small_disk_is_warm_without_a_node_copy(made: MadeStore, tmp_path: Path, options: str) -> None:
    """Too little room or too few inodes for both: the hand-out is made, and nothing else (field reports F9, F10)."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"{options},mode=0700", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        hooked = made.hook("--warm-dir", disk / "warm", environ=ALWAYS)
        blobs = [path for path in (disk / "warm" / "node" / "blobs").rglob("*") if path.is_file()]
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)

    assert ("warm", [], []) == (hooked.outcome, hooked.against, blobs)
