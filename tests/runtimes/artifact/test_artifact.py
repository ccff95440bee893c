"""The whole summary of an artifact, from its bytes alone."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import cachectl
from cachectl.errors import DocumentError
from cachectl.runtimes.artifact import InputSpec, inspect_artifact

Read = Callable[[str], bytes]
Pack = Callable[..., bytes]
NAMES = ("npugraph_ex_static", "npugraph_ex_dynamic", "npugraph_ex_rank1", "torchair_ge")


def test_inspect_artifact_static_graph_is_told_whole(artifact_bytes: Read) -> None:
    """Who wrote it, for what, with which inputs, options and operators."""
    data = artifact_bytes("npugraph_ex_static")

    summary = inspect_artifact(data)

    assert ("npugraph_ex", "1.0.6", "3.11") == (summary.runtime, summary.format_version, summary.python_minor)
    assert "Decoder.main_decode(x, kv, positions)" == summary.name
    assert "2026-11-29T23:07:49Z" == summary.created_at
    assert ("/srv/example/one_layer.py", 10) == (summary.co_filename, summary.first_line)
    assert len(data) == summary.size_bytes
    assert "True" == summary.options["frozen_parameter"]
    assert 1 == summary.ops["aten.index_copy.default"]
    assert (
        InputSpec(0, "arg0_1", "user", "0", (16, 16), "float32", "cpu", (16, 1), True),
        InputSpec(1, "arg1_1", "user", "1", (16,), "float32", "cpu", (1,), True),
        InputSpec(2, "arg2_1", "user", "2", (2, 16), "float32", "cpu", (16, 1), False),
        InputSpec(3, "arg3_1", "user", "3", (16,), "float32", "cpu", (1,), True),
        InputSpec(4, "arg4_1", "user", "4", (8, 16), "float32", "cpu", (16, 1), False),
        InputSpec(5, "arg5_1", "user", "5", (2,), "int64", "cpu", (1,), False),
    ) == summary.inputs


def test_inspect_artifact_dynamic_graph_keeps_symbols(artifact_bytes: Read) -> None:
    """Dynamic dimensions are symbols, and the symbol itself is an input without shape."""
    inputs = inspect_artifact(artifact_bytes("npugraph_ex_dynamic")).inputs

    assert InputSpec(2, "arg2_1", "user", "2", value="s77") == inputs[2]
    assert ("s91", 16) == inputs[6].shape


def test_inspect_artifact_torchair_is_told_by_its_own_names(artifact_bytes: Read) -> None:
    """An artifact of torchair says no device of its inputs; its settings hold more than its options."""
    summary = inspect_artifact(artifact_bytes("torchair_ge"))

    assert ("torchair", "1.0.5") == (summary.runtime, summary.format_version)
    assert {None} == {spec.device for spec in summary.inputs}
    assert "max-autotune" == summary.options["mode"]
    assert {"ge.deterministic", "ge.graph_key"} <= set(summary.settings) - set(summary.options)


@pytest.mark.parametrize("minor", ["3.10", "3.11", "3.12", "3.13"])
def test_inspect_artifact_other_minor_is_named(pack: Pack, artifact_bytes: Read, minor: str) -> None:
    """An artifact of another CPython is read like any other and names the minor it is for."""
    data = pack(compiled_fn=artifact_bytes(f"bytecode_{minor.replace('.', '_')}"))

    assert minor == inspect_artifact(data).python_minor


def test_inspect_artifact_unknown_minor_is_read_without_one(pack: Pack, artifact_bytes: Read) -> None:
    """Bytecode nobody here knows leaves the rest readable."""
    summary = inspect_artifact(pack(compiled_fn=artifact_bytes("bytecode_3_9")))

    assert (None, ()) == (summary.python_minor, summary.python_minors)
    assert "main_decode" in summary.name


@pytest.mark.parametrize(
    ("date", "created_at"),
    [
        ("2026-01-02 03:04:05.678901+00:00", "2026-01-02T03:04:05Z"),
        ("2026-01-02 03:04:05+02:00", "2026-01-02T01:04:05Z"),
        ("2026-01-02 03:04:05", "2026-01-02T03:04:05Z"),
        ("0001-01-01 00:00:00+10:00", None),
        ("yesterday", None),
        ("", None),
    ],
)
def test_inspect_artifact_date_is_utc_or_absent(pack: Pack, date: str, created_at: str | None) -> None:
    """The runtime's date comes as UTC in ISO 8601; what is no date decides nothing."""
    assert created_at == inspect_artifact(pack(date=date)).created_at


def test_inspect_artifact_format_version_is_not_judged(pack: Pack) -> None:
    """An artifact of a version yet to come is read as far as it goes."""
    assert "9.9" == inspect_artifact(pack(version="9.9")).format_version


def test_inspect_artifact_broken_bytecode_is_unreadable(pack: Pack) -> None:
    """A right envelope around bytes that are no bytecode is no artifact."""
    with pytest.raises(DocumentError, match="compiled_fn is not marshalled bytecode"):
        inspect_artifact(pack(compiled_fn=b"\xe3\x00"))


@pytest.mark.parametrize("name", NAMES)
def test_inspect_artifact_cut_or_flipped_raises_nothing_else(artifact_bytes: Read, name: str) -> None:
    """Cut at every fiftieth it is refused; with one bit flipped (500 places) it is refused or read."""
    data = artifact_bytes(name)
    for part in range(50):
        with pytest.raises(DocumentError):
            inspect_artifact(data[: len(data) * part // 50])
    source = random.Random(20260101)
    refusals = []
    for _ in range(500):
        flipped = bytearray(data)
        flipped[source.randrange(len(data))] ^= 1 << source.randrange(8)
        try:
            inspect_artifact(bytes(flipped))
        except DocumentError as error:
            refusals.append(str(error))

    assert refusals
    assert not [text for text in refusals if "\n" in text]


@pytest.mark.parametrize("minor", ["3.10", "3.11", "3.12", "3.13"])
def test_inspect_artifact_bare_interpreter_reads_and_runs_nothing(
    artifact_bytes: Read, interpreter: Callable[[str], str], tmp_path: Path, minor: str
) -> None:
    """Each CPython reads an artifact with the standard library alone; nothing is unpickled, unmarshalled or run."""
    path = tmp_path / "compiled_module"
    path.write_bytes(artifact_bytes("npugraph_ex_static"))
    script = f"""
import sys
sys.path.insert(0, {str(Path(cachectl.__file__).parents[1])!r})
def refuse(event, arguments):
    if event in ("pickle.find_class", "marshal.loads", "exec", "compile") and armed:
        raise SystemExit(f"{{event}} {{arguments}}")
armed = False
sys.addaudithook(refuse)
from cachectl.runtimes.artifact import inspect_artifact
with open({str(path)!r}, "rb") as source:
    data = source.read()
inspect_artifact(data)
armed = True
print(inspect_artifact(data).python_minor)
foreign = {{name.split(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names)
print(sorted(foreign - {{"__main__", "cachectl"}}))
"""
    result = subprocess.run([interpreter(minor), "-I", "-S", "-c", script], capture_output=True, text=True, check=False)

    assert ("3.11\n[]\n", "", 0) == (result.stdout, result.stderr, result.returncode)
