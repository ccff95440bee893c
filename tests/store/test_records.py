"""Boot records as values: newest first, bounded, one set of each id."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachectl.identity.topology import rank_topology, topology_part
from cachectl.schemas.boot import BootRecord, Member, WarmSet
from cachectl.schemas.canonical import digest_of
from cachectl.store.records import SETS_KEPT, members_of_ranks, tied_to_cut, with_warm_set
from tests.strategies import BOOT_RECORDS, MEMBERS, WARM_SETS


def joined(record: BootRecord | None, warm_set: WarmSet, sequence: int = 1) -> BootRecord:
    """Return the record with a set joined."""
    return with_warm_set(
        record, warm_set, recipe="made-up", recipe_digest=digest_of("r"), paths=(".",), sequence=sequence
    )


def warm_set(name: str, *members: Member) -> WarmSet:
    """Return a warm set of some name."""
    return WarmSet(digest_of(name), "2026-03-01T12:00:00Z", {"name": name}, members)


@given(st.none() | BOOT_RECORDS, WARM_SETS)
def test_with_warm_set_puts_it_first_and_once(record: BootRecord | None, newest: WarmSet) -> None:
    """The new set is the first, no other of its id stays, and the others keep their order."""
    found = joined(record, newest).sets

    older = [item for item in (record.sets if record else ()) if item.warm_set != newest.warm_set]
    assert [newest, *older] == list(found)


def test_with_warm_set_built_again_moves_to_the_front() -> None:
    """A set that was built again takes the place of its own earlier build."""
    record = joined(joined(joined(None, warm_set("a")), warm_set("b")), warm_set("a"), sequence=3)

    assert [digest_of("a"), digest_of("b")] == [item.warm_set for item in record.sets]
    assert 3 == record.sequence


def test_with_warm_set_many_drops_the_oldest() -> None:
    """A record stays short, whatever is built."""
    record = None
    for number in range(SETS_KEPT + 5):
        record = joined(record, warm_set(str(number)))

    assert record is not None
    assert [digest_of(str(number)) for number in reversed(range(5, SETS_KEPT + 5))] == [
        item.warm_set for item in record.sets
    ]


def test_with_warm_set_many_of_one_cut_leave_the_newest_of_another() -> None:
    """Who builds again and again in one cut, or on one toolchain, takes no other's only set; their older ones go."""
    other_cut = replace(warm_set("apart"), ranks_per_node=1)
    other_tools = replace(warm_set("tools"), request={"toolchain": {"torch": "2.12"}})
    record = joined(joined(None, other_tools), other_cut)
    for number in range(SETS_KEPT + 5):
        record = joined(record, replace(warm_set(str(number)), ranks_per_node=2))

    newest = [digest_of(str(number)) for number in reversed(range(7, SETS_KEPT + 5))]
    assert SETS_KEPT == len(record.sets)
    assert [*newest, digest_of("apart"), digest_of("tools")] == [item.warm_set for item in record.sets]


@pytest.mark.parametrize(
    ("found", "tied"),
    [({"device_index": 0}, True), ({"local_rank": None}, True), ({"groups": {"1": [[0]]}}, False), ({}, False)],
)
def test_tied_to_cut_where_an_artifact_holds_anything_of_it(found: dict[str, object], tied: bool) -> None:
    """A device by number or a launcher's variable ties it; a process group has the same ranks in every cut."""
    assert tied == tied_to_cut(rank_topology(topology_part({}), 0, found))


@given(st.lists(MEMBERS, max_size=6), st.none() | st.frozensets(st.integers(0, 127), max_size=4))
def test_members_of_ranks_keeps_order_and_ranks(members: list[Member], ranks: frozenset[int] | None) -> None:
    """Exactly the members of these ranks, in the set's order; all for None (field report T3)."""
    found = members_of_ranks(warm_set("a", *members), ranks)

    assert [member for member in members if ranks is None or member.rank in ranks] == list(found)
