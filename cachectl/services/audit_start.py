"""What a runtime's next start makes of one method folder: load, delete, crash, or run without its static kernels.

Owns the runtime's own rules as findings, in the order in which the runtime comes upon them. It reads files and runs
nothing. Facts (torch_npu 2.13, dynamo/<runtime>/): `CompiledModel.load` follows links, wants the file's owner to be the
process and its mode to be 0600, and its own format version; any exception while loading removes the folder that the
file really lies in (`LazyCompiledModel.compile`), unguarded. `_acl_concrete_graph/static_kernel.py` has the rules of
static kernels. GE's index is JSON that names its models (hicann/ge, `model_cache`); it is read leniently.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

from cachectl.errors import DocumentError
from cachectl.runtimes.artifact import PICKLE_SIZE_LIMIT_BYTES, ArtifactSummary, inspect_artifact
from cachectl.runtimes.cache_tree import ARTIFACT_NAME, MethodFolder, SeenFile
from cachectl.schemas.audit import AuditEffect, AuditFinding, AuditKind, AuditSeen
from cachectl.store.layout import read_bounded

__all__ = ["read_folder", "recorded_cann"]

_OUTPUTS: Final = "static_kernel_compile_outputs"
_KERNEL_CACHE: Final = f"{_OUTPUTS}/static_kernel_cache/"
_JSON_LIMIT_BYTES: Final = 16 << 20
_REBUILD: Final = "delete the folder before the next start, or let cachectl build it"


class _Folder:
    """One method folder with what is needed to say something about it."""

    def __init__(self, folder: MethodFolder, top: str, seen: AuditSeen) -> None:
        self.folder = folder
        self.top = top
        self.seen = seen

    def finding(
        self, kind: AuditKind, effect: AuditEffect, detail: str, hint: str, *, below: str = ARTIFACT_NAME
    ) -> AuditFinding:
        path = os.path.join(os.path.relpath(self.folder.path, self.top), below)
        return AuditFinding(kind=kind, path=os.path.normpath(path), effect=effect, detail=detail, hint=hint)


def read_folder(folder: MethodFolder, top: str, seen: AuditSeen) -> tuple[ArtifactSummary | None, list[AuditFinding]]:
    """Return what the folder's artifact says, None where nothing can be read, and what is wrong with the folder.

    Args:
        folder: as `cache_tree.scan` found it.
        top: the audited folder; findings' paths are relative to it.
        seen: who starts next, with which Python, wheels and CANN; what is null there is not compared.
    """
    here = _Folder(folder, top, seen)
    artifact = folder.artifact
    if artifact is None and os.path.isdir(os.path.join(folder.path, ARTIFACT_NAME)):
        return None, [here.finding("unreadable", "deleted", "it is a folder, and no file", _REBUILD)]
    if artifact is None:
        hint = "a start that was killed, a second trace of the method, or a deletion: a start with logs at info says"
        return None, [
            here.finding("missing-artifact", "cold", f"the folder has no {ARTIFACT_NAME}", hint, below="."),
        ]
    findings = list(_links(here, artifact))
    path = os.path.join(folder.path, ARTIFACT_NAME)
    try:
        found = os.stat(path)
    except OSError as error:
        what = f"a link to {artifact.link}, which is not there" if artifact.link else error.strerror or str(error)
        findings.append(here.finding("unreadable", "cold", what, "delete the link"))
        return None, findings
    findings += _access(here, found)
    summary, problem = _read(here, path, found)
    if summary is None:
        return None, [*findings, *problem]
    findings += [*problem, *_loading(here, summary), *_static_kernels(here, summary), *_ge_index(here)]
    return summary, findings


def recorded_cann(summary: ArtifactSummary) -> str | None:
    """Return the CANN that static kernels were compiled with, "" if it was not known; None where there are none."""
    for name, value in summary.settings.items():
        if name.startswith("static_kernel_compile") and name.endswith(".cann_version"):
            return value
    return None


def _links(here: _Folder, artifact: SeenFile) -> Iterator[AuditFinding]:
    folder = here.folder
    real = os.path.realpath(os.path.join(folder.path, ARTIFACT_NAME))
    if artifact.link is not None or folder.links:
        named = ARTIFACT_NAME if artifact.link is not None else os.path.basename(folder.links[0])
        detail = f"{named} is a link; what can't be loaded is removed where it leads: {os.path.dirname(real)}"
        yield here.finding("symlink", "deleted", detail, "put a copy in the link's place")
    for file in folder.files:
        if file.link is not None and file.path.startswith(f"{_OUTPUTS}/"):
            detail = f"a link to {file.link}; the runtime refuses links below its kernels"
            yield here.finding("symlink", "crash", detail, "put a copy in the link's place", below=file.path)


def _access(here: _Folder, found: os.stat_result) -> Iterator[AuditFinding]:
    if found.st_uid != here.seen.uid:
        detail = f"it belongs to uid {found.st_uid}, the process will be {here.seen.uid}; the runtime wants its own"
        yield here.finding("wrong-owner", "deleted", detail, f"chown -R {here.seen.uid} the cache, or give --uid")
    if found.st_mode & 0o777 != 0o600:
        detail = f"its mode is {found.st_mode & 0o777:04o}; the runtime wants 0600 exactly"
        yield here.finding("wrong-mode", "deleted", detail, "chmod 600 it before the next start")


def _read(here: _Folder, path: str, found: os.stat_result) -> tuple[ArtifactSummary | None, list[AuditFinding]]:
    def problem(kind: AuditKind, detail: str) -> tuple[None, list[AuditFinding]]:
        return None, [here.finding(kind, "deleted", detail, _REBUILD)]

    if not stat.S_ISREG(found.st_mode):
        # open() of a pipe waits for its writer: the runtime's, too.
        return None, [here.finding("unreadable", "crash", "it is no regular file", "delete it")]
    if found.st_size == 0:
        return problem("empty", "it has 0 bytes: a writer was killed, or is at work just now")
    try:
        with open(path, "rb") as file:
            data = file.read(PICKLE_SIZE_LIMIT_BYTES + 1)
    except OSError as error:
        return problem("unreadable", f"it can't be opened: {error.strerror}")
    try:
        return inspect_artifact(data), []
    except DocumentError as error:
        # A pickle ends with its STOP opcode.
        kind: AuditKind = "unreadable" if data.endswith(b".") or len(data) > PICKLE_SIZE_LIMIT_BYTES else "truncated"
        return problem(kind, error.message)


def _loading(here: _Folder, summary: ArtifactSummary) -> Iterator[AuditFinding]:
    installed = here.seen.npugraph_ex if summary.runtime == "npugraph_ex" else here.seen.torchair
    if installed is not None and installed != summary.format_version:
        detail = f"{summary.runtime} format {summary.format_version}; torch_npu here reads {installed} only"
        yield here.finding("other-format", "deleted", detail, _REBUILD)
    if here.seen.python not in summary.python_minors:
        minors = "/".join(summary.python_minors) or "no known CPython"
        detail = f"bytecode of {minors}; CPython {here.seen.python} crashes when it is called, or never returns"
        yield here.finding("foreign-bytecode", "crash", detail, "start it with that CPython, or give --python")
    for found in summary.findings:
        if found.kind == "compiled-functions":
            yield here.finding("unloadable", "deleted", f"{found.detail}; the runtime loads exactly one", _REBUILD)
        elif found.kind == "process-handle":
            detail = f"{found.detail} means something only in the process that compiled it"
            yield here.finding("process-handle", "wrong", detail, "don't cache this method")
    method = summary.name.partition("(")[0].rpartition(".")[2]
    if method != here.folder.method:
        detail = (
            f"it was compiled from {summary.name.partition('(')[0]} and lies where {here.folder.method} is looked up"
        )
        yield here.finding("wrong-place", "wrong", detail, _REBUILD)


def _static_kernels(here: _Folder, summary: ArtifactSummary) -> Iterator[AuditFinding]:
    cann = recorded_cann(summary)
    if cann is None:
        return
    kernel: AuditKind = "static-kernel"
    if not cann:
        detail = "the CANN of its static kernels is not recorded, and equals any other that can't be read"
        yield here.finding(kernel, "wrong", detail, _REBUILD)
    elif here.seen.cann is not None and cann != here.seen.cann:
        detail = f"its static kernels are of CANN {cann}, here is {here.seen.cann}: they are left out"
        yield here.finding(kernel, "slow", detail, _REBUILD)
    files = [file for file in here.folder.files if file.path.startswith(f"{_OUTPUTS}/")]
    runs = [file for file in files if _is_installed(file.path)]
    if not runs and here.folder.rank.rank in (None, 0):
        # Only the folder of a node's first rank has kernels.
        tried = any(PurePosixPath(file.path).parts[1].startswith("ts") for file in files)
        detail = (
            "its kernels' folder has no .run: it is taken as a failed compile and skipped for good"
            if tried
            else ("its static kernels are not there: they are compiled again at each node's first start")
        )
        yield here.finding(kernel, "slow", detail, _REBUILD, below=_OUTPUTS)
    for file in runs:
        if not file.mode & 0o100 or not file.size_bytes:
            detail = "it is empty" if not file.size_bytes else f"mode {file.mode & 0o777:04o} has no x bit"
            detail += ": installing it raises, while other ranks wait"
            yield here.finding(kernel, "crash", detail, "chmod u+x it, or delete its folder", below=file.path)
    for file in files:
        if file.path.startswith(_KERNEL_CACHE) and file.path.endswith(".json"):
            known = _json(os.path.join(here.folder.path, file.path))
            gone = [path for path in _texts(known) if path.endswith(".run") and not os.path.exists(path)]
            if known is None or gone:
                detail = f"{len(gone)} of its paths lead nowhere, such as {gone[0]}" if gone else "it is no JSON"
                yield here.finding(kernel, "slow", detail, _REBUILD, below=file.path)


def _is_installed(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return len(parts) == 3 and parts[1].startswith("ts") and parts[1].endswith("_outputs") and parts[2].endswith(".run")


def _ge_index(here: _Folder) -> Iterator[AuditFinding]:
    files = {file.path for file in here.folder.files}
    named: set[str] = set()
    for path in sorted(files):
        if not path.endswith(".idx"):
            continue
        known = _json(os.path.join(here.folder.path, path))
        if known is None:
            yield here.finding("missing-model", "crash", "the index is no JSON", "delete it", below=path)
            continue
        # Older indexes hold absolute paths or paths below ./cache_dir; what counts is what lies beside them.
        models = sorted({PurePosixPath(text).name for text in _texts(known) if text.endswith((".om", ".rdcpkt"))})
        named.update(models)
        if gone := [model for model in models if model not in files]:
            detail = f"it names {', '.join(gone)}, which is not there: building the graph fails"
            hint = "delete the index together with what it names"
            yield here.finding("missing-model", "crash", detail, hint, below=path)
    for file in here.folder.files:
        if file.path.endswith(".om") and file.path not in named:
            detail = "no index names it"
            finding = here.finding("orphan", "wasted", detail, "delete it", below=file.path)
            yield finding.model_copy(update={"size_bytes": file.size_bytes})


def _json(path: str) -> Any:
    try:
        # A pipe of this name would wait for its writer for ever.
        return json.loads(read_bounded(Path(path), _JSON_LIMIT_BYTES, follow=True))
    except (OSError, ValueError, RecursionError):
        return None


def _texts(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, list):
            pending += item
