"""Verify: whether the store's files are whole, close over each other, and agree with the database.

Owns the findings. Reads only. `--quick` looks at sizes and names, the default reads every byte and looks into every
artifact; what stands in another room (signatures) joins here when it is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from cachectl.errors import (
    ArtifactCorruptedError,
    ArtifactNotFoundError,
    CachectlError,
    ConfigError,
    DocumentError,
    StoreError,
)
from cachectl.runtimes.artifact import inspect_artifact
from cachectl.schemas.boot import BootRecord, StoredEntry
from cachectl.schemas.canonical import DIGEST_PREFIX
from cachectl.schemas.recipe_reading import load_recipe
from cachectl.schemas.report import Finding, FindingKind, VerifyReport
from cachectl.store.blobs import BlobStore
from cachectl.store.drafts import drafted_blobs
from cachectl.store.layout import StoreLayout
from cachectl.store.lines import noted_blobs
from cachectl.store.manifest import ManifestRepo
from cachectl.store.reading import read_manifest_file, stored_manifests

__all__ = ["verify"]


def verify(layout: StoreLayout, targets: Sequence[str], *, quick: bool = False, deep: bool = False) -> VerifyReport:
    """Check the whole store, or the entries that the targets name: recipe files or keys.

    Args:
        quick: sizes and names only, no byte of a blob is read.
        deep: also load and run; not in this version.

    Raises:
        ConfigError: an unknown key, a recipe that can't be read, or --deep.
        StoreError, ManifestError: the store itself can't be read.
    """
    if deep:
        raise ConfigError(
            "verify --deep: this version does not load entries to verify them", hint="run: cachectl build --force"
        )
    layout.check()
    with ManifestRepo.open(layout.database, read_only=True) as repo:
        indexed = dict(repo.known_manifests())
        wanted = _wanted(repo, targets)
        check = _Check(layout, quick)
        found: dict[str, StoredEntry] = {}
        for path in stored_manifests(layout):
            if wanted is None or DIGEST_PREFIX + path.parent.name in wanted:
                entry = check.manifest(path)
                if entry is not None:
                    found[DIGEST_PREFIX + path.stem] = entry
        for entry in found.values():
            check.files(entry)
        check.index(indexed, found, wanted)
        check.records(wanted)
        if wanted is None:
            check.extra(found)
    return VerifyReport(checked=check.checked, findings=tuple(check.findings))


def _wanted(repo: ManifestRepo, targets: Sequence[str]) -> set[str] | None:
    if not targets:
        return None
    keys: set[str] = set()
    for target in targets:
        path = Path(target)
        if path.suffix in (".yaml", ".yml") or path.exists():
            name = load_recipe(path).recipe.name
            keys |= {row.key for row in repo.entries(recipe=name)}
        else:
            keys.add(repo.entry(target).key)
    return keys


class _Check:
    """The findings of one run, as they come."""

    def __init__(self, layout: StoreLayout, quick: bool) -> None:
        self.layout = layout
        self.blobs = BlobStore(layout)
        self.quick = quick
        self.findings: list[Finding] = []
        self.checked = 0
        # By digest of a blob that was looked at: the CPython minors of an artifact.
        self._seen: dict[str, tuple[str, ...]] = {}
        # Blobs that manifests stand on, and whether there is one that can't be read for want of its own.
        self._bases: set[str] = set()
        self._baseless = False

    def manifest(self, path: Path) -> StoredEntry | None:
        """Read one entry manifest; a damaged one is a finding."""
        self.checked += 1
        try:
            read = read_manifest_file(path)
            if read.base is not None:
                self._bases.add(read.base)
            return read.entry
        except ArtifactNotFoundError as error:
            self._baseless = True
            self._add("missing-blob", DIGEST_PREFIX + path.parent.name, path, error.message)
        except ArtifactCorruptedError as error:
            self._add("corrupt-blob", DIGEST_PREFIX + path.parent.name, path, error.message)
        except CachectlError as error:
            self._add("unreadable-artifact", DIGEST_PREFIX + path.parent.name, path, error.message)
        return None

    def files(self, entry: StoredEntry) -> None:
        """Check that every file of an entry is there, is what its digest says, and can be read as an artifact."""
        for item in entry.files:
            path = self.layout.blob(item.digest)
            # Entries share files. A file's content is looked at once, and what each says of it is its own.
            if self.blobs.exists(item.digest, item.size_bytes):
                if not self.quick and item.digest not in self._seen:
                    self._seen[item.digest] = self._content(entry, item.path, item.digest, path)
            elif self.blobs.exists(item.digest):
                self._add("corrupt-blob", entry.key, path, f"{item.path} has another size than {item.size_bytes} bytes")
            elif item.digest not in self._seen:
                self._seen[item.digest] = ()
                detail = f"{item.path} of {entry.method} [{entry.case}] is not in the store"
                self._add("missing-blob", entry.key, path, detail)
            minors = self._seen.get(item.digest)
            minor = entry.parts.get("toolchain", {}).get("python", {}).get("minor")
            if minors and minor not in minors:
                detail = f"{item.path} holds bytecode of {'/'.join(minors)}, its entry says CPython {minor}"
                self._add("foreign-bytecode", entry.key, path, detail)

    def _content(self, entry: StoredEntry, name: str, digest: str, path: Path) -> tuple[str, ...]:
        """Check a blob's bytes; return the CPython minors that it is for where it is an artifact, else nothing."""
        try:
            self.blobs.check(digest)
        except ArtifactCorruptedError as error:
            self._add("corrupt-blob", entry.key, path, f"{name}: {error.message}")
            return ()
        except ArtifactNotFoundError as error:
            self._add("missing-blob", entry.key, path, f"{name}: {error.message}")
            return ()
        if name != "compiled_module":
            return ()
        try:
            with self.blobs.open(digest) as blob:
                return tuple(inspect_artifact(blob.read()).python_minors) or ("no known CPython",)
        except DocumentError as error:
            self._add("unreadable-artifact", entry.key, path, f"{name}: {error.message}")
            return ()

    def index(self, indexed: dict[str, str], found: dict[str, StoredEntry], wanted: set[str] | None) -> None:
        """Compare the manifests on disk with the rows of the database."""
        for manifest, entry in found.items():
            if manifest not in indexed:
                path = self.layout.manifest(entry.key, manifest)
                self._add("index-drift", entry.key, path, "the manifest is in the store and not in the database")
        for manifest, key in indexed.items():
            if (wanted is None or key in wanted) and not self.layout.manifest(key, manifest).is_file():
                path = self.layout.manifest(key, manifest)
                self._add("index-drift", key, path, "the database names a manifest that is not in the store")

    def records(self, wanted: set[str] | None) -> None:
        """Check that every boot record can be read and that every set in it is whole."""
        folder = self.layout.boot_record("x").parent
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            try:
                record = BootRecord.from_bytes(path.read_bytes())
            except DocumentError as error:
                self._add("incomplete-set", None, path, error.message)
                continue
            except OSError as error:
                self._add("incomplete-set", None, path, f"boot record can't be read: {error.strerror}")
                continue
            for key, detail in self._broken_members(record):
                if wanted is None or key in wanted:
                    self._add("incomplete-set", key, path, detail)

    def _broken_members(self, record: BootRecord) -> Iterator[tuple[str, str]]:
        for warm_set in record.sets:
            for member in warm_set.members:
                if not self.layout.manifest(member.key, member.manifest).is_file():
                    yield (
                        member.key,
                        f"warm set {warm_set.warm_set} lacks {member.method} [{member.case}] of rank {member.rank}",
                    )

    def extra(self, found: dict[str, StoredEntry]) -> None:
        """Find blobs that no manifest names, and files that no blob can be; only sensible over the whole store."""
        named = {item.digest for entry in found.values() for item in entry.files} | self._bases
        named |= noted_blobs(self.layout) | drafted_blobs(self.layout)
        named |= {base for digest in named if (base := self._base_of(digest)) is not None}
        if self._baseless or any(
            finding.kind in ("corrupt-blob", "unreadable-artifact") and finding.path is not None
            for finding in self.findings
        ):
            # A manifest that can't be read may name them; nothing is called extra on half the evidence.
            return
        blobs = {path: digest for digest, path in self.blobs.all()}
        for path in sorted(self.layout.blobs.rglob("*")):
            if path.is_dir() and not path.is_symlink():
                continue
            if path not in blobs:
                self._add("extra-file", None, path, "no blob: its name is no digest, or it is no plain file")
            elif blobs[path] not in named:
                self._add("extra-file", None, path, "no entry manifest names this blob; a build may be adding it now")

    def _base_of(self, digest: str) -> str | None:
        try:
            return self.blobs.base_of(digest)
        except StoreError:
            return None  # Found to be damaged before.

    def _add(self, kind: FindingKind, key: str | None, path: Path, detail: str) -> None:
        self.findings.append(Finding(kind=kind, key=key, path=str(path), detail=detail))
