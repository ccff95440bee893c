"""Acting as another user: what an init container that runs as root does for a pod that runs as somebody else.

Owns the switch between the two. Files of a hand-out are made by its owner, with the owner's rights alone: what the
owner may have planted in folders of its own can't lead root anywhere, and nothing has to be given away afterwards. The
real user stays root's, so the owner can neither stop nor trace the hook. Standard library only.

The switch is the whole process's: nothing but the hook's own process, which has one thread, may switch.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["LAST_UID", "acting_as", "may_act_as", "own_folder"]

# One less than the number that means "leave it as it is" to the system calls.
LAST_UID = 2**32 - 2


def may_act_as(uid: int) -> bool:
    """Say whether this process may hand out for a user: itself, or anybody if it is root."""
    return 0 <= uid <= LAST_UID and os.getuid() in (0, uid)


@contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Run the block with a user's rights; does nothing where it has them already. May be nested, also back to root.

    The groups stay: Kubernetes gives `fsGroup` to the init container as to the program.

    Raises:
        OSError: this process may not become that user (a container without CAP_SETUID).
    """
    before = os.geteuid()
    if uid == before:
        yield
        return
    if before != 0 and os.getuid() == 0:
        os.seteuid(0)
    try:
        if uid != os.geteuid():
            os.seteuid(uid)
        yield
    finally:
        if os.geteuid() != before:
            if os.geteuid() != 0:
                os.seteuid(0)
            if before != 0:
                os.seteuid(before)


def own_folder(folder: Path) -> None:
    """Make a private folder of the user that this process acts as, where there is none.

    Raises:
        OSError: it can't be made, or what is there is a link, no folder, or another user's.
    """
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise
