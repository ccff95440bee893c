"""How reasons are shown to people: equal ones once for all ranks, hints once at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from cachectl.cli.output import human_value, ranks_text

if TYPE_CHECKING:
    from cachectl.cli.output import Output

__all__ = ["ReasonLike", "differing_parts", "show_differences", "show_hints", "show_reasons"]

# So many differences of one part are shown; more of them say no more. --verbose and --json have them all.
_SHOWN_OF_A_PART = 12
_TEXT_LIMIT = 200


class ReasonLike(Protocol):
    """What the two forms of a reason have in common (schemas.boot.Reason, schemas.report)."""

    @property
    def part(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def stored(self) -> object: ...
    @property
    def wanted(self) -> object: ...
    @property
    def kind(self) -> str: ...
    @property
    def hint(self) -> str | None: ...


def show_reasons(out: Output, rows: Iterable[tuple[str, int, str, Sequence[ReasonLike]]]) -> None:
    """Show why entries are as they are.

    Args:
        rows: per entry its `method/case`, rank, state and reasons. Entries that differ only in rank share one heading.
    """
    groups: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
    hints: list[str] = []
    for title, rank, state, reasons in rows:
        if not reasons:
            continue
        texts = tuple(_reason_text(reason, whole=bool(out.verbose)) for reason in reasons)
        groups.setdefault((title, state, texts), []).append(rank)
        hints += [reason.hint for reason in reasons if reason.hint]
    for (title, state, texts), ranks in groups.items():
        out.line()
        out.line(f"{title} {ranks_text(ranks)}: {state}")
        for text in texts:
            out.line(f"  {text}")
    show_hints(out, list(dict.fromkeys(hints)))


def show_hints(out: Output, hints: Sequence[str]) -> None:
    """Show what to run next, after a blank line."""
    if hints:
        out.line()
    for hint in hints:
        out.line(f"hint: {hint}")


def show_differences(out: Output, reasons: Sequence[ReasonLike]) -> None:
    """Show differences by part, `stored → wanted`, those that count before noise."""
    sections: dict[tuple[bool, str], list[ReasonLike]] = {}
    for reason in reasons:
        sections.setdefault((reason.kind == "noise", reason.part), []).append(reason)
    for (noise, part), members in sorted(sections.items(), key=lambda item: item[0][0]):
        shown = members if out.verbose else members[:_SHOWN_OF_A_PART]
        for reason in shown:
            label = f"noise, {part}" if noise else part if reason.kind == "semantic" else f"{part}, {reason.kind}"
            out.line(f"  {label}: {reason.name}{_values(reason, whole=bool(out.verbose))}")
        if len(members) > len(shown):
            out.line(f"  {part}: {len(members) - len(shown)} more (-v shows them)")


def _values(reason: ReasonLike, *, whole: bool) -> str:
    values = [value for value in (reason.stored, reason.wanted) if value is not None]
    if not values:
        return ""
    if len(values) == 1 and reason.kind != "semantic":
        # What was found, in words: there is no other side to it.
        return f": {human_value(values[0], whole=whole, limit=_TEXT_LIMIT)}"
    return f": {human_value(reason.stored, whole=whole)} → {human_value(reason.wanted, whole=whole)}"


def differing_parts(number: int) -> str:
    """Return how many parts differ, in words."""
    if not number:
        return "nothing that counts differs"
    return f"{number} part{'' if number == 1 else 's'} differ{'s' if number == 1 else ''}"


def _reason_text(reason: ReasonLike, *, whole: bool) -> str:
    text = f"{reason.part}: {reason.name}"
    if reason.stored is not None or reason.wanted is not None:
        stored, wanted = human_value(reason.stored, whole=whole), human_value(reason.wanted, whole=whole)
        text += f": stored {stored}, wanted {wanted}"
    return f"{text} ({reason.kind})"
