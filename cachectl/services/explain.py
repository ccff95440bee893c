"""Explain: what the hook decides for a recipe here and why, and the stored entries that come nearest.

The decision is the hook's own, taken without writing anything. Never writes to the store.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cachectl.boot.handout import Handout
from cachectl.boot.hook import HookOptions, run_hook
from cachectl.errors import CachectlError, StoreError
from cachectl.identity.environment import check_declared
from cachectl.identity.explain import changing_name, is_noise, mended
from cachectl.schemas.boot import BootRecord, Reason
from cachectl.schemas.canonical import DIGEST_PREFIX
from cachectl.schemas.report import ExplainReport, Nearest, ReasonModel
from cachectl.services.framework import framework_reports
from cachectl.services.neighbours import (
    SHOWN,
    Compared,
    Neighbours,
    Question,
    Stored,
    boot_record,
    compare,
    compare_bytes,
    find_neighbours,
    named_entry,
    newest_of_keys,
    read_question,
)
from cachectl.services.plan import unnamed_set
from cachectl.store.blobs import BlobStore
from cachectl.store.layout import StoreLayout
from cachectl.store.reading import read_boot_record

__all__ = ["explain"]

# What the hook says of a set that it has no better reason for: a search that found nothing.
_NOTHING_FOUND = frozenset({("store", "boot record"), ("store", "warm set")})


def explain(
    layout: StoreLayout, recipe: Path, *, key: str | None = None, environ: Mapping[str, str] | None = None
) -> ExplainReport:
    """Return what the hook would decide for a recipe here, why, and the entries that come nearest.

    Args:
        recipe: the recipe file.
        key: an entry to compare with instead of the nearest ones, by its key or first digits.
        environ: the environment that the program will have; None for this process's.

    Raises:
        ConfigError: the recipe is wrong, or no entry has this key.
        StoreError, DocumentError: there is no store here that this program can read.
    """
    environ = os.environ if environ is None else environ
    layout.check()
    question = read_question(layout, recipe, environ)
    decided = _decide(layout, question)
    neighbours = find_neighbours(layout, question)
    compared = [
        compare(layout, line, stored) for line, candidates in neighbours.lines for stored in newest_of_keys(candidates)
    ]
    others = [(compare(layout, line, stored), alike) for line, stored, alike in neighbours.others]
    outcome, reasons = _judge(layout, question, decided, neighbours, compared, others)
    if key is not None:
        nearest = [compare_bytes(layout, compare(layout, *named_entry(layout, question, key)))]
    else:
        nearest = sorted([*compared, *(item for item, _ in others)], key=lambda item: item.distance)
        # Bytes are read of the few that are shown.
        nearest = [compare_bytes(layout, item) for item in _each_key(nearest)[:SHOWN]]
        nearest.sort(key=lambda item: item.distance)
    return ExplainReport.model_validate(
        {
            "outcome": outcome,
            "reasons": tuple(ReasonModel.of(reason) for reason in reasons),
            "nearest": tuple(_nearest(item) for item in nearest),
            "framework": framework_reports(question.loaded),
        }
    )


def _decide(layout: StoreLayout, question: Question) -> Handout:
    """Return the hook's own decision. Where the files of what it would hand out are damaged, it is let do it.

    Without writing, the hook reads no blob; so they are checked here. If one is damaged, only a hand-out tells whether
    an older set takes its place: it is made in a scratch folder.
    """
    if question.environ.get("CACHECTL_DISABLE") == "1":
        hint = "run: unset CACHECTL_DISABLE"
        off = Reason("policy", "CACHECTL_DISABLE", "1", None, "policy", hint)
        return Handout("disabled", question.loaded.path, reasons=(off,))
    options = HookOptions(recipe=str(question.loaded.path), store=str(layout.root), read_only=True)
    decided = run_hook(options, question.environ)
    blobs = BlobStore(layout)
    try:
        handed = [entry for handed_set in decided.sets for entry in handed_set.entries]
        for digest in {item.digest for entry in handed for item in entry.entry.files}:
            blobs.check(digest)
    except StoreError:
        with tempfile.TemporaryDirectory(prefix="cachectl-explain.") as scratch:
            return run_hook(replace(options, read_only=False, warm_dir=scratch), question.environ)
    return decided


def _each_key(compared: Iterable[Compared]) -> list[Compared]:
    return list({item.stored.key: item for item in reversed(list(compared))}.values())[::-1]


def _nearest(item: Compared) -> Nearest:
    stored = item.stored
    return Nearest(
        key=stored.key,
        distance=item.distance,
        differs=tuple(ReasonModel.of(reason) for reason in item.reasons),
        line=f"{stored.recipe} {stored.method}/{stored.case} rank {stored.rank}",
    )


# Judging.


def _judge(
    layout: StoreLayout,
    question: Question,
    decided: Handout,
    neighbours: Neighbours,
    compared: Sequence[Compared],
    others: Sequence[tuple[Compared, bool]],
) -> tuple[str, list[Reason]]:
    """Return the outcome and the reasons: what counts first, then noise."""
    outcome = decided.outcome
    reasons = [*_against(layout, question, decided, neighbours, compared, others)]
    if outcome == "warm":
        pending = [mended(reason, question.commands) for reason in _declared(question, decided)]
        reasons += pending
        # The hook hands out what the program's process is going to refuse: it may run before the program's environment
        # is made. Here a variable with another value is in plain sight; one that is not set may still come.
        if any(reason.kind == "semantic" for reason in pending):
            outcome = "cold"
    elif outcome == "cold" and all(is_noise(reason) for reason in reasons):
        text = "nothing that is compared here differs, and still the hook finds no set"
        hint = f"report this, with the output of: {question.commands.verify()} --json"
        reasons.append(Reason("store", "alarm", text, kind="corrupt", hint=hint))
    if neighbours.fault is not None:
        reasons.append(neighbours.fault)
    reasons += _noise(layout, question)
    reasons += _changing(question, neighbours)
    reasons = [*(item for item in reasons if not is_noise(item)), *filter(is_noise, reasons)]
    return outcome, list({str(item): item for item in reversed(reasons)}.values())[::-1]


def _against(
    layout: StoreLayout,
    question: Question,
    decided: Handout,
    neighbours: Neighbours,
    compared: Sequence[Compared],
    others: Sequence[tuple[Compared, bool]],
) -> Iterator[Reason]:
    """Yield the hook's reasons, and for a cold start those of all parts of what comes next to being handed out."""
    named = [reason for reason in decided.reasons if (reason.part, reason.name) not in _NOTHING_FOUND]
    if decided.outcome == "warm":
        keys = {handed.entry.key for handed in decided.entries}
        taken = [item for item in compared if item.stored.key in keys]
        yield from (mended(reason, question.commands) for reason in named)
        # What counts and differs from a set that is handed out can't be seen from here, and the process compares it.
        yield from (
            reason if is_noise(reason) else replace(reason, kind="absent") for item in taken for reason in item.reasons
        )
        return
    if decided.outcome != "cold":
        yield from decided.reasons
        return
    record = boot_record(layout, question)
    best = _newest_set(layout, question, record, compared) if named else []
    best = best or _best_of_lines(compared)
    # A version that can't be read is the hook's to say, not a difference from each that is stored.
    unread = tuple(f"{reason.name}." for reason in named if reason.kind == "absent")
    details = [reason for item in best for reason in item.reasons if not (unread and reason.name.startswith(unread))]
    by_name = {(reason.part, reason.name): reason for reason in details}
    # The comparison here says the same with the command that mends it.
    yield from (by_name.get((reason.part, reason.name)) or mended(reason, question.commands) for reason in named)
    yield from details
    lacking = [line for line, candidates in neighbours.lines if not candidates]
    alike = _best_of_lines([item for item, same_model in others if same_model])
    yield from (reason for item in alike for reason in item.reasons)
    if len(lacking) == len(question.lines) and not alike:
        yield from decided.reasons
        return
    if lacking:
        lines = ", ".join(str(line) for line in lacking[:SHOWN]) + (", …" if len(lacking) > SHOWN else "")
        yield Reason("store", "entry", None, lines, "absent", f"run: {question.commands.build()}")
    if not named and not lacking and all(item.holds for item in best):
        unnamed = unnamed_set(record, {item.stored.key for item in best}, question.commands.build())
        if unnamed is not None:
            yield unnamed


def _newest_set(
    layout: StoreLayout, question: Question, record: BootRecord | None, compared: Sequence[Compared]
) -> list[Compared]:
    """Return the members of the newest set beside their lines: the hook's reasons are about them."""
    known = {item.stored.manifest: item for item in compared}
    lines = {(line.method, line.case, line.rank): line for line in question.lines}
    found = []
    for member in record.sets[0].members if record is not None and record.sets else ():
        line = lines.get((member.method, member.case, member.rank))
        if line is not None:
            stored = Stored(member.key, member.manifest, question.name, member.method, member.case, member.rank)
            found.append(known.get(member.manifest) or compare(layout, line, stored))
    return found


def _best_of_lines(compared: Iterable[Compared]) -> list[Compared]:
    """Return for each line what comes nearest to it, the newest of equals."""
    best: dict[str, Compared] = {}
    for item in compared:
        place = str(item.line)
        if place not in best or item.distance < best[place].distance:
            best[place] = item
    return list(best.values())


def _declared(question: Question, decided: Handout) -> Iterator[Reason]:
    # All sets of one recipe were built with the same declared environment.
    declared = decided.sets[0].request.get("environment") if decided.sets else None
    framework = question.loaded.framework
    own = framework.framework.environment if framework is not None else {}
    for reason in check_declared(declared if isinstance(declared, dict) else {}, question.environ):
        if reason.name in own:
            continue  # The framework sets it itself, whatever is there.
        yield replace(reason, kind="absent") if reason.name not in question.environ else reason


def _noise(layout: StoreLayout, question: Question) -> Iterator[Reason]:
    """Yield what is new about the recipe's bytes alone."""
    try:
        known = read_boot_record(layout, raw_digest=question.loaded.raw_digest) is not None
        meant = read_boot_record(layout, recipe_digest=question.loaded.digest) is not None
    except CachectlError:
        return  # The hook's own reason says so.
    if meant and not known:
        hint = (
            "the store knows this recipe by its meaning, not by its bytes, and an image without PyYAML and pydantic "
            f"would start cold; run: {question.commands.build()}"
        )
        yield Reason("store", "recipe bytes", None, question.loaded.raw_digest, "noise", hint)


def _changing(question: Question, neighbours: Neighbours) -> Iterator[Reason]:
    for _, candidates in neighbours.lines:
        history = [stored.parts for stored in candidates if stored.parts is not None]
        alarm = changing_name(history) if neighbours.fault is None else None
        if alarm is not None:
            keys = [stored.key.removeprefix(DIGEST_PREFIX)[:12] for stored in newest_of_keys(candidates)][:2]
            hint = f"no start can find what it changes; take it out, and see: {question.commands.diff(*reversed(keys))}"
            yield replace(alarm, hint=hint)
