"""Dynamo's guards of one compilation, read as a guard sheet.

Owns the way from Dynamo's private guard objects to plain facts. Each guard is read where Dynamo has just built its own
check for it, with the same value in hand, and becomes a fact of cachectl.identity.guards or a line in `unrepresented`;
no guard is dropped in silence, and a type of guard that this program doesn't know is unrepresented too. Guards that a
program's own guard filter leaves out are kept: a filter saves time at each call, and the proof runs once.

Kept apart on purpose from what torch compares:

- the number of threads is left out (torchrun changes it), and a device's index is relative to the current device;
- a class, function or module is the one of that name, and a Python function the one with that code, since addresses
  say nothing in another process;
- hook dicts that were empty have to be empty, torch's global ones too, though torch skips them by default
  (skip_nnmodule_hook_guards);
- the methods that were traced have to be those that the live classes give: torch doesn't look at a class again, and
  would run the old graph after a monkeypatch;
- an OrderedDict that was walked has to be in the order that it iterates in;
- 0.0 is not -0.0, and constants inside a tuple keep their types: (1, True) is not (1, 1);
- memory that two tensors share, or don't, is compared for all that torch looks at for aliasing, not only for those
  that the compiler found to share some.

A string under a name with KEY, TOKEN, SECRET or PASSWORD is neither stored nor hashed, and to compare its type alone
would let a changed one pass: such a guard is unrepresented, and the build fails naming the attribute. So are URL
credentials and absolute paths.

Runs in rank processes, where torch is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from cachectl.build.guard_ambient import Ambient, concrete
from cachectl.build.guard_environment import guarded_variable
from cachectl.build.guard_places import keyword_of
from cachectl.build.guard_relations import Relations, joined
from cachectl.build.lookups import Lookups
from cachectl.build.untraced import UntracedRecorder
from cachectl.identity.guard_paths import secret_name
from cachectl.identity.guard_values import Unsayable, in_order, length_of, members_of, plain_value
from cachectl.schemas.canonical import canonical_bytes

__all__ = ["RecordedGuards", "location_of", "read_guards"]

# torch_npu adds a guard of its own while it compiles (torch_npu 2.13: dynamo/_deterministic_guard.py), a plain function
# with no type that could name it.
_DETERMINISM_MODULE = "torch_npu.dynamo._deterministic_guard"


@dataclass(frozen=True)
class RecordedGuards:
    """What one compilation guarded.

    Args:
        sheet: the guard sheet; see cachectl.identity.guards.
        unrepresented: guards that no sheet can hold, each by type, source, why, and the user's line.
        dynamic: Dynamo's names of sizes and integers that stayed symbolic, with their bounds, None for no bound.
        guard_count: how many guards Dynamo made.
        code_location: file, line and name of the compiled code, for messages.
        variables: environment variables that were guarded; they are no part of the sheet.
    """

    sheet: dict[str, Any]
    unrepresented: list[str]
    dynamic: dict[str, list[int | None]]
    guard_count: int
    code_location: str
    variables: frozenset[str] = frozenset()


def read_guards(
    graph: Any, builder: Any, lookups: Lookups | None = None, untraced: UntracedRecorder | None = None
) -> RecordedGuards:
    """Read what one compilation guarded.

    Args:
        graph: Dynamo's output graph.
        builder: the GuardBuilder that has just made Dynamo's own checks.
        lookups: what was looked for meanwhile.
        untraced: what ran meanwhile without being traced.
    """
    reading = _Reading(graph, builder, lookups or Lookups())
    if untraced is not None:
        reading.add_untraced(untraced)
    return reading.recorded()


def location_of(code: CodeType) -> str:
    """Return file, line and name of code, for messages."""
    return f"{code.co_filename}:{code.co_firstlineno} {getattr(code, 'co_qualname', code.co_name)}"


class _Reading(Relations, Ambient):
    """One compilation while it is read."""

    def recorded(self) -> RecordedGuards:
        guards = sorted(self.graph.guards, key=lambda guard: (guard.name, guard.create_fn_name()))
        for guard in guards:
            try:
                self.add(guard)
            except Unsayable as error:
                self.refuse(guard, str(error))
        self.add_methods()
        self.add_key_orders()
        self.add_absences()
        self.add_identities()
        self.add_unplaced()
        self.add_compiler_guards()
        self.sheet.add_groups("group", joined(self.pairs))
        self.add_memory()
        return RecordedGuards(
            sheet=self.sheet.sheet(),
            unrepresented=sorted(self.unrepresented),
            dynamic=self.dynamic(),
            guard_count=len(guards),
            code_location=location_of(self.builder.f_code),
            variables=frozenset(self.variables),
        )

    def add(self, guard: Any) -> None:
        if (variable := guarded_variable(self.builder, guard)) is not None:
            self.variables.add(variable)
            return
        kind = guard.create_fn_name()
        handler = _HANDLERS.get(kind)
        if getattr(guard.create_fn, "__module__", "") == _DETERMINISM_MODULE:
            handler = _Reading.add_deterministic_level
        if handler is None:
            raise Unsayable("a type of guard that this program doesn't know")
        handler(self, guard)

    def constant(self, guard: Any, value: Any) -> Any:
        """Return a guarded constant as JSON, unless it is a string under a secret's name."""
        said = self.reader.value(value)
        name = secret_name(self.path(guard.originating_source))
        if name is not None and _holds_text(said):
            raise Unsayable(
                f"a string under the name {name}, which may be a secret: rename it or keep it out of the graph"
            )
        return said

    # Guards on one value.

    def add_type(self, guard: Any) -> None:
        value = self.value(guard)
        path = self.path(guard.originating_source)
        self.put(path, *self.reader.type_fact(type(value)))
        self.classes[path] = type(value)
        if path[0].startswith("I:torch.") and path[-1].startswith("._global_") and isinstance(value, dict):
            # torch.nn's hooks for every module. A trace runs them, and torch guards their dict's type alone.
            self.put(path, "length", length_of(value))

    def add_identity(self, guard: Any) -> None:
        value = self.value(guard)
        identity = self.reader.identity(value)
        if isinstance(value, type):
            self.homes.setdefault(value, self.path(guard.originating_source))
        if identity[0] == "value":
            self.fact(guard, "equals", self.constant(guard, value))
        else:
            self.fact(guard, "is", identity)

    def add_instance(self, guard: Any) -> None:
        raise Unsayable("a module that is guarded by its address; leave inline_inbuilt_nn_modules on")

    def add_constant(self, guard: Any) -> None:
        value = self.value(guard)
        if type(value) is CodeType:
            self.fact(guard, "is", self.reader.identity(value))
        else:
            self.fact(guard, "equals", self.constant(guard, value))

    def add_base_constant(self, guard: Any) -> None:
        self.fact(guard, "base", self.constant(guard, plain_value(self.value(guard))))

    def add_present(self, guard: Any) -> None:
        self.fact(guard, "present")

    def add_attribute(self, guard: Any) -> None:
        name = keyword_of(guard, "attr")
        self.fact(guard, "has", name, hasattr(self.value(guard), name))

    def add_absence(self, guard: Any) -> None:
        self.fact(guard, "absent", keyword_of(guard, "attr"))

    def add_length(self, guard: Any) -> None:
        value = self.value(guard)
        if not isinstance(value, dict):
            self.fact(guard, *self.reader.type_fact(type(value)))
        self.fact(guard, "length", length_of(value))

    def add_contains(self, guard: Any, *, held: bool) -> None:
        self.fact(guard, "contains", self.reader.member(keyword_of(guard, "key")), held)

    def add_keys(self, guard: Any) -> None:
        value = self.value(guard)
        if value is self.registry:
            self.fact(guard, "registered", self.reader.registered(value))
        elif isinstance(value, dict):
            # In its order, whether or not torch compares that: it doesn't for a dict that is unpacked with `**`.
            self.add_ordered_keys(guard)
        else:
            self.fact(guard, "keys", sorted(map(self.reader.member, members_of(value)), key=canonical_bytes))

    def add_ordered_keys(self, guard: Any) -> None:
        self.fact(guard, "ordered", list(map(self.reader.member, in_order(self.value(guard)))))

    def add_iterator(self, guard: Any) -> None:
        self.fact(guard, *self.reader.iterator(self.value(guard)))

    def add_tensor(self, guard: Any) -> None:
        held = keyword_of(guard, "value", None)
        value = held() if callable(held) and not isinstance(held, self.reader.torch.Tensor) else held
        value = self.value(guard) if value is None else value
        if guard.is_specialized_nn_module() or guard.originating_source.is_dict_key():
            raise Unsayable("a tensor that is guarded by its address")
        fact = self.reader.tensor(value)
        sizes = self.graph.input_source_to_sizes_strides[guard.originating_source]
        fact["shape"] = [concrete(size) for size in sizes["size"]]
        if fact["stride"] is not None:
            fact["stride"] = [concrete(step) for step in sizes["stride"]]
        path = self.path(guard.originating_source)
        self.put(path, "tensor", fact)
        if guard.name in self.apart_names:
            self.put(path, "apart")
            self.apart[path] = value

    def add_opaque(self, guard: Any) -> None:
        """Keep which process group it is: torch bakes its name and size into the graph and compares neither."""
        value = self.value(guard)
        if type(value).__name__ != "ProcessGroup":
            self.refuse_metadata(guard)
        self.fact(guard, "is", self.reader.identity(value))

    def refuse_metadata(self, guard: Any) -> None:
        raise Unsayable(f"what a {self.reader.class_name(type(self.value(guard)))} says of itself")


def _holds_text(said: Any) -> bool:
    if isinstance(said, dict):
        # An enum's or class's name is no secret.
        return any(_holds_text(value) for tag, value in said.items() if tag in _HOLDING_TAGS or tag == "$bytes")
    if isinstance(said, list):
        return any(map(_holds_text, said))
    return isinstance(said, str)


_HOLDING_TAGS = frozenset({"$tuple", "$list", "$set", "$frozenset", "$keys", "$fields"})

_HANDLERS: Mapping[str, Callable[[_Reading, Any], None]] = {
    "TYPE_MATCH": _Reading.add_type,
    "FAKE_SCRIPT_TYPE_MATCH": _Reading.add_type,
    "ID_MATCH": _Reading.add_identity,
    "FUNCTION_MATCH": _Reading.add_identity,
    "CLASS_MATCH": _Reading.add_identity,
    "MODULE_MATCH": _Reading.add_identity,
    "CLOSURE_MATCH": _Reading.add_identity,
    "BUILTIN_MATCH": _Reading.add_identity,
    "NN_MODULE": _Reading.add_instance,
    "EQUALS_MATCH": _Reading.add_constant,
    "CONSTANT_MATCH": _Reading.add_constant,
    "BOOL_MATCH": _Reading.add_constant,
    "NONE_MATCH": _Reading.add_constant,
    "CONSTANT_SUBCLASS_MATCH": _Reading.add_base_constant,
    "DISPATCH_KEY_SET_MATCH": _Reading.add_constant,
    "NOT_NONE_MATCH": _Reading.add_present,
    "WEAKREF_ALIVE": _Reading.add_present,
    "HASATTR": _Reading.add_attribute,
    "NOT_PRESENT_IN_GENERIC_DICT": _Reading.add_absence,
    "SEQUENCE_LENGTH": _Reading.add_length,
    "EMPTY_NN_MODULE_HOOKS_DICT": _Reading.add_length,
    "DICT_CONTAINS": functools.partial(_Reading.add_contains, held=True),
    "DICT_NOT_CONTAINS": functools.partial(_Reading.add_contains, held=False),
    "SET_CONTAINS": functools.partial(_Reading.add_contains, held=True),
    "SET_NOT_CONTAINS": functools.partial(_Reading.add_contains, held=False),
    "DICT_KEYS_MATCH": _Reading.add_keys,
    "DICT_VERSION": _Reading.add_keys,
    "MAPPING_KEYS_CHECK": _Reading.add_ordered_keys,
    "TUPLE_ITERATOR_LEN": _Reading.add_iterator,
    "RANGE_ITERATOR_MATCH": _Reading.add_iterator,
    "COUNT_ITERATOR_MATCH": _Reading.add_iterator,
    "TENSOR_MATCH": _Reading.add_tensor,
    "TENSOR_SUBCLASS_METADATA_MATCH": _Reading.refuse_metadata,
    "DTENSOR_SPEC_MATCH": _Reading.refuse_metadata,
    "OPAQUE_OBJ_GUARD_FN_MATCH": _Reading.add_opaque,
    "DUPLICATE_INPUT": _Reading.add_pair,
    "GLOBAL_STATE": _Reading.add_global_state,
    "TORCH_FUNCTION_STATE": _Reading.add_function_modes,
    "DEFAULT_DEVICE": _Reading.add_default_device,
    "AUTOGRAD_SAVED_TENSORS_HOOKS": _Reading.add_saved_tensors_hooks,
    "FUNCTORCH_STACK_MATCH": _Reading.add_functorch,
    "DUAL_LEVEL": _Reading.add_forward_ad,
    "GRAD_MODE": _Reading.ignore,
    "DETERMINISTIC_ALGORITHMS": _Reading.ignore,
    "FSDP_TRAINING_STATE": _Reading.ignore,
    "SHAPE_ENV": _Reading.add_expressions,
}
