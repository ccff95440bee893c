"""The example's program after a change, as users run it; test_changes.py plays everything that can change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_edited_forward_is_cold_right_and_named(program: Any, plain_cache: Path) -> None:
    """The plain runtime, beside, answers from its old cache and wrongly; cachectl's reason names the file."""
    shutil.copytree(plain_cache, program.folder / "plain")
    program.edit("nn.functional.silu(self.gate(hidden))", "nn.functional.relu(self.gate(hidden))")

    eager = program.generate("--eager")
    plain = program.generate("--plain", "--cache-dir", "plain")
    ours = program.generate()

    assert eager["tokens"] != plain["tokens"] or _gap(eager, plain) > 1e-3
    assert "cold" == ours["outcome"]
    assert any(reason.startswith("sources: tiny_decoder/model.py") for reason in ours["reasons"]), ours["reasons"]
    assert _gap(eager, ours) < 1e-3


def test_other_cann_is_cold_with_the_version_named(program: Any) -> None:
    """Under another CANN version the hook refuses, and the reason holds both versions."""
    document = program.hook(environ={"CACHECTL_SIM_CANN": "8.6.0"})

    reasons = {(reason["part"], reason["name"]): reason for reason in document["reasons"]}
    assert "cold" == document["outcome"]
    assert ("8.5.0", "8.6.0") == tuple(reasons["toolchain", "cann.CANN"][side] for side in ("stored", "wanted"))


def test_other_soc_is_cold_with_the_soc_named(program: Any) -> None:
    """On another SoC the hook refuses, and the reason holds both names."""
    document = program.hook(environ={"CACHECTL_SIM_SOC": "Ascend910_9391"})

    (reason,) = document["reasons"]
    assert "cold" == document["outcome"]
    assert ("device", "soc", "ascend910b1", "ascend910_9391") == tuple(
        reason[name] for name in ("part", "name", "stored", "wanted")
    )


def test_tampered_artifact_is_refused_by_verify_and_hook(program: Any) -> None:
    """One bit, same size: verify finds it, the hook goes cold and says so, and the program still answers right."""
    victims = [path for path in (program.store / "blobs").rglob("*") if path.is_file()]
    for victim in victims:
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.chmod(0o644)
        victim.write_bytes(bytes(data))

    verified = program.cachectl("verify", "--json")
    document = program.hook()
    cold = program.generate()

    assert 1 == verified.returncode
    assert "corrupt-blob" in verified.stdout
    assert "cold" == document["outcome"]
    assert ("artifact", "corrupt") == (document["reasons"][0]["part"], document["reasons"][0]["kind"])
    assert [] == list(program.warm_dir.glob("handouts/*"))
    assert ("cold", program.generate("--eager")["tokens"]) == (cold["outcome"], cold["tokens"])


def _gap(one: dict[str, Any], other: dict[str, Any]) -> float:
    pairs = zip(one["logits"], other["logits"], strict=True)
    return max(abs(a - b) for left, right in pairs for a, b in zip(left, right, strict=True))
