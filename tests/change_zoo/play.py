"""Plays starts of a program, each in a process of its own: reads a list of them, prints what became of each.

torch and the runtime are imported once and the processes are forked from here, before any of the program's own modules
is imported: so a start costs what it does, and not the seconds of these imports.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import pkgutil
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch_npu

import cachectl
import cachectl.boot
import cachectl.identity
from cachectl.runtimes.npugraph_ex import NpuGraphEx

# What a first call imports, whoever makes it.
for name in ("inference", "npu_fx_compiler", "patterns.pattern_pass_manager", "_acl_concrete_graph.acl_graph"):
    importlib.import_module(f"npugraph_ex.{name}")
for name in ("_dynamo.testing", "_inductor.compile_fx", "_functorch.aot_autograd"):
    importlib.import_module(f"torch.{name}")


def play(start: dict[str, Any]) -> dict[str, Any]:
    """Run the program in its folder as the recipe there says, but for what the start says otherwise.

    A start is {"folder", "runtime": "cachectl" or the plain runtime's cache folder, "copy": what that folder is to be
    a copy of, "environ", "config", "options", "calls": [arguments of the inputs, a call each], "noise"}.
    """
    for name, value in start.get("environ", {}).items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    if start.get("noise"):
        other_clock_and_order()
    if "uid" in start:
        become(start["uid"])
    folder = start["folder"]
    os.chdir(start.get("cwd", folder))
    sys.path.insert(0, folder)
    with open(os.path.join(folder, "recipe.yaml"), encoding="utf-8") as file:
        recipe = json.load(file)
    program = importlib.import_module("model")
    decoder = program.build(**{**recipe["model"]["config"], **start.get("config", {})})
    usual = recipe["functions"][0]["cases"][0]["args"]
    calls = [program.inputs(decoder, 0, **{**usual, **arguments}) for arguments in start.get("calls", [{}])]
    with torch.no_grad():
        expected = [decoder.main_decode(**call) for call in calls]
    options = {**recipe["compile"]["options"], **start.get("options", {})}
    if start["runtime"] == "cachectl":
        warm = cachectl.warm_start(os.path.join(folder, "recipe.yaml"))
        method = cachectl.cache_compile(decoder.main_decode, warm=warm, dynamic=False, options=options)
        said = [
            {**called(method, call, right), "outcome": warm.outcome}
            for call, right in zip(calls, expected, strict=True)
        ]
        return {"calls": said, "reasons": [reason.to_json() for reason in warm.reasons], **here()}
    if "copy" in start:
        shutil.copytree(start["copy"], start["runtime"])
    os.makedirs(start["runtime"], mode=0o700, exist_ok=True)
    method = torch.npu.npugraph_ex.inference.cache_compile(
        decoder.main_decode, cache_dir=start["runtime"], dynamic=False, options=options
    )
    said = [called(method, call, right) for call, right in zip(calls, expected, strict=True)]
    return {"calls": said, "loaded": NpuGraphEx().was_loaded(method), **here()}


def called(method: Callable[..., Any], call: dict[str, Any], expected: torch.Tensor) -> dict[str, Any]:
    """Return how far a call's result is from eager's, or how it crashed."""
    try:
        found = method(**call)
    except Exception as error:  # noqa: BLE001 - how the plain runtime crashes is what is asked
        return {"error": None, "crash": f"{type(error).__name__}: {error}"}
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return {"error": float("inf"), "crash": None}
    return {"error": (found - expected).abs().max().item(), "crash": None}


def here() -> dict[str, Any]:
    """Return what this process runs on, in its own words."""
    return {
        "torch_npu": torch_npu.__version__,
        "soc": torch.npu.get_device_name(),
        "cann": torch_npu.npu.utils.get_cann_version(),
        "uid": os.getuid(),
        "host": os.uname().nodename,
        "cores": len(os.sched_getaffinity(0)),
        "hash": hash("text"),
    }


def other_clock_and_order() -> None:
    """Let this process live in 1970, and find the files of a folder in another order."""
    time.time, time.time_ns = lambda: 7.0, lambda: 7_000_000_000
    listdir = os.listdir
    os.listdir = lambda *place: sorted(listdir(*place), reverse=True)


def become(uid: int) -> None:
    """Become another user, who need not be able to read this interpreter's files: cachectl is imported before."""
    for package in (cachectl.boot, cachectl.identity):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def in_a_process_of_its_own(start: dict[str, Any]) -> dict[str, Any]:
    """Fork, play, and return what the child says, or how it ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            try:
                document = play(start)
            except BaseException:  # noqa: BLE001 - told to the test, which fails
                document = {"fault": traceback.format_exc()}
            with os.fdopen(writing, "w", encoding="utf-8") as file:
                json.dump(document, file)
            # What a program's own end does.
            atexit._run_exitfuncs()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as file:
        text = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    document = json.loads(text) if text else {"fault": f"ended with {status}"}
    return {**document, "seconds": sum(os.times()[2:4])}


if __name__ == "__main__":
    json.dump([in_a_process_of_its_own(start) for start in json.load(sys.stdin)], sys.stdout)
