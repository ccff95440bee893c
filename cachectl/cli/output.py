"""The one sink of what commands say: for people, as one JSON document, or not at all.

Data goes to stdout, progress and logs to stderr. On a terminal tables are laid out by rich; elsewhere they are plain
aligned columns, one row a line, which grep and awk can read. Nothing is told by colour alone. In JSON mode stdout
carries exactly one document.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO

from cachectl.schemas.canonical import DIGEST_PREFIX, is_digest

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["Mode", "Output", "clean", "human_seconds", "human_size", "human_value", "ranks_text", "short_key"]

Mode = Literal["human", "json", "quiet"]

_KEY_HEX = 12


class Output:
    """Where a command's results go; commands say what, this knows how.

    Args:
        mode: human, json (one document on stdout) or quiet (nothing but errors).
        verbose: 0, or more for whole digests and details.
    """

    def __init__(
        self, mode: Mode = "human", *, verbose: int = 0, stdout: TextIO | None = None, stderr: TextIO | None = None
    ) -> None:
        self.mode = mode
        self.verbose = verbose
        self.stdout = sys.stdout if stdout is None else stdout
        self.stderr = sys.stderr if stderr is None else stderr

    @property
    def terminal(self) -> bool:
        """Whether tables are read on a terminal."""
        return _is_terminal(self.stdout)

    @property
    def live(self) -> bool:
        """Whether progress may be drawn in place: stderr is a terminal and somebody wants to read it."""
        return self.mode == "human" and _is_terminal(self.stderr)

    def report(self, report: BaseModel | Mapping[str, Any], human: Callable[[], None]) -> None:
        """Give the result: as a document in JSON mode, through `human` for people, not at all when quiet."""
        if self.mode == "json":
            self.document(report)
        elif self.mode == "human":
            human()

    def document(self, report: BaseModel | Mapping[str, Any]) -> None:
        """Write the report as JSON on stdout, whatever the mode."""
        document = dict(report) if isinstance(report, Mapping) else report.model_dump(mode="json")
        self.stdout.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")

    def line(self, text: str = "") -> None:
        """Write one line of the result for people."""
        if self.mode == "human":
            self.stdout.write(clean(text) + "\n")

    def log(self, text: str) -> None:
        """Write one line about what is going on, on stderr; not when quiet."""
        if self.mode != "quiet":
            self.stderr.write(clean(text) + "\n")
            self.stderr.flush()

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()) -> None:
        """Write a table for people; the columns named in `right` hold numbers."""
        if self.mode != "human":
            return
        cells = [[clean("" if value is None else str(value)) for value in row] for row in rows]
        if self.terminal:
            self._rich_table(columns, cells, right)
            return
        widths = [max(len(cell) for cell in column) for column in zip(columns, *cells, strict=True)]
        for row in [list(columns), *cells]:
            texts = [
                cell.rjust(width) if name in right else cell.ljust(width)
                for name, cell, width in zip(columns, row, widths, strict=True)
            ]
            self.stdout.write("  ".join(texts).rstrip() + "\n")

    def _rich_table(self, columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[str]) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in columns:
            table.add_column(name, justify="right" if name in right else "left", overflow="fold")
        for row in cells:
            table.add_row(*(Text(cell) for cell in row))
        Console(file=self.stdout, highlight=False).print(table)

    def key(self, key: str | None) -> str:
        """Return a key as people read it: whole when verbose, else short enough for a table."""
        return "-" if key is None else key if self.verbose else short_key(key)


def clean(text: str) -> str:
    """Return the text with control characters escaped: names come from other machines, the terminal obeys escapes."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "backslashreplace").decode("ascii")
        for character in text
    )


def short_key(key: str) -> str:
    """Return the beginning of a digest's hex, as commands accept it."""
    return key.removeprefix(DIGEST_PREFIX)[:_KEY_HEX] if is_digest(key) else key


def human_size(size_bytes: float) -> str:
    """Return a number of bytes in binary units."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size_bytes /= 1024
        if size_bytes < 1024 or unit == "TiB":
            break
    return f"{size_bytes:.1f} {unit}"


def human_seconds(seconds: float | None) -> str:
    """Return a duration with the precision that it deserves; `-` when nothing was measured."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def human_value(value: object, *, whole: bool = False, limit: int = 60) -> str:
    """Return a reason's value for people: text as it is, digests short, the rest as JSON, cut unless `whole`."""
    if value is None:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    if whole:
        return text
    if is_digest(text):
        return DIGEST_PREFIX + short_key(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as people write them: `rank 3`, `ranks 0-63`, `ranks 0-3,8`."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    spans = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ordered) > 1 else ''} {spans}"


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"
