"""A store whose entries were never built: right documents around bytes of any size, published as a build publishes.

The documents are as large as real ones, since a hook reads and checks them all: sources with the example's files, a
guard sheet, inputs of eight tensors. Toolchain and device are this interpreter's, so a hook finds the set warm.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import EXAMPLE, BenchmarkError

from cachectl.identity.device import device_part
from cachectl.identity.guards import SheetBuilder
from cachectl.identity.request import entry_model_part, recipe_request
from cachectl.identity.sources import SOURCES_VERSION
from cachectl.identity.topology import rank_topology
from cachectl.schemas.canonical import DIGEST_PREFIX, digest_bytes
from cachectl.schemas.entry import EntryManifest
from cachectl.schemas.keying import compute_key
from cachectl.schemas.recipe_reading import LoadedRecipe, load_recipe
from cachectl.store.layout import StoreLayout
from cachectl.store.manifest import ManifestRepo
from cachectl.store.writing import Publication, add_artifact, publish

__all__ = ["MadeUpJob", "MadeUpStore"]

_CREATED_AT = "2026-01-01T00:00:00Z"
_GUARDED_LAYERS = 8
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class MadeUpJob:
    """A recipe of many ranks, and what a build of it would publish."""

    recipe: Path
    loaded: LoadedRecipe
    request: dict[str, Any]

    @classmethod
    def make(cls, folder: Path, ranks: int) -> MadeUpJob:
        """Write a recipe and the sources it names into `folder`."""
        shutil.copytree(EXAMPLE / "tiny_decoder", folder / "tiny_decoder", ignore=shutil.ignore_patterns("__pycache__"))
        text = (EXAMPLE / "recipe-32.yaml").read_text()
        recipe = folder / "recipe.yaml"
        recipe.write_text(text.replace("{world_size: 1}", f"{{world_size: {ranks}}}"))
        loaded = load_recipe(recipe)
        request, missing = recipe_request(loaded.recipe.to_document(), os.environ)
        if missing:
            raise BenchmarkError(f"the toolchain is not whole here: {missing[0]}; {missing[0].hint}")
        return cls(recipe, loaded, request)

    def manifest(self, rank: int, files: list[dict[str, Any]]) -> EntryManifest:
        """Return the manifest of one rank's entry around these files."""
        document = self.loaded.recipe.to_document()
        function = document["functions"][0]
        method, case = function["method"], function["cases"][0]
        sources, raw_sources = self._sources()
        parts = {
            "model": entry_model_part(document, method, case),
            "sources": sources,
            "inputs": _inputs(),
            "topology": rank_topology(self.request["topology"], rank),
            "options": self.request["options"],
            "toolchain": self.request["toolchain"],
            "device": self.request["device"],
            "environment": {"declared": self.request["environment"], "observed": {}},
            "guards": _guards(),
        }
        return EntryManifest.from_document(
            {
                "schema": "cachectl/entry/v1",
                "key_version": self.request["key_version"],
                "key": compute_key(parts),
                "recipe": self.loaded.recipe.name,
                "method": method,
                "case": case["name"],
                "rank": rank,
                "parts": parts,
                "raw_sources": raw_sources,
                "artifact": {
                    "runtime": "npugraph_ex",
                    "format_version": "1.0.6",
                    "runtime_path": f"Model_static_aclgraphcache_{rank:032x}/{method}",
                    "files": files,
                },
                "evidence": {
                    "kind": "simulated",
                    "soc": device_part("simulated", os.environ)[0]["soc"],
                    "cann": self.request["toolchain"]["cann"]["CANN"],
                    "torch_npu": self.request["toolchain"]["torch_npu"]["version"],
                },
                "provenance": {"created_at": _CREATED_AT, "builder": "bench", "cold_seconds": 1.0, "warm_seconds": 1.0},
            }
        )

    def publication(self, manifests: list[EntryManifest]) -> Publication:
        """Return what publishes these entries as the job's warm set."""
        return Publication(
            recipe=self.loaded.recipe.name,
            recipe_digest=self.loaded.digest,
            raw_digest=self.loaded.raw_digest,
            paths=tuple(self.loaded.recipe.to_document()["model"]["path"]),
            request=self.request,
            manifests=tuple(manifests),
            reused=(),
            created_at=_CREATED_AT,
        )

    def _sources(self) -> tuple[dict[str, Any], dict[str, Any]]:
        files, raw = [], {}
        for path in sorted((self.recipe.parent / "tiny_decoder").glob("*.py")):
            inner = f"tiny_decoder/{path.name}"
            digest = digest_bytes(path.read_bytes())
            names = {f"Definition{number}.method": digest for number in range(12)}
            files.append(
                {
                    "root": "path:0",
                    "path": inner,
                    "module": f"tiny_decoder.{path.stem}",
                    "traced": True,
                    "whole": None,
                    "definitions": names,
                    "classes": {},
                    "bindings": {},
                }
            )
            raw[f"path:0/{inner}"] = digest
        document = {"version": SOURCES_VERSION, "attributes": [], "files": files, "packages": []}
        return document, {"version": SOURCES_VERSION, "files": raw, "code": {}, "classes": {}, "notes": []}


@dataclass(frozen=True)
class MadeUpStore:
    """A published store; `blobs` are the files that a hook for its recipe has to lay down."""

    layout: StoreLayout
    job: MadeUpJob
    blobs: tuple[Path, ...]

    @classmethod
    def make(cls, folder: Path, *, entries: int, entry_bytes: int, sparse: bool = False) -> MadeUpStore:
        """Publish `entries` entries of one file each.

        Args:
            sparse: the file is all zeros and takes no room; nothing but its size is like a real one's.
        """
        folder.mkdir()
        layout = StoreLayout(folder / "store")
        layout.create()
        job = MadeUpJob.make(folder, entries)
        manifests, blobs = [], []
        for rank in range(entries):
            if sparse:
                files = [_add_sparse(layout, entry_bytes)]
            else:
                artifact = write_artifact(folder / "artifact", rank, entry_bytes)
                files = add_artifact(layout, artifact)
                shutil.rmtree(artifact)
            blobs.append(layout.blob(files[0]["digest"]))
            manifests.append(job.manifest(rank, files))
        with ManifestRepo.open(layout.database, create=True) as repo:
            publish(layout, repo, job.publication(manifests))
        return cls(layout, job, tuple(blobs))


def write_artifact(folder: Path, seed: int, size_bytes: int) -> Path:
    """Write a folder with one file of `size_bytes` bytes that no other seed gives; return the folder."""
    folder.mkdir(parents=True)
    source = random.Random(seed)
    with open(folder / "compiled_module", "wb") as file:
        left = size_bytes
        while left:
            chunk = source.randbytes(min(left, _CHUNK_BYTES))
            file.write(chunk)
            left -= len(chunk)
    return folder


def _add_sparse(layout: StoreLayout, size_bytes: int) -> dict[str, Any]:
    zeros, hasher = bytes(_CHUNK_BYTES), hashlib.sha256()
    for _ in range(size_bytes // _CHUNK_BYTES):
        hasher.update(zeros)
    digest = DIGEST_PREFIX + hasher.hexdigest()
    path = layout.blob(digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, size_bytes)
    return {"path": "compiled_module", "digest": digest, "size_bytes": size_bytes, "mode": "0600"}


def _inputs() -> dict[str, Any]:
    tensor = {"dtype": "float32", "device": "cpu", "format": None, "requires_grad": False}
    return {
        f"L['argument_{number}']": {"tensor": {**tensor, "shape": [4, 64 + number], "stride": [64 + number, 1]}}
        for number in range(8)
    }


def _guards() -> dict[str, Any]:
    """Return a sheet of some 6 KB, what a deep decoder's comes to."""
    builder = SheetBuilder()
    for layer in range(_GUARDED_LAYERS):
        for name in ("attention", "mlp", "norm"):
            path = ("L:self", ".layers", f"[{layer}]", f".{name}")
            builder.add(path, ["type", f"tiny_decoder.model:{name.title()}"])
            # Different from layer to layer, so that equal subtrees don't make the sheet smaller than a real one.
            builder.add((*path, ".scale"), ["equals", {"float": 0.25 + layer}])
    builder.add_ambient({"grad_mode": False, "default_dtype": "torch.float32"})
    return builder.sheet()
