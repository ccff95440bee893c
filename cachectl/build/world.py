"""A rank process's place in its world: its device, and the process group that the model's collectives run over.

Owns joining and leaving, and telling an error of this rank from the echo of another one's. Nothing here for a world of
one. Rank processes only: imports torch.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from cachectl.errors import EnvironmentFault

__all__ = ["is_of_peer", "join_world", "leave_world"]

# hccl also where the CANN is simulated: gloo carries it there, and programs say the same name in both.
BACKEND = "hccl"
# A rank whose peers are gone for longer than this has failed; torch's own default.
_PATIENCE = timedelta(minutes=30)
_ECHO = re.compile(
    r"closed by (remote )?peer|reset by peer|broken pipe|connection (refused|was likely closed)|socket (time|closed)|"
    r"\[.*gloo/transport/|remote process|waiting for .* (rank|peer)|hccl.*(time ?out|remote)|recvvalue failed",
    re.IGNORECASE,
)
_ECHO_TYPES = ("DistNetworkError", "DistStoreError", "DistBackendError")


def join_world(meeting: str, environ: Mapping[str, str]) -> None:
    """Take this rank's device and join the default process group, as a program does before it builds its model.

    Args:
        meeting: a name of this phase of this build, the same in all ranks: a launcher's store may have served before.
        environ: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.

    Raises:
        EnvironmentFault: no device for this rank, or the others did not come.
    """
    torch: Any = importlib.import_module("torch")
    local_rank, devices = int(environ.get("LOCAL_RANK", "0")), torch.npu.device_count()
    if local_rank >= devices:
        raise EnvironmentFault(
            f"local rank {local_rank} has no device: there are {devices} here",
            hint="build where each rank has one; CACHECTL_SIM_DEVICES sets how many are simulated",
        )
    torch.npu.set_device(local_rank)
    distributed = importlib.import_module("torch.distributed")
    try:
        store, rank, world_size = next(distributed.rendezvous("env://", timeout=_PATIENCE))
        distributed.init_process_group(
            BACKEND,
            store=distributed.PrefixStore(f"cachectl/{meeting}", store),
            rank=rank,
            world_size=world_size,
            timeout=_PATIENCE,
        )
    except (RuntimeError, ValueError) as error:
        raise EnvironmentFault(
            f"the ranks could not meet: {' '.join(str(error).split())[:500]}", hint="see the rank's log"
        ) from error


def leave_world() -> None:
    """Wait until all ranks are done, then leave: one that goes first can take the store of the others with it."""
    distributed = importlib.import_module("torch.distributed")
    if distributed.is_initialized():
        try:
            distributed.barrier()
            distributed.destroy_process_group()
        except RuntimeError:
            os._exit(0)  # Its document is written; a peer that is gone has one of its own.


def is_of_peer(error: BaseException) -> bool:
    """Say whether an error tells no more than that another rank is gone."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if type(current).__name__ in _ECHO_TYPES or _ECHO.search(str(current)):
            return True
        current = current.__cause__ or current.__context__
    return False
