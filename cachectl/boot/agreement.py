"""The ranks of a job agree, once for each method, whether it starts warm: all of them, or none.

Owns the exchange through the rendezvous store: its keys, its order, its bounds. A rank that is warm where another
compiles would wait in the first collective until a watchdog ends the job. One exchange a method, within its first call;
later calls ask nobody. Standard library only: the store comes in from the runtime's adapter.

Keys, below `cachectl/agreement/v1/<restart>/<method>/<ordinal>/`. All ranks know them, also one that was handed
nothing; the class is not in them, since ranks may hold parts of different classes:

    set            warm set of the first rank that was ready, and the method as its entries name it
    vote/<rank>    1 once this rank is ready; 2 where an earlier start left its vote in the same store
    ready          how many ranks are ready
    decision       the verdict, a JSON document, written by compare_set over nothing

Why there is one verdict: `decision` is written once, and every rank takes what stands there, its own or another's.
`warm` is written by the rank that counts itself as the last holder, so each holder has voted; it votes when its checks,
proof and load are done, and only once. A rank that is cold writes so at once and waits for nobody. A rank that has
waited long enough writes cold itself, and is bound like the others by what stands, even where that is warm. What can't
be agreed on: a rank that loses the store between its vote and the verdict starts cold alone. Its answers are right, and
the others wait for it as long as it compiles.
"""

from __future__ import annotations

import json
import math
import threading
import time
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cachectl.boot.handout import HandedSet
from cachectl.boot.options import DEFAULT_DEADLINE_S
from cachectl.schemas.boot import KINDS, Reason

__all__ = ["TIMEOUT_VARIABLE", "MethodAgreement", "Patience", "Store", "Verdict"]

TIMEOUT_VARIABLE = "CACHECTL_AGREEMENT_TIMEOUT_S"

_PREFIX = "cachectl/agreement/v1"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
# So many ranks poll as often as that; with more of them each polls less often, and the store has as much to do.
_RANKS_AT_FULL_PACE = 64
# What is kept of the time-out for writing that it passed.
_LAST_WORD_S = 1.0
# A reason goes through the store in so many characters: a rank's memory is not the place for a list of everything.
_LIMIT_CHARACTERS, _ERROR_CHARACTERS = 2000, 200
# So many ranks at most are asked after when time is up.
_ASKED_AFTER = 64


class Store(Protocol):
    """What is used of torch.distributed's store."""

    def compare_set(self, key: str, expected_value: str, desired_value: str, /) -> bytes: ...
    def add(self, key: str, value: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...


class _Ranked(Protocol):
    def process_group(self) -> tuple[int, int] | None: ...
    def rendezvous_store(self) -> Store | None: ...


@dataclass
class Patience:
    """How long this process may still wait for other ranks, over all its methods together; seconds."""

    left_s: float = DEFAULT_DEADLINE_S
    # The setting can't be read: this rank does not start warm with a bound that nobody chose.
    fault: Reason | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @classmethod
    def of(cls, left_s: float | None, environ: Mapping[str, str]) -> Patience:
        """Return the bound of a start.

        Args:
            left_s: what the hook left of its deadline; None where nobody knows, for the default deadline.
            environ: may say another bound in CACHECTL_AGREEMENT_TIMEOUT_S.
        """
        text = environ.get(TIMEOUT_VARIABLE, "").strip()
        if not text:
            return cls(DEFAULT_DEADLINE_S if left_s is None else left_s)
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            hint = "give a number of seconds, or unset it"
            return cls(0.0, Reason("policy", TIMEOUT_VARIABLE, None, text, "policy", hint))
        return cls(seconds)

    def spend(self, seconds: float) -> None:
        """Take what was waited off what is left."""
        with self._lock:
            self.left_s = max(0.0, self.left_s - seconds)


@dataclass(frozen=True)
class Verdict:
    """What binds a method on this rank. `by` is the rank that wrote it; None where the store could not be asked."""

    warm: bool
    by: int | None
    reason: Reason | None = None
    warm_set: str | None = None


class MethodAgreement:
    """One method's exchange with the other ranks.

    One for each cached method, made in the order in which the program makes those: the ordinal is part of the keys, and
    ranks that make their cached methods of one name in another order meet in none, which ends in cold.
    """

    def __init__(
        self,
        method: types.MethodType,
        runtime: _Ranked,
        patience: Patience,
        environ: Mapping[str, str],
        *,
        binding: bool = True,
    ) -> None:
        self.method = method.__name__
        self.verdict: Verdict | None = None
        self.seconds = 0.0
        # The method's first call has asked, or had nobody to ask.
        self.over = False
        self._runtime = runtime
        self._patience = patience
        self._binding = binding
        self._keys = _keys(self.method, environ)
        self._running: _Exchange | None = None

    @property
    def against(self) -> Reason | None:
        """Why the method is cold on all ranks; None while nothing is agreed on, and where warm is."""
        return self.verdict.reason if self.verdict is not None else None

    def settle(
        self, of_set: HandedSet | None, reasons: Iterable[Reason], *, entry_method: str | None = None
    ) -> Reason | None:
        """Exchange verdicts, the first time; return why the method is cold though this rank is ready, else None.

        With fewer than two ranks, before a process group is there, and for an entry that is handed out by itself, there
        is nobody to agree with. Does not raise;
        waits no longer than the patience that is left. A call that was interrupted here goes on where it was.

        Args:
            of_set: the set this rank is ready with; None where it is cold.
            reasons: why it is cold; none where it is ready.
            entry_method: the method as the ready entry names it, with its module's path in the recipe's model.
        """
        if not self.over:
            started = time.monotonic()
            try:
                self._settle(of_set, next(iter(reasons), None), entry_method or self.method)
            except Exception as error:  # noqa: BLE001 - boot's broad handler; what the store raises must not end a boot
                self.verdict = Verdict(False, None, _lost(error))
            finally:
                waited = time.monotonic() - started
                self.seconds += waited
                self._patience.spend(waited)
            self.over = True
        return self.against

    def report(self) -> dict[str, Any] | None:
        """Return what the report says of this method; None where no ranks had to agree."""
        if self.verdict is None:
            return None
        return {
            "method": self.method,
            "verdict": "warm" if self.verdict.warm else "cold",
            "by": self.verdict.by,
            "reason": self.verdict.reason.to_json() if self.verdict.reason is not None else None,
            "seconds": round(self.seconds, 6),
        }

    def _settle(self, of_set: HandedSet | None, against: Reason | None, entry_method: str) -> None:
        group = self._runtime.process_group()
        if group is None or group[1] < 2 or (of_set is not None and not of_set.members):
            # A build's second process holds one entry and no set: its launcher compares the ranks.
            return
        rank, world = group
        store = self._runtime.rendezvous_store()
        if store is None:
            hint = "initialise the process group with a store"
            self.verdict = Verdict(False, None, Reason("agreement", "store", kind="absent", hint=hint))
            return
        if self._running is None:
            against = against or self._patience.fault
            holders = _holders(of_set, entry_method)
            if against is None and (of_set is None or rank not in holders):
                against = Reason("model", "method", holders, rank, "absent", "build the recipe for this rank, too")
            subject = (of_set.warm_set or "") if of_set is not None else ""
            if entry_method != self.method:
                # Main and draft model can be of one class: ranks that make them in another order agree on nothing.
                subject = f"{subject} {entry_method}"
            exchange = _Exchange(store, self._keys, rank, holders, subject, against, self._patience.left_s)
            exchange.pause_s = _LONGEST_PAUSE_S * max(1.0, world / _RANKS_AT_FULL_PACE)
            exchange.binding = self._binding
            self._running = exchange
        exchange = self._running
        if exchange.ident is None:
            # Known before it begins: a start that is interrupted has mostly begun, and two exchanges would vote twice.
            exchange.start()
        # Not join: interrupted, it takes a running thread for ended (CPython 3.10 to 3.12).
        exchange.over.wait(max(0.0, exchange.ends_s - time.monotonic()))
        self.verdict = exchange.given_up()


class _Exchange(threading.Thread):
    """The exchange itself, in a thread of its own: an answer of the store has no time-out in torch's client."""

    pause_s = _LONGEST_PAUSE_S
    binding = True

    def __init__(
        self,
        store: Store,
        keys: str,
        rank: int,
        holders: Sequence[int],
        subject: str,
        against: Reason | None,
        timeout_s: float,
    ) -> None:
        super().__init__(name="cachectl-agreement", daemon=True)
        self._store, self._keys, self._rank, self._holders = store, keys, rank, holders
        # What this rank is ready with: its warm set, and the entries' method where that says more than the keys.
        self._warm_set = subject
        self._against = against
        self._timeout_s = timeout_s
        now = time.monotonic()
        # The store gets at least a moment, else a rank without patience could not even say that it is cold.
        self.ends_s = now + max(timeout_s, _LAST_WORD_S)
        self._waits_until_s = now + timeout_s - min(_LAST_WORD_S, timeout_s / 10)
        self._verdict: Verdict | None = None
        self._error: Exception | None = None
        self._late = False
        self.over = threading.Event()

    def run(self) -> None:
        """Take part; what comes of it is for `given_up`."""
        try:
            if not self.binding:
                # Proved and run cold on purpose: no rank may start warm beside this one.
                hint = "start all ranks without --observe"
                self._decide(Verdict(False, self._rank, Reason("policy", "--observe", kind="policy", hint=hint)))
                self._keys += "observed/"
            self._verdict = self._be_cold(self._against) if self._against is not None else self._be_ready()
        except Exception as error:  # noqa: BLE001 - any: the peer that held the store died, or the network did
            self._error = error
        finally:
            self.over.set()

    def given_up(self) -> Verdict:
        """Return the verdict; where there is none yet, cold for this rank alone, and the thread writes no more."""
        self._late = True
        if self._verdict is not None:
            return self._verdict
        return Verdict(False, None, _lost(self._error) if self._error is not None else _silent(self._timeout_s))

    def _be_cold(self, against: Reason) -> Verdict:
        """Say that this rank is cold; it stays so whatever stands, and another's earlier reason is told as well."""
        standing = self._refuse(against)
        return Verdict(False, self._rank, against) if standing.warm else standing

    def _refuse(self, against: Reason) -> Verdict:
        return self._decide(Verdict(False, self._rank, against))

    def _be_ready(self) -> Verdict:
        """Vote that this rank is ready; return what is decided."""
        standing = self._standing()
        if standing is not None:
            return standing
        voted = self._store.compare_set(self._keys + "set", "", self._warm_set).decode()
        if voted != self._warm_set:
            hint = "let all ranks read one store, and start them again"
            return self._refuse(Reason("agreement", "warm set", voted, self._warm_set, hint=hint))
        if self._store.add(f"{self._keys}vote/{self._rank}", 1) != 1:
            # Another start's votes may already have made the count, so what stands counts for nothing.
            hint = "give each start a rendezvous store of its own"
            stale = Reason("agreement", "vote", "an earlier start's", "this start's", "policy", hint)
            self._refuse(stale)
            return Verdict(False, self._rank, stale)
        ready = self._store.add(self._keys + "ready", 1)
        if ready == len(self._holders):
            return self._decide(Verdict(True, self._rank, warm_set=self._warm_set))
        pause_s = _FIRST_PAUSE_S
        while (standing := self._standing()) is None:
            if time.monotonic() + pause_s > self._waits_until_s:
                return self._refuse(self._nobody_came())
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, self.pause_s)
        return standing

    def _standing(self) -> Verdict | None:
        key = self._keys + "decision"
        return self._read(self._store.get(key)) if self._store.check([key]) else None

    def _decide(self, verdict: Verdict) -> Verdict:
        """Write a verdict unless one stands; return the one that stands."""
        if verdict.warm and (self._late or time.monotonic() > self.ends_s):
            # The store answered so late that this rank has been cold for a while.
            verdict = Verdict(False, self._rank, _silent(self._timeout_s))
        written = _written(verdict)
        stands = self._store.compare_set(self._keys + "decision", "", written)
        return verdict if stands == written.encode() else self._read(stands)

    def _read(self, data: bytes) -> Verdict:
        """Return a verdict as this rank has to take it: another rank's reason is told with that rank's name."""
        try:
            document = json.loads(data)
            by, warm_set = int(document["by"]), document["warm_set"]
            if document["verdict"] == "warm":
                if warm_set == self._warm_set:
                    return Verdict(True, by, warm_set=warm_set)
                hint = "let all ranks read one store, and start them again"
                reason = Reason("agreement", "warm set", warm_set, self._warm_set, hint=hint)
            else:
                reason = _told(by, document["reason"])
        except (ValueError, KeyError, TypeError) as error:
            text = f"{type(error).__name__}: {error}"
            hint = "run the same cachectl on all ranks"
            return Verdict(False, None, Reason("agreement", "verdict", text, kind="corrupt", hint=hint))
        return Verdict(False, by, reason)

    def _nobody_came(self) -> Reason:
        asked = self._holders[:_ASKED_AFTER]
        absent = [rank for rank in asked if not self._store.check([f"{self._keys}vote/{rank}"])]
        hint = f"start all ranks together, or raise {TIMEOUT_VARIABLE}"
        wanted = f"all ready in {self._timeout_s:.1f} s"
        return Reason("agreement", "time-out", f"ranks {absent} not ready", wanted, "policy", hint)


_ordinals: dict[str, int] = {}
_counting = threading.Lock()


def _keys(name: str, environ: Mapping[str, str]) -> str:
    """Return what a cached method's keys begin with; unlike that of any other of this process.

    A store is new with each rendezvous, but torchrun's (torch 2.13, elastic/rendezvous/dynamic_rendezvous.py) serves
    its restarts, too. Over several nodes its count of them can't be used: each node's agent counts its own.
    """
    with _counting:
        ordinal = _ordinals[name] = _ordinals.get(name, -1) + 1
    one_node = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_node else "0"
    return f"{_PREFIX}/{restart}/{name}/{ordinal}/"


def _holders(of_set: HandedSet | None, method: str) -> list[int]:
    """Return the ranks that have an entry of this method in the whole set."""
    members = of_set.members if of_set is not None else ()
    return sorted({member.rank for member in members if member.method == method})


def _written(verdict: Verdict) -> str:
    reason = verdict.reason
    return json.dumps(
        {
            "verdict": "warm" if verdict.warm else "cold",
            "by": verdict.by,
            "warm_set": verdict.warm_set,
            "reason": {
                "text": str(reason)[:_LIMIT_CHARACTERS],
                "kind": reason.kind,
                "hint": reason.hint[:_LIMIT_CHARACTERS],
            }
            if reason is not None
            else None,
        }
    )


def _told(by: int, document: Mapping[str, Any]) -> Reason:
    kind = document["kind"] if document["kind"] in KINDS else "semantic"
    return Reason("agreement", f"rank {by}", f"cold: {document['text']}", "warm", kind, str(document["hint"]))


def _lost(error: Exception) -> Reason:
    # What torch says of a lost connection goes on with its C++ stack.
    text = " ".join(f"{type(error).__name__}: {error}".split())[:_ERROR_CHARACTERS]
    hint = "see the log of the process that holds the rendezvous store, the first rank's or the launcher's"
    return Reason("agreement", "store", None, text, "absent", hint)


def _silent(timeout_s: float) -> Reason:
    hint = "see whether the process that holds the rendezvous store runs"
    return Reason("agreement", "store", None, f"no answer in {timeout_s:.1f} s", "absent", hint)
