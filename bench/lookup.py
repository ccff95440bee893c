"""Looking up one request line in a large database beside a small one, both SQLite."""

from __future__ import annotations

import random
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

from measure import THIS_CPU, BenchmarkError, Row, Samples, interleaved, scratch

from cachectl.schemas.boot import ArtifactFile
from cachectl.schemas.canonical import digest_of
from cachectl.schemas.keying import KEY_PARTS
from cachectl.store.manifest import ManifestRepo
from cachectl.store.manifest_rows import NewEntry

NAME = "lookup"
BUDGET = "at 10^5 entries ≤ 1.2× of 10^3"
SMALL = 1_000
RANKS = 16
LOOKUPS = 200
_START = datetime(2026, 1, 1, tzinfo=timezone.utc)


def run(quick: bool) -> list[Row]:
    large = 10_000 if quick else 100_000
    with scratch() as folder, _filled(folder / "small.db", SMALL) as few, _filled(folder / "large.db", large) as many:
        at_large, at_small = interleaved(
            3 if quick else 15, lambda: _look_up(many, large), lambda: _look_up(few, SMALL)
        )
    return [
        Row(
            f"one line's entry among {large:,}",
            Samples(at_large),
            THIS_CPU,
            against_what=f"among {SMALL:,}",
            against=Samples(at_small),
            budget="≤ 1.2× (100,000)",
            ratio_max=1.2,
            at_scale=not quick,
        )
    ]


def _look_up(repo: ManifestRepo, count: int) -> float:
    """Return the seconds of one lookup, over lines picked at random."""
    numbers = [random.randrange(count) for _ in range(LOOKUPS)]
    started = time.perf_counter()
    for number in numbers:
        found = repo.line(f"recipe-{number // RANKS}", "main_decode", "b4", number % RANKS)
        if len(found) != 1:
            raise BenchmarkError(f"found {len(found)} entries of line {number}")
    return (time.perf_counter() - started) / LOOKUPS


def _filled(path: Path, count: int) -> ManifestRepo:
    repo = ManifestRepo.open(path, create=True)
    for begin in range(0, count, 2_000):
        repo.publish([_entry(number) for number in range(begin, min(begin + 2_000, count))])
    return repo


def _entry(number: int) -> NewEntry:
    recipe, rank = f"recipe-{number // RANKS}", number % RANKS
    return NewEntry(
        key=digest_of(["key", number]),
        manifest=digest_of(["manifest", number]),
        recipe=recipe,
        recipe_digest=digest_of(recipe),
        method="main_decode",
        case="b4",
        rank=rank,
        world_size=RANKS,
        cold_seconds=7.5,
        warm_seconds=0.125,
        created_at=_START + timedelta(seconds=number),
        evidence="simulated",
        files=(ArtifactFile("compiled_module", digest_of(["file", number]), 450_000, 0o600),),
        parts={part: {"part": part, "number": number} for part in KEY_PARTS},
    )
