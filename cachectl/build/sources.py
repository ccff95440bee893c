"""Records the code that Dynamo traces in a rank process.

Owns the wrapping of Dynamo's instruction translators (a private API, found by its features); the key part `sources` is
made of it in cachectl/build/source_document.py. torch must be importable; nothing here imports it before a recorder is
entered.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any

from cachectl.build.kept_fault import KeptFault
from cachectl.build.source_document import TracedCode, sources_document
from cachectl.build.untraced import UntracedRecorder
from cachectl.errors import BuildError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SourceRecorder"]

_WANTED_PARAMETERS = ("f_code", "f_globals", "f_locals", "symbolic_locals")


class SourceRecorder:
    """Collects every code object that Dynamo traces while it is entered: root frames and all that they inline.

    Frames compiled before, and found again in Dynamo's cache, are not traced and so not seen: call
    `torch._dynamo.reset()` first where that can be. Entering twice at once records into both.

    Raises:
        BuildError: on entering, when this torch's Dynamo can't be recorded.
    """

    def __init__(self) -> None:
        # Equal code may stand in two modules, and then reads the globals of each.
        self._traced: dict[tuple[str, str, CodeType], TracedCode] = {}
        self._translator: Any = None
        self._original: Any = None
        self._fault = KeptFault()
        self._untraced = UntracedRecorder()

    def __enter__(self) -> Self:
        self._translator = _translator()
        self._original = original = self._translator.__init__

        def recorded(translator: Any, *args: Any, **kwargs: Any) -> None:
            original(translator, *args, **kwargs)
            with self._fault.kept():
                self._record(translator)

        self._untraced.__enter__()
        self._translator.__init__ = recorded
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._translator.__init__ = self._original
        self._untraced.__exit__(kind, error, traceback)

    def codes(self) -> list[CodeType]:
        """Return the traced code objects in the order in which Dynamo came to them, torch's own among them."""
        return [traced.code for traced in self._traced.values()]

    def document(
        self,
        roots: Mapping[str, Path],
        extra_modules: Sequence[str] = (),
        extra_files: Iterable[Path] = (),
        *,
        asked: Sequence[str] = (),
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the key part `sources` and the raw table beside it.

        Args:
            roots: folder by root name, "path:<n>" and "recipe"; a file belongs to the deepest that holds it.
            extra_modules: "module:qualname" is treated as if Dynamo had traced that function, "module" alone counts
                whole.
            extra_files: what else shapes the graph (the recipe's `sources`); each counts whole and lies under a root.
            asked: "module:qualname" of what the recipe names (the model factory, say); it counts in the same way, and a
                program need not have imported it.

        Raises:
            BuildError: traced code has no source file, lies outside of all roots and packages, or is not what its
                file says; or an extra module or file can't be found.
            Exception: what recording a frame raised.
        """
        self._fault.raise_kept()
        return sources_document(
            list(self._traced.values()), roots, extra_modules, extra_files, self._untraced.functions(), asked
        )

    def _record(self, translator: Any) -> None:
        code: CodeType = translator.f_code
        name = str(translator.f_globals.get("__name__", ""))
        traced = self._traced.setdefault((name, code.co_filename, code), TracedCode(code, name))
        if code.co_argcount:
            first = code.co_varnames[0]
            kind = _type_of(translator.symbolic_locals.get(first), translator.f_locals.get(first))
            if kind is not None:
                traced.types.add(kind)


def _translator() -> Any:
    try:
        convert = importlib.import_module("torch._dynamo.symbolic_convert")
    except ImportError as error:
        raise BuildError(f"Dynamo can't be imported: {error}", hint="install torch where the ranks run") from error
    translator = getattr(convert, "InstructionTranslatorBase", None)
    # The constructor through the class's dictionary: what is inherited would not be ours to replace.
    constructor = vars(translator).get("__init__") if isinstance(translator, type) else None
    parameters = inspect.signature(constructor).parameters if constructor is not None else {}
    missing = [name for name in _WANTED_PARAMETERS if name not in parameters]
    if missing:
        version = getattr(sys.modules.get("torch"), "__version__", "unknown")
        raise BuildError(
            f"Dynamo of torch {version} has no InstructionTranslatorBase with {', '.join(missing)}: what it traces "
            "can't be recorded",
            hint="use a torch that this cachectl knows, or a newer cachectl",
        )
    return translator


def _type_of(variable: Any, value: Any) -> type | None:
    """Return the class of a traced function's first argument, from what Dynamo already knows of it.

    Only instance dictionaries are read: Dynamo's properties evaluate, raise, or realise a lazy variable, which installs
    guards, and recording must leave the compilation as it would have been.
    """
    held = getattr(variable, "__dict__", {})
    lazy = held.get("_cache")
    value = held.get("value", value) if lazy is None else getattr(lazy, "__dict__", {}).get("value", value)
    if value is None:
        return None
    return value if isinstance(value, type) else type(value)
