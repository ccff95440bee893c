"""The cut of a world into nodes: how many ranks each node runs, and whether an artifact of one cut fits another.

Owns reading the cut from the environment, and what follows from it for a rank: with equal nodes, as torchrun numbers
ranks, rank r of n a node is local rank r mod n on node r div n, and has the device of its local rank. What an artifact
holds of it stands in `found` of the topology part; an artifact that holds nothing of it fits every cut. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cachectl.schemas.boot import Reason, WarmSet
from cachectl.store.records import TIES

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = ["cut_reason", "cut_text", "of_other_cut", "ranks_per_node", "sets_in_turn"]

# Before a launcher ran PET_NPROC_PER_NODE is what torchrun will start.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "PET_NPROC_PER_NODE")


def ranks_per_node(environ: Mapping[str, str], world_size: object) -> int | None:
    """Return how many ranks each node of this start runs; None where nobody says so, or nodes are unequal.

    The same in all ranks of a start with equal nodes. Where they are not equal, some ranks may take them for so.

    Args:
        environ: the environment of the program or, in a hook, of the pod.
        world_size: of the set that is asked about.
    """
    each = next((number for name in _LOCAL_SIZES if (number := _count(environ, name))), None)
    nodes = _count(environ, "GROUP_WORLD_SIZE")
    if type(world_size) is not int or world_size < 2 or each is None or world_size % each:
        return None
    return each if nodes is None or nodes * each == world_size else None


def cut_reason(topology: Mapping[str, Any], built: object, asked: int | None) -> Reason | None:
    """Return why an entry does not fit a cut; None where it does, and where that can't be told.

    A device that was not that of the local rank when the entry was built follows another rule than the cut: only the
    program's process can compare it.

    Args:
        topology: the entry's topology part.
        built: ranks per node when it was built, None where the manifest does not say so.
        asked: ranks per node that are asked for, None where nobody knows.
    """
    if type(built) is not int or built < 1 or asked is None or built == asked:
        return None
    found = topology.get("found") or {}
    then, here = _place(topology["rank"], built), _place(topology["rank"], asked)
    if all(found.get(name) != then[name] or then[name] == here[name] for name in then):
        return None
    size = topology["world_size"]
    hint = "run: cachectl build"
    return Reason("topology", "node cut", cut_text(size, built), cut_text(size, asked), hint=hint)


def cut_text(world_size: int, each: int) -> str:
    """Return a cut for people: `2 nodes of 4`."""
    nodes = world_size // each
    return f"{nodes} node{'s' if nodes > 1 else ''} of {each}"


def of_other_cut(tied_to: int | None, here: int | None) -> bool:
    """Say whether a set that is tied to a cut, or to none, was built in another one than a start has, where known."""
    return None not in (tied_to, here) and tied_to != here


def sets_in_turn(sets: Iterable[WarmSet], here: int | None) -> list[WarmSet]:
    """Return a record's sets in the order in which a hook looks at them; within one cut as they were.

    Those that fit the cut of this start come first. Where that is not known, the cuts take turns: however many sets
    there are of the newest one, others have a place in the hand-out, too.
    """
    if here is not None:
        return sorted(sets, key=lambda item: of_other_cut(item.ranks_per_node, here))
    seen: dict[int | None, int] = {}
    turns = []
    for item in sets:
        turns.append((seen.setdefault(item.ranks_per_node, 0), item))
        seen[item.ranks_per_node] += 1
    return [item for _, item in sorted(turns, key=lambda turn: turn[0])]


def _place(rank: int, each: int) -> dict[str, Any]:
    """Return what of a rank's place depends on the cut, by its names in `found`; variables are texts there."""
    node, local = divmod(rank, each)
    return dict(zip(TIES, (local, str(local), str(each), str(node)), strict=True))


def _count(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdecimal() and 0 < len(text) < 11 else None
