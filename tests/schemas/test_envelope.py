"""DSSE envelopes: bytes and values are the same thing said twice; what is no envelope is a DocumentError."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from cachectl.errors import DocumentError
from cachectl.schemas.envelope import ENTRY_PAYLOAD_TYPE, Envelope, Signature, pre_authentication_encoding
from tests.strategies import ENVELOPES


@given(ENVELOPES)
def test_envelope_round_trip_is_equal(envelope: Envelope) -> None:
    """An envelope reads back equal, and writes the same bytes again."""
    again = Envelope.from_bytes(envelope.to_bytes())

    assert envelope == again
    assert envelope.to_bytes() == again.to_bytes()


def test_pre_authentication_encoding_matches_the_published_example() -> None:
    """DSSE's own test vector: type and payload with their lengths in bytes."""
    expected = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"

    assert expected == pre_authentication_encoding("http://example.com/HelloWorld", b"hello world")


def test_pre_authentication_encoding_counts_bytes_not_characters() -> None:
    """The length of a type is that of its UTF-8."""
    assert b"DSSEv1 2 \xc3\xa9 0 " == pre_authentication_encoding("é", b"")


def test_pre_authentication_encoding_moved_border_differs() -> None:
    """Moving bytes between type and payload never gives the same signed text."""
    assert pre_authentication_encoding("a 1 b", b"c") != pre_authentication_encoding("a", b"b 1 c")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"payload":"!!","payloadType":"t","signatures":[]}',
        b'{"payload":"","payloadType":7,"signatures":[]}',
        b'{"payload":"","payloadType":"t","signatures":[{"keyid":"k"}]}',
        b'{"payload":"","payloadType":"t","signatures":["x"]}',
        b'{"payload":"","payloadType":"t","signatures":null}',
        b'{"payload":null,"payloadType":"t","signatures":[]}',
        b"[" * 100_000,
    ],
)
def test_envelope_malformed_bytes_is_document_error(data: bytes) -> None:
    """Whatever the bytes are, reading them raises DocumentError and nothing else."""
    with pytest.raises(DocumentError, match="not a DSSE envelope: "):
        Envelope.from_bytes(data)


def test_envelope_signature_without_keyid_is_read() -> None:
    """DSSE leaves the key's name out where it is not known."""
    data = b'{"payload":"","payloadType":"t","signatures":[{"sig":"AAA="}]}'

    assert Envelope("t", b"", (Signature("", b"\0\0"),)) == Envelope.from_bytes(data)


def test_envelope_document_of_its_type_is_the_payload() -> None:
    """The payload comes out as the object it was."""
    envelope = Envelope(ENTRY_PAYLOAD_TYPE, json.dumps({"a": 1}).encode())

    assert {"a": 1} == envelope.document(ENTRY_PAYLOAD_TYPE)


@pytest.mark.parametrize(
    ("payload_type", "payload", "message"),
    [
        ("text/plain", b"{}", f"the envelope holds 'text/plain', wanted '{ENTRY_PAYLOAD_TYPE}'"),
        (ENTRY_PAYLOAD_TYPE, b"[]", "the envelope's payload is a list, not an object"),
        (
            ENTRY_PAYLOAD_TYPE,
            b"x",
            "the envelope's payload is not JSON: Expecting value: line 1 column 1 (char 0)",
        ),
    ],
)
def test_envelope_document_of_another_kind_is_document_error(payload_type: str, payload: bytes, message: str) -> None:
    """A payload of another type or shape is refused, with what was found."""
    with pytest.raises(DocumentError) as caught:
        Envelope(payload_type, payload).document(ENTRY_PAYLOAD_TYPE)

    assert message == str(caught.value)
    assert 3 == caught.value.exit_code
