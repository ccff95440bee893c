"""The cached method in the program's process: which case a call is, whether its entry still holds, warm or cold.

Owns the decision at each call. At the first call that looks like a handed-out case everything is compared again with
what this process sees: toolchain, device, options, the sources of the imported modules, the environment that model code
reads, and the guards (the proof); then the runtime loads the artifact. Every later call is compared with its case's
input spec before it is dispatched. What fits no case, or fails a check, is compiled by the runtime in a private folder,
and the reason is kept. Attributes that are changed after the proof are the program's duty.

Standard library only: torch comes in through the runtime adapter.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cachectl.boot.agreement import MethodAgreement, Patience
from cachectl.boot.cases import (
    UNGUARDED,
    CaseState,
    ColdCalls,
    Runtime,
    at_expected_folder,
    key_version_reasons,
    sets_in_order,
)
from cachectl.boot.handout import Handout
from cachectl.boot.proof import prove
from cachectl.boot.watch import StartWatch
from cachectl.identity.call_check import call_check
from cachectl.identity.environment import check_declared, check_environment
from cachectl.identity.inputs import bind_call, check_call
from cachectl.identity.ranks import check_ranks, find_ranks
from cachectl.identity.relations import check_relations, relations_of
from cachectl.identity.sources import check_modules
from cachectl.schemas.boot import Reason

__all__ = ["CachedMethod"]

# So many calls that fit no case are told why; a cold program must not pay for words at every step.
_EXPLAINED_CALLS = 8


class CachedMethod:
    """A drop-in for the runtime's cached method that loads only what holds.

    Deciding and compiling happen once, whichever threads ask; the calls are as safe as the runtime's own.

    With `observe` everything is checked and proved, and nothing is loaded. `on_first_call` is called after the first
    call of each case, and after the first cold one; it must not raise. With `prove_each_call` later calls are proved
    too, for a program whose own call was guarded each time.
    """

    def __init__(
        self,
        method: types.MethodType,
        handout: Handout,
        runtime: Runtime,
        *,
        dynamic: bool,
        options: Mapping[str, Any],
        new_cold_folder: Callable[[], Path],
        environ: Mapping[str, str] | None = None,
        observe: bool = False,
        on_first_call: Callable[[], None] | None = None,
        watch: StartWatch | None = None,
        new_recorder: Callable[[types.MethodType], ColdCalls] | None = None,
        patience: Patience | None = None,
        prove_each_call: bool = False,
    ) -> None:
        self.method = method
        self.handout = handout
        self.runtime = runtime
        self.dynamic = dynamic
        self.options = dict(options)
        self.environ = os.environ if environ is None else environ
        self.reasons: list[Reason] = list(handout.reasons)
        self.cold_calls = 0
        self.observed_calls = 0
        # While torch.compiler.set_stance barred compiled code.
        self.barred_calls = 0
        # Of the first call that fits no case, compiling included; a case keeps its own.
        self.seconds: dict[str, float] = {}
        self._observe = observe
        self._prove_each_call = prove_each_call
        self._on_first_call = on_first_call
        # Without one nothing is told: the watch of no hand-out is silent.
        self._watch = watch if watch is not None else StartWatch(Handout("unwatched", Path()))
        self._watch.using()
        self._new_recorder = new_recorder
        self._recorder = new_recorder(method) if new_recorder is not None else None
        self._patience = patience or Patience.of(None, self.environ)
        self.agreement = MethodAgreement(method, runtime, self._patience, self.environ, binding=not observe)
        self._signature = inspect.signature(method)
        self._explained = 0
        # The runtime's graphs that captured in first calls.
        self._graphs: set[int] = set()
        # Of several sets in the order in which they are tried; once a case of one holds, of this one only.
        self.cases = self._handed_cases()
        self._new_cold_folder = new_cold_folder
        self._cold: Callable[..., Any] | None = None
        # Reentrant: the proof reads the program's own objects, whose properties may call anything.
        self._deciding = threading.RLock()

    def _handed_cases(self) -> list[CaseState]:
        """Return the cases of this method that are this rank's; where there are none, say why in `reasons`."""
        handed = [
            CaseState(item, handed_set)
            for handed_set in sets_in_order(self.handout.sets, self.runtime, self.environ)
            for item in handed_set.entries
            # The path to the module inside the recipe's model is not known here: where several fit, the proof tells.
            if item.entry.method.rpartition(".")[2] == self.method.__name__
        ]
        ranks = find_ranks(self.environ, group=self.runtime.process_group()).ranks
        # A hand-out may be for all ranks of a node: another rank's artifact has another device and other groups in it.
        cases = [case for case in handed if ranks is None or case.handed.entry.rank in ranks]
        for case in cases:
            parts = case.handed.entry.parts
            case.relations = relations_of(parts["guards"], self._signature.parameters)
            case.fits = call_check(
                parts["inputs"],
                self._signature,
                lambda name: getattr(self.runtime.torch, name),
                case.relations,
                self.runtime.plain_tensor_types,
            )
        if handed and not cases:
            hint = "start as many ranks as the recipe's topology says"
            stored = sorted({case.handed.entry.rank for case in handed})
            self.reasons.append(Reason("topology", "rank", stored, list(ranks or ()), hint=hint))
        elif self.handout.outcome == "warm" and not cases:
            methods = sorted({item.entry.method for handed_set in self.handout.sets for item in handed_set.entries})
            hint = "add the method to the recipe and run: cachectl build"
            self.reasons.append(Reason("model", "method", methods, self.method.__name__, "absent", hint))
        return cases

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedMethod:
        """Return a cached method of the copied model that decides anew: nothing proved holds for another object."""
        return type(self)(
            copy.deepcopy(self.method, memo),
            self.handout,
            self.runtime,
            dynamic=self.dynamic,
            options=self.options,
            new_cold_folder=self._new_cold_folder,
            environ=self.environ,
            observe=self._observe,
            on_first_call=self._on_first_call,
            watch=self._watch,
            new_recorder=self._new_recorder,
            patience=self._patience,
            prove_each_call=self._prove_each_call,
        )

    @property
    def outcome(self) -> str:
        """`warm` once a loaded case ran and no call went cold, `cold` once one did, else `unused`.

        `inert` where what went cold had held and could not be loaded, `observed` where it held and was not to be;
        `degraded` where a graph captured more often than the runtime lets it, and runs eagerly since.
        """
        if self.cold_calls:
            return "cold"
        if any(case.inert for case in self.cases):
            return "inert"
        if self.observed_calls:
            return "observed"
        if any(case.calls for case in self.cases):
            return "degraded" if self._fell_back() else "warm"
        return "inert" if self.barred_calls else "unused"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method: through the loaded case that the call looks like, else through the runtime's own compile."""
        if stance := self.runtime.stance():
            if stance != UNGUARDED:
                return self._run_barred(stance, args, kwargs)
            begun = [case for case in self.cases if case.begun]
            # The program vouches for its calls; only of what kind one is has to be seen, where there are several.
            if len(begun) == 1 and begun[0].loaded is not None and not self.cold_calls:
                begun[0].calls += 1
                with self.runtime.call_context():
                    return begun[0].loaded(*args, **kwargs)
        for case in self.cases:
            if case.fits is not None:
                try:
                    fits = case.fits(*args, **kwargs)
                except (TypeError, AttributeError, RuntimeError):
                    continue  # Arguments of another kind, as a nested tensor: compared again below, in words.
                if fits:
                    return self._dispatch(case, args, kwargs)
        return self._call_slowly(args, kwargs)

    def _call_slowly(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compare in words: for cases without a generated check, and to explain the first calls that fit none."""
        against: list[Reason] = []
        if self._explained < _EXPLAINED_CALLS or any(case.fits is None for case in self.cases):
            try:
                arguments = bind_call(self._signature, args, kwargs)
            except TypeError:
                # The method's own complaint of its arguments, in Python's words; no call of it took place.
                return self.method(*args, **kwargs)
            for case in self.cases:
                different = check_call(
                    case.handed.entry.parts["inputs"], arguments, self.runtime.tensor_type, self.runtime.format_of
                ) or check_relations(case.relations, arguments)
                if not different:
                    return self._dispatch(case, args, kwargs)
                if not against or len(different) < len(against):
                    against = different
            self._explained += 1
        return self.run_cold(against, args, kwargs)

    def _dispatch(self, case: CaseState, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not case.begun:
            # The first call is within the lock too: a runtime captures one graph at a time.
            with self._deciding:
                case = case.instead or case
                if case not in self.cases:
                    # Another thread's first call settled on another set meanwhile.
                    return self(*args, **kwargs)
                if not case.decided:
                    case = self._decide(case, bind_call(self._signature, args, kwargs))
                if case.loaded is not None and not case.begun:
                    case.calls += 1
                    with self._survived(case), self._first_call(case.seconds), self.runtime.call_context():
                        case.ambient_holds = self.runtime.ambient_watch()
                        result = case.loaded(*args, **kwargs)
                    case.begun = True
                    return result
        if case.loaded is None:
            return self._run_unloaded(case, args, kwargs)
        # A stance is the program's word for its own calls.
        if self._prove_each_call and not self.runtime.stance():
            failed = self._safely(self._prove, case, bind_call(self._signature, args, kwargs))
            if failed:
                return self.run_cold(failed, args, kwargs)
        with self.runtime.call_context():
            against = [] if case.ambient_holds() else self._prove_ambient(case)
            if not against:
                case.calls += 1
                return case.loaded(*args, **kwargs)
        return self.run_cold(against, args, kwargs)

    def _prove_ambient(self, case: CaseState) -> Sequence[Reason]:
        """Hold the state around a later call against the sheet: what changed may be noise, as the thread count is."""
        sheet = {**case.handed.entry.parts["guards"], "nodes": [[[], {}]], "expressions": []}
        failed = prove(sheet, arguments={}, function=self.method.__func__, torch=self.runtime.torch).failed
        if not failed:
            case.ambient_holds = self.runtime.ambient_watch()
        return failed

    @contextmanager
    def _survived(self, case: CaseState) -> Iterator[None]:
        """Tell the node that the first call within came back; what raised may be what kills the next start, too."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            # Somebody interrupted it.
            self._watch.withdraw(case.handed)
            raise
        self._watch.success(case.handed)

    @contextmanager
    def _first_call(self, seconds: dict[str, float]) -> Iterator[None]:
        """Keep what the call within took, and how much of it the capture; then tell whoever keeps the report."""
        before, started = self.runtime.captures(), time.perf_counter()
        yield
        seconds["first_call"] = time.perf_counter() - started
        after = self.runtime.captures()
        if before is not None and after is not None:
            captured = after.since(before)
            seconds["capture"] = captured.seconds
            self._graphs |= captured.graphs
        if self._on_first_call is not None:
            self._on_first_call()

    def _fell_back(self) -> bool:
        """Say whether the runtime gave up replaying a graph of this method's, and keep why."""
        found = self.runtime.captures() if self._graphs else None
        if found is None or not found.fallen & self._graphs:
            return False
        hint = "the runtime runs it eagerly from here on: keep shapes and addresses, or build with a higher limit"
        options = [case.handed.entry.parts["options"].get("options") or {} for case in self.cases if case.begun]
        limit = next((found["capture_limit"] for found in options if "capture_limit" in found), None)
        reason = Reason("options", "capture_limit", limit, "more graph keys", hint=hint)
        if reason not in self.reasons:
            self.reasons.append(reason)
        return True

    def _decide(self, case: CaseState, arguments: Mapping[str, Any]) -> CaseState:
        """Decide a case at its first call; return it, or the same case of the first set that holds.

        The method's first case asks the other ranks. Where they said cold, no later case is looked at.
        """
        if self.agreement.against is not None:
            case.reasons, case.decided = (self.agreement.against,), True
            self._add_reasons(case.reasons)
            return case
        tried = []
        for candidate in self._alternatives(case, arguments):
            tried.append(candidate)
            started = time.perf_counter()
            candidate.reasons = tuple(self._safely(self._check, candidate, arguments))
            candidate.seconds["proof"] = time.perf_counter() - started
            if not candidate.reasons:
                break
        taken = case if tried[-1].reasons else tried[-1]
        if not taken.reasons:
            self._keep_to(taken, tried)
            # What the other sets lack is nobody's matter any more.
            tried = [taken]
            if not self._observe:
                self._load(taken)
        against = self.agreement.settle(
            None if taken.reasons else taken.of_set, taken.reasons, entry_method=taken.handed.entry.method
        )
        if against is not None and not taken.reasons:
            taken.loaded, taken.reasons = None, (against,)
            self._watch.withdraw(taken.handed)
        for candidate in tried:
            self._add_reasons(candidate.reasons)
            # Last: what another thread sees decided is whole.
            candidate.decided = True
        return taken

    def _alternatives(self, case: CaseState, arguments: Mapping[str, Any]) -> Iterator[CaseState]:
        """Yield a case, and the undecided ones that the same call fits of other sets, in the order of the sets.

        Of its own set those are among them that are a method of this name of another module: main and draft model can
        be of one class, with equal inputs.
        """
        yield case
        for other in self.cases:
            of_same_module = other.handed.entry.method == case.handed.entry.method
            if other is case or other.decided or (other.of_set is case.of_set and of_same_module):
                continue
            inputs = other.handed.entry.parts["inputs"]
            different = check_call(inputs, arguments, self.runtime.tensor_type, self.runtime.format_of)
            if not (different or check_relations(other.relations, arguments)):
                yield other

    def _keep_to(self, taken: CaseState, tried: Sequence[CaseState]) -> None:
        """Settle on the set of a case that holds: ranks of one job must not load entries of two sets."""
        for other in tried:
            if other is not taken:
                other.instead = taken
                taken.seconds["proof"] += other.seconds["proof"]
        # And the receiver is the module that the taken case is of.
        method = taken.handed.entry.method
        self.cases = [case for case in self.cases if case.of_set is taken.of_set and case.handed.entry.method == method]

    def _load(self, case: CaseState) -> None:
        started = time.perf_counter()
        self._watch.begin(case.handed)
        try:
            case.loaded = self.runtime.load(
                self.method,
                at_expected_folder(case, self.runtime, self.method, dynamic=self.dynamic, options=self.options),
            )
        except Exception as error:  # noqa: BLE001 - boot's broad handler; a loader that fails must not end the boot
            text = f"{type(error).__name__}: {error}"
            hint = "run: cachectl verify, and cachectl build --force where it finds nothing"
            case.reasons = (Reason("artifact", "load", text, kind="corrupt", hint=hint),)
            case.inert = True
        finally:
            if case.loaded is None:
                # Refused or interrupted: no death is to be counted for it.
                self._watch.withdraw(case.handed)
        case.seconds["load"] = time.perf_counter() - started

    def _safely(
        self,
        check: Callable[[CaseState, Mapping[str, Any]], list[Reason]],
        case: CaseState,
        arguments: Mapping[str, Any],
    ) -> list[Reason]:
        try:
            return check(case, arguments)
        except Exception as error:  # noqa: BLE001 - boot's broad handler; a check that fails must not end the program
            text = f"{type(error).__name__}: {error}"
            return [Reason("policy", "check", text, kind="corrupt", hint="please report this fault")]

    def _check(self, case: CaseState, arguments: Mapping[str, Any]) -> list[Reason]:
        """Return what stands against this entry in this process; the cheap checks first, the proof last."""
        parts = case.handed.entry.parts
        environment = parts["environment"]
        reasons = [
            *self._watch.refused(case.handed),
            *key_version_reasons(case.of_set.request),
            *self.runtime.process_reasons(case.of_set.request, self.options, self.dynamic),
            *self.runtime.found_reasons(parts["options"], self.options),
            *self._rank_reasons(parts["topology"]),
            *self.runtime.placed_reasons(parts["topology"], self.environ),
            *check_declared(environment["declared"], self.environ),
            *check_environment(environment, self.environ),
            *check_modules(parts["sources"], case.handed.document["raw_sources"], sys.modules, self.handout.roots),
        ]
        return reasons or self._prove(case, arguments)

    def _prove(self, case: CaseState, arguments: Mapping[str, Any]) -> list[Reason]:
        """Return what of the guard sheet does not hold for this call."""
        parts = case.handed.entry.parts
        with self.runtime.call_context():
            case.proof = prove(
                parts["guards"],
                arguments={self._self_name(): self.method.__self__, **arguments},
                function=self.method.__func__,
                torch=self.runtime.torch,
                prepared=case.prepared,
            )
        return list(case.proof.failed)

    def _rank_reasons(self, topology: Mapping[str, Any]) -> list[Reason]:
        """Compare an entry's rank and world with this process, whose process group may have come late."""
        here = find_ranks(self.environ, group=self.runtime.process_group())
        reasons = check_ranks(topology, here, process=True)
        if not reasons and here.ranks is not None and topology.get("rank") not in here.ranks:
            hint = "another rank's artifact is never loaded: make the cached method after init_process_group"
            return [Reason("topology", "rank", topology.get("rank"), list(here.ranks), hint=hint)]
        return reasons

    def _self_name(self) -> str:
        # Dynamo names the receiver as the method does, which need not be `self`.
        return self.method.__func__.__code__.co_varnames[0]

    def _add_reasons(self, against: Iterable[Reason]) -> None:
        for reason in against:
            if reason not in self.reasons:
                self.reasons.append(reason)

    def _run_unloaded(self, case: CaseState, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call that fits a case which is not loaded: refused, not loadable, or only observed."""
        if not case.reasons:
            self.observed_calls += 1
        elif not case.inert:
            self.cold_calls += 1
        return self._run_compiled(case.seconds, args, kwargs)

    def run_cold(self, against: Sequence[Reason], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call through the runtime's own compile, for these reasons."""
        self.cold_calls += 1
        self._add_reasons(against)
        self._tell_cold(against or self.reasons)
        return self._run_compiled(self.seconds, args, kwargs)

    def _run_barred(self, stance: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call while a setting of the program's bars compiled code: as the runtime's own does, not as cold."""
        self.barred_calls += 1
        hint = "a call within torch.compiler.set_stance runs as that says: nothing handed out is loaded"
        against = [Reason("policy", "torch.compiler.set_stance", "default", stance, "policy", hint)]
        self._add_reasons(against)
        self._tell_cold(against)
        return self._run_watched(self._compiled_cold(), self.seconds, args, kwargs)

    def _tell_cold(self, against: Iterable[Reason]) -> None:
        """Say to the other ranks that this one's first call goes cold."""
        if not self.agreement.over:
            with self._deciding:
                self.agreement.settle(None, against)

    def _run_compiled(self, seconds: dict[str, float], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        compiled = self._recorder.compiled(args, kwargs) if self._recorder is not None else None
        if compiled is None:
            compiled = self._compiled_cold()
        return self._run_watched(compiled, seconds, args, kwargs)

    def _run_watched(
        self,
        compiled: Callable[..., Any],
        seconds: dict[str, float],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if "first_call" in seconds:
            return compiled(*args, **kwargs)
        with self._deciding, self._first_call(seconds):
            result = compiled(*args, **kwargs)
        self._watch.cold()
        return result

    def _compiled_cold(self) -> Callable[..., Any]:
        if self._cold is None:
            with self._deciding:
                if self._cold is None:
                    self._cold = self.runtime.compile(
                        self.method, dynamic=self.dynamic, options=self.options, cache_dir=self._new_cold_folder()
                    )
        return self._cold
