"""Compile calls of the programs around a model, one form each."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachectl.services.check import check
from tests.services.checked import document, told, written

PROGRAMS = {
    "default backend": ("torch.compile(model.main_decode, fullgraph=True)", ("backend", "error")),
    "inductor": ('torch.compile(model, backend="inductor", fullgraph=True)', ("backend", "error")),
    "aot_eager": ('torch.compile(model, backend="aot_eager", fullgraph=True)', ("backend", "error")),
    "cuda graphs": ('torch.compile(model, backend=b, mode="reduce-overhead", fullgraph=True)', ("backend", "error")),
    "no fullgraph": (
        'torch.compile(model.main_decode, backend="npugraph_ex", dynamic=False)',
        ("fullgraph", "warning"),
    ),
    "fullgraph false": ('torch.compile(model, backend="npugraph_ex", fullgraph=False)', ("fullgraph", "warning")),
    "function": ('torch.compile(step, backend="npugraph_ex", fullgraph=True)', ("not-a-method", "warning")),
    "function cached": ("torch.npu.npugraph_ex.inference.cache_compile(step, cache_dir=d)", ("not-a-method", "error")),
    "lambda": ("torchair.inference.cache_compile(lambda x: x)", ("not-a-method", "error")),
    "loop": (
        "[cache_compile(model.main_decode, dynamic=False, cache_dir=d) for d in folders]",
        ("several-traces", "warning"),
    ),
    "dynamic left out": ("torchair.inference.cache_compile(model.main_decode, cache_dir=d)", ("dynamic", "warning")),
    "dynamic": ("torchair.inference.cache_compile(model.main_decode, dynamic=True)", ("dynamic", "warning")),
    "dynamic left to torch": (
        'torch.compile(model.main_decode, backend="npugraph_ex", fullgraph=True)',
        ("dynamic", "advice"),
    ),
    "dynamic of a variable": ("torchair.inference.cache_compile(model.main_decode, dynamic=b)", None),
    "of another method": ("torchair.inference.cache_compile(model.prefill_step, cache_dir=d)", None),
    "good": ('torch.compile(model.main_decode, backend="npugraph_ex", fullgraph=True, dynamic=False)', None),
    "good of ge": ("torch.compile(model.main_decode, backend=npu_backend, fullgraph=True, dynamic=False)", None),
    "options spread": ("torch.compile(model.main_decode, **options)", None),
    "good cached": (
        "torch.npu.npugraph_ex.inference.cache_compile(model.main_decode, cache_dir=d, dynamic=False)",
        None,
    ),
    "loop over models": ("[cache_compile(one.main_decode, cache_dir=d, dynamic=False) for one in models]", None),
    "re.compile": ("re.compile('x')", None),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_compile_call_of_a_program_is_held_against_the_rules(tmp_path: Path, name: str) -> None:
    """A call that an NPU can't run, or whose method can't be cached, is found at its line."""
    call, expected = PROGRAMS[name]
    text = "import re\n\nimport torch\n\n\ndef step(x):\n    return x\n\n\n"
    text += f"def main(model, models, folders, d, b):\n    return {call}\n"
    recipe = written(tmp_path, document(), serve=text)

    report = check(recipe, traces=False)

    found = [(item.rule, item.severity, item.path, item.line) for item in report.findings if item.path == "serve.py"]
    assert ([(*expected, "serve.py", 11)] if expected else []) == found


def test_method_compiled_twice_is_found_and_branches_are_not(tmp_path: Path) -> None:
    """Two calls of one run are two traces; one in each branch is one."""
    call = 'torch.compile(model.main_decode, backend="npugraph_ex", fullgraph=True)'
    twice = f"import torch\n\n\ndef main(model):\n    a = {call}\n    b = {call}\n    return a, b\n"
    apart = f"import torch\n\n\ndef main(model, flag):\n    if flag:\n        a = {call}\n"
    apart += f"    else:\n        a = {call}\n    return a\n"
    recipe = written(tmp_path, document(), twice=twice, apart=apart)

    report = check(recipe, traces=False)

    found = [(item.rule, item.path, item.line) for item in report.findings if item.severity == "warning"]
    assert [("several-traces", "twice.py", 6)] == found


def test_file_that_is_no_python_is_no_program(tmp_path: Path) -> None:
    """Only what the recipe's names lead to has to be parsed."""
    recipe = written(tmp_path, document(), notes="compile this (")

    assert [] == told(recipe)
