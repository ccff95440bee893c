"""Inspect: what an artifact says of itself, read without running it and without torch."""

from __future__ import annotations

import sys
from pathlib import Path

from cachectl.errors import ConfigError, DocumentError, StoreError
from cachectl.runtimes.artifact import ArtifactSummary, inspect_artifact
from cachectl.schemas.canonical import digest_bytes
from cachectl.schemas.report import InspectInput, InspectPython, InspectReport
from cachectl.store.blobs import BlobStore
from cachectl.store.layout import StoreLayout, describe_os_error
from cachectl.store.manifest import ManifestRepo
from cachectl.store.reading import read_manifest

__all__ = ["describe", "inspect"]

_ARTIFACT_NAME = "compiled_module"


def inspect(layout: StoreLayout | None, target: str) -> InspectReport:
    """Read the artifact that a path or an entry's key names.

    A path that exists is taken as a path: the file itself, or a folder with one `compiled_module` in it.

    Raises:
        ConfigError: neither a file nor a key of this store, or a file that is no artifact.
        DocumentError: what the store holds is no artifact.
        StoreError: it can't be read, or is not what its digest says.
    """
    path = Path(target)
    if path.exists():
        file = _artifact_file(path)
        try:
            data = file.read_bytes()
        except OSError as error:
            raise describe_os_error(error, f"can't read {file}") from error
        try:
            summary = inspect_artifact(data)
        except DocumentError as error:
            # The caller's own file, which is nobody's to delete and build again.
            raise ConfigError(
                f"{file}: {error.message}", hint="pass a compiled_module or the key of an entry"
            ) from error
        return describe(None, str(file), summary)
    if layout is None:
        raise ConfigError(f"{target} is no file", hint="pass a path, or --store DIR and a key")
    layout.check()
    with ManifestRepo.open(layout.database, read_only=True) as repo:
        row = repo.entry(target)
    entry = read_manifest(layout, row.key, row.manifest).entry
    digest = next((item.digest for item in entry.files if item.path == _ARTIFACT_NAME), None)
    if digest is None:
        raise StoreError(f"entry {row.key} has no {_ARTIFACT_NAME}", hint="run: cachectl verify")
    blobs = BlobStore(layout)
    with blobs.open(digest) as blob:
        data = blob.read()
    if digest_bytes(data) != digest:
        raise StoreError(f"blob {digest} holds other bytes", hint="run: cachectl verify")
    return describe(row.key, str(layout.blob(digest)), inspect_artifact(data))


def _artifact_file(path: Path) -> Path:
    if path.is_file():
        return path
    found = sorted(path.rglob(_ARTIFACT_NAME))
    if len(found) != 1:
        raise ConfigError(
            f"{path} holds {len(found)} files named {_ARTIFACT_NAME}", hint="pass the path of one of them"
        )
    return found[0]


def describe(key: str | None, path: str, summary: ArtifactSummary) -> InspectReport:
    """Return what was read of an artifact as the document that is printed."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return InspectReport(
        key=key,
        path=path,
        runtime=summary.runtime,
        format_version=summary.format_version,
        name=summary.name,
        created_at=summary.created_at,
        python=InspectPython(
            implementation="cpython",
            minor=summary.python_minor or "/".join(summary.python_minors) or "unknown",
            # Bytecode of another minor loads and then crashes the process (measured), so it is told here.
            magic_ok=here in summary.python_minors,
        ),
        inputs=tuple(
            InspectInput.model_validate(
                {
                    "name": spec.name,
                    "kind": spec.kind,
                    "source": spec.source,
                    "shape": spec.shape,
                    "dtype": spec.dtype,
                    "device": spec.device,
                    "stride": spec.stride,
                }
            )
            for spec in summary.inputs
        ),
        options=dict(summary.options),
        graph_ops=tuple(f"{name} x{count}" for name, count in sorted(summary.ops.items())),
        size_bytes=summary.size_bytes,
        findings=tuple(f"{finding.kind} in {finding.where}: {finding.detail}" for finding in summary.findings),
    )
