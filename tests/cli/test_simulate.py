"""`cachectl simulate`: the command is CMD's own, its streams and its exit code too."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize("code", [0, 1, 7])
def test_simulate_exits_as_the_command_does(cachectl: Run, code: int) -> None:
    """The exit code is CMD's, and stdout has nothing but what CMD wrote."""
    result = cachectl("simulate", "--", "sh", "-c", f"echo out; echo err >&2; exit {code}")

    assert (code, "out\n", "err\n") == (result.returncode, result.stdout, result.stderr)


def test_simulate_signal_is_passed_on(cachectl: Run) -> None:
    """A command that dies of a signal is seen to: a shell reports 128 + signal."""
    result = cachectl("simulate", "--", "sh", "-c", "kill -KILL $$")

    assert -signal.SIGKILL == result.returncode


def test_simulate_command_not_found_exits_127(cachectl: Run) -> None:
    """An unknown command is told as a shell tells it."""
    result = cachectl("simulate", "--", "no-such-command")

    assert (127, "") == (result.returncode, result.stdout)
    assert "cachectl: no-such-command: command not found\n" == result.stderr


def test_simulate_command_not_executable_exits_126(cachectl: Run, tmp_path: Path) -> None:
    """A file that can't be run is told apart from one that is not there."""
    (tmp_path / "plain").write_text("no program")

    result = cachectl("simulate", "--", str(tmp_path / "plain"))

    assert 126 == result.returncode
    assert "Permission denied" in result.stderr


def test_simulate_options_of_the_command_are_the_commands(cachectl: Run) -> None:
    """What stands behind the command belongs to it, --help and --json too."""
    result = cachectl("simulate", "--", "echo", "--json", "--help", "-q")

    assert (0, "--json --help -q\n") == (result.returncode, result.stdout)


def test_simulate_without_command_is_a_usage_error(cachectl: Run) -> None:
    """There has to be something to run."""
    result = cachectl("simulate")

    assert 2 == result.returncode
    assert "CMD" in result.stderr


def test_simulate_broken_pipe_ends_the_command(cachectl: Run) -> None:
    """Python's ignored SIGPIPE is not handed down: `simulate -- CMD | head` ends."""
    probe = "grep -i SigIgn /proc/self/status"

    result = cachectl("simulate", "--", "sh", "-c", probe)

    assert int(result.stdout.split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0


def test_simulate_sets_what_the_simulated_cann_reports(cachectl: Run) -> None:
    """The command sees the simulated CANN on its library path, with the SoC that was asked for."""
    script = "import os; print(os.environ['CACHECTL_SIM_SOC'], os.path.isdir(os.environ['ASCEND_HOME_PATH']))"

    result = cachectl("simulate", "--", sys.executable, "-c", script, environ={"CACHECTL_SIM_SOC": "Ascend910B3"})

    assert "Ascend910B3 True\n" == result.stdout


def test_simulate_unknown_soc_exits_2(cachectl: Run) -> None:
    """A value that can't be simulated is the caller's mistake."""
    result = cachectl("simulate", "--", "true", environ={"CACHECTL_SIM_DEVICES": "many"})

    assert 2 == result.returncode
    assert "CACHECTL_SIM_DEVICES" in result.stderr
