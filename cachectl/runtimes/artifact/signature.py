"""Reads the signature text of an artifact: its graph's inputs, compile options and operators.

Owns the text that the runtimes' `save_compiled_fx` writes for people (torch_npu, dynamo/<runtime>/inference/
_cache_compiler.py): three sections under ruled titles. The text decides nothing when the artifact is loaded, so what
can't be read in it is left out rather than refused. Patterns are linear in the text, hostile texts included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["InputSpec", "Signature", "operators", "read_shape", "read_signature"]

Dimension = int | str

_TITLE: Final = re.compile(r"^-{10,}(graph module|inputs|compile options)-{10,}$", re.MULTILINE)
_INPUT: Final = re.compile(r"^(\d{1,9}):(\S+) (UserInput|Parameter|Buffer)\((.*?)\)=(.*)$", re.DOTALL)
_INPUT_START: Final = re.compile(r"^\d{1,9}:\S+ (?:UserInput|Parameter|Buffer)\(")
_SIZE: Final = re.compile(r"\bsize=\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
_DTYPE: Final = re.compile(r"\bdtype=torch\.(\w+)")
_DEVICE: Final = re.compile(r"\bdevice='([^']*)'")
_SEPARATORS: Final = re.compile(r"([(),])")
_NUMERAL: Final = re.compile(r"\d{1,18}", re.ASCII)
_ANNOTATION: Final = re.compile(r"""\b(\w+): "(?:([a-z]\w*)\[|Sym\()""")
_OPERATOR: Final = re.compile(r"\btorch\.ops\.([A-Za-z_][\w.]{0,200})\(")

# torch/utils/_dtype_abbrs.py: what `print_readable` annotates with. The inputs' own text leaves out whatever was the
# default dtype while compiling, so these are what tells bfloat16 from float32.
_DTYPES: Final = {
    "bf16": "bfloat16",
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "f8e4m3fnuz": "float8_e4m3fnuz",
    "f8e5m2fnuz": "float8_e5m2fnuz",
    "f8e8m0fnu": "float8_e8m0fnu",
    "f4e2m1fnx2": "float4_e2m1fn_x2",
    "c32": "complex32",
    "c64": "complex64",
    "c128": "complex128",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "b8": "bool",
}
_KINDS: Final = {"UserInput": "user", "Parameter": "parameter", "Buffer": "buffer"}


@dataclass(frozen=True)
class InputSpec:
    """One input of the compiled graph.

    `kind` is user, parameter or buffer as the runtime said; from torch 2.5 on Dynamo lifts parameters, and all are
    user. `source` is the parameter's name, or the user input's number. `shape` is None for a symbol or a plain number,
    which `value` then holds; a dynamic dimension stands as its symbol. `dtype` has no "torch.". `stride` and
    `static_address` come from the generated code, `device` from whichever says it; None where nothing does.
    """

    index: int
    name: str
    kind: str
    source: str
    shape: tuple[Dimension, ...] | None = None
    dtype: str | None = None
    device: str | None = None
    stride: tuple[Dimension, ...] | None = None
    static_address: bool | None = None
    value: str | None = None


@dataclass(frozen=True)
class Signature:
    """The three sections; `complete` tells whether all of them were there and every input line was read."""

    inputs: tuple[InputSpec, ...]
    options: Mapping[str, str]
    ops: Mapping[str, int]
    complete: bool


def read_signature(text: str) -> Signature:
    """Read a signature text; an unknown or missing section leaves its part empty and `complete` false."""
    sections = _sections(text)
    graph = sections.get("graph module", "")
    dtypes = _annotated_dtypes(graph)
    lines = _joined(sections.get("inputs", ""))
    inputs = tuple(spec for line in lines if (spec := _input(line, dtypes)) is not None)
    return Signature(
        inputs=inputs,
        options=_options(sections.get("compile options", "")),
        ops=operators(graph),
        complete=len(sections) == 3 and len(inputs) == len(lines),
    )


def operators(code: str) -> dict[str, int]:
    """Count the `torch.ops` calls in generated code, by name ("aten.addmm.default"), in order of name."""
    counts: dict[str, int] = {}
    for line in code.splitlines():
        if line.lstrip().startswith("#"):
            continue  # quoted source lines stand in comments
        for match in _OPERATOR.finditer(line):
            counts[match[1]] = counts.get(match[1], 0) + 1
    return dict(sorted(counts.items()))


def read_shape(text: str) -> tuple[Dimension, ...]:
    """Read "2, Max(1, s77), 16" as (2, "Max(1, s77)", 16); a tuple's trailing comma is no dimension."""
    parts = [""]
    depth = 0
    for piece in _SEPARATORS.split(text):
        if piece == "," and depth == 0:
            parts.append("")
            continue
        depth += (piece == "(") - (piece == ")")
        parts[-1] += piece
    # Longer numerals would be no size, and CPython refuses to convert thousands of digits.
    return tuple(int(part) if _NUMERAL.fullmatch(part) else part for part in map(str.strip, parts) if part)


def _sections(text: str) -> dict[str, str]:
    titles = list(_TITLE.finditer(text))
    sections: dict[str, str] = {}
    for number, title in enumerate(titles, start=1):
        end = titles[number].start() if number < len(titles) else len(text)
        sections.setdefault(title[1], text[title.end() : end].strip("\n"))
    return sections


def _annotated_dtypes(graph: str) -> dict[str, str]:
    for line in graph.splitlines():
        if line.lstrip().startswith("def forward("):
            return {match[1]: _DTYPES.get(match[2], match[2]) for match in _ANNOTATION.finditer(line) if match[2]}
    return {}


def _joined(section: str) -> list[str]:
    """Return one text per input; a value printed over several lines belongs to the input it follows."""
    entries: list[list[str]] = []
    for line in section.split("\n"):
        if not entries or _INPUT_START.match(line):
            entries.append([line])
        else:
            entries[-1].append(line)
    return [text for lines in entries if (text := "\n".join(lines).rstrip("\n"))]


def _input(line: str, dtypes: Mapping[str, str]) -> InputSpec | None:
    match = _INPUT.match(line)
    if match is None:
        return None
    index, name, kind, source, value = match.groups()
    size = _SIZE.search(value)
    if size is None:
        return InputSpec(int(index), name, _KINDS[kind], source, value=value)
    dtype = _DTYPE.search(value)
    device = _DEVICE.search(value)
    return InputSpec(
        index=int(index),
        name=name,
        kind=_KINDS[kind],
        source=source,
        shape=read_shape(size[1]),
        dtype=dtype[1] if dtype else dtypes.get(name),
        device=device[1] if device else None,
    )


def _options(section: str) -> dict[str, str]:
    options: dict[str, str] = {}
    last = None
    for line in section.split("\n"):
        name, sign, value = line.partition("=")
        if sign and name and not name[0].isspace():
            options[name] = value
            last = name
        elif last is not None and line:
            options[last] += f"\n{line}"
    return options
