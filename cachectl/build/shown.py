"""What an entry says of its gates beyond equal values: rungs of the ladder, golden outputs, captures, seconds.

Owns the form of the manifest's `provenance.shown`. The first process leaves what the second compares; what goes into
the entry is the second one's, which has nothing but the artifact. Rank processes only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cachectl.build.steps import Ran
    from cachectl.runtimes.captures import Captures, GraphKeys

__all__ = ["captured", "shown_by_recording", "shown_by_reloading", "static_kernels_rung"]


def captured(runtime: Any, before: Captures | None) -> Captures | None:
    """Return what graph captures came to since an earlier count; None where this wheel can't be asked."""
    after: Captures | None = runtime.captures()
    return after.since(before) if after is not None and before is not None else None


def shown_by_recording(ran: Ran, held: Mapping[str, list[str]], captures: Captures | None) -> dict[str, Any]:
    """Return what the first process leaves for the second one."""
    return {
        "inputs": ran.inputs,
        "outputs": [step["digest"] for step in ran.golden],
        "held": dict(held),
        "seconds": {"first_call": ran.seconds[0], **_capture_seconds(captures)},
    }


def shown_by_reloading(
    ran: Ran,
    held: Mapping[str, list[str]],
    captures: Captures | None,
    *,
    recorded: Mapping[str, Any] | None,
    keys: GraphKeys,
    seconds: Mapping[str, float],
    static_kernels: str,
    rtol: float,
    atol: float,
) -> dict[str, Any]:
    """Return `provenance.shown`.

    Args:
        ran: the loaded artifact's steps.
        recorded: what the first process left; None where it was a program under `exec --record`, whose values are its
            own matter.
        keys: as predicted from the artifact.
        seconds: of the warm first call's stages.
        static_kernels: the last rung's word.
    """
    warm_up = {
        "inputs_digest": ran.inputs,
        "inputs_repeat": recorded["inputs"] == ran.inputs if recorded else None,
        "exact": recorded["outputs"] == [step["digest"] for step in ran.golden] if recorded else None,
        "rtol": rtol,
        "atol": atol,
        "steps": ran.golden,
    }
    counted: dict[str, int] = {}
    warning = keys.warning
    if captures is not None:
        counted = {
            "captured": captures.captured,
            "recaptured": captures.recaptured,
            "fell_back": captures.fell_back,
        }
        if captures.fell_back and warning is None:
            warning = (
                f"an argument that the graph writes had moved, and capture_limit is {keys.limit}: from the first move "
                "on the runtime runs this method eagerly"
            )
    return {
        "rungs": {**dict.fromkeys(("eager", "graph", "accuracy", "cache"), "passed"), "static_kernels": static_kernels},
        "warm_up": warm_up,
        "held": dict(held),
        "captures": {**asdict(keys), **counted, "warning": warning},
        "seconds": {
            "warm": {**seconds, **_capture_seconds(captures)},
            **({"cold": recorded["seconds"]} if recorded else {}),
        },
    }


def static_kernels_rung(options: Mapping[str, Any], folder: Path) -> str:
    """Return the word of the last rung: whether static kernels were asked for, and are with the artifact.

    Only each node's local rank 0 saves them (torch_npu: static_kernel.py).
    """
    if options.get("static_kernel_compile") is not True:
        return "not asked"
    return "passed" if any(folder.rglob("*.run")) else "none saved"


def _capture_seconds(captures: Captures | None) -> dict[str, float]:
    return {"capture": captures.seconds, "warm_up": captures.warm_up_seconds} if captures is not None else {}
