"""What `cachectl triage` prints with --json: the stages of the ladder, what each showed, and what to do next.

Owns the field names. Texts hold no secrets and no absolute paths of this machine; who makes the report sees to it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cachectl.schemas.fields import Document, Many
from cachectl.schemas.report import Report

__all__ = ["STAGES", "StageName", "TriageFinding", "TriageReport", "TriageStage", "Verdict"]

StageName = Literal["eager", "aot_eager", "force_eager", "npugraph_ex", "cache"]
Verdict = Literal["ok", "failed", "differs", "skipped"]
STAGES: tuple[StageName, ...] = ("eager", "aot_eager", "force_eager", "npugraph_ex", "cache")


def _encodable(value: Any) -> Any:
    # A model's error may hold what is no UTF-8, as lone surrogates, which JSON can't carry.
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value


_Text = Annotated[str, BeforeValidator(_encodable)]


class TriageFinding(Document):
    """One thing that a stage showed; `next` is what to do, "" where nothing is.

    `where` is a place in the model's code, `file:line in function`. `option` and `difference` are for findings about
    values.
    """

    kind: str
    what: _Text
    where: _Text | None = None
    next: _Text = ""
    method: str = ""
    case: str = ""
    rank: int = Field(default=0, ge=0)
    cause: str | None = None
    option: str | None = None
    difference: float | None = None
    times: int | None = None


class TriageStage(Document):
    """One stage. `note` says what it did, or why it did not."""

    stage: StageName
    verdict: Verdict
    seconds: float = Field(ge=0)
    findings: Many[TriageFinding] = ()
    notes: Many[_Text] = ()


class TriageReport(Report):
    """How far a recipe comes; `stage` is where it stopped, null where every stage is right.

    `evidence`: `simulated`, or the device that this was shown on.
    """

    stage: StageName | None
    stages: Many[TriageStage]
    advice: Many[_Text]
    recipe: str
    evidence: str
    versions: dict[str, str]

    @property
    def exit_code(self) -> int:
        """1 where a stage stopped it."""
        return 0 if self.stage is None else 1
