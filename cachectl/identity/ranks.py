"""Which ranks a start is about: what each source says, whether they agree, and whether the topology fits.

Owns which number means which rank: `rank` is the global rank, counted over all nodes; a local rank or a device's index
is none. Hook, explain and the program's process ask here, so that they can't disagree. Standard library only.

Sources, and where their meaning is from:

- `--rank N`, and in the program's process torch.distributed's own rank, once a process group is there;
- torchrun: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE in every process;
- cann-recipes-infer's offline start sets no RANK: the global rank is LOCAL_RANK + RANK_OFFSET;
- an AscendJob's pod (mind-cluster, Ascend Operator): RANK is the pod's index, LOCAL_RANK the list "0,1,2,…",
  LOCAL_WORLD_SIZE the pod's devices, WORLD_SIZE all of them;
- a Kubeflow PyTorchJob's pod: RANK is the pod's index, PET_NODE_RANK the same, PET_NNODES and PET_NPROC_PER_NODE what
  torchrun will start; WORLD_SIZE may count pods;
- a LeaderWorkerSet's pod (lws 0.6): LWS_WORKER_INDEX is its index in a group of LWS_GROUP_SIZE. A group is one job, so
  LWS_GROUP_INDEX, which replica it is, says nothing of ranks. How many ranks a pod runs LWS doesn't know;
- RANK_TABLE_FILE, versions 1.0, 1.2, 2.0 (identity/rank_table.py), with RANK_ID where a process has one.

A pod's index is for what runs before the launcher. Once a launcher has set RANK and LOCAL_RANK its word stands: a
dynamic rendezvous may number nodes in another order than the job's controller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cachectl.identity.rank_table import RankTableError, read_rank_table
from cachectl.schemas.boot import Reason
from cachectl.values import dataclass

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Fact", "RanksHere", "check_ranks", "find_ranks", "ranks_here"]

RANK_TABLE_VARIABLE = "RANK_TABLE_FILE"
# Addresses by which a pod finds its server in a rank table: the downward API's names in mind-cluster's manifests.
_ADDRESSES = ("POD_IP", "XDL_IP", "HOST_IP")
_MEND = "unset or mend one of them: a wrong rank would be another rank's artifact"


@dataclass(frozen=True)
class Fact:
    """What one source says: which ranks, of how many; None where it doesn't say. `source` is what people are shown."""

    source: str
    ranks: tuple[int, ...] | None = None
    world_size: int | None = None


@dataclass(frozen=True)
class RanksHere:
    """What all sources say together.

    Attributes:
        ranks: the ranks a start is about, ascending; None where nothing says so, which means all.
        facts: what each source says, the one that decides first.
        against: contradictions between two sources, each with both.
        unread: sources that are there and can't be understood.
    """

    ranks: tuple[int, ...] | None
    facts: tuple[Fact, ...] = ()
    against: tuple[Reason, ...] = ()
    unread: tuple[Reason, ...] = ()


def find_ranks(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    group: tuple[int, int] | None = None,
) -> RanksHere:
    """Return the ranks that a start is about, with the source of each fact; reads the rank table, if one is named.

    Args:
        environ: the environment of the program or, in a hook, of the pod.
        rank: what `--rank` says.
        group: torch.distributed's (rank, world size) in the program's process; None before it has one.
    """
    launcher = _Launcher(environ)
    facts = []
    if rank is not None:
        facts.append(Fact(f"--rank {rank}", (rank,)))
    if group is not None:
        facts.append(Fact(f"torch.distributed rank {group[0]} of {group[1]}", (group[0],), group[1]))
    facts += launcher.facts()
    facts += _table_facts(environ, launcher.unread, alone=not any(fact.ranks for fact in facts))
    # The narrowest decides: a process is one of its pod's ranks, a pod's are some of the table's.
    said = sorted((fact for fact in facts if fact.ranks is not None), key=lambda fact: len(fact.ranks or ()))
    rest = [fact for fact in facts if fact.ranks is None]
    ranks = said[0].ranks if said else None
    against = (*launcher.against, *_contradictions(said, facts))
    return RanksHere(ranks, (*said, *rest), against, tuple(launcher.unread))


def ranks_here(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the global ranks that these variables are about; None where they don't say, as before a launcher ran."""
    return find_ranks(environ).ranks


def check_ranks(topology: Mapping[str, Any], here: RanksHere, *, process: bool = False) -> list[Reason]:
    """Return what stands against starting a topology with these ranks; the caller looks whether it holds them.

    Args:
        topology: a set's or an entry's topology document.
        here: what the sources say.
        process: whether this is the program's process, which has to know its rank. A hook that knows none hands all
            ranks out.
    """
    if here.against:
        return list(here.against)
    stored = topology.get("world_size")
    for fact in here.facts:
        if fact.world_size is not None and fact.world_size != stored:
            hint = f"built for {stored} ranks, started with {fact.world_size} ({fact.source}): start as many, or run "
            hint += "cachectl build for this topology"
            return [Reason("topology", "world_size", stored, fact.world_size, hint=hint)]
    if stored == 1 or here.ranks is not None:
        return []
    # A table that is not there yet, or not completed, is no fault before the program runs.
    if unread := [reason for reason in here.unread if process or reason.kind == "corrupt"]:
        return unread
    if process:
        hint = "start the program with torchrun, or export RANK to each process"
        return [Reason("topology", "rank", topology.get("rank"), kind="absent", hint=hint)]
    return []


def _contradictions(said: Sequence[Fact], facts: Sequence[Fact]) -> Iterable[Reason]:
    """Yield what two sources disagree in, at most once for ranks and once for the world's size."""
    first = said[0] if said else None
    for other in said[1:]:
        if first is not None and not {*(first.ranks or ())} <= {*(other.ranks or ())}:
            yield _against("rank", first.source, other.source)
            break
    sizes = [fact for fact in facts if fact.world_size is not None]
    for other in sizes[1:]:
        if other.world_size != sizes[0].world_size:
            yield _against("world_size", sizes[0].source, other.source)
            break
    for size in sizes:
        if first is not None and max(first.ranks or (0,)) >= (size.world_size or 0):
            yield _against("rank", first.source, size.source)
            break


def _against(name: str, one: str, other: str) -> Reason:
    return Reason("topology", name, one, other, hint=f"two sources contradict each other: {_MEND}")


class _Launcher:
    """What launchers and job controllers leave in the environment; `against` and `unread` as in RanksHere."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.against: list[Reason] = []
        self.unread: list[Reason] = []

    def facts(self) -> list[Fact]:
        """Return what they say; none where no launcher and no controller was here."""
        local = self._text("LOCAL_RANK")
        if "," in local:
            return self._ascend_job(local)
        rank, number = self._number("RANK"), self._number("LOCAL_RANK")
        if number is not None:
            return self._process(rank, number)
        pod = self._pod()
        if pod is None:
            return [] if rank is None else [Fact(f"RANK={rank}", (rank,))]
        index, fact = pod
        if rank is None or rank == index:
            # Before a launcher ran RANK is the pod's index in a PyTorchJob, and in manifests made after it.
            return [fact]
        if rank < index:
            # Each pod before this one runs a rank at least.
            self._contradict("rank", f"RANK={rank}", fact.source)
        return [Fact(f"RANK={rank}", (rank,)), fact]

    def _process(self, rank: int | None, local: int) -> list[Fact]:
        """A process that a launcher started."""
        facts = []
        here, offset = self._number("LOCAL_WORLD_SIZE"), self._number("RANK_OFFSET")
        size = self._number("WORLD_SIZE")
        if rank is not None:
            facts.append(Fact(f"RANK={rank}", (rank,)))
        if rank is None or offset is not None:
            source = f"LOCAL_RANK={local}" + ("" if offset is None else f" + RANK_OFFSET={offset}")
            facts.append(Fact(source, (local + (offset or 0),)))
        if here is not None and local >= here:
            self._contradict("local_rank", f"LOCAL_RANK={local}", f"LOCAL_WORLD_SIZE={here}")
        group, groups = self._number("GROUP_RANK"), self._number("GROUP_WORLD_SIZE")
        if group is not None and groups is not None and here is not None and groups * here == size:
            # Nodes of equal size; torchrun numbers the ranks node by node.
            source = f"GROUP_RANK={group} × LOCAL_WORLD_SIZE={here} + LOCAL_RANK={local}"
            facts.append(Fact(source, (group * here + local,)))
        return [*facts, *self._world()]

    def _ascend_job(self, local: str) -> list[Fact]:
        """An AscendJob's pod: its index, and the local ranks it will start."""
        numbers = [_count(part.strip()) for part in local.split(",") if part.strip()]
        index = self._number("RANK")
        if None in numbers or not numbers:
            self._not_understood("LOCAL_RANK", local)
            return []
        if index is None:
            return []
        here = sorted(number for number in numbers if number is not None)
        each = self._number("LOCAL_WORLD_SIZE") or len(here)
        if here[-1] >= each:
            self._contradict("local_rank", f"LOCAL_RANK={local}", f"LOCAL_WORLD_SIZE={each}")
        source = f"RANK={index} (the pod's) × {each} + LOCAL_RANK={local}"
        return [Fact(source, tuple(index * each + number for number in here)), *self._world()]

    def _world(self) -> list[Fact]:
        size = self._number("WORLD_SIZE")
        return [] if size is None else [Fact(f"WORLD_SIZE={size}", None, size)]

    def _pod(self) -> tuple[int, Fact] | None:
        """A pod whose launcher has not run: its index, with the ranks it will start as far as that can be known."""
        # PET_NNODES may be a range, PET_NPROC_PER_NODE a word such as auto: then neither counts anything yet.
        each = _count(self._text("PET_NPROC_PER_NODE"))
        index, name = self._number("PET_NODE_RANK"), "PET_NODE_RANK"
        pods = _count(self._text("PET_NNODES"))
        if index is None:
            index, name = self._number("LWS_WORKER_INDEX"), "LWS_WORKER_INDEX"
            pods = self._number("LWS_GROUP_SIZE")
            each = self._number("LOCAL_WORLD_SIZE") or each
        if index is None:
            return None
        source = f"{name}={index}" + (f" × {each} ranks a pod" if each else "")
        if pods is not None and index >= pods:
            self._contradict("node_rank", source, f"{pods} pods")
        ranks = tuple(range(index * each, (index + 1) * each)) if each else None
        return index, Fact(source, ranks, pods * each if pods and each else None)

    def _text(self, name: str) -> str:
        return self._environ.get(name, "").strip()

    def _number(self, name: str) -> int | None:
        """Return a variable as a count; unset, empty and -1, torch's word for none, are None."""
        text = self._text(name)
        number = _count(text)
        if number is None and text not in ("", "-1"):
            self._not_understood(name, text)
        return number

    def _not_understood(self, name: str, text: str) -> None:
        reason = Reason("topology", name, None, text, "corrupt", f"{name} is no number: mend it, or pass --rank")
        if reason not in self.unread:
            self.unread.append(reason)

    def _contradict(self, name: str, one: str, other: str) -> None:
        self.against.append(_against(name, one, other))


def _table_facts(environ: Mapping[str, str], unread: list[Reason], *, alone: bool) -> list[Fact]:
    """Return what a rank table says, and RANK_ID beside it where nothing else names a process's rank."""
    name = environ.get(RANK_TABLE_VARIABLE, "").strip()
    if not name:
        return []
    try:
        table = read_rank_table(Path(name))
    except RankTableError as error:
        kind = "absent" if error.pending else "corrupt"
        hint = f"mend the rank table, unset {RANK_TABLE_VARIABLE}, or pass --rank"
        unread.append(Reason("topology", "rank table", name, str(error), kind, hint))
        return []
    own = table.ranks_of({environ[key] for key in _ADDRESSES if environ.get(key)})
    source = f"rank table {name}, version {table.version}, {table.world_size} ranks"
    if own is not None and len(own) < table.world_size:
        source += f", here {_brief(own)}"
    rank = _count(environ.get("RANK_ID", "").strip()) if alone else None
    facts = [] if rank is None else [Fact(f"RANK_ID={rank}", (rank,))]
    if own is None and (facts or not alone):
        # The table doesn't say which are here: whatever does has to name some of them.
        own = tuple(range(table.world_size))
    return [*facts, Fact(source, own, table.world_size)]


def _brief(ranks: Sequence[int]) -> str:
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _count(text: str) -> int | None:
    # Ten digits are more ranks than there will be, and int() of a longer text may take its time.
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 11 else None
