"""Notes as the processes of a program leave them under record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["method", "note", "spec"]


def spec(batch: int, dtype: str = "float32") -> dict[str, Any]:
    """Return the input spec of a call with one tensor."""
    tensor = {"shape": [batch, 8], "stride": [8, 1], "dtype": dtype, "device": "cpu", "format": None}
    return {"L['x']": {"tensor": tensor}, "L['mode']": {"value": "plain"}, "L['mask']": {"value": None}}


def method(name: str = "main_decode", *batches: int, at: float = 1.0, **fields: Any) -> dict[str, Any]:
    """Return the note of a compiled method that was called with these batches."""
    return {
        "method": name,
        "class": "Decoder",
        "module": "models.decoder",
        "owner": "Decoder",
        "how": "cache_compile",
        "runtime": "npugraph_ex",
        "dynamic": False,
        "options": {"frozen_parameter": True},
        "code_options": {},
        "calls": [
            {"spec": spec(batch), "at": at + place, "grad": False} for place, batch in enumerate(batches or (4,))
        ],
        "more": False,
        **fields,
    }


def note(folder: Path, *methods: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the notes of one process that ran infer.py in a folder."""
    return {
        "pid": 100,
        "started_at": 1.0,
        "command": ["/opt/venv/bin/python3", "-u", "infer.py", "--config", "config/a.yaml", "--batch=4"],
        "cwd": str(folder),
        "forked": False,
        "search_path": [str(folder)],
        "stack": [str(folder / "infer.py")],
        "opened": [str(folder / "config" / "a.yaml")],
        "environ": {"TASK_QUEUE_ENABLE": "1"},
        "read_at_start": [],
        "launcher": [],
        "rank": None,
        "world_size": None,
        "simulated": True,
        "versions": {"torch": "2.13.0", "torch_npu": "2.13.0", "python": "3.11.7"},
        "dynamo": {},
        "methods": list(methods),
        "left": [],
        **fields,
    }
