"""Where the ranks of a program meet: torch.distributed's store of the default process group.

Owns finding it; what goes through it is cachectl.boot.agreement's. torch is passed in.

Facts: torch 2.13 torch/distributed/distributed_c10d.py (`_get_default_store`, `_world.pg_map`): the store that
`init_process_group` was given or made, behind a prefix of the group's own. Over nothing `compare_set` writes and
returns what it wrote, over something it returns what stands (TCPStore, FileStore, HashStore).
"""

from __future__ import annotations

from typing import Any

__all__ = ["rendezvous_store"]

_USED = ("compare_set", "add", "check", "get")


def rendezvous_store(torch: Any) -> Any:
    """Return the default process group's store; None without a group, and where it has no store that can be asked."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    find = getattr(distributed.distributed_c10d, "_get_default_store", None)
    store = find() if find is not None else None
    return store if all(hasattr(store, name) for name in _USED) else None
