"""The inputs part: what a call's arguments look like, leaf by leaf, and whether another call's look the same.

Owns the input spec. A spec maps the name that Dynamo gives a place (`L['x']`, `L['lengths'][0]`) to what stands there:
a tensor by shape, stride, dtype, device type, NPU format and whether it stands at an earlier place too; a plain value
by itself; a member of an enumeration, a dtype or a layout by its class and name; a container by its kind and length.
Dimensions and integers that stayed symbolic in the graph are ranges `[low, high]`, None for no bound. The runtime
compares none of this on load, and sizes and strides only in the first call of a process (measured), so the program's
process compares it on every call.

Standard library only: tensors are told by the tensor type that the caller passes in.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from cachectl.schemas.boot import Reason
from cachectl.schemas.canonical import canonical_bytes

__all__ = ["InputError", "bind_call", "check_call", "describe_call", "with_dynamic"]

_DEPTH_LIMIT = 16
_PLAIN_CLASSES = ("torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


class InputError(ValueError):
    """An argument that no spec can say; `place` names it as Dynamo would."""

    def __init__(self, place: str, kind: str) -> None:
        super().__init__(f"{place} is a {kind}, which an input spec can't say")
        self.place = place
        self.kind = kind


def bind_call(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by parameter name, defaults filled in: positional and keyword calls are equal.

    Raises:
        TypeError: the arguments don't fit the signature, in Python's own words.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def describe_call(
    arguments: Mapping[str, Any], tensor_type: type, format_of: Callable[[Any], int | None]
) -> dict[str, Any]:
    """Return the input spec of a call.

    Args:
        arguments: by parameter name, without the method's own `self`.
        tensor_type: torch.Tensor.
        format_of: gives a tensor's private NPU format (29 is FRACTAL_NZ), None off the device.

    Raises:
        InputError: a leaf of a kind that can't be compared in another process.
    """
    spec: dict[str, Any] = {}
    seen: dict[int, str] = {}
    for name, value in arguments.items():
        _describe(f"L['{name}']", value, tensor_type, format_of, spec, seen, 0)
    return spec


def with_dynamic(spec: Mapping[str, Any], dynamic: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec with the places that stayed symbolic replaced by their ranges.

    Args:
        spec: as `describe_call` gave it.
        dynamic: Dynamo's source name to `[low, high]`, as `L['x'].size()[0]` or `L['lengths'][0]`.
    """
    result: dict[str, Any] = {}
    for place, leaf in spec.items():
        if "tensor" in leaf:
            tensor = dict(leaf["tensor"])
            tensor["shape"] = [
                {"range": list(dynamic[f"{place}.size()[{index}]"])} if f"{place}.size()[{index}]" in dynamic else size
                for index, size in enumerate(tensor["shape"])
            ]
            if any(isinstance(size, dict) for size in tensor["shape"]):
                # A stride that is a product of symbolic sizes changes with them; contiguity is what stays.
                tensor["stride"] = "contiguous" if _is_contiguous(leaf["tensor"]) else leaf["tensor"]["stride"]
            result[place] = {"tensor": tensor}
        elif "value" in leaf and place in dynamic and type(leaf["value"]) is int:
            result[place] = {"integer": {"range": list(dynamic[place])}}
        else:
            result[place] = leaf
    return result


def check_call(
    spec: Mapping[str, Any], arguments: Mapping[str, Any], tensor_type: type, format_of: Callable[[Any], int | None]
) -> list[Reason]:
    """Compare a call with a spec; one reason for each place that differs, empty when the call fits."""
    try:
        found = describe_call(arguments, tensor_type, format_of)
    except InputError as error:
        return [
            Reason("inputs", error.place, None, error.kind, hint="pass tensors, numbers, strings or containers of them")
        ]
    reasons = []
    for place in sorted({*spec, *found}):
        stored, wanted = spec.get(place), found.get(place)
        if stored is None or wanted is None or not _leaf_fits(stored, wanted):
            reasons.append(
                Reason("inputs", place, _only_differing(stored, wanted), _only_differing(wanted, stored), hint=_HINT)
            )
    return reasons


_HINT = "add a case with these inputs to the recipe and run: cachectl build"


def _describe(
    place: str,
    value: Any,
    tensor_type: type,
    format_of: Callable[[Any], int | None],
    spec: dict[str, Any],
    seen: dict[int, str],
    depth: int,
) -> None:
    if depth > _DEPTH_LIMIT:
        raise InputError(place, "container nested too deeply")
    if isinstance(value, tensor_type):
        spec[place] = {"tensor": _describe_tensor(place, value, tensor_type, format_of)}
        # One tensor at two places is another graph than two tensors: Dynamo guards it, and the graph reads it once.
        first = seen.setdefault(id(value), place)
        if first != place:
            spec[place]["tensor"]["same_as"] = first
    elif value is None or type(value) in (bool, int, float, str):
        spec[place] = {"value": value}
    elif type(value) in (list, tuple):
        spec[place] = {type(value).__name__: len(value)}
        for index, member in enumerate(value):
            _describe(f"{place}[{index}]", member, tensor_type, format_of, spec, seen, depth + 1)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        spec[place] = {"namedtuple": f"{type(value).__module__}.{type(value).__qualname__}", "length": len(value)}
        for name, member in zip(value._fields, value, strict=True):
            _describe(f"{place}.{name}", member, tensor_type, format_of, spec, seen, depth + 1)
    elif type(value) is dict and all(isinstance(key, str) for key in value):
        # In its own order: a method that walks the dict computes in that order.
        spec[place] = {"dict": list(value)}
        for key in value:
            _describe(f"{place}['{key}']", value[key], tensor_type, format_of, spec, seen, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        spec[place] = {"dataclass": f"{type(value).__module__}.{type(value).__qualname__}"}
        for field in dataclasses.fields(value):
            if not hasattr(value, field.name):
                raise InputError(place, f"dataclass without its field {field.name}")
            _describe(
                f"{place}.{field.name}", getattr(value, field.name), tensor_type, format_of, spec, seen, depth + 1
            )
    elif (constant := _constant(value)) is not None:
        spec[place] = {"constant": constant}
    else:
        raise InputError(place, f"{type(value).__module__}.{type(value).__qualname__}")


def _constant(value: Any) -> Any:
    # Few calls have one, and the reader brings a parser along.
    from cachectl.identity.guard_reader import named_constant

    return named_constant(value)


def _describe_tensor(
    place: str, tensor: Any, tensor_type: type, format_of: Callable[[Any], int | None]
) -> dict[str, Any]:
    layout = str(tensor.layout)
    if layout != "torch.strided":
        raise InputError(place, f"tensor of layout {layout}")
    try:
        return {
            "shape": [int(size) for size in tensor.shape],
            "stride": [int(step) for step in tensor.stride()],
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": tensor.device.type,
            "format": format_of(tensor),
            "requires_grad": bool(tensor.requires_grad),
            **_class_of(tensor, tensor_type),
        }
    except (RuntimeError, TypeError) as error:
        # A nested tensor has no one shape; the call still has to run, cold.
        raise InputError(place, f"tensor without shape or strides ({error})") from error


def _class_of(tensor: Any, tensor_type: type) -> dict[str, str]:
    # Plain tensors and parameters, which are most, say nothing; a subclass dispatches in its own way.
    name = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    return {} if type(tensor) is tensor_type or name in _PLAIN_CLASSES else {"class": name}


def _leaf_fits(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    if "integer" in stored:
        value = wanted.get("value")
        return type(value) is int and _in_range(value, stored["integer"]["range"])
    if "tensor" in stored and "tensor" in wanted:
        left, right = stored["tensor"], wanted["tensor"]
        return (
            len(left["shape"]) == len(right["shape"])
            and all(
                _in_range(size, kept["range"]) if isinstance(kept, Mapping) else kept == size
                for kept, size in zip(left["shape"], right["shape"], strict=True)
            )
            and (_is_contiguous(right) if left["stride"] == "contiguous" else left["stride"] == right["stride"])
            and _without_layout(left) == _without_layout(right)
        )
    # By canonical bytes: 1, 1.0 and True, and 0.0 and -0.0, are equal to Python and different to the graph; a stored
    # infinity is {"$float": "inf"}, and nan is equal to itself.
    return canonical_bytes(stored) == canonical_bytes(wanted)


def _without_layout(tensor: Mapping[str, Any]) -> dict[str, Any]:
    # All that is recorded is compared, also what a newer recorder adds.
    return {name: value for name, value in tensor.items() if name not in ("shape", "stride")}


def _in_range(value: int, bounds: list[int | None]) -> bool:
    low, high = bounds
    return (low is None or value >= low) and (high is None or value <= high)


def _is_contiguous(tensor: Mapping[str, Any]) -> bool:
    if 0 in tensor["shape"]:
        return True
    expected = 1
    for size, step in zip(reversed(tensor["shape"]), reversed(tensor["stride"]), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _only_differing(leaf: Any, other: Any) -> Any:
    if isinstance(leaf, Mapping) and isinstance(other, Mapping) and "tensor" in leaf and "tensor" in other:
        return {name: value for name, value in leaf["tensor"].items() if value != other["tensor"].get(name)}
    return leaf
