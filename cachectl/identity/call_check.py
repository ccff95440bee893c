"""The comparison of every later call with its case, in a few microseconds.

Owns the generated check. It says yes only where `inputs.check_call` finds no difference; a no may be wrong and is asked
again there, slowly. Generated once a case, because a loop over eight tensors' properties costs several times as much
(bench/README.md). Standard library only: torch's objects come from the caller.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cachectl.identity.relations import relation_term

__all__ = ["call_check"]

_CONSTANT = "_constant_"
_TENSOR_FIELDS = frozenset({"shape", "stride", "dtype", "device", "format", "requires_grad"})


def call_check(
    spec: Mapping[str, Any],
    signature: inspect.Signature,
    torch_name: Callable[[str], Any],
    relations: Sequence[Any] = (),
    tensor_types: Sequence[type] = (),
) -> Callable[..., bool] | None:
    """Return a function with the method's own signature that says whether a call fits the spec.

    It raises TypeError or AttributeError for arguments of other kinds; both mean no. What has all of a tensor's
    properties is taken for one.

    Args:
        spec: an input spec, with its dynamic ranges.
        signature: of the bound method.
        torch_name: gives torch's object of a name, such as `float32` or `strided`.
        tensor_types: the classes that a tensor may be of; a subclass is left to the slow comparison. None for any.
        relations: what has to hold between sizes and integers, see cachectl.identity.relations.

    Returns:
        The function; None where the spec holds what is not worth generating for (nested containers, private formats,
        variadic parameters): the slow comparison serves then.
    """
    constants: dict[str, Any] = {}
    terms: list[str] = []
    places: list[str] = []
    tensors: list[str] = []
    for name, parameter in signature.parameters.items():
        plain = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if not plain or not name.isidentifier() or keyword.iskeyword(name) or name.startswith(_CONSTANT):
            return None
        try:
            found = _terms(f"L['{name}']", name, spec, constants, torch_name, places, tensors)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None  # A spec that no recorder of ours writes.
        if found is None:
            return None
        terms += found
    if len(places) != len(spec):
        return None
    if tensor_types:
        kinds = _constant(constants, tuple(tensor_types))
        terms += [f"{_constant(constants, type)}({expression}) in {kinds}" for expression in tensors]
    if len(tensors) > 1:
        # Two places with one tensor: another graph. Looked at last, since it is rare.
        ids = ", ".join(f"{_constant(constants, id)}({expression})" for expression in tensors)
        terms.append(f"{_constant(constants, len)}({{{ids}}}) == {len(tensors)}")
    for tree in relations:
        term = relation_term(tree, signature.parameters)
        if term is None:
            return None
        terms.append(term)
    header = _header(signature, constants)
    source = f"def check({header}):\n    return {' and '.join(terms) or 'True'}\n"
    namespace: dict[str, Any] = dict(constants)
    exec(source, namespace)  # noqa: S102 - every name in it was checked above, every value is a constant beside it
    check: Callable[..., bool] = namespace["check"]
    return check


def _header(signature: inspect.Signature, constants: dict[str, Any]) -> str:
    words = []
    starred = False
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        if parameter.default is parameter.empty:
            words.append(name)
        else:
            words.append(f"{name}={_constant(constants, parameter.default)}")
    return ", ".join(words)


def _terms(
    place: str,
    expression: str,
    spec: Mapping[str, Any],
    constants: dict[str, Any],
    torch_name: Callable[[str], Any],
    places: list[str],
    tensors: list[str],
) -> list[str] | None:
    """Return the conditions for one leaf or one flat container; None for what is left to the slow comparison."""
    leaf = spec.get(place)
    if leaf is None:
        return None
    places.append(place)
    # Not by the builtins' names: a parameter may be called `type` or `len`.
    type_of = f"{_constant(constants, type)}({expression})"
    if "tensor" in leaf:
        if not {"same_as", "class"}.isdisjoint(leaf["tensor"]):
            return None
        tensors.append(expression)
        return _tensor_terms(expression, leaf["tensor"], constants, torch_name)
    if "integer" in leaf:
        return [f"{type_of} is {_constant(constants, int)}", *_range_terms(expression, leaf["integer"]["range"])]
    if "value" in leaf:
        value = leaf["value"]
        if value is None:
            return [f"{expression} is None"]
        if type(value) not in (bool, int, float, str) or (type(value) is float and not value):
            return None  # A stored infinity, and the two zeros, which only their texts tell apart.
        constant = _constant(constants, value)
        return [f"{type_of} is {_constant(constants, type(value))}", f"{expression} == {constant}"]
    for kind in (list, tuple):
        if kind.__name__ in leaf:
            length = int(leaf[kind.__name__])
            terms = [
                f"{type_of} is {_constant(constants, kind)}",
                f"{_constant(constants, len)}({expression}) == {length}",
            ]
            for index in range(length):
                inner = _terms(
                    f"{place}[{index}]", f"{expression}[{index}]", spec, constants, torch_name, places, tensors
                )
                if inner is None:
                    return None
                terms += inner
            return terms
    return None


def _tensor_terms(
    expression: str, tensor: Mapping[str, Any], constants: dict[str, Any], torch_name: Callable[[str], Any]
) -> list[str] | None:
    if tensor["format"] is not None or set(tensor) != _TENSOR_FIELDS:
        return None
    terms = [
        f"{expression}.layout is {_constant(constants, torch_name('strided'))}",
        f"{expression}.dtype is {_constant(constants, torch_name(tensor['dtype']))}",
        f"{expression}.device.type == {_constant(constants, tensor['device'])}",
        f"{expression}.requires_grad is {bool(tensor['requires_grad'])}",
    ]
    if any(isinstance(size, Mapping) for size in tensor["shape"]):
        terms.append(f"{_constant(constants, len)}({expression}.shape) == {len(tensor['shape'])}")
        for index, size in enumerate(tensor["shape"]):
            if isinstance(size, Mapping):
                terms += _range_terms(f"{expression}.shape[{index}]", size["range"])
            else:
                terms.append(f"{expression}.shape[{index}] == {int(size)}")
    else:
        terms.append(f"{expression}.shape == {_constant(constants, tuple(tensor['shape']))}")
    if tensor["stride"] == "contiguous":
        terms.append(f"{expression}.is_contiguous()")
    else:
        terms.append(f"{expression}.stride() == {_constant(constants, tuple(tensor['stride']))}")
    return terms


def _range_terms(expression: str, bounds: list[int | None]) -> list[str]:
    low, high = bounds
    return [
        *([f"{expression} >= {int(low)}"] if low is not None else []),
        *([f"{expression} <= {int(high)}"] if high is not None else []),
    ]


def _constant(constants: dict[str, Any], value: Any) -> str:
    name = f"{_CONSTANT}{len(constants)}"
    constants[name] = value
    return name
