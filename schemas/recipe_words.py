"""How messages about a recipe name its places and values."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, TypeAlias

from cachectl.errors import ConfigError
from cachectl.schemas.keying import is_secret_name

__all__ = ["Place", "fault", "is_secret", "kind_of", "names_of", "place_text", "read_file", "shorten", "show"]

# The steps to a value: field names and indexes.
Place: TypeAlias = tuple[str | int, ...]


def names_of(place: Place) -> tuple[str, ...]:
    """Return the field names of a place, without the indexes."""
    return tuple(step for step in place if isinstance(step, str))


def is_secret(place: Place) -> bool:
    """Say whether a place holds a secret by its name; its value is never shown."""
    return len(place) > 1 and place[0] == "environment" and is_secret_name(str(place[1]))


def place_text(place: Place) -> str:
    """Return a place as messages name it."""
    text = ""
    for step in place:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{step}" if text else step
    return text


def kind_of(value: Any) -> str:
    """Say what a value is to YAML."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "a whole number"
    if isinstance(value, float):
        return "a number with a point"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, list) else "a mapping"


def show(value: Any) -> str:
    """Return a value's repr, shortened."""
    return shorten(repr(value))


def shorten(text: str, limit: int = 60) -> str:
    """Cut text to what a message can hold."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def fault(message: str, hint: str) -> ConfigError:
    """Return the ConfigError, in one line."""
    # A quoted value or a file name may hold line breaks; the message stays one line.
    return ConfigError(" ".join(message.splitlines()), hint=" ".join(hint.splitlines()))


def _unwaiting(path: str, flags: int) -> int:
    """Open a file; a pipe without a writer doesn't hold the opening."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_file(path: Path, limit_bytes: int, what: str, *, regular: bool = False) -> bytes | None:
    """Return the bytes of a user's file, None where there is none. Raises ConfigError.

    Args:
        limit_bytes: what is larger is refused.
        what: the file in a hint, as "recipe".
        regular: whether a pipe is refused, and not waited for, where nobody names one on purpose.
    """
    try:
        with open(path, "rb", opener=_unwaiting) if regular else open(path, "rb") as file:
            if regular and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                raise fault(f"{path}: is a pipe", f"write the {what} to a file")
            data = file.read(limit_bytes + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError as error:
        raise fault(f"{path}: is a directory", f"name the {what} in it") from error
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise fault(f"{path}: can't be read: {why}", "check the path and its permissions") from error
    except ValueError as error:  # a NUL in the path
        raise fault(f"{str(path)!r}: no path: {error}", "check the path") from error
    if len(data) > limit_bytes:
        raise fault(f"{path}: more than {limit_bytes} bytes", f"check that it is a {what}")
    return data
