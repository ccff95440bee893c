"""A small model with its recipe, as files in a folder, and what `check` says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cachectl.services.check import check

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "tiny-decoder"
MODEL = """\
import torch


class Model(torch.nn.Module):
    def main_decode(self, x: torch.Tensor):
        return x * 2


def build():
    return Model().eval()


def inputs(model, rank):
    return {"x": torch.ones(2)}
"""


def document(**changes: Any) -> dict[str, Any]:
    """Return a recipe's document, with sections merged into it."""
    recipe: dict[str, Any] = {
        "schema": "cachectl/recipe/v1",
        "name": "checked",
        "device": "simulated",
        "model": {"factory": "model:build", "path": ["."]},
        "compile": {"options": {"frozen_parameter": True}},
        "functions": [{"method": "main_decode", "cases": [{"name": "one", "inputs": "model:inputs"}]}],
        "environment": {"TASK_QUEUE_ENABLE": "1"},
    }
    for name, value in changes.items():
        recipe[name] = {**recipe.get(name, {}), **value} if isinstance(value, dict) else value
    return recipe


def written(folder: Path, recipe: dict[str, Any], model: str = MODEL, **files: str) -> Path:
    """Write a recipe with its model, one line a value, and other files; return the recipe's path."""
    (folder / "model.py").write_text(model)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "recipe.yaml").write_text(json.dumps(recipe, indent=1))
    return folder / "recipe.yaml"


def wheel(folder: Path) -> list[str]:
    """Write the files of a torch and a torch_npu that options and versions are read from; return the search path."""
    config = folder / "torch_npu" / "dynamo" / "npugraph_ex" / "configs"
    config.mkdir(parents=True)
    (config / "compiler_config.py").write_text(
        "class CompilerConfig:\n    def __init__(self):\n"
        "        self.frozen_parameter = OptionValue(False, [True, False])\n"
        "        self.capture_limit = IntRangeValue(64, 1, 1000)\n"
        "        self.post_grad_custom_pass = CallableValue(None)\n"
    )
    for name, version in (("torch", "2.5.1"), ("torch_npu", "2.5.1")):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "__init__.py").write_text("")
        (folder / name / "version.py").write_text(f"__version__ = '{version}'\ngit_version = 'abc'\n")
    return [str(folder)]


def told(recipe: Path, **options: Any) -> list[tuple[str, str, int | None]]:
    """Return rule, severity and line of all findings but the advice that each recipe gets."""
    report = check(recipe, traces=False, **options)
    return [(item.rule, item.severity, item.line) for item in report.findings if item.rule not in ("mode", "ladder")]
