"""`exec --lift`: a full-graph torch.compile of a bound method, with npugraph_ex, becomes a cached call.

Owns the replacement of `torch.compile`: what of a program's compiles can be proved, and what happens to the others. The
program's own compile is made first, as ever, so that whatever torch says against it is said; it is also what runs where
nothing was handed out or something does not hold. Nothing of ours is raised into the program. Standard library only;
the runtime adapter brings torch.

What torch.compile means and a cached method does not, and how it is kept:

- grad mode: an artifact is made without gradients; a call with them runs as torch.compile would have it;
- `dynamic=None`: the first graph is static, and so only a recipe with `dynamic: false` serves it; a call that fits no
  case is torch.compile's, which may then make a dynamic graph;
- guards at each call: a program may change an attribute between two calls of what torch.compile made, and torch would
  see it. So a lifted call proves its case anew each time, and what no longer holds is torch's;
- stances, and being called by code that is being compiled itself: torch's own code answers;
- `disable`, `mode` and whatever else is given: not lifted.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cachectl.boot.cases import REPLACED
from cachectl.boot.report import say
from cachectl.program import WarmStart, add_method, process_start
from cachectl.programs_imports import compile_stand_in
from cachectl.schemas.boot import Reason

__all__ = ["install"]

# So many compiles of others are told; a program that compiles much with inductor must not read of that only.
_TOLD = 8


def install(torch: types.ModuleType) -> None:
    """Replace `torch.compile`, once."""
    original = torch.compile
    if hasattr(original, REPLACED):
        return

    def see_to(model: Any, kwargs: Mapping[str, Any]) -> Any:
        # Before, since torch takes some of its options out of the program's dict.
        answer = _answer(torch, model, kwargs)
        return answer(original(model, **kwargs))

    stand_in = compile_stand_in(original, see_to)
    setattr(stand_in, REPLACED, original)
    torch.__dict__["compile"] = stand_in


def _answer(torch: Any, model: Any, kwargs: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return what makes the program's object of torch's own: a cached call, or the same with the reason reported."""
    try:
        start = process_start()
        if start is None:
            return _as_it_is
        from cachectl.runtimes.backends import read_compile

        found = read_compile(torch, model, kwargs)
        if isinstance(found, Reason):
            return functools.partial(_left, start, found)
        dynamic, options = found
        return functools.partial(_lifted, torch, start, model, dynamic, options)
    except Exception as error:  # noqa: BLE001 - boot's broad handler; what is ours must not end the program
        say(f"torch.compile is left to torch: {type(error).__name__}: {error}")
        return _as_it_is


def _as_it_is(plain: Any) -> Any:
    return plain


def _left(start: WarmStart, reason: Reason, plain: Any) -> Any:
    # What npugraph_ex compiles and nobody kept is a cold start; another backend's compile is no business of ours.
    if reason.name != "backend":
        start.uncovered.append(reason)
    elif len(start.foreign) < _TOLD:
        start.foreign.append(reason)
    return plain


def _lifted(
    torch: Any,
    start: WarmStart,
    method: types.MethodType,
    dynamic: bool,
    options: Mapping[str, Any],
    plain: Callable[..., Any],
) -> Callable[..., Any]:
    """Return torch's own compiled method with the cached one in front of it."""
    from cachectl.runtimes.npugraph_ex import NpuGraphEx

    class AsCompiled(NpuGraphEx):
        """The adapter, compiling as the program does."""

        def compile(self, method: types.MethodType, **_: Any) -> Callable[..., Any]:
            return plain

    try:
        cached = add_method(
            start,
            method,
            AsCompiled(),
            dynamic=dynamic,
            options=options,
            # Nothing is compiled to a folder.
            new_cold_folder=lambda: Path(os.devnull),
            recorded_by=NpuGraphEx(),
            # torch.compile guards every call, so that a model may change between two of them.
            prove_each_call=True,
        )
    except Exception as error:  # noqa: BLE001 - boot's broad handler; what is ours must not end the program
        say(f"torch.compile is left to torch: {type(error).__name__}: {error}")
        return plain
    hint = f"call it under torch.no_grad(): the artifact of {method.__name__} is made without gradients"
    with_gradients = Reason("guards", "grad_mode", False, True, hint=hint)

    # With torch's own attributes: compiled code that calls this is traced through what torch would have traced.
    @functools.wraps(plain)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        if torch.is_grad_enabled():
            return cached.run_cold((with_gradients,), args, kwargs)
        return cached(*args, **kwargs)

    return lifted
