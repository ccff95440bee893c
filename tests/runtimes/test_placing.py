"""What of an artifact is bound to a place: groups by name, the device by number, the cut into nodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cachectl.runtimes.artifact import inspect_artifact
from cachectl.runtimes.placing import placed, placed_reasons

# Written by rank 1 of a world of two, with collectives over a group of both (torch_npu 2.13.0).
ARTIFACT = (Path(__file__).parent / "artifact" / "data" / "npugraph_ex_rank1.bin").read_bytes()
STATIC_KERNELS = (Path(__file__).parent / "artifact" / "data" / "npugraph_ex_static_kernels.bin").read_bytes()
ALONE = (Path(__file__).parent / "artifact" / "data" / "npugraph_ex_static.bin").read_bytes()


def process(groups: dict[str, list[int]], device: int = 1) -> Any:
    """Return a torch whose process has these groups, by name, and this device."""
    world = SimpleNamespace(
        pg_group_ranks={name: dict.fromkeys(ranks) for name, ranks in groups.items()},
        pg_names={name: name for name in groups},
        pg_to_tag={name: f"ptd:{name}" for name in groups},
    )
    distributed = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: bool(groups),
        get_world_size=lambda: max(map(len, groups.values())),
        distributed_c10d=SimpleNamespace(_world=world),
    )
    return SimpleNamespace(distributed=distributed, npu=SimpleNamespace(current_device=lambda: device))


def test_groups_that_the_graph_names_are_found_with_their_ranks() -> None:
    """Only those: a group that the program has besides is nobody's matter."""
    names = inspect_artifact(ARTIFACT).group_names
    assert names
    torch = process({names[0].removeprefix("ptd:"): [0, 1], "unrelated": [1]})

    found = placed(torch, ARTIFACT, environ={})

    assert [[0, 1]] == found["groups"][names[0]]
    assert "unrelated" not in found["groups"]
    assert [] == placed_reasons(torch, found, {})


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1, 2], None])
def test_group_of_another_membership_is_a_reason_with_both(ranks: list[int] | None) -> None:
    """Another order of new_group calls, another world, or no such group."""
    found = {"groups": {"1": [[0, 1]]}}
    torch = process({"1": ranks} if ranks is not None else {})

    (reason,) = placed_reasons(torch, found, {})

    assert ("topology", "groups.1", [[0, 1]], [ranks] if ranks is not None else None) == (
        reason.part,
        reason.name,
        reason.stored,
        reason.wanted,
    )


def test_same_rank_in_another_node_cut_has_another_device_than_its_artifact_names() -> None:
    """Rank 1 of two on one node has device 1; with a node each it has device 0, and the runtime's path is the same."""
    device = next(item.detail for item in inspect_artifact(ARTIFACT).findings if item.kind == "device-index")
    found = placed(process({}, device=1), ARTIFACT, environ={"LOCAL_WORLD_SIZE": "2"})

    (reason,) = placed_reasons(process({}, device=0), found, {"LOCAL_WORLD_SIZE": "1"})

    assert ("npu:1", {"device_index": 1}) == (device, found)
    assert ("topology", "device_index", 1, 0) == (reason.part, reason.name, reason.stored, reason.wanted)
    assert "device 1" in reason.hint
    assert [] == placed_reasons(process({}, device=1), found, {"LOCAL_WORLD_SIZE": "1"})


@pytest.mark.parametrize("name", ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"])
def test_variables_of_the_node_cut_count_where_model_code_reads_them(name: str) -> None:
    """Read at build: compared, also with none; not read: nobody's matter."""
    read = placed(process({}), ALONE, read=[name, "HOME"], environ={name: "1"})
    unread = placed(process({}), ALONE, read=[], environ={name: "1"})

    assert [] == placed_reasons(process({}), read, {name: "1"})
    for other in ({name: "0"}, {}):
        (reason,) = placed_reasons(process({}), read, other)
        assert ("topology", "1", other.get(name)) == (reason.part, reason.stored, reason.wanted)
        assert [] == placed_reasons(process({}), unread, other)


def test_static_kernels_of_several_ranks_need_the_local_world_size() -> None:
    """Unset, the runtime leaves them out with a warning; another cut has them with other ranks (field report T8)."""
    world = process({"0": [0, 1]})

    found = placed(world, STATIC_KERNELS, environ={"LOCAL_WORLD_SIZE": "2"})

    assert "2" == found["local_world_size"]
    assert [] == placed_reasons(world, found, {"LOCAL_WORLD_SIZE": "2"})
    for environ in ({}, {"LOCAL_WORLD_SIZE": "1"}):
        (reason,) = placed_reasons(world, found, environ)
        assert ("topology", "local_world_size", "2", environ.get("LOCAL_WORLD_SIZE")) == (
            reason.part,
            reason.name,
            reason.stored,
            reason.wanted,
        )
        assert "LOCAL_WORLD_SIZE" in reason.hint
    assert "local_world_size" not in placed(process({}), STATIC_KERNELS, environ={})
    assert "local_world_size" not in placed(world, ALONE, environ={"LOCAL_WORLD_SIZE": "2"})
