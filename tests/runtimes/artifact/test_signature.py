"""The signature text: inputs, options and operators as the runtimes write them for people."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachectl.runtimes.artifact.pickles import read_pickle
from cachectl.runtimes.artifact.signature import InputSpec, operators, read_shape, read_signature

Read = Callable[[str], bytes]

GRAPH = """--------------------------------------------graph module--------------------------------------------
class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "bf16[8, 8]", arg1_1: "bf16[8]", arg2_1: "Sym(s77)", arg3_1: "i64[s77]", arg4_1: "f8[]"):
        # File: /srv/model.py:3 in f, code: torch.ops.aten.relu.default(x)
        addmm: "bf16[s77, 64]" = torch.ops.aten.addmm.default(arg1_1, arg3_1, arg0_1);  arg1_1 = None
        mul: "bf16[s77, 64]" = torch.ops.aten.mul.Tensor(torch.ops.aten.mul.Tensor(addmm, 2), 3)
        return (mul,)

"""
INPUTS = """-----------------------------------------------inputs-----------------------------------------------
0:arg0_1 Parameter(layers.0.weight)=FakeTensor(..., device='npu:0', size=(64, 64))
1:arg1_1 Buffer(L['self'].scale)=FakeTensor(..., size=(64,))
2:arg2_1 UserInput(0)=s77
3:arg3_1 UserInput(1)=FakeTensor(..., size=(s77,), dtype=torch.int64)
4:arg4_1 UserInput(2)=Parameter containing:
FakeTensor(..., size=(Max(1, s77), 2*s77))
"""
OPTIONS = """------------------------------------------compile options-------------------------------------------
frozen_parameter=True
super_kernel_optimize_options={'a=b': ['.*']}
text=first
second
empty=
"""


def test_read_signature_each_kind_of_input_is_told() -> None:
    """Parameters, buffers, symbols and tensors come with what the line and the graph's annotation say."""
    signature = read_signature(GRAPH + INPUTS + OPTIONS)

    assert signature.complete
    assert (
        InputSpec(0, "arg0_1", "parameter", "layers.0.weight", (64, 64), "bfloat16", "npu:0"),
        InputSpec(1, "arg1_1", "buffer", "L['self'].scale", (64,), "bfloat16"),
        InputSpec(2, "arg2_1", "user", "0", value="s77"),
        InputSpec(3, "arg3_1", "user", "1", ("s77",), "int64"),
        InputSpec(4, "arg4_1", "user", "2", ("Max(1, s77)", "2*s77"), "f8"),
    ) == signature.inputs


def test_read_signature_options_keep_their_text() -> None:
    """A value is all after the first sign of equality, over as many lines as it has."""
    assert {
        "frozen_parameter": "True",
        "super_kernel_optimize_options": "{'a=b': ['.*']}",
        "text": "first\nsecond",
        "empty": "",
    } == read_signature(GRAPH + INPUTS + OPTIONS).options


def test_operators_quoted_source_is_not_counted() -> None:
    """Calls are counted, what a comment quotes is not."""
    assert {"aten.addmm.default": 1, "aten.mul.Tensor": 2} == operators(GRAPH)


@pytest.mark.parametrize("text", ["", GRAPH, GRAPH + OPTIONS, GRAPH + INPUTS])
def test_read_signature_missing_section_is_incomplete(text: str) -> None:
    """What is not there is empty, and said to be."""
    signature = read_signature(text)

    assert not signature.complete
    assert {} == signature.options or "compile options" in text


def test_read_signature_unreadable_input_is_incomplete() -> None:
    """A line in no known form is left out and the signature is not complete."""
    text = GRAPH + INPUTS.replace("0:arg0_1 Parameter", "0:arg0_1 Something") + OPTIONS

    assert not read_signature(text).complete
    assert 4 == len(read_signature(text).inputs)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("", ()),
        ("2,", (2,)),
        ("2, s77, 16", (2, "s77", 16)),
        ("(s0*((s1//2))), Max(1, s0)", ("(s0*((s1//2)))", "Max(1, s0)")),
        ("9" * 5000, ("9" * 5000,)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_read_shape_numbers_and_symbols(text: str, shape: tuple[int | str, ...]) -> None:
    """Numbers are numbers, everything else is its text, commas inside parentheses divide nothing."""
    assert shape == read_shape(text)


def test_read_signature_default_dtype_is_read_from_the_graph(artifact_bytes: Read) -> None:
    """A program whose default dtype is bfloat16 writes inputs without dtype; they are not taken for float32."""
    signature = read_signature(read_pickle(artifact_bytes("npugraph_ex_rank1")).signature)

    assert ["bfloat16"] * 4 == [spec.dtype for spec in signature.inputs]
    assert 1 == signature.ops["_c10d_functional.all_reduce.default"]


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_read_signature_any_text_is_read(text: str) -> None:
    """No text raises, wherever it stands in a signature."""
    for candidate in (text, GRAPH + text, GRAPH + INPUTS + text, INPUTS + text + OPTIONS):
        read_signature(candidate)
