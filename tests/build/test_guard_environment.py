"""Guards about environment variables go into the environment part, and not into the sheet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cachectl.build.guard_environment import guarded_variable
from cachectl.identity.guard_values import Unsayable

SNIPPET = """
import json, os
import torch, torch._dynamo
from cachectl.build.guards import GuardRecorder

READS = {
    "item": lambda x: x * float(os.environ["GAIN"]),
    "get": lambda x: x + 1 if os.environ.get("GAIN") == "2" else x,
    "in": lambda x: x + 1 if "GAIN" in os.environ else x,
    "placement": lambda x: x + 1 if os.environ["POD_IP"] else x,
    "secret": lambda x: x + 1 if os.environ["HUB_TOKEN"] else x,
    "own dict": lambda x, named={b"GAIN": 2}: x * named[b"GAIN"],
}
found = {}
for name, function in READS.items():
    torch._dynamo.reset()
    with GuardRecorder(function.__code__) as recorder:
        torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))
    recorded = recorder.recorded()
    found[name] = [sorted(recorded.variables), recorded.unrepresented, json.dumps(recorded.sheet)]
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch: make venv")
def test_guards_on_set_variables_are_told_by_name_and_kept_out_of_the_sheet(tmp_path: Path) -> None:
    """However forward asks for a variable that is set, the build can keep it; placement and secrets are refused."""
    (tmp_path / "snippet.py").write_text(textwrap.dedent(SNIPPET))
    done = subprocess.run(
        [sys.executable, "snippet.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "GAIN": "2",
            "POD_IP": "10.0.0.9",
            "HUB_TOKEN": "hunter2",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)

    for name in ("item", "get", "in"):
        variables, unrepresented, sheet = found[name]
        assert (["GAIN"], []) == (variables, unrepresented)
        assert b"GAIN".hex() not in sheet
    for name, why in (("placement", "POD_IP, which only says where a process runs"), ("secret", "may be a secret")):
        variables, unrepresented, sheet = found[name]
        assert [] == variables
        assert why in unrepresented[0]
        assert "hunter2" not in json.dumps(found[name])
    assert [] == found["own dict"][0]


@pytest.mark.parametrize(("index", "base"), [("GAIN", os.environ), (b"GAIN", {b"GAIN": b"1"}), (None, None)])
def test_other_sources_are_no_variables(index: object, base: object) -> None:
    """Only an item of os.environ's own dict is a variable."""
    builder = SimpleNamespace(get=lambda source: source)
    guard = SimpleNamespace(originating_source=SimpleNamespace(index=index, base=base))

    assert guarded_variable(builder, guard) is None


@pytest.mark.parametrize(("name", "expected"), [("GAIN", "GAIN"), ("HOME", Unsayable), ("HUB_TOKEN", Unsayable)])
def test_item_of_the_environment_is_a_variable(name: str, expected: Any) -> None:
    """Placement and secrets are in no part, so a graph that depends on them can't be kept."""
    builder = SimpleNamespace(get=lambda source: os.environ._data)
    guard = SimpleNamespace(originating_source=SimpleNamespace(index=name.encode(), base="environ._data"))

    if expected is Unsayable:
        with pytest.raises(Unsayable, match=name):
            guarded_variable(builder, guard)
    else:
        assert expected == guarded_variable(builder, guard)
