"""The guard sheet of a 32-layer decoder: its size, its proof in fresh processes; and the check of every later call."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from measure import CHILDREN, EXAMPLE, THIS_CPU, Row, Samples, child_environ, run_child, scratch

import cachectl

NAME = "proof"
BUDGET = "3,500 guards ≤ 10 ms; the sheet ≤ 16 KB; a later call's check ≤ 5 µs for 8 tensors"
# As deep as that Dynamo sets some 3,500 guards.
LAYERS = 32


def run(quick: bool) -> list[Row]:
    with scratch() as folder:
        sheet = folder / "sheet.json"
        recorded = _child("guards.py", "record", str(LAYERS), str(sheet))
        proofs = [_child("guards.py", "prove", str(LAYERS), str(sheet)) for _ in range(2 if quick else 7)]
        calls = _child("calls.py", "3" if quick else "15")
    return [
        Row(
            f"proof of {recorded['guards']:,} guards of Dynamo's ({proofs[0]['guards']:,} facts), fresh process",
            Samples(tuple(item["seconds"] for item in proofs)),
            THIS_CPU,
            against_what="the same again, in one process",
            against=Samples(tuple(item["again_seconds"] for item in proofs)),
            budget="≤ 10 ms",
            value_max=0.010,
        ),
        Row(
            "  its sheet, canonical JSON",
            Samples((recorded["size_bytes"],)),
            THIS_CPU,
            unit="bytes",
            budget="≤ 16 KB",
            value_max=16_000,
        ),
        Row(
            "a later call's check, 8 tensors",
            Samples(tuple(calls["check"])),
            THIS_CPU,
            against_what="a loop over shape, stride, dtype, device",
            against=Samples(tuple(calls["loop"])),
            budget="≤ 5 µs",
            value_max=5e-6,
        ),
    ]


def _child(program: str, *arguments: str) -> dict[str, Any]:
    package = str(Path(cachectl.__file__).resolve().parents[1])
    search = os.pathsep.join([str(EXAMPLE), package])
    # torch without its NPU backend: guards are Dynamo's, and the proof is plain Python.
    environ = child_environ(TORCH_DEVICE_BACKEND_AUTOLOAD="0", PYTHONPATH=search)
    found: dict[str, Any] = json.loads(
        run_child([sys.executable, str(CHILDREN / program), *arguments], environ=environ).stdout
    )
    return found
