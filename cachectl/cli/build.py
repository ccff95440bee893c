"""`cachectl build`: builds what plan says is missing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cachectl.cli.options import HELP_NAMES, Session, example, rank_timeout, recipes_argument, session_options
from cachectl.cli.output import Output, clean, human_seconds

if TYPE_CHECKING:
    from rich.progress import Task, TaskID
    from typing_extensions import Self

    from cachectl.schemas.report import Boot, BuildReport, Built
    from cachectl.services.build import BuildEvent

__all__ = ["command", "event_text", "left_text", "render"]


def _read_shard(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    part, _, parts = value.partition("/")
    if not (part.isascii() and part.isdecimal() and parts.isascii() and parts.isdecimal()):
        raise click.BadParameter(f"{value!r} is not i/n, as in 0/4", ctx, param)
    if int(parts) < 1 or int(part) > int(parts):
        raise click.BadParameter(f"there is no part {part} of {parts}", ctx, param)
    return int(part), int(parts)


@click.command(
    "build",
    context_settings=HELP_NAMES,
    epilog=example("cachectl build recipe.yaml --store /mnt/cache", "cachectl build recipe.yaml --force --timeout 900"),
)
@recipes_argument
@click.option(
    "--force",
    is_flag=True,
    help="Build again what is ready: a new manifest under the same key. Also what a gate refused lately.",
)
@click.option(
    "--jobs",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Recipes built at once.",
)
@click.option("--keep-going", is_flag=True, help="Go on after a failed entry.")
@rank_timeout
@click.option(
    "--shard",
    metavar="I/N",
    callback=_read_shard,
    help="Build part I of N of the recipes' cases; the part that makes a set whole publishes it.",
)
@session_options
def command(
    session: Session,
    recipes: tuple[Path, ...],
    force: bool,
    jobs: int,
    keep_going: bool,
    timeout_s: float | None,
    shard: tuple[int, int] | None,
) -> int:
    """Build what plan says is missing.

    Compiles in private rank processes, loads each result in a second fresh process and compares its outputs, and only
    then publishes. What a failed build made is in no warm set. Starts all ranks of a recipe here; where a launcher
    started it once a rank, as in `torchrun ... -m cachectl build`, each builds its own. Exits 0 when everything is
    ready, 1 when an entry or a gate failed.
    """
    from cachectl.services.build import build

    with _progress(session.out) as progress:
        report = build(
            session.layout(),
            list(recipes),
            force=force,
            jobs=jobs,
            keep_going=keep_going,
            timeout_s=timeout_s,
            shard=shard,
            progress=progress.event,
        )
    session.out.report(report, lambda: render(session.out, report))
    return report.exit_code


class _LineProgress:
    """Progress as one line an event on stderr: for logs and pipelines."""

    def __init__(self, out: Output) -> None:
        self._out = out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def event(self, event: BuildEvent) -> None:
        self._out.log(event_text(event))


class _LiveProgress:
    """Progress drawn in place on a terminal: one line a rank, with the time it has taken; what is done stays above.

    Of a world that is larger than a screen the first ranks have lines; the others' phases are theirs, mostly.
    """

    _RANKS = 16

    def __init__(self, out: Output) -> None:
        from rich.console import Console
        from rich.progress import Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.text import Text

        class Left(ProgressColumn):
            """Counts down between events; a compile says nothing for minutes."""

            def render(self, task: Task) -> Text:
                ends_s = task.fields["ends_s"]
                return Text(left_text(max(0.0, ends_s - time.monotonic())) if ends_s is not None else "")

        self._tasks: dict[tuple[str, int], TaskID] = {}
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            Left(),
            console=Console(file=out.stderr, highlight=False),
            transient=True,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def event(self, event: BuildEvent) -> None:
        place = (event.recipe, event.rank)
        if event.kind != "phase":
            if event.kind in ("done", "failed") and place in self._tasks:
                self._progress.remove_task(self._tasks.pop(place))
            self._progress.console.print(clean(event_text(event)), markup=False, soft_wrap=True)
            return
        if event.rank >= self._RANKS:
            return
        ends_s = time.monotonic() + event.left_s if event.left_s is not None else None
        description = clean(f"{_title(event)}: {event.phase}")
        task = self._tasks.get(place)
        if task is None:
            self._tasks[place] = self._progress.add_task(description, total=None, ends_s=ends_s)
        else:
            self._progress.update(task, description=description, ends_s=ends_s)


def _progress(out: Output) -> _LineProgress | _LiveProgress:
    return _LiveProgress(out) if out.live else _LineProgress(out)


def _title(event: BuildEvent) -> str:
    recipe = f"{event.recipe}: " if event.recipe else ""
    case = f"{event.method}/{event.case} " if event.method else ""
    return f"{recipe}{case}rank {event.rank}"


def event_text(event: BuildEvent) -> str:
    """Return one line for an event: what, where, how long it took and should take."""
    if event.kind == "start":
        left = f", {left_text(event.left_s)}" if event.left_s is not None else ""
        return f"{event.text}: building{left}" + (f" (log: {event.log})" if event.log else "")
    if event.kind == "waiting":
        return event.text
    if event.kind == "note":
        return f"{_title(event)}: {event.text}"
    text = f"{_title(event)}: {event.phase or event.kind}"
    if event.elapsed_s:
        text += f", {human_seconds(event.elapsed_s)}"
        if event.estimate_s:
            text += f" of about {human_seconds(event.estimate_s)}"
    elif event.estimate_s:
        text += f", about {human_seconds(event.estimate_s)}"
    if event.left_s is not None:
        text += f", {left_text(event.left_s)}"
    if event.seconds:
        parts = ", ".join(f"{name.replace('_', '-')} {human_seconds(value)}" for name, value in event.seconds.items())
        text += f" ({parts})"
    if event.kind == "failed":
        text += f": {event.text}" + (f" (log: {event.log})" if event.log else "")
    return text


def left_text(seconds: float) -> str:
    """Return how long a rank will go on, as roughly as it is known: by what it took at an earlier build."""
    if seconds >= 90:
        return f"~{round(seconds / 60)} min left"
    return f"~{max(5, 5 * round(seconds / 5))} s left" if seconds > 0 else "any moment now"


def render(out: Output, report: BuildReport) -> None:
    """Write the report for people."""
    if report.built:
        out.table(
            ["METHOD", "CASE", "RANK", "KEY", "COLD", "WARM", "RATIO"],
            [
                [
                    entry.method,
                    entry.case,
                    entry.rank,
                    out.key(entry.key),
                    human_seconds(entry.cold_seconds),
                    human_seconds(entry.warm_seconds),
                    _ratio(entry),
                ]
                for entry in report.built
            ],
            right=["RANK", "COLD", "WARM", "RATIO"],
        )
        out.line()
    for failure in report.failed:
        out.line(f"failed: {failure.method}/{failure.case} rank {failure.rank}: {failure.error}")
        if failure.log:
            out.line(f"  log: {failure.log}")
    out.line(
        f"{len(report.built)} built, {len(report.reused)} reused, {len(report.failed)} failed"
        f" in {human_seconds(report.seconds)}"
    )
    for boot in report.boots:
        named = f" of {boot.recipe}" if len(report.boots) > 1 else ""
        out.line(f"warm set {out.key(boot.warm_set)}{named} is ready{_saved(boot)}")
    if report.warm_set and not report.boots:
        out.line(f"warm set {out.key(report.warm_set)} is ready")


def _saved(boot: Boot) -> str:
    if boot.saved_seconds is None:
        return ""
    where = " (simulated)" if boot.evidence == "simulated" else ""
    return f": each start saves about {human_seconds(boot.saved_seconds)} of compiling{where}"


def _ratio(entry: Built) -> str:
    return f"{entry.cold_seconds / entry.warm_seconds:.1f}x" if entry.cold_seconds and entry.warm_seconds else "-"
