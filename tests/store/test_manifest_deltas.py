"""Manifests by what they have in common: what comes out is what went in, and a world's take little more than one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from cachectl.errors import ArtifactCorruptedError, ArtifactNotFoundError, DocumentError
from cachectl.schemas.boot import StoredEntry
from cachectl.schemas.canonical import digest_bytes, digest_of
from cachectl.schemas.entry import EntryManifest
from cachectl.schemas.envelope import ENTRY_PAYLOAD_TYPE, Envelope, Signature
from cachectl.schemas.keying import KEY_VERSION, compute_key
from cachectl.store.blobs import BlobStore
from cachectl.store.layout import StoreLayout
from cachectl.store.manifest import ManifestRepo
from cachectl.store.manifest_deltas import base_text, is_manifest_delta, manifest_delta, read_manifest_delta
from cachectl.store.reading import read_manifest_file, stored_manifests
from cachectl.store.writing import Publication, add_artifact, publish, publish_entries
from tests.store.test_deltas import of_rank
from tests.strategies import entry_documents

RECIPE = digest_of("recipe")
# As many guards as a small decoder's sheet has.
GUARDS = {"nodes": [[["attribute", f"layer{number}.weight"], {"dtype": "float32"}] for number in range(150)]}


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    """An empty store."""
    made = StoreLayout(tmp_path / "store")
    made.create()
    ManifestRepo.open(made.database, create=True).close()
    return made


def document(rank: int, files: list[dict[str, Any]], world_size: int = 64) -> dict[str, Any]:
    """Return a manifest's payload as a rank of a world writes it: parts that name the rank, times of its own."""
    parts: dict[str, Any] = {
        "model": {"factory": "model:build", "method": "main_decode", "inputs": "model:inputs", "args": {}},
        "sources": {"version": 1, "attributes": [], "files": [], "packages": []},
        "inputs": {"L['x']": {"tensor": {"shape": [2, 8]}}},
        "topology": {"rank": rank, "world_size": world_size, "found": {"device_index": rank}},
        "options": {"frozen_parameter": True},
        "toolchain": {"torch": "2.13.0"},
        "device": {"soc": "ascend910b1", "simulated": True},
        "environment": {"declared": {}, "observed": {}},
        "guards": {**GUARDS, "first": rank * 8, "group": f"ptd:{rank + 2}"},
    }
    return {
        "schema": "cachectl/entry/v1",
        "key_version": KEY_VERSION,
        "key": compute_key(parts),
        "recipe": "ranked",
        "method": "main_decode",
        "case": "b2",
        "rank": rank,
        "parts": parts,
        "raw_sources": {},
        "artifact": {
            "runtime": "npugraph_ex",
            "format_version": "1.0.6",
            "runtime_path": f"Ranked_0/world{world_size}global_rank{rank}/main_decode",
            "files": files,
        },
        "evidence": {"kind": "simulated", "soc": "ascend910b1", "cann": "8.5.0", "torch_npu": "2.13.0"},
        "provenance": {
            "created_at": "2026-03-01T12:00:00Z",
            "builder": "cachectl tests",
            "cold_seconds": 1.0 + rank / 7,
            "warm_seconds": 0.1 + rank / 11,
        },
    }


def publish_ranks(layout: StoreLayout, folder: Path, world_size: int) -> list[EntryManifest]:
    """Publish one entry a rank, each with an artifact of its own that means the same."""
    like: dict[str, str] = {}
    manifests = []
    for rank in range(world_size):
        harvest = folder / f"{world_size}-{rank}"
        harvest.mkdir()
        (harvest / "compiled_module").write_bytes(of_rank(rank))
        files = add_artifact(layout, harvest, like=like)
        like.setdefault("compiled_module", files[0]["digest"])
        manifests.append(EntryManifest.from_document(document(rank, files, world_size)))
    with ManifestRepo.open(layout.database) as repo:
        publish_entries(layout, repo, manifests, RECIPE)
    return manifests


def publish_set(layout: StoreLayout, manifests: list[EntryManifest]) -> None:
    """Publish the warm set that the entries make, with its boot record."""
    with ManifestRepo.open(layout.database) as repo:
        publish(
            layout,
            repo,
            Publication(
                recipe="ranked",
                recipe_digest=RECIPE,
                raw_digest=digest_of("the recipe's bytes"),
                paths=(".",),
                request={"options": {"frozen_parameter": True}},
                manifests=tuple(manifests),
                reused=(),
                created_at="2026-03-01T12:00:00Z",
            ),
        )


def stored_bytes(*folders: Path) -> int:
    """Return how many bytes the files below folders take."""
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


def test_64_ranks_take_no_more_than_twice_the_bytes_of_one_with_their_manifests(
    layout: StoreLayout, tmp_path: Path
) -> None:
    """One real artifact of 64 ranks: blobs and manifests, and the whole store with its database; all can be read."""
    alone = StoreLayout(tmp_path / "alone")
    alone.create()
    ManifestRepo.open(alone.database, create=True).close()
    publish_set(alone, publish_ranks(alone, tmp_path, 1))

    manifests = publish_ranks(layout, tmp_path, 64)
    publish_set(layout, manifests)

    assert stored_bytes(layout.entries, layout.blobs) <= 2 * stored_bytes(alone.entries, alone.blobs)
    assert stored_bytes(layout.root) <= 2 * stored_bytes(alone.root)
    # No more for a rank than its row and its places in the indices.
    assert layout.database.stat().st_size - alone.database.stat().st_size <= 63 * 1_500
    assert [layout.database.name] == [path.name for path in layout.root.glob("manifest.db*")]
    read = [read_manifest_file(path) for path in stored_manifests(layout)]
    assert {item.entry.rank: item.document for item in read} == {
        manifest.rank: manifest.to_document() for manifest in manifests
    }
    assert {item.manifest for item in read} == {digest_bytes(manifest.envelope().to_bytes()) for manifest in manifests}


def test_manifest_of_a_world_of_one_is_an_envelope(layout: StoreLayout, tmp_path: Path) -> None:
    """Nobody shares with it: the file is what it always was, and there is no base."""
    publish_ranks(layout, tmp_path, 1)
    (path,) = stored_manifests(layout)

    assert ENTRY_PAYLOAD_TYPE == Envelope.from_bytes(path.read_bytes()).payload_type
    assert 1 == len(list(BlobStore(layout).all()))


@given(document=entry_documents(), other=entry_documents())
def test_manifest_delta_of_anything_gives_back_the_very_envelope(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any], other: dict[str, Any]
) -> None:
    """Whatever the payloads, and with signatures, which are over the payload itself."""
    layout = StoreLayout(tmp_path_factory.getbasetemp() / "manifest-deltas")
    layout.create()
    blobs = BlobStore(layout)
    text = base_text(EntryManifest.from_document(other).envelope())
    assert text is not None
    base, _ = blobs.add_bytes(text)
    for payload in (EntryManifest.from_document(document).envelope().payload, text.replace(b"\n", b"")):
        envelope = Envelope(ENTRY_PAYLOAD_TYPE, payload, (Signature("a", b"\x00\xff"),))

        data = manifest_delta(blobs, envelope, base)

        if data is not None:
            assert is_manifest_delta(data)
            assert (envelope.to_bytes(), base) == read_manifest_delta(blobs, data)


def test_manifest_without_its_base_is_refused_by_name_and_mended_by_the_next_publish(
    layout: StoreLayout, tmp_path: Path
) -> None:
    """A base that is gone or damaged: read as not found or other bytes, never as another manifest."""
    manifests = publish_ranks(layout, tmp_path, 3)
    path = next(path for path in stored_manifests(layout) if is_manifest_delta(path.read_bytes()))
    base = read_manifest_file(path).base
    assert base is not None
    blob = layout.blob(base)
    held = blob.read_bytes()
    blob.chmod(0o644)

    blob.write_bytes(held.replace(b"layer1.", b"layer2."))
    with pytest.raises(ArtifactCorruptedError, match="holds other bytes"):
        read_manifest_file(path)
    blob.unlink()
    with pytest.raises(ArtifactNotFoundError, match=base):
        read_manifest_file(path)
    with ManifestRepo.open(layout.database) as repo:
        publish_entries(layout, repo, manifests, RECIPE)
    assert held == blob.read_bytes()
    assert {0, 1, 2} == {read_manifest_file(path).entry.rank for path in stored_manifests(layout)}


@pytest.mark.parametrize("packed", ["", "AAAA", "!", 7, None])
def test_manifest_delta_malformed_is_a_document_error(layout: StoreLayout, packed: object) -> None:
    """What lies in a store may be damaged: an error of ours."""
    data = json.dumps({"payloadDelta": packed}, separators=(",", ":")).encode()

    with pytest.raises(DocumentError):
        read_manifest_delta(BlobStore(layout), data)


def test_manifest_delta_is_read_as_the_boot_path_reads_it(layout: StoreLayout, tmp_path: Path) -> None:
    """The view of the boot path is that of the whole document."""
    manifests = publish_ranks(layout, tmp_path, 2)
    expected = {manifest.rank: StoredEntry.from_document(manifest.to_document()) for manifest in manifests}

    assert expected == {read.entry.rank: read.entry for read in map(read_manifest_file, stored_manifests(layout))}
    assert os.path.isfile(layout.line(digest_of([RECIPE, "main_decode", "b2"])))
