"""Makes torch.npu.NPUGraph record and replay for real on CPU tensors; torch_npu's own calls still happen.

Patched: NPUGraph.capture_begin, capture_end, replay and reset; the four task group functions; ExternalEvent.wait; and
the pool state call, which must not be given CPU storages.
"""

from __future__ import annotations

from copy import deepcopy
from types import ModuleType
from typing import Any

import torch

from .capture import GraphCaptureError, Recording, TaskGroup, UpdateMode

_RECORDING = "_cachectl_recording"

# Captures that are under way, innermost last; updates that are under way, with the group they are for.
_capturing: list[Recording] = []
_updating: list[tuple[TaskGroup, UpdateMode]] = []
_groups: dict[Any, TaskGroup] = {}


def install(torch_npu: ModuleType) -> None:
    """Patch torch_npu; to be called once."""
    graphs = torch_npu.npu.graphs
    _patch_graph(graphs.NPUGraph)
    _patch_task_groups(graphs, (graphs, torch_npu.npu, torch.npu))
    _patch_external_event((torch_npu.npu, torch.npu))
    _patch_pool_state(torch_npu._C)
    _keep_tensors_by_reference(graphs)


def _patch_graph(graph: Any) -> None:
    capture_begin, capture_end, replay, reset = graph.capture_begin, graph.capture_end, graph.replay, graph.reset

    def simulated_capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        capture_begin(self, *args, **kwargs)
        recording = Recording()
        self.__dict__[_RECORDING] = recording
        _capturing.append(recording)
        # The mode of auto_dispatch_capture swaps operators, so it must see them before they are recorded.
        with _Outside(self):
            recording.mode.__enter__()

    def simulated_capture_end(self: Any) -> None:
        recording = self.__dict__.get(_RECORDING)
        if recording is not None and recording in _capturing:
            with _Outside(self):
                recording.mode.__exit__(None, None, None)
            _capturing.remove(recording)
            recording.close()
        capture_end(self)

    def simulated_replay(self: Any) -> None:
        replay(self)
        recording = self.__dict__.get(_RECORDING)
        if recording is not None:
            recording.replay()

    def simulated_reset(self: Any) -> None:
        reset(self)
        recording = self.__dict__.pop(_RECORDING, None)
        if recording is not None:
            for handle in [handle for handle, group in _groups.items() if group.recording is recording]:
                del _groups[handle]

    graph.capture_begin, graph.capture_end = simulated_capture_begin, simulated_capture_end
    graph.replay, graph.reset = simulated_replay, simulated_reset


class _Outside:
    """Takes a graph's own dispatch mode off the stack for a moment, when it has one there."""

    def __init__(self, graph: Any) -> None:
        self._mode = graph.graph_dispatch_mode if graph.auto_dispatch_capture else None

    def __enter__(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)

    def __exit__(self, *_: object) -> None:
        if self._mode is not None:
            self._mode.__enter__()


def _patch_task_groups(graphs: ModuleType, places: tuple[Any, ...]) -> None:
    group_begin, group_end = graphs.graph_task_group_begin, graphs.graph_task_group_end
    update_begin, update_end = graphs.graph_task_update_begin, graphs.graph_task_update_end

    def graph_task_group_begin(stream: Any) -> None:
        group_begin(stream)
        if _capturing:
            _capturing[-1].begin_group()

    def graph_task_group_end(stream: Any) -> Any:
        handle = group_end(stream)
        if _capturing:
            _groups[handle] = _capturing[-1].end_group()
        return handle

    def graph_task_update_begin(stream: Any, handle: Any) -> None:
        update_begin(stream, handle)
        if handle not in _groups:
            raise GraphCaptureError(f"task group {handle} is not one of a captured graph")
        mode = UpdateMode()
        mode.__enter__()
        _updating.append((_groups[handle], mode))

    def graph_task_update_end(stream: Any) -> None:
        group, mode = _updating.pop()
        mode.__exit__(None, None, None)
        update_end(stream)
        group.update(mode.operations)

    for function in (graph_task_group_begin, graph_task_group_end, graph_task_update_begin, graph_task_update_end):
        for place in places:
            setattr(place, function.__name__, function)


def _patch_external_event(places: tuple[Any, ...]) -> None:
    class ExternalEvent(torch.npu.ExternalEvent):  # type: ignore[misc]
        """An external event whose wait, inside a capture, makes the next task group wait for its update."""

        def wait(self, *args: Any, **kwargs: Any) -> Any:
            if _capturing:
                _capturing[-1].note_external_wait()
            return super().wait(*args, **kwargs)

    ExternalEvent.__module__ = torch.npu.ExternalEvent.__module__
    for place in places:
        place.ExternalEvent = ExternalEvent


def _patch_pool_state(extension: Any) -> None:
    set_state = extension._npu_setCheckpointPoolState

    def set_pool_state(device: int, state: Any, stale: list[int], to_free: list[int]) -> Any:
        # The runtime passes storages of graph outputs. Here they are CPU storages, which the device's allocator does
        # not know and must not touch; they are kept and freed by their owners.
        return set_state(device, state, [], [])

    extension._npu_setCheckpointPoolState = set_pool_state


def _keep_tensors_by_reference(graphs: ModuleType) -> None:
    """Let auto_dispatch_capture keep CPU tensors themselves: it copies them, and an update would write to the copy."""

    def kept(value: Any) -> Any:
        return value if isinstance(value, torch.Tensor) else deepcopy(value)

    from torch_npu.npu._npugraph_handlers import npugraph_handler

    graphs.deepcopy = kept  # type: ignore[attr-defined]
    npugraph_handler.deepcopy = kept
