"""Folders that the runtimes' own `cache_compile` keeps: what lies where, and what a name there says.

Owns the pattern of those paths and the walk over them; it opens no file, follows no link above the pattern, and judges
nothing. Standard library only. Fact (torch_npu 2.13, dynamo/<runtime>/inference/_cache_compiler.py, `get_cache_bin`):

    <cache>/<Class>_<dynamic|static>[_aclgraphcache][_gecache]_<md5>/     a graph folder
        [world<N>global_rank<r>][_tp_rank<t>][_pp_rank<p>]/               a rank folder; left out where there is none
            <method>/compiled_module                                      a method folder; all below it belongs to it
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

__all__ = [
    "ARTIFACT_NAME",
    "CacheTree",
    "GraphFolder",
    "MethodFolder",
    "RankFolder",
    "SeenFile",
    "read_graph_name",
    "read_rank_name",
    "scan",
]

ARTIFACT_NAME: Final = "compiled_module"

_GRAPH: Final = re.compile(
    r"(?P<kind>.+_(?P<trace>dynamic|static)(?P<cache>_aclgraphcache)?(?P<ge>_gecache)?)_[0-9a-f]{32}"
)
_RANK: Final = re.compile(
    r"(?:world(?P<world>\d{1,6})global_rank(?P<rank>\d{1,6}))?_?(?:tp_rank(?P<tp>\d{1,6}))?_?(?:pp_rank(?P<pp>\d{1,6}))?"
)


@dataclass(frozen=True)
class GraphFolder:
    """A graph folder's name: `kind` is all of it but the md5, such as Decoder_static_aclgraphcache."""

    name: str
    kind: str
    dynamic: bool


@dataclass(frozen=True)
class RankFolder:
    """A rank folder's name, read; `name` is empty and all is None for a process without a group."""

    name: str = ""
    world_size: int | None = None
    rank: int | None = None
    tp_rank: int | None = None
    pp_rank: int | None = None


@dataclass(frozen=True)
class SeenFile:
    """A file below a method folder: its path there, what lstat says, and where it points if it is a link."""

    path: str
    mode: int
    uid: int
    size_bytes: int
    modified_at: float
    link: str | None = None


@dataclass(frozen=True)
class MethodFolder:
    """A method folder. `cache` and `path` are absolute; `links` are those of its three folders that are links."""

    cache: str
    graph: GraphFolder
    rank: RankFolder
    method: str
    path: str
    files: tuple[SeenFile, ...]
    links: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files below it, as their sizes say."""
        return sum(file.size_bytes for file in self.files)

    @property
    def artifact(self) -> SeenFile | None:
        """Its `compiled_module`, where there is one."""
        return next((file for file in self.files if file.path == ARTIFACT_NAME), None)


@dataclass
class CacheTree:
    """What a walk found, in order of path; paths are absolute.

    `empty` are graph and rank folders with no method folder in them. `strays` are artifacts where the runtime looks for
    none. `unread` are folders that could not be listed, each with the system's words.
    """

    folders: list[MethodFolder] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    strays: list[tuple[str, int]] = field(default_factory=list)
    unread: list[tuple[str, str]] = field(default_factory=list)
    size_bytes: int = 0

    @property
    def found(self) -> bool:
        """Whether there was anything of a runtime's cache."""
        return bool(self.folders or self.empty or self.strays)


def read_graph_name(name: str) -> GraphFolder | None:
    """Read a graph folder's name; None for any other."""
    match = _GRAPH.fullmatch(name)
    return None if match is None else GraphFolder(name, match["kind"], match["trace"] == "dynamic")


def read_rank_name(name: str) -> RankFolder | None:
    """Read a rank folder's name; None for any other."""
    match = _RANK.fullmatch(name)
    if match is None or not name or name.startswith("_"):
        return None
    numbers = (None if match[group] is None else int(match[group]) for group in ("world", "rank", "tp", "pp"))
    return RankFolder(name, *numbers)


def scan(top: str) -> CacheTree:
    """Walk a folder: a cache, something above several, or a graph, rank or method folder.

    What vanishes during the walk is left out. Links are followed for graph, rank and method folders only, as the
    runtime does; so the walk ends.

    Raises:
        OSError: `top` itself can't be listed.
    """
    tree = CacheTree()
    # A trailing slash would make a link a folder; the path is kept as given otherwise, since links in it matter.
    top = os.path.abspath(top)
    os.scandir(top).close()
    parts = top.split(os.sep)
    place = next((at for at in range(len(parts) - 1, 0, -1) if read_graph_name(parts[at])), None)
    below = 0 if place is None else len(parts) - 1 - place
    if place is None or below > 2:
        _walk_above(tree, top)
        return tree
    graph = read_graph_name(parts[place])
    assert graph is not None
    cache = os.sep.join(parts[:place]) or os.sep
    rank = read_rank_name(parts[place + 1]) if below else None
    if below == 0:
        _walk_graph(tree, cache, graph, top)
    elif below == 1 and rank is not None:
        _walk_rank(tree, cache, graph, rank, top, ())
    else:
        _add_method(tree, cache, graph, rank or RankFolder(), parts[-1], top, ())
    return tree


def _walk_above(tree: CacheTree, path: str) -> None:
    pending = [path]
    while pending:
        folder = pending.pop()
        deeper = []
        for entry in _entries(tree, folder):
            graph = read_graph_name(entry.name)
            if graph is not None and _is_dir(entry):
                _walk_graph(tree, folder, graph, entry.path)
            elif entry.is_dir(follow_symlinks=False):
                deeper.append(entry.path)
            elif (seen := _seen(entry.path, entry.name)) is not None:
                tree.size_bytes += seen.size_bytes
                if entry.name == ARTIFACT_NAME:
                    tree.strays.append((entry.path, seen.size_bytes))
        pending += reversed(deeper)


def _walk_graph(tree: CacheTree, cache: str, graph: GraphFolder, path: str) -> None:
    links = (path,) if os.path.islink(path) else ()
    before = len(tree.folders), len(tree.empty), len(tree.unread)
    for entry in _entries(tree, path):
        rank = read_rank_name(entry.name)
        if _is_dir(entry):
            if rank is not None:
                _walk_rank(tree, cache, graph, rank, entry.path, links)
            else:
                _add_method(tree, cache, graph, RankFolder(), entry.name, entry.path, links)
        elif (seen := _seen(entry.path, entry.name)) is not None:
            tree.size_bytes += seen.size_bytes
            if entry.name == ARTIFACT_NAME:
                tree.strays.append((entry.path, seen.size_bytes))
    if before == (len(tree.folders), len(tree.empty), len(tree.unread)):
        tree.empty.append(path)


def _walk_rank(
    tree: CacheTree, cache: str, graph: GraphFolder, rank: RankFolder, path: str, links: tuple[str, ...]
) -> None:
    links = (*links, path) if os.path.islink(path) else links
    before = len(tree.folders), len(tree.unread)
    for entry in _entries(tree, path):
        if _is_dir(entry):
            _add_method(tree, cache, graph, rank, entry.name, entry.path, links)
        elif (seen := _seen(entry.path, entry.name)) is not None:
            tree.size_bytes += seen.size_bytes
            if entry.name == ARTIFACT_NAME:
                tree.strays.append((entry.path, seen.size_bytes))
    if before == (len(tree.folders), len(tree.unread)):
        tree.empty.append(path)


def _add_method(
    tree: CacheTree,
    cache: str,
    graph: GraphFolder,
    rank: RankFolder,
    method: str,
    path: str,
    links: tuple[str, ...],
) -> None:
    links = (*links, path) if os.path.islink(path) else links
    files = tuple(sorted(_below(tree, path), key=lambda file: file.path))
    folder = MethodFolder(cache, graph, rank, method, path, files, links)
    tree.folders.append(folder)
    tree.size_bytes += folder.size_bytes


def _below(tree: CacheTree, path: str) -> Iterator[SeenFile]:
    pending = [(path, "")]
    while pending:
        folder, prefix = pending.pop()
        for entry in _entries(tree, folder):
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                pending.append((entry.path, f"{name}/"))
            elif (seen := _seen(entry.path, name)) is not None:
                yield seen


def _is_dir(entry: os.DirEntry[str]) -> bool:
    """Say whether an entry is a folder or a link to one; a link that only leads to itself is none."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _entries(tree: CacheTree, path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        if error.errno != errno.ENOENT:
            tree.unread.append((path, error.strerror or str(error)))
        return []


def _seen(path: str, name: str) -> SeenFile | None:
    try:
        found = os.lstat(path)
        link = os.readlink(path) if stat.S_ISLNK(found.st_mode) else None
    except OSError:
        return None
    return SeenFile(name, found.st_mode, found.st_uid, found.st_size, found.st_mtime, link)
