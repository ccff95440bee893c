"""One world on one node and on two: the same ranks, other devices, one path of the runtime's; real collectives."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import DEADLINE, RankedProgram, lay_ranked

# Two launchers of a rank each, twice over.
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(7200)]


def free_port() -> int:
    """Return a port that nobody has, below those that the kernel gives out: a moment later it is free, too."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(10000, max(lowest, 10100)), 100):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def on_two_nodes(
    program: RankedProgram, before: Sequence[str], *command: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run CMD once a rank, with a launcher for each of two nodes; `before` starts each launcher."""
    port = free_port()
    running = []
    for node in range(2):
        launcher = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1"),
            *("--master-addr=127.0.0.1", f"--master-port={port}"),
        ]
        words = [word.replace("NODE", str(node)) for word in before]
        if words[0] == "exec":
            words[1:1] = DEADLINE
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", "cachectl", *words, "--", *launcher, *command],
                cwd=program.folder,
                env={**os.environ, "CACHECTL_STORE": str(program.store), "CACHECTL_WARM_DIR": str(program.warm_dir)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = [process.communicate(timeout=3000) for process in running]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *texts)
        for process, texts in zip(running, ended, strict=True)
    ]


def places(folder: Path) -> list[tuple[int, int | None, str]]:
    """Return rank, device and runtime path of each entry in a store."""
    found = []
    for path in sorted(folder.glob("entries/*/*/*.json")):
        done = subprocess.run(
            [sys.executable, "-m", "cachectl", "show", path.parent.name, "--json", "--store", str(folder)],
            capture_output=True,
            text=True,
            check=True,
        )
        document: dict[str, Any] = json.loads(done.stdout)
        index = document["parts"]["topology"].get("found", {}).get("device_index")
        found.append((document["rank"], index, document["artifact"]["runtime_path"]))
    return sorted(found)


def in_cut(node: int) -> dict[str, str]:
    """Return what a launcher of one rank on each of two nodes tells its rank."""
    rank = {"RANK": str(node), "LOCAL_RANK": "0", "GROUP_RANK": str(node)}
    return {**rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}


def test_world_built_in_two_node_cuts_is_warm_in_both(tmp_path: Path) -> None:
    """Rank 1 has device 1 on one node and device 0 on a node of its own: two entries at one path of the runtime's.

    Where only another cut's set is there, all ranks agree on cold, and are right; plan and build take it for missing.
    With a set of each, ranks of either cut take theirs, whichever is newer.
    """
    program = lay_ranked(tmp_path / "program", tmp_path / "store")
    program.write_recipe(2)
    config = '{"tensor_parallel": 2}'
    program.build()

    before = on_two_nodes(program, ["exec", "recipe.yaml", "--report", "before-NODE.json"], "serve.py", config)
    planned = program.cachectl("plan", "recipe.yaml", "--json", environ=in_cut(0))
    built = on_two_nodes(program, ["simulate"], "-m", "cachectl", "build", "recipe.yaml", "--quiet")
    apart = on_two_nodes(program, ["exec", "recipe.yaml", "--report", "apart-NODE.json"], "serve.py", config)
    together = program.torchrun(2, "serve.py", config)
    again = program.build()
    plans = [program.cachectl("plan", "recipe.yaml", environ=environ) for environ in ({}, in_cut(1))]
    # Now the set of one node is the newer one.
    program.build("recipe.yaml", "--force")
    apart_again = on_two_nodes(program, ["exec", "recipe.yaml", "--report", "again-NODE.json"], "serve.py", config)

    assert [0, 0] * 4 == [done.returncode for done in (*before, *built, *apart, *apart_again)], [
        done.stderr for done in built
    ]
    reports = {
        name: [json.loads((program.folder / f"{name}-{node}.json").read_text()) for node in range(2)]
        for name in ("before", "apart", "again")
    }
    assert ["cold", "cold"] == [report["outcome"] for report in reports["before"]]
    (against,) = [reason for reason in reports["before"][1]["reasons"] if reason["name"] == "device_index"]
    assert (1, 0) == (against["stored"], against["wanted"])
    assert "cachectl build" in against["hint"]
    entries = json.loads(planned.stdout)["entries"]
    assert [(0, "ready"), (1, "missing")] == [(entry["rank"], entry["state"]) for entry in entries]
    (reason,) = entries[1]["reasons"]
    assert ("topology", "node cut") == (reason["part"], reason["name"])
    assert ("1 node of 2", "2 nodes of 1") == (reason["stored"], reason["wanted"])
    for name in ("apart", "again"):
        assert ["warm", "warm"] == [report["outcome"] for report in reports[name]], reports[name]
    assert "warm" == together.report["outcome"], together.report
    assert [] == again["built"]
    assert [0, 0] == [done.returncode for done in plans], [done.stdout for done in plans]
    runs = (*apart, *apart_again)
    said = [json.loads(line) for done in runs for line in done.stdout.splitlines() if line.startswith('{"rank"')]
    assert [True] * 6 == [document["equal"] for document in (*said, *together.ranks)]
    found = places(program.store)
    assert [(0, 0), (1, 0), (1, 1)] == sorted({(rank, device) for rank, device, _ in found})
    assert 1 == len({path for rank, _, path in found if rank == 1})
