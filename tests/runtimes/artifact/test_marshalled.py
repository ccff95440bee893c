"""The marshal reader: what it finds in bytecode of each minor, without one code object being made."""

from __future__ import annotations

import marshal
import random
import struct
import subprocess
import sys
import types
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachectl.errors import DocumentError
from cachectl.runtimes.artifact import marshalled
from cachectl.runtimes.artifact.marshalled import read_code
from cachectl.runtimes.artifact.opcodes import DIALECTS
from cachectl.runtimes.artifact.pickles import read_pickle

Read = Callable[[str], bytes]
Interpreter = Callable[[str], str]
MINORS = ("3.10", "3.11", "3.12", "3.13")


def code_of(source: str, name: str = "f") -> types.CodeType:
    """Return the code object of a function in a source text."""
    namespace: dict[str, types.FunctionType] = {}
    exec(source, namespace)
    return namespace[name].__code__


@pytest.mark.parametrize("minor", MINORS)
def test_read_code_stored_bytecode_tells_its_minor(artifact_bytes: Read, minor: str) -> None:
    """The same source compiled by four minors gives the same facts and each its own minor."""
    code = read_code(artifact_bytes(f"bytecode_{minor.replace('.', '_')}"))

    assert minor == code.python_minor
    assert ("main_decode", "/srv/example/decode.py", 2) == (code.name, code.filename, code.first_line)
    assert ("npu:3",) == code.devices
    assert ("__compiled_fn_1_a",) == code.compiled_functions
    assert ("torch",) == code.imports
    assert "_modules" in code.names


@pytest.mark.parametrize("minor", ["3.8", "3.9"])
def test_read_code_older_minor_is_claimed_by_none(artifact_bytes: Read, minor: str) -> None:
    """Bytecode of 3.8 and 3.9 has 3.10's layout but not its line table, and is not taken for it."""
    code = read_code(artifact_bytes(f"bytecode_{minor.replace('.', '_')}"))

    assert "main_decode" == code.name
    assert () == code.minors
    assert code.python_minor is None


@pytest.mark.parametrize("minor", MINORS)
def test_read_code_standard_library_fits_its_minor(interpreter: Interpreter, minor: str) -> None:
    """Every function of some modules fits the minor that compiled it, and nearly every one no other."""
    script = """
import argparse, collections, decimal, inspect, json.decoder, marshal, struct, sys, types
for module in (argparse, collections, inspect, json.decoder):
    with open(module.__file__, encoding="utf-8") as source:
        stack = [compile(source.read(), module.__file__, "exec")]
    while stack:
        code = stack.pop()
        stack.extend(const for const in code.co_consts if isinstance(const, types.CodeType))
        data = marshal.dumps(code)
        sys.stdout.buffer.write(struct.pack("<I", len(data)) + data)
"""
    output = subprocess.run([interpreter(minor), "-I", "-c", script], check=True, capture_output=True).stdout
    position = total = exact = 0
    while position < len(output):
        (size,) = struct.unpack_from("<I", output, position)
        code = read_code(output[position + 4 : position + 4 + size])
        position += 4 + size
        total += 1
        exact += code.python_minor == minor
        assert minor in code.minors

    assert total > 300
    assert exact / total > 0.85


@pytest.mark.parametrize("minor", MINORS)
def test_dialects_equal_the_interpreters_own_tables(interpreter: Interpreter, minor: str) -> None:
    """The stored instruction sets are what each interpreter's `opcode` module says."""
    script = """
import opcode
entries = getattr(opcode, "_inline_cache_entries", None) or {}
names = {
    name: number
    for name, number in opcode.opmap.items()
    if number < 256 and name != "CACHE" and not name.startswith("INSTRUMENTED")
}
if not isinstance(entries, dict):  # 3.11 and 3.12 list them by number
    entries = {name: entries[number] for name, number in names.items()}
caches = {number: entries[name] for name, number in names.items() if entries.get(name)}
print((sorted(set(names.values())), caches, names["EXTENDED_ARG"], names["LOAD_CONST"], names.get("RESUME")))
"""
    output = subprocess.run([interpreter(minor), "-I", "-c", script], check=True, capture_output=True, text=True).stdout
    dialect = next(item for item in DIALECTS if item.minor == minor)

    assert eval(output) == (
        sorted(dialect.valid),
        dict(dialect.caches),
        dialect.extended_arg,
        dialect.load_const,
        dialect.resume,
    )


def test_read_code_of_this_interpreter_equals_the_code_object() -> None:
    """Names, file, line and free variables are those of the code object itself."""
    source = (
        "def outer(a):\n"
        "    def f(x, *, y=1):\n"
        "        return [a, x, y, len(x), f, 10**30, 1.5, 2j, b'x', ..., {1, 2}]\n"
        "    return f\n"
    )
    namespace: dict[str, Callable[[int], types.FunctionType]] = {}
    exec(compile(source, "/srv/exämple.py", "exec"), namespace)
    expected = namespace["outer"](1).__code__

    code = read_code(marshal.dumps(expected))

    assert (expected.co_name, expected.co_filename) == (code.name, code.filename)
    assert (expected.co_names, expected.co_firstlineno) == (code.names, code.first_line)
    assert expected.co_freevars == code.free_variables
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in code.minors


def test_read_code_real_artifact_holds_the_device_it_was_compiled_on(artifact_bytes: Read) -> None:
    """Rank 1's bytecode names device 1, though all its tensors are on the CPU."""
    code = read_code(read_pickle(artifact_bytes("npugraph_ex_rank1")).compiled_fn)

    assert ("npu:1",) == code.devices
    assert "3.11" == code.python_minor
    assert 1 == len(code.compiled_functions)


def test_read_code_user_class_constant_is_listed() -> None:
    """The text that stands for a class, and that loading turns into one, is found."""
    code = code_of("def f(a):\n    a('<user_class>pkg.mod|Thing')\n    a('npu:7')\n    a('npu:x')\n")

    assert ("pkg.mod|Thing",) == read_code(marshal.dumps(code)).user_classes
    assert ("npu:7",) == read_code(marshal.dumps(code)).devices


def test_read_code_path_that_is_no_utf8_can_be_encoded() -> None:
    """Surrogates in a file name come as escapes."""
    code = code_of("def f(): pass").replace(co_filename="/srv/\udcff.py")

    assert "/srv/\\udcff.py" == read_code(marshal.dumps(code)).filename


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xe3",
        b"N",
        b"s\x01\x00\x00\x00x",
        b"r\x00\x00\x00\x00",
        b"\xa9\x01r\x00\x00\x00\x00",
        b"(\xff\xff\xff\x7f",
        b"(\xff\xff\xff\xff",
        b"s\xff\xff\xff\x7f",
        b"l\xff\xff\xff\x7f",
        b"{N",
        b"u\x01\x00\x00\x00\xff",
        b"[\x01\x00\x00\x00?",
        b")\x01" * 5000,
        b"c" * 5000,
        b"c" + b"\xff" * 400,
        marshal.dumps([1, {"a": (2, frozenset({3}))}]),
    ],
    ids=lambda data: repr(data[:8]),
)
def test_read_code_no_code_object_is_refused_in_one_line(data: bytes) -> None:
    """Other marshalled values, lies about lengths and endless nesting end in one line."""
    with pytest.raises(DocumentError, match="compiled_fn is not marshalled bytecode") as raised:
        read_code(data)

    assert "\n" not in str(raised.value)


def test_read_code_bytes_after_the_end_are_refused(artifact_bytes: Read) -> None:
    """`marshal.loads` would not look at them."""
    with pytest.raises(DocumentError, match="1 bytes stand after its end"):
        read_code(artifact_bytes("bytecode_3_11") + b"N")


def test_read_code_shared_parts_are_not_walked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code objects that all refer to one long table are refused before the work grows."""
    monkeypatch.setattr(marshalled, "_WORK_FACTOR", 1)
    shared = code_of("def f():\n" + "    len(1)\n" * 300)
    other = code_of("def f(): return 1").replace(co_consts=tuple(shared.replace(co_name=f"f{n}") for n in range(50)))

    with pytest.raises(DocumentError, match="share too much"):
        read_code(marshal.dumps(other))


@pytest.mark.parametrize("minor", MINORS)
def test_read_code_cut_or_flipped_raises_nothing_else(artifact_bytes: Read, minor: str) -> None:
    """Cut anywhere it is refused; with one bit flipped it is refused or read."""
    data = artifact_bytes(f"bytecode_{minor.replace('.', '_')}")
    for end in range(len(data)):
        with pytest.raises(DocumentError):
            read_code(data[:end])
    source = random.Random(20260103)
    refusals = []
    for _ in range(500):
        flipped = bytearray(data)
        flipped[source.randrange(len(data))] ^= 1 << source.randrange(8)
        try:
            read_code(bytes(flipped))
        except DocumentError as error:
            refusals.append(str(error))

    assert refusals
    assert not [text for text in refusals if "\n" in text]


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_read_code_any_bytes_raise_nothing_else(data: bytes) -> None:
    """Random bytes, also after the start of a code object, are refused."""
    for candidate in (data, b"\xe3" + bytes(20) + data, b"c" + bytes(24) + data):
        with pytest.raises(DocumentError):
            read_code(candidate)
