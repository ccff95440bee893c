"""`cachectl exec`: the hook, then an unchanged program as a child with cachectl's start-up module in front.

Owns the child's environment, its signals and its exit code, and the report's last word. A composition root like
program.py: it joins the hook with the simulated CANN. Standard library only, and no click: it stands in every start.
CMD runs whether the hook was warm or cold; what goes wrong here must not keep it from running.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cachectl.boot.bounded import in_child
from cachectl.boot.command import DEFAULT_AGAIN, not_run, run_command
from cachectl.boot.handout import HANDOUT_VARIABLE, STARTUP, Handout, startup_in_front
from cachectl.boot.hook import HookOptions, declared_request, hook_in_time, parse_arguments
from cachectl.boot.reach import isolation
from cachectl.boot.report import EXEC_VARIABLE, ExecNote
from cachectl.boot.warmdir import WarmDir, choose_warm_dir
from cachectl.boot.watch import StartWatch
from cachectl.errors import CachectlError, ConfigError, DocumentError
from cachectl.publishing import DEFAULT_TIMEOUT_S, Publishing
from cachectl.runtimes.simulated import environment as simulated_environment
from cachectl.schemas.boot import Reason

__all__ = ["STARTUP", "ExecOptions", "main", "parse_options"]

_USAGE = 2
_FLAGS = {
    "--lift": "lift",
    "--observe": "observe",
    "--record": "record",
    "-q": "quiet",
    "--quiet": "quiet",
    "-v": "verbose",
    "--verbose": "verbose",
}
_HOOK_VALUES = frozenset({"--store", "--warm-dir", "--rank", "--deadline"})
_OWN_VALUES = frozenset({"--report", "--record-timeout"})


@dataclass(frozen=True)
class ExecOptions:
    """What the command line says: the hook's part of it, exec's own, and CMD."""

    hook: HookOptions
    command: tuple[str, ...]
    report: str | None = None
    observe: bool = False
    quiet: bool = False
    record: bool = False
    record_timeout_s: float = DEFAULT_TIMEOUT_S
    lift: bool = False


def main(arguments: Sequence[str]) -> int:
    """Run `cachectl exec`; return CMD's exit code, 128 + signal where one ended it, or 2, 126, 127 of our own."""
    try:
        options = parse_options(arguments)
    except ConfigError as error:
        _say(str(error))
        return _USAGE
    if os.environ.get("CACHECTL_DISABLE") == "1":
        return _become(options.command, os.environ)
    until_s = time.monotonic() + options.hook.deadline_s
    environ = _program_environment(options)
    handout = _hand_out(options, environ, until_s)
    note = _leave_note(options, handout, environ)
    environ.pop(HANDOUT_VARIABLE, None)
    environ.pop(EXEC_VARIABLE, None)
    if note is not None:
        if handout.outcome == "warm":
            environ[HANDOUT_VARIABLE] = handout.env[HANDOUT_VARIABLE]
        environ[EXEC_VARIABLE] = str(note.folder)
        environ["PYTHONPATH"] = startup_in_front(environ.get("PYTHONPATH"))
    if handout.outcome != "warm" and not options.quiet:
        _tell(handout.outcome, handout.reasons)
    watch = StartWatch(handout, exec_id=note.folder.name, is_exec=True) if note is not None else None
    publishing = _publishing(options, note) if note is not None and options.record else None
    code = None
    try:
        code = run_command(options.command, environ, publishing, watch)
        return code
    finally:
        if watch is not None and code is not None:
            watch.end_of_command(code)
        if note is not None:
            _finish(note, handout, quiet=options.quiet)
            if publishing is not None and code is not None:
                _publish(note, publishing, code, quiet=options.quiet)
            shutil.rmtree(note.folder, ignore_errors=True)


def parse_options(arguments: Sequence[str]) -> ExecOptions:
    """Read the command line.

    Raises:
        ConfigError: an option that exec does not have, no recipe, or no command behind `--`.
    """
    words = list(arguments)
    if "--" not in words:
        raise ConfigError("exec: no command", hint="run: cachectl exec RECIPE -- CMD...")
    split = words.index("--")
    words, command = words[:split], words[split + 1 :]
    flags: set[str] = set()
    own: dict[str, str] = {}
    for_hook: list[str] = []
    while words:
        word = words.pop(0)
        name, inline, value = word.partition("=")
        if word in _FLAGS:
            flags.add(_FLAGS[word])
        elif name in _OWN_VALUES or name in _HOOK_VALUES:
            value = value if inline else words.pop(0) if words else ""
            if not value:
                raise ConfigError(f"exec: {name} without a value", hint="see: cachectl exec --help")
            if name in _OWN_VALUES:
                own[name] = value
            else:
                for_hook += [name, value]
        elif word.startswith("-"):
            raise ConfigError(f"exec: unknown option {name}", hint="see: cachectl exec --help")
        else:
            for_hook.append(word)
    hook = parse_arguments(for_hook)
    if hook.unknown:
        raise ConfigError(f"exec: can't read {' '.join(hook.unknown)}", hint="see: cachectl exec --help")
    if hook.recipe is None or not command:
        missing = "recipe" if hook.recipe is None else "command"
        raise ConfigError(f"exec: no {missing}", hint="run: cachectl exec RECIPE -- CMD...")
    return ExecOptions(
        hook,
        tuple(command),
        own.get("--report"),
        "observe" in flags,
        "quiet" in flags,
        "record" in flags,
        _seconds(own.get("--record-timeout")),
        "lift" in flags,
    )


def _seconds(text: str | None) -> float:
    if text is None:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    # "nan" and "inf" are numbers to Python, and no bounds.
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"exec: --record-timeout {text} is no time in seconds", hint="pass a number above 0")
    return seconds


def _program_environment(options: ExecOptions) -> dict[str, str]:
    """Return CMD's environment: ours, what the recipe declares, and the simulated CANN where the recipe says so."""
    environ = dict(os.environ)
    try:
        declared, simulated = _declared_in_time(options.hook, environ)
        environ.update(declared)
        if simulated:
            environ = simulated_environment(environ)
    except CachectlError as error:
        _say(str(error))
    return environ


def _declared_in_time(options: HookOptions, environ: Mapping[str, str]) -> tuple[dict[str, str], bool]:
    """Return what the recipe declares, and whether it is for the simulated device; by the deadline. As the hook's work.

    Raises:
        CachectlError: nothing says so, or not in time.
    """

    def tell() -> dict[str, Any]:
        try:
            declared, simulated = declared_request(options, environ)
        except CachectlError as error:
            return {"error": error.message, "hint": error.hint}
        return {"declared": declared, "simulated": simulated}

    try:
        told = in_child(tell, options.deadline_s)
    except OSError:
        told = tell()
    if "error" in told:
        raise ConfigError(told["error"], hint=told["hint"])
    return told["declared"], told["simulated"]


def _hand_out(options: ExecOptions, environ: Mapping[str, str], until_s: float) -> Handout:
    """Return what a hook before us handed out for this recipe, else what ours does.

    Args:
        until_s: when the hook has to be done, on the monotonic clock.
    """
    left = environ.get(HANDOUT_VARIABLE)
    if left:
        try:
            handed = Handout.read(Path(left))
        except DocumentError as error:
            _say(f"{HANDOUT_VARIABLE} is left aside: {error}")
        else:
            if handed.recipe_path == Path(os.path.abspath(str(options.hook.recipe))):
                return handed
    told = hook_in_time(replace(options.hook, deadline_s=until_s - time.monotonic()), environ)
    if told.outcome != "warm":
        return told
    try:
        handed = Handout.read(Path(told.env[HANDOUT_VARIABLE]))
    except DocumentError as error:
        reason = Reason("store", "hand-out", error.message, kind="corrupt", hint="look at the node's disk")
        return Handout("cold", told.recipe_path, reasons=(*told.reasons, reason), seconds=told.seconds)
    return replace(handed, reasons=told.reasons, seconds=told.seconds, python_path=environ.get("PYTHONPATH"))


def _leave_note(options: ExecOptions, handout: Handout, environ: Mapping[str, str]) -> ExecNote | None:
    """Write what the program's processes have to know; None where there is no room for it, and CMD runs as it is."""
    try:
        chosen = choose_warm_dir(options.hook.warm_dir, environ)
        folder = chosen.new_cold() if isinstance(chosen, WarmDir) else Path(tempfile.mkdtemp(prefix="cachectl-exec."))
        report = Path(os.path.abspath(options.report)) if options.report is not None else None
        note = ExecNote(
            folder,
            handout.recipe_path,
            handout.report(),
            report,
            options.observe,
            options.hook.warm_dir,
            record=options.record,
            lift=options.lift,
            isolated=isolation(options.command),
        )
        note.write()
    except OSError as error:
        _say(f"the program runs without cachectl: {error.filename or 'warm dir'}: {error.strerror}")
        return None
    try:
        # Now, so that there is one while CMD runs, and so that a path that can't be written is told early.
        note.publish()
    except OSError as error:
        _say(f"--report {options.report}: {error.strerror}; the program runs without a report")
        note = replace(note, report=None)
        note.write()
    return note


def _publishing(options: ExecOptions, note: ExecNote) -> Publishing:
    """Return exec's part of recording."""
    environ = {name: value for name, value in os.environ.items() if name not in (HANDOUT_VARIABLE, EXEC_VARIABLE)}
    return Publishing(
        note,
        store=options.hook.store or environ.get("CACHECTL_STORE"),
        timeout_s=options.record_timeout_s,
        environ=environ,
        say=(lambda text: None) if options.quiet else lambda text: _write(f"cachectl exec: {text}\n"),
    )


def _become(command: Sequence[str], environ: Mapping[str, str]) -> int:
    for ignored in DEFAULT_AGAIN:
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), dict(environ))  # noqa: S606 - the command is the caller's
    except OSError as error:
        return not_run(command[0], error)


def _finish(note: ExecNote, handout: Handout, *, quiet: bool) -> None:
    """Complete the report, say in the end what came of the hand-out, and clear away what stood between."""
    try:
        document = note.publish()
    except OSError as error:
        _say(f"--report {note.report}: {error.strerror}")
    else:
        if not quiet and handout.outcome == "warm":
            _tell(document["outcome"], [Reason(**reason) for reason in document["reasons"]])


def _publish(note: ExecNote, publishing: Publishing, code: int, *, quiet: bool) -> None:
    """Prove and publish what the program recorded, and say what became of it."""
    recorded = publishing.finish(code)
    try:
        replace(note, recorded=recorded).publish()
    except OSError as error:
        _say(f"--report {note.report}: {error.strerror}")
    if quiet or not (recorded["entries"] or recorded["reasons"]):
        return
    count = len(recorded["entries"])
    what = f"{count} {'entry' if count == 1 else 'entries'}" if count else "nothing"
    after = "; the next start is warm" if recorded["warm_set"] and count else ""
    _tell(f"recorded and published {what}{after}", [Reason(**reason) for reason in recorded["reasons"]])


def _tell(outcome: str, reasons: Iterable[Reason]) -> None:
    text = f"cachectl exec: {outcome}\n"
    for reason in reasons:
        text += f"  {reason}\n" + (f"    {reason.hint}\n" if reason.hint else "")
    _write(text)


def _say(text: str) -> None:
    _write(f"cachectl: {' '.join(text.split())}\n")


def _write(text: str) -> None:
    try:
        os.write(2, text.encode("utf-8", "backslashreplace"))
    except OSError:
        pass  # Nobody listens, and CMD runs the same.
