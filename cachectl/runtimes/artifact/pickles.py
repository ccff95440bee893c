"""Reads the pickle a compile runtime saves as `compiled_module`, without unpickling it.

Owns the outer form of the artifact and nothing of what its three parts say. No `pickle.Unpickler` is run: the opcodes
are listed with `pickletools`, and only the two dozen that plain dataclasses need are carried out, on inert records.
An allow-list in `find_class` would not be enough: BUILD with a slot state sets attributes on an allowed class itself.
"""

from __future__ import annotations

import pickletools
import struct
from dataclasses import dataclass
from typing import Any, Final

from cachectl.errors import DocumentError

__all__ = ["PICKLE_SIZE_LIMIT_BYTES", "PickledArtifact", "read_pickle"]

PICKLE_SIZE_LIMIT_BYTES: Final = 64 << 20

# A model with 100,000 parameters pickles to fewer; a longer stream is made to keep the reader busy.
_OPCODE_LIMIT: Final = 2_000_000

# Where each runtime's dataclasses live: imported by themselves, and inside torch_npu.
_RUNTIMES: Final = {
    "npugraph_ex.inference._cache_compiler": "npugraph_ex",
    "torch_npu.dynamo.npugraph_ex.inference._cache_compiler": "npugraph_ex",
    "torchair.inference._cache_compiler": "torchair",
    "torch_npu.dynamo.torchair.inference._cache_compiler": "torchair",
}
_FIELDS: Final = {
    "ModelCacheArtifact": ("meta", "compiled_fn", "compiled_fx"),
    "ModelCacheMeta": ("name", "date", "version"),
    "CompiledFX": ("signature", "py_code", "input_parameters"),
}
_HINT: Final = "delete it and build the entry again"


@dataclass(frozen=True)
class PickledArtifact:
    """The fields of the runtime's three dataclasses, as values.

    `runtime` is npugraph_ex or torchair, by the module the dataclasses were pickled from. `compiled_fn` is marshalled
    bytecode and `py_code` Python text: neither may be run here. Texts are as found, but for lone surrogates, which are
    written as escapes so that every text can be encoded.
    """

    runtime: str
    name: str
    date: str
    version: str
    compiled_fn: bytes
    signature: str
    py_code: str
    input_parameters: tuple[tuple[str, bool], ...]


class _Mark:
    """Stands on the stack where MARK was."""


@dataclass(frozen=True)
class _Class:
    """A class of the runtime, by name; never the class itself."""

    module: str
    name: str


class _Record:
    """What NEWOBJ makes of a `_Class`; BUILD may fill it once."""

    def __init__(self, kind: _Class) -> None:
        self.kind = kind
        self.state: dict[object, object] | None = None


def read_pickle(data: bytes) -> PickledArtifact:
    """Read a `compiled_module`.

    Time and memory are linear in `len(data)`; no code of the artifact or of the runtime runs.

    Raises:
        DocumentError: too large, no pickle, cut off, with bytes after its end, naming any class but the runtime's
            three, using any opcode these don't need, or with missing, unknown or mistyped fields.
    """
    if len(data) > PICKLE_SIZE_LIMIT_BYTES:
        raise DocumentError(f"artifact is {len(data)} bytes, the reader stops at {PICKLE_SIZE_LIMIT_BYTES}", hint=_HINT)
    try:
        value = _evaluate(data)
    except DocumentError:
        raise
    # What pickletools raises on malformed streams (Lib/pickletools.py), and an operand of the wrong kind here.
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, EOFError, struct.error) as error:
        raise DocumentError(f"artifact is not a readable pickle: {_one_line(error)}", hint=_HINT) from error
    return _artifact(value)


def _evaluate(data: bytes) -> object:
    stack: list[object] = []
    memo: dict[int, object] = {}
    for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if position is None:
            raise ValueError("an opcode without a position")
        if count == 0 and (name != "PROTO" or argument not in (4, 5)):
            raise ValueError(f"it starts with {name}, not with protocol 4 or 5")
        if count >= _OPCODE_LIMIT:
            raise ValueError(f"more than {_OPCODE_LIMIT} opcodes")
        if name == "STOP":
            if len(stack) != 1:
                raise ValueError(f"{len(stack)} values are left at its end")
            if position + 1 != len(data):
                raise ValueError(f"{len(data) - position - 1} bytes stand after its end")
            return stack[0]
        if name == "PROTO":
            if count:
                raise ValueError(f"a second PROTO at byte {position}")
        elif name == "FRAME":
            # The runtime's unpickler refuses a frame that reaches past the end; pickletools does not look.
            if int(argument or 0) > len(data) - position - 9:
                raise ValueError(f"the frame at byte {position} is cut off")
        else:
            _apply(name, argument, position, stack, memo)
    raise ValueError("it has no end")


def _apply(name: str, argument: Any, position: int, stack: list[object], memo: dict[int, object]) -> None:
    """Do what one opcode does to stack and memo."""
    if name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"):
        stack.append(argument)
    elif name == "NEWTRUE":
        stack.append(True)
    elif name == "NEWFALSE":
        stack.append(False)
    elif name == "EMPTY_TUPLE":
        stack.append(())
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        stack.append(tuple(_pop(stack, int(name[-1]))))
    elif name == "TUPLE":
        stack.append(tuple(_pop_to_mark(stack)))
    elif name == "EMPTY_LIST":
        stack.append([])
    elif name == "EMPTY_DICT":
        stack.append({})
    elif name == "MARK":
        stack.append(_Mark())
    elif name == "APPEND":
        items = _pop(stack, 1)
        _top(stack, list).extend(items)
    elif name == "APPENDS":
        items = _pop_to_mark(stack)
        _top(stack, list).extend(items)
    elif name == "SETITEM":
        items = _pop(stack, 2)
        _set_items(_top(stack, dict), items)
    elif name == "SETITEMS":
        items = _pop_to_mark(stack)
        _set_items(_top(stack, dict), items)
    elif name == "MEMOIZE":
        memo[len(memo)] = _top(stack, object)
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[int(argument or 0)])
    elif name == "STACK_GLOBAL":
        stack.append(_find_class(*_pop(stack, 2)))
    elif name == "NEWOBJ":
        kind, arguments = _pop(stack, 2)
        if not isinstance(kind, _Class) or arguments != ():
            raise ValueError(f"NEWOBJ at byte {position} makes no dataclass")
        stack.append(_Record(kind))
    elif name == "BUILD":
        (state,) = _pop(stack, 1)
        record = _top(stack, _Record)
        if record.state is not None or not isinstance(state, dict):
            raise ValueError(f"BUILD at byte {position} does not fill a fresh dataclass")
        record.state = state
    else:
        raise DocumentError(
            f"artifact uses the pickle opcode {name} at byte {position}, which plain dataclasses never need",
            hint=_HINT,
        )


def _pop(stack: list[object], count: int) -> list[object]:
    if len(stack) < count:
        raise ValueError("it takes more values than it made")
    items = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    if any(isinstance(item, _Mark) for item in items):
        raise ValueError("it takes a mark for a value")
    return items


def _pop_to_mark(stack: list[object]) -> list[object]:
    for index in range(len(stack) - 1, -1, -1):
        if isinstance(stack[index], _Mark):
            items = stack[index + 1 :]
            del stack[index:]
            return items
    raise ValueError("it has no mark where it needs one")


def _top(stack: list[object], kind: type) -> Any:
    if not stack or isinstance(stack[-1], _Mark) or not isinstance(stack[-1], kind):
        raise ValueError(f"it has no {kind.__name__.lstrip('_').lower()} where it needs one")
    return stack[-1]


def _set_items(target: dict[object, object], items: list[object]) -> None:
    if len(items) % 2:
        raise ValueError("a dictionary with a key and no value")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str):
            raise TypeError(f"a dictionary key is a {type(key).__name__}")
        target[key] = value


def _find_class(module: object, name: object) -> _Class:
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("a class is named by something that is no text")
    if module not in _RUNTIMES or name not in _FIELDS:
        raise DocumentError(
            f"artifact names {_short(f'{module}.{name}')}, which is none of the runtime's dataclasses", hint=_HINT
        )
    return _Class(module, name)


def _artifact(value: object) -> PickledArtifact:
    artifact, module = _fields(value, "ModelCacheArtifact", None)
    meta, _ = _fields(artifact["meta"], "ModelCacheMeta", module)
    compiled, _ = _fields(artifact["compiled_fx"], "CompiledFX", module)
    compiled_fn = artifact["compiled_fn"]
    if not isinstance(compiled_fn, bytes):
        raise DocumentError(f"artifact's compiled_fn is a {type(compiled_fn).__name__}, not bytes", hint=_HINT)
    return PickledArtifact(
        runtime=_RUNTIMES[module],
        name=_text(meta, "name"),
        date=_text(meta, "date"),
        version=_text(meta, "version"),
        compiled_fn=compiled_fn,
        signature=_text(compiled, "signature"),
        py_code=_text(compiled, "py_code"),
        input_parameters=_parameters(compiled["input_parameters"]),
    )


def _fields(value: object, name: str, module: str | None) -> tuple[dict[object, object], str]:
    if not isinstance(value, _Record) or value.kind.name != name:
        found = value.kind.name if isinstance(value, _Record) else type(value).__name__.lstrip("_")
        raise DocumentError(f"artifact has a {found} where {name} belongs", hint=_HINT)
    if module is not None and value.kind.module != module:
        raise DocumentError(f"artifact mixes {module} and {value.kind.module}", hint=_HINT)
    state = value.state or {}
    wanted = set(_FIELDS[name])
    if state.keys() != wanted:
        missing = ", ".join(sorted(wanted - state.keys())) or "nothing"
        unknown = _short(", ".join(sorted(str(key) for key in state.keys() - wanted))) or "nothing"
        raise DocumentError(f"artifact's {name} lacks {missing} and has {unknown} beside its fields", hint=_HINT)
    return state, value.kind.module


def _text(state: dict[object, object], field: str) -> str:
    value = state[field]
    if not isinstance(value, str):
        raise DocumentError(f"artifact's {field} is a {type(value).__name__}, not text", hint=_HINT)
    return _encodable(value)


def _parameters(value: object) -> tuple[tuple[str, bool], ...]:
    if not isinstance(value, list):
        raise DocumentError(f"artifact's input_parameters is a {type(value).__name__}, not a list", hint=_HINT)
    parameters: list[tuple[str, bool]] = []
    texts: dict[str, str] = {}  # each name once: a pickle may refer to one long name a million times
    for item in value:
        if not isinstance(item, tuple) or len(item) != 2:
            raise DocumentError("artifact's input_parameters holds something other than pairs", hint=_HINT)
        name, is_parameter = item
        if not isinstance(name, str) or not isinstance(is_parameter, bool):
            raise DocumentError("artifact's input_parameters holds a pair that is not (name, flag)", hint=_HINT)
        if name not in texts:
            texts[name] = _encodable(name)
        parameters.append((texts[name], is_parameter))
    return tuple(parameters)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _short(text: str) -> str:
    text = ascii(text)[1:-1]
    return text if len(text) <= 80 else f"{text[:77]}..."


def _one_line(error: Exception) -> str:
    return _short(" ".join(str(error).split()) or type(error).__name__)
