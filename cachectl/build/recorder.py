"""What is recorded around one compile of a method, by a build's rank process and by a program under `exec --record`.

Owns the watching of one compile and what becomes of it: traced sources, guards, what is registered, what the runtime
said, and the gates that the saved artifact itself has to pass. Whose values are compared with whose is for the callers
to say. Imports torch through the recorders only, and is used where torch is.
"""

from __future__ import annotations

import logging
import os
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cachectl.build.guards import GuardRecorder
from cachectl.build.job import CaseJob
from cachectl.build.sources import SourceRecorder
from cachectl.errors import BuildError, ConfigError
from cachectl.identity.guard_paths import parse_source
from cachectl.identity.guards import facts_at
from cachectl.identity.inputs import with_dynamic

if TYPE_CHECKING:
    from typing_extensions import Self

    from cachectl.runtimes.artifact import ArtifactSummary

__all__ = ["CompileRecorder", "KeptCompile", "UpstreamMessages", "extra_files", "own_functions"]

# The runtime's own logger names, and Dynamo's.
_RUNTIME_LOGGERS = ("npugraph_ex", "torchair", "torch._dynamo")


@dataclass
class UpstreamMessages(logging.Handler):
    """What the runtime and Dynamo warned of while a case was compiled."""

    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    __hash__ = logging.Handler.__hash__

    def skipped(self) -> str | None:
        """Return the text in which the runtime says that it did not keep the artifact; None if it kept it."""
        return next((text for text in self.texts if "Skip cache" in text), None)


@dataclass(frozen=True)
class KeptCompile:
    """What one compile left that goes into an entry, whichever case it is.

    Attributes:
        found: the `found` of the part `options`: what no recipe says, registrations and operators among it.
        sheet: the part `guards`.
        inputs: the part `inputs`, with the ranges that stayed symbolic.
        variables: environment variables that were guarded; they belong to the part `environment`.
        guard_count: how many guards Dynamo made.
        warnings: what the runtime and Dynamo warned of.
    """

    found: dict[str, Any]
    sheet: dict[str, Any]
    inputs: dict[str, Any]
    variables: frozenset[str]
    guard_count: int
    warnings: list[str]


class CompileRecorder:
    """Records one compile of a method while it is entered; the first call of what the runtime made belongs in there.

    One at a time, and one compiling thread. Making one reads what the process has registered and its environment, as
    they are before the runtime's own code runs: that is what a program has when it is about to load.

    Args:
        runtime: the adapter.
        method: bound method.
        options: as they are compiled with.
        keep_warnings: whether Python's warnings are kept instead of shown; no program of a user's may lose them.

    Raises:
        ConfigError: code among the options or registrations that can't be told from other code.
        BuildError: on entering, a torch that can't be recorded.
    """

    def __init__(
        self, runtime: Any, method: types.MethodType, options: Mapping[str, Any], *, keep_warnings: bool
    ) -> None:
        self.guards = GuardRecorder(method.__func__.__code__)
        self.sources = SourceRecorder()
        self.messages = UpstreamMessages()
        self.environ = dict(os.environ)
        self._runtime = runtime
        self._registered = runtime.found(options, strict=True)
        self._keep_warnings = keep_warnings
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as entered:
            entered.enter_context(_logged(self.messages))
            if self._keep_warnings:
                entered.enter_context(_warned(self.messages))
            entered.enter_context(self.guards)
            entered.enter_context(self.sources)
            self._entered = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, trace)

    def check_artifact(self, case: CaseJob, cache_dir: Path) -> tuple[Path, ArtifactSummary]:
        """Hold what was traced and saved against the gates; return the artifact's folder and what it says of itself.

        Raises:
            BuildError: traced more than once, host reads, nothing saved, or nothing that another process may load.
        """
        from cachectl.build import gates

        skipped = self.messages.skipped()
        gates.refuse_recompiles(case, self.guards.compilations, skipped)
        gates.refuse_host_reads(case, self.sources.codes())
        saved = gates.saved_artifact(case, cache_dir, skipped)
        summary = gates.refuse_uncacheable(case, saved.read_bytes())
        return saved.parent, summary

    def kept(self, case: CaseJob, spec: Mapping[str, Any], operators: Iterable[str], *, dynamic: bool) -> KeptCompile:
        """Return what goes into an entry.

        Args:
            case: for words.
            spec: the call's input spec.
            operators: of the graph.
            dynamic: as compiled.

        Raises:
            BuildError: guards that no sheet can hold.
            ConfigError: an operator's code that can't be told from other code.
        """
        recorded = self.guards.recorded()
        found = {**self._registered, "operators": self._runtime.operators(operators, strict=True)}
        if recorded.unrepresented:
            raise BuildError(
                f"{case.method} [{case.name}]: {len(recorded.unrepresented)} guards can't be kept: "
                f"{recorded.unrepresented[0]}",
                hint="the model depends on something that can't be compared in another process; see the rank's log",
            )
        free = _unread_integers(spec, recorded.sheet) if dynamic else {}
        return KeptCompile(
            found=found,
            sheet=recorded.sheet,
            inputs=with_dynamic(spec, {**free, **recorded.dynamic}),
            variables=recorded.variables,
            guard_count=recorded.guard_count,
            warnings=sorted(set(self.messages.texts)),
        )


def own_functions(recipe: Mapping[str, Any], inputs: str, code_options: Sequence[str]) -> list[str]:
    """Return the functions the recipe itself names for one case, `pkg.mod:fn`: factory, inputs, setup, custom passes.

    Of one case, so that its key doesn't depend on what else is built with it.
    """
    compile_section = recipe["compile"]
    references = {recipe["model"]["factory"], inputs, *(compile_section["options"][name] for name in code_options)}
    if compile_section["setup"]:
        references.add(compile_section["setup"])
    # What of ours stands for a program only runs it; its own files are among the recipe's `sources`.
    return sorted(reference for reference in references if not reference.startswith("cachectl.programs:"))


def extra_files(recipe: Mapping[str, Any], recipe_folder: Path) -> list[Path]:
    """Return the files that the recipe's `model.sources` globs name. Raises ConfigError for one that names none."""
    found: list[Path] = []
    for pattern in recipe["model"]["sources"]:
        matches = sorted(path for path in recipe_folder.glob(pattern) if path.is_file())
        if not matches:
            raise ConfigError(
                f"model.sources: {pattern!r} names no file", hint="patterns are relative to the recipe's folder"
            )
        found.extend(matches)
    return found


def _unread_integers(spec: Mapping[str, Any], sheet: Mapping[str, Any]) -> dict[str, list[int | None]]:
    """Return the integers of a dynamic call without a guard: the graph does not read them, any value fits."""
    free: dict[str, list[int | None]] = {}
    for place, leaf in spec.items():
        if type(leaf.get("value")) is int:
            kinds = {fact[0] for fact in facts_at(sheet, parse_source(place))}
            if not kinds & {"equals", "base", "is"}:
                free[place] = [None, None]
    return free


@contextmanager
def _logged(messages: UpstreamMessages) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _RUNTIME_LOGGERS]
    for logger in loggers:
        logger.addHandler(messages)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(messages)


@contextmanager
def _warned(messages: UpstreamMessages) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            messages.texts.extend(str(item.message) for item in caught)
