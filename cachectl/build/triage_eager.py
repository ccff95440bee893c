"""The first stage of triage: the model as it is, without a compiler.

Owns what eager steps show: exceptions with their place, values that are no numbers with the operator they began in, and
runs that differ from themselves. Rank processes only: imports torch.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cachectl.build.triage_reasons import attention_fault, finding, place_of, user_frames, user_place
from cachectl.build.triage_steps import Run, Steps

__all__ = ["eager_findings", "raised_place"]

_REPEATABLE = (
    "draw random numbers outside and pass a tensor, and call eval(); or the step keeps state in a place that is no "
    "attribute of the model"
)
_FINITE = (
    "mend the model's values first: memory that nothing wrote, an empty row in a softmax, a division by zero, or a "
    "dtype that overflows"
)
# They give memory as they find it.
_UNWRITTEN = ("aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided", "aten.resize_")


def eager_findings(steps: Steps, run: Run, roots: Mapping[str, Path], *, dynamic: bool) -> list[dict[str, Any]]:
    """Return what is wrong with the eager steps; empty where a compiler may come.

    Args:
        run: the first run.
    """
    if run.error is not None:
        where, line = raised_place(run.error, roots)
        text = f"{type(run.error).__name__}: {run.error}"
        fault = attention_fault(text, line, dynamic=dynamic)
        if fault is not None:
            return [finding("attention-lengths", text, fault, where=where)]
        what = f"step {len(run.outputs) + 1} raises {text}"
        return [finding("raises", what, "mend it first: a graph does what the code does", where=where)]
    if (number := next((number for number, output in enumerate(run.outputs, 1) if _bad(output)), None)) is not None:
        return [_not_finite(steps, number, run, roots)]
    difference = steps.difference(run, steps.run(steps.method))
    if difference is not None:
        what = f"two eager runs from one state differ in {difference}"
        return [finding("not-repeatable", what, _REPEATABLE, difference=difference.comparison.max_difference)]
    return []


def raised_place(error: BaseException, roots: Mapping[str, Path]) -> tuple[str | None, str]:
    """Return where in the model's code an error came from, and the line that stands there."""
    frames = [*(getattr(error, "real_stack", None) or ())] or user_frames(str(error))
    if not frames:
        frames = [*traceback.TracebackException.from_exception(error).stack]
    triples = [(frame.filename, frame.lineno, frame.name) for frame in frames]
    where = user_place(triples, roots)
    for frame in reversed(frames):
        if place_of(frame.filename, frame.lineno, frame.name, roots) == where:
            return where, frame.line or ""
    return where, ""


def _bad(output: Any) -> bool:
    return any(_is_nan(leaf) for leaf in pytree.tree_leaves(output))


def _is_nan(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and bool(leaf.isnan().any())


def _not_finite(steps: Steps, number: int, run: Run, roots: Mapping[str, Path]) -> dict[str, Any]:
    places = [
        f"output{pytree.keystr(path)}"
        for path, leaf in pytree.tree_flatten_with_path(run.outputs[number - 1])[0]
        if _is_nan(leaf)
    ]
    what = f"step {number} gives NaN in {', '.join(places[:3])}"
    if given := next(_nan_before(steps), None):
        return finding("not-finite", f"{what}; {given} holds NaN before the first step", "load or initialise it first")
    watch = _FirstNan(roots)
    with watch:
        steps.run(steps.method)
    if watch.operator is not None:
        what += f"; it begins in {watch.operator}"
    return finding("not-finite", what, _FINITE, where=watch.where)


def _nan_before(steps: Steps) -> Iterator[str]:
    yield from (place for place, tensor in steps.snapshot.tensors if _is_nan(tensor))
    model = steps.method.__self__
    if isinstance(model, torch.nn.Module):
        yield from (name for name, parameter in model.named_parameters() if _is_nan(parameter))


class _FirstNan(TorchDispatchMode):  # type: ignore[misc]
    """Finds the first operator that makes NaN of inputs without."""

    def __init__(self, roots: Mapping[str, Path]) -> None:
        super().__init__()
        self._roots = roots
        self.operator: str | None = None
        self.where: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        wanted = self.operator is None and not str(func).startswith(_UNWRITTEN) and _bad(result)
        if wanted and not _bad([*pytree.tree_leaves(args), *pytree.tree_leaves(kwargs)]):
            self.operator = str(func)
            frames = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_stack()]
            self.where = user_place(frames, self._roots)
        return result
