"""Reading what was published: entry manifests and boot records, checked against the digests that name them.

Owns how a reader finds and trusts a document. Standard library only; writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cachectl.errors import ArtifactCorruptedError, ArtifactNotFoundError, DocumentError
from cachectl.schemas.boot import BootRecord, StoredEntry
from cachectl.schemas.canonical import DIGEST_PREFIX, digest_bytes, is_digest
from cachectl.schemas.envelope import ENTRY_PAYLOAD_TYPE, Envelope
from cachectl.schemas.trail import read_pointer
from cachectl.store.blobs import BlobStore
from cachectl.store.layout import NO_REGULAR_FILE, StoreLayout, bare_hex, describe_os_error, read_bounded
from cachectl.store.manifest_deltas import is_manifest_delta, read_manifest_delta
from cachectl.values import dataclass

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "ReadManifest",
    "read_boot_record",
    "read_manifest",
    "read_manifest_file",
    "read_recipe_pointer",
    "stored_manifests",
]

# A manifest holds a guard sheet (16 KB by budget) and file lists; what is far larger is not ours to parse at boot.
_DOCUMENT_LIMIT_BYTES = 16 << 20


@dataclass(frozen=True)
class ReadManifest:
    """One entry manifest as it was read: its digest, its envelope, the whole document, and the boot path's view.

    `base` is the digest of the blob that its file stands on, where it is kept by what it has in common with another.
    """

    manifest: str
    envelope: Envelope
    document: dict[str, Any]
    entry: StoredEntry
    base: str | None = None


def read_manifest(layout: StoreLayout, key: str, manifest: str) -> ReadManifest:
    """Read the entry manifest that a member names.

    Raises:
        ArtifactNotFoundError: not there.
        ArtifactCorruptedError: its bytes, or the key it says, are not what its name says.
        DocumentError: malformed or of another schema.
        StoreError: not readable.
    """
    read = read_manifest_file(layout.manifest(key, manifest))
    if read.entry.key != key:
        raise ArtifactCorruptedError(
            f"entry manifest {manifest} says key {read.entry.key}, its name says {key}",
            path=layout.manifest(key, manifest),
            hint="run: cachectl verify",
        )
    return read


def read_manifest_file(path: Path) -> ReadManifest:
    """Read an entry manifest's file; as `read_manifest`, with the digest taken from the file's name."""
    data = _read(path, "entry manifest")
    base = None
    if is_manifest_delta(data):
        data, base = read_manifest_delta(BlobStore(StoreLayout.of_manifest(path)), data)
    found = digest_bytes(data)
    if f"{bare_hex(found)}.json" != path.name:
        raise ArtifactCorruptedError(
            f"entry manifest {path.name} holds other bytes", path=path, hint="run: cachectl verify"
        )
    envelope = Envelope.from_bytes(data)
    document = envelope.document(ENTRY_PAYLOAD_TYPE)
    return ReadManifest(found, envelope, document, StoredEntry.from_document(document), base)


def stored_manifests(layout: StoreLayout) -> Iterator[Path]:
    """Yield the paths of all entry manifests, sorted by key and digest.

    Raises:
        StoreError: a folder can't be read.
    """
    for folder in _sorted(layout.entries):
        for key in _sorted(folder):
            for path in _sorted(key):
                if path.suffix == ".json" and is_digest(DIGEST_PREFIX + path.stem):
                    yield path


def read_boot_record(
    layout: StoreLayout, *, raw_digest: str | None = None, recipe_digest: str | None = None
) -> BootRecord | None:
    """Read a recipe's boot record, by the digest of the recipe file's bytes or by that of its meaning.

    Returns:
        The record; None if the store knows no such recipe.

    Raises:
        DocumentError: malformed, or of a newer schema.
        StoreError: not readable.
    """
    if recipe_digest is None:
        if raw_digest is None:
            raise TypeError("give raw_digest or recipe_digest")
        pointer = read_recipe_pointer(layout, raw_digest)
        if not isinstance(pointer, str):
            return None
        recipe_digest = pointer
    try:
        record = BootRecord.from_bytes(_read(layout.boot_record(recipe_digest), "boot record"))
    except ArtifactNotFoundError:
        return None
    if record.recipe_digest != recipe_digest:
        raise DocumentError(
            f"boot record of {recipe_digest} is about {record.recipe_digest}", hint="run: cachectl verify"
        )
    return record


def read_recipe_pointer(layout: StoreLayout, raw_digest: str) -> str | tuple[str, ...] | None:
    """Return what the store knows of these bytes: their meaning's digest, or which files to read next (schemas/trail).

    Raises:
        DocumentError: malformed.
        StoreError: not readable.
    """
    try:
        data = _read(layout.raw_recipe(raw_digest), "recipe pointer")
    except ArtifactNotFoundError:
        return None
    pointer = read_pointer(data)
    if pointer is None:
        raise DocumentError(
            f"recipe pointer {layout.raw_recipe(raw_digest)} holds no digest", hint="run: cachectl verify"
        )
    return pointer


def _read(path: Path, what: str) -> bytes:
    try:
        data = read_bounded(path, _DOCUMENT_LIMIT_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ArtifactNotFoundError(f"{what} {path} is not there", hint="run: cachectl verify") from error
    except OSError as error:
        if error.errno in NO_REGULAR_FILE:
            raise DocumentError(f"{what} {path} is no regular file", hint="run: cachectl verify") from error
        raise describe_os_error(error, f"can't read {what} {path}") from error
    if len(data) > _DOCUMENT_LIMIT_BYTES:
        raise DocumentError(f"{what} {path} is larger than {_DOCUMENT_LIMIT_BYTES} bytes")
    return data


def _sorted(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise describe_os_error(error, f"can't list {folder}") from error
