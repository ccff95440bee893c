"""`cachectl exec --record` around CMD: when anything is published, in what bounds, and that CMD's end stays CMD's.

CMD leaves drafts by hand here; what is recorded and proved is in tests/end_to_end/test_exec_record.py.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import LONG_S
from tests.cli.test_exec import report_of, run, start
from tests.stores import MadeStore, tree

REASON = {"part": "policy", "name": "record", "stored": None, "wanted": "fault", "kind": "policy", "hint": "none"}
DRAFT = json.dumps({"method": "main_decode", "rank": 0, "refused": REASON})
FOLDER = '"$CACHECTL_EXEC/record/drafts/1-0"'
LEAVE = f"mkdir -p {FOLDER} && echo '{DRAFT}' >{FOLDER}/draft.json"
# Whoever reads it waits for a writer that never comes.
LEAVE_FIFO = f"mkdir -p {FOLDER} && mkfifo {FOLDER}/draft.json"


def recorded_of(made: MadeStore) -> dict[str, Any]:
    """Return what the report says of recording."""
    document: dict[str, Any] = json.loads((made.folder / "report.json").read_text())["recorded"]
    return document


def named(recorded: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Return part, name and what was wanted of each reason."""
    return [(reason["part"], reason["name"], reason["wanted"]) for reason in recorded["reasons"]]


def test_record_nothing_recorded_is_said_nothing_of(made: MadeStore) -> None:
    """A program that compiled nothing: an empty part of the report, no process that proves, the store as it was."""
    before = tree(made.layout.root)

    done = run(made, "--record", "--report", "report.json", "--", "sh", "-c", "echo out; exit 7")

    assert (7, "out\n") == (done.returncode, done.stdout)
    assert "prov" not in done.stderr
    assert ([], None, []) == tuple(recorded_of(made)[name] for name in ("entries", "warm_set", "reasons"))
    assert before == tree(made.layout.root)


def test_record_without_the_option_is_not_in_the_report(made: MadeStore) -> None:
    """The contract's report, and nothing else, where recording was not asked for."""
    assert "recorded" not in report_of(made, "--", "true")


def test_record_is_null_while_the_command_runs(made: MadeStore) -> None:
    """What became of it is known after CMD's end only."""
    done = run(made, "--record", "--report", "report.json", "--", "cat", "report.json")

    assert json.loads(done.stdout)["recorded"] is None


def test_record_refused_call_has_its_reason_in_the_report_and_on_stderr(made: MadeStore) -> None:
    """What a process of the program could not keep is told, and CMD's exit code is its own."""
    done = run(made, "--record", "--report", "report.json", "--", "sh", "-c", LEAVE)

    assert (0, [("policy", "record", "fault")]) == (done.returncode, named(recorded_of(made)))
    assert "proving what was recorded, for at most 600 s" in done.stderr
    assert "recorded and published nothing" in done.stderr


def test_record_quiet_says_nothing(made: MadeStore) -> None:
    """-q is for this too."""
    assert "" == run(made, "-q", "--record", "--", "sh", "-c", LEAVE).stderr


@pytest.mark.parametrize(("end", "code"), [("exit 3", 3), ("kill -KILL $$", 137), ("kill -TERM $$", 143)])
def test_record_command_that_ends_badly_publishes_nothing(made: MadeStore, end: str, code: int) -> None:
    """Another exit code than 0, or a signal that exec was not sent: nothing is proved, and the report has the code."""
    done = run(made, "--record", "--report", "report.json", "--", "sh", "-c", f"{LEAVE}; {end}")

    assert (code, [("policy", "exit code", code)]) == (done.returncode, named(recorded_of(made)))
    assert "proving" not in done.stderr


def test_record_server_that_exec_is_told_to_stop_publishes(made: MadeStore) -> None:
    """SIGTERM to exec, which CMD dies of: the end that a server has."""
    words = ("--record", "--report", "report.json", "--", "sh", "-c", f"{LEAVE}; echo ready; exec sleep 60")
    with start(made, *words) as child:
        assert child.stdout is not None
        assert "ready\n" == child.stdout.readline()
        child.terminate()
        child.communicate(timeout=LONG_S)

    assert (143, [("policy", "record", "fault")]) == (child.returncode, named(recorded_of(made)))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_record_signal_stops_the_publishing(made: MadeStore, name: str) -> None:
    """Told to stop while it proves, exec stops that and exits with CMD's code; nothing of it is left running."""
    words = ("--record", "--report", "report.json", "--", "sh", "-c", LEAVE_FIFO)
    with start(made, *words) as child:
        publishing = _await_publishing(child)
        child.send_signal(signal.Signals[name])
        child.communicate(timeout=LONG_S)

    assert (0, [("policy", "record", f"stopped by {name}")]) == (child.returncode, named(recorded_of(made)))
    # By their numbers: the children of a process that is gone are somebody else's. What was killed goes in a moment.
    deadline_s = time.monotonic() + LONG_S
    while any(map(_publishes, publishing)):
        assert time.monotonic() < deadline_s, "left running"
        time.sleep(0.05)


def test_record_damaged_draft_is_a_reason(made: MadeStore) -> None:
    """What can't be read is told, and CMD's exit code is its own."""
    done = run(made, "--record", "--report", "report.json", "--", "sh", "-c", LEAVE.replace("{", "[", 1))

    ((part, name, wanted),) = named(recorded_of(made))
    assert (0, "policy", "record") == (done.returncode, part, name)
    assert "can't read the draft" in wanted


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "nan", "inf"])
def test_record_timeout_that_is_no_time_is_refused(made: MadeStore, seconds: str) -> None:
    """A bound has to be one; CMD does not run."""
    done = run(made, "--record", "--record-timeout", seconds, "--", "echo", "ran")

    assert (2, "") == (done.returncode, done.stdout)
    assert f"--record-timeout {seconds}" in done.stderr


def _await_publishing(child: subprocess.Popen[str]) -> list[int]:
    deadline_s = time.monotonic() + LONG_S
    while not (found := _publishing(child.pid)):
        assert time.monotonic() < deadline_s, "no publishing process"
        time.sleep(0.05)
    return found


def _publishing(pid: int) -> list[int]:
    """Return the process ids of exec's children that publish."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == pid and _publishes(int(path.parent.name)):
            found.append(int(path.parent.name))
    return found


def _publishes(pid: int) -> bool:
    """Say whether a process runs that publishes; one that ended and was not collected has no words any more."""
    try:
        return b"publish" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
