"""Paths inside an artifact point into its own hand-out, or to nothing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from cachectl.boot.materialize import Timing, lay_down
from cachectl.boot.relocate import repoint
from cachectl.errors import StoreError
from cachectl.schemas.boot import ArtifactFile, StoredEntry
from cachectl.schemas.canonical import digest_bytes
from cachectl.store.blobs import BlobStore
from cachectl.store.layout import StoreLayout

RUN = "static_kernel_compile_outputs/ts20260301_pid7_outputs/kernels.run"
CACHE = "static_kernel_compile_outputs/static_kernel_cache/CANN-8.5.0_Ascend910B1.json"


def lay(tmp_path: Path, files: dict[str, bytes]) -> tuple[StoredEntry, Path]:
    """Lay an artifact's files down; return its entry and the method's folder."""
    layout = StoreLayout(tmp_path / "store")
    layout.create()
    blobs = BlobStore(layout)
    items = []
    for path, data in files.items():
        blobs.add_bytes(data)
        items.append(ArtifactFile(path, digest_bytes(data), len(data), 0o700 if path.endswith(".run") else 0o600))
    key = digest_bytes(b"key")
    entry = StoredEntry(key, "r", "decode", "b4", 0, {}, "npugraph_ex", "1", "Model/decode", tuple(items))
    handout = tmp_path / "handout"
    handout.mkdir(mode=0o700)
    return entry, lay_down(blobs, entry, handout, deadline_s=time.monotonic() + 200, timing=Timing())


def test_lay_down_static_kernel_cache_points_to_its_own_kernels(tmp_path: Path) -> None:
    """The builder's folder is replaced by the hand-out's; what lies in neither is left out, and it is 0600."""
    known = {
        "a": f"/build/ws/Model/decode/{RUN}",
        "b": f"/build/static_kernel_compile_outputs/x/{RUN}",
        "other": "/tmp/static_kernel_compile_outputs/ts1_outputs/theirs.run",
        "plain": "/etc/passwd",
        "up": "/x/static_kernel_compile_outputs/../../../etc/passwd",
        "number": 7,
    }
    _, folder = lay(tmp_path, {RUN: b"#!/bin/sh\n", CACHE: json.dumps(known).encode(), "compiled_module": b"code"})

    assert {"a": str(folder / RUN), "b": str(folder / RUN)} == json.loads((folder / CACHE).read_bytes())
    assert 0o600 == (folder / CACHE).stat().st_mode & 0o7777
    assert os.access(folder / RUN, os.X_OK)
    assert [CACHE.rpartition("/")[2]] == os.listdir((folder / CACHE).parent)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"[" * 100_000, b"\xff"], ids=["empty", "list", "cut", "deep", "no text"]
)
def test_lay_down_malformed_static_kernel_cache_is_empty(tmp_path: Path, data: bytes) -> None:
    """Its runtime compiles then, as if it had none."""
    _, folder = lay(tmp_path, {CACHE: data, RUN: b"#!/bin/sh\n"})

    assert {} == json.loads((folder / CACHE).read_bytes())


def test_repoint_leaves_other_files_alone(tmp_path: Path) -> None:
    """Also JSON of the same name at another place."""
    text = json.dumps({"a": f"/build/{RUN}"}).encode()
    _, folder = lay(tmp_path, {f"deeper/{CACHE}": text, "static_kernel_compile_outputs/x.json": text})

    assert {text} == {
        (folder / name).read_bytes() for name in (f"deeper/{CACHE}", "static_kernel_compile_outputs/x.json")
    }


def test_repoint_planted_link_is_not_written_through(tmp_path: Path) -> None:
    """The new file is made, not the old one written."""
    entry, folder = lay(tmp_path, {CACHE: b"{}"})
    (tmp_path / "victim").write_bytes(b"mine")
    (folder / CACHE).with_name(f".{CACHE.rpartition('/')[2]}").symlink_to(tmp_path / "victim")

    with pytest.raises(FileExistsError):
        repoint(entry, folder)
    assert b"mine" == (tmp_path / "victim").read_bytes()


@pytest.mark.parametrize("name", [RUN, "compiled_module"])
def test_lay_down_noexec_mount_refused_where_kernels_must_run(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime would raise in the first call while its peers wait in a collective; no program, no matter."""

    class Mount:
        f_flag = os.ST_NOEXEC

    def statvfs(_: Any) -> Mount:
        return Mount()

    monkeypatch.setattr(os, "statvfs", statvfs)
    if name == RUN:
        with pytest.raises(StoreError, match="noexec"):
            lay(tmp_path, {name: b"data"})
    else:
        lay(tmp_path, {name: b"data"})
