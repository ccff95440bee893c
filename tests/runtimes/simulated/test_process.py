"""The real torch_npu on the simulated CANN: what it reports, how it starts and ends, and captured graphs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow]

Run = Callable[..., Any]

REPORT = """
import json, torch
from cachectl.runtimes.simulated import loaded_is_simulated
from torch_npu.npu.utils import get_cann_version
packages = ("CANN", "RUNTIME", "COMPILER", "HCCL", "OPP")
print(json.dumps({
    "available": torch.npu.is_available(),
    "devices": torch.npu.device_count(),
    "soc": torch.npu.get_device_name(),
    "cann": sorted({get_cann_version(package) for package in packages}),
    "from_files": torch.version.cann,
    "simulated": loaded_is_simulated(),
}))
"""

PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])


@pytest.mark.parametrize("cann", ["8.5.0", "8.3.RC1"])
def test_torch_npu_reports_what_the_environment_asks_for(
    run_simulated: Run, simulated_environment: dict[str, str], cann: str
) -> None:
    """Plain `import torch` works, and its own calls, the toolkit's files and the environment agree."""
    from cachectl.runtimes.simulated import environment

    asked = environment(simulated_environment, soc="Ascend910_9391", cann=cann, devices=4)
    asked["PYTHONPATH"] += f":{PACKAGE_PARENT}"
    assert {
        "available": True,
        "devices": 4,
        "soc": "Ascend910_9391",
        "cann": [cann],
        "from_files": cann,
        "simulated": True,
    } == run_simulated(REPORT, env=asked).value


def test_a_simulated_process_is_quiet_and_ends_well(run_simulated: Run) -> None:
    """Importing, using a device and leaving prints nothing and crashes nowhere."""
    ended = run_simulated("import torch; torch.npu.synchronize(); print(torch.npu.current_device())")
    assert (0, "") == (ended.value, ended.stderr)


def test_startup_costs_next_to_nothing_without_torch(simulated_environment: dict[str, str]) -> None:
    """A process that never imports torch imports neither it nor the patches."""
    source = "import sys; print(sorted(name for name in sys.modules if 'torch' in name or 'cachectl' in name))"
    done = subprocess.run(
        [sys.executable, "-c", source], env=simulated_environment, capture_output=True, text=True, check=True
    )
    assert "[]" == done.stdout.strip()


def test_startup_runs_the_users_own_sitecustomize(simulated_environment: dict[str, str], tmp_path: Path) -> None:
    """The next one on the path runs under its own name, and the simulation stays in place when it raises."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.users = __name__; raise ValueError('theirs')\n")
    env = {**simulated_environment, "PYTHONPATH": f"{simulated_environment['PYTHONPATH']}:{tmp_path}"}
    source = "import sys; print(sys.users, '_AfterImport' in str(sys.meta_path))"
    done = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True, check=True)
    assert "sitecustomize True" == done.stdout.strip()
    assert "Error in sitecustomize; set PYTHONVERBOSE for traceback:\nValueError: theirs\n" == done.stderr


def test_an_operator_without_reference_fails_with_its_name(run_simulated: Run) -> None:
    """The error names the operator and says what is missing; it is a NotImplementedError as before."""
    source = """
import json, torch, torch_npu
try:
    torch_npu.npu_lightning_indexer(torch.ones(2), torch.ones(2), torch.ones(2))
except NotImplementedError as error:
    print(json.dumps(str(error)))
"""
    said = run_simulated(source).value
    assert said.startswith("npu::npu_lightning_indexer on CPU tensors: the simulation has no reference implementation")


@pytest.fixture(scope="module")
def statements(run_simulated: Run) -> dict[str, bool]:
    """What programs/raw_graphs.py found."""
    found: dict[str, bool] = run_simulated("raw_graphs.py").value
    return found


@pytest.mark.parametrize(
    "statement",
    [
        "replay_follows_inputs",
        "capture_leaves_older_tensors_alone",
        "undeclared_writers_leave_older_tensors_alone",
        "host_reads_are_refused",
        "gradients_and_inference_tensors_replay",
        "views_that_copy_replay",
        "updates_reach_captured_attention",
        "unfinished_update_is_reported",
        "outputs_outlive_reset",
    ],
)
def test_npu_graph_used_directly(statements: dict[str, bool], statement: str) -> None:
    """Each statement of programs/raw_graphs.py holds."""
    assert statements[statement]


# graphs captured, and whether an output held from the first step keeps its values
STEPS = {
    "plain": (1, False),
    "cloned": (1, True),
    "inputs-kept": (1, False),
    "unfrozen": (1, False),
    "keys": (3, False),
    "keys-cloned": (3, True),
    "keys-apart": (3, False),
    "keys-limited": (2, True),
    "keys-inputs-kept": (3, False),
    "aliasing": (7, True),
    "super-kernel": (1, False),
}


@dataclass(frozen=True)
class Steps:
    """What one process of programs/decoder.py found by case, and each artifact's bytes and time after it."""

    found: dict[str, dict[str, Any]]
    artifacts: dict[str, list[tuple[bytes, int]]]


@pytest.fixture(scope="module")
def cold_and_warm(run_simulated: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Steps, Steps]:
    """All cases, in the process that builds and in the next one."""
    folder = tmp_path_factory.mktemp("steps")

    def process() -> Steps:
        found = run_simulated("decoder.py", folder, *STEPS).value
        artifacts = {case: sorted((folder / case).rglob("compiled_module")) for case in STEPS}
        kept = {case: [(path.read_bytes(), path.stat().st_mtime_ns) for path in artifacts[case]] for case in STEPS}
        return Steps(found, kept)

    return process(), process()


@pytest.mark.parametrize("case", STEPS)
def test_cache_compile_cold_and_warm_equals_eager_at_every_step(cold_and_warm: tuple[Steps, Steps], case: str) -> None:
    """Outputs, the model's state and the caller's inputs are right, in the process that builds and in the next one."""
    for steps in cold_and_warm:
        found = steps.found[case]
        assert (0, 0, 0) == (found["error"], found["state_error"], found["given_error"])
        assert STEPS[case] == (found["captures"], found["held_are_intact"])
        assert 1 == len(steps.artifacts[case])


def test_a_warm_process_leaves_the_artifact_as_it_is(cold_and_warm: tuple[Steps, Steps]) -> None:
    """The second process reads what the first wrote: same bytes, same time."""
    cold, warm = cold_and_warm

    assert cold.artifacts == warm.artifacts


def test_attention_lengths_that_change_use_one_graph(run_simulated: Run, tmp_path: Path) -> None:
    """Eight steps with other list[int] lengths: one capture, right values, cold and warm."""
    for _ in ("cold", "warm"):
        assert {"error": 0.0, "captures": 1} == run_simulated("lengths.py", tmp_path).value


# hccl goes by way of gloo in the simulation, so it shows both.
@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.nightly), "hccl"])
def test_ranks_with_collectives_equal_eager(run_simulated: Run, tmp_path: Path, backend: str) -> None:
    """Two ranks reduce and gather inside a captured graph; each has its own artifact and the right values."""
    for _ in ("cold", "warm"):
        assert [0.0, 0.0] == run_simulated("ranks.py", tmp_path, backend).value
    assert 2 == len(list(tmp_path.rglob("world2global_rank*/main_decode/compiled_module")))
