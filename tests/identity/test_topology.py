"""The topology part: every size counts, and each rank's part is its own."""

from __future__ import annotations

import pytest

from cachectl.identity.topology import SIZES, rank_topology, topology_part
from cachectl.schemas.canonical import digest_of

EIGHT = topology_part({"topology": {"world_size": 8, "tensor_parallel": 4, "data_parallel": 2}})


def test_topology_part_fills_in_defaults() -> None:
    """A size that is left out is 1; writing the 1 changes nothing."""
    assert dict.fromkeys(SIZES, 1) == topology_part({})
    assert topology_part({}) == topology_part({"topology": {"world_size": 1}}) == topology_part({"topology": None})


@pytest.mark.parametrize("name", SIZES)
def test_topology_part_each_size_counts(name: str) -> None:
    """The same world split in another way is another topology (field reports T6, T7)."""
    other = topology_part({"topology": {name: 2}})

    assert digest_of(topology_part({})) != digest_of(other)
    assert 2 == other[name]


def test_rank_topology_ranks_differ() -> None:
    """Each rank's entry has a part of its own (field report T1)."""
    parts = [rank_topology(EIGHT, rank) for rank in range(8)]

    assert 8 == len({digest_of(part) for part in parts})
    assert all(part.items() >= EIGHT.items() for part in parts)
