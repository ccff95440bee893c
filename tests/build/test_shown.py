"""What an entry says of its gates beyond equal values, from what two processes found."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

from cachectl.build.drafts import proved
from cachectl.build.shown import shown_by_recording, shown_by_reloading, static_kernels_rung
from cachectl.build.steps import Ran
from cachectl.runtimes.captures import Captures, GraphKeys
from cachectl.schemas.canonical import digest_bytes
from cachectl.schemas.entry import Shown

ONE, OTHER = digest_bytes(b"one"), digest_bytes(b"other")
KEYS = GraphKeys(64, 1, (), (), ("arg4_1",))


def ran(inputs: str = ONE, outputs: str = ONE) -> Ran:
    """Return a run of one step with these digests."""
    golden = [{"step": 0, "inputs": "given", "digest": outputs, "values": []}]
    return Ran(inputs=inputs, golden=golden, seconds=[0.5])


def shown(recorded: dict[str, Any] | None, found: Ran, captures: Captures | None = None) -> Shown:
    """Return what an entry shows, as its manifest reads it."""
    document = shown_by_reloading(
        found,
        {"outputs": ["output"], "inputs": []},
        captures,
        recorded=recorded,
        keys=KEYS,
        seconds={"load": 0.1, "proof": 0.2},
        static_kernels="not asked",
        rtol=1e-3,
        atol=1e-4,
    )
    return Shown.model_validate(document)


@pytest.mark.parametrize(
    ("second", "repeat", "exact"),
    [(ran(), True, True), (ran(outputs=OTHER), True, False), (ran(inputs=OTHER), False, True)],
)
def test_golden_outputs_say_whether_two_processes_gave_the_same(second: Ran, repeat: bool, exact: bool) -> None:
    """To the last bit, or within the tolerances that stand beside; and whether the inputs were the same at all."""
    recorded = shown_by_recording(ran(), {"outputs": ["output"], "inputs": []}, None)

    warm_up = shown(recorded, second).warm_up

    assert (repeat, exact, 1e-3, 1e-4) == (warm_up.inputs_repeat, warm_up.exact, warm_up.rtol, warm_up.atol)
    assert (second.inputs, second.golden[0]["digest"]) == (warm_up.inputs_digest, warm_up.steps[0].digest)


def test_seconds_are_apart_for_the_cold_and_the_warm_first_call() -> None:
    """Load, warm-up and capture, as far as they were measured."""
    first = shown_by_recording(ran(), {}, Captures(captured=1, seconds=0.25, warm_up_seconds=0.125))

    found = shown({**first, "held": {}}, ran(), Captures(captured=2, recaptured=1, seconds=0.5, warm_up_seconds=0.25))

    assert {"first_call": 0.5, "capture": 0.25, "warm_up": 0.125} == found.seconds["cold"]
    assert {"load": 0.1, "proof": 0.2, "capture": 0.5, "warm_up": 0.25} == found.seconds["warm"]
    assert (2, 1, 64, 1, ("arg4_1",)) == (
        found.captures.captured,
        found.captures.recaptured,
        found.captures.limit,
        found.captures.keys,
        found.captures.written,
    )


def test_gates_that_went_beyond_the_limit_are_a_warning() -> None:
    """A written argument that moves once too often; nothing else in the artifact tells."""
    fell_back = shown(None, ran(), Captures(captured=1, fell_back=1)).captures
    did_not = shown(None, ran(), Captures(captured=2, recaptured=1)).captures

    assert (1, None) == (fell_back.fell_back, did_not.warning)
    assert "an argument that the graph writes had moved, and capture_limit is 64" in str(fell_back.warning)


def test_entry_that_a_program_recorded_says_what_one_process_showed() -> None:
    """Under exec --record the first process is the program, whose values are its own."""
    found = shown(None, ran())

    assert (None, None, ["warm"]) == (found.warm_up.exact, found.warm_up.inputs_repeat, list(found.seconds))
    assert (None, None) == (found.captures.captured, found.captures.recaptured)


@pytest.mark.parametrize(
    ("options", "file", "word"),
    [
        ({}, "outputs/ts1_pid2_outputs/a.run", "not asked"),
        ({"static_kernel_compile": False}, "outputs/ts1_pid2_outputs/a.run", "not asked"),
        ({"static_kernel_compile": True}, "outputs/ts1_pid2_outputs/a.run", "passed"),
        ({"static_kernel_compile": True}, "compiled_module", "none saved"),
    ],
)
def test_static_kernels_are_a_rung_where_they_are_asked_for(
    tmp_path: Path, options: dict[str, Any], file: str, word: str
) -> None:
    """Asked for and saved; a world's other ranks save none."""
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()

    assert word == static_kernels_rung(options, tmp_path)


def test_proved_document_has_what_the_second_process_showed() -> None:
    """And none where it showed nothing, as a stand-in."""
    document = {"provenance": {"warm_seconds": None, "gates": {}}}
    found, reloaded = {"gates": {"first step": 0.0}}, {"gates": {"reloaded first step": 0.0}, "warm_seconds": 0.5}

    with_it = proved(document, found, {**reloaded, "shown": {"rungs": {}}})["provenance"]
    without = proved(document, found, reloaded)["provenance"]

    assert {"warm_seconds": 0.5, "gates": {**found["gates"], **reloaded["gates"]}, "shown": {"rungs": {}}} == with_it
    assert "shown" not in without
