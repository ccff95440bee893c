"""The recipe: what to compile, with which inputs, options and topology.

Owns the recipe's fields, their defaults and what each may hold. Whether an import path, a method or an option exists is
not asked here: nothing of the user's is imported. Files are read in schemas/recipe_reading.py.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from cachectl.schemas.canonical import canonical_bytes
from cachectl.schemas.fields import Document, Many
from cachectl.schemas.keying import is_secret_name, without_credentials
from cachectl.schemas.recipe_words import show

__all__ = [
    "RECIPE_SCHEMA",
    "CaseSpec",
    "CompileSpec",
    "FrameworkSpec",
    "FunctionSpec",
    "GatesSpec",
    "ModelSpec",
    "Recipe",
    "TopologySpec",
]

RECIPE_SCHEMA = "cachectl/recipe/v1"
_MAX_NAME_LENGTH = 128  # a name becomes part of file names, which end at 255 bytes

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
_CASE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _wrong(what: str, hint: str, *below: str | int) -> PydanticCustomError:
    # The braces keep a value that itself holds braces from being taken for a template.
    return PydanticCustomError("recipe", "{what}; {hint}", {"what": what, "hint": hint, "below": below})


def _check_name(value: str) -> str:
    if len(value) > _MAX_NAME_LENGTH:
        raise _wrong(f"a name of {len(value)} characters", f"shorten it to {_MAX_NAME_LENGTH}")
    if not _NAME.fullmatch(value):
        raise _wrong(f"{show(value)} is no name", "use a-z, 0-9, '.' and '-', and start with a letter or digit")
    return value


def _check_case_name(value: str) -> str:
    if len(value) > _MAX_NAME_LENGTH:
        raise _wrong(f"a name of {len(value)} characters", f"shorten it to {_MAX_NAME_LENGTH}")
    if not _CASE_NAME.fullmatch(value):
        raise _wrong(
            f"{show(value)} is no case name", "use letters, digits, '.', '_' and '-', and start with a letter or digit"
        )
    return value


def _check_method(value: str) -> str:
    if not all(map(_is_identifier, value.split("."))):
        raise _wrong(f"{show(value)} is no method name", "write the name of a method of the model, such as main_decode")
    return value


def _check_reference(value: str) -> str:
    module, separator, function = value.partition(":")
    if not separator or not all(_is_identifier(step) for step in (*module.split("."), *function.split("."))):
        raise _wrong(f"{show(value)} is no import path", "write it as package.module:function")
    return value


def _check_text(value: str) -> str:
    if not value or "\0" in value:
        raise _wrong(f"{show(value)} is no usable text", "write it without NUL characters, and not empty")
    return value


def _check_environment(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not name or "=" in name or "\0" in name:
            raise _wrong(f"{show(name)} is no name of an environment variable", 'write NAME: "value"', name)
        if "\0" in text:
            raise _wrong("the value holds a NUL character", "remove it, no process can have it", name)
    return value


def _check_json(value: dict[str, Any]) -> dict[str, Any]:
    try:
        canonical_bytes(value)
    except TypeError as error:
        raise _wrong(str(error), "use text, numbers, true, false, null, lists and mappings") from error
    return value


def _is_identifier(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


_Name = Annotated[str, AfterValidator(_check_name)]
_CaseName = Annotated[str, AfterValidator(_check_case_name)]
_Method = Annotated[str, AfterValidator(_check_method)]
_Reference = Annotated[str, AfterValidator(_check_reference)]
_Text = Annotated[str, AfterValidator(_check_text)]
_Environment = Annotated[dict[str, str], AfterValidator(_check_environment)]
_Free = Annotated[dict[str, Any], AfterValidator(_check_json)]
_Size = Annotated[int, Field(ge=1)]


class ModelSpec(Document):
    """How a rank process makes the model: `factory(**config)`, with `path` on sys.path before.

    `path` and `sources` are relative to the recipe's folder. `revision` names the weights, where they are constants of
    the artifact; None where they aren't.
    """

    factory: _Reference
    config: _Free = Field(default_factory=dict)
    path: Many[_Text] = (".",)
    sources: Many[_Text] = ()
    revision: _Text | None = None


class CompileSpec(Document):
    """How to compile: `options` are npugraph_ex's, `config` is CompilerConfig's dotted fields for ge_graph.

    `setup` is called in each rank before compiling; None means nothing is.
    """

    mode: Literal["npugraph_ex", "ge_graph"] = "npugraph_ex"
    dynamic: bool = False
    options: _Free = Field(default_factory=dict)
    config: _Free = Field(default_factory=dict)
    dynamo: _Free = Field(default_factory=dict)
    setup: _Reference | None = None


class CaseSpec(Document):
    """One set of example inputs: `inputs(model, rank, **args)` returns the method's keyword arguments."""

    name: _CaseName
    inputs: _Reference
    args: _Free = Field(default_factory=dict)


class FunctionSpec(Document):
    """One method of the model and the cases it is compiled for.

    `method` is a name, or a path to a method of a module inside: `draft.main_decode`.
    """

    method: _Method
    cases: Many[CaseSpec]

    @model_validator(mode="after")
    def _check_cases(self) -> FunctionSpec:
        if not self.cases:
            raise _wrong("is empty", "write at least one case: {name: b4, inputs: package.module:function}", "cases")
        _refuse_twins((case.name for case in self.cases), "cases", "name", "give each case a name of its own")
        return self


class TopologySpec(Document):
    """How many ranks there are and how the model is cut over them.

    What the sizes have to do with each other is the framework's matter: expert groups may span others.
    """

    world_size: _Size = 1
    tensor_parallel: _Size = 1
    pipeline_parallel: _Size = 1
    expert_parallel: _Size = 1
    data_parallel: _Size = 1
    context_parallel: _Size = 1


class GatesSpec(Document):
    """How far the warm outputs may be from the cold ones, and over how many steps they are compared."""

    rtol: float = Field(default=1.0e-3, ge=0)
    atol: float = Field(default=1.0e-3, ge=0)
    steps: int = Field(default=4, ge=3, le=64)


class FrameworkSpec(Document):
    """A framework whose own config says what is compiled; `config` is relative to the recipe's folder."""

    kind: Literal["cann-recipes"]
    config: _Text


class Recipe(Document):
    """One recipe: `model` and `functions`, or `framework` and `command`."""

    schema_version: Literal["cachectl/recipe/v1"] = Field(alias="schema")
    name: _Name
    device: Literal["npu", "simulated"] = "npu"
    model: ModelSpec | None = None
    framework: FrameworkSpec | None = None
    command: Many[_Text] = ()
    compile: CompileSpec = Field(default_factory=CompileSpec)
    functions: Many[FunctionSpec] = ()
    topology: TopologySpec = Field(default_factory=TopologySpec)
    environment: _Environment = Field(default_factory=dict)
    gates: GatesSpec = Field(default_factory=GatesSpec)

    @model_validator(mode="after")
    def _check_form(self) -> Recipe:
        given = self.model_fields_set
        own = sorted(given & {"model", "functions"}, reverse=True)
        foreign = sorted(given & {"framework", "command"})
        if own and foreign:
            raise _wrong(
                f"stands beside {own[0]}",
                "keep model and functions, or framework and command",
                "framework" if "framework" in foreign else "command",
            )
        if foreign:
            if self.framework is None:
                raise _wrong("missing", "add framework: {kind: cann-recipes, config: path.yaml}", "framework")
            if not self.command:
                raise _wrong("missing or empty", "add command: [python, infer.py], the program to run", "command")
            return self
        if self.model is None:
            raise _wrong("missing", "add model and functions, or framework and command", "model")
        if not self.functions:
            raise _wrong("missing or empty", "add at least one: {method: main_decode, cases: [...]}", "functions")
        _refuse_twins(
            (function.method for function in self.functions), "functions", "method", "put its cases under one of them"
        )
        return self

    def to_document(self) -> dict[str, Any]:
        """Return what the recipe means as plain JSON values: every default filled in, the unused form left out.

        The document may be stored and hashed. Values of environment variables that hold secrets are not in it, and
        neither are the user and password of a URL; the ranks get both from `environment`.
        """
        unused = {"model", "functions"} if self.framework is not None else {"framework", "command"}
        document = self.model_dump(by_alias=True, exclude=unused)
        document["environment"] = {name: value for name, value in self.environment.items() if not is_secret_name(name)}
        if self.gates.steps == GatesSpec().steps:
            # Newer than the digests that recipes are found by.
            del document["gates"]["steps"]
        cleaned: dict[str, Any] = _without_credentials(document)
        return cleaned


def _refuse_twins(names: Iterable[str], section: str, field: str, hint: str) -> None:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in first:
            raise _wrong(f"{show(name)} stands in {section}[{first[name]}] too", hint, section, index, field)
        first[name] = index


def _without_credentials(value: Any) -> Any:
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, Mapping):
        return {key: _without_credentials(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_credentials(member) for member in value]
    return value
