"""Classes and objects as the reader of source text has them: what they inherit, hold and are made with.

Owns what is known of an object's attributes, what torch.nn.Module gives it, and what type annotations say.
"""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cachectl.services.checks.expressions import ExpressionReader
from cachectl.services.checks.modules import Module, is_module_class
from cachectl.services.checks.values import (
    HOST,
    NONE,
    UNKNOWN,
    Bound,
    Class,
    Const,
    Ext,
    ExtObj,
    Func,
    Host,
    Map,
    Obj,
    Seq,
    Tensor,
    Union,
    Unknown,
    Value,
    first_known,
    join,
    named,
    words,
)
from cachectl.services.checks.watcher import Frame

__all__ = ["ObjectReader", "held", "last_name", "modules_below"]

# So many calls within each other are followed.
DEEPEST = 28
# Methods of torch.nn.Module that return the module.
SAME_MODULE = words(
    "to npu cuda cpu eval train requires_grad_ half float bfloat16 double type apply to_empty share_memory"
)

_TENSOR_TYPES = words(
    "Tensor LongTensor IntTensor FloatTensor HalfTensor BoolTensor BFloat16Tensor DoubleTensor Int8Tensor "
    "ByteTensor ShortTensor CharTensor Parameter"
)


class ObjectReader(ExpressionReader):
    """Knows classes and objects."""

    depth = 0

    @abstractmethod
    def call_function(
        self, func: Func, args: list[Value], kwargs: Mapping[str, Value], node: ast.AST, frame: Frame
    ) -> Value:
        """Read a function with these arguments; return what it returns."""

    def bases(self, cls: Class) -> list[Value]:
        frame = cls.scope or self.module_frame(cls.module)
        watching, self.watching = self.watching, False
        try:
            return [self.eval(base, frame) for base in cls.node.bases]
        finally:
            self.watching = watching

    def mro(self, cls: Class) -> list[Class]:
        """Return a class with those it inherits from that the reader has the source of, nearest first."""
        found: list[Class] = []
        waiting = [cls]
        while waiting and len(found) < 50:
            first = waiting.pop(0)
            if all(first.node is not other.node for other in found):
                found.append(first)
                waiting = [base for base in self.bases(first) if isinstance(base, Class)] + waiting
        return found

    def foreign_bases(self, cls: Class) -> list[Value]:
        """Return the base classes that the reader has no source of."""
        return [base for known in self.mro(cls) for base in self.bases(known) if not isinstance(base, Class)]

    def is_module(self, cls: Class) -> bool:
        """Say whether a class is a torch.nn.Module, as far as its text tells."""
        return any(
            is_module_class(base) or (isinstance(base, Ext) and base.path.endswith(("Model", "Module", "Mixin")))
            for base in self.foreign_bases(cls)
        )

    def is_record(self, cls: Class) -> bool:
        """Say whether a class is a dataclass, a named tuple or an enumeration."""
        frame = self.module_frame(cls.module)
        marks = [
            self.eval(mark.func if isinstance(mark, ast.Call) else mark, frame)
            for known in self.mro(cls)
            for mark in known.node.decorator_list
        ]
        names = [
            value.path.rpartition(".")[2] for value in (*marks, *self.foreign_bases(cls)) if isinstance(value, Ext)
        ]
        return any(name in ("dataclass", "NamedTuple", "TypedDict", "BaseModel") or "Enum" in name for name in names)

    def find_in_class(self, cls: Class, name: str, behind: Class | None = None) -> tuple[Class, ast.AST] | None:
        """Return the statement that binds a name in a class or what it inherits, with the class it stands in."""
        order = self.mro(cls)
        if behind is not None:
            places = [i for i, known in enumerate(order) if known.node is behind.node]
            order = order[places[0] + 1 :] if places else order
        for known in order:
            for statement in reversed(known.node.body):
                if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) and statement.name == name:
                    return known, statement
                targets = (
                    statement.targets if isinstance(statement, ast.Assign)
                    else [statement.target] if isinstance(statement, ast.AnnAssign) and statement.value is not None
                    else []
                )  # fmt: skip
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    source = getattr(statement, "value", None)
                    if isinstance(source, ast.Name) and source.id != name:
                        # Another name for a method of the same class.
                        return self.find_in_class(known, source.id) or (known, statement)
                    return known, statement
        return None

    def method_of(self, cls: Class, name: str) -> Func | None:
        """Return the function of that name in a class or what it inherits."""
        found = self.find_in_class(cls, name)
        if found is None or not isinstance(found[1], (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        return Func(found[1], found[0].module, found[0].scope, found[0])

    def member(self, value: Obj | Class, name: str, node: ast.AST, frame: Frame) -> Value:
        cls = value.cls if isinstance(value, Obj) else value
        if isinstance(value, Obj) and name in value.attrs:
            found = value.attrs[name]
            if isinstance(found, Const) and name in self.changing and name != "training":
                return Host(name)
            return named(found, name)
        return self.class_member(value, cls, name, None, frame)

    def class_member(self, value: Any, cls: Class, name: str, behind: Class | None, frame: Frame) -> Value:
        """Return what a class gives for a name; methods are bound to `value` where that is an object."""
        place = self.find_in_class(cls, name, behind)
        if place is None:
            return Host(name) if name == "training" else Unknown(name)
        known, statement = place
        scope = known.scope or self.module_frame(known.module)
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            func = Func(statement, known.module, known.scope, known)
            marks = {last_name(mark) for mark in statement.decorator_list}
            if "staticmethod" in marks:
                return func
            if "classmethod" in marks:
                return Bound(func, cls)
            if not isinstance(value, Obj):
                return func
            if marks & {"property", "cached_property", "setter"}:
                return self.call_function(func, [value], {}, statement, frame)
            return Bound(func, value)
        source = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
        if source is None:
            return UNKNOWN
        found = self.eval(source, scope)
        if isinstance(found, Func) and isinstance(value, Obj):
            return Bound(found, value)  # An alias in the class's body: still a method.
        return Host(name) if isinstance(found, Const) and name in self.changing else named(found, name)

    def instantiate(
        self, cls: Class, args: list[Value], kwargs: dict[str, Value], node: ast.AST, frame: Frame
    ) -> Value:
        """Return a new object of a class, with what its __init__ makes of its attributes."""
        made = Obj(cls, name="local" if self.watching else "")
        found = self.method_of(cls, "__init__")
        watching, self.watching = self.watching, False
        try:
            if found is not None:
                self.call_function(found, [made, *args], kwargs, node, frame)
            elif self.is_record(cls):
                self._fill(made, args, kwargs)
            else:
                made.attrs |= kwargs
        finally:
            self.watching = watching
        return made

    def _fill(self, made: Obj, args: list[Value], kwargs: dict[str, Value]) -> None:
        """Bind the fields of a dataclass or a named tuple."""
        fields = [
            (statement, known)
            for known in reversed(self.mro(made.cls))
            for statement in known.node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        ]
        for index, (statement, known) in enumerate(fields):
            name = statement.target.id  # type: ignore[union-attr]
            value = args[index] if index < len(args) else kwargs.get(name)
            if value is None or isinstance(value, Unknown):
                value = first_known([self.annotated(statement.annotation, known.module), value or UNKNOWN])
                if isinstance(value, Unknown) and isinstance(statement.value, ast.Constant):
                    value = Const(statement.value.value)
            made.attrs[name] = named(value, name)

    def _module_api(
        self, receiver: Obj, name: str, args: list[Value], kwargs: dict[str, Value], node: ast.AST
    ) -> Value:
        """Call what an object has from torch.nn.Module."""
        first = args[0] if args else kwargs.get("name")
        if name in ("register_buffer", "register_parameter", "add_module", "register_module", "__setattr__"):
            value = args[1] if len(args) > 1 else first_known(kwargs.values())
            if isinstance(first, Const) and isinstance(first.value, str):
                kind = {"register_buffer": "buffer", "register_parameter": "parameter"}.get(name, "")
                receiver.attrs[first.value] = (
                    held(value, first.value, kind) if value != NONE else NONE
                )  # fmt: skip
            return NONE
        if name in SAME_MODULE:
            if name in ("eval", "train"):
                self.trains(receiver, name == "train" and not (args and args[0] == Const(False)))
            return receiver
        if name in ("parameters", "buffers"):
            return Seq("list", None, Tensor(kind="parameter" if name == "parameters" else "buffer"))
        if name in ("named_parameters", "named_buffers"):
            return Seq("list", None, Seq("tuple", (HOST, Tensor(kind="parameter"))))
        return Unknown(name)

    def trains(self, receiver: Obj, value: bool) -> None:
        """Note that a module, and all below it, trains or not."""
        for part in modules_below(receiver):
            part.attrs["training"] = Const(value)

    def _is_instance(self, value: Value, kind: Value) -> bool | None:
        if isinstance(kind, Seq) and kind.items is not None:
            answers = [self._is_instance(value, item) for item in kind.items]
            return True if True in answers else None if None in answers else False
        if isinstance(value, (Unknown, Union, Host)):
            return None
        if isinstance(kind, Class):
            if isinstance(value, Obj):
                if any(known.node is kind.node for known in self.mro(value.cls)):
                    return True
                return None if self.foreign_bases(value.cls) and self.foreign_bases(kind) else False
            return False
        path = kind.path if isinstance(kind, Ext) else ""
        if isinstance(value, Tensor):
            if path.endswith("Parameter"):
                return value.kind == "parameter" or None
            return path in ("torch.Tensor", "torch.nn.Parameter") if path.startswith(("torch.", "builtins.")) else None
        if isinstance(value, Seq) and path.startswith(("builtins.", "torch.")):
            return path == f"builtins.{value.kind}" or path.endswith((".Sequence", ".Iterable"))
        if isinstance(value, Const) and path.startswith("builtins."):
            known = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "tuple": tuple, "dict": dict}
            type_ = known.get(path.removeprefix("builtins."))
            return isinstance(value.value, type_) if type_ is not None else None
        return False if isinstance(value, Const) and path.startswith("torch.") else None

    def annotated(self, node: ast.expr | None, module: Module) -> Value:
        """Return what a type annotation says of a value."""
        if node is None:
            return UNKNOWN
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                return self.annotated(ast.parse(node.value, mode="eval").body, module)
            except SyntaxError:
                return UNKNOWN
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return join(*(self.annotated(side, module) for side in (node.left, node.right)))
        if isinstance(node, ast.Constant) and node.value is None:
            return NONE
        if isinstance(node, ast.Subscript):
            return self._annotated_generic(node, module)
        name = last_name(node)
        if name in _TENSOR_TYPES:
            return Tensor(boolean=name == "BoolTensor")
        if name in ("int", "float", "bool", "str", "complex", "dtype", "device", "Enum"):
            return HOST
        if name in ("list", "List", "tuple", "Tuple", "set"):
            return Seq(name.lower(), None, UNKNOWN)
        if name in ("dict", "Dict"):
            return Map({}, UNKNOWN)
        value = self.eval(node, self.module_frame(module)) if isinstance(node, (ast.Name, ast.Attribute)) else UNKNOWN
        if isinstance(value, Class) and self.is_record(value) and self.depth < DEEPEST:
            made = Obj(value)
            self.depth += 1
            self._fill(made, [], {})
            self.depth -= 1
            return made
        return UNKNOWN

    def _annotated_generic(self, node: ast.Subscript, module: Module) -> Value:
        name = last_name(node.value)
        inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        members = [self.annotated(part, module) for part in inner if not _is_ellipsis(part)]
        if name == "Optional":
            return join(*members, NONE)
        if name in ("Annotated", "Final", "ClassVar"):
            return members[0] if members else UNKNOWN
        if name == "Union":
            return join(*members)
        if name in ("list", "List", "Sequence", "Iterable", "tuple", "Tuple", "set", "Set"):
            kind = "tuple" if name.lower() == "tuple" else "set" if name.lower() == "set" else "list"
            if kind == "tuple" and not any(map(_is_ellipsis, inner)):
                return Seq(kind, tuple(members))
            return Seq(kind, None, members[0] if members else UNKNOWN)
        if name in ("dict", "Dict", "Mapping"):
            return Map({}, members[1] if len(members) > 1 else UNKNOWN)
        return UNKNOWN


def held(value: Value, name: str, kind: str = "") -> Value:
    """Return a value as an attribute holds it: tensors know where they live."""
    if isinstance(value, Tensor):
        return replace(value, home=value.home or name, name=name, kind=kind or value.kind or "plain", sliced="")
    if isinstance(value, Seq):
        items = tuple(held(item, name, kind) for item in value.items) if value.items is not None else None
        return replace(value, items=items, element=held(value.element, name, kind))
    if isinstance(value, Map):
        return Map({key: held(item, name, kind) for key, item in value.known.items()}, held(value.rest, name, kind))
    return value


def modules_below(value: Value) -> list[Any]:
    """Return an object and the objects below it, each once."""
    found: list[Any] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Seq):
            waiting += item.items if item.items is not None else [item.element]
        elif isinstance(item, Map):
            waiting += [*item.known.values(), item.rest]
        elif isinstance(item, Union):
            waiting += item.members
        elif isinstance(item, (Obj, ExtObj)) and all(item is not other for other in found):
            found.append(item)
            waiting += [*item.attrs.values(), *(item.args if isinstance(item, ExtObj) else ())]
    return found


def last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_ellipsis(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...
