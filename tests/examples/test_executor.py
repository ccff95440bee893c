"""The example executor, a program that knows nothing of cachectl: right in eager mode, compiled, and loaded."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.examples.executor_runs import (
    EXAMPLE,
    FIRST_CALLS,
    Executor,
    documents,
    lay_executor,
    reason_names,
    recipe_of,
)

STEPS = 32
# Worlds of four ranks build for minutes where they share few cores with others.
LONG = pytest.mark.timeout(3600)


@pytest.fixture
def inference_config() -> Iterator[Any]:
    """The example's configuration module, which imports no torch."""
    path = EXAMPLE / "executor" / "inference_config.py"
    spec = importlib.util.spec_from_file_location("executor_inference_config", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
        patch.setenv("TASK_QUEUE_ENABLE", "set before")
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """Write static.yaml with fields of its sections changed."""

    def write(**changes: dict[str, Any]) -> Path:
        document = yaml.safe_load((EXAMPLE / "config" / "static.yaml").read_text())
        for section, fields in changes.items():
            document[section].update(fields)
        path = tmp_path / "edited.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    """The example in a folder of its own, with one layer, and nothing in its store yet."""
    return lay_executor(tmp_path_factory.mktemp("executor"))


@pytest.fixture(scope="module")
def eager(executor: Executor) -> dict[str, Any]:
    """What the one rank of static.yaml decodes without a graph."""
    (rank,) = executor.run("static", "--steps", str(STEPS), exe_mode="eager")
    return rank


@pytest.mark.parametrize(
    ("section", "field", "value", "said"),
    [
        ("model_config", "exe_mode", "acl_graph", "exe_mode='acl_graph'"),
        ("model_config", "platform_version", 950, "platform_version=950"),
        ("model_config", "next_n", 3, "next_n=3"),
        ("model_config", "with_ckpt", True, "with_ckpt=True"),
        ("parallel_config", "attn_tp_size", 2, "attn_tp_size=2"),
        ("parallel_config", "dense_tp_size", 4, "dense_tp_size=4"),
    ],
)
def test_config_that_cannot_run_is_refused(
    inference_config: Any, edited: Any, section: str, field: str, value: Any, said: str
) -> None:
    """Refused before torch is imported, with field and value."""
    with pytest.raises(ValueError, match=re.escape(said)):
        inference_config.InferenceConfig.from_yaml(edited(**{section: {field: value}}))


def test_config_static_kernel_needs_npugraph_ex(inference_config: Any, edited: Any) -> None:
    """The framework's own constraint between two fields."""
    with pytest.raises(ValueError, match="enable_static_kernel needs exe_mode='npugraph_ex', not 'eager'"):
        inference_config.InferenceConfig.from_yaml(
            edited(model_config={"enable_static_kernel": True, "exe_mode": "eager"})
        )


def test_config_batch_has_to_be_shared_evenly(inference_config: Any, edited: Any) -> None:
    """Four copies of the model can't share a batch of six."""
    with pytest.raises(ValueError, match="batch_size=6 is not divisible by attn_dp_size=4"):
        inference_config.InferenceConfig.from_yaml(
            edited(parallel_config={"world_size": 4}, scheduler_config={"batch_size": 6})
        )


def test_config_empty_file_is_refused(inference_config: Any, tmp_path: Path) -> None:
    """Refused by its name; an empty file is read as nothing at all."""
    path = tmp_path / "empty.yaml"
    path.touch()

    with pytest.raises(ValueError, match=r"empty\.yaml: no sections in it"):
        inference_config.InferenceConfig.from_yaml(path)


@pytest.mark.parametrize(("mode", "queue"), [("npugraph_ex", "1"), ("eager", "2")])
def test_config_sets_task_queue_whatever_was_set(inference_config: Any, edited: Any, mode: str, queue: str) -> None:
    """The variable follows the mode and not the pod; unknown fields are dropped, an empty section is its defaults."""
    path = edited(model_config={"exe_mode": mode, "no_such_field": 1}, data_config={"input_truncated_len": 8})

    config = inference_config.InferenceConfig.from_yaml(path)

    assert (queue, 8) == (os.environ["TASK_QUEUE_ENABLE"], config.data_config.input_truncated_len)


def test_config_cache_dir_has_the_date_unless_told(
    inference_config: Any, edited: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """output_path first, then RES_PATH, then a folder of the day; the rank comes without RANK."""
    for name in ("RES_PATH", "WORK_DIR"):
        monkeypatch.delenv(name, raising=False)
    read = inference_config.InferenceConfig.from_yaml

    dated = read(edited()).cache_dir
    monkeypatch.setenv("RES_PATH", "res/mine")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK_OFFSET", "8")

    assert re.fullmatch(r"\./res/\d{8}/tiny_executor_edited/compile_cache", dated)
    assert "./res/mine/compile_cache" == read(edited()).cache_dir
    assert "out/compile_cache" == read(edited(model_config={"output_path": "out"})).cache_dir
    assert 9 == read(edited()).parallel_config.global_rank


def test_example_knows_nothing_of_cachectl() -> None:
    """No file of the program imports it or asks for its variables."""
    for path in EXAMPLE.rglob("*.py"):
        code = re.sub(r'^""".*?"""', "", path.read_text(), flags=re.DOTALL)
        assert "cachectl" not in code.lower(), path.name


@pytest.mark.real
@pytest.mark.nightly
def test_eager_drafting_changes_no_token(executor: Executor, eager: dict[str, Any]) -> None:
    """Tokens that were drafted and verified are those of decoding one at a time, some accepted and some not."""
    (plain,) = executor.run("static", "--steps", str(STEPS), exe_mode="eager", next_n=0)

    assert 0 < eager["accepted"] < STEPS * len(eager["tokens"])
    assert all(STEPS + 1 == len(row) for row in plain["tokens"])
    for row, drafted in zip(plain["tokens"], eager["tokens"], strict=True):
        assert row == drafted[: STEPS + 1]
        assert len(set(row)) > 5, "tokens that hardly change would hide a wrong graph"


@pytest.mark.real
@pytest.mark.slow
def test_static_own_cache_cold_and_warm_decode_as_eager(
    executor: Executor, eager: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program alone: its own cache directory, an artifact each for main and draft model, saved once."""
    # Else the directory is the day's, and may be another one at the second start.
    monkeypatch.setenv("RES_PATH", "res/mine")

    def saved() -> list[tuple[str, bytes, int]]:
        paths = (executor.folder / "res").rglob("compiled_module")
        return sorted((path.parent.name, path.read_bytes(), path.stat().st_mtime_ns) for path in paths)

    (cold,) = executor.run("static", "--steps", str(STEPS))
    before = saved()
    (warm,) = executor.run("static", "--steps", str(STEPS))

    assert decoded(eager) == decoded(cold) == decoded(warm)
    assert_all_stages(cold, warm)
    assert ["main_decode", "mtp_decode"] == [method for method, _, _ in before]
    # What is compiled is saved anew.
    assert before == saved()


@pytest.mark.real
@pytest.mark.slow
def test_static_under_exec_cold_then_warm_decodes_as_eager(executor: Executor, eager: dict[str, Any]) -> None:
    """Unchanged under exec: cold and recorded, then warm, main and draft; no cache directory of its own is made."""
    assert_cold_then_warm(executor, "static", [eager])


@LONG
@pytest.mark.real
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("config", "torchrun"),
    [("dynamic", False), ("static_rank4", False), ("static_rank4", True), ("dynamic_rank4", False)],
)
def test_under_exec_cold_then_warm_decodes_as_eager(tmp_path: Path, config: str, torchrun: bool) -> None:
    """The same with lengths as host lists, and with four ranks, started as the framework does or by torchrun."""
    executor = lay_executor(tmp_path, torchrun=torchrun)
    assert_cold_then_warm(executor, config, executor.run(config, "--steps", str(STEPS), exe_mode="eager"))


@LONG
@pytest.mark.real
@pytest.mark.nightly
@pytest.mark.parametrize("config", ["static", "dynamic", "static_rank4", "dynamic_rank4"])
def test_built_from_its_config_starts_warm_and_decodes_as_eager(tmp_path: Path, config: str) -> None:
    """The framework's recipe is planned, built ahead of time, ready, and the first start is warm on every rank."""
    executor = lay_executor(tmp_path)
    eager = executor.run(config, "--steps", str(STEPS), exe_mode="eager")
    executor.cachectl("init")

    before = executor.call("plan", recipe_of(config), "--json")
    built = executor.cachectl("build", recipe_of(config))
    after = executor.cachectl("plan", recipe_of(config), "--require-ready")
    ranks, report = executor.execute(config)

    lines = {(method, rank["rank"]) for method in ("main_decode", "mtp_decode") for rank in eager}
    assert lines == {(line["method"], line["rank"]) for line in json.loads(before.stdout)["entries"]}
    assert (1, len(lines), {"ready"}) == (
        before.returncode,
        len(built["built"]),
        {line["state"] for line in after["entries"]},
    )
    assert ("warm", []) == (report["outcome"], report["reasons"])
    assert [decoded(rank) for rank in eager] == [decoded(rank) for rank in ranks]


@LONG
@pytest.mark.real
@pytest.mark.nightly
@pytest.mark.parametrize("config", ["static", "dynamic", "static_rank4"])
def test_recorded_then_built_starts_warm_and_decodes_as_eager(tmp_path: Path, config: str) -> None:
    """The program runs as ever while record writes its recipe; build takes it as it stands; then it starts warm."""
    executor = lay_executor(tmp_path)
    eager = executor.run(config, "--steps", str(STEPS), exe_mode="eager")
    command = executor.command(config, {})

    recorded = executor.call(
        "simulate", "--", sys.executable, "-m", "cachectl", "record", "-o", "own.yaml", "--", *command
    )
    built = executor.cachectl("build", "own.yaml")
    ranks, report = executor.execute(config, recipe="own.yaml")

    assert 0 == recorded.returncode, recorded.stderr
    assert [decoded(rank) for rank in eager] == [decoded(rank) for rank in documents(recorded.stdout)]
    assert {"main_decode", "mtp_decode"} == {entry["method"] for entry in built["built"]}
    assert ("warm", []) == (report["outcome"], report["reasons"])
    assert [decoded(rank) for rank in eager] == [decoded(rank) for rank in ranks]


@LONG
@pytest.mark.real
@pytest.mark.nightly
@pytest.mark.parametrize("config", ["static", "dynamic"])
def test_without_cache_compile_lifted_decodes_as_eager(tmp_path: Path, config: str) -> None:
    """enable_cache_compile off: torch.compile, which --lift makes warm from what the cached program left."""
    executor = lay_executor(tmp_path)
    eager = executor.run(config, "--steps", str(STEPS), exe_mode="eager")
    executor.execute(config, "--record")

    ranks, report = executor.execute(config, "--lift", enable_cache_compile=False)

    assert ("warm", []) == (report["outcome"], report["reasons"])
    assert [decoded(rank) for rank in eager] == [decoded(rank) for rank in ranks]


@LONG
@pytest.mark.real
@pytest.mark.nightly
def test_edited_layer_is_cold_and_right_where_its_own_cache_is_wrong(tmp_path: Path) -> None:
    """One line of the model changes: the runtime's own cache decodes the old model's tokens, exec the new one's."""
    executor = lay_executor(tmp_path)
    executor.run("static", "--steps", str(STEPS))
    executor.execute("static", "--record")
    executor.edit("models/layers.py", "nn.functional.silu(", "nn.functional.relu(")
    eager = executor.run("static", "--steps", str(STEPS), exe_mode="eager")

    stale = executor.run("static", "--steps", str(STEPS))
    ranks, report = executor.execute("static")

    assert decoded(eager[0]) != decoded(stale[0])
    assert decoded(eager[0]) == decoded(ranks[0])
    assert ("cold", {("sources", "models/layers.py: SwiGLU.forward")}) == (report["outcome"], reason_names(report))


@pytest.mark.real
@pytest.mark.nightly
def test_launch_ends_all_ranks_when_one_fails(executor: Executor) -> None:
    """A rank that can't start takes the others with it, which would wait for it."""
    executor.edit_config("static_rank4", "broken", exe_mode="acl_graph")

    done = executor.call("simulate", "--", sys.executable, "launch.py", "--config", "config/broken.yaml")

    assert 1 == done.returncode
    assert "exe_mode='acl_graph'" in done.stderr


def decoded(rank: dict[str, Any]) -> tuple[Any, ...]:
    """Return what has to be equal in every way of running: tokens, drafts, and how many of them were accepted."""
    return rank["rank"], rank["tokens"], rank["drafted"], rank["accepted"]


def assert_all_stages(cold: dict[str, Any], warm: dict[str, Any]) -> None:
    """Assert that both starts tell all times, main and draft model's first calls among them."""
    assert cold["seconds"].keys() == warm["seconds"].keys() >= set(FIRST_CALLS)


def assert_cold_then_warm(executor: Executor, config: str, eager: list[dict[str, Any]]) -> None:
    """Assert that two starts under exec decode as eager does, the first cold and recorded, the second warm."""
    before = sorted((executor.folder / "res").rglob("*"))

    cold, first = executor.execute(config, "--record")
    warm, second = executor.execute(config)

    assert [decoded(rank) for rank in eager] == [decoded(rank) for rank in cold] == [decoded(rank) for rank in warm]
    assert ("cold", []) == (first["outcome"], first["recorded"]["reasons"])
    assert ("warm", []) == (second["outcome"], second["reasons"])
    for one, other in zip(cold, warm, strict=True):
        assert_all_stages(one, other)
    assert before == sorted((executor.folder / "res").rglob("*"))
