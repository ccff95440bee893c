"""What entries say of graph captures, to whoever plans or builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cachectl.schemas.keying import warm_set_id
from cachectl.services.captures import capture_reason, capture_warning, captured_by_a_start, first_call_seconds
from tests.services.standin import Site, make_site

WARNING = "each new value of L['n'] is another graph key"
SHOWN = {
    "rungs": {"eager": "passed"},
    "warm_up": {"inputs_digest": "sha256:" + "0" * 64, "rtol": 0.0, "atol": 0.0, "steps": []},
    "held": {"outputs": [], "inputs": []},
    "captures": {
        "limit": 64,
        "keys": None,
        "values": ["L['n']"],
        "captured": 1,
        "recaptured": 0,
        "warning": WARNING,
    },
}


@pytest.mark.parametrize("shown", [None, {}, {"captures": {"limit": 64, "keys": 1, "warning": None}}])
def test_capture_warning_is_none_where_nothing_is_wrong(shown: dict[str, Any] | None) -> None:
    """Entries of earlier versions say nothing."""
    assert capture_warning(shown) is None


def test_first_call_seconds_are_in_their_order_and_empty_for_earlier_entries() -> None:
    """Load, warm-up and capture apart; other names are left out."""
    warm = {"capture": 0.2, "first_call": 0.4, "load": 0.1, "other": 1.0, "warm_up": 0.0}

    assert ["load", "warm_up", "capture", "first_call"] == list(first_call_seconds({"seconds": {"warm": warm}}))
    assert [{}, {}, {}] == [first_call_seconds(shown) for shown in (None, {}, {"seconds": {}})]


def test_captures_of_a_start_are_summed_over_its_entries() -> None:
    """Captures of a key that had moved are the gates' own; an entry that says nothing leaves the sum unknown."""
    one = {"captures": {"captured": 2, "recaptured": 1}, "seconds": {"warm": {"capture": 0.25}}}

    assert (2, 0.5) == captured_by_a_start([one, one])
    assert captured_by_a_start([one, None]) is None
    assert (0, 0.0) == captured_by_a_start([])


def warned(folder: Path) -> Site:
    """Return a site whose case c0 is built with a warning of its captures, in both ranks."""
    site = make_site(folder)
    (folder / "shown.json").write_text(json.dumps(SHOWN))
    site.recipe({"c0": "build", "c1": "build"})
    return site


def test_build_and_plan_tell_a_warning_of_captures_once_a_case(tmp_path: Path) -> None:
    """Before and after: the entry is ready all the same, and the reason is noise."""
    site = warned(tmp_path)

    built = site.build("recipe.yaml")
    planned = site.run("plan", "recipe.yaml", "--json", "--require-ready")

    assert (0, 0) == (built.returncode, planned.returncode), built.stderr + planned.stderr
    assert 2 == built.stderr.count(WARNING)
    assert 1 == built.stderr.count("rank 0: each start captures 2 graphs, warm or cold")
    entries = planned.report["entries"]
    assert [("ready", [("options", "capture_limit", 64, "noise", WARNING)])] * 2 == [
        (
            entry["state"],
            [
                (reason["part"], reason["name"], reason["stored"], reason["kind"], reason["hint"])
                for reason in entry["reasons"]
            ],
        )
        for entry in entries
    ]


def test_capture_reason_of_an_entry_that_is_gone_is_none(tmp_path: Path) -> None:
    """verify tells what is missing."""
    site = make_site(tmp_path)
    key = warm_set_id(["sha256:" + "0" * 64])

    assert capture_reason(site.layout, key, key) is None
