"""Audit: what a cache directory that nobody manages holds, what is wrong with it, and what the next start makes of it.

Owns what shows only between folders: ranks that are missing, artifacts in each other's place, dated directories, and
what a newer artifact has left behind. It reads files only: nothing is run, unpickled, written or locked.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from cachectl.errors import ConfigError, StoreError
from cachectl.identity.toolchain import package_folder, read_cann, toolchain_part
from cachectl.runtimes.artifact import ArtifactSummary
from cachectl.runtimes.cache_tree import ARTIFACT_NAME, CacheTree, MethodFolder, scan
from cachectl.schemas.audit import AuditArtifact, AuditEffect, AuditFinding, AuditKind, AuditReport, AuditSeen
from cachectl.services.audit_notes import changes, gaps
from cachectl.services.audit_start import read_folder
from cachectl.services.inspect import describe

__all__ = ["audit", "what_starts_here"]

# 2026-09-30, 20260930, 2026_09_30_235959 and the like, as frameworks put them into a directory's name.
_DATE: Final = re.compile(
    r"(?<!\d)20\d{2}([-_.]?)(?:0[1-9]|1[0-2])\1(?:0[1-9]|[12]\d|3[01])(?:[-_T.]?\d{2}[-_:.]?\d{2}(?:[-_:.]?\d{2})?)?(?!\d)"
)
_RANKS_PER_NODE: Final = 64
_DEVICE: Final = re.compile(r"^(?:npu:|privateuseone:|device_index )(\d+)$")


@dataclass
class _Item:
    """One method folder, what was read of it, and what is wrong with it."""

    folder: MethodFolder
    summary: ArtifactSummary | None
    findings: list[AuditFinding]
    dates: str = ""
    family: str = ""
    orphaned: bool = False

    @property
    def made(self) -> str:
        """When its artifact was made, ISO 8601 in UTC; the file's time where it doesn't say."""
        if self.summary is not None and self.summary.created_at is not None:
            return self.summary.created_at
        artifact = self.folder.artifact
        moment = datetime.fromtimestamp(artifact.modified_at if artifact else 0, timezone.utc)
        return f"{moment.replace(tzinfo=None).isoformat(timespec='seconds')}Z"


@dataclass
class _Audit:
    """An audit in the making; findings' paths are relative to `top`."""

    top: str
    items: list[_Item]
    findings: list[AuditFinding] = field(default_factory=list)

    def path(self, path: str) -> str:
        """Return a path as findings say it."""
        return os.path.relpath(path, self.top)

    def say(
        self, kind: AuditKind, effect: AuditEffect, path: str, detail: str, hint: str, *, size_bytes: int = 0
    ) -> None:
        """Add a finding about an absolute path."""
        found = AuditFinding(
            kind=kind, path=self.path(path), effect=effect, detail=detail, hint=hint, size_bytes=size_bytes
        )
        self.findings.append(found)


def what_starts_here(
    *, uid: int | None = None, python: str | None = None, environ: Mapping[str, str] | None = None
) -> AuditSeen:
    """Return who is taken to start next: this user and interpreter unless told otherwise, with this machine's wheels.

    The wheels are those of this interpreter, so they are left out where another `python` is named, and CANN where
    ASCEND_HOME_PATH is not set.
    """
    environ = os.environ if environ is None else environ
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    formats: dict[str, str | None] = {}
    torch_npu = None
    if python in (None, here) and package_folder("torch_npu") is not None:
        document, _ = toolchain_part(environ, simulated=False)
        formats, torch_npu = document["formats"], document["torch_npu"]["version"]
    home = environ.get("ASCEND_HOME_PATH", "")
    return AuditSeen(
        uid=os.getuid() if uid is None else uid,
        python=python or here,
        torch_npu=torch_npu,
        npugraph_ex=formats.get("npugraph_ex"),
        torchair=formats.get("torchair"),
        cann=read_cann(Path(home))["CANN"] if home else None,
    )


def audit(directory: str, seen: AuditSeen) -> AuditReport:
    """Audit a cache directory, something above several, or one folder of a cache.

    Args:
        directory: links in it are followed as far as the runtime follows them.
        seen: who starts next, and with what; see `what_starts_here`.

    Raises:
        ConfigError: no directory, or nothing of a runtime's cache in it.
        StoreError: it can't be read.
    """
    if not directory:
        raise ConfigError("'' is no directory", hint="pass the cache directory of a program")
    top = os.path.abspath(directory)
    try:
        tree = scan(top)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{directory} is no directory", hint="pass the cache directory of a program") from error
    except OSError as error:
        raise StoreError(
            f"can't read {directory}: {error.strerror or error}", hint="run the audit as the user that runs the program"
        ) from error
    if not tree.found and not tree.unread:
        raise ConfigError(
            f"{directory} holds no cache of npugraph_ex or torchair",
            hint="their folders are named <Class>_<static|dynamic>_aclgraphcache_<md5>; pass the cache_dir of the "
            "program, TORCHAIR_CACHE_HOME, or .torchair_cache where it was started",
        )
    unread = {path for path, _ in tree.unread}
    # What can't be listed may hold anything; that it can't is a finding of its own.
    listed = [folder for folder in tree.folders if folder.artifact is not None or folder.path not in unread]
    items = [_Item(folder, *read_folder(folder, top, seen)) for folder in listed]
    audited = _Audit(top, items)
    _say_access(audited, seen)
    _say_outside(audited, tree)
    _say_ranks(audited)
    _say_devices(audited)
    _say_dates(audited)
    _say_superseded(audited)
    return _report(audited, tree, seen)


def _report(audited: _Audit, tree: CacheTree, seen: AuditSeen) -> AuditReport:
    findings = [finding for item in audited.items for finding in item.findings] + audited.findings
    read = [(item.folder, item.summary) for item in audited.items if item.summary is not None]
    return AuditReport(
        path=audited.top,
        seen=seen,
        artifacts=tuple(_artifact(audited, item) for item in audited.items if item.folder.artifact is not None),
        findings=tuple(findings),
        ignored=gaps(read),
        changes=changes(read),
        size_bytes=tree.size_bytes,
        orphaned_bytes=sum(finding.size_bytes for finding in findings if finding.kind in ("orphan", "stray")),
    )


def _artifact(audited: _Audit, item: _Item) -> AuditArtifact:
    folder, rank = item.folder, item.folder.rank
    broken = any(found.effect in ("deleted", "crash", "wrong") and found.kind != "symlink" for found in item.findings)
    state = "orphaned" if item.orphaned else "broken" if broken or item.summary is None else "good"
    path = audited.path(folder.path)
    return AuditArtifact.model_validate(
        {
            "path": path,
            "cache": audited.path(folder.cache),
            "graph": folder.graph.name,
            "dynamic": folder.graph.dynamic,
            "world_size": rank.world_size,
            "rank": rank.rank,
            "tp_rank": rank.tp_rank,
            "pp_rank": rank.pp_rank,
            "method": folder.method,
            "state": state,
            "size_bytes": folder.size_bytes,
            "content": None
            if item.summary is None
            else describe(None, path.encode("utf-8", "backslashreplace").decode(), item.summary),
        }
    )


def _say_access(audited: _Audit, seen: AuditSeen) -> None:
    """What the next process may not write: the runtime's answers to a miss and to a broken artifact both raise."""
    caches = {item.folder.cache for item in audited.items}
    methods = {
        os.path.dirname(os.path.realpath(os.path.join(item.folder.path, ARTIFACT_NAME))) for item in audited.items
    }
    for path in sorted(caches | methods):
        try:
            found, linked = os.stat(path), os.lstat(path)
            read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
        except OSError:
            continue
        strange = {found.st_uid, linked.st_uid} - {seen.uid}
        if path in caches and strange:
            detail = (
                f"it belongs to uid {strange.pop()}, the process will be {seen.uid}: cache_compile raises where this "
            )
            detail += "is its cache_dir"
            audited.say("wrong-owner", "crash", path, detail, f"chown -R {seen.uid} the cache, or give --uid")
        elif read_only or not _writable(found, seen.uid):
            detail = "its file system is read-only" if read_only else "its mode bars writing"
            detail += ": what is missing can't be saved, what is broken can't be removed, and the first call raises"
            audited.say("not-writable", "crash", path, detail, "give each process a writable copy of its own")


def _writable(found: os.stat_result, uid: int) -> bool:
    if uid == 0:
        return True
    if found.st_uid == uid:
        return found.st_mode & 0o300 == 0o300
    # Which groups the process will have is not known here.
    return found.st_mode & 0o030 == 0o030 or found.st_mode & 0o003 == 0o003


def _say_outside(audited: _Audit, tree: CacheTree) -> None:
    for path in tree.empty:
        detail = "no method in it: the runtime removed what it could not load, or a second trace removed the first"
        audited.say("missing-artifact", "cold", path, detail, "rmdir it, or start with logs at info and see which")
    for path, size_bytes in tree.strays:
        detail = "an artifact where the runtime looks for none: it needs the graph folder and the method's name above"
        audited.say("stray", "wasted", path, detail, "put the whole tree back, or delete it", size_bytes=size_bytes)
    for path, why in tree.unread:
        hint = "run the audit as the user that runs the program"
        audited.say("unreadable", "cold", path, f"the folder can't be listed: {why}", hint)


def _say_ranks(audited: _Audit) -> None:
    """Ranks of a world that have no artifact; a node's own directory holds one whole block of them, lawfully."""
    groups: dict[tuple[str, str, str, int], set[int]] = defaultdict(set)
    for item in audited.items:
        folder = item.folder
        if folder.rank.world_size is not None and folder.rank.rank is not None and folder.artifact is not None:
            groups[folder.cache, folder.graph.kind, folder.method, folder.rank.world_size].add(folder.rank.rank)
    for (cache, kind, method, world), numbers in sorted(groups.items()):
        ranks = {rank for rank in numbers if rank < world}
        if strange := sorted(numbers - ranks):
            detail = f"{kind}.{method} of world {world} has folders of {_ranks(strange)}, which such a world lacks"
            audited.say("stray", "wasted", cache, detail, "delete them; no start looks there")
        if ranks and not _is_block(ranks, world):
            missing = _ranks(sorted(set(range(world)) - ranks))
            detail = (
                f"{kind}.{method} of world {world} lacks {missing}: unless they don't have this method, they compile "
            )
            detail += "while the others wait for them"
            hint = "bring the missing ranks' folders, or compile all ranks anew"
            audited.say("missing-rank", "cold", cache, detail, hint)


def _is_block(ranks: set[int], world: int) -> bool:
    first, count = min(ranks), len(ranks)
    return world % count == 0 and first % count == 0 and ranks == set(range(first, first + count)) and first < world


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:16])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{' and more' if len(ranks) > 16 else ''}"


def _say_devices(audited: _Audit) -> None:
    """Artifacts in the folders of each other's ranks: no number of ranks per node explains their device numbers."""
    groups: dict[tuple[str, str, str, int], dict[int, int]] = defaultdict(dict)
    for item in audited.items:
        rank = item.folder.rank
        devices = _devices(item.summary)
        if rank.world_size is not None and rank.rank is not None and rank.rank < rank.world_size and len(devices) == 1:
            # A graph folder of its own per rank is lawful: what differs in the module's repr differs in the md5.
            group = item.folder.cache, item.folder.graph.kind, item.folder.method, rank.world_size
            groups[group][rank.rank] = devices.pop()
    for (cache, kind, method, world), devices_of in sorted(groups.items()):
        if _fits_some_node(devices_of, world):
            continue
        said = ", ".join(f"rank {rank} npu:{device}" for rank, device in sorted(devices_of.items())[:16])
        detail = (
            f"{kind}.{method} of world {world} was compiled for devices that fit no number of ranks per node: {said}"
        )
        hint = "compile all ranks anew, unless the program chooses its devices otherwise"
        audited.say("wrong-place", "wrong", cache, detail, hint)


def _fits_some_node(devices_of: Mapping[int, int], world: int) -> bool:
    # Device numbers count local ranks, from 0 or from where a program's own devices begin.
    return any(
        len({device - rank % local for rank, device in devices_of.items()}) == 1
        for local in range(1, min(world, _RANKS_PER_NODE) + 1)
    )


def _devices(summary: ArtifactSummary | None) -> set[int]:
    found = () if summary is None else (item.detail for item in summary.findings if item.kind == "device-index")
    return {int(match[1]) for text in found if (match := _DEVICE.match(text))}


def _say_dates(audited: _Audit) -> None:
    """Directories with a date in their name: a new day finds none of them, and only the newest can be in use."""
    newest: dict[str, str] = {}
    for item in audited.items:
        # What lies above the audited folder is somebody else's name for it.
        name = os.path.join(os.path.basename(audited.top), audited.path(item.folder.cache))
        item.dates = "".join("".join(filter(str.isdigit, match[0])) for match in _DATE.finditer(name))
        item.family = os.path.normpath(_DATE.sub("<date>", name))
        newest[item.family] = max(newest.get(item.family, ""), item.dates)
    told: set[str] = set()
    for item in audited.items:
        if not item.dates:
            continue
        if item.dates != newest[item.family]:
            _orphan(audited, item, "its directory's date has passed, and a newer one lies beside it")
        elif item.folder.cache not in told:
            told.add(item.folder.cache)
            detail = "its name holds a date: after it every start compiles anew, beside what is here"
            audited.say("dated-cache", "cold", item.folder.cache, detail, "give the program a cache_dir without a date")


def _say_superseded(audited: _Audit) -> None:
    """Artifacts that a newer one for the same method, rank and cache has left behind under another md5."""
    groups: dict[tuple[str, ...], list[_Item]] = defaultdict(list)
    for item in audited.items:
        if item.folder.artifact is not None and not item.orphaned:
            folder = item.folder
            groups[folder.cache, folder.graph.kind, folder.rank.name, folder.method].append(item)
    for items in groups.values():
        *older, current = sorted(items, key=lambda item: item.made)
        for item in older:
            if item.made == current.made:
                continue  # Copied at one time: neither has left the other behind.
            why = _difference(item.summary, current.summary)
            if why is None:
                why = "their options are equal: the module's repr changed"
                if len(older) > 1:
                    why += ", perhaps at every start (an address in it, or in a custom pass)"
            _orphan(
                audited, item, f"{current.folder.graph.name} of {current.made} is newer than this of {item.made}; {why}"
            )


def _difference(older: ArtifactSummary | None, newer: ArtifactSummary | None) -> str | None:
    if older is None or newer is None:
        return "one of them can't be read"
    names = sorted({*older.options, *newer.options})
    differs = [
        f"{name} {older.options.get(name, 'nothing')} -> {newer.options.get(name, 'nothing')}"
        for name in names
        if older.options.get(name) != newer.options.get(name)
    ]
    return ", ".join(differs) or None


def _orphan(audited: _Audit, item: _Item, detail: str) -> None:
    item.orphaned = True
    hint = "delete it, unless another program still asks for it"
    audited.say("orphan", "wasted", item.folder.path, detail, hint, size_bytes=item.folder.size_bytes)
