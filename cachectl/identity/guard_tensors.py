"""Tensors, devices and the state around a call as plain JSON, as torch's own guards look at them.

Owns what of torch's objects goes into a guard sheet. Torch is passed in and its private names are looked up when they
are read; nothing is imported. Standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from cachectl.identity.guard_classes import class_name, lineage, patched_members

__all__ = ["TensorReader", "fits_strides"]

# A tensor's dimension markings, compared as torch compares them: the live ones have to be among the recorded ones.
_MARKS = (
    "_dynamo_dynamic_indices",
    "_dynamo_weak_dynamic_indices",
    "_dynamo_unbacked_indices",
    "_dynamo_strict_unbacked_indices",
    "_dynamo_static_indices",
)
# Threads are placement: torchrun sets OMP_NUM_THREADS=1 where a build without it has as many as there are cores.
_NOISE = frozenset({"num_threads"})


class TensorReader:
    """Reads classes, tensors, devices and ambient state of one process.

    Args:
        torch: the imported module; None where no tensor, device or ambient state will be read.
    """

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self._class_names: dict[type, str] = {}
        self._lineages: dict[type, list[str]] = {}
        self._devices: dict[Any, str] = {}
        self._dtypes: dict[Any, str] = {}
        self._key_sets: dict[int, str] = {}
        self._format_of: Callable[[Any], int] | None = getattr(sys.modules.get("torch_npu"), "get_npu_format", None)
        self._local_keys: tuple[int, int] | None = None

    def class_name(self, kind: type) -> str:
        """Return what `class_name` does, remembered."""
        name = self._class_names.get(kind)
        if name is None:
            name = self._class_names[kind] = class_name(kind)
        return name

    def lineage(self, kind: type) -> list[str]:
        """Return what `lineage` does, remembered."""
        found = self._lineages.get(kind)
        if found is None:
            found = self._lineages[kind] = lineage(kind)
        return found

    def type_fact(self, kind: type) -> tuple[Any, ...]:
        """Return the fact that a value is of a class."""
        inherited = self.lineage(kind)
        return ("type", self.class_name(kind), *([inherited] if inherited else []))

    def device(self, device: Any) -> str:
        """Return a device as its type, with `:current` or the index where it has one; a CPU's index is kept as it is.

        An index is placement: rank 3 sits on device 3 of one node and on device 1 of another. What is identity is
        whether it is the device that the process computes on.
        """
        text = self._devices.get(device)
        if text is None:
            kind, index = device.type, device.index
            if index is None:
                text = kind
            else:
                module = None if kind == "cpu" else getattr(self.torch, kind, None)
                current = getattr(module, "current_device", None)
                text = f"{kind}:current" if current is not None and current() == index else f"{kind}:{index}"
            self._devices[device] = text
        return text

    def tensor(self, tensor: Any) -> dict[str, Any]:
        """Return what torch's tensor guards compare: class, dtype, device, shape, stride, gradient, dispatch keys.

        Beyond them the private NPU format, which decides what a compiled kernel reads.
        """
        fact = {
            "class": self.class_name(type(tensor)),
            "device": self.device(tensor.device),
            "dtype": self.dtype(tensor.dtype),
            "keys": self.dispatch_keys(self.raw_keys(tensor)),
            "requires_grad": bool(tensor.requires_grad),
            "shape": [int(size) for size in tensor.shape],
            "stride": [int(step) for step in tensor.stride()] if fits_strides(tensor, self.torch) else None,
        }
        if marks := self.marks(tensor):
            fact["marks"] = marks
        form = self.npu_format(tensor)
        if form is not None:
            fact["format"] = form
        return fact

    def dtype(self, dtype: Any) -> str:
        """Return a dtype's name without torch's."""
        name = self._dtypes.get(dtype)
        if name is None:
            name = self._dtypes[dtype] = str(dtype).removeprefix("torch.")
        return name

    def raw_keys(self, tensor: Any) -> int:
        """Return a tensor's dispatch keys as bits.

        Thread-local ones are applied as torch's own tensor guards do: under inference mode the same tensor dispatches
        otherwise.
        """
        private = self.torch._C
        if self._local_keys is None:
            included, excluded = private._dispatch_tls_local_include_set(), private._dispatch_tls_local_exclude_set()
            self._local_keys = int(included.raw_repr()), ~int(excluded.raw_repr())
        return (int(private._dispatch_keys(tensor).raw_repr()) | self._local_keys[0]) & self._local_keys[1]

    def dispatch_keys(self, raw: int) -> str:
        """Return the names of dispatch keys given as bits."""
        text = self._key_sets.get(raw)
        if text is None:
            names = str(self.torch._C.DispatchKeySet.from_raw_repr(raw))
            text = self._key_sets[raw] = names.removeprefix("DispatchKeySet(").removesuffix(")")
        return text

    def marks(self, tensor: Any) -> dict[str, list[int]]:
        """Return a tensor's dimension markings; empty for nearly all tensors."""
        held = tensor.__dict__
        if not held:
            return {}
        return {name: sorted(int(index) for index in held[name]) for name in _MARKS if name in held}

    def npu_format(self, tensor: Any) -> int | None:
        """Return the private NPU format; None off the device, where there is none."""
        if self._format_of is None or tensor.device.type not in ("npu", "privateuseone"):
            return None
        return int(self._format_of(tensor))

    def extent(self, tensor: Any) -> tuple[int, int] | None:
        """Return the addresses from first to past the last byte that a tensor reaches; None where it has no memory."""
        start, span = tensor.data_ptr(), 1
        if not start:
            return None
        for size, step in zip(tensor.shape, tensor.stride(), strict=True):
            if not size:
                return None
            span += (size - 1) * step
        return start, start + span * tensor.element_size()

    def ambient(self, global_state: Any = None) -> dict[str, Any]:
        """Return the state around a call that Dynamo guards: modes, default dtype and device, autocast, determinism.

        Args:
            global_state: a GlobalStateGuard taken earlier; None for the state now.
        """
        torch = self.torch
        guard = torch._C._dynamo.guards.GlobalStateGuard() if global_state is None else global_state
        state = {name: item for name, item in json.loads(guard.__getstate__()).items() if name not in _NOISE}
        stack_at = torch._C._get_function_stack_at
        modes = [self.class_name(type(stack_at(place))) for place in range(torch._C._len_torch_function_stack())]
        # Imported by torch once a default device is set.
        default_device = getattr(sys.modules.get("torch.utils._device"), "CURRENT_DEVICE", None)
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return {
            **state,
            "default_device": None if default_device is None else self.device(default_device),
            "forward_ad_level": torch.autograd.forward_ad._current_level,
            "functorch_depth": self._functorch_depth(),
            # Hooks that can't be inlined are no part of a graph, and torch's own guard ignores them.
            "saved_tensors_hooks": bool(hooks) and all(isinstance(hook, torch.fx.GraphModule) for hook in hooks),
            # Dynamo takes an operator's meaning from the operator, whatever was patched into the class.
            "tensor_methods": patched_members(torch.Tensor),
            "torch_function_modes": modes,
            "npu_deterministic_level": self.deterministic_level(),
        }

    def deterministic_level(self) -> int | None:
        """Return torch_npu's deterministic level; None without torch_npu or where it has none."""
        read = getattr(getattr(self.torch, "npu", None), "_get_deterministic_level", None)
        return int(read()) if read is not None else None

    def _functorch_depth(self) -> int:
        stack = self.torch._C._functorch.get_interpreter_stack()
        return 0 if stack is None else len(stack)


def fits_strides(tensor: Any, torch: Any) -> bool:
    """Say whether a tensor has strides at all; sparse ones have none."""
    return bool(tensor.layout is torch.strided)
