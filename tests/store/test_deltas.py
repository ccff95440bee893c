"""Deltas: what comes out is what went in, whatever it was; ranks that mean the same share their bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachectl.errors import ArtifactCorruptedError, ArtifactNotFoundError, DocumentError
from cachectl.schemas.canonical import digest_bytes
from cachectl.store.blobs import BlobStore
from cachectl.store.deltas import Delta, encode_delta
from cachectl.store.layout import StoreLayout
from cachectl.store.writing import add_artifact

# Written by a rank of a world of two (torch_npu 2.13.0).
ARTIFACT = Path(__file__).resolve().parents[1] / "runtimes" / "artifact" / "data" / "npugraph_ex_rank1.bin"


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    """An empty store's blobs."""
    layout = StoreLayout(tmp_path / "store")
    layout.create()
    return BlobStore(layout)


def of_rank(rank: int) -> bytes:
    """Return the artifact as another rank of the same meaning writes it: its own date, names and device number."""
    data = ARTIFACT.read_bytes()
    date = data.index(b"+00:00") - 15
    data = data[:date] + f"{rank:02}:{rank:02}:01.{rank:06}".encode() + data[date + 15 :]
    name = data.index(b"__compiled_fn_") + 16
    return (data[:name] + os.urandom(4).hex().encode() + data[name + 8 :]).replace(b"npu:1", f"npu:{rank}".encode())


pieces = st.lists(
    st.sampled_from([b"a = 1\n", b"return x\n", b"\x00\xff", b"long line " * 9, b"\r", b"b"]), max_size=12
)


@given(base=pieces, data=pieces, tail=st.binary(max_size=80))
def test_delta_of_anything_gives_back_the_very_bytes(base: list[bytes], data: list[bytes], tail: bytes) -> None:
    """Lines in another order, cut, repeated, with other bytes between."""
    old, new = b"".join(base) * 9, (b"".join(data) + tail) * 3 + b"".join(base) * 9

    encoded = encode_delta(old, digest_bytes(old), new)

    if encoded is not None:
        delta = Delta.from_bytes(encoded)
        assert (new, len(new), digest_bytes(old)) == (delta.apply(old), delta.size_bytes, delta.base)
        assert encoded == delta.to_bytes()
        assert 4 * len(encoded) <= len(new)


@given(st.binary(max_size=200))
def test_delta_of_any_bytes_is_read_or_refused(data: bytes) -> None:
    """What lies in a store may be damaged: an error of ours, and no endless work."""
    for damaged in (data, b"ccdelta1" + data, b"ccdelta1" + bytes(32) + data):
        try:
            assert Delta.from_bytes(damaged).size_bytes >= 0
        except DocumentError:
            pass


def test_64_ranks_that_mean_the_same_take_no_more_than_twice_the_bytes_of_one(blobs: BlobStore, tmp_path: Path) -> None:
    """64 artifacts with dates, names and device numbers of their own: each comes out exactly as it was built."""
    made = {rank: of_rank(rank) for rank in range(64)}
    files = []
    for rank, data in made.items():
        folder = tmp_path / f"rank{rank}"
        folder.mkdir()
        (folder / "compiled_module").write_bytes(data)
        like = {file["path"]: file["digest"] for file in files[0]} if files else None
        files.append(add_artifact(blobs.layout, folder, like=like))

    stored = sum(path.stat().st_size for path in blobs.layout.blobs.rglob("*") if path.is_file())
    assert stored <= 2 * len(made[0])
    assert 64 == len({file["digest"] for (file,) in files})
    for rank, (file,) in enumerate(files):
        assert (digest_bytes(made[rank]), len(made[rank])) == (file["digest"], file["size_bytes"])
        assert blobs.exists(file["digest"], file["size_bytes"])
        with blobs.open(file["digest"]) as opened:
            assert made[rank] == opened.read()
        blobs.check(file["digest"])
    assert {file["digest"] for (file,) in files} == {digest for digest, _ in blobs.all()}


def test_blob_that_has_little_in_common_is_stored_whole(blobs: BlobStore, tmp_path: Path) -> None:
    """So is one whose base is not there, or damaged: a delta against other bytes could never be read again."""
    (tmp_path / "a").write_bytes(os.urandom(500))
    (tmp_path / "b").write_bytes(ARTIFACT.read_bytes())
    base, _ = blobs.add_bytes(of_rank(2))
    other, _ = blobs.add_like(tmp_path / "a", base)
    nowhere, _ = blobs.add_like(tmp_path / "b", digest_bytes(b"nowhere"))

    assert [True, True] == [blobs.layout.blob(digest).is_file() for digest in (other, nowhere)]
    blobs.layout.blob(nowhere).unlink()
    os.chmod(blobs.layout.blob(base), 0o644)
    blobs.layout.blob(base).write_bytes(b"damaged")
    again, _ = blobs.add_like(tmp_path / "b", base)
    assert blobs.layout.blob(again).is_file()


def test_blob_whose_base_is_gone_or_damaged_is_told(blobs: BlobStore, tmp_path: Path) -> None:
    """It is missing where its base is; with another base its own bytes are others."""
    (tmp_path / "b").write_bytes(of_rank(3))
    base, _ = blobs.add_bytes(of_rank(2))
    digest, size_bytes = blobs.add_like(tmp_path / "b", base)

    assert (base, None) == (blobs.base_of(digest), blobs.base_of(base))
    assert not blobs.layout.blob(digest).exists()
    os.chmod(blobs.layout.blob(base), 0o644)
    damaged = bytearray(of_rank(2))
    damaged[500] ^= 1
    blobs.layout.blob(base).write_bytes(damaged)
    with pytest.raises(ArtifactCorruptedError):
        blobs.check(digest)
    blobs.layout.blob(base).unlink()
    assert not blobs.exists(digest, size_bytes)
    with pytest.raises(ArtifactNotFoundError):
        blobs.open(digest)
    os.chmod(blobs.layout.blob_delta(digest), 0o644)
    blobs.layout.blob_delta(digest).write_bytes(b"no delta")
    assert not blobs.exists(digest)
    with pytest.raises(ArtifactCorruptedError):
        blobs.open(digest)
