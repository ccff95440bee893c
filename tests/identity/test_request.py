"""The request: which recipe fields are identity, and how two requests differ in words."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from cachectl.identity.request import (
    REQUEST_PARTS,
    compare_requests,
    differences,
    entry_model_part,
    recipe_request,
    source_roots,
)
from cachectl.schemas.canonical import canonical_bytes, digest_of
from tests.stores import write_site
from tests.strategies import CANONICAL_VALUES, JSON_VALUES

RECIPE: dict[str, Any] = {
    "schema": "cachectl/recipe/v1",
    "name": "tiny",
    "device": "simulated",
    "model": {
        "factory": "tiny.model:build",
        "config": {"layers": 4, "fill": float("-inf")},
        "path": ["."],
        "sources": ["*.json"],
        "revision": None,
    },
    "compile": {
        "mode": "npugraph_ex",
        "dynamic": False,
        "options": {"frozen_parameter": True},
        "config": {},
        "dynamo": {"specialize_int": True},
        "setup": None,
    },
    "functions": [
        {"method": "decode", "cases": [{"name": "b4", "inputs": "tiny.inputs:decode", "args": {"batch": 4}}]}
    ],
    "topology": {"world_size": 1},
    "environment": {"TASK_QUEUE_ENABLE": "1"},
    "gates": {"rtol": 1e-3, "atol": 1e-3},
}


@pytest.fixture
def request_of(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return the request of the recipe, changed by a function, in some environment."""
    write_site(tmp_path / "site")

    def make(change: Callable[[dict[str, Any]], object] = lambda recipe: None, **environ: str) -> dict[str, Any]:
        recipe = copy.deepcopy(RECIPE)
        change(recipe)
        request, missing = recipe_request(recipe, environ, search_path=[str(tmp_path / "site")])
        assert [] == missing
        return request

    return make


RequestOf = Callable[..., dict[str, Any]]


def test_recipe_request_has_all_parts_and_a_canonical_form(request_of: RequestOf) -> None:
    """Nothing but the version and the parts, and all of it can be digested."""
    request = request_of()

    assert {"key_version", *REQUEST_PARTS} == request.keys()
    assert canonical_bytes(request)


SEMANTIC: dict[str, Callable[[dict[str, Any]], object]] = {
    "model.factory": lambda recipe: recipe["model"].update(factory="tiny.model:other"),
    "model.config.layers": lambda recipe: recipe["model"]["config"].update(layers=5),
    "model.config.new": lambda recipe: recipe["model"]["config"].update(new=None),
    "model.config.fill": lambda recipe: recipe["model"]["config"].update(fill=float("inf")),
    "model.revision": lambda recipe: recipe["model"].update(revision="main"),
    "model.sources": lambda recipe: recipe["model"].update(sources=["*.txt"]),
    "model.unheard": lambda recipe: recipe["model"].update(unheard=1),
    "model.functions": lambda recipe: recipe["functions"][0].update(method="other"),
    "model.args": lambda recipe: recipe["functions"][0]["cases"][0]["args"].update(batch=2),
    "model.framework": lambda recipe: recipe.update(framework={"kind": "cann-recipes"}),
    "options.mode": lambda recipe: recipe["compile"].update(mode="ge_graph"),
    "options.dynamic": lambda recipe: recipe["compile"].update(dynamic=True),
    "options.options": lambda recipe: recipe["compile"]["options"].update(inplace_pass=False),
    "options.dynamo": lambda recipe: recipe["compile"]["dynamo"].update(specialize_int=False),
    "options.setup": lambda recipe: recipe["compile"].update(setup="a:b"),
    "options.unheard": lambda recipe: recipe["compile"].update(unheard=1),
    "topology": lambda recipe: recipe["topology"].update(tensor_parallel=2),
    "environment": lambda recipe: recipe["environment"].update(TASK_QUEUE_ENABLE="2"),
    "environment.new": lambda recipe: recipe["environment"].update(NEW=""),
}


@pytest.mark.parametrize("name", SEMANTIC)
def test_recipe_request_each_semantic_field_counts(request_of: RequestOf, name: str) -> None:
    """One changed field is one reason, in its part; a field that nobody knows counts, too (field report W5)."""
    before, after = request_of(), request_of(SEMANTIC[name])

    (reason,) = compare_requests(before, after)

    assert name.partition(".")[0] == reason.part
    assert "cachectl build" in reason.hint
    assert digest_of(before[reason.part]) != digest_of(after[reason.part])


NOISE: dict[str, Callable[[dict[str, Any]], object]] = {
    "name": lambda recipe: recipe.update(name="other"),
    "gates": lambda recipe: recipe["gates"].update(rtol=1.0),
    "path": lambda recipe: recipe["model"].update(path=["src", "."]),
    "order": lambda recipe: recipe.update(reversed(list(recipe.items()))),
    "defaults": lambda recipe: recipe["topology"].update(data_parallel=1),
}


@pytest.mark.parametrize("name", NOISE)
def test_recipe_request_labels_and_places_never_count(request_of: RequestOf, name: str) -> None:
    """What can't reach the graph changes no part (field report W18)."""
    assert [] == compare_requests(request_of(), request_of(NOISE[name]))


@pytest.mark.parametrize(
    ("environ", "part"),
    [({"CACHECTL_SIM_SOC": "310P3"}, "device"), ({"CACHECTL_SIM_CANN": "8.2"}, "toolchain")],
)
def test_recipe_request_machine_counts(request_of: RequestOf, environ: dict[str, str], part: str) -> None:
    """Device and toolchain come from the machine."""
    assert {part} == {reason.part for reason in compare_requests(request_of(), request_of(**environ))}


def test_recipe_request_placement_never_counts(request_of: RequestOf) -> None:
    """Home, pod and ports are no part of a request (field reports S1, S3, S5)."""
    assert request_of() == request_of(HOME="/x", POD_IP="10.0.0.1", MASTER_PORT="1", HOSTNAME="y", CUDA="z")


def test_recipe_request_incomplete_says_so(tmp_path: Path) -> None:
    """What can't be known is a reason and None, never left out."""
    request, missing = recipe_request({**RECIPE, "device": "npu"}, {}, search_path=[str(tmp_path)])

    assert {"torch", "torch_npu", "cann", "soc"} == {reason.name for reason in missing}
    assert {"absent"} == {reason.kind for reason in missing}
    assert {"simulated": False, "soc": None} == request["device"]


def test_compare_requests_stored_as_json_is_equal(request_of: RequestOf) -> None:
    """A request that went through a document compares equal with itself, infinities included."""
    request = request_of()

    assert [] == compare_requests(json.loads(canonical_bytes(request)), request)


def test_compare_requests_other_key_version_is_policy(request_of: RequestOf) -> None:
    """Keys of another version are not compared part by part only."""
    (reason,) = compare_requests({**request_of(), "key_version": 0}, request_of())

    assert ("policy", "key_version", "policy") == (reason.part, reason.name, reason.kind)


@pytest.mark.parametrize("part", REQUEST_PARTS)
def test_compare_requests_missing_part_differs(request_of: RequestOf, part: str) -> None:
    """A record without a part fits nothing."""
    request = request_of()
    stored = {name: value for name, value in request.items() if name != part}

    assert {part} == {reason.part for reason in compare_requests(stored, request)}


def test_entry_model_part_case_name_is_a_label() -> None:
    """Renaming a case keeps the part; its inputs and arguments, the method and the model don't."""
    case = RECIPE["functions"][0]["cases"][0]
    part = entry_model_part(RECIPE, "decode", case)

    assert part == entry_model_part(RECIPE, "decode", {**case, "name": "renamed"})
    others = [
        entry_model_part(RECIPE, "prefill", case),
        entry_model_part(RECIPE, "decode", {**case, "args": {"batch": 2}}),
        entry_model_part(RECIPE, "decode", {**case, "inputs": "tiny.inputs:other"}),
        entry_model_part({**RECIPE, "model": {**RECIPE["model"], "config": {}}}, "decode", case),
    ]
    assert 5 == len({digest_of(item) for item in [part, *others]})
    assert "path" not in part


def test_source_roots_are_absolute_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each path of the recipe is a root by its number, relative to the recipe's folder, not to the working one."""
    monkeypatch.chdir("/")

    assert {
        "path:0": tmp_path,
        "path:1": tmp_path.parent / "lib",
        "path:2": Path("/abs"),
        "recipe": tmp_path,
    } == source_roots(tmp_path, [".", "../lib", "/abs"])


@given(JSON_VALUES)
def test_differences_of_equal_values_none(value: Any) -> None:
    """A value does not differ from its copy, nor from what a JSON file gives back of it."""
    assert [] == list(differences(value, copy.deepcopy(value)))
    assert [] == list(differences(json.loads(canonical_bytes(value)), value))


@given(CANONICAL_VALUES, CANONICAL_VALUES)
def test_differences_exactly_where_the_canonical_bytes_differ(left: Any, right: Any) -> None:
    """No difference in the key without one in words, and none in words without one in the key."""
    assert (canonical_bytes(left) != canonical_bytes(right)) == bool(list(differences(left, right)))


@pytest.mark.parametrize(
    ("stored", "wanted", "found"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, [("a.b", 1, 2)]),
        ({"a": [1, 2]}, {"a": [1, 3]}, [("a[1]", 2, 3)]),
        ({"a": [1]}, {"a": [1, 2]}, [("a", [1], [1, 2])]),
        ({}, {"a": None}, [("a", None, None)]),
        ({"a": 1}, {}, [("a", 1, None)]),
        (1, True, [("", 1, True)]),
        (1, 1.0, [("", 1, 1.0)]),
        ("1", 1, [("", "1", 1)]),
        ({"a": {}}, {"a": []}, [("a", {}, [])]),
    ],
)
def test_differences_name_the_place(stored: Any, wanted: Any, found: list[tuple[str, Any, Any]]) -> None:
    """Types count, and absence is told from None by there being a difference."""
    assert found == list(differences(stored, wanted))


def test_differences_of_what_json_cannot_say_by_equality() -> None:
    """A running process has options that are functions: they equal themselves and nothing stored."""
    assert [] == list(differences({"pass": len}, {"pass": len}))
    assert [("pass", None, len)] == list(differences({"pass": None}, {"pass": len}))
