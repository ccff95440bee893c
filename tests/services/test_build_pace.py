"""The pace of a launch: what is left is said only where all that is left is known."""

from __future__ import annotations

import pytest

from cachectl.services.build_pace import Pace

KNOWN = {
    0: {"record start": 10.0, "record": 60.0, "reload start": 12.0, "reload": 5.0},
    1: {"record start": 11.0, "record": 30.0, "reload start": 12.0, "reload": 4.0},
}


def test_pace_left_counts_down_and_never_below_nothing() -> None:
    """In the first start all of it is left; a part that takes longer than the last time has no more left itself."""
    pace = Pace([0, 1], KNOWN)

    assert 11 + 60 + 30 + 12 + 5 + 4 == pace.whole_s()
    pace.enter(0, "record", None, 100.0)
    assert pytest.approx(122 - 3) == pace.left_s(0, 103.0)
    pace.enter(0, "record", 0, 112.0)
    assert pytest.approx(60 + 30 + 12 + 9) == pace.left_s(0, 112.0)
    # Eager, compile and check of one case are one part.
    pace.enter(0, "record", 0, 120.0)
    assert pytest.approx(52 + 51) == pace.left_s(0, 120.0)
    assert pytest.approx(51) == pace.left_s(0, 500.0)
    pace.enter(0, "reload", 1, 600.0)
    assert pytest.approx(4) == pace.left_s(0, 600.0)


def test_pace_counts_nothing_of_what_was_recorded_before() -> None:
    """One case has its record behind it: the other's is left, and both proofs; with both there is no first phase."""
    assert 11 + 30 + 12 + 5 + 4 == Pace([0, 1], KNOWN, {0}).whole_s()
    pace = Pace([0, 1], KNOWN, {0, 1})

    assert 12 + 5 + 4 == pace.whole_s()
    pace.enter(0, "reload", None, 0.0)
    pace.enter(0, "reload", 0, 10.0)
    pace.end(20.0)
    # A launch that was not whole says nothing of the next one.
    assert {} == pace.of_case(0)


def test_pace_is_silent_where_a_part_was_never_measured() -> None:
    """A case that is new says nothing, until it is behind; a rank that has not begun has no part yet."""
    pace = Pace([0, 1], {1: KNOWN[1]})

    assert pace.whole_s() is None
    assert pace.left_s(0, 1.0) is None
    pace.enter(0, "record", None, 1.0)
    assert pace.left_s(0, 1.0) is None
    pace.enter(0, "reload", 1, 9.0)
    assert pytest.approx(4) == pace.left_s(0, 9.0)


def test_pace_notes_the_slowest_rank_and_only_whole_launches() -> None:
    """Two ranks: of each part the longer one; a case whose second phase never ran is not noted."""
    pace = Pace([0, 1], {})
    for rank, late in ((0, 0.0), (1, 2.0)):
        pace.enter(rank, "record", None, 0.0)
        pace.enter(rank, "record", 0, 5.0 + late)
        pace.enter(rank, "record", 1, 20.0 + 2 * late)
    pace.end(30.0)
    assert {} == pace.of_case(0)
    pace.enter(0, "reload", None, 30.0)
    pace.enter(0, "reload", 0, 33.0)
    pace.end(34.5)

    assert {"record start": 7.0, "record": 17.0, "reload start": 3.0, "reload": 1.5} == pace.of_case(0)
    assert {} == pace.of_case(1)
