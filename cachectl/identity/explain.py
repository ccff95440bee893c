"""Explain: in what a stored entry differs from what is asked for, part by part, and which command mends it.

Owns the comparison that plan, explain and diff share, the distance between two entries, and the look at an entry's
history. A difference that is in the key is semantic; one that the key leaves out (a comment, a label) is noise and
counts for nothing. Standard library only; nothing here raises for what a document says, it becomes a reason.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cachectl.identity.environment import check_environment
from cachectl.identity.guard_expressions import render
from cachectl.identity.guard_paths import readable
from cachectl.identity.guard_values import Unsayable
from cachectl.identity.guards import SHEET_SCHEMA
from cachectl.identity.node_cut import cut_reason
from cachectl.identity.request import compare_requests, differences
from cachectl.identity.sources import changed_bytes, check_files, file_label
from cachectl.identity.topology import asked_topology, rank_topology
from cachectl.schemas.boot import Reason
from cachectl.schemas.canonical import canonical_bytes, digest_of
from cachectl.schemas.keying import KEY_PARTS

__all__ = [
    "CHANGES_SEEN",
    "Asked",
    "Commands",
    "changing_name",
    "compare_entries",
    "compare_entry",
    "distance",
    "each_once",
    "is_noise",
    "mended",
]

# So many entries of a line, one after the other, have to differ in one name before it is called one that always does.
CHANGES_SEEN = 3
# What follows from other parts: a changed option can show in the guards, too.
_FOLLOWING = ("inputs", "guards")
# What a framework's config names and may not be mounted where plan and hook run.
_MODELS = "framework.models."
_UNSEEN = "the model's config.json is not seen from here; the program's process proves what it loads"


@dataclass(frozen=True)
class Commands:
    """The commands that hints name, for one recipe and store."""

    recipe: str
    store: str

    def build(self, *options: str) -> str:
        """Return the command that builds what is asked for."""
        return self._command("build", shlex.quote(self.recipe), *options)

    def verify(self) -> str:
        """Return the command that checks the recipe's entries."""
        return self._command("verify", shlex.quote(self.recipe))

    def diff(self, stored: str, wanted: str) -> str:
        """Return the command that compares two entries."""
        return self._command("diff", stored, wanted)

    def _command(self, *words: str) -> str:
        return " ".join(("cachectl", *words, "--store", shlex.quote(self.store)))


@dataclass(frozen=True)
class Asked:
    """One request line as it is asked for here.

    `model` is the line's own model part, `request` the set's parts; `unknown` are beginnings of names in the toolchain
    that nobody can know, as the git revision of a version that is only rehearsed. `ranks_per_node` is the cut into
    nodes, None where it is not known.
    """

    model: Mapping[str, Any]
    request: Mapping[str, Any]
    rank: int
    roots: Mapping[str, Path]
    environ: Mapping[str, str]
    commands: Commands
    unknown: tuple[str, ...] = ()
    ranks_per_node: int | None = None


def compare_entry(document: Mapping[str, Any], asked: Asked) -> list[Reason]:
    """Compare an entry manifest's document with a request line; one reason a name, semantic ones and noise.

    Inputs and guards are not compared: only the running program has what they are about.
    """
    try:
        reasons = [*_semantic(document, asked)]
        noise = changed_bytes(document["parts"]["sources"], document["raw_sources"], asked.roots)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        text = f"{type(error).__name__}: {error}"
        return [Reason("artifact", "manifest", text, kind="corrupt", hint=f"run: {asked.commands.build('--force')}")]
    named = {reason.name.partition(":")[0] for reason in reasons if reason.part == "sources"}
    return each_once([*reasons, *(reason for reason in noise if reason.name not in named)])


def compare_entries(stored: Mapping[str, Any], wanted: Mapping[str, Any], hint: str) -> list[Reason]:
    """Compare two entry manifests' documents in all nine parts, and in what is recorded beside them."""
    reasons = []
    for part in KEY_PARTS:
        reasons += [replace(reason, hint=hint) for reason in _compare_part(part, stored["parts"], wanted["parts"])]
    for name, left, right in differences(_labels(stored), _labels(wanted)):
        part, _, name = name.partition(".")
        reasons.append(Reason(part, name, left, right, "noise", _NOISE_HINTS[part]))
    return each_once(reasons)


def distance(reasons: Iterable[Reason]) -> int:
    """Return how many parts differ in what counts."""
    return len({reason.part for reason in reasons if not is_noise(reason)})


def is_noise(reason: Reason) -> bool:
    """Say whether a difference changes nothing."""
    return reason.kind == "noise"


def each_once(reasons: Iterable[Reason]) -> list[Reason]:
    """Return the reasons without those whose part and name stand before them."""
    return list({(reason.part, reason.name): reason for reason in reversed(list(reasons))}.values())[::-1]


def mended(reason: Reason, commands: Commands) -> Reason:
    """Return a reason whose hint says the command that mends it, with its recipe and store.

    A hint that says more than `build again` keeps its words: what can't be read, which package to install.
    """
    return replace(reason, hint=_hint(reason, commands))


def changing_name(history: Sequence[Mapping[str, Any]]) -> Reason | None:
    """Return an alarm if the newest entries of a line each differ from the one before in one and the same name.

    What is seen: `CHANGES_SEEN` entries or more whose parts differ in one name outside of sources, by another value in
    each. What is not: two names that change together, a value that comes back, and edited code, which people do.

    Args:
        history: the parts of a line's entries, newest first.
    """
    found: list[Reason] = []
    built = _without_rebuilds(history)
    for newer, older in itertools.pairwise(built):
        changed = each_once(reason for part in KEY_PARTS for reason in _compare_part(part, older, newer))
        own = [reason for reason in changed if reason.part not in _FOLLOWING] or changed
        if len(own) != 1 or own[0].part == "sources":
            break
        if found and (found[0].part, found[0].name) != (own[0].part, own[0].name):
            break
        found.append(own[0])
    values = {canonical_bytes(value) for reason in found for value in (reason.stored, reason.wanted)}
    if len(found) < CHANGES_SEEN - 1 or len(values) != len(found) + 1:
        return None
    newest = found[0]
    return Reason(newest.part, f"changes at every build: {newest.name}", newest.stored, newest.wanted, "noise")


def _semantic(document: Mapping[str, Any], asked: Asked) -> Iterator[Reason]:
    parts = document["parts"]
    build = f"run: {asked.commands.build()}"
    for name, stored, wanted in differences(parts["model"], asked.model):
        if wanted is None and name.startswith(_MODELS):
            yield Reason("model", name, stored, None, "noise", _UNSEEN)
        else:
            yield Reason("model", name, stored, wanted, hint=build)
    left = {
        "key_version": document["key_version"],
        "topology": asked_topology(parts["topology"]),
        # What building found of the options is for the running program to compare.
        "options": {name: value for name, value in parts["options"].items() if name != "found"},
        "environment": parts["environment"]["declared"],
        "toolchain": parts["toolchain"],
        "device": parts["device"],
    }
    right = {name: value for name, value in asked.request.items() if name != "model"}
    right["topology"] = rank_topology(asked.request["topology"], asked.rank)
    for reason in compare_requests(left, right):
        if reason.part == "toolchain" and reason.name.startswith(asked.unknown):
            continue
        # Not by `mended`: a declared variable is the recipe's to change, not the shell's.
        yield replace(reason, hint=_topology_hint(reason, build) if reason.part == "topology" else build)
    built = (document.get("provenance") or {}).get("ranks_per_node")
    if (against := cut_reason(parts["topology"], built, asked.ranks_per_node)) is not None:
        yield mended(against, asked.commands)
    for reason in (
        *check_files(parts["sources"], document["raw_sources"], asked.roots),
        *check_environment(parts["environment"], asked.environ, outside=True),
    ):
        yield mended(reason, asked.commands)


def _hint(reason: Reason, commands: Commands) -> str:
    build = f"run: {commands.build()}"
    if reason.part == "environment":
        return f"run: {_export(reason.name, reason.stored)}; or, to build for the value here: {commands.build()}"
    if reason.part == "topology":
        return _topology_hint(reason, build)
    if reason.part == "artifact" and reason.kind in ("corrupt", "absent"):
        return f"run: {commands.build('--force')}"
    if reason.part == "sources":
        return reason.hint.replace("cachectl build RECIPE", commands.build()) or build
    return build if reason.kind == "semantic" else reason.hint or build


def _topology_hint(reason: Reason, build: str) -> str:
    what = {"world_size": "world", "rank": "rank"}.get(reason.name, reason.name)
    return f"have {what} {_plain(reason.stored)}, asked {_plain(reason.wanted)}; {build}"


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else "none" if value is None else str(value)


def _export(name: str, stored: Any) -> str:
    if stored is None:
        return f"unset {name}"
    return f"export {name}={shlex.quote(stored)}" if isinstance(stored, str) else f"export {name}=..."


# Two entries, part by part.


_NOISE_HINTS = {
    "sources": "nothing to do: comments, layout or code that the graph does not stand on",
    "artifact": "nothing to do: the runtime names and writes its files anew in every build",
    "store": "nothing to do: labels and provenance are in no key",
}


def _labels(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a manifest says beside its key parts, by the part that a reason would name."""
    artifact = document["artifact"]
    provenance = document.get("provenance") or {}
    return {
        "sources": document["raw_sources"].get("files", {}),
        "artifact": {
            "runtime_path": artifact["runtime_path"],
            **{file["path"]: file["digest"] for file in artifact["files"]},
        },
        "store": {
            **{name: document[name] for name in ("recipe", "case")},
            "builder": provenance.get("builder"),
            "created_at": provenance.get("created_at"),
        },
    }


def _compare_part(part: str, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Reason]:
    left, right = stored[part], wanted[part]
    if digest_of(left) == digest_of(right):
        return []
    try:
        found = [Reason(part, *item) for item in _VIEWS.get(part, differences)(left, right)]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, Unsayable):
        found = []
    # A document that no view can take apart still differs: by its digest it is another key.
    return found or [Reason(part, "document", digest_of(left), digest_of(right))]


def _environment(stored: Any, wanted: Any) -> Iterator[tuple[str, Any, Any]]:
    # By variable: one that is declared and was read, too, is one name.
    seen = set()
    for section in sorted({*stored, *wanted}):
        for name in sorted({*stored.get(section, {}), *wanted.get(section, {})}):
            left, right = (document.get(section, {}).get(name, _ABSENT) for document in (stored, wanted))
            if name in seen or (left is not _ABSENT and right is not _ABSENT and left == right):
                continue
            seen.add(name)
            # Never read is not the same as read and unset, which is None.
            yield name, *(f"not {section}" if value is _ABSENT else value for value in (left, right))


_ABSENT = object()


def _sources(stored: Any, wanted: Any) -> Iterator[tuple[str, Any, Any]]:
    left, right = _source_names(stored), _source_names(wanted)
    for name in sorted({*left, *right}):
        if canonical_bytes(left.get(name)) != canonical_bytes(right.get(name)):
            yield name, left.get(name), right.get(name)


def _source_names(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sources document as one flat mapping from the names that `check_files` uses to what is recorded."""
    names: dict[str, Any] = {}
    paths = [file["path"] for file in document["files"]]
    for file in document["files"]:
        # Equal paths below two roots are told apart.
        label = file["path"] if paths.count(file["path"]) == 1 else file_label(file)
        for kind, prefix in (("definitions", ""), ("classes", "class "), ("bindings", "")):
            # A null binding is a name that the module does not have, which is not the same as no such record.
            names.update({f"{label}: {prefix}{name}": digest or "missing" for name, digest in file[kind].items()})
        names[label] = {
            name: value for name, value in file.items() if name not in ("path", "definitions", "classes", "bindings")
        }
    names.update({f"package {package['name']}": package["version"] for package in document["packages"]})
    names.update({name: value for name, value in document.items() if name not in ("files", "packages")})
    return names


def _inputs(stored: Any, wanted: Any) -> Iterator[tuple[str, Any, Any]]:
    # A place's name holds dots and brackets of its own, so the leaves are compared below it.
    for place in sorted({*stored, *wanted}):
        left, right = stored.get(place), wanted.get(place)
        if isinstance(left, Mapping) and isinstance(right, Mapping) and set(left) == set(right) == {"tensor"}:
            for name, one, other in differences(left["tensor"], right["tensor"]):
                yield f"{place}.{name}", one, other
        elif canonical_bytes(left) != canonical_bytes(right):
            yield place, left, right


def _guards(stored: Any, wanted: Any) -> Iterator[tuple[str, Any, Any]]:
    if not stored.get("schema") == wanted.get("schema") == SHEET_SCHEMA:
        yield from differences(stored, wanted)
        return
    sides = [(sheet["nodes"], _node_identities(sheet["nodes"])) for sheet in (stored, wanted)]
    yield from _node_differences(sides, (-1, -1), ())
    yield from differences(stored["ambient"], wanted["ambient"], "ambient")
    left, right = ({canonical_bytes(tree): tree for tree in sheet["expressions"]} for sheet in (stored, wanted))
    for identity in sorted({*left} ^ {*right}):
        yield render(left.get(identity, right.get(identity))), identity in left, identity in right


def _node_identities(nodes: Sequence[Any]) -> list[str]:
    """Return a digest for each node of a guard sheet, equal where the subtrees are: children stand before parents."""
    identities: list[str] = []
    for facts, below in nodes:
        identities.append(digest_of([facts, {step: identities[number] for step, number in below.items()}]))
    return identities


def _node_differences(
    sides: Sequence[tuple[Sequence[Any], Sequence[str]]], numbers: Sequence[int | None], path: tuple[str, ...]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the places at which two sheets' facts differ, without walking into equal subtrees.

    Args:
        sides: of each sheet its nodes and their identities.
        numbers: the number of the place's node in each sheet, None where it has none.
        path: the place.
    """
    known = [None if number is None else side[1][number] for side, number in zip(sides, numbers, strict=True)]
    if known[0] == known[1]:
        return
    nodes = [([], {}) if number is None else side[0][number] for side, number in zip(sides, numbers, strict=True)]
    facts = [{canonical_bytes(fact): fact for fact in node[0]} for node in nodes]
    stored, wanted = (
        [fact for key, fact in own.items() if key not in other] for own, other in zip(facts, facts[::-1], strict=True)
    )
    if stored or wanted:
        yield from _fact_differences(readable(path), stored, wanted)
    for step in sorted({*nodes[0][1], *nodes[1][1]}):
        yield from _node_differences(sides, [node[1].get(step) for node in nodes], (*path, step))


def _fact_differences(place: str, stored: list[Any], wanted: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what differs at one place; within the one fact of a kind that both sides have, its values alone."""
    if [fact[0] for fact in stored] != [fact[0] for fact in wanted] or len(stored) != 1:
        yield place, stored or None, wanted or None
        return
    (left,), (right,) = stored, wanted
    name = f"{place}: {left[0]}"
    if len(left) == len(right) == 2:
        yield from differences(left[1], right[1], name)
    else:
        yield name, left[1:], right[1:]


_VIEWS = {"environment": _environment, "sources": _sources, "inputs": _inputs, "guards": _guards}


def _without_rebuilds(history: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the history with entries of one key, one after the other, as one."""
    kept: list[Mapping[str, Any]] = []
    for parts in history:
        if not kept or digest_of(kept[-1]) != digest_of(parts):
            kept.append(parts)
    return kept
