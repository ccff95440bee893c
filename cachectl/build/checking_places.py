"""Where in the user's code something that a trace shows stands: from stacks to file and line.

Owns which frame of a stack is the user's, and the words of findings' paths. Rank processes only.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import re
import sysconfig
import textwrap
from collections.abc import Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from cachectl.schemas.check import Finding, Severity, rule_finding

if TYPE_CHECKING:
    from typing import TypeGuard

__all__ = ["Findings", "Place", "Places"]

Place = tuple[str, int]

_TEXT_FRAME = re.compile(r'^\s*(?:#\s*)?File "([^"]+)", line (\d+)', re.MULTILINE)
# Packages whose own frames are never what the user has to change.
_LIBRARIES = ("torch", "torch_npu", "torchair", "npugraph_ex", "cachectl")


class Places:
    """Finds the user's frame in a stack: the innermost below the recipe's roots, else the innermost of no library.

    Args:
        roots: folders of the recipe's code, see cachectl.identity.request.source_roots.
    """

    def __init__(self, roots: Mapping[str, Path]) -> None:
        self._roots = tuple(f"{os.path.realpath(root)}{os.sep}" for root in roots.values())
        self._foreign = _library_folders()
        paths = sysconfig.get_paths()
        self._standard = f"{os.path.realpath(paths['stdlib'])}{os.sep}"
        self._packages = tuple(f"{os.path.realpath(paths[kind])}{os.sep}" for kind in ("purelib", "platlib"))

    def of_frames(self, frames: Iterable[Any]) -> Place | None:
        """Return the place in a StackSummary, outermost frame first."""
        return self._chosen([(frame.filename, frame.lineno or 1) for frame in frames or ()])

    def of_text(self, text: str | None) -> Place | None:
        """Return the place in a stack that was kept as text: an FX node's stack_trace, a Dynamo message."""
        return self._chosen([(file, int(line)) for file, line in _TEXT_FRAME.findall(text or "")])

    def of_error(self, error: BaseException) -> Place | None:
        """Return the place that raised: Dynamo's own account of the user's stack, else the traceback."""
        if (frames := getattr(error, "real_stack", None)) and (place := self.of_frames(frames)) is not None:
            return place
        if (place := self.of_text(str(error))) is not None:
            return place
        frames, at = [], error.__traceback__
        while at is not None:
            frames.append((at.tb_frame.f_code.co_filename, at.tb_lineno))
            at = at.tb_next
        return self._chosen(frames)

    def of_code(self, code: CodeType) -> Place:
        return (code.co_filename, code.co_firstlineno)

    def of_return(self, code: CodeType) -> Place:
        """Return the place of a function's one return statement, else of its definition."""
        found = [node.lineno for node in ast.walk(_tree(code)) if isinstance(node, ast.Return)]
        return (code.co_filename, code.co_firstlineno - 1 + found[0]) if len(found) == 1 else self.of_code(code)

    def of_store(self, name: str, texts: Iterable[str | None], code: CodeType) -> Place | None:
        """Return where an attribute is bound in the functions of some stacks and of a method; None if nowhere.

        `name` is its path in the model, as `layers.0.cache` or `caches[1]`.

        An assignment that spans a line of the stacks comes first: its value was worked out there.
        """
        whole, bracket, _ = name.partition("[")
        attribute, member = whole.rpartition(".")[2], bool(bracket)
        near: dict[str, set[int]] = {code.co_filename: {code.co_firstlineno}}
        for text in texts:
            for file, line in _TEXT_FRAME.findall(text or ""):
                if not self._is_library(os.path.realpath(file)):
                    near.setdefault(file, set()).add(int(line))
        found: list[tuple[bool, str, int]] = []
        for file, lines in near.items():
            for function in ast.walk(_file_tree(file)):
                if isinstance(function, ast.FunctionDef) and _spans(function, lines):
                    stores = (node for node in ast.walk(function) if _stores(node, attribute, member=member))
                    found.extend((not _spans(node, lines), file, node.lineno) for node in stores)
        return min(found)[1:] if found else None

    def line_of(self, place: Place | None) -> str:
        """Return the source line at a place, "" where it can't be read."""
        return linecache.getline(*place).strip() if place is not None else ""

    def _chosen(self, frames: list[Place]) -> Place | None:
        real = [(os.path.realpath(file), line) for file, line in frames if not file.startswith("<")]
        own = [place for place in real if place[0].startswith(self._roots) and not self._is_library(place[0])]
        near = own or [place for place in real if not self._is_library(place[0])]
        return near[-1] if near else None

    def _is_library(self, file: str) -> bool:
        # Packages may lie below the standard library's folder, and are none of it.
        return file.startswith(self._foreign) or (
            file.startswith(self._standard) and not file.startswith(self._packages)
        )


class Findings:
    """The findings of a trace: one for each rule, place and method, whatever the number of cases and layers.

    Args:
        folder: the recipe's; paths below it are said relative to it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = os.path.realpath(folder)
        self._found: dict[tuple[str, str | None, int | None, str | None], Finding] = {}

    def add(
        self,
        rule: str,
        severity: Severity,
        what: str,
        *,
        place: Place | None,
        method: str | None,
        rewrite: str | None = None,
    ) -> None:
        """Add a finding; the first of those that are one is kept."""
        path, line = (self._said(place[0]), place[1]) if place is not None else (None, None)
        key = (rule, path, line, method)
        if key not in self._found:
            self._found[key] = rule_finding(rule, severity, what, path=path, line=line, rewrite=rewrite, method=method)

    def has(self, *rules: str, method: str) -> bool:
        """Say whether one of the rules is broken in a method."""
        return any(rule in rules and of == method for rule, _, _, of in self._found)

    def stand_at(self, place: Place) -> bool:
        """Say whether there is a finding at a place."""
        where = (self._said(place[0]), place[1])
        return any((path, line) == where for _, path, line, _ in self._found)

    def documents(self) -> list[dict[str, Any]]:
        """Return the findings, by path, line and rule."""
        order = sorted(self._found.values(), key=lambda found: (found.path or "", found.line or 0, found.rule))
        return [found.as_document() for found in order]

    def _said(self, file: str) -> str:
        file = os.path.realpath(file)
        below = file.startswith(f"{self._folder}{os.sep}")
        return os.path.relpath(file, self._folder) if below else file


def _spans(node: ast.stmt, lines: set[int]) -> bool:
    start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    return any(start <= line <= (node.end_lineno or start) for line in lines)


def _stores(node: ast.AST, attribute: str, *, member: bool) -> TypeGuard[ast.stmt]:
    """Say whether a statement binds `….attribute`, or with `member` a place inside of it."""
    if not isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        return False
    targets = list(node.targets if isinstance(node, ast.Assign) else [node.target])
    while targets:
        target = targets.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            targets.extend(target.elts)
            continue
        held = any(isinstance(part, ast.Attribute) and part.attr == attribute for part in ast.walk(target))
        if held and (isinstance(target, ast.Subscript) if member else getattr(target, "attr", None) == attribute):
            return True
    return False


@functools.lru_cache(maxsize=64)
def _file_tree(file: str) -> ast.AST:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


@functools.lru_cache(maxsize=256)
def _tree(code: CodeType) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):
        return ast.Module(body=[], type_ignores=[])


def _library_folders() -> tuple[str, ...]:
    folders = []
    for name in _LIBRARIES:
        # By path: torch_npu keeps a module in sys.modules that imports torchair when it is looked at.
        found = PathFinder.find_spec(name)
        if found is not None and found.origin:
            folders.append(os.path.dirname(found.origin))
    return tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in folders)
