"""Publishing: what a build proved becomes visible, all at once and last things last.

Owns the write order, stated here once: blobs, entry manifests, database rows in one transaction, boot record. A crash
at any point leaves the old warm sets or the new one; what was written and is not named yet is found again by content
at the next build, or cleared by prune. Deleting goes the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachectl.errors import ArtifactNotFoundError
from cachectl.schemas.boot import Absence, Member, StoredEntry, WarmSet
from cachectl.schemas.canonical import digest_bytes
from cachectl.schemas.entry import EntryManifest
from cachectl.schemas.envelope import Envelope
from cachectl.schemas.keying import warm_set_id
from cachectl.schemas.trail import Trail, pointer_bytes
from cachectl.store.blobs import BlobStore, digest_file, write_atomically
from cachectl.store.layout import StoreLayout, bare_hex, read_bounded
from cachectl.store.lines import note_line, read_line
from cachectl.store.locks import file_lock
from cachectl.store.manifest import ManifestRepo
from cachectl.store.manifest_deltas import base_text, manifest_delta
from cachectl.store.manifest_rows import NewEntry, NewWarmSet
from cachectl.store.reading import read_boot_record, read_manifest
from cachectl.store.records import tied_to_cut, with_warm_set

__all__ = ["Publication", "add_artifact", "describe_artifact", "name_recipe", "note_base", "publish", "publish_entries"]

_RECORD_LOCK_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Publication:
    """What one build publishes for one recipe.

    `manifests` are the entries that were built now; `reused` the members whose entries are in the store already;
    `request` the key part documents that are known before tracing, as the hook will compute them again; `absent` the
    methods that ranks were found not to have; `trail` what the hook has to know of files beside the recipe's.
    `ranks_per_node` is the cut into nodes that was asked for; it goes into the record where an entry is tied to a cut.
    """

    recipe: str
    recipe_digest: str
    raw_digest: str
    paths: tuple[str, ...]
    request: dict[str, Any]
    manifests: tuple[EntryManifest, ...]
    reused: tuple[Member, ...]
    created_at: str
    absent: tuple[Absence, ...] = ()
    trail: Trail = ()
    ranks_per_node: int | None = None


def add_artifact(layout: StoreLayout, folder: Path, *, like: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Store every file below `folder` as a blob; return the manifest's file list, sorted by path.

    Args:
        like: digests of files by path, of an artifact that is expected to be nearly the same: another rank's.

    Raises:
        StoreError: a system call failed, or the artifact holds a link or special file.
    """
    blobs = BlobStore(layout)

    def add(path: Path, name: str) -> tuple[str, int]:
        base = (like or {}).get(name)
        return blobs.add_file(path) if base is None else blobs.add_like(path, base)

    return _listed(folder, add)


def describe_artifact(folder: Path) -> list[dict[str, Any]]:
    """Return the file list that `add_artifact` would return, with nothing stored. Raises StoreError as it does."""
    return _listed(folder, lambda path, name: digest_file(path))


def _listed(folder: Path, digest_of: Callable[[Path, str], tuple[str, int]]) -> list[dict[str, Any]]:
    files = []
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        name = path.relative_to(folder).as_posix()
        digest, size_bytes = digest_of(path, name)
        mode = 0o700 if path.stat().st_mode & 0o100 else 0o600
        files.append({"path": name, "digest": digest, "size_bytes": size_bytes, "mode": f"{mode:04o}"})
    return files


def note_base(layout: StoreLayout, recipe_digest: str, document: Mapping[str, Any]) -> None:
    """Let other ranks' files and manifests of a line stand on an entry's, unless they do on another's already.

    Args:
        document: the entry manifest's, also before it was proved; its files are in the store.

    Raises:
        StoreError: a system call failed.
    """
    blobs = BlobStore(layout)
    line = (str(document["method"]), str(document["case"]))
    note = read_line(layout, recipe_digest, *line)
    whole = {
        file["path"]: file["digest"]
        for file in document["artifact"]["files"]
        if file["path"] not in note.files or blobs.base_of(file["digest"]) is None
    }
    manifest = None
    if note.manifest is None or not blobs.exists(note.manifest):
        text = base_text(EntryManifest.from_document(document).envelope())
        manifest = blobs.add_bytes(text)[0] if text is not None else None
    if whole or manifest is not None:
        note_line(layout, recipe_digest, *line, files={**note.files, **whole} if whole else None, manifest=manifest)


def publish(layout: StoreLayout, repo: ManifestRepo, publication: Publication) -> WarmSet:
    """Publish entries and their warm set; blobs must have been added. Idempotent, safe beside other publishers.

    Raises:
        ArtifactNotFoundError: a file of a member is not in the store (field report D8).
        StoreError, ManifestError: nothing new is visible then.
    """
    blobs = BlobStore(layout)
    for manifest in publication.manifests:
        _check_closure(blobs, StoredEntry.from_document(manifest.to_document()))
    topologies: list[Mapping[str, Any]] = [manifest.parts.topology for manifest in publication.manifests]
    for member in publication.reused:
        entry = read_manifest(layout, member.key, member.manifest).entry
        _check_closure(blobs, entry)
        topologies.append(entry.parts["topology"])
    members = list(publication.reused)
    rows = _write_manifests(layout, publication.manifests, publication.recipe_digest)
    members += [Member(row.key, row.manifest, row.method, row.case, row.rank) for row in rows]
    members.sort(key=lambda member: (member.rank, member.method, member.case, member.key))
    warm_set = WarmSet(
        warm_set=warm_set_id([member.key for member in members]),
        created_at=publication.created_at,
        request=publication.request,
        members=tuple(members),
        absent=tuple(sorted(publication.absent, key=lambda absence: (absence.rank, absence.method, absence.case))),
        ranks_per_node=publication.ranks_per_node if any(map(tied_to_cut, topologies)) else None,
    )
    # Two publishers of one recipe, each with another toolchain, must not lose each other's set from the record.
    with file_lock(layout, f"record-{bare_hex(publication.recipe_digest)}", _RECORD_LOCK_TIMEOUT_S):
        record = read_boot_record(layout, recipe_digest=publication.recipe_digest)
        sequence = repo.publish(
            rows,
            NewWarmSet(publication.recipe, publication.recipe_digest, warm_set),
            after=record.sequence if record is not None else 0,
        )
        record = with_warm_set(
            record,
            warm_set,
            recipe=publication.recipe,
            recipe_digest=publication.recipe_digest,
            paths=publication.paths,
            sequence=sequence,
        )
        write_atomically(layout, layout.boot_record(publication.recipe_digest), record.to_bytes())
    name_recipe(layout, publication.raw_digest, publication.recipe_digest, publication.trail)
    return warm_set


def publish_entries(
    layout: StoreLayout, repo: ManifestRepo, manifests: Sequence[EntryManifest], recipe_digest: str
) -> None:
    """Publish entries without a warm set: no hook sees them, the next build reuses them. Idempotent.

    Raises:
        ArtifactNotFoundError, StoreError, ManifestError: as `publish`.
    """
    blobs = BlobStore(layout)
    for manifest in manifests:
        _check_closure(blobs, StoredEntry.from_document(manifest.to_document()))
    if manifests:
        repo.publish(_write_manifests(layout, manifests, recipe_digest))


def _write_manifests(layout: StoreLayout, manifests: Sequence[EntryManifest], recipe_digest: str) -> list[NewEntry]:
    """Write the manifests' files; return their rows. A world's are kept by what they have in common with another."""
    rows = []
    bases: dict[tuple[str, str], str | None] = {}
    blobs = BlobStore(layout)
    for manifest in manifests:
        envelope = manifest.envelope()
        data = envelope.to_bytes()
        digest = digest_bytes(data)
        rows.append(NewEntry.from_document(manifest.to_document(), manifest=digest, recipe_digest=recipe_digest))
        line = (manifest.method, manifest.case)
        shared = None
        if rows[-1].world_size > 1:
            if line not in bases:
                bases[line] = read_line(layout, recipe_digest, *line).manifest
            shared = _shared(blobs, envelope, bases[line])
            if shared is None and (text := base_text(envelope)) is not None:
                bases[line], _ = blobs.add_bytes(text)
                note_line(layout, recipe_digest, *line, manifest=bases[line])
                shared = _shared(blobs, envelope, bases[line])
        write_atomically(layout, layout.manifest(manifest.key, digest), shared or data)
    return rows


def _shared(blobs: BlobStore, envelope: Envelope, base: str | None) -> bytes | None:
    return manifest_delta(blobs, envelope, base) if base is not None else None


def name_recipe(layout: StoreLayout, raw_digest: str, recipe_digest: str, trail: Trail = ()) -> None:
    """Let the hook find the record of `recipe_digest` by these bytes of a recipe file. Idempotent.

    Args:
        trail: what else has to be named for it, where other files take part in the recipe's meaning (schemas/trail.py).
    """
    # The end of the trail first: whoever follows it meanwhile finds either all of it or nothing.
    for digest, meaning in ((raw_digest, recipe_digest), *reversed(trail)):
        _name_bytes(layout, digest, pointer_bytes(meaning))


def _name_bytes(layout: StoreLayout, raw_digest: str, data: bytes) -> None:
    target = layout.raw_recipe(raw_digest)
    # An older cachectl may have given the same bytes another meaning; then its pointer would hide the new record.
    try:
        found = read_bounded(target, len(data))
    except OSError:
        found = b""
    if found != data:
        write_atomically(layout, target, data)


def _check_closure(blobs: BlobStore, entry: StoredEntry) -> None:
    for item in entry.files:
        if not blobs.exists(item.digest, item.size_bytes):
            raise ArtifactNotFoundError(
                f"{entry.method} [{entry.case}] rank {entry.rank}: {item.path} ({item.digest}) is not in the store",
                hint="run: cachectl build --force",
            )
