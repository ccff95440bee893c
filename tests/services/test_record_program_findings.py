"""What the notes of a program's processes say together: ranks, methods, and what one recipe can't say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cachectl.services.record_program_findings import Findings, find_program
from tests.services.program_notes import method, note


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a program with a script and a configuration."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "a.yaml").touch()
    (tmp_path / "infer.py").touch()
    return tmp_path


def found(*notes: dict[str, Any]) -> Findings:
    program = find_program(notes)
    assert isinstance(program, Findings)
    return program


def test_find_program_puts_ranks_together(folder: Path) -> None:
    """Methods of any rank, the world's size, and the sizes that the ranks given to cache_compile tell."""
    ranks = [
        note(
            folder,
            method(tp_rank=rank % 2, pp_rank=0),
            *([method("mtp_decode", at=3.0)] if rank == 3 else []),
            rank=rank,
            world_size=4,
            pid=100 + rank,
        )
        for rank in (2, 0, 3, 1)
    ]

    program = found(*ranks)

    assert (4, {"tensor_parallel": 2, "data_parallel": 2}) == (program.world_size, dict(program.sizes))
    assert [("main_decode", [0, 1, 2, 3]), ("mtp_decode", [3])] == [(item.name, item.ranks) for item in program.found]


@pytest.mark.parametrize(("devices", "told"), [((0, 0), True), ((0, 1), False), ((None, None), False)])
def test_find_program_ranks_on_one_device_are_told(
    folder: Path, devices: tuple[int | None, int | None], told: bool
) -> None:
    """A build gives each rank its own, so that an artifact that names one is cold in such a program."""
    ranks = [note(folder, method(), rank=rank, world_size=2) for rank in (0, 1)]
    for rank, device in zip(ranks, devices, strict=True):
        rank["methods"][0]["calls"][0]["device"] = device

    warnings = found(*ranks).warnings

    assert told is any("ranks 0, 1 all run on device 0" in warning for warning in warnings)


def test_find_program_ranks_that_disagree_are_told(folder: Path) -> None:
    """Options, numbers of calls and variables of two ranks: the recipe has one answer, and says so."""
    ranks = [
        note(folder, method("main_decode", 4, 2), rank=0, world_size=2),
        note(
            folder,
            method("main_decode", 4, options={}),
            rank=1,
            world_size=2,
            environ={"TASK_QUEUE_ENABLE": "2", "HCCL_BUFFSIZE": "1"},
        ),
    ]

    program = found(*ranks)

    assert (1, {}) == (len(program.found[0].calls), dict(program.environ))
    told = " ".join(program.warnings)
    assert all(word in told for word in ("rank 1 compiles main_decode", "1 kinds of input", "HCCL_BUFFSIZE"))


def test_find_program_ranks_that_a_launcher_numbers_are_one_program(folder: Path) -> None:
    """torch.distributed.launch gives each rank its number as an argument."""
    ranks = [
        note(folder, method(), rank=rank, world_size=2, command=["python", "-u", "infer.py", f"--local-rank={rank}"])
        for rank in (0, 1)
    ]

    program = found(*ranks)

    assert ([0, 1], ()) == (program.found[0].ranks, program.command.arguments)


def test_find_program_second_program_is_told(folder: Path) -> None:
    """A shell script that runs two programs: the first is recorded, the second named."""
    other = note(folder, method("decode"), command=["python", "other.py", "--key", "hunter2"], started_at=2.0)

    program = found(note(folder, method()), other)

    assert ("main_decode",) == program.methods
    assert "another program compiles, too, and is not in the recipe: other.py" in program.warnings


def test_find_program_methods_with_other_options_are_left_out(folder: Path) -> None:
    """A recipe has one `dynamic` and one set of options: those of the first call."""
    program = found(note(folder, method(), method("wide_decode", at=9.0, dynamic=True)))

    assert ("main_decode",) == program.methods
    assert any("wide_decode is left out" in warning for warning in program.warnings)


def test_find_program_equal_names_are_told_by_their_modules(folder: Path) -> None:
    """Main and draft model with a method of one name."""
    program = found(note(folder, method(), method(owner="Draft", at=2.0)))

    assert ("Decoder.main_decode", "Draft.main_decode") == program.methods


def test_find_program_method_compiled_twice_is_one(folder: Path) -> None:
    """A cache folder a batch: one method, whose kinds of call are counted in the order of the calls."""
    program = found(note(folder, method("main_decode", 2, at=5.0), method("main_decode", 4, 2, at=1.0)))

    (only,) = program.found
    assert [4, 2] == [call["L['x']"]["tensor"]["shape"][0] for call in only.calls]


def test_find_program_many_kinds_are_told(folder: Path) -> None:
    """A program that pads nothing compiles at each new shape."""
    program = found(note(folder, method(more=True)))

    assert any("each compiled anew" in warning for warning in program.warnings)
