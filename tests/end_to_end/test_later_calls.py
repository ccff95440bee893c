"""State around later calls: what Dynamo guards at each call and a loaded graph does not look at."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow]

PROGRAM = """
import json, os
os.environ["TASK_QUEUE_ENABLE"] = "1"
import torch, torch_npu, yaml
import cachectl
from tiny_decoder.inputs import decode
from tiny_decoder.model import build

recipe = yaml.safe_load(open("recipe.yaml"))
model = build(**recipe["model"]["config"])
warm = cachectl.warm_start("recipe.yaml")
method = cachectl.cache_compile(model.main_decode, warm=warm, dynamic=False, options=recipe["compile"]["options"])
inputs = decode(model, 0, batch=4)
outcomes = []
with torch.no_grad():
    method(**inputs)
    outcomes.append(warm.outcome)
    torch.set_num_threads(torch.get_num_threads() + 1)
    method(**inputs)
    outcomes.append(warm.outcome)
    torch.use_deterministic_algorithms(True)
    found, eager = method(**inputs), model.main_decode(**inputs)
    outcomes.append(warm.outcome)
same = found.dtype == eager.dtype and torch.allclose(found.float(), eager.float(), atol=1e-4)
print(json.dumps({"outcomes": outcomes, "same": same, "reasons": [str(reason) for reason in warm.reasons]}))
"""


def test_deterministic_mode_after_the_first_call_is_cold_and_right_and_threads_are_noise(program: Any) -> None:
    """The first call is warm; another thread count leaves it so; in deterministic mode it is compiled, and says why."""
    (program.folder / "later.py").write_text(PROGRAM)

    done = program.cachectl("simulate", "--", sys.executable, "later.py")

    assert 0 == done.returncode, done.stderr
    document = json.loads(done.stdout)
    assert (["warm", "warm", "cold"], True) == (document["outcomes"], document["same"])
    assert any(reason.startswith("guards: deterministic_algorithms") for reason in document["reasons"]), document[
        "reasons"
    ]
