"""Publishing 16 entries of 4 MiB beside copying, hashing and syncing the same bytes, both in this process."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import time
from pathlib import Path

from made_up_store import MadeUpJob, write_artifact
from measure import THIS_CPU, Row, Samples, interleaved, scratch

from cachectl.store.layout import StoreLayout
from cachectl.store.manifest import ManifestRepo
from cachectl.store.writing import add_artifact, publish

NAME = "publish"
BUDGET = "at least 0.8× the speed of copying and hashing: ≤ 1.25× its time"
ENTRIES = 16
ENTRY_BYTES = 4 << 20
# As in children/floor.py.
CHUNK_BYTES = 1 << 18


def run(quick: bool) -> list[Row]:
    with scratch() as folder:
        job = MadeUpJob.make(folder, ENTRIES)
        artifacts = [write_artifact(folder / f"artifact{rank}", rank, ENTRY_BYTES) for rank in range(ENTRIES)]
        numbers = itertools.count()

        def ours() -> tuple[float, float]:
            target = folder / f"store{next(numbers)}"
            layout = StoreLayout(target)
            layout.create()
            # A store and its database are made once, not at each publication.
            with ManifestRepo.open(layout.database, create=True) as repo:
                started = time.perf_counter()
                files = [add_artifact(layout, artifact) for artifact in artifacts]
                added = time.perf_counter()
                manifests = [job.manifest(rank, files[rank]) for rank in range(ENTRIES)]
                described = time.perf_counter()
                publish(layout, repo, job.publication(manifests))
                finished = time.perf_counter()
            shutil.rmtree(target)
            # Making the documents is the benchmark's own.
            return finished - started - (described - added), finished - described

        def floor() -> float:
            target = folder / f"copies{next(numbers)}"
            target.mkdir()
            started = time.perf_counter()
            for number, artifact in enumerate(artifacts):
                copy_durably(artifact / "compiled_module", target / str(number))
            seconds = time.perf_counter() - started
            shutil.rmtree(target)
            return seconds

        published, copied = interleaved(3 if quick else 11, ours, floor)
    return [
        Row(
            f"publish {ENTRIES} × 4 MiB",
            Samples(tuple(whole for whole, _ in published)),
            THIS_CPU,
            against_what="copy, sha256, fsync",
            against=Samples(copied),
            budget="≤ 1.25×",
            ratio_max=1.25,
        ),
        Row(
            "  of that: manifests, database, boot record",
            Samples(tuple(naming for _, naming in published)),
            THIS_CPU,
        ),
    ]


def copy_durably(source: Path, target: Path) -> str:
    hasher = hashlib.sha256()
    with open(source, "rb", buffering=0) as reading, open(target, "wb", buffering=0) as writing:
        while chunk := reading.read(CHUNK_BYTES):
            hasher.update(chunk)
            writing.write(chunk)
        os.fsync(writing.fileno())
    return hasher.hexdigest()
