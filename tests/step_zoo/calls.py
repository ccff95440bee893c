"""Programs that call one cached method in all the ways programs do; each prints what it saw as one document."""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import model as zoo
import torch

import cachectl

OPTIONS = {"frozen_parameter": True}


def error_of(call: Callable[[], Any]) -> str:
    """Return what a call raises, in words."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the test compares
        return f"{type(error).__name__}: {error}"
    return "nothing"


def cached_of(receiver: zoo.Model, name: str = "strided", **named: Any) -> Any:
    """Return a cached method of a start of its own."""
    warm = cachectl.warm_start("recipe.yaml", **named)
    return cachectl.cache_compile(getattr(receiver, name), warm=warm, dynamic=False, options=OPTIONS)


def said(cached: Any) -> dict[str, Any]:
    """Return outcome and reasons."""
    return {"outcome": cached.outcome, "reasons": [str(reason) for reason in cached.reasons]}


def ways_to_pass() -> dict[str, Any]:
    """Positional and keyword calls, defaults left out and given, wrong arity, another kind of argument."""
    receiver = zoo.build()
    strided, defaults = cached_of(receiver), cached_of(receiver, "defaults")
    keyword_only = cached_of(receiver, "keyword_only")
    x = zoo.inputs(receiver, 0, "strided")["x"]
    wrong = {
        "missing": ((), {}),
        "too many": ((x, x), {}),
        "unknown": ((x,), {"y": 1}),
        "twice": ((x,), {"x": x}),
    }
    errors = {
        name: [error_of(functools.partial(called, *args, **kwargs)) for called in (strided, receiver.strided)]
        for name, (args, kwargs) in wrong.items()
    }
    before_any_call = said(strided)
    y = zoo.rows()
    equal = [
        torch.equal(strided(x), receiver.strided(x)),
        torch.equal(strided(x=x), receiver.strided(x)),
        torch.equal(defaults(y), y * 3),
        torch.equal(defaults(y, None), y * 3),
        torch.equal(defaults(n=3, x=y), y * 3),
        torch.equal(keyword_only(y), y * 2),
        torch.equal(keyword_only(y, scale=2.0), y * 2),
    ]
    warm = [said(strided), said(defaults), said(keyword_only)]
    other = {"value": torch.equal(defaults(y, n=4), y * 4), **said(defaults)}
    return {"errors": errors, "before": before_any_call, "equal": equal, "warm": warm, "other": other}


def threads() -> dict[str, Any]:
    """Eight threads make the first call at once."""
    receiver = zoo.build()
    cached = cached_of(receiver)
    x = zoo.inputs(receiver, 0, "strided")["x"]
    expected = receiver.strided(x)
    start, right = threading.Barrier(8), []

    def run() -> None:
        start.wait()
        right.append(bool(torch.allclose(cached(x), expected)))

    running = [threading.Thread(target=run) for _ in range(8)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return {"right": right, "calls": cached.cases[0].calls, **said(cached)}


def modes() -> dict[str, Any]:
    """Calls under grad mode, no_grad, inference mode with tensors of both kinds, autocast and another default dtype."""
    found = {}
    for name, mode, make in (
        ("grad", torch.enable_grad(), zoo.rows),
        ("no-grad", torch.no_grad(), zoo.rows),
        ("inference-outside", torch.inference_mode(), zoo.rows),
        ("autocast", torch.autocast("cpu", dtype=torch.bfloat16), zoo.rows),
        ("deterministic", None, zoo.rows),
    ):
        receiver = zoo.build()
        cached = cached_of(receiver, "submodule")
        # Made outside: of no mode.
        x = make()
        if mode is None:
            torch.use_deterministic_algorithms(True)
            result = cached(x)
            expected = receiver.submodule(x)
            torch.use_deterministic_algorithms(False)
        else:
            with mode:
                result, expected = cached(x), receiver.submodule(x)
        found[name] = {
            "equal": bool(torch.allclose(result.float(), expected.float(), atol=1e-2)),
            "dtype": str(result.dtype) == str(expected.dtype),
            **said(cached),
        }
    with torch.inference_mode():
        receiver = zoo.build()
        cached = cached_of(receiver, "buffer")
        x = zoo.rows()
        right = []
        for step in range(1, 4):
            right.append(bool(torch.allclose(cached(x), x * 2 * step)))
        found["inference-all"] = {"equal": all(right), "dtype": True, **said(cached)}
    return found


def objects() -> dict[str, Any]:
    """Two objects for one method, a deep copy with the model, other receivers, and what is no method."""
    receiver = zoo.build()
    one, other = cached_of(receiver), cached_of(receiver)
    x = zoo.inputs(receiver, 0, "strided")["x"]
    equal = [torch.equal(one(x), other(x))]
    receiver.decode = one
    twin = copy.deepcopy(receiver)
    with torch.no_grad():
        twin.linear.weight.mul_(2)
    equal.append(torch.allclose(twin.decode(x), twin.strided(x)))
    equal.append(not torch.allclose(twin.decode(x), one(x)))
    return {
        "equal": [bool(value) for value in equal],
        "one": said(one),
        "other": said(other),
        "twin": said(twin.decode),
        "function": error_of(lambda: cachectl.cache_compile(zoo.rows, warm=cachectl.warm_start("recipe.yaml"))),
        "static": error_of(lambda: cachectl.cache_compile("text".upper, warm=cachectl.warm_start("recipe.yaml"))),
    }


def held() -> dict[str, Any]:
    """Outputs that are kept across calls, here and with the plain runtime that loaded its own cache."""
    receiver = zoo.build()
    cached = cached_of(receiver, "submodule")
    plain_folder = os.path.abspath("plain")
    for _ in range(2):  # The second one loads.
        plain = torch.npu.npugraph_ex.inference.cache_compile(
            receiver.submodule, cache_dir=plain_folder, dynamic=False, options=OPTIONS
        )
        plain(zoo.rows())
    found = []
    for call in (cached, plain):
        first = call(zoo.rows())
        kept = first.clone()
        call(zoo.rows() + 1)
        found.append(bool(torch.equal(first, kept)))
    return {"cachectl": found[0], "plain": found[1], **said(cached)}


def beyond_the_limit() -> dict[str, Any]:
    """One warm call after another with another graph key each, up to the runtime's limit and past it."""
    receiver = zoo.build()
    warm = cachectl.warm_start("recipe.yaml")
    cached = cachectl.cache_compile(receiver.plain_values, warm=warm, dynamic=True, options=OPTIONS)
    x, found = zoo.rows(), {}
    equal = True
    for n in range(2, 68):
        arguments = {"x": x, "flag": True, "name": "negative", "none": None, "n": n}
        equal &= bool(torch.allclose(cached(**arguments), receiver.plain_values(**arguments)))
        found[n] = cached.outcome
    return {"equal": equal, "outcomes": [found[2], found[65], found[66]], "start": warm.outcome, **said(cached)}


def folders() -> dict[str, Any]:
    """Cold compiles in a private folder that goes with the process, and not with a child that was forked."""
    receiver = zoo.build()
    cached = cached_of(receiver, "submodule")
    x = torch.ones(7, zoo.WIDTH)  # No case has it.
    equal = bool(torch.allclose(cached(x), receiver.submodule(x)))
    from cachectl.program import cold_folder

    folder = cold_folder(None)
    child = os.fork()
    if child == 0:
        sys.exit(0)  # Runs the exit handlers it got from its parent.
    os.waitpid(child, 0)
    return {
        "equal": equal,
        "kept": folder.is_dir(),
        "folder": str(folder),
        "mode": oct(folder.stat().st_mode & 0o777),
        **said(cached),
    }


if __name__ == "__main__":
    json.dump({name: globals()[name]() for name in sys.argv[1:]}, sys.stdout)
