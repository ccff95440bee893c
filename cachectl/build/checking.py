"""The check phase of a rank process: make the model under fake tensors, trace each case, report what breaks a rule.

Owns the phase's document and what is asked of model and call before tracing. Nothing runs on a device, nothing is
compiled by the runtime, nothing is written but the document. Rank processes only: imports torch.

    rank<r>/check.json  {"rank", "failure", "findings": [Finding], "traced": [[method, case]], "notes": [text]}

One process is enough for a world of several ranks: it is one of them, with a process group that meets nobody.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from cachectl.build.checking_model import FakedProgram
from cachectl.build.checking_places import Findings, Places
from cachectl.build.checking_rules import collectives_of
from cachectl.build.checking_state import State
from cachectl.build.checking_trace import CaseTrace
from cachectl.build.job import CaseJob, EventLog, Job
from cachectl.errors import ConfigError
from cachectl.identity.inputs import InputError, bind_call, describe_call

__all__ = ["CheckedProgram"]


class CheckedProgram(FakedProgram):
    """A faked program that traces its cases and collects what that shows; see FakedProgram for its arguments."""

    def __init__(self, job: Job, rank: int, events: EventLog, *, real: bool, again: Callable[[], NoReturn]) -> None:
        super().__init__(job, rank, events, real=real, again=again)
        self._places = Places(self.roots)
        self._findings = Findings(job.recipe_folder)
        self._traced: list[list[str]] = []
        self._notes: list[str] = []
        self._codes: dict[types.CodeType, set[str]] = defaultdict(set)

    def summary(self) -> dict[str, Any]:
        """Return the phase's document, without rank and failure."""
        notes = []
        if self.unmade is not None:
            notes.append(f"not traced: {self.unmade}")
        elif self.ran_script:
            notes.append("the program ran until its methods were called; what was traced are fakes of its tensors")
        elif self.real:
            notes.append("the factory or an input function reads values: the model was made for real, then faked")
        if self.job.world_size > 1 and self._traced:
            notes.append(f"traced as rank {self.rank} of {self.job.world_size}; the other ranks were not run")
        self._shared_code()
        return {"findings": self._findings.documents(), "traced": self._traced, "notes": [*notes, *self._notes]}

    def check(self, case: CaseJob) -> None:
        """Trace one case and read what it shows.

        Raises:
            ConfigError: a method that the model lacks, inputs that don't fit.
        """
        if self.unmade is not None:
            return
        self._events.phase(case, "trace")
        name = f"{case.method} [{case.name}]"
        if (absent := self.absence(case)) is not None:
            if self.job.world_size == 1:
                raise absent
            self._notes.append(f"{name}: rank {self.rank} has no such method")
            return
        try:
            method = self.method(case)
        except ConfigError as error:
            rule = "decorated-method" if "decorated" in error.message else "not-a-method"
            self._findings.add(rule, "error", error.message, place=None, method=case.method)
            return
        self._codes[method.__func__.__code__].add(case.method)
        inputs = self.call_of(case)
        self._devices(case, inputs)
        if not self._input_spec(case, method, inputs):
            return
        trace = CaseTrace(
            self.model,
            method,
            inputs,
            name=case.method,
            fakes=self.fakes,
            places=self._places,
            findings=self._findings,
            recipe=self.job.recipe,
        )
        trace.run()
        self._traced.append([case.method, case.name])
        self._facts(name, case, trace)
        self._static(case, method, inputs)

    def _shared_code(self) -> None:
        """Find methods of one code object: the runtime keeps no artifact of a second trace of it."""
        for code, methods in self._codes.items():
            if len(methods) > 1:
                first, *others = sorted(methods)
                what = f"{', '.join(others)} and {first} are one function: its second trace ends the first one's cache"
                place = self._places.of_code(code)
                self._findings.add("several-traces", "warning", what, place=place, method=first)

    def _devices(self, case: CaseJob, inputs: Mapping[str, Any]) -> None:
        """Find tensors that are not where the recipe's device says, or not all in one place."""
        found: dict[tuple[str, bool], list[str]] = defaultdict(list)
        for tensor, owner in State(self.model, inputs).tensors():
            # A number of no dimension may stay on the host.
            if owner.kind != "argument" or tensor.dim():
                found[tensor.device.type, owner.kind == "argument"].append(f"{owner.kind} {owner.name}")
        devices = {device for device, _ in found}
        if self.job.recipe["device"] != "npu" and devices <= {"cpu"}:
            return
        for (device, passed), names in found.items():
            if device != "npu":
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                what = f"{names[0]}{more} on {device}, not on the NPU"
                # The model's own is the same for all methods.
                method = case.method if passed else None
                self._findings.add("not-on-npu", "error", what, place=None, method=method)

    def _input_spec(self, case: CaseJob, method: types.MethodType, inputs: Mapping[str, Any]) -> bool:
        try:
            arguments = bind_call(self.signature(method), (), inputs)
            describe_call(arguments, torch.Tensor, lambda tensor: None)
        except InputError as error:
            place = self._places.of_code(method.__func__.__code__)
            self._findings.add("input-type", "error", f"[{case.name}]: {error}", place=place, method=case.method)
            return False
        return True

    def _facts(self, name: str, case: CaseJob, trace: CaseTrace) -> None:
        compile_section = self.job.recipe["compile"]
        self._notes += [f"{name}: the graph could not be read: {fault}" for fault in trace.faults]
        for reading in trace.graphs[:1]:
            written = trace.written
            collectives = collectives_of(reading)
            said = f"{name}: {len(reading.inputs)} graph inputs, {len(reading.operations)} operators"
            if written:
                said += f", {len(written)} written in place: {_some(written)}"
            if collectives:
                said += f", {len(collectives)} collectives"
            self._notes.append(said)
            if reading.fault is not None:
                text = " ".join(str(reading.fault).split())[:200]
                self._notes.append(f"{name}: operators were read up to {type(reading.fault).__name__}: {text}")
            if collectives and compile_section["mode"] == "ge_graph" and not compile_section["setup"]:
                place = self._places.of_text(collectives[0].node.stack_trace)
                what = "collectives in the graph, and no compile.setup that calls torchair.patch_for_hcom()"
                self._findings.add("collectives", "error", what, place=place, method=case.method)

    def _static(self, case: CaseJob, method: types.MethodType, inputs: Mapping[str, Any]) -> None:
        """Advise a static graph where no number comes in that could change from step to step."""
        if not self.job.recipe["compile"]["dynamic"] or any(_numbers(inputs)):
            return
        what = f"dynamic is true, and [{case.name}] passes no list of lengths: every size in it is fixed"
        place = self._places.of_code(method.__func__.__code__)
        self._findings.add("static-graph", "advice", what, place=place, method=case.method)


def _numbers(inputs: Mapping[str, Any]) -> Iterator[bool]:
    for leaf in pytree.tree_leaves(dict(inputs)):
        if hasattr(leaf, "__dataclass_fields__"):
            yield from _numbers({name: getattr(leaf, name) for name in leaf.__dataclass_fields__})
        elif type(leaf) is int:
            yield True


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
