"""What the hook hands to the program: the report it prints and the document it leaves in the warm dir.

Owns the shape of both. The hand-out document holds all the program's process needs to compare everything again (each
set's request and members, each entry's whole manifest document), so that the process never needs the store. A hand-out
holds up to four sets, since not all can be seen from where the hook runs; the process takes the first that holds.
Standard library only.

The document, `handout.json`, with paths relative to its own folder:

    {"schema": "cachectl/handout/v2",
     "recipe_path": …,
     "roots":  {name: folder},                   where the recipe's source files lie
     "left_s": seconds of the hook's deadline that were left, for which ranks may wait for each other
     "sets":   [{"warm_set": id,
                 "request": {part: document},
                 "members": [[rank, method, case, key]],     of the whole set, also what is not handed out here
                 "ranks_per_node": the cut into nodes that the set is tied to; left out where it fits each
                 "entries": [{"path": …, "document": entry manifest}]}]}
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from cachectl.errors import DocumentError
from cachectl.schemas.boot import Reason, StoredEntry
from cachectl.schemas.canonical import canonical_bytes_of_parsed
from cachectl.schemas.keying import warm_set_id
from cachectl.values import dataclass, field

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "HANDOUT_SCHEMA",
    "HANDOUT_VARIABLE",
    "SETS_HANDED",
    "STARTUP",
    "HandedEntry",
    "HandedMember",
    "HandedSet",
    "Handout",
    "HookSeconds",
    "startup_in_front",
]

HANDOUT_SCHEMA = "cachectl/handout/v2"
HANDOUT_VARIABLE = "CACHECTL_HANDOUT"
# So many sets at most: what can't be seen before the program runs has few values, and each set costs a copy.
SETS_HANDED = 4
# First on the program's PYTHONPATH: Python runs the sitecustomize in it, which waits for a runtime to be imported.
STARTUP = Path(__file__).resolve().parent / "startup"
_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True)
class HookSeconds:
    """Where a hook's time went, in seconds: finding, reading with hashing, writing, and all of it."""

    resolve: float = 0.0
    verify: float = 0.0
    materialize: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class HandedEntry:
    """One entry as it was handed out: where its method's folder lies, and what its manifest says."""

    entry: StoredEntry
    path: Path | None
    document: Mapping[str, Any]


@dataclass(frozen=True)
class HandedMember:
    """One entry of a whole set, whether it is handed out here or not: which ranks of the job have which entries."""

    rank: int
    method: str
    case: str
    key: str


@dataclass(frozen=True)
class HandedSet:
    """One warm set of a hand-out: what it was built for, all its members, and the entries that were laid down here.

    `ranks_per_node` is the cut into nodes that it is tied to, None where it fits each.
    """

    warm_set: str | None = None
    request: Mapping[str, Any] = field(default_factory=dict)
    entries: tuple[HandedEntry, ...] = ()
    members: tuple[HandedMember, ...] = ()
    ranks_per_node: int | None = None


@dataclass(frozen=True)
class Handout:
    """The hook's result. `warm` means handed out: the proof is the program's process to give.

    `sets` are in the order in which the process tries them; the report tells the first.
    """

    outcome: str
    recipe_path: Path
    folder: Path | None = None
    sets: tuple[HandedSet, ...] = ()
    reasons: tuple[Reason, ...] = ()
    roots: Mapping[str, Path] = field(default_factory=dict)
    seconds: HookSeconds = HookSeconds()
    # PYTHONPATH as the program would have it without us.
    python_path: str | None = None
    # The report of a hook that ran in another process, where this is all that came of it.
    told: Mapping[str, Any] | None = None
    # Of the hook's deadline, seconds; None where nobody knows.
    left_s: float | None = None

    @classmethod
    def of_report(cls, report: Mapping[str, Any], recipe_path: Path) -> Handout:
        """Return what a hook in another process told; sets and entries are in the document that it left."""
        return cls(
            report["outcome"],
            recipe_path,
            folder=Path(report["cache_dir"]) if report["cache_dir"] is not None else None,
            reasons=tuple(Reason(**reason) for reason in report["reasons"]),
            seconds=HookSeconds(**report["seconds"]),
            told=report,
        )

    @property
    def warm_set(self) -> str | None:
        """Id of the first set; None where nothing is handed out."""
        return self.sets[0].warm_set if self.sets else None

    @property
    def entries(self) -> tuple[HandedEntry, ...]:
        """The first set's entries."""
        return self.sets[0].entries if self.sets else ()

    @property
    def env(self) -> dict[str, str]:
        """What the program's environment gets: the place of the hand-out and the start-up module that instruments it.

        Never a bare cache home: nothing is loaded unproved.
        """
        if self.told is not None:
            return dict(self.told["env"])
        if self.folder is None:
            return {}
        return {
            HANDOUT_VARIABLE: str(self.folder / "handout.json"),
            "PYTHONPATH": startup_in_front(self.python_path),
        }

    def report(self) -> dict[str, Any]:
        """Return the hook's document of the contract."""
        if self.told is not None:
            return dict(self.told)
        return {
            "outcome": self.outcome,
            "warm_set": self.warm_set,
            "cache_dir": str(self.folder) if self.folder is not None else None,
            "env": self.env,
            "entries": [
                {
                    "key": item.entry.key,
                    "method": item.entry.method,
                    "case": item.entry.case,
                    "rank": item.entry.rank,
                    "path": str(item.path) if item.path is not None else None,
                }
                for item in self.entries
            ],
            "reasons": [reason.to_json() for reason in self.reasons],
            "seconds": {name: round(value, 6) for name, value in vars(self.seconds).items()},
        }

    def write(self) -> None:
        """Write handout.json into the hand-out's folder, last of all; a reader sees all of it or nothing."""
        if self.folder is None:
            raise ValueError("a cold hand-out has no folder")
        # Read from JSON but for texts and numbers of ours; the plain way took 10 ms for 16 entries.
        data = canonical_bytes_of_parsed(
            {
                "schema": HANDOUT_SCHEMA,
                "recipe_path": str(self.recipe_path),
                "roots": {name: str(root) for name, root in self.roots.items()},
                "left_s": self.left_s,
                "sets": [_set_document(item, self.folder) for item in self.sets],
            }
        )
        pending = self.folder / ".handout.json"
        descriptor = os.open(pending, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(pending, self.folder / "handout.json")

    @classmethod
    def read(cls, path: Path) -> Handout:
        """Read a hand-out that a hook left for this process.

        Raises:
            DocumentError: not there, not ours, or malformed.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                owner = os.fstat(file.fileno()).st_uid
                if owner != os.getuid():
                    raise DocumentError(f"hand-out {path} belongs to uid {owner}, this process is {os.getuid()}")
                document = json.loads(file.read(_LIMIT_BYTES))
            if document["schema"] != HANDOUT_SCHEMA:
                raise DocumentError(
                    f"hand-out has schema {document['schema']!r}, this program reads {HANDOUT_SCHEMA!r}"
                )
            if not document["sets"]:
                raise DocumentError(f"hand-out {path} holds no set")
            return cls(
                outcome="warm",
                recipe_path=Path(document["recipe_path"]),
                folder=path.parent,
                sets=tuple(_read_set(item, path.parent) for item in document["sets"]),
                roots={str(name): Path(root) for name, root in document["roots"].items()},
                left_s=_seconds(document["left_s"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            # The cause first: where a line is cut, the path goes.
            raise DocumentError(f"can't read the hand-out: {why}: {path}") from error


def startup_in_front(python_path: str | None) -> str:
    """Return a PYTHONPATH with the start-up module's folder first, once."""
    if not python_path:
        return str(STARTUP)
    # An empty part means the current directory, so it is kept.
    return os.pathsep.join([str(STARTUP), *(part for part in python_path.split(os.pathsep) if part != str(STARTUP))])


def _seconds(value: Any) -> float | None:
    if value is None or (isinstance(value, (int, float)) and 0 <= value < math.inf):
        return value
    raise ValueError(f"left_s is {value!r}")


def _set_document(item: HandedSet, folder: Path) -> dict[str, Any]:
    return {
        "warm_set": item.warm_set,
        "request": item.request,
        "members": [[member.rank, member.method, member.case, member.key] for member in item.members],
        **({} if item.ranks_per_node is None else {"ranks_per_node": item.ranks_per_node}),
        "entries": [
            # Relative: a volume may be mounted at another place in the program's container.
            {
                "path": os.path.relpath(entry.path, folder) if entry.path is not None else None,
                "document": entry.document,
            }
            for entry in item.entries
        ],
    }


def _read_set(document: Mapping[str, Any], folder: Path) -> HandedSet:
    """Read one set; raises ValueError where entries, members and id don't belong together."""
    members = tuple(HandedMember(*member) for member in document["members"])
    if warm_set_id(member.key for member in members) != document["warm_set"]:
        raise ValueError(f"set {document['warm_set']} has other members")
    entries = tuple(
        HandedEntry(
            StoredEntry.from_document(item["document"]),
            Path(os.path.normpath(folder / item["path"])),
            item["document"],
        )
        for item in document["entries"]
    )
    for handed in entries:
        entry = handed.entry
        if HandedMember(entry.rank, entry.method, entry.case, entry.key) not in members:
            raise ValueError(f"entry {entry.key} is no member of set {document['warm_set']}")
    each = document.get("ranks_per_node")
    if each is not None and type(each) is not int:
        raise ValueError(f"ranks_per_node is {each!r}")
    return HandedSet(str(document["warm_set"]), dict(document["request"]), entries, members, each)
