"""Where everything lies in a store; the only place that knows.

    <root>/
      store.json                        {"schema": "cachectl/store/v1"}: the mark without which nothing is deleted
      CACHEDIR.TAG                      backup tools leave the folder out (bford.info/cachedir)
      manifest.db                       the embedded database; an index, rebuilt from entries/ by `cachectl db reindex`
      blobs/sha256/ab/abcd…             one file by content, mode 0444
      blobs/sha256/ab/abcd….delta       the same by what it has in common with another blob (store/deltas.py)
      entries/ab/<key>/<manifest>.json  entry manifests in DSSE envelopes, named by key and own digest, mode 0444;
                                        a world's by what they have in common with a blob (store/manifest_deltas.py)
      boot/recipes/<recipe>.json        boot record of a recipe (digest of its meaning), replaced atomically
      boot/raw/<bytes>                  the digest of the meaning, by the digest of the recipe file's bytes; or which
                                        files to read next (schemas/trail.py)
      boot/absent/<recipe>.json         which ranks were found to have no method of which case; builds read it
      boot/lines/<line>.json            what builds left for the next one of a method's case (store/lines.py)
      boot/drafts/<line>.json           what a build recorded of a case and has not proved yet (store/drafts.py)
      boot/refused/<recipe>.json        which cases a gate refused lately, and of what (store/refusals.py)
      locks/<name>.lock                 one per recipe that is being built, one per boot record that is being written
      logs/<build>/…                    what the ranks of a build printed
      tmp/                              files being written; nothing here is ever read

Folders take the mode of the root, which is 0755 where we make it, whatever the umask (field report P7): what one user
builds other users' pods read, and nobody else writes. Digests appear in names as bare hex. Bump STORE_SCHEMA when a
reader of the old tree would go wrong, and nothing else. Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

from cachectl.errors import DocumentError, StoreError, StoreReadOnlyError
from cachectl.schemas.canonical import DIGEST_PREFIX, canonical_bytes
from cachectl.values import dataclass

__all__ = [
    "DELTA_SUFFIX",
    "NO_REGULAR_FILE",
    "STORE_SCHEMA",
    "StoreLayout",
    "bare_hex",
    "default_store_root",
    "describe_os_error",
    "fsync_folder",
    "read_bounded",
]

STORE_SCHEMA = "cachectl/store/v1"
DELTA_SUFFIX = ".delta"
# What opening a link, a folder or a special file where a file should be gives.
NO_REGULAR_FILE = (errno.ELOOP, errno.EINVAL, errno.EISDIR)
_ROOT_MODE = 0o755
_MARK_LIMIT_BYTES = 1 << 16
# What a file system or its server puts into an empty volume: no other people's files.
_VOLUME_FOLDERS = frozenset({"lost+found", ".snapshot"})
_OWN_NAMES = frozenset({"CACHEDIR.TAG", "blobs", "boot", "entries", "locks", "logs", "store.json", "tmp"})
_CACHEDIR_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# This folder holds compile caches made by cachectl.\n"


def bare_hex(digest: str) -> str:
    """Return the hex of a digest, for use in a file name."""
    return digest.removeprefix(DIGEST_PREFIX)


def default_store_root() -> Path:
    """Return the user data dir's store: $XDG_DATA_HOME, else ~/.local/share (XDG Base Directory, 0.8).

    Raises:
        StoreError: neither is set, as for a numeric uid without a passwd entry.
    """
    data_home = os.environ.get("XDG_DATA_HOME")
    if data_home and os.path.isabs(data_home):
        return Path(data_home) / "cachectl" / "store"
    home = os.environ.get("HOME")
    if home and os.path.isabs(home):
        return Path(home) / ".local" / "share" / "cachectl" / "store"
    raise StoreError(
        "no store named, and neither XDG_DATA_HOME nor HOME is set", hint="pass --store DIR or set CACHECTL_STORE"
    )


def describe_os_error(error: OSError, what: str) -> StoreError:
    """Return the store error for a failed system call; `what` says what was being done to which file."""
    reason = error.strerror or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(
            f"{what}: {reason}", hint="free space or inodes there, or pass another --store; nothing was published"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreReadOnlyError(f"{what}: {reason}", hint="run as the store's owner, or pass another --store")
    return StoreError(f"{what}: {reason}")


def read_bounded(path: Path, limit_bytes: int, *, follow: bool = False) -> bytes:
    """Return a regular file's bytes, at most `limit_bytes` + 1 of them, without waiting for anybody.

    Args:
        follow: whether the path may be a link, as a mounted ConfigMap's files are; nothing in a store is one.

    Raises:
        OSError: as `open` does; EINVAL for a FIFO, a device or a folder.
    """
    # O_NONBLOCK: a FIFO planted here must not hang the reader; it is refused by the fstat that follows the open.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(limit_bytes + 1)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class StoreLayout:
    """Paths of one store; making one touches no file."""

    root: Path

    @classmethod
    def resolve(cls, spec: str | None) -> StoreLayout:
        """Return the layout for `--store` (or the default); the folder need not exist.

        Raises:
            StoreError: the path is a file, or a URL, which this version can't open.
        """
        if spec is not None and "://" in spec:
            raise StoreError(f"store {spec}: this version opens folders only", hint="pass --store DIR")
        # Absolute from the first moment on: a service's cwd is often / (field report P5).
        root = Path(os.path.abspath(spec)) if spec else default_store_root()
        layout = cls(root)
        layout.refuse_file()
        return layout

    def refuse_file(self) -> None:
        """Raise StoreError if the store's path is something else than a folder."""
        try:
            if self.root.exists() and not self.root.is_dir():
                raise StoreError(f"store {self.root} is a file, not a folder", hint="pass --store DIR")
        except OSError as error:
            raise describe_os_error(error, f"store {self.root}") from error

    @property
    def mark(self) -> Path:
        return self.root / "store.json"

    @property
    def database(self) -> Path:
        return self.root / "manifest.db"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def entries(self) -> Path:
        return self.root / "entries"

    def blob(self, digest: str) -> Path:
        name = bare_hex(digest)
        return self.root / "blobs" / "sha256" / name[:2] / name

    def blob_delta(self, digest: str) -> Path:
        path = self.blob(digest)
        return path.with_name(path.name + DELTA_SUFFIX)

    @property
    def blobs(self) -> Path:
        return self.root / "blobs" / "sha256"

    def manifest(self, key: str, manifest: str) -> Path:
        name = bare_hex(key)
        return self.entries / name[:2] / name / f"{bare_hex(manifest)}.json"

    @classmethod
    def of_manifest(cls, path: Path) -> StoreLayout:
        """Return the layout of the store in which an entry manifest lies."""
        return cls(path.parents[3])

    def boot_record(self, recipe_digest: str) -> Path:
        return self.root / "boot" / "recipes" / f"{bare_hex(recipe_digest)}.json"

    def raw_recipe(self, raw_digest: str) -> Path:
        return self.root / "boot" / "raw" / bare_hex(raw_digest)

    def absences(self, recipe_digest: str) -> Path:
        return self.root / "boot" / "absent" / f"{bare_hex(recipe_digest)}.json"

    def line(self, name: str) -> Path:
        return self.root / "boot" / "lines" / f"{bare_hex(name)}.json"

    def draft(self, name: str) -> Path:
        return self.root / "boot" / "drafts" / f"{bare_hex(name)}.json"

    def refusals(self, recipe_digest: str) -> Path:
        return self.root / "boot" / "refused" / f"{bare_hex(recipe_digest)}.json"

    def lock(self, name: str) -> Path:
        return self.root / "locks" / f"{name}.lock"

    def exists(self) -> bool:
        """Say whether a store was made here."""
        return self.mark.is_file()

    def check(self) -> None:
        """Raise unless this is a store that this program can read.

        Raises:
            StoreError: no store here, or the path is a file.
            DocumentError: a store of another schema.
        """
        self.refuse_file()
        try:
            document = json.loads(read_bounded(self.mark, _MARK_LIMIT_BYTES))
        except FileNotFoundError as error:
            raise StoreError(f"no store at {self.root}", hint=f"run: cachectl init --store {self.root}") from error
        except OSError as error:
            raise describe_os_error(error, f"store {self.root}") from error
        except (ValueError, RecursionError) as error:
            raise DocumentError(
                f"{self.mark} is not JSON: {error}", hint="restore it from a backup of the store"
            ) from error
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != STORE_SCHEMA:
            raise DocumentError(f"store {self.root} has schema {schema!r}, this program reads {STORE_SCHEMA!r}")

    def create(self) -> bool:
        """Make the folders and the mark; say whether the store is new. Idempotent, safe across processes.

        A folder that holds other people's files is refused: a store must be able to delete inside itself. One that an
        interrupted or a concurrent making has begun, told by its CACHEDIR.TAG, is completed.

        Raises:
            StoreError: not a folder, not empty and not a store, or not writable.
        """
        self.refuse_file()
        if self.exists():
            self.check()
            return False
        try:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.root.mkdir()
                self.root.chmod(_ROOT_MODE)
            except FileExistsError:
                self._refuse_foreign()
            (self.root / "CACHEDIR.TAG").write_text(_CACHEDIR_TAG)
            for folder in (self.tmp, self.logs, self.entries, self.blobs, self.root / "locks"):
                self.make_folder(folder)
            for folder in (self.boot_record("x").parent, self.raw_recipe("x").parent):
                self.make_folder(folder)
            pending = self.tmp / f"store.json.{os.getpid()}"
            pending.write_bytes(canonical_bytes({"schema": STORE_SCHEMA}))
            os.replace(pending, self.mark)
        except OSError as error:
            raise describe_os_error(error, f"can't make a store at {self.root}") from error
        return True

    def make_folder(self, folder: Path) -> None:
        """Make a folder of the store and what is missing above it, each with the root's mode and durable.

        Raises OSError. Idempotent, safe across processes.
        """
        if folder == self.root or folder.is_dir():
            return
        self.make_folder(folder.parent)
        try:
            folder.mkdir()
        except FileExistsError:
            return
        # Without the sticky bit, which would keep a second builder from replacing the first one's boot record.
        folder.chmod(stat.S_IMODE(self.root.stat().st_mode) & 0o2777)
        fsync_folder(folder.parent)

    def _refuse_foreign(self) -> None:
        names = {item.name for item in self.root.iterdir()} - _VOLUME_FOLDERS
        # The mark is looked for after the listing: another process may have finished the store in between.
        if names and not ("CACHEDIR.TAG" in names and names <= _OWN_NAMES) and not self.exists():
            raise StoreError(f"{self.root} is not empty and is no store", hint="pass an empty or new folder to --store")


def fsync_folder(folder: Path) -> None:
    """Make renames in a folder, and new folders in it, durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
