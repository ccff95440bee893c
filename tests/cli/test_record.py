"""`cachectl record`: CMD is CMD's own, and what came of it is said; the runtimes here are made up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import LONG_S, Run

# Leaves the notes that a process leaves which has compiled and called one method.
COMPILES = """\
import os, sys
from cachectl.build.watching_notes import process_notes

class Decoder:
    def main_decode(self, x):
        return x

notes = process_notes()
how = {"how": "cache_compile", "runtime": "npugraph_ex", "dynamic": False, "options": {}}
if notes is not None:
    note = notes.method(Decoder().main_decode, how)
    notes.called(note, {"spec": {"L['x']": {"value": 1}}, "at": 1.0, "grad": False}, None)
print("out", *sys.argv[1:], flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a program."""
    made = tmp_path / "program"
    made.mkdir()
    (made / "serve.py").write_text(COMPILES)
    return made


def test_record_writes_the_recipe_and_leaves_stdout_to_cmd(cachectl: Run, folder: Path) -> None:
    """stdout is CMD's; file, methods and the next command stand on stderr."""
    done = cachectl("record", "--", sys.executable, "serve.py", "0", "x", cwd=folder)

    assert (0, "out 0 x\n") == (done.returncode, done.stdout), done.stderr
    assert done.stderr.endswith("serve.recipe.yaml: main_decode; run: cachectl build serve.recipe.yaml\n")
    assert "command: [python, serve.py, '0', x]" in (folder / "serve.recipe.yaml").read_text()


@pytest.mark.parametrize("code", [0, 3])
def test_record_json_is_one_document(cachectl: Run, folder: Path, code: int) -> None:
    """With --json stdout has the document alone, and CMD's words go to stderr; the exit code is CMD's."""
    words = ("--json", "-o", "x.yaml", "--name", "other", "--", sys.executable, "serve.py", str(code))

    done = cachectl("record", *words, cwd=folder)

    document = json.loads(done.stdout)
    assert (code, str(folder / "x.yaml"), ["main_decode"]) == (
        done.returncode,
        document["recipe"],
        document["methods"],
    )
    assert code == sum("exit code 3" in warning for warning in document["warnings"]) * 3
    assert f"out {code}\n" in done.stderr
    assert "name: other\n" in (folder / "x.yaml").read_text()


def test_record_shell_script_is_followed_to_its_python(cachectl: Run, folder: Path) -> None:
    """CMD is no Python; the recipe names the script of the process that compiled."""
    (folder / "run.sh").write_text(f"cd inner && {sys.executable} ../serve.py 0\n")
    (folder / "inner").mkdir()

    done = cachectl("record", "--json", "--", "sh", "run.sh", cwd=folder)

    recipe = Path(json.loads(done.stdout)["recipe"])
    assert folder / "serve.recipe.yaml" == recipe
    text = recipe.read_text()
    assert "command: [python, ../serve.py, '0']" in text
    assert "folder: inner\n" in text


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("true",), 1, "no Python process of CMD obeyed PYTHONPATH"),
        ((sys.executable, "-c", "1"), 1, "no Python process that was reached imported torch"),
        ((sys.executable, "-I", "-c", "1"), 1, "python -I"),
        (("sh", "-c", "exit 7"), 7, ""),
        (("sh", "-c", "kill -TERM $$"), 143, ""),
        (("no-such-command",), 127, "command not found"),
    ],
)
def test_record_nothing_compiled_says_what_was_seen(
    cachectl: Run, words: tuple[str, ...], code: int, said: str
) -> None:
    """1 where CMD ended well, else CMD's own code; no file, and what kept record from seeing anything."""
    done = cachectl("record", "-o", "x.yaml", "--", *words)

    assert code == done.returncode
    assert said in done.stderr
    assert "nothing was compiled that a recipe can say" in done.stderr


def test_record_existing_file_is_refused_before_cmd_runs(cachectl: Run, folder: Path) -> None:
    """Exit code 2, CMD did not run, the file is as it was."""
    (folder / "serve.recipe.yaml").write_text("mine")

    done = cachectl("record", "--", sys.executable, "serve.py", "0", cwd=folder)

    assert (2, "", "mine") == (done.returncode, done.stdout, (folder / "serve.recipe.yaml").read_text())
    assert "--force" in done.stderr


def test_record_disabled_runs_cmd_only(cachectl: Run, folder: Path) -> None:
    """CACHECTL_DISABLE=1: no start-up module, no file."""
    show = "import os; print(os.environ.get('CACHECTL_RECORD'))"

    done = cachectl("record", "--", sys.executable, "-c", show, environ={"CACHECTL_DISABLE": "1"}, cwd=folder)

    assert (0, "None\n", ["serve.py"]) == (done.returncode, done.stdout, os.listdir(folder))


def test_record_options_behind_cmd_are_cmds(cachectl: Run, folder: Path) -> None:
    """What looks like an option of ours stands behind CMD."""
    done = cachectl("record", "--", sys.executable, "serve.py", "0", "--json", "-o", cwd=folder)

    assert (0, "out 0 --json -o\n") == (done.returncode, done.stdout)


def test_record_forwards_signals(folder: Path) -> None:
    """SIGTERM reaches CMD, whose answer is the exit code, and what it had compiled is written."""
    # Not one long sleep: a signal between Python's last look and the system call is answered when the sleep is over.
    script = COMPILES.replace("sys.exit(int(sys.argv[1]))", "import time\nwhile True:\n    time.sleep(0.01)")
    (folder / "serve.py").write_text("import signal, sys\nsignal.signal(15, lambda *_: sys.exit(9))\n" + script)
    words = [sys.executable, "-m", "cachectl", "record", "--", sys.executable, "serve.py", "0"]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert "out 0\n" == child.stdout.readline()
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=LONG_S)

    assert 9 == child.returncode, err
    assert (folder / "serve.recipe.yaml").is_file()


# A runtime and a torch as far as the watching looks at them.
TORCH = """\
class Tensor: ...
class _Nn:
    class Module: ...
    Parameter = Tensor
nn = _Nn
class _Compiler:
    @staticmethod
    def is_compiling(): return False
compiler = _Compiler
class _Distributed:
    @staticmethod
    def is_available(): return False
distributed = _Distributed
class _Npu:
    npugraph_ex = None
npu = _Npu
__version__ = "2.13.0"
def is_grad_enabled(): return False
def compile(model=None, **kwargs): return model
"""
RUNTIME = """\
def cache_compile(func, *, config=None, dynamic=True, cache_dir=None, **kwargs):
    class Compiled:
        made_for = func.__name__
        def __call__(self, *args, **kwargs):
            return func(*args, **kwargs)
    return Compiled()
"""
PROGRAM = """\
import sys, torch
from npugraph_ex.inference import cache_compile

class Model(torch.nn.Module):
    def main_decode(self, n, lengths=(), *rest):
        return n + 1

model = Model()
decode = cache_compile(model.main_decode, dynamic=sys.argv[1] == "dynamic", cache_dir="mine")
said = [decode(1), decode(2), decode(n=2), decode(1), decode(3, lengths=[1, 2]), decode.made_for]
try:
    decode()
except TypeError:
    said.append("TypeError")
for n in range(4, 40 if sys.argv[1] == "many" else 4):
    decode(n)
torch.compile(model.main_decode, backend="inductor")
torch.compile(len)
torch.compile()
print(said)
"""
FORKED = """\
    class Model(torch.nn.Module):
        def main_decode(self, n):
            return n
    npugraph_ex.inference.cache_compile(Model().main_decode)(1)
    os._exit(0)
"""


@pytest.fixture
def watched(cachectl: Run, folder: Path) -> Callable[..., dict[str, Any]]:
    """Run a program on the made-up runtime under record; return the document."""
    (folder / "npugraph_ex" / "inference").mkdir(parents=True)
    (folder / "npugraph_ex" / "__init__.py").touch()
    (folder / "npugraph_ex" / "inference" / "__init__.py").write_text(RUNTIME)
    (folder / "torch.py").write_text(TORCH)
    (folder / "torch_npu.py").write_text("__version__ = '2.13.0'\n")
    (folder / "own.py").write_text(PROGRAM)

    def run(*words: str) -> dict[str, Any]:
        done = cachectl("record", "--json", "--", sys.executable, "own.py", *words, cwd=folder)
        assert "[2, 3, 3, 2, 4, 'main_decode', 'TypeError']" in done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return {**document, "code": done.returncode, "text": (folder / "own.recipe.yaml").read_text()}

    return run


@pytest.mark.parametrize(("mode", "cases"), [("static", 3), ("dynamic", 2), ("many", 16)])
def test_record_counts_the_kinds_of_calls(watched: Callable[..., dict[str, Any]], mode: str, cases: int) -> None:
    """Static: another number is another kind. Dynamic: only another structure is. What the program sees is the same."""
    document = watched(mode)

    assert (0, ["main_decode"]) == (document["code"], document["methods"])
    assert cases == document["text"].count("- {name: call")
    assert ("each compiled anew" in " ".join(document["warnings"])) == (mode == "many")
    assert "backend inductor" in " ".join(document["warnings"])


def test_record_forked_process_is_told(cachectl: Run, watched: Callable[..., dict[str, Any]], folder: Path) -> None:
    """A child that was forked after torch was imported compiles: no recipe can start it, and that is said."""
    (folder / "own.py").write_text(
        "import os, torch, npugraph_ex.inference\nif not os.fork():\n" + FORKED + "os.wait()\n"
    )

    done = cachectl("record", "--", sys.executable, "own.py", cwd=folder)

    assert 1 == done.returncode
    assert "multiprocessing or a fork has started" in done.stderr


def test_record_watching_costs_little(cachectl: Run, watched: Callable[..., dict[str, Any]], folder: Path) -> None:
    """A call of a known kind costs far less than a step: some hundred Python calls, counted and not timed."""
    with (folder / "own.py").open("a") as file:
        file.write(COUNTED)

    done = cachectl("record", "--json", "--", sys.executable, "own.py", "static", cwd=folder)

    said = [line.split() for line in done.stderr.splitlines() if line.startswith("counted ")]
    (plain, known) = (int(word) for word in said[0][1:])
    assert (0, True) == (done.returncode, plain > 0), done.stderr
    assert plain < known < 300, known


# What a call of the method itself comes to, and one through what watches it.
COUNTED = """
def count(call, *words):
    seen = []
    sys.setprofile(lambda frame, event, _: seen.append(event) if event in ("call", "c_call") else None)
    call(*words)
    sys.setprofile(None)
    return len(seen)
decode(1)
print("counted", count(model.main_decode, 1), count(decode, 1))
"""
