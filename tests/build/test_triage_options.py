"""Options off and on again, one by one: which one is blamed, and for what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cachectl.build.triage_options import options_off, restore_options, restored_names

# As torch_npu 2.13 has them, in part.
DEFAULTS = {
    "force_eager": False,
    "clone_input": True,
    "frozen_parameter": False,
    "inplace_pass": True,
    "pattern_fusion_pass": True,
    "remove_noop_ops": True,
    "post_grad_custom_pre_pass": None,
    "super_kernel_optimize": False,
    "super_kernel_optimize_options": None,
    "capture_limit": "64",
    "mode": "npugraph_ex",
}


class Graph:
    """A graph that some sets of options make wrong; remembers what was tried."""

    def __init__(self, *wrong: Mapping[str, Any]) -> None:
        self.wrong = wrong
        self.tried: list[str] = []

    def attempt(self, what: str, options: Mapping[str, Any]) -> tuple[str | None, float | None]:
        self.tried.append(what)
        bad = any(all(options.get(name) == value for name, value in case.items()) for case in self.wrong)
        return ("step 1: output: largest difference 2", 2.0) if bad else (None, None)

    def restore(self, **given: Any) -> list[dict[str, Any]]:
        return restore_options({**DEFAULTS, **given}, DEFAULTS, given, self.attempt)


def test_options_off_are_only_those_that_the_wheel_knows() -> None:
    """An older wheel refuses a name it does not have."""
    assert {"clone_input": True, "inplace_pass": False} == options_off({"inplace_pass": True, "clone_input": True})


def test_restored_names_are_the_recipes_own_first() -> None:
    """What the recipe set is likelier at fault than a default; what is off is not tried, nor what computes nothing."""
    effective = {**DEFAULTS, "frozen_parameter": True, "clone_input": False, "force_eager": True}

    assert [
        "clone_input",
        "frozen_parameter",
        "inplace_pass",
        "pattern_fusion_pass",
        "remove_noop_ops",
    ] == restored_names(effective, DEFAULTS)


def test_restore_options_names_the_option_with_its_numbers() -> None:
    """A default's fault, with everything else right."""
    graph = Graph({"inplace_pass": True})

    blamed, tried = graph.restore(frozen_parameter=True)

    assert ("option", "inplace_pass", 2.0) == (blamed["kind"], blamed["option"], blamed["difference"])
    assert "alone makes the difference" in blamed["what"]
    assert "frozen_parameter: equal; inplace_pass: step 1" in tried["what"]
    assert ["all off", "frozen_parameter", "inplace_pass", "pattern_fusion_pass", "remove_noop_ops"] == graph.tried


def test_restore_options_with_all_off_wrong_blames_none() -> None:
    """Then it is capture; nothing else is tried."""
    graph = Graph({})

    (found,) = graph.restore()

    assert ("capture", ["all off"]) == (found["kind"], graph.tried)
    assert "no option is to blame" in found["next"]


def test_restore_options_finds_two_that_are_wrong_together() -> None:
    """None alone makes the difference; without either of the two it is gone."""
    graph = Graph({"inplace_pass": True, "pattern_fusion_pass": True})

    found = graph.restore()

    assert ["inplace_pass", "pattern_fusion_pass"] == [item["option"] for item in found if item["kind"] == "option"]
    assert all("together" in item["what"] for item in found if item["kind"] == "option")


def test_restore_options_that_finds_none_says_so() -> None:
    """As where the runtime is right in this process and was wrong in the one before."""
    found = Graph().restore()

    assert ["capture", "tried"] == [item["kind"] for item in found]
    assert "alone or together" in found[0]["what"]


def test_restore_options_gives_a_function_as_the_recipe_did() -> None:
    """A custom pass is switched on by the function, not by its name."""

    def own_pass(graph: object) -> None:
        """Do nothing."""

    graph = Graph({"post_grad_custom_pre_pass": own_pass})

    found = graph.restore(post_grad_custom_pre_pass=own_pass)

    assert ["post_grad_custom_pre_pass"] == [item["option"] for item in found if item["kind"] == "option"]
    assert "the custom pass" in found[0]["next"]


def test_restore_options_brings_an_options_own_settings_with_it() -> None:
    """Super kernels without their settings would be others."""
    settings = {"dcci_disable_on_kernel": [".*"]}
    graph = Graph({"super_kernel_optimize": True, "super_kernel_optimize_options": settings})

    found = graph.restore(super_kernel_optimize=True, super_kernel_optimize_options=settings)

    assert ["super_kernel_optimize"] == [item["option"] for item in found if item["kind"] == "option"]
