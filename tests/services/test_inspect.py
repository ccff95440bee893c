"""Inspect: artifacts of the user's own and of the store, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachectl.errors import ConfigError, DocumentError, StoreError
from cachectl.services.inspect import inspect
from cachectl.store.layout import StoreLayout
from tests.stores import MadeStore, make_store

DATA = Path(__file__).resolve().parents[1] / "runtimes" / "artifact" / "data"


@pytest.mark.parametrize("name", ["npugraph_ex_static", "npugraph_ex_dynamic", "torchair_ge"])
def test_inspect_of_a_file_needs_no_store(name: str) -> None:
    """A file tells runtime, format and interpreter; there is no key to it."""
    report = inspect(None, str(DATA / f"{name}.bin"))

    assert (None, True) == (report.key, name.startswith(report.runtime.replace("torchair", "torchair_ge")[:8]))
    assert report.format_version
    assert report.inputs


def test_inspect_of_a_folder_takes_the_one_artifact_in_it(tmp_path: Path) -> None:
    """A cache directory with one compiled_module somewhere below is as good as its path."""
    module = tmp_path / "Model_static_aclgraphcache_0" / "main_decode" / "compiled_module"
    module.parent.mkdir(parents=True)
    module.write_bytes((DATA / "npugraph_ex_static.bin").read_bytes())

    assert str(module) == inspect(None, str(tmp_path)).path


@pytest.mark.parametrize("count", [0, 2])
def test_inspect_of_a_folder_without_one_artifact_is_a_usage_error(tmp_path: Path, count: int) -> None:
    """None or several: which one is for the caller to say."""
    for number in range(count):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "compiled_module").touch()

    with pytest.raises(ConfigError, match=f"holds {count} files named compiled_module"):
        inspect(None, str(tmp_path))


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x80\x04K\x01.", b"x" * 1000])
def test_inspect_of_another_file_is_a_usage_error_that_deletes_nothing(tmp_path: Path, data: bytes) -> None:
    """The caller's own file: exit 2, its path, and no advice to delete it."""
    path = tmp_path / "notes.txt"
    path.write_bytes(data)

    with pytest.raises(ConfigError) as raised:
        inspect(None, str(path))

    assert 2 == raised.value.exit_code
    assert raised.value.message.startswith(f"{path}: ")
    assert "delete" not in f"{raised.value.message} {raised.value.hint}"


def test_inspect_without_store_or_file_is_a_usage_error() -> None:
    """A key needs a store."""
    with pytest.raises(ConfigError, match="nothing-here is no file"):
        inspect(None, "nothing-here")


def test_inspect_of_an_unknown_key_is_a_usage_error(tmp_path: Path) -> None:
    """A key that no entry has, in a store that is there."""
    made = make_store(tmp_path / "made")

    with pytest.raises(ConfigError):
        inspect(made.layout, "sha256:" + "0" * 64)


def test_inspect_of_an_entry_that_is_no_artifact_is_the_stores_fault(made: MadeStore) -> None:
    """Bytes that equal their digest and are no artifact: exit 3, since the store is to be mended."""
    key = made.publish().members[0].key

    with pytest.raises(DocumentError):
        inspect(made.layout, key)


def test_inspect_of_a_damaged_blob_names_the_digest(made: MadeStore) -> None:
    """Other bytes than the digest says are never interpreted."""
    warm_set = made.publish()
    blob = made.blob(case="b4")
    blob.chmod(0o644)
    blob.write_bytes(b"other" + blob.read_bytes()[5:])

    with pytest.raises(StoreError, match="holds other bytes"):
        inspect(made.layout, made.member(warm_set, "b4").key)


def test_inspect_where_no_store_is_says_so(tmp_path: Path) -> None:
    """A store that is not there is an error of the store, not of the key."""
    with pytest.raises(StoreError):
        inspect(StoreLayout(tmp_path / "nowhere"), "3f9c")
