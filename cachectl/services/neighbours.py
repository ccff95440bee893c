"""Neighbours: the stored entries that a recipe's lines could have meant, each beside its line.

Owns where they are looked for: in the database, by line and, for a line that has none, by model part or by recipe and
method; where the database can't be read, in the boot record and the manifests' files. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cachectl.errors import CachectlError, ConfigError, EnvironmentFault, ManifestError, StoreError
from cachectl.identity.explain import CHANGES_SEEN, Asked, Commands, distance
from cachectl.identity.node_cut import ranks_per_node
from cachectl.identity.ranks import ranks_here
from cachectl.identity.request import entry_model_part, recipe_request, source_roots
from cachectl.schemas.boot import Absence, BootRecord, Member, Reason
from cachectl.schemas.canonical import DIGEST_PREFIX, digest_of
from cachectl.schemas.recipe_reading import LoadedRecipe, load_recipe
from cachectl.services.plan import against_entry, known_absences
from cachectl.store.blobs import BlobStore
from cachectl.store.layout import StoreLayout
from cachectl.store.manifest import ManifestRepo
from cachectl.store.manifest_rows import EntryRow
from cachectl.store.reading import ReadManifest, read_boot_record, read_manifest, read_manifest_file, stored_manifests

__all__ = [
    "SHOWN",
    "Compared",
    "Line",
    "Neighbours",
    "Question",
    "Stored",
    "boot_record",
    "compare",
    "compare_bytes",
    "find_neighbours",
    "named_entry",
    "newest_of_keys",
    "read_question",
]

SHOWN = 5
# So many entries are compared in all: a line's newest ones, fewer of each where a recipe has many lines.
_COMPARED = 64
_COMPARED_OF_A_LINE = 16
# Of one build all ranks, however they lie in the database: those nearest to the rank asked for are shown.
_ALIKE_READ = 1024
# Without the database manifests are read one by one; in a store with more of them some stay unseen.
_MANIFESTS_READ = 2000


@dataclass(frozen=True)
class Line:
    """One request line: what it is for, and what it asks."""

    recipe: str
    method: str
    case: str
    rank: int
    asked: Asked

    def __str__(self) -> str:
        return f"{self.method}/{self.case} rank {self.rank}"


@dataclass(frozen=True)
class Stored:
    """One stored entry, as the database or its manifest's file tells it. `parts` are there where they came along."""

    key: str
    manifest: str
    recipe: str
    method: str
    case: str
    rank: int
    state: str = "ready"
    state_reason: str | None = None
    parts: Mapping[str, Any] | None = None

    @classmethod
    def of_row(cls, row: EntryRow, parts: Mapping[str, Any] | None = None) -> Stored:
        """Return a row of the database."""
        return cls(
            row.key, row.manifest, row.recipe, row.method, row.case, row.rank, row.state, row.state_reason, parts
        )

    @classmethod
    def of_manifest(cls, read: ReadManifest) -> Stored:
        """Return an entry whose manifest was read; its state is the database's to know."""
        entry = read.entry
        return cls(
            entry.key, read.manifest, entry.recipe, entry.method, entry.case, entry.rank, parts=dict(entry.parts)
        )


@dataclass(frozen=True)
class Compared:
    """A stored entry beside a line: in what they differ."""

    stored: Stored
    line: Line
    reasons: tuple[Reason, ...]

    @property
    def distance(self) -> int:
        return distance(self.reasons)

    @property
    def holds(self) -> bool:
        return self.distance == 0


@dataclass
class Neighbours:
    """The entries of each line, newest first, and others that are like a line that has none; what was in the way."""

    lines: list[tuple[Line, list[Stored]]] = field(default_factory=list)
    # By line; of the same model part where the flag is set, else only of the same recipe and method.
    others: list[tuple[Line, Stored, bool]] = field(default_factory=list)
    fault: Reason | None = None


@dataclass(frozen=True)
class Question:
    """The recipe as it is asked about here."""

    loaded: LoadedRecipe
    request: Mapping[str, Any]
    lines: tuple[Line, ...]
    commands: Commands
    environ: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.loaded.recipe.name


def read_question(layout: StoreLayout, recipe: Path, environ: Mapping[str, str]) -> Question:
    loaded = load_recipe(recipe)
    document = loaded.document
    request, _ = recipe_request(document, environ)
    commands = Commands(str(loaded.path), str(layout.root))
    model = document.get("model") or {}
    roots = source_roots(loaded.folder, tuple(model.get("path") or ()))
    ranks = ranks_here(environ) or range(document["topology"]["world_size"])
    absent = known_absences(layout, loaded.digest, request, roots)
    each = ranks_per_node(environ, document["topology"]["world_size"])
    lines = tuple(
        Line(
            loaded.recipe.name,
            function["method"],
            case["name"],
            rank,
            Asked(
                entry_model_part(document, function["method"], case),
                request,
                rank,
                roots,
                environ,
                commands,
                ranks_per_node=each,
            ),
        )
        for rank in ranks
        for function in document.get("functions") or ()
        for case in function["cases"]
        if Absence(function["method"], case["name"], rank) not in absent
    )
    return Question(loaded, request, lines, commands, environ)


def find_neighbours(layout: StoreLayout, question: Question) -> Neighbours:
    """Return the entries of each line, and others where a line has none."""
    found = _from_database(layout, question)
    return found if found.fault is None else replace(_from_files(layout, question), fault=found.fault)


def _from_database(layout: StoreLayout, question: Question) -> Neighbours:
    found = Neighbours()
    limit = max(CHANGES_SEEN, min(_COMPARED_OF_A_LINE, _COMPARED // max(1, len(question.lines))))
    try:
        with ManifestRepo.open(layout.database, read_only=True) as repo:
            for line in question.lines:
                rows = repo.line(question.name, line.method, line.case, line.rank, limit=limit)
                # Fewer have no history to look for changes in.
                with_parts = len(rows) >= CHANGES_SEEN
                candidates = [Stored.of_row(row, _parts(layout, row) if with_parts else None) for row in rows]
                found.lines.append((line, candidates))
                if not candidates:
                    found.others += _others_in_database(repo, question, line)
    except (ManifestError, StoreError, EnvironmentFault) as error:
        found.fault = Reason("store", "database", error.message, kind="absent", hint=error.hint or "run: cachectl db")
    return found


def _parts(layout: StoreLayout, row: EntryRow) -> Mapping[str, Any] | None:
    try:
        return read_manifest(layout, row.key, row.manifest).entry.parts
    except CachectlError:
        return None  # Said where the entry is compared.


def _others_in_database(repo: ManifestRepo, question: Question, line: Line) -> Iterator[tuple[Line, Stored, bool]]:
    newest = repo.entries_of_model(digest_of(line.asked.model), limit=_ALIKE_READ)
    alike = sorted(newest, key=lambda row: abs(row.rank - line.rank))[:SHOWN]
    for row in alike or repo.entries(recipe=question.name, method=line.method, limit=SHOWN):
        yield line, Stored.of_row(row), bool(alike)


def _from_files(layout: StoreLayout, question: Question) -> Neighbours:
    """Find the same without the database: the members that the boot record names, and the manifests beside them."""
    entries: dict[str, Stored] = {}
    for member in _members(boot_record(layout, question)):
        try:
            read = read_manifest(layout, member.key, member.manifest)
        except CachectlError:
            entries[member.manifest] = Stored(
                member.key, member.manifest, question.name, member.method, member.case, member.rank
            )
        else:
            entries[member.manifest] = Stored.of_manifest(read)
    for number, path in enumerate(stored_manifests(layout)):
        if number >= _MANIFESTS_READ:
            break
        try:
            read = read_manifest_file(path)
        except CachectlError:
            continue
        entries.setdefault(read.manifest, Stored.of_manifest(read))
    found = Neighbours()
    for line in question.lines:
        place = (question.name, line.method, line.case, line.rank)
        candidates = [item for item in entries.values() if (item.recipe, item.method, item.case, item.rank) == place]
        found.lines.append((line, candidates[:_COMPARED_OF_A_LINE]))
        if not candidates:
            model = digest_of(line.asked.model)
            alike = [item for item in entries.values() if item.parts and digest_of(item.parts["model"]) == model]
            alike.sort(key=lambda item: abs(item.rank - line.rank))
            others = alike or [
                item for item in entries.values() if (item.recipe, item.method) == (question.name, line.method)
            ]
            found.others += [(line, item, bool(alike)) for item in others[:SHOWN]]
    return found


def named_entry(layout: StoreLayout, question: Question, key: str) -> tuple[Line, Stored]:
    """Return the entry of a key and the line that it is nearest to by name.

    Raises:
        ConfigError: no such key, more than one, or a recipe without lines.
    """
    try:
        with ManifestRepo.open(layout.database, read_only=True) as repo:
            stored = Stored.of_row(repo.entry(key))
    except (ManifestError, StoreError, EnvironmentFault):
        stored = _stored_by_key(layout, key)
    if not question.lines:
        raise ConfigError(f"{question.loaded.path.name}: functions: none, so there is nothing to compare {key} with")
    place = (stored.method, stored.case, stored.rank)
    likeness = [
        sum(one == other for one, other in zip(place, (line.method, line.case, line.rank), strict=True))
        for line in question.lines
    ]
    return question.lines[likeness.index(max(likeness))], stored


def _stored_by_key(layout: StoreLayout, key: str) -> Stored:
    wanted = key.removeprefix(DIGEST_PREFIX)
    found = {path.parent.name: path for path in stored_manifests(layout) if path.parent.name.startswith(wanted)}
    if len(found) != 1 or not wanted:
        what = "begins no entry's key" if not found else "begins more than one key"
        raise ConfigError(f"{key!r} {what}", hint="run `cachectl ls` to see the keys")
    (path,) = found.values()
    return Stored.of_manifest(read_manifest_file(path))


def boot_record(layout: StoreLayout, question: Question) -> BootRecord | None:
    try:
        return read_boot_record(layout, recipe_digest=question.loaded.digest)
    except CachectlError:
        return None  # The hook's own reason says so.


def _members(record: BootRecord | None) -> Iterator[Member]:
    for warm_set in record.sets if record is not None else ():
        yield from warm_set.members


def compare(layout: StoreLayout, line: Line, stored: Stored) -> Compared:
    """Compare a stored entry with a line, in their labels, too: those are noise."""
    reasons = [*against_entry(layout, line.asked, stored)]
    hint = f"a label is in no key, but entries are found by it; run: {line.asked.commands.build()}"
    labels = {"recipe": (stored.recipe, line.recipe), "case": (stored.case, line.case)}
    reasons += [Reason("store", name, *pair, "noise", hint) for name, pair in labels.items() if pair[0] != pair[1]]
    return Compared(stored, line, tuple(reasons))


def compare_bytes(layout: StoreLayout, compared: Compared) -> Compared:
    """Return the comparison with what is wrong with the bytes of the entry's files."""
    force = f"run: {compared.line.asked.commands.build('--force')}"
    known = {(reason.part, reason.name) for reason in compared.reasons}
    found = []
    try:
        files = read_manifest(layout, compared.stored.key, compared.stored.manifest).entry.files
    except CachectlError:
        return compared  # Compared already, and said.
    for item in files:
        try:
            BlobStore(layout).check(item.digest)
        except StoreError as error:
            if ("artifact", item.path) not in known:
                found.append(Reason("artifact", item.path, error.message, kind="corrupt", hint=force))
    return replace(compared, reasons=(*compared.reasons, *found))


def newest_of_keys(candidates: Iterable[Stored]) -> list[Stored]:
    # Rebuilds of one key differ in nothing that could be asked.
    return list({stored.key: stored for stored in reversed(list(candidates))}.values())[::-1]
