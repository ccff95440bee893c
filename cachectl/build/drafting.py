"""Records a program's cold calls in its own process, around the runtime's own compile.

Owns what `exec --record` does in there: each call of a new kind is compiled in a folder of its own, what a build's rank
process records of a compile is recorded, and artifact and findings are left as a draft for exec, which proves and
publishes them when the program has ended. The program's values are not touched: it runs no step more than it asked for.

Nothing of ours is raised into the program, and nothing of ours decides what it computes: whatever fails here, the call
has been answered by what the runtime compiled. Imports torch through the recorders only; it is the program's own.
"""

from __future__ import annotations

import importlib
import inspect
import os
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachectl.boot.report import say
from cachectl.build.call_drafts import leave_draft, refusal, sayable_environment
from cachectl.build.job import CaseJob, Job
from cachectl.build.recorder import CompileRecorder, extra_files, own_functions
from cachectl.errors import CachectlError, DocumentError
from cachectl.identity.call_check import call_check
from cachectl.identity.environment import check_declared, starting_environment
from cachectl.identity.inputs import InputError, bind_call, check_call, describe_call
from cachectl.identity.ranks import check_ranks, find_ranks
from cachectl.identity.relations import check_relations, relations_of
from cachectl.identity.request import source_roots
from cachectl.schemas.boot import Reason

__all__ = ["CallRecorder"]

# So many kinds of call of one method are recorded, each a compile of its own; a recipe has that many cases seldom.
_KINDS = 32
# exec makes the job while the program imports torch; the first compile is seldom faster than that.
_JOB_WAIT_S, _JOB_PAUSE_S = 60.0, 0.05
# Dynamo is watched by wrapping its own functions: one compile at a time.
_recording = threading.Lock()


class _RefusedError(Exception):
    """Nothing of a call is kept, for this reason; never leaves this module."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True)
class _Known:
    """One kind of call: what runs it, and whether another call is of that kind."""

    compiled: Callable[..., Any]
    fits: Callable[..., bool]


class CallRecorder:
    """Records the cold calls of one method; see cachectl.boot.instrument.ColdCalls.

    Args:
        method: the program's bound method.
        runtime: the adapter it is compiled through.
        dynamic: as compiled.
        options: as compiled.
        new_cold_folder: makes the private folder of one compile.
        folder: the record folder.
    """

    def __init__(
        self,
        method: types.MethodType,
        runtime: Any,
        *,
        dynamic: bool,
        options: Mapping[str, Any],
        new_cold_folder: Callable[[], Path],
        folder: Path,
    ) -> None:
        self._method = method
        self._runtime = runtime
        self._dynamic = dynamic
        self._options = dict(options)
        self._new_cold_folder = new_cold_folder
        self._folder = folder
        self._signature = inspect.signature(method)
        self._known: list[_Known] = []
        # What was compiled when recording failed: from then on it answers whatever is not known.
        self._last: Callable[..., Any] | None = None
        self._told: set[str] = set()

    def compiled(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
        """Return what runs this cold call, recording it if it is the first of its kind; None to run it as ever."""
        known = self._find(args, kwargs)
        if known is not None or self._last is not None or len(self._known) >= _KINDS:
            return known or self._last
        try:
            arguments = bind_call(self._signature, args, kwargs)
            spec = describe_call(arguments, self._runtime.tensor_type, self._runtime.format_of)
            cache_dir = self._new_cold_folder()
            compiled = self._runtime.compile(
                self._method, dynamic=self._dynamic, options=self._options, cache_dir=cache_dir
            )
        except TypeError:
            return None  # The method's own complaint of its arguments, which the call itself makes.
        except InputError as error:
            hint = "pass tensors, numbers, strings or containers of them"
            self._refuse(Reason("inputs", error.place, None, error.kind, hint=hint))
            return None
        except Exception as error:  # noqa: BLE001 - what is ours must not end the program
            self._refuse(_fault(error))
            return None

        def first(*args: Any, **kwargs: Any) -> Any:
            # Another thread may have made the first call of this kind meanwhile.
            known = self._find(args, kwargs)
            return known(*args, **kwargs) if known else self._record(compiled, cache_dir, spec, args, kwargs)

        return first

    def _find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
        for known in self._known:
            try:
                if known.fits(*args, **kwargs):
                    return known.compiled
            except (TypeError, AttributeError, RuntimeError):
                continue  # Arguments of another kind.
        return None

    def _record(
        self,
        compiled: Callable[..., Any],
        cache_dir: Path,
        spec: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run the first call of its kind while it is watched; what it returns and raises is the program's."""
        if not _recording.acquire(blocking=False):
            self._refuse(Reason("policy", "record", kind="policy", hint="another thread was compiling: run it again"))
            self._known.append(_Known(compiled, self._fits(spec, {})))
            return compiled(*args, **kwargs)
        try:
            try:
                recorder = CompileRecorder(self._runtime, self._method, self._options, keep_warnings=False)
                recorder.__enter__()
            except Exception as error:  # noqa: BLE001 - what is ours must not end the program
                self._give_up(compiled, _fault(error))
                return compiled(*args, **kwargs)
            started = time.perf_counter()
            try:
                with _only_new_code():
                    result = compiled(*args, **kwargs)
            finally:
                recorder.__exit__(None, None, None)
            self._keep(compiled, cache_dir, spec, recorder, time.perf_counter() - started)
            return result
        finally:
            _recording.release()

    def _keep(
        self,
        compiled: Callable[..., Any],
        cache_dir: Path,
        spec: Mapping[str, Any],
        recorder: CompileRecorder,
        cold_s: float,
    ) -> None:
        """Leave the draft of a call that came back, or say why there is none."""
        try:
            label = CaseJob(-1, self._method.__name__, {"name": "cold call"})
            artifact, summary = recorder.check_artifact(label, cache_dir)
            kept = recorder.kept(label, spec, summary.ops, dynamic=self._dynamic)
            job = self._job()
            document = {
                "method": self._method.__name__,
                "rank": self._rank(job),
                "sources": self._sources(job, recorder),
                "inputs": kept.inputs,
                "found": kept.found,
                "placed": self._runtime.placed(artifact / "compiled_module", (), recorder.environ),
                "guards": kept.sheet,
                "environ": sayable_environment(recorder.environ),
                "started": sayable_environment(starting_environment(os.environ)),
                "variables": sorted(kept.variables),
                "hash_seed": os.environ.get("PYTHONHASHSEED"),
                "runtime": self._runtime.name,
                "runtime_path": artifact.relative_to(os.path.realpath(cache_dir)).as_posix(),
                "guard_count": kept.guard_count,
                "cold_seconds": cold_s,
                "warnings": kept.warnings,
            }
            leave_draft(self._folder, document, artifact)
            self._known.append(_Known(compiled, self._fits(kept.inputs, kept.sheet)))
        except _RefusedError as error:
            self._give_up(compiled, error.reason)
        except Exception as error:  # noqa: BLE001 - what is ours must not end the program
            self._give_up(compiled, _fault(error))

    def _job(self) -> Job:
        """Return what exec makes while the program starts, waiting for it at most that long."""
        deadline_s = time.monotonic() + _JOB_WAIT_S
        path = self._folder / "job.json"
        while not path.exists():
            if (reason := refusal(self._folder)) is not None:
                raise _RefusedError(reason)
            if time.monotonic() > deadline_s:
                raise DocumentError(f"{path} is not there after {_JOB_WAIT_S:g} s", hint="run: cachectl build RECIPE")
            time.sleep(_JOB_PAUSE_S)
        return Job.read(path)

    def _rank(self, job: Job) -> int:
        """Return this process's rank, if the process is what the request is about."""
        environ = os.environ
        here = find_ranks(environ, group=self._runtime.process_group())
        declared = {function["method"].rpartition(".")[2] for function in job.recipe["functions"]}
        against = [
            *self._runtime.process_reasons(job.request, self._options, self._dynamic),
            *check_declared(job.request["environment"], environ),
            *check_ranks(job.request["topology"], here, process=True),
        ]
        if self._method.__name__ not in declared:
            hint = "add the method to the recipe"
            against = [Reason("model", "method", sorted(declared), self._method.__name__, "absent", hint)]
        if against:
            raise _RefusedError(against[0])
        if here.ranks is not None and len(here.ranks) == 1:
            return here.ranks[0]
        if job.world_size > 1:
            hint = "start one process a rank"
            raise _RefusedError(Reason("topology", "rank", None, list(here.ranks or ()), hint=hint))
        return 0

    def _sources(self, job: Job, recorder: CompileRecorder) -> dict[str, Any]:
        """Return the part `sources` and its raw table for each inputs function that a case of the method has."""
        roots = source_roots(job.recipe_folder, job.roots)
        options = job.recipe["compile"]["options"]
        code = [name for name in self._runtime.code_options() if options.get(name) is not None]
        files = extra_files(job.recipe, job.recipe_folder)
        found = {}
        for function in job.recipe["functions"]:
            for case in function["cases"]:
                if function["method"].rpartition(".")[2] == self._method.__name__ and case["inputs"] not in found:
                    own = own_functions(job.recipe, case["inputs"], code)
                    document, raw = recorder.sources.document(roots, (), files, asked=own)
                    found[case["inputs"]] = {"document": document, "raw": raw}
        return found

    def _fits(self, inputs: Mapping[str, Any], sheet: Mapping[str, Any]) -> Callable[..., bool]:
        """Return what says whether a call is of this kind; a wrong yes costs a compile, no wrong value."""
        runtime, relations = self._runtime, relations_of(sheet, self._signature.parameters)
        quick = call_check(
            inputs,
            self._signature,
            lambda name: getattr(runtime.torch, name),
            relations,
            runtime.plain_tensor_types,
        )
        if quick is not None:
            return quick

        def slow(*args: Any, **kwargs: Any) -> bool:
            arguments = bind_call(self._signature, args, kwargs)
            different = check_call(inputs, arguments, runtime.tensor_type, runtime.format_of)
            return not different and not check_relations(relations, arguments)

        return slow

    def _give_up(self, compiled: Callable[..., Any], reason: Reason) -> None:
        """Record nothing more of this method: what was compiled last answers what is not known."""
        self._last = compiled
        self._refuse(reason)

    def _refuse(self, reason: Reason) -> None:
        """Leave the reason for exec's report, and say it once."""
        if str(reason) in self._told:
            return
        self._told.add(str(reason))
        document = {"method": self._method.__name__, "rank": 0, "refused": reason.to_json()}
        try:
            leave_draft(self._folder, document)
        except (OSError, TypeError, ValueError) as error:
            say(f"{self._method.__name__} is not recorded: {reason} ({error})")


_AHEAD = "build ahead instead: cachectl build RECIPE"


def _fault(error: Exception) -> Reason:
    hint = str(getattr(error, "hint", None) or _AHEAD).replace("see the rank's log", _AHEAD)
    text = error.message if isinstance(error, CachectlError) else f"{type(error).__name__}: {error}"
    return Reason("policy", "record", None, " ".join(text.split())[:1000], "policy", hint)


@contextmanager
def _only_new_code() -> Iterator[None]:
    """Let the runtime see the code that Dynamo makes from now on, and none that it made of the method before.

    Its watcher looks through all of it after each call, takes the first for what it has just compiled, and saves an
    earlier case's code with this case's graph (torch_npu 2.13.0: ModelCacheWatcher.__exit__). A build forgets all of
    it; a program's may still be in use, and Dynamo itself asks the map for the code of every entry that it holds. So
    the map stays as it is, and only the name by which the watcher finds it stands for a view.
    """
    utils: Any = importlib.import_module("torch._dynamo.utils")
    whole: Any = getattr(utils, "orig_code_map", None)
    if not hasattr(whole, "values") or not hasattr(whole, "refs"):
        yield  # The runtime knows no other place to look, and saves nothing.
        return
    # Held, so that no new code gets the number of one that went meanwhile.
    alive = [reference() for reference in list(whole.refs.values())]
    before = {id(code) for code in alive}

    class Since:
        @property
        def values(self) -> dict[int, Any]:
            return {made: code for made, code in list(whole.values.items()) if made not in before}

    utils.orig_code_map = Since()
    try:
        yield
    finally:
        utils.orig_code_map = whole
