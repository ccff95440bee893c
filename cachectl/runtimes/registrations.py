"""What a process has registered with torch and torch_npu that shapes a graph and stands in no option.

Owns the reading of live registries: Dynamo's and AOT's configuration, npugraph_ex's patterns, decompositions, patched
collectives and the operators of a graph. What torch and torch_npu register themselves is in the toolchain; only what
somebody else put there is told. torchair's converters reach ge_graph only. Read-only: nothing is imported that the
process has not imported, nothing is registered or called.

Facts: torch 2.13 torch/utils/_config_module.py (`_config`: name → entry with default and alias), _decomp/__init__.py
(`global_decomposition_table`), _inductor/pattern_matcher.py (`register_replacement`: the entry's check closes over
search, replacement and extra check), _library/simple_registry.py and custom_ops.py (`OPDEFS`); torch_npu 2.13
dynamo/npugraph_ex/patterns/pattern_pass_manager.py (`_pattern_manager().pass_dict`).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from cachectl.identity.callables import Undigestible, callable_digest, home_module
from cachectl.identity.options import DYNAMO_NOISE
from cachectl.schemas.canonical import canonical_bytes, digest_of

__all__ = ["changed_config", "digest_or_text", "registrations", "registered_operators"]

# Whose registrations the toolchain stands for.
_VENDORS = frozenset({"torch", "torch_npu", "npugraph_ex", "torchair", "torchgen", "functorch"})
_CONFIGS = {"dynamo": "torch._dynamo.config", "functorch": "torch._functorch.config"}
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "recv",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "send",
)
# The operators that torch itself defines.
_OWN_NAMESPACES = frozenset({"aten", "prim", "prims", "inductor", "quantized"})


def registrations(*, strict: bool) -> dict[str, dict[str, Any]]:
    """Return, group by group, what others than torch and torch_npu have configured and registered in this process.

    Args:
        strict: raise for a function that can't be digested; else its description is a text that equals no digest.

    Raises:
        Undigestible: only if strict.
    """
    digest = digest_or_text(strict)
    found = {group: changed_config(sys.modules.get(module)) for group, module in _CONFIGS.items()}
    found["patterns"] = dict(_numbered(_patterns(digest)))
    found["decompositions"] = dict(_decompositions(digest))
    found["collectives"] = dict(_collectives())
    return {group: values for group, values in found.items() if values}


def digest_or_text(strict: bool) -> Callable[[Any], str]:
    """Return how functions are digested: raising where they can't be, or saying so in the digest's place."""
    if strict:
        return callable_digest

    def digest(function: Any) -> str:
        try:
            return callable_digest(function)
        except Undigestible as error:
            return f"can't be digested: {error}"

    return digest


def changed_config(module: Any) -> dict[str, Any]:
    """Return the fields of a torch configuration module that differ from torch's defaults, noise left out.

    An entry counts by its value; one that no document can say counts by its type and its code, where it has any.
    """
    fields = {}
    for name, entry in sorted(getattr(module, "_config", {}).items()):
        if name in DYNAMO_NOISE or name == "_save_config_ignore" or getattr(entry, "deprecated", False):
            continue
        if getattr(entry, "alias", None) is not None:
            continue
        value, default = getattr(module, name), getattr(entry, "default", None)
        said, meant = _said(value), _said(default)
        if said != meant:
            fields[name] = said
    return fields


def registered_operators(names: Iterable[str], *, strict: bool) -> dict[str, Any]:
    """Return what stands for the operators that others than torch define, of these in a graph.

    Args:
        names: as an artifact's reader gives them, `<namespace>.<name>.<overload>`.
        strict: as for `registrations`.

    Returns:
        By name the schema and, where Python code defines them, the digests of its fake implementation and of kernels
        that are in the operator's own table; None for an operator that this process does not have.
    """
    digest = digest_or_text(strict)
    torch = sys.modules["torch"]
    found: dict[str, Any] = {}
    for name in sorted(set(names)):
        namespace, _, rest = name.partition(".")
        if namespace in _OWN_NAMESPACES or not rest:
            continue
        operator: Any = torch.ops
        for step in (namespace, *rest.split(".")):
            operator = getattr(operator, step, None)
        schema = getattr(operator, "_schema", None)
        if schema is None:
            found[name] = None
            continue
        kernels = {
            str(key): digest(kernel)
            for key, kernel in sorted(getattr(operator, "py_kernels", {}).items(), key=lambda item: str(item[0]))
            if _is_foreign(kernel)
        }
        # An overload's fake is registered under the overload's own name.
        overload = str(schema.overload_name)
        for kernel in _fakes(f"{schema.name}.{overload}" if overload else str(schema.name)):
            kernels["fake"] = digest(kernel)
        found[name] = {"schema": str(schema), "kernels": kernels}
    return found


def _said(value: Any) -> Any:
    if isinstance(value, types.FunctionType):
        return digest_or_text(False)(value)
    if isinstance(value, (set, frozenset, list, tuple)):
        members = [_said(item) for item in value]
        return sorted(members, key=canonical_bytes) if isinstance(value, (set, frozenset)) else members
    if isinstance(value, Mapping):
        return {str(key): _said(item) for key, item in value.items()}
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _is_foreign(function: Any) -> bool:
    return callable(function) and home_module(function).partition(".")[0] not in _VENDORS


def _fakes(name: str) -> Iterator[Any]:
    """Yield the foreign Python function behind an operator's fake implementation, if there is one."""
    registry = getattr(sys.modules.get("torch._library.simple_registry"), "singleton", None)
    entry = registry.get(name) if registry is not None and hasattr(registry, "get") else None
    definition = getattr(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {}).get(name)
    kernel = getattr(getattr(entry, "fake_impl", None), "kernel", None)
    registered = getattr(kernel, "func", None)
    # torch puts a fake that a module registers under a check of its own, which has it in its closure (torch 2.13
    # library.py `_check_pystubs_once`).
    for function in (getattr(definition, "_abstract_fn", None), registered, *_closure(registered).values()):
        if _is_foreign(function):
            yield function
            return


def _patterns(digest: Callable[[Any], str]) -> Iterator[tuple[str, Any]]:
    """Yield name and digest of each foreign pattern, in the order in which they are tried."""
    manager = getattr(
        sys.modules.get("npugraph_ex.patterns.pattern_pass_manager"), "_global_pattern_pass_manager", None
    )
    entries = getattr(getattr(manager, "pass_dict", None), "patterns", {})
    seen: set[int] = set()
    for items in entries.values():
        for entry in items:
            if id(entry) in seen:
                continue
            seen.add(id(entry))
            closed = _closure(getattr(entry, "extra_check", None))
            search, replace = closed.get("search_fn"), closed.get("replace_fn")
            check = _closure(closed.get("extra_check")).get("extra_check", closed.get("extra_check"))
            if not any(_is_foreign(function) for function in (search, replace, check)):
                continue
            inputs = [_described_input(value) for value in closed.get("example_inputs") or ()]
            workaround = {str(name): _said(value) for name, value in (closed.get("scalar_workaround") or {}).items()}
            yield (
                str(getattr(search, "__qualname__", type(search).__qualname__)),
                digest_of([digest(search), digest(replace), digest(check), inputs, workaround]),
            )


def _described_input(value: Any) -> Any:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return [[str(size) for size in value.shape], str(value.dtype)]
    return _said(value)


def _closure(function: Any) -> dict[str, Any]:
    cells = {}
    if isinstance(function, types.FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                cells[name] = cell.cell_contents
            except ValueError:
                continue
    return cells


def _numbered(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Give equal names a number, in their order: patterns are tried one after the other."""
    for number, (name, value) in enumerate(pairs):
        yield f"{number} {name}", value


def _decompositions(digest: Callable[[Any], str]) -> Iterator[tuple[str, str]]:
    tables = getattr(sys.modules.get("torch._decomp"), "global_decomposition_table", {})
    for kind, table in tables.items():
        for operator, function in table.items():
            if _is_foreign(function):
                yield f"{kind} {operator}", digest(function)


def _collectives() -> Iterator[tuple[str, str]]:
    distributed = sys.modules.get("torch.distributed")
    for name in _COLLECTIVES:
        function = getattr(distributed, name, None)
        if function is not None and not home_module(function).startswith("torch.distributed"):
            yield name, f"{home_module(function)}:{getattr(function, '__qualname__', name)}"
