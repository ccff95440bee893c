"""Boot documents: strict reading, no path that leaves the artifact, and a round trip that changes nothing."""

from __future__ import annotations

import copy
import json
from typing import Any, get_args

import pytest
from hypothesis import given

from cachectl.errors import DocumentError
from cachectl.schemas.boot import KINDS, PARTS, BootRecord, Reason, StoredEntry
from cachectl.schemas.canonical import canonical_bytes, digest_bytes
from cachectl.schemas.keying import KEY_PARTS, KEY_VERSION, compute_key
from cachectl.schemas.report import ReasonKind, ReasonPart
from tests.strategies import BOOT_RECORDS

KEY = digest_bytes(b"key")
RECORD = BootRecord(
    recipe="tiny", recipe_digest=KEY, sequence=1, created_at="2026-01-01T00:00:00Z", paths=(".",), sets=()
)


def _entry(**changes: Any) -> dict[str, Any]:
    parts = {name: {"name": name} for name in KEY_PARTS}
    document: dict[str, Any] = {
        "schema": "cachectl/entry/v1",
        "key_version": KEY_VERSION,
        "key": compute_key(parts),
        "recipe": "tiny",
        "method": "main_decode",
        "case": "b4",
        "rank": 1,
        "parts": parts,
        "artifact": {
            "runtime": "npugraph_ex",
            "format_version": "1.0.6",
            "runtime_path": "Model_static_aclgraphcache_0123/main_decode",
            "files": [{"path": "sub/compiled_module", "digest": KEY, "size_bytes": 7, "mode": "0600"}],
        },
        "evidence": {"kind": "simulated"},
        "provenance": {},
    }
    return document | changes


@given(BOOT_RECORDS)
def test_boot_record_round_trip_is_equal(record: BootRecord) -> None:
    """A boot record reads back equal, and writes the same bytes again."""
    again = BootRecord.from_bytes(record.to_bytes())

    assert record == again
    assert record.to_bytes() == again.to_bytes()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schema", "cachectl/boot-record/v2"),
        ("recipe_digest", "sha256:12"),
        ("recipe_digest", None),
        ("sequence", "newest"),
        ("sequence", None),
        ("paths", None),
        ("sets", None),
        ("sets", [{}]),
        ("sets", ["x"]),
        ("sets", [{"warm_set": KEY, "created_at": "", "request": {}, "members": [{"key": KEY}]}]),
        ("sets", [{"warm_set": KEY, "created_at": "", "request": 3, "members": []}]),
    ],
)
def test_boot_record_wrong_field_is_document_error(field: str, value: Any) -> None:
    """Another version, or a missing or mistyped field, is a DocumentError, which a boot turns into cold."""
    document = json.loads(RECORD.to_bytes())
    document[field] = value

    with pytest.raises(DocumentError, match=r"^boot record "):
        BootRecord.from_bytes(canonical_bytes(document))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b"7", b"[" * 100_000])
def test_boot_record_no_object_is_document_error(data: bytes) -> None:
    """Torn or foreign bytes are a DocumentError and nothing else."""
    with pytest.raises(DocumentError, match=r"^boot record is malformed: "):
        BootRecord.from_bytes(data)


def test_stored_entry_reads_every_field() -> None:
    """The boot's view of a manifest holds what the document says, modes as numbers."""
    document = _entry()

    entry = StoredEntry.from_document(document)

    assert (document["key"], "tiny", "main_decode", "b4", 1) == (
        entry.key,
        entry.recipe,
        entry.method,
        entry.case,
        entry.rank,
    )
    assert document["parts"] == entry.parts
    assert ("npugraph_ex", "1.0.6") == (entry.runtime, entry.format_version)
    assert "Model_static_aclgraphcache_0123/main_decode" == entry.runtime_path
    assert ("sub/compiled_module", KEY, 7, 0o600) == tuple(vars(entry.files[0]).values())
    assert {"kind": "simulated"} == entry.evidence


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "a/../../x",
        "/etc/passwd",
        "a//b",
        "./a",
        "a/.",
        "a/",
        "..",
        ".",
        "",
        "a\\..\\b",
        "a\0b",
        None,
        7,
    ],
)
@pytest.mark.parametrize("field", ["path", "runtime_path"])
def test_stored_entry_path_outside_the_artifact_is_document_error(field: str, path: Any) -> None:
    """A manifest from elsewhere can't name a file outside the directory it is laid out in."""
    document = copy.deepcopy(_entry())
    artifact = document["artifact"]
    (artifact["files"][0] if field == "path" else artifact)[field] = path

    with pytest.raises(DocumentError, match=r"^entry manifest is malformed: ValueError: "):
        StoredEntry.from_document(document)


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": "cachectl/entry/v2"},
        {"schema": None},
        {"key": "sha256:0"},
        {"rank": "first"},
        {"parts": None},
        {"artifact": None},
        {"artifact": {}},
        {"artifact": {"files": [{}]}},
        {"artifact": {"files": [{"path": "a", "digest": KEY, "size_bytes": 1, "mode": "rw"}]}},
        {"artifact": {"files": [{"path": "a", "digest": KEY, "size_bytes": 1, "mode": 384}]}},
        {"evidence": None},
    ],
)
def test_stored_entry_wrong_field_is_document_error(changes: dict[str, Any]) -> None:
    """Another version, or a missing or mistyped field, is a DocumentError."""
    with pytest.raises(DocumentError, match=r"^entry manifest "):
        StoredEntry.from_document(_entry(**changes))


def test_reason_to_json_has_the_fields_of_the_contract() -> None:
    """A reason is one JSON object with six fields, in the contract's order."""
    reason = Reason("toolchain", "cann", "8.3", "8.5", hint="cachectl build recipe.yaml")

    assert [
        ("part", "toolchain"),
        ("name", "cann"),
        ("stored", "8.3"),
        ("wanted", "8.5"),
        ("kind", "semantic"),
        ("hint", "cachectl build recipe.yaml"),
    ] == list(reason.to_json().items())


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (Reason("toolchain", "cann", "8.3", "8.5"), "toolchain: cann: stored 8.3, wanted 8.5 (semantic)"),
        (Reason("store", "no record", kind="absent"), "store: no record (absent)"),
        (Reason("inputs", "x.shape", [4, 1], None), "inputs: x.shape: stored [4, 1], wanted null (semantic)"),
        (Reason("options", "o", "x" * 100, ""), f"options: o: stored {'x' * 79}…, wanted  (semantic)"),
    ],
)
def test_reason_as_text_is_one_short_line(reason: Reason, expected: str) -> None:
    """As text a reason shows both values, cut to a readable length."""
    assert expected == str(reason)


def test_parts_and_kinds_are_the_same_on_both_sides() -> None:
    """The reading side's tables, the key's and the pydantic models' say the same."""
    assert PARTS == get_args(ReasonPart)
    assert KINDS == get_args(ReasonKind)
    assert KEY_PARTS == PARTS[: len(KEY_PARTS)]
