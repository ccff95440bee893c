"""What the next start makes of one folder: each known way of being broken, on artifacts that the runtime saved."""

from __future__ import annotations

import json
import marshal
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cachectl.services.audit import audit, what_starts_here
from tests.services.caches import DATA, KIND, STATIC, lay, md5, said, seen, the_one


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "empty"),
        (STATIC[:-1], "truncated"),
        (STATIC[: len(STATIC) // 2], "truncated"),
        (STATIC[:1], "truncated"),
        (STATIC[:4096] + bytes(len(STATIC) - 4096), "truncated"),
        (b"\x80\x04cos\nsystem\n.", "unreadable"),
        (b"<html>not found</html>.", "unreadable"),
    ],
)
def test_audit_tells_artifacts_that_the_next_start_deletes(tmp_path: Path, data: bytes, kind: str) -> None:
    """What no unpickler of the runtime's takes: it removes the folder and compiles anew."""
    lay(tmp_path, data)

    report = audit(str(tmp_path), seen())

    assert [(kind, "deleted")] == said(report)
    assert [("broken", None)] == [(artifact.state, artifact.content) for artifact in report.artifacts]
    assert 1 == report.exit_code


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o400, 0o700])
def test_audit_tells_a_mode_that_the_runtime_refuses(tmp_path: Path, mode: int) -> None:
    """0600 exactly; a copy through tar or an image loses it."""
    lay(tmp_path, mode=mode)

    found = the_one(audit(str(tmp_path), seen()))

    assert ("wrong-mode", "deleted", "chmod 600 it before the next start") == (found.kind, found.effect, found.hint)


def test_audit_tells_another_format(tmp_path: Path) -> None:
    """A wheel that reads another version removes the artifact; where no wheel is known nothing is claimed."""
    lay(tmp_path)

    assert ("other-format", "deleted") == said(audit(str(tmp_path), seen(npugraph_ex="1.0.7")))[0]
    assert [] == said(audit(str(tmp_path), seen(npugraph_ex=None)))


@pytest.mark.parametrize("python", ["3.10", "3.12"])
def test_audit_tells_foreign_bytecode(tmp_path: Path, python: str) -> None:
    """Bytecode of another minor loads and takes the process down."""
    lay(tmp_path)

    assert [("foreign-bytecode", "crash")] == said(audit(str(tmp_path), seen(python=python)))


def test_audit_tells_links_and_where_a_deletion_would_land(tmp_path: Path) -> None:
    """The runtime resolves links first, so that it removes the folder of what a link leads to."""
    shared = lay(tmp_path / "shared")
    link = tmp_path / "cache" / f"{KIND}_{md5(2)}" / "main_decode" / "compiled_module"
    link.parent.mkdir(parents=True)
    link.symlink_to(shared)

    found = the_one(audit(str(tmp_path / "cache"), seen()))

    assert ("symlink", "deleted") == (found.kind, found.effect)
    assert str(shared.parent) in found.detail


def test_audit_tells_a_link_to_nothing(tmp_path: Path) -> None:
    """The runtime finds no file and compiles."""
    path = lay(tmp_path)
    path.unlink()
    path.symlink_to(tmp_path / "gone")

    assert [("symlink", "deleted"), ("unreadable", "cold")] == said(audit(str(tmp_path), seen()))


def test_audit_does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    """A pipe in an artifact's place would hold the runtime for ever."""
    path = lay(tmp_path)
    path.unlink()
    os.mkfifo(path, 0o600)

    assert [("unreadable", "crash")] == said(audit(str(tmp_path), seen()))


def test_audit_tells_an_artifact_of_another_method(tmp_path: Path) -> None:
    """A copy in the wrong folder is loaded without a word."""
    lay(tmp_path, method="mtp_decode")

    found = the_one(audit(str(tmp_path), seen()))

    assert ("wrong-place", "wrong") == (found.kind, found.effect)
    assert "Decoder.main_decode" in found.detail
    assert "mtp_decode" in found.detail


KERNELS = (
    'compile_configs["static_kernel_compile"] = True\ncompile_configs["static_kernel_compile.cann_version"] = "8.5.0"\n'
)
RUN = "static_kernel_compile_outputs/ts1_pid1_outputs/a.run"


def lay_kernels(folder: Path, path: str = RUN, *, mode: int = 0o700, data: bytes = b"#!/bin/sh\n") -> Path:
    """Lay one file of static kernels into a method folder."""
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    file.chmod(mode)
    return file


def test_audit_finds_whole_static_kernels_good(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    """A .run that can be executed, of this CANN, and an index that leads to it."""
    folder = lay(tmp_path, pack(py_code=KERNELS)).parent
    run = lay_kernels(folder)
    index = "static_kernel_compile_outputs/static_kernel_cache/CANN-8.5.0_Ascend910B1.json"
    lay_kernels(folder, index, data=json.dumps({"key": str(run)}).encode())

    assert [] == said(audit(str(tmp_path), seen()))


def test_audit_tells_static_kernels_of_another_cann(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    """The runtime leaves them out with a warning: degraded, as it will be after an upgrade."""
    lay_kernels(lay(tmp_path, pack(py_code=KERNELS)).parent)

    report = audit(str(tmp_path), seen(cann="9.1.0"))

    assert [("static-kernel", "slow")] == said(report)
    assert [("CANN", "slow"), ("CANN", "unnoticed")] == [
        (change.change, change.effect) for change in report.changes if change.change == "CANN"
    ]


def test_audit_tells_static_kernels_of_no_known_cann(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    """An empty version equals another empty one."""
    lay_kernels(lay(tmp_path, pack(py_code=KERNELS.replace("8.5.0", ""))).parent)

    assert [("static-kernel", "wrong")] == said(audit(str(tmp_path), seen()))


@pytest.mark.parametrize(
    ("path", "mode", "data", "effect"),
    [
        (None, 0, b"", "slow"),
        ("static_kernel_compile_outputs/ts1_pid1_outputs/a.json", 0o600, b"{}", "slow"),
        (RUN, 0o600, b"#!/bin/sh\n", "crash"),
        (RUN, 0o700, b"", "crash"),
    ],
)
def test_audit_tells_static_kernels_that_are_not_whole(
    tmp_path: Path, pack: Callable[..., bytes], path: str | None, mode: int, data: bytes, effect: str
) -> None:
    """None there, a compile that failed and is skipped for good, no x bit, nothing in it."""
    folder = lay(tmp_path, pack(py_code=KERNELS)).parent
    if path is not None:
        lay_kernels(folder, path, mode=mode, data=data)

    assert [("static-kernel", effect)] == said(audit(str(tmp_path), seen()))


def test_audit_expects_no_static_kernels_in_other_ranks_folders(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    """Only a node's first rank keeps them."""
    lay(tmp_path, pack(py_code=KERNELS), rank="world2global_rank1")

    assert [] == said(audit(str(tmp_path), seen()))


def test_audit_tells_paths_of_static_kernels_that_moved(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    """The index holds absolute paths; in a copied cache they lead nowhere."""
    folder = lay(tmp_path, pack(py_code=KERNELS)).parent
    lay_kernels(folder)
    index = "static_kernel_compile_outputs/static_kernel_cache/CANN-8.5.0_Ascend910B1.json"
    lay_kernels(folder, index, data=b'{"key": "/build/machine/a.run"}')

    found = the_one(audit(str(tmp_path), seen()))

    assert ("static-kernel", "slow") == (found.kind, found.effect)
    assert "/build/machine/a.run" in found.detail


def test_audit_tells_a_ge_index_without_its_model(tmp_path: Path) -> None:
    """An index that names a missing .om makes the graph's build fail; a model that no index names is waste."""
    folder = lay(tmp_path, (DATA / "torchair_ge.bin").read_bytes(), kind="Decoder_static_gecache").parent
    (folder / "graph_1.idx").write_text(json.dumps({"cache_file_list": [{"cache_file_name": "./cache_dir/g_1.om"}]}))
    (folder / "g_0.om").write_bytes(b"model")

    report = audit(str(tmp_path), seen())

    assert [("missing-model", "crash"), ("orphan", "wasted")] == said(report)
    assert 5 == report.orphaned_bytes
    (folder / "g_0.om").rename(folder / "g_1.om")
    assert [] == said(audit(str(tmp_path), seen()))


def test_audit_waits_for_no_pipe_in_the_place_of_an_index(tmp_path: Path) -> None:
    """Its writer may never come: what is no file is told as what it is not."""
    folder = lay(tmp_path, (DATA / "torchair_ge.bin").read_bytes(), kind="Decoder_static_gecache").parent
    os.mkfifo(folder / "graph_1.idx")

    assert [("missing-model", "crash")] == said(audit(str(tmp_path), seen()))


def test_audit_tells_handles_of_the_process_that_compiled(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    """A number that meant something in the builder means something else, or nothing, in the next process."""
    lay(tmp_path, pack(py_code="x = triton_kernel_wrapper_mutation(kernel_idx = 3)"))

    assert [("process-handle", "wrong")] == said(audit(str(tmp_path), seen()))


def test_audit_tells_an_artifact_with_several_compiled_functions(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    """The runtime loads exactly one; bytecode without any is removed."""
    code = compile("1", "f.py", "eval")
    lay(tmp_path, pack(compiled_fn=marshal.dumps(code)))

    here = what_starts_here().python
    kinds = [kind for kind, _ in said(audit(str(tmp_path), seen(python=here)))]

    assert ["unloadable"] == kinds


def test_audit_tells_a_folder_in_an_artifacts_place(tmp_path: Path) -> None:
    """The runtime finds something there, can't open it, and removes the method's folder."""
    path = lay(tmp_path)
    path.unlink()
    path.mkdir()

    assert [("unreadable", "deleted")] == said(audit(str(tmp_path), seen()))
