"""What ties an artifact to its place in a world: the process groups it names and the device it was compiled on.

Owns reading both from a saved artifact, and reading the same of a running process. A group stands in generated code by
its name or tag, which torch counts up as groups are made: another order of `new_group` calls gives the name to other
ranks, and the artifact would reduce over them without a word. A device stands in the bytecode by its number. Rank
processes and the program's process; torch is passed in.

Facts: torch 2.13 torch/distributed/distributed_c10d.py (`_process_group_name` counts, `_world.pg_to_tag`);
npugraph_ex's collectives carry tag, rank list and group size (npu_define operators), and its static kernels need
LOCAL_WORLD_SIZE in a world of several ranks (_acl_concrete_graph/static_kernel.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cachectl.runtimes.artifact import inspect_artifact
from cachectl.schemas.boot import Reason

__all__ = ["placed", "placed_reasons"]

# What of the launcher's environment depends on how a world is cut into nodes.
CUT_VARIABLES = {"LOCAL_RANK": "local_rank", "LOCAL_WORLD_SIZE": "local_world_size", "GROUP_RANK": "node_rank"}


def placed(torch: Any, data: bytes, *, read: Iterable[str] = (), environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what building finds of an entry's topology; empty for an artifact that fits any place.

    Args:
        torch: the module.
        data: the saved artifact.
        read: names of environment variables that model code read.
        environ: where their values are.

    Raises:
        DocumentError: the bytes are no artifact.
    """
    summary = inspect_artifact(data)
    found: dict[str, Any] = {}
    known = _groups(torch)
    if groups := {name: known[name] for name in summary.group_names if name in known}:
        found["groups"] = groups
    if any(finding.kind == "device-index" for finding in summary.findings):
        found["device_index"] = torch.npu.current_device()
    cut = CUT_VARIABLES.keys() & set(read)
    if _world_size(torch) > 1 and summary.settings.get("static_kernel_compile") == "True":
        # The runtime keeps static kernels with each node's first rank, and leaves them out where this is not set.
        cut |= {"LOCAL_WORLD_SIZE"}
    for variable in sorted(cut):
        found[CUT_VARIABLES[variable]] = environ.get(variable)
    return found


def placed_reasons(torch: Any, found: Mapping[str, Any], environ: Mapping[str, str]) -> list[Reason]:
    """Compare what building found of an entry's topology with this process."""
    reasons = []
    known = _groups(torch) if found.get("groups") else {}
    for name, stored in sorted((found.get("groups") or {}).items()):
        if known.get(name) != stored:
            hint = f"make the process groups in the order of the build, so that group {name} has ranks {stored}"
            reasons.append(Reason("topology", f"groups.{name}", stored, known.get(name), hint=hint))
    if "device_index" in found and (index := torch.npu.current_device()) != (stored := found["device_index"]):
        hint = f"the artifact names device {stored}: start this rank on it, or run cachectl build in this node cut"
        reasons.append(Reason("topology", "device_index", stored, index, hint=hint))
    for variable, name in CUT_VARIABLES.items():
        if name in found and environ.get(variable) != (stored := found[name]):
            hint = f"{variable} was read at build time: cut the world into nodes as then, or run cachectl build"
            reasons.append(Reason("topology", name, stored, environ.get(variable), hint=hint))
    return reasons


def _world_size(torch: Any) -> int:
    distributed = torch.distributed
    initialized = distributed.is_available() and distributed.is_initialized()
    return int(distributed.get_world_size()) if initialized else 1


def _groups(torch: Any) -> dict[str, list[list[int]]]:
    """Return the ranks behind every name and tag of this process's groups; several groups can have one tag."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return {}
    world = distributed.distributed_c10d._world
    found: dict[str, list[list[int]]] = {}
    for group, ranks in world.pg_group_ranks.items():
        for name in {str(world.pg_names.get(group, "")), str(world.pg_to_tag.get(group, ""))} - {""}:
            found.setdefault(name, []).append(sorted(ranks))
    return {name: sorted(several) for name, several in found.items()}
