"""Publishing what a program recorded: what stands against it before any process is started to prove it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cachectl.build.call_drafts import leave_draft, read_drafts, refusal
from cachectl.build.job import Job
from cachectl.schemas.boot import Reason
from cachectl.services import record
from cachectl.services.record import prepare_record, publish_drafts
from cachectl.services.request import read_request
from cachectl.store.layout import StoreLayout

pytestmark = [pytest.mark.real]

WHOLE = {
    "method": "main_decode",
    "rank": 0,
    "sources": {},
    "inputs": {"L['x']": {"tensor": {"shape": [3]}}, "L['n']": {"value": 7}},
    "environ": {"GAIN": "2", "HF_TOKEN": "", "TMPDIR": "/tmp/x", "KEPT": "1"},
    "started": {"HF_TOKEN": "other", "KEPT": "1", "GONE": "1"},
    "hash_seed": "2",
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe of a model that is never built here."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        json.dumps(
            {
                "schema": "cachectl/recipe/v1",
                "name": "own",
                "device": "simulated",
                "model": {"factory": "model:build", "path": ["."]},
                "functions": [{"method": "main_decode", "cases": [{"name": "b2", "inputs": "model:inputs"}]}],
            }
        )
    )
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A record folder."""
    path = tmp_path / "record"
    path.mkdir()
    return path


def published(folder: Path, recipe: Path, store: Path) -> tuple[list[tuple[str, str]], Any]:
    """Publish; return part and name of each reason, and the report."""
    report = publish_drafts(StoreLayout(store), recipe, folder, timeout_s=60)
    return [(reason.part, reason.name) for reason in report.reasons], report


def test_prepare_leaves_what_a_build_here_would_ask_for(recipe: Path, folder: Path) -> None:
    """The recipe, its request on this machine, and every case."""
    prepare_record(recipe, folder)

    job, request = Job.read(folder / "job.json"), read_request(recipe)
    assert (request.document, request.request, ["b2"]) == (job.recipe, job.request, [case.name for case in job.cases])
    assert refusal(folder) is None


def test_prepare_of_a_recipe_that_cannot_be_built_leaves_the_reason(recipe: Path, folder: Path) -> None:
    """A wrong recipe, or one that this version doesn't build: the program's process reads why."""
    recipe.write_text(recipe.read_text().replace("main_decode", "no method"))

    prepare_record(recipe, folder)

    reason = refusal(folder)
    assert reason is not None
    assert ("policy", "record") == (reason.part, reason.name)
    assert not (folder / "job.json").exists()


def test_publish_of_refused_calls_only_touches_no_store(recipe: Path, folder: Path, tmp_path: Path) -> None:
    """Each reason once; the store is not even made."""
    reason = Reason("inputs", "L['x']", None, "odd", hint="none")
    for _ in range(2):
        leave_draft(folder, {"method": "main_decode", "rank": 0, "refused": reason.to_json()})

    reasons, report = published(folder, recipe, tmp_path / "store")

    assert ([("inputs", "L['x']")], (), None) == (reasons, report.entries, report.warm_set)
    assert not (tmp_path / "store").exists()


def test_publish_after_the_recipe_changed_is_refused(recipe: Path, folder: Path, tmp_path: Path) -> None:
    """What was compared with another request than today's is not published under today's."""
    prepare_record(recipe, folder)
    leave_draft(folder, WHOLE)
    recipe.write_text(recipe.read_text().replace('"b2"', '"b3"'))

    assert [("policy", "request")] == published(folder, recipe, tmp_path / "store")[0]


def test_publish_into_what_is_no_store_is_a_reason(recipe: Path, folder: Path, tmp_path: Path) -> None:
    """The store's error, with its hint."""
    prepare_record(recipe, folder)
    leave_draft(folder, WHOLE)
    (tmp_path / "store").write_text("a file")

    reasons, report = published(folder, recipe, tmp_path / "store")

    assert [("policy", "record")] == reasons
    assert str(tmp_path / "store") in str(report.reasons[0].wanted)


def test_publish_of_a_method_that_the_recipe_does_not_have_starts_no_process(
    recipe: Path, folder: Path, tmp_path: Path
) -> None:
    """Nothing of it could be proved: the call is told, and what the set lacks."""
    prepare_record(recipe, folder)
    leave_draft(folder, {**WHOLE, "method": "mtp_decode"})

    reasons, report = published(folder, recipe, tmp_path / "store")

    assert [("inputs", "mtp_decode"), ("store", "warm set")] == reasons
    assert ["main_decode [b2] rank 0"] == report.reasons[1].wanted


def test_fresh_process_has_what_the_program_set_and_no_secret(folder: Path) -> None:
    """Changed and new names of the program's own; no placement, and another order of hashes than it had."""
    leave_draft(folder, WHOLE)
    drafts = read_drafts(folder)

    assert ({"GAIN": "2"}, "1") == (record._changes(drafts), record._hash_seed(drafts))


def test_call_that_is_no_case_is_told_with_its_shapes(folder: Path) -> None:
    """Tensors by their shape, plain values by themselves."""
    leave_draft(folder, WHOLE)

    reason = record._no_case(read_drafts(folder)[0], 1)

    assert ("inputs", "main_decode", {"L['x']": [3], "L['n']": {"value": 7}}) == (
        reason.part,
        reason.name,
        reason.wanted,
    )
