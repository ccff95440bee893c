"""Verify: each finding made by the damage it stands for, and what a quick or narrowed run looks at."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cachectl.errors import ConfigError, StoreError
from cachectl.schemas.canonical import digest_bytes
from cachectl.services.verify import verify
from cachectl.store.manifest import ManifestRepo
from tests.stores import MadeStore, tree

DATA = Path(__file__).resolve().parents[1] / "runtimes" / "artifact" / "data"
Damage = Callable[[MadeStore], None]


@pytest.fixture
def made(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> MadeStore:
    """A store with one warm set whose artifacts can be read, for the interpreter they were made by."""
    real = (DATA / "npugraph_ex_static.bin").read_bytes()

    def write(folder: Path, size_bytes: int) -> None:
        (folder / "kernels").mkdir(parents=True, exist_ok=True)
        # Pickles end at their STOP: what follows makes each one's digest its own.
        (folder / "compiled_module").write_bytes(real)
        (folder / "kernels" / f"{folder.name}.run").write_text(folder.name)

    monkeypatch.setattr("tests.stores.write_artifact", write)
    toolchain = {"python": {"implementation": "cpython", "minor": "3.11", "magic": "a70d0d0a"}}
    made.publish(request={"toolchain": toolchain})
    return made


def kernel(made: MadeStore, case: str = "b4") -> Path:
    """Return the blob of a case's own kernel."""
    return made.layout.blob(digest_bytes(f"a-{case}-0".encode()))


def module(made: MadeStore) -> Path:
    """Return the blob of the compiled module, which both cases have."""
    return made.layout.blob(digest_bytes((DATA / "npugraph_ex_static.bin").read_bytes()))


def manifests(made: MadeStore) -> list[Path]:
    """Return the entry manifests."""
    return sorted(made.layout.entries.glob("*/*/*.json"))


def overwrite(path: Path, data: bytes) -> None:
    """Put other bytes in a file of the store."""
    path.chmod(0o644)
    path.write_bytes(data)


def _foreign(made: MadeStore) -> None:
    toolchain = {"python": {"implementation": "cpython", "minor": "3.12", "magic": "cb0d0d0a"}}
    made.publish("other", request={"toolchain": toolchain})


def _unreadable(made: MadeStore) -> None:
    # Written before the store knew the format, or by another version: equal to its digest and no artifact.
    shutil.rmtree(made.folder / "artifacts")
    path = made.folder / "artifacts" / "b-b4-0"

    def write(folder: Path, size_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "compiled_module").write_text(path.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.stores.write_artifact", write)
        made.publish("b", cases=("b4",))


def _unindexed(made: MadeStore) -> None:
    with ManifestRepo.open(made.layout.database) as repo:
        repo.forget([f"sha256:{manifests(made)[0].stem}"])


def _stray(made: MadeStore) -> None:
    (module(made).parent / "notes.txt").write_text("stray")


def _unnamed(made: MadeStore) -> None:
    path = made.layout.blob(digest_bytes(b"unnamed"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"unnamed")


def _half_a_record(made: MadeStore) -> None:
    (record,) = made.layout.root.glob("boot/recipes/*.json")
    overwrite(record, record.read_bytes()[:100])


def _record_is_a_folder(made: MadeStore) -> None:
    (record,) = made.layout.root.glob("boot/recipes/*.json")
    record.unlink()
    record.mkdir()


DAMAGES: dict[str, tuple[Damage, set[str], bool]] = {
    # name: what is done, the kinds found, and whether --quick finds them too
    "nothing": (lambda made: None, set(), True),
    "blob-gone": (lambda made: kernel(made).unlink(), {"missing-blob"}, True),
    "blob-shorter": (lambda made: overwrite(kernel(made), b"a"), {"corrupt-blob"}, True),
    "blob-bit": (lambda made: overwrite(kernel(made), b"a-b4-1"), {"corrupt-blob"}, False),
    "blob-is-a-folder": (lambda made: (kernel(made).unlink(), kernel(made).mkdir())[0], {"missing-blob"}, True),
    "manifest-bit": (
        lambda made: overwrite(manifests(made)[0], manifests(made)[0].read_bytes().replace(b"p", b"q", 1)),
        {"corrupt-blob"},
        True,
    ),
    "manifest-empty": (lambda made: overwrite(manifests(made)[0], b""), {"corrupt-blob"}, True),
    "manifest-gone": (lambda made: manifests(made)[0].unlink(), {"index-drift", "incomplete-set", "extra-file"}, True),
    "row-gone": (_unindexed, {"index-drift"}, True),
    "file-stray": (_stray, {"extra-file"}, True),
    "blob-unnamed": (_unnamed, {"extra-file"}, True),
    "record-half": (_half_a_record, {"incomplete-set"}, True),
    "record-is-a-folder": (_record_is_a_folder, {"incomplete-set"}, True),
    "artifact-unreadable": (_unreadable, {"unreadable-artifact"}, False),
    "artifact-of-another-python": (_foreign, {"foreign-bytecode"}, False),
}


def test_verify_compares_each_entry_with_the_files_it_shares(made: MadeStore) -> None:
    """Whichever entry comes first: two that say another Python than their shared artifact are two findings."""
    _foreign(made)

    found = [finding.key for finding in verify(made.layout, []).findings]

    assert 2 == len(set(found)) == len(found)


def test_verify_truncated_file_is_told_once_an_entry(made: MadeStore) -> None:
    """Its size says it all: the digest is not computed, too."""
    module(made).chmod(0o644)
    os.truncate(module(made), 10)

    kinds = [finding.kind for finding in verify(made.layout, []).findings]

    assert ["corrupt-blob", "corrupt-blob"] == kinds


@pytest.mark.parametrize("name", DAMAGES)
def test_verify_finds_each_damage_by_its_kind(made: MadeStore, name: str) -> None:
    """One damage, its kind and no other, with the path; --quick finds what sizes and names tell."""
    damage, kinds, quickly = DAMAGES[name]
    damage(made)

    report, quick = verify(made.layout, []), verify(made.layout, [], quick=True)

    assert kinds == {finding.kind for finding in report.findings}, report.findings
    assert (kinds if quickly else set()) == {finding.kind for finding in quick.findings}, quick.findings
    assert all(finding.path and finding.detail for finding in report.findings)
    assert (1 if kinds else 0) == report.exit_code


def test_verify_of_many_damages_finds_them_all(made: MadeStore) -> None:
    """One finding does not hide the next."""
    kernel(made, "b2").unlink()
    _unindexed(made)
    _half_a_record(made)
    _stray(made)

    kinds = {finding.kind for finding in verify(made.layout, []).findings}

    assert {"missing-blob", "index-drift", "incomplete-set", "extra-file"} == kinds


def test_verify_quick_reads_no_blob(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blobs that can't be opened at all pass a quick run: only their sizes are asked for."""
    opened: list[str] = []
    real_open = os.open

    def watch(path: object, *arguments: int, **named: int) -> int:
        opened.append(str(path))
        return real_open(path, *arguments, **named)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr("os.open", watch)
    verify(made.layout, [], quick=True)

    assert [] == [path for path in opened if "/blobs/" in path]


def test_verify_changes_nothing(made: MadeStore) -> None:
    """The store's files are the same to the nanosecond; the database's side files may come and go."""
    _stray(made)
    before = {name: found for name, found in tree(made.layout.root).items() if "/" in name}

    verify(made.layout, [])

    assert before == {name: found for name, found in tree(made.layout.root).items() if "/" in name}


def test_verify_of_a_key_looks_at_that_entry_only(made: MadeStore) -> None:
    """A key, or its beginning, narrows the run: damage of another entry is not told."""
    kernel(made, "b4").unlink()
    with ManifestRepo.open(made.layout.database, read_only=True) as repo:
        keys = {row.case: row.key for row in repo.entries()}

    assert (1, ()) == (verify(made.layout, [keys["b2"]]).checked, verify(made.layout, [keys["b2"][7:27]]).findings)
    (finding,) = verify(made.layout, [keys["b4"]]).findings
    assert ("missing-blob", keys["b4"]) == (finding.kind, finding.key)


def test_verify_of_a_recipe_looks_at_its_entries(made: MadeStore) -> None:
    """A recipe file stands for the entries of its name."""
    kernel(made, "b4").unlink()

    report = verify(made.layout, [str(made.recipe)])

    assert (2, ["missing-blob"]) == (report.checked, [finding.kind for finding in report.findings])


def test_verify_of_an_unknown_key_is_a_usage_error(made: MadeStore) -> None:
    """A key that no entry has: exit 2, not a clean report."""
    with pytest.raises(ConfigError) as raised:
        verify(made.layout, ["sha256:" + "0" * 64])

    assert 2 == raised.value.exit_code


@pytest.mark.parametrize("target", ["nothing.yaml", "zzz", ""])
def test_verify_of_what_is_neither_file_nor_key_is_a_usage_error(made: MadeStore, target: str) -> None:
    """A recipe that is not there, a word, nothing."""
    with pytest.raises(ConfigError):
        verify(made.layout, [target])


def test_verify_deep_is_refused_with_what_does_the_same(made: MadeStore) -> None:
    """Not in this version: said, not ignored."""
    with pytest.raises(ConfigError, match="--deep"):
        verify(made.layout, [], deep=True)


def test_verify_where_no_store_is_says_so(made: MadeStore) -> None:
    """A store that is gone is no clean store."""
    shutil.rmtree(made.layout.root)

    with pytest.raises(StoreError):
        verify(made.layout, [])
