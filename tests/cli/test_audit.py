"""`cachectl audit` for people: what it prints, how it exits, and options that make no sense."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from cachectl.schemas.audit import AuditEffect, AuditKind

Run = Callable[..., "subprocess.CompletedProcess[str]"]

ARTIFACT = Path(__file__).resolve().parents[1] / "runtimes" / "artifact" / "data" / "npugraph_ex_rank1.bin"
GRAPH = f"Decoder_static_aclgraphcache_{'0f3c' * 8}"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of two ranks whose modes a copy has lost."""
    for rank in (0, 1):
        path = tmp_path / "cache" / GRAPH / f"world2global_rank{rank}" / "main_decode" / "compiled_module"
        path.parent.mkdir(parents=True)
        path.write_bytes(ARTIFACT.read_bytes())
        path.chmod(0o644)
    return tmp_path / "cache"


def test_audit_shows_ranks_together_and_each_finding_once(cache: Path, cachectl: Run) -> None:
    """Two ranks are one row; what is said of both in the same words is said once, unless verbose."""
    short, long = cachectl("audit", str(cache), "--python", "3.11"), cachectl("audit", str(cache), "-v")

    rows = [line for line in short.stdout.splitlines() if "Decoder_static_aclgraphcache_0f3c0f3c" in line]
    assert (1, 1) == (short.returncode, long.returncode)
    assert any("ranks 0-1 of 2" in row for row in rows)
    assert 1 == short.stdout.count("its mode is 0644")
    assert "compiled_module and 1 more" in short.stdout
    assert all(f"world2global_rank{rank}/main_decode/compiled_module" in long.stdout for rank in (0, 1))
    assert "bfloat16" not in short.stdout
    assert "bfloat16" in long.stdout
    assert "2 findings" in short.stdout


def test_audit_exits_0_where_nothing_is_wrong(cache: Path, cachectl: Run) -> None:
    """Modes put back, and the CPython named that the artifacts are of."""
    for path in cache.rglob("compiled_module"):
        path.chmod(0o600)

    done = cachectl("audit", str(cache), "--python", "3.11")

    assert (0, "") == (done.returncode, done.stderr)
    assert "no findings" in done.stdout


@pytest.mark.parametrize("options", [("--uid", "-1"), ("--uid", "root"), ("--python", "python3.11"), ("--python", "")])
def test_audit_refuses_options_that_make_no_sense(cache: Path, cachectl: Run, options: tuple[str, str]) -> None:
    """A name is no uid, and a command no minor."""
    assert 2 == cachectl("audit", str(cache), *options).returncode


def test_commands_document_explains_every_finding_and_effect(repository: Path) -> None:
    """No word of the report is left to guess."""
    text = (repository / "docs" / "commands.md").read_text(encoding="utf-8")
    section = text.partition("## `audit`\n")[2].partition("\n## `")[0]

    assert [] == [word for word in (*get_args(AuditKind), *get_args(AuditEffect)) if f"`{word}`" not in section]
