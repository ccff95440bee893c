"""Record a program: what its processes left of their compiles becomes a recipe file.

Owns the folder of one run, the environment in which CMD is watched, and the file that is written: whole or not at all,
never over another one unless asked to. What is in it is found in record_program_findings.py and said in
record_program_text.py.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cachectl.boot.handout import startup_in_front
from cachectl.boot.reach import isolation, unreached
from cachectl.build.watching_notes import RECORD_VARIABLE, read_notes
from cachectl.errors import CachectlError, ConfigError
from cachectl.programs_command import ScriptCommand, read_command
from cachectl.schemas.recipe_reading import load_recipe
from cachectl.services.record_program_findings import find_program
from cachectl.services.record_program_text import recipe_text

__all__ = ["RecordedProgram", "Recording", "default_path", "open_recording", "refuse_early"]

_ENDING = ".recipe.yaml"
# How far CMD's processes came that compiled nothing, the furthest first; see cachectl.boot.reach.
_SEEN = {
    "runtime": "CMD imported the runtime and compiled nothing: a cache or graph mode that is switched off in its "
    "configuration, or an end before its first compile",
    "torch": "CMD imported torch, and no runtime that compiles: it ran eagerly, or ended before",
}


@dataclass(frozen=True)
class RecordedProgram:
    """What came of recording one program.

    Attributes:
        recipe: the file; None where nothing was compiled that a recipe can say.
        methods: the recipe's methods.
        warnings: what the recipe does not say, or what to look at.
        seen: in words, what CMD did instead, where there is no recipe.
    """

    recipe: Path | None
    methods: tuple[str, ...]
    warnings: tuple[str, ...]
    seen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recording:
    """The folder of one run, and CMD."""

    folder: Path
    command: tuple[str, ...]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment in which CMD leaves notes of its compiles."""
        return {
            **environ,
            RECORD_VARIABLE: str(self.folder),
            "PYTHONPATH": startup_in_front(environ.get("PYTHONPATH")),
        }

    def write_recipe(self, path: Path | None, *, name: str | None, force: bool, code: int) -> RecordedProgram:
        """Write the recipe of what CMD compiled.

        Args:
            path: the file; None for the script's own name beside it.
            name: the recipe's name; None for the script's.
            force: whether an existing file may be replaced.
            code: CMD's exit code.

        Raises:
            ConfigError: the file is there, or can't be written.
        """
        found = find_program(read_notes(self.folder))
        if isinstance(found, tuple):
            return RecordedProgram(None, (), (), found or self._unseen())
        warnings = list(found.warnings)
        if code != 0:
            warnings.append(f"CMD ended with exit code {code}: it may have compiled more, had it come further")
        if path is None:
            path = Path(found.folder, default_path(found.command))
            if path.exists() and not force:
                # CMD has run for this; what it said must not be lost now.
                path = _free(path)
                warnings.append(f"{default_path(found.command)} is there, so the recipe is {path.name}")
        path = Path(os.path.abspath(path))
        text, said = recipe_text(found, path.parent, name or recipe_name(found.command))
        _write(path, text, force=force)
        return RecordedProgram(path, found.methods, tuple(dict.fromkeys([*warnings, *said])))

    def _unseen(self) -> tuple[str, ...]:
        for stage, said in _SEEN.items():
            if (self.folder / f"seen.{stage}").exists():
                return (said,)
        return (str(unreached(self.folder, isolation(self.command)).hint),)


@contextmanager
def open_recording(command: Sequence[str]) -> Iterator[Recording]:
    """Yield the recording of one run; its folder goes afterwards. Raises ConfigError: there is no room for it."""
    try:
        # What CMD left running may write its notes while they are deleted.
        made = tempfile.TemporaryDirectory(prefix="cachectl-record.", ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"record needs a folder for its notes: {error.strerror}", hint="free space, or set TMPDIR"
        ) from error
    with made as folder:
        yield Recording(Path(folder), tuple(command))


def refuse_early(path: Path | None, command: Sequence[str], *, name: str | None, force: bool) -> None:
    """Refuse, before CMD runs, a file that is there; as far as CMD itself says which one it will be.

    Raises:
        ConfigError: it is there, or its folder is not; or a name that no recipe can have.
    """
    if name is not None and recipe_name(ScriptCommand(name, True, ())) != name:
        raise ConfigError(
            f"--name {name!r} is no name", hint="use a-z, 0-9, '.' and '-', and start with one of a-z, 0-9"
        )
    if path is None:
        try:
            path = Path(default_path(read_command(command)))
        except ConfigError:
            return  # A script of the shell, say: known when it has run.
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"is in no folder: {path.parent} is not there"
        raise ConfigError(f"-o {path} {what}", hint="name a file: -o infer.recipe.yaml")
    if path.exists() and not force:
        raise ConfigError(f"{path} is there", hint="pass -o FILE for another one, or --force to replace it")


def default_path(command: ScriptCommand) -> str:
    """Return the recipe's path for a program, relative to its working folder."""
    return (command.target if command.is_module else command.target.removesuffix(".py")) + _ENDING


def recipe_name(command: ScriptCommand) -> str:
    """Return a recipe's name for a program."""
    base = command.target if command.is_module else os.path.basename(command.target).removesuffix(".py")
    name = re.sub(r"[^a-z0-9.-]+", "-", base.lower()).strip("-.")
    return name[:128].rstrip("-.") or "program"


def _free(path: Path) -> Path:
    stem = path.name.removesuffix(_ENDING)
    number = 2
    while (other := path.with_name(f"{stem}-{number}{_ENDING}")).exists():
        number += 1
    return other


def _write(path: Path, text: str, *, force: bool) -> None:
    """Write the file whole, once it is known to be a recipe. Raises ConfigError."""
    pending = path.with_name(f".{path.name}.{os.getpid()}.yaml")
    try:
        try:
            with open(pending, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            load_recipe(pending)
            if force:
                os.replace(pending, path)
            else:
                # A link, since a rename replaces what another process has written meanwhile.
                os.link(pending, path)
        finally:
            pending.unlink(missing_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"{path} is there", hint="pass --force to replace it") from error
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}", hint="pass -o FILE") from error
    except CachectlError as error:
        raise ConfigError(
            f"what the program compiles makes no recipe: {error.message}", hint="please report this fault"
        ) from error
