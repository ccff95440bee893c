"""The end of a script that runs as a model: at the call that was wanted, or before it, and what stays of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch

from cachectl import programs_ending
from cachectl.errors import ConfigError
from tests.scripts import Run, called, run

__all__ = ["run"]


def test_model_clean_up_of_the_script_runs_and_harms_nothing(run: Run) -> None:
    """`finally` runs while the script is ended; what it raises itself, or swallows, changes nothing."""
    text = """
said = []
def decode():
    try:
        cache_compile(Model().main_decode)(torch.ones(1, 4))
    finally:
        said.append("finally")
        raise ValueError("closed twice")
try:
    decode()
except BaseException as error:
    said.append(type(error).__name__)
cache_compile(Model().main_decode)(torch.ones(9, 4))
"""
    assert (1, 4) == called(run(text))["x"].shape
    assert ["finally", "ValueError"] == sys.modules["__main__"].said  # type: ignore[attr-defined]


def test_model_method_called_in_a_thread_ends_the_main_thread(
    run: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's worker thread makes the call, while the main thread waits for ever; nobody prints a traceback."""
    monkeypatch.setattr(programs_ending, "AGAIN_S", 120.0)  # How long the thread is waited for.
    text = """
compiled = cache_compile(Model().main_decode)
worker = threading.Thread(target=lambda: compiled(torch.ones(1, 4)))
worker.start()
threading.Event().wait()
"""
    assert (1, 4) == called(run(text))["x"].shape
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\nraise RuntimeError('no\\nweights')\n", r"raised RuntimeError: no weights \(script.py:21\)"),
        ("sys.exit(3)\n", "ended with exit code 3 before its methods were called"),
        ("sys.exit()\n", "ended with exit code 0"),
        ("x = (\n", r"raised SyntaxError: '\(' was never closed \(script.py:20\)"),
        ("import no_such_module\n", r"raised ModuleNotFoundError: .*no_such_module.* \(script.py:20\)"),
        ("torch.ones(2).view(3)\n", r"raised RuntimeError: .* \(script.py:20\)"),
        ("cache_compile(Model().main_decode)\n", "ended, and main_decode was not called"),
        ("cache_compile(Draft().mtp_decode)(torch.ones(1))\n", "main_decode was not called"),
        ("", "ended, and main_decode was not called"),
        ("cache_compile(Model().main_decode)(torch.ones(1, 4), iter([]))\n", "list_iterator"),
        ("cache_compile(len)\n", "AssertionError: the runtime compiles"),
    ],
)
def test_model_script_that_ends_first_is_a_config_error(run: Run, text: str, said: str) -> None:
    """The script's own exception, with its own line; or what it compiled instead."""
    with pytest.raises(ConfigError, match=said):
        run(text)


def test_model_too_few_kinds_of_calls_says_how_many_there_were(run: Run) -> None:
    """The recipe wants more than the program makes."""
    text = "compiled = cache_compile(Model().main_decode)\nfor _ in range(3):\n    compiled(torch.ones(1, 4))\n"

    with pytest.raises(ConfigError, match="was called with 1 kinds of input, not 2"):
        run(text, calls={"main_decode": 2})


@pytest.mark.parametrize(
    ("command", "config", "said"),
    [
        (("python", "gone.py"), {}, "gone.py: No such file"),
        (("python", "script.py"), {"folder": "gone"}, "folder .*gone: No such file"),
        (("python", "-m", "no.such.module"), {}, "no module named no.such.module"),
        (("bash", "run.sh"), {}, "is no Python"),
    ],
)
def test_model_command_that_is_not_there_is_a_config_error(
    run: Run, command: tuple[str, ...], config: dict[str, Any], said: str
) -> None:
    """No script, no folder, no module: said before anything runs."""
    with pytest.raises(ConfigError, match=said):
        run("", command=command, **config)


def test_model_default_dtype_of_the_call_stays(run: Run) -> None:
    """A program that decodes under another default dtype is built under it, though its block has ended."""
    text = """
try:
    torch.set_default_dtype(torch.float64)
    cache_compile(Model().main_decode)(torch.ones(1, 4))
finally:
    torch.set_default_dtype(torch.float32)
"""
    run(text)

    assert torch.float64 == torch.get_default_dtype()


def test_model_process_group_of_the_script_outlives_its_clean_up(run: Run) -> None:
    """A script of one rank makes its default group without any launcher; its `finally` does not take it away."""
    text = """
import torch.distributed as dist
try:
    dist.init_process_group("gloo")
    compiled = cache_compile(Model().main_decode)
    dist.all_reduce(torch.ones(1))
    compiled(torch.ones(1, 4))
finally:
    dist.destroy_process_group()
"""
    run(text)

    assert torch.distributed.is_initialized()
    assert 1 == torch.distributed.get_world_size()
    torch.distributed.destroy_process_group()


def test_model_world_that_does_not_fit_is_a_config_error(run: Run) -> None:
    """A script that joins a world of four in a build of one rank."""
    with pytest.raises(ConfigError, match="world_size 4, and this rank has world_size 1"):
        run("import torch.distributed as dist\ndist.init_process_group('gloo', rank=0, world_size=4)\n")


def test_model_script_that_waits_on_is_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose loop catches whatever a request raises, and waits for the next one."""
    monkeypatch.setattr(programs_ending, "PATIENCE_S", 0.2)
    # Longer: a second interrupt would break off asyncio's own clean-up, where that is slow.
    monkeypatch.setattr(programs_ending, "AGAIN_S", 5.0)
    text = """
import asyncio
compiled = cache_compile(Model().main_decode)

async def request():
    compiled(torch.ones(1, 4))

async def serve():
    task = asyncio.create_task(request())
    await asyncio.Event().wait()

asyncio.run(serve())
"""
    assert (1, 4) == called(run(text))["x"].shape


def test_model_swallowed_end_of_a_plain_loop_is_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever swallows every exception is interrupted again where it waits."""
    monkeypatch.setattr(programs_ending, "PATIENCE_S", 0.1)
    monkeypatch.setattr(programs_ending, "AGAIN_S", 0.1)
    text = """
compiled = cache_compile(Model().main_decode)
try:
    compiled(torch.ones(1, 4))
except BaseException:
    pass
try:
    threading.Event().wait()
except BaseException:
    pass
threading.Event().wait()
"""
    assert (1, 4) == called(run(text))["x"].shape


def test_model_thread_that_the_script_joins_ends_without_a_word(
    run: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in its join, CPython takes the thread for ended: it is waited for all the same."""
    monkeypatch.setattr(programs_ending, "AGAIN_S", 120.0)
    text = """
import time
compiled = cache_compile(Model().main_decode)
def work():
    try:
        compiled(torch.ones(1, 4))
    finally:
        time.sleep(0.5)
worker = threading.Thread(target=work)
worker.start()
worker.join()
"""
    assert (1, 4) == called(run(text))["x"].shape
    wait_for(sys.modules["__main__"].worker)
    assert "Traceback" not in capfd.readouterr().err


def wait_for(thread: threading.Thread) -> None:
    """Wait until a thread has ended; join() may say so too early."""
    until_s = time.monotonic() + 120
    while thread.ident in sys._current_frames() and time.monotonic() < until_s:
        time.sleep(0.01)


def test_model_interrupt_after_the_script_breaks_nothing_off(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread makes the last call while the main one ends by itself: what puts the process back is not interrupted."""
    change = os.chdir
    came = []

    def interrupted(folder: Any) -> None:
        if came:
            # As the one that is sent when a thread made the call, and that comes late.
            signal.raise_signal(signal.SIGINT)
        came.append(folder)
        change(folder)

    before = (os.getcwd(), signal.getsignal(signal.SIGINT), threading.excepthook)
    monkeypatch.setattr(os, "chdir", interrupted)
    text = """
compiled = cache_compile(Model().main_decode)
worker = threading.Thread(target=lambda: compiled(torch.ones(1, 4)))
worker.start()
worker.join()
"""
    assert (1, 4) == called(run(text))["x"].shape
    assert 2 == len(came)
    assert before == (os.getcwd(), signal.getsignal(signal.SIGINT), threading.excepthook)


def test_model_objects_of_the_script_outlive_it(run: Run) -> None:
    """What a function of the script made is not let go when it is ended: its last word would take a group along."""
    text = """
said = []
class Owner:
    def __del__(self):
        said.append("gone")

def main():
    owner = Owner()
    cache_compile(Model().main_decode)(torch.ones(1, 4))

main()
"""
    model = run(text)

    assert [] == sys.modules["__main__"].said  # type: ignore[attr-defined]
    del model


def test_model_inference_mode_of_the_call_is_not_the_builds(run: Run) -> None:
    """A program that decodes in inference mode: its tensors stay what they are, and the mode ends with the script."""
    text = """
with torch.inference_mode():
    first, second = Model(), Draft()
    cache_compile(first.main_decode)(torch.ones(1, 4))
    cache_compile(second.mtp_decode)(torch.ones(1, 4))
"""
    model = run(text, "main_decode", "mtp_decode")

    assert not torch.is_inference_mode_enabled()
    assert [True, True] == [called(model, name)["x"].is_inference() for name in ("main_decode", "mtp_decode")]
