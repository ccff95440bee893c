"""The recorder against the real Dynamo: the proof says what torch's own guards say, in this process and in another.

The zoo (guard_zoo/models.py) has a small model for each thing that Dynamo guards, and what may change about it. Torch's
verdict on each change is asked of the guard manager that was compiled; where ours differs, the change says why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cachectl.identity.guards import sheet_digest

# One process compiles or traces all of it: minutes on a machine that others load.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_spec("torch") is None, reason="needs torch: make venv"),
]

ZOO = Path(__file__).parent / "guard_zoo"
# The layers of one model of the zoo and of the tiny decoder in examples/ take this much, whatever their number.
SHEET_LIMIT_BYTES = 16 * 1024


def run_python(*arguments: str, seed: int, folder: Path = ZOO) -> str:
    """Run Python with the zoo and the repository on its path, and return what it prints."""
    environment = {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONHASHSEED": str(seed),
        "PYTHONPATH": os.pathsep.join([str(ZOO), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    assert 0 == done.returncode, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every animal's sheet and the verdicts of the process that recorded it."""
    folder = tmp_path_factory.mktemp("zoo")
    run_python("-m", "verdicts", "record", str(folder), seed=1)
    return folder


def results(folder: Path, verb: str) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob(f"*.{verb}"))}


def test_zoo_is_recorded_whole(zoo: Path) -> None:
    """Every animal's guards can be said, and there are many."""
    found = results(zoo, "record")

    assert {} == {name: result["unrepresented"] for name, result in found.items() if result["unrepresented"]}
    assert 20 <= len(found)
    assert 220 <= sum(len(result["verdicts"]) for result in found.values())


def test_zoo_proof_agrees_with_torch(zoo: Path) -> None:
    """What torch refuses the proof refuses, what it passes the proof passes, but for the differences that say why."""
    disagreements = {}
    for name, result in results(zoo, "record").items():
        for change, verdict in result["verdicts"].items():
            wanted = verdict["torch"] if verdict["ours"] is None else verdict["ours"]
            if verdict["proof"] is not wanted:
                disagreements[f"{name}: {change}"] = verdict

    assert {} == disagreements


def test_zoo_differences_are_real(zoo: Path) -> None:
    """A difference that torch no longer makes is no longer excused."""
    needless = [
        f"{name}: {change}"
        for name, result in results(zoo, "record").items()
        for change, verdict in result["verdicts"].items()
        if verdict["ours"] is not None and verdict["ours"] is verdict["torch"]
    ]

    assert [] == needless


def test_zoo_another_process_agrees(zoo: Path) -> None:
    """Sheets prove and refuse in a fresh process with another hash seed as they did where they were recorded."""
    run_python("-m", "verdicts", "prove", str(zoo), seed=2)
    recorded, proved = results(zoo, "record"), results(zoo, "prove")

    assert recorded.keys() == proved.keys()
    differing = {
        f"{name}: {change}": proved[name]["verdicts"][change]
        for name, result in recorded.items()
        for change, verdict in result["verdicts"].items()
        if verdict["proof"] is not proved[name]["verdicts"][change]["proof"]
    }
    assert {} == differing


def test_zoo_sheets_are_equal_in_another_process(zoo: Path, tmp_path: Path) -> None:
    """Recording again under another hash seed gives the same sheets, byte by byte."""
    run_python("-m", "verdicts", "record", str(tmp_path), seed=3)

    assert [] == [
        path.name for path in sorted(zoo.glob("*.sheet")) if path.read_bytes() != (tmp_path / path.name).read_bytes()
    ]


def test_zoo_sheets_hold_nothing_of_this_machine(zoo: Path) -> None:
    """No path, address or process-dependent name gets into a sheet."""
    for path in zoo.glob("*.sheet"):
        text = path.read_text()
        assert str(ZOO.parents[2]) not in text
        assert "site-packages" not in text
        assert "0x" not in text
        assert "__builtins_dict__" not in text
        assert "___unnamed_scope" not in text
        assert "num_threads" not in text


def test_zoo_dynamic_leaves_have_their_bounds(zoo: Path) -> None:
    """What stayed symbolic is named as Dynamo names it, with the bounds that guards gave it."""
    found = results(zoo, "record")

    assert {"L['count']": [None, 99], "L['y'].size()[0]": [4, None]} == found["dynamic"]["dynamic"]
    assert [2, None] == found["dynamic lengths"]["dynamic"]["L['x'].size()[0]"]
    assert [None, None] == found["dynamic lengths"]["dynamic"]["L['lengths'][0]"]
    assert {} == found["static lengths"]["dynamic"]


PRELUDE = """
import json, torch
from torch import nn
from cachectl.boot.proof import prove
from cachectl.build.guards import GuardRecorder
from cachectl.errors import BuildError
from cachectl.schemas.canonical import canonical_bytes


def compiled(model, *calls, **options):
    torch._dynamo.reset()
    recorder = GuardRecorder(type(model).decode.__code__)
    with torch.no_grad(), recorder:
        function = torch.compile(model.decode, backend="eager", fullgraph=True, **options)
        for call in calls:
            function(**call)
    return recorder


x = torch.zeros(2, 4)
"""


def run_snippet(text: str, tmp_path: Path) -> Any:
    """Run a program after the prelude, and return the JSON that it prints."""
    script = tmp_path / "snippet.py"
    script.write_text(PRELUDE + textwrap.dedent(text))
    return json.loads(run_python(str(script), seed=0).splitlines()[-1])


def test_recorder_counts_recompiles_and_keeps_the_first(tmp_path: Path) -> None:
    """A second compilation is counted, and does not take the first one's place."""
    found = run_snippet(
        """
        class Model(nn.Module):
            def decode(self, x):
                return x + 1

        once = compiled(Model(), {"x": x}, dynamic=False)
        twice = compiled(Model(), {"x": x}, {"x": torch.zeros(3, 4)}, dynamic=False)
        print(json.dumps([once.compilations, twice.compilations, once.recorded().sheet, twice.recorded().sheet]))
        """,
        tmp_path,
    )

    assert [1, 2] == found[:2]
    assert sheet_digest(found[2]) == sheet_digest(found[3])


def test_recorder_of_code_that_was_not_compiled_is_a_build_error(tmp_path: Path) -> None:
    """Code that Dynamo never saw has no guards, which must not look like a proof of nothing."""
    text = run_snippet(
        """
        class Model(nn.Module):
            def decode(self, x):
                return x + 1

        recorder = GuardRecorder(Model.decode.__code__)
        with recorder:
            pass
        try:
            recorder.recorded()
        except BuildError as error:
            print(json.dumps(str(error)))
        """,
        tmp_path,
    )

    assert "compiled nothing" in text
    assert "decode" in text


def test_recorder_undoes_its_wrapping(tmp_path: Path) -> None:
    """Torch is left as it was, also after an error."""
    assert run_snippet(
        """
        from torch._dynamo.guards import CheckFunctionManager
        before = CheckFunctionManager.compile_check_fn
        try:
            with GuardRecorder(run_nothing := (lambda: 0).__code__):
                during = CheckFunctionManager.compile_check_fn
                raise KeyError
        except KeyError:
            pass
        print(json.dumps(during is not before and CheckFunctionManager.compile_check_fn is before))
        """,
        tmp_path,
    )


def test_recorder_on_an_unknown_torch_is_a_build_error(tmp_path: Path) -> None:
    """Where the private API is not as expected, the build says which torch and what is missing."""
    texts = run_snippet(
        """
        from torch._dynamo import guards
        texts = []
        for owner, name, other in (
            (guards.CheckFunctionManager, "compile_check_fn", lambda self, something: 0),
            (guards.CheckFunctionManager, "compile_check_fn", None),
            (guards.GuardBuilder, "get", None),
        ):
            held = getattr(owner, name)
            setattr(owner, name, other)
            try:
                with GuardRecorder((lambda: 0).__code__):
                    pass
            except BuildError as error:
                texts.append(str(error))
            setattr(owner, name, held)
        print(json.dumps(texts))
        """,
        tmp_path,
    )

    assert 3 == len(texts)
    assert all("keeps its guards in another way" in text and "docs/" in text for text in texts)


def test_recorder_refuses_what_it_may_not_or_can_not_keep(tmp_path: Path) -> None:
    """Secrets, credentials, absolute paths and nameless objects fail the build by name and line, never by value."""
    lines, sheet = run_snippet(
        """
        class Handle:
            pass

        HANDLE = Handle()

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.api_key = "s3cr3t"
                self.url = "https://user:s3cr3t@host"
                self.folder = "/srv/s3cr3t/x"
                self.key_count = 4

            def decode(self, x, handle=HANDLE):
                if self.api_key == "a" or self.url == "b" or self.folder == "c":
                    x = x * 2
                return x + self.key_count + (1 if handle is HANDLE else 0)

        recorded = compiled(Model(), {"x": x}).recorded()
        print(json.dumps([recorded.unrepresented, canonical_bytes(recorded.sheet).decode()]))
        """,
        tmp_path,
    )

    assert "s3cr3t" not in sheet
    assert "s3cr3t" not in str(lines)
    for name, why in (("api_key", "may be a secret"), ("url", "credentials"), ("folder", "absolute path")):
        assert any(line.split(": ")[0].endswith(f".{name}") and why in line and "snippet.py:" in line for line in lines)
    assert not any("key_count" in line for line in lines)


def test_recorder_refuses_a_type_of_guard_that_it_does_not_know(tmp_path: Path) -> None:
    """A guard of a later torch fails the build instead of being dropped."""
    lines = run_snippet(
        """
        from cachectl.build import guard_reading
        known = dict(guard_reading._HANDLERS)
        del known["SEQUENCE_LENGTH"]
        guard_reading._HANDLERS = known

        class Model(nn.Module):
            def decode(self, x, lengths):
                return x + len(lengths)

        print(json.dumps(compiled(Model(), {"x": x, "lengths": [1]}).recorded().unrepresented))
        """,
        tmp_path,
    )

    assert lines
    assert all("SEQUENCE_LENGTH L['lengths']: a type of guard that this program doesn't know" in line for line in lines)


def test_recorder_knows_every_type_of_guard_that_torch_makes(tmp_path: Path) -> None:
    """Each guard method of this torch's builder has a way into the sheet, or a refusal with a reason."""
    missing = run_snippet(
        """
        from cachectl.build.guard_reading import _HANDLERS
        from torch._dynamo.guards import GuardBuilder
        names = {name for name in vars(GuardBuilder) if name.isupper() and callable(getattr(GuardBuilder, name))}
        print(json.dumps(sorted(names - set(_HANDLERS))))
        """,
        tmp_path,
    )

    assert [] == missing


def test_recorder_keeps_guards_that_a_filter_drops(tmp_path: Path) -> None:
    """A program's guard filter saves time at each call; the proof runs once and is not cut short."""
    names = run_snippet(
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = 2.0

            def decode(self, x):
                return x * self.scale

        model = Model()
        options = {"guard_filter_fn": lambda guards: [False for guard in guards]}
        sheet = compiled(model, {"x": x}, options=options).recorded().sheet
        model.scale = 3.0
        with torch.no_grad():
            proof = prove(sheet, arguments={"self": model, "x": torch.zeros(3, 4)}, function=model.decode, torch=torch)
        print(json.dumps([reason.name for reason in proof.failed]))
        """,
        tmp_path,
    )

    assert ["self.scale", "x"] == sorted(names)


def test_recorder_leaves_the_compiled_result_alone(tmp_path: Path) -> None:
    """Recording changes neither the outputs nor how often Dynamo compiles."""
    assert run_snippet(
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def decode(self, x, lengths):
                return self.linear(x) * lengths[0] + len(lengths)

        model = Model()
        calls = [{"x": torch.ones(n, 4), "lengths": [n + 3, 2]} for n in (2, 3, 4)]
        with torch.no_grad():
            wanted = [model.decode(**call) for call in calls]
        recorder = compiled(model, *calls, dynamic=True)
        with torch.no_grad():
            function = torch.compile(model.decode, backend="eager", fullgraph=True, dynamic=True)
            same = all(torch.equal(function(**call), value) for call, value in zip(calls, wanted))
        print(json.dumps(same and recorder.compilations == 1))
        """,
        tmp_path,
    )


@pytest.mark.parametrize("layers", [2, 32])
def test_decoder_sheet_is_small_and_proves(layers: int, tmp_path: Path, repository: Path) -> None:
    """The example's sheet stays within its budget at any depth, proves unchanged, and refuses another depth."""
    size_bytes, guards, held, refused = run_snippet(
        f"""
        import sys
        sys.path.insert(0, {str(repository / "examples" / "tiny-decoder")!r})
        from tiny_decoder import inputs, model as models

        def case(layers):
            model = models.build(layers=layers)
            return model, inputs.decode(model, 0)

        model, call = case({layers})
        recorder = GuardRecorder(type(model).main_decode.__code__)
        with torch.no_grad(), recorder:
            torch.compile(model.main_decode, backend="eager", fullgraph=True, dynamic=False)(**call)
        recorded = recorder.recorded()
        assert not recorded.unrepresented, recorded.unrepresented
        proofs = []
        for depth in ({layers}, {layers} + 1):
            model, call = case(depth)
            with torch.no_grad():
                proofs.append(prove(recorded.sheet, arguments={{"self": model, **call}}, function=model.main_decode))
        size = len(canonical_bytes(recorded.sheet))
        print(json.dumps([size, recorded.guard_count, proofs[0].holds, [str(reason) for reason in proofs[1].failed]]))
        """,
        tmp_path,
    )

    assert size_bytes <= SHEET_LIMIT_BYTES
    assert 100 * layers <= guards
    assert held
    assert any("self.layers" in text for text in refused)
