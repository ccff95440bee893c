"""The ladder without torch: where it stops, what a rank's end becomes, and what stays behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cachectl.services.triage_kernels import static_kernels
from tests.services.caches import lay, seen
from tests.services.standin import RANK, TORCH, TORCHRUN, Site

# Before the stand-in's own work: the findings that a case's args say, as a rank leaves them.
FINDS = """
import json, os, sys
from pathlib import Path

phase, job = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
number = int(os.environ.get("RANK", "0")) if job["world_size"] > 1 else 0
for case in job["cases"]:
    args = case["case"].get("args") or {}
    found = args.get("finds", {}).get(phase)
    if found is not None and str(number) in args.get("on", "0"):
        path = Path(job["workspace"]) / f"rank{number}" / f"{phase}.case{case['index']}.json"
        path.write_text(json.dumps({"notes": [f"steps {Path(job['workspace'], 'triage.json').read_text()}"], **found}))
"""
BREAK = {"kind": "graph-break", "what": "print", "where": "model.py:3 in f", "next": "take it out", "cause": "print"}
WRONG = {"kind": "differs", "what": "differ in step 2", "where": None, "next": "look", "difference": 0.5}
STAGES = ["eager", "aot_eager", "force_eager", "npugraph_ex", "cache"]


@pytest.fixture
def climb(site: Site) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Triage a recipe whose one case does and finds what is said; return exit code and document."""
    (site.folder / "site" / "torch" / "__init__.py").write_text(TORCH.format(rank=FINDS + RANK, torchrun=TORCHRUN))

    def run(
        *options: str,
        do: str = "build",
        ranks: Mapping[str, str] | None = None,
        finds: Mapping[str, Any] | None = None,
        on: str = "0",
        **fields: Any,
    ) -> tuple[int, dict[str, Any]]:
        arguments = {"do": do, "ranks": ranks or {}, "finds": finds or {}, "on": on}
        case = {"name": "b2", "inputs": "model:inputs", "args": arguments}
        other = {"name": "b4", "inputs": "model:inputs", "args": {"do": "build", "n": 1}}
        site.recipe({}, functions=[{"method": "main_decode", "cases": [case, other]}], **fields)
        done = site.run("triage", "recipe.yaml", "--json", *options)
        assert done.stdout, done.stderr
        return done.returncode, done.report

    return run


def verdicts(report: Mapping[str, Any]) -> list[str]:
    """Return the stages' verdicts, in the ladder's order."""
    assert STAGES == [stage["stage"] for stage in report["stages"]]
    return [stage["verdict"] for stage in report["stages"]]


def test_every_stage_right_exits_0_and_leaves_nothing(site: Site, climb: Callable[..., Any]) -> None:
    """Six processes for five stages, no store, no workspace."""
    code, report = climb()

    assert (0, None, ["ok"] * 5) == (code, report["stage"], verdicts(report))
    assert ["every stage is right; run: cachectl build recipe.yaml"] == report["advice"]
    assert "simulated" == report["evidence"]
    phases = list(dict.fromkeys(phase for _, phase, _ in site.ranks()))
    assert [*(f"triage-{name}" for name in STAGES[:4]), "record", "triage-cache"] == phases
    assert (False, []) == (site.layout.root.exists(), list(site.temporary.iterdir()))


@pytest.mark.parametrize("stage", ["eager", *(pytest.param(name, marks=pytest.mark.nightly) for name in STAGES[1:4])])
def test_first_bad_stage_ends_the_climb(site: Site, climb: Callable[..., Any], stage: str) -> None:
    """What comes after is skipped, and not started."""
    code, report = climb(finds={f"triage-{stage}": {"verdict": "failed", "findings": [BREAK]}})
    place = STAGES.index(stage)

    assert (1, stage) == (code, report["stage"])
    assert ["ok"] * place + ["failed"] + ["skipped"] * (4 - place) == verdicts(report)
    (found,) = report["stages"][place]["findings"]
    assert {**BREAK, "method": "main_decode", "case": "b2", "rank": 0} == {
        name: value for name, value in found.items() if value is not None
    }
    assert ["take it out", "then run again: cachectl triage recipe.yaml"] == report["advice"]
    assert f"triage-{stage}" == site.ranks()[-1][1]


def test_differing_graph_has_its_options_restored(site: Site, climb: Callable[..., Any]) -> None:
    """One more phase, whose findings stand beside the difference."""
    option = {
        "kind": "option",
        "what": "inplace_pass alone",
        "where": None,
        "next": "leave it off",
        "option": "inplace_pass",
    }
    code, report = climb(
        finds={
            "triage-npugraph_ex": {"verdict": "differs", "findings": [WRONG]},
            "triage-options": {"verdict": "differs", "findings": [option]},
        }
    )

    stage = report["stages"][3]
    assert (1, "npugraph_ex", "differs") == (code, report["stage"], stage["verdict"])
    assert [("differs", None, 0.5), ("option", "inplace_pass", None)] == [
        (found["kind"], found["option"], found["difference"]) for found in stage["findings"]
    ]
    assert ["look", "leave it off"] == report["advice"][:2]


@pytest.mark.nightly
def test_graph_break_has_no_options_restored(site: Site, climb: Callable[..., Any]) -> None:
    """No option mends it."""
    climb(finds={"triage-npugraph_ex": {"verdict": "failed", "findings": [BREAK]}})

    assert "triage-options" not in {phase for _, phase, _ in site.ranks()}


@pytest.mark.nightly
def test_skipped_aot_eager_does_not_end_the_climb(climb: Callable[..., Any]) -> None:
    """A model that runs on an NPU only goes on to the next stage."""
    skipped = {"kind": "skipped", "what": "NPU only", "where": None, "next": ""}
    code, report = climb(finds={"triage-aot_eager": {"verdict": "skipped", "findings": [skipped]}})

    assert (0, ["ok", "skipped", "ok", "ok", "ok"]) == (code, verdicts(report))


@pytest.mark.parametrize(
    ("do", "stage", "kind", "words"),
    [
        ("die-triage-force_eager", "force_eager", "died", "by signal SIGKILL"),
        pytest.param("fail-triage-eager", "eager", "refused", "does not work", marks=pytest.mark.nightly),
        pytest.param("fail-record", "cache", "refused", "does not work", marks=pytest.mark.nightly),
        pytest.param("die-triage-cache", "cache", "died", "by signal SIGKILL", marks=pytest.mark.nightly),
    ],
)
def test_rank_that_ends_badly_is_a_finding(
    climb: Callable[..., Any], do: str, stage: str, kind: str, words: str
) -> None:
    """Killed, or refused by a build's gate: the stage failed, the command did not."""
    code, report = climb(do=do)

    (found,) = report["stages"][STAGES.index(stage)]["findings"]
    assert (1, stage, kind) == (code, report["stage"], found["kind"])
    assert words in found["what"]


def test_log_that_nobody_keeps_is_not_pointed_at(climb: Callable[..., Any], tmp_path: Path) -> None:
    """Logs go with the process: what to do is to keep them, and where they are kept they are named."""
    _, report = climb(do="die-triage-eager")
    _, kept = climb("--keep", str(tmp_path / "logs"), do="die-triage-eager")

    assert "run it again with --keep FOLDER, where its log stays" == report["stages"][0]["findings"][0]["next"]
    assert "triage-eager.log" in kept["stages"][0]["findings"][0]["next"]


def test_rank_that_hangs_is_given_up(climb: Callable[..., Any]) -> None:
    """--timeout bounds each process."""
    code, report = climb("--timeout", "1.5", do="wait-triage-eager")

    (found,) = report["stages"][0]["findings"]
    assert (1, "timeout") == (code, found["kind"])
    assert found["next"].endswith("where its log stays, or pass a longer --timeout")


@pytest.mark.nightly
def test_recipe_that_is_wrong_in_a_rank_exits_2(climb: Callable[..., Any]) -> None:
    """No such module or method: nothing to find a stage for."""
    code, report = climb(do="refuse-triage-eager")

    assert (2, "main_decode [b2]: does not work") == (code, report["error"])


def test_case_and_steps_reach_the_ranks(site: Site, climb: Callable[..., Any]) -> None:
    """Only what was named runs, so often."""
    _, report = climb(
        "--case", "main_decode/b2", "--steps", "7", finds={"triage-eager": {"verdict": "ok", "findings": []}}
    )

    assert {"b2"} == {case for _, _, case in site.ranks()}
    assert ['steps {"steps": 7}'] == report["stages"][0]["notes"]


def test_unknown_case_names_those_that_are_there(climb: Callable[..., Any]) -> None:
    """Usage, before anything is started."""
    code, report = climb("--case", "b8")

    assert (2, "it has: main_decode/b2, main_decode/b4") == (code, report["hint"])


def test_graph_engine_stops_after_aot_eager(site: Site, climb: Callable[..., Any]) -> None:
    """This version can't compile for GE, and says so in one line."""
    code, report = climb(compile={"mode": "ge_graph"})

    assert (0, ["ok", "ok", "skipped", "skipped", "skipped"]) == (code, verdicts(report))
    assert ["this version can't compile for GE: stopped after aot_eager"] == report["stages"][2]["notes"]
    assert {"triage-eager", "triage-aot_eager"} == {phase for _, phase, _ in site.ranks()}


@pytest.mark.nightly
def test_ranks_that_find_the_same_are_told_once(climb: Callable[..., Any]) -> None:
    """The first one's finding stands; a rank's own is told besides."""
    code, report = climb(
        finds={"triage-eager": {"verdict": "failed", "findings": [BREAK]}}, on="01", topology={"world_size": 2}
    )

    assert (1, [0]) == (code, [found["rank"] for found in report["stages"][0]["findings"]])


def test_finding_of_one_rank_is_kept_where_the_others_are_stopped(climb: Callable[..., Any]) -> None:
    """The rank leaves what it found and ends; the launcher's error says no more than that."""
    code, report = climb(
        finds={"triage-eager": {"verdict": "failed", "findings": [BREAK]}},
        on="1",
        ranks={"1": "die-triage-eager"},
        topology={"world_size": 2},
    )

    assert (1, [("graph-break", 1)]) == (
        code,
        [(found["kind"], found["rank"]) for found in report["stages"][0]["findings"]],
    )


def test_keep_and_report_leave_logs_and_a_page(site: Site, climb: Callable[..., Any], tmp_path: Path) -> None:
    """A folder of logs, one file that is whole, and the contract's names in their order on stdout."""
    _, report = climb(
        "--keep", "logs", "--report", "triage.md", finds={"triage-eager": {"verdict": "failed", "findings": [BREAK]}}
    )

    assert ["stage", "stages", "advice"] == list(report)[:3]
    assert ["stage", "verdict", "seconds", "findings"] == list(report["stages"][0])[:4]
    page = (site.folder / "triage.md").read_text()
    assert ["triage-eager.log"] == [path.name for path in (site.folder / "logs").iterdir()]
    assert "Stopped at **eager**." in page
    assert str(tmp_path) not in page
    assert [] == list(site.folder.glob(".triage.md.*"))


@pytest.mark.parametrize("options", [("--report", "no/such/folder/t.md"), ("--keep", "recipe.yaml/logs")])
def test_place_that_cannot_be_written_is_usage(climb: Callable[..., Any], options: tuple[str, str]) -> None:
    """With the path in the message."""
    code, report = climb(*options, finds={"triage-eager": {"verdict": "failed", "findings": [BREAK]}})

    assert 2 == code
    assert options[1].partition("/")[0] in report["error"]


KERNELS = 'compile_configs["static_kernel_compile.cann_version"] = "8.5.0"\n'


@pytest.mark.parametrize(
    ("cann", "mode", "verdict", "words"),
    [
        ("8.5.0", 0o700, "ok", ""),
        ("9.1.0", 0o700, "ok", "static kernels are of CANN 8.5.0, here is 9.1.0"),
        ("8.5.0", 0o600, "failed", "mode 0600 has no x bit"),
        ("8.5.0", None, "ok", "no .run: it is taken as a failed compile"),
    ],
)
def test_static_kernels_stop_it_where_they_would_crash(
    tmp_path: Path, pack: Callable[..., bytes], cann: str, mode: int | None, verdict: str, words: str
) -> None:
    """Left out is slower, and said; a .run that can't be executed raises while other ranks wait."""
    outputs = lay(tmp_path, pack(py_code=KERNELS)).parent / "static_kernel_compile_outputs" / "ts1_pid1_outputs"
    outputs.mkdir(parents=True)
    kernel = outputs / ("a.run" if mode is not None else "a.json")
    kernel.write_text("#!/bin/sh\n")
    kernel.chmod(mode or 0o600)

    found, findings = static_kernels(tmp_path, seen(cann=cann), method="main_decode", case="b4", rank=0)

    assert verdict == found
    assert words in "; ".join(item.what for item in findings)
    assert bool(words) == bool(findings)
