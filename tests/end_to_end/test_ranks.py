"""Programs of several ranks with collectives in their graphs, real: built, handed out, proved, run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachectl.store.layout import StoreLayout
from cachectl.store.manifest_deltas import is_manifest_delta
from cachectl.store.reading import stored_manifests
from tests.end_to_end.conftest import BOUND_S, Program, RankedProgram, lay_ranked

# Several processes that import torch, several times over.
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(3600)]

Ranked = Callable[[int], RankedProgram]
CONFIG = '{"tensor_parallel": 2}'


def outcomes(report: dict[str, Any]) -> list[tuple[int, str]]:
    """Return each rank with its outcome."""
    return [(rank["rank"], rank["outcome"]) for rank in report["ranks"]]


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(4, marks=pytest.mark.nightly), pytest.param(8, marks=pytest.mark.nightly)]
)
def test_ranks_of_a_world_are_warm_with_right_values(ranked: Ranked, world_size: int) -> None:
    """An unchanged program under exec and torchrun: every rank loads its own artifact, reduces and exchanges right."""
    run = ranked(world_size).torchrun(world_size, "serve.py", CONFIG)

    assert 0 == run.returncode, run.stderr
    assert [(rank, True) for rank in range(world_size)] == [(said["rank"], said["equal"]) for said in run.ranks]
    assert ("warm", [(rank, "warm") for rank in range(world_size)]) == (run.report["outcome"], outcomes(run.report))
    assert 1 == len(run.report["agreement"])
    # Artifact and manifest of all ranks but one lie there by what they have in common, and were handed out as built.
    layout = StoreLayout(ranked(world_size).store)
    shared = [is_manifest_delta(path.read_bytes()) for path in stored_manifests(layout)]
    assert (world_size - 1, [True] * world_size) == (len(list(layout.blobs.rglob("*.delta"))), shared)


def test_ranks_with_other_groups_and_devices_than_at_the_build_are_cold_and_right(own_ranked: Ranked) -> None:
    """The artifact names a group and a device: the name stands for other ranks here, and the node cut is another."""
    program = own_ranked(2)
    program.edit('int(os.environ["LOCAL_RANK"])', "0", "serve.py")

    run = program.torchrun(2, "serve.py", CONFIG, environ={"GROUPS_BEFORE": "[[0], [1]]"})

    assert 0 == run.returncode, run.stderr
    assert [(0, True), (1, True)] == [(said["rank"], said["equal"]) for said in run.ranks]
    assert [(0, "cold"), (1, "cold")] == outcomes(run.report)
    found = {(reason["name"], str(reason["stored"]), str(reason["wanted"])) for reason in run.report["reasons"]}
    assert {("groups.1", "[[0, 1]]", "[[0]]"), ("device_index", "1", "0")} <= found


def test_models_of_one_class_and_a_head_that_one_rank_has_are_all_warm(tmp_path: Path) -> None:
    """Main and draft model with equal inputs are told apart by the proof; rank 1 has no head and is whole without."""
    program = lay_ranked(tmp_path / "program", tmp_path / "store")
    cases = [{"name": "b2", "inputs": "model:pair_inputs"}]
    methods = ["main.main_decode", "draft.main_decode", "main.mtp_decode"]
    program.write_recipe(
        2,
        model={"factory": "model:build_pair", "path": ["."]},
        functions=[{"method": method, "cases": cases} for method in methods],
    )

    built = program.build()
    run = program.torchrun(2, "serve_pair.py")
    plan = program.cachectl("plan", "recipe.yaml", "--require-ready", "--json")

    expected = sorted([(method, rank) for method in methods for rank in (0, 1)])[:-1]
    assert expected == sorted((entry["method"], entry["rank"]) for entry in built["built"])
    assert 0 == run.returncode, run.stderr
    assert [True, True] == [all(said["equal"].values()) for said in run.ranks]
    assert [6, 4] == [len(said["equal"]) for said in run.ranks]
    assert ("warm", [(0, "warm"), (1, "warm")]) == (run.report["outcome"], outcomes(run.report))
    assert (0, 5) == (plan.returncode, json.loads(plan.stdout)["ready"])


@pytest.mark.nightly
def test_ranks_that_torchrun_starts_build_their_own(tmp_path: Path) -> None:
    """torchrun -m cachectl build: each process its rank, one store, rank 0 closes the set, a start is warm."""
    program = lay_ranked(tmp_path / "program", tmp_path / "store")
    program.write_recipe(2)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    done = program.cachectl("simulate", "--", *launcher, "-m", "cachectl", "build", "recipe.yaml", "--quiet")
    run = program.torchrun(2, "serve.py", CONFIG)

    assert 0 == done.returncode, done.stderr
    assert ("warm", [(0, "warm"), (1, "warm")]) == (run.report["outcome"], outcomes(run.report))
    # Neither had published when the other stored its files.
    layout = StoreLayout(program.store)
    shared = [is_manifest_delta(path.read_bytes()) for path in stored_manifests(layout)]
    assert (1, [True, True]) == (len(list(layout.blobs.rglob("*.delta"))), shared)


@pytest.mark.nightly
@pytest.mark.parametrize(("trouble", "words"), [("raise", "this rank has no such file"), ("die", "SIGKILL")])
def test_rank_whose_inputs_fail_is_named_and_not_its_waiting_peer(tmp_path: Path, trouble: str, words: str) -> None:
    """A real collective waits for a rank that raised or was killed: its own words stand in the report."""
    program = lay_ranked(tmp_path / "program", tmp_path / "store")
    case = {"name": "b2", "inputs": "model:inputs", "args": {"trouble": trouble, "at": 1}}
    program.write_recipe(2, functions=[{"method": "main_decode", "cases": [case]}])

    done = program.cachectl("build", "recipe.yaml", "--json", "--keep-going")

    assert 1 == done.returncode, done.stderr
    (failure,) = json.loads(done.stdout)["failed"]
    assert (1, True) == (failure["rank"], words in failure["error"])
    assert "peer" not in failure["error"]


def start(program: Program, *arguments: str) -> subprocess.Popen[str]:
    """Start `cachectl ARGUMENTS...` in a program's folder, with workspaces of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "cachectl", *arguments],
        cwd=program.folder,
        env={**os.environ, "CACHECTL_STORE": str(program.store), "CACHECTL_WARM_DIR": str(program.warm_dir)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yield each process that stands below another one, with its command line."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if words[0] != "Z":
            children.setdefault(int(words[1]), []).append(int(path.parent.name))
    below = [pid]
    for parent in below:
        for child in children.get(parent, []):
            below.append(child)
            try:
                yield child, Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
            except OSError:
                continue


def find_process(process: subprocess.Popen[str], words: str) -> int | None:
    """Return a process of a running build whose command line holds the words; wait for one, as long as it runs."""
    while process.poll() is None:
        for pid, command in descendants(process.pid):
            if words in command:
                return pid
        time.sleep(0.05)
    return None


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("words", ["cachectl.build.worker", "cachectl.build.elastic", "cachectl build"])
def test_real_builds_killed_at_random_moments_leave_no_half_set(tmp_path: Path, words: str) -> None:
    """SIGKILL of a compiling rank, of torchrun, of the whole build: no half set, nobody left, the next one finishes."""
    program = lay_ranked(tmp_path / "program", tmp_path / "store")
    program.write_recipe(2)
    started = time.monotonic()
    program.build()
    longest_s = 0.8 * (time.monotonic() - started)
    dice = random.Random(5)
    returncode = 0
    # One that was done by then, or whose victim was, shows nothing: this machine has become quicker.
    while returncode == 0 and longest_s > 1:
        process = start(program, "build", "recipe.yaml", "--json", "--force")
        time.sleep(dice.uniform(0.25, 1.0) * longest_s)
        victim = process.pid if words == "cachectl build" else find_process(process, words)
        before = [(pid, born(pid)) for pid, _ in descendants(process.pid)]
        if victim is not None:
            os.kill(victim, signal.SIGKILL)
        _, stderr = process.communicate(timeout=BOUND_S)
        returncode, longest_s = process.returncode, 0.7 * longest_s
        until_s = time.monotonic() + 240
        while any(is_running(*found) for found in before) and time.monotonic() < until_s:
            time.sleep(0.1)

        assert [] == [found for found in before if is_running(*found)]
        for path in program.store.glob("boot/recipes/*.json"):
            for warm_set in json.loads(path.read_text())["sets"]:
                assert [0, 1] == sorted(member["rank"] for member in warm_set["members"])
        verified = json.loads(program.cachectl("verify", "--json").stdout)
        assert {finding["kind"] for finding in verified["findings"]} <= {"extra-file", "index-drift"}, verified
        assert "warm" == json.loads(program.cachectl("hook", "recipe.yaml").stdout)["outcome"]
    assert 0 != returncode, stderr
    program.build("recipe.yaml", "--force")
    assert 0 == program.cachectl("plan", "recipe.yaml", "--require-ready").returncode


def born(pid: int) -> str | None:
    """Return when a process began, which tells it from a later one with its number; None where it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return words[19] if words[0] != "Z" else None


def is_running(pid: int, since: str | None) -> bool:
    """Say whether a process that began then runs still; a zombie does not."""
    return since is not None and born(pid) == since


TWO_MODELS = """
import torch


class Model(torch.nn.Module):
    def __init__(self, noisy):
        super().__init__()
        self.noisy = noisy
        self.weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)

    def main_decode(self, x):
        y = torch.relu(x @ self.weight)
        return y + torch.rand_like(y) if self.noisy else y


def build(noisy=False):
    return Model(noisy).eval()


def inputs(model, rank, rows=2):
    return {"x": torch.ones(rows, 4)}
"""


@pytest.mark.nightly
def test_real_shards_at_once_of_which_one_fails_publish_the_other(
    tmp_path: Path, write_recipe: Callable[..., Path]
) -> None:
    """Two processes, one store: the graph with random numbers is refused, and told again; the other starts warm."""
    folder = tmp_path / "program"
    program = Program(folder, tmp_path / "store", tmp_path / "warm")
    for name, noisy in (("bad", True), ("good", False)):
        config = {"factory": "model:build", "config": {"noisy": noisy}, "path": ["."]}
        write_recipe(folder, TWO_MODELS, name=name, model=config).rename(folder / f"{name}.yaml")
    recipes = ("good.yaml", "bad.yaml")

    shards = [start(program, "build", "--json", "--shard", f"{part}/2", *recipes) for part in (0, 1)]
    said = [(process.communicate(timeout=BOUND_S), process.returncode) for process in shards]
    again = program.cachectl("build", "--json", "bad.yaml")

    reports = [json.loads(stdout) for (stdout, _), _ in said]
    assert [(0, 1, 0), (1, 0, 1)] == [
        (code, len(report["built"]), len(report["failed"])) for report, (_, code) in zip(reports, said, strict=True)
    ], said
    assert "random" in reports[1]["failed"][0]["error"]
    assert "warm" == json.loads(program.cachectl("hook", "good.yaml").stdout)["outcome"]
    assert "cold" == json.loads(program.cachectl("hook", "bad.yaml").stdout)["outcome"]
    (failure,) = json.loads(again.stdout)["failed"]
    assert (1, True) == (again.returncode, failure["error"].startswith("not built again"))
