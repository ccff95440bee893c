"""What `cachectl audit` prints with --json: a cache directory that nobody manages, and what will become of it.

Owns the words for what is wrong there and for what the next start of the runtime makes of it. `content` of an artifact
is the document of `cachectl inspect`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cachectl.schemas.fields import Document, Many
from cachectl.schemas.report import InspectReport, Report

__all__ = [
    "AuditArtifact",
    "AuditChange",
    "AuditEffect",
    "AuditFinding",
    "AuditGap",
    "AuditKind",
    "AuditReport",
    "AuditSeen",
]

AuditKind = Literal[
    "empty",
    "truncated",
    "unreadable",
    "unloadable",
    "wrong-owner",
    "wrong-mode",
    "not-writable",
    "other-format",
    "foreign-bytecode",
    "process-handle",
    "wrong-place",
    "symlink",
    "missing-artifact",
    "missing-rank",
    "missing-model",
    "static-kernel",
    "stray",
    "dated-cache",
    "orphan",
]
# deleted: the runtime removes the folder and compiles anew. crash: the process ends or raises. wrong: it is loaded, and
# may answer wrong. cold: nothing is found, and is compiled. slow: loaded, without its static kernels. wasted: bytes.
AuditEffect = Literal["deleted", "crash", "wrong", "cold", "slow", "wasted"]


def _encodable(value: Any) -> Any:
    # Names on disk are bytes; what is no UTF-8 reaches Python as lone surrogates, which JSON can't carry.
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value


_Text = Annotated[str, BeforeValidator(_encodable)]


class AuditSeen(Document):
    """Who is taken to start next, and with what; null where this machine doesn't say."""

    uid: int = Field(ge=0)
    python: str
    torch_npu: str | None
    npugraph_ex: str | None
    torchair: str | None
    cann: str | None


class AuditArtifact(Document):
    """One method folder; `path` is relative to the audited folder, `size_bytes` that of all below it.

    `broken`: the next start deletes it, crashes on it, or may answer wrong. `orphaned`: nothing will look for it.
    `content` is null where nothing could be read.
    """

    path: _Text
    cache: _Text
    graph: _Text
    dynamic: bool
    world_size: int | None
    rank: int | None
    tp_rank: int | None
    pp_rank: int | None
    method: _Text
    state: Literal["good", "broken", "orphaned"]
    size_bytes: int = Field(ge=0)
    content: InspectReport | None


class AuditFinding(Document):
    """One thing that is wrong with the directory, and what the next start makes of it."""

    kind: AuditKind
    path: _Text
    effect: AuditEffect
    detail: _Text
    hint: str
    size_bytes: int = Field(default=0, ge=0)


class AuditGap(Document):
    """What shapes an artifact and is not in the runtime's key, and where it shows in this directory."""

    name: str
    detail: _Text
    here: Many[_Text] = ()


class AuditChange(Document):
    """What becomes of `artifacts` of these artifacts when something around them changes."""

    change: str
    artifacts: int = Field(ge=0)
    effect: Literal["deleted", "crash", "cold", "slow", "unnoticed"]
    detail: _Text


class AuditReport(Report):
    """What an unmanaged cache directory holds."""

    path: _Text
    seen: AuditSeen
    artifacts: Many[AuditArtifact]
    findings: Many[AuditFinding]
    ignored: Many[AuditGap]
    changes: Many[AuditChange]
    size_bytes: int = Field(ge=0)
    orphaned_bytes: int = Field(ge=0)

    @property
    def exit_code(self) -> int:
        """1 with a finding; what the runtime's key ignores is true of every cache, and no finding."""
        return 1 if self.findings else 0
