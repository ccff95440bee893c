"""Rank tables of each version, as CANN's guide and Ascend Operator write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def servers(count: int, each: int, *, version: str = "1.0") -> dict[str, Any]:
    """Return a table of version 1.0 or 1.2: `count` servers of `each` devices, ranks in order."""
    listed = [
        {
            "server_id": f"10.0.0.{server}",
            "host_ip": f"10.0.0.{server}",
            "container_ip": f"192.168.7.{server}",
            "device": [
                {
                    "device_id": str(device),
                    "device_ip": f"172.16.{server}.{device}",
                    "rank_id": str(server * each + device),
                    **({"super_device_id": str(server * each + device)} if version == "1.2" else {}),
                }
                for device in range(each)
            ],
        }
        for server in range(count)
    ]
    table = {"status": "completed", "version": version, "server_count": str(count), "server_list": listed}
    if version == "1.2":
        names = [{"server_id": f"10.0.0.{server}"} for server in range(count)]
        table["super_pod_list"] = [{"super_pod_id": "0", "server_list": names}]
    return table


def levels(count: int) -> dict[str, Any]:
    """Return a table of version 2.0 with `count` ranks."""
    address = {"addr_type": "EID", "addr": "000000000000002000100000df001001", "ports": ["0/0"], "plane_id": "plane0"}
    level = {"net_layer": 0, "net_instance_id": "az0-rack0", "net_type": "TOPO_FILE_DESC", "rank_addr_list": [address]}
    listed = [{"rank_id": rank, "local_id": rank, "device_id": rank, "level_list": [level]} for rank in range(count)]
    return {"status": "completed", "version": "2.0", "rank_count": count, "rank_list": listed}


def written(path: Path, table: Mapping[str, Any] | str) -> Path:
    """Write a table, or text that is none, and return its path."""
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return path
