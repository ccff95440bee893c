"""`cachectl explain` and `cachectl diff`: their text, their documents, their exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cachectl.cli import diff, explain
from cachectl.cli.output import Output
from cachectl.schemas.canonical import digest_bytes
from cachectl.schemas.report import DiffReport, ExplainReport, Nearest, ReasonModel
from tests.cli.conftest import LONG_S
from tests.stores import MadeStore, make_store

KEY = digest_bytes(b"key")
OTHER = digest_bytes(b"other")
CANN = ReasonModel(part="toolchain", name="cann.CANN", stored="8.5.0", wanted="9.0.0", kind="semantic", hint="build it")
UNSET = ReasonModel(part="environment", name="DEPTH", stored="4", wanted=None, kind="semantic", hint="export DEPTH=4")
COMMENT = ReasonModel(part="sources", name="a.py", stored=KEY, wanted=OTHER, kind="noise", hint="nothing to do")
GONE = ReasonModel(part="store", name="database", stored="there is no database", kind="absent", hint="init")


@pytest.fixture
def made(tmp_path: Path) -> MadeStore:
    """A store with one published warm set."""
    store = make_store(tmp_path / "made")
    store.publish()
    return store


def run(made: MadeStore, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in the program's environment."""
    return subprocess.run(
        [sys.executable, "-m", "cachectl", *arguments],
        env={**os.environ, **made.hook_environ(environ)},
        cwd=made.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )


def test_explain_render_has_a_heading_an_entry_and_hints_at_the_end() -> None:
    """Outcome, what counts, what doesn't, each near entry under its own heading, then what to run."""
    stdout = io.StringIO()
    report = ExplainReport(
        outcome="cold",
        reasons=[CANN, UNSET, GONE, COMMENT],
        nearest=[
            Nearest(key=KEY, distance=1, differs=[CANN], line="tiny main_decode/b4 rank 0"),
            Nearest(key=OTHER, distance=0, differs=[COMMENT], line="tiny main_decode/b2 rank 0"),
        ],
    )

    explain.render(Output(stdout=stdout), report)

    assert (
        "cold\n"
        "  toolchain: cann.CANN: 8.5.0 → 9.0.0\n"
        "  environment: DEPTH: 4 → nothing\n"
        "  store, absent: database: there is no database\n"
        f"  noise, sources: a.py: sha256:{KEY[7:19]} → sha256:{OTHER[7:19]}\n"
        "\n"
        f"{KEY[7:19]} tiny main_decode/b4 rank 0: 1 part differs\n"
        "  toolchain: cann.CANN: 8.5.0 → 9.0.0\n"
        "\n"
        f"{OTHER[7:19]} tiny main_decode/b2 rank 0: nothing that counts differs\n"
        f"  noise, sources: a.py: sha256:{KEY[7:19]} → sha256:{OTHER[7:19]}\n"
        "\n"
        "hint: build it\nhint: export DEPTH=4\nhint: init\nhint: nothing to do\n"
    ) == stdout.getvalue()


def test_diff_render_cuts_a_long_part_short() -> None:
    """Three hundred guards that differ are not three hundred lines, unless they are asked for."""
    guards = [ReasonModel(part="guards", name=f"self.x{n}", stored=n, kind="semantic", hint="") for n in range(300)]
    report = DiffReport(stored=KEY, wanted=OTHER, distance=2, differs=[CANN, *guards])
    short, whole = io.StringIO(), io.StringIO()

    diff.render(Output(stdout=short), report)
    diff.render(Output(stdout=whole, verbose=1), report)

    assert f"{KEY[7:19]} → {OTHER[7:19]}: 2 parts differ\n" == short.getvalue().splitlines(keepends=True)[0]
    assert short.getvalue().endswith("  guards: self.x11: 11 → nothing\n  guards: 288 more (-v shows them)\n")
    assert 302 == len(whole.getvalue().splitlines())


def test_explain_warm_exits_none_and_cold_exits_one(made: MadeStore) -> None:
    """The exit code is the outcome; the text and the document name the same thing."""
    warm = run(made, "explain", "recipe/recipe.yaml")
    text = run(made, "explain", "recipe/recipe.yaml", N_LAYERS="8")
    document = json.loads(run(made, "explain", "recipe/recipe.yaml", "--json", N_LAYERS="8").stdout)

    assert (0, "warm") == (warm.returncode, warm.stdout.splitlines()[0])
    assert (1, "cold") == (text.returncode, text.stdout.splitlines()[0])
    assert "  environment: N_LAYERS: 4 → 8\n" in text.stdout
    assert "hint: run: export N_LAYERS=4; or, to build for the value here: cachectl build" in text.stdout
    assert ["outcome", "reasons", "nearest"] == list(document)
    assert [("environment", "N_LAYERS", "4", "8", "semantic")] == [
        tuple(reason[name] for name in ("part", "name", "stored", "wanted", "kind")) for reason in document["reasons"]
    ]
    assert [{"key", "distance", "differs"}] * 2 == [set(entry) for entry in document["nearest"]]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["explain", "nothing.yaml"], 2, "nothing.yaml"),
        (["explain", "recipe/recipe.yaml", "--key", "ffff"], 2, "no entry's key begins with 'ffff'"),
        (["explain", "recipe/recipe.yaml", "--store", "elsewhere"], 3, "no store at"),
        (["explain"], 2, "Missing argument 'RECIPE'"),
        (["diff", "ffff", "ffff"], 2, "no entry's key begins with 'ffff'"),
        (["diff", "nonsense", "ffff"], 2, "'nonsense' is no key"),
    ],
)
def test_explain_and_diff_wrong_input_is_one_line(made: MadeStore, arguments: list[str], code: int, said: str) -> None:
    """What was written wrongly exits 2, a store that isn't there 3, each with one line."""
    result = run(made, *arguments)

    assert (code, "", 1) == (result.returncode, result.stdout, result.stderr.count("\n"))
    assert said in result.stderr


def test_diff_names_the_case_and_its_noise(made: MadeStore) -> None:
    """Two entries of one build differ in their case; an entry differs from itself in nothing."""
    four, two = (made.member(made.publish(), case).key for case in ("b4", "b2"))
    done = run(made, "diff", four[7:19], two, "--json")
    document: dict[str, Any] = json.loads(done.stdout)
    same = run(made, "diff", four, four)

    assert (0, four, two, 2) == (done.returncode, document["stored"], document["wanted"], document["distance"])
    assert [("model", "args.batch", 4, 2), ("inputs", "L['x']", {"value": 4}, {"value": 2})] == [
        (reason["part"], reason["name"], reason["stored"], reason["wanted"])
        for reason in document["differs"]
        if reason["kind"] == "semantic"
    ]
    assert {"noise"} == {reason["kind"] for reason in document["differs"]} - {"semantic"}
    assert f"{four[7:19]} → {four[7:19]}: nothing that counts differs\n" == same.stdout


def test_explain_alarm_names_what_changes_at_every_build(tmp_path: Path) -> None:
    """A variable that is another in each build is named in text and JSON, and the hinted command shows it (S1, S2)."""
    made = make_store(tmp_path / "made")
    for number in (1, 2, 3):
        made.publish(observed={"RUN_ID": f"run-{number}"}, created_at=f"2026-03-02T12:00:0{number}Z")

    text = run(made, "explain", "recipe/recipe.yaml", RUN_ID="run-4")
    document = json.loads(run(made, "explain", "recipe/recipe.yaml", "--json", RUN_ID="run-4").stdout)
    (alarm,) = (reason for reason in document["reasons"] if reason["name"].startswith("changes at every build"))
    hinted = run(made, *alarm["hint"].rpartition("cachectl ")[2].split())

    assert ("cold", 1) == (document["outcome"], text.returncode)
    assert "  environment: RUN_ID: run-3 → run-4\n" in text.stdout
    assert "  noise, environment: changes at every build: RUN_ID: run-2 → run-3\n" in text.stdout
    assert ("environment", "noise") == (alarm["part"], alarm["kind"])
    assert (0, True) == (hinted.returncode, "  environment: RUN_ID: run-2 → run-3\n" in hinted.stdout)


def test_plan_rehearsal_names_the_lost_sets_of_several_recipes(made: MadeStore) -> None:
    """Each recipe's set has its line; a set that is stale already is not lost to the upgrade."""
    other = made.recipe.with_name("other.yaml")
    other.write_text(made.recipe.read_text().replace("name: made-up", "name: never-built"))
    words = ("plan", str(made.recipe), str(other))

    rehearsed = run(made, *words, "--toolchain", "cann=9.0.0,torch=2.14.0")
    today = run(made, *words)
    stale = run(made, *words, "--toolchain", "cann=9.0.0", N_LAYERS="8")

    assert [1, 1, 1] == [result.returncode for result in (rehearsed, today, stale)]
    assert rehearsed.stdout.startswith("RECIPE       METHOD")
    assert 1 == rehearsed.stdout.count(" of made-up is lost: 2 of 2 entries, which took an unknown time to compile\n")
    assert "with cann 9.0.0, torch 2.14.0 warm set " in rehearsed.stdout
    assert "torch.git" not in rehearsed.stdout
    assert "lost" not in today.stdout
    assert "with cann 9.0.0 no warm set that is ready today is lost\n" in stale.stdout
