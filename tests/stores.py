"""Published stores without torch: made-up artifacts, real documents, a recipe with a source file, and the real hook.

The entries are published by `store.writing.publish` for a toolchain that stands beside the store as a few version
files, so that a hook in a child process finds all of it equal. What is made up is only what the artifact's bytes mean.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cachectl
from cachectl.identity.request import entry_model_part, recipe_request
from cachectl.identity.source_digest import SourceIndex
from cachectl.identity.topology import rank_topology
from cachectl.schemas.boot import Member, WarmSet
from cachectl.schemas.canonical import digest_bytes
from cachectl.schemas.entry import EntryManifest
from cachectl.schemas.keying import KEY_VERSION, compute_key
from cachectl.schemas.recipe_reading import load_recipe
from cachectl.store.blobs import BlobStore
from cachectl.store.layout import StoreLayout
from cachectl.store.manifest import ManifestRepo
from cachectl.store.writing import Publication, add_artifact, publish

SOURCE = "SCALE = 2\n\n\ndef main_decode(x):\n    # doubles\n    return x * SCALE\n"
RECIPE = """\
schema: cachectl/recipe/v1
name: made-up
device: simulated
model: {{factory: "decoder:build", path: [.]}}
functions:
  - method: main_decode
    cases:
      - {{name: b4, inputs: "decoder:inputs", args: {{batch: 4}}}}
      - {{name: b2, inputs: "decoder:inputs", args: {{batch: 2}}}}
topology: {{world_size: {world_size}}}
"""
# What the made-up model code read while it was traced: one name that was set, one that was not, one secret.
OBSERVED = {"N_LAYERS": "4", "FAST_PATH": None, "HUB_TOKEN": {"set": True}}
ENVIRON = {"N_LAYERS": "4", "HUB_TOKEN": "hunter2"}
NO_SOURCES: dict[str, Any] = {"version": 1, "attributes": [], "files": [], "packages": []}
NO_RAW_SOURCES: dict[str, Any] = {"version": 1, "files": {}, "code": {}, "classes": {}, "notes": []}


@dataclass(frozen=True)
class Hooked:
    """What a hook's process left: exit code, what it printed, and the document in it."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def report(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.stdout)
        return document

    @property
    def outcome(self) -> str:
        return str(self.report["outcome"])

    @property
    def against(self) -> list[tuple[str, str, str]]:
        """Part, name and kind of each reason."""
        return [(reason["part"], reason["name"], reason["kind"]) for reason in self.report["reasons"]]


@dataclass(frozen=True)
class MadeStore:
    """A store with its recipe and its toolchain, all below one folder that can be copied elsewhere."""

    folder: Path
    environ: Mapping[str, str] = field(default_factory=lambda: dict(ENVIRON))

    @property
    def layout(self) -> StoreLayout:
        return StoreLayout(self.folder / "store")

    @property
    def recipe(self) -> Path:
        return self.folder / "recipe" / "recipe.yaml"

    @property
    def source(self) -> Path:
        return self.folder / "recipe" / "decoder.py"

    @property
    def site(self) -> Path:
        """Where `torch` and `torch_npu` lie: version files, and modules that refuse to be imported."""
        return self.folder / "site"

    @property
    def warm_dir(self) -> Path:
        return self.folder / "warm"

    def copy(self, folder: Path) -> MadeStore:
        """Return the same store at another place."""
        shutil.copytree(self.folder, folder)
        return replace(self, folder=folder)

    def publish(
        self,
        name: str = "a",
        *,
        ranks: Iterable[int] = (0,),
        cases: Sequence[str] = ("b4", "b2"),
        size_bytes: int = 3000,
        sources: bool = True,
        observed: Mapping[str, Any] | None = None,
        request: Mapping[str, Any] | None = None,
        created_at: str = "2026-03-01T12:00:00Z",
        repo: ManifestRepo | None = None,
        ranks_per_node: int | None = None,
        tied: bool = True,
    ) -> WarmSet:
        """Publish a warm set whose entries' guards say `name`; equal arguments give equal entries.

        Args:
            request: parts of the request that differ from those of this interpreter and toolchain.
            ranks_per_node: the cut into nodes that it is built in.
            tied: whether each artifact names the device that its rank has in that cut.
        """
        loaded = load_recipe(self.recipe)
        document = loaded.document
        whole, missing = recipe_request(document, {}, search_path=[str(self.site)])
        assert not missing
        whole = {**whole, **(request or {})}
        by_name = {case["name"]: case for function in document["functions"] for case in function["cases"]}
        manifests = []
        for rank in ranks:
            for case in cases:
                parts = {
                    "model": entry_model_part(document, "main_decode", by_name[case]),
                    "sources": source_document(self.source) if sources else NO_SOURCES,
                    "inputs": {"L['x']": {"value": by_name[case]["args"].get("batch", 0)}},
                    "topology": rank_topology(
                        whole["topology"],
                        rank,
                        {"device_index": rank % ranks_per_node} if ranks_per_node and tied else {},
                    ),
                    "options": whole["options"],
                    "toolchain": whole["toolchain"],
                    "device": whole["device"],
                    "environment": {
                        "declared": whole["environment"],
                        "observed": dict(OBSERVED if observed is None else observed),
                    },
                    "guards": {"name": name},
                }
                artifact = self.folder / "artifacts" / f"{name}-{case}-{rank}"
                write_artifact(artifact, size_bytes)
                manifests.append(
                    EntryManifest.from_document(
                        {
                            "schema": "cachectl/entry/v1",
                            "key_version": KEY_VERSION,
                            "key": compute_key(parts),
                            "recipe": loaded.recipe.name,
                            "method": "main_decode",
                            "case": case,
                            "rank": rank,
                            "parts": parts,
                            "raw_sources": raw_sources(self.source) if sources else NO_RAW_SOURCES,
                            "artifact": {
                                "runtime": "npugraph_ex",
                                "format_version": "1.0.6",
                                "runtime_path": "Model_static_aclgraphcache_0123/main_decode",
                                "files": add_artifact(self.layout, artifact),
                            },
                            "evidence": {
                                "kind": "simulated",
                                "soc": "ascend910b1",
                                "cann": "8.5.0",
                                "torch_npu": "2.13.0",
                            },
                            "provenance": {
                                "created_at": created_at,
                                "builder": "cachectl tests",
                                **({"ranks_per_node": ranks_per_node} if ranks_per_node else {}),
                            },
                        }
                    )
                )
        publication = Publication(
            recipe=loaded.recipe.name,
            recipe_digest=loaded.digest,
            raw_digest=loaded.raw_digest,
            paths=(".",),
            request=whole,
            manifests=tuple(manifests),
            reused=(),
            created_at=created_at,
            trail=loaded.trail,
            ranks_per_node=ranks_per_node,
        )
        if repo is not None:
            return publish(self.layout, repo, publication)
        with ManifestRepo.open(self.layout.database) as opened:
            return publish(self.layout, opened, publication)

    def hook_environ(self, environ: Mapping[str, str | None] | None = None) -> dict[str, str]:
        """Return a hook's environment: what the program will have, and where this package and its torch lie."""
        whole: dict[str, str | None] = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{self.site}{os.pathsep}{package_folder(self.folder)}",
            "HOME": str(self.folder / "home"),
            "CACHECTL_STORE": str(self.layout.root),
            "CACHECTL_WARM_DIR": str(self.warm_dir),
            **self.environ,
            **(environ or {}),
        }
        return {name: value for name, value in whole.items() if value is not None}

    def hook(
        self,
        *arguments: str | Path,
        environ: Mapping[str, str | None] | None = None,
        python: Sequence[str] = (sys.executable,),
        program: Sequence[str] = ("-m", "cachectl"),
        cwd: Path | None = None,
        recipe: Path | None = None,
        timeout_s: float = 200.0,
    ) -> Hooked:
        """Run `cachectl hook RECIPE ARGUMENTS...` in a process of its own; an environ value of None unsets the name."""
        result = subprocess.run(
            [*python, *program, "hook", str(recipe or self.recipe), *map(str, arguments)],
            cwd=cwd or self.folder,
            env=self.hook_environ(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
        decoded = (text.decode("utf-8", "surrogateescape") for text in (result.stdout, result.stderr))
        return Hooked(result.returncode, *decoded)

    def member(self, warm_set: WarmSet, case: str = "b4", rank: int = 0) -> Member:
        """Return one member of a warm set."""
        (found,) = [member for member in warm_set.members if (member.case, member.rank) == (case, rank)]
        return found

    def blob(self, name: str = "a", case: str = "b4", rank: int = 0) -> Path:
        """Return the blob of an entry's compiled module."""
        content = (self.folder / "artifacts" / f"{name}-{case}-{rank}" / "compiled_module").read_bytes()
        return self.layout.blob(digest_bytes(content))


def make_store(folder: Path, *, world_size: int = 1) -> MadeStore:
    """Make an empty store with recipe, source file and toolchain below `folder`."""
    made = MadeStore(folder)
    made.recipe.parent.mkdir(parents=True)
    made.recipe.write_text(RECIPE.format(world_size=world_size))
    made.source.write_text(SOURCE)
    (folder / "home").mkdir()
    write_site(made.site)
    made.layout.create()
    ManifestRepo.open(made.layout.database, create=True).close()
    return made


def write_site(site: Path, **changes: str) -> None:
    """Write the files that tell torch's and torch_npu's versions; `changes` name what differs."""
    found = {
        "torch": "2.13.0+cpu",
        "torch_git": "c" * 40,
        "torch_npu": "2.13.0",
        "torch_npu_git": "d" * 40,
        "npugraph_ex": "1.0.6",
        "torchair": "1.0.5",
        **changes,
    }
    files = {
        "torch/version.py": f"__version__ = '{found['torch']}'\ngit_version = '{found['torch_git']}'\n",
        "torch_npu/version.py": f"__version__ = '{found['torch_npu']}'\ngit_version = '{found['torch_npu_git']}'\n",
    }
    for package in ("torch", "torch_npu"):
        files[f"{package}/__init__.py"] = "raise AssertionError('the boot path imports no torch')\n"
    for runtime in ("npugraph_ex", "torchair"):
        place = f"torch_npu/dynamo/{runtime}/inference/_cache_compiler.py"
        files[place] = f"class CompiledModel:\n    VERSION = '{found[runtime]}'\n"
    for place, text in files.items():
        (site / place).parent.mkdir(parents=True, exist_ok=True)
        (site / place).write_text(text)


def write_artifact(folder: Path, size_bytes: int) -> None:
    """Write an artifact whose compiled module depends on the folder's name, beside a kernel that all share."""
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    seed = hashlib.sha256(folder.name.encode()).digest()
    (folder / "compiled_module").write_bytes((seed * (size_bytes // len(seed) + 1))[:size_bytes])
    (folder / "kernels" / "common.run").write_bytes(b"#!/bin/sh\n")
    (folder / "kernels" / "common.run").chmod(0o755)


def source_document(path: Path) -> dict[str, Any]:
    """Return the sources part of a graph that was traced from `main_decode` in one file."""
    index = SourceIndex(path.read_bytes())
    entry = {
        "root": "path:0",
        "path": path.name,
        "module": path.stem,
        "traced": True,
        "whole": None,
        "definitions": {"main_decode": index.definition("main_decode")},
        "classes": {},
        "bindings": {"SCALE": index.binding("SCALE")},
    }
    return {**NO_SOURCES, "files": [entry]}


def raw_sources(path: Path) -> dict[str, Any]:
    """Return the raw table beside `source_document`."""
    return {**NO_RAW_SOURCES, "files": {f"path:0/{path.name}": digest_bytes(path.read_bytes())}}


def package_folder(folder: Path) -> Path:
    """Return a folder that holds this package and nothing else, for interpreters without our dependencies."""
    library = folder / "lib"
    library.mkdir(exist_ok=True)
    link = library / "cachectl"
    if not link.is_symlink():
        try:
            link.symlink_to(Path(cachectl.__file__).parent)
        except FileExistsError:
            pass  # Another process of the same test was quicker.
    return library


def blobs_of(folder: Path, contents: Iterable[bytes]) -> BlobStore:
    """Return a store of blobs only."""
    layout = StoreLayout(folder)
    layout.create()
    blobs = BlobStore(layout)
    for data in contents:
        blobs.add_bytes(data)
    return blobs


def tree(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return everything about a folder's files that a writer would change: kind, mode, owner, times and content."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() and not path.is_symlink() else ""
        name = path.relative_to(folder).as_posix()
        found[name] = (status.st_mode, status.st_uid, status.st_mtime_ns, status.st_ctime_ns, content)
    return found
