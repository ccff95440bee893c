"""Time the check of a later call of 8 tensors beside a plain loop: `python calls.py ROUNDS`; prints one document."""

from __future__ import annotations

import inspect
import json
import sys
import timeit
from typing import Any

import torch
from torch import Tensor

from cachectl.identity.call_check import call_check
from cachectl.identity.inputs import describe_call

CALLS = 20_000


class Model:
    """Eight tensors by keyword, as a decode step takes them."""

    def step(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor, h: Tensor) -> None:
        """Take the tensors."""


inputs = {name: torch.zeros(4, 64 + number) for number, name in enumerate("abcdefgh")}
spec = describe_call(inputs, torch.Tensor, lambda tensor: None)
check = call_check(spec, inspect.signature(Model().step), lambda name: getattr(torch, name))
if check is None or not check(**inputs):
    sys.exit("no check was generated, or it refuses the call it was made for")
kept = {name: (x.shape, x.stride(), x.dtype, x.device) for name, x in inputs.items()}


def loop(**call: Any) -> bool:
    for name, (shape, stride, dtype, device) in kept.items():
        x = call[name]
        if x.shape != shape or x.stride() != stride or x.dtype is not dtype or x.device != device:
            return False
    return True


times: dict[str, list[float]] = {"check": [], "loop": []}
for _ in range(int(sys.argv[1])):
    times["check"].append(timeit.timeit(lambda: check(**inputs), number=CALLS) / CALLS)
    times["loop"].append(timeit.timeit(lambda: loop(**inputs), number=CALLS) / CALLS)
print(json.dumps(times))
