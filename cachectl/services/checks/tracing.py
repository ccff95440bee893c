"""Has a recipe's cases traced in a rank process, for what their text does not show.

Owns the process's job and what its failures mean for a check. The tracing itself is build/checking*.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachectl.build.job import CaseJob, Job
from cachectl.build.launcher import run_phase
from cachectl.build.workspace import private_workspace
from cachectl.errors import BuildError, ConfigError, EnvironmentFault
from cachectl.identity.request import recipe_request
from cachectl.identity.toolchain import package_folder
from cachectl.schemas.check import Finding, rule_finding

__all__ = ["Traced", "trace"]


@dataclass(frozen=True)
class Traced:
    """What tracing found; `traced` are pairs of method and case."""

    findings: tuple[Finding, ...] = ()
    traced: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def trace(
    recipe: Mapping[str, Any],
    folder: Path,
    environ: Mapping[str, str],
    *,
    timeout_s: float | None,
    progress: Callable[[str], None],
) -> Traced:
    """Trace a recipe's cases under fake tensors; without torch or torch_npu say so, and find nothing.

    Args:
        recipe: its document.
        folder: the recipe's own.
        environ: of the rank process.
        timeout_s: bound on it, seconds.

    Raises:
        ConfigError: the recipe's code can't be imported, or raises.
    """
    for name in ("torch", "torch_npu"):
        if package_folder(name) is None:
            return Traced(notes=(f"not traced: {name} is not installed here",))
    with private_workspace() as workspace:
        job = _job(recipe, folder, environ, workspace)
        job.write()
        try:
            found = run_phase(
                job,
                "check",
                environ=environ,
                log_path=workspace / "check.log",
                timeout_s=timeout_s,
                progress=lambda entered: progress(entered.phase),
                rank=0,
            )
        except ConfigError as error:
            error.hint = f"{_without(error.hint, workspace)}; check --no-trace reads the source alone"
            raise
        except EnvironmentFault as error:
            return Traced(notes=(f"not traced: {_without(error.message, workspace)}",))
        except BuildError as error:
            what = f"the process that traces ended: {_without(error.message, workspace)}"
            return Traced((rule_finding("does-not-run", "error", what),), notes=("not traced whole",))
    document = found[0]
    return Traced(
        tuple(map(Finding.from_document, document.get("findings", ()))),
        tuple((str(method), str(case)) for method, case in document.get("traced", ())),
        tuple(map(str, document.get("notes", ()))),
    )


def _job(recipe: Mapping[str, Any], folder: Path, environ: Mapping[str, str], workspace: Path) -> Job:
    request, _ = recipe_request(recipe, environ)
    cases = ((function["method"], case) for function in recipe["functions"] for case in function["cases"])
    return Job(
        recipe=dict(recipe),
        recipe_folder=folder,
        workspace=workspace,
        request=request,
        cases=tuple(CaseJob(index, method, case) for index, (method, case) in enumerate(cases)),
        world_size=int(recipe["topology"]["world_size"]),
    )


def _without(text: str | None, workspace: Path) -> str:
    """Return words without the path of a log that is gone when they are read."""
    words = (text or "").replace(f"see {workspace / 'check.log'} for its traceback", "let it run eagerly first")
    return words.replace(str(workspace), "the workspace")
