"""`cachectl exec`: the program is CMD's own, its streams, signals and exit code too; the hook stands before it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cachectl.execution import STARTUP
from tests.cli.conftest import LONG_S
from tests.stores import MadeStore, tree

ECHO = "import os, sys; print(os.environ.get(sys.argv[1]))"


def start(
    made: MadeStore,
    *arguments: str | Path,
    environ: Mapping[str, str | None] | None = None,
    python: Sequence[str] = (),
    **options: Any,
) -> subprocess.Popen[str]:
    """Start `cachectl exec RECIPE ARGUMENTS...`."""
    whole = {
        # One home for all: the simulated CANN is compiled once.
        **made.hook_environ({"HOME": os.environ["HOME"], **(environ or {})}),
    }
    return subprocess.Popen(
        [sys.executable, *python, "-m", "cachectl", "exec", str(made.recipe), *map(str, arguments)],
        cwd=made.folder,
        env=whole,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run(
    made: MadeStore, *arguments: str | Path, environ: Mapping[str, str | None] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    with start(made, *arguments, environ=environ, **options) as child:
        out, err = child.communicate(timeout=LONG_S)
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def report_of(made: MadeStore, *arguments: str | Path, **options: Any) -> dict[str, Any]:
    """Run with `--report` and return the report."""
    run(made, "--report", "report.json", *arguments, **options)
    document: dict[str, Any] = json.loads((made.folder / "report.json").read_text())
    return document


@pytest.mark.parametrize("code", [0, 1, 7])
def test_exec_exits_as_the_command_does(made: MadeStore, code: int) -> None:
    """The exit code is CMD's, and stdout has nothing but what CMD wrote."""
    done = run(made, "-q", "--", "sh", "-c", f"echo out; echo err >&2; exit {code}")

    assert (code, "out\n", "err\n") == (done.returncode, done.stdout, done.stderr)


def test_exec_signal_of_the_command_is_128_and_the_signal(made: MadeStore) -> None:
    """A command that dies of a signal is told as a shell tells it, and the report is complete."""
    done = run(made, "--report", "report.json", "--", "sh", "-c", "kill -KILL $$")

    assert 128 + signal.SIGKILL == done.returncode
    assert "unused" == json.loads((made.folder / "report.json").read_text())["outcome"]


@pytest.mark.parametrize("name", ["no-such-command", "/no/such/command"])
def test_exec_command_not_found_exits_127(made: MadeStore, name: str) -> None:
    """An unknown command is told as a shell tells it."""
    done = run(made, "-q", "--", name)

    assert (127, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith(f"cachectl: {name}: ")


def test_exec_command_not_executable_exits_126(made: MadeStore) -> None:
    """A file that can't be run is told apart from one that is not there."""
    (made.folder / "plain").write_text("no program")

    done = run(made, "-q", "--", made.folder / "plain")

    assert 126 == done.returncode
    assert "Permission denied" in done.stderr


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1", "USR2", "QUIT"])
def test_exec_forwards_signals(made: MadeStore, name: str) -> None:
    """A signal sent to exec reaches CMD, whose answer is the exit code."""
    script = f"trap 'echo got {name}; exit 9' {name}; echo ready; while :; do sleep 0.05; done"
    with start(made, "-q", "--", "sh", "-c", script) as child:
        assert child.stdout is not None
        assert "ready\n" == child.stdout.readline()
        child.send_signal(getattr(signal, f"SIG{name}"))
        out, _ = child.communicate(timeout=LONG_S)

    assert (9, f"got {name}\n") == (child.returncode, out)


def test_exec_command_that_dies_of_a_forwarded_signal(made: MadeStore) -> None:
    """CMD without a handler ends of the signal, and exec says so with its exit code."""
    with start(made, "-q", "--", "sh", "-c", "echo ready; exec sleep 60") as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.terminate()
        child.communicate(timeout=LONG_S)

    assert 128 + signal.SIGTERM == child.returncode


def test_exec_interrupt_of_the_terminal_reaches_the_command_once(made: MadeStore) -> None:
    """Ctrl-C goes to the whole foreground group; exec adds no second one."""
    import pty

    # Ended by another signal through exec, which passes on what came to it first: a second one would be here by then.
    script = (
        "import signal, time\n"
        "seen, over = [], []\n"
        "signal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        "signal.signal(signal.SIGUSR1, lambda *_: over.append(1))\n"
        "print('ready', flush=True)\n"
        "while not seen: time.sleep(0.01)\n"
        "print('interrupted', flush=True)\n"
        "while not over: time.sleep(0.01)\n"
        "print('seen', len(seen), flush=True)\n"
    )
    leader = (
        "import os, sys, fcntl, termios\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", leader, "-m", "cachectl", "exec", made.recipe, "-q", "--", sys.executable, "-c", script],
        cwd=made.folder,
        env=made.hook_environ({"HOME": os.environ["HOME"]}),
        stdin=theirs,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with child:
        os.close(theirs)
        assert child.stdout is not None
        assert "ready\n" == child.stdout.readline()
        os.write(ours, b"\x03")
        assert "interrupted\n" == child.stdout.readline()
        child.send_signal(signal.SIGUSR1)
        out, _ = child.communicate(timeout=LONG_S)
    os.close(ours)

    assert (0, "seen 1\n") == (child.returncode, out)


def test_exec_started_with_ignored_signals_still_ends(made: MadeStore) -> None:
    """Under nohup, and where SIGCHLD is ignored, CMD's end is still noticed, and CMD ignores SIGHUP as it would."""
    script = "import os, signal, sys; signal.signal(17, signal.SIG_IGN); signal.signal(1, signal.SIG_IGN); "
    script += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"

    done = run(made, "-q", "--", "sh", "-c", "kill -HUP $$; echo on; exit 5", python=("-c", script))

    assert (5, "on\n") == (done.returncode, done.stdout)


def test_exec_broken_pipe_ends_the_command(made: MadeStore) -> None:
    """Python's ignored SIGPIPE is not handed down, and no signal is blocked in CMD."""
    done = run(made, "-q", "--", "grep", "-E", "Sig(Ign|Blk)", "/proc/self/status")

    blocked, ignored = (int(line.split()[1], 16) for line in done.stdout.splitlines())
    assert (0, 0) == (blocked, ignored & (1 << (signal.SIGPIPE - 1)))


def test_exec_options_of_the_command_are_the_commands(made: MadeStore) -> None:
    """What stands behind `--` belongs to CMD, --help and a second -- too."""
    done = run(made, "-q", "--", "echo", "--json", "--help", "--", "-q")

    assert (0, "--json --help -- -q\n") == (done.returncode, done.stdout)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "exec: no command; run: cachectl exec RECIPE -- CMD..."),
        (["--"], "exec: no command; run: cachectl exec RECIPE -- CMD..."),
        (["--nope", "--", "true"], "exec: unknown option --nope; see: cachectl exec --help"),
        (["--json", "--", "true"], "exec: unknown option --json; see: cachectl exec --help"),
        (["--report", "--", "true"], "exec: --report without a value; see: cachectl exec --help"),
        (["--rank", "one", "--", "true"], "exec: can't read --rank one; see: cachectl exec --help"),
        (["another.yaml", "--", "true"], "exec: can't read another.yaml; see: cachectl exec --help"),
    ],
)
def test_exec_usage_error_is_one_line_and_exits_2(made: MadeStore, arguments: list[str], text: str) -> None:
    """What can't be read is said before anything runs."""
    done = run(made, *arguments)

    assert (2, "", 1) == (done.returncode, done.stdout, len(done.stderr.splitlines()))
    assert done.stderr.startswith(f"cachectl: {text}")


def test_exec_help_shows_options_and_an_example(made: MadeStore) -> None:
    """The help needs no recipe and no command."""
    done = run(made, "--help")

    assert 0 == done.returncode
    assert "Usage: cachectl exec RECIPE [OPTIONS] -- CMD..." in done.stdout
    assert "--observe" in done.stdout


def test_exec_imports_neither_click_nor_pydantic(made: MadeStore) -> None:
    """exec stands in every start: where the store knows the recipe it needs the standard library only."""
    done = run(made, "-q", "--", "true", python=("-S", "-X", "importtime"))

    assert 0 == done.returncode, done.stderr[-500:]
    heavy = (
        "click",
        "pydantic",
        "yaml",
        "sqlalchemy",
        "rich",
        "torch",
        "torch_npu",
        "numpy",
        "cryptography",
        "asyncio",
    )
    assert " cachectl.execution\n" in done.stderr
    assert [] == [name for name in heavy if f" {name}\n" in done.stderr]


def test_exec_disabled_runs_the_command_and_touches_no_file(made: MadeStore) -> None:
    """CACHECTL_DISABLE=1 leaves the program as it would be without us."""
    made.hook_environ()  # makes a folder for itself
    before = tree(made.folder)

    command = ("--", sys.executable, "-c", ECHO, "CACHECTL_EXEC")
    done = run(made, "--report", "report.json", *command, environ={"CACHECTL_DISABLE": "1"})

    assert (0, "None\n", "") == (done.returncode, done.stdout, done.stderr)
    assert before == tree(made.folder)


def test_exec_hands_out_and_reports_unused(made: MadeStore) -> None:
    """A program that never calls a method: handed out, unused, with the hook's document in the report."""
    report = report_of(made, "--", sys.executable, "-c", "pass")

    assert "unused" == report["outcome"]
    assert ["b2", "b4"] == sorted(entry["case"] for entry in report["entries"])
    assert [("policy", "torch")] == [(reason["part"], reason["name"]) for reason in report["reasons"]]
    assert report["stages"]["hook"] > 0


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ((sys.executable, "-I", "-c", "pass"), "python -I"),
        (("env", "-i", sys.executable, "-c", "pass"), "env -i"),
        (("sh", "-c", f"env -i {sys.executable} -c pass"), "python"),
        ((sys.executable, "-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], env={})"), "torch"),
        (("true",), "python"),
    ],
    ids=["isolated", "clean", "clean-in-a-script", "clean-child", "no-python"],
)
def test_exec_program_it_does_not_reach_is_unused_with_the_setting_named(
    made: MadeStore, command: tuple[str, ...], name: str
) -> None:
    """What kept CMD from the hand-out is told, in words that can be acted on."""
    report = report_of(made, "--", *command)

    assert ("unused", [("policy", name)]) == (
        report["outcome"],
        [(reason["part"], reason["name"]) for reason in report["reasons"]],
    )
    assert report["reasons"][0]["hint"]


def test_exec_cold_hook_still_runs_the_command(made: MadeStore) -> None:
    """Without a store the program runs, and stderr and report tell why it is cold."""
    (made.layout.root / "store.json").unlink()

    done = run(made, "--report", "report.json", "--", "echo", "on")

    report = json.loads((made.folder / "report.json").read_text())
    assert (0, "on\n") == (done.returncode, done.stdout)
    assert "cachectl exec: cold" in done.stderr
    assert ("cold", "store") == (report["outcome"], report["reasons"][0]["part"])


def test_exec_recipe_that_is_not_there_still_runs_the_command(made: MadeStore) -> None:
    """A recipe that can't be read is a cold start, too."""
    made.recipe.unlink()

    done = run(made, "--", "echo", "on")

    assert (0, "on\n") == (done.returncode, done.stdout)
    assert "recipe.yaml" in done.stderr


def test_exec_environment_of_the_command(made: MadeStore) -> None:
    """CMD has the hand-out, the start-up module in front of its own PYTHONPATH, and the simulated CANN behind it."""
    script = "import json, os; print(json.dumps(dict(os.environ)))"

    found = json.loads(run(made, "-q", "--", sys.executable, "-c", script).stdout)

    places = found["PYTHONPATH"].split(os.pathsep)
    assert str(STARTUP) == places[0]
    assert "simulated" in places[1]
    assert str(made.site) == places[2]
    assert found["CACHECTL_HANDOUT"].startswith(str(made.warm_dir))
    assert "1" == found["CACHECTL_SIMULATED"]


@pytest.mark.parametrize("known", [True, False], ids=["built", "never-built"])
def test_exec_exports_what_the_recipe_declares(made: MadeStore, known: bool) -> None:
    """The recipe's environment is part of the request, so CMD gets it, also where only the recipe's text says so."""
    with made.recipe.open("a") as file:
        file.write('environment: {TASK_QUEUE_ENABLE: "1", MY_TOKEN: "s3cret"}\n')
    if known:
        made.publish()

    done = run(made, "-q", "--", sys.executable, "-c", ECHO, "TASK_QUEUE_ENABLE", environ={"TASK_QUEUE_ENABLE": "2"})
    secret = run(made, "-q", "--", sys.executable, "-c", ECHO, "MY_TOKEN")

    assert ("1\n", "None\n") == (done.stdout, secret.stdout)


def test_exec_takes_the_handout_of_a_hook_before_it(made: MadeStore) -> None:
    """What an init container's hook laid down serves exec, without the store."""
    handed = made.hook().report["env"]
    (made.layout.root / "store.json").rename(made.folder / "gone.json")

    done = run(made, "-q", "--", sys.executable, "-c", ECHO, "CACHECTL_HANDOUT", environ=handed)

    assert f"{handed['CACHECTL_HANDOUT']}\n" == done.stdout


def test_exec_handout_of_another_recipe_is_not_handed_down(made: MadeStore) -> None:
    """A leftover CACHECTL_HANDOUT of another recipe doesn't reach CMD."""
    other = made.recipe.with_name("other.yaml")
    other.write_bytes(made.recipe.read_bytes())
    handed = made.hook(recipe=other).report["env"]

    done = run(made, "-q", "--", sys.executable, "-c", ECHO, "CACHECTL_HANDOUT", environ=handed)

    assert f"{handed['CACHECTL_HANDOUT']}\n" != done.stdout
    assert "handout.json" in done.stdout


def test_exec_report_that_cant_be_written_is_one_line(made: MadeStore) -> None:
    """A report's folder that is not there is said at the start, and the program runs."""
    done = run(made, "-q", "--report", "no/folder/report.json", "--", "echo", "on")

    text = "No such file or directory; the program runs without a report"
    assert (0, "on\n") == (done.returncode, done.stdout)
    assert f"cachectl: --report no/folder/report.json: {text}\n" == done.stderr


def test_exec_report_is_there_while_the_command_runs(made: MadeStore) -> None:
    """Whoever watches the report finds one from the start, and nothing else is left beside it."""
    waits = "echo ready; until [ -e go ]; do sleep 0.05; done"
    with start(made, "-q", "--report", "report.json", "--", "sh", "-c", waits) as child:
        assert child.stdout is not None
        child.stdout.readline()
        early = json.loads((made.folder / "report.json").read_text())
        (made.folder / "go").touch()
        child.communicate(timeout=LONG_S)

    assert "unused" == early["outcome"]
    assert [] == list(made.folder.glob(".report*"))
    assert [] == list((made.warm_dir / "cold").iterdir())


def test_exec_store_is_unchanged(made: MadeStore) -> None:
    """A start reads the store and leaves every byte and time stamp."""
    before = tree(made.layout.root)

    run(made, "--", "true")

    assert before == tree(made.layout.root)
