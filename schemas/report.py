"""What the commands print with --json: one model a command, with the exit code that belongs to it.

Owns the field names of the contract and the rule that turns a result into an exit code; printing and exiting are the
CLI's. `model_dump(mode="json")` of any of them is plain JSON in the contract's field order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from cachectl.schemas.boot import Reason
from cachectl.schemas.cann_recipes_report import FrameworkReport
from cachectl.schemas.canonical import canonical_bytes
from cachectl.schemas.fields import Digest, Document, Many

__all__ = [
    "Boot",
    "BuildReport",
    "Built",
    "DiffReport",
    "DoctorCheck",
    "DoctorReport",
    "ExplainReport",
    "Failed",
    "Finding",
    "FindingKind",
    "HookEntry",
    "HookReport",
    "HookSeconds",
    "InspectInput",
    "InspectPython",
    "InspectReport",
    "LostSet",
    "LsEntry",
    "LsReport",
    "Nearest",
    "Outcome",
    "PlanEntry",
    "PlanReport",
    "ReasonKind",
    "ReasonModel",
    "ReasonPart",
    "RecordReport",
    "Report",
    "VerifyReport",
]

Outcome = Literal["warm", "cold", "degraded", "inert", "unused", "observed", "disabled"]
ReasonPart = Literal[
    "model",
    "sources",
    "inputs",
    "topology",
    "options",
    "toolchain",
    "device",
    "environment",
    "guards",
    "trust",
    "artifact",
    "store",
    "policy",
    "agreement",
]
ReasonKind = Literal["semantic", "noise", "absent", "corrupt", "policy"]
FindingKind = Literal[
    "missing-blob",
    "corrupt-blob",
    "unsigned",
    "bad-signature",
    "extra-file",
    "index-drift",
    "incomplete-set",
    "unreadable-artifact",
    "foreign-bytecode",
]


def _plain_json(value: Any) -> Any:
    # Key parts may hold sets and non-finite floats; a reason quotes them, and its document has to stay JSON.
    try:
        return json.loads(canonical_bytes(value))
    except TypeError as error:
        raise ValueError(str(error)) from error


_Json = Annotated[Any, AfterValidator(_plain_json)]
_Seconds = Annotated[float, Field(ge=0)]


class Report(Document):
    """What a command found; base of all reports."""

    @property
    def exit_code(self) -> int:
        """The exit code that goes with this result: 0 good, 1 findings or not ready."""
        return 0


class ReasonModel(Document):
    """A `boot.Reason` as the contract's JSON."""

    part: ReasonPart
    name: str
    stored: _Json = None
    wanted: _Json = None
    kind: ReasonKind
    hint: str

    @classmethod
    def of(cls, reason: Reason) -> ReasonModel:
        """Return the model of a reason; raises pydantic's ValidationError for an unknown part or kind."""
        return cls.model_validate(reason.to_json())


class PlanEntry(Document):
    """One entry a recipe asks for: ready, missing (no key yet) or stale (same request line, other parts)."""

    key: Digest | None
    recipe: str
    method: str
    case: str
    rank: int = Field(ge=0)
    state: Literal["ready", "missing", "stale"]
    reasons: Many[ReasonModel] = ()

    @model_validator(mode="after")
    def _check_key(self) -> PlanEntry:
        if (self.key is None) != (self.state == "missing"):
            raise ValueError(f"a {self.state} entry {'has no' if self.key is None else 'has a'} key")
        return self


class LostSet(Document):
    """A warm set that holds today and would not under the rehearsed toolchain.

    `seconds` is what compiling its lines anew took last time; None where that is not known of each.
    """

    recipe: str
    warm_set: Digest
    lost: int = Field(ge=1)
    entries: int = Field(ge=1)
    seconds: _Seconds | None = None


def _without_empty_framework(document: dict[str, Any]) -> dict[str, Any]:
    # Most recipes name no framework; their documents stay as short as the contract says.
    return {name: value for name, value in document.items() if name != "framework" or value}


class PlanReport(Report):
    """What there is to build, entry by entry, the three counts, and how long building took last time.

    `expected_seconds` is None where nothing is to be built, or a line was never built. `lost` is a rehearsal's account
    for people, by warm set; its JSON is the stale entries. `framework` has a block for each recipe that names a
    framework's config.
    """

    entries: Many[PlanEntry]
    ready: int
    missing: int
    stale: int
    expected_seconds: _Seconds | None = None
    lost: Many[LostSet] = Field(default=(), exclude=True)
    framework: Many[FrameworkReport] = ()

    @classmethod
    def of(
        cls,
        entries: Iterable[PlanEntry],
        *,
        expected_seconds: float | None = None,
        lost: tuple[LostSet, ...] = (),
        framework: tuple[FrameworkReport, ...] = (),
    ) -> PlanReport:
        """Return the report of these entries, counted."""
        entries = tuple(entries)
        counts = Counter(entry.state for entry in entries)
        return cls(
            entries=entries,
            ready=counts["ready"],
            missing=counts["missing"],
            stale=counts["stale"],
            expected_seconds=expected_seconds,
            lost=lost,
            framework=framework,
        )

    @model_serializer(mode="wrap")
    def _leave_out_empty(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_empty_framework(dump(self))

    @model_validator(mode="after")
    def _check_counts(self) -> PlanReport:
        counts = Counter(entry.state for entry in self.entries)
        if (counts["ready"], counts["missing"], counts["stale"]) != (self.ready, self.missing, self.stale):
            raise ValueError("the counts are not those of the entries")
        return self

    @property
    def exit_code(self) -> int:
        """1 with work to do."""
        return 1 if self.missing or self.stale else 0


class Built(Document):
    """One entry this build made; a time is None where that run was not measured."""

    key: Digest
    method: str
    case: str
    rank: int = Field(ge=0)
    cold_seconds: _Seconds | None
    warm_seconds: _Seconds | None


class Failed(Document):
    """One entry that could not be built or did not pass a gate; `log` is the path of the rank's log."""

    method: str
    case: str
    rank: int = Field(ge=0)
    error: str
    log: str | None


class Boot(Document):
    """What each start with a ready warm set saves: over its cases, the slowest rank's cold less its warm first call.

    `saved_seconds` is null where a time was not measured.
    """

    recipe: str
    warm_set: Digest
    saved_seconds: _Seconds | None
    evidence: Literal["simulated", "device"]


class BuildReport(Report):
    """What a build made, found already there, and could not make; `warm_set` is null unless one is ready.

    `warm_set` is the last recipe's; `boots` tells people of each recipe that is ready.
    """

    built: Many[Built]
    reused: Many[Digest]
    failed: Many[Failed]
    seconds: _Seconds
    warm_set: Digest | None
    boots: Many[Boot] = Field(default=(), exclude=True)

    @property
    def exit_code(self) -> int:
        """1 with a failed entry."""
        return 1 if self.failed else 0


class RecordReport(Report):
    """What exec --record published of a run: `warm_set` where it is whole, and why anything was not published."""

    entries: Many[Built] = ()
    warm_set: Digest | None = None
    reasons: Many[ReasonModel] = ()
    seconds: _Seconds = 0.0


class HookEntry(Document):
    """One entry handed out, and the directory it was laid out in."""

    key: Digest
    method: str
    case: str
    rank: int = Field(ge=0)
    path: str


class HookSeconds(Document):
    """How long each step of the hook took."""

    resolve: _Seconds = 0.0
    verify: _Seconds = 0.0
    materialize: _Seconds = 0.0
    total: _Seconds = 0.0


class HookReport(Report):
    """What the hook decided; warm means handed out, the proof is the process's."""

    outcome: Outcome
    warm_set: Digest | None
    cache_dir: str | None
    env: dict[str, str]
    entries: Many[HookEntry]
    reasons: Many[ReasonModel]
    seconds: HookSeconds

    @property
    def strict_exit_code(self) -> int:
        """The exit code under --strict: 1 unless warm.

        Disabled is 0: the switch that turns cachectl off must not keep pods from starting.
        """
        return 0 if self.outcome in ("warm", "disabled") else 1


class Nearest(Document):
    """A stored entry near to the request: how many parts differ, and in what.

    `line` says for people what the entry is for; it is no part of the JSON.
    """

    key: Digest
    distance: int = Field(ge=0)
    differs: Many[ReasonModel]
    line: str = Field(default="", exclude=True)


class ExplainReport(Report):
    """Why a request is warm or why not, and what comes nearest to it."""

    outcome: Outcome
    reasons: Many[ReasonModel]
    nearest: Many[Nearest]
    framework: Many[FrameworkReport] = ()

    @model_serializer(mode="wrap")
    def _leave_out_empty(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _without_empty_framework(dump(self))

    @property
    def exit_code(self) -> int:
        """1 if cold."""
        return 1 if self.outcome == "cold" else 0


class DiffReport(Report):
    """In what two stored entries differ: `distance` parts that count, and noise."""

    stored: Digest
    wanted: Digest
    distance: int = Field(ge=0)
    differs: Many[ReasonModel]


class Finding(Document):
    """One thing verify found wrong; `key` and `path` are null where it has none."""

    kind: FindingKind
    key: Digest | None
    path: str | None
    detail: str
    repaired: bool = False


class VerifyReport(Report):
    """How many entries were checked and what is wrong with them."""

    checked: int = Field(ge=0)
    findings: Many[Finding]

    @property
    def exit_code(self) -> int:
        """1 with a finding that is not repaired."""
        return 1 if any(not finding.repaired for finding in self.findings) else 0


class LsEntry(Document):
    """One stored entry; times are UTC, `last_used_at` is null before the first use."""

    key: Digest
    recipe: str
    method: str
    case: str
    rank: int = Field(ge=0)
    state: Literal["ready", "invalid", "quarantined"]
    size_bytes: int = Field(ge=0)
    created_at: str
    last_used_at: str | None
    pinned: bool


class LsReport(Report):
    """The stored entries."""

    entries: Many[LsEntry]


class InspectPython(Document):
    """The CPython an artifact's bytecode is for, and whether this one could run it."""

    implementation: str
    minor: str
    magic_ok: bool


class InspectInput(Document):
    """One input of the compiled graph; a dimension that varies is text. `stride` is null where it isn't recorded."""

    name: str
    kind: Literal["parameter", "buffer", "user"]
    source: str
    # None for what is no tensor, a symbolic length say.
    shape: Many[int | str] | None
    dtype: str | None
    device: str | None
    stride: Many[int | str] | None = None


class InspectReport(Report):
    """What an artifact says of itself, read without running it; `key` is null for a file outside the store."""

    key: Digest | None
    path: str
    runtime: str
    format_version: str
    name: str
    created_at: str | None
    python: InspectPython
    inputs: Many[InspectInput]
    options: dict[str, Any]
    graph_ops: Many[str]
    size_bytes: int = Field(ge=0)
    # What ties the artifact to a place or a process; worth reading, not a fault.
    findings: Many[str] = ()


class DoctorCheck(Document):
    """One check of the environment; `hint` says what to do where it is not ok."""

    name: str
    state: Literal["ok", "warn", "fail"]
    detail: str
    hint: str


class DoctorReport(Report):
    """The checks of the environment, in the order they were made."""

    checks: Many[DoctorCheck]

    @property
    def exit_code(self) -> int:
        """1 with a failed check; a warning is no failure."""
        return 1 if any(check.state == "fail" for check in self.checks) else 0
