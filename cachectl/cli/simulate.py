"""`cachectl simulate`: runs a command on the simulated CANN."""

from __future__ import annotations

import errno
import os
import signal
import sys

import click

from cachectl.cli.options import HELP_NAMES, Session, example, session_options

__all__ = ["command"]

_NOT_EXECUTABLE = 126
_NOT_FOUND = 127


@click.command(
    "simulate",
    # What stands behind CMD belongs to CMD, also where it looks like one of our options.
    context_settings={**HELP_NAMES, "allow_interspersed_args": False},
    epilog=example(
        "cachectl simulate -- python serve.py",
        "CACHECTL_SIM_SOC=Ascend910B3 cachectl simulate -- torchrun --nproc-per-node 4 serve.py",
    ),
)
@click.argument("arguments", metavar="-- CMD...", nargs=-1, required=True, type=click.UNPROCESSED)
@session_options
def command(session: Session, arguments: tuple[str, ...]) -> int:
    """Run a command on the simulated CANN.

    CMD finds the simulated CANN on its library path, and torch_npu runs without an NPU. CACHECTL_SIM_SOC,
    CACHECTL_SIM_CANN and CACHECTL_SIM_DEVICES set what is reported. stdout and the exit code are CMD's own; 127 when
    CMD is not found, 126 when it can't be run.
    """
    from cachectl.runtimes.simulated import environment

    variables = environment(os.environ)
    sys.stdout.flush()
    # Python ignores these two, and an ignored signal stays ignored across exec: `CMD | head` would not end.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvpe(arguments[0], list(arguments), variables)  # noqa: S606 - the command is the caller's
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        reason = "command not found" if missing and os.sep not in arguments[0] else error.strerror
        session.out.stderr.write(f"cachectl: {arguments[0]}: {reason}\n")
        return _NOT_FOUND if missing else _NOT_EXECUTABLE
