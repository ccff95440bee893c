"""`cachectl plan`: its options, and its report for people."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Callable

import pytest

from cachectl.cli.output import Output
from cachectl.cli.plan import render
from cachectl.schemas.canonical import digest_bytes
from cachectl.schemas.report import LostSet, PlanEntry, PlanReport, ReasonModel

Run = Callable[..., "subprocess.CompletedProcess[str]"]

KEY = digest_bytes(b"key")
STALE = ReasonModel(
    part="toolchain", name="cann", stored="8.5.0", wanted="9.1.0", kind="semantic", hint="cachectl build recipe.yaml"
)
MISSING = ReasonModel(part="store", name="entry", kind="absent", hint="cachectl build recipe.yaml")


def entry(rank: int, state: str, *reasons: ReasonModel) -> PlanEntry:
    """Return one planned entry."""
    key = None if state == "missing" else KEY
    fields = {"key": key, "recipe": "tiny", "method": "main_decode", "case": "b4", "rank": rank, "state": state}
    return PlanEntry.model_validate({**fields, "reasons": reasons})


def rendered(report: PlanReport, verbose: int = 0) -> str:
    """Return what a person reads."""
    stdout = io.StringIO()
    render(Output(stdout=stdout, verbose=verbose), report)
    return stdout.getvalue()


def test_render_ready_is_a_table_and_a_count() -> None:
    """With nothing to do there are no reasons and no hints."""
    text = rendered(PlanReport.of([entry(0, "ready"), entry(1, "ready")]))

    assert (
        "METHOD       CASE  RANK  STATE  KEY           WHY\n"
        f"main_decode  b4       0  ready  {KEY[7:19]}\n"
        f"main_decode  b4       1  ready  {KEY[7:19]}\n"
        "\n"
        "2 ready, 0 missing, 0 stale\n"
    ) == text


def test_render_equal_reasons_of_many_ranks_are_told_once() -> None:
    """Sixty-four ranks that miss for one reason are one heading; each hint stands once."""
    entries = [entry(rank, "stale", STALE) for rank in range(64)] + [entry(64, "missing", MISSING)]
    text = rendered(PlanReport.of(entries))

    assert "main_decode/b4 ranks 0-63: stale\n  toolchain: cann: stored 8.5.0, wanted 9.1.0 (semantic)\n" in text
    assert "main_decode/b4 rank 64: missing\n  store: entry (absent)\n" in text
    assert 1 == text.count("hint: cachectl build recipe.yaml\n")
    assert text.endswith("\n0 ready, 1 missing, 64 stale\n")


def test_render_several_recipes_are_told_apart() -> None:
    """With more than one recipe each row and each heading says whose it is."""
    other = entry(0, "stale", STALE).model_copy(update={"recipe": "large"})
    text = rendered(PlanReport.of([entry(0, "stale", STALE), other], expected_seconds=9_000.0))

    assert text.startswith("RECIPE  METHOD ")
    assert "\ntiny main_decode/b4 rank 0: stale\n" in text
    assert "\nlarge main_decode/b4 rank 0: stale\n" in text
    assert "compiling what is not ready took 2 h 30 min when it was built last\n" in text


def test_render_rehearsal_names_what_is_lost() -> None:
    """A rehearsed upgrade says which warm sets it takes and what they cost, or that it takes none."""
    report = PlanReport.of(
        [entry(0, "stale", STALE)],
        lost=(LostSet(recipe="tiny", warm_set=KEY, lost=1, entries=64, seconds=7_260.0),),
    )
    stdout, none = io.StringIO(), io.StringIO()
    render(Output(stdout=stdout), report, toolchain={"cann": "9.1.0", "torch": "2.14.0"})
    render(Output(stdout=none), PlanReport.of([entry(0, "ready")]), toolchain={"cann": "8.5.0"})

    assert (
        f"with cann 9.1.0, torch 2.14.0 warm set {KEY[7:19]} of tiny is lost: 1 of 64 entries, "
        "which took 2 h 01 min to compile\n"
    ) in stdout.getvalue()
    assert "with cann 8.5.0 no warm set that is ready today is lost\n" in none.getvalue()


def test_render_verbose_shows_whole_keys() -> None:
    """-v shows what the short forms stand for."""
    assert KEY in rendered(PlanReport.of([entry(0, "ready")]), verbose=1)


@pytest.mark.parametrize("value", ["cann", "=9.1.0", "cann=", "cann=1,cann=2", ""])
def test_toolchain_malformed_is_a_usage_error(cachectl: Run, value: str) -> None:
    """--toolchain takes name=version pairs, each name once."""
    result = cachectl("plan", "recipe.yaml", "--toolchain", value)

    assert 2 == result.returncode
    assert "--toolchain" in result.stderr
    assert 1 == result.stderr.count("\n")


def test_json_and_quiet_exclude_each_other(cachectl: Run) -> None:
    """Nobody can want a document and nothing."""
    result = cachectl("plan", "recipe.yaml", "--json", "-q")

    assert 2 == result.returncode
    assert "--json and -q exclude each other" in result.stderr
