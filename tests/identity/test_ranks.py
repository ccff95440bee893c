"""The ranks a start is about: what each launcher's variables mean, and two sources that disagree are a cold start."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachectl.identity.ranks import check_ranks, find_ranks, ranks_here
from cachectl.identity.topology import topology_part
from tests.identity.rank_tables import levels, servers, written

EIGHT = topology_part({"topology": {"world_size": 8, "tensor_parallel": 4, "data_parallel": 2}})

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
ASCEND_JOB = {"RANK": "1", "LOCAL_RANK": "0,1,2,3", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}
PYTORCH_JOB = {"RANK": "1", "WORLD_SIZE": "2", "PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}
LWS = {"LWS_GROUP_INDEX": "3", "LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "job-0.job"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, None),
        # torchrun
        (TORCHRUN, (5,)),
        ({"RANK": "0", "LOCAL_RANK": "0"}, (0,)),
        ({"RANK": "5"}, (5,)),
        ({"RANK": " 5 "}, (5,)),
        ({"RANK": "", "LOCAL_RANK": ""}, None),
        ({"RANK": "-1", "LOCAL_RANK": "-1"}, None),
        ({"WORLD_SIZE": "8"}, None),
        # Nodes of unequal size: torchrun's node index and node size say nothing of the rank.
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5", "LOCAL_RANK": "2"}, (5,)),
        # cann-recipes offline
        ({"LOCAL_RANK": "3"}, (3,)),
        ({"LOCAL_RANK": "3", "RANK_OFFSET": "8"}, (11,)),
        ({"LOCAL_RANK": "3", "RANK_OFFSET": "8", "WORLD_SIZE": "16"}, (11,)),
        ({"RANK": "11", "LOCAL_RANK": "3", "RANK_OFFSET": "8"}, (11,)),
        ({"RANK_OFFSET": "8"}, None),
        # AscendJob
        (ASCEND_JOB, (4, 5, 6, 7)),
        ({**ASCEND_JOB, "RANK": "0"}, (0, 1, 2, 3)),
        ({"RANK": "1", "LOCAL_RANK": "0, 1,"}, (2, 3)),
        ({"RANK": "1", "LOCAL_RANK": "0,1", "LOCAL_WORLD_SIZE": "4"}, (4, 5)),
        ({"LOCAL_RANK": "0,1"}, None),
        # A pod of one device looks like torchrun's, and means the same.
        ({"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "4"}, (2,)),
        # PyTorchJob
        (PYTORCH_JOB, (4, 5, 6, 7)),
        ({"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}, (4, 5, 6, 7)),
        ({**PYTORCH_JOB, "PET_NPROC_PER_NODE": "auto"}, None),
        ({**PYTORCH_JOB, "PET_NNODES": "1:4"}, (4, 5, 6, 7)),
        ({"RANK": "1", "PET_NODE_RANK": "1"}, None),
        # After torchrun ran, whose dynamic rendezvous may number the nodes in another order.
        ({**PYTORCH_JOB, **TORCHRUN, "PET_NODE_RANK": "0"}, (5,)),
        # LeaderWorkerSet
        (LWS, None),
        ({**LWS, "LOCAL_WORLD_SIZE": "4"}, (4, 5, 6, 7)),
        ({**LWS, "PET_NPROC_PER_NODE": "4"}, (4, 5, 6, 7)),
        ({**LWS, "LOCAL_WORLD_SIZE": "4", "RANK": "1"}, (4, 5, 6, 7)),
        ({**LWS, "LOCAL_WORLD_SIZE": "4", "RANK": "5"}, (5,)),
        ({**LWS, "RANK": "3"}, (3,)),
        ({**LWS, **TORCHRUN, "LWS_WORKER_INDEX": "0"}, (5,)),
        # Devices are no ranks.
        ({"ASCEND_RT_VISIBLE_DEVICES": "4,5", "ASCEND_VISIBLE_DEVICES": "4,5", "DEVICE_ID": "5"}, None),
        ({"RANK": "0", "LOCAL_RANK": "0", "ASCEND_RT_VISIBLE_DEVICES": "5"}, (0,)),
        ({"RANK_ID": "3"}, None),
    ],
)
def test_ranks_here_each_launcher(environ: dict[str, str], wanted: tuple[int, ...] | None) -> None:
    """torchrun, cann-recipes' offline start, AscendJob, PyTorchJob and LWS pods, none contradicting itself (T3)."""
    assert wanted == ranks_here(environ)
    assert () == find_ranks(environ).against
    assert () == find_ranks(environ).unread


TABLES = {
    "v10": servers(2, 4),
    "v12": servers(2, 4, version="1.2"),
    "v20": levels(8),
    "one": servers(1, 8),
    "each": servers(8, 1),
}


def table_environ(folder: Path, table: str) -> dict[str, str]:
    return {"RANK_TABLE_FILE": str(written(folder / "hccl.json", TABLES[table]))}


@pytest.mark.parametrize(
    ("table", "environ", "wanted"),
    [
        ("v10", {}, None),
        ("v10", {"POD_IP": "192.168.7.1"}, (4, 5, 6, 7)),
        ("v12", {"POD_IP": "192.168.7.1"}, (4, 5, 6, 7)),
        ("v12", {"XDL_IP": "10.0.0.0"}, (0, 1, 2, 3)),
        ("each", {"XDL_IP": "10.0.0.3"}, (3,)),
        ("v12", {"HOST_IP": "10.0.0.0", "POD_IP": "192.168.7.1"}, (4, 5, 6, 7)),
        ("one", {}, (0, 1, 2, 3, 4, 5, 6, 7)),
        ("v20", {}, None),
        ("v20", {"POD_IP": "192.168.7.1"}, None),
        ("v20", {"RANK_ID": "3"}, (3,)),
        ("v10", {"RANK_ID": "3"}, (3,)),
        ("v10", {"RANK_ID": "5", "POD_IP": "192.168.7.1"}, (5,)),
        ("v10", {"RANK": "5", "LOCAL_RANK": "1", "RANK_ID": "1"}, (5,)),
        ("v10", TORCHRUN, (5,)),
        ("v20", TORCHRUN, (5,)),
        ("v12", {**ASCEND_JOB, "XDL_IP": "10.0.0.1"}, (4, 5, 6, 7)),
    ],
)
def test_find_ranks_table(tmp_path: Path, table: str, environ: dict[str, str], wanted: tuple[int, ...] | None) -> None:
    """A rank table says how many ranks there are, and which are here where it names this pod's address."""
    here = find_ranks({**environ, **table_environ(tmp_path, table)})

    assert wanted == here.ranks
    assert () == here.against
    assert [] == check_ranks(EIGHT, here)


@pytest.mark.parametrize(
    ("environ", "rank", "group", "name", "sources"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "4"}, None, None, "rank", ("RANK=5", "WORLD_SIZE=4")),
        ({**TORCHRUN, "RANK": "4"}, None, None, "rank", ("RANK=4", "GROUP_RANK=1")),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, None, None, "local_rank", ("LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4")),
        ({"RANK": "3", "LOCAL_RANK": "3", "RANK_OFFSET": "8"}, None, None, "rank", ("RANK=3", "RANK_OFFSET=8")),
        (
            {**ASCEND_JOB, "LOCAL_WORLD_SIZE": "2"},
            None,
            None,
            "local_rank",
            ("LOCAL_RANK=0,1,2,3", "LOCAL_WORLD_SIZE=2"),
        ),
        ({**ASCEND_JOB, "WORLD_SIZE": "4"}, None, None, "rank", ("RANK=1 (the pod's)", "WORLD_SIZE=4")),
        ({**PYTORCH_JOB, "RANK": "0"}, None, None, "rank", ("RANK=0", "PET_NODE_RANK=1")),
        ({**PYTORCH_JOB, "RANK": "2"}, None, None, "rank", ("RANK=2", "PET_NODE_RANK=1")),
        ({**PYTORCH_JOB, "PET_NNODES": "1"}, None, None, "node_rank", ("PET_NODE_RANK=1", "1 pods")),
        ({**LWS, "LOCAL_WORLD_SIZE": "4", "RANK": "2"}, None, None, "rank", ("RANK=2", "LWS_WORKER_INDEX=1")),
        ({**LWS, "LWS_GROUP_SIZE": "1"}, None, None, "node_rank", ("LWS_WORKER_INDEX=1", "1 pods")),
        (TORCHRUN, 4, None, "rank", ("--rank 4", "RANK=5")),
        (ASCEND_JOB, 3, None, "rank", ("--rank 3", "RANK=1 (the pod's)")),
        ({**LWS, "LOCAL_WORLD_SIZE": "4"}, 3, None, "rank", ("--rank 3", "LWS_WORKER_INDEX=1")),
        (TORCHRUN, None, (4, 8), "rank", ("torch.distributed rank 4 of 8", "RANK=5")),
        (TORCHRUN, None, (5, 6), "world_size", ("torch.distributed rank 5 of 6", "WORLD_SIZE=8")),
    ],
)
def test_find_ranks_contradiction_names_both_sources(
    environ: dict[str, str], rank: int | None, group: tuple[int, int] | None, name: str, sources: tuple[str, str]
) -> None:
    """Two sources that disagree are cold, part topology, with both and their values."""
    here = find_ranks(environ, rank=rank, group=group)
    reason, *_ = check_ranks(EIGHT, here)

    assert ("topology", name, "semantic") == (reason.part, reason.name, reason.kind)
    assert sources[0] in reason.stored
    assert sources[1] in reason.wanted
    assert "contradict" in reason.hint


@pytest.mark.parametrize(
    ("table", "environ", "rank", "name", "sources"),
    [
        ("v10", {"RANK": "8", "LOCAL_RANK": "0"}, None, "rank", ("RANK=8", "8 ranks")),
        ("v20", {"RANK": "8", "LOCAL_RANK": "0"}, None, "rank", ("RANK=8", "8 ranks")),
        ("v12", {"RANK": "1", "LOCAL_RANK": "1", "POD_IP": "192.168.7.1"}, None, "rank", ("RANK=1", "here 4–7")),
        ("v12", {**ASCEND_JOB, "XDL_IP": "10.0.0.0"}, None, "rank", ("RANK=1 (the pod's)", "here 0–3")),
        ("v12", {**TORCHRUN, "WORLD_SIZE": "16"}, None, "world_size", ("WORLD_SIZE=16", "8 ranks")),
        ("v20", {**TORCHRUN, "WORLD_SIZE": "16"}, None, "world_size", ("WORLD_SIZE=16", "8 ranks")),
        ("v20", {}, 9, "rank", ("--rank 9", "8 ranks")),
        ("v10", {"POD_IP": "192.168.7.1"}, 3, "rank", ("--rank 3", "here 4–7")),
        ("v10", {"POD_IP": "192.168.7.1", "RANK_ID": "3"}, None, "rank", ("RANK_ID=3", "here 4–7")),
        ("v20", PYTORCH_JOB | {"PET_NPROC_PER_NODE": "2"}, None, "world_size", ("PET_NODE_RANK=1", "8 ranks")),
    ],
)
def test_find_ranks_contradicting_table(
    tmp_path: Path, table: str, environ: dict[str, str], rank: int | None, name: str, sources: tuple[str, str]
) -> None:
    """A rank or a world that the rank table does not have is cold, with the table's path and what it says."""
    here = find_ranks({**environ, **table_environ(tmp_path, table)}, rank=rank)
    reason, *_ = check_ranks(EIGHT, here)

    assert ("topology", name) == (reason.part, reason.name)
    assert sources[0] in reason.stored
    assert str(tmp_path / "hccl.json") in reason.wanted
    assert sources[1] in reason.wanted


@pytest.mark.parametrize(
    ("environ", "rank", "wanted"),
    [
        ({}, 3, (3,)),
        (TORCHRUN, 5, (5,)),
        (ASCEND_JOB, 6, (6,)),
        ({**LWS, "LOCAL_WORLD_SIZE": "4"}, 4, (4,)),
        (LWS, 3, (3,)),
    ],
)
def test_find_ranks_option_narrows(environ: dict[str, str], rank: int, wanted: tuple[int, ...]) -> None:
    """`--rank N` picks one of the ranks that the environment means."""
    here = find_ranks(environ, rank=rank)

    assert (wanted, ()) == (here.ranks, here.against)
    assert f"--rank {rank}" in {fact.source for fact in here.facts}


def test_find_ranks_process_group_is_the_rank(tmp_path: Path) -> None:
    """A program that spawns its ranks without variables has its rank from torch.distributed."""
    assert (3,) == find_ranks({}, group=(3, 8)).ranks
    assert (3,) == find_ranks(table_environ(tmp_path, "v20"), group=(3, 8)).ranks


@pytest.mark.parametrize("size", [1, 4, 16])
def test_check_ranks_other_world_is_a_reason(size: int) -> None:
    """Have 8, asked for another number: both stand in the reason, and who asked (field report T7)."""
    (reason,) = check_ranks(EIGHT, find_ranks({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size)}))

    assert ("topology", "world_size", 8, size) == (reason.part, reason.name, reason.stored, reason.wanted)
    assert "run cachectl build" in reason.hint
    assert f"WORLD_SIZE={size}" in reason.hint


@pytest.mark.parametrize(
    "environ",
    [
        {},
        TORCHRUN,
        ASCEND_JOB,
        PYTORCH_JOB,
        LWS,
        {"RANK": "0", "LOCAL_RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"LOCAL_RANK": "0", "WORLD_SIZE": "many"},
    ],
)
def test_check_ranks_equal_or_unknown_is_none(environ: dict[str, str]) -> None:
    """Before a launcher ran WORLD_SIZE may count pods, and says nothing."""
    assert [] == check_ranks(EIGHT, find_ranks(environ))


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"RANK": "two"}, "RANK"),
        ({"RANK": "²"}, "RANK"),
        ({"RANK": "9" * 5000}, "RANK"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK"),
        ({"RANK": "1", "LOCAL_RANK": "0,x"}, "LOCAL_RANK"),
        ({"PET_NODE_RANK": "x"}, "PET_NODE_RANK"),
        ({"LWS_WORKER_INDEX": "x"}, "LWS_WORKER_INDEX"),
    ],
)
def test_check_ranks_what_is_no_number_is_cold(environ: dict[str, str], name: str) -> None:
    """A rank that can't be read is never guessed; with one rank in all there is nothing to guess."""
    here = find_ranks(environ)
    (reason,) = check_ranks(EIGHT, here)

    assert (None, "topology", name, "corrupt") == (here.ranks, reason.part, reason.name, reason.kind)
    assert [] == check_ranks(topology_part({}), here)
    assert [] == check_ranks(EIGHT, find_ranks({**environ, "RANK": "5", "LOCAL_RANK": "1"}))


def test_check_ranks_malformed_table_is_cold_where_it_is_the_only_source(tmp_path: Path) -> None:
    """Where a launcher named the rank a broken table changes nothing; alone it is a reason, in hook and process."""
    environ = {"RANK_TABLE_FILE": str(written(tmp_path / "t", "{"))}
    (reason,) = check_ranks(EIGHT, find_ranks(environ))

    assert ("topology", "rank table", environ["RANK_TABLE_FILE"], "corrupt") == (
        reason.part,
        reason.name,
        reason.stored,
        reason.kind,
    )
    assert "no JSON" in reason.wanted
    assert [reason] == check_ranks(EIGHT, find_ranks(environ), process=True)
    assert [] == check_ranks(EIGHT, find_ranks({**environ, **TORCHRUN}), process=True)
    assert [] == check_ranks(topology_part({}), find_ranks(environ), process=True)


@pytest.mark.parametrize("table", [None, {**levels(8), "status": "initializing"}])
def test_check_ranks_table_to_come_is_pending_before_the_program(
    tmp_path: Path, table: dict[str, object] | None
) -> None:
    """A hook that runs before the table is completed hands all ranks out; a process without a rank is cold."""
    path = tmp_path / "hccl.json"
    if table is not None:
        written(path, table)
    here = find_ranks({"RANK_TABLE_FILE": str(path)})

    assert None is here.ranks
    assert [] == check_ranks(EIGHT, here)
    (reason,) = check_ranks(EIGHT, here, process=True)
    assert ("topology", "rank table", "absent") == (reason.part, reason.name, reason.kind)


def test_check_ranks_process_without_a_rank_is_cold() -> None:
    """A process of several ranks that knows not which it is never takes one's artifact (field reports T1, T3)."""
    topology = {**EIGHT, "rank": 3}
    (reason,) = check_ranks(topology, find_ranks({}), process=True)

    assert ("topology", "rank", 3, None, "absent") == (
        reason.part,
        reason.name,
        reason.stored,
        reason.wanted,
        reason.kind,
    )
    assert [] == check_ranks(topology_part({}), find_ranks({}), process=True)
