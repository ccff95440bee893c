"""The sink: modes, tables, and how values are written for people."""

from __future__ import annotations

import contextlib
import io
import json
import pty

import pytest

from cachectl.cli.output import Output, clean, human_seconds, human_size, human_value, ranks_text, short_key
from cachectl.schemas.canonical import digest_bytes

KEY = digest_bytes(b"key")


def test_report_json_is_one_document() -> None:
    """JSON mode writes the document and nothing that is meant for people."""
    stdout = io.StringIO()
    out = Output("json", stdout=stdout)

    out.line("for people")
    out.table(["A"], [["1"]])
    out.report({"key": KEY, "none": None}, lambda: pytest.fail("rendered for people"))

    assert {"key": KEY, "none": None} == json.loads(stdout.getvalue())


def test_report_quiet_says_nothing() -> None:
    """Quiet mode writes neither results nor logs."""
    stdout, stderr = io.StringIO(), io.StringIO()
    out = Output("quiet", stdout=stdout, stderr=stderr)

    out.report({}, lambda: pytest.fail("rendered for people"))
    out.line("for people")
    out.log("log")

    assert ("", "") == (stdout.getvalue(), stderr.getvalue())


def test_table_without_terminal_is_plain_aligned_columns() -> None:
    """Elsewhere than on a terminal a table is one row a line, for grep and awk."""
    stdout = io.StringIO()

    Output(stdout=stdout).table(["NAME", "RANK"], [["decode", 0], ["mtp", 12]], right=["RANK"])

    assert "NAME    RANK\ndecode     0\nmtp       12\n" == stdout.getvalue()


def test_table_on_a_terminal_has_the_same_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the table is laid out by rich; what it says is the same."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    leader, follower = pty.openpty()
    with open(follower, "w", encoding="utf-8") as terminal:
        Output(stdout=terminal).table(["NAME", "RANK"], [["[b]decode[/b]", 0]], right=["RANK"])
    # To its end: a terminal hands on what was written in its own time, and a read may give the first line alone.
    written = b""
    with contextlib.suppress(OSError), open(leader, "rb", buffering=0) as screen:
        while more := screen.read(4096):
            written += more
    text = written.decode()

    assert "NAME" in text
    assert "[b]decode[/b]" in text


def test_clean_control_characters_are_escaped() -> None:
    """A name from another machine can't move the reader's cursor."""
    assert "a\\x1b[2Jb\\n" == clean("a\x1b[2Jb\n")


def test_key_is_short_unless_verbose() -> None:
    """Tables show enough of a key to name it; -v shows all."""
    assert KEY[7:19] == Output().key(KEY) == short_key(KEY)
    assert KEY == Output(verbose=1).key(KEY)
    assert "-" == Output().key(None)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (455_427, "444.8 KiB"), (5 << 50, "5120.0 TiB")],
)
def test_human_size_uses_binary_units(size_bytes: int, text: str) -> None:
    """Sizes are in binary units."""
    assert text == human_size(size_bytes)


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (0.127, "0.13 s"), (61.26, "61.3 s"), (185, "3 min 05 s")])
def test_human_seconds_has_the_precision_it_deserves(seconds: float | None, text: str) -> None:
    """Durations are short."""
    assert text == human_seconds(seconds)


def test_human_value_is_short_unless_whole() -> None:
    """Values are cut for a table; digests are shortened, the rest is JSON."""
    assert "nothing" == human_value(None)
    assert '{"a": [2], "b": 1}' == human_value({"b": 1, "a": [2]})
    assert KEY[:19] == human_value(KEY)
    assert "x" * 9 + "…" == human_value("x" * 100, limit=10)
    assert "x" * 100 == human_value("x" * 100, whole=True)


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([1, 0, 2], "ranks 0-2"), ([0, 1, 8, 4, 5], "ranks 0-1,4-5,8")]
)
def test_ranks_text_joins_runs(ranks: list[int], text: str) -> None:
    """Runs of ranks are written as spans."""
    assert text == ranks_text(ranks)
