"""One hand-out in the making: warm sets laid down in a new private folder, and the document written last.

Owns that folder until it is whole: what is abandoned leaves nothing behind. A set that can't be laid down leaves the
sets before it as they are. Standard library only; the store is only read.
"""

from __future__ import annotations

import _thread
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from cachectl.boot.candidates import Candidate
from cachectl.boot.claims import note_size, release
from cachectl.boot.handout import SETS_HANDED, HandedEntry, HandedMember, HandedSet, Handout, HookSeconds
from cachectl.boot.materialize import Timing, describe_write_error, lay_down
from cachectl.boot.node import NodeCopy, node_copy
from cachectl.boot.options import DEFAULT_DEADLINE_S, HookOptions
from cachectl.boot.starts import QuarantinedError, Starts
from cachectl.boot.together import each, workers_for
from cachectl.boot.warmdir import WarmDir, choose_warm_dir, find_warm_dirs, remove_tree
from cachectl.errors import StoreError
from cachectl.schemas.boot import Reason, StoredEntry, WarmSet
from cachectl.store.blobs import BlobStore
from cachectl.store.layout import StoreLayout, bare_hex
from cachectl.values import dataclass, field, replace

__all__ = ["NoWarmDirError", "UnfinishedHandout"]


class NoWarmDirError(StoreError):
    """No folder can be this user's warm dir, whatever set is tried; `reason` says why."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason), hint=reason.hint)
        self.reason = reason


@dataclass
class UnfinishedHandout:
    """A hand-out to which sets are added; with `read_only` nothing is written at all."""

    layout: StoreLayout
    options: HookOptions
    environ: Mapping[str, str]
    # On the monotonic clock.
    deadline_s: float
    sets: list[HandedSet] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)
    # Spent in `add`, seconds.
    spent_s: float = 0.0
    _warm_dir: WarmDir | None = None
    _folder: Path | None = None
    _node: NodeCopy | None = None
    # By warm dir.
    _starts: dict[Path, Starts] = field(default_factory=dict)
    # By key: entries that differ in their names only, or that several sets share, are laid down once.
    _paths: dict[str, Path] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """How many more sets fit in."""
        return SETS_HANDED - len(self.sets)

    def add(self, candidate: Candidate) -> None:
        """Lay a candidate's entries down behind the sets that are there.

        Raises:
            NoWarmDirError: there is no place for any set.
            DeadlineError: out of time.
            CachectlError: this one can't be laid down.
        """
        started = time.perf_counter()
        before = set(self._paths)
        try:
            if self.options.read_only:
                self._refuse_poison(candidate, find_warm_dirs(self.options.warm_dir, self.environ, self.options.uid))
            else:
                folder, warm_dir = self._own_folder()
                with warm_dir.acting():
                    self._refuse_poison(candidate, [warm_dir.root])
                    self._lay_down([item.entry for item in candidate.manifests], folder)
        except BaseException:
            for key in set(self._paths) - before:
                del self._paths[key]
                self._remove(bare_hex(key))
            raise
        finally:
            self.spent_s += time.perf_counter() - started
        entries = tuple(
            HandedEntry(item.entry, self._paths.get(item.entry.key), item.document) for item in candidate.manifests
        )
        found = candidate.warm_set
        self.sets.append(
            HandedSet(found.warm_set, found.request, entries, _members(found), ranks_per_node=found.ranks_per_node)
        )

    def finish(self, found: Handout) -> Handout:
        """Return `found` as the warm hand-out that it is now, its document written.

        Raises:
            StoreError: the document can't be written.
        """
        seconds = HookSeconds(found.seconds.resolve, self.timing.verify_s, self.timing.write_s)
        left_s = round(max(0.0, self.deadline_s - time.monotonic()), 3)
        # A hook without a deadline still bounds how long its ranks wait for each other.
        left_s = left_s if left_s < math.inf else DEFAULT_DEADLINE_S
        handout = replace(
            found, outcome="warm", sets=tuple(self.sets), folder=self._folder, seconds=seconds, left_s=left_s
        )
        told = [problem for starts in self._starts.values() for problem in starts.problems]
        told += self._node.told if self._node is not None else []
        handout = replace(handout, reasons=(*handout.reasons, *told))
        if self._folder is None or self._warm_dir is None:
            return handout
        try:
            with self._warm_dir.acting():
                handout.write()
                note_size(self._folder, self.timing.size_bytes)
                if self._node is not None and self._node.added:
                    self._node.forget_old()
        except OSError as error:
            raise describe_write_error(error, self._folder) from error
        self._warm_dir.forget_old()
        return handout

    def abandon(self) -> None:
        """Remove what was laid down: half a hand-out helps nobody. Never raises."""
        self._remove("")
        if self._folder is not None:
            release(self._folder)

    def _remove(self, name: str) -> None:
        """Remove what lies at a place in the hand-out's folder, or all of it. Never raises."""
        if self._folder is not None and self._warm_dir is not None:
            try:
                with self._warm_dir.acting():
                    remove_tree(self._folder / name)
            except OSError:
                pass  # No longer ours to remove; a later hook's sweep finds it.

    def _lay_down(self, entries: Iterable[StoredEntry], folder: Path) -> None:
        """Lay down what is not there yet, several entries at once where they are large. Raises as lay_down."""
        missing = {entry.key: entry for entry in entries if entry.key not in self._paths}
        # Noted before it is written: half of it has to go, too.
        self._paths.update((key, folder / bare_hex(key)) for key in missing)
        timings: list[Timing] = []
        unpacking = _thread.allocate_lock()

        def lay(entry: StoredEntry) -> None:
            timing = Timing()
            timings.append(timing)
            self._paths[entry.key] = lay_down(
                BlobStore(self.layout),
                entry,
                folder,
                deadline_s=self.deadline_s,
                timing=timing,
                node=self._node,
                unpacking=unpacking,
            )

        started = time.perf_counter()
        size_bytes = sum(item.size_bytes for entry in missing.values() for item in entry.files)
        each(lay, list(missing.values()), workers_for(size_bytes))
        self.timing.add(timings, time.perf_counter() - started)

    def _refuse_poison(self, candidate: Candidate, warm_dirs: Iterable[Path]) -> None:
        """Raise QuarantinedError for a set of which an entry killed starts on this node."""
        for root in warm_dirs:
            starts = self._starts.get(root)
            if starts is None:
                starts = self._starts[root] = Starts.of(root)
                starts.settle(write=not self.options.read_only)
            refusals = {item.entry.key: starts.refusal(item.entry) for item in candidate.manifests}
            if reasons := [reason for reason in refusals.values() if reason is not None]:
                raise QuarantinedError(reasons)

    def _own_folder(self) -> tuple[Path, WarmDir]:
        if self._folder is None or self._warm_dir is None:
            chosen = choose_warm_dir(self.options.warm_dir, self.environ, self.options.uid)
            if not isinstance(chosen, WarmDir):
                raise NoWarmDirError(chosen)
            try:
                self._folder, self._warm_dir = chosen.new_handout(), chosen
                with chosen.acting():
                    self._node = node_copy(chosen.root, self.layout.blobs, self.environ)
            except OSError as error:
                hint = "pass --warm-dir DIR or set CACHECTL_WARM_DIR to a folder this user may write"
                reason = Reason("store", "warm dir", str(chosen.root), error.strerror, "policy", hint)
                raise NoWarmDirError(reason) from error
        return self._folder, self._warm_dir


def _members(warm_set: WarmSet) -> tuple[HandedMember, ...]:
    members = (HandedMember(item.rank, item.method, item.case, item.key) for item in warm_set.members)
    return tuple(sorted(members, key=lambda member: (member.rank, member.method, member.case)))
