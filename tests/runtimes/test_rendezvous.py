"""Where the ranks of a program meet, in torch's own terms."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from cachectl.runtimes.rendezvous import rendezvous_store

pytestmark = pytest.mark.real


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_rendezvous_store_is_the_default_groups(tmp_path: Path, kind: str) -> None:
    """With each store that torch makes ranks meet in: written once, and what stands comes back."""
    torch = pytest.importorskip("torch")
    distributed = torch.distributed
    assert rendezvous_store(torch) is None
    store = {
        "tcp": lambda: distributed.TCPStore("127.0.0.1", 0, 1, True),
        "file": lambda: distributed.FileStore(str(tmp_path / "store"), 1),
        "hash": distributed.HashStore,
    }[kind]()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = rendezvous_store(torch)

        assert [False, b"first", b"first", True] == [
            found.check(["decision"]),
            found.compare_set("decision", "", "first"),
            found.compare_set("decision", "", "second"),
            found.check(["decision"]),
        ]
        assert ([1, 2], b"first") == ([found.add("ready", 1), found.add("ready", 1)], found.get("decision"))
    finally:
        distributed.destroy_process_group()


def test_rendezvous_store_that_can_not_be_asked_is_none() -> None:
    """A store without what the exchange uses is as good as none, and so is a torch that hides it."""

    def torch_with(**names: object) -> types.SimpleNamespace:
        private = types.SimpleNamespace(**names)
        group = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, distributed_c10d=private)
        return types.SimpleNamespace(distributed=group)

    assert rendezvous_store(torch_with(_get_default_store=object)) is None
    assert rendezvous_store(torch_with()) is None
