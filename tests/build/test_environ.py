"""The watch of os.environ: every way in which model code asks for a name, and none of the others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cachectl.build.environ import EnvironmentWatch
from cachectl.build.environ_copies import goes_to_child
from cachectl.identity.environment import EVERY_NAME


def names_read(tmp_path: Path, text: str) -> set[str]:
    """Return the names that code in a model's file is seen to read."""
    code = compile(f"import os, shutil, tempfile\n{text}", str(tmp_path / "model.py"), "exec")
    watch = EnvironmentWatch()
    with watch.watching():
        exec(code, {"__name__": "model"})
    return watch.names


@pytest.mark.parametrize(
    "text",
    [
        "os.environ.get('NAME')",
        "os.environ.get('NAME', '1')",
        "'NAME' in os.environ",
        "os.getenv('NAME')",
        "float(os.getenv('NAME', '1') or 0)",
        "os.environ.setdefault('NAME', '')",
        "os.environ.pop('NAME', None)",
        "os.environb.get(b'NAME')",
        "os.getenvb(b'NAME')",
        "try:\n    os.environ['NAME']\nexcept KeyError:\n    pass",
        "from os import environ\nenviron.get('NAME')",
        "(lambda: [os.getenv(name) for name in ('NAME',)])()",
        "list(map(os.environ.get, ['NAME']))",
        "'NAME' in os.environ.keys()",
    ],
)
@pytest.mark.parametrize("value", [None, "", "2"], ids=["unset", "empty", "set"])
def test_watch_sees_each_way_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, value: str | None
) -> None:
    """A name counts whether it is found or not: absence shapes a graph as well."""
    monkeypatch.delenv("NAME", raising=False)
    if value is not None:
        monkeypatch.setenv("NAME", value)

    assert {"NAME"} == names_read(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "os.environ.copy()",
        "repr(os.environ)",
        "tempfile.gettempdir()",
        "os.path.expanduser('~')",
        "shutil.which('sh')",
        "os.environ['NEW'] = '1'",
    ],
)
def test_watch_overlooks_what_asks_for_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Copies for a child process, writes, and what the standard library reads are no reads of model code."""
    monkeypatch.setenv("NEW", "0")

    assert set() == names_read(tmp_path, text)


def test_watch_ends_with_its_block(tmp_path: Path) -> None:
    """os.environ is what it was before."""
    before = type(os.environ).__getitem__, type(os.environ).__iter__
    names_read(tmp_path, "os.getenv('NAME')")

    assert before == (type(os.environ).__getitem__, type(os.environ).__iter__)


def test_watch_ends_with_its_block_whatever_happens(tmp_path: Path) -> None:
    """An exception in model code leaves os.environ as it was."""
    before = type(os.environ).__getitem__, type(os.environ).__iter__

    with pytest.raises(ZeroDivisionError):
        names_read(tmp_path, "1 / 0")

    assert before == (type(os.environ).__getitem__, type(os.environ).__iter__)


def test_watch_outside_its_block_sees_nothing() -> None:
    """Reads before and after do not count."""
    watch = EnvironmentWatch()
    with watch.watching():
        pass
    os.environ.get("NAME")

    assert set() == watch.names


def test_watch_lets_a_child_start_with_a_changed_copy(tmp_path: Path) -> None:
    """A model that starts a process: the child has the copy, and no name is read for it."""
    text = (
        "import subprocess, sys\n"
        "out = subprocess.run([sys.executable, '-c', 'import os; print(os.environ[\"NAME\"])'],\n"
        "    env=dict(os.environ, NAME='3'), capture_output=True, text=True, check=True).stdout\n"
        "assert out == '3\\n'"
    )

    (tmp_path / "model.py").write_text(f"import os, shutil, tempfile\n{text}")
    assert set() == names_read(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "dict(os.environ)['NAME']",
        "{**os.environ}",
        "{name: value for name, value in os.environ.items() if name.startswith('NA')}",
        "for name in os.environ:\n    pass",
        "list(os.environ)",
        "os.environ | {}",
        "sorted(os.environ.keys())",
        "list(os.environ.copy().items())",
        "dict(os.environ.copy())",
        "os.environ.copy() | {}",
        "len([*os.environ.values()])",
        "env = dict(os.environ)",
        "def f():\n    env = dict(os.environ)\n    return env.get('NAME')\nf()",
        "def f():\n    env = dict(os.environ)\n    return env\nf()",
        "def f(env):\n    return env\nf(env=dict(os.environ))",
        "import collections\ncollections.ChainMap(dict(os.environ))",
    ],
)
def test_watch_counts_a_walk_as_a_read_of_every_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """A plain copy tells nobody what is looked up in it, so it stands for all names."""
    monkeypatch.setenv("NAME", "0")
    (tmp_path / "model.py").write_text(f"import os, shutil, tempfile\n{text}")

    assert EVERY_NAME in names_read(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "env = os.environ.copy()\nenv['OTHER'] = '1'\nenv.get('NAME')",
        "'NAME' in os.environ.copy()",
        "os.environ.copy()['NAME']",
        "os.environ.copy().setdefault('NAME', '1')",
        "os.environ.copy().pop('NAME', None)",
        "os.path.expandvars('$NAME/x')",
        "os.path.expandvars('${NAME}')",
        "import string\nstring.Template('$NAME').substitute(os.environ)",
        "import collections\ncollections.ChainMap(os.environ, {})['NAME']",
        "import collections\ncollections.ChainMap(os.environ.copy(), {})['NAME']",
        "'{NAME}'.format_map(os.environ)",
        "exec('os.getenv(\"NAME\")', {'os': os, '__name__': 'model'})",
        "exec('os.getenv(\"NAME\")', {'os': os})",
        (
            "import dataclasses\nD = dataclasses.make_dataclass('D', [('x', str, dataclasses.field("
            "default_factory=lambda: os.getenv('NAME')))])\nD()"
        ),
    ],
)
def test_watch_sees_names_through_what_passes_them_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """A watched copy, the standard library's own functions and executed text hide nothing."""
    monkeypatch.setenv("NAME", "0")

    assert {"NAME"} == names_read(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "os.environ.copy()",
        "repr(os.environ)",
        "import subprocess\nsubprocess.run(['true'], env=dict(os.environ, X='1'), check=True)",
        "import subprocess\nsubprocess.run(['true'], env={**os.environ, 'X': '1'}, check=True)",
        "import subprocess\nsubprocess.run(['true'], env=os.environ.copy(), check=True)",
        "from subprocess import check_output\ncheck_output(['true'], env={**os.environ})",
        (
            "import subprocess\ndef f():\n    env = dict(os.environ)\n    env['X'] = '1'\n    env.update(Y='2')\n"
            "    env.pop('Z', None)\n    del env['X']\n    subprocess.run(['true'], env=env, check=True)\nf()"
        ),
        "import pickle\npickle.loads(pickle.dumps(os.environ.copy()))",
    ],
)
def test_watch_lets_copies_for_a_child_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A copy that plainly goes to a child process asks for no name."""
    monkeypatch.setenv("NEW", "0")
    (tmp_path / "model.py").write_text(f"import os, shutil, tempfile\n{text}")

    assert set() == names_read(tmp_path, text)


def test_copies_whose_source_is_not_there_count_whole(tmp_path: Path) -> None:
    """What can't be read may look up anything."""
    assert {EVERY_NAME} == names_read(tmp_path, "dict(os.environ)")
    (tmp_path / "model.py").write_text("import os, shutil, tempfile\n(")
    assert not goes_to_child(compile("1", str(tmp_path / "model.py"), "exec"), 1)
    (tmp_path / "other.py").write_text("x = 1\n")
    assert not goes_to_child(compile("1", str(tmp_path / "other.py"), "exec"), 1)
    assert not goes_to_child(compile("1", str(tmp_path / "other.py"), "exec"), 7)


def test_watched_copy_is_plain_to_others(tmp_path: Path) -> None:
    """Known code, as torch's own, gets the plain dict."""
    held: dict[str, Any] = {"os": os, "__name__": "torch.part"}
    watch = EnvironmentWatch()
    with watch.watching():
        exec(compile("plain = os.environ.copy()", "<string>", "exec"), held)

    assert type(held["plain"]) is dict
    assert set() == watch.names
