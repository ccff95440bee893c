"""From what a rank found to the entry manifest's document, before and after the second process proved it.

Owns what of a rank's results goes into a manifest, and the copy of the artifact that the second process loads. Light:
no torch here.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from cachectl import __version__
from cachectl.build.job import RECORDED, CaseJob, Job, write_json
from cachectl.errors import ArtifactCorruptedError, BuildError
from cachectl.schemas.keying import compute_key
from cachectl.store.blobs import BlobStore, digest_file
from cachectl.store.layout import StoreLayout
from cachectl.store.writing import add_artifact, describe_artifact

__all__ = ["draft_entry", "entry_document", "now_text", "proved", "restore_draft", "store_harvest"]


def draft_entry(
    layout: StoreLayout,
    job: Job,
    recipe_name: str,
    rank: int,
    case: CaseJob,
    found: dict[str, Any],
    *,
    like: Mapping[str, str] | None = None,
    later: bool = False,
) -> dict[str, Any]:
    """Store a recorded case's files, leave its manifest's document where the second process reads it, and return it.

    Args:
        like: digests by path of another rank's files, which these are nearly the same as.
        later: leave the storing to `store_harvest`.

    Raises:
        StoreError: a file can't be stored.
    """
    folder = job.case_folder(rank, case)
    harvest = folder / "harvest"
    shutil.copytree(found["artifact"], harvest)
    files = describe_artifact(harvest) if later else add_artifact(layout, harvest, like=like)
    document = entry_document(job, recipe_name, rank, case, found, files)
    write_json(folder / "entry.json", document)
    write_json(folder / RECORDED, found.get("shown") or {})
    return document


def restore_draft(
    layout: StoreLayout, job: Job, rank: int, case: CaseJob, document: dict[str, Any], shown: dict[str, Any]
) -> None:
    """Lay out what an earlier build recorded as `draft_entry` left it there, for a second process to prove.

    Raises:
        StoreError: a file is not in the store any more, or holds other bytes.
        OSError: the workspace can't be written.
    """
    folder = job.case_folder(rank, case)
    blobs = BlobStore(layout)
    for item in document["artifact"]["files"]:
        target = folder / "harvest" / item["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        with blobs.open(item["digest"]) as source, open(target, "wb") as copy:
            shutil.copyfileobj(source, copy)
        target.chmod(int(item["mode"], 8))
        if digest_file(target) != (item["digest"], item["size_bytes"]):
            raise ArtifactCorruptedError(f"blob {item['digest']} holds other bytes", path=layout.blob(item["digest"]))
    write_json(folder / "entry.json", document)
    write_json(folder / RECORDED, shown)


def store_harvest(layout: StoreLayout, job: Job, document: dict[str, Any], like: Mapping[str, str] | None) -> None:
    """Store the files of an entry that was drafted with `later`.

    Raises:
        BuildError: they are others than were drafted.
        StoreError: a file can't be stored.
    """
    (case,) = [case for case in job.cases if (case.method, case.name) == (document["method"], document["case"])]
    harvest = job.case_folder(document["rank"], case) / "harvest"
    if add_artifact(layout, harvest, like=like) != document["artifact"]["files"]:
        raise BuildError(
            f"{case.method} [{case.name}]: the artifact changed while it was proved", hint="nothing was published"
        )


def proved(document: dict[str, Any], found: dict[str, Any], reloaded: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest's document with what the second process found."""
    gates = {**found["gates"], **reloaded["gates"]}
    provenance = {**document["provenance"], "warm_seconds": reloaded["warm_seconds"], "gates": gates}
    if reloaded.get("shown") is not None:
        provenance["shown"] = reloaded["shown"]
    return {**document, "provenance": provenance}


def now_text() -> str:
    """Return this moment as manifests say it, UTC."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def entry_document(
    job: Job, recipe_name: str, rank: int, case: CaseJob, found: dict[str, Any], files: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the manifest's document of what was found, before a second process proved it."""
    toolchain, device = job.request["toolchain"], job.request["device"]
    return {
        "schema": "cachectl/entry/v1",
        "key_version": job.request["key_version"],
        "key": compute_key(found["parts"]),
        "recipe": recipe_name,
        "method": case.method,
        "case": case.name,
        "rank": rank,
        "parts": found["parts"],
        "raw_sources": found["raw_sources"],
        "artifact": {
            "runtime": found["runtime"],
            "format_version": toolchain["formats"][found["runtime"]],
            "runtime_path": found["runtime_path"],
            "files": files,
        },
        "evidence": {
            "kind": "simulated" if device["simulated"] else "device",
            "soc": device["soc"],
            "cann": toolchain["cann"]["CANN"],
            "torch_npu": toolchain["torch_npu"]["version"],
        },
        "provenance": {
            "created_at": now_text(),
            "builder": f"cachectl {__version__}",
            "cold_seconds": found["cold_seconds"],
            "warm_seconds": None,
            "gates": found["gates"],
            "warnings": found["warnings"],
            **({} if job.ranks_per_node is None else {"ranks_per_node": job.ranks_per_node}),
        },
    }
