"""Ranks in processes of their own, with a real TCPStore: what test_agreement.py has them do.

Run as a script it imports torch once, and forks the ranks of each world that it reads from stdin: a JSON list of ranks
a line, answered by the JSON list of what each rank found; null for a rank that died.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from cachectl.boot.agreement import Patience
from cachectl.boot.handout import HandedMember, HandedSet, Handout
from cachectl.boot.instrument import CachedMethod
from cachectl.runtimes.rendezvous import rendezvous_store
from cachectl.schemas.boot import Reason
from tests.boot.test_instrument import REQUEST, Loader, handed
from tests.identity.calls import contiguous

# Until a world that hangs is ended.
_WORLD_S = 200.0
_PAUSE_S = 0.005
# What the keys of the first cached method of that name begin with; see cachectl/boot/agreement.py.
_DECODE = "cachectl/agreement/v1/0/decode/"
_OTHER_SET = "sha256:" + "b" * 64
_ROWS = {"b2": 2, "b4": 4, "none": 7}


@dataclass
class RankLoader(Loader):
    """The stand-in runtime of a rank, with torch's own process group and store."""

    torch_itself: Any = None
    told: Rank | None = None

    def process_group(self) -> tuple[int, int] | None:
        distributed = self.torch_itself.distributed
        return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else None

    def rendezvous_store(self) -> Any:
        return rendezvous_store(self.torch_itself)

    def load(self, method: Any, folder: Path) -> Any:
        told, store = self.told, self.rendezvous_store()
        assert told is not None
        if told.fate == "dies loading":
            _die()
        if told.fate == "dies waiting":
            threading.Thread(target=_die_after, args=(store, 2), daemon=True).start()
        if told.fate == "can't load":
            raise RuntimeError("this rank's copy is damaged")
        if told.fate == "late":
            _wait(store, told.after)
            time.sleep(told.seconds)
        return super().load(method, folder)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_after(store: Any, ready: int) -> None:
    _wait(store, ready)
    _die()


def _wait(store: Any, what: int | str, ordinal: int = 0) -> None:
    """Wait until so many ranks are ready, until there is a `decision`, or until the `store` is gone."""
    keys = f"{_DECODE}{ordinal}/"
    while True:
        try:
            if store.add(f"{keys}ready", 0) >= what if isinstance(what, int) else store.check([f"{keys}{what}"]):
                return
        except Exception:
            if what == "store":
                return
            raise
        time.sleep(_PAUSE_S)


class Methods:
    """A model with two methods."""

    def decode(self, x: Any) -> str:
        """Say that the plain method ran."""
        return "eager"

    def draft(self, x: Any) -> str:
        """Say that the plain method ran."""
        return "eager"


@dataclass
class Rank:
    """One rank of a world, and what it does; see `run_rank`."""

    rank: int
    world: int
    port: int = 0
    # Methods in the order of their first calls, and the case of each call.
    calls: list[list[str]] = field(default_factory=lambda: [["decode", "b2"]])
    # Which ranks hold which method, in the set that was built.
    holders: dict[str, list[int]] = field(default_factory=dict)
    # What happens to it: `cold`, `can't load`, `dies loading`, `dies waiting` once two ranks are ready, or `late`: it
    # loads `seconds` after so many ranks are ready, after the `decision`, or after the `store` is gone.
    fate: str = ""
    after: int | str = 0
    seconds: float = 0.0
    # "" for a cold hook; a letter for the set that was handed out.
    handed: str = "a"
    observe: bool = False
    # No rank that is ready should be too late, however slow the machine is.
    timeout_s: float = 60.0
    # Rounds of methods of their own, each rank late at random; see `run_rounds`.
    rounds: int = 0
    # The store lies in this rank's process; else in one of its own, as with torchrun.
    holds_store: bool = False


def run_rank(torch: Any, told: Rank, folder: Path) -> dict[str, Any]:
    """Do what one rank was told, and return what came of it."""
    start_group(torch, told)
    runtime = RankLoader(torch_itself=torch, told=told)
    if told.fate == "cold":
        runtime.against.append(Reason("guards", "self.scale", 1, 3, hint="build again"))
    if told.rounds:
        return run_rounds(runtime, told, folder)
    handout = hand_out(told, folder)
    patience, environ = Patience(told.timeout_s), {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}
    model = Methods()
    made = {
        # In one order on all ranks, whatever the order of the calls.
        method: cached_method(model, method, handout, runtime, told, patience, environ, folder)
        for method in ("decode", "draft")
    }
    values, seconds = [], []
    for method, case in told.calls:
        started = time.monotonic()
        values.append(made[method](contiguous(_ROWS[case], 4)))
        seconds.append(time.monotonic() - started)
    if told.fate == "dies waiting":
        # Its thread may have been too slow.
        _die()
    cached = [made[method] for method in dict.fromkeys(method for method, _ in told.calls)]
    return {
        "values": values,
        "seconds": seconds,
        "outcomes": [method.outcome for method in cached],
        "agreement": [method.agreement.report() for method in cached],
        "reasons": [[reason.part, reason.name, str(reason)] for method in cached for reason in method.reasons],
        "loads": len(runtime.loads),
    }


def run_rounds(runtime: RankLoader, told: Rank, folder: Path) -> dict[str, Any]:
    """Agree on many methods, one after the other, most with hardly enough patience; return this rank's verdicts.

    Of ten rounds one is waited for, so that all ranks begin the next ones together, and in one a rank is too late.
    """
    handout, model, found = hand_out(told, folder), Methods(), []
    for number in range(told.rounds):
        waited_for, too_late = number % 10 == 0, number % 10 == 5
        patience = Patience(60.0 if waited_for else told.timeout_s)
        cached = cached_method(model, "decode", handout, runtime, told, patience, {}, folder)
        if too_late and told.rank == 0:
            _wait(runtime.rendezvous_store(), "decision", number)
        elif not waited_for:
            # Up to what the others wait: some arrive when time is up, to the millisecond.
            time.sleep(((number * 7 + told.rank * 13) % 10) / 10 * told.timeout_s)
        value = cached(contiguous(2, 4))
        report = cached.agreement.report() or {}
        found.append([value, report["verdict"], report["by"]])
    return {"rounds": found}


def cached_method(
    model: Methods,
    method: str,
    handout: Handout,
    runtime: RankLoader,
    told: Rank,
    patience: Patience,
    environ: Mapping[str, str],
    folder: Path,
) -> CachedMethod:
    """Return the cached method of a rank."""
    bound: types.MethodType = getattr(model, method)
    return CachedMethod(
        bound,
        handout,
        runtime,
        dynamic=False,
        options={},
        new_cold_folder=lambda: folder / "cold",
        environ=environ,
        observe=told.observe,
        patience=patience,
    )


def hand_out(told: Rank, folder: Path) -> Handout:
    """Return what the hook handed to a rank."""
    if not told.handed:
        reason = Reason("store", "boot record", kind="absent", hint="run: cachectl build")
        return Handout("cold", folder / "recipe.yaml", reasons=(reason,))
    topology = {"world_size": told.world, "rank": told.rank}
    entries = tuple(
        handed(folder / method, case, {"x": contiguous(_ROWS[case], 4)}, topology=topology, model={"method": method})
        for method, ranks in told.holders.items()
        if told.rank in ranks
        for case in ("b2", "b4")
    )
    members = tuple(
        HandedMember(rank, method, case, f"{method} {case} {rank}")
        for method, ranks in told.holders.items()
        for rank in ranks
        for case in ("b2", "b4")
    )
    found = HandedSet("sha256:" + told.handed * 64, REQUEST, entries, members)
    return Handout("warm", folder / "recipe.yaml", sets=(found,))


def start_group(torch: Any, told: Rank) -> None:
    """Join the world's process group; nobody is past it, and may die, before all are."""
    store = new_store(torch, told.port)
    torch.distributed.init_process_group("gloo", store=store, rank=told.rank, world_size=told.world)
    started = store.add("started", 1)
    while started < told.world:
        time.sleep(_PAUSE_S)
        started = store.add("started", 0)


def new_store(torch: Any, port: int, listening: int | None = None) -> Any:
    """Return a store at this port, served by another process, or by this one on a socket that listens."""
    return torch.distributed.TCPStore(
        "127.0.0.1",
        port,
        None,
        listening is not None,
        timedelta(seconds=_WORLD_S),
        wait_for_workers=False,
        master_listen_fd=listening,
    )


def run_world(torch: Any, ranks: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """Fork the ranks, and return what each found."""
    # The socket is made here, and handed on: a port that was free a moment ago may be another process's by now.
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = listening.getsockname()[1]
    worlds = [Rank(**{**told, "port": port}) for told in ranks]
    holder = None if any(told.holds_store for told in worlds) else _forked_holder(torch, port, listening)
    children = [_forked(torch, told, listening) for told in worlds]
    listening.close()
    ends = time.monotonic() + _WORLD_S
    found: list[dict[str, Any] | None] = []
    for pid, reading in children:
        data = b""
        while select.select([reading], [], [], max(0.0, ends - time.monotonic()))[0]:
            part = os.read(reading, 1 << 16)
            if not part:
                break
            data += part
        else:
            os.kill(pid, signal.SIGKILL)
        os.close(reading)
        found.append(json.loads(data) if data else None)
    if holder is not None:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    for pid, _ in children:
        os.waitpid(pid, 0)
    return found


def _forked_holder(torch: Any, port: int, listening: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        store = new_store(torch, port, listening.detach())
        time.sleep(_WORLD_S + 10)
        del store
    finally:
        os._exit(0)


def _forked(torch: Any, told: Rank, listening: socket.socket) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        # Open in nobody else: else a store whose process died would not refuse to be asked.
        held = new_store(torch, told.port, listening.detach()) if told.holds_store else listening.close()
        with tempfile.TemporaryDirectory() as folder:
            found = run_rank(torch, told, Path(folder))
        del held
        os.write(writing, json.dumps(found).encode())
        os.close(writing)
    except BaseException as error:  # noqa: BLE001 - the child ends here, whatever it was
        sys.stderr.write(f"rank {told.rank}: {type(error).__name__}: {error}\n")
    finally:
        os._exit(0)


def main() -> None:
    """Serve worlds until stdin ends."""
    import torch
    import torch.distributed

    for line in sys.stdin:
        sys.stdout.write(json.dumps(run_world(torch, json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
