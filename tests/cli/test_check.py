"""`cachectl check` for people and programs: what it prints, how it exits, and the trace on the simulated CANN."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachectl.schemas.check import RULES

Run = Callable[..., "subprocess.CompletedProcess[str]"]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-decoder"
MODEL = """\
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(4))

    def main_decode(self, x: torch.Tensor):
        self.state = self.state + 1
        for helper in (torch.relu, torch.tanh):
            x = helper(x)
        return x * x.sum().item() + self.state


def build():
    return Model().eval()


def inputs(model, rank):
    return {"x": torch.ones(4)}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe whose method breaks two rules."""
    (tmp_path / "model.py").write_text(MODEL)
    document: dict[str, Any] = {
        "schema": "cachectl/recipe/v1",
        "name": "checked",
        "device": "simulated",
        "model": {"factory": "model:build"},
        "compile": {"options": {"frozen_parameter": True}},
        "functions": [{"method": "main_decode", "cases": [{"name": "one", "inputs": "model:inputs"}]}],
        "environment": {"TASK_QUEUE_ENABLE": "1"},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(document))
    return path


def test_check_shows_findings_by_file_with_their_rewrite(recipe: Path, cachectl: Run) -> None:
    """File, line and rule in the form that editors jump to; the ladder last."""
    done = cachectl("check", str(recipe), "--no-trace")

    lines = done.stdout.splitlines()
    first = lines.index("model.py")
    assert 1 == done.returncode
    assert "  model.py:10 rebound-buffer: the buffer `self.state` is bound to another tensor" == lines[first + 1]
    assert f"    {RULES['rebound-buffer'][1]}" == lines[first + 2]
    assert "  model.py:13 host-sync: `x.sum().item()` reads a tensor on the host" == lines[first + 3]
    assert done.stdout.index("host-sync") < done.stdout.index("before a cache is worth making")
    assert "2 errors, no warnings; no cases traced" == lines[-1]
    assert "" == done.stderr


def test_check_prints_one_document(recipe: Path, cachectl: Run) -> None:
    """The contract's fields, and counts that fit the findings."""
    done = cachectl("check", str(recipe), "--no-trace", "--json")

    document = json.loads(done.stdout)
    severities = [item["severity"] for item in document["findings"]]
    assert ["findings", "errors", "warnings", "advice", "traced", "notes"] == list(document)
    assert (2, 0, 2) == (document["errors"], document["warnings"], document["advice"])
    assert severities.count("error") == document["errors"]
    assert {"rule", "severity", "path", "line", "what", "rewrite", "method"} == set(document["findings"][0])
    assert ([], ["not traced: --no-trace"]) == (document["traced"], document["notes"])


def test_check_quiet_says_it_with_the_exit_code(recipe: Path, cachectl: Run) -> None:
    """Nothing but errors of the command itself is printed."""
    done = cachectl("check", str(recipe), "--no-trace", "-q")

    assert (1, "", "") == (done.returncode, done.stdout, done.stderr)


def test_check_refuses_what_is_no_recipe(recipe: Path, cachectl: Run) -> None:
    """A recipe that is not there, a method that is not there, a bound that is none."""
    recipe.write_text(recipe.read_text().replace("main_decode", "other"))

    assert 2 == cachectl("check", "missing.yaml").returncode
    assert "no method 'other'; it has: main_decode" in cachectl("check", str(recipe), "--no-trace").stderr
    assert 2 == cachectl("check", str(recipe), "--timeout", "0").returncode


def test_check_needs_no_store_and_leaves_nothing(recipe: Path, cachectl: Run, store: Path) -> None:
    """Neither the store nor the model's folder gets a file."""
    before = sorted(recipe.parent.rglob("*"))

    cachectl("check", str(recipe), "--no-trace")

    assert not store.exists()
    assert before == sorted(recipe.parent.rglob("*"))


@pytest.mark.real
@pytest.mark.nightly
def test_check_traces_the_tiny_decoder_without_a_finding(cachectl: Run) -> None:
    """Both readers find the example good, with either attention."""
    for name in ("recipe.yaml", "recipe-dynamic.yaml"):
        document = json.loads(cachectl("check", str(EXAMPLE / name), "--json").stdout)

        assert (0, 0) == (document["errors"], document["warnings"]), document["findings"]
        assert document["traced"]


@pytest.mark.real
@pytest.mark.slow
def test_check_merges_what_the_trace_finds(recipe: Path, cachectl: Run) -> None:
    """One finding for one rule at one place, whoever saw it."""
    done = cachectl("check", str(recipe), "--json")

    document = json.loads(done.stdout)
    places = [(item["rule"], item["line"]) for item in document["findings"] if item["severity"] == "error"]
    assert 1 == done.returncode
    assert {("rebound-buffer", 10), ("host-sync", 13)} <= set(places)
    assert len(set(places)) == len(places)
