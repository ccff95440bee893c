"""Ranks of one job that differ: one decision for all of them, and right values. Real artifacts, real launcher.

Every way in which a rank can be unlike the others is in tests/boot/test_agreement.py, without compiling.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import DEADLINE, RankedProgram

# Several processes that import torch, several times over.
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(3600)]

Ranked = Callable[[int], RankedProgram]
CONFIG = '{"tensor_parallel": 2}'
# Rank 1 comes to its first call when the others have decided without it.
LATE = """\
if rank == 1 and step == 0:
    import time
    from cachectl.runtimes.rendezvous import rendezvous_store
    while not rendezvous_store(torch).check(["cachectl/agreement/v1/0/main_decode/0/decision"]):
        time.sleep(0.1)
"""


def damage(program: RankedProgram, rank: int) -> dict[str, str]:
    """Hand all ranks out, cut one rank's artifact short, and return the environment that names the hand-out."""
    handed = program.hook()
    (entry,) = [entry for entry in handed["entries"] if entry["rank"] == rank]
    artifact = Path(entry["path"]) / "compiled_module"
    artifact.write_bytes(artifact.read_bytes()[:1000])
    return {"CACHECTL_HANDOUT": handed["env"]["CACHECTL_HANDOUT"]}


def outcomes(report: dict[str, Any]) -> dict[int, str]:
    """Return each rank's outcome."""
    return {rank["rank"]: rank["outcome"] for rank in report["ranks"]}


def decided(report: dict[str, Any]) -> tuple[str, str, int]:
    """Return method, verdict and writer of the one decision that all ranks report."""
    each = {(found["method"], found["verdict"], found["by"]) for rank in report["ranks"] for found in rank["agreement"]}
    assert 1 == len(each)
    assert 1 == len(report["agreement"])
    return each.pop()


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_rank_with_a_damaged_copy_makes_all_cold_and_right(own_ranked: Ranked, world_size: int) -> None:
    """One artifact can't be loaded: its rank says so before anything of the method ran, and all compile."""
    program, last = own_ranked(world_size), world_size - 1

    run = program.torchrun(world_size, "serve.py", CONFIG, environ=damage(program, last))

    assert 0 == run.returncode, run.stderr
    assert [True] * world_size == [said["equal"] for said in run.ranks]
    assert ("main_decode", "cold", last) == decided(run.report)
    assert {**dict.fromkeys(range(last), "cold"), last: "inert"} == outcomes(run.report)
    # Nobody waited for as long as it may.
    assert run.report["agreement"][0]["seconds"] < float(DEADLINE[1]) / 2
    # Told as the rank itself tells it; the others name the rank.
    assert ("artifact", "load") == tuple(run.report["agreement"][0]["reason"][name] for name in ("part", "name"))
    assert ["agreement"] == [reason["part"] for reason in run.report["ranks"][0]["reasons"]]
    assert f"rank {last}" == run.report["ranks"][0]["reasons"][0]["name"]


@pytest.mark.nightly
def test_rank_that_is_late_finds_all_cold_and_right(own_ranked: Ranked) -> None:
    """Three ranks wait as long as they may; then all four are cold, also the late one, which was ready."""
    program = own_ranked(4)
    late = textwrap.indent(LATE, " " * 16)
    program.edit("model.cache.copy_(before)", f"model.cache.copy_(before)\n{late}", "serve.py")

    run = program.torchrun(4, "serve.py", CONFIG, environ={"CACHECTL_AGREEMENT_TIMEOUT_S": "20"})

    assert 0 == run.returncode, run.stderr
    assert [True] * 4 == [said["equal"] for said in run.ranks]
    method, verdict, by = decided(run.report)
    assert ("main_decode", "cold") == (method, verdict)
    assert by != 1
    assert dict.fromkeys(range(4), "cold") == outcomes(run.report)
    assert ("agreement", "time-out") == tuple(run.report["agreement"][0]["reason"][name] for name in ("part", "name"))


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A mount on which nobody can write."""
    folder = tmp_path / "warm3"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.nightly
def test_rank_whose_mount_is_read_only_makes_all_cold_and_right(own_ranked: Ranked, read_only: Path) -> None:
    """Each rank's own hook: one has no place for its copy, and the others, handed out and ready, are cold with it."""
    program = own_ranked(4)
    words = f"{sys.executable} -m cachectl exec recipe.yaml --warm-dir {read_only.parent}/warm$RANK"
    command = f"exec {words} {' '.join(DEADLINE)} --report report$RANK.json -- {sys.executable} serve.py '{CONFIG}'"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "--no-python"]

    done = program.cachectl("simulate", "--", *launcher, "sh", "-c", command)

    assert 0 == done.returncode, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]
    assert [True] * 4 == [rank["equal"] for rank in said]
    reports = [json.loads((program.folder / f"report{rank}.json").read_text()) for rank in range(4)]
    assert ["cold"] * 4 == [report["outcome"] for report in reports]
    assert [("cold", 3)] * 4 == [(found["verdict"], found["by"]) for report in reports for found in report["agreement"]]
    assert all(report["agreement"][0]["seconds"] < float(DEADLINE[1]) / 2 for report in reports)
    assert "warm dir" == reports[3]["reasons"][0]["name"]
    assert ["rank 3"] * 3 == [report["reasons"][0]["name"] for report in reports[:3]]
