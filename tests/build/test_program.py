"""The names in a recipe made live objects: what is wrong with them is said with what to write instead.

Needs torch alone but for the last test; the whole way, with exit codes, is in tests/end_to_end/test_bad_input.py.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch

from cachectl.build.job import CaseJob, EventLog, Job
from cachectl.build.program import RankProgram
from cachectl.errors import ConfigError
from cachectl.runtimes.simulated import environment


class Model(torch.nn.Module):
    """A model with methods that can and that can't be cached."""

    def decode(self, x: Any, *, n: int = 1) -> Any:
        return x

    @functools.lru_cache(maxsize=1)  # noqa: B019 - what the test is about
    def cached(self, x: Any) -> Any:
        return x

    @staticmethod
    def static(x: Any) -> Any:
        return x

    def _decorated(self, x: Any) -> Any:
        return x

    @functools.wraps(_decorated)
    def decorated(self, x: Any) -> Any:
        return x


Make = Callable[..., RankProgram]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a maker of programs whose recipe names functions of a module that is written here."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def build(module: str = "", **model: Any) -> RankProgram:
        (tmp_path / "own_model.py").write_text(module)
        sys.modules.pop("own_model", None)
        recipe = {
            "model": {"factory": "own_model:build", "config": {}, "path": ["."], "sources": [], **model},
            "compile": {"dynamic": False, "options": {}, "setup": None, "dynamo": {}},
            "gates": {"rtol": 1e-3, "atol": 1e-3},
        }
        events = EventLog(tmp_path / "rank0")
        program = RankProgram(Job(recipe, tmp_path, tmp_path, {}, (), 1), 0, events)
        events.close()
        program.model = Model()
        return program

    return build


def case(method: str = "decode", **args: Any) -> CaseJob:
    """Return a case of a method."""
    return CaseJob(0, method, {"name": "b4", "inputs": "own_model:inputs", "args": args})


def test_method_of_the_model_is_the_bound_method(make: Make) -> None:
    """What the runtime can cache."""
    program = make()

    assert program.model.decode == program.method(case())


@pytest.mark.parametrize("owners", [["a", "b"], {"decode": "somebody"}])
def test_models_own_attribute_owners_says_nothing_of_its_methods(make: Make, owners: object) -> None:
    """Only what stands for a program that compiles by itself has methods of other modules."""
    program = make()
    program.model.owners = owners  # type: ignore[assignment]

    assert program.model.decode == program.method(case())


@pytest.mark.parametrize(
    ("method", "words", "hint"),
    [
        ("decod", "Model has no method 'decod'", "it has: "),
        ("static", "'static' of Model is a function, no method", "undecorated"),
        ("cached", "'cached' of Model is decorated", "undecorated"),
        ("decorated", "'decorated' of Model is decorated", "undecorated"),
        ("training", "'training' of Model is a bool, no method", "undecorated"),
    ],
)
def test_method_that_can_not_be_cached_is_refused(make: Make, method: str, words: str, hint: str) -> None:
    """Misspelled, static, decorated, no method at all."""
    with pytest.raises(ConfigError) as raised:
        make().method(case(method))

    assert words in raised.value.message
    assert hint in str(raised.value.hint)


def test_inputs_are_called_with_model_rank_and_args(make: Make) -> None:
    """And give what the method takes."""
    program = make("def inputs(model, rank, batch):\n    return {'x': [type(model).__name__, rank, batch]}\n")

    assert {"x": ["Model", 0, 4]} == program.inputs(case(batch=4))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def inputs(model, rank):\n    return [1]\n", "returned a list"),
        ("def inputs(model, rank):\n    return {1: 2}\n", "returned a dict"),
        ("def inputs(model, rank):\n    return None\n", "returned a NoneType"),
        ("def inputs(model, rank):\n    return {}\n", "do not fit decode: missing a required argument: 'x'"),
        ("def inputs(model, rank):\n    return {'x': 1, 'y': 2}\n", "got an unexpected keyword argument 'y'"),
        ("def inputs(model):\n    return {'x': 1}\n", "too many positional arguments"),
        ("inputs = 3\n", "own_model has no function 'inputs'"),
        ("", "own_model has no function 'inputs'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(make: Make, text: str, words: str) -> None:
    """Another type, other arguments, no function."""
    with pytest.raises(ConfigError) as raised:
        make(text).inputs(case())

    assert words in raised.value.message
    assert raised.value.hint


def test_inputs_that_raise_are_known_as_what_was_running(make: Make) -> None:
    """What the user's code raises passes through; `doing` says where it was."""
    program = make("def inputs(model, rank):\n    raise SystemExit(3)\n")

    with pytest.raises(SystemExit):
        program.inputs(case())

    assert program.doing is not None
    assert "inputs of case b4 own_model:inputs" == program.doing.what


def test_import_that_fails_says_where_it_looked(make: Make, tmp_path: Path) -> None:
    """A module that is not on model.path."""
    program = make(factory="nowhere:build")

    with pytest.raises(ModuleNotFoundError):
        program._build_model()

    assert program.doing is not None
    assert str(tmp_path) in program.doing.hint


def test_factory_that_returns_no_module_is_refused(make: Make) -> None:
    """A factory gives a torch.nn.Module."""
    with pytest.raises(ConfigError, match="returned a int"):
        make("def build():\n    return 3\n")._build_model()


def test_extra_files_are_those_of_the_patterns_and_a_pattern_without_one_is_refused(make: Make, tmp_path: Path) -> None:
    """`model.sources`: files only, in order; a typo must not silently watch nothing."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a.json").touch()

    assert [tmp_path / "configs" / "a.json"] == make(sources=["configs/*"]).extra_files()
    with pytest.raises(ConfigError, match="'confgs/\\*' names no file"):
        make(sources=["confgs/*"]).extra_files()


# The whole way of a rank process, all cases in one.

MODEL = """
import torch

class Model(torch.nn.Module):
    def main_decode(self, x):
        return x

    @torch.no_grad()
    def decorated(self, x):
        return x

    free = staticmethod(len)

def build(layers=1):
    return Model()

def broken():
    raise KeyError("weights")

def nothing():
    return None

def inputs(model, rank):
    return {"x": torch.ones(2, 4)}

def listed(model, rank):
    return [1]

def too_many(model, rank):
    return {"x": torch.ones(2, 4), "y": 1}
"""

# What of the recipe is other than in the plain one, and words of the message.
CASES = {
    "factory-module": ({"factory": "nowhere:build"}, "importing nowhere raised ModuleNotFoundError"),
    "factory-name": ({"factory": "own:bild"}, "model.factory own:bild: own has no function 'bild'"),
    "factory-raises": ({"factory": "own:broken"}, "model.factory own:broken raised KeyError"),
    "factory-config": ({"config": {"layer": 4}}, "got an unexpected keyword argument 'layer'"),
    "factory-result": ({"factory": "own:nothing"}, "model.factory own:nothing returned a NoneType"),
    "import-error": ({"factory": "lacking:build"}, "No module named 'missing_dependency'"),
    "setup-raises": ({"setup": "own:broken"}, "compile.setup own:broken raised KeyError"),
    "method": ({"method": "decode"}, "Model has no method 'decode'"),
    "method-decorated": ({"method": "decorated"}, "'decorated' of Model is decorated"),
    "method-static": ({"method": "free"}, "'free' of Model is a builtin_function_or_method, no method"),
    "inputs-name": ({"inputs": "own:input"}, "own has no function 'input'"),
    "inputs-type": ({"inputs": "own:listed"}, "inputs own:listed of case b2 returned a list"),
    "inputs-arity": ({"inputs": "own:too_many"}, "inputs own:too_many of case b2 do not fit main_decode"),
    "nothing": ({}, "no failure"),
}

SCRIPT = """
import json, sys
from pathlib import Path

from cachectl.build import worker
from cachectl.build.job import CaseJob, EventLog, Job
from cachectl.build.program import RankProgram
from cachectl.errors import CachectlError
from cachectl.schemas.recipe import Recipe

class Program(RankProgram):
    def _refuse_other_toolchain(self):
        pass

folder = Path.cwd()
path = list(sys.path)
said = {}
for name, (edits, _) in json.load(sys.stdin).items():
    case = {"name": "b2", "inputs": edits.get("inputs", "own:inputs"), "args": {}}
    recipe = Recipe.model_validate({
        "schema": "cachectl/recipe/v1", "name": "own", "device": "simulated",
        "model": {"factory": edits.get("factory", "own:build"), "config": edits.get("config", {})},
        "compile": {"setup": edits.get("setup")},
        "functions": [{"method": edits.get("method", "main_decode"), "cases": [case]}],
    }).to_document()
    asked = CaseJob(0, edits.get("method", "main_decode"), case)
    program = Program(Job(recipe, folder, folder / name, {}, (asked,), 1), 0, EventLog(folder / name))
    try:
        program.start("record")
        program.method(asked)
        program.inputs(asked)
        said[name] = "no failure"
    except CachectlError as error:
        said[name] = error.message
    except Exception as error:
        said[name] = worker._blamed(error, 'record', program, asked).message
    sys.path[:] = path
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one rank process said to each case."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(MODEL)
    (folder / "lacking.py").write_text(f"import missing_dependency\n{MODEL}")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=folder,
        env=environment({**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}),
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    words: dict[str, str] = json.loads(done.stdout)
    return words


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_rank_program_says_what_is_wrong_with_the_recipe(said: dict[str, str], name: str) -> None:
    """The message names the field, what it says, and what it did; a right recipe has none."""
    assert CASES[name][1] in said[name]
