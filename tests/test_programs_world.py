"""A script of several ranks in rank processes that have met already: its own group, and one end for all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

# What a rank process of a build does before and after it makes the model: python rank.py RANK FOLDER.
RANK = """\
import json, sys, types
from pathlib import Path
import torch, torch.distributed as dist
for name in ("npugraph_ex", "npugraph_ex.inference"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["npugraph_ex.inference"].cache_compile = lambda method, **_: method
from cachectl import programs

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
programs.set_recipe_folder(folder)
model = programs.model(["python", "script.py"], ["main_decode", "mtp_decode"], ranks={"mtp_decode": [1]})
has = [name for name in ("main_decode", "mtp_decode") if name in vars(model)]
x = torch.ones(1)
dist.all_reduce(x)
said = {"rank": dist.get_rank(), "sum": float(x), "has": has, "steps": model.main_decode.__self__.steps}
print(json.dumps(said), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
# Every step of the main method is a collective; the draft stands on rank 1 only, and is called first in its step 3.
SCRIPT = """\
import torch, torch.distributed as dist
from npugraph_ex.inference import cache_compile

class Main(torch.nn.Module):
    steps = 0
    def main_decode(self, x):
        self.steps += 1
        dist.all_reduce(x)
        return x

class Draft(torch.nn.Module):
    def mtp_decode(self, x):
        return x

assert not dist.is_initialized()
dist.init_process_group("gloo", init_method="env://", timeout=None)
try:
    main = cache_compile(Main().main_decode)
    draft = cache_compile(Draft().mtp_decode) if dist.get_rank() == 1 else None
    for step in range(1000):
        main(torch.ones(2))
        if draft is not None and step >= 2:
            draft(torch.ones(2))
finally:
    dist.destroy_process_group()
"""


def test_ranks_with_other_methods_end_their_script_at_one_call(tmp_path: Path) -> None:
    """Rank 0 has seen all of its own at once, and goes on until rank 1 has: at the next call that both make they stop.

    The group that the script has made is left, and its collectives work.
    """
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, "rank.py"]
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(tmp_path)],
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said: list[dict[str, Any]] = []
    for rank in ranks:
        out, err = rank.communicate(timeout=500)
        assert rank.returncode == 0, err
        said.append(json.loads(out))

    assert [
        {"rank": 0, "sum": 2.0, "has": ["main_decode"], "steps": 3},
        {"rank": 1, "sum": 2.0, "has": ["main_decode", "mtp_decode"], "steps": 3},
    ] == said
