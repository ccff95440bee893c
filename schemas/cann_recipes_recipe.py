"""The recipe document that means what a cann-recipes config and its program mean, and the bytes it hangs on.

Owns which of a framework's recipe stands in the document: sections that the recipe states itself win over what the
framework would do. Reads the config and the models' config.json; runs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from cachectl.schemas.cann_recipes import FACTORY, INPUTS, Framework, model_files, read_framework
from cachectl.schemas.canonical import digest_bytes
from cachectl.schemas.recipe import Recipe
from cachectl.schemas.recipe_words import fault, read_file
from cachectl.schemas.trail import fold

__all__ = ["FrameworkRecipe", "load_framework"]

_MAX_CONFIG_BYTES = 1 << 20
_MAX_MODEL_BYTES = 16 << 20
_PYTHON = re.compile(r"python[0-9.]*")


@dataclass(frozen=True)
class FrameworkRecipe:
    """A framework's recipe, understood: the document that means the same, and how its bytes are found again.

    Attributes:
        framework: what the config says.
        document: the recipe document, with `model` and `functions`.
        steps: the files that take part, step by step, each as the recipe or the config names it.
        digests: those of all bytes before each step, and of all bytes last.
        unseen: as `digests`' last, for who can't see the models' files; None where they are not seen here either.
    """

    framework: Framework
    document: dict[str, Any]
    steps: tuple[tuple[str, ...], ...]
    digests: tuple[str, ...]
    unseen: str | None


def load_framework(recipe: Recipe, folder: Path, raw_digest: str, name: str) -> FrameworkRecipe:
    """Read the config that a recipe names, and what it says of its models.

    Args:
        recipe: a recipe with `framework` and `command`.
        folder: where it lies; what it names is relative to it.
        raw_digest: that of its file's bytes.
        name: the recipe's file, for messages.

    Raises:
        ConfigError: the config can't be read, is wrong, or of a kind of which nothing can be cached.
    """
    assert recipe.framework is not None
    config = recipe.framework.config
    raw = read_file(folder / config, _MAX_CONFIG_BYTES, "configuration file", regular=True)
    if raw is None:
        raise fault(
            f"{name}: framework.config: {config}: no such file",
            f"looked in {folder}; write its path relative to the recipe",
        )
    places = model_files(raw, config, _folders(recipe.command))
    files = {
        place: read_file(folder / place, _MAX_MODEL_BYTES, "configuration file", regular=True)
        for field in places.values()
        for place in field
    }
    models = {
        field: next((place, data) for place in candidates if (data := files[place]) is not None)
        for field, candidates in places.items()
        if any(files[place] is not None for place in candidates)
    }
    framework = _noted(recipe, read_framework(config, raw, models, command=recipe.command))
    after_config = fold(raw_digest, [digest_bytes(raw)])
    steps: tuple[tuple[str, ...], ...] = ((config,),)
    digests: tuple[str, ...] = (raw_digest, after_config)
    unseen = None
    if files:
        steps = (*steps, tuple(files))
        found = [None if data is None else digest_bytes(data) for data in files.values()]
        digests = (*digests, fold(after_config, found))
        if any(found):
            unseen = fold(after_config, [None] * len(found))
    return FrameworkRecipe(framework, _document(recipe, framework, name), steps, digests, unseen)


def _noted(recipe: Recipe, framework: Framework) -> Framework:
    """Return the framework with what stands between recipe and config added to its notes."""
    notes = [
        f"environment.{name}: the framework overwrites {recipe.environment[name]!r} with {value!r}"
        for name, value in framework.environment.items()
        if recipe.environment.get(name, value) != value
    ]
    if not any(PurePath(framework.name).name in word for word in recipe.command):
        notes.append(f"command does not name {PurePath(framework.name).name}: it has to read this config, no other")
    return replace(framework, notes=(*framework.notes, *notes))


def _folders(command: Sequence[str]) -> tuple[str, ...]:
    """Return what a relative model path may be relative to: the recipe's folder, and that of the script."""
    script = next((word for word in command if word.endswith(".py")), "")
    return tuple(dict.fromkeys(["", str(PurePath(script).parent) if script else ""]))


def _document(recipe: Recipe, framework: Framework, name: str) -> dict[str, Any]:
    """Return the document that means the same; raises ConfigError where recipe and config contradict each other."""
    document = recipe.to_document()
    command = _command(document.pop("command"))
    case = {"name": framework.case, "inputs": INPUTS}
    document["model"] = {
        "factory": FACTORY,
        "config": {
            "command": command,
            "methods": list(framework.methods),
            **({"ranks": {name: list(ranks) for name, ranks in framework.ranks.items()}} if framework.ranks else {}),
        },
        "path": ["."],
        "sources": [],
        "revision": None,
    }
    document["functions"] = [
        {"method": method, "cases": [{**case, "args": {"method": method, "number": 0}}]} for method in framework.methods
    ]
    document["framework"] = {"kind": "cann-recipes", **framework.document}
    document["compile"] = _compile(recipe, framework, document["compile"])
    document["topology"] = _topology(recipe, framework, document["topology"], name)
    document["environment"] = {**framework.launch, **document["environment"], **framework.environment}
    return document


def _command(command: Sequence[str]) -> list[str]:
    # Which interpreter it is says the toolchain; where it lies is no identity.
    first, *rest = command
    return ["python" if _PYTHON.fullmatch(PurePath(first).name) else first, *rest]


def _compile(recipe: Recipe, framework: Framework, stated: Mapping[str, Any]) -> dict[str, Any]:
    given = recipe.compile.model_fields_set
    derived: dict[str, Any] = {
        "mode": "ge_graph" if framework.mode == "ge_graph" else "npugraph_ex",
        "dynamic": framework.dynamic,
    }
    # Dynamo's fields the program sets itself, before it compiles, and not all versions of torch have them.
    merged = {"options": framework.options, "config": framework.compiler_config}
    return {
        **stated,
        **{field: value for field, value in derived.items() if field not in given},
        **{field: {**value, **stated[field]} for field, value in merged.items()},
    }


def _topology(recipe: Recipe, framework: Framework, stated: Mapping[str, int], name: str) -> dict[str, int]:
    given = recipe.topology.model_fields_set
    world = framework.topology["world_size"]
    if "world_size" in given and stated["world_size"] != world:
        raise fault(
            f"{name}: topology.world_size: {stated['world_size']}, and {framework.name} says world_size {world}",
            "remove it from the recipe, or change the config",
        )
    return {field: stated[field] if field in given else size for field, size in framework.topology.items()}
