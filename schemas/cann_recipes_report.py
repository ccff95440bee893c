"""What plan and explain print of a framework's recipe: the config as it was understood.

Owns the shape of the block; what it says is read in schemas/cann_recipes.py.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from cachectl.schemas.cann_recipes import Framework
from cachectl.schemas.fields import Document, Many

__all__ = ["FrameworkReport", "LeftOutReport", "MethodReport"]


class LeftOutReport(Document):
    """One field of the config that is not in the key, and why."""

    name: str
    why: str


class MethodReport(Document):
    """One cached method; `ranks` says which ranks hold it where not all do."""

    name: str
    ranks: Many[int] | None = None


class FrameworkReport(Document):
    """A framework's config: what it is read as, and what the framework does with it.

    `in_key` is the part of the key; `cache_dir` where the program's own caches lie when cachectl is not there;
    `inert` which setting keeps the program from reading any cache.
    """

    recipe: str
    kind: Literal["cann-recipes"] = "cann-recipes"
    config: str
    family: Literal["A", "B"]
    mode: Literal["npugraph_ex", "ge_graph", "eager"]
    methods: Many[MethodReport]
    dynamic: bool
    options: dict[str, Any]
    compiler_config: dict[str, Any] = Field(default_factory=dict)
    dynamo: dict[str, Any] = Field(default_factory=dict)
    topology: dict[str, int]
    environment: dict[str, str]
    cache_dir: str
    rank_rule: str
    in_key: dict[str, Any]
    not_in_key: Many[LeftOutReport]
    notes: Many[str] = ()
    inert: str | None = None

    @classmethod
    def of(cls, recipe: str, framework: Framework, document: dict[str, Any]) -> FrameworkReport:
        """Return the block of one recipe.

        Args:
            recipe: its name.
            framework: its config.
            document: the recipe document that means the same, whose sections count.
        """
        compiled = document["compile"]
        return cls.model_validate(
            {
                "recipe": recipe,
                "config": framework.name,
                "family": framework.family,
                "mode": framework.mode,
                "methods": [
                    MethodReport(name=method, ranks=framework.ranks.get(method)) for method in framework.methods
                ],
                "dynamic": compiled["dynamic"],
                "options": compiled["options"],
                "compiler_config": compiled["config"],
                "dynamo": {**framework.dynamo, **compiled["dynamo"]},
                "topology": document["topology"],
                "environment": document["environment"],
                "cache_dir": framework.cache_dir,
                "rank_rule": framework.rank_rule,
                "in_key": framework.document,
                "not_in_key": [LeftOutReport(name=item.name, why=item.why) for item in framework.left_out],
                "notes": list(framework.notes),
                "inert": framework.inert,
            }
        )
