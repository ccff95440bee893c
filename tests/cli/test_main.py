"""The command group: help, unknown and reserved names, and the one place where errors become exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import click
import pytest

from cachectl import errors
from cachectl.cli import main
from cachectl.cli.verbs import RESERVED, VERBS, Verb
from tests.cli.conftest import LONG_S

Run = Callable[..., "subprocess.CompletedProcess[str]"]

HEAVY = {"torch", "torch_npu", "pydantic", "sqlalchemy", "alembic", "rich", "yaml", "cryptography"}

ERRORS: list[tuple[errors.CachectlError, int]] = [
    (errors.CachectlError("what", hint="run this"), 3),
    (errors.ConfigError("what", hint="run this"), 2),
    (errors.EnvironmentFault("what", hint="run this"), 3),
    (errors.SimulationError("what", hint="run this"), 3),
    (errors.StoreError("what", hint="run this"), 3),
    (errors.ArtifactNotFoundError("what", hint="run this"), 3),
    (errors.ArtifactCorruptedError("what", path=Path("blob"), hint="run this"), 3),
    (errors.StoreReadOnlyError("what", hint="run this"), 3),
    (errors.StoreLockTimeoutError("what", lock_path=Path("lock"), timeout_s=1.0, hint="run this"), 3),
    (errors.ManifestError("what", hint="run this"), 3),
    (errors.SchemaBehindError("what", current=None, head="r0001", hint="run this"), 3),
    (errors.SchemaAheadError("what", current="r9999", hint="run this"), 3),
    (errors.ManifestConflictError("what", hint="run this"), 3),
    (errors.DocumentError("what", hint="run this"), 3),
    (errors.BuildError("what", hint="run this"), 1),
]

# What the extra verb of `raising` does; set by each test.
raised: BaseException = RuntimeError()


@click.command("raising")
@click.option("--json", is_flag=True)
def raising(json: bool) -> int:
    """Raise what the test has set."""
    raise raised


@click.command("terminated")
def terminated() -> int:
    """Get a SIGTERM, as from a scheduler."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
    return 0


@pytest.fixture
def run_raising(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command that raises an error; return exit code, stdout, stderr."""
    module = sys.modules[__name__]
    monkeypatch.setitem(VERBS, "raising", Verb("raising", f"{__name__}:raising", "Raise."))

    def run(error: BaseException, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(module, "raised", error)
        code = main.run(["raising", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def imported(stderr: str) -> set[str]:
    """Return the top-level packages in the report of `python -X importtime`."""
    return {match[1] for match in re.finditer(r"^import time:.*\|\s*(\w+)", stderr, re.MULTILINE)}


def test_errors_every_class_is_covered_here() -> None:
    """The table above names every class of the error tree."""
    tree = {errors.CachectlError}
    while more := {child for kind in tree for child in kind.__subclasses__()} - tree:
        tree |= more

    assert {kind for kind in tree if kind.__module__ == "cachectl.errors"} == {type(error) for error, _ in ERRORS}


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=lambda value: type(value).__name__)
def test_run_cachectl_error_becomes_two_lines_and_its_exit_code(
    run_raising: Callable[..., tuple[int, str, str]], error: errors.CachectlError, code: int
) -> None:
    """Each error of the tree is one line that says what, one that says what to run, and its exit code."""
    assert (code, "", "cachectl: what; run this\n") == run_raising(error)


def test_run_build_error_names_the_log(run_raising: Callable[..., tuple[int, str, str]]) -> None:
    """A build error points at the log that has the upstream text, on one line even if the message has several."""
    error = errors.BuildError("rank 0 failed:\n  assertion\n", log_path=Path("/logs/rank0.log"))

    assert (1, "", "cachectl: rank 0 failed: assertion; log: /logs/rank0.log\n") == run_raising(error)


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/store/tmp/x"),
            3,
            "cachectl: /store/tmp/x: No space left on device; free space on that file system\n",
        ),
        (OSError("odd"), 3, "cachectl: odd\n"),
        (KeyboardInterrupt(), 130, "cachectl: interrupted\n"),
        (click.UsageError("wrong"), 2, "cachectl: wrong; run: cachectl raising --help\n"),
        (click.FileError("f", "gone"), 2, "cachectl: Could not open file 'f': gone\n"),
        (
            ZeroDivisionError("by zero"),
            3,
            "cachectl: internal error: ZeroDivisionError: by zero; run again with CACHECTL_DEBUG=1\n",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_run_other_errors_become_one_line_and_an_exit_code(
    run_raising: Callable[..., tuple[int, str, str]], error: BaseException, code: int, stderr: str
) -> None:
    """What is no error of ours ends in one line as well, without a traceback."""
    assert (code, "", stderr) == run_raising(error)


def test_run_error_with_json_gives_one_document(run_raising: Callable[..., tuple[int, str, str]]) -> None:
    """With --json stdout has one document, also when the command failed."""
    code, stdout, stderr = run_raising(errors.StoreError("what", hint="run this"), "--json")

    assert 3 == code
    assert {"error": "what", "hint": "run this", "exit_code": 3} == json.loads(stdout)
    assert "cachectl: what; run this\n" == stderr


def test_run_debug_shows_the_traceback(
    run_raising: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CACHECTL_DEBUG=1 is the only way to a traceback."""
    monkeypatch.setenv("CACHECTL_DEBUG", "1")

    _, _, stderr = run_raising(ZeroDivisionError("by zero"))

    assert stderr.startswith("Traceback (most recent call last):\n")
    assert "cachectl: internal error: ZeroDivisionError: by zero; " in stderr


def test_run_error_hides_credentials(run_raising: Callable[..., tuple[int, str, str]]) -> None:
    """A database URL in a message comes without its user and password."""
    _, _, stderr = run_raising(errors.ManifestError("can't open postgresql://me:secret@db/cachectl"))

    assert "cachectl: can't open postgresql://***@db/cachectl\n" == stderr


def test_run_sigterm_ends_in_an_exception_and_143(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM unwinds as Ctrl-C does, so that nobody leaves child processes behind."""
    monkeypatch.setitem(VERBS, "terminated", Verb("terminated", f"{__name__}:terminated", "Get a SIGTERM."))

    code = main.run(["terminated"])

    assert (143, "cachectl: terminated\n") == (code, capsys.readouterr().err)
    assert signal.SIG_DFL == signal.getsignal(signal.SIGTERM)


def test_hook_interrupted_is_one_line_and_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C on a hook is somebody at a terminal: no traceback, and the exit code that the other commands give."""

    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["cachectl", "hook", "recipe.yaml"])
    monkeypatch.setattr(import_module("cachectl.boot.hook"), "main", interrupted)

    code = import_module("cachectl.__main__").main()

    assert (130, "cachectl: interrupted\n") == (code, capsys.readouterr().err)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["hook", "--help"], ["hook"], ["exec", "--help"], ["exec"], ["--version"]]
)
def test_startup_imports_nothing_heavy(cachectl: Run, arguments: list[str]) -> None:
    """Help and the hook start without torch, pydantic, SQLAlchemy and rich; the hook without click, too."""
    result = cachectl(*arguments, python=("-X", "importtime"))
    unwanted = HEAVY | ({"click"} if arguments[0] in ("hook", "exec") else set())

    assert set() == imported(result.stderr) & unwanted
    assert "cachectl" in imported(result.stderr)


def test_help_names_every_verb_and_no_reserved_one(cachectl: Run) -> None:
    """--help shows what works, the first verbs first, and nothing that this version does not have."""
    result = cachectl("--help")
    shown = re.findall(r"^  ([a-z]+)  +\w", result.stdout, re.MULTILINE)

    assert 0 == result.returncode
    assert list(VERBS) == shown
    assert set() == set(shown) & RESERVED


def test_help_on_a_terminal_is_bold_for_the_first_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    """The verbs everybody needs stand out; the text reads the same without the bold."""
    context = click.Context(main.command, color=True)

    text = main.command.get_help(context)

    assert f"  {click.style('plan', bold=True)}      Say entry by entry" in text
    assert "  plan      Say entry by entry" in click.unstyle(text)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_has_an_example(cachectl: Run, verb: str) -> None:
    """Each verb's help starts with the line of the table and shows how the verb is run."""
    result = cachectl(verb, "--help")

    assert 0 == result.returncode
    assert VERBS[verb].help in " ".join(result.stdout.split())
    assert "Example:" in result.stdout
    assert f"cachectl {verb}" in result.stdout.partition("Example:")[2]
    assert "" == result.stderr


@pytest.mark.parametrize("verb", [verb for verb in VERBS.values() if verb.target])
def test_table_help_is_the_first_line_of_the_docstring(verb: Verb) -> None:
    """The table that --help prints from says what the command's own help says."""
    module, _, attribute = str(verb.target).partition(":")
    command = getattr(import_module(module), attribute)

    assert verb.help == command.help.splitlines()[0]
    assert verb.name == command.name


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_run_reserved_name_says_not_yet(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A name kept for later is no typo: one line says that this version does not have it."""
    code = main.run([name, "recipe.yaml"])

    assert 2 == code
    assert re.fullmatch(rf"cachectl: this version \(.*\) does not have '{name}' yet\n", capsys.readouterr().err)


def test_run_unknown_verb_names_the_nearest(cachectl: Run) -> None:
    """A mistyped verb is answered with the nearest one."""
    result = cachectl("biuld", "recipe.yaml")

    assert 2 == result.returncode
    assert "cachectl: no command 'biuld'; did you mean 'build'?; run: cachectl --help\n" == result.stderr
    assert "" == result.stdout


def test_run_without_verb_shows_the_help_on_stderr(cachectl: Run) -> None:
    """No verb is a usage error, and the answer is the list of verbs."""
    result = cachectl()

    assert (2, "") == (result.returncode, result.stdout)
    assert result.stderr.startswith("Usage: cachectl COMMAND")


def test_run_option_before_the_verb_says_where_options_stand(cachectl: Run) -> None:
    """Options stand after the verb."""
    result = cachectl("--json", "ls")

    assert 2 == result.returncode
    assert "--json: options stand after the verb" in result.stderr


def test_run_unknown_option_is_a_usage_error(cachectl: Run) -> None:
    """An unknown option exits 2 and points at the verb's help."""
    result = cachectl("plan", "recipe.yaml", "--nope")

    assert 2 == result.returncode
    assert result.stderr.startswith("cachectl: No such option")
    assert result.stderr.endswith("; run: cachectl plan --help\n")


def test_run_reader_gone_is_quiet(tmp_path: Path) -> None:
    """A closed pipe ends a command without a word, as SIGPIPE would."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "cachectl", "--help"]

    with open(writing, "wb") as gone:
        result = subprocess.run(
            command, cwd=tmp_path, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=LONG_S, check=False
        )

    assert (141, "") == (result.returncode, result.stderr)


def test_run_full_disk_exits_3(tmp_path: Path) -> None:
    """A result that can't be written is an environment error."""
    command = ["bash", "-c", f"{sys.executable} -m cachectl --help >/dev/full"]

    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S, check=False)

    assert 3 == result.returncode
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.stderr
