"""Rank tables: each version is read whole, and what is no table says nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cachectl.identity.rank_table import RankTableError, read_rank_table
from tests.identity.rank_tables import levels, servers, written


@pytest.mark.parametrize("version", ["1.0", "1.2"])
@pytest.mark.parametrize(
    ("addresses", "wanted"),
    [
        ((), None),
        (("192.168.7.1",), (4, 5, 6, 7)),
        (("10.0.0.0",), (0, 1, 2, 3)),
        (("10.0.0.0", "192.168.7.1"), (4, 5, 6, 7)),
        (("10.9.9.9",), None),
    ],
)
def test_read_rank_table_servers_of_an_address(
    tmp_path: Path, version: str, addresses: tuple[str, ...], wanted: tuple[int, ...] | None
) -> None:
    """A pod finds its ranks by its own address, or by its host's; the pod's comes first."""
    table = read_rank_table(written(tmp_path / "hccl.json", servers(2, 4, version=version)))

    assert (version, 8) == (table.version, table.world_size)
    assert wanted == table.ranks_of(addresses)


def test_read_rank_table_one_server_is_this_one(tmp_path: Path) -> None:
    """A table of a single server is about the server that reads it."""
    assert (0, 1) == read_rank_table(written(tmp_path / "t", servers(1, 2))).ranks_of(())


def test_read_rank_table_pods_of_one_host_are_told_by_their_own_address(tmp_path: Path) -> None:
    """Two pods on a host share its address: by that both are meant, by the pod's only one."""
    table = servers(2, 2)
    for server in table["server_list"]:
        server["host_ip"] = server["server_id"] = "10.0.0.9"
    read = read_rank_table(written(tmp_path / "t", table))

    assert (0, 1, 2, 3) == read.ranks_of(["10.0.0.9"])
    assert (2, 3) == read.ranks_of(["192.168.7.1"])


def test_read_rank_table_version_2_counts_ranks_and_names_no_server(tmp_path: Path) -> None:
    """Version 2.0 lists ranks with their addresses; which of them are here it doesn't say."""
    table = read_rank_table(written(tmp_path / "t", levels(4)))

    assert ("2.0", 4, None) == (table.version, table.world_size, table.ranks_of(["10.0.0.0"]))


def test_read_rank_table_mounted_config_map_is_a_link(tmp_path: Path) -> None:
    """A mounted ConfigMap's files are symbolic links."""
    written(tmp_path / "data", levels(2))
    os.symlink("data", tmp_path / "hccl.json")

    assert 2 == read_rank_table(tmp_path / "hccl.json").world_size


def _changed(table: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {name: value for name, value in {**table, **fields}.items() if value is not None}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        ("[" * 100_000, "no JSON"),
        (_changed(servers(1, 2), version="3.0"), "version '3.0'"),
        (_changed(servers(1, 2), version=None), "version None"),
        (_changed(levels(2), version=2.0), "version 2.0"),
        (_changed(servers(1, 2), server_list=None), "server_list"),
        (_changed(servers(1, 2), server_list=[]), "server_list"),
        (_changed(servers(1, 2), server_list=["x"]), "server_list"),
        (_changed(servers(1, 2), server_list=[{"server_id": "a"}]), "device"),
        (_changed(servers(1, 2), server_count="2"), "server_count is '2', the table has 1"),
        (_changed(servers(1, 2), server_list=[{"device": [{"rank_id": "x"}]}]), "rank_id 'x'"),
        (_changed(servers(1, 2), server_list=[{"device": [{"rank_id": True}]}]), "rank_id True"),
        (_changed(servers(1, 2), server_list=[{"device": [{"rank_id": "-1"}]}]), "rank_id '-1'"),
        (_changed(servers(1, 2), server_list=[{"device": [{"rank_id": "9" * 5000}]}]), "rank_id"),
        (_changed(servers(1, 2), server_list=[{"device": [{}]}]), "rank_id None"),
        (_changed(servers(1, 2), server_list=[{"device": [{"rank_id": "1"}]}]), "not 0 to 0"),
        (_changed(servers(1, 2), server_list=[{"device": [{"rank_id": "0"}, {"rank_id": "0"}]}]), "not 0 to 1"),
        (_changed(servers(2, 2, version="1.2"), super_pod_list=None), "super_pod_list"),
        (
            _changed(servers(2, 2, version="1.2"), super_pod_list=[{"server_list": [{"server_id": "10.0.0.7"}]}]),
            "super_pod_list names server '10.0.0.7'",
        ),
        (_changed(levels(2), rank_count=3), "rank_count is 3, the table has 2"),
        (_changed(levels(2), rank_list=None), "rank_list"),
        (_changed(levels(2), rank_list=[{"rank_id": 0}, {"rank_id": 2}]), "not 0 to 1"),
    ],
)
def test_read_rank_table_malformed_is_refused(tmp_path: Path, table: Any, words: str) -> None:
    """A table that is not whole says nothing: a wrong rank is worse than none."""
    with pytest.raises(RankTableError, match=words.split("'", maxsplit=1)[0]) as caught:
        read_rank_table(written(tmp_path / "t", table))

    assert words in str(caught.value)
    assert not caught.value.pending


@pytest.mark.parametrize(
    "table", ["", "\n", _changed(levels(2), status="initializing"), _changed(levels(2), status=None)]
)
def test_read_rank_table_not_completed_is_pending(tmp_path: Path, table: Any) -> None:
    """Ascend Operator mounts the file before it is completed, and truncates it to write it anew."""
    with pytest.raises(RankTableError) as caught:
        read_rank_table(written(tmp_path / "t", table))

    assert caught.value.pending


def test_read_rank_table_absent_or_no_file_is_pending(tmp_path: Path) -> None:
    """A table that isn't there may still come; a FIFO in its place keeps nobody waiting."""
    os.mkfifo(tmp_path / "fifo")

    for path in (tmp_path / "none", tmp_path, tmp_path / "fifo", tmp_path / "none" / "t"):
        with pytest.raises(RankTableError) as caught:
            read_rank_table(path)
        assert caught.value.pending


def test_read_rank_table_of_no_size_is_refused(tmp_path: Path) -> None:
    """A sparse file of gigabytes in its place does not fill the pod's memory."""
    path = tmp_path / "t"
    path.touch()
    os.truncate(path, 4 << 30)

    with pytest.raises(RankTableError, match="more than 64 MiB"):
        read_rank_table(path)


def test_read_rank_table_counts_may_be_text_or_numbers(tmp_path: Path) -> None:
    """Versions 1.x say numbers as text, 2.0 as numbers; writers mix them, and some leave the count out."""
    table = levels(2)
    table["rank_count"] = "2"
    for item in table["rank_list"]:
        item["rank_id"] = str(item["rank_id"])
    assert 2 == read_rank_table(written(tmp_path / "a", table)).world_size

    assert 2 == read_rank_table(written(tmp_path / "b", _changed(servers(1, 2), server_count=None))).world_size
