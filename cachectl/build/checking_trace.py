"""Tracing one case of a method: Dynamo with a backend that only looks, called as a program calls its steps.

Owns what happens around a graph: breaks with Dynamo's reasons, second traces, what a call leaves changed in the model.
Rank processes only: imports torch.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import re
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils import _pytree as pytree

from cachectl.build.checking_graph import GraphReading, read_graph, storage_of
from cachectl.build.checking_places import Findings, Place, Places
from cachectl.build.checking_rules import Owner, Rules
from cachectl.build.checking_state import State
from cachectl.build.triage_reasons import attention_fault
from cachectl.schemas.check import Severity

__all__ = ["CaseTrace", "rule_of_break"]

_WORDS = 300
_DEPTH = 8
# What Dynamo's reason says, in order: the first that fits names the rule.
_BREAKS: tuple[tuple[str, str], ...] = (
    (r"data-dependent branching|data-dependent (jump|assert)", "tensor-branch"),
    (r"`?print`? with argument|builtin print|logging\.Logger|LoggingLogger|logging function|warnings\.warn", "print"),
    (r"synchroni[sz]e|\bstreams?\b|(cuda|npu) event", "stream-sync"),
    (r"backward|autograd\.grad|requires_grad_", "backward"),
    (r"triton", "triton-kernel"),
    (r"tolist|\.item\(|_local_scalar_dense|numpy\(\)|__bool__|data-dependent expression", "host-sync"),
    (r"dynamic (output )?shape|nonzero|masked_select|unbacked|data dependent operator", "data-dependent-shape"),
    (
        r"fake impl|meta kernel|no meta|no fake|running with fake|UnsupportedOperator|NotImplementedError.*meta",
        "no-meta-kernel",
    ),
    (r"observed exception|when making fake tensor call|RuntimeError when", "does-not-run"),
)


def rule_of_break(text: str) -> str:
    """Return the rule that a reason of Dynamo's for not tracing on is about."""
    return next((rule for pattern, rule in _BREAKS if re.search(pattern, text, re.IGNORECASE)), "graph-break")


class CaseTrace:
    """Traces one case and adds what it finds.

    Args:
        method: the bound method that the case compiles.
        inputs: its keyword arguments, fakes of `fakes`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        method: types.MethodType,
        inputs: Mapping[str, Any],
        *,
        name: str,
        fakes: FakeTensorMode,
        places: Places,
        findings: Findings,
        recipe: Mapping[str, Any],
    ) -> None:
        self._method, self._inputs, self._name = method, inputs, name
        self._fakes, self._places, self._findings = fakes, places, findings
        self._dynamic = bool(recipe["compile"]["dynamic"])
        self._state = State(model, inputs)
        self._written: set[int] = set()
        self._stores: list[tuple[str, Place | None]] = []
        self._whole = True
        self.graphs: list[GraphReading] = []
        # What went wrong in reading a graph, which is no fault of the method's.
        self.faults: list[str] = []
        self._rules: Callable[[Callable[[int], Owner | None]], Rules] = lambda owner_of: Rules(
            places=places,
            findings=findings,
            method=name,
            mode=recipe["compile"]["mode"],
            dynamic=self._dynamic,
            simulated=recipe["device"] == "simulated",
            listed=any(_is_lengths(value) for value in _containers(inputs)),
            marked=all(
                hasattr(tensor, "_dynamo_static_indices")
                for tensor, owner in self._state.tensors()
                if owner.kind == "argument"
            ),
            owner_of=owner_of,
        )

    def run(self) -> None:
        """Trace the method whole; where that fails, trace its pieces to see what else breaks it."""
        dynamo = importlib.import_module("torch._dynamo")
        dynamo.reset()
        try:
            with self._noting_stores():
                self._run_whole()
        finally:
            self._state.restore()
            dynamo.reset()

    @property
    def written(self) -> list[str]:
        """The names of the model's and the call's tensors that the graph writes in place."""
        return sorted(self._state.owners[key].name for key in self._written)

    def _run_whole(self) -> None:
        """Call the method three times: as it is, again, and with other values in its lists of integers."""
        config = importlib.import_module("torch._dynamo.config")
        compiled = self._compiled(fullgraph=True)
        self._whole = True
        try:
            with config.patch(error_on_recompile=True):
                output = self._call(compiled, self._inputs)
                if not self.graphs:
                    place = self._places.of_code(self._method.__func__.__code__)
                    what = "the method calls no operator of torch: there is no graph to keep"
                    self._findings.add("no-graph", "error", what, place=place, method=self._name)
                    return
                self._read_output(output)
                self._read_bindings()
                try:
                    self._call(compiled, self._inputs)
                except _recompile_error() as error:
                    self._recompiled(error, "the second call")
                    return
                others = _other_lengths(self._inputs)
                if others is not None:
                    self._call_with_lengths(compiled, others)
        except (DataDependentOutputException, DynamicOutputShapeException):
            # The graph reads a value, which its reading has said; a call of it can't be played to the end.
            return
        except Exception as error:  # noqa: BLE001 - the user's code and Dynamo may raise anything
            self._broke(error)
            if not self._findings.has("does-not-run", "no-meta-kernel", method=self._name):
                self._run_pieces()

    def _run_pieces(self) -> None:
        """Let Dynamo break the graph where it must, and note each place."""
        reasons = importlib.import_module("torch._dynamo.utils").graph_break_reasons
        importlib.import_module("torch._dynamo").reset()
        self._state.restore()
        reasons.clear()
        self._whole = False
        with contextlib.suppress(Exception):
            # Between the pieces the user's code runs on fakes, which have no values to give.
            self._call(self._compiled(fullgraph=False), self._inputs)
        for reason in reasons:
            place = self._places.of_frames(reason.user_stack)
            # The same break again, in the words of the piece that ended there.
            if place is None or not self._findings.stand_at(place):
                self._say_break(str(reason.reason), place)

    def _call_with_lengths(self, compiled: Callable[..., Any], others: Mapping[str, Any]) -> None:
        try:
            self._call(compiled, others)
        except _recompile_error() as error:
            if not self._findings.has("fia-lengths", method=self._name):
                self._recompiled(error, "a call with other values in its list of integers", severity="warning")

    def _compiled(self, *, fullgraph: bool) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(
            self._method, backend=self._look, fullgraph=fullgraph, dynamic=self._dynamic
        )
        return compiled

    def _call(self, compiled: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
        with torch.no_grad(), self._fakes:
            return compiled(**inputs)

    def _look(self, module: Any, example_inputs: Any) -> Callable[..., Any]:
        """Be Dynamo's backend: read the graph, and return what runs it on fakes."""
        try:
            with _keeping_guards():
                self._read_graph(module, example_inputs)
        except Exception as error:  # noqa: BLE001 - raised in here it would be taken for a fault of the user's method
            traceback.print_exc()
            self.faults.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        run: Callable[..., Any] = module.forward
        return run

    def _read_graph(self, module: Any, example_inputs: Any) -> None:
        reading = read_graph(module)
        self.graphs.append(reading)
        owners = dict(enumerate(map(self._owner, reading.inputs, example_inputs)))
        examples = dict(enumerate(map(_example, reading.inputs, example_inputs)))
        for operation in reading.operations:
            for tensor in operation.written():
                index = reading.owner(tensor)
                if index is not None and id(examples[index]) in self._state.owners:
                    self._written.add(id(examples[index]))
        self._rules(owners.get).read(reading, whole=self._whole)

    def _owner(self, node: Any, value: Any) -> Owner | None:
        return self._state.owner(_example(node, value))

    def _broke(self, error: BaseException) -> None:
        text = str(error)
        if type(error).__module__.startswith("torch") and "Unsupported" in type(error).__name__:
            text = str(getattr(error, "msg", None) or text)
        place = self._places.of_error(error)
        if type(error).__name__ == "TorchRuntimeError" and rule_of_break(text) == "graph-break":
            self._findings.add("does-not-run", "error", _one_line(text), place=place, method=self._name)
            return
        if attention_fault(str(error), self._places.line_of(place), dynamic=self._dynamic) is not None:
            what = "the operator takes its lengths as list[int], and is given something else"
            if not self._findings.has("fia-lengths", method=self._name):
                rewrite = "lengths as list[int], one number a row, with dynamic: true"
                self._findings.add("fia-lengths", "error", what, place=place, method=self._name, rewrite=rewrite)
            return
        # Dynamo's own fault, which may be one with fakes only.
        severity: Severity = "warning" if "Internal" in type(error).__name__ else "error"
        self._say_break(text, place, severity)

    def _say_break(self, text: str, place: Place | None, severity: Severity = "error") -> None:
        line = self._places.line_of(place)
        rule = rule_of_break(text)
        if rule == "graph-break":
            rule = rule_of_break(line) if re.search(r"print\(|synchronize|\.item\(|tolist", line) else rule
        place = place if place is not None else self._places.of_code(self._method.__func__.__code__)
        self._findings.add(rule, severity, _one_line(text), place=place, method=self._name)

    def _recompiled(self, error: BaseException, when: str, severity: Severity = "error") -> None:
        found = re.search(r"^\s*-\s*(?:\d+/\d+: )?(.*)$", str(error), re.MULTILINE)
        reason = re.split(r"\s{2,}#|\s+\(HINT", found.group(1))[0].strip() if found else _one_line(str(error))
        place = self._places.of_text(str(error))
        if place is None:
            place = self._places.of_code(self._method.__func__.__code__)
        changed = re.search(r"\.(\w+) == ", reason)
        stored = dict(self._stores).get(changed.group(1)) if changed else None
        if changed and changed.group(1) in dict(self._stores):
            what = f"{changed.group(1)} changes at each step: {when} is traced anew since {reason}"
            self._findings.add("changed-attribute", "error", what, place=stored or place, method=self._name)
            return
        if self._findings.has("rebound-buffer", "grown-cache", method=self._name) and severity == "error":
            return
        what = f"{when} is traced anew: {reason}"
        self._findings.add("recompile", severity, what[:_WORDS], place=place, method=self._name)

    def _read_bindings(self) -> None:
        """Find the buffers, parameters and tensor attributes that the call bound to other tensors."""
        for name, before, after in self._state.bound_anew():
            if isinstance(before, torch.Tensor) and after is not before:
                place = self._place_of_store(name)
                what = f"each step binds {name} to a new tensor: the graph keeps the address of the first"
                if not self._findings.has("grown-cache", method=self._name):
                    self._findings.add("rebound-buffer", "error", what, place=place, method=self._name)

    def _place_of_store(self, name: str) -> Place | None:
        if (place := dict(self._stores).get(name.rpartition(".")[2])) is not None:
            return place
        texts = {node.stack_trace for reading in self.graphs for node in reading.module.graph.nodes}
        return self._places.of_store(name, texts, self._method.__func__.__code__)

    def _read_output(self, output: Any) -> None:
        """Find what the call returned: the model's state, written by the step, and what asks for gradients."""
        code = self._method.__func__.__code__
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        written = {
            storage_of(tensor): owner.name
            for tensor, owner in self._state.tensors()
            if id(tensor) in self._written and owner.kind != "parameter"
        }
        for leaf in leaves:
            if (name := written.get(storage_of(leaf))) is not None:
                what = f"{name} is written in place and returned: a replay copies it out at each step"
                place = self._places.of_return(code)
                self._findings.add("returned-cache", "warning", what, place=place, method=self._name)
        if any(leaf.requires_grad for leaf in leaves):
            what = "what the method returns asks for gradients, though it was called without them"
            place = self._places.of_return(code)
            if not self._findings.has("backward", method=self._name):
                self._findings.add("backward", "error", what, place=place, method=self._name)

    @contextlib.contextmanager
    def _noting_stores(self) -> Iterator[None]:
        """Note where the traced code sets attributes; a private part of Dynamo, found by its features."""
        effects: Any = getattr(importlib.import_module("torch._dynamo.side_effects"), "SideEffects", None)
        original = vars(effects).get("store_attr") if isinstance(effects, type) else None
        if original is None:
            yield
            return
        extract = torch._guards.TracingContext.extract_stack

        def store_attr(effects: Any, item: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
            self._stores.append((str(name), self._places.of_frames(extract())))
            return original(effects, item, name, *args, **kwargs)

        effects.store_attr = store_attr
        try:
            yield
        finally:
            effects.store_attr = original


def _example(node: Any, value: Any) -> Any:
    """Return what the process passes for a graph input: Dynamo's own record of it, else what it gives its backend."""
    example = getattr(node.meta.get("grapharg"), "example", None)
    return value if example is None else example


def _keeping_guards() -> contextlib.AbstractContextManager[Any]:
    """Leave the trace's guards as they are, whatever a reading asks of sizes that are symbols."""
    mode = torch._guards.TracingContext.get().fake_mode
    suppressed: contextlib.AbstractContextManager[Any] = (
        contextlib.nullcontext() if mode is None or mode.shape_env is None else mode.shape_env.suppress_guards()
    )
    return suppressed


def _recompile_error() -> type[Exception]:
    found: type[Exception] = importlib.import_module("torch._dynamo.exc").RecompileError
    return found


def _one_line(text: str) -> str:
    """Return what Dynamo says first: the reason and its explanation, without hints and stacks."""
    whole = re.sub(r"\[?ConstantVariable\(\w+: (.*?)\)\]?", r"\1", text)
    text = re.split(r"\n\s*(?:Hint:|Developer debug context:|For more details|from user code:|The branch)", text)[0]
    if (named := re.search(r"unsupported operator: ([\w.:]+)", whole)) is not None:
        return f"{named.group(1)} has no meta kernel: it can't run on fake tensors"
    got = re.search(r"got ([A-Za-z]+\(.*\))", text) or re.search(r"raised exception ([A-Za-z_]+\(.*\))", whole)
    words = " ".join((got.group(1) if got else text).split())
    words = re.sub(r" Explanation:$", "", words).replace(" Explanation: ", ": ")
    return words if len(words) <= _WORDS else f"{words[:_WORDS]}…"


def _containers(value: Any, depth: int = 0) -> Iterator[Any]:
    if isinstance(value, Mapping):
        members: Any = value.values()
    elif hasattr(value, "__dataclass_fields__"):
        members = [getattr(value, name) for name in value.__dataclass_fields__]
    elif isinstance(value, (list, tuple)):
        members = value
        yield value
    else:
        return
    if depth < _DEPTH:
        for member in members:
            yield from _containers(member, depth + 1)


def _is_lengths(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(member) is int for member in value)


def _other_lengths(inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the call of the next step, whose lists of integers hold other values; None where there is no such list."""
    if not any(_is_lengths(value) for value in _containers(inputs)):
        return None

    def changed(value: Any) -> Any:
        if _is_lengths(value):
            return [member + 1 for member in value]
        if isinstance(value, dict):
            return {key: changed(member) for key, member in value.items()}
        if isinstance(value, list):
            return [changed(member) for member in value]
        if type(value) is tuple:
            return tuple(changed(member) for member in value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            other = copy.copy(value)
            for item in dataclasses.fields(value):
                object.__setattr__(other, item.name, changed(getattr(value, item.name)))
            return other
        return value

    return {name: changed(value) for name, value in inputs.items()}
