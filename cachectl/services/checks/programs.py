"""Calls of torch.compile and cache_compile in the programs around a model, held against what graph mode wants.

Owns reading one file's compile calls as text, without following what they are given. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from cachectl.errors import ConfigError
from cachectl.identity.options import HANDLES, WheelOption
from cachectl.identity.source_syntax import bound_names, effects_of
from cachectl.schemas.check import rule_finding
from cachectl.services.checks.modules import Module, Modules
from cachectl.services.checks.recipe import compiles_prefill, near_option
from cachectl.services.checks.state_rules import Findings, text_of

__all__ = ["check_programs"]

_LACKING = frozenset({"inductor", "aot_eager", "cudagraphs", "onnxrt", "tvm", "openxla", "ipex", "tensorrt", "eager"})
_CUDA_MODES = frozenset({"reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"})
_DEEPEST = 1
# What holds a whole model, by its last word: main_model, self.net.
_WHOLE = re.compile(r"(^|_)(model|module|net|network|llm)_?\d*$")
_BRINGS = (b"torch_npu", b"torchair")
_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)


def check_programs(
    recipe: Mapping[str, Any], modules: Modules, findings: Findings, wheel: Mapping[str, WheelOption] | None = None
) -> None:
    """Read the compile calls of the files at the top of the roots, and of those that the model is made of.

    What lies deeper may be another model's. A file that can't be parsed is no program of this one.

    Args:
        recipe: its document.
        modules: where files are looked for.
        findings: where what is found goes.
        wheel: the options of the installed torch_npu; None where they aren't known.
    """
    methods = frozenset(function["method"].rpartition(".")[2] for function in recipe["functions"])
    dynamic = bool(recipe["compile"]["dynamic"])
    options = recipe["compile"]["options"] if recipe["compile"]["mode"] == "npugraph_ex" else None
    brought = False
    files: list[_File] = []
    near = dict.fromkeys([*modules.files(depth=_DEEPEST), *(module.path for module in modules.loaded())])
    for path in near:
        try:
            text = path.read_bytes()
        except OSError:
            continue
        brought = brought or any(name in text for name in _BRINGS)
        if b"compile" not in text:
            continue
        try:
            module = modules.parse(path)
        except ConfigError:
            continue
        file = _File(module, findings, wheel)
        file.check(methods, dynamic, options)
        files.append(file)
    if not brought:
        for file in files:
            file.say_not_brought()


@dataclass(frozen=True)
class _Call:
    """One compile call: `kind` is compile or cache_compile; `what` is compiled, None for a decorator."""

    node: ast.Call | ast.expr
    kind: str
    what: ast.expr | None
    options: dict[str, ast.expr]
    spread: bool
    loop: ast.AST | None
    scope: ast.AST


class _File:
    def __init__(self, module: Module, findings: Findings, wheel: Mapping[str, WheelOption] | None) -> None:
        self.module, self.findings, self.wheel = module, findings, wheel
        self._named: _Call | None = None

    def _add(self, rule: str, severity: Any, what: str, node: ast.AST, rewrite: str | None = None) -> None:
        line = getattr(node, "lineno", None)
        self.findings.add(rule_finding(rule, severity, what, path=self.module.shown, line=line, rewrite=rewrite))

    def check(self, methods: frozenset[str], dynamic: bool, options: Mapping[str, Any] | None) -> None:
        calls = list(self._calls(self.module.tree, None, self.module.tree))
        # Another backend is another program: what of it could be cached is asked when it has ours.
        ours = [call for call in calls if call.kind == "cache_compile" or self._backend(call)]
        for call in ours:
            self._target(call)
            self._options(call)
        self._several(calls)
        for method in methods:
            of_method = [call for call in ours if isinstance(call.what, ast.Attribute) and call.what.attr == method]
            self._dynamic(of_method, dynamic)
            if options is not None:
                self._other_options(of_method, options)

    def say_not_brought(self) -> None:
        """Advise to import torch_npu, where no file of the program does and a backend of it is named."""
        if self._named is not None:
            what = "no file here imports torch_npu, which brings the backend: torch loads it by itself, unless "
            what += "TORCH_DEVICE_BACKEND_AUTOLOAD is 0"
            self._add("backend", "advice", what, self._named.node, "import torch_npu, before the model is moved")

    # Finding them.

    def _calls(self, node: ast.AST, loop: ast.AST | None, scope: ast.AST) -> Iterator[_Call]:
        for child in ast.iter_child_nodes(node):
            inner_loop, inner_scope = loop, scope
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inner_loop, inner_scope = None, child
                for mark in child.decorator_list:
                    if (kind := self._kind(mark.func if isinstance(mark, ast.Call) else mark)) is not None:
                        options = mark.keywords if isinstance(mark, ast.Call) else []
                        yield self._call(mark, kind, None, options, loop, child)
            elif isinstance(child, _LOOPS):
                inner_loop = child
            elif isinstance(child, ast.Call):
                kind = self._kind(child.func)
                if kind is None and (own := _own_compile(child)) is not None:
                    yield self._call(child, "compile", own, child.keywords, loop, scope)
                given = [keyword.value for keyword in child.keywords if keyword.arg in ("model", "func")]
                if kind is not None and (child.args or given):
                    yield self._call(child, kind, [*child.args, *given][0], child.keywords, loop, scope)
            yield from self._calls(child, inner_loop, inner_scope)

    @staticmethod
    def _call(
        node: Any, kind: str, what: ast.expr | None, keywords: list[ast.keyword], loop: ast.AST | None, scope: ast.AST
    ) -> _Call:
        options = {keyword.arg: keyword.value for keyword in keywords if keyword.arg is not None}
        return _Call(node, kind, what, options, any(keyword.arg is None for keyword in keywords), loop, scope)

    def _kind(self, function: ast.AST) -> str | None:
        """Return which compile function a call is of, by its dotted name and the file's imports."""
        parts: list[str] = []
        while isinstance(function, ast.Attribute):
            parts.append(function.attr)
            function = function.value
        if not isinstance(function, ast.Name):
            return None
        parts.append(function.id)
        name = ".".join(reversed(parts))
        if name == "torch.compile" or (name == "compile" and self._from_torch("compile")):
            return "compile"
        return "cache_compile" if parts[0] == "cache_compile" else None

    def _from_torch(self, name: str) -> bool:
        return any(
            isinstance(statement, ast.ImportFrom) and statement.module == "torch"
            for statement in self.module.bindings.get(name, [])
        )

    # The rules.

    def _backend(self, call: _Call) -> bool:
        """Say whether a call of torch.compile has a backend that an NPU may have; report the rest."""
        backend = call.options.get("backend")
        mode = call.options.get("mode")
        if call.what is not None and isinstance(call.node, ast.Call) and len(call.node.args) > 1:
            return True  # Positional options: torch.compile takes none.
        if backend is None and not call.spread:
            what = f"`{text_of(call.node)}` takes the default, inductor, which the NPU lacks"
            self._add("backend", "error", what, call.node)
            return False
        name = backend.value if isinstance(backend, ast.Constant) else None
        if name == "npugraph_ex" and self._named is None:
            self._named = call
        if name in _LACKING:
            self._add("backend", "error", f"the NPU has no backend {name!r}", call.node)
            return False
        if isinstance(mode, ast.Constant) and mode.value in _CUDA_MODES:
            self._add("backend", "error", f"mode {mode.value!r} is of CUDA graphs, which the NPU lacks", call.node)
            return False
        fullgraph = call.options.get("fullgraph")
        if (fullgraph is None and not call.spread) or (isinstance(fullgraph, ast.Constant) and not fullgraph.value):
            what = "fullgraph is False" if fullgraph is not None else "fullgraph is left out, and so False"
            self._add("fullgraph", "warning", f"`{text_of(call.node)}`: {what}", call.node)
        return True

    def _target(self, call: _Call) -> None:
        """Find what is compiled and can't be cached: functions, lambdas, decorated methods."""
        what = call.what
        if what is None:
            kind = "decorated-method" if self._in_class(call.scope) else "not-a-method"
            name = getattr(call.scope, "name", "")
            self._add(kind, "warning", f"`@{text_of(call.node)}` on {name}: it can't be cached", call.node)
        elif isinstance(what, ast.Lambda):
            self._add("not-a-method", "error", f"`{text_of(call.node)}` compiles a lambda", call.node)
        elif isinstance(what, ast.Name) and self._is_function(what.id, call.scope):
            severity = "error" if call.kind == "cache_compile" else "warning"
            self._add("not-a-method", severity, f"{what.id} is a function, and no method of the model", call.node)
        elif isinstance(what, (ast.Name, ast.Attribute)) and _WHOLE.search(_last_name(what).lower()):
            severity = "error" if call.kind == "cache_compile" else "warning"
            said = f"`{text_of(what)}` is compiled as a whole, prefill too, and can't be cached"
            self._add(
                "not-a-method", severity, said, call.node, f"compile its decode method: {text_of(what)}.main_decode"
            )
        elif isinstance(what, ast.Attribute) and compiles_prefill(what.attr):
            self._add("compiled-prefill", "warning", f"`{text_of(what)}` is compiled", call.node)

    def _options(self, call: _Call) -> None:
        """Find options that the installed wheel lacks, where they are written out."""
        given = call.options.get("options")
        if self.wheel is None or not isinstance(given, ast.Dict) or not _is_npugraph_ex(call):
            return
        for key in given.keys:
            name = key.value if isinstance(key, ast.Constant) else None
            if isinstance(name, str) and name not in self.wheel and name not in HANDLES and key is not None:
                hint = near_option(name, self.wheel)
                self._add("unknown-option", "error", f"this torch_npu has no option {name}", key, hint)

    def _other_options(self, calls: list[_Call], options: Mapping[str, Any]) -> None:
        """Find a method that every call compiles with other options than the recipe's."""
        if self.wheel is None or not calls:
            return
        wanted = _effective(options, self.wheel)
        differing = []
        for call in calls:
            given = _literal(call)
            if given is None or wanted is None or (found := _effective(given, self.wheel)) is None:
                return
            names = sorted(name for name in self.wheel if found[name] != wanted[name])
            if not names:
                return
            differing.append((call, found, names))
        for call, found, names in differing:
            name = names[0]
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            what = f"{name} is {found[name]} here, and {wanted[name] if wanted else None} in the recipe{more}"
            rewrite = "the same options in both: with others each start is cold"
            self._add("option-value", "warning", what, call.node, rewrite)

    def _in_class(self, function: ast.AST) -> bool:
        return any(isinstance(node, ast.ClassDef) and function in node.body for node in ast.walk(self.module.tree))

    def _is_function(self, name: str, scope: ast.AST) -> bool:
        """Say whether a name is a function of this file, at its top or in the scope of the call."""
        for place in (scope, self.module.tree):
            body = getattr(place, "body", [])
            if any(isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) and item.name == name for item in body):
                return True
            if name in bound_names(body):
                return False
        return False

    def _dynamic(self, calls: list[_Call], dynamic: bool) -> None:
        """Find a method that is compiled otherwise than the recipe says, at every place where it is."""
        said = [_dynamic_of(call) for call in calls]
        if not said or any(value in (dynamic, ...) for value in said):
            return
        for call, value in zip(calls, said, strict=True):
            if value is None:
                what = f"`{text_of(call.node)}` leaves dynamic out: torch makes the graph dynamic at a second shape"
                self._add("dynamic", "advice", what, call.node, f"dynamic={dynamic}, as the recipe says")
            else:
                left = "" if "dynamic" in call.options else ", its default"
                what = f"dynamic is {value} here{left}, and {dynamic} in the recipe: each start is cold"
                self._add("dynamic", "warning", what, call.node, f"dynamic={dynamic}, as the recipe says")

    def _several(self, calls: list[_Call]) -> None:
        """Find one method that is compiled twice: in a loop that doesn't change it, or at two places of one run."""
        seen: dict[tuple[int, str], _Call] = {}
        for call in calls:
            if not isinstance(call.what, ast.Attribute):
                continue
            text = text_of(call.what)
            if call.loop is not None and not (_names_in(call.what) & _targets(call.loop)):
                self._add("several-traces", "warning", f"`{text}` is compiled once a turn of a loop", call.node)
            place = (id(call.scope), text)
            if place in seen and not _apart(seen[place].node, call.node, call.scope):
                what = f"`{text}` is compiled on line {seen[place].node.lineno}, too"
                self._add("several-traces", "warning", what, call.node)
            seen.setdefault(place, call)


def _own_compile(node: ast.Call) -> ast.expr | None:
    """Return the module whose own compile() is called, told from re.compile by what it is given."""
    given = {keyword.arg for keyword in node.keywords}
    own = isinstance(node.func, ast.Attribute) and node.func.attr == "compile" and given & {"backend", "fullgraph"}
    return node.func.value if own and isinstance(node.func, ast.Attribute) else None


def _last_name(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _is_npugraph_ex(call: _Call) -> bool:
    """Say whether a call names npugraph_ex: its options are of that mode then."""
    backend = call.options.get("backend")
    if call.kind == "compile":
        return isinstance(backend, ast.Constant) and backend.value == "npugraph_ex"
    return "torchair" not in text_of(call.node.func) if isinstance(call.node, ast.Call) else False


def _literal(call: _Call) -> dict[str, Any] | None:
    """Return the options that a call writes out, None where they are not all known."""
    if call.spread or not _is_npugraph_ex(call) or "config" in call.options:
        return None
    given = call.options.get("options")
    if given is None:
        return {}
    try:
        value = ast.literal_eval(given)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _effective(options: Mapping[str, Any], wheel: Mapping[str, WheelOption]) -> dict[str, Any] | None:
    """Return every option with the value that the runtime will use; None where one of them is unknown or code."""
    if any(name not in wheel and name not in HANDLES for name in options):
        return None
    if any(wheel[name].is_code and value is not None for name, value in options.items() if name in wheel):
        return None
    return {name: item.effective(options[name]) if name in options else item.usual for name, item in wheel.items()}


def _dynamic_of(call: _Call) -> bool | EllipsisType | None:
    """Return what a call says of `dynamic`: True, False, None where torch decides, `...` where it isn't known."""
    given = call.options.get("dynamic")
    if given is None:
        return ... if call.spread else True if call.kind == "cache_compile" else None
    return given.value if isinstance(given, ast.Constant) and isinstance(given.value, bool) else ...


def _names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _targets(loop: ast.AST) -> set[str]:
    """Return the names that a loop binds, or whose attributes and items it sets."""
    if isinstance(loop, (ast.For, ast.AsyncFor, ast.While)):
        effects = effects_of(loop)
        return {*effects.binds, *effects.stores}
    return {name for generator in getattr(loop, "generators", []) for name in _names_in(generator.target)}


def _apart(one: ast.AST, other: ast.AST, scope: ast.AST) -> bool:
    """Say whether only one of two calls runs: they stand in other branches of an `if`, or behind a return."""
    return _path(one, scope) != _path(other, scope)


def _path(node: ast.AST, scope: ast.AST) -> list[tuple[int, str]]:
    """Return the branches that lead to a node."""

    def search(place: ast.AST) -> list[tuple[int, str]] | None:
        for field, value in ast.iter_fields(place):
            for child in value if isinstance(value, list) else [value]:
                if child is node:
                    return [_step(place, field)]
                if isinstance(child, ast.AST) and (below := search(child)) is not None:
                    return [_step(place, field), *below]
        return None

    steps = search(scope) or []
    return [step for step in steps if step[1]]


def _step(place: ast.AST, field: str) -> tuple[int, str]:
    branches = isinstance(place, (ast.If, ast.Try, ast.IfExp, ast.Match, ast.ExceptHandler, ast.match_case))
    return (id(place), field if branches and field != "test" else "")
