"""A system that does not tell in which environment a process started."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachectl.identity.environment import EVERY_NAME, check_environment, environment_part, starting_environment


def test_starting_environment_without_proc_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc can't be read, what the process has now is all there is."""

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)

    assert {"DEPTH": "4"} == starting_environment({"DEPTH": "4"})


def test_whole_environment_counts_where_all_of_it_was_read() -> None:
    """Model code that walked over it may have read any name: each that is set counts, and each that is set later."""
    environ = {"DEPTH": "4", "HOME": "/root", "HF_TOKEN": "x", "HCCL_ALGO": "ring", "SHLVL": "2", "GIVEN": "1"}
    recipe = {"environment": {"GIVEN": "1"}}
    part = environment_part(recipe, {EVERY_NAME, "UNSET"}, environ, environ)

    assert {"DEPTH": "4", "UNSET": None} == part["observed"]
    assert {"HCCL_ALGO": "ring"} == part["families"]
    assert part["whole"] is True
    assert "whole" not in environment_part(recipe, {"UNSET"}, environ, environ)
    assert [] == check_environment(part, {**environ, "HOME": "/home", "SHLVL": "5", "HF_TOKEN": "y"})
    assert ["DEPTH"] == [reason.name for reason in check_environment(part, {**environ, "DEPTH": "5"})]
    (reason,) = check_environment(part, {**environ, "LATE": "1"})
    assert ("LATE", None, "1") == (reason.name, reason.stored, reason.wanted)
    assert "whole environment" in reason.hint
    assert [] == check_environment(part, {**environ, "LATE": "1"}, outside=True)


def test_environment_part_says_what_the_process_changed_itself() -> None:
    """A name that model code set before it compiled is what it was at the start, too: that is what a hook sees."""
    part = environment_part({}, {"DEPTH"}, {"DEPTH": "4", "HCCL_ALGO": "ring"}, {"HCCL_ALGO": "ring", "HCCL_GONE": "1"})

    assert {"DEPTH": None, "HCCL_GONE": "1"} == part["start"]
    assert [] == check_environment(part, {"HCCL_ALGO": "ring", "HCCL_GONE": "1"}, outside=True)
