"""The entry manifest: what is written is exactly what the boot path reads, and the key is that of the parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachectl.errors import DocumentError
from cachectl.schemas.boot import StoredEntry
from cachectl.schemas.canonical import digest_bytes
from cachectl.schemas.entry import EntryManifest
from cachectl.schemas.envelope import ENTRY_PAYLOAD_TYPE, Envelope
from cachectl.schemas.keying import KEY_PARTS, KEY_VERSION, compute_key
from tests.strategies import entry_documents

PARTS: dict[str, Any] = {name: {} for name in KEY_PARTS}
DOCUMENT: dict[str, Any] = {
    "schema": "cachectl/entry/v1",
    "key_version": KEY_VERSION,
    "key": compute_key(PARTS),
    "recipe": "tiny-decoder",
    "method": "main_decode",
    "case": "b4",
    "rank": 0,
    "parts": PARTS,
    "raw_sources": {"tiny_decoder/model.py": digest_bytes(b"source")},
    "artifact": {
        "runtime": "npugraph_ex",
        "format_version": "1.0.6",
        "runtime_path": "Model_static_aclgraphcache_0123/main_decode",
        "files": [
            {"path": "compiled_module", "digest": digest_bytes(b"x"), "size_bytes": 1, "mode": "0600"},
            {"path": "kernels/a.run", "digest": digest_bytes(b"y"), "size_bytes": 1, "mode": "0700"},
        ],
    },
    "evidence": {"kind": "simulated", "soc": "Ascend910B1", "cann": "8.5.0", "torch_npu": "2.13.0"},
    "provenance": {
        "created_at": "2026-11-29T22:57:00Z",
        "builder": "cachectl 0.1.0",
        "cold_seconds": 7.66,
        "warm_seconds": 0.127,
        "gates": {"max_error": 0.0},
        "warnings": [],
    },
}


@settings(max_examples=50)
@given(entry_documents())
def test_entry_manifest_stored_entry_reads_what_it_writes(document: dict[str, Any]) -> None:
    """The standard-library reader takes from the envelope every value that the writer put in."""
    manifest = EntryManifest.from_document(document)
    envelope = Envelope.from_bytes(manifest.envelope().to_bytes())

    stored = StoredEntry.from_document(envelope.document(ENTRY_PAYLOAD_TYPE))

    for name in ("key", "recipe", "method", "case", "rank"):
        assert document[name] == getattr(stored, name)
    assert document["key"] == compute_key(stored.parts)
    assert document["evidence"] == stored.evidence
    for name in ("runtime", "format_version", "runtime_path"):
        assert document["artifact"][name] == getattr(stored, name)
    assert document["artifact"]["files"] == [vars(file) | {"mode": f"{file.mode:04o}"} for file in stored.files]


@settings(max_examples=50)
@given(entry_documents())
def test_entry_manifest_round_trip_is_equal(document: dict[str, Any]) -> None:
    """Written, read and written again, a manifest has the same bytes and so the same digest."""
    envelope = EntryManifest.from_document(document).envelope()

    again = EntryManifest.from_envelope(envelope)

    assert envelope.to_bytes() == again.envelope().to_bytes()
    assert again == EntryManifest.from_document(again.to_document())


def test_entry_manifest_to_document_is_the_payload() -> None:
    """The fields of the document are those it was read from."""
    assert DOCUMENT == EntryManifest.from_document(DOCUMENT).to_document()


SHOWN = {
    "rungs": {
        "eager": "passed",
        "graph": "passed",
        "accuracy": "passed",
        "cache": "passed",
        "static_kernels": "not asked",
    },
    "warm_up": {
        "inputs_digest": digest_bytes(b"inputs"),
        "inputs_repeat": True,
        "exact": None,
        "rtol": 1e-3,
        "atol": 1e-3,
        "steps": [
            {
                "step": 0,
                "inputs": "given",
                "digest": digest_bytes(b"outputs"),
                "values": [{"place": "output", "dtype": "float32", "shape": [1], "digest": None, "numbers": ["nan"]}],
            }
        ],
    },
    "held": {"outputs": ["output"], "inputs": []},
    "captures": {
        "limit": 64,
        "keys": None,
        "sizes": [],
        "values": ["L['n']"],
        "written": [],
        "captured": 1,
        "recaptured": 0,
        "fell_back": 0,
        "warning": "each new value",
    },
    "seconds": {"warm": {"load": 0.1}},
}


def test_entry_manifest_keeps_what_the_gates_showed_and_earlier_ones_stay_as_they_were() -> None:
    """A manifest of an earlier version has no such field, read and written again; the key takes no notice."""
    provenance = {**DOCUMENT["provenance"], "shown": SHOWN}
    with_it = EntryManifest.from_document(DOCUMENT | {"provenance": provenance})

    assert SHOWN == with_it.to_document()["provenance"]["shown"]
    assert DOCUMENT["key"] == with_it.key
    assert "shown" not in EntryManifest.from_document(DOCUMENT).to_document()["provenance"]


def test_node_cut_is_in_the_manifest_where_it_was_noted() -> None:
    """Of a world of several ranks it says how many each node ran; others stay as they were, byte by byte."""
    provenance = {**DOCUMENT["provenance"], "ranks_per_node": 2}
    with_it = EntryManifest.from_document(DOCUMENT | {"provenance": provenance})

    assert 2 == with_it.to_document()["provenance"]["ranks_per_node"]
    assert "ranks_per_node" not in EntryManifest.from_document(DOCUMENT).to_document()["provenance"]
    with pytest.raises(DocumentError, match=r"provenance\.ranks_per_node"):
        EntryManifest.from_document(DOCUMENT | {"provenance": {**provenance, "ranks_per_node": 0}})


@pytest.mark.parametrize(
    "wrong",
    [
        {"rungs": {"eager": "yes"}},
        {"warm_up": {**SHOWN["warm_up"], "steps": [{"step": 0, "inputs": "guessed", "digest": digest_bytes(b"")}]}},
        {"warm_up": {**SHOWN["warm_up"], "inputs_digest": "sha256:0"}},
        {"captures": {**SHOWN["captures"], "keys": "many"}},
    ],
)
def test_entry_manifest_refuses_what_no_gate_shows(wrong: dict[str, Any]) -> None:
    """A rung, a kind of inputs, a digest or a count that is none."""
    provenance = {**DOCUMENT["provenance"], "shown": {**SHOWN, **wrong}}

    with pytest.raises(DocumentError, match=r"provenance\.shown\."):
        EntryManifest.from_document(DOCUMENT | {"provenance": provenance})


def test_entry_manifest_raw_sources_are_beside_the_key() -> None:
    """Another digest of a whole source file, as after an edited comment, leaves the key as it is."""
    edited = DOCUMENT | {"raw_sources": {"tiny_decoder/model.py": digest_bytes(b"edited")}}
    without = {name: value for name, value in DOCUMENT.items() if name != "raw_sources"}

    assert DOCUMENT["key"] == EntryManifest.from_document(edited).key
    assert {} == EntryManifest.from_document(without).to_document()["raw_sources"]


@given(st.sampled_from(KEY_PARTS))
def test_entry_manifest_changed_part_is_refused(name: str) -> None:
    """A manifest whose parts don't give its key is never written and never read."""
    document = DOCUMENT | {"parts": PARTS | {name: {"x": 1}}}

    with pytest.raises(DocumentError) as caught:
        EntryManifest.from_document(document)

    assert f"the key is {DOCUMENT['key']}, its parts give {compute_key(document['parts'])}" in str(caught.value)


def _set(value: Any, *path: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        target: Any = document
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _set("cachectl/entry/v2", "schema"),
            "entry manifest has schema 'cachectl/entry/v2', this program reads 'cachectl/entry/v1'",
        ),
        (_set(4, "key_version"), "entry manifest has key_version 4, this program reads 1, 2 and 3"),
        (_set(True, "key_version"), "entry manifest has key_version True, this program reads 1, 2 and 3"),
        (_set(1, "extra"), "entry manifest is malformed: extra: Extra inputs are not permitted"),
        (_set(1, "artifact", "extra"), "entry manifest is malformed: artifact.extra: Extra inputs are not permitted"),
        (_set(1, "evidence", "extra"), "entry manifest is malformed: evidence.extra: Extra inputs are not permitted"),
        (
            _set(1, "provenance", "extra"),
            "entry manifest is malformed: provenance.extra: Extra inputs are not permitted",
        ),
        (_set(1, "parts", "extra"), "entry manifest is malformed: parts.extra: Extra inputs are not permitted"),
        (
            _set("", "evidence", "cann"),
            "entry manifest is malformed: evidence.cann: String should have at least 1 character",
        ),
        (_set(-1, "rank"), "entry manifest is malformed: rank: Input should be greater than or equal to 0"),
        (_set("0", "rank"), "entry manifest is malformed: rank: Input should be a valid integer"),
        (
            _set("../x", "artifact", "files", 0, "path"),
            "entry manifest is malformed: artifact.files.0.path: Value error, '../x' leaves the artifact's directory",
        ),
        (
            _set("compiled_module/x", "artifact", "files", 1, "path"),
            "entry manifest is malformed: artifact: Value error, 'compiled_module/x' lies below another file",
        ),
        (
            _set("compiled_module", "artifact", "files", 1, "path"),
            "entry manifest is malformed: artifact: Value error, a path stands twice among the files",
        ),
        (
            _set("644", "artifact", "files", 0, "mode"),
            "entry manifest is malformed: artifact.files.0.mode: String should match pattern '^0[0-7]{3}\\z'",
        ),
        (
            _set("sha256:x", "artifact", "files", 0, "digest"),
            "entry manifest is malformed: artifact.files.0.digest: Value error, 'sha256:x' is no digest",
        ),
    ],
)
def test_entry_manifest_wrong_field_is_document_error(change: Callable[[dict[str, Any]], None], message: str) -> None:
    """Unknown, mistyped and dangerous fields are refused with their place."""
    document = copy.deepcopy(DOCUMENT)
    change(document)

    with pytest.raises(DocumentError) as caught:
        EntryManifest.from_document(document)

    assert message == str(caught.value)


@pytest.mark.parametrize("stamp", ["2026-11-29 22:57:00Z", "2026-11-29T22:57:00+01:00", "2026-11-29T22:57:00Z\n", ""])
def test_entry_manifest_time_without_utc_is_document_error(stamp: str) -> None:
    """Times are UTC and say so: stores of several time zones are compared as text."""
    document = copy.deepcopy(DOCUMENT)
    document["provenance"]["created_at"] = stamp

    with pytest.raises(DocumentError, match=r"provenance\.created_at"):
        EntryManifest.from_document(document)
