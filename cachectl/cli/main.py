"""The command group and the one place where errors become messages and exit codes.

Commands are imported when they are called; `--help` prints from the table of verbs.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

import click

import cachectl
from cachectl import config
from cachectl.cli.output import clean
from cachectl.cli.verbs import RESERVED, VERBS
from cachectl.errors import BuildError, CachectlError

__all__ = ["command", "run"]

_INTERRUPTED = 130  # 128 + SIGINT
_TERMINATED = 143  # 128 + SIGTERM
_BROKEN_PIPE = 141  # 128 + SIGPIPE
_ENVIRONMENT = 3
_USAGE = 2

# postgresql://user:password@host: nothing that we print may carry it.
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")

_OS_HINTS = {
    errno.ENOSPC: "free space on that file system",
    errno.EDQUOT: "free space or raise the quota there",
    errno.EROFS: "that file system is mounted read-only",
    errno.EACCES: "check the owner and mode of that path",
    errno.EPERM: "check the owner and mode of that path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


class _Verbs(click.Group):
    """A group that knows its commands by name and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = VERBS.get(cmd_name)
        if verb is None or verb.target is None:
            return None
        module, _, attribute = verb.target.partition(":")
        found: click.Command = getattr(import_module(module), attribute)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        found = self.get_command(ctx, name)
        if found is not None:
            return name, found, args[1:]
        if name in RESERVED:
            raise click.UsageError(f"this version ({cachectl.__version__}) does not have {name!r} yet")
        near = difflib.get_close_matches(name, [*VERBS, *RESERVED], n=1)
        raise click.UsageError(f"no command {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""), ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(_USAGE)
        if args[0].startswith("-") and args[0] not in ("--help", "-h", "--version"):
            raise click.UsageError(f"{args[0]}: options stand after the verb", ctx)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for verb in VERBS.values():
            name = click.style(verb.name, bold=True) if verb.group is None else verb.name
            groups.setdefault(verb.group or "Commands", []).append((name, verb.help))
        width = max(len(name) for name in VERBS)
        for title, rows in groups.items():
            with formatter.section(title):
                # One column for all groups; a styled name is longer than it looks.
                formatter.write_dl([(name + " " * (width - len(click.unstyle(name))), text) for name, text in rows])


@click.group(
    cls=_Verbs,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    options_metavar="",
    subcommand_metavar="COMMAND [ARGS]... [OPTIONS]",
    epilog="Options stand after the command. `cachectl COMMAND --help` says more and gives an example.",
)
@click.version_option(cachectl.__version__, prog_name="cachectl", message="%(prog)s %(version)s")
def command() -> None:
    """Build, prove and hand out the compile caches of an Ascend NPU inference fleet."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; return its exit code.

    What a command raises ends here: one line on stderr that says what and which value, one with what to run next, and
    the contract's exit code. A traceback is shown only with CACHECTL_DEBUG=1.
    """
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding can't show must not end a command.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with _terminable():
            code = _invoke(arguments)
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
        return _BROKEN_PIPE
    except _Terminated:
        return _report("terminated", None, _TERMINATED, arguments)
    except (KeyboardInterrupt, click.Abort):
        return _report("interrupted", None, _INTERRUPTED, arguments)
    except CachectlError as error:
        log = f"log: {error.log_path}" if isinstance(error, BuildError) and error.log_path else None
        hints = "; ".join(part for part in (error.hint, log) if part)
        return _report(error.message, hints, error.exit_code, arguments)
    except click.UsageError as error:
        # `cachectl` alone has nothing to say about a reserved name: such an error comes without a context.
        hint = f"run: {error.ctx.command_path} --help" if error.ctx is not None else None
        return _report(error.format_message(), hint, _USAGE, arguments)
    except click.ClickException as error:
        return _report(error.format_message(), None, _USAGE, arguments)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error.strerror or error)
        return _report(what, _OS_HINTS.get(error.errno or 0), _ENVIRONMENT, arguments)
    except Exception as error:  # noqa: BLE001 - the command line's last resort; nothing may end in a traceback
        text = f"internal error: {type(error).__name__}: {error}"
        return _report(text, "run again with CACHECTL_DEBUG=1", _ENVIRONMENT, arguments)
    return code


class _Terminated(KeyboardInterrupt):
    """SIGTERM arrived; as with Ctrl-C, whoever runs child processes or has a workspace cleans up on the way out."""


@contextmanager
def _terminable() -> Iterator[None]:
    # A scheduler stops a build with SIGTERM, whose default would leave rank processes behind.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def terminate(*_: object) -> None:
        # Once is enough: a second one must not break the cleaning up.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _invoke(arguments: Sequence[str]) -> int:
    # Not click's own `main`: it answers a broken pipe by exiting 1, which here means findings.
    try:
        with command.make_context("cachectl", list(arguments)) as context:
            code = command.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    return code if isinstance(code, int) else 0


def _report(message: str, hint: str | None, code: int, arguments: Sequence[str]) -> int:
    message = _one_line(message)
    hint = _one_line(hint) if hint else None
    try:
        if config.is_on("debug") and sys.exc_info()[1] is not None:
            traceback.print_exc()
        # One line, the way out in it: what follows may be cut off by whoever collects logs.
        sys.stderr.write(f"cachectl: {message}" + (f"; {hint}\n" if hint else "\n"))
        sys.stderr.flush()
        if _wants_json(arguments):
            # Whoever asked for a document gets one.
            document = {"error": message, "hint": hint, "exit_code": code}
            sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
        sys.stdout.flush()
    except OSError:
        # Nobody reads, or nothing can be written: the exit code is all that is left to say.
        _drop_stdout()
    return code


def _one_line(text: str) -> str:
    return clean(" ".join(_CREDENTIALS.sub("***@", text).split()))


def _wants_json(arguments: Sequence[str]) -> bool:
    before = list(arguments[: arguments.index("--")]) if "--" in arguments else list(arguments)
    return "--json" in before


def _drop_stdout() -> None:
    # The interpreter flushes stdout once more at exit and would complain there.
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.close(sink)
