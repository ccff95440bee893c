"""Reports: the contract's field names in the contract's order, and the exit code of each result."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from cachectl.schemas.boot import Reason
from cachectl.schemas.canonical import digest_bytes
from cachectl.schemas.report import (
    BuildReport,
    DiffReport,
    DoctorReport,
    ExplainReport,
    HookReport,
    InspectReport,
    LsReport,
    PlanEntry,
    PlanReport,
    ReasonModel,
    Report,
    VerifyReport,
)

KEY = digest_bytes(b"key")
REASON = {
    "part": "toolchain",
    "name": "cann",
    "stored": "8.3",
    "wanted": "8.5",
    "kind": "semantic",
    "hint": "cachectl build recipe.yaml",
}
LINE = {"method": "main_decode", "case": "b4", "rank": 0}
SECONDS = {"resolve": 0.1, "verify": 0.2, "materialize": 0.3, "total": 0.6}

PLAN: dict[str, Any] = {
    "entries": [
        {"key": KEY, "recipe": "tiny", **LINE, "state": "ready", "reasons": []},
        {"key": None, "recipe": "tiny", **LINE, "state": "missing", "reasons": [REASON]},
        {"key": KEY, "recipe": "tiny", **LINE, "state": "stale", "reasons": [REASON]},
    ],
    "ready": 1,
    "missing": 1,
    "stale": 1,
    "expected_seconds": None,
}
BUILD: dict[str, Any] = {
    "built": [{"key": KEY, **LINE, "cold_seconds": 7.66, "warm_seconds": 0.127}],
    "reused": [KEY],
    "failed": [{**LINE, "error": "graph break at model.py:12", "log": "rank0.log"}],
    "seconds": 12.5,
    "warm_set": None,
}
HOOK: dict[str, Any] = {
    "outcome": "warm",
    "warm_set": KEY,
    "cache_dir": "/var/tmp/cachectl-0/warm",
    "env": {"CACHECTL_HANDOUT": "/var/tmp/cachectl-0/warm/handout.json"},
    "entries": [{"key": KEY, **LINE, "path": "/var/tmp/cachectl-0/warm/main_decode"}],
    "reasons": [],
    "seconds": SECONDS,
}
EXPLAIN: dict[str, Any] = {
    "outcome": "cold",
    "reasons": [REASON],
    "nearest": [{"key": KEY, "distance": 1, "differs": [REASON]}],
}
DIFF: dict[str, Any] = {"stored": KEY, "wanted": KEY, "distance": 1, "differs": [REASON]}
VERIFY: dict[str, Any] = {
    "checked": 3,
    "findings": [
        {"kind": "corrupt-blob", "key": KEY, "path": "blobs/ab", "detail": "digest differs", "repaired": False}
    ],
}
LS: dict[str, Any] = {
    "entries": [
        {
            "key": KEY,
            "recipe": "tiny",
            **LINE,
            "state": "ready",
            "size_bytes": 450_000,
            "created_at": "2026-11-29T22:57:00Z",
            "last_used_at": None,
            "pinned": False,
        }
    ]
}
INSPECT: dict[str, Any] = {
    "key": None,
    "path": "compiled_module",
    "runtime": "npugraph_ex",
    "format_version": "1.0.6",
    "name": "main_decode",
    "created_at": "2026-11-29 22:57:00",
    "python": {"implementation": "cpython", "minor": "3.11", "magic_ok": True},
    "inputs": [
        {
            "name": "arg0_1",
            "kind": "parameter",
            "source": "self.weight",
            "shape": [4, "s0"],
            "dtype": "torch.float16",
            "device": "npu:0",
            "stride": [64, 1],
        },
        {
            "name": "arg1_1",
            "kind": "user",
            "source": "x",
            "shape": [],
            "dtype": "torch.int64",
            "device": "cpu",
            "stride": None,
        },
    ],
    "options": {"frozen_parameter": True},
    "graph_ops": ["aten.mm.default"],
    "size_bytes": 450_000,
    "findings": [],
}
DOCTOR: dict[str, Any] = {"checks": [{"name": "cann", "state": "ok", "detail": "8.5.0", "hint": ""}]}

REPORTS: list[tuple[type[Report], dict[str, Any]]] = [
    (PlanReport, PLAN),
    (BuildReport, BUILD),
    (HookReport, HOOK),
    (ExplainReport, EXPLAIN),
    (DiffReport, DIFF),
    (VerifyReport, VERIFY),
    (LsReport, LS),
    (InspectReport, INSPECT),
    (DoctorReport, DOCTOR),
]


@pytest.mark.parametrize(("model", "document"), REPORTS)
def test_report_writes_the_fields_of_the_contract(model: type[Report], document: dict[str, Any]) -> None:
    """The JSON has exactly the contract's names, in its order, and reads back to an equal report."""
    report = model.model_validate(document)

    assert json.dumps(document) == json.dumps(report.model_dump(mode="json"))
    assert report == model.model_validate_json(report.model_dump_json())


@pytest.mark.parametrize(("model", "document"), REPORTS)
def test_report_unknown_field_is_refused(model: type[Report], document: dict[str, Any]) -> None:
    """A field outside the contract can't be printed by accident."""
    with pytest.raises(ValidationError):
        model.model_validate(document | {"extra": 1})


@pytest.mark.parametrize(
    ("model", "document", "exit_code"),
    [
        (PlanReport, PLAN, 1),
        (PlanReport, {"entries": PLAN["entries"][:1], "ready": 1, "missing": 0, "stale": 0}, 0),
        (PlanReport, {"entries": PLAN["entries"][1:2], "ready": 0, "missing": 1, "stale": 0}, 1),
        (PlanReport, {"entries": PLAN["entries"][2:], "ready": 0, "missing": 0, "stale": 1}, 1),
        (PlanReport, {"entries": [], "ready": 0, "missing": 0, "stale": 0}, 0),
        (BuildReport, BUILD, 1),
        (BuildReport, BUILD | {"failed": []}, 0),
        (HookReport, HOOK, 0),
        (HookReport, HOOK | {"outcome": "cold"}, 0),
        (ExplainReport, EXPLAIN, 1),
        (ExplainReport, EXPLAIN | {"outcome": "warm"}, 0),
        (ExplainReport, EXPLAIN | {"outcome": "degraded"}, 0),
        (DiffReport, DIFF, 0),
        (VerifyReport, VERIFY, 1),
        (VerifyReport, VERIFY | {"findings": []}, 0),
        (VerifyReport, VERIFY | {"findings": [VERIFY["findings"][0] | {"repaired": True}]}, 0),
        (VerifyReport, VERIFY | {"findings": [VERIFY["findings"][0] | {"repaired": True}, VERIFY["findings"][0]]}, 1),
        (LsReport, LS, 0),
        (InspectReport, INSPECT, 0),
        (InspectReport, INSPECT | {"findings": ["bytecode of CPython 3.12"]}, 0),
        (DoctorReport, DOCTOR, 0),
        (DoctorReport, {"checks": [DOCTOR["checks"][0] | {"state": "warn"}]}, 0),
        (DoctorReport, {"checks": [DOCTOR["checks"][0] | {"state": "fail"}]}, 1),
    ],
)
def test_report_exit_code_follows_the_result(model: type[Report], document: dict[str, Any], exit_code: int) -> None:
    """Findings and work to do are 1, the rest is 0; the hook is always 0."""
    assert exit_code == model.model_validate(document).exit_code


@pytest.mark.parametrize(
    ("outcome", "exit_code"), [("warm", 0), ("disabled", 0), ("cold", 1), ("degraded", 1), ("observed", 1)]
)
def test_hook_report_strict_exit_code_is_one_unless_warm(outcome: str, exit_code: int) -> None:
    """Under --strict only warm is good, but the switch that turns cachectl off stops no pod."""
    assert exit_code == HookReport.model_validate(HOOK | {"outcome": outcome}).strict_exit_code


def test_plan_report_of_counts_its_entries() -> None:
    """The three counts come from the entries."""
    entries = [PlanEntry.model_validate(entry) for entry in PLAN["entries"]]

    assert PLAN == PlanReport.of(entries).model_dump(mode="json")


def test_plan_report_wrong_counts_are_refused() -> None:
    """Counts that are not those of the entries would make --require-ready lie."""
    with pytest.raises(ValidationError, match="the counts are not those of the entries"):
        PlanReport.model_validate(PLAN | {"ready": 3})


@pytest.mark.parametrize(("state", "key"), [("missing", KEY), ("ready", None), ("stale", None)])
def test_plan_entry_key_and_state_that_disagree_are_refused(state: str, key: str | None) -> None:
    """Exactly the missing entries have no key."""
    with pytest.raises(ValidationError, match=f"a {state} entry has"):
        PlanEntry.model_validate(PLAN["entries"][0] | {"state": state, "key": key})


def test_reason_model_of_boot_reason_is_equal() -> None:
    """A reason says the same on both sides, as plain JSON also where it quotes sets and non-finite floats."""
    plain = Reason("toolchain", "cann", "8.3", "8.5", hint="cachectl build recipe.yaml")
    odd = Reason("guards", "values", {"b", "a"}, float("nan"), kind="noise")

    assert REASON == ReasonModel.of(plain).model_dump(mode="json")
    assert (["a", "b"], {"$float": "nan"}) == (ReasonModel.of(odd).stored, ReasonModel.of(odd).wanted)


@pytest.mark.parametrize("change", [{"part": "weather"}, {"kind": "odd"}, {"stored": b"x"}, {"hint": None}])
def test_reason_model_wrong_field_is_refused(change: dict[str, Any]) -> None:
    """Parts and kinds are closed lists, and values are JSON."""
    with pytest.raises(ValidationError):
        ReasonModel.model_validate(REASON | change)


@pytest.mark.parametrize(
    "kind",
    [
        "missing-blob",
        "corrupt-blob",
        "unsigned",
        "bad-signature",
        "extra-file",
        "index-drift",
        "incomplete-set",
        "unreadable-artifact",
        "foreign-bytecode",
    ],
)
def test_finding_every_kind_of_the_contract_is_known(kind: str) -> None:
    """Verify's kinds are those of the contract."""
    finding = VERIFY["findings"][0] | {"kind": kind}

    assert kind == VerifyReport.model_validate(VERIFY | {"findings": [finding]}).findings[0].kind


def test_finding_other_kind_is_refused() -> None:
    """A kind outside the contract can't be printed."""
    with pytest.raises(ValidationError):
        VerifyReport.model_validate(VERIFY | {"findings": [VERIFY["findings"][0] | {"kind": "odd"}]})
