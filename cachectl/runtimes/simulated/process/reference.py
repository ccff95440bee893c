"""How a reference operator is described and registered: one function, what it covers, and a refusal for the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Reference", "SimulationUnsupportedError", "adapter", "operator", "output_dtype_of"]


class SimulationUnsupportedError(NotImplementedError):
    """An npu operator, or a use of one, that the simulation has no reference for."""


@dataclass(frozen=True)
class Reference:
    """One reference operator.

    Args:
        name: operator with its overload, without the npu namespace, such as "scatter_update_" or "npu_x.out".
        function: takes those schema arguments by name that it supports; any other, given a value that is not its
            default, is refused.
        covers: what is covered, for people.
        ignored: arguments that change nothing in the result, such as tuning hints; "*" is all of them.
    """

    name: str
    function: Callable[..., Any]
    covers: str
    ignored: tuple[str, ...] = ()


def operator(name: str) -> Any:
    """Return the overload object of torch.ops.npu that `name` means, or None in a torch_npu that lacks it."""
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.npu, base, None)
    return None if packet is None else getattr(packet, overload or "default", None)


def adapter(reference: Reference) -> Callable[..., Any]:
    """Return the kernel to register: binds a call to the schema and refuses what the reference does not cover."""
    schema = operator(reference.name)._schema
    taken = frozenset(inspect.signature(reference.function).parameters)
    ignores_all = "*" in reference.ignored
    arguments = [(argument.name, argument.default_value) for argument in schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = {}
        for index, (name, default) in enumerate(arguments):
            value = args[index] if index < len(args) else kwargs.get(name, default)
            if name in taken:
                call[name] = value
            elif not (ignores_all or name in reference.ignored or value is None or _is_default(value, default)):
                raise SimulationUnsupportedError(
                    f"npu::{reference.name} with {name}={_brief(value)}: the simulation's reference covers "
                    f"{reference.covers}"
                )
        return reference.function(**call)

    return kernel


def _is_default(value: Any, default: Any) -> bool:
    return not isinstance(value, (torch.Tensor, list)) and value == default


def _brief(value: Any) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


# ScalarType numbers of c10: how torch_npu passes an output type as an int.
_SCALAR_TYPES = {
    1: torch.int8,
    3: torch.int32,
    5: torch.float16,
    6: torch.float32,
    12: torch.int8,  # qint8 and qint32: a device returns the plain types
    14: torch.int32,
    15: torch.bfloat16,
}


def output_dtype_of(value: int | torch.dtype | None, default: torch.dtype) -> torch.dtype:
    """Return the dtype that a c10 ScalarType number, a dtype or None (the default) means.

    Raises:
        SimulationUnsupportedError: a type the references do not make, such as int4 and float8.
    """
    if value is None:
        return default
    found = value if isinstance(value, torch.dtype) else _SCALAR_TYPES.get(value)
    if found is None:
        raise SimulationUnsupportedError(f"output type number {value}: the simulation makes int8, int32 and floats")
    return found
