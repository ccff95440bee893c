"""Reads marshalled CPython bytecode without `marshal.loads`, and tells which minor made it.

Owns the marshal stream of code objects of CPython 3.10 to 3.13 (Python/marshal.c). `marshal.loads` on foreign bytes
may crash the interpreter, and bytecode of another minor crashes when it is called; so nothing here makes a code object.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from cachectl.errors import DocumentError
from cachectl.runtimes.artifact.opcodes import DIALECTS, Dialect

__all__ = ["CodeSummary", "read_code"]

_DEPTH_LIMIT: Final = 64
_OBJECT_LIMIT: Final = 1_000_000
_WORK_FACTOR: Final = 16
_FREE_VARIABLE: Final = 0x80  # CO_FAST_FREE, Include/internal/pycore_code.h
_DEVICE_TYPES: Final = frozenset({"npu", "privateuseone", "cuda"})
_DEVICE_TEXT: Final = re.compile(r"(?:npu|privateuseone|cuda):\d{1,9}")
_IMPORT: Final = "__import_"
_COMPILED: Final = "__compiled_fn"
_USER_CLASS: Final = "<user_class>"
_HINT: Final = "delete it and build the entry again"


@dataclass(frozen=True)
class CodeSummary:
    """What a marshalled code object says of itself.

    `minors` are the CPython minors ("3.11") whose instruction set the bytecode fits: more than one for code too small
    to tell, none for a minor this program does not know. `devices` are indexed devices ("npu:1") among its constants.
    `compiled_functions` are the names through which Dynamo's code calls its graphs; `imports` the modules the runtime
    imports when it loads the code; `user_classes` those it looks up for constants ("module|name").
    """

    name: str
    qualname: str | None
    filename: str
    first_line: int
    names: tuple[str, ...]
    free_variables: tuple[str, ...]
    minors: tuple[str, ...]
    devices: tuple[str, ...]
    compiled_functions: tuple[str, ...]
    imports: tuple[str, ...]
    user_classes: tuple[str, ...]

    @property
    def python_minor(self) -> str | None:
        """The minor that made the bytecode, where exactly one fits."""
        return self.minors[0] if len(self.minors) == 1 else None


@dataclass(frozen=True)
class _Other:
    """A value whose kind is all that matters here."""

    kind: str


@dataclass(frozen=True)
class _Code:
    """The fields of a code object that are of use, in either layout."""

    code: bytes
    consts: tuple[object, ...]
    names: tuple[str, ...]
    free_variables: tuple[str, ...]
    filename: str
    name: str
    qualname: str | None
    first_line: int
    line_table: bytes


def read_code(data: bytes) -> CodeSummary:
    """Read a marshalled code object.

    Time and memory are linear in `len(data)`; nothing is executed and no code object is made.

    Raises:
        DocumentError: cut off, with bytes after its end, or no code object in the layout of 3.8 to 3.10 or of 3.11 on.
    """
    failures: list[str] = []
    for has_localsplus in (True, False):
        reader = _Reader(data, has_localsplus)
        try:
            return _summary(reader.read(), reader.codes, has_localsplus)
        except (ValueError, TypeError, IndexError) as error:
            failures.append(str(error) or type(error).__name__)
    raise DocumentError(
        f"compiled_fn is not marshalled bytecode: {failures[0]} (3.11 layout), {failures[1]} (3.10 layout)", hint=_HINT
    )


@dataclass
class _Reader:
    """One pass over a marshal stream, with code objects in one of the two layouts."""

    data: bytes
    has_localsplus: bool
    position: int = 0
    objects: int = 0
    work: int = 0
    references: list[object] = field(default_factory=list)
    codes: list[_Code] = field(default_factory=list)

    def read(self) -> _Code:
        value = self._object(0)
        if not isinstance(value, _Code):
            raise TypeError(f"a {type(value).__name__} stands where the code object belongs")
        if self.position != len(self.data):
            raise ValueError(f"{len(self.data) - self.position} bytes stand after its end")
        return value

    def _object(self, depth: int) -> object:
        self.objects += 1
        if depth > _DEPTH_LIMIT or self.objects > _OBJECT_LIMIT:
            raise ValueError("it is nested too deep or holds too many objects")
        kind = self._byte()
        if not kind & 0x80:
            return self._value(chr(kind), depth)
        # A reference's number is taken when its object starts, so that inner objects come after it.
        slot = len(self.references)
        self.references.append(_UNFINISHED)
        value = self._value(chr(kind & 0x7F), depth)
        self.references[slot] = value
        return value

    def _value(self, kind: str, depth: int) -> object:
        if kind in _CONSTANTS:
            return _CONSTANTS[kind]
        if kind == "i":
            return self._long()
        if kind == "r":
            value = self.references[_not_negative(self._long())]
            if value is _UNFINISHED:
                raise ValueError("it refers to an object that is not complete")
            return value
        if kind in "zZ":
            return self._take(self._byte()).decode("latin-1")
        if kind in "aA":
            return self._take(self._length()).decode("latin-1")
        if kind in "ut":
            # Paths that are not UTF-8 come as lone surrogates; written as escapes, every text can be encoded.
            text = self._take(self._length()).decode("utf-8", "surrogatepass")
            return text.encode("utf-8", "backslashreplace").decode("utf-8")
        if kind == "s":
            return self._take(self._length())
        if kind == ")":
            return tuple(self._object(depth + 1) for _ in range(self._byte()))
        if kind == "(":
            return tuple(self._object(depth + 1) for _ in range(self._length()))
        if kind == "c":
            return self._code(depth)
        return self._other(kind, depth)

    def _other(self, kind: str, depth: int) -> _Other:
        if kind in "[<>":
            for _ in range(self._length()):
                self._object(depth + 1)
        elif kind == "{":
            while self.data[self.position : self.position + 1] != b"0":
                self._object(depth + 1)
                self._object(depth + 1)
            self.position += 1
        elif kind == ":":  # slice, 3.14
            for _ in range(3):
                self._object(depth + 1)
        elif kind == "g":
            self._take(8)
        elif kind == "y":
            self._take(16)
        elif kind == "l":
            self._take(2 * abs(self._long()))
        elif kind == "I":
            self._take(8)
        elif kind in "fx":
            for _ in range(1 if kind == "f" else 2):
                self._take(self._byte())
        else:
            raise ValueError(f"byte {self.position - 1} is no known type code")
        return _Other(kind)

    def _code(self, depth: int) -> _Code:
        counts = [_not_negative(self._long()) for _ in range(5 if self.has_localsplus else 6)]
        if counts[0] > 0xFFFF:
            raise ValueError("its argument count is out of range")
        parts = [self._object(depth + 1) for _ in range(5 if self.has_localsplus else 8)]
        if self.has_localsplus:
            code, consts, names, local_names, local_kinds = parts
            filename, name, qualname = (self._object(depth + 1) for _ in range(3))
            self.work += len(_bytes(local_kinds))
            free_variables: object = tuple(
                local
                for local, bits in zip(_texts(local_names), _bytes(local_kinds), strict=True)
                if bits & _FREE_VARIABLE
            )
        else:
            code, consts, names, local_names, free_variables, cell_variables, filename, name = parts
            if not isinstance(local_names, tuple) or not isinstance(cell_variables, tuple):
                raise TypeError("its variables are no tuples")
            qualname = None
        first_line = self._long()
        line_table = _bytes(self._object(depth + 1))
        if self.has_localsplus:
            _bytes(self._object(depth + 1))  # exception table
        if not isinstance(consts, tuple):
            raise TypeError("its constants are no tuple")
        found = _Code(
            code=_bytes(code),
            consts=consts,
            names=_texts(names),
            free_variables=_texts(free_variables),
            filename=_text(filename),
            name=_text(name),
            qualname=None if qualname is None else _text(qualname),
            first_line=first_line,
            line_table=line_table,
        )
        # References let many code objects share one long part; what is looked at stays linear in what was stored.
        self.work += len(found.code) + len(found.consts) + len(found.names) + len(found.line_table)
        if self.work > _WORK_FACTOR * len(self.data):
            raise ValueError("its code objects share too much")
        self.codes.append(found)
        return found

    def _take(self, count: int) -> bytes:
        chunk = self.data[self.position : self.position + count]
        if len(chunk) != count:
            raise ValueError(f"it ends {count - len(chunk)} bytes too early")
        self.position += count
        return chunk

    def _byte(self) -> int:
        return self._take(1)[0]

    def _long(self) -> int:
        return int.from_bytes(self._take(4), "little", signed=True)

    def _length(self) -> int:
        # Each element takes a byte at least: a claim beyond what is left is a lie, and found before any loop starts.
        count = self._long()
        if not 0 <= count <= len(self.data) - self.position:
            raise ValueError(f"a length of {count} at byte {self.position - 4} is more than is left")
        return count


_UNFINISHED: Final = _Other("unfinished")
_CONSTANTS: Final[dict[str, object]] = {
    "N": None,
    "T": True,
    "F": False,
    ".": _Other("ellipsis"),
    "S": _Other("stop-iteration"),
}


def _summary(outer: _Code, codes: list[_Code], has_localsplus: bool) -> CodeSummary:
    dialects = [
        dialect
        for dialect in DIALECTS
        if dialect.has_localsplus == has_localsplus and all(_fits(code, dialect) for code in codes)
    ]
    # Each text once: a stream may refer to one long text a million times.
    names = tuple(dict.fromkeys(outer.names))
    texts = tuple(dict.fromkeys(const for code in codes for const in code.consts if isinstance(const, str)))
    devices = {text for text in texts if _DEVICE_TEXT.fullmatch(text)}
    for dialect in dialects:
        for code in codes:
            devices.update(_device_pairs(code, dialect))
    return CodeSummary(
        name=outer.name,
        qualname=outer.qualname,
        filename=outer.filename,
        first_line=outer.first_line,
        names=names,
        free_variables=outer.free_variables,
        minors=tuple(dialect.minor for dialect in dialects),
        devices=tuple(sorted(devices)),
        compiled_functions=tuple(name for name in names if name.startswith(_COMPILED)),
        imports=tuple(name[len(_IMPORT) :].replace("_dot_", ".") for name in names if name.startswith(_IMPORT)),
        user_classes=tuple(text[len(_USER_CLASS) :] for text in texts if text.startswith(_USER_CLASS)),
    )


def _fits(code: _Code, dialect: Dialect) -> bool:
    """Whether each instruction is one of the dialect's, with its caches and operands where they belong."""
    if not code.code or len(code.code) % 2:
        return False
    if not dialect.has_localsplus and sum(code.line_table[::2]) != len(code.code):
        # PEP 626: 3.10's line table covers the whole code. Up to 3.9 it ends where the last line starts.
        return False
    seen_resume = dialect.resume is None
    for opcode, argument, caches_are_zero in _instructions(code.code, dialect):
        if opcode not in dialect.valid or not caches_are_zero:
            return False
        if opcode == dialect.resume:
            seen_resume = True
        if opcode == dialect.load_const and argument >= len(code.consts):
            return False
        shift = dialect.name_shift.get(opcode)
        if shift is not None and argument >> shift >= len(code.names):
            return False
    return seen_resume


def _instructions(code: bytes, dialect: Dialect) -> Iterator[tuple[int, int, bool]]:
    position = extended = 0
    while position < len(code):
        opcode, argument = code[position], code[position + 1] | extended
        position += 2
        extended = (argument << 8) & 0xFFFFFFFF if opcode == dialect.extended_arg else 0
        width = 2 * dialect.caches.get(opcode, 0)
        yield opcode, argument, code[position : position + width] == bytes(width)
        position += width


def _device_pairs(code: _Code, dialect: Dialect) -> Iterator[str]:
    """Yield "npu:1" for each device type that is loaded right before a number, as torch.device("npu", 1) is."""
    previous: object = None
    for opcode, argument, _ in _instructions(code.code, dialect):
        if opcode == dialect.extended_arg:
            continue
        value = code.consts[argument] if opcode == dialect.load_const else None
        if isinstance(previous, str) and previous in _DEVICE_TYPES and type(value) is int:
            yield f"{previous}:{value}"
        previous = value


def _not_negative(number: int) -> int:
    if number < 0:
        raise ValueError(f"a count is {number}")
    return number


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is no text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, tuple):
        raise TypeError("its names are no tuple")
    return tuple(_text(item) for item in value)


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a part of its code is no bytes")
    return value
