"""The restricted pickle reader: what it reads, and that nothing hostile gets further than a DocumentError."""

from __future__ import annotations

import os
import pickle
import pickletools
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachectl.errors import DocumentError
from cachectl.runtimes.artifact import pickles
from cachectl.runtimes.artifact.pickles import read_pickle

Read = Callable[[str], bytes]
Pack = Callable[..., bytes]
MODULE = "npugraph_ex.inference._cache_compiler"


def text(value: str) -> bytes:
    """Return the opcode that pushes a short text."""
    encoded = value.encode()
    return b"\x8c" + bytes([len(encoded)]) + encoded


def protocol_4(body: bytes) -> bytes:
    """Return a whole protocol 4 pickle around a body."""
    return b"\x80\x04" + body + b"."


def known(name: str) -> bytes:
    """Return the opcodes that push one of the runtime's classes."""
    return text(MODULE) + text(name) + b"\x93"


@pytest.mark.parametrize(
    ("name", "runtime", "version"),
    [("npugraph_ex_static", "npugraph_ex", "1.0.6"), ("torchair_ge", "torchair", "1.0.5")],
)
def test_read_pickle_real_artifact_returns_its_fields(
    artifact_bytes: Read, name: str, runtime: str, version: str
) -> None:
    """What a runtime wrote is read whole, and tells which runtime it was."""
    pickled = read_pickle(artifact_bytes(name))

    assert (runtime, version) == (pickled.runtime, pickled.version)
    assert pickled.name.startswith("Decoder.main_decode(x, kv")
    assert pickled.compiled_fn[:1] == b"\xe3"
    assert "def kernel(" in pickled.py_code
    assert "graph module" in pickled.signature


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize(
    ("module", "runtime"),
    [
        (MODULE, "npugraph_ex"),
        ("torch_npu.dynamo.npugraph_ex.inference._cache_compiler", "npugraph_ex"),
        ("torchair.inference._cache_compiler", "torchair"),
        ("torch_npu.dynamo.torchair.inference._cache_compiler", "torchair"),
    ],
)
def test_read_pickle_each_class_path_names_its_runtime(pack: Pack, module: str, runtime: str, protocol: int) -> None:
    """Both runtimes are known standalone and inside torch_npu, in the pickle protocols of CPython 3.8 to 3.14."""
    parameters = [(f"layers.{number}.weight", number % 2 == 0) for number in range(3000)]

    pickled = read_pickle(pack(module=module, protocol=protocol, input_parameters=parameters, py_code="x" * 100_000))

    assert runtime == pickled.runtime
    assert tuple(parameters) == pickled.input_parameters
    assert 100_000 == len(pickled.py_code)


@given(
    name=st.text(st.characters()),
    code=st.binary(),
    parameters=st.lists(st.tuples(st.text(st.characters(codec="utf-8")), st.booleans())),
)
@settings(
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
def test_read_pickle_any_fields_come_back(
    pack: Pack, name: str, code: bytes, parameters: list[tuple[str, bool]]
) -> None:
    """Fields survive the way through the runtime's pickle, lone surrogates as escapes."""
    pickled = read_pickle(pack(name=name, compiled_fn=code, input_parameters=parameters))

    assert name.encode("utf-8", "backslashreplace").decode() == pickled.name
    assert code == pickled.compiled_fn
    assert tuple(parameters) == pickled.input_parameters


HOSTILE = {
    "global": protocol_4(b"cos\nsystem\n" + text("exit 9") + b"\x85R"),
    "stack-global": protocol_4(text("os") + text("system") + b"\x93" + text("exit 9") + b"\x85R"),
    "reduce-of-known": protocol_4(known("ModelCacheMeta") + b")R"),
    "inst": protocol_4(b"(" + text("exit 9") + b"ios\nsystem\n"),
    "obj": protocol_4(b"(" + known("ModelCacheMeta") + b"o"),
    "ext1": protocol_4(b"\x82\x01"),
    "ext4": protocol_4(b"\x84\x01\x00\x00\x00"),
    "persid": protocol_4(b"Pid\n"),
    "binpersid": protocol_4(text("id") + b"Q"),
    "newobj-ex": protocol_4(known("ModelCacheMeta") + b")}\x92"),
    "newobj-arguments": protocol_4(known("ModelCacheMeta") + text("x") + b"\x85\x81"),
    "newobj-of-text": protocol_4(text("os") + b")\x81"),
    "build-of-class": protocol_4(known("ModelCacheMeta") + b"}" + text("name") + text("x") + b"sb"),
    "build-slots-of-class": protocol_4(known("ModelCacheMeta") + b"N}" + text("__setstate__") + text("x") + b"s\x86b"),
    "build-twice": protocol_4(known("ModelCacheMeta") + b")\x81}b}b"),
    "class-itself": protocol_4(known("ModelCacheArtifact")),
    "empty-record": protocol_4(known("ModelCacheArtifact") + b")\x81"),
    "nested-attribute": protocol_4(text(MODULE) + text("CompiledModel.save") + b"\x93"),
    "module-attribute": protocol_4(text(MODULE) + text("os") + b"\x93"),
    "buffers": b"\x80\x05\x97.",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1) + b"x.",
    "long-bytes": protocol_4(b"\x8e" + struct.pack("<Q", 1 << 62)),
    "long-text": protocol_4(b"\x8d" + struct.pack("<Q", (1 << 64) - 1)),
    "long-frame": protocol_4(b"\x95" + struct.pack("<Q", 1 << 62)),
    "long-put": protocol_4(b"}r\xff\xff\xff\xff"),
    "long-integer": protocol_4(b"\x8b\xff\xff\xff\x7f"),
    "get-nothing": protocol_4(b"h\x07"),
    "no-mark": protocol_4(b"]e"),
    "only-mark": protocol_4(b"("),
    "mark-as-value": protocol_4(b"]" + b"(a"),
    "odd-items": protocol_4(b"}(" + text("x") + b"u"),
    "list-as-key": protocol_4(b"}]]s"),
    "append-to-text": protocol_4(text("x") + b"]a"),
    "underflow": protocol_4(b"\x86"),
    "old-protocol": pickle.dumps({"a": 1}, protocol=2),
    "no-protocol": b"}.",
    "two-protocols": protocol_4(b"\x80\x04}"),
    "integer": pickle.dumps(7, protocol=4),
    "set": pickle.dumps({1, 2}, protocol=4),
    "dict": pickle.dumps({"a": "b"}, protocol=4),
    "left-over": protocol_4(b"}}"),
    "empty": b"",
    "stop": b".",
    "zip": b"PK\x03\x04" + bytes(64),
    "text": b"{}",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_read_pickle_hostile_stream_is_refused_in_one_line(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a pickle tries, nothing is called and one line says so."""
    calls: list[str] = []
    monkeypatch.setattr(os, "system", calls.append)

    with pytest.raises(DocumentError) as raised:
        read_pickle(data)

    assert "\n" not in str(raised.value)
    assert [] == calls


def test_read_pickle_unknown_class_is_named() -> None:
    """The refusal says which class the artifact asked for."""
    with pytest.raises(DocumentError, match=r"names os\.system, which is none of the runtime's dataclasses"):
        read_pickle(HOSTILE["stack-global"])


def test_read_pickle_memo_bomb_stays_small() -> None:
    """A list that holds the one before it a hundred times, sixty deep, is refused without being spread out."""
    body = b"]\x94"
    for number in range(60):
        body += b"](" + (b"h" + bytes([number])) * 100 + b"e\x94"
    with pytest.raises(DocumentError, match="left at its end"):
        read_pickle(protocol_4(body))


def test_read_pickle_too_many_opcodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of opcodes that make nothing ends at the limit."""
    monkeypatch.setattr(pickles, "_OPCODE_LIMIT", 1000)
    with pytest.raises(DocumentError, match="more than 1000 opcodes"):
        read_pickle(protocol_4(b"}" + b"\x94" * 2000))


def test_read_pickle_too_large_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is looked at before the content."""
    monkeypatch.setattr(pickles, "PICKLE_SIZE_LIMIT_BYTES", 10)
    with pytest.raises(DocumentError, match="artifact is 11 bytes, the reader stops at 10"):
        read_pickle(b"x" * 11)


def test_read_pickle_cut_anywhere_is_refused(artifact_bytes: Read) -> None:
    """A torn write is never read as an artifact, wherever it was torn."""
    data = artifact_bytes("npugraph_ex_static")
    for part in range(50):
        with pytest.raises(DocumentError):
            read_pickle(data[: len(data) * part // 50])
    with pytest.raises(DocumentError):
        read_pickle(data[:-1])


def test_read_pickle_bytes_after_the_end_are_refused(artifact_bytes: Read) -> None:
    """An unpickler would not look at what follows; here it makes the artifact another one."""
    with pytest.raises(DocumentError, match="3 bytes stand after its end"):
        read_pickle(artifact_bytes("npugraph_ex_static") + b"xyz")


@pytest.mark.parametrize(
    "fields",
    [
        {"name": b"x"},
        {"date": None},
        {"version": "1.0.6", "signature": 1},
        {"py_code": ["x"]},
        {"compiled_fn": "text"},
        {"input_parameters": ("x", True)},
        {"input_parameters": ["x"]},
        {"input_parameters": [("x", 1)]},
        {"input_parameters": [("x", True, True)]},
        {"extra": "x"},
    ],
    ids=str,
)
def test_read_pickle_mistyped_or_unknown_field_is_refused(pack: Pack, fields: dict[str, Any]) -> None:
    """A field of another type than the runtime writes, or one more, makes the artifact unreadable."""
    with pytest.raises(DocumentError):
        read_pickle(pack(**fields))


def test_read_pickle_mixed_runtimes_are_refused(pack: Pack) -> None:
    """All three dataclasses come from one module."""
    data = pack()
    at = data.rindex(b"\x8c\x0eModelCacheMeta")
    other = b"\x8c\x22torchair.inference._cache_compiler"
    opcode = next(op for op in pickletools.genops(data) if op[0].name == "FRAME")
    assert opcode[2] is not None
    module = data.rfind(b"h", 0, at)  # the memoized module's name
    mixed = data[:module] + other + data[module + 2 :]
    frame = struct.pack("<Q", len(mixed) - opcode[2] - 9)
    mixed = mixed[: opcode[2] + 1] + frame + mixed[opcode[2] + 9 :]
    with pytest.raises(DocumentError, match=r"mixes npugraph_ex\.inference\._cache_compiler and torchair"):
        read_pickle(mixed)


@pytest.mark.parametrize("name", ["npugraph_ex_static", "torchair_ge"])
def test_read_pickle_flipped_bits_raise_nothing_else(artifact_bytes: Read, name: str) -> None:
    """One flipped bit gives either values or a DocumentError (500 places, the same every run)."""
    data = artifact_bytes(name)
    source = random.Random(20260102)
    refusals = []
    for _ in range(500):
        at, bit = source.randrange(len(data)), source.randrange(8)
        flipped = bytearray(data)
        flipped[at] ^= 1 << bit
        try:
            read_pickle(bytes(flipped))
        except DocumentError as error:
            refusals.append(str(error))

    assert refusals
    assert not [text for text in refusals if "\n" in text]


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_read_pickle_any_bytes_raise_nothing_else(data: bytes) -> None:
    """Random bytes after a right start are refused, and by nothing but a DocumentError."""
    for candidate in (data, b"\x80\x04" + data, protocol_4(data)):
        with pytest.raises(DocumentError):
            read_pickle(candidate)


PIECES = [known("ModelCacheMeta"), known("CompiledFX"), text("x"), b"h\x00"]
PIECES += [bytes([opcode]) for opcode in b"})(]tubease\x94\x81\x85\x86\x87\x88\x89"]


@given(st.lists(st.sampled_from(PIECES), max_size=30))
@settings(max_examples=300, deadline=None)
def test_read_pickle_any_allowed_opcodes_raise_nothing_else(opcodes: list[bytes]) -> None:
    """Allowed opcodes in any order are refused, and by nothing but a DocumentError."""
    with pytest.raises(DocumentError):
        read_pickle(protocol_4(b"".join(opcodes)))
