"""Which environment variables model code reads while a model is built, fed and run.

Owns the watching of os.environ in a rank process. A read counts unless the standard library, torch, torch_npu or
cachectl made it for itself: an unknown reader goes in (deny list, not allow list). Functions of the standard library
that only pass a name or a mapping on, as os.path.expandvars, are looked through. Who copies the whole environment may
look up any name in the copy: `os.environ.copy()` gives model code a copy that is watched as well, every other way of
walking over it counts as a read of all names, but for a copy that plainly goes to a child process. Dynamo follows
`os.environ` reads without running them, so the eager step has to run under the watch too.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from cachectl.build.environ_copies import goes_to_child
from cachectl.identity.environment import EVERY_NAME
from cachectl.identity.guard_classes import is_known

__all__ = ["EnvironmentWatch"]

_STANDARD = tuple({os.path.realpath(sysconfig.get_paths()[name]) + os.sep for name in ("stdlib", "platstdlib")})
_SITE = ("site-packages" + os.sep, "dist-packages" + os.sep)
# Modules of the standard library that read what they are handed, and functions that look up names they are given. Some
# are frozen, and then have no file.
_PASSING_MODULES = frozenset({"os", "_collections_abc", "collections", "string", "configparser", "functools", "copy"})
_PASSING_FUNCTIONS = frozenset({"expandvars"})
_KNOWN_PACKAGES = ("torch", "torch_npu", "torchair", "cachectl", "numpy", "sympy", "pydantic", "yaml")
# Text for people, which shapes no graph.
_TEXT = frozenset({"__repr__", "__str__"})


class EnvironmentWatch:
    """Collects the names that model code asked for, found or not; EVERY_NAME among them where it may have been any."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._walks: set[tuple[CodeType, int]] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch reads of os.environ in this process for the block."""
        kind: Any = type(os.environ)
        read, walk, copy = kind.__getitem__, kind.__iter__, kind.copy

        def watched_read(environ: Any, name: Any) -> Any:
            self.saw(name, sys._getframe(1))
            return read(environ, name)

        def watched_walk(environ: Any) -> Any:
            self.saw_walk(sys._getframe(1))
            return walk(environ)

        def watched_copy(environ: Any) -> Any:
            held = copy(environ)
            return _WatchedCopy(held, self) if _reader(sys._getframe(1)) is not None else held

        kind.__getitem__, kind.__iter__, kind.copy = watched_read, watched_walk, watched_copy
        try:
            yield
        finally:
            kind.__getitem__, kind.__iter__, kind.copy = read, walk, copy

    def saw(self, name: Any, frame: FrameType | None) -> None:
        """Note a read of one name, unless it is a step of a walk that was noted."""
        reader = _reader(frame)
        if isinstance(name, (str, bytes)) and reader is not None and _step(reader) not in self._walks:
            self.names.add(os.fsdecode(name))

    def saw_walk(self, frame: FrameType | None) -> None:
        """Note that all names were read."""
        reader = _reader(frame)
        if reader is None:
            return
        self._walks.add(_step(reader))
        if not goes_to_child(reader.f_code, reader.f_lineno):
            self.names.add(EVERY_NAME)


class _WatchedCopy(dict[Any, Any]):
    """A copy of the environment that tells the watch of what model code looks up in it."""

    def __init__(self, held: dict[Any, Any], watch: EnvironmentWatch) -> None:
        super().__init__(held)
        self._watch = watch

    def __getitem__(self, name: Any) -> Any:
        self._watch.saw(name, sys._getframe(1))
        return super().__getitem__(name)

    def __contains__(self, name: Any) -> bool:
        self._watch.saw(name, sys._getframe(1))
        return super().__contains__(name)

    def get(self, name: Any, default: Any = None) -> Any:
        self._watch.saw(name, sys._getframe(1))
        return super().get(name, default)

    def pop(self, name: Any, *default: Any) -> Any:
        self._watch.saw(name, sys._getframe(1))
        return super().pop(name, *default)

    def setdefault(self, name: Any, default: Any = None) -> Any:
        self._watch.saw(name, sys._getframe(1))
        return super().setdefault(name, default)

    def __reduce__(self) -> Any:
        return dict, (dict(super().items()),)


def _walking(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def walked(self: _WatchedCopy, *args: Any) -> Any:
        self._watch.saw_walk(sys._getframe(1))
        return plain(self, *args)

    return walked


for _name in ("__iter__", "__or__", "__ror__", "__eq__", "items", "keys", "values", "copy", "popitem"):
    setattr(_WatchedCopy, _name, _walking(_name))


def _step(frame: FrameType) -> tuple[CodeType, int]:
    return frame.f_code, frame.f_lasti


def _reader(frame: FrameType | None) -> FrameType | None:
    """Return the frame of model code that is behind a read, None if known code is."""
    while frame is not None:
        name = frame.f_code.co_name
        module = _standard_module(frame)
        if module is None:
            if frame.f_code.co_filename.startswith("<") and "__name__" not in frame.f_globals:
                frame = frame.f_back  # Text that somebody ran; whose it is, its caller tells.
                continue
            return None if _is_known(frame) else frame
        if name in _TEXT or not (module in _PASSING_MODULES or name in _PASSING_FUNCTIONS):
            return None
        frame = frame.f_back
    return None


def _standard_module(frame: FrameType) -> str | None:
    """Return the top-level module of the standard library that a frame belongs to; None for every other frame."""
    file = frame.f_code.co_filename
    if file.startswith("<frozen "):
        return file[len("<frozen ") : -1].partition(".")[0]
    path = os.path.realpath(file) if not file.startswith("<") else ""
    for folder in _STANDARD:
        if path.startswith(folder) and not any(site in path for site in _SITE):
            return path[len(folder) :].partition(os.sep)[0].removesuffix(".py")
    return None


def _is_known(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith("<"):
        # Code of a text belongs to the module in whose name it runs.
        return is_known(str(frame.f_globals["__name__"]))
    for site in _SITE:
        _, found, inner = file.rpartition(site)
        if found:
            return inner.split(os.sep, 1)[0] in _KNOWN_PACKAGES
    return os.path.realpath(file).startswith(str(Path(__file__).resolve().parents[1]) + os.sep)
