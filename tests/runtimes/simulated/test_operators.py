"""Every reference operator against a naive computation of its documented formula, in one child process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow]

_CHECKED = sorted(
    {
        name
        for program in ("operators.py", "attention.py")
        for names in re.findall(
            r"^@check\((.*)\)$", (Path(__file__).parent / "programs" / program).read_text(), re.MULTILINE
        )
        for name in re.findall(r'"([^"]+)"', names)
    }
)

# Helpers that only make room for another operator's result, and overloads that share a checked function.
_CHECKED_THROUGH_OTHERS = {
    "_npu_fused_infer_attention_score_get_max_workspace",
    "_npu_fused_infer_attention_score_v2_get_max_workspace",
    "_npu_fused_infer_attention_score_infer_output",
    "_npu_fused_infer_attention_score_v2_infer_output",
    "_npu_format_cast.aclnn",
    "npu_format_cast.Tensor",
}


@pytest.fixture(scope="module")
def results(run_simulated: Callable[..., Any]) -> dict[str, str | None]:
    """What programs/operators.py found for each operator: nothing, or a traceback."""
    found: dict[str, str | None] = run_simulated("operators.py").value
    return found


@pytest.mark.parametrize("operator", _CHECKED)
def test_reference_operator_equals_its_formula(results: dict[str, str | None], operator: str) -> None:
    """Values equal the naive ones; shapes and types equal those of torch_npu's meta kernel."""
    assert results[operator] is None, results[operator]


def test_supported_table_holds_no_unchecked_operator(run_simulated: Callable[..., Any]) -> None:
    """An operator can't be added to the references without a check."""
    source = """
import json, sys, torch_npu
print(json.dumps(sorted(sys.modules["_cachectl_simulated_process.operators"].SUPPORTED)))
"""
    assert set() == set(run_simulated(source).value) - set(_CHECKED) - _CHECKED_THROUGH_OTHERS
