"""Letting entries start again on this node, after starts that died of them were found and mended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cachectl.boot.acting import acting_as, may_act_as
from cachectl.boot.starts import Starts
from cachectl.boot.warmdir import find_warm_dirs
from cachectl.errors import ConfigError
from cachectl.schemas.canonical import DIGEST_PREFIX

__all__ = ["release_entries"]


def release_entries(
    keys: Sequence[str], *, warm_dir: str | None, uid: int | None = None, dry_run: bool = False
) -> list[dict[str, Any]]:
    """Forget the deaths of entries on this node; return what was known of each: key, name, deaths, warm dir.

    Args:
        keys: the entries' keys or their first digits.
        warm_dir: as for the hook; None for the hook's defaults.
        uid: whose warm dir; None for this process's user.
        dry_run: return the same and change nothing.

    Raises:
        ConfigError: no deaths are noted for a key, or it begins more than one; nothing is released then.
    """
    if uid is not None and not may_act_as(uid):
        raise ConfigError(f"--uid {uid}: this process is uid {os.getuid()}", hint="run it as that user, or as root")
    roots = find_warm_dirs(warm_dir, os.environ, uid)
    with acting_as(os.getuid() if uid is None else uid):
        known = _known(roots, settle=not dry_run)
        chosen = [item for key in keys for item in _chosen(key, known, roots)]
        for item in {item["path"]: item for item in chosen}.values():
            if not dry_run:
                Starts.of(Path(item["warm_dir"])).release(item["path"])
    return [{name: value for name, value in item.items() if name != "path"} for item in chosen]


def _known(roots: Sequence[Path], *, settle: bool) -> list[dict[str, Any]]:
    found = []
    for root in roots:
        starts = Starts.of(root)
        starts.settle(write=settle)
        found += [{**item, "warm_dir": str(root)} for item in starts.quarantined()]
    return found


def _chosen(key: str, known: Sequence[dict[str, Any]], roots: Sequence[Path]) -> list[dict[str, Any]]:
    digits = key.removeprefix(DIGEST_PREFIX)
    found = [item for item in known if digits and item["key"].startswith(DIGEST_PREFIX + digits)]
    if len({item["key"] for item in found}) > 1:
        raise ConfigError(f"{digits!r} begins more than one key", hint="give more digits")
    if not found:
        where = ", ".join(map(str, roots)) or "no warm dir of this user's"
        raise ConfigError(
            f"no start on this node died of an entry {key!r} ({where})",
            hint="pass --warm-dir DIR as to the hook; `cachectl hook RECIPE --read-only` names the key",
        )
    return found
