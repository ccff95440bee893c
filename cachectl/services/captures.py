"""What entries say of graph captures, for whoever plans or builds: what will make the runtime give up replaying.

Owns reading it of manifests. Capture itself is paid again in every process, warm or cold; it is no reason against an
entry, so what is said here is noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cachectl.errors import CachectlError
from cachectl.schemas.boot import Reason
from cachectl.store.layout import StoreLayout
from cachectl.store.reading import read_manifest

__all__ = ["capture_reason", "capture_warning", "captured_by_a_start", "first_call_seconds"]


def capture_warning(shown: Mapping[str, Any] | None) -> str | None:
    """Return what an entry's `provenance.shown` warns of; None for nothing, and for entries of earlier versions."""
    text = ((shown or {}).get("captures") or {}).get("warning")
    return str(text) if text else None


def first_call_seconds(shown: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the seconds of an entry's warm first call, part by part in their order; empty where nobody kept them."""
    found = ((shown or {}).get("seconds") or {}).get("warm") or {}
    return {name: found[name] for name in ("proof", "load", "warm_up", "capture", "first_call") if name in found}


def captured_by_a_start(shown: Iterable[Mapping[str, Any] | None]) -> tuple[int, float] | None:
    """Return how many graphs a start captures that uses all these entries of one rank, and the seconds that took.

    Each entry's graph has a limit of its own, so the sum is beyond none. None where nobody counted.
    """
    graphs, seconds = 0, 0.0
    for one in shown:
        captures = (one or {}).get("captures") or {}
        if captures.get("captured") is None:
            return None
        graphs += captures["captured"] - captures["recaptured"]
        seconds += first_call_seconds(one).get("capture", 0.0)
    return graphs, seconds


def capture_reason(layout: StoreLayout, key: str, manifest: str) -> Reason | None:
    """Return the same of a stored entry as a reason; None also where it can't be read, which verify tells."""
    try:
        document = read_manifest(layout, key, manifest).document
    except CachectlError:
        return None
    shown = (document.get("provenance") or {}).get("shown") or {}
    text = capture_warning(shown)
    if text is None:
        return None
    return Reason("options", "capture_limit", shown["captures"].get("limit"), None, "noise", text)
