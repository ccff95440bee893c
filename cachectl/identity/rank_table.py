"""Rank tables: the JSON file that tells HCCL which rank runs on which device of which server.

Owns the shapes of the three versions and what a table can't be. A table is read whole or not at all: a wrong rank is
worse than none. Standard library only.

Facts (CANN's HCCL guide for 1.0 and 1.2, hccl's and Ascend Operator's sources for 2.0): `status` is "completed" once
the table may be used. Versions 1.0 and 1.2 hold `server_count` and `server_list`, each server with `server_id` and a
list `device`, whose items carry `rank_id` as text; Ascend Operator adds `container_ip` and `host_ip`, ClusterD
`server_ip`. 1.2 adds `super_device_id` to each device and `super_pod_list`, which names the servers again. 2.0 holds
`rank_count` and `rank_list`, whose items carry `rank_id` and `local_id` as numbers and the addresses in `level_list`;
it names no server.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from cachectl.store.layout import read_bounded
from cachectl.values import dataclass

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = ["RankTable", "RankTableError", "read_rank_table"]

# A table of 100,000 ranks with all its addresses is about 50 MB; that much is read at a start, and no more.
_LIMIT_BYTES = 64 << 20


class RankTableError(Exception):
    """A rank table that says nothing; `pending` where it may yet do so: it is not there or not completed."""

    def __init__(self, message: str, *, pending: bool = False) -> None:
        super().__init__(message)
        self.pending = pending


@dataclass(frozen=True)
class Server:
    """One server of a table: its addresses, the container's before the host's, and the ranks it runs."""

    container: tuple[str, ...]
    host: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RankTable:
    """A whole table: its version, how many ranks it has, and its servers; version 2.0 names none."""

    version: str
    world_size: int
    servers: tuple[Server, ...] = ()

    def ranks_of(self, addresses: Collection[str]) -> tuple[int, ...] | None:
        """Return the ranks of the servers that have one of these addresses; None where the table doesn't say.

        A container's address names one pod; several pods of a host share the host's, and then all of theirs are meant.
        A table of a single server is about that one.
        """
        for which in ("container", "host"):
            found = [server for server in self.servers if set(getattr(server, which)) & set(addresses)]
            if found:
                return tuple(sorted(rank for server in found for rank in server.ranks))
        return self.servers[0].ranks if len(self.servers) == 1 else None


def read_rank_table(path: Path) -> RankTable:
    """Read a rank table.

    Raises:
        RankTableError: there is none, it is not completed, or it is no table of a known version.
    """
    try:
        raw = read_bounded(path, _LIMIT_BYTES, follow=True)
    except OSError as error:
        raise RankTableError(error.strerror or str(error), pending=True) from error
    if len(raw) > _LIMIT_BYTES:
        raise RankTableError(f"more than {_LIMIT_BYTES >> 20} MiB")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        # Ascend Operator truncates the file and writes it anew: an empty one is to come.
        raise RankTableError(f"no JSON: {error}", pending=not raw.strip()) from error
    if not isinstance(document, dict):
        raise RankTableError("no JSON object")
    status = document.get("status")
    if status != "completed":
        raise RankTableError(f"status is {status!r}, not 'completed'", pending=True)
    version = document.get("version")
    if version in ("1.0", "1.2"):
        return _servers(document, version)
    if version == "2.0":
        return _ranks(document)
    raise RankTableError(f"version {version!r} is none of 1.0, 1.2, 2.0")


def _servers(document: Mapping[str, Any], version: str) -> RankTable:
    items = _objects(document, "server_list")
    _count(document, "server_count", len(items))
    servers = []
    for item in items:
        ranks = tuple(sorted(_rank(device) for device in _objects(item, "device")))
        servers.append(Server(_texts(item, "container_ip", "server_ip"), _texts(item, "server_id", "host_ip"), ranks))
    names = {item.get("server_id") for item in items}
    if version == "1.2":
        for pod in _objects(document, "super_pod_list"):
            for server in _objects(pod, "server_list"):
                if server.get("server_id") not in names:
                    raise RankTableError(
                        f"super_pod_list names server {server.get('server_id')!r}, server_list does not"
                    )
    return RankTable(version, _whole([rank for server in servers for rank in server.ranks]), tuple(servers))


def _ranks(document: Mapping[str, Any]) -> RankTable:
    items = _objects(document, "rank_list")
    _count(document, "rank_count", len(items))
    return RankTable("2.0", _whole([_rank(item) for item in items]))


def _objects(document: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    value = document.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise RankTableError(f"{name} is no list of objects")
    return value


def _texts(item: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    values = (item.get(name) for name in names)
    return tuple(value for value in values if isinstance(value, str) and value)


def _rank(item: Mapping[str, Any]) -> int:
    number = _number(item.get("rank_id"))
    if number is None:
        raise RankTableError(f"rank_id {item.get('rank_id')!r} is no rank")
    return number


def _count(document: Mapping[str, Any], name: str, found: int) -> None:
    # Older writers leave the count out; one that is there has to be right.
    if name in document and _number(document[name]) != found:
        raise RankTableError(f"{name} is {document[name]!r}, the table has {found}")


def _whole(ranks: Sequence[int]) -> int:
    if sorted(ranks) != list(range(len(ranks))):
        raise RankTableError(f"rank_ids are not 0 to {len(ranks) - 1}, each once")
    return len(ranks)


def _number(value: object) -> int | None:
    """Return a count: text in versions 1.x, a number in 2.0; either is taken for either."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value >= 0 else None
    # Ten digits are more ranks than there will be, and int() of a longer text may take its time.
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 11 else None
