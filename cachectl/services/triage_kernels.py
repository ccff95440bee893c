"""The static kernels of a case that triage saved, as its cache stage says them.

Owns which of an audit's findings count there, and whether one stops the climb. Reads files only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cachectl.schemas.audit import AuditSeen
from cachectl.schemas.triage import TriageFinding, Verdict
from cachectl.services.audit import audit

__all__ = ["static_kernels"]


def static_kernels(cache: Path, seen: AuditSeen, **named: Any) -> tuple[Verdict, list[TriageFinding]]:
    """Return the verdict on the static kernels below a cache_dir, and what is wrong with them.

    Args:
        seen: who would start next; see `what_starts_here`.
        named: method, case and rank, for the findings.
    """
    found = [item for item in audit(str(cache), seen).findings if item.kind in ("static-kernel", "symlink")]
    # Without its kernels a graph is slower and not wrong; the simulated CANN compiles none.
    verdict: Verdict = "failed" if any(item.effect != "slow" for item in found) else "ok"
    return verdict, [
        TriageFinding(kind="static-kernel", what=item.detail, where=item.path, next=item.hint, **named)
        for item in found
    ]
