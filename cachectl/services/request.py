"""From a recipe file to its request on this machine; what plan and build both start from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cachectl.build.job import CaseJob
from cachectl.errors import ConfigError
from cachectl.identity.device import in_simulation
from cachectl.identity.explain import Asked, Commands
from cachectl.identity.request import entry_model_part, recipe_request, source_roots
from cachectl.runtimes import simulated
from cachectl.schemas.boot import Reason
from cachectl.schemas.recipe_reading import LoadedRecipe, load_recipe
from cachectl.services.framework import refuse_unsupported

__all__ = ["HASH_SEEDS", "RecipeRequest", "read_request", "rehearse"]

# Of the processes that save an entry and that load it: another order of every set of strings, so that what depends on
# one shows as a difference.
HASH_SEEDS = ("1", "2")


@dataclass(frozen=True)
class RecipeRequest:
    """A recipe as this machine would build it: its request, the ranks' environment, and what is not known.

    `unknown` are beginnings of the toolchain's names that a rehearsal can't know. `ranks_per_node` is the cut into
    nodes for which entries are asked, None where it does not matter or nobody knows.
    """

    loaded: LoadedRecipe
    document: dict[str, Any]
    request: dict[str, Any]
    environ: dict[str, str]
    roots: Mapping[str, Path]
    missing: tuple[Reason, ...]
    unknown: tuple[str, ...] = ()
    ranks_per_node: int | None = None

    @property
    def world_size(self) -> int:
        """How many ranks the recipe's topology has."""
        return int(self.document["topology"]["world_size"])

    def rank_environ(self, hash_seed: str) -> dict[str, str]:
        """Return the environment of a rank process; a hash seed that the recipe itself declares stands."""
        return {**self.environ, "PYTHONHASHSEED": hash_seed, **self.document["environment"]}

    def cases(self) -> Iterator[CaseJob]:
        """Yield the recipe's cases in their order, numbered."""
        index = 0
        for function in self.document["functions"]:
            for case in function["cases"]:
                yield CaseJob(index, function["method"], case)
                index += 1

    def asked(self, case: CaseJob, rank: int, store: Path) -> Asked:
        """Return one line of the request, as entries are compared with it."""
        return Asked(
            model=entry_model_part(self.document, case.method, case.case),
            request=self.request,
            rank=rank,
            roots=self.roots,
            environ=self.environ,
            commands=Commands(str(self.loaded.path), str(store)),
            unknown=self.unknown,
            ranks_per_node=self.ranks_per_node,
        )


def read_request(path: Path, *, modes: tuple[str, ...] = ("npugraph_ex",), to_build: bool = True) -> RecipeRequest:
    """Read a recipe and return its request on this machine.

    Args:
        path: the recipe file.
        modes: those of `compile.mode` that the caller can do something with.
        to_build: whether anything is to be made of it; without, a framework's config of another mode is no error.

    Raises:
        ConfigError: the recipe is wrong, or needs what this version does not do.
        SimulationError: the simulated CANN can't be made.
    """
    loaded = load_recipe(path)
    document = loaded.document
    if to_build:
        refuse_unsupported(loaded, modes)
    if loaded.framework is None and document["compile"]["mode"] not in modes:
        raise ConfigError(
            f"{path.name}: compile.mode {document['compile']['mode']}: this version builds npugraph_ex only"
        )
    environ: dict[str, str] = {**os.environ, **document["environment"]}
    if document["device"] == "simulated" or in_simulation(os.environ):
        environ = simulated.environment(environ)
    request, missing = recipe_request(document, environ)
    return RecipeRequest(
        loaded,
        document,
        request,
        environ,
        source_roots(loaded.folder, tuple(document["model"]["path"])),
        tuple(missing),
    )


def rehearse(request: RecipeRequest, toolchain: Mapping[str, str]) -> RecipeRequest:
    """Return the request as it would be with other versions, by name (`cann`, `torch`, `torch_npu`).

    A version says nothing of the git revision and the formats that come with it: they are left out of the comparison.

    Raises:
        ConfigError: a name that is none of these.
    """
    document = dict(request.request["toolchain"])
    unknown: list[str] = []
    for name, version in toolchain.items():
        if name == "cann":
            document["cann"] = dict.fromkeys(document["cann"], version)
        elif name not in ("torch", "torch_npu"):
            raise ConfigError(f"--toolchain {name}: unknown name", hint="use cann=, torch= or torch_npu=")
        elif not _is_version(document[name]["version"], version):
            document[name] = {**document[name], "version": version}
            unknown += [f"{name}.git", *(["formats."] if name == "torch_npu" else [])]
    return replace(request, request={**request.request, "toolchain": document}, unknown=tuple(unknown))


def _is_version(installed: str | None, named: str) -> bool:
    # 2.13.0 names 2.13.0+cpu as well as itself; with a local part only the very same is meant.
    return installed == named or (installed is not None and "+" not in named and installed.partition("+")[0] == named)
