"""The recorder in a program's process: whatever becomes of the recording, the program gets its answer."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cachectl.build import drafting
from cachectl.build.call_drafts import leave_refusal, read_drafts
from cachectl.build.drafting import CallRecorder
from cachectl.errors import BuildError
from cachectl.schemas.boot import Reason

pytestmark = [pytest.mark.real]


@pytest.fixture(scope="module")
def torch() -> Any:
    """Torch, without torch_npu: what is compiled here runs on Dynamo's own backend."""
    return pytest.importorskip("torch")


class Runtime:
    """A runtime that compiles with Dynamo alone, and saves what it is told to."""

    name = "npugraph_ex"

    def __init__(self, torch: Any, *, saves: bytes | None = None) -> None:
        self.torch = torch
        self.tensor_type = torch.Tensor
        self.plain_tensor_types = (torch.Tensor,)
        self.saves = saves
        self.compiles = 0

    def format_of(self, tensor: Any) -> None:
        return None

    def found(self, options: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
        return {}

    def compile(
        self, method: types.MethodType, *, dynamic: bool, options: Mapping[str, Any], cache_dir: Path
    ) -> Callable[..., Any]:
        self.compiles += 1
        if self.saves is not None:
            (cache_dir / "compiled_module").write_bytes(self.saves)
        compiled: Callable[..., Any] = self.torch.compile(method, backend="eager", fullgraph=True, dynamic=dynamic)
        return compiled


@pytest.fixture
def make(torch: Any, tmp_path: Path) -> Callable[..., tuple[CallRecorder, Runtime]]:
    """Make a recorder of a model's method over a runtime that saves nothing."""
    torch._dynamo.reset()

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
        def decode(self, x: Any, times: int = 2) -> Any:
            if times < 0:
                raise ValueError("times below 0")
            return x * times

    folders = iter(range(100))

    def cold_folder() -> Path:
        folder = tmp_path / f"cold{next(folders)}"
        folder.mkdir()
        return folder

    def made(runtime: Runtime | None = None) -> tuple[CallRecorder, Runtime]:
        runtime = runtime or Runtime(torch)
        recorder = CallRecorder(
            Model().decode, runtime, dynamic=False, options={}, new_cold_folder=cold_folder, folder=tmp_path / "record"
        )
        return recorder, runtime

    return made


def call(recorder: CallRecorder, *args: Any, **kwargs: Any) -> Any:
    """Make a cold call as the cached method does."""
    compiled = recorder.compiled(args, kwargs)
    assert compiled is not None
    return compiled(*args, **kwargs)


def refused(tmp_path: Path) -> list[str]:
    """Return what the drafts say that was not kept."""
    return [str(draft.refused.wanted) for draft in read_drafts(tmp_path / "record") if draft.refused is not None]


def test_call_whose_artifact_was_not_saved_is_answered_and_told(
    torch: Any, make: Callable[..., tuple[CallRecorder, Runtime]], tmp_path: Path
) -> None:
    """The reason is left once, and what was compiled goes on answering: nothing is compiled twice."""
    recorder, runtime = make()

    answers = [call(recorder, torch.ones(2)).tolist() for _ in range(3)]

    assert ([[2.0, 2.0]] * 3, 1) == (answers, runtime.compiles)
    (reason,) = refused(tmp_path)
    assert "did not save the artifact: found 0 saved graphs" in reason


def test_call_after_one_that_was_refused_is_answered_by_the_same_code(
    torch: Any, make: Callable[..., tuple[CallRecorder, Runtime]]
) -> None:
    """Another shape: Dynamo compiles it, as it would without a recorder; nothing more is recorded."""
    recorder, runtime = make()
    call(recorder, torch.ones(2))

    assert ([2.0] * 3, 1) == (call(recorder, torch.ones(3)).tolist(), runtime.compiles)


def test_error_of_the_program_is_the_programs(
    torch: Any, make: Callable[..., tuple[CallRecorder, Runtime]], tmp_path: Path
) -> None:
    """What the method raises comes out as without a recorder, and Dynamo is as it was."""
    before = torch._dynamo.guards.CheckFunctionManager.compile_check_fn
    recorder, _ = make()

    with pytest.raises(Exception, match="times below 0"):
        call(recorder, torch.ones(2), -1)

    assert before is torch._dynamo.guards.CheckFunctionManager.compile_check_fn
    assert [] == refused(tmp_path)


def test_arguments_that_do_not_fit_are_left_to_the_method(
    torch: Any, make: Callable[..., tuple[CallRecorder, Runtime]], tmp_path: Path
) -> None:
    """The recorder says nothing of them."""
    recorder, runtime = make()

    assert recorder.compiled((torch.ones(2), 1, 2), {}) is None
    assert (0, []) == (runtime.compiles, refused(tmp_path))


def test_argument_that_no_spec_can_say_is_run_as_ever_and_told(
    torch: Any, make: Callable[..., tuple[CallRecorder, Runtime]], tmp_path: Path
) -> None:
    """An object of the program's own."""
    recorder, runtime = make()

    assert recorder.compiled((torch.ones(2), object()), {}) is None
    assert 0 == runtime.compiles
    assert ["builtins.object"] == refused(tmp_path)


def test_torch_that_cannot_be_watched_is_no_hindrance(
    torch: Any,
    make: Callable[..., tuple[CallRecorder, Runtime]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unknown torch: the call is compiled and answered, and the report says why nothing is kept."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise BuildError("torch 9 keeps its guards in another way", hint="use another torch")

    monkeypatch.setattr(drafting, "CompileRecorder", refuse)
    recorder, runtime = make()

    assert ([2.0, 2.0], 1) == (call(recorder, torch.ones(2)).tolist(), runtime.compiles)
    assert ["torch 9 keeps its guards in another way"] == refused(tmp_path)


def test_folder_that_cannot_be_written_is_no_hindrance(
    torch: Any, make: Callable[..., tuple[CallRecorder, Runtime]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason goes to stderr then."""
    (tmp_path / "record").write_text("no folder")
    recorder, _ = make()

    assert [2.0, 2.0] == call(recorder, torch.ones(2)).tolist()
    assert "cachectl: decode is not recorded" in capsys.readouterr().err


def test_two_threads_compile_and_one_is_recorded(
    torch: Any, make: Callable[..., tuple[CallRecorder, Runtime]], tmp_path: Path
) -> None:
    """While one compile is watched, another is run as ever, and told."""
    recorder, _ = make()

    with drafting._recording:
        answer = call(recorder, torch.ones(2))

    assert [2.0, 2.0] == answer.tolist() == call(recorder, torch.ones(2)).tolist()
    (draft,) = read_drafts(tmp_path / "record")
    assert draft.refused is not None
    assert "another thread was compiling" in draft.refused.hint


def test_refusal_of_exec_is_the_reason(
    torch: Any, make: Callable[..., tuple[CallRecorder, Runtime]], tmp_path: Path, repository: Path
) -> None:
    """Where exec could not say what may be recorded, its reason is the call's."""
    saved = (repository / "tests" / "runtimes" / "artifact" / "data" / "npugraph_ex_static.bin").read_bytes()
    runtime = Runtime(torch, saves=saved)
    runtime.operators = lambda names, strict: {}  # type: ignore[attr-defined]
    recorder, _ = make(runtime)
    (tmp_path / "record").mkdir()
    leave_refusal(tmp_path / "record", Reason("toolchain", "cann", None, "no CANN", "absent", "source set_env.sh"))

    assert [2.0, 2.0] == call(recorder, torch.ones(2)).tolist()
    assert ["no CANN"] == refused(tmp_path)


def test_watcher_of_the_runtime_sees_new_code_only(torch: Any) -> None:
    """Dynamo's map of its own code stays whole for Dynamo, and is a view for whoever looks it up by its name."""
    utils = sys.modules["torch._dynamo.utils"]
    whole = utils.orig_code_map

    def original() -> None: ...

    old, new = (compile(f"{number}", "made", "eval") for number in (1, 2))
    whole[old] = original.__code__
    with drafting._only_new_code():
        whole[new] = original.__code__
        seen = utils.orig_code_map.values

    assert [id(new)] == list(seen)
    assert whole is utils.orig_code_map
    assert original.__code__ is whole[old]


def test_recorder_is_what_the_cached_method_expects() -> None:
    """The protocol that boot names, without importing it from here."""
    from cachectl.boot.cases import ColdCalls

    assert (
        inspect.signature(ColdCalls.compiled).parameters.keys()
        == inspect.signature(CallRecorder.compiled).parameters.keys()
    )
