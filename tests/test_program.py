"""The program's two calls on the real runtime: a model of many methods, built once and called in all sorts of ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.zoo import DYNAMIC, GOOD, Built, build

# A build of all of it in one fixture: minutes on a machine that others load.
pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The zoo with every method that can be cached in its store. Shared: change nothing in it."""
    return build(tmp_path_factory.mktemp("zoo") / "zoo", dynamic=False)


@pytest.fixture(scope="module")
def called(zoo: Built) -> dict[str, Any]:
    """What each method's calls came to in a program that started warm."""
    return zoo.program("program.py", *GOOD)


@pytest.fixture(scope="module")
def dynamic_zoo(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The methods for which symbolic sizes make a difference, in a store. Shared: change nothing in it."""
    return build(tmp_path_factory.mktemp("zoo-dynamic") / "zoo", dynamic=True)


@pytest.fixture(scope="module")
def called_dynamic(dynamic_zoo: Built) -> dict[str, Any]:
    """The same for graphs with symbolic sizes."""
    return dynamic_zoo.program("program.py", *DYNAMIC)


@pytest.mark.parametrize("method", GOOD)
def test_method_after_build_is_warm_and_right_in_every_step(called: dict[str, Any], method: str) -> None:
    """Outputs of four steps, and all that a step writes, are eager's; nothing was compiled."""
    found = called[method]

    assert ("warm", []) == (found["outcome"], found["reasons"])
    assert found["equal"], found["place"]


@pytest.mark.parametrize("method", DYNAMIC)
def test_dynamic_method_after_build_is_warm_and_right(called_dynamic: dict[str, Any], method: str) -> None:
    """The same of graphs whose sizes are symbols."""
    found = called_dynamic[method]

    assert ("warm", []) == (found["outcome"], found["reasons"])
    assert found["equal"], found["place"]


def test_start_with_more_graph_keys_than_the_limit_is_degraded_and_right(dynamic_zoo: Built) -> None:
    """64 keys are captured; with the next one the runtime runs eagerly for good, and the report says so."""
    found = dynamic_zoo.program("calls.py", "beyond_the_limit")["beyond_the_limit"]

    assert (["warm", "warm", "degraded"], "degraded") == (found["outcomes"], found["start"])
    assert found["equal"]
    assert any(reason.startswith("options: capture_limit") for reason in found["reasons"]), found["reasons"]


@pytest.fixture(scope="module")
def ways(zoo: Built) -> dict[str, Any]:
    """What programs saw that called cached methods in all ways; one process for all of them."""
    return zoo.program("calls.py", "ways_to_pass", "objects", "held", "folders", "threads", "modes")


def test_call_with_wrong_arguments_raises_what_the_method_raises(ways: dict[str, Any]) -> None:
    """Too few, too many, unknown, twice: Python's own words, and the start is none the colder for it."""
    found = ways["ways_to_pass"]

    for ours, plain in found["errors"].values():
        assert plain == ours
        assert plain.startswith("TypeError: Model.strided() ")
    assert {"outcome": "unused", "reasons": []} == found["before"]


def test_call_by_position_keyword_or_default_is_one_case(ways: dict[str, Any]) -> None:
    """However the arguments arrive it is the same case, warm and right; another value of one is cold and right."""
    found = ways["ways_to_pass"]

    assert all(found["equal"])
    assert [("warm", [])] * 3 == [(method["outcome"], method["reasons"]) for method in found["warm"]]
    assert ("cold", True) == (found["other"]["outcome"], found["other"]["value"])
    assert any(reason.startswith("inputs: L['n']") for reason in found["other"]["reasons"])


def test_first_call_from_eight_threads_is_decided_once(ways: dict[str, Any]) -> None:
    """All of them run what one of them loaded; no thread takes an undecided case for a refused one."""
    found = ways["threads"]

    assert ("warm", [], 8) == (found["outcome"], found["reasons"], found["calls"])
    assert [True] * 8 == found["right"]


def test_objects_for_one_method_decide_each_for_itself(ways: dict[str, Any]) -> None:
    """Two objects are both warm; a deep copy of the model brings its own, on its own weights."""
    found = ways["objects"]

    assert [True, True, True] == found["equal"]
    assert ["warm"] * 3 == [found[name]["outcome"] for name in ("one", "other", "twin")]


@pytest.mark.parametrize("kind", ["function", "static"])
def test_cache_compile_of_no_method_of_a_module_says_so_at_once(ways: dict[str, Any], kind: str) -> None:
    """A function, or a method of something else: refused where it is given, not in the first call."""
    assert ways["objects"][kind].startswith("ConfigError: cache_compile was given a ")


def test_held_outputs_are_as_the_plain_runtime_leaves_them(ways: dict[str, Any]) -> None:
    """Whether a later call changes an output that was kept is the runtime's matter, not ours."""
    assert ways["held"]["plain"] == ways["held"]["cachectl"]


@pytest.mark.parametrize("mode", ["grad", "no-grad", "inference-outside", "inference-all"])
def test_call_in_a_grad_or_inference_mode_is_right(ways: dict[str, Any], mode: str) -> None:
    """Values are eager's; tensors made outside the mode are warm under each."""
    found = ways["modes"][mode]

    assert found["equal"]
    # Tensors made inside inference mode are of another kind; a recipe's inputs can be made so too.
    assert "inference-all" == mode or ("warm", []) == (found["outcome"], found["reasons"])


@pytest.mark.parametrize(("mode", "word"), [("autocast", "autocast"), ("deterministic", "deterministic")])
def test_first_call_under_another_ambient_state_is_cold_with_the_reason(
    ways: dict[str, Any], mode: str, word: str
) -> None:
    """Autocast or deterministic mode around the first call: compiled for it, right, and named."""
    found = ways["modes"][mode]

    assert ("cold", True, True) == (found["outcome"], found["equal"], found["dtype"])
    assert any(word in reason for reason in found["reasons"]), found["reasons"]


def test_cold_folder_is_private_and_goes_with_the_process(zoo: Built, ways: dict[str, Any]) -> None:
    """Below the warm dir, 0700, kept when a forked child exits, gone with the process that made it."""
    found = ways["folders"]

    assert ("cold", True, True, "0o700") == (found["outcome"], found["equal"], found["kept"], found["mode"])
    assert Path(found["folder"]).is_relative_to(zoo.folder / "warm")
    assert not Path(found["folder"]).exists()
    assert [] == list((zoo.folder / "warm" / "cold").iterdir())
    assert not (zoo.folder / ".torchair_cache").exists()
