"""Cuts of a world into nodes: read from what launchers say, and compared only as far as an entry is tied to one."""

from __future__ import annotations

from typing import Any

import pytest

from cachectl.identity.node_cut import cut_reason, of_other_cut, ranks_per_node, sets_in_turn
from cachectl.identity.topology import rank_topology, topology_part
from cachectl.schemas.boot import WarmSet

EIGHT = topology_part({"topology": {"world_size": 8}})


@pytest.mark.parametrize(
    ("environ", "each"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": " 8 "}, 8),
        ({"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, 4),
        ({"PET_NPROC_PER_NODE": "2"}, 2),
        ({"PET_NPROC_PER_NODE": "2", "LOCAL_WORLD_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "3"}, None),
        ({"LOCAL_WORLD_SIZE": "3"}, None),
        ({"LOCAL_WORLD_SIZE": "0"}, None),
        ({"LOCAL_WORLD_SIZE": "16"}, None),
        ({"PET_NPROC_PER_NODE": "auto"}, None),
        ({}, None),
    ],
)
def test_ranks_per_node_is_what_a_launcher_says_of_equal_nodes(environ: dict[str, str], each: int | None) -> None:
    """Nodes that can't be equal, and what no launcher says, are not known."""
    assert each == ranks_per_node(environ, 8)


@pytest.mark.parametrize("world_size", [1, None, "8"])
def test_ranks_per_node_of_one_rank_or_of_no_known_world_is_none(world_size: object) -> None:
    """A world of one is cut in one way only; where a set does not say its world's size, nothing follows."""
    assert ranks_per_node({"LOCAL_WORLD_SIZE": "1"}, world_size) is None


@pytest.mark.parametrize(
    ("rank", "found", "differs"),
    [
        (5, {"device_index": 5}, True),
        (3, {"device_index": 3}, False),
        (3, {"local_world_size": "8"}, True),
        (5, {"local_rank": "5"}, True),
        (5, {"node_rank": "0"}, True),
        (3, {"node_rank": "0"}, False),
        (5, {"device_index": 0}, False),
        (5, {"local_rank": None}, False),
        (5, {"groups": {"1": [[0, 1]]}}, False),
        (5, {}, False),
    ],
)
def test_cut_reason_of_eight_on_one_node_asked_for_four(rank: int, found: dict[str, Any], differs: bool) -> None:
    """A rank whose place is the same in both cuts fits, as what is tied to none does, and what the cut did not give."""
    reason = cut_reason(rank_topology(EIGHT, rank, found), 8, 4)

    assert differs == (reason is not None)
    if reason is not None:
        assert ("topology", "node cut", "1 node of 8", "2 nodes of 4") == (
            reason.part,
            reason.name,
            reason.stored,
            reason.wanted,
        )


@pytest.mark.parametrize(("built", "asked"), [(4, 4), (None, 4), (8, None), ("8", 4), (0, 4)])
def test_cut_reason_without_two_known_cuts_is_none(built: object, asked: int | None) -> None:
    """What an earlier version did not note is no difference, nor is what a start does not know."""
    assert cut_reason(rank_topology(EIGHT, 5, {"device_index": 5}), built, asked) is None


@pytest.mark.parametrize(
    ("tied_to", "here", "other"), [(4, 8, True), (4, 4, False), (None, 8, False), (4, None, False)]
)
def test_of_other_cut_where_both_are_known(tied_to: int | None, here: int | None, other: bool) -> None:
    """A set that is tied to no cut is of none that another start has."""
    assert other == of_other_cut(tied_to, here)


def record(*cuts: int | None) -> list[WarmSet]:
    """Return sets of these cuts; their ids count up."""
    return [WarmSet(str(number), "", {}, (), ranks_per_node=each) for number, each in enumerate(cuts)]


@pytest.mark.parametrize(
    ("cuts", "here", "wanted"),
    [
        ((8, 8, 4, None), 4, "2301"),
        ((8, 8, 4, None), 8, "0132"),
        ((8, 8, 4, None), 2, "3012"),
        ((8, 8, 8, 4, 4), None, "03142"),
        ((None, 8, None, 4), None, "0132"),
        ((8, 8, 8), None, "012"),
        ((None, None), None, "01"),
        ((), 4, ""),
    ],
)
def test_sets_in_turn_puts_the_own_cut_first_or_takes_one_of_each(
    cuts: tuple[int | None, ...], here: int | None, wanted: str
) -> None:
    """The order within a cut stays; without a known cut none is behind all of another one's."""
    assert wanted == "".join(item.warm_set for item in sets_in_turn(record(*cuts), here))
