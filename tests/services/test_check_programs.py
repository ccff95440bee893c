"""Compile calls of the programs around a model, one form each."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachectl.services.check import check
from tests.services.checked import document, told, wheel, written

PROGRAMS = {
    "default backend": ("torch.compile(model.main_decode, fullgraph=True)", ("backend", "error")),
    "inductor": ('torch.compile(model, backend="inductor", fullgraph=True)', ("backend", "error")),
    "aot_eager": ('torch.compile(model, backend="aot_eager", fullgraph=True)', ("backend", "error")),
    "cuda graphs": ('torch.compile(model, backend=b, mode="reduce-overhead", fullgraph=True)', ("backend", "error")),
    "no fullgraph": (
        'torch.compile(model.main_decode, backend="npugraph_ex", dynamic=False)',
        ("fullgraph", "warning"),
    ),
    "fullgraph false": (
        'torch.compile(model.main_decode, backend="npugraph_ex", fullgraph=False, dynamic=False)',
        ("fullgraph", "warning"),
    ),
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
    "of another method": ("torchair.inference.cache_compile(model.other_step, cache_dir=d)", None),
    "prefill": ("torchair.inference.cache_compile(model.prefill, cache_dir=d)", ("compiled-prefill", "warning")),
    "decode after prefill": ("torchair.inference.cache_compile(model.prefill_then_decode, cache_dir=d)", None),
    "whole model": (
        'torch.compile(self.main_model, backend="npugraph_ex", fullgraph=True, dynamic=False)',
        ("not-a-method", "warning"),
    ),
    "whole model cached": (
        "torch.npu.npugraph_ex.inference.cache_compile(model, dynamic=False)",
        ("not-a-method", "error"),
    ),
    "whole model in place": (
        'model.compile(backend="npugraph_ex", fullgraph=True, dynamic=False)',
        ("not-a-method", "warning"),
    ),
    "method handed on": ('torch.compile(model_forward, backend="npugraph_ex", fullgraph=True)', None),
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
    text = "import re\n\nimport torch, torch_npu\n\n\ndef step(x):\n    return x\n\n\n"
    text += f"def main(model, models, folders, d, b):\n    return {call}\n"
    recipe = written(tmp_path, document(), serve=text)

    report = check(recipe, traces=False, search_path=[])

    found = [(item.rule, item.severity, item.path, item.line) for item in report.findings if item.path == "serve.py"]
    assert ([(*expected, "serve.py", 11)] if expected else []) == found


def test_method_compiled_twice_is_found_and_branches_are_not(tmp_path: Path) -> None:
    """Two calls of one run are two traces; one in each branch is one."""
    call = 'torch.compile(model.main_decode, backend="npugraph_ex", fullgraph=True)'
    twice = f"import torch\n\n\ndef main(model):\n    a = {call}\n    b = {call}\n    return a, b\n"
    apart = f"import torch\n\n\ndef main(model, flag):\n    if flag:\n        a = {call}\n"
    apart += f"    else:\n        a = {call}\n    return a\n"
    recipe = written(tmp_path, document(), twice=twice, apart=apart)

    report = check(recipe, traces=False, search_path=[])

    found = [(item.rule, item.path, item.line) for item in report.findings if item.severity == "warning"]
    assert [("several-traces", "twice.py", 6)] == found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ('{"frozen_parameter": True}', []),
        ('{"frozen_parameter": True, "capture_limit": 64, "use_graph_pool": None}', []),
        ('{"frozen_parameter": flag}', []),
        ("options", []),
        ('{"frozen_parameter": False}', [("option-value", "warning", 5)]),
        ('{"frozen_parameter": True, "capture_limit": 8}', [("option-value", "warning", 5)]),
        ('{"frozen_paramter": True}', [("unknown-option", "error", 5)]),
    ],
)
def test_options_of_a_program_are_held_against_wheel_and_recipe(
    tmp_path: Path, options: str, expected: list[tuple[str, str, int]]
) -> None:
    """A name that the wheel lacks, or another value than the recipe's; what is not written out is nobody's to judge."""
    text = "import torch_npu\n\n\ndef main(cache_compile, model, options, flag):\n"
    text += f"    return cache_compile(model.main_decode, dynamic=False, options={options})\n"
    recipe = written(tmp_path, document(), serve=text)

    report = check(recipe, traces=False, search_path=wheel(tmp_path / "site"))

    found = [(item.rule, item.severity, item.line) for item in report.findings if item.path == "serve.py"]
    assert expected == found


def test_program_that_imports_no_torch_npu_is_told_of_it(tmp_path: Path) -> None:
    """torch loads the backend by itself, as long as nobody switches that off; one import anywhere settles it."""
    call = 'torch.compile(model.main_decode, backend="npugraph_ex", fullgraph=True, dynamic=False)'
    text = f"import torch\n\n\ndef main(model):\n    return {call}\n"
    recipe = written(tmp_path, document(), serve=text)

    found = [
        (item.rule, item.severity, item.path, item.line)
        for item in check(recipe, traces=False, search_path=[]).findings
    ]
    written(tmp_path, document(), serve=text, start="import torch_npu\n")

    assert ("backend", "advice", "serve.py", 5) in found
    assert [] == told(recipe, search_path=[])


def test_file_that_is_no_python_is_no_program(tmp_path: Path) -> None:
    """Only what the recipe's names lead to has to be parsed."""
    recipe = written(tmp_path, document(), notes="compile this (")

    assert [] == told(recipe)
