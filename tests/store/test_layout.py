"""Where a store lies and how it is made: once, by whoever comes, and never over other people's files."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cachectl.errors import ArtifactNotFoundError, DocumentError, StoreError, StoreReadOnlyError
from cachectl.schemas.canonical import digest_bytes
from cachectl.store.layout import StoreLayout, bare_hex, default_store_root, describe_os_error, read_bounded

DIGEST = digest_bytes(b"x")


def modes(root: Path) -> set[int]:
    """Return the permission bits of all folders of a store."""
    return {path.stat().st_mode & 0o7777 for path in [root, *root.rglob("*")] if path.is_dir()}


def test_resolve_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder counts once, when the store is named (field report P5)."""
    monkeypatch.chdir(tmp_path)
    layout = StoreLayout.resolve("store")
    monkeypatch.chdir("/")

    assert tmp_path / "store" == layout.root
    assert not layout.root.exists()


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"XDG_DATA_HOME": "/data", "HOME": "/home/x"}, "/data/cachectl/store"),
        ({"XDG_DATA_HOME": "", "HOME": "/home/x"}, "/home/x/.local/share/cachectl/store"),
        ({"XDG_DATA_HOME": "relative", "HOME": "/home/x"}, "/home/x/.local/share/cachectl/store"),
    ],
)
def test_default_store_root_follows_xdg(environ: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user data dir is XDG's, and a relative one is ignored as XDG wants."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    assert Path(wanted) == default_store_root()


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_default_store_root_without_home_refused(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A numeric uid without a home gets a hint, not a folder below / (field reports P4, P5)."""
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("HOME")
    if home is not None:
        monkeypatch.setenv("HOME", home)

    with pytest.raises(StoreError, match="CACHECTL_STORE"):
        default_store_root()


def test_resolve_url_refused() -> None:
    """A URL is not taken for a folder of that name."""
    with pytest.raises(StoreError, match="folders only"):
        StoreLayout.resolve("https://cache.example/store")


@pytest.mark.parametrize("below", ["", "/below"])
def test_create_at_a_file_refused(tmp_path: Path, below: str) -> None:
    """A file where the store or its parent should be stays as it is."""
    (tmp_path / "file").write_text("mine")
    layout = StoreLayout(Path(f"{tmp_path / 'file'}{below}"))

    with pytest.raises(StoreError, match=r"is a file|Not a directory|File exists"):
        layout.create()
    with pytest.raises(StoreError):
        layout.check()
    assert "mine" == (tmp_path / "file").read_text()


def test_create_twice_makes_one_store(tmp_path: Path) -> None:
    """The first call makes it, the second finds it."""
    layout = StoreLayout(tmp_path / "deep" / "store")

    assert (False, True, False, True) == (layout.exists(), layout.create(), layout.create(), layout.exists())
    layout.check()
    assert (layout.root / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
    assert [] == list(layout.tmp.iterdir())


@pytest.mark.parametrize("name", ["thesis.tex", "tmp", "blobs"])
def test_create_in_a_foreign_folder_refused(tmp_path: Path, name: str) -> None:
    """A folder that holds anything of others never becomes ours to delete in (field report C7)."""
    (tmp_path / "store" / name).mkdir(parents=True)

    with pytest.raises(StoreError, match="is not empty"):
        StoreLayout(tmp_path / "store").create()
    assert [name] == [path.name for path in (tmp_path / "store").iterdir()]


def test_create_in_a_fresh_volume_succeeds(tmp_path: Path) -> None:
    """A new ext4 volume holds lost+found, an NFS export .snapshot; both are empty to us."""
    for name in ("lost+found", ".snapshot"):
        (tmp_path / "store" / name).mkdir(parents=True)

    assert StoreLayout(tmp_path / "store").create()


@pytest.mark.parametrize("call", ["mkdir", "write_text", "write_bytes"])
def test_create_interrupted_is_completed_later(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever step fails, the next making completes the store (field report D16)."""
    layout = StoreLayout(tmp_path / "store")
    real = getattr(Path, call)
    fails_at = {"mkdir": 4, "write_text": 1, "write_bytes": 1}[call]
    calls = 0

    def fail(self: Path, *arguments: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, call, fail)
        with pytest.raises(StoreError, match="No space left"):
            layout.create()
    assert not layout.exists()

    assert layout.create()
    layout.check()


def test_create_by_eight_processes_at_once_succeeds(tmp_path: Path) -> None:
    """Builders that start on an empty volume together all get the store (field reports C1, C14)."""
    script = (
        "import sys, time; from pathlib import Path; from cachectl.store.layout import StoreLayout\n"
        "time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
        "StoreLayout(Path(sys.argv[1])).create(); StoreLayout(Path(sys.argv[1])).check()\n"
    )
    import time

    for number in range(3):
        start = str(time.time() + 1.0)
        command = [sys.executable, "-c", script, str(tmp_path / f"store{number}"), start]
        processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(8)]
        errors = [process.communicate(timeout=200)[1] for process in processes]

        assert [""] * 8 == errors


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_create_umask_any_gives_readable_folders(tmp_path: Path, umask: int) -> None:
    """Other users' pods read a store and nobody else writes it, whatever the umask (field report P7)."""
    layout = StoreLayout(tmp_path / "store")
    before = os.umask(umask)
    try:
        layout.create()
        layout.make_folder(layout.blob(DIGEST).parent)
    finally:
        os.umask(before)

    assert {0o755} == modes(layout.root)


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o2775])
def test_create_in_an_existing_folder_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    """Who made the folder decided who reads and writes it; all folders below follow."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    layout = StoreLayout(tmp_path / "store")

    layout.create()
    layout.make_folder(layout.manifest(DIGEST, DIGEST).parent)

    assert {mode} == modes(layout.root)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"schema":"cachectl/store/v2"}', "cachectl/store/v2"),
        (b"[]", "schema None"),
        (b"", "is not JSON"),
        (b"[" * 60_000, "is not JSON"),
        (b"\xff", "is not JSON"),
    ],
    ids=["newer", "list", "empty", "deep", "no text"],
)
def test_check_strange_mark_refused(tmp_path: Path, data: bytes, message: str) -> None:
    """A mark that this program can't read is no store of its."""
    layout = StoreLayout(tmp_path)
    layout.mark.write_bytes(data)

    with pytest.raises(DocumentError, match=message):
        layout.check()


def test_check_missing_store_names_the_command(tmp_path: Path) -> None:
    """Nothing there is told apart from something wrong there."""
    with pytest.raises(StoreError, match=f"run: cachectl init --store {tmp_path}"):
        StoreLayout(tmp_path).check()


def test_paths_lie_below_the_root_by_bare_hex(tmp_path: Path) -> None:
    """Digests stand in names without their prefix, spread over folders by their first two digits."""
    layout, name = StoreLayout(tmp_path), bare_hex(DIGEST)

    assert tmp_path / "blobs" / "sha256" / name[:2] / name == layout.blob(DIGEST)
    assert tmp_path / "entries" / name[:2] / name / f"{name}.json" == layout.manifest(DIGEST, DIGEST)
    assert tmp_path / "boot" / "recipes" / f"{name}.json" == layout.boot_record(DIGEST)
    assert tmp_path / "boot" / "raw" / name == layout.raw_recipe(DIGEST)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StoreError),
        (errno.EDQUOT, StoreError),
        (errno.EACCES, StoreReadOnlyError),
        (errno.EROFS, StoreReadOnlyError),
        (errno.EIO, StoreError),
    ],
    ids=errno.errorcode.get,
)
def test_describe_os_error_kind_and_words(number: int, kind: type[StoreError]) -> None:
    """Denied is told apart from full and from broken; all end with exit code 3 (field report F12)."""
    error = describe_os_error(OSError(number, os.strerror(number)), "can't write blob x")

    assert (kind, 3) == (type(error), error.exit_code)
    assert error.message == f"can't write blob x: {os.strerror(number)}"
    assert not isinstance(error, ArtifactNotFoundError)


def test_read_bounded_stops_at_the_limit(tmp_path: Path) -> None:
    """A file that is far too large is not read to its end; one byte more tells it."""
    (tmp_path / "large").write_bytes(b"x" * 100)

    assert b"x" * 11 == read_bounded(tmp_path / "large", 10)


def test_read_bounded_special_files_refused_at_once(tmp_path: Path) -> None:
    """FIFOs, also with somebody at the other end, devices, folders and links are refused without waiting."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("large")
    (tmp_path / "large").write_bytes(b"x")
    holder = os.open(tmp_path / "fifo", os.O_RDWR)
    try:
        for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero"), tmp_path / "link"):
            with pytest.raises(OSError, match=r"no regular file|symbolic link"):
                read_bounded(path, 10)
    finally:
        os.close(holder)
    assert b"x" == read_bounded(tmp_path / "link", 10, follow=True)
