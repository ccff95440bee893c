"""What recording refuses on the real runtime: what a graph can't be, each in words that say what to change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.zoo import BAD, Built

# A build of all of it in one fixture: minutes on a machine that others load.
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1800)]

WORDS = {
    "bad_parameter_written": ("the step writes the parameter weight", "register what changes as a buffer"),
    "bad_object": (
        "L['options'] is a types.SimpleNamespace, which an input spec can't say",
        "pass tensors, numbers, strings",
    ),
    "bad_counter": ("traced 2 times", "each step binds count anew: write it in place"),
    "bad_cache_bound_anew": ("compiled and eager differ in the second step", "each step binds kv_bound anew"),
    "bad_view_written": ("a fresh process can't run what was saved: ", "not cacheable as it stands"),
    "bad_no_graph": ("the runtime did not save the artifact: found 0 saved graphs, wanted 1", ""),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of one build of every method that can't be cached, and of one that can."""
    zoo = Built(tmp_path_factory.mktemp("bad") / "zoo", dynamic=False)
    zoo.recipe("bad.yaml", "bad", [*BAD, "submodule"])
    done = zoo.run("build", "bad.yaml", "--keep-going", "--json")
    assert 1 == done.returncode, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert [] == list((zoo.folder / "store").glob("boot/recipes/*.json"))
    return report


def test_every_bad_method_is_refused_and_the_good_one_is_built(refused: dict[str, Any]) -> None:
    """Six failures, one entry, no warm set."""
    assert set(BAD) == set(WORDS) == {failure["method"] for failure in refused["failed"]}
    assert (["submodule"], None) == ([entry["method"] for entry in refused["built"]], refused["warm_set"])


@pytest.mark.parametrize("method", WORDS)
def test_bad_method_is_refused_with_what_to_change(refused: dict[str, Any], method: str) -> None:
    """Method, case, what was found, and the way out."""
    (failure,) = [failure for failure in refused["failed"] if failure["method"] == method]

    assert failure["error"].startswith(f"{method} [one]: {WORDS[method][0]}"), failure["error"]
    assert WORDS[method][1] in failure["error"]
