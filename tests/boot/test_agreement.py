"""Ranks that agree: real processes, a real TCPStore, and every way in which one of them can be unlike the others.

What happens with real artifacts is in tests/end_to_end/test_agreement.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cachectl.boot.agreement import TIMEOUT_VARIABLE, MethodAgreement, Patience
from cachectl.boot.handout import HandedMember, HandedSet
from cachectl.schemas.boot import Reason
from tests.boot.memory_store import MemoryStore

World = Callable[..., list[dict[str, Any]]]

ROOT = Path(__file__).resolve().parents[2]
BOTH = {"decode": [0, 1]}


@pytest.fixture(scope="module")
def forker() -> Iterator[subprocess.Popen[str]]:
    """A process that imported torch once, and forks ranks from itself."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.boot.rank_processes"],
        cwd=ROOT,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait(240)
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def world(forker: subprocess.Popen[str]) -> World:
    """Run a world of ranks: what all have in common, then what each has of its own. Return what each found."""

    def run(size: int, each: dict[int, dict[str, Any]] | None = None, **common: Any) -> list[Any]:
        ranks = [
            {"holders": BOTH, **common, **(each or {}).get(rank, {}), "rank": rank, "world": size}
            for rank in range(size)
        ]
        assert forker.stdin is not None
        assert forker.stdout is not None
        forker.stdin.write(json.dumps(ranks) + "\n")
        forker.stdin.flush()
        found: list[Any] = json.loads(forker.stdout.readline())
        return found

    return run


def verdicts(found: list[Any], method: int = 0) -> list[tuple[str, int | None]]:
    """Return each rank's verdict on its first method, and who wrote it."""
    return [(rank["agreement"][method]["verdict"], rank["agreement"][method]["by"]) for rank in found]


@pytest.mark.real
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_are_all_ready_start_warm(world: World, size: int) -> None:
    """Every rank runs what it loaded, on one verdict; later calls and cases ask nobody."""
    found = world(size, holders={"decode": list(range(size))}, calls=[["decode", "b2"], ["decode", "b4"]])

    assert [["warm b2", "warm b4"]] * size == [rank["values"] for rank in found]
    assert 1 == len(set(verdicts(found)))
    assert [["warm"]] * size == [rank["outcomes"] for rank in found]
    assert [[]] * size == [rank["reasons"] for rank in found]


@pytest.mark.real
@pytest.mark.parametrize(
    ("cold", "own"),
    [
        ({"fate": "cold"}, "guards: self.scale"),
        ({"fate": "can't load"}, "artifact: load"),
        ({"handed": ""}, "store: boot record"),
        ({"calls": [["decode", "none"]]}, "inputs: L['x']"),
    ],
    ids=["refused", "inert", "no-handout", "no-case"],
)
def test_one_rank_that_is_cold_makes_all_cold_at_once(world: World, cold: dict[str, Any], own: str) -> None:
    """Whatever stands against one rank: the others drop what they loaded, name that rank, and wait for no time-out."""
    found = world(3, {1: cold}, holders={"decode": [0, 1, 2]}, timeout_s=120.0)

    assert [("cold", 1)] * 3 == verdicts(found)
    assert [["cold"]] * 3 == [rank["values"] for rank in found]
    assert all(max(rank["seconds"]) < 60 for rank in found)
    for rank in (0, 2):
        (reason,) = found[rank]["reasons"]
        assert ["agreement", "rank 1"] == reason[:2]
        assert own in reason[2]
    assert found[1]["reasons"][0][2].startswith(own)


@pytest.mark.real
def test_cold_verdict_binds_later_cases_too(world: World) -> None:
    """What the ranks agreed on is not taken back by a case that would hold."""
    calls = [["decode", "b2"], ["decode", "b4"], ["decode", "b2"]]
    found = world(2, {1: {"fate": "cold"}}, calls=calls)

    assert [["cold"] * 3] * 2 == [rank["values"] for rank in found]
    assert [1, 0] == [rank["loads"] for rank in found]


@pytest.mark.real
def test_first_call_without_a_case_settles_the_method(world: World) -> None:
    """A rank whose first call was cold stays cold in the case that it has: the others are cold by its word."""
    calls = [["decode", "none"], ["decode", "b2"]]
    found = world(2, {1: {"calls": calls}})

    assert [["cold"], ["cold", "cold"]] == [rank["values"] for rank in found]
    assert [1, 0] == [rank["loads"] for rank in found]


@pytest.mark.real
def test_later_case_that_does_not_hold_is_cold_on_its_own_rank(world: World) -> None:
    """After the exchange nothing is asked: a call that fits no case is this rank's own matter."""
    found = world(2, {1: {"calls": [["decode", "b2"], ["decode", "none"]]}})

    assert [["warm b2"], ["warm b2", "cold"]] == [rank["values"] for rank in found]
    assert 1 == len(set(verdicts(found)))


@pytest.mark.real
def test_rank_that_is_too_late_finds_all_cold(world: World) -> None:
    """Who waited long enough writes cold; the late rank, ready itself, is bound by it."""
    late = {"fate": "late", "after": "decision"}
    found = world(3, {2: late}, holders={"decode": [0, 1, 2]}, timeout_s=1.0)

    assert 1 == len(set(verdicts(found)))
    (verdict,) = set(verdicts(found))
    assert "cold" == verdict[0]
    assert verdict[1] in (0, 1)
    assert [["cold"]] * 3 == [rank["values"] for rank in found]
    assert any(re.search(r"ranks \[(\d, )?2\] not ready", reason[2]) for reason in found[verdict[1]]["reasons"])
    assert ["agreement", f"rank {verdict[1]}"] == found[2]["reasons"][0][:2]


@pytest.mark.real
def test_rank_that_is_late_within_the_time_is_waited_for(world: World) -> None:
    """A rank may be later than others by what is left of the deadline."""
    found = world(2, {1: {"fate": "late", "after": 1, "seconds": 1.0}})

    assert [["warm b2"]] * 2 == [rank["values"] for rank in found]
    assert found[0]["agreement"][0]["seconds"] > 0.5


@pytest.mark.real
def test_rank_that_dies_before_it_voted_makes_the_others_cold_in_time(world: World) -> None:
    """Nobody waits longer than the time-out for a process that is gone."""
    found = world(3, {1: {"fate": "dies loading"}}, holders={"decode": [0, 1, 2]}, timeout_s=1.0)

    assert found[1] is None
    alive = [found[0], found[2]]
    assert 1 == len(set(verdicts(alive)))
    assert [["cold"]] * 2 == [rank["values"] for rank in alive]
    assert all(rank["seconds"][0] < 30 for rank in alive)


@pytest.mark.real
def test_rank_that_dies_while_waiting_leaves_one_verdict_for_the_others(world: World) -> None:
    """Its vote stands: the living are all warm, or all cold."""
    each = {1: {"fate": "dies waiting"}, 2: {"fate": "late", "after": 2, "seconds": 0.5}}
    found = world(3, each, holders={"decode": [0, 1, 2]})

    assert found[1] is None
    assert [("warm", 2)] * 2 == verdicts([found[0], found[2]])


@pytest.mark.real
def test_store_that_dies_makes_its_ranks_cold_with_the_reason(world: World) -> None:
    """The process that held the store is gone: nobody can agree, and nobody waits."""
    each = {0: {"fate": "dies waiting", "holds_store": True}, 2: {"fate": "late", "after": "store"}}
    found = world(3, each, holders={"decode": [0, 1, 2]}, timeout_s=120.0)

    assert found[0] is None
    assert [("cold", None)] * 2 == verdicts([found[1], found[2]])
    assert [["cold"]] * 2 == [found[rank]["values"] for rank in (1, 2)]
    assert ["agreement", "store"] == found[1]["reasons"][0][:2]
    assert all(found[rank]["seconds"][0] < 60 for rank in (1, 2))


@pytest.mark.real
def test_ranks_with_other_warm_sets_are_cold(world: World) -> None:
    """Ranks that read two stores, or two states of one, are not mixed."""
    found = world(2, {1: {"handed": "b"}})

    assert 1 == len(set(verdicts(found)))
    assert [["cold"]] * 2 == [rank["values"] for rank in found]
    assert any("warm set" in reason[2] for rank in found for reason in rank["reasons"])


@pytest.mark.real
def test_method_of_some_ranks_only_is_agreed_on_by_those(world: World) -> None:
    """Ranks that don't have a method are not waited for."""
    holders = {"decode": [0, 1], "draft": [2]}
    found = world(3, {2: {"calls": [["draft", "b4"]]}}, holders=holders, timeout_s=120.0)

    assert [["warm b2"], ["warm b2"], ["warm b4"]] == [rank["values"] for rank in found]
    assert [("warm", 2)] == verdicts([found[2]])
    assert all(max(rank["seconds"]) < 60 for rank in found)


@pytest.mark.real
def test_rank_that_calls_what_it_does_not_hold_makes_the_method_cold(world: World) -> None:
    """A rank that compiles a method beside ranks that are warm would keep them waiting: it says so."""
    found = world(3, {0: {"fate": "late", "after": "decision"}})

    assert [("cold", 2)] * 3 == verdicts(found)
    assert [["cold"]] * 3 == [rank["values"] for rank in found]


@pytest.mark.real
def test_methods_in_another_order_on_each_rank_do_not_deadlock(world: World) -> None:
    """Each waits for the other in another method until time is up; each method has one verdict."""
    holders = {"decode": [0, 1], "draft": [0, 1]}
    orders = [[["decode", "b2"], ["draft", "b2"]], [["draft", "b2"], ["decode", "b2"]]]
    found = world(2, {rank: {"calls": calls} for rank, calls in enumerate(orders)}, holders=holders, timeout_s=1.0)

    assert all(sum(rank["seconds"]) < 30 for rank in found)
    methods = [dict(zip((name for name, _ in orders[rank]), found[rank]["values"], strict=True)) for rank in (0, 1)]
    assert methods[0] == methods[1]
    assert "cold" in methods[0].values()
    assert verdicts(found[:1]) == verdicts(found[1:], method=1)
    assert verdicts(found[:1], method=1) == verdicts(found[1:])


@pytest.mark.real
def test_observing_ranks_report_what_would_have_been(world: World) -> None:
    """Proved on all ranks: the verdict would have been warm; nothing was loaded."""
    found = world(2, observe=True)

    assert [(["cold"], ["observed"], 0)] * 2 == [(rank["values"], rank["outcomes"], rank["loads"]) for rank in found]
    assert ["warm"] * 2 == [verdict for verdict, _ in verdicts(found)]


@pytest.mark.real
def test_observing_rank_that_would_be_cold_is_told_by_all(world: World) -> None:
    """What one rank would have lacked is why all would have been cold."""
    found = world(2, {1: {"fate": "cold"}}, observe=True)

    assert [("cold", 1)] * 2 == verdicts(found)
    assert [["cold"]] * 2 == [rank["outcomes"] for rank in found]


@pytest.mark.real
def test_rank_that_only_observes_does_not_leave_the_others_warm(world: World) -> None:
    """It runs cold on purpose, and nobody is to wait for it in a collective."""
    found = world(2, {0: {"fate": "late", "after": "decision"}, 1: {"observe": True, "timeout_s": 1.0}})

    assert [["cold"]] * 2 == [rank["values"] for rank in found]
    assert ("cold", 1) == verdicts(found)[0]
    assert "--observe" in found[0]["reasons"][0][2]


@pytest.mark.real
def test_ranks_that_write_at_the_same_moment_have_one_verdict(world: World) -> None:
    """Time-outs beside votes that are the last, many times over: no method is warm here and cold there."""
    found = world(4, holders={"decode": [0, 1, 2, 3]}, rounds=60, timeout_s=0.02)

    rounds = list(zip(*(rank["rounds"] for rank in found), strict=True))
    assert 60 == len(rounds)
    for each in rounds:
        assert 1 == len({tuple(rank) for rank in each}), each
    # Both came about, or the test shows nothing.
    assert {"warm", "cold"} == {each[0][1] for each in rounds}


class Ranks:
    """Two ranks as threads of this process, where a process of its own would show no more."""

    def __init__(self, rank: int, store: Any, world: int = 2) -> None:
        self.rank, self.store, self.world = rank, store, world

    def process_group(self) -> tuple[int, int] | None:
        return (self.rank, self.world) if self.world else None

    def rendezvous_store(self) -> Any:
        return self.store


class Model:
    """Whose method is agreed on; each test has a class of its own, and so keys of its own."""

    def decode(self) -> None:
        """Do nothing."""


def agreement(kind: type, ranks: Ranks, patience: Patience | None = None, **environ: str) -> MethodAgreement:
    """Return a rank's agreement on the decode method of a class."""
    method: types.MethodType = kind().decode
    return MethodAgreement(method, ranks, patience or Patience(60.0), environ)


def own_set(*ranks: int) -> HandedSet:
    """Return a set of one method on these ranks."""
    return HandedSet("sha256:0", {}, (), tuple(HandedMember(rank, "decode", "b2", f"{rank}") for rank in ranks))


COLD = Reason("guards", "self.scale", 1, 2)


@pytest.mark.parametrize("world_size", [0, 1])
def test_settle_alone_asks_nobody(world_size: int) -> None:
    """Without a process group, or with one rank, there is no exchange and nothing in the report."""
    store = MemoryStore()
    alone = agreement(Model, Ranks(0, store, world_size))

    assert (None, None, 0) == (alone.settle(own_set(0), ()), alone.report(), store.asked)


def test_settle_asks_once() -> None:
    """Later calls ask nobody, whatever they are about."""
    store = MemoryStore()
    mine = agreement(Model, Ranks(0, store))
    mine.settle(None, (COLD,))
    asked = store.asked

    for _ in range(3):
        mine.settle(own_set(0, 1), ())

    assert (1, asked) == (asked, store.asked)


def test_settle_each_restart_of_one_store_has_keys_of_its_own() -> None:
    """torchrun restarts the ranks with the same store: what stood before binds nobody."""
    first = type("Model", (Model,), {})
    store = MemoryStore()
    cut = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    agreement(first, Ranks(0, store), TORCHELASTIC_RESTART_COUNT="0", **cut).settle(None, (COLD,))
    keys = set(store.values)

    # A new process counts its cached methods from the first again.
    second = type("Model", (Model,), {"__qualname__": "Restarted"})
    again = agreement(second, Ranks(0, store), TORCHELASTIC_RESTART_COUNT="1", **cut)

    assert not any(key.startswith(again._keys) for key in keys)
    assert "/1/" in again._keys


def test_settle_vote_of_an_earlier_start_is_cold_on_every_rank() -> None:
    """Where a store serves two starts of one name, half a vote is not counted with half of another one."""
    store = MemoryStore()
    kind = type("Model", (Model,), {"__qualname__": "Stale"})
    names = [agreement(kind, Ranks(rank, store)) for rank in (0, 1, 0)]
    for later in names[1:]:
        later._keys = names[0]._keys
    both = [threading.Thread(target=name.settle, args=(own_set(0, 1), ())) for name in names[:2]]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert names[0].against is None
    store.values.pop(names[0]._keys + "decision")

    against = names[2].settle(own_set(0, 1), ())

    assert against is not None
    assert ("agreement", "vote") == (against.part, against.name)


def test_settle_store_that_does_not_answer_is_cold_within_the_patience() -> None:
    """A client of torch's waits for an answer without end; the call does not."""
    answers = threading.Event()

    class Silent(MemoryStore):
        def check(self, keys: list[str]) -> bool:
            return answers.wait(120)

    started = time.monotonic()
    against = agreement(Model, Ranks(0, Silent()), Patience(1.2)).settle(own_set(0, 1), ())

    assert time.monotonic() - started < 60
    answers.set()
    assert against is not None
    assert ("agreement", "store", "no answer in 1.2 s") == (against.part, against.name, against.wanted)


def test_settle_group_without_a_store_is_cold() -> None:
    """Several ranks that can't ask each other don't guess."""
    against = agreement(Model, Ranks(0, None)).settle(own_set(0, 1), ())

    assert against is not None
    assert ("agreement", "store", "absent") == (against.part, against.name, against.kind)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"verdict": "cold", "by": "x"}', b"\xff\xfe", b"cold:1:timeout"])
def test_settle_verdict_that_can_not_be_read_is_cold(data: bytes) -> None:
    """What another version, or anybody, wrote there is no reason to start warm."""
    mine = agreement(Model, store_with := Ranks(0, MemoryStore()))
    store_with.store.values[mine._keys + "decision"] = data

    against = mine.settle(own_set(0, 1), ())

    assert against is not None
    assert ("agreement", "verdict", "corrupt") == (against.part, against.name, against.kind)


def test_settle_verdict_of_another_set_is_cold() -> None:
    """A verdict says which set it is about."""
    mine = agreement(Model, ranks := Ranks(0, MemoryStore()))
    decision = {"verdict": "warm", "by": 1, "warm_set": "sha256:1", "reason": None}
    ranks.store.values[mine._keys + "decision"] = json.dumps(decision).encode()

    against = mine.settle(own_set(0, 1), ())

    assert against is not None
    assert ("agreement", "warm set", "sha256:1", "sha256:0") == (
        against.part,
        against.name,
        against.stored,
        against.wanted,
    )


def test_settle_interrupted_goes_on_with_the_vote_it_gave() -> None:
    """Ctrl-C while waiting passes through; the next call waits on, and votes no second time."""
    kind, store = type("Model", (Model,), {"__qualname__": "Interrupted"}), MemoryStore()
    mine, other = agreement(kind, Ranks(0, store)), agreement(kind, Ranks(1, store))
    other._keys = mine._keys

    with _interrupted_once(lambda: store.check([mine._keys + "vote/0"])), pytest.raises(KeyboardInterrupt):
        mine.settle(own_set(0, 1), ())
    # Late enough that a second vote would come before.
    late = threading.Timer(0.5, other.settle, (own_set(0, 1), ()))
    late.start()

    assert mine.settle(own_set(0, 1), ()) is None
    late.join()
    assert mine.report() is not None
    assert b"1" == store.values[mine._keys + "vote/0"]


def test_settle_interrupted_as_it_begins_goes_on_with_the_exchange_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is only about to run has begun: there is no second one beside it, and no second vote."""
    kind, store = type("Model", (Model,), {"__qualname__": "Beginning"}), MemoryStore()
    mine, other = agreement(kind, Ranks(0, store)), agreement(kind, Ranks(1, store))
    other._keys = mine._keys
    start, begun = threading.Thread.start, []

    def start_interrupted(thread: threading.Thread) -> None:
        start(thread)
        begun.append(thread)
        if len(begun) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_interrupted)
    with pytest.raises(KeyboardInterrupt):
        mine.settle(own_set(0, 1), ())
    monkeypatch.undo()
    # Late enough that a second vote would come before.
    late = threading.Timer(0.5, other.settle, (own_set(0, 1), ()))
    late.start()

    assert mine.settle(own_set(0, 1), ()) is None
    late.join()
    assert b"1" == store.values[mine._keys + "vote/0"]


def test_patience_is_one_for_all_methods() -> None:
    """Methods that wait one after the other wait no longer than the deadline together."""
    patience, bounds = Patience(2.0), []

    for _ in range(3):
        against = agreement(Model, Ranks(0, MemoryStore()), patience).settle(own_set(0, 1), ())
        assert against is not None
        # "all ready in 2.0 s", or "no answer in 2.0 s" where this process was too slow to say so itself.
        bounds.append(float(str(against.wanted).split()[-2]))

    assert 2.0 == bounds[0]
    # A tenth is kept each time for the last word.
    assert bounds[1] <= 0.3
    assert bounds[2] <= 0.1


@pytest.mark.parametrize(("text", "seconds"), [("", 30.0), ("2.5", 2.5), ("0", 0.0), (" 7 ", 7.0)])
def test_patience_is_the_settings_or_what_the_hook_left(text: str, seconds: float) -> None:
    """The environment overrides; without a word of the hook it is the default deadline."""
    assert seconds == Patience.of(None, {TIMEOUT_VARIABLE: text}).left_s
    assert (12.0 if not text else seconds) == Patience.of(12.0, {TIMEOUT_VARIABLE: text}).left_s


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_patience_that_can_not_be_read_is_cold_with_the_setting_named(text: str) -> None:
    """A bound that nobody chose is not used: the rank says cold, and why."""
    store = MemoryStore()
    mine = agreement(Model, Ranks(0, store), Patience.of(None, {TIMEOUT_VARIABLE: text}))

    against = mine.settle(own_set(0, 1), ())

    assert against is not None
    assert ("policy", TIMEOUT_VARIABLE, text) == (against.part, against.name, against.wanted)


@contextmanager
def _interrupted_once(due: Callable[[], bool]) -> Iterator[None]:
    """Interrupt this thread once `due` says so.

    Signal after signal until one has arrived: of a signal that comes between Python's last look and a system call that
    waits, nothing is seen before the wait is over.
    """
    arrived, here = threading.Event(), threading.get_ident()

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        if not arrived.is_set():
            arrived.set()
            raise KeyboardInterrupt

    def send() -> None:
        while not due():
            time.sleep(0.01)
        while not arrived.wait(0.1):
            signal.pthread_kill(here, signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt)
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        yield
    finally:
        arrived.set()
        sender.join()
        signal.signal(signal.SIGINT, before)
