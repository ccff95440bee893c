"""Reading published documents: found by digest, refused when they are not what their name says."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from cachectl.errors import ArtifactCorruptedError, ArtifactNotFoundError, CachectlError, DocumentError
from cachectl.schemas.boot import Member
from cachectl.schemas.canonical import digest_bytes
from cachectl.schemas.envelope import ENTRY_PAYLOAD_TYPE, Envelope
from cachectl.store.reading import read_boot_record, read_manifest, read_manifest_file, stored_manifests
from tests.stores import MadeStore, make_store


@pytest.fixture(scope="module")
def _template(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    made = make_store(tmp_path_factory.mktemp("template") / "made")
    made.publish()
    return made


@pytest.fixture
def made(_template: MadeStore, tmp_path: Path) -> MadeStore:
    """A store with one warm set of two entries."""
    return _template.copy(tmp_path / "made")


@pytest.fixture
def raw_digest(made: MadeStore) -> str:
    """The digest of the recipe's bytes."""
    return digest_bytes(made.recipe.read_bytes())


@pytest.fixture
def member(made: MadeStore, raw_digest: str) -> Member:
    """The first member of the set."""
    record = read_boot_record(made.layout, raw_digest=raw_digest)
    assert record is not None
    return record.sets[0].members[0]


def test_read_boot_record_by_bytes_and_by_meaning_is_one(made: MadeStore, raw_digest: str) -> None:
    """Both ways lead to the same record."""
    by_bytes = read_boot_record(made.layout, raw_digest=raw_digest)
    assert by_bytes is not None

    assert by_bytes == read_boot_record(made.layout, recipe_digest=by_bytes.recipe_digest)
    assert ("made-up", (".",), 1) == (by_bytes.recipe, by_bytes.paths, len(by_bytes.sets))


def test_read_boot_record_unknown_is_none(made: MadeStore) -> None:
    """An unknown recipe is a value, not an error; so is a pointer to a record that is gone."""
    other = digest_bytes(b"other")

    assert read_boot_record(made.layout, raw_digest=other) is None
    assert read_boot_record(made.layout, recipe_digest=other) is None
    made.layout.raw_recipe(other).write_text(other)
    assert read_boot_record(made.layout, raw_digest=other) is None


def test_read_boot_record_without_digest_is_a_mistake(made: MadeStore) -> None:
    """One of the two has to be given."""
    with pytest.raises(TypeError, match="raw_digest or recipe_digest"):
        read_boot_record(made.layout)


@pytest.mark.parametrize("text", ["", "sha256:abc", "../../etc/passwd", "é"])
def test_read_boot_record_pointer_without_digest_refused(made: MadeStore, raw_digest: str, text: str) -> None:
    """What a pointer says becomes part of a path only if it is a digest."""
    made.layout.raw_recipe(raw_digest).unlink()
    made.layout.raw_recipe(raw_digest).write_text(text)

    with pytest.raises(DocumentError, match="holds no digest"):
        read_boot_record(made.layout, raw_digest=raw_digest)


def test_read_boot_record_of_another_recipe_refused(made: MadeStore, raw_digest: str) -> None:
    """A record under another recipe's name is not that recipe's."""
    record = read_boot_record(made.layout, raw_digest=raw_digest)
    assert record is not None
    other = digest_bytes(b"other")
    shutil.copy(made.layout.boot_record(record.recipe_digest), made.layout.boot_record(other))

    with pytest.raises(DocumentError, match="is about"):
        read_boot_record(made.layout, recipe_digest=other)


def test_read_manifest_gives_document_and_view(made: MadeStore, member: Member) -> None:
    """The whole document and the boot path's view are of the same entry."""
    read = read_manifest(made.layout, member.key, member.manifest)

    assert (member.key, member.manifest, member.case) == (read.entry.key, read.manifest, read.entry.case)
    assert read.document["parts"] == read.entry.parts
    assert "raw_sources" in read.document


def test_read_manifest_missing_is_told_apart(made: MadeStore, member: Member) -> None:
    """Not there is not corrupt (field report F12)."""
    made.layout.manifest(member.key, member.manifest).unlink()

    with pytest.raises(ArtifactNotFoundError):
        read_manifest(made.layout, member.key, member.manifest)


def test_read_manifest_each_flipped_byte_is_noticed(made: MadeStore, member: Member) -> None:
    """No byte of the envelope is beyond its digest (field report D6)."""
    path = made.layout.manifest(member.key, member.manifest)
    data = path.read_bytes()
    path.chmod(0o600)

    for place in range(0, len(data), 97):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ArtifactCorruptedError, match="holds other bytes"):
            read_manifest(made.layout, member.key, member.manifest)


def test_read_manifest_under_another_key_refused(made: MadeStore, member: Member) -> None:
    """A whole manifest in another key's folder is not that key's entry."""
    other = digest_bytes(b"other")
    target = made.layout.manifest(other, member.manifest)
    target.parent.mkdir(parents=True)
    shutil.copy(made.layout.manifest(member.key, member.manifest), target)

    with pytest.raises(ArtifactCorruptedError, match="its name says"):
        read_manifest(made.layout, other, member.manifest)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"null",
        b"[" * 100_000,
        Envelope("application/other", b"{}").to_bytes(),
        Envelope(ENTRY_PAYLOAD_TYPE, b"[]").to_bytes(),
        Envelope(ENTRY_PAYLOAD_TYPE, b'{"schema":"cachectl/entry/v2"}').to_bytes(),
        Envelope(ENTRY_PAYLOAD_TYPE, b'{"schema":"cachectl/entry/v1"}').to_bytes(),
    ],
    ids=["empty", "object", "null", "deep", "type", "list", "newer", "fields"],
)
def test_read_manifest_file_right_digest_wrong_document_refused(tmp_path: Path, data: bytes) -> None:
    """A digest proves bytes, not meaning: what is no entry manifest is refused in words."""
    path = tmp_path / f"{digest_bytes(data).removeprefix('sha256:')}.json"
    path.write_bytes(data)

    with pytest.raises(DocumentError):
        read_manifest_file(path)


@pytest.mark.parametrize("kind", ["fifo", "held fifo", "link", "folder", "large"])
def test_read_manifest_no_regular_file_refused_at_once(made: MadeStore, member: Member, kind: str) -> None:
    """Planted files neither hang nor fill the memory (field report P9)."""
    path = made.layout.manifest(member.key, member.manifest)
    path.unlink()
    holder = None
    if "fifo" in kind:
        os.mkfifo(path)
        holder = os.open(path, os.O_RDWR) if "held" in kind else None
    elif kind == "link":
        path.symlink_to(__file__)
    elif kind == "folder":
        path.mkdir()
    else:
        with open(path, "wb") as file:
            file.truncate(1 << 40)

    with pytest.raises(DocumentError):
        read_manifest(made.layout, member.key, member.manifest)
    if holder is not None:
        os.close(holder)


def test_stored_manifests_yields_manifests_only(made: MadeStore) -> None:
    """Temp files, strange names and stray files among the entries are left out (field report C6)."""
    wanted = sorted(stored_manifests(made.layout))
    (wanted[0].parent / "x.json.tmp").touch()
    (wanted[0].parent / "short.json").touch()
    (made.layout.entries / "stray").touch()
    (wanted[0].parent.parent / "stray").touch()

    assert wanted == list(stored_manifests(made.layout))
    assert 2 == len(wanted)


def test_stored_manifests_unreadable_folder_is_a_store_error(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that can't be listed is not an empty one (field report F12)."""

    def fail(self: Path) -> list[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", fail)

    with pytest.raises(CachectlError, match="Permission denied"):
        list(stored_manifests(made.layout))
