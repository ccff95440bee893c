"""The options of npugraph_ex, switched off together and on again one by one.

Owns which value of an option is its off, and finding the one that makes the difference. Rank processes only.

Facts: torch_npu 2.13 npugraph_ex/configs/compiler_config.py (names and defaults), _acl_concrete_graph/acl_graph.py
(clone_input copies inputs before a replay: off is the risk).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cachectl.build.triage_reasons import finding, one_line

__all__ = ["options_off", "restore_options", "restored_names"]

# Off where nothing is optimised and nothing of the program's is shared with a replay.
_OFF: dict[str, Any] = {
    "clone_input": True,
    "frozen_parameter": False,
    "inplace_pass": False,
    "input_inplace_pass": False,
    "pattern_fusion_pass": False,
    "post_grad_custom_pre_pass": None,
    "post_grad_custom_post_pass": None,
    "remove_cat_ops": False,
    "remove_noop_ops": False,
    "reuse_graph_pool_in_same_fx": False,
    "static_kernel_compile": False,
    "super_kernel_optimize": False,
}
# They say how long to look and what to write down, not what is computed.
_KEPT = frozenset({"mode", "capture_error_mode", "force_eager", "data_dump_dir", "data_dump_stage", "dump_tensor_data"})
_CAPTURE = (
    "no option is to blame: it is capture, or what compile.setup registers; look at memory that a replay writes while "
    "the program still reads it"
)
# Options that mean nothing without another one.
_OF = {"super_kernel_optimize_options": "super_kernel_optimize", "super_kernel_debug_options": "super_kernel_optimize"}
# Other options: what is wrong is what they do to the graph.
_ADVICE = {
    "post_grad_custom_pre_pass": "the custom pass changes what the graph computes: mend it, or leave it out",
    "post_grad_custom_post_pass": "the custom pass changes what the graph computes: mend it, or leave it out",
    "pattern_fusion_pass": "a fusion pattern changes what the graph computes: look at register_replacement in "
    "compile.setup, or set pattern_fusion_pass: false",
    "frozen_parameter": "parameters are moved or replaced between calls: leave them where they are, or set "
    "frozen_parameter: false",
    # torch_npu 2.13 static_kernel.py, `_fx_func_run`.
    "static_kernel_compile": "the first call runs the step once more on the same tensors, to find its kernels: a step "
    "that adds to its state adds twice; write what doesn't depend on how often the step ran, or leave it off",
    "clone_input": "an input is written while the graph still reads it: set clone_input: true",
}


def options_off(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that switch everything off, of those that this wheel knows."""
    return {name: value for name, value in _OFF.items() if name in known and value is not None}


def restored_names(effective: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Return the options that are on, in the order in which they are restored: the recipe's own first.

    Args:
        effective: every option with the value that the recipe gives it, or its default.
        defaults: every option's default.
    """
    on = [
        name
        for name, value in effective.items()
        if name not in _KEPT and name not in _OF and value != _OFF.get(name, defaults.get(name))
    ]
    return sorted(on, key=lambda name: (effective[name] == defaults.get(name), name))


def restore_options(
    effective: Mapping[str, Any],
    defaults: Mapping[str, Any],
    given: Mapping[str, Any],
    attempt: Callable[[str, Mapping[str, Any]], tuple[str | None, float | None]],
) -> list[dict[str, Any]]:
    """Return what switching the options on one by one shows.

    Args:
        given: the recipe's options, with functions in them.
        attempt: runs the steps with some options; returns how they are wrong, None where they are right, and the
            largest difference. Its first argument says what is tried.
    """
    off = options_off(defaults)
    wrong, difference = attempt("all off", off)
    if wrong is not None:
        return [finding("capture", f"with every option off: {wrong}", _CAPTURE, difference=difference)]
    names = restored_names(effective, defaults)
    blamed, tried = [], []
    for name in names:
        wrong, difference = attempt(name, {**off, **_switched_on(name, effective, given)})
        tried.append(f"{name}: {wrong or 'equal'}")
        if wrong is not None:
            blamed.append(_blamed(name, wrong, difference, "alone"))
    # Together only: without which of them are the steps right?
    every = {key: value for name in names for key, value in _switched_on(name, effective, given).items()}
    if not blamed and attempt("all on", {**off, **every})[0] is not None:
        for name in names:
            without = {key: value for key, value in every.items() if key != name and _OF.get(key) != name}
            if attempt(f"without {name}", {**off, **without})[0] is None:
                blamed.append(_blamed(name, "right without it, wrong with all", None, "together with another one"))
    if not blamed:
        blamed.append(finding("capture", "no option makes the difference, alone or together", _CAPTURE))
    return [*blamed, finding("tried", f"options restored one by one: {'; '.join(tried)}", "")]


def _switched_on(name: str, effective: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    of = {other: given[other] for other, leader in _OF.items() if leader == name and given.get(other) is not None}
    return {name: given.get(name, effective[name]), **of}


def _blamed(name: str, wrong: str, difference: float | None, how: str) -> dict[str, Any]:
    advice = _ADVICE.get(name, f"mend what {name} does to this graph, or set it to {_OFF.get(name)!r}")
    what = one_line(f"option {name} {how} makes the difference: {wrong}")
    return finding("option", what, advice, option=name, difference=difference)
