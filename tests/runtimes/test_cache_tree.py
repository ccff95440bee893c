"""The runtime's folders: names that are its own and names that aren't, and a walk over what lies there."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachectl.runtimes.cache_tree import GraphFolder, RankFolder, read_graph_name, read_rank_name, scan

MD5 = "0f3c" * 8


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"Decoder_static_aclgraphcache_{MD5}", ("Decoder_static_aclgraphcache", False)),
        (f"My_Model_dynamic_gecache_{MD5}", ("My_Model_dynamic_gecache", True)),
        (f"Decoder_dynamic_{MD5}", ("Decoder_dynamic", True)),
        (f"static_static_aclgraphcache_{MD5}", ("static_static_aclgraphcache", False)),
    ],
)
def test_read_graph_name_takes_what_the_runtimes_write(name: str, expected: tuple[str, bool]) -> None:
    """Both runtimes, both traces, class names with underscores and with the runtime's own words."""
    assert GraphFolder(name, *expected) == read_graph_name(name)


@pytest.mark.parametrize(
    "name", ["", "Decoder", f"Decoder_{MD5}", f"_static_{MD5}", "Decoder_static_0f3c", f"Decoder_static_{MD5.upper()}"]
)
def test_read_graph_name_refuses_any_other(name: str) -> None:
    """No class, no trace, no whole md5: not the runtime's."""
    assert None is read_graph_name(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("world8global_rank3", (8, 3, None, None)),
        ("world8global_rank3_tp_rank1_pp_rank0", (8, 3, 1, 0)),
        ("tp_rank2", (None, None, 2, None)),
        ("pp_rank1", (None, None, None, 1)),
    ],
)
def test_read_rank_name_takes_what_the_runtimes_write(name: str, expected: tuple[int | None, ...]) -> None:
    """A world's rank, with and without the ranks that a program names itself."""
    assert RankFolder(name, *expected) == read_rank_name(name)


@pytest.mark.parametrize("name", ["", "_", "_tp_rank1", "main_decode", "world8", "world8global_rank", "tp_rankx"])
def test_read_rank_name_refuses_any_other(name: str) -> None:
    """A method's name is no rank's."""
    assert None is read_rank_name(name)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with one method of a single process and one of a rank."""
    graph = tmp_path / "cache" / f"Decoder_static_aclgraphcache_{MD5}"
    for folder in (graph / "main_decode", graph / "world2global_rank1" / "mtp_decode"):
        folder.mkdir(parents=True)
        (folder / "compiled_module").write_bytes(b"four")
    return tmp_path / "cache"


@pytest.mark.parametrize("below", [".", "..", f"Decoder_static_aclgraphcache_{MD5}"])
def test_scan_finds_the_same_from_a_cache_above_it_and_a_graph_folder(cache: Path, below: str) -> None:
    """Whatever of these is named, cache, rank and method are the same."""
    tree = scan(str(cache / below))

    assert [("main_decode", None), ("mtp_decode", 1)] == [(item.method, item.rank.rank) for item in tree.folders]
    assert {str(cache)} == {item.cache for item in tree.folders}
    assert 8 == tree.size_bytes


@pytest.mark.parametrize("below", ["world2global_rank1", "world2global_rank1/mtp_decode"])
def test_scan_of_a_rank_or_method_folder_knows_what_is_above(cache: Path, below: str) -> None:
    """The names above the audited folder are read, its neighbours aren't."""
    tree = scan(str(cache / f"Decoder_static_aclgraphcache_{MD5}" / below))

    assert [("mtp_decode", 1, 2)] == [(item.method, item.rank.rank, item.rank.world_size) for item in tree.folders]


def test_scan_ends_where_links_lead_in_circles(cache: Path) -> None:
    """A link to what is above it is followed once where the runtime would, and never above the pattern."""
    graph = cache / f"Decoder_static_aclgraphcache_{MD5}"
    (cache / "again").symlink_to(cache)
    (graph / "looped").symlink_to(cache)
    (graph / "main_decode" / "up").symlink_to(graph)

    tree = scan(str(cache))

    assert ["looped", "main_decode", "mtp_decode"] == sorted(item.method for item in tree.folders)


def test_scan_says_what_is_empty_and_what_lies_astray(cache: Path) -> None:
    """A graph folder with nothing in it, and artifacts outside of the pattern or too high in it."""
    (cache / f"Other_static_aclgraphcache_{MD5}").mkdir()
    (cache / "compiled_module").write_bytes(b"x")
    (cache / f"Decoder_static_aclgraphcache_{MD5}" / "compiled_module").write_bytes(b"xy")

    tree = scan(str(cache))

    assert [str(cache / f"Other_static_aclgraphcache_{MD5}")] == tree.empty
    assert [1, 2] == sorted(size for _, size in tree.strays)
