"""Makes AclGraph of npugraph_ex and torchair safe and right for CPU tensors.

AclGraph clones a call's inputs only when they are npu tensors, so a program's own CPU tensors would become the captured
buffers, to be overwritten by later calls. And it keeps addresses instead of tensors, because a device's memory pool
outlives them; CPU memory does not. Here inputs are cloned as on a device, and what is rebuilt from an address shares
the storage that it came from.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_STORAGE = "_cachectl_storage"


def install(module: ModuleType) -> None:
    """Patch one acl_graph module and the utils module beside it."""
    utils = sys.modules[module.get_tensor_metadata.__module__]
    get_metadata, rebuild = utils.get_tensor_metadata, utils.reconstruct_from_tensor_metadata

    def get_tensor_metadata(value: Any) -> Any:
        metadata = get_metadata(value)
        if isinstance(value, torch.Tensor) and value.is_cpu:
            setattr(metadata, _STORAGE, value.untyped_storage())
        return metadata

    def reconstruct_from_tensor_metadata(metadata: Any) -> Any:
        storage = getattr(metadata, _STORAGE, None)
        if storage is None:
            return rebuild(metadata)
        # AclGraph rebuilds while it captures: this is bookkeeping, not an operator of the graph.
        with _disable_current_modes():
            empty = torch.empty(0, dtype=metadata.dtype)
            return empty.set_(storage, metadata.storage_offset, metadata.size, metadata.stride)

    place: Any
    for place in (utils, module):
        place.get_tensor_metadata = get_tensor_metadata
        place.reconstruct_from_tensor_metadata = reconstruct_from_tensor_metadata
    _clone_inputs(module.AclGraph)


def _clone_inputs(acl_graph: Any) -> None:
    capture = acl_graph.capture

    def capture_clones(self: Any, graph_key: str, *args: Any, **kwargs: Any) -> Any:
        if not _clones_inputs(self.config):
            return capture(self, graph_key, *args, **kwargs)
        cloned = list(args)
        for name, index in self._user_inputs_mapping.items():
            if name in self._mutated_user_inputs or index in getattr(self, "_userinput_ref_with_output", {}):
                continue
            if isinstance(cloned[index], torch.Tensor) and cloned[index].is_cpu:
                cloned[index] = cloned[index].detach().clone(memory_format=torch.contiguous_format)
        return capture(self, graph_key, *cloned, **kwargs)

    acl_graph.capture = capture_clones


def _clones_inputs(config: dict[str, Any]) -> bool:
    value = config.get("clone_input", True)
    return value not in (False, "0", "False")
