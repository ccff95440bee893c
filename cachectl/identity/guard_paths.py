"""Places in a call, as Dynamo names them: parsed once at build, walked at every boot.

Owns the path: a tuple of steps, each a short string whose first character says what kind it is. The first step is a
root. A guard sheet holds the steps as the edges of its tree.

    L:x       the argument (or free variable) x          G:EPS     the method's global EPS
    I:a.b     the imported module a.b                    B         the method's builtins, a dict
    .eps      the attribute                              !eps      the attribute, past the class's own __getattr__
    :weight   the item with this string as its key       #3        the item with this integer as its key
    =<json>   the item with another constant as its key, as cachectl.identity.guard_values writes it
    @type @classdict @key:0 @value:0 @member:0 @next:0 @size:0 @stride:0 @offset @weakref
    @fields @dataclass_fields @numpy @scalar_tensor @item @int         what Dynamo's other sources do

A source's name is a Python expression. It is parsed as one and never evaluated. Standard library only.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from cachectl.identity.guard_values import Unsayable
from cachectl.schemas.canonical import canonical_bytes

__all__ = ["Path", "item_step", "parse_source", "path_of", "readable", "secret_name"]

Path: TypeAlias = tuple[str, ...]

_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_CONTAINERS = frozenset({"._modules", "._parameters", "._buffers"})
# Functions of one argument that stand in sources' names, and the step they are.
_CALLS = {
    "type": "@type",
    "int": "@int",
    "___from_numpy": "@numpy",
    "___as_tensor": "@scalar_tensor",
    "___namedtuple_fields": "@fields",
    "___dataclass_fields": "@dataclass_fields",
}
_DEPTH_LIMIT = 1000


def parse_source(name: str, aliases: Mapping[str, Path | None] | None = None) -> Path:
    """Return the path that a Dynamo source name says.

    Args:
        name: as `L['self']._modules['layers'].eps`.
        aliases: globals that Dynamo itself installed while tracing, and the path that means the same without it; None
            where there is none.

    Raises:
        Unsayable: no chain of accesses that a boot may walk.
    """
    try:
        tree = ast.parse(name, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unsayable(f"the source {name!r}, which is no expression") from error
    return path_of(tree, aliases or {})


def path_of(tree: ast.expr, aliases: Mapping[str, Path | None]) -> Path:
    """Return the path of a parsed source name; raises as `parse_source` does."""
    steps: list[str] = []
    for _ in range(_DEPTH_LIMIT):
        root = _root(tree, aliases)
        if root is not None:
            return (*root, *reversed(steps))
        step, tree = _last_step(tree)
        steps.append(step)
    raise Unsayable("a source nested too deeply")


def item_step(key: Any) -> str:
    """Return the step to the item with a constant as its key.

    Args:
        key: as cachectl.identity.guard_values writes it.
    """
    if type(key) is str:
        return f":{key}"
    if type(key) is int:
        return f"#{key}"
    return f"={canonical_bytes(key).decode()}"


def readable(path: Sequence[str]) -> str:
    """Return a path as a programmer would write it: `self.layers[0].norm.eps`."""
    text, steps = "", list(path)
    for place, step in enumerate(steps):
        kind, rest = step[0], step[1:]
        after_container = place > 0 and steps[place - 1] in _CONTAINERS
        if place == 0:
            text = rest[1:] if kind in "LGI" else "builtins"
        elif step in _CONTAINERS and place + 1 < len(steps) and steps[place + 1][0] == ":":
            continue
        elif kind == ":" and after_container:
            text += f"[{rest}]" if rest.isdecimal() else f".{rest}"
        elif kind in ".!":
            text += f".{rest}"
        elif kind == ":":
            text += f"[{rest!r}]"
        elif kind in "#=":
            text += f"[{rest}]"
        else:
            text = _readable_call(text, rest)
    return text


def secret_name(path: Sequence[str]) -> str | None:
    """Return the name a path ends in, if it looks like that of a secret; an index takes the name before it."""
    for step in reversed(path):
        if step[0] in "#=@":
            continue
        name = step[2:] if step[:2] in ("L:", "G:", "I:") else step[1:]
        return name if any(word in name.upper() for word in _SECRETS) else None
    return None


def _readable_call(text: str, call: str) -> str:
    name, _, argument = call.partition(":")
    if name == "type":
        return f"type({text})"
    if name in ("key", "value"):
        return f"list({text}{'.values()' if name == 'value' else ''})[{argument}]"
    if name == "classdict":
        return f"{text}.__dict__"
    if name in ("size", "stride"):
        return f"{text}.{name}({argument})"
    if name == "offset":
        return f"{text}.storage_offset()"
    if name == "subclasses":
        return f"{text}.__subclasses__()"
    return f"{text}.<{call}>"


def _root(tree: ast.expr, aliases: Mapping[str, Path | None]) -> Path | None:
    if isinstance(tree, ast.Subscript) and isinstance(tree.value, ast.Name) and tree.value.id in ("L", "G"):
        name = _constant(tree.slice)
        if not isinstance(name, str):
            raise Unsayable(f"the source {ast.unparse(tree)}")
        if tree.value.id == "G" and name in aliases:
            alias = aliases[name]
            if alias is None:
                raise Unsayable("an object that only tracing made a global of")
            return alias
        return (f"{tree.value.id}:{name}",)
    if isinstance(tree, ast.Call) and _called(tree) == "__import__" and len(tree.args) == 1:
        return (f"I:{_constant(tree.args[0])}",)
    if isinstance(tree, (ast.Attribute, ast.Subscript)):
        return None
    if isinstance(tree, ast.Call) and (isinstance(tree.func, (ast.Attribute, ast.Subscript)) or tree.args):
        return None
    raise Unsayable(f"the source {ast.unparse(tree)}")


def _last_step(tree: ast.expr) -> tuple[str, ast.expr]:
    """Return the outermost step of a source's name and what it is taken from."""
    if isinstance(tree, ast.Attribute):
        return f".{tree.attr}", tree.value
    if isinstance(tree, ast.Subscript):
        return _item(tree)
    if isinstance(tree, ast.Call) and not tree.keywords:
        return _call(tree)
    raise Unsayable(f"the source {ast.unparse(tree)}")


def _item(tree: ast.Subscript) -> tuple[str, ast.expr]:
    value = tree.value
    if isinstance(value, ast.Call) and not value.keywords:
        called = _called(value)
        if called in ("size", "stride") and isinstance(value.func, ast.Attribute) and not value.args:
            return f"@{called}:{_index(tree.slice)}", value.func.value
        if called == "list" and len(value.args) == 1:
            inner = value.args[0]
            if isinstance(inner, ast.Call) and _called(inner) == "dict.keys" and len(inner.args) == 1:
                return f"@key:{_index(tree.slice)}", inner.args[0]
            return f"@member:{_index(tree.slice)}", inner
        if called == "__tensor_flatten__":
            raise Unsayable("what a tensor subclass is made of")
    return _keyed_item(tree.slice, value), value


def _keyed_item(key: ast.expr, owner: ast.expr) -> str:
    """Return the step to an item whose key is a constant, or the dict's own n-th: `d[list(dict.keys(d))[0]]`."""
    if isinstance(key, ast.Subscript):
        step, keys_of = _item(key)
        if step.startswith("@key:") and ast.dump(keys_of) == ast.dump(owner):
            return f"@value:{step.removeprefix('@key:')}"
    return _constant_item(key)


def _call(tree: ast.Call) -> tuple[str, ast.expr]:
    called, arguments = _called(tree), tree.args
    if called in _CALLS and len(arguments) == 1:
        return _CALLS[called], arguments[0]
    if called == "dict" and len(arguments) == 1:
        inner = arguments[0]
        if isinstance(inner, ast.Attribute) and inner.attr == "__dict__":
            return "@classdict", inner.value
    if called in ("dict.__getitem__", "list.__getitem__") and len(arguments) == 2:
        return _keyed_item(arguments[1], arguments[0]), arguments[0]
    if called == "___tuple_iterator_getitem" and len(arguments) == 2:
        return f"@next:{_index(arguments[1])}", arguments[0]
    if called in ("getattr", "object.__getattribute__") and len(arguments) == 2:
        return f"{'.' if called == 'getattr' else '!'}{_constant(arguments[1])}", arguments[0]
    if not arguments and isinstance(tree.func, ast.Attribute) and called in ("storage_offset", "item"):
        return "@offset" if called == "storage_offset" else "@item", tree.func.value
    if not arguments and called == "__subclasses__" and isinstance(tree.func, ast.Attribute):
        return "@subclasses", tree.func.value
    if not arguments and called not in ("get_base", "__obj_flatten__", "qualified_name", "__neg__"):
        # Dynamo holds some globals by a weak reference: `G['name']()`.
        return "@weakref", tree.func
    raise Unsayable(f"the source {ast.unparse(tree)}")


def _called(tree: ast.Call) -> str:
    """Return what is called: a plain name, `list.__getitem__` and the like, or the method's name."""
    if isinstance(tree.func, ast.Name):
        return tree.func.id
    if isinstance(tree.func, ast.Attribute):
        owner = tree.func.value
        if isinstance(owner, ast.Name) and owner.id in ("dict", "list", "object"):
            return f"{owner.id}.{tree.func.attr}"
        return tree.func.attr
    return ""


def _constant_item(tree: ast.expr) -> str:
    key = _constant(tree)
    if type(key) in (str, int):
        return item_step(key)
    if key is None or type(key) in (bool, float):
        return item_step(key if type(key) is not float else json.loads(json.dumps(key)))
    if type(key) is tuple and all(member is None or type(member) in (str, int, bool) for member in key):
        return item_step({"$tuple": list(key)})
    raise Unsayable(f"the key {ast.unparse(tree)}")


def _constant(tree: ast.expr) -> Any:
    try:
        return ast.literal_eval(tree)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise Unsayable(f"the key {ast.unparse(tree)}") from error


def _index(tree: ast.expr) -> int:
    index = _constant(tree)
    if type(index) is not int:
        raise Unsayable(f"the index {ast.unparse(tree)}")
    return index
