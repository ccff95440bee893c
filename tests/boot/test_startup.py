"""The start-up module in real processes: what it replaces, what it leaves alone, and what runs after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cachectl
from cachectl.boot.report import ExecNote
from cachectl.execution import STARTUP
from cachectl.runtimes import simulated

SIMULATED_STARTUP = simulated.STARTUP

# A runtime that says what it was called with. The real ones are importable by two names each.
RUNTIME = """\
def cache_compile(func, *, config=None, dynamic=True, cache_dir=None, **kwargs):
    import os
    print("runtime", os.path.basename(str(cache_dir)) if cache_dir == "mine" else "private", os.path.isdir(cache_dir))
    return func
"""
# A torch of which only compile is there.
TORCH = """\
def compile(model=None, **kwargs):
    if model is None:
        return lambda model: compile(model, **kwargs)
    print("compile", model.__name__, kwargs)
    return model
"""
CALL = "from {name} import cache_compile; print(cache_compile(len, cache_dir='mine')('four'))"
NAMES = [
    "npugraph_ex.inference",
    "torch_npu.dynamo.npugraph_ex.inference",
    "torchair.inference",
    "torch_npu.dynamo.torchair.inference",
]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the runtimes' names in it, and a torch that is not there."""
    folder = tmp_path / "site"
    for name in NAMES:
        place = folder.joinpath(*name.split("."))
        place.mkdir(parents=True)
        for package in (place, *place.parents):
            if package == folder:
                break
            (package / "__init__.py").touch()
        (place / "__init__.py").write_text(RUNTIME)
    (folder / "torch.py").write_text("raise ImportError('no torch here')\n")
    return folder


@pytest.fixture
def note(tmp_path: Path) -> ExecNote:
    """What exec leaves after a cold hook."""
    folder = tmp_path / "note"
    folder.mkdir()
    hook: dict[str, Any] = {
        "outcome": "cold",
        "warm_set": None,
        "cache_dir": None,
        "env": {},
        "entries": [],
        "reasons": [],
        "seconds": {"resolve": 0.0, "verify": 0.0, "materialize": 0.0, "total": 0.5},
    }
    made = ExecNote(folder, tmp_path / "recipe.yaml", hook, tmp_path / "report.json", warm_dir=str(tmp_path / "warm"))
    made.write()
    return made


@pytest.fixture
def run(tmp_path: Path, site: Path, note: ExecNote) -> Run:
    """Run Python code with the start-up module first on PYTHONPATH, as exec does; cachectl itself is not on it."""

    def start(
        code: str, *first: Path, environ: Mapping[str, str] | None = None, options: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        places = [*(first or (STARTUP,)), site]
        return subprocess.run(
            [sys.executable, *options, "-c", code],
            cwd=tmp_path,
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": os.pathsep.join(map(str, places)),
                "CACHECTL_EXEC": str(note.folder),
                **(environ or {}),
            },
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return start


@pytest.mark.parametrize("name", NAMES)
def test_startup_runtime_compiles_in_a_private_folder(run: Run, name: str, tmp_path: Path) -> None:
    """Under each of its names a runtime gets another folder than the program's, which is not even made."""
    done = run(CALL.format(name=name))

    assert (0, "runtime private True\n4\n") == (done.returncode, done.stdout), done.stderr
    assert not (tmp_path / "mine").exists()
    assert [] == list((tmp_path / "warm" / "cold").iterdir())


def test_startup_torchair_is_reported_as_left_to_the_runtime(run: Run, note: ExecNote) -> None:
    """What this version has no adapter for is cold by policy, and the report says so without a word on stderr."""
    done = run(CALL.format(name="torchair.inference"))

    assert note.report is not None
    report = json.loads(note.report.read_text())
    assert "" == done.stderr
    assert "cold" == report["outcome"]
    assert [("policy", "torchair.inference.cache_compile")] == [
        (reason["part"], reason["name"]) for reason in report["reasons"]
    ]


def test_startup_without_torch_leaves_the_call_to_the_runtime(run: Run) -> None:
    """What goes wrong on our side is one line on stderr, and the program gets what the runtime gives."""
    done = run(CALL.format(name="npugraph_ex.inference"))

    assert 0 == done.returncode
    assert ["cachectl: cache_compile is left to the runtime: ImportError: no torch here"] == done.stderr.splitlines()


@pytest.mark.parametrize(
    ("code", "stages"),
    [
        ("pass", ["python"]),
        ("import json", ["python"]),
        ("import torch", ["python", "torch"]),
        (CALL.format(name=NAMES[0]), ["python", "runtime", "torch"]),
    ],
)
def test_startup_marks_how_far_a_process_came(
    run: Run, site: Path, note: ExecNote, code: str, stages: list[str]
) -> None:
    """exec can tell a program that was never reached from one that has nothing to do with torch."""
    (site / "torch.py").write_text("")

    assert 0 == run(code).returncode

    assert stages == sorted(path.suffix[1:] for path in note.folder.glob("seen.*"))


def test_startup_lift_replaces_torch_compile_and_leaves_what_it_cannot_prove(
    run: Run, site: Path, note: ExecNote
) -> None:
    """The program's own compile is made as ever, once; the report says why it is not lifted."""
    (site / "torch.py").write_text(TORCH)
    replace(note, lift=True).write()

    done = run("import torch; print(torch.compile(len, fullgraph=True)('four'), torch.compile(mode='x')(len)('six'))")

    assert (0, "compile len {'fullgraph': True}\ncompile len {'mode': 'x'}\n4 3\n", "") == (
        done.returncode,
        done.stdout,
        done.stderr,
    )
    assert note.report is not None
    report = json.loads(note.report.read_text())
    assert [("options", "backend", "inductor")] == [
        (reason["part"], reason["name"], reason["wanted"]) for reason in report["reasons"]
    ]


def test_startup_without_lift_leaves_torch_compile(run: Run, site: Path) -> None:
    """torch's own function stays what it is."""
    (site / "torch.py").write_text(TORCH)

    done = run("import torch; print(torch.compile.__code__.co_filename)")

    assert f"{site / 'torch.py'}\n" == done.stdout


def test_startup_lift_that_fails_leaves_torch_compile(run: Run, site: Path, note: ExecNote) -> None:
    """A torch that has no compile is imported as ever; one line on stderr says so."""
    (site / "torch.py").write_text("")
    replace(note, lift=True).write()

    done = run("import torch; print('on')")

    assert (0, "on\n") == (done.returncode, done.stdout)
    (line,) = done.stderr.splitlines()
    assert line.startswith("cachectl: torch.compile stays as it is: AttributeError: ")


def test_startup_unreadable_note_leaves_the_module_alone(run: Run, note: ExecNote) -> None:
    """Without what exec left the runtime's own function stays, with the program's folder."""
    (note.folder / "exec.json").write_text("{")

    done = run(CALL.format(name="npugraph_ex.inference"))

    assert (0, "runtime mine False\n4\n") == (done.returncode, done.stdout)
    assert 1 == len(done.stderr.splitlines())
    assert done.stderr.startswith("cachectl: npugraph_ex.inference stays as it is: DocumentError: ")


@pytest.mark.parametrize("environ", [{"CACHECTL_DISABLE": "1"}, {"CACHECTL_EXEC": ""}], ids=["disabled", "no-exec"])
def test_startup_switched_off_changes_nothing(run: Run, environ: dict[str, str]) -> None:
    """With the switch, and where neither exec nor a hook stands behind it, nothing is replaced or watched."""
    code = f"import sys; print(any('_AfterImport' in repr(f) for f in sys.meta_path)); {CALL.format(name=NAMES[0])}"

    done = run(code, environ=environ)

    assert (0, "False\nruntime mine False\n4\n", "") == (done.returncode, done.stdout, done.stderr)


def test_startup_program_without_a_runtime_loads_nothing_of_ours(run: Run) -> None:
    """A process that imports no runtime has no cachectl, json or typing in it because of us, and its own sys.path."""
    code = "import sys; print([n for n in ('cachectl', 'json', 'typing', 'torch') if n in sys.modules], len(sys.path))"
    with_us = run(code)
    without = run(code, environ={"CACHECTL_EXEC": "", "PYTHONPATH": f"{STARTUP}/../nothing{os.pathsep}nothing"})

    assert "" == with_us.stderr
    assert without.stdout == with_us.stdout


def test_startup_loads_cachectl_from_its_own_place_without_touching_sys_path(run: Run) -> None:
    """cachectl need not be importable where the program runs; it is loaded from where the start-up module lies."""
    code = "import sys; before = list(sys.path); {call}; import cachectl; print(cachectl.__file__, before == sys.path)"

    done = run(code.format(call=CALL.format(name=NAMES[0])), options=("-S",) if sys.prefix == sys.base_prefix else ())

    assert f"{Path(cachectl.__file__).resolve()} True" == done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "order",
    [
        pytest.param([STARTUP], id="exec"),
        pytest.param([STARTUP, SIMULATED_STARTUP], id="exec-simulated"),
        pytest.param([SIMULATED_STARTUP, STARTUP], id="simulated-exec"),
    ],
)
def test_startup_runs_the_users_sitecustomize_once(run: Run, site: Path, order: list[Path]) -> None:
    """The user's start-up module runs once, under its own name, whichever of ours stand in front of it."""
    (site / "sitecustomize.py").write_text("print('user', __name__, __file__)\n")

    done = run("import sitecustomize; print(sitecustomize.__file__)", *order, environ={"CACHECTL_SIMULATED": "1"})

    theirs = str(site / "sitecustomize.py")
    assert (f"user sitecustomize {theirs}\n{theirs}\n", "") == (done.stdout, done.stderr)


@pytest.mark.parametrize("order", [[STARTUP, SIMULATED_STARTUP], [SIMULATED_STARTUP, STARTUP]], ids=["first", "second"])
def test_startup_finds_modules_beside_the_simulations_finder(run: Run, site: Path, order: list[Path]) -> None:
    """Both start-up modules wait for torch_npu, and neither sends the other round in circles."""
    code = f"import torch_npu; print(torch_npu.__name__); {CALL.format(name='torchair.inference')}"
    # The simulation's patches want the real torch_npu: it is told that this one has them.
    (site / "torch_npu" / "__init__.py").write_text("_cachectl_simulated = True\n")

    done = run(code, *order, environ={"CACHECTL_SIMULATED": "1"})

    assert (0, "torch_npu\nruntime private True\n4\n") == (done.returncode, done.stdout), done.stderr


def test_startup_failing_sitecustomize_is_pythons_to_report(run: Run, site: Path) -> None:
    """What the user's start-up module raises is told as Python tells it, and the program runs."""
    (site / "sitecustomize.py").write_text("raise RuntimeError('mine')\n")

    done = run("print('on')")

    assert (0, "on\n") == (done.returncode, done.stdout)
    assert "RuntimeError: mine" in done.stderr


def test_startup_import_seconds_are_in_the_report(run: Run, site: Path, note: ExecNote) -> None:
    """The stage `import` is what torch and torch_npu took."""
    (site / "torch_npu" / "__init__.py").write_text("import time; time.sleep(0.05)\n")

    run(f"import torch_npu; {CALL.format(name='torchair.inference')}")

    assert note.report is not None
    stages = json.loads(note.report.read_text())["stages"]
    assert 0.05 <= stages["import"] < 60.0
    assert 0.5 == stages["hook"]


# In an environment that a hook handed out


def left_by_hook(path: Path, **other: str) -> dict[str, str]:
    """Return the environment that is left of a hook, without exec."""
    return {"CACHECTL_EXEC": "", "CACHECTL_HANDOUT": str(path), **other}


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (None, "No such file or directory"),
        ('{"schema": "cachectl/handout/v1", "entries": []}', "schema 'cachectl/handout/v1'"),
        ('{"schema": "cachectl/handout/v99"}', "schema 'cachectl/handout/v99'"),
        ("half of a docu", "Expecting value"),
    ],
    ids=["gone", "older", "newer", "garbage"],
)
def test_startup_strange_handout_is_cold_with_one_line(
    run: Run, tmp_path: Path, document: str | None, text: str
) -> None:
    """A hand-out that is gone, or of another version of cachectl, is a cold start; the program gets its runtime."""
    path = tmp_path / "handout.json"
    if document is not None:
        path.write_text(document)

    done = run(CALL.format(name="torchair.inference"), environ=left_by_hook(path, HOME=str(tmp_path)))

    assert (0, "runtime private True\n4\n") == (done.returncode, done.stdout)
    (line,) = done.stderr.splitlines()
    assert line.startswith("cachectl: cold (and 1 more): store: hand-out: stored ")
    assert text in line


def test_startup_of_a_broken_cachectl_leaves_the_program_alone(run: Run, tmp_path: Path, site: Path) -> None:
    """A container whose cachectl can't be imported runs its program as ever, with one line."""
    package = tmp_path / "broken" / "cachectl"
    startup = package / "boot" / "startup"
    startup.mkdir(parents=True)
    (package / "__init__.py").write_text("import gone_missing\n")
    (startup / "sitecustomize.py").write_text((STARTUP / "sitecustomize.py").read_text())

    done = run(CALL.format(name="torchair.inference"), startup, environ=left_by_hook(tmp_path / "handout.json"))

    assert (0, "runtime mine False\n4\n") == (done.returncode, done.stdout)
    assert 1 == len(done.stderr.splitlines())
    assert "No module named 'gone_missing'" in done.stderr


def test_startup_folder_that_is_gone_changes_nothing(run: Run, tmp_path: Path) -> None:
    """A container without cachectl at all: Python passes over the folder, and the program runs as ever."""
    environ = left_by_hook(tmp_path / "handout.json")

    done = run(CALL.format(name="torchair.inference"), tmp_path / "no such folder", environ=environ)

    assert (0, "runtime mine False\n4\n", "") == (done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    "order",
    [
        pytest.param([STARTUP, STARTUP], id="twice"),
        pytest.param([STARTUP, SIMULATED_STARTUP, STARTUP], id="around-simulated"),
        pytest.param([SIMULATED_STARTUP, STARTUP, SIMULATED_STARTUP, STARTUP], id="all-twice"),
    ],
)
@pytest.mark.parametrize("disabled", ["", "1"])
def test_startup_twice_on_the_path_runs_once(run: Run, site: Path, order: list[Path], disabled: str) -> None:
    """Lines of a hook that were evaluated twice, by a shell and by one within it, are as good as once."""
    (site / "sitecustomize.py").write_text("print('user', __name__)\n")
    code = "import sys; print(sum('_AfterImport' in repr(finder) for finder in sys.meta_path))"

    done = run(code, *order, environ={"CACHECTL_SIMULATED": "", "CACHECTL_DISABLE": disabled})

    assert (f"user sitecustomize\n{0 if disabled else 1}\n", "") == (done.stdout, done.stderr)


def test_startup_in_a_program_without_torch_is_silent_and_cheap(run: Run, tmp_path: Path) -> None:
    """pip, a shell's helpers and the like load nothing of ours and say nothing, whatever the hand-out is worth."""
    code = "import sys, json, subprocess; print([n for n in sys.modules if 'cachectl' in n], sys.flags.isolated)"

    done = run(code, environ=left_by_hook(tmp_path / "gone.json"))

    assert ("[] 0\n", "") == (done.stdout, done.stderr)
