"""Calls to describe and compare without torch: a tensor that is only what an input spec asks of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.strategies import TEXTS


@dataclass(frozen=True)
class Device:
    type: str = "cpu"


class DType:
    """One object for each dtype or layout, printed as torch prints it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"

    __repr__ = __str__


DTYPES = {name: DType(name) for name in ("float32", "float16", "bfloat16", "int64")}
# What torch has by name, as far as a generated check asks for it.
STRIDED, SPARSE = DType("strided"), DType("sparse_coo")
TORCH = {**DTYPES, "strided": STRIDED}


@dataclass(frozen=True, eq=False)
class Tensor:
    """What a spec asks of a tensor."""

    shape: tuple[int, ...] = (2, 4)
    strides: tuple[int, ...] = (4, 1)
    dtype: DType = DTYPES["float32"]
    device: Device = Device()
    requires_grad: bool = False
    npu_format: int = 2
    layout: DType = STRIDED

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def is_contiguous(self) -> bool:
        if 0 in self.shape:
            return True
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and step != expected:
                return False
            expected *= size
        return True


class Nested(Tensor):
    """A tensor without strides, as torch's nested ones."""

    def stride(self) -> tuple[int, ...]:
        raise RuntimeError("nested tensors do not have strides")


def format_of(tensor: Tensor) -> int | None:
    """Return a tensor's private format: there is one on the device and nowhere else."""
    return tensor.npu_format if tensor.device.type == "npu" else None


def contiguous(*shape: int, **changes: Any) -> Tensor:
    """Return a contiguous tensor of some shape."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return replace(Tensor(shape, tuple(reversed(strides))), **changes)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Cache:
    keys: Any
    length: int = 0


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
TENSORS = SHAPES.flatmap(
    lambda shape: st.builds(
        Tensor,
        shape=st.just(shape),
        strides=st.just(contiguous(*shape).strides) | st.tuples(*[st.integers(0, 4) for _ in shape]),
        dtype=st.sampled_from(list(DTYPES.values())),
        device=st.sampled_from([Device(), Device("npu")]),
        requires_grad=st.booleans(),
        npu_format=st.sampled_from([2, 29]),
        layout=st.just(STRIDED),
    )
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(width=16) | st.sampled_from([0.0, -0.0, 1.0]) | TEXTS
)
LEAVES = TENSORS | SCALARS
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.builds(Pair, inner, inner)
        | st.builds(Cache, inner)
        | st.dictionaries(TEXTS, inner, max_size=3)
    ),
    max_leaves=8,
)
CALLS = st.dictionaries(st.sampled_from(["x", "y", "lengths"]), VALUES, max_size=3)
