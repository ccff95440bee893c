"""The rules that a recipe and this machine's wheels break: options, environment, versions, mode; and what to do first.

Owns checks that need no model. Options and defaults are read from the wheel's text, as for a request.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cachectl.errors import ConfigError
from cachectl.identity.options import HANDLES, WheelOption, options_part, wheel_options
from cachectl.identity.toolchain import package_folder
from cachectl.runtimes import simulated
from cachectl.schemas.check import Finding, rule_finding
from cachectl.schemas.recipe_yaml import RecipeYaml

__all__ = ["advice", "check_recipe", "compiles_prefill", "near_option", "reference_operators"]

_OLDEST_TORCH = (2, 6)
_MODE = {
    "npugraph_ex": "npugraph_ex is experimental, and by its vendor's word not for commercial use; GE is mature",
    "ge_graph": "GE is the mature mode; npugraph_ex stays nearer to eager, and is experimental",
}
_LADDER = (
    "1. eager runs, and its function and accuracy are right",
    "2. graph mode without a break and without a recompile: TORCH_LOGS=graph_breaks,recompiles",
    "3. graph and eager agree over one prefill and several decode steps",
    "4. then the cache: shapes, guards and groups of ranks are settled, so it holds",
    "5. then static kernels, streams, super kernels, one after another",
)


def check_recipe(recipe: Mapping[str, Any], path: Path, shown: str, search_path: list[str] | None) -> Iterator[Finding]:
    """Yield what is wrong with a recipe's compile section and environment, and with this machine's torch.

    Args:
        recipe: its document.
        path: its file, for lines.
        shown: how findings name the file.
        search_path: where torch and torch_npu are looked for; None for sys.path.
    """
    lines = _Lines(path)
    section = recipe["compile"]
    npu_folder, torch_folder = package_folder("torch_npu", search_path), package_folder("torch", search_path)

    def found(rule: str, severity: Any, what: str, *place: str | int, rewrite: str | None = None) -> Finding:
        return rule_finding(rule, severity, what, path=shown, line=lines.of(*place), rewrite=rewrite)

    device = (recipe.get("model") or {}).get("config", {}).get("device")
    if recipe["device"] == "npu" and isinstance(device, str) and not device.startswith("npu"):
        what = f"model.config says device {device}, and the recipe npu"
        yield found("not-on-npu", "error", what, "model", "config", "device", rewrite="model: {config: {device: npu}}")
    for index, function in enumerate(recipe["functions"]):
        if compiles_prefill(function["method"]):
            what = f"{function['method']} is a prefill, and is compiled"
            yield found("compiled-prefill", "warning", what, "functions", index, "method")
    if section["mode"] == "npugraph_ex":
        yield from _options(section, wheel_options(npu_folder), found)
        yield from _task_queue(recipe, found)
        version = _version_of(torch_folder)
        if version is not None and version < _OLDEST_TORCH:
            yield rule_finding(
                "torch-version", "error", f"torch {version[0]}.{version[1]} is installed, npugraph_ex needs 2.6"
            )
    elif section["options"]:
        what = f"compile.options are npugraph_ex's: {', '.join(section['options'])}"
        yield found("option-value", "error", what, "compile", "options", rewrite="write compile.config for ge_graph")
    if not section["dynamo"]:
        return
    try:
        options_part({**section, "options": {}}, npu_folder=npu_folder, torch_folder=torch_folder)
    except ConfigError as error:
        yield found("unknown-option", "error", error.message, "compile", "dynamo", rewrite=error.hint)


def compiles_prefill(method: str) -> bool:
    """Say whether a method's name is that of a prefill, as the guides call it."""
    words = set(method.rpartition(".")[2].lower().split("_"))
    return "prefill" in words and not words & {"decode", "after"}


def _options(section: Mapping[str, Any], wheel: Mapping[str, WheelOption] | None, found: Any) -> Iterator[Finding]:
    options = section["options"]
    for name, value in options.items():
        place = ("compile", "options", name)
        if name in HANDLES:
            if value is None:
                continue  # The default, written out as the guides do.
            what = f"{name} is {HANDLES[name]}, which no artifact can hold"
            yield found("option-value", "error", what, *place, rewrite="leave it out")
        elif wheel is not None and name not in wheel:
            what, hint = f"this torch_npu has no option {name}", near_option(name, wheel)
            yield found("unknown-option", "error", what, *place, rewrite=hint)
        elif wheel is not None and (wrong := _wrong_value(wheel[name], value)) is not None:
            yield found("option-value", "error", f"{name}: {value!r} is no value of it", *place, rewrite=wrong)
    if options.get("force_eager") is True:
        what = "force_eager runs operator by operator: nothing is captured"
        yield found("option-value", "warning", what, "compile", "options", "force_eager", rewrite="leave it out")
    if options.get("clone_input") is False:
        what = "clone_input is off: later calls are copied into the first call's tensors"
        rewrite = "leave it on, unless the program gives those tensors up after its first call"
        yield found("option-value", "advice", what, "compile", "options", "clone_input", rewrite=rewrite)
    if options.get("frozen_parameter") is not True and (wheel is None or "frozen_parameter" in wheel):
        what = "frozen_parameter is off: parameters' addresses are looked at in every replay"
        rewrite = "compile: {options: {frozen_parameter: true}}, where weights stay where they are"
        yield found("forgotten-option", "advice", what, "compile", "options", rewrite=rewrite)


def near_option(name: str, wheel: Mapping[str, WheelOption]) -> str:
    """Return which option a name that the wheel lacks may mean."""
    near = difflib.get_close_matches(name, wheel, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"it has: {', '.join(sorted(wheel))}"


def _wrong_value(option: WheelOption, value: Any) -> str | None:
    """Return what an option takes, where a value is none of it."""
    if option.choices is not None:
        taken = any(value == choice and type(value) is type(choice) for choice in option.choices)
        return None if taken else f"it takes: {', '.join(repr(choice) for choice in option.choices)}"
    if option.is_code:
        return None if value is None or (isinstance(value, str) and ":" in value) else 'write "pkg.mod:fn"'
    usual = option.default
    if usual is None or value is None:
        return None
    if isinstance(usual, bool) is not isinstance(value, bool):
        return f"it takes a {type(usual).__name__}, as {usual!r}"
    number = isinstance(usual, (int, float)) and isinstance(value, (int, float))
    return None if number or isinstance(value, type(usual)) else f"it takes a {type(usual).__name__}, as {usual!r}"


def _task_queue(recipe: Mapping[str, Any], found: Any) -> Iterator[Finding]:
    value = recipe["environment"].get("TASK_QUEUE_ENABLE")
    rewrite = 'environment: {TASK_QUEUE_ENABLE: "1"}'
    if value is None:
        what = "TASK_QUEUE_ENABLE is not declared; npugraph_ex takes 0 or 1"
        yield found("forgotten-option", "advice", what, "environment", rewrite=rewrite)
    elif value not in ("0", "1"):
        what = f"TASK_QUEUE_ENABLE is {value}; npugraph_ex takes 0 or 1"
        yield found("option-value", "error", what, "environment", "TASK_QUEUE_ENABLE", rewrite=rewrite)


def advice(recipe: Mapping[str, Any], shown: str) -> Iterator[Finding]:
    """Yield the advice that every recipe gets: on the mode, and on what comes before caching."""
    yield rule_finding("mode", "advice", _MODE[recipe["compile"]["mode"]], path=shown)
    yield rule_finding("ladder", "advice", "before a cache is worth making", rewrite="\n".join(_LADDER))


@functools.cache
def reference_operators() -> frozenset[str]:
    """Return the npu operators that the simulation has, read from its own files: importing them would import torch."""
    names: set[str] = set()
    for path in sorted(Path(simulated.__file__).parent.glob("process/operators_*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Reference"):
                continue
            if node.args and isinstance(node.args[0], ast.Constant):
                names.add(str(node.args[0].value).partition(".")[0])
    return frozenset(names)


def _version_of(folder: Path | None) -> tuple[int, int] | None:
    try:
        text = (folder / "version.py").read_text(encoding="utf-8") if folder is not None else ""
    except (OSError, ValueError):
        return None
    match = re.search(r"__version__ *= *['\"](\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


class _Lines:
    """Lines of a recipe's values."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @functools.cached_property
    def _source(self) -> RecipeYaml | None:
        try:
            source = RecipeYaml(str(self._path), self._path.read_bytes())
            source.document()
        except (ConfigError, OSError):
            return None
        return source

    def of(self, *place: str | int) -> int | None:
        """Return the line of a value, or of what stands nearest around it; None where no line is known."""
        return (self._source.line(place) or None) if self._source is not None else None
