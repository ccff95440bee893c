"""Audit on a cache that the real runtime made, whole and broken in each known way: what it foretells happens."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import Program, lay_program

pytestmark = [pytest.mark.real, pytest.mark.slow]

# The runtime's own start, over folders that the test names: its decision to load or to remove, and nothing compiled.
# Only the path is put in its hands: it is an md5 over the model's repr, and one model has to start over many folders.
START = """
import json, os, sys
import torch, torch_npu, yaml
from npugraph_ex.inference import _cache_compiler as runtime
from tiny_decoder.model import build

model = build(**yaml.safe_load(open("recipe.yaml"))["model"]["config"])
said = {}
for path in json.load(sys.stdin):
    runtime.CompiledModel.get_cache_bin = staticmethod(lambda *args, path=path, **named: os.path.realpath(path))
    started = runtime.LazyCompiledModel(model.main_decode, dynamic=False).compile({})
    said[path] = "compiles" if isinstance(started, runtime.ModelCacheSaver) else "loads"
print("SAID " + json.dumps(said))
"""


def whole(path: Path) -> None:
    """Leave it as the runtime saved it."""


def emptied(path: Path) -> None:
    """A writer that was killed between opening and writing."""
    path.write_bytes(b"")
    path.chmod(0o600)


def cut(path: Path) -> None:
    """A writer that was killed, or a full disk."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def cut_by_one(path: Path) -> None:
    """A transfer that lost its last byte."""
    path.write_bytes(path.read_bytes()[:-1])


def replaced(path: Path) -> None:
    """A download's error page."""
    path.write_bytes(b"<html>403</html>\n")


def readable_by_all(path: Path) -> None:
    """An image's COPY, tar without -p, kubectl cp."""
    path.chmod(0o644)


def older_format(path: Path) -> None:
    """A wheel of before an upgrade."""
    data = path.read_bytes()
    assert 1 == data.count(b"1.0.6")
    path.write_bytes(data.replace(b"1.0.6", b"1.0.5"))


def linked(path: Path) -> None:
    """A link into a folder that others share; it loads, and what it leads to is at risk."""
    shared = path.parents[5] / path.parents[3].name
    shutil.copytree(path.parent, shared)
    path.unlink()
    path.symlink_to(shared / path.name)


def linked_and_cut(path: Path) -> None:
    """The same with an artifact that can't be loaded: what goes is the shared folder."""
    linked(path)
    cut(path.resolve())


def gone(path: Path) -> None:
    """A folder that lost its artifact."""
    path.unlink()


# Each way with what audit says of it: kinds, and whether the runtime removes the folder.
WAYS: list[tuple[Callable[[Path], None], list[str], bool]] = [
    (whole, [], False),
    (emptied, ["empty"], True),
    (cut, ["truncated"], True),
    (cut_by_one, ["truncated"], True),
    (replaced, ["truncated"], True),
    (readable_by_all, ["wrong-mode"], True),
    (older_format, ["other-format"], True),
    (linked, ["symlink"], False),
    (linked_and_cut, ["symlink", "truncated"], True),
    (gone, ["missing-artifact"], False),
]


def run_audit(program: Program, directory: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Return exit code and document of `cachectl audit --json`."""
    done = program.cachectl("audit", str(directory), "--json", *options)
    assert "" == done.stderr
    return done.returncode, json.loads(done.stdout)


def copy_cache(plain_cache: Path, to: Path) -> Path:
    """Copy the cache, modes and all; return its artifact."""
    shutil.copytree(plain_cache, to)
    (artifact,) = to.rglob("compiled_module")
    return artifact


@pytest.fixture
def other(tmp_path: Path) -> Program:
    """A program in a folder of its own, without a store."""
    return lay_program(tmp_path / "own" / "tiny-decoder", tmp_path / "store")


def test_audit_of_the_runtimes_own_cache_is_complete_and_leaves_it_alone(plain_cache: Path, other: Program) -> None:
    """Method, inputs, options and operators of an untouched cache, exit 0, no store, and not a file changed."""

    def everything() -> list[tuple[str, int, int, int]]:
        paths = [plain_cache, *sorted(plain_cache.rglob("*"))]
        return [(str(path), path.stat().st_mode, path.stat().st_mtime_ns, path.stat().st_size) for path in paths]

    before = everything()
    code, report = run_audit(other, plain_cache)

    assert (0, []) == (code, report["findings"])
    (artifact,) = report["artifacts"]
    assert ("main_decode", "good", False) == (artifact["method"], artifact["state"], artifact["dynamic"])
    content = artifact["content"]
    assert ("npugraph_ex", True) == (content["runtime"], content["python"]["magic_ok"])
    assert "True" == content["options"]["frozen_parameter"]
    assert content["inputs"]
    assert content["graph_ops"]
    assert before == everything()
    assert not other.store.exists()


def test_audit_foretells_what_the_runtimes_next_start_removes(
    plain_cache: Path, other: Program, tmp_path: Path
) -> None:
    """Every known way of breaking a cache: said to be deleted if, and only if, the runtime itself deletes it."""
    paths = {}
    for way, _, _ in WAYS:
        paths[way.__name__] = copy_cache(plain_cache, tmp_path / "ways" / way.__name__ / "cache")
        way(paths[way.__name__])
    folders = {way: path.resolve().parent for way, path in paths.items()}

    code, report = run_audit(other, tmp_path / "ways")

    assert 1 == code
    for way, kinds, removed in WAYS:
        told = [found for found in report["findings"] if found["path"].startswith(f"{way.__name__}/")]
        assert kinds == [found["kind"] for found in told], way.__name__
        effects = [found["effect"] for found in told if found["kind"] != "symlink"]
        assert removed == ("deleted" in effects), way.__name__

    (other.folder / "start.py").write_text(START)
    (other.folder / "paths.json").write_text(json.dumps([str(path) for path in paths.values()]))
    command = ["sh", "-c", f"exec {sys.executable} start.py < paths.json"]
    done = other.cachectl("simulate", "--", *command, environ={"TASK_QUEUE_ENABLE": "1"})
    assert 0 == done.returncode, done.stderr
    said = json.loads(done.stdout.partition("SAID ")[2])

    for way, kinds, removed in WAYS:
        assert removed == (not folders[way.__name__].is_dir()), way.__name__
        loads = kinds in ([], ["symlink"])
        assert ("loads" if loads else "compiles") == said[str(paths[way.__name__])], way.__name__


def test_audit_of_worlds_dates_and_leftovers_made_of_a_real_artifact(
    plain_cache: Path, other: Program, tmp_path: Path
) -> None:
    """A rank too few, yesterday's directory and a second md5 for one method: named, with their bytes."""
    (graph,) = plain_cache.iterdir()
    size = sum(path.stat().st_size for path in graph.rglob("*") if path.is_file())
    root = tmp_path / "compile_cache"
    today, yesterday = root / "20260902", root / "20260901"
    for rank in (0, 1, 2):
        shutil.copytree(graph / "main_decode", today / graph.name / f"world4global_rank{rank}" / "main_decode")
    shutil.copytree(graph, yesterday / graph.name)
    shutil.copytree(graph, tmp_path / "two" / graph.name)
    shutil.copytree(graph, tmp_path / "two" / f"{graph.name[:-32]}{'0' * 32}")
    # Of two of one second nobody knows which is left behind: this one says that it is of another year.
    (module,) = (tmp_path / "two" / graph.name).rglob("compiled_module")
    older, dates = re.subn(rb"20\d\d(-\d\d-\d\d)", rb"2020\1", module.read_bytes())
    module.write_bytes(older)

    dated, twice = run_audit(other, root)[1], run_audit(other, tmp_path / "two")[1]

    assert 1 == dates
    assert {"missing-rank", "dated-cache", "orphan"} == {found["kind"] for found in dated["findings"]}
    assert (size, 4 * size) == (dated["orphaned_bytes"], dated["size_bytes"])
    assert ["orphan"] == [found["kind"] for found in twice["findings"]]
    assert size == twice["orphaned_bytes"]


def test_audit_as_another_user_and_another_python(plain_cache: Path, other: Program) -> None:
    """--uid and --python say who will start; the cache of this user is of no use to them."""
    code, report = run_audit(other, plain_cache, "--uid", str(os.getuid() + 1), "--python", "3.9")

    assert 1 == code
    assert {"wrong-owner", "foreign-bytecode"} == {found["kind"] for found in report["findings"]} - {"not-writable"}


def test_audit_imports_no_torch(plain_cache: Path, other: Program) -> None:
    """Nothing of the artifact runs, and neither torch nor torch_npu is imported; people get a text."""
    done = other.cachectl("audit", str(plain_cache), environ={"PYTHONPROFILEIMPORTTIME": "1"})

    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert 0 == done.returncode
    assert "cachectl.services.audit" in imported
    assert not {name for name in imported if name.partition(".")[0] in ("torch", "torch_npu", "npugraph_ex")}
    assert "main_decode" in done.stdout
