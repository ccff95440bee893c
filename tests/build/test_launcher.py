"""Rank processes that die, hang, flood their log or leave children: what the launcher says and what it leaves.

The ranks are the real worker with a `torch` of the test's own: importing it is the first thing a rank does, and what
it does there stands for what a model may do anywhere.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cachectl
from cachectl.build.job import CaseJob, Job
from cachectl.build.launcher import RankPhase, run_phase
from cachectl.errors import BuildError, EnvironmentFault

Rank = Callable[..., dict[str, Any]]

ANSWER = "import json, os\njson.dump({'rank': 0, 'cases': {}, 'failure': None}, open('rank0/record.json', 'w'))\n"
# A child of the rank that ignores SIGTERM, as a compiler may, and says who it is.
CHILD = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, 1); "
    'print("up", flush=True); time.sleep(600)\'], stdout=subprocess.PIPE)\n'
    "child.stdout.readline()\n"
    "open('child', 'w').write(str(child.pid))\n"
)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """An empty workspace."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


def environ_with(folder: Path, code: str) -> Mapping[str, str]:
    """Return a rank's environment in which `import torch` runs `code`."""
    (folder / "site" / "torch").mkdir(parents=True)
    (folder / "site" / "torch" / "__init__.py").write_text(code)
    package = Path(cachectl.__file__).resolve().parents[1]
    return {**os.environ, "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{package}"}


def run(
    workspace: Path,
    code: str,
    *,
    timeout_s: float | None = 280.0,
    phases: list[RankPhase] | None = None,
    told: Callable[[int, dict[int, dict[str, Any]]], None] | None = None,
) -> dict[str, Any]:
    """Run `record` on a rank whose `import torch` runs `code`."""
    job = Job({"model": {"path": []}}, workspace, workspace, {}, (CaseJob(0, "main_decode", {"name": "b4"}),), 1)
    job.write()
    documents = run_phase(
        job,
        "record",
        environ=environ_with(workspace.parent, code),
        log_path=workspace.parent / "rank0.log",
        timeout_s=timeout_s,
        progress=(phases if phases is not None else []).append,
        told=told,
    )
    return documents[0]


def is_alive(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 240.0) -> bool:
    """Wait for a condition; say whether it came true."""
    deadline_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os._exit(7)", "with exit code 7: its log is empty"),
        ("import os; os._exit(0)", "with exit code 0: its log is empty"),
        ("print('last words', flush=True); import os; os._exit(1)", "with exit code 1: last words"),
        ("import os; os.kill(os.getpid(), 9)", "by signal SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "by signal SIGSEGV"),
        ("import os; os.kill(os.getpid(), 40)", "by signal 40"),
    ],
)
def test_rank_without_a_result_is_a_build_error_with_how_it_ended(workspace: Path, code: str, words: str) -> None:
    """Exit code or signal, the log's last line, and where the log is."""
    with pytest.raises(BuildError) as raised:
        run(workspace, code)

    assert f"rank 0 died in record {words}" in raised.value.message
    assert str(workspace.parent / "rank0.log") in str(raised.value.hint)
    assert 1 == raised.value.exit_code


def test_case_that_was_done_is_told_before_its_rank_dies(workspace: Path) -> None:
    """A rank leaves what it found of its case and is killed: that is known, and the death is the error."""
    found: list[tuple[int, dict[int, Any]]] = []
    code = (
        "import json, os\n"
        "os.mkdir('rank0/case0')\n"
        "json.dump({'seconds': 1}, open('rank0/case0/told-record.json', 'w'))\n"
        "open('rank0/events.jsonl', 'a').write(json.dumps({'case': 0, 'told': 'record'}) + chr(10))\n"
        "os.kill(os.getpid(), 9)\n"
    )

    with pytest.raises(BuildError, match="by signal SIGKILL"):
        run(workspace, code, told=lambda index, of_rank: found.append((index, of_rank)))

    assert [(0, {0: {"seconds": 1}})] == found


@pytest.mark.parametrize("text", ["", "{", '{"rank": 0'])
def test_rank_with_half_a_result_is_a_build_error(workspace: Path, text: str) -> None:
    """A result that is no document counts as none."""
    with pytest.raises(BuildError, match="died in record with exit code 0"):
        run(workspace, f"import os\nopen('rank0/record.json', 'w').write({text!r})\nos._exit(0)")


def test_rank_that_crashes_after_its_result_has_answered(workspace: Path) -> None:
    """The result is written last: a runtime that crashes while it is torn down takes nothing from it."""
    result = run(workspace, ANSWER + "os.kill(os.getpid(), 11)")

    assert {"rank": 0, "cases": {}, "failure": None} == result


@pytest.mark.parametrize(
    "code", ["raise ImportError('libhccl.so: no such file')", "import sys; sys.exit('no licence')"]
)
def test_rank_whose_torch_fails_reports_an_environment_fault(workspace: Path, code: str) -> None:
    """A broken installation is not the recipe's fault; its words are there, and no traceback to read."""
    with pytest.raises(EnvironmentFault) as raised:
        run(workspace, code)

    assert raised.value.message.startswith("torch can't be imported: ")
    assert "libhccl" in raised.value.message or "no licence" in raised.value.message
    assert (0, str(workspace.parent / "rank0.log")) == (raised.value.rank, str(raised.value.hint).split()[1])


def test_rank_out_of_time_is_stopped_with_its_children(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time-out says its bound and the log; rank and child are gone, though the child ignores SIGTERM."""
    child = workspace / "child"

    def monotonic() -> float:
        # The time is over when the child is there, however long that took.
        return time.monotonic() + (3600.0 if child.exists() and child.read_text() else 0.0)

    monkeypatch.setattr("cachectl.build.launcher.time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    with pytest.raises(BuildError) as raised:
        run(workspace, CHILD + "time.sleep(1200)", timeout_s=600.0)

    assert "rank 0 did not finish record within 600 s" == raised.value.message
    assert raised.value.log_path == workspace.parent / "rank0.log"
    assert wait_until(lambda: not is_alive(int(child.read_text())))


def test_rank_that_ends_leaves_no_children(workspace: Path) -> None:
    """A compiler that a rank started and forgot does not stay behind."""
    run(workspace, CHILD + ANSWER + "os._exit(0)")

    child = int((workspace / "child").read_text())
    assert wait_until(lambda: not is_alive(child))


def test_rank_that_floods_its_log_is_named_by_its_last_line(workspace: Path) -> None:
    """100 MB of log, the last of it one line without an end: the message stays one short line."""
    code = "import os\nfor _ in range(100): os.write(1, b'x' * (1 << 20))\nos.write(1, b'\\nthe end')\nos._exit(1)"

    with pytest.raises(BuildError) as raised:
        run(workspace, code)

    assert "rank 0 died in record with exit code 1: the end" == raised.value.message


def test_rank_events_reach_progress_in_order(workspace: Path) -> None:
    """What a rank says of its phases is followed while it runs, also what it said just before it died."""
    code = (
        "import json, os\n"
        "with open('rank0/events.jsonl', 'a') as file:\n"
        "    for phase in ('import', 'compile'):\n"
        "        file.write(json.dumps({'case': None, 'phase': phase, 'at': 0}) + '\\n')\n"
        "    file.write('{\"case\": nul')\n"
        "os._exit(1)\n"
    )
    phases: list[RankPhase] = []

    with pytest.raises(BuildError):
        run(workspace, code, phases=phases)

    assert ["import", "compile"] == [phase.phase for phase in phases]


LAUNCHER = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import importlib.util
spec = importlib.util.spec_from_file_location("launched", {file!r})
module = importlib.util.module_from_spec(spec)
sys.modules["launched"] = module
spec.loader.exec_module(module)
module.run(Path({workspace!r}), {code!r}, timeout_s=None)
"""


def test_rank_does_not_outlive_a_launcher_that_is_killed(workspace: Path) -> None:
    """SIGKILL leaves the launcher no time: the rank, deep in native code, is ended by the kernel."""
    # Holds the interpreter's lock: no thread of the rank's own could watch.
    code = "import ctypes, os\nopen('rank', 'w').write(str(os.getpid()))\nctypes.PyDLL(None).sleep(600)\n"
    text = LAUNCHER.format(tests=str(Path(__file__).parent), file=__file__, workspace=str(workspace), code=code)
    launcher = subprocess.Popen([sys.executable, "-c", text])
    assert wait_until(lambda: (workspace / "rank").exists() and bool((workspace / "rank").read_text()))
    rank = int((workspace / "rank").read_text())

    launcher.send_signal(signal.SIGKILL)
    launcher.wait()

    assert wait_until(lambda: not is_alive(rank))


def test_rank_whose_launcher_is_gone_already_ends_at_once(workspace: Path) -> None:
    """Between the start of a rank and its watch the launcher may die: then the rank has another parent."""
    done = subprocess.run(
        [sys.executable, "-m", "cachectl.build.worker", "record", str(workspace / "job.json"), "1"],
        env={**environ_with(workspace.parent, "")},
        check=False,
        timeout=240,
    )

    assert -signal.SIGKILL == done.returncode


class Told(list[RankPhase]):
    """What was told, and a file by which the rank knows that it was often enough."""

    def __init__(self, enough: Path) -> None:
        super().__init__()
        self._enough = enough

    def append(self, phase: RankPhase) -> None:
        super().append(phase)
        if len(self) > 2:
            self._enough.touch()


def test_phase_that_lasts_is_told_again(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compile says nothing for minutes: whoever reads the log is told that it goes on, with the time it has taken."""
    monkeypatch.setattr("cachectl.build.launcher._TOLD_AGAIN_S", 0.3)
    phases: list[RankPhase] = Told(workspace / "enough")
    event = '{"case": 0, "phase": "compile", "at": 0}'
    code = (
        "import os, time\n"
        f"print({event!r}, file=open('rank0/events.jsonl', 'a'), flush=True)\n"
        "while not os.path.exists('enough'):\n    time.sleep(0.05)\n"
    )

    run(workspace, code + ANSWER + "os._exit(0)\n", phases=phases)

    assert len(phases) > 2
    assert {(0, 0, "compile")} == {(phase.rank, phase.case, phase.phase) for phase in phases}
    assert sorted(phase.elapsed_s for phase in phases) == [phase.elapsed_s for phase in phases]
