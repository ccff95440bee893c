"""The warm dir: which folder a process of this user may own, and the folders in it.

Owns everything below the warm dir's root:

    <root>/                     0700, owned by the user that it is for
      cachectl.env              the newest hook's environment, for a shell (boot/env_file.py)
      node/blobs/<hh>/<hex>     immutable verified copies of blobs, 0400, shared by the hand-outs (boot/node.py)
      node/locks/<hh>           held while a blob is laid down
      handouts/<id>/            one per hand-out, private to the job it was made for
        .claim                  held by whoever made or uses it (boot/claims.py)
        handout.json            what was handed out, written last
        <key>/<runtime path>/…  one entry's files, 0600, as the runtime wants them
      cold/<id>/                where a process without a fitting entry compiles
        .claim                  held by that process
      starts/open/<id>          one start that is not settled, held by its process (boot/starts.py)
      starts/entries/<id>.json  the deaths of one entry's starts
      .swept                    when idle folders were last removed

Standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from cachectl.boot.acting import acting_as, may_act_as
from cachectl.boot.claims import hold, sweep
from cachectl.schemas.boot import Reason
from cachectl.values import dataclass, field

__all__ = ["WarmDir", "choose_warm_dir", "find_warm_dirs", "remove_tree"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class WarmDir:
    """A folder of one user, 0700. What makes or removes something in it acts as that user."""

    root: Path
    uid: int = field(default_factory=os.getuid)

    def new_handout(self) -> Path:
        """Make and return an empty private folder for one hand-out, held by this process. Raises OSError."""
        with self.acting():
            return self._private_folder(self.root / "handouts")

    def new_cold(self) -> Path:
        """Make and return a private folder to compile in, held by this process. Raises OSError."""
        with self.acting():
            return self._private_folder(self.root / "cold")

    def acting(self) -> AbstractContextManager[None]:
        """Return a context in which this process has the owner's rights. Raises OSError."""
        return acting_as(self.uid)

    def forget_old(self) -> int:
        """Remove what nobody holds and nobody will ask for; say how many folders. Never raises."""
        try:
            with self.acting():
                return sweep(self.root, remove_tree)
        except OSError:
            return 0

    def _private_folder(self, parent: Path) -> Path:
        # What lies in a root that was wider once may have been planted there.
        problem = _make_private(parent, self.uid)
        if problem is not None:
            raise PermissionError(errno.EPERM, problem, str(parent))
        while True:
            name = os.urandom(8).hex()
            # Under another name until it is held: what nobody holds is removed by the next hook.
            pending, folder = parent / f".{name}", parent / name
            try:
                os.mkdir(pending, 0o700)
            except FileExistsError:
                continue
            # Parents with the setgid bit hand it on.
            os.chmod(pending, 0o700)
            hold(pending, folder)
            os.rename(pending, folder)
            return folder


def remove_tree(folder: Path) -> None:
    """Delete a folder of ours with all that is in it, following no link; what can't be deleted stays. Never raises.

    Not by shutil: its import costs every start, and fails where the interpreter's own files can't be read any more.
    """
    for parent, folders, files in os.walk(folder, topdown=False):
        for name in files:
            _quietly(os.unlink, os.path.join(parent, name))
        for name in folders:
            path = os.path.join(parent, name)
            _quietly(os.unlink if os.path.islink(path) else os.rmdir, path)
    _quietly(os.rmdir, str(folder))


def _quietly(remove: Callable[[str], None], path: str) -> None:
    try:
        remove(path)
    except OSError:
        pass  # Somebody else was faster, or it is not ours to delete.


def choose_warm_dir(asked: str | None, environ: Mapping[str, str], uid: int | None = None) -> WarmDir | Reason:
    """Return the warm dir of a user: the one asked for, else the first of the contract's defaults that can be theirs.

    The order: `asked`, CACHECTL_WARM_DIR, XDG_CACHE_HOME, $HOME/.cache when it is writable, /var/tmp/cachectl-<uid>.
    A fixed suffix is put below shared parents, so that nothing of other programs is ever ours to delete (field report
    C7). No user name is looked up: random uids have none (P4). A folder of root's that was asked for, as the mount of
    an emptyDir, gets a private folder below it.

    Args:
        uid: whose; None for this process's user. Root may ask for others, whose XDG and HOME it does not know.

    Returns:
        The folder, made and checked; or the reason why there is none.
    """
    uid = os.getuid() if uid is None else uid
    if not may_act_as(uid):
        return Reason("policy", "uid", os.getuid(), uid, "policy", "run the hook as the program's user, or as root")
    problem = ""
    explicit, candidates = _candidates(asked, environ, uid)
    for _, candidate in candidates:
        root = candidate
        try:
            root = _without_links(candidate, uid)
            found = _make_private(root, uid)
            if found is not None and explicit and _is_roots(root, uid):
                root = root / f"cachectl-{uid}"
                below = _make_private(root, uid)
                found = None if below is None else f"{found}; {root.name} in it: {below}"
        except OSError as error:
            found = error.strerror or type(error).__name__
        if found is None:
            return WarmDir(root, uid)
        problem = found if explicit else f"{root}: {found}"
    return _reason(candidates[-1][0], problem)


def find_warm_dirs(asked: str | None, environ: Mapping[str, str], uid: int | None = None) -> list[Path]:
    """Return the folders that may be a user's warm dirs and are there; makes nothing."""
    uid = os.getuid() if uid is None else uid
    explicit, candidates = _candidates(asked, environ, uid)
    folders = [root for _, root in candidates]
    if explicit:
        folders.append(folders[0] / f"cachectl-{uid}")
    return [folder for folder in folders if folder.is_dir()]


def _candidates(asked: str | None, environ: Mapping[str, str], uid: int) -> tuple[bool, list[tuple[str, Path]]]:
    """Return whether a folder was asked for, and the folders to try with the words to name them by."""
    explicit = asked or environ.get("CACHECTL_WARM_DIR")
    if explicit:
        return True, [(explicit, Path(os.path.abspath(explicit)))]
    candidates = []
    if uid == os.getuid():
        if os.path.isabs(environ.get("XDG_CACHE_HOME", "")):
            candidates.append(Path(environ["XDG_CACHE_HOME"]) / "cachectl" / "warm")
        if os.path.isabs(environ.get("HOME", "")):
            candidates.append(Path(environ["HOME"]) / ".cache" / "cachectl" / "warm")
    candidates.append(Path(f"/var/tmp/cachectl-{uid}"))
    return False, [(str(root), root) for root in candidates]


def _reason(path: str, problem: str) -> Reason:
    return Reason(
        "store",
        "warm dir",
        stored=problem,
        wanted="a folder of mode 0700 owned by this uid",
        kind="policy",
        hint=f"{path} can't be used ({problem}): pass --warm-dir DIR or set CACHECTL_WARM_DIR to a folder of this user",
    )


def _is_roots(folder: Path, uid: int) -> bool:
    """Say whether a private folder may be made below: root's own, or for root any that is not another user's.

    The owner of a folder can put another one in the place of what lies in it, sticky bit or not.
    """
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == 0 and uid != 0


def _make_private(root: Path, uid: int) -> str | None:
    """Make `root` a 0700 folder of a user; return what stands against it."""
    try:
        descriptor = _open_made(root, uid)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and root.is_symlink():
            return "a symbolic link"
        return error.strerror or type(error).__name__
    try:
        found = os.fstat(descriptor)
        if found.st_uid != uid:
            return f"owned by uid {found.st_uid}, we are {uid}: a folder of ours below it would do"
        # As its user: an init container's root may have no right over what is not root's.
        with acting_as(uid):
            if stat.S_IMODE(found.st_mode) != 0o700:
                # An init container's umask or a volume's fsGroup made it wider: ours to tighten, since we own it.
                os.fchmod(descriptor, 0o700)
            # Also that its user gets there: a folder of root's above may be closed.
            usable = os.access(root, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
    except OSError as error:
        return error.strerror or type(error).__name__
    finally:
        os.close(descriptor)
    return None if usable else "not writable"


def _open_made(root: Path, uid: int) -> int:
    """Open a folder, made with what is missing above it, all of it the user's alone. Raises OSError.

    Step by step through descriptors: nobody can put a link in the place of a folder that was made a moment ago. Not
    Path.mkdir(parents=True), whose parents get the umask's mode.
    """
    missing: list[str] = []
    folder = root
    while not os.path.lexists(folder):
        missing.append(folder.name)
        folder = folder.parent
    descriptor = os.open(folder, _DIRECTORY)
    for name in reversed(missing):
        above = descriptor
        try:
            descriptor = _open_step(name, above, uid)
        finally:
            os.close(above)
    return descriptor


def _open_step(name: str, above: int, uid: int) -> int:
    """Open a folder in another one, made by its user where it may, else by root and given away. Raises OSError."""
    try:
        with acting_as(uid):
            os.mkdir(name, 0o700, dir_fd=above)
    except FileExistsError:
        pass
    except PermissionError:
        if uid == os.geteuid():
            raise
        os.mkdir(name, 0o700, dir_fd=above)
        descriptor = os.open(name, _DIRECTORY, dir_fd=above)
        try:
            # What somebody moved here in between has an owner, or something in it.
            if os.fstat(descriptor).st_uid == os.geteuid() and not os.listdir(descriptor):
                os.fchown(descriptor, uid, -1)
            return descriptor
        except OSError:
            os.close(descriptor)
            os.rmdir(name, dir_fd=above)
            raise
    return os.open(name, _DIRECTORY, dir_fd=above)


def _without_links(path: Path, uid: int) -> Path:
    """Return a path without links above its last step. Raises PermissionError for one that somebody else planted.

    The folder itself may not be a link; above it the runtime refuses links where it looks for static kernels. A link
    is somebody else's where others may write its folder and it is neither root's nor the user's (as the kernel's own
    protected_symlinks has it; which knows only sticky folders).
    """
    if Path(os.path.realpath(path.parent)) != path.parent:
        trusted = {0, uid} if uid == os.getuid() else {0}
        for step in reversed(path.parent.parents):
            _refuse_planted(step, trusted)
        _refuse_planted(path.parent, trusted)
    return Path(os.path.realpath(path.parent)) / path.name


def _refuse_planted(step: Path, trusted: set[int]) -> None:
    if step.is_symlink() and step.lstat().st_uid not in trusted and step.parent.stat().st_mode & 0o022:
        raise PermissionError(errno.EPERM, f"{step} is a link of uid {step.lstat().st_uid}", str(step))
