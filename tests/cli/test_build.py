"""`cachectl build`: its options, and its report for people."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Callable

import pytest

from cachectl.cli.build import event_text, left_text, render
from cachectl.cli.output import Output
from cachectl.schemas.canonical import digest_bytes
from cachectl.schemas.report import Boot, BuildReport, Built, Failed
from cachectl.services.build import BuildEvent

Run = Callable[..., "subprocess.CompletedProcess[str]"]

KEY = digest_bytes(b"key")


def test_render_shows_cold_and_warm_seconds_failures_and_the_warm_set() -> None:
    """The summary says what was built and how much faster it loads, what failed and where its log is."""
    stdout = io.StringIO()
    report = BuildReport(
        built=[Built(key=KEY, method="main_decode", case="b4", rank=0, cold_seconds=7.66, warm_seconds=0.127)],
        reused=[KEY],
        failed=[
            Failed(method="mtp_decode", case="b4", rank=1, error="gate outputs: error 0.96", log="/logs/rank1.log")
        ],
        seconds=93.4,
        warm_set=KEY,
    )

    render(Output(stdout=stdout), report)

    assert (
        "METHOD       CASE  RANK  KEY             COLD    WARM  RATIO\n"
        f"main_decode  b4       0  {KEY[7:19]}  7.66 s  0.13 s  60.3x\n"
        "\n"
        "failed: mtp_decode/b4 rank 1: gate outputs: error 0.96\n"
        "  log: /logs/rank1.log\n"
        "1 built, 1 reused, 1 failed in 93.4 s\n"
        f"warm set {KEY[7:19]} is ready\n"
    ) == stdout.getvalue()


def test_render_says_what_each_start_saves_and_where_that_was_measured() -> None:
    """Of each recipe that is ready; simulated seconds are called so, and what was not measured is not made up."""
    stdout = io.StringIO()
    boots = [
        Boot(recipe="tiny", warm_set=KEY, saved_seconds=7.53, evidence="simulated"),
        Boot(recipe="large", warm_set=KEY, saved_seconds=190.4, evidence="device"),
        Boot(recipe="other", warm_set=KEY, saved_seconds=None, evidence="device"),
    ]

    render(Output(stdout=stdout), BuildReport(built=(), reused=(), failed=(), seconds=1, warm_set=KEY, boots=boots))

    assert (
        "0 built, 0 reused, 0 failed in 1.00 s\n"
        f"warm set {KEY[7:19]} of tiny is ready: each start saves about 7.53 s of compiling (simulated)\n"
        f"warm set {KEY[7:19]} of large is ready: each start saves about 3 min 10 s of compiling\n"
        f"warm set {KEY[7:19]} of other is ready\n"
    ) == stdout.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "any moment now"),
        (3.0, "~5 s left"),
        (62.0, "~60 s left"),
        (95.0, "~2 min left"),
        (7300.0, "~122 min left"),
    ],
)
def test_left_text_is_as_rough_as_what_is_known(seconds: float, text: str) -> None:
    """It is what an earlier build took, on another day."""
    assert text == left_text(seconds)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (BuildEvent("start", text="tiny", left_s=130.0, log="/logs/0"), "tiny: building, ~2 min left (log: /logs/0)"),
        (
            BuildEvent("phase", "main_decode", "b4", 3, "compile", elapsed_s=5.0, left_s=40.0),
            "main_decode/b4 rank 3: compile, 5.00 s, ~40 s left",
        ),
        (BuildEvent("start", text="tiny", log="/logs/0"), "tiny: building (log: /logs/0)"),
        (BuildEvent("phase", phase="import", elapsed_s=5.42), "rank 0: import, 5.42 s"),
        (
            BuildEvent("phase", "main_decode", "b4", 3, "compile", elapsed_s=5.0, estimate_s=40.0),
            "main_decode/b4 rank 3: compile, 5.00 s of about 40.0 s",
        ),
        (BuildEvent("reused", "main_decode", "b4"), "main_decode/b4 rank 0: reused"),
        (BuildEvent("reused", "main_decode", "b4", recipe="tiny"), "tiny: main_decode/b4 rank 0: reused"),
        (
            BuildEvent("done", "main_decode", "b4", seconds={"load": 0.11, "warm_up": 0.03, "capture": 0.22}),
            "main_decode/b4 rank 0: done (load 0.11 s, warm-up 0.03 s, capture 0.22 s)",
        ),
        (BuildEvent("note", "main_decode", "b4", 2, text="64 keys"), "main_decode/b4 rank 2: 64 keys"),
        (
            BuildEvent("failed", "main_decode", "b4", text="gate: error 0.96", log="/logs/0"),
            "main_decode/b4 rank 0: failed: gate: error 0.96 (log: /logs/0)",
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, BuildEvent) else "",
)
def test_event_text_says_what_where_and_how_long(event: BuildEvent, text: str) -> None:
    """Progress is one line an event, with the time it took and should take where that is known."""
    assert text == event_text(event)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--jobs", "0"), "--jobs"),
        (("--timeout", "nan"), "not a number of seconds above 0"),
        (("--timeout", "0"), "not a number of seconds above 0"),
        (("--timeout", "soon"), "--timeout"),
        (("--shard", "4"), "'4' is not i/n, as in 0/4"),
        (("--shard", "5/4"), "there is no part 5 of 4"),
        (("--shard", "0/0"), "there is no part 0 of 0"),
        (("--shard", "-1/4"), "'-1/4' is not i/n"),
    ],
)
def test_option_wrong_value_is_a_usage_error(cachectl: Run, option: tuple[str, str], message: str) -> None:
    """A value that makes no sense is refused before anything is read."""
    result = cachectl("build", "recipe.yaml", *option)

    assert (2, "") == (result.returncode, result.stdout)
    assert message in result.stderr
