"""What the cached method tells the node of its entries: begun, come through, withdrawn; and what it is told."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachectl.boot.handout import HandedSet, Handout
from cachectl.boot.instrument import CachedMethod
from cachectl.boot.start_log import StartLog, describe
from cachectl.boot.starts import Death, Starts
from cachectl.boot.warmdir import WarmDir
from cachectl.boot.watch import StartWatch, warm_dir_of
from tests.boot.test_instrument import REQUEST, Loader, Model, handed, members
from tests.identity.calls import contiguous


@pytest.fixture
def warm(tmp_path: Path) -> WarmDir:
    """A warm dir of this user's."""
    (tmp_path / "warm").mkdir(mode=0o700)
    return WarmDir(tmp_path / "warm")


@pytest.fixture
def handout(warm: WarmDir) -> Handout:
    """A hand-out of two cases in it."""
    folder = warm.new_handout()
    entries = tuple(handed(folder, f"b{rows}", {"x": contiguous(rows, 4), "n": 1, "flag": False}) for rows in (2, 4))
    sets = (HandedSet("sha256:" + "0" * 64, REQUEST, entries, members(entries)),)
    made = Handout("warm", folder / "recipe.yaml", sets=sets, folder=folder)
    made.write()
    return made


@pytest.fixture
def start(handout: Handout, tmp_path: Path) -> Callable[..., tuple[CachedMethod, StartWatch]]:
    """Return a maker of cached methods on the hand-out, each with a watch of its own."""

    def build(runtime: Any = None) -> tuple[CachedMethod, StartWatch]:
        watch = StartWatch(handout)
        cached = CachedMethod(
            Model().decode,  # type: ignore[arg-type]
            handout,
            runtime or Loader(),
            dynamic=False,
            options={},
            new_cold_folder=lambda: tmp_path / "cold",
            environ={},
            watch=watch,
        )
        return cached, watch

    return build


def log_of(warm: WarmDir) -> StartLog:
    """Return the one open log."""
    (path,) = (warm.root / "starts" / "open").iterdir()
    return StartLog.read(path)


def noted(warm: WarmDir) -> tuple[set[str], set[str]]:
    """Return the cases that were begun and those that came through."""
    log = log_of(warm)
    names = {name: what.partition(" ")[0] for name, _, what in log.held.values()}
    return {names[name] for name in log.begun}, {names[name] for name in log.succeeded}


class Dying(Loader):
    """A runtime whose loaded code raises."""

    raises: BaseException = AssertionError("expect size 4")

    def load(self, method: Any, folder: Path) -> Callable[..., str]:
        def run(*_: Any, **__: Any) -> str:
            raise self.raises

        return run


def test_first_call_is_begun_and_comes_through(start: Callable[..., Any], warm: WarmDir) -> None:
    """Once a case; later calls tell nothing."""
    cached, _ = start()
    assert (set(), set()) == noted(warm)

    for _ in range(3):
        assert "warm b4" == cached(contiguous(4, 4))

    assert ({"decode/b4"}, {"decode/b4"}) == noted(warm)
    size_bytes = log_of(warm).path.stat().st_size
    cached(contiguous(4, 4))
    assert size_bytes == log_of(warm).path.stat().st_size


def test_first_call_that_raises_stays_begun(start: Callable[..., Any], warm: WarmDir) -> None:
    """What raises in the loaded code reaches the program, and is a death unless a call comes through."""
    cached, watch = start(Dying())

    with pytest.raises(AssertionError, match="expect size"):
        cached(contiguous(4, 4))

    assert ({"decode/b4"}, set()) == noted(warm)
    watch.end()
    Starts.of(warm.root).settle()
    assert ["decode/b4 rank 0"] == [item["name"] for item in Starts.of(warm.root).quarantined()]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("when", ["load", "call"])
def test_first_call_that_is_interrupted_is_no_death(
    start: Callable[..., Any], warm: WarmDir, error: BaseException, when: str
) -> None:
    """Somebody stopped it; that says nothing of the artifact."""
    runtime = Loader(fails=error) if when == "load" else Dying()
    runtime.raises = error  # type: ignore[attr-defined]
    cached, _ = start(runtime)

    with pytest.raises(type(error)):
        cached(contiguous(4, 4))

    assert (set(), set()) == noted(warm)


def test_load_that_fails_is_withdrawn(start: Callable[..., Any], warm: WarmDir) -> None:
    """The program goes on cold by itself, at each start."""
    cached, _ = start(Loader(fails=ValueError("Version mismatch")))

    assert "cold" == cached(contiguous(4, 4))

    assert (set(), set()) == noted(warm)


def test_quarantined_case_is_cold_and_the_other_one_warm(
    start: Callable[..., Any], handout: Handout, warm: WarmDir
) -> None:
    """The process looks by itself: a container that is started again runs no hook."""
    for name in "xy":
        Starts.of(warm.root).note_death(describe(handout.entries[0].entry), Death(name, time.time(), "exit code 139"))
    cached, _ = start()

    assert ("cold", "warm b4") == (cached(contiguous(2, 4)), cached(contiguous(4, 4)))
    assert [("policy", "quarantine")] == [(reason.part, reason.name) for reason in cached.reasons]
    # What it had better not touch it does not hold: its own death would count against the other one only.
    assert ["decode/b4 rank 0"] == [what for _, _, what in log_of(warm).held.values()]


def test_success_forgets_an_earlier_death(start: Callable[..., Any], handout: Handout, warm: WarmDir) -> None:
    """Two in a row count."""
    for handed_entry in handout.entries:
        Starts.of(warm.root).note_death(describe(handed_entry.entry), Death("x", time.time(), "exit code 139"))
    cached, _ = start()

    cached(contiguous(2, 4))

    assert ["decode/b4 rank 0"] == [item["name"] for item in Starts.of(warm.root).quarantined()]


def test_watch_of_one_rank_holds_its_entries_only(handout: Handout, warm: WarmDir) -> None:
    """Another rank's death is another entry's."""
    StartWatch(handout, ranks=[3])

    assert {} == log_of(warm).held


def test_end_leaves_no_log(start: Callable[..., Any], warm: WarmDir) -> None:
    """A start that came to its end has nothing to settle."""
    _, watch = start()
    watch.end()

    assert [] == os.listdir(warm.root / "starts" / "open")


def test_cold_handout_is_not_watched(handout: Handout, warm: WarmDir) -> None:
    """Nothing was handed out, so nothing can have died of it."""
    StartWatch(Handout("cold", Path("recipe.yaml"), folder=handout.folder))

    assert not (warm.root / "starts").exists()


@pytest.mark.parametrize("change", ["mode", "link", "owner"])
def test_warm_dir_of_a_folder_that_others_may_change_is_none(warm: WarmDir, change: str) -> None:
    """No state is read from, or written to, what is not this user's alone."""
    folder = warm.new_handout()
    assert warm.root == warm_dir_of(folder)
    if change == "mode":
        warm.root.chmod(0o777)
    elif change == "link":
        moved = folder.parent.rename(warm.root / "moved")
        folder.parent.symlink_to(moved)
    elif os.getuid() == 0:
        os.chown(warm.root, 1234, 1234)
    else:
        pytest.skip("needs root, to give a folder away")

    assert warm_dir_of(folder) is None
