"""Two modules of one class in one model, called with equal inputs: the proof says which entry is whose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachectl.boot.handout import HandedSet, Handout
from cachectl.boot.instrument import CachedMethod
from cachectl.identity.guard_paths import parse_source
from cachectl.identity.guards import SheetBuilder
from tests.boot.test_instrument import FOUR, REQUEST, TWO, Loader, Model, handed, members
from tests.identity.calls import contiguous

SCALES = {"main": 2, "draft": 3}


def sheet(scale: int) -> dict[str, Any]:
    """Return a guard sheet that holds the receiver's scale."""
    builder = SheetBuilder()
    builder.add(parse_source("L['self'].scale"), ["equals", scale])
    return builder.sheet()


@pytest.fixture
def cached_of(tmp_path: Path) -> Callable[..., CachedMethod]:
    """Return a maker of cached methods of a model with this scale, handed both modules' entries for 2 and 4 rows."""
    entries = tuple(
        handed(
            tmp_path / module,
            f"b{rows}",
            {"x": contiguous(rows, 4), "n": 1, "flag": False},
            model={"method": f"{module}.decode"},
            guards=sheet(scale),
        )
        for module, scale in SCALES.items()
        for rows in (2, 4)
    )
    for item in entries:
        assert item.path is not None
        (item.path / "compiled_module").write_text(f"{item.entry.method} {item.entry.case}")
    handout = Handout(
        "warm", tmp_path / "recipe.yaml", sets=(HandedSet("sha256:" + "0" * 64, REQUEST, entries, members(entries)),)
    )

    def make(scale: int, runtime: Loader) -> CachedMethod:
        model = Model()
        model.scale = scale
        return CachedMethod(
            model.decode,  # type: ignore[arg-type]
            handout,
            runtime,
            dynamic=False,
            options={},
            new_cold_folder=lambda: tmp_path / "cold",
            environ={},
        )

    return make


@pytest.mark.parametrize(("module", "scale"), SCALES.items())
def test_receiver_gets_the_entries_of_its_own_module(
    cached_of: Callable[..., CachedMethod], module: str, scale: int
) -> None:
    """Both fit the call; the one whose guards hold is taken, and later cases are of the same module."""
    runtime = Loader()
    cached = cached_of(scale, runtime)

    assert [f"{module}.decode b2", f"{module}.decode b4"] == [cached(TWO), cached(FOUR)]
    assert f"{module}.decode b2" == cached(TWO)
    assert ("warm", [], 2, []) == (cached.outcome, cached.reasons, len(runtime.loads), runtime.compiles)


def test_receiver_that_is_neither_is_cold_and_both_say_why(cached_of: Callable[..., CachedMethod]) -> None:
    """No entry is loaded for a model that none was built for."""
    runtime = Loader()
    cached = cached_of(7, runtime)

    assert ("cold", "cold", []) == (cached(TWO), cached.outcome, runtime.loads)
    assert {(2, 7), (3, 7)} == {(reason.stored, reason.wanted) for reason in cached.reasons}
