"""Options that commands share, and the session that every command gets from them.

Options stand after the verb. A command's function returns its exit code.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cachectl import config
from cachectl.cli.output import Output
from cachectl.store.layout import StoreLayout

__all__ = [
    "HELP_NAMES",
    "Session",
    "example",
    "positive_seconds",
    "rank_timeout",
    "recipes_argument",
    "session_options",
]

HELP_NAMES = {"help_option_names": ["-h", "--help"]}

recipes_argument = click.argument(
    "recipes", metavar="RECIPE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)


@dataclass(frozen=True)
class Session:
    """What every command knows: the store that was named, and where to say things."""

    store: config.Setting
    out: Output

    def layout(self) -> StoreLayout:
        """Return the store's layout; raises as StoreLayout.resolve does."""
        return StoreLayout.resolve(self.store.value)


def positive_seconds(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """Refuse, as an option's callback, what is no duration above 0: nan and inf are floats, too."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise click.BadParameter(f"{value} is not a number of seconds above 0", ctx, param)
    return value


rank_timeout = click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=float,
    callback=positive_seconds,
    help="Give up a rank process after this long.",
)


def session_options(function: Callable[..., int]) -> Callable[..., int]:
    """Give a command `--store`, `--json`, `-v`, `-q`; its function gets them as `session`."""

    @click.option("--store", metavar="DIR|URL", help="The store.  [env: CACHECTL_STORE; default: the user data dir]")
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document; logs go to stderr.")
    @click.option("-v", "--verbose", count=True, help="Say more: whole digests, details, logs.")
    @click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
    @functools.wraps(function)
    def wrapper(*args: Any, store: str | None, as_json: bool, verbose: int, quiet: bool, **kwargs: Any) -> int:
        if as_json and quiet:
            raise click.UsageError("--json and -q exclude each other", click.get_current_context())
        if verbose:
            level = logging.INFO if verbose == 1 else logging.DEBUG
            logging.basicConfig(stream=sys.stderr, level=level, format="%(levelname)s %(name)s: %(message)s")
        out = Output("json" if as_json else "quiet" if quiet else "human", verbose=verbose)
        return function(*args, session=Session(config.resolve("store", store), out), **kwargs)

    return wrapper


def example(*lines: str) -> str:
    """Return a help epilog that shows how the command is run."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)
