"""What a simulated process does to torch_npu after importing it. Imports torch; loaded by file path from startup/.

    capture       what a graph capture records and how a replay runs it again
    graphs        NPUGraph, task groups and external events, on top of capture
    acl_graph     AclGraph of npugraph_ex and torchair: inputs and outputs that live on the CPU
    collectives   hccl by way of gloo
    operators     registers the reference implementations: operators_*, with attention
    reference     how one is described, and the refusal of an npu operator that has none

It may run where cachectl is not importable, under another name, so the modules import each other relatively and nothing
else of ours.
"""

from __future__ import annotations

import ctypes
from types import ModuleType

_MARK = "_cachectl_simulated"


def on_torch_npu(torch_npu: ModuleType) -> None:
    """Patch graphs, the hccl backend and register the reference operators, once per process."""
    if getattr(torch_npu, _MARK, False):
        return
    from . import collectives, graphs, operators

    graphs.install(torch_npu)
    operators.install()
    collectives.install()
    _allow_captures()
    setattr(torch_npu, _MARK, True)


def _allow_captures() -> None:
    # The library refuses to capture in a process where nothing would see to right replays.
    ctypes.c_int.in_dll(ctypes.CDLL("libascendcl.so"), "cachectl_simulated_replay").value = 1


def on_acl_graph(module: ModuleType) -> None:
    """Patch an acl_graph module of npugraph_ex or torchair, once per module object."""
    if getattr(module, _MARK, False):
        return
    from . import acl_graph

    acl_graph.install(module)
    setattr(module, _MARK, True)
