"""The dangers named in an artifact: each kind is found where it stands, and nothing where it does not."""

from __future__ import annotations

import marshal
import types
from collections.abc import Callable
from typing import Any

import pytest

from cachectl.runtimes.artifact import inspect_artifact
from cachectl.runtimes.artifact.findings import FINDING_KINDS, Finding

Read = Callable[[str], bytes]
Pack = Callable[..., bytes]


def kinds(data: bytes, *, where: str | None = None) -> dict[str, list[str]]:
    """Return the details of an artifact's findings by kind."""
    found: dict[str, list[str]] = {}
    for finding in inspect_artifact(data).findings:
        if where in (None, finding.where):
            found.setdefault(finding.kind, []).append(finding.detail)
    return found


def test_find_dangers_rank_artifact_names_each(artifact_bytes: Read) -> None:
    """A rank's real artifact holds its device, its group's name, random operators and a constant."""
    found = inspect_artifact(artifact_bytes("npugraph_ex_rank1")).findings

    assert (
        Finding("device-index", "compiled_fn", "npu:1"),
        Finding("process-group", "py_code", "_c10d_functional.all_reduce_.default: '1'"),
        Finding("random", "py_code", "aten.native_dropout.default"),
        Finding("random", "py_code", "aten.rand.default"),
        Finding("tensor-constant", "py_code", "_tensor_constant0"),
        Finding("embedded-pickle", "py_code", found[5].detail),
        Finding("absolute-path", "compiled_fn", "/srv/example/ranks.py"),
        Finding("absolute-path", "signature", "/srv/example/ranks.py", 3),
    ) == found


def test_find_dangers_plain_artifact_has_only_place(artifact_bytes: Read) -> None:
    """Without collectives and randomness only the device and the paths are left."""
    assert {"device-index", "absolute-path"} == set(kinds(artifact_bytes("npugraph_ex_static")))


def test_find_dangers_torchair_artifact_names_graph_and_cache_dir(artifact_bytes: Read) -> None:
    """GE's serialised graph and the directory it was cached in are named."""
    found = kinds(artifact_bytes("torchair_ge"), where="py_code")

    assert ["embedded-graph", "absolute-path"] == list(found)
    assert found["absolute-path"][0].startswith("/srv/example/ge/Decoder_static_gecache_")


@pytest.mark.parametrize(
    ("line", "kind", "detail"),
    [
        ("    y = torch.ops.aten.zeros.default([2], device='npu:3')", "device-index", "npu:3"),
        ("    y = torch.ops.aten.zeros.default([2], device = device(type='npu', index=5))", "device-index", "npu:5"),
        ("    user_stream_info={'a': {'stream_id': 1, 'device_index': 2}},", "device-index", "device_index 2"),
        (
            'compile_configs["static_kernel_compile.cann_version"] = ""',
            "static-kernel",
            "static_kernel_compile.cann_version=",
        ),
        (
            'local_compile_options["_aclnn_static_shape_kernel.cann_version"] = "9.0"',
            "static-kernel",
            "_aclnn_static_shape_kernel.cann_version=9.0",
        ),
        ('compile_configs["static_kernel_compile.compile_cache_dir"] = "/srv/a/b"', "absolute-path", "/srv/a/b"),
        (
            "    used_process_group = {'group_name_1': ([0, 1], 'tag')}",
            "process-group",
            "{'group_name_1': ([0, 1], 'tag')}",
        ),
        (
            "    a = torch.ops.npu_define.allgather.default(x, 'ptd:0', [0, 1, 2, 3], 4);  x = None",
            "process-group",
            "npu_define.allgather.default: 'ptd:0', [0, 1, 2, 3]",
        ),
        (
            "    a = torch.ops.npu.npu_moe_distribute_dispatch.default(x, e, 'tcp_0', 16, 3)",
            "process-group",
            "npu.npu_moe_distribute_dispatch.default: 'tcp_0'",
        ),
        (
            "    a = torch.ops.higher_order.triton_kernel_wrapper_functional(kernel_idx = 7, grid = [(1, 1, 1)])",
            "process-handle",
            "triton_kernel_wrapper_functional(kernel_idx=7)",
        ),
        ("    a = get_external_object_by_index(4)", "process-handle", "get_external_object_by_index(4)"),
        ("    a = torch.ops.aten.bernoulli_.float(x, 0.5)", "random", "aten.bernoulli_.float"),
        ("    a = torch.ops.npu._npu_dropout.default(x, 0.5)", "random", "npu._npu_dropout.default"),
        ("import socket", "unexpected-import", "socket"),
        ("    from os_helpers.tools import run", "unexpected-import", "os_helpers.tools"),
    ],
)
def test_find_dangers_line_of_code_is_named(pack: Pack, line: str, kind: str, detail: str) -> None:
    """Each form the code generators write is found, with its text."""
    assert [detail] == kinds(pack(py_code=f"x = 1\n{line}\n"), where="py_code")[kind]


@pytest.mark.parametrize(
    "line",
    [
        "def main():\n    a = rand_strided((2,),(1,),device ='npu:0',dtype =torch.float32)",
        "    a = torch.ops.aten.arange.default(16, device = device(type='cpu'), pin_memory = False)",
        "    a = torch.ops.npu.npu_fused_infer_attention_score.default(q, k, input_layout = 'BNSD')",
        "    a = torch.ops.aten.expand.default(b, [2, 3])",
        "    a = torch.ops.aten.operand.default(b)",
        "    a = torch.ops._c10d_functional.wait_tensor.default(b)",
        "    # torch.ops.aten.rand.default([2]) 'npu:1'",
        "serialized_text = b\"'npu:1' '/srv/a/b'\"",
        "import torch_npu",
        "from npugraph_ex.ops._tagged_event import x",
    ],
)
def test_find_dangers_harmless_line_is_not_named(pack: Pack, line: str) -> None:
    """What no load or call runs, and what only looks alike, is left alone."""
    found = kinds(pack(py_code=f"{line}\n"), where="py_code")

    assert set(found) <= {"embedded-graph"}


def _code(source: str) -> bytes:
    namespace: dict[str, Any] = {}
    exec(compile(source, "<dynamo>", "exec"), namespace)
    made = namespace["f"]
    function = made if isinstance(made, types.FunctionType) else made()
    return marshal.dumps(function.__code__)


@pytest.mark.parametrize(
    ("source", "kind", "details"),
    [
        ("def f(x):\n    return x", "compiled-functions", ["0 compiled functions"]),
        (
            "def f(x):\n    return __compiled_fn_1(x), __compiled_fn_2(x)",
            "compiled-functions",
            ["2 compiled functions"],
        ),
        ("def f(x):\n    return __import_pkg_dot_mod.y, __import_torch.z", "unexpected-import", ["pkg.mod"]),
        ("def f(x):\n    x('<user_class>pkg.mod|Thing')\n    return x", "user-class", ["pkg.mod.Thing"]),
        ("def outer():\n    a = 1\n    def g(x):\n        return a\n    return g\nf = outer()", "closure", ["a"]),
    ],
)
def test_find_dangers_bytecode_is_named(pack: Pack, source: str, kind: str, details: list[str]) -> None:
    """What loading the bytecode would look up or fill in is found."""
    assert details == kinds(pack(compiled_fn=_code(source)), where="compiled_fn")[kind]


def test_find_dangers_unknown_bytecode_is_foreign(pack: Pack, artifact_bytes: Read) -> None:
    """Bytecode of a minor this program does not know is said to be foreign."""
    assert "foreign-bytecode" in kinds(pack(compiled_fn=artifact_bytes("bytecode_3_9")))


def test_find_dangers_many_of_a_kind_are_cut(pack: Pack) -> None:
    """A hostile artifact cannot fill a report: fifty different findings of a kind, each of 400 characters."""
    lines = "".join(f"    a = 'npu:{number}'\n" for number in range(500)) + f"    a = '/{'x' * 9000}/y'\n"

    found = kinds(pack(py_code=lines))

    assert 50 == len(found["device-index"])
    assert [400] == [len(detail) for detail in found["absolute-path"] if "xxx" in detail]


def test_find_dangers_control_characters_are_escaped(pack: Pack) -> None:
    """A path that would move a terminal's cursor is shown as escapes."""
    assert ["/srv/\\x1b[2J"] == kinds(pack(py_code="a = '/srv/\x1b[2J'\n"), where="py_code")["absolute-path"]


def test_find_dangers_kinds_are_all_described(pack: Pack) -> None:
    """Every finding is of a described kind."""
    assert set(kinds(pack())) <= set(FINDING_KINDS)
    assert "unread-signature" in kinds(pack())
