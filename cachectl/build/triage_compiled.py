"""The compiled stages of triage: what Dynamo says of the method, and whether its values stay eager's.

Owns compiling a method with a backend while Dynamo's reasons are kept: graph breaks, recompiles, host reads. Rank
processes only: imports torch.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cachectl.build import gates
from cachectl.build.job import CaseJob
from cachectl.build.recorder import UpstreamMessages
from cachectl.build.sources import SourceRecorder
from cachectl.build.triage_eager import raised_place
from cachectl.build.triage_reasons import (
    attention_fault,
    break_advice,
    finding,
    one_line,
    read_recompiles,
    recompile_advice,
    runtime_notes,
    user_place,
    value_advice,
)
from cachectl.build.triage_steps import Run, Steps
from cachectl.errors import BuildError

__all__ = ["Compiled", "compiled_findings", "run_compiled"]

_LOGGERS = ("npugraph_ex", "torchair", "torch._dynamo")
_RECOMPILES = "torch._dynamo.guards.__recompiles"
_SHOWN_RECOMPILES = 4


@dataclass
class Compiled:
    """One compiled run, with what Dynamo and the runtime said meanwhile."""

    run: Run
    recompiles: list[str] = field(default_factory=list)
    messages: UpstreamMessages = field(default_factory=UpstreamMessages)
    codes: list[Any] = field(default_factory=list)


class _Recompiles(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.DEBUG)
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())


def run_compiled(steps: Steps, compile_method: Callable[[], Callable[..., Any]]) -> Compiled:
    """Compile the method anew and run the steps through it.

    Args:
        compile_method: returns the compiled method; Dynamo has forgotten what it compiled before.
    """
    importlib.import_module("torch._dynamo").reset()
    # Each step may be a graph of its own, and all of them are to be seen.
    config = importlib.import_module("torch._dynamo").config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    setattr(config, limit, max(getattr(config, limit), steps.count + 1))
    compiled = Compiled(Run())
    sources = SourceRecorder()
    with _listening(compiled), sources:
        compiled.run = steps.run(compile_method())
    compiled.codes = sources.codes()
    return compiled


def compiled_findings(
    stage: str,
    steps: Steps,
    case: CaseJob,
    eager: Run,
    compiled: Compiled,
    roots: Mapping[str, Path],
    *,
    dynamic: bool,
) -> tuple[str, list[dict[str, Any]]]:
    """Return the verdict on a compiled run, ok, failed or differs, and the findings behind it."""
    notes = runtime_notes(compiled.messages.texts)
    if (error := compiled.run.error) is not None:
        return "failed", [*_raised(steps, error, len(compiled.run.outputs), roots, dynamic=dynamic), *notes]
    found = _recompiles(compiled.recompiles, roots, dynamic=dynamic)
    try:
        gates.refuse_host_reads(case, compiled.codes)
    except BuildError as refused:
        found.append(_host_read(case, refused))
    difference = steps.difference(eager, compiled.run)
    if difference is not None:
        found.append(
            finding(
                "differs",
                f"{stage} and eager differ in {difference}",
                value_advice(stage, steps.rebound),
                difference=difference.comparison.max_difference,
            )
        )
        return ("failed" if len(found) > 1 else "differs"), [*found, *notes]
    return ("failed" if found else "ok"), [*found, *notes]


def _recompiles(texts: list[str], roots: Mapping[str, Path], *, dynamic: bool) -> list[dict[str, Any]]:
    """Return one finding for each guard that fails, however many steps it fails in."""
    groups: dict[tuple[str | None, str], list[Any]] = {}
    for recompile in read_recompiles(texts, roots):
        kind, _ = recompile_advice(recompile, dynamic=dynamic)
        groups.setdefault((recompile.where, kind), []).append(recompile)
    found = []
    for (where, kind), recompiles in list(groups.items())[:_SHOWN_RECOMPILES]:
        first = recompiles[0]
        many = len(recompiles) > 1
        times = f"{len(recompiles)} recompiles of {first.function}" if many else f"{first.function} recompiled"
        line = f": {first.line}" if first.line else ""
        _, advice = recompile_advice(first, dynamic=dynamic)
        found.append(finding(kind, f"{times}, guard {first.guard}{line}", advice, where=where, times=len(recompiles)))
    return found


def _host_read(case: CaseJob, refused: BuildError) -> dict[str, Any]:
    what = refused.message.removeprefix(f"{case.method} [{case.name}]: ")
    return finding("host-read", what, refused.hint or "", where=what.partition(" calls ")[0].replace(" ", " in ", 1))


def _raised(
    steps: Steps, error: BaseException, done: int, roots: Mapping[str, Path], *, dynamic: bool
) -> list[dict[str, Any]]:
    text = _reason(error)
    where, line = raised_place(error, roots)
    fault = attention_fault(f"{type(error).__name__} {error}", line, dynamic=dynamic)
    if fault is not None:
        return [finding("attention-lengths", text, fault, where=where)]
    exc = importlib.import_module("torch._dynamo.exc")
    if isinstance(error, (exc.Unsupported, exc.UserError)):
        breaks = list(_all_breaks(steps, roots))
        return breaks or [_break(text, where, line)]
    if isinstance(error, exc.TorchDynamoException):
        return [_with_cause("not-traced", text, text, where, line)]
    what = f"step {done + 1} raises {type(error).__name__}: {error}"
    if "Capture" in type(error).__name__ or "captur" in str(error):
        return [_with_cause("capture", what, str(error), where, line)]
    return [finding("raises", what, "see the rank's log for the traceback", where=where)]


def _with_cause(kind: str, what: str, text: str, where: str | None, line: str) -> dict[str, Any]:
    """Return the finding for an error that is no graph break, with the cause that its text has in common with one."""
    cause, advice = break_advice(text, line)
    if cause == "host-read":
        return finding(cause, what, advice, where=where)
    return finding(kind, what, advice, where=where, cause=cause if cause != "graph-break" else None)


def _break(text: str, where: str | None, line: str) -> dict[str, Any]:
    kind, advice = break_advice(text, line)
    return finding("graph-break", text, advice, where=where, cause=kind)


def _reason(error: BaseException) -> str:
    """Return an error's own words: Dynamo's without the frames and the advertisement for its environment variables."""
    text = str(error).partition("\nfrom user code:")[0].partition("\nSet TORCHDYNAMO_VERBOSE")[0]
    text = text.partition("For more details about this graph break")[0].partition("Developer debug context:")[0]
    text = text.partition("\nOriginal traceback:")[0].partition("\nTraceback (most recent call last):")[0]
    return one_line(text)


def _all_breaks(steps: Steps, roots: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    """Yield every break that Dynamo finds when it may break: a full graph ends at the first."""
    dynamo = importlib.import_module("torch._dynamo")
    dynamo.reset()
    try:
        with torch.no_grad():
            explained = dynamo.explain(steps.method)(**steps.inputs)
        reasons = explained.break_reasons
    except (Exception, SystemExit):  # noqa: BLE001 - the code that broke the graph runs here; the first break is known
        return
    finally:
        steps.restore()
    for reason in reasons:
        frames = [(frame.filename, frame.lineno, frame.name) for frame in reason.user_stack]
        line = reason.user_stack[-1].line or "" if reason.user_stack else ""
        # What runs after a break has a name of Dynamo's own.
        where = user_place(frames, roots)
        yield _break(_reason(RuntimeError(reason.reason)), _without_resume(where), line)


def _without_resume(where: str | None) -> str | None:
    if where is None or "torch_dynamo_resume_in_" not in where:
        return where
    place, _, name = where.partition(" in torch_dynamo_resume_in_")
    return f"{place} in {name.rpartition('_at_')[0]}"


@contextmanager
def _listening(compiled: Compiled) -> Iterator[None]:
    torch._logging.set_logs(recompiles=True)
    recompiles = logging.getLogger(_RECOMPILES)
    handler = _Recompiles(compiled.recompiles)
    recompiles.addHandler(handler)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addHandler(compiled.messages)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        compiled.messages.texts.extend(str(item.message) for item in caught)
    finally:
        recompiles.removeHandler(handler)
        for logger in loggers:
            logger.removeHandler(compiled.messages)
