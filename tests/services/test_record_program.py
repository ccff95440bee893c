"""From the notes of a program's processes to a recipe: what is merged, what is left out, what is said of it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cachectl.errors import ConfigError
from cachectl.schemas.recipe_reading import load_recipe
from cachectl.services.record_program import RecordedProgram, open_recording, refuse_early
from tests.services.program_notes import method, note, spec

Write = Callable[..., RecordedProgram]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a program with a script and a configuration."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "a.yaml").touch()
    (tmp_path / "infer.py").touch()
    return tmp_path


@pytest.fixture
def write(folder: Path) -> Write:
    """Write the recipe of some notes."""

    def written(
        *notes: dict[str, Any], path: Path | None = None, name: str | None = None, force: bool = False, code: int = 0
    ) -> RecordedProgram:
        with open_recording(["bash", "run.sh"]) as recording:
            for number, document in enumerate(notes):
                (recording.folder / f"{number}.json").write_text(json.dumps(document))
            return recording.write_recipe(path, name=name, force=force, code=code)

    return written


def test_write_recipe_is_one_that_loads(folder: Path, write: Write) -> None:
    """The file stands beside the script, says what the process did, and means it when it is read back."""
    recorded = write(note(folder, method("main_decode", 4, 2), method("mtp_decode", 4, at=5.0)))

    assert folder / "infer.recipe.yaml" == recorded.recipe
    assert (("main_decode", "mtp_decode"), ()) == (recorded.methods, recorded.warnings)
    document = load_recipe(recorded.recipe).recipe.to_document()
    assert {
        "factory": "cachectl.programs:model",
        "config": {
            "command": ["python", "infer.py", "--config", "config/a.yaml", "--batch=4"],
            "methods": ["main_decode", "mtp_decode"],
            "calls": {"main_decode": 2},
        },
        "path": ["."],
        "sources": ["config/a.yaml", "infer.py"],
        "revision": None,
    } == document["model"]
    assert ("infer", "simulated", {"TASK_QUEUE_ENABLE": "1"}) == (
        document["name"],
        document["device"],
        document["environment"],
    )
    assert [("main_decode", 0), ("main_decode", 1), ("mtp_decode", 0)] == [
        (case["args"]["method"], case["args"]["number"])
        for function in document["functions"]
        for case in function["cases"]
    ]


def test_write_recipe_comments_say_what_was_called(folder: Path, write: Write) -> None:
    """Shapes and dtypes of each case stand above it; what is None is no news."""
    text = write(note(folder, method("main_decode", 4))).recipe.read_text()  # type: ignore[union-attr]

    assert "      # x: float32[4, 8], mode: 'plain'\n" in text
    assert "# It was compiled there with python 3.11.7, torch 2.13.0, torch_npu 2.13.0." in text
    assert max(map(len, text.splitlines())) <= 120


def test_write_recipe_elsewhere_has_paths_from_there(folder: Path, write: Write) -> None:
    """Paths are relative to the recipe's folder, wherever that is."""
    (folder / "recipes" / "npu").mkdir(parents=True)

    recorded = write(note(folder, method()), path=folder / "recipes" / "npu" / "x.yaml", name="other")

    document = yaml.safe_load(recorded.recipe.read_text())  # type: ignore[union-attr]
    assert ("other", "../..", ["../.."]) == (
        document["name"],
        document["model"]["config"]["folder"],
        document["model"]["path"],
    )
    assert ["../../config/a.yaml", "../../infer.py"] == document["model"]["sources"]


@pytest.mark.parametrize(
    ("command", "path", "name"),
    [
        (["python", "tools/Infer_2.py"], "tools/Infer_2.recipe.yaml", "infer-2"),
        (["python", "-m", "pkg.serve"], "pkg.serve.recipe.yaml", "pkg.serve"),
        (["python", "run"], "run.recipe.yaml", "run"),
    ],
)
def test_write_recipe_default_path_is_the_scripts(
    folder: Path, write: Write, command: list[str], path: str, name: str
) -> None:
    """The script's path, or the module's name, gives the file and the recipe's name."""
    (folder / "tools").mkdir()

    recorded = write(note(folder, method(), command=command))

    assert folder / path == recorded.recipe
    assert name == load_recipe(recorded.recipe).recipe.name


def test_write_recipe_never_replaces_a_file_unless_asked_to(folder: Path, write: Write) -> None:
    """A file that came while CMD ran stays; the recipe gets another name, or with -o an error."""
    kept = folder / "infer.recipe.yaml"
    kept.write_text("mine")

    recorded = write(note(folder, method()))
    with pytest.raises(ConfigError, match="is there"):
        write(note(folder, method()), path=kept)

    assert ("infer-2.recipe.yaml", "mine") == (recorded.recipe and recorded.recipe.name, kept.read_text())
    assert any("infer-2.recipe.yaml" in warning for warning in recorded.warnings)
    write(note(folder, method()), path=kept, force=True)
    assert "infer" == load_recipe(kept).recipe.name
    assert [] == [name for name in os.listdir(folder) if name.startswith(".")]


def test_write_recipe_files_outside_are_told(
    folder: Path, write: Write, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A model's config.json in another place counts for no plan; one beside the program does, whatever its name."""
    elsewhere = tmp_path_factory.mktemp("weights")
    files = [elsewhere / "config.json", folder / "odd[1].json"]
    for file in files:
        file.touch()

    recorded = write(note(folder, method(), opened=list(map(str, files))))

    assert any(warning.startswith("config.json: read, and outside") for warning in recorded.warnings)
    document = load_recipe(recorded.recipe).recipe.to_document()  # type: ignore[arg-type]
    assert ["config/a.yaml", "odd[[]1].json", "infer.py"] == document["model"]["sources"]
    assert [folder / "odd[1].json"] == list(folder.glob("odd[[]1].json"))


def test_write_recipe_secrets_are_not_written(folder: Path, write: Write) -> None:
    """Neither words behind an option that names a secret, nor a URL's credentials, nor a variable's value."""
    command = ["python", "infer.py", "--hf-token", "hunter2", "--api_key=hunter2", "--url=https://me:hunter2@host/x"]

    recorded = write(note(folder, method(), command=command, environ={"VLLM_API_KEY": "hunter2"}))

    assert recorded.recipe is not None
    assert "hunter2" not in recorded.recipe.read_text() + repr(recorded)
    words = load_recipe(recorded.recipe).recipe.to_document()["model"]["config"]["command"]
    assert ["python", "infer.py", "--url=https://host/x"] == words
    assert ["--hf-token", "--api_key", "the credentials"] == [
        warning.split(" is ")[0].split(" in ")[0] for warning in recorded.warnings if "secret" in warning
    ]


def test_write_recipe_options_that_are_functions_are_named(folder: Path, write: Write) -> None:
    """A pass of a module is named; one of the script itself can't be, and that is said in both places."""
    code = {"post_grad_custom_post_pass": "passes:fuse", "post_grad_custom_pre_pass": None}

    recorded = write(note(folder, method(code_options=code)))

    document = yaml.safe_load(recorded.recipe.read_text())  # type: ignore[union-attr]
    assert {"frozen_parameter": True, "post_grad_custom_post_pass": "passes:fuse"} == document["compile"]["options"]
    assert any("post_grad_custom_pre_pass" in warning for warning in recorded.warnings)
    assert "CHECK: the option post_grad_custom_pre_pass" in recorded.recipe.read_text()  # type: ignore[union-attr]


def test_write_recipe_of_torch_compile_says_how_to_start(folder: Path, write: Write) -> None:
    """What torch.compile made starts warm under exec --lift, and without gradients only."""
    calls = [{"spec": spec(4), "at": 1.0, "grad": True}]

    recorded = write(note(folder, method(how="torch.compile", calls=calls)))

    assert any("exec --lift" in warning for warning in recorded.warnings)
    assert any("no_grad" in warning for warning in recorded.warnings)


def test_write_recipe_failed_command_is_told(folder: Path, write: Write) -> None:
    """What was compiled before CMD failed is written, with a word about it."""
    recorded = write(note(folder, method()), code=3)

    assert recorded.recipe is not None
    assert any("exit code 3" in warning for warning in recorded.warnings)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"command": ["python", "-c", "x"]}, "behind -c"),
        ({"command": ["python"]}, "stdin"),
        ({"forked": True}, "multiprocessing or a fork"),
        ({"methods": [method(calls=[])]}, "compiled and never called"),
        ({"command": ["python", "infer.py", "\udcff"]}, "is no text"),
        ({"methods": [method("<lambda>")]}, "without a name of its own"),
        ({"methods": [], "left": [{"what": "f", "why": "pass fullgraph=True", "foreign": False}]}, "fullgraph"),
    ],
)
def test_write_recipe_without_anything_to_say_tells_what_was_seen(
    folder: Path, write: Write, fields: dict[str, Any], said: str
) -> None:
    """No recipe, and the reason in words."""
    recorded = write(note(folder, method(), **fields))

    assert (None, ()) == (recorded.recipe, recorded.methods)
    assert said in " ".join(recorded.seen)


def test_write_recipe_without_any_notes_says_how_far_cmd_came(write: Write) -> None:
    """No Python process left anything."""
    assert "no Python process of CMD obeyed PYTHONPATH" in " ".join(write().seen)


def test_write_recipe_of_a_world_says_which_ranks_have_a_method(folder: Path, write: Write) -> None:
    """The build has to know it, too: ranks stop together at a method that all of them have."""
    both = [method(), method("mtp_decode", at=3.0)]
    ranks = [note(folder, *both[: rank + 1], rank=rank, world_size=2, launcher=["RANK"]) for rank in (0, 1)]

    recorded = write(*ranks)

    document = yaml.safe_load(recorded.recipe.read_text())  # type: ignore[union-attr]
    assert {"mtp_decode": [1]} == document["model"]["config"]["ranks"]
    assert {"world_size": 2} == document["topology"]
    assert "launcher" not in document["model"]["config"]


def test_write_recipe_says_what_a_launcher_has_set(folder: Path, write: Write) -> None:
    """A program of one rank that asks for its rank finds it in a build, too."""
    recorded = write(note(folder, method(), launcher=["RANK", "WORLD_SIZE"], rank=0, world_size=1))

    document = yaml.safe_load(recorded.recipe.read_text())  # type: ignore[union-attr]
    assert ["RANK", "WORLD_SIZE"] == document["model"]["config"]["launcher"]


@pytest.mark.parametrize(
    ("path", "command", "said"),
    [
        ("there.yaml", ["bash", "x.sh"], "there.yaml is there"),
        ("gone/x.yaml", ["bash", "x.sh"], "gone is not there"),
        (".", ["bash", "x.sh"], "is a folder"),
        (None, ["python", "infer.py"], "infer.recipe.yaml is there"),
    ],
)
def test_refuse_early_says_so_before_cmd_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None, command: list[str], said: str
) -> None:
    """A run of an hour must not end in a file that can't be written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").touch()
    (tmp_path / "infer.recipe.yaml").touch()

    with pytest.raises(ConfigError, match=said):
        refuse_early(Path(path) if path else None, command, name=None, force=False)


def test_refuse_early_passes_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A free name, a file that may be replaced, and a command whose script is not known yet."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.yaml").touch()

    refuse_early(Path("new.yaml"), ["python", "x.py"], name="a.b-2", force=False)
    refuse_early(Path("there.yaml"), ["python", "x.py"], name=None, force=True)
    refuse_early(None, ["bash", "x.sh"], name=None, force=False)
    with pytest.raises(ConfigError, match=r"there\.yaml"):
        refuse_early(Path("there.yaml"), ["python", "x.py"], name=None, force=False)


@pytest.mark.parametrize("name", ["", "-x", "Upper", "a b", "x" * 200])
def test_refuse_early_names_that_no_recipe_has(name: str) -> None:
    """Said before CMD runs, not after."""
    with pytest.raises(ConfigError, match="is no name"):
        refuse_early(None, ["bash", "x.sh"], name=name, force=False)


def test_recording_whose_folder_is_still_written_to_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CMD left running notes something while the notes are deleted: the recipe is written, that is no fault."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    remove = os.rmdir

    def filled_meanwhile(path: str, **options: Any) -> None:
        if Path(path).name.startswith("cachectl-record."):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        remove(path, **options)

    with monkeypatch.context() as patch, open_recording(["bash", "run.sh"]) as recording:
        patch.setattr(os, "rmdir", filled_meanwhile)
        (recording.folder / "0.json").touch()

    assert [] == list(recording.folder.iterdir())


def test_recording_without_room_for_its_notes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before CMD runs, with what helps; what goes wrong later has words of its own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))

    with pytest.raises(ConfigError, match="needs a folder for its notes"), open_recording(["true"]):
        pytest.fail("there is no folder")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(OSError, match="of its own"), open_recording(["true"]):
        raise OSError("of its own")
