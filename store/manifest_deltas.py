"""An entry manifest as what it has in common with another rank's: the ranks of a world write nearly equal manifests.

Owns the form. A manifest's file is a DSSE envelope; of a world of several ranks it may be this instead, canonical JSON:

    {"payloadDelta": base64, "signatures": […]}

where the signatures stand only if there are any. The delta (store/deltas.py) stands on a blob that holds another rank's
payload, and gives the payload's bytes. The file's name stays the digest of the envelope that comes out, and signatures
are over the payload that comes out, so that nobody who reads manifests trusts the base. Both sides of a delta are the
payload with a line break after each comma: canonical JSON is one line and has none of its own. Standard library only.
"""

from __future__ import annotations

import base64
import binascii
import json

from cachectl.errors import DocumentError
from cachectl.schemas.canonical import canonical_bytes
from cachectl.schemas.envelope import ENTRY_PAYLOAD_TYPE, Envelope
from cachectl.store.blobs import BlobStore
from cachectl.store.deltas import DELTA_LIMIT_BYTES, Delta, encode_delta

__all__ = ["base_text", "is_manifest_delta", "manifest_delta", "read_manifest_delta"]

_BEGIN = b'{"payloadDelta":'


def is_manifest_delta(data: bytes) -> bool:
    """Say whether a manifest file's bytes are of this form."""
    return data.startswith(_BEGIN)


def base_text(envelope: Envelope) -> bytes | None:
    """Return the blob that other ranks' manifests can stand on; None for a payload that is not canonical JSON."""
    return None if b"\n" in envelope.payload else envelope.payload.replace(b",", b",\n")


def manifest_delta(blobs: BlobStore, envelope: Envelope, base: str) -> bytes | None:
    """Return an envelope's file by what it has in common with a base; None where that is not nearly all.

    Args:
        base: digest of the blob, which may be missing or damaged.
    """
    text = base_text(envelope)
    held = blobs.held_whole(base)
    if text is None or held is None or envelope.payload_type != ENTRY_PAYLOAD_TYPE:
        return None
    delta = encode_delta(held, base, text)
    if delta is None:
        return None
    signatures = json.loads(envelope.to_bytes())["signatures"]
    packed = base64.b64encode(delta).decode("ascii")
    return canonical_bytes({"payloadDelta": packed, **({"signatures": signatures} if signatures else {})})


def read_manifest_delta(blobs: BlobStore, data: bytes) -> tuple[bytes, str]:
    """Return the envelope's bytes that a file of this form stands for, unchecked, and the digest of its base.

    Raises:
        DocumentError: malformed.
        ArtifactNotFoundError: the base is not in the store.
        StoreError: the base can't be read.
    """
    try:
        document = json.loads(data)
        delta = Delta.from_bytes(base64.b64decode(document["payloadDelta"], validate=True))
        signatures = document.get("signatures", [])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
        raise DocumentError(f"entry manifest's delta is malformed: {type(error).__name__}: {error}") from error
    with blobs.open(delta.base) as file:
        text = delta.apply(file.read(DELTA_LIMIT_BYTES))
    payload = base64.b64encode(text.replace(b"\n", b"")).decode("ascii")
    whole = {"payload": payload, "payloadType": ENTRY_PAYLOAD_TYPE, "signatures": signatures}
    return canonical_bytes(whole), delta.base
