"""The compiled methods of a recipe, read as text: from the factory to the model, its methods, and what they call.

Owns finding a method's source and its arguments, and the rules on what is compiled at all. Nothing is imported or run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from cachectl.errors import ConfigError
from cachectl.schemas.check import Severity, rule_finding
from cachectl.services.checks.arguments import given, has_number, plain
from cachectl.services.checks.call_rules import CompiledRules
from cachectl.services.checks.calls import REST
from cachectl.services.checks.modules import Modules
from cachectl.services.checks.npu_rules import Setting
from cachectl.services.checks.objects import last_name, modules_below
from cachectl.services.checks.places import moves_to_device, names_cuda
from cachectl.services.checks.state_rules import Findings, text_of
from cachectl.services.checks.statements import SourceReader, TooLargeError
from cachectl.services.checks.values import (
    UNKNOWN,
    Bound,
    Class,
    Const,
    Ext,
    ExtObj,
    Func,
    Map,
    Obj,
    Seq,
    Tensor,
    Value,
    alternatives,
)

__all__ = ["Read", "check_model"]


@dataclass
class Read:
    """What reading the model came to.

    `methods` are those whose source was read; `lengths` the kinds of attention lengths met; `host_inputs` whether a
    call has a number or a list among its arguments, None where that is not known.
    """

    methods: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lengths: set[str] = field(default_factory=set)
    host_inputs: bool | None = False


def check_model(recipe: Mapping[str, Any], modules: Modules, setting: Setting, findings: Findings) -> Read:
    """Read a recipe's methods against the rules.

    Args:
        recipe: its document, with `model` and `functions`.

    Raises:
        ConfigError: a file that can't be parsed; a factory, a method or an input function that is not in its file.
    """
    return _ModelCheck(recipe, modules, setting, findings).run()


class _Named(NamedTuple):
    """What a recipe names: what is called, and the function or class that stands behind it."""

    value: Value
    place: Func | Class


class _ModelCheck:
    def __init__(self, recipe: Mapping[str, Any], modules: Modules, setting: Setting, findings: Findings) -> None:
        self.recipe, self.modules, self.findings = recipe, modules, findings
        self.setting = setting
        self.rules = CompiledRules(findings, setting)
        self.reader = SourceReader(modules, self.rules)
        self.rules.reader = self.reader
        self.read = Read()

    def run(self) -> Read:
        models = self._models()
        self._settle()
        compiled: dict[int, tuple[str, Obj]] = {}
        for function in self.recipe["functions"]:
            self._function(function, models, compiled)
        self.read.lengths = self.rules.lengths
        return self.read

    def _settle(self) -> None:
        """Read which attributes change and which methods set up, of all modules that are known by now."""
        self.reader.changing = self.modules.changing_attributes()
        self.reader.setting_up = self.modules.setting_up()
        if setup := self.recipe["compile"]["setup"]:
            self.modules.find(setup.partition(":")[0])
        marked = any(b"mark_static" in module.source for module in self.modules.loaded())
        self.rules.setting = self.setting = replace(self.setting, marked=marked)

    # The model.

    def _models(self) -> list[Obj]:
        """Return what the factory may return."""
        section = self.recipe["model"]
        func = self._named("model.factory", section["factory"])
        if func is None:
            return []
        kwargs = {name: plain(value) for name, value in section["config"].items()}
        value = self._called(func, [], kwargs)
        found = [member for member in alternatives(value) if isinstance(member, Obj)]
        if found:
            self._place(func.place, found[0])
            trains = not any(part.attrs.get("training") == Const(False) for part in modules_below(found[0]))
            # Known to train: there is a factory to read, and nothing in it calls eval().
            self.rules.setting = self.setting = replace(self.setting, trains=trains)
        return found

    def _called(self, named: _Named, args: list[Value], kwargs: dict[str, Value]) -> Value:
        """Return what a function that the recipe names returns, as far as can be told in time."""
        self.reader.calls = self.reader.statements = 0
        frame = self.reader.module_frame(named.place.module)
        try:
            return self.reader.call(named.value, args, kwargs, named.place.node, frame)
        except (RecursionError, TooLargeError):
            self.read.notes.append(f"{named.place.name}: too large to be read whole")
            self.reader.depth = 0
            return UNKNOWN

    def _named(self, what: str, reference: str) -> _Named | None:
        """Return the function that a recipe names, None where its source is not to be read."""
        module_name, _, name = reference.partition(":")
        module = self.modules.find(module_name)
        if module is None:
            instead = "classes there that have the method are read"
            if what != "model.factory":
                instead = "arguments are known by their annotations"
            self.read.notes.append(f"{reference} is not below model.path: {instead}")
            return None
        value: Value = self.reader.global_name(module, name.partition(".")[0])
        for step in name.split(".")[1:]:
            value = self.reader.attribute(value, step, module.tree, self.reader.module_frame(module))
        if value is None:
            near = ", ".join(sorted(item for item in module.bindings if not item.startswith("_"))[:12])
            raise ConfigError(
                f"{what} {reference}: {module_name} has no function {name!r}", hint=f"it has: {near or 'nothing'}"
            )
        place = value.args[0] if isinstance(value, ExtObj) and value.args else value
        place = place.func if isinstance(place, Bound) else place
        if isinstance(place, (Func, Class)):
            return _Named(value, place)
        self.read.notes.append(f"{reference} is no function whose source is to be read")
        return None

    def _place(self, factory: Func | Class, model: Obj) -> None:
        """Find a model that is never moved to the NPU, or to something else."""
        moved = False
        for module in self.modules.loaded():
            for node in ast.walk(module.tree):
                if not isinstance(node, ast.Call):
                    continue
                if (cuda := names_cuda(node)) is not None:
                    self._add("not-on-npu", "error", f"`{cuda}` names CUDA", module.shown, node.lineno)
                moved = moved or moves_to_device(node)
        if self.setting.on_npu and not moved:
            what = f"nothing below {factory.name} moves {model.cls.name} to the NPU"
            self._add("not-on-npu", "error", what, factory.module.shown, factory.node.lineno)

    def _add(self, rule: str, severity: Severity, what: str, path: str | None, line: int | None, **more: Any) -> None:
        self.findings.add(rule_finding(rule, severity, what, path=path, line=line, **more))

    # Its methods.

    def _function(
        self, function: Mapping[str, Any], models: Sequence[Obj], compiled: dict[int, tuple[str, Obj]]
    ) -> None:
        name = function["method"]
        receivers = self._receivers(models, name) if models else self._by_name(name)
        if not receivers:
            self.read.notes.append(f"{name}: its source was not found")
            self.read.host_inputs = None
            return
        for receiver in receivers:
            func = self._method(receiver, name)
            if func is None:
                continue
            other, of = compiled.setdefault(id(func.node), (name, receiver))
            if other != name:
                # Of two modules: cachectl keeps them apart. torch.compile and the runtime's own cache may not.
                severity: Severity = "warning" if of is receiver else "advice"
                what = f"{name} and {other} are one function"
                self._add("several-traces", severity, what, func.module.shown, func.node.lineno, method=name)
            self._cases(function, receiver, func, models[0] if models else UNKNOWN)

    def _receivers(self, models: Sequence[Obj], method: str) -> list[Obj]:
        """Return the module that has a method, of the models that the factory may return."""
        found: list[Obj] = []
        *path, last = method.split(".")
        for model in models:
            value: Value = model
            for step in path:
                frame = self.reader.module_frame(model.cls.module)
                value = self.reader.attribute(value, step, model.cls.node, frame)
                value = next((item for item in alternatives(value) if isinstance(item, Obj)), UNKNOWN)
            if isinstance(value, Obj):
                found.append(value)
        having = [item for item in found if last in item.attrs or self.reader.find_in_class(item.cls, last) is not None]
        return (having or found)[:1]

    def _by_name(self, method: str) -> list[Obj]:
        """Return an object of each module class below the roots that has a method of that name."""
        found: list[Obj] = []
        last = method.rpartition(".")[2]
        for root in self.modules.roots:
            for path in self.modules.files(root):
                found += self._with_method(path, last)
            if found:
                self._settle()
                break
        return found

    def _with_method(self, path: Path, method: str) -> Iterator[Obj]:
        """Yield an object of each module class of a file that has a method of its own of that name."""
        try:
            if f"def {method}(".encode() not in path.read_bytes():
                return
            module = self.modules.find(self.modules.dotted(path))
        except (OSError, ConfigError):
            return  # Not what the recipe names: others may be there.
        if module is None:
            return
        for node in module.tree.body:
            if not isinstance(node, ast.ClassDef):
                continue
            own = any(isinstance(item, ast.FunctionDef) and item.name == method for item in node.body)
            if own and self.reader.is_module(cls := Class(node, module)):
                made = self.reader.instantiate(cls, [], {REST: UNKNOWN}, node, self.reader.module_frame(module))
                if isinstance(made, Obj):
                    yield made

    def _method(self, receiver: Obj, name: str) -> Func | None:
        """Return a method's function; say what is wrong where it is none that can be cached."""
        last = name.rpartition(".")[2]
        cls = receiver.cls
        own = receiver.attrs.get(last)
        frame = self.reader.module_frame(cls.module)
        if own is None and isinstance(self.reader.member(receiver, last, cls.node, frame), Bound):
            # A property may return a method: that one is compiled.
            own = self.reader.member(receiver, last, cls.node, frame)
        if own is not None and not isinstance(own, Bound):
            what = f"{name} of {cls.name} is set on the instance, and no method"
            func = next((item for item in alternatives(own) if isinstance(item, Func)), None)
            path, line = (func.module.shown, func.node.lineno) if func else (cls.module.shown, cls.node.lineno)
            self._add("not-a-method", "error", what, path, line, method=name)
            return None
        func = own.func if isinstance(own, Bound) else self.reader.method_of(cls, last)
        if func is None:
            if self.reader.find_in_class(cls, last) is not None:
                what = f"{name} of {cls.name} is no function that is written in the class"
                self._add("not-a-method", "error", what, cls.module.shown, cls.node.lineno, method=name)
                return None
            foreign = [base for base in self.reader.foreign_bases(cls) if not _is_plain_module(base)]
            if not foreign and self.recipe["topology"]["world_size"] == 1:
                names = sorted(
                    item.name
                    for known in self.reader.mro(cls)
                    for item in known.node.body
                    if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")
                )
                raise ConfigError(
                    f"functions: {cls.name} has no method {last!r}",
                    hint=f"it has: {', '.join(names) or 'none of its own'}",
                )
            self.read.notes.append(f"{name}: its source was not found")
            return None
        for mark in func.decorators:
            if _keeps_function(mark):
                continue
            rule = (
                "not-a-method" if text_of(mark) in ("staticmethod", "classmethod", "property") else "decorated-method"
            )
            what = f"{name} is decorated with @{text_of(mark)}"
            self._add(rule, "error", what, func.module.shown, mark.lineno, method=name)
        return func

    def _cases(self, function: Mapping[str, Any], receiver: Obj, func: Func, model: Value) -> None:
        name = function["method"]
        self.read.methods.append(name)
        for case in function["cases"]:
            kwargs = self._inputs(case, model)
            self.rules.method_name, self.rules.flagged = name, False
            self.rules.flag_argument = bool(_flags(func))
            if kwargs is not None:
                self._input_types(kwargs, func, name, case["name"])
            self._host_inputs(kwargs)
            try:
                self.reader.watch(func, [receiver], kwargs)
            except (RecursionError, TooLargeError):
                self.read.notes.append(f"{name}: too large to be read whole")
            self._flag_argument(func, name)
            self._list_arguments(kwargs, func, name)

    def _inputs(self, case: Mapping[str, Any], model: Value) -> dict[str, Value] | None:
        """Return what a case's inputs function returns, as far as its text tells; None where it doesn't."""
        func = self._named(f"inputs of case {case['name']}", case["inputs"])
        if func is None:
            return None
        args = {name: plain(value) for name, value in (case.get("args") or {}).items()}
        value = self._called(func, [model, Const(0)], args)
        found = next((item for item in alternatives(value) if isinstance(item, Map)), None)
        if found is None or found.rest is not None:
            return None
        return {name: given(item, name) for name, item in found.known.items() if isinstance(name, str)}

    def _host_inputs(self, kwargs: Mapping[str, Value] | None) -> None:
        if kwargs is None or any(not isinstance(item, (Tensor, Const, Seq, Map, Obj)) for item in kwargs.values()):
            self.read.host_inputs = True if self.read.host_inputs else None
            return
        if any(has_number(item) for item in kwargs.values()):
            self.read.host_inputs = True

    def _input_types(self, kwargs: Mapping[str, Value], func: Func, name: str, case: str) -> None:
        for argument, value in kwargs.items():
            kind = ""
            if isinstance(value, Obj) and not self.reader.is_record(value.cls):
                kind = value.cls.name
            elif isinstance(value, ExtObj) and value.path in ("types.SimpleNamespace", "argparse.Namespace"):
                kind = value.path.rpartition(".")[2]
            if kind:
                what = f"[{case}]: {argument} is a {kind}, which an input spec can't say"
                self._add("input-type", "error", what, func.module.shown, func.node.lineno, method=name)

    def _flag_argument(self, func: Func, name: str) -> None:
        """Find a flag for prefill among the arguments of the method itself, where no branch on it was reported."""
        for argument in _flags(func):
            if not self.rules.flagged:
                what = f"{name} takes `{argument.arg}`"
                self._add("prefill-flag", "warning", what, func.module.shown, argument.lineno, method=name)

    def _list_arguments(self, kwargs: Mapping[str, Value] | None, func: Func, name: str) -> None:
        """Find lists of lengths under dynamic=False that no attention operator was seen to take."""
        if self.setting.dynamic or self.findings.of_rule("fia-lengths"):
            return
        frame = self.reader.bind(func, [], kwargs or {})
        for argument, value in frame.names.items():
            words = set(argument.lower().split("_"))
            # An argument that may be None is left to the trace, which has a call.
            if isinstance(value, Seq) and has_number(value) and words & {"seq", "lengths", "len", "lens", "seqlens"}:
                what = f"{name} takes {argument} as list[int], and dynamic is false: each step is another graph"
                self._add("fia-lengths", "error", what, func.module.shown, func.node.lineno, method=name)


def _flags(func: Func) -> list[ast.arg]:
    """Return a function's arguments that say whether this is prefill."""
    spec = func.node.args
    arguments = (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)
    return [argument for argument in arguments if argument.arg in ("is_prefill", "prefill", "is_prompt")]


def _keeps_function(mark: ast.expr) -> bool:
    """Say whether a decorator is known to return the function that it is given."""
    name = last_name(mark)
    return name in ("override", "final", "abstractmethod") or "docstring" in name


def _is_plain_module(base: Value) -> bool:
    return isinstance(base, Ext) and base.path in ("torch.nn.Module", "typing.Generic", "builtins.object", "abc.ABC")
