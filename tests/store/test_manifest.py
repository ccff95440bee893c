"""The manifest database: publishing, lookup, withdrawal, rebuilding, and what holds between processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from cachectl.errors import ConfigError, DocumentError, ManifestConflictError, ManifestError, SchemaBehindError
from cachectl.schemas.boot import ENTRY_SCHEMA
from cachectl.schemas.canonical import digest_of
from cachectl.schemas.keying import KEY_PARTS, KEY_VERSION, compute_key
from cachectl.schemas.tables import entries, entry_files, warm_set_members, warm_sets
from cachectl.store.engine import open_engine, reading, writing
from cachectl.store.manifest import ManifestRepo
from cachectl.store.manifest_rows import FailureRow, NewEntry, Stats
from tests.store.manifest_samples import RECIPE_DIGEST, START, boot_record, new_entry, new_set

SAMPLES = str(Path(__file__).parent)

PUBLISH = f"""
import sys
sys.path.insert(0, {SAMPLES!r})
from cachectl.store.manifest import ManifestRepo
from manifest_samples import new_entry, new_set
database, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
shared = new_entry("shared", rank=7)
with ManifestRepo.open(database, timeout_s=200.0) as repo:
    for number in range(count):
        own = [new_entry(f"{{name}}-{{number}}", rank=rank) for rank in range(3)]
        print(repo.publish([*own, shared], new_set(*own, shared)), flush=True)
"""

PUBLISH_KILLED = f"""
import os, signal, sys
sys.path.insert(0, {SAMPLES!r})
import sqlalchemy as sa
from cachectl.store.manifest import ManifestRepo
from manifest_samples import new_entry, new_set
repo = ManifestRepo.open(sys.argv[1])
left = int(sys.argv[2])
@sa.event.listens_for(repo.engine, "after_cursor_execute")
def kill(*statement):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
new = [new_entry("new", rank=rank) for rank in range(4)]
repo.publish(new, new_set(*new))
repo.close()
"""


@pytest.fixture
def repo(database: str) -> Iterator[ManifestRepo]:
    """An empty database of each kind."""
    with ManifestRepo.open(database, create=True) as opened:
        yield opened


@pytest.fixture
def sqlite_repo(tmp_path: Path) -> Iterator[ManifestRepo]:
    """An empty SQLite database."""
    with ManifestRepo.open(tmp_path / "manifest.db", create=True) as opened:
        yield opened


def _document(parts: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return a sound manifest's payload with some key parts and fields changed; the key follows the parts."""
    documents: dict[str, Any] = {**{name: {} for name in KEY_PARTS}, "topology": {"world_size": 2, "rank": 1}}
    documents.update(parts or {})
    document: dict[str, Any] = {
        "schema": ENTRY_SCHEMA,
        "key_version": KEY_VERSION,
        "key": compute_key(documents),
        "recipe": "tiny-decoder",
        "method": "main_decode",
        "case": "b4",
        "rank": 1,
        "parts": documents,
        "artifact": {
            "runtime": "npugraph_ex",
            "format_version": "1.0.6",
            "runtime_path": "Model/main_decode",
            "files": [{"path": "compiled_module", "digest": digest_of("module"), "size_bytes": 4096, "mode": "0600"}],
        },
        "evidence": {"kind": "simulated", "soc": "Ascend910B1", "cann": "8.2.RC1", "torch_npu": "2.13.0"},
        "provenance": {"created_at": "2026-03-01T12:00:00Z", "cold_seconds": 7.5, "warm_seconds": 0.125},
    }
    return {**document, **changes}


def _statements(repo: ManifestRepo, act: Callable[[], object]) -> list[tuple[str, Any]]:
    """Run `act` and return what was sent to the database meanwhile."""
    sent: list[tuple[str, Any]] = []

    def note(connection: sa.Connection, cursor: object, statement: str, parameters: Any, *rest: object) -> None:
        sent.append((statement, parameters))

    sa.event.listen(repo.engine, "before_cursor_execute", note)
    act()
    sa.event.remove(repo.engine, "before_cursor_execute", note)
    return [item for item in sent if not item[0].startswith("BEGIN")]


def _scans(repo: ManifestRepo, act: Callable[[], object]) -> list[str]:
    """Return the steps in SQLite's plans for what `act` asks that read a whole table or index."""
    with reading(repo.engine) as connection:
        connection.exec_driver_sql("SELECT 1")
    steps: list[str] = []
    for statement, parameters in _statements(repo, act):
        with reading(repo.engine) as connection:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
        steps.extend(str(row[3]) for row in plan)
    assert steps
    return [step for step in steps if step.startswith("SCAN") or "TEMP B-TREE FOR ORDER" in step]


# Opening


def test_open_without_tables_is_behind(database: str) -> None:
    """A database without tables is opened only by who wants to make them."""
    engine = open_engine(database, create=True)
    engine.connect().close()
    engine.dispose()

    with pytest.raises(SchemaBehindError, match="cachectl db upgrade"):
        ManifestRepo.open(database)


def test_open_database_of_another_program_is_refused(database: str) -> None:
    """Tables are not made beside those of another program."""
    engine = open_engine(database, create=True)
    with writing(engine) as connection:
        connection.exec_driver_sql("CREATE TABLE payroll (id INTEGER)")
    engine.dispose()

    with pytest.raises(ManifestError, match="another program's database: it has the table payroll"):
        ManifestRepo.open(database, create=True)


# Reading manifests


def test_new_entry_document_is_read_whole() -> None:
    """Every field of a manifest that the database keeps comes out of it."""
    document = _document()
    entry = NewEntry.from_document(document, manifest=digest_of("file"), recipe_digest=RECIPE_DIGEST)

    assert (document["key"], digest_of("file"), RECIPE_DIGEST) == (entry.key, entry.manifest, entry.recipe_digest)
    assert ("main_decode", "b4", 1, 2) == (entry.method, entry.case, entry.rank, entry.world_size)
    assert (7.5, 0.125, START, "simulated") == (
        entry.cold_seconds,
        entry.warm_seconds,
        entry.created_at,
        entry.evidence,
    )
    assert ["compiled_module"] == [file.path for file in entry.files]


def test_new_entry_seconds_not_measured_are_none() -> None:
    """A side that was not measured has no seconds."""
    provenance = {"created_at": "2026-03-01T12:00:00Z", "warm_seconds": None}
    entry = NewEntry.from_document(_document(provenance=provenance), manifest=digest_of("file"))

    assert (None, None) == (entry.cold_seconds, entry.warm_seconds)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parts": {"topology": {}}}, "world_size"),
        ({"parts": {"topology": {"world_size": "two"}}}, "two"),
        ({"provenance": {}}, "created_at"),
        ({"provenance": {"created_at": "2026-03-01T12:00:00"}}, "no time zone"),
        ({"provenance": None}, "NoneType"),
        ({"evidence": {}}, "kind"),
        ({"schema": "cachectl/entry/v2"}, "cachectl/entry/v2"),
        ({"key": digest_of("another")}, "key"),
    ],
)
def test_new_entry_malformed_document_is_a_document_error(changes: dict[str, Any], said: str) -> None:
    """What a manifest lacks is said, not guessed."""
    with pytest.raises(DocumentError, match=said):
        NewEntry.from_document(_document(**changes), manifest=digest_of("file"))


# Publishing


def test_publish_entry_comes_back_as_it_went_in(repo: ManifestRepo) -> None:
    """Row and files say what was published."""
    new = new_entry(parts={"model": {"name": "\ud800 and \0", "set": {"b", "a"}}})
    repo.publish([new])
    row = repo.entry(new.key)

    assert (new.key, new.manifest, new.recipe, new.recipe_digest) == (
        row.key,
        row.manifest,
        row.recipe,
        row.recipe_digest,
    )
    assert (new.method, new.case, new.rank, new.world_size) == (row.method, row.case, row.rank, row.world_size)
    assert ("ready", None, 5120, 7.5, 0.125) == (
        row.state,
        row.state_reason,
        row.size_bytes,
        row.cold_seconds,
        row.warm_seconds,
    )
    assert (START, None, False, "simulated") == (row.created_at, row.last_used_at, row.pinned, row.evidence)
    assert new.files == repo.files(row)
    assert (row,) == repo.entries_of_model(digest_of({"name": "\ud800 and \0", "set": ["a", "b"]}), limit=2)


def test_publish_sequences_of_a_recipe_grow_from_one(repo: ManifestRepo) -> None:
    """Each recipe counts for itself, and a publish without a warm set counts nothing."""
    a, b = new_entry("a"), new_entry("b", minutes=1)

    assert 0 == repo.publish([a])
    assert 1 == repo.publish([], new_set(a))
    assert 2 == repo.publish([b], new_set(b))
    assert 1 == repo.publish([], new_set(b, recipe="other", recipe_digest=digest_of("other")))
    assert 3 == repo.next_sequence(RECIPE_DIGEST)


def test_publish_after_a_later_boot_record_goes_beyond_it(repo: ManifestRepo) -> None:
    """A database that lost its count never repeats a sequence that a boot record on disk has."""
    a = new_entry("a")

    assert 18 == repo.publish([a], new_set(a), after=17)
    assert 19 == repo.publish([a], new_set(a), after=3)
    assert 31 == repo.next_sequence(RECIPE_DIGEST, after=30)


def test_publish_same_manifests_again_keeps_one_row_each(repo: ManifestRepo) -> None:
    """Publishing is idempotent: the warm set gets the new sequence, nothing is doubled."""
    new = [new_entry(rank=rank) for rank in range(3)]
    repo.publish(new, new_set(*new))
    repo.publish(new, new_set(*new))
    (only,) = repo.warm_sets(RECIPE_DIGEST)

    assert 2 == only.sequence
    assert new_set(*new).warm_set == only.warm_set
    assert 3 == repo.stats().entries


def test_publish_new_manifest_of_a_key_is_the_newest(repo: ManifestRepo) -> None:
    """A forced build adds a manifest to the key; the key means that one, and the old one stays."""
    old, forced = new_entry(build=1), new_entry(build=2, minutes=5)
    repo.publish([forced], new_set(forced))
    repo.publish([old], new_set(old))

    assert old.key == forced.key
    assert forced.manifest == repo.entry(old.key).manifest
    assert [forced.manifest, old.manifest] == [row.manifest for row in repo.entries()]
    assert 2 == len(repo.warm_sets(RECIPE_DIGEST))


def test_publish_member_unknown_publishes_nothing(repo: ManifestRepo) -> None:
    """A warm set is whole or it is not there, and neither are the entries that came with it."""
    a, absent = new_entry("a"), new_entry("absent", rank=1)

    with pytest.raises(ManifestConflictError, match=r"main_decode/b4/1 .*which no entry has"):
        repo.publish([a], new_set(a, absent))

    assert [] == list(repo.entries())
    assert () == repo.warm_sets()
    assert 1 == repo.next_sequence(RECIPE_DIGEST)


def test_publish_member_invalidated_meanwhile_is_refused(repo: ManifestRepo) -> None:
    """A reused entry that was invalidated after planning ends the publish, and says why it was."""
    reused, new = new_entry("a"), new_entry("b", rank=1)
    repo.publish([reused])
    repo.invalidate([reused.key], "wrong tokens in production")

    with pytest.raises(ManifestConflictError, match=r"is invalid: wrong tokens in production; .*--force"):
        repo.publish([new], new_set(reused, new))


def test_publish_success_forgets_the_failure(repo: ManifestRepo) -> None:
    """What was built is no failure any more, on that toolchain and line only."""
    new = new_entry()
    toolchain = digest_of(new.parts["toolchain"])
    repo.record_failure(_failure(toolchain=toolchain))
    repo.record_failure(_failure(toolchain=digest_of("another")))
    repo.record_failure(_failure(toolchain=toolchain, rank=5))
    repo.publish([new])

    assert {(digest_of("another"), 0), (toolchain, 5)} == {(row.toolchain, row.rank) for row in repo.failures()}


def test_publish_by_many_processes_keeps_all_and_no_sequence_twice(database: str) -> None:
    """Eight publishers at once, who share an entry, all succeed, each with sequences of its own that grow."""
    ManifestRepo.open(database, create=True).close()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PUBLISH, database, f"publisher-{number}", "4"], stdout=subprocess.PIPE, text=True
        )
        for number in range(8)
    ]
    printed = [[int(line) for line in child.communicate(timeout=280)[0].split()] for child in children]

    assert [0] * 8 == [child.returncode for child in children]
    assert list(range(1, 33)) == sorted(sequence for sequences in printed for sequence in sequences)
    assert printed == [sorted(sequences) for sequences in printed]
    with ManifestRepo.open(database) as repo:
        assert 8 * 4 * 3 + 1 == repo.stats().entries
        assert [4] * 32 == [len(row.warm_set.members) for row in repo.warm_sets(RECIPE_DIGEST)]


def test_publish_killed_anywhere_leaves_nothing_partial(tmp_path: Path) -> None:
    """A kill -9 after any statement of a publish leaves the database as before it, and usable."""
    path = tmp_path / "manifest.db"
    with ManifestRepo.open(path, create=True) as repo:
        repo.publish([new_entry("old")], new_set(new_entry("old")))
    killed = 0
    while True:
        command = [sys.executable, "-c", PUBLISH_KILLED, str(path), str(killed + 1)]
        status = subprocess.run(command, timeout=200, check=False).returncode
        if status == 0:
            break
        assert -signal.SIGKILL == status
        killed += 1
        with ManifestRepo.open(path) as repo, reading(repo.engine) as connection:
            tables = (entries, entry_files, warm_sets, warm_set_members)
            counts = [connection.scalar(sa.select(sa.func.count()).select_from(table)) for table in tables]
            assert [1, 2, 1, 1] == counts

    assert killed >= 8
    with ManifestRepo.open(path) as repo:
        assert 5 == repo.stats().entries
        assert [2, 1] == [row.sequence for row in repo.warm_sets(RECIPE_DIGEST)]


# Finding


def test_entries_filters_are_joined_and_newest_come_first(repo: ManifestRepo) -> None:
    """Each filter narrows; the order is that of creation, latest first."""
    repo.publish(
        [
            new_entry("1", minutes=1),
            new_entry("2", minutes=3, rank=1),
            new_entry("3", minutes=2, case="b8"),
            new_entry("4", minutes=4, method="mtp_decode"),
            new_entry("5", minutes=5, recipe="other"),
        ]
    )
    repo.invalidate([new_entry("2", rank=1).key], "stale")

    def found(**filters: Any) -> list[int]:
        return [int((row.created_at - START) / timedelta(minutes=1)) for row in repo.entries(**filters)]

    assert [5, 4, 3, 2, 1] == found()
    assert [4, 3, 2, 1] == found(recipe="tiny-decoder")
    assert [3, 2, 1] == found(recipe="tiny-decoder", method="main_decode")
    assert [2] == found(case="b8")
    assert [3] == found(rank=1)
    assert [3] == found(state="invalid")
    assert [5, 4] == found(limit=2)
    assert [] == found(recipe="absent")


def test_entries_left_before_the_end_gives_its_connection_back(repo: ManifestRepo) -> None:
    """A reader that stops early holds nothing: many of them don't use up the connections."""
    repo.publish([new_entry(str(number)) for number in range(20)])
    for _ in range(30):
        rows = repo.entries()
        next(rows)
        del rows

    assert 1 == repo.pin([new_entry("0").key])


def test_entry_prefix_names_the_key_with_or_without_algorithm(repo: ManifestRepo) -> None:
    """The first digits are enough where they name one key."""
    new = new_entry()
    repo.publish([new])

    for text in (new.key, new.key.removeprefix("sha256:"), new.key[:13], new.key[7:11]):
        assert new.manifest == repo.entry(text).manifest


def test_entry_prefix_of_several_keys_names_them(repo: ManifestRepo) -> None:
    """An ambiguous prefix is the caller's mistake, and the message lists what it could mean, not everything."""
    keys = ["sha256:abc" + f"{number:061x}" for number in range(8)]
    repo.publish([replace(new_entry(str(number)), key=key) for number, key in enumerate(keys)])

    with pytest.raises(ConfigError, match="'abc' begins more than one key") as raised:
        repo.entry("abc")
    assert [key in str(raised.value) for key in keys] == [True] * 5 + [False] * 3


@pytest.mark.parametrize("text", ["", "sha256:", "xyz", "ABC", "a" * 65, "%", "sha256:abc'"])
def test_entry_text_that_is_no_prefix_is_a_config_error(sqlite_repo: ManifestRepo, text: str) -> None:
    """Only lower-case hex digits begin a key."""
    with pytest.raises(ConfigError, match="no key nor the beginning of one"):
        sqlite_repo.entry(text)


def test_entry_unknown_prefix_is_a_config_error(repo: ManifestRepo) -> None:
    """A key nobody has is the caller's mistake (exit 2), not a fault of the store."""
    repo.publish([new_entry()])

    with pytest.raises(ConfigError, match="no entry's key begins with 'fffffff'") as raised:
        repo.entry("fffffff")
    assert 2 == raised.value.exit_code


def test_line_has_its_entries_of_every_state_newest_first(repo: ManifestRepo) -> None:
    """A line has its entries of every state, newest first, and no other line's."""
    new = [new_entry(str(number), minutes=number) for number in range(3)]
    repo.publish([*new, new_entry("of another rank", rank=1)])
    repo.invalidate([new[1].key], "stale")
    line = repo.line("tiny-decoder", "main_decode", "b4", 0)

    assert [(new[2].key, "ready"), (new[1].key, "invalid"), (new[0].key, "ready")] == [
        (row.key, row.state) for row in line
    ]
    assert 1 == len(repo.line("tiny-decoder", "main_decode", "b4", 0, limit=1))
    assert () == repo.line("tiny-decoder", "main_decode", "b16", 0)


def test_entries_of_model_finds_a_renamed_recipe(repo: ManifestRepo) -> None:
    """Entries of one model part come newest first whatever their recipe's name and rank, and no more than asked."""
    new = [new_entry("a", recipe=f"recipe-{rank}", rank=rank, minutes=rank) for rank in range(3)]
    repo.publish([*new, new_entry("b")])
    model = digest_of(new[0].parts["model"])

    assert ["recipe-2", "recipe-1", "recipe-0"] == [row.recipe for row in repo.entries_of_model(model, limit=9)]
    assert ["recipe-2"] == [row.recipe for row in repo.entries_of_model(model, limit=1)]
    assert () == repo.entries_of_model(digest_of("another model"), limit=9)


def test_warm_sets_are_newest_first_with_members_in_rank_order(repo: ManifestRepo) -> None:
    """A recipe's sets come by their sequence, whole."""
    first = [new_entry("a", rank=rank) for rank in (1, 0, 2)]
    second = [new_entry("b", rank=0)]
    repo.publish(first, new_set(*first))
    repo.publish(second, new_set(*second))
    rows = repo.warm_sets(RECIPE_DIGEST)

    assert [2, 1] == [row.sequence for row in rows]
    assert [0, 1, 2] == [member.rank for member in rows[1].warm_set.members]
    assert {"options": {"frozen_parameter": True}} == rows[0].warm_set.request
    assert [2] == [row.sequence for row in repo.warm_sets(RECIPE_DIGEST, limit=1)]
    assert [1] == [row.sequence for row in repo.warm_sets(keys=[first[0].key])]
    assert [2, 1] == [row.sequence for row in repo.warm_sets(keys=[first[0].manifest, second[0].manifest])]
    assert () == repo.warm_sets(digest_of("another recipe"))


def test_files_shared_by_entries_are_found_from_their_digest(repo: ManifestRepo) -> None:
    """A corrupt blob leads to the entries that hold it, and prune sees each blob once."""
    a, b = new_entry("a"), new_entry("b", minutes=1)
    repo.publish([a, b])

    assert [b.key, a.key] == [row.key for row in repo.entries_holding(digest_of("common"))]
    assert sorted({file.digest for new in (a, b) for file in new.files}) == list(repo.blob_digests())
    assert sorted((new.manifest, new.key) for new in (a, b)) == list(repo.known_manifests())


@pytest.mark.parametrize("count", [3, 60])
def test_finding_takes_the_same_number_of_statements_for_any_number_of_rows(
    sqlite_repo: ManifestRepo, count: int
) -> None:
    """No query is made for each row of another."""
    new = [new_entry(str(number), minutes=number) for number in range(count)]
    sqlite_repo.publish(new)
    for entry in new:
        sqlite_repo.publish([], new_set(entry))

    assert 1 == len(_statements(sqlite_repo, lambda: sqlite_repo.line("tiny-decoder", "main_decode", "b4", 0)))
    assert 2 == len(_statements(sqlite_repo, lambda: sqlite_repo.warm_sets(RECIPE_DIGEST)))
    assert 2 == len(_statements(sqlite_repo, lambda: sqlite_repo.entry(new[0].key)))
    assert 1 == len(_statements(sqlite_repo, lambda: list(sqlite_repo.entries())))


def test_finding_one_line_or_key_reads_no_whole_table(sqlite_repo: ManifestRepo) -> None:
    """SQLite's plans search an index for everything about one line, key, set or blob, and sort nothing."""
    new = [new_entry(str(number), rank=number) for number in range(5)]
    sqlite_repo.publish(new, new_set(*new))
    entry = sqlite_repo.entry(new[0].key)
    acts: list[Callable[[], object]] = [
        lambda: sqlite_repo.line("tiny-decoder", "main_decode", "b4", 0),
        lambda: sqlite_repo.entry(new[0].key[:20]),
        lambda: sqlite_repo.files(entry),
        lambda: sqlite_repo.entries_of_model(digest_of(new[0].parts["model"]), limit=5),
        lambda: list(sqlite_repo.entries(recipe="tiny-decoder", method="main_decode", case="b4", rank=0)),
    ]

    assert [[]] * 5 == [_scans(sqlite_repo, act) for act in acts]


def test_changing_one_key_reads_no_whole_table(sqlite_repo: ManifestRepo) -> None:
    """Publishing, withdrawing, pinning and forgetting search by index too."""
    new = [new_entry(str(number), rank=number) for number in range(5)]
    sqlite_repo.publish(new, new_set(*new))
    entry = new_entry("another")
    acts: list[Callable[[], object]] = [
        lambda: sqlite_repo.publish([entry], new_set(entry)),
        lambda: sqlite_repo.quarantine([entry.key], "died twice"),
        lambda: sqlite_repo.release([entry.key]),
        lambda: sqlite_repo.invalidate([entry.key], "stale"),
        lambda: sqlite_repo.touch([entry.key], START),
        lambda: sqlite_repo.forget([entry.manifest]),
    ]

    assert [[]] * 6 == [
        [step for step in _scans(sqlite_repo, act) if not step.startswith("SCAN CONSTANT ROW")] for act in acts
    ]


@pytest.mark.slow
def test_entries_memory_does_not_grow_with_their_number(sqlite_repo: ManifestRepo) -> None:
    """Going through all entries holds a page of them, not all."""
    sqlite_repo.reindex((new_entry(str(number)) for number in range(12_000)), ())
    peaks = []
    for limit in (2_000, 12_000):
        tracemalloc.start()
        assert limit == sum(1 for _ in sqlite_repo.entries(limit=limit))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    assert peaks[1] < 1.5 * peaks[0]


# Changing


def test_invalidate_key_takes_all_its_manifests_and_their_sets(repo: ManifestRepo) -> None:
    """A key stands for every manifest of it; sets without one of them stay ready."""
    old, forced, other = new_entry(build=1), new_entry(build=2, minutes=1), new_entry("other", rank=1)
    repo.publish([old, other], new_set(old, other))
    repo.publish([forced], new_set(forced, other))
    repo.publish([], new_set(other))

    assert 2 == repo.invalidate([old.key], "wrong tokens")
    assert 0 == repo.invalidate([old.key], "again")
    assert [("invalid", "wrong tokens")] * 2 == [(row.state, row.state_reason) for row in repo.entries(state="invalid")]
    assert ["ready", "invalid", "invalid"] == [row.state for row in repo.warm_sets(RECIPE_DIGEST)]
    assert [3] == [row.sequence for row in repo.warm_sets(RECIPE_DIGEST, state="ready")]


def test_invalidate_manifest_leaves_the_others_of_its_key(repo: ManifestRepo) -> None:
    """One corrupt manifest does not take its key along."""
    old, forced = new_entry(build=1), new_entry(build=2, minutes=1)
    repo.publish([old, forced])

    assert 1 == repo.invalidate([forced.manifest], "corrupt")
    assert [old.manifest] == [row.manifest for row in repo.entries(state="ready")]


def test_release_quarantined_entry_makes_whole_sets_ready(repo: ManifestRepo) -> None:
    """A set is ready again when its last quarantined member is; an invalid member keeps it out for good."""
    a, b, c = (new_entry(name, rank=rank) for rank, name in enumerate("abc"))
    repo.publish([a, b, c], new_set(a, b))
    repo.publish([], new_set(b, c))
    repo.quarantine([a.key, b.key], "died twice at start")
    repo.invalidate([c.key], "stale")

    assert 1 == repo.release([a.key])
    assert ["invalid", "invalid"] == [row.state for row in repo.warm_sets(RECIPE_DIGEST)]
    assert 1 == repo.release([b.key, c.key])
    assert ["invalid", "ready"] == [row.state for row in repo.warm_sets(RECIPE_DIGEST)]
    assert [("invalid", "stale"), ("ready", None), ("ready", None)] == [
        (row.state, row.state_reason) for row in sorted(repo.entries(), key=lambda row: -row.rank)
    ]


def test_quarantine_invalid_entry_changes_nothing(repo: ManifestRepo) -> None:
    """What is invalid can't be brought back by way of quarantine and release."""
    a = new_entry()
    repo.publish([a])
    repo.invalidate([a.key], "stale")

    assert 0 == repo.quarantine([a.key], "died twice")
    assert 0 == repo.release([a.key])
    assert "invalid" == repo.entry(a.key).state


def test_pin_entry_keeps_it_from_being_forgotten(repo: ManifestRepo) -> None:
    """Forgetting takes an entry with its files and sets, but never a pinned one."""
    a, b = new_entry("a"), new_entry("b", rank=1)
    repo.publish([a, b], new_set(a, b))
    repo.publish([], new_set(b))

    assert (1, 0) == (repo.pin([b.key]), repo.pin([b.key]))
    assert (a.manifest,) == repo.forget([a.manifest, b.manifest])
    assert [b.manifest] == [row.manifest for row in repo.entries()]
    assert [2] == [row.sequence for row in repo.warm_sets(RECIPE_DIGEST)]
    assert 2 == repo.stats().blobs
    assert 1 == repo.unpin([b.key])
    assert (b.manifest,) == repo.forget([b.manifest])
    assert Stats(*[0] * 10) == repo.stats()
    assert 3 == repo.next_sequence(RECIPE_DIGEST)


def test_touch_entry_keeps_the_latest_use(repo: ManifestRepo) -> None:
    """A late report of an earlier use does not turn the time back."""
    a = new_entry()
    repo.publish([a])
    for minutes in (5, 2):
        repo.touch([a.key], START + timedelta(minutes=minutes))

    assert START + timedelta(minutes=5) == repo.entry(a.key).last_used_at


def test_changing_many_keys_at_once_takes_all(repo: ManifestRepo) -> None:
    """More keys than one statement takes values are no limit."""
    new = [new_entry(str(number)) for number in range(1_100)]
    repo.publish(new, new_set(*new))

    assert 1_100 == repo.pin([entry.key for entry in new])
    assert 1_100 == len(repo.warm_sets(RECIPE_DIGEST)[0].warm_set.members)
    assert 1 == len(repo.warm_sets(keys=[entry.key for entry in new]))
    assert 1_100 == repo.invalidate([entry.key for entry in new], "stale")


# Failures


def _failure(**changes: Any) -> FailureRow:
    fields: dict[str, Any] = {
        "recipe": "tiny-decoder",
        "method": "main_decode",
        "case": "b4",
        "rank": 0,
        "toolchain": digest_of("toolchain"),
        "error": "torch._dynamo.exc.Unsupported: call_function",
        "log_path": "logs/build-1.log",
        "failed_at": START,
        "expires_at": START + timedelta(hours=1),
    }
    return FailureRow(**{**fields, **changes})


def test_failures_latest_of_a_line_replaces_the_one_before(repo: ManifestRepo) -> None:
    """A line fails once for each toolchain; the last text stands."""
    repo.record_failure(_failure(error="first"))
    repo.record_failure(_failure(error="second", log_path=None, failed_at=START + timedelta(minutes=1)))
    repo.record_failure(_failure(error="on another", toolchain=digest_of("newer")))

    assert ["second", "on another"] == [row.error for row in repo.failures(recipe="tiny-decoder")]
    assert ["second"] == [row.error for row in repo.failures(rank=0, toolchain=digest_of("toolchain"))]
    assert () == repo.failures(case="b8")


def test_failures_expired_are_left_out_and_forgotten(repo: ManifestRepo) -> None:
    """A failure counts until it expires, and is deleted after."""
    repo.record_failure(_failure())
    repo.record_failure(_failure(rank=1, expires_at=START + timedelta(hours=3)))
    now = START + timedelta(hours=1)

    assert [1] == [row.rank for row in repo.failures(now=now)]
    assert 1 == repo.forget_expired_failures(now)
    assert [1] == [row.rank for row in repo.failures()]


def test_failures_text_that_no_database_takes_is_kept_readable(repo: ManifestRepo) -> None:
    """A compiler's output may hold NUL and broken characters; it is stored all the same."""
    repo.record_failure(_failure(error="before\0after \udcff"))

    assert "before\N{REPLACEMENT CHARACTER}after ?" == repo.failures()[0].error


# The whole database


def test_reindex_lost_database_gives_back_entries_sets_and_sequence(repo: ManifestRepo) -> None:
    """From manifests and boot records alone everything that files know is there again."""
    a, b = new_entry("a", recipe_digest=None), new_entry("b", rank=1, minutes=1, recipe_digest=None)
    record = boot_record(12, new_set(b), new_set(a, b))
    result = repo.reindex([a, b], [record])

    assert (2, 0, 0, 2, ()) == (result.added, result.removed, result.kept, result.warm_sets, result.incomplete)
    assert list(record.sets) == [row.warm_set for row in repo.warm_sets(RECIPE_DIGEST)]
    assert [RECIPE_DIGEST] * 2 == [row.recipe_digest for row in repo.entries()]
    assert 13 == repo.next_sequence(RECIPE_DIGEST)


def test_reindex_known_entries_keep_what_only_the_database_knows(repo: ManifestRepo) -> None:
    """State, pin and last use survive; what has no file goes, with its sets; a set with it is told."""
    kept, gone, added = new_entry("kept"), new_entry("gone", rank=1), new_entry("added", rank=2)
    repo.publish([kept, gone], new_set(kept, gone))
    repo.publish([], new_set(kept))
    repo.pin([kept.key])
    repo.touch([kept.key], START)
    repo.quarantine([kept.key], "died twice")
    result = repo.reindex(iter([kept, added]), iter([boot_record(1, new_set(kept), new_set(kept, gone))]))
    row = repo.entry(kept.key)

    assert (1, 1, 1, 1) == (result.added, result.removed, result.kept, result.warm_sets)
    assert (new_set(kept, gone).warm_set.warm_set,) == result.incomplete
    assert (True, START, "quarantined") == (row.pinned, row.last_used_at, row.state)
    assert ["invalid"] == [row.state for row in repo.warm_sets()]
    assert {kept.key, added.key} == {row.key for row in repo.entries()}
    assert 3 == repo.next_sequence(RECIPE_DIGEST)


def test_reindex_that_fails_midway_changes_nothing(repo: ManifestRepo) -> None:
    """A manifest that can't be read ends the rebuild, and the database is as before."""
    a = new_entry("a")
    repo.publish([a], new_set(a))

    def unreadable() -> Iterator[NewEntry]:
        yield new_entry("b")
        raise DocumentError("manifest is malformed")

    with pytest.raises(DocumentError):
        repo.reindex(unreadable(), ())

    assert [a.key] == [row.key for row in repo.entries()]
    assert 1 == len(repo.warm_sets(RECIPE_DIGEST, state="ready"))
    repo.reindex([a], ())


def test_stats_count_each_shared_file_once(repo: ManifestRepo) -> None:
    """Bytes of entries and bytes of blobs are two figures."""
    a, b, c = (new_entry(name) for name in "abc")
    repo.publish([a, b, c], new_set(a))
    repo.pin([a.key])
    repo.invalidate([b.key], "stale")
    repo.quarantine([c.key], "died twice")
    repo.record_failure(_failure(rank=3))

    assert (
        Stats(
            entries=3,
            ready=1,
            invalid=1,
            quarantined=1,
            pinned=1,
            size_bytes=3 * 5120,
            blobs=4,
            blob_bytes=3 * 4096 + 1024,
            warm_sets=1,
            failures=1,
        )
        == repo.stats()
    )
