"""Recording what Dynamo traces: the real Dynamo over a real model, then edits of its files."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachectl.build.sources import SourceRecorder
from cachectl.errors import BuildError
from cachectl.identity.sources import check_files, check_modules
from cachectl.schemas.canonical import canonical_bytes

pytestmark = pytest.mark.real

MODEL = """from __future__ import annotations

import dataclasses
import typing

import torch
from torch import nn

from traced.tools import act, make, scaled

EPS = 0.5
triple = make(3.0)


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    weight: float = 2.0


class Step(typing.NamedTuple):
    hidden: torch.Tensor
    count: int = 1


@torch._dynamo.assume_constant_result
def constant():
    return 1.25


class Block(nn.Module):
    gain = 2.0

    def forward(self, x):
        return self.mix(x) * self.gain

    def mix(self, x):
        return x + EPS

    def prefill(self, x):
        return x * 100


class Special(Block):
    def prefill(self, x):
        return x * 200


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Special() for _ in range(2))
        self.debug = False

    @property
    def factor(self):
        return 1.5

    @staticmethod
    def clip(x):
        return x.clamp(max=8.0)

    def main_decode(self, x, bias=0.25):
        def nested(value):
            return value - 1.0

        pair = Pair(x)
        step = Step(pair.first * pair.weight)
        x = sum(part * 1.0 for part in [step.hidden, nested(step.hidden)])
        unit = float(step.count)
        x = sum([part + unit for part in (x, x)])
        for block in self.blocks:
            x = block(x)
        if self.debug:
            report(x)
        return self.clip(act(triple(scaled(x)))) * self.factor + bias + constant()

    def prefill(self, x):
        return x * 300


def report(x):
    print("value", x)
"""
TOOLS = """FACTOR = 2.0
act = lambda x: x.relu()


def make(factor):
    def inner(x):
        return x * factor

    return inner


def scaled(x):
    return x * FACTOR


def unused(x):
    return x
"""


def write_model(folder: Path, model: str = MODEL, tools: str = TOOLS) -> None:
    """Write the package `traced` below `folder`."""
    package = folder / "traced"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text(model)
    (package / "tools.py").write_text(tools)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with the package, whose modules and compiled frames are forgotten afterwards."""
    import torch

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    before = set(sys.modules)
    write_model(tmp_path / "project")
    yield tmp_path / "project"
    torch._dynamo.reset()
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("traced", "elsewhere"):
            del sys.modules[name]
    importlib.invalidate_caches()


def compiled(method: Any, *args: Any) -> SourceRecorder:
    """Compile and call a method under a recorder."""
    import torch

    with SourceRecorder() as recorder, torch.no_grad():
        torch.compile(method, backend="eager", fullgraph=True, dynamic=False)(*args)
    return recorder


def recorded(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trace the model's main_decode and return its document and raw table."""
    import torch

    model = importlib.import_module("traced.model").Decoder()
    return compiled(model.main_decode, torch.ones(2, 2)).document({"path:0": folder})


def entries(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the document's files by path."""
    return {entry["path"]: entry for entry in document["files"]}


def test_recorder_names_what_was_traced_and_nothing_else(folder: Path) -> None:
    """Root and inlined functions of every kind are there; torch's own and what did not run are not."""
    document, raw = recorded(folder)
    files = entries(document)

    assert ["traced/model.py", "traced/tools.py"] == sorted(files)
    assert {
        "Decoder.main_decode",
        "Decoder.factor",
        "Decoder.clip",
        "Block.forward",
        "Block.mix",
        "constant",  # decorated: it ran without being traced
    } == set(files["traced/model.py"]["definitions"])
    assert {"<lambda>", "make", "scaled"} == set(files["traced/tools.py"]["definitions"])
    assert {"FACTOR", "act", "make", "scaled"} <= set(files["traced/tools.py"]["bindings"])
    assert {"Block", "Special", "Decoder", "Pair", "Step"} == set(files["traced/model.py"]["classes"])
    assert files["traced/model.py"]["bindings"]["EPS"]
    assert files["traced/model.py"]["bindings"]["float"] is None
    assert [] == document["packages"]
    assert all(entry["whole"] is None and entry["traced"] for entry in files.values())
    assert str(folder) not in canonical_bytes([document, raw]).decode()
    assert [] == check_files(document, raw, {"path:0": folder})
    assert [] == check_modules(document, raw, sys.modules)


@pytest.mark.parametrize(
    ("name", "old", "new", "wanted"),
    [
        ("model", "x * 300", "x * 301", None),
        ("model", "x * 200", "x * 201", None),
        ("model", '"value"', '"a value"', None),
        ("tools", "def unused(x):\n    return x", "def unused(x):\n    return 1", None),
        ("model", "self.debug = False", "self.debug = bool(0)", None),
        ("model", "x + EPS", "x - EPS", "traced/model.py: Block.mix"),
        ("model", "EPS = 0.5", "EPS = 0.75", "traced/model.py: EPS"),
        ("model", "bias=0.25", "bias=0.5", "traced/model.py: Decoder.main_decode"),
        ("model", "weight: float = 2.0", "weight: float = 3.0", "traced/model.py: class Pair"),
        ("model", "count: int = 1", "count: int = 2", "traced/model.py: class Step"),
        ("model", "return 1.25", "return 1.5", "traced/model.py: constant"),
        ("model", "gain = 2.0", "gain = 3.0", "traced/model.py: class Block"),
        ("model", "make(3.0)", "make(4.0)", "traced/model.py: triple"),
        ("model", "part * 1.0", "part * 2.0", "traced/model.py: Decoder.main_decode"),
        ("tools", "x.relu()", "x.tanh()", "traced/tools.py: <lambda>"),
        ("tools", "FACTOR = 2.0", "FACTOR = 4.0", "traced/tools.py: FACTOR"),
        ("tools", "x * factor", "x / factor", "traced/tools.py: make"),
        (
            "model",
            "class Special(Block):",
            "class Special(Block):\n    def mix(self, x):\n        return x\n",
            "traced/model.py: class Special",
        ),
        # What Python looks for by itself, and a method that nobody asks for.
        *(
            (
                "model",
                "class Special(Block):",
                f"class Special(Block):\n    def {name}(self, *args):\n        return 0\n",
                wanted,
            )
            for name, wanted in (
                ("__len__", "traced/model.py: class Special"),
                ("__init__", "traced/model.py: class Special"),
                ("other", None),
            )
        ),
    ],
)
def test_recorder_document_tells_edits_apart(folder: Path, name: str, old: str, new: str, wanted: str | None) -> None:
    """An edit is warm exactly when nothing that was traced is made of it."""
    document, raw = recorded(folder)
    path = folder / "traced" / f"{name}.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))

    reasons = [reason.name for reason in check_files(document, raw, {"path:0": folder})]

    assert ([] if wanted is None else [wanted]) == [reason for reason in reasons if reason == wanted or wanted is None]


def test_recorder_extra_function_counts_as_traced(folder: Path) -> None:
    """The factory was run, not traced, and is named by the recipe."""
    import torch

    importlib.import_module("traced.model")
    document, raw = SourceRecorder().document({"path:0": folder}, ["traced.tools:unused", "torch.nn:Module"])

    assert ["unused"] == list(entries(document)["traced/tools.py"]["definitions"])
    assert ["unused"] == list(raw["code"]["path:0/traced/tools.py"])
    assert torch is not None


def test_recorder_left_restores_dynamo(folder: Path) -> None:
    """Nothing of ours stays in Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    before = InstructionTranslatorBase.__init__
    with SourceRecorder():
        inside = InstructionTranslatorBase.__init__

    assert before is not inside
    assert before is InstructionTranslatorBase.__init__


def test_recorder_unknown_dynamo_is_a_build_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch, whose translators look different, is refused by name."""
    from torch._dynamo import symbolic_convert

    class Other:
        def __init__(self, code: object) -> None:
            self.code = code

    monkeypatch.setattr(symbolic_convert, "InstructionTranslatorBase", Other)

    with pytest.raises(BuildError, match="f_code, f_globals"), SourceRecorder():
        raise AssertionError("entered")


def test_document_file_edited_since_its_import_is_a_build_error(folder: Path) -> None:
    """What was traced must be what the file says, or the document would be of other code."""
    import torch

    model = importlib.import_module("traced.model").Decoder()
    recorder = compiled(model.main_decode, torch.ones(2, 2))
    (folder / "traced" / "model.py").write_text(MODEL.replace("x + EPS", "x - EPS"))

    with pytest.raises(BuildError, match=r"Block\.mix as Dynamo traced it"):
        recorder.document({"path:0": folder})


def test_document_code_without_a_file_is_a_build_error(folder: Path) -> None:
    """Text that was executed leaves nothing to compare with later."""
    import torch

    namespace: dict[str, Any] = {"__name__": "nowhere"}
    exec("def call(x):\n    return x + 1\n", namespace)

    with pytest.raises(BuildError, match="has no source file"):
        compiled(namespace["call"], torch.ones(2)).document({"path:0": folder})


def test_document_module_outside_of_roots_counts_by_its_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install has no version to trust; it is found through the import system."""
    import torch

    (tmp_path / "other").mkdir()
    path = tmp_path / "other" / "elsewhere.py"
    path.write_text("GAIN = 2\n\n\ndef call(x):\n    return x * GAIN\n\n\ndef other(x):\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    call = importlib.import_module("elsewhere").call
    document, raw = compiled(call, torch.ones(2)).document({"path:0": folder})

    assert [] == document["packages"]
    assert "package:elsewhere" == document["files"][0]["root"]
    path.write_text(path.read_text().replace("return x\n", "return 1\n"))
    assert [] == check_files(document, raw, {})
    path.write_text(path.read_text().replace("GAIN = 2", "GAIN = 3"))
    assert ["elsewhere.py: GAIN"] == [reason.name for reason in check_files(document, raw, {})]


SCRIPT = """
import json, sys
from pathlib import Path
import torch
from cachectl.build.sources import SourceRecorder
from cachectl.identity.sources import check_files, check_modules

class Local(torch.nn.Module):
    def main_decode(self, x):
        return model.main_decode(x) + 1

from traced.model import Decoder
model = Decoder()
local = Local()
with SourceRecorder() as recorder, torch.no_grad():
    torch.compile(local.main_decode, backend="eager", fullgraph=True, dynamic=False)(torch.ones(2, 2))
roots = {"path:0": Path(__file__).parent}
document, raw = recorder.document(roots)
reasons = check_files(document, raw, roots) + check_modules(document, raw, getattr(sys, "modules"))
print(json.dumps([document, raw, [str(reason) for reason in reasons]], sort_keys=True))
"""


@pytest.mark.slow
def test_document_of_a_script_is_equal_in_every_process_folder_and_clone(tmp_path: Path, repository: Path) -> None:
    """Code in the main program is found; hash seed, working folder and the clone's place leave no trace."""
    outputs = set()
    for seed, place in (("1", "here"), ("2", "deep/er")):
        folder = tmp_path / place
        write_model(folder)
        (folder / "infer.py").write_text(SCRIPT)
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(repository)}
        done = subprocess.run(
            [sys.executable, "infer.py"] if seed == "1" else [sys.executable, f"{place}/infer.py"],
            cwd=folder if seed == "1" else tmp_path,
            env=environ,
            check=True,
            capture_output=True,
            text=True,
        )
        outputs.add(done.stdout)
    document, _, reasons = json.loads(done.stdout)

    assert 1 == len(outputs)
    assert [] == reasons
    assert "__main__" == entries(document)["infer.py"]["module"]
    assert ["Local.main_decode"] == list(entries(document)["infer.py"]["definitions"])


def test_function_that_the_recipe_names_is_found_below_the_roots_and_need_not_be_imported(tmp_path: Path) -> None:
    """A program that neither imports nor could import the recipe's inputs is as good; an edited file is not."""
    (tmp_path / "asked_only").mkdir()
    (tmp_path / "asked_only" / "__init__.py").write_text("")
    (tmp_path / "asked_only" / "inputs.py").write_text("START = 5\n\ndef decode(model, rank):\n    return START\n")

    document, raw = SourceRecorder().document({"path:0": tmp_path}, asked=["asked_only.inputs:decode"])

    (entry,) = [entry for entry in document["files"] if entry["path"] == "asked_only/inputs.py"]
    assert (False, ["decode"]) == (entry["traced"], sorted(entry["definitions"]))
    assert entry["bindings"]["START"] is not None
    assert "asked_only" not in sys.modules
    assert [] == check_modules(document, raw, {}, {"path:0": tmp_path})
    (tmp_path / "asked_only" / "inputs.py").write_text("START = 6\n\ndef decode(model, rank):\n    return START\n")
    assert ["asked_only/inputs.py: START"] == [
        reason.name for reason in check_modules(document, raw, {}, {"path:0": tmp_path})
    ]
