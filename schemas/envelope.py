"""DSSE envelopes: a document, its type, and the signatures over both.

Owns the envelope format (github.com/secure-systems-lab/dsse, protocol.md) and nothing of what the payload says. Every
entry manifest is enveloped from the first version on, also unsigned, so that signing never changes the layout.
Standard library only; signatures are made and checked in store/signing, with `cryptography`.
"""

from __future__ import annotations

import base64
import binascii
import json

from cachectl.errors import DocumentError
from cachectl.schemas.canonical import canonical_bytes
from cachectl.values import dataclass

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = ["ENTRY_PAYLOAD_TYPE", "Envelope", "Signature", "pre_authentication_encoding"]

ENTRY_PAYLOAD_TYPE = "application/vnd.cachectl.entry.v1+json"


@dataclass(frozen=True)
class Signature:
    """One signature: the key's name as the signer gave it, and the raw signature bytes."""

    keyid: str
    sig: bytes


@dataclass(frozen=True)
class Envelope:
    """A payload's bytes, their type and the signatures over both."""

    payload_type: str
    payload: bytes
    signatures: tuple[Signature, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the envelope as canonical JSON; `from_bytes` reads it back to an equal value."""
        return canonical_bytes(
            {
                "payloadType": self.payload_type,
                "payload": base64.b64encode(self.payload).decode("ascii"),
                "signatures": [
                    {"keyid": signature.keyid, "sig": base64.b64encode(signature.sig).decode("ascii")}
                    for signature in self.signatures
                ],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Envelope:
        """Read an envelope; the payload is decoded but not interpreted.

        Raises:
            DocumentError: not JSON, not an envelope, or not base64.
        """
        try:
            document = json.loads(data)
            payload = base64.b64decode(document["payload"], validate=True)
            signatures = tuple(
                Signature(str(item.get("keyid", "")), base64.b64decode(item["sig"], validate=True))
                for item in document["signatures"]
            )
            payload_type = document["payloadType"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
            raise DocumentError(f"not a DSSE envelope: {type(error).__name__}: {error}") from error
        if not isinstance(payload_type, str):
            raise DocumentError(f"not a DSSE envelope: payloadType is {payload_type!r}")
        return cls(payload_type, payload, signatures)

    def document(self, payload_type: str) -> dict[str, Any]:
        """Return the payload as a JSON object, if it is of the type asked for.

        Raises:
            DocumentError: another type, or no JSON object.
        """
        if self.payload_type != payload_type:
            raise DocumentError(f"the envelope holds {self.payload_type!r}, wanted {payload_type!r}")
        try:
            document = json.loads(self.payload)
        except (ValueError, RecursionError) as error:
            raise DocumentError(f"the envelope's payload is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise DocumentError(f"the envelope's payload is a {type(document).__name__}, not an object")
        return document


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """Return what is signed: DSSE's PAE of the type and the payload bytes."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
