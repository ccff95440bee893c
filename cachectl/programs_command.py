"""Reads the command line of a Python program: which script or module it runs, and with which arguments.

Owns what may stand in the `command` of a program's model and what of it can be run in another process. Nothing is
imported or run here. Light: no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cachectl.errors import ConfigError

__all__ = ["ScriptCommand", "is_launcher", "is_python", "read_command"]

_PYTHON = re.compile(r"(python|pypy)[0-9.]*t?")
_LAUNCHERS = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
# Python's options that take the rest of the word, or the next one (CPython, Python/getopt.c: SHORT_OPTS).
_WITH_VALUE = "WX"
# torchrun's options without a value (torch 2.13, distributed/run.py); every other one has one.
_LAUNCHER_FLAGS = frozenset(
    {
        "--standalone",
        "--no-python",
        "--run-path",
        "--use-env",
        "--use_env",
        "--no_python",
        "--run_path",
    }
)
_HINT = "write it as [python, infer.py, ...] or [python, -m, package.module, ...]"


@dataclass(frozen=True)
class ScriptCommand:
    """What a Python process runs.

    Attributes:
        target: the script's path as it was given, or the module's name.
        is_module: whether it is run with `-m`.
        arguments: what stands behind it.
        flags: Python's own options before it, `-m` left out.
    """

    target: str
    is_module: bool
    arguments: tuple[str, ...]
    flags: tuple[str, ...] = ()

    def words(self) -> list[str]:
        """Return the command without any machine's paths of an interpreter, and without a launcher."""
        return ["python", *self.flags, *(["-m"] if self.is_module else []), self.target, *self.arguments]


def is_python(word: str) -> bool:
    """Say whether a word names a Python interpreter."""
    return _PYTHON.fullmatch(os.path.basename(word)) is not None


def is_launcher(command: ScriptCommand) -> bool:
    """Say whether a command starts torch's launcher of ranks, which compiles nothing itself."""
    name = command.target if command.is_module else os.path.basename(command.target)
    return name in _LAUNCHERS


def read_command(words: Sequence[str]) -> ScriptCommand:
    """Read a command; torch's launcher before the script is left out, since a build starts the ranks by itself.

    Args:
        words: as a shell splits them; the interpreter may be left out before a `.py` file.

    Raises:
        ConfigError: no Python program, or one without a file: `-c`, a script on stdin.
    """
    left = [str(word) for word in words]
    if not left:
        raise ConfigError("command: empty", hint=_HINT)
    if is_python(left[0]):
        found = _after_python(left[1:])
    elif os.path.basename(left[0]) in _LAUNCHERS:
        return read_command(_after_launcher(left[1:]))
    elif left[0].endswith(".py"):
        found = ScriptCommand(left[0], False, tuple(left[1:]))
    else:
        raise ConfigError(f"command: {left[0]!r} is no Python", hint=f"name the script that it runs; {_HINT}")
    if is_launcher(found):
        return read_command(_after_launcher(list(found.arguments)))
    return found


def _after_python(words: list[str]) -> ScriptCommand:
    flags: list[str] = []
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        word = words.pop(0)
        if word.startswith("--"):
            flags.append(word)
            if word == "--check-hash-based-pycs" and words:
                flags.append(words.pop(0))
            continue
        for place, letter in enumerate(word[1:], 1):
            rest = word[place + 1 :]
            if letter == "m":
                before = word[:place]
                flags += [before] if before != "-" else []
                name = rest or (words.pop(0) if words else "")
                if not name:
                    raise _no_file("-m without a module")
                return ScriptCommand(name, True, tuple(words), tuple(flags))
            if letter == "c":
                raise _no_file("the program is the text behind -c")
            if letter in _WITH_VALUE:
                flags.append(word)
                if not rest and words:
                    flags.append(words.pop(0))
                break
        else:
            flags.append(word)
    if words and words[0] == "--":
        words.pop(0)
    if not words or words[0] == "-":
        raise _no_file("the program comes from stdin")
    return ScriptCommand(words[0], False, tuple(words[1:]), tuple(flags))


def _after_launcher(words: list[str]) -> list[str]:
    """Return the words of a rank's own command, behind the launcher's options."""
    is_module = False
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word in ("-m", "--module"):
            is_module = True
        elif word == "--no-python":
            return words
        elif word not in _LAUNCHER_FLAGS and "=" not in word and words:
            words.pop(0)
    if not words:
        raise _no_file("the launcher starts nothing")
    return ["python", "-m", *words] if is_module else ["python", *words]


def _no_file(what: str) -> ConfigError:
    # Without the words: an argument may be a secret.
    return ConfigError(f"command: {what}", hint=f"put it into a file; {_HINT}")
