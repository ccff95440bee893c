"""Defaults that only a running interpreter could compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachectl.identity.options import dynamo_defaults


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2**10", 1024),
        ("10 - 3", 7),
        ("base - 3", ...),
        ("2**'x'", ...),
        ("2**(1 - 3)", ...),
        ("2**99999999", ...),
    ],
)
def test_dynamo_defaults_sums_are_computed_within_bounds(tmp_path: Path, text: str, value: object) -> None:
    """A power of plain integers has its value; an unknown name, another type and a huge power are left open."""
    (tmp_path / "_dynamo").mkdir()
    (tmp_path / "_dynamo" / "config.py").write_text(f"limit = {text}\n")

    assert {"limit": value} == dynamo_defaults(tmp_path)
