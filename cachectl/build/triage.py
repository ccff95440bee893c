"""A rank's part of `cachectl triage`: one stage of the ladder for one case, in a fresh process.

Owns what each stage runs; what is found is words and numbers, never values of the model's. A stage that fails is no
failure of the process: its document says so. In a world of several ranks the process ends all the same, since the
others may wait for it in a collective, and the document stands in a file of its own. Rank processes only: imports
torch.
"""

from __future__ import annotations

import difflib
import importlib
import json
import shutil
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cachectl.build.job import CaseJob, EventLog, Job, write_json
from cachectl.build.program import RankProgram
from cachectl.build.reloading import reload_case
from cachectl.build.triage_compiled import Compiled, compiled_findings, run_compiled
from cachectl.build.triage_eager import eager_findings
from cachectl.build.triage_files import INERT_ADVICE, SETTINGS, identity_file, stage_file
from cachectl.build.triage_options import options_off, restore_options
from cachectl.build.triage_reasons import finding, one_line, refusal_kind, runtime_notes
from cachectl.build.triage_steps import Run, Steps
from cachectl.errors import BuildError, CachectlError

__all__ = ["run_stage"]

_CPU_ONLY = "an NPU has no aot_eager: this stage ran on the CPU"


def run_stage(phase: str, program: RankProgram, job: Job, case: CaseJob, events: EventLog) -> dict[str, Any]:
    """Run one stage of a case; return its document: verdict, findings, notes.

    Raises:
        BuildError: in a world of several ranks, a stage that an exception ended.
        ConfigError: the recipe's inputs.
    """
    name = phase.removeprefix("triage-")
    events.phase(case, name)
    stage = _Stage(program, job, case, events)
    document = stage.run(name)
    write_json(stage_file(job, program.rank, phase, case), document)
    if stage.ended and job.world_size > 1:
        raise BuildError(document["findings"][0]["what"], hint=document["findings"][0]["next"])
    return document


class _Stage:
    """One case in this process. `ended`: an exception left the step half done, and peers may wait."""

    def __init__(self, program: RankProgram, job: Job, case: CaseJob, events: EventLog) -> None:
        self.program, self.job, self.case, self.events = program, job, case, events
        self.settings = json.loads((job.workspace / SETTINGS).read_bytes())
        self.ended = False
        self.notes: list[str] = []
        self._named = f"{case.method} [{case.name}]"

    def run(self, name: str) -> dict[str, Any]:
        stages: dict[str, Callable[[], tuple[str, list[dict[str, Any]]]]] = {
            "eager": self._eager,
            "aot_eager": self._aot_eager,
            "force_eager": self._force_eager,
            "npugraph_ex": self._npugraph_ex,
            "options": self._options,
            "cache": self._cache,
        }
        verdict, findings = stages[name]()
        return {"verdict": verdict, "findings": findings, "notes": self.notes}

    def _steps(self, *, on_cpu: bool = False) -> tuple[Steps, Run]:
        """Return the steps and an eager run of them; lengths that the model can't take as they grow stay."""
        steps = Steps(self.program, self.case, int(self.settings["steps"]), on_cpu=on_cpu)
        run = steps.run(steps.method)
        if run.error is not None and run.outputs and steps.growing:
            steps.stop_growing()
            self.notes.append(f"{self._named}: lengths stay as the recipe gives them: {_said(run.error)}")
            run = steps.run(steps.method)
        return steps, run

    def _eager(self) -> tuple[str, list[dict[str, Any]]]:
        steps, run = self._steps()
        self._note_steps(steps)
        found = eager_findings(steps, run, self.program.roots, dynamic=self.program.dynamic)
        self._log(run.error)
        self.ended = run.error is not None
        return ("failed" if found else "ok"), found

    def _note_steps(self, steps: Steps) -> None:
        how = "from inputs(step=…)" if steps.takes_step else "in another order"
        if steps.growing:
            how += f", {', '.join(steps.growing)} one more a step"
        self.notes.append(f"{self._named}: {steps.count} calls on one state, other values {how}")

    def _aot_eager(self) -> tuple[str, list[dict[str, Any]]]:
        self.notes.append(_CPU_ONLY)
        if self._is_on_device():
            try:
                _to_cpu(self.program.model)
            except (RuntimeError, NotImplementedError) as error:
                return self._skipped(f"the model can't be moved to the CPU: {_said(error)}")
        steps, eager = self._steps(on_cpu=True)
        if eager.error is not None:
            self._log(eager.error)
            return self._skipped(f"the method doesn't run on the CPU: {_said(eager.error)}")
        return self._judged("aot_eager", steps, eager, run_compiled(steps, lambda: self._compiled(steps, "aot_eager")))

    def _skipped(self, why: str) -> tuple[str, list[dict[str, Any]]]:
        return "skipped", [finding("skipped", why, "Dynamo's part is seen in the next stage")]

    def _is_on_device(self) -> bool:
        inputs = self.program.inputs(self.case)
        return any(tensor.device.type != "cpu" for tensor in _tensors(self.program.model, inputs))

    def _force_eager(self) -> tuple[str, list[dict[str, Any]]]:
        options = {**options_off(self.program.runtime.effective_options({})), "force_eager": True}
        self.notes.append("options: force_eager on, every other one off")
        return self._with_options("force_eager", options)

    def _npugraph_ex(self) -> tuple[str, list[dict[str, Any]]]:
        identity = _cache_identity(self.program, self.case)
        write_json(identity_file(self.job.workspace, self.program.rank, self.case), identity)
        return self._with_options("npugraph_ex", self.program.options)

    def _with_options(self, name: str, options: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
        steps, eager = self._steps()
        if eager.error is not None:
            # It ran in the first stage: two processes differ.
            self.ended = True
            self._log(eager.error)
            what = f"eager ran before and now raises {_said(eager.error)}"
            return "failed", [finding("not-repeatable", what, "see the rank's log")]
        compiled = run_compiled(steps, lambda: self._compiled(steps, "npugraph_ex", options))
        return self._judged(name, steps, eager, compiled)

    def _compiled(self, steps: Steps, backend: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        named = {"options": dict(options)} if options is not None else {}
        compiled: Callable[..., Any] = torch.compile(
            steps.method, backend=backend, fullgraph=True, dynamic=self.program.dynamic, **named
        )
        return compiled

    def _judged(self, name: str, steps: Steps, eager: Run, compiled: Compiled) -> tuple[str, list[dict[str, Any]]]:
        self._log(compiled.run.error)
        self.ended = compiled.run.error is not None
        return compiled_findings(
            name, steps, self.case, eager, compiled, self.program.roots, dynamic=self.program.dynamic
        )

    def _options(self) -> tuple[str, list[dict[str, Any]]]:
        """Switch the options on one by one; only after a stage that differs or fails."""
        steps, eager = self._steps()
        runtime, given = self.program.runtime, self.program.options
        code = {name: value for name, value in given.items() if callable(value)}
        plain = {name: value for name, value in given.items() if name not in code}
        effective = {**runtime.effective_options(plain), **code}

        def attempt(what: str, options: Mapping[str, Any]) -> tuple[str | None, float | None]:
            self.events.phase(self.case, f"options, {what}")
            compiled = run_compiled(steps, lambda: self._compiled(steps, "npugraph_ex", options))
            if compiled.run.error is not None:
                self._log(compiled.run.error)
                if self.job.world_size > 1:
                    # Peers wait in a collective: nothing more can be tried in these processes.
                    raise BuildError(f"{self._named}: options, {what}: raises {_said(compiled.run.error)}")
                return f"raises {_said(compiled.run.error)}", None
            difference = steps.difference(eager, compiled.run)
            return (None, None) if difference is None else (str(difference), difference.comparison.max_difference)

        return "differs", restore_options(effective, runtime.effective_options({}), given, attempt)

    def _cache(self) -> tuple[str, list[dict[str, Any]]]:
        """Load what the first process saved: as cachectl would, then as the runtime does by itself."""
        manifest = json.loads((self.job.case_folder(self.program.rank, self.case) / "entry.json").read_bytes())
        try:
            reload_case(self.program, self.job, self.case, manifest, self.events)
        except CachectlError as error:
            self.ended = True
            self._log(error)
            what = error.message.removeprefix(f"{self.case.method} [{self.case.name}]: ")
            return "failed", [finding(refusal_kind(what), what, error.hint or "see the rank's log")]
        except Exception as error:  # noqa: BLE001 - loaded code runs here, and may raise anything
            self.ended = True
            self._log(error)
            hint = "the entry is not cacheable as it stands; see the rank's log for the traceback"
            return "failed", [finding("not-loaded", f"a fresh process can't run what was saved: {_said(error)}", hint)]
        return self._plain_load(str(manifest["artifact"]["runtime_path"]))

    def _plain_load(self, saved_path: str) -> tuple[str, list[dict[str, Any]]]:
        """Say whether the runtime finds and loads its own cache: a copy, since it deletes what it can't load."""
        program, runtime = self.program, self.program.runtime
        folder = self.job.case_folder(program.rank, self.case)
        shutil.copytree(folder / "cache", folder / "plain")
        arguments: dict[str, Any] = {
            "dynamic": program.dynamic,
            "options": program.options,
            "cache_dir": folder / "plain",
        }
        steps, eager = self._steps()
        found = runtime.expected_folder(steps.method, **arguments).relative_to((folder / "plain").resolve()).as_posix()
        if found != saved_path:
            return "failed", [self._elsewhere(saved_path, found)]
        compiled: list[Any] = []

        def load() -> Callable[..., Any]:
            compiled.append(runtime.compile(steps.method, **arguments))
            loaded: Callable[..., Any] = compiled[0]
            return loaded

        ran = run_compiled(steps, load)
        notes = runtime_notes(ran.messages.texts)
        if ran.run.error is None and not runtime.was_loaded(compiled[0]):
            why = next((note["what"] for note in notes if note["kind"] == "inert"), "it said nothing")
            what = f"the runtime compiles anew what was saved a process before: {why}"
            advice = "keep the cache's owner, mode 0600 and torch_npu version"
            return "failed", [finding("inert", what, advice), *notes]
        self._log(ran.run.error)
        if ran.run.error is not None:
            self.ended = True
            what = f"what was loaded raises at step {len(ran.run.outputs) + 1}: {_said(ran.run.error)}"
            advice = "the runtime skips guards on load: give this call a case of its own"
            return "failed", [finding("not-loaded", what, advice), *notes]
        if (difference := steps.difference(eager, ran.run)) is not None:
            what, largest = f"loaded, and differs from eager in {difference}", difference.comparison.max_difference
            advice = "the runtime skips guards on load: what changes between steps has to be an argument, as a tensor"
            return "differs", [finding("reload-differs", what, advice, difference=largest), *notes]
        return "ok", notes

    def _elsewhere(self, saved_path: str, found: str) -> dict[str, Any]:
        before = json.loads(identity_file(self.job.workspace, self.program.rank, self.case).read_bytes())
        why = _what_differs(before, _cache_identity(self.program, self.case))
        looked, saved = found.partition("/")[0], saved_path.partition("/")[0]
        return finding(
            "inert",
            f"the runtime looks for its cache in {looked} and saved it in {saved}: {why}",
            INERT_ADVICE,
        )

    def _log(self, error: BaseException | None) -> None:
        # The rank's log is where a traceback is looked for.
        if error is not None:
            traceback.print_exception(error)


def _cache_identity(program: RankProgram, case: CaseJob) -> dict[str, Any]:
    """Return what the runtime's key is made of, in this process."""
    compiler = importlib.import_module("npugraph_ex.inference._cache_compiler")
    digest = getattr(compiler, "_get_code_digest", repr)
    module = program.method(case).__self__
    first, second = str(module), str(module)
    return {
        "module": first,
        "unstable": _changed_lines(first, second) if first != second else None,
        "passes": {name: str(digest(value)) for name, value in program.options.items() if callable(value)},
    }


def _what_differs(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    for name, digest in now["passes"].items():
        if before["passes"].get(name) != digest:
            return f"the code of option {name} reads otherwise in each process"
    if before["module"] != now["module"]:
        return f"str(model) differs between two processes: {_changed_lines(before['module'], now['module'])}"
    return "neither str(model) nor the passes differ; the determinism level or the world does"


def _changed_lines(before: str, now: str) -> str:
    lines = difflib.ndiff(before.splitlines(), now.splitlines())
    changed = [line[2:].strip() for line in lines if line[:2] in ("- ", "+ ")]
    return one_line(" | ".join(changed[:2]))[:300]


def _tensors(model: torch.nn.Module, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(dict(inputs))
    return [*model.parameters(), *model.buffers(), *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]


def _to_cpu(model: torch.nn.Module) -> None:
    """Move a model to the CPU: parameters, buffers, and tensors that are plain attributes."""
    model.to("cpu")
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if not name.startswith("_") and isinstance(value, (torch.Tensor, list, tuple, dict)):
                moved = pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, value)
                setattr(module, name, moved)


def _said(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}")[:400]
