"""Reads a recipe file, and says in one line what is wrong with it.

Owns the text of everything that the recipe's fields refuse; what its YAML may be stands in schemas/recipe_yaml.py.
Nothing that a recipe names is imported or run.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cachectl.schemas.cann_recipes_recipe import FrameworkRecipe, load_framework
from cachectl.schemas.canonical import digest_bytes, digest_of
from cachectl.schemas.fields import Document
from cachectl.schemas.recipe import (
    RECIPE_SCHEMA,
    CaseSpec,
    CompileSpec,
    FrameworkSpec,
    FunctionSpec,
    GatesSpec,
    ModelSpec,
    Recipe,
    TopologySpec,
)
from cachectl.schemas.recipe_words import Place, fault, kind_of, names_of, read_file, shorten, show
from cachectl.schemas.recipe_yaml import RecipeYaml
from cachectl.schemas.trail import Trail

__all__ = ["MAX_RECIPE_BYTES", "LoadedRecipe", "load_recipe"]

MAX_RECIPE_BYTES = 1 << 20
_MAX_DIGITS = 128

_SECTIONS: dict[tuple[str, ...], type[Document]] = {
    (): Recipe,
    ("model",): ModelSpec,
    ("compile",): CompileSpec,
    ("functions",): FunctionSpec,
    ("functions", "cases"): CaseSpec,
    ("topology",): TopologySpec,
    ("gates",): GatesSpec,
    ("framework",): FrameworkSpec,
}

_EXAMPLES: dict[tuple[str, ...], str] = {
    ("name",): "name: tiny-decoder",
    ("model", "factory"): "factory: package.module:build",
    ("functions", "method"): "method: main_decode",
    ("functions", "cases"): "cases: [{name: b4, inputs: package.module:function}]",
    ("functions", "cases", "name"): "name: b4",
    ("functions", "cases", "inputs"): "inputs: package.module:function",
    ("framework", "kind"): "kind: cann-recipes",
    ("framework", "config"): "config: path.yaml",
}

_WANTED = {
    "string_type": ("text", "write text"),
    "int_type": ("a whole number", "write it plain, such as 4"),
    "float_type": ("a number", "write it plain, such as 1.0e-3"),
    "bool_type": ("true or false", "write true or false"),
    "dict_type": ("a mapping", "write name: value pairs"),
    "model_type": ("a mapping", "write name: value pairs"),
    "tuple_type": ("a list", "write [...]"),
}

# Fields of cann-recipes-infer's own YAML configs, which users call recipes too.
_FOREIGN_FIELDS = ("scheduler_config", "model_config", "entry_script", "exe_mode", "exe")

_EXPONENT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")
_FREE = (
    ("model", "config"),
    ("compile", "options"),
    ("compile", "config"),
    ("compile", "dynamo"),
    ("functions", "cases", "args"),
)


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe and the file it came from.

    `raw_digest` is that of the bytes, by which a boot finds its record. `digest` is that of the meaning: equal for
    recipes that differ only in comments, order, layout or written-out defaults. `framework` is what a framework's
    config says, whose bytes are among those of `raw_digest`.
    """

    path: Path
    raw: bytes
    raw_digest: str
    recipe: Recipe
    digest: str
    framework: FrameworkRecipe | None = None

    @property
    def document(self) -> dict[str, Any]:
        """What the recipe means, as plain JSON values, with `model` and `functions` whatever its form."""
        return self.framework.document if self.framework is not None else self.recipe.to_document()

    @property
    def trail(self) -> Trail:
        """What the store has to know, so that a boot finds the record by the bytes of several files."""
        if self.framework is None:
            return ()
        steps = tuple(zip(self.framework.digests, self.framework.steps, strict=False))
        return steps if self.framework.unseen is None else (*steps, (self.framework.unseen, self.digest))

    @property
    def folder(self) -> Path:
        """The folder that the recipe's relative paths start from."""
        return self.path.parent


def load_recipe(path: Path) -> LoadedRecipe:
    """Read and check a recipe file; imports and runs nothing of what it names.

    Args:
        path: the file, as the user named it; error messages repeat it so.

    Raises:
        ConfigError: the file can't be read, isn't YAML, or isn't a recipe; one line with the file, the field, the
            value and the way out.
    """
    raw = read_file(path, MAX_RECIPE_BYTES, "recipe file")
    if raw is None:
        raise fault(f"{path}: no such file", "check the path")
    source = RecipeYaml(str(path), raw)
    document = source.document()
    _check_schema(source, document)
    _settle_exponents(source, document)
    try:
        recipe = Recipe.model_validate(document)
    except ValidationError as error:
        _explain(source, document, error)
    whole = Path(os.path.abspath(path))
    if recipe.framework is None:
        return LoadedRecipe(whole, raw, digest_bytes(raw), recipe, digest_of(recipe.to_document()))
    framework = load_framework(recipe, whole.parent, digest_bytes(raw), str(path))
    return LoadedRecipe(whole, raw, framework.digests[-1], recipe, digest_of(framework.document), framework)


def _check_schema(source: RecipeYaml, document: dict[str, Any]) -> None:
    if "schema" not in document:
        foreign = [field for field in _FOREIGN_FIELDS if field in document]
        if foreign:
            source.fail(
                ("schema",),
                f"missing, and {foreign[0]} is a field of a cann-recipes config",
                "write a recipe that names it: framework: {kind: cann-recipes, config: " + source.name + "}",
            )
        source.fail(("schema",), "missing", f"add 'schema: {RECIPE_SCHEMA}'")
    schema = document["schema"]
    if schema == RECIPE_SCHEMA:
        return
    match = re.fullmatch(r"cachectl/recipe/v([0-9]+)", schema) if isinstance(schema, str) else None
    if match and len(match[1]) < _MAX_DIGITS and int(match[1]) > 1:
        source.fail(
            ("schema",),
            f"{show(schema)} is newer than this program, which reads {RECIPE_SCHEMA!r}",
            "upgrade cachectl",
        )
    source.fail(("schema",), f"{show(schema)} is no schema this program reads", f"write 'schema: {RECIPE_SCHEMA}'")


def _settle_exponents(source: RecipeYaml, document: dict[str, Any]) -> None:
    """Read 1e-3 as the number it is where a number is wanted, and refuse it where it could be either.

    YAML 1.1 takes an exponent without a decimal point for text, YAML 1.2 for a number.
    """
    for place, node in source.nodes.items():
        if not isinstance(node, yaml.ScalarNode) or node.style or node.tag != "tag:yaml.org,2002:str":
            continue
        if not _EXPONENT.fullmatch(node.value):
            continue
        names = names_of(place)
        if any(names[: len(free)] == free and len(names) > len(free) for free in _FREE):
            mantissa, letter, exponent = node.value.partition("e" if "e" in node.value else "E")
            source.fail(
                place,
                f"{shorten(node.value)} is text to YAML 1.1 and a number to 1.2",
                f"write {shorten(mantissa)}.0{letter}{shorten(exponent)} or quote it",
            )
        section = document.get("gates")
        if names in (("gates", "rtol"), ("gates", "atol")) and isinstance(section, dict):
            # An overflow is left as it was written, and then refused as text.
            number = float(node.value)
            section[names[1]] = number if math.isfinite(number) else node.value


def _explain(source: RecipeYaml, document: dict[str, Any], error: ValidationError) -> NoReturn:
    """Raise the ConfigError for the most telling of pydantic's errors.

    An unknown field comes before a missing one: a typo makes both. Otherwise the first in the file wins.
    """
    rank = {"extra_forbidden": 0, "missing": 2}
    details = error.errors(include_url=False)
    detail = min(details, key=lambda item: (rank.get(item["type"], 1), source.line(item["loc"])))
    place: Place = detail["loc"]
    if detail["type"] == "recipe":
        context = detail["ctx"]
        source.fail((*place, *context["below"]), context["what"], context["hint"])
    if detail["type"] == "extra_forbidden":
        source.fail(place, "unknown field", _nearest(place))
    if detail["type"] == "missing":
        source.fail(place, "missing", f"add '{_EXAMPLES[names_of(place)]}'")
    if detail["type"] in _WANTED:
        _explain_type(source, place, detail)
    if detail["type"] == "literal_error":
        wanted = detail["ctx"]["expected"].replace("'", "")
        source.fail(place, f"{show(detail['input'])} is not known", f"write {wanted}")
    bound = detail["ctx"]["ge"]
    source.fail(place, f"{source.written(place)} is less than {bound:g}", f"write {bound:g} or more")


def _explain_type(source: RecipeYaml, place: Place, detail: ErrorDetails) -> NoReturn:
    wanted, hint = _WANTED[detail["type"]]
    value = detail["input"]
    written = source.written(place)
    if value is None:
        source.fail(place, f"is empty, wanted {wanted}", "fill it in or remove the line")
    if wanted == "text" and written is not None:
        hint = "quote it" if written == "the value" else f'quote it: "{written}"'
    elif wanted == "a list" and written is not None:
        hint = f"write [{written}]"
    if isinstance(value, str):
        source.fail(place, f"{show(value)} is text, wanted {wanted}", hint)
    if written is None:
        source.fail(place, f"is {kind_of(value)}, wanted {wanted}", hint)
    source.fail(place, f"{written} is {kind_of(value)} to YAML, wanted {wanted}", hint)


def _nearest(place: Place) -> str:
    *section, name = names_of((*place[:-1], str(place[-1])))
    known = _fields(_SECTIONS[tuple(section)])
    # The right name in the wrong section comes nearer than a similar name in this one.
    for other, model in _SECTIONS.items():
        if name in _fields(model):
            return f"did you mean {'.'.join((*other, name))!r}?"
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known here: {', '.join(known)}"


def _fields(model: type[Document]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]
