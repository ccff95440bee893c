"""A framework's recipe in the services: what of it is shown, and what of it can't be built or never is used."""

from __future__ import annotations

from collections.abc import Collection

from cachectl.errors import ConfigError
from cachectl.schemas.boot import Reason
from cachectl.schemas.cann_recipes_report import FrameworkReport
from cachectl.schemas.recipe_reading import LoadedRecipe

__all__ = ["framework_reports", "not_built", "refuse_inert", "refuse_unsupported"]


def framework_reports(*recipes: LoadedRecipe) -> tuple[FrameworkReport, ...]:
    """Return a block for each recipe that names a framework's config."""
    return tuple(
        FrameworkReport.of(loaded.recipe.name, loaded.framework.framework, loaded.document)
        for loaded in recipes
        if loaded.framework is not None
    )


def not_built(loaded: LoadedRecipe) -> Reason | None:
    """Return why nothing is built of a framework's config; None for other recipes, and for configs that are."""
    if loaded.framework is None or (against := loaded.framework.framework.against) is None:
        return None
    return Reason("policy", "framework config", against[0], None, "policy", against[1])


def refuse_unsupported(loaded: LoadedRecipe, modes: Collection[str]) -> None:
    """Raise ConfigError for a config of which nobody can make anything, or only in a mode that is none of these."""
    if loaded.framework is None or (against := loaded.framework.framework.against) is None:
        return
    if not (loaded.framework.framework.mode == "ge_graph" and "ge_graph" in modes):
        raise ConfigError(against[0], hint=against[1])


def refuse_inert(loaded: LoadedRecipe) -> None:
    """Raise ConfigError for a config with a setting that keeps its program from reading what is built for it."""
    if loaded.framework is None:
        return
    framework = loaded.framework.framework
    if framework.inert is None or framework.lifted:
        return
    raise ConfigError(
        f"{framework.name}: {framework.inert}",
        hint="set enable_cache_compile: true; it is in no key, so what is built holds for exec --lift without it too",
    )
