"""The calls a program makes, or exec makes for it: start warm if it can, and compile a method through the hand-out.

Owns the joining of hook, runtime adapter and cached method in the program's process, and the one start that a process
under exec has. Imports the standard library and ours only; torch is looked up when a method is compiled, and is the
program's own.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cachectl.boot.agreement import Patience
from cachectl.boot.bounded import in_thread, own_deadline
from cachectl.boot.cases import ColdCalls
from cachectl.boot.handout import HANDOUT_VARIABLE, Handout
from cachectl.boot.hook import DEFAULT_DEADLINE_S, HookOptions, run_hook
from cachectl.boot.instrument import CachedMethod
from cachectl.boot.materialize import DeadlineError
from cachectl.boot.report import EXEC_VARIABLE, ExecNote, overall
from cachectl.boot.warmdir import WarmDir, choose_warm_dir
from cachectl.boot.watch import StartWatch
from cachectl.errors import ConfigError, DocumentError
from cachectl.identity.ranks import ranks_here
from cachectl.schemas.boot import Reason

__all__ = ["WarmStart", "add_method", "cache_compile", "cold_folder", "process_start", "warm_start"]


@dataclass
class WarmStart:
    """What a start was handed, and what became of it. `outcome` changes as methods are called for the first time."""

    handout: Handout
    warm_dir: str | None = None
    methods: list[CachedMethod] = field(default_factory=list)
    # Why a method of the program was left to the runtime: nothing that could be proved.
    uncovered: list[Reason] = field(default_factory=list)
    # Compiles with other runtimes, told and counted for nothing.
    foreign: list[Reason] = field(default_factory=list)
    # What exec left for this process; None where the program itself starts warm.
    note: ExecNote | None = None
    import_seconds: float | None = None
    # How long its methods may wait for other ranks, all together; made with the first of them.
    patience: Patience | None = None
    # In an environment that a hook handed out, without exec: nobody but the process itself can say why it is cold.
    speaks: bool = False
    # What this process tells the node of how it fares; None where nothing was handed out.
    watch: StartWatch | None = None

    def __post_init__(self) -> None:
        """Claim the hand-out for as long as this process lives; one that is being removed is a cold start."""
        if self.handout.outcome != "warm":
            return
        exec_id = self.note.folder.name if self.note is not None else None
        self.watch = StartWatch(self.handout, exec_id=exec_id, ranks=ranks_here(os.environ))
        atexit.register(self.watch.end)
        reasons = (*self.handout.reasons, *self.watch.problems)
        self.handout = replace(self.handout, reasons=reasons)
        if self.watch.against is not None:
            seconds = self.handout.seconds
            self.handout = Handout(
                "cold", self.handout.recipe_path, reasons=(*reasons, self.watch.against), seconds=seconds
            )

    @property
    def outcome(self) -> str:
        """`warm` while nothing went cold; `unused` when no method was called yet; else what the worst method says."""
        if self.handout.outcome != "warm":
            return self.handout.outcome
        return "cold" if self.uncovered else overall(method.outcome for method in self.methods)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why anything went cold, in the order it was found, each once."""
        found = dict.fromkeys(str(reason) for reason in self.handout.reasons)
        reasons = list(self.handout.reasons)
        for against in (self.uncovered, *(method.reasons for method in self.methods), self.foreign):
            for reason in against:
                if str(reason) not in found:
                    found[str(reason)] = None
                    reasons.append(reason)
        return tuple(reasons)

    def report(self) -> dict[str, Any]:
        """Return the hook's document with what the process found: outcome, reasons, proofs and seconds by stage.

        Of the stages `capture` lies within `first_call`; both, and `import`, are None where nobody measured them.
        """
        stages: dict[str, float | None] = {
            "import": self.import_seconds,
            "hook": self.handout.seconds.total,
            "proof": 0.0,
            "load": 0.0,
            "capture": None,
            "first_call": 0.0,
        }
        proofs = []
        for method in self.methods:
            for seconds in (method.seconds, *(case.seconds for case in method.cases)):
                for name, value in seconds.items():
                    stages[name] = (stages[name] or 0.0) + value
            proofs += [
                {
                    "key": case.handed.entry.key,
                    "rank": case.handed.entry.rank,
                    "guards": case.proof.guards if case.proof is not None else 0,
                    "failed": [str(reason) for reason in case.reasons],
                    "seconds": case.seconds.get("proof", 0.0),
                }
                for case in method.cases
                if case.decided
            ]
        return {
            **self.handout.report(),
            "outcome": self.outcome,
            "reasons": [reason.to_json() for reason in (*self.reasons, *self._uncalled())],
            "proofs": proofs,
            "agreement": [told for told in (method.agreement.report() for method in self.methods) if told] or None,
            "stages": stages,
        }

    def _rank(self) -> int | None:
        """This process's rank, as the launcher says, else as its process group does; None where neither is there."""
        ranks = ranks_here(os.environ)
        groups = (method.runtime.process_group() for method in self.methods)
        return ranks[0] if ranks else next((group[0] for group in groups if group is not None), None)

    def _uncalled(self) -> Iterable[Reason]:
        """Yield what was handed out and not used by anything: one reason a method, or one for all."""
        if self.outcome != "unused":
            return
        hint = "call what cache_compile returned, not the method itself"
        for method in self.methods:
            yield Reason("policy", f"{method.method.__name__} was not called", kind="absent", hint=hint)
        if not self.methods:
            hint = "let the program call cache_compile; for a full-graph torch.compile run: cachectl exec --lift"
            yield Reason("policy", "cache_compile", kind="absent", hint=hint)

    def note_down(self) -> None:
        """Leave this process's part of the report where exec looks for it; never raises.

        In an environment that a hook handed out there is no exec: the first cold call is told on stderr, in one line.
        """
        if self.note is not None:
            self.note.add(self.report(), rank=self._rank())
        elif self.speaks and self.outcome in ("cold", "inert"):
            self.speaks = False
            _say_cold(self.outcome, self.reasons)


def _say_cold(outcome: str, reasons: Sequence[Reason]) -> None:
    told = f"{reasons[0]}; {reasons[0].hint}" if reasons else "for no reason that is known"
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    try:
        os.write(2, f"cachectl: {outcome}{more}: {' '.join(told.split())}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        pass  # Nobody listens.


_starts: dict[str, WarmStart] = {}
_starting = threading.Lock()


def process_start() -> WarmStart | None:
    """Return the one start of a process that exec or a hook's hand-out stands behind; None where there is neither.

    Raises:
        DocumentError: what exec left can't be read.
    """
    folder, left = os.environ.get(EXEC_VARIABLE), os.environ.get(HANDOUT_VARIABLE)
    with _starting:
        where = folder or left
        if not where:
            return None
        if where not in _starts:
            if not folder:
                _starts[where] = WarmStart(_left_by_hook(Path(where)), speaks=True)
            else:
                note = ExecNote.read(Path(folder))
                _starts[where] = start = WarmStart(note.handout(left), note.warm_dir, note=note)
                atexit.register(start.note_down)
        return _starts[where]


def _left_by_hook(path: Path, recipe: Path = Path()) -> Handout:
    try:
        return Handout.read(path)
    except DocumentError as error:
        hint = "run the hook as this user, or unset CACHECTL_HANDOUT"
        reason = Reason("store", "hand-out", error.message, kind="corrupt", hint=hint)
        return Handout("cold", recipe, reasons=(reason,))


def warm_start(
    recipe: str | os.PathLike[str],
    *,
    store: str | None = None,
    warm_dir: str | None = None,
    rank: int | None = None,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> WarmStart:
    """Run the hook for a recipe and return its result; never raises.

    A hand-out that a hook made before this process started (CACHECTL_HANDOUT) is taken instead of a second one; under
    exec of the same recipe it is exec's own start, which its report is about.

    Args:
        recipe: path of the recipe file.
        store: the store; None for CACHECTL_STORE or the default.
        warm_dir: where to lay the private copy; None for the contract's defaults.
        rank: this process's global rank; None for the environment's.
        deadline_s: cold when not done by then, seconds.
    """
    if os.environ.get("CACHECTL_DISABLE") == "1":
        return WarmStart(Handout("disabled", Path(recipe)))
    try:
        path = Path(os.path.abspath(recipe))
    except OSError:
        path = Path(recipe)  # The working folder is gone; the hook says so.
    if os.environ.get(EXEC_VARIABLE):
        try:
            start = process_start()
        except DocumentError:
            start = None  # As without exec.
        if start is not None and start.handout.recipe_path == path:
            return start
    left = os.environ.get(HANDOUT_VARIABLE)
    if left:
        handed = _left_by_hook(Path(left), path)
        if handed.recipe_path == path:
            return WarmStart(handed, warm_dir)
    options = HookOptions(
        recipe=os.fspath(recipe),
        store=store,
        warm_dir=warm_dir,
        rank=rank,
        deadline_s=own_deadline(deadline_s),
        quiet=True,
    )
    try:
        return WarmStart(in_thread(lambda: run_hook(options), deadline_s), warm_dir)
    except RuntimeError:
        # No thread to be had, as at a container's pid limit: better unbounded than not at all.
        return WarmStart(run_hook(options), warm_dir)
    except DeadlineError as error:
        reason = Reason("policy", "deadline", error.message, kind="policy", hint=error.hint or "")
        return WarmStart(Handout("cold", path, reasons=(reason,)), warm_dir)


def cache_compile(
    method: types.MethodType,
    *,
    warm: WarmStart,
    dynamic: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return a cached method that loads what was handed out where it holds, and compiles through the runtime where not.

    A drop-in for `torch.npu.npugraph_ex.inference.cache_compile`, with several cases of one method through one object.
    A cold call compiles in a private folder: no cache directory of the program's is read or written.

    Args:
        method: bound method of a torch.nn.Module.
        warm: from `warm_start`.
        dynamic: as for the runtime, whose default is True; has to be the recipe's.
        options: as for the runtime; have to mean what the recipe's mean.

    Raises:
        EnvironmentFault: torch_npu can't be imported or has no npugraph_ex.
        ConfigError: an option this torch_npu does not have, or no bound method of a module.
    """
    from cachectl.runtimes.npugraph_ex import NpuGraphEx

    runtime = NpuGraphEx()
    receiver: object = getattr(method, "__self__", None)
    if not hasattr(method, "__func__") or not isinstance(receiver, runtime.torch.nn.Module):
        raise ConfigError(
            f"cache_compile was given a {type(method).__name__}, which the runtime can't cache",
            hint="pass a bound method of a torch.nn.Module, as model.main_decode",
        )
    runtime.effective_options(options or {})
    if warm.handout.outcome == "disabled":
        compiled: Callable[..., Any] = runtime.torch.npu.npugraph_ex.inference.cache_compile(
            method, dynamic=dynamic, options=dict(options or {})
        )
        return compiled
    return add_method(warm, method, runtime, dynamic=dynamic, options=options or {})


def add_method(
    warm: WarmStart,
    method: types.MethodType,
    runtime: Any,
    *,
    dynamic: bool,
    options: Mapping[str, Any],
    new_cold_folder: Callable[[], Path] | None = None,
    recorded_by: Any = None,
    prove_each_call: bool = False,
) -> CachedMethod:
    """Return the cached method of one start, compiling through this adapter where it goes cold.

    Args:
        warm: the start.
        method: the program's bound method.
        runtime: the adapter.
        dynamic: as the program compiles.
        options: as the program compiles.
        new_cold_folder: makes the folder of a cold compile; None for a private one that goes with the process.
        recorded_by: the adapter through which `exec --record` compiles; None for the same.
        prove_each_call: whether later calls are proved too.
    """
    if warm.patience is None:
        warm.patience = Patience.of(warm.handout.left_s, os.environ)
    cached = CachedMethod(
        method,
        warm.handout,
        runtime,
        dynamic=dynamic,
        options=options,
        new_cold_folder=new_cold_folder or (lambda: cold_folder(warm.warm_dir)),
        observe=warm.note is not None and warm.note.observe,
        on_first_call=warm.note_down,
        watch=warm.watch,
        new_recorder=_recorder(warm, recorded_by or runtime, dynamic=dynamic, options=options),
        patience=warm.patience,
        prove_each_call=prove_each_call,
    )
    warm.methods.append(cached)
    return cached


def _recorder(
    warm: WarmStart, runtime: Any, *, dynamic: bool, options: Mapping[str, Any]
) -> Callable[[types.MethodType], ColdCalls] | None:
    """Return what makes a method's recorder; None where exec was not asked to record."""
    if warm.note is None or not warm.note.record:
        return None
    from cachectl.build.call_drafts import record_folder
    from cachectl.build.drafting import CallRecorder

    folder = record_folder(warm.note.folder)
    return lambda method: CallRecorder(
        method,
        runtime,
        dynamic=dynamic,
        options=options,
        new_cold_folder=lambda: cold_folder(warm.warm_dir),
        folder=folder,
    )


# A graph and its kernels need less; a folder without this much room would fail in the first call, when it is saved.
_ROOM_BYTES = 64 << 20


def cold_folder(asked: str | None) -> Path:
    """Make a private folder for a cold compile; it goes with the process. Raises OSError where there is no room."""
    chosen = choose_warm_dir(asked, os.environ)
    folder = None
    if isinstance(chosen, WarmDir) and _has_room(chosen.root):
        try:
            folder = chosen.new_cold()
        except OSError:
            pass  # Out of inodes, or made read-only since: the folder for temporary files serves as well.
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="cachectl-cold."))
    atexit.register(_forget, folder, os.getpid())
    return folder


def _has_room(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free >= _ROOM_BYTES
    except OSError:
        return False


def _forget(folder: Path, pid: int) -> None:
    # A child that was forked has its parent's exit handlers, and its parent still uses the folder.
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
