"""The adapter on the real torch_npu: options as the runtime means them, and loading that deletes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow]

PROGRAM = '''
import json, os, sys, traceback
from pathlib import Path
import torch
from cachectl.runtimes.npugraph_ex import NpuGraphEx

runtime = NpuGraphEx()
folder = Path(sys.argv[1])
found = {}


class Model(torch.nn.Module):
    """Two methods with defaults."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def decode(self, x, y=None, n=3, *, scale=2.0):
        return self.linear(x) * n * scale


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


torch.manual_seed(0)
model = Model().requires_grad_(False)
x = torch.ones(2, 4)
expected = model.decode(x)
options = {"frozen_parameter": True}
found["options"] = {
    "empty is default": runtime.effective_options({}) == runtime.effective_options({"frozen_parameter": False}),
    "order": runtime.effective_options({"frozen_parameter": True, "force_eager": False})
    == runtime.effective_options({"force_eager": False, "frozen_parameter": True}),
    "differ": runtime.effective_options({}) != runtime.effective_options(options),
    "unknown": error_of(lambda: runtime.effective_options({"frozen_paramter": True})),
    "value": error_of(lambda: runtime.effective_options({"frozen_parameter": "maybe"})),
}

# What the runtime saves is where the adapter says that it will look for it.
compiled = runtime.compile(model.decode, dynamic=False, options=options, cache_dir=folder)
found["cold"] = bool(torch.equal(compiled(x), expected))
artifact = runtime.expected_folder(model.decode, dynamic=False, options=options, cache_dir=folder)
found["saved"] = [str(path.relative_to(folder.resolve())) for path in folder.rglob("compiled_module")] == [
    str((artifact / "compiled_module").relative_to(folder.resolve()))
]
found["other folder"] = artifact != runtime.expected_folder(
    model.decode, dynamic=True, options=options, cache_dir=folder
)

loaded = runtime.load(model.decode, artifact)
with torch.no_grad():
    found["calls"] = [
        bool(torch.allclose(loaded(x), expected)),
        bool(torch.allclose(loaded(x=x), expected)),
        bool(torch.allclose(loaded(x, None, 3, scale=2.0), expected)),
        bool(torch.allclose(loaded(x, n=3), expected)),
    ]
    plain = runtime._cache_compiler().CompiledModel.load(str(artifact / "compiled_module")).rebase(
        model, globals(), func=model.decode, cache_dir=str(artifact)
    )
    found["plain"] = error_of(lambda: plain(x))

# Damage: every load raises, nothing is deleted.
good = (artifact / "compiled_module").read_bytes()
found["damages"] = {}
for name, data, mode in (
    ("empty", b"", 0o600),
    ("half", good[: len(good) // 2], 0o600),
    ("text", b"not a pickle", 0o600),
    ("mode", good, 0o644),
):
    (artifact / "compiled_module").write_bytes(data)
    (artifact / "compiled_module").chmod(mode)
    error = error_of(lambda: runtime.load(model.decode, artifact))
    found["damages"][name] = [error is not None, (artifact / "compiled_module").exists()]

# Contexts in which the runtime compiles.
with torch.enable_grad(), runtime.call_context():
    found["grad"] = torch.is_grad_enabled()
with torch.inference_mode(), runtime.call_context():
    found["inference"] = [torch.is_inference_mode_enabled(), torch.is_grad_enabled()]
with torch.inference_mode():
    with runtime.call_context():
        pass
    found["after"] = torch.is_inference_mode_enabled()
print("RESULT" + json.dumps(found))
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the adapter did in one process on the simulated CANN."""
    folder = tmp_path_factory.mktemp("adapter")
    (folder / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "cachectl", "simulate", "--", sys.executable, "program.py", str(folder / "cache")],
        cwd=folder,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.partition("RESULT")[2])
    return document


def test_effective_options_mean_the_same_whatever_is_left_out(found: dict[str, Any]) -> None:
    """Defaults and order make no difference; a wrong name or value is refused in the runtime's words."""
    options = found["options"]

    assert (True, True, True) == (options["empty is default"], options["order"], options["differ"])
    assert options["unknown"].startswith("ConfigError: ")
    assert "frozen_paramter" in options["unknown"]
    assert options["value"].startswith("ConfigError: ")


def test_expected_folder_is_where_the_runtime_saves(found: dict[str, Any]) -> None:
    """The adapter asks the runtime itself; another graph kind lies elsewhere."""
    assert (True, True, True) == (found["cold"], found["saved"], found["other folder"])


def test_load_gives_the_method_its_defaults_back(found: dict[str, Any]) -> None:
    """However much is left out, the loaded method runs; the runtime's own misses the arguments."""
    assert [True, True, True, True] == found["calls"]
    assert "missing" in found["plain"]


@pytest.mark.parametrize("damage", ["empty", "half", "text", "mode"])
def test_load_of_a_damaged_artifact_raises_and_deletes_nothing(found: dict[str, Any], damage: str) -> None:
    """The runtime's own answer is to delete the folder; here it is the caller's to start cold."""
    assert [True, True] == found["damages"][damage]


def test_call_context_is_the_mode_in_which_builds_run(found: dict[str, Any]) -> None:
    """No grad, and outside of inference mode, which is there again afterwards."""
    assert (False, [False, False], True) == (found["grad"], found["inference"], found["after"])
