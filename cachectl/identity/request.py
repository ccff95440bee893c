"""The request: what is known of an entry before anything is traced, and how two requests differ.

Owns which recipe fields go into which part. A recipe's name, gates and file paths are labels and rules, not identity:
they are left out; a field that nobody knows would go in. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cachectl.identity.device import device_part
from cachectl.identity.environment import declared_part
from cachectl.identity.toolchain import package_folder, toolchain_part
from cachectl.identity.topology import topology_part
from cachectl.schemas.boot import Reason
from cachectl.schemas.canonical import canonical_bytes
from cachectl.schemas.keying import KEY_VERSION

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = ["REQUEST_PARTS", "compare_requests", "differences", "entry_model_part", "recipe_request", "source_roots"]

REQUEST_PARTS = ("model", "topology", "options", "environment", "toolchain", "device")

_HINTS = {
    "model": "the recipe changed: run cachectl build",
    "topology": "another layout of ranks is another warm set: run cachectl build for it",
    "options": "compile options are part of the graph: run cachectl build",
    "environment": "the declared environment is part of the key: run cachectl build",
    "toolchain": "artifacts are valid for one toolchain: run cachectl build on this one",
    "device": "artifacts are valid for one SoC: run cachectl build on this one",
}


def recipe_request(
    recipe: Mapping[str, Any], environ: Mapping[str, str], *, search_path: list[str] | None = None
) -> tuple[dict[str, Any], list[Reason]]:
    """Return the request of a recipe document: key part documents by name, and why any of them is incomplete.

    Args:
        recipe: the recipe's semantic document, defaults filled in.
        environ: the environment the program will have.
        search_path: where torch and torch_npu are looked for; None for this interpreter's sys.path.

    Raises:
        ConfigError: a compile option or Dynamo field that the torch found there does not have.
    """
    from cachectl.identity.options import options_part  # parses source text; the hook compares requests without it

    simulated = recipe.get("device") == "simulated"
    toolchain, missing = toolchain_part(environ, simulated=simulated, search_path=search_path)
    device, unknown = device_part(str(recipe.get("device", "npu")), environ)
    request = {
        "key_version": KEY_VERSION,
        "model": _model(recipe),
        "topology": topology_part(recipe),
        "options": options_part(
            recipe.get("compile") or {},
            npu_folder=package_folder("torch_npu", search_path),
            torch_folder=package_folder("torch", search_path),
        ),
        "environment": declared_part(recipe),
        "toolchain": toolchain,
        "device": device,
    }
    return request, [*missing, *unknown]


def source_roots(recipe_folder: Path, paths: Sequence[str]) -> dict[str, Path]:
    """Return the folders behind the names that a sources document uses for its files.

    Args:
        recipe_folder: where the recipe lies.
        paths: the recipe's `model.path`, relative to it.
    """
    roots = {f"path:{index}": Path(os.path.abspath(recipe_folder / path)) for index, path in enumerate(paths)}
    return {**roots, "recipe": Path(os.path.abspath(recipe_folder))}


def entry_model_part(recipe: Mapping[str, Any], method: str, case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model part of one entry: the factory with its config, the method, and the case's inputs.

    The case's name is a label: renaming a case keeps the key. What a framework's config says is part of it.
    """
    model = recipe["model"]
    part = {name: value for name, value in model.items() if name not in _MODEL_LABELS}
    if recipe.get("framework") is not None:
        part["framework"] = recipe["framework"]
    return {**part, "method": method, "inputs": case["inputs"], "args": case.get("args") or {}}


# Where the files lie is no identity, their content is: it is in the sources part. The patterns in `sources` count:
# another pattern is another set of files.
_MODEL_LABELS = ("path",)


def _model(recipe: Mapping[str, Any]) -> dict[str, Any]:
    model = recipe.get("model") or {}
    part = {name: value for name, value in model.items() if name not in _MODEL_LABELS}
    for name in ("functions", "framework", "command"):
        if recipe.get(name) is not None:
            part[name] = recipe[name]
    return part


def compare_requests(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Reason]:
    """Return one reason for each value in which two requests differ, part by part."""
    reasons = []
    if stored.get("key_version") != wanted.get("key_version"):
        reasons.append(
            Reason(
                "policy",
                "key_version",
                stored.get("key_version"),
                wanted.get("key_version"),
                "policy",
                "run: cachectl build",
            )
        )
    for part in REQUEST_PARTS:
        for name, left, right in differences(stored.get(part), wanted.get(part)):
            reasons.append(Reason(part, name or part, left, right, hint=_HINTS[part]))
    return reasons


def differences(stored: Any, wanted: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, stored, wanted) for each leaf in which two documents differ; types count.

    Leaves are equal when their canonical bytes are: what was stored is JSON, what is wanted may hold an infinity.
    """
    if isinstance(stored, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*stored, *wanted}):
            inner = f"{name}.{key}" if name else key
            yield from differences(stored.get(key, _ABSENT), wanted.get(key, _ABSENT), inner)
    elif isinstance(stored, (list, tuple)) and isinstance(wanted, (list, tuple)) and len(stored) == len(wanted):
        for index, (left, right) in enumerate(zip(stored, wanted, strict=True)):
            yield from differences(left, right, f"{name}[{index}]")
    elif not _equal(stored, wanted):
        yield name, None if stored is _ABSENT else stored, None if wanted is _ABSENT else wanted


_ABSENT = object()


# Of these an equal type and value is an equal text; the hook compares thousands of them at every start.
_PLAIN = (str, int, bool, type(None))


def _equal(stored: Any, wanted: Any) -> bool:
    if type(stored) is type(wanted) and type(stored) in _PLAIN:
        return bool(stored == wanted)
    try:
        return canonical_bytes(stored) == canonical_bytes(wanted)
    except TypeError:
        # A running process has values that JSON can't say, such as a function among the options.
        return type(stored) is type(wanted) and bool(stored == wanted)
