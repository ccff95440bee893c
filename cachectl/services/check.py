"""Whether a recipe's model is ready for graph mode and for a cache, before any time on an NPU.

Owns what is looked at and in which order: the recipe, the model's source, the programs around it, a trace.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from cachectl.identity.device import in_simulation
from cachectl.identity.options import wheel_options
from cachectl.identity.request import source_roots
from cachectl.identity.toolchain import package_folder
from cachectl.runtimes import simulated
from cachectl.schemas.check import SEVERITIES, CheckReport, Finding, rule_finding
from cachectl.schemas.recipe_reading import load_recipe
from cachectl.services.checks.model import Read, check_model
from cachectl.services.checks.modules import Modules
from cachectl.services.checks.npu_rules import Setting
from cachectl.services.checks.programs import check_programs
from cachectl.services.checks.recipe import advice, check_recipe, reference_operators
from cachectl.services.checks.state_rules import Findings
from cachectl.services.checks.tracing import Traced, trace
from cachectl.services.framework import refuse_unsupported

__all__ = ["check"]

_MODES = ("npugraph_ex", "ge_graph")
_OPTION_RULES = ("unknown-option", "option-value")


def check(
    path: Path,
    *,
    traces: bool = True,
    timeout_s: float | None = None,
    search_path: list[str] | None = None,
    progress: Callable[[str], None] = lambda phase: None,
) -> CheckReport:
    """Check a recipe; read its model's source, and trace it where torch is there.

    Args:
        traces: whether to trace; without it nothing of the user's is run.
        timeout_s: bound on the process that traces, seconds.
        search_path: where torch and torch_npu are looked for; None for sys.path.

    Raises:
        ConfigError: the recipe is wrong; a file can't be parsed; a name leads nowhere; its code raises in the trace.
        SimulationError: the simulated CANN can't be made.
    """
    loaded = load_recipe(path)
    refuse_unsupported(loaded, _MODES)
    recipe = loaded.document
    findings = Findings({})
    simulates = recipe["device"] == "simulated" or in_simulation(os.environ)
    setting = Setting(
        mode=recipe["compile"]["mode"],
        dynamic=bool(recipe["compile"]["dynamic"]),
        on_npu=not simulates,
        references=reference_operators() if simulates else None,
    )
    roots = [root for name, root in source_roots(loaded.folder, tuple(recipe["model"]["path"])).items()
             if name.startswith("path:")]  # fmt: skip
    modules = Modules(roots, loaded.folder)
    shown = modules.shown(path)
    for finding in check_recipe(recipe, path, shown, search_path):
        findings.add(finding)
    read = check_model(recipe, modules, setting, findings)
    check_programs(recipe, modules, findings, wheel_options(package_folder("torch_npu", search_path)))
    traced = Traced(notes=("not traced: --no-trace",))
    if traces:
        # A document leaves secrets out; a framework's own settings come before the recipe's.
        own = loaded.recipe.environment if loaded.framework is None else {}
        environ = {**os.environ, **recipe["environment"], **own}
        environ = simulated.environment(environ) if simulates else environ
        sound = _without_wrong_options(recipe, findings)
        traced = trace(sound, loaded.folder, environ, timeout_s=timeout_s, progress=progress)
    _add_traced(traced, findings, {module.shown for module in modules.loaded()})
    _unseen(recipe, read, traced, findings, shown)
    _static_graph(recipe, read, findings, shown)
    for finding in advice(recipe, shown):
        findings.add(finding)
    ordered = sorted(findings.found.values(), key=_place)
    return CheckReport(tuple(ordered), traced.traced, tuple(dict.fromkeys([*read.notes, *traced.notes])))


def _without_wrong_options(recipe: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """Return what can be traced of a recipe whose options were found to be wrong: it without any."""
    if not any(findings.of_rule(rule) for rule in _OPTION_RULES):
        return recipe
    return {**recipe, "compile": {**recipe["compile"], "options": {}, "dynamo": {}}}


def _add_traced(traced: Traced, findings: Findings, read_files: set[str]) -> None:
    """Add what the trace found and the source doesn't show; `read_files` are those whose source was read."""
    for finding in traced.findings:
        if _is_known(findings, finding):
            continue
        if finding.rule == "computed-rotary" and finding.path in read_files:
            # A trace sees cos and sin, and not of what; whose text shows no positions may use them for anything.
            finding = replace(finding, severity="advice")
        findings.add(finding)


def _unseen(recipe: dict[str, Any], read: Read, traced: Traced, findings: Findings, shown: str) -> None:
    """Find the methods that neither reader saw."""
    seen = {*read.methods, *(method for method, _ in traced.traced)}
    for function in recipe["functions"]:
        if function["method"] not in seen and not _has_findings(findings, function["method"]):
            what = f"{function['method']}: its source was not found, and it was not traced"
            findings.add(rule_finding("unseen", "warning", what, path=shown, method=function["method"]))


def _is_known(findings: Findings, finding: Finding) -> bool:
    """Say whether what a trace found is what the source shows, and knows better: at a place, and of which modules."""
    methods = (None, finding.method)
    same = findings.of_rule(finding.rule)
    if finding.rule == "several-traces":
        return bool(same)
    return finding.line is None and any(item.method in methods for item in same)


def _has_findings(findings: Findings, method: str) -> bool:
    return any(item.method == method for item in findings.found.values())


def _static_graph(recipe: dict[str, Any], read: Read, findings: Findings, shown: str) -> None:
    """Advise a static graph, where each call is known and has neither number nor list."""
    nothing_changes = read.host_inputs is False and "list" not in read.lengths
    if recipe["compile"]["dynamic"] and nothing_changes and not findings.of_rule("static-graph"):
        what = "dynamic is true, and no call has a number or a list that could change"
        findings.add(rule_finding("static-graph", "advice", what, path=shown))


def _place(finding: Finding) -> tuple[Any, ...]:
    last = {"mode": 1, "ladder": 2}
    gravity = SEVERITIES.index(finding.severity)
    return (last.get(finding.rule, 0), finding.path or "", finding.line or 0, gravity, finding.rule)
