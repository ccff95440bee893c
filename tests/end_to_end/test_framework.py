"""A framework's recipe after its config was edited: warm where a field doesn't count, cold and named where it does.

The example executor is built once from its own config; that build and a first warm start are what tests/examples shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.examples.executor_runs import Executor, lay_executor, reason_names, recipe_of

pytestmark = [pytest.mark.real, pytest.mark.nightly, pytest.mark.timeout(3600)]

CONFIG = "static"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    """The example with a store that holds what its config compiles."""
    executor = lay_executor(tmp_path_factory.mktemp("framework"))
    executor.cachectl("init")
    executor.cachectl("build", recipe_of(CONFIG))
    return executor


@pytest.fixture
def executor(built: Executor) -> Any:
    """The same, whose config is put back after a test."""
    path = built.folder / "config" / f"{CONFIG}.yaml"
    before = path.read_bytes()
    yield built
    path.write_bytes(before)


def edit(executor: Executor, section: str, **fields: Any) -> None:
    """Set fields of the config, in place."""
    path: Path = executor.folder / "config" / f"{CONFIG}.yaml"
    document = yaml.safe_load(path.read_text())
    document[section].update(fields)
    path.write_text(yaml.safe_dump(document))


def test_exec_is_warm_after_what_does_not_count(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dataset, temperature, order of lines, and the day: new bytes, the same meaning, the same tokens."""
    expected, _ = executor.execute(CONFIG)
    edit(executor, "data_config", dataset="LongBench", temperature=0.7)
    # As the framework's launch script exports them.
    monkeypatch.setenv("RES_PATH", "res/20261201/tiny_executor_static")
    monkeypatch.setenv("WORK_DIR", str(executor.folder))
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")

    ranks, report = executor.execute(CONFIG)

    assert ("warm", []) == (report["outcome"], report["reasons"])
    assert expected[0]["tokens"] == ranks[0]["tokens"]
    assert 2 == executor.cachectl("plan", recipe_of(CONFIG), "--require-ready")["ready"]


def test_exec_is_cold_and_right_after_another_batch_size(executor: Executor) -> None:
    """Every field that differs is named by explain, and the program runs as it would without cachectl."""
    edit(executor, "scheduler_config", batch_size=2)
    eager = executor.run(CONFIG, "--steps", "32", exe_mode="eager")

    ranks, report = executor.execute(CONFIG)
    explained = executor.call("explain", recipe_of(CONFIG), "--json")

    assert "cold" == report["outcome"]
    assert eager[0]["tokens"] == ranks[0]["tokens"]
    assert '"framework.config.scheduler_config.batch_size"' in explained.stdout
    assert 1 == explained.returncode


def test_exec_names_the_setting_that_makes_caching_inert(executor: Executor) -> None:
    """A program that does not read its cache was handed one for nothing: unused, and the report says why."""
    edit(executor, "model_config", enable_cache_compile=False)

    _, report = executor.execute(CONFIG)
    refused = executor.call("build", recipe_of(CONFIG))

    assert "unused" == report["outcome"]
    assert ("policy", "framework config") in reason_names(report)
    assert (2, True) == (refused.returncode, "enable_cache_compile false" in refused.stderr)


def test_exec_of_an_eager_config_is_cold_with_the_setting(executor: Executor) -> None:
    """exe_mode eager compiles nothing: cold, named, and CMD runs."""
    edit(executor, "model_config", exe_mode="eager")

    ranks, report = executor.execute(CONFIG)

    assert ("cold", {("policy", "framework config")}) == (report["outcome"], reason_names(report))
    assert 1 == len(ranks)
