"""The generated code: what its lines state, and which of them run."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from cachectl.runtimes.artifact.generated import ExampleInput, read_generated
from cachectl.runtimes.artifact.pickles import read_pickle

Read = Callable[[str], bytes]


def test_read_generated_npugraph_ex_states_inputs_and_settings(artifact_bytes: Read) -> None:
    """Strides, devices, static inputs and settings are read from the fixed forms."""
    generated = read_generated(read_pickle(artifact_bytes("npugraph_ex_dynamic")).py_code)

    assert {0: (16, 1), 1: (1,), 3: (16, 1), 4: (1,), 6: (16, 1), 7: (1,)} == generated.strides
    assert ExampleInput(("s91", 16), (16, 1), "cpu", "float32") == generated.examples["arg6_1"]
    assert frozenset({0, 1, 4}) == generated.static_inputs
    assert ("True", "64") == (generated.settings["force_eager"], generated.settings["capture_limit"])
    assert (((2, True), (5, True)), ("arg6_1",)) == (generated.graph_key_inputs, generated.written_inputs)
    assert "npugraph_ex._acl_concrete_graph.acl_graph" in generated.imports
    assert {} == generated.serialized


def test_read_generated_torchair_states_settings_and_graph(artifact_bytes: Read) -> None:
    """What torchair writes has its graph as bytes, no example and no list of static inputs."""
    generated = read_generated(read_pickle(artifact_bytes("torchair_ge")).py_code)

    assert ["serialized_graph"] == list(generated.serialized)
    assert "graph_1" == generated.settings["ge.graph_key"]
    assert (None, None) == (generated.static_inputs, generated.graph_key_inputs)
    assert {} == generated.examples


def test_read_generated_example_call_is_not_live() -> None:
    """Lines of `main`, comments and byte literals run never or hold no code; what follows `main` is live again."""
    text = "serialized_gm = b'npu:1'\nx = 1\n# y = 'npu:2'\ndef main():\n    z = 'npu:3'\n\nafter = 4\n"

    assert ("x = 1", "after = 4") == read_generated(text).live


def test_read_generated_dynamic_sizes_keep_their_expressions() -> None:
    """Sizes that are expressions with parentheses are read as text."""
    text = "    assert_size_stride(args[3], (s0*(s1//2), 16), (Max(1, s1), 1))\n"

    assert {3: ("Max(1, s1)", 1)} == read_generated(text).strides


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_read_generated_any_text_is_read(text: str) -> None:
    """No text raises."""
    read_generated(text)
    read_generated(f"def main():\n    {text}")
