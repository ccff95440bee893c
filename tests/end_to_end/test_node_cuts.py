"""One world on one node and on two: the same ranks, other devices, one path of the runtime's; real collectives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import RankedProgram, lay_ranked

# Two launchers of a rank each, twice over.
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]


def on_two_nodes(
    program: RankedProgram, before: Sequence[str], *command: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run CMD once a rank, with a launcher for each of two nodes; `before` starts each launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []
    for node in range(2):
        launcher = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1"),
            *("--master-addr=127.0.0.1", f"--master-port={port}"),
        ]
        words = [word.replace("NODE", str(node)) for word in before]
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
    ended = [process.communicate(timeout=900) for process in running]
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


def test_world_built_in_another_node_cut_is_warm_there_and_cold_where_it_was_before(tmp_path: Path) -> None:
    """Rank 1 has device 1 on one node and device 0 on a node of its own: two entries at one path of the runtime's.

    Starts take the newest set; where it is another cut's, all ranks agree on cold, and are right.
    """
    program = lay_ranked(tmp_path / "program", tmp_path / "store")
    program.write_recipe(2)
    config = '{"tensor_parallel": 2}'
    program.build()

    before = on_two_nodes(program, ["exec", "recipe.yaml", "--report", "before-NODE.json"], "serve.py", config)
    built = on_two_nodes(program, ["simulate"], "-m", "cachectl", "build", "recipe.yaml", "--force", "--quiet")
    apart = on_two_nodes(program, ["exec", "recipe.yaml", "--report", "apart-NODE.json"], "serve.py", config)
    together = program.torchrun(2, "serve.py", config)

    assert [0, 0] * 3 == [done.returncode for done in (*before, *built, *apart)], [done.stderr for done in built]
    reports = {
        name: [json.loads((program.folder / f"{name}-{node}.json").read_text()) for node in range(2)]
        for name in ("before", "apart")
    }
    assert ["cold", "cold"] == [report["outcome"] for report in reports["before"]]
    (against,) = [reason for reason in reports["before"][1]["reasons"] if reason["name"] == "device_index"]
    assert (1, 0) == (against["stored"], against["wanted"])
    assert "build --force" in against["hint"]
    assert ["warm", "warm"] == [report["outcome"] for report in reports["apart"]], reports["apart"]
    assert [("device_index", 0, 1)] == [
        (reason["name"], reason["stored"], reason["wanted"])
        for reason in together.report["reasons"]
        if reason["part"] == "topology"
    ]
    assert "cold" == together.report["outcome"]
    said = [json.loads(line) for done in apart for line in done.stdout.splitlines() if line.startswith('{"rank"')]
    assert [True] * 4 == [document["equal"] for document in (*said, *together.ranks)]
    found = places(program.store)
    assert [(0, 0), (1, 0), (1, 1)] == sorted({(rank, device) for rank, device, _ in found})
    assert 1 == len({path for rank, _, path in found if rank == 1})
