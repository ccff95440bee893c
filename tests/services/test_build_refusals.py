"""What a gate refused: told again while nothing has changed, built again when anything has; no other failure is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cachectl.store.refusals import REFUSAL_KEPT_S
from tests.services.standin import RANK, TORCH, TORCHRUN, Site, finish
from tests.stores import write_site


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    """An environment in which ranks leave their marks, and builds their workspaces, out of a build's sight."""
    (tmp_path / "marks").mkdir()
    return {"MARKS": str(tmp_path / "marks"), "TMPDIR": str(tmp_path / "marks")}


def launches(elsewhere: dict[str, str]) -> int:
    """Return how many cases ranks have begun."""
    path = Path(elsewhere["MARKS"]) / "ranks"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _environment(site: Site) -> dict[str, str]:
    return {"MODEL_FLAG": "1"}


def _touch(site: Site) -> dict[str, str]:
    (site.folder / "weights.json").write_text("{}")
    return {}


def _toolchain(site: Site) -> dict[str, str]:
    write_site(site.folder / "site", torch="2.13.1+cpu")
    (site.folder / "site" / "torch" / "__init__.py").write_text(TORCH.format(rank=RANK, torchrun=TORCHRUN))
    return {}


def _age(site: Site) -> dict[str, str]:
    (path,) = (site.layout.root / "boot" / "refused").iterdir()
    document = json.loads(path.read_text())
    document["refused"][0]["at"] -= REFUSAL_KEPT_S
    path.chmod(0o644)
    path.write_text(json.dumps(document))
    return {}


def test_build_of_what_a_gate_refused_is_told_again_until_something_has_changed(
    site: Site, elsewhere: dict[str, str]
) -> None:
    """Field report D3: a refusal costs no second compile, and a cause that is mended is no refusal any more."""
    recipe = site.recipe({"b4": "gate-record"})
    environ = dict(elsewhere)

    def try_again(*options: str) -> tuple[bool, dict[str, Any]]:
        before = launches(elsewhere)
        done = finish(site.start("build", "--json", *options, recipe, environ=environ))
        (failure,) = done.report["failed"]
        assert (1, True) == (done.returncode, "does not work" in failure["error"])
        return launches(elsewhere) > before, failure

    tried, first = try_again()
    assert tried
    for noise in ({}, {"OLDPWD": "/elsewhere"}):
        environ |= noise
        tried, failure = try_again()
        assert (False, first["log"]) == (tried, failure["log"])
        assert re.match(r"not built again: it was refused (just now|\d+ min ago), ", failure["error"])
        assert failure["error"].endswith("change code, environment or toolchain, or pass --force")
    assert try_again("--force")[0]
    for change in (_environment, _touch, _toolchain, _age):
        environ |= change(site)
        assert [True, False] == [try_again()[0], try_again()[0]], change


@pytest.mark.parametrize(
    ("does", "words"),
    [("fail-record", ""), ("refuse-record", ""), ("gate-record", ": No space left on device")],
)
def test_build_of_what_failed_in_another_way_is_tried_again(
    site: Site, elsewhere: dict[str, str], does: str, words: str
) -> None:
    """Out of disk, an error of the recipe's own code: the next time it may go well, nothing else changed."""
    recipe = site.recipe({"b4": does})

    for _ in range(2):
        finish(site.start("build", "--json", recipe, environ={**elsewhere, "WORDS": words}))

    assert 2 == launches(elsewhere)


def test_build_that_keeps_going_past_a_refusal_builds_the_rest(site: Site, elsewhere: dict[str, str]) -> None:
    """The refused case is told, the others are reused; once its cause is mended it is built, and forgotten."""
    recipe = site.recipe({"b2": "build", "b4": "gate-reload"})
    finish(site.start("build", "--json", "--keep-going", recipe, environ=elsewhere))
    before = launches(elsewhere)

    held = finish(site.start("build", "--json", "--keep-going", recipe, environ=elsewhere))
    plan = site.run("plan", "--json", str(recipe)).report
    (Path(elsewhere["MARKS"]) / "mended").touch()
    (site.folder / "config.json").write_text("{}")
    mended = finish(site.start("build", "--json", "--keep-going", recipe, environ=elsewhere))

    assert (1, ["b4"], 1) == (
        held.returncode,
        [failure["case"] for failure in held.report["failed"]],
        len(held.report["reused"]),
    )
    assert {"b2": "ready", "b4": "missing"} == {entry["case"]: entry["state"] for entry in plan["entries"]}
    assert (0, before + 2) == (mended.returncode, launches(elsewhere))
    assert [] == json.loads(next((site.layout.root / "boot" / "refused").iterdir()).read_text())["refused"]
