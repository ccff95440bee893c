"""Calls as the reader of source text follows them: functions, methods, containers, modules of torch.

Owns which function a call runs and how its arguments are bound. What has no source here is asked of torch_calls.py.
"""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cachectl.services.checks.modules import Modules
from cachectl.services.checks.objects import DEEPEST, SAME_MODULE, ObjectReader
from cachectl.services.checks.torch_calls import TENSOR_METHODS, external_call, tensor_method
from cachectl.services.checks.values import (
    HOST,
    NONE,
    TENSOR,
    UNKNOWN,
    Bound,
    Class,
    Const,
    Ext,
    ExtObj,
    Func,
    Host,
    Map,
    ModuleRef,
    Obj,
    Seq,
    Shape,
    Tensor,
    Unknown,
    Value,
    alternatives,
    element_of,
    first_known,
    join,
    named,
    present,
    signature,
)
from cachectl.services.checks.watcher import Frame, Watcher

__all__ = ["REST", "CallReader", "Super"]

# Stands among keyword arguments for those that are passed and not known.
REST = "**"

_MOST_CALLS = 20_000


@dataclass(eq=False)
class Super:
    """What super() returns: an object, looked at from behind one of its classes."""

    receiver: Obj
    behind: Class


class CallReader(ObjectReader):
    """Follows calls."""

    # How many branches that need not be taken stand around what is read.
    doubt = 0
    # How many things the call that is looked at may be of.
    choices = 1
    # Methods that some __init__ calls.
    setting_up: frozenset[str] = frozenset()

    def __init__(self, modules: Modules, watcher: Watcher | None = None) -> None:
        super().__init__(modules, watcher)
        self.calls = 0
        # What functions of the compiled path returned, by their arguments.
        self.answers: dict[Any, Value] = {}
        # Frames of these, so that no id in their arguments is used again.
        self.kept: list[Frame] = []

    @abstractmethod
    def run(self, func: Func, frame: Frame) -> Value:
        """Read a function's body in a frame whose parameters are bound; return what it returns."""

    def _eval_Call(self, node: ast.Call, frame: Frame) -> Value:  # noqa: N802 - the syntax tree's name
        if isinstance(node.func, ast.Attribute):
            receiver = self.eval(node.func.value, frame)
            args, kwargs = self.arguments(node, frame)
            name, members = node.func.attr, present(receiver)
            before, self.choices = self.choices, len(members)
            found = [self.call_method(member, name, args, kwargs, node, frame) for member in members]
            self.choices = before
            return join(*found)
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not frame.module.bindings.get("super"):
            return self._super(frame)
        callee = self.eval(node.func, frame)
        args, kwargs = self.arguments(node, frame)
        return join(*(self.call(member, args, kwargs, node, frame) for member in present(callee)))

    def arguments(self, node: ast.Call, frame: Frame) -> tuple[list[Value], dict[str, Value]]:
        """Evaluate a call's arguments, stars spread as far as they are known."""
        args: list[Value] = []
        for part in node.args:
            value = self.eval(part, frame)
            if isinstance(part, ast.Starred):
                args += list(value.items) if isinstance(value, Seq) and value.items is not None else []
            else:
                args.append(value)
        kwargs: dict[str, Value] = {}
        for keyword in node.keywords:
            value = self.eval(keyword.value, frame)
            if keyword.arg is not None:
                kwargs[keyword.arg] = value
            elif isinstance(value, Map):
                kwargs |= {key: item for key, item in value.known.items() if isinstance(key, str)}
                if value.rest is not None:
                    kwargs[REST] = UNKNOWN
            else:
                kwargs[REST] = UNKNOWN
        return args, kwargs

    def _super(self, frame: Frame) -> Value:
        scope: Frame | None = frame
        while scope is not None:
            if scope.owner is not None and isinstance(scope.receiver, Obj):
                return Super(scope.receiver, scope.owner)
            scope = scope.outer
        return UNKNOWN

    def call_method(
        self, receiver: Value, name: str, args: list[Value], kwargs: dict[str, Value], node: ast.Call, frame: Frame
    ) -> Value:
        """Call a method of a value."""
        if isinstance(receiver, (Ext, ModuleRef)):
            return self.call(self.attribute(receiver, name, node, frame), args, kwargs, node, frame)
        if isinstance(receiver, Super):
            found = self.class_member(receiver.receiver, receiver.receiver.cls, name, receiver.behind, frame)
            if isinstance(found, Bound):
                return self.call(found, args, kwargs, node, frame)
            return self._module_api(receiver.receiver, name, args, kwargs, node)
        if isinstance(receiver, (Obj, Class)):
            found = self.member(receiver, name, node, frame)
            if isinstance(receiver, Obj) and isinstance(found, Unknown):
                if self.watching:
                    self.watcher.method(frame, node, receiver, name, args, kwargs)
                return self._module_api(receiver, name, args, kwargs, node)
            return join(*(self.call(member, args, kwargs, node, frame) for member in present(found)))
        if self.watching:
            self.watcher.method(frame, node, receiver, name, args, kwargs)
        if isinstance(receiver, Tensor):
            return tensor_method(receiver, name, args, node)
        if isinstance(receiver, (Seq, Map)):
            return self._container_method(receiver, name, args)
        if isinstance(receiver, ExtObj):
            if name in receiver.attrs:
                return self.call(receiver.attrs[name], args, kwargs, node, frame)
            if name in SAME_MODULE and receiver.path.startswith("torch."):
                return receiver
            if name == "forward" and receiver.path.startswith("torch.nn."):
                return self.call(receiver, args, kwargs, node, frame)
            return UNKNOWN
        if isinstance(receiver, (Host, Const)):
            return HOST
        if isinstance(receiver, Shape):
            return HOST
        if isinstance(receiver, Unknown) and name in TENSOR_METHODS:
            return HOST if name == "item" else tensor_method(Tensor(name=receiver.name), name, args, node)
        return UNKNOWN

    @staticmethod
    def _container_method(receiver: Seq | Map, name: str, args: list[Value]) -> Value:
        if isinstance(receiver, Map):
            rest = [] if receiver.rest is None else [receiver.rest]
            if name == "get" or name == "pop":
                key = args[0] if args else UNKNOWN
                if isinstance(key, Const) and isinstance(key.value, str) and key.value in receiver.known:
                    return receiver.known[key.value]
                default = args[1] if len(args) > 1 else NONE
                return (
                    default if isinstance(key, Const) and receiver.rest is None else join(default, *rest or [UNKNOWN])
                )
            everything = join(*receiver.known.values(), *rest)
            if name == "values":
                return Seq("list", tuple(receiver.known.values()) if not rest else None, everything)
            if name == "items":
                if not rest:
                    pairs = tuple(Seq("tuple", (Const(key), value)) for key, value in receiver.known.items())
                    return Seq("list", pairs)
                return Seq("list", None, Seq("tuple", (HOST, everything)))
            if name == "keys":
                return Seq("list", None, HOST)
            if name == "update" and args and isinstance(args[0], Map):
                receiver.known |= args[0].known
            return UNKNOWN if name not in ("update", "setdefault") else NONE
        return element_of(receiver) if name == "pop" else HOST if name in ("index", "count") else NONE

    def call(self, callee: Value, args: list[Value], kwargs: dict[str, Value], node: ast.AST, frame: Frame) -> Value:
        """Call a value."""
        if isinstance(callee, Func):
            return self.call_function(callee, args, kwargs, node, frame)
        if isinstance(callee, Bound):
            return self.call_function(callee.func, [callee.receiver, *args], kwargs, node, frame)
        if self.watching and isinstance(node, ast.Call):
            self.watcher.call(frame, node, callee, args, kwargs)
        if isinstance(callee, Class):
            return self.instantiate(callee, args, kwargs, node, frame)
        if isinstance(callee, Obj):
            found = self.method_of(callee.cls, "__call__") or self.method_of(callee.cls, "forward")
            if "forward" in callee.attrs:
                return self.call(callee.attrs["forward"], args, kwargs, node, frame)
            return self.call_function(found, [callee, *args], kwargs, node, frame) if found is not None else UNKNOWN
        if isinstance(callee, ExtObj):
            return self._call_foreign(callee, args, kwargs, node, frame)
        if isinstance(callee, Ext):
            return self._call_named(callee, args, kwargs, node, frame)
        return UNKNOWN

    def _call_foreign(
        self, callee: ExtObj, args: list[Value], kwargs: dict[str, Value], node: ast.AST, frame: Frame
    ) -> Value:
        if callee.path == "functools.partial" and callee.args:
            first, *bound = callee.args
            return join(
                *(
                    self.call(item, [*bound, *args], {**callee.kwargs, **kwargs}, node, frame)
                    for item in alternatives(first)
                )
            )
        if callee.path == "torch.nn.Sequential":
            parts = [item for arg in callee.args for item in (arg.items or () if isinstance(arg, Seq) else (arg,))]
            value: Value = args[0] if args else TENSOR
            for part in parts:
                value = self.call(part, [value], {}, node, frame)
            return value if parts else TENSOR
        if callee.path in ("torch.nn.LSTM", "torch.nn.GRU", "torch.nn.RNN", "torch.nn.MultiheadAttention"):
            return Seq("tuple", None, TENSOR)
        return TENSOR if callee.path.startswith("torch.nn.") else UNKNOWN

    def _call_named(
        self, callee: Ext, args: list[Value], kwargs: dict[str, Value], node: ast.AST, frame: Frame
    ) -> Value:
        path = callee.path
        if path == "builtins.isinstance" and len(args) == 2:
            found = self._is_instance(args[0], args[1])
            return HOST if found is None else Const(found)
        if path in ("builtins.getattr", "builtins.hasattr") and len(args) > 1 and isinstance(args[1], Const):
            value = join(*(self.attribute(item, str(args[1].value), node, frame) for item in present(args[0])))
            if path == "builtins.hasattr":
                return HOST if isinstance(value, Unknown) else Const(True)
            return value if len(args) == 2 or not isinstance(value, Unknown) else UNKNOWN
        if path == "builtins.setattr" and len(args) == 3 and isinstance(args[1], Const) and isinstance(node, ast.Call):
            target = ast.copy_location(ast.Attribute(node.args[0], str(args[1].value), ast.Store()), node)
            for member in alternatives(args[0]):
                self.set_attribute(target, member, args[2], node.args[2], frame)
            return NONE
        if path == "builtins.map" and len(args) > 1:
            return Seq("list", None, self.call(args[0], [element_of(arg) for arg in args[1:]], {}, node, frame))
        if path in ("types.SimpleNamespace", "argparse.Namespace"):
            return ExtObj(path, (), dict(kwargs), name="local" if self.watching else "", attrs=dict(kwargs))
        if path == "dataclasses.replace" and args and isinstance(args[0], Obj):
            return Obj(args[0].cls, {**args[0].attrs, **kwargs})
        if path in ("builtins.type", "builtins.vars"):
            return args[0].cls if args and isinstance(args[0], Obj) else HOST
        return external_call(path, args, kwargs)

    def call_function(
        self, func: Func, args: list[Value], kwargs: Mapping[str, Value], node: ast.AST, frame: Frame
    ) -> Value:
        """Read a function with these arguments; return what it returns."""
        if self.watching:
            self.watcher.entered(frame, node, func)
        if self.depth >= DEEPEST or self.calls >= _MOST_CALLS:
            return UNKNOWN
        if self.watching and self.doubt and func.owner is not None and func.name in self.setting_up:
            # What __init__ calls too makes up for something that is not there yet: no step of the many.
            return UNKNOWN
        inner = self.bind(func, args, kwargs)
        key: Any = None
        if self.watching:
            key = (id(func.node), tuple((name, signature(value)) for name, value in inner.names.items()))
            if key in self.answers:
                return self.answers[key]
            self.answers[key] = UNKNOWN  # For a function that calls itself.
        self.calls += 1
        self.depth += 1
        try:
            value = self.run(func, inner)
        finally:
            self.depth -= 1
        if key is not None:
            self.answers[key] = value
            self.kept.append(inner)
        return value

    @abstractmethod
    def set_attribute(
        self, target: ast.Attribute, receiver: Value, value: Value, source: ast.AST, frame: Frame
    ) -> None:
        """Bind an attribute of a value."""

    def bind(self, func: Func, args: Sequence[Value], kwargs: Mapping[str, Value]) -> Frame:
        """Return the frame of a call; what is not passed has its default, or what its annotation says."""
        receiver = args[0] if args and func.owner is not None else None
        frame = Frame(func.module, func, outer=func.scope, receiver=receiver, owner=func.owner)
        spec = func.node.args
        plain = [*spec.posonlyargs, *spec.args]
        defaults: list[ast.expr | None] = [None] * (len(plain) - len(spec.defaults)) + list(spec.defaults)
        rest = dict(kwargs)
        # More is passed than is known: a default need not be what is used.
        open_ = rest.pop(REST, None) is not None
        for index, (parameter, default) in enumerate(
            [*zip(plain, defaults, strict=True), *zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
        ):
            value = rest.pop(parameter.arg, None)
            if value is None and index < min(len(args), len(plain)):
                value = args[index]
            if value is None and default is not None and not open_:
                value = self._default(default, func)
            if value is None or isinstance(value, Unknown):
                value = first_known([self.annotated(parameter.annotation, func.module), value or UNKNOWN])
            frame.names[parameter.arg] = named(value, parameter.arg)
        if spec.vararg is not None:
            frame.names[spec.vararg.arg] = Seq("tuple", tuple(args[len(plain) :]))
        if spec.kwarg is not None:
            frame.names[spec.kwarg.arg] = Map(rest, UNKNOWN if open_ else None)
        return frame

    def _default(self, node: ast.expr, func: Func) -> Value:
        watching, self.watching = self.watching, False
        try:
            return self.eval(node, func.scope or self.module_frame(func.module))
        finally:
            self.watching = watching
