"""Whole files by their code: what a finding about a model as a whole stands on."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachectl.identity.source_files import imported_files, is_unchanged

MODEL = '''"""A model."""


class Head:
    """Has a step."""

    def step(self):
        """Take it."""
        return 1  # One.
'''


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A root with a package of which one module is imported."""
    folder = tmp_path / "root"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "head.py").write_text(MODEL)
    (folder / "inner" / "unused.py").write_text("y = 1\n")
    spec = importlib.util.spec_from_file_location("made_up_head", folder / "inner" / "head.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["made_up_head"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["made_up_head"])
    yield folder
    del sys.modules["made_up_head"]


def test_imported_files_are_those_below_a_root_by_place(root: Path, tmp_path: Path) -> None:
    """What was not imported, what lies elsewhere and the recipe's own folder are left out."""
    roots = {"path:0": root, "recipe": tmp_path}

    assert ["path:0/inner/head.py"] == list(imported_files(roots))
    assert {} == imported_files({"path:0": tmp_path / "other", "recipe": tmp_path})


def test_imported_files_leave_out_an_interpreter_below_the_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment in the project's folder: its packages are thousands of files, and not the model's."""
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(root / "inner")})

    assert {} == imported_files({"path:0": root})
    # A root that lies in there itself is the model's all the same.
    assert ["path:0/head.py"] == list(imported_files({"path:0": root / "inner"}))


@pytest.mark.parametrize(
    ("old", "new", "unchanged"),
    [
        ("# One.", "# The first.", True),
        ('"""Has a step."""', '"""Has one step."""', True),
        ("        return 1", "\n        return  1", True),
        ("return 1", "return 2", False),
        ("    def step(self):", "    def more(self): ...\n\n    def step(self):", False),
        ("class Head:", "class Head(object", False),
    ],
)
def test_is_unchanged_by_code_and_not_by_text(root: Path, old: str, new: str, unchanged: bool) -> None:
    """A new method anywhere counts, a comment doesn't; a file that can't be parsed any more is another one."""
    roots = {"path:0": root}
    noted = imported_files(roots)
    path = root / "inner" / "head.py"
    path.write_text(MODEL.replace(old, new))

    assert unchanged is is_unchanged(noted, roots)


def test_is_unchanged_not_for_a_file_that_is_gone_or_a_root_that_is_unknown(root: Path) -> None:
    """Nobody knows then."""
    noted = imported_files({"path:0": root})

    assert not is_unchanged(noted, {"path:1": root})
    (root / "inner" / "head.py").unlink()
    assert not is_unchanged(noted, {"path:0": root})
    assert is_unchanged({}, {})
