"""Refusals of a build, one by one: what passes, what does not, and the words."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch

from cachectl.build import gates
from cachectl.build.job import CaseJob
from cachectl.build.recording import eager_run
from cachectl.build.state import Snapshot
from cachectl.build.steps import StepInputs, run_steps
from cachectl.errors import BuildError
from cachectl.schemas.keying import KEY_PARTS

CASE = CaseJob(0, "main_decode", {"name": "b4"})
DATA = Path(__file__).resolve().parents[1] / "runtimes" / "artifact" / "data"


class Model(torch.nn.Module):
    """A decode step with a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(3))

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the cache; return something of both."""
        self.cache.add_(x)
        return x * 2 + self.cache


Step = Callable[..., Any]


def held_against(
    found: Callable[[Model], Step],
    options: Mapping[str, Any] | None = None,
    eager: Callable[[Model], Step] | None = None,
) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Run four steps eagerly and as `found` does them; return what the gates say of the two."""
    model = Model()
    inputs = {"x": torch.arange(3.0)}
    snapshot = Snapshot(model, inputs)
    calls = StepInputs(inputs, snapshot, lambda: {"x": torch.arange(3.0)}, 4)
    expected, _ = eager_run(eager(model) if eager is not None else model.step, calls, snapshot)
    ran = run_steps(found(model), calls, snapshot)
    snapshot.restore()
    differences = gates.compare_runs(CASE, calls, snapshot, expected, ran, rtol=1e-3, atol=1e-3)
    return differences, gates.held_values(CASE, expected, ran, options or {})


def in_one_place(model: Model) -> Step:
    """A replay: every output stands where the last one did."""
    graph_memory = torch.zeros(3)
    return lambda x: graph_memory.copy_(model.step(x))


def into_the_first_input(model: Model) -> Step:
    """A replay without clones of the inputs: later ones are copied into the first one."""
    first: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        first.append(x)
        first[0].copy_(x)
        return model.step(first[0])

    return step


def test_compare_runs_returns_the_largest_difference_of_each_step_and_state() -> None:
    """Within the tolerances the numbers are kept, for the entry's provenance."""
    differences, _ = held_against(lambda model: lambda x: model.step(x) + 5e-4)

    assert {
        "first step": 5,
        "state after it": 0,
        "second step, other values": 5,
        "third step, other values": 5,
        "state before the last step": 0,
        "fourth step, inputs made anew": 5,
        "state after the last step": 0,
        "last step's inputs after it": 0,
    } == {name: round(difference * 1e4) for name, difference in differences.items()}


def _repeats_itself(model: Model) -> Step:
    outputs: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        outputs.append(model.step(x))
        return outputs[0].clone()

    return step


def _forgets_its_cache(model: Model) -> Step:
    return lambda x: x * 2 + model.cache + x


def _wrong_after(count: int) -> Callable[[Model], Step]:
    def wrong(model: Model) -> Step:
        calls: list[int] = []

        def step(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return model.step(x) + (len(calls) > count)

        return step

    return wrong


def _writes_its_input(model: Model) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        result = model.step(x)
        x.zero_()
        return result

    return step


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (_repeats_itself, "the second step, other values: output: largest difference "),
        (_forgets_its_cache, "the state after it: cache: largest difference 2 (rtol 0.001, atol 0.001)"),
        (_wrong_after(0), "the first step: output: largest difference 1 (rtol 0.001, atol 0.001)"),
        (_wrong_after(2), "the third step, other values: output: largest difference 1 "),
        (_wrong_after(3), "the fourth step, inputs made anew: output: largest difference 1 "),
        (_writes_its_input, "the last step's inputs after it: output['x']: largest difference 2 "),
    ],
)
def test_compare_runs_names_step_place_and_tolerances(found: Callable[[Model], Step], words: str) -> None:
    """The first step, or state between, that differs ends the build."""
    with pytest.raises(BuildError) as raised:
        held_against(found)

    assert f"main_decode [b4]: compiled and eager differ in {words}" in raised.value.message


def test_held_values_are_told_where_no_option_keeps_them() -> None:
    """Outputs in a graph's memory and inputs that later ones are copied into: a rule for programs, no fault."""
    assert {"outputs": [], "inputs": []} == held_against(lambda model: model.step)[1]
    assert {"outputs": ["output"], "inputs": []} == held_against(in_one_place)[1]
    assert {"outputs": [], "inputs": ["inputs['x']"]} == held_against(into_the_first_input)[1]


@pytest.mark.parametrize(
    ("found", "option", "place"),
    [(in_one_place, "clone_output", "output"), (into_the_first_input, "clone_input", "inputs['x']")],
)
@pytest.mark.parametrize("value", [True, "True"])
def test_held_values_are_refused_where_an_option_says_they_are_kept(
    found: Callable[[Model], Step], option: str, place: str, value: Any
) -> None:
    """With the option the program may rely on it; a runtime that breaks it would give wrong values."""
    with pytest.raises(BuildError, match=rf"{option} is on, and a later compiled call overwrites") as raised:
        held_against(found, {option: value})

    assert place in raised.value.message


def _returns_its_cache(model: Model) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        return model.cache.add_(x)

    return step


def test_output_that_is_the_cache_changes_in_eager_too() -> None:
    """What eager doesn't keep nobody can have kept."""
    _, held = held_against(_returns_its_cache, {"clone_output": True}, _returns_its_cache)

    assert {"outputs": [], "inputs": []} == held


def test_input_that_is_an_output_is_told_and_no_options_matter() -> None:
    """The runtime clones neither, whatever the options say."""
    options = {"clone_output": True, "clone_input": True}

    def eager(model: Model) -> Step:
        return lambda x: (model.step(x), x)

    def replay(model: Model) -> Step:
        first: list[torch.Tensor] = []

        def step(x: torch.Tensor) -> Any:
            first.append(x)
            first[0].copy_(x)
            return model.step(first[0]), first[0]

        return step

    assert {"outputs": ["output[1]"], "inputs": ["inputs['x']"]} == held_against(replay, options, eager)[1]


def test_loaded_artifact_that_overwrites_more_than_the_graph_is_refused() -> None:
    """A cold start would be right where the warm one is wrong."""
    nothing: dict[str, list[str]] = {"outputs": [], "inputs": []}
    outputs = {"outputs": ["output[0]"], "inputs": []}

    gates.refuse_other_held(CASE, outputs, nothing)
    gates.refuse_other_held(CASE, outputs, outputs)
    with pytest.raises(BuildError, match=r"loaded artifact overwrites output\[0\], which the compiled graph leaves"):
        gates.refuse_other_held(CASE, nothing, outputs)


PARTS: dict[str, Any] = {name: {} for name in KEY_PARTS} | {"environment": {"observed": {"A": "1"}}}


def test_refuse_other_key_lets_an_equal_key_pass() -> None:
    """Equal parts, in whatever order they were found; one value less is another key."""
    found = dict(reversed(PARTS.items()))

    gates.refuse_other_key(CASE, PARTS, found)
    with pytest.raises(BuildError, match="another key: environment"):
        gates.refuse_other_key(CASE, PARTS, {**found, "environment": {"observed": {}}})


def test_refuse_other_key_names_the_part_and_what_differs() -> None:
    """A variable that only one of two processes read, as where the order of a set decides."""
    found = {**PARTS, "environment": {"observed": {"A": "1", "B": None}}}

    with pytest.raises(BuildError, match=r"another key: environment: observed.B in one of them only"):
        gates.refuse_other_key(CASE, PARTS, found)


@pytest.mark.parametrize("count", [0, 1])
def test_refuse_recompiles_lets_one_graph_pass(count: int) -> None:
    """One trace is what is wanted; none is found elsewhere; a second one is refused, also without words of upstream."""
    gates.refuse_recompiles(CASE, count, None)
    with pytest.raises(BuildError, match="traced 2 times"):
        gates.refuse_recompiles(CASE, 2, None)


def test_refuse_recompiles_repeats_the_runtimes_words_on_one_line() -> None:
    """How often, and what the runtime said of it."""
    with pytest.raises(BuildError, match=r"traced 2 times, .*: Skip cache as x recompiled"):
        gates.refuse_recompiles(CASE, 2, "Skip cache\n  as x recompiled")


def test_refuse_host_reads_names_file_line_and_function(tmp_path: Path) -> None:
    """`.item()` of the model's own code; torch's is torch's business."""
    text = "def step(x):\n    y = x + 1\n    return y.item()\n"
    own, torchs = {}, {}  # type: ignore[var-annotated]
    exec(compile(text, str(tmp_path / "model.py"), "exec"), own)
    exec(compile(text, f"{os.sep}site{os.sep}torch{os.sep}nn.py", "exec"), torchs)

    gates.refuse_host_reads(CASE, [torchs["step"].__code__])
    with pytest.raises(BuildError, match=r"model\.py:3 step calls \.item\(\)"):
        gates.refuse_host_reads(CASE, [torchs["step"].__code__, own["step"].__code__])


@pytest.mark.parametrize("name", ["items", "item_size"])
def test_refuse_host_reads_lets_other_names_pass(name: str) -> None:
    """Only `.item`, which is refused beside the other name."""
    passing, refused = {}, {}  # type: ignore[var-annotated]
    exec(f"def step(x):\n    return x.{name}", passing)
    exec(f"def step(x):\n    return x.{name}, x.item()", refused)

    gates.refuse_host_reads(CASE, [passing["step"].__code__])
    with pytest.raises(BuildError, match=r"step calls \.item\(\)"):
        gates.refuse_host_reads(CASE, [refused["step"].__code__])


def test_saved_artifact_is_the_one_that_was_saved(tmp_path: Path) -> None:
    """Wherever below the runtime put it."""
    (tmp_path / "a" / "main_decode").mkdir(parents=True)
    (tmp_path / "a" / "main_decode" / "compiled_module").write_bytes(b"graph")

    assert b"graph" == gates.saved_artifact(CASE, tmp_path, None).read_bytes()


@pytest.mark.parametrize(
    ("contents", "skipped", "words"),
    [
        ([], None, "found 0 saved graphs, wanted 1"),
        ([b""], None, "found 0 saved graphs, wanted 1"),
        ([b"a", b"b"], None, "found 2 saved graphs, wanted 1"),
        ([b"a"], "Skip cache as failed to serialize", "Skip cache as failed to serialize"),
    ],
)
def test_saved_artifact_missing_is_refused_with_the_runtimes_words(
    tmp_path: Path, contents: list[bytes], skipped: str | None, words: str
) -> None:
    """None, an empty one, several, or one that the runtime took back."""
    for number, content in enumerate(contents):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "compiled_module").write_bytes(content)

    with pytest.raises(BuildError, match=words):
        gates.saved_artifact(CASE, tmp_path, skipped)


def test_refuse_changing_text_names_the_line() -> None:
    """The runtime names its cache after str(model): a counter in it and nothing is ever found again."""

    class Counting:
        count = 0

        def __str__(self) -> str:
            self.count += 1
            return f"Model(\n  (layer): Linear()\n  seen {self.count} times\n)"

    with pytest.raises(BuildError) as caught:
        gates.refuse_changing_text(CASE, Counting())

    assert "main_decode [b4]: str(model) is another text each time" in caught.value.message
    assert "seen 1 times" in caught.value.message
    gates.refuse_changing_text(CASE, object())


def test_refuse_uncacheable_lets_a_real_artifact_pass() -> None:
    """What the runtime saved for a plain decoder."""
    summary = gates.refuse_uncacheable(CASE, (DATA / "npugraph_ex_static.bin").read_bytes())

    assert "npugraph_ex" == summary.runtime


def test_refuse_uncacheable_says_what_it_cannot_read() -> None:
    """A form this version does not know is not published unseen."""
    with pytest.raises(BuildError, match="the artifact can't be read"):
        gates.refuse_uncacheable(CASE, b"something else")
