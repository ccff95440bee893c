"""The proof: a guard sheet held once against the live model and call, before anything is loaded.

Owns the evaluation. The runtime skips Dynamo's guards on load, so here every fact of the sheet is looked up in the live
objects and compared; the first failures come out as reasons in the program's own words. The live objects are a
stranger's: properties that raise, attributes that are gone, values whose `==` returns tensors are failed facts, never
exceptions. Beyond attribute and item access none of their code runs: types are compared before values, containers are
read through their base classes, and nothing is imported.

Standard library only; torch is passed in, or is what the program imported.
"""

from __future__ import annotations

import gc
import sys
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from cachectl.boot.proof_facts import (
    CHECKS,
    HOLDS,
    Facts,
    Mismatch,
    TensorFact,
    Trail,
    name_of,
    shown,
    steps_of,
    stored_in,
    unknown_fact,
)
from cachectl.boot.proof_steps import access_of
from cachectl.identity.guard_expressions import evaluate, paths_in, render
from cachectl.identity.guard_paths import readable, secret_name
from cachectl.identity.guard_reader import GuardReader
from cachectl.identity.guard_values import Unsayable, same
from cachectl.identity.guards import SHEET_SCHEMA
from cachectl.schemas.boot import Reason

__all__ = ["FAILURE_LIMIT", "Proof", "prove"]

# Enough to see what is wrong; a model of another depth would give thousands.
FAILURE_LIMIT = 20
# A sheet's tree is walked in full though its nodes are shared. A real one has some ten thousand places; one with more
# than this is no sheet that building made.
_PLACE_LIMIT = 2_000_000


@dataclass(frozen=True)
class Proof:
    """What the proof found: how many facts were compared, why it failed (at most FAILURE_LIMIT reasons), how long."""

    guards: int
    failed: tuple[Reason, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether every guard of the sheet holds."""
        return not self.failed


def prove(
    sheet: Mapping[str, Any],
    *,
    arguments: Mapping[str, Any],
    function: Any,
    torch: Any = None,
    prepared: dict[int, tuple[list[Any], list[Any]]] | None = None,
) -> Proof:
    """Hold a guard sheet against a call. Never raises, whatever the live values or the sheet are.

    Args:
        sheet: as cachectl.identity.guards describes it.
        arguments: the call's arguments by the names that the function gives them, with the receiver.
        function: the method's function, or the bound method; its globals, builtins and free variables are read.
        torch: the imported module; None for what sys.modules holds.
        prepared: what is kept between the proofs of one sheet in one process, empty at first; None for a single one.
    """
    started = time.perf_counter()
    prover = _Prover(arguments, function, sys.modules.get("torch") if torch is None else torch)
    if prepared is not None:
        prover.prepared = prepared
    # A full collection in the middle of the walk would go through all of torch's objects: as much time again.
    collecting = gc.isenabled()
    gc.disable()
    try:
        prover.run(sheet)
    except _Enough:
        pass
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        prover.failed.append(
            Reason("guards", "sheet", None, f"{type(error).__name__}: {error}", "corrupt", "run: cachectl verify")
        )
    finally:
        if collecting:
            gc.enable()
    return Proof(prover.count, tuple(prover.failed[:FAILURE_LIMIT]), time.perf_counter() - started)


class _Enough(Exception):
    """FAILURE_LIMIT failures were found, or the sheet is larger than any that building makes."""


class _Prover:
    def __init__(self, arguments: Mapping[str, Any], function: Any, torch: Any) -> None:
        self.arguments = arguments
        self.function: Any = function.__func__ if isinstance(function, types.MethodType) else function
        self.torch = torch
        self.count = 0
        self.failed: list[Reason] = []
        self.places = 0
        self.nodes: list[Any] = []
        self.prepared: dict[int, tuple[list[Any], list[Any]]] = {}
        self.reader = GuardReader(torch)
        self.facts = Facts(self.reader)

    def run(self, sheet: Mapping[str, Any]) -> None:
        if sheet.get("schema") != SHEET_SCHEMA:
            hint = "install the cachectl that built the entry, or run: cachectl build"
            self.report("guards", "sheet", sheet.get("schema"), SHEET_SCHEMA, hint)
            return
        self.prove_ambient(sheet["ambient"])
        self.nodes = sheet["nodes"]
        # As torch's own guards do it: a tensor subclass or a mode has no say in what its attributes are. Entered after
        # the ambient state is read, of which it is part.
        without_functions = getattr(getattr(self.torch, "_C", None), "DisableTorchFunction", nullcontext)
        with without_functions():
            if self.nodes:
                self.visit_root(len(self.nodes) - 1)
            self.prove_memory()
            for tree in sheet["expressions"]:
                self.prove_expression(tree)

    # State around the call.

    def prove_ambient(self, stored: Mapping[str, Any]) -> None:
        if not stored:
            return
        try:
            live = self.reader.ambient()
        except (AttributeError, TypeError, ValueError) as error:
            hint = "build again with this torch: cachectl build"
            self.report("guards", "ambient state", sorted(stored), f"{type(error).__name__}: {error}", hint)
            return
        for name in sorted(stored):
            self.count += 1
            if name not in live or not same(stored[name], live[name]):
                hint = f"set {name} as it was at build time before the first call, or run: cachectl build --force"
                self.report("guards", name, stored[name], live.get(name), hint)

    # The tree.

    def visit_root(self, number: int) -> None:
        for step, below in self.nodes[number][1].items():
            trail = (None, step)
            try:
                value = self.root(step)
            except (LookupError, AttributeError, TypeError) as error:
                self.fail(trail, Mismatch("present", str(error.args[0]) if error.args else type(error).__name__))
            else:
                self.visit(below, value, trail)

    def root(self, step: str) -> Any:
        kind, name = step[0], step[2:]
        if kind == "L":
            return self.local(name)
        namespace = self.function.__globals__
        if kind == "G":
            if name not in namespace:
                raise LookupError("no such global")
            return namespace[name]
        if kind == "I":
            if name not in sys.modules:
                raise LookupError("module not imported yet")
            return sys.modules[name]
        if step == "B":
            builtins = namespace["__builtins__"]
            return builtins if type(builtins) is dict else builtins.__dict__
        raise LookupError(f"unknown place {step!r}")

    def local(self, name: str) -> Any:
        if name in self.arguments:
            return self.arguments[name]
        code = self.function.__code__
        if name in code.co_freevars:
            cells: Any = self.function.__closure__
            return cells[code.co_freevars.index(name)].cell_contents
        defaults = self.function.__defaults__ or ()
        positional = code.co_varnames[: code.co_argcount]
        if name in positional[len(positional) - len(defaults) :]:
            return defaults[positional.index(name) - len(positional) + len(defaults)]
        keywords = self.function.__kwdefaults__ or {}
        if name in keywords:
            return keywords[name]
        raise LookupError("no such argument")

    def visit(self, number: int, value: Any, trail: Trail) -> None:
        prepared = self.prepared.get(number)
        if prepared is None:
            prepared = self.prepared[number] = self.prepare(number)
        self.places += 1
        if self.places > _PLACE_LIMIT:
            self.report("guards", "sheet", self.places, _PLACE_LIMIT, "run: cachectl verify")
            raise _Enough
        failed_before = len(self.failed)
        for check, fact in prepared[0]:
            self.count += 1
            try:
                found = check(self.facts, value, fact, trail)
            except Exception as error:  # noqa: BLE001 -- a live value may raise anything: that is a failed fact
                found = Mismatch(stored_in(fact), type(error).__name__)
            if found is not HOLDS:
                self.fail(trail, found)
        if len(self.failed) > failed_before:
            # What lies below a value of another kind says nothing new.
            return
        for step, access, key, below in prepared[1]:
            try:
                member = access(self.reader, value, key)
            except Exception as error:  # noqa: BLE001 -- as above, for attribute and item access
                self.fail((trail, step), Mismatch("present", _text_of(error)))
            else:
                self.visit(below, member, (trail, step))

    def prepare(self, number: int) -> tuple[list[Any], list[Any]]:
        facts, steps = self.nodes[number]
        checks: list[Any] = [(CHECKS.get(fact[0], unknown_fact), fact) for fact in facts if fact[0] != "memory"]
        group = next((fact[1] for fact in facts if fact[0] == "group"), None)
        memory = next((fact[1] for fact in facts if fact[0] == "memory"), None)
        for place, (check, fact) in enumerate(checks):
            if fact[0] == "tensor":
                checks[place] = (check, TensorFact(fact[1]))
            elif fact[0] == "apart":
                checks[place] = (check, ["apart", group, memory])
        return checks, [(step, *access_of(step), below) for step, below in steps.items()]

    # Facts that relate places.

    def prove_memory(self) -> None:
        """Compare which tensors reach into one another's memory with what did at build time."""
        spans: list[tuple[int, int, int, Trail, int | None]] = []
        for tensor, trail, _, memory in self.facts.apart.values():
            try:
                extent = self.reader.extent(tensor)
            except Exception:  # noqa: BLE001, S112 -- a tensor subclass without memory of its own raises what it likes
                continue
            if extent is not None:
                spans.append((*extent, len(spans), trail, memory))
        spans.sort(key=lambda span: span[:3])
        clusters: list[list[tuple[Trail, int | None]]] = []
        end = -1
        for start, stop, _, trail, memory in spans:
            if start >= end:
                clusters.append([])
            clusters[-1].append((trail, memory))
            end = max(end, stop)
        self.compare_clusters(clusters)

    def compare_clusters(self, clusters: Sequence[Sequence[tuple[Trail, int | None]]]) -> None:
        homes: dict[int, int] = {}
        for place, cluster in enumerate(clusters):
            first, expected = cluster[0]
            for trail, memory in cluster:
                name = name_of(trail)
                if trail is not first and (memory is None or memory != expected):
                    hint = "give each tensor memory of its own as at build time, or run: cachectl build --force"
                    name = f"{name_of(first)} and {name}"
                    self.report(self.part(trail), name, "memory of their own", "shared memory", hint)
                elif memory is not None and homes.setdefault(memory, place) != place:
                    hint = "let them share memory as at build time, or run: cachectl build --force"
                    self.report(self.part(trail), name, "shared memory", "memory of its own", hint)

    def prove_expression(self, tree: Any) -> None:
        self.count += 1
        paths = list(paths_in(tree))
        part = "inputs" if any(self.part_of(path) == "inputs" for path in paths) else "guards"
        text = render(tree)
        hint = "add a case with these sizes to the recipe and run: cachectl build"
        try:
            if not evaluate(tree, self.value_at):
                live = {readable(path): shown(self.reader, self.value_at(path)) for path in paths}
                self.report(part, text, True, live, hint)
        except Exception as error:  # noqa: BLE001 -- the values it reads are live ones
            self.report(part, text, True, _text_of(error), hint)

    def value_at(self, path: tuple[str, ...]) -> Any:
        value = self.root(path[0])
        for step in path[1:]:
            access, key = access_of(step)
            value = access(self.reader, value, key)
        return value

    # Reasons.

    def fail(self, trail: Trail, found: Any) -> None:
        path = steps_of(trail)
        name = readable(path)
        wanted = "not shown, its name is that of a secret" if secret_name(path) else found.wanted
        self.report(self.part_of(path), name, found.stored, wanted, self.hint(trail, name))

    def hint(self, trail: Trail, name: str) -> str:
        if self.part(trail) == "inputs":
            return "add a case with these inputs to the recipe and run: cachectl build"
        if steps_of(trail)[0][0] == "I":
            return f"import the module before the first call, or restore {name}; else run: cachectl build --force"
        # plan can't see what a live model holds, and calls the entry ready.
        return f"restore {name} as it was at build time, or run: cachectl build --force"

    def report(self, part: str, name: str, stored: Any, wanted: Any, hint: str) -> None:
        self.failed.append(Reason(part, name, stored, wanted, "semantic", hint))
        if len(self.failed) >= FAILURE_LIMIT:
            raise _Enough

    def part(self, trail: Trail) -> str:
        return self.part_of(steps_of(trail))

    def part_of(self, path: tuple[str, ...]) -> str:
        names = getattr(getattr(self.function, "__code__", None), "co_varnames", ())
        is_argument = path[0].startswith("L:") and path[0][2:] in self.arguments
        return "inputs" if is_argument and path[0][2:] not in ("self", *names[:1]) else "guards"


def _text_of(error: BaseException) -> str:
    """Return an error in one short line; a stranger's text may be anything, so its type is enough."""
    if isinstance(error, (LookupError, Unsayable, ArithmeticError)) and error.args and type(error.args[0]) is str:
        return error.args[0][:200]
    return type(error).__name__
