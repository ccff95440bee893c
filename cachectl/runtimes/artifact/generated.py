"""Reads the Python text a runtime generated, line by line, without compiling or running it.

Owns the shape of that text: which lines are called after loading, and the facts its fixed forms state (input strides
and devices, compile settings). It is not parsed with `ast`: a hostile text can exhaust CPython's parser, and the
text may be of another Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cachectl.runtimes.artifact.signature import Dimension, read_shape

__all__ = ["ExampleInput", "GeneratedCode", "read_generated"]

_TUPLE: Final = r"\(([^()]*(?:\([^()]*\)[^()]*)*)\)"  # expressions of dynamic sizes hold one level of parentheses
_STRIDE: Final = re.compile(rf"^\s*assert_size_stride\(args\[(\d{{1,9}})\], {_TUPLE}, {_TUPLE}\)")
_EXAMPLE: Final = re.compile(rf"^\s*(\w+) = rand_strided\({_TUPLE},{_TUPLE},device ='([^']*)',dtype =torch\.(\w+)\)")
_SETTING: Final = re.compile(r"""^\w+\["([^"]+)"\] = (?:"(.*)"|(True|False))$""")
_PARAMETERS: Final = re.compile(r"^\s*parameter_user_inputs=\[([\d, ]*)\]")
_KEY_INPUTS: Final = re.compile(r"^\s*unupdated_sym_input_index=\[([^\]]*)\]")
_KEY_INPUT: Final = re.compile(r"\((\d{1,9}), (True|False)\)")
_WRITTEN: Final = re.compile(r"^\s*mutated_user_inputs=\[([^\]]*)\]")
_IMPORT: Final = re.compile(r"^\s*(?:from (\S+) import |import (\S+))")
_CONSTANT: Final = re.compile(r"^\s*tensor_constants\['([^']*)'\] = ")
_SERIALIZED: Final = re.compile(r"^(serialized_\w+) = ")


@dataclass(frozen=True)
class ExampleInput:
    """An input of the graph as the generated example call makes it."""

    shape: tuple[Dimension, ...]
    stride: tuple[Dimension, ...]
    device: str
    dtype: str


@dataclass(frozen=True)
class GeneratedCode:
    """The generated text's facts.

    `live` are the lines that run when the artifact is loaded or called: all but comments, the example call in `main`
    that nothing calls, and the byte literals in `serialized` (name to length of the line). `strides` are what the
    first call of a process asserts, by input number; `examples` are by input name; `settings` by option name.
    `static_inputs` are the inputs whose address is taken as fixed; None where the runtime does not say.
    `graph_key_inputs` are the inputs whose size (False) or value (True) is part of the runtime's graph key, by number;
    None where it does not say. `written_inputs` are the names of those that the graph writes.
    """

    live: tuple[str, ...]
    serialized: Mapping[str, int]
    strides: Mapping[int, tuple[Dimension, ...]]
    examples: Mapping[str, ExampleInput]
    settings: Mapping[str, str]
    static_inputs: frozenset[int] | None
    imports: tuple[str, ...]
    tensor_constants: tuple[str, ...]
    graph_key_inputs: tuple[tuple[int, bool], ...] | None = None
    written_inputs: tuple[str, ...] = ()


def read_generated(text: str) -> GeneratedCode:
    """Read the generated code; lines in no known form count as live and state nothing else."""
    live: list[str] = []
    serialized: dict[str, int] = {}
    strides: dict[int, tuple[Dimension, ...]] = {}
    examples: dict[str, ExampleInput] = {}
    settings: dict[str, str] = {}
    static_inputs: frozenset[int] | None = None
    imports: dict[str, None] = {}
    constants: dict[str, None] = {}
    key_inputs: tuple[tuple[int, bool], ...] | None = None
    written: tuple[str, ...] = ()
    in_example = False
    for line in text.split("\n"):
        if line and not line[0].isspace():
            in_example = line.startswith("def main(")
        if in_example:
            if match := _EXAMPLE.match(line):
                name, shape, stride, device, dtype = match.groups()
                examples[name] = ExampleInput(read_shape(shape), read_shape(stride), device, dtype)
            continue
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if match := _SERIALIZED.match(line):
            serialized[match[1]] = len(line)
            continue
        live.append(line)
        if match := _STRIDE.match(line):
            strides[int(match[1])] = read_shape(match[3])
        elif match := _SETTING.match(line):
            settings[match[1]] = match[2] if match[3] is None else match[3]
        elif match := _PARAMETERS.match(line):
            static_inputs = frozenset(number for number in read_shape(match[1]) if isinstance(number, int))
        elif match := _KEY_INPUTS.match(line):
            key_inputs = tuple((int(number), value == "True") for number, value in _KEY_INPUT.findall(match[1]))
        elif match := _WRITTEN.match(line):
            written = tuple(re.findall(r"'(\w+)'", match[1]))
        elif match := _IMPORT.match(line):
            imports[match[1] or match[2]] = None
        elif match := _CONSTANT.match(line):
            constants[match[1]] = None
    return GeneratedCode(
        live=tuple(live),
        serialized=serialized,
        strides=strides,
        examples=examples,
        settings=settings,
        static_inputs=static_inputs,
        imports=tuple(imports),
        tensor_constants=tuple(constants),
        graph_key_inputs=key_inputs,
        written_inputs=written,
    )
