"""Loaded code behind rare wrappers, and modules whose files or specs are gone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cachectl.identity.source_digest import code_digest
from cachectl.identity.sources import changed_bytes, live_class_names, live_code, package_folders
from tests.stores import raw_sources, source_document


def bare(x: int) -> int:
    return x + 1


def other(x: int) -> int:
    return x + 2


def silent(function: Callable[..., Any], note: str) -> Callable[..., Any]:
    def wrapper(x: int) -> Any:
        return function(x), note, later

    if note == "bind":
        later = 1
    return wrapper


def module(**members: Any) -> ModuleType:
    """Return a module as a program would have it loaded, with these members."""
    found = ModuleType("loaded")
    vars(found).update(members)
    return found


@pytest.mark.parametrize(
    "wrapped",
    [
        functools.partial(bare, 1),
        functools.cached_property(bare),
        functools.lru_cache(bare),
        staticmethod(bare),
        property(bare),
    ],
)
def test_live_code_of_a_wrapped_function_is_the_function_s(wrapped: object) -> None:
    """What a wrapper holds is what runs: a patched one shows."""
    assert [code_digest(bare.__code__)] == live_code(module(f=wrapped), "f")


def test_live_code_of_a_function_that_wraps_itself_ends() -> None:
    """A circle of wrappers counts each once."""

    def circle(x: int) -> int:
        return x

    circle.__wrapped__ = circle  # type: ignore[attr-defined]

    assert [code_digest(circle.__code__)] == live_code(module(circle=circle), "circle")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="CPython 3.10 has no co_qualname to tell a wrapper by")
def test_live_code_of_a_decorator_without_wraps_is_in_its_closure() -> None:
    """A cell that is not bound yet and one that holds no function are passed over."""
    found = [live_code(module(f=silent(function, "free")), "f") for function in (bare, other)]

    assert found[0] is not None
    assert code_digest(bare.__code__) == found[0][1]
    assert found[0] != found[1]


def test_live_class_names_of_no_class_is_none() -> None:
    """A class that was replaced by a function has no members to compare."""
    assert live_class_names(module(Model=bare), "Model", frozenset({"run"})) is None


def test_package_folders_of_a_module_without_a_spec_are_looked_up_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a program put into sys.modules by hand does not hide the file of that name."""
    (tmp_path / "by_hand.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert [tmp_path] == package_folders("by_hand")
    monkeypatch.setitem(sys.modules, "by_hand", ModuleType("by_hand"))
    assert [tmp_path] == package_folders("by_hand")


def test_changed_bytes_names_edited_files_only(tmp_path: Path) -> None:
    """A file below a root that nobody gave is for the check itself to name."""
    source = tmp_path / "decoder.py"
    source.write_text("SCALE = 2\n\n\ndef main_decode(x):\n    return x * SCALE\n")
    document, raw = source_document(source), raw_sources(source)
    roots = {"path:0": tmp_path}

    assert [] == changed_bytes(document, raw, roots)
    source.write_text(source.read_text() + "# later\n")
    (reason,) = changed_bytes(document, raw, roots)
    assert ("decoder.py", "noise") == (reason.name, reason.kind)
    assert [] == changed_bytes(document, raw, {})
    source.unlink()
    assert [] == changed_bytes(document, raw, roots)
