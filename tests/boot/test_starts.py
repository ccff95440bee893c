"""Starts that die after a hand-out: counted once each, forgotten at a success, and two of them make the third cold."""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachectl.boot import starts as starts_module
from cachectl.boot.handout import Handout
from cachectl.boot.start_log import describe
from cachectl.boot.starts import DEATH_DAYS, Death, Starts
from cachectl.boot.watch import StartWatch
from tests.stores import Hooked, MadeStore

# A program's process on a hand-out, without a runtime: what it does there is its argument.
PROGRAM = """
import atexit, os, signal, sys, time
from pathlib import Path
from cachectl.boot.handout import Handout
from cachectl.boot.watch import StartWatch

exec_folder = os.environ.get("CACHECTL_EXEC")
handout = Handout.read(Path(os.environ["CACHECTL_HANDOUT"]))
watch = StartWatch(handout, exec_id=Path(exec_folder).name if exec_folder else None)
atexit.register(watch.end)
if "bystander" not in sys.argv: watch.using()
b4, b2 = sorted(handout.entries, key=lambda item: item.entry.case, reverse=True)
def die(number=9): os.kill(os.getpid(), number)
exec(sys.argv[1])
"""
BEGIN_AND_DIE = "watch.begin(b4); die()"
SUCCEED = "watch.begin(b4); watch.success(b4)"
QUARANTINE = [("policy", "quarantine", "policy")]


def start(made: MadeStore, does: str, hooked: Hooked | None = None) -> int:
    """Run a program on a hand-out, a new one unless given; return its exit code."""
    hooked = hooked or made.hook()
    assert "warm" == hooked.outcome, hooked.stderr
    return run(made, does, hooked).returncode


def run(made: MadeStore, does: str, hooked: Hooked) -> subprocess.CompletedProcess[str]:
    """Run a program on a hand-out."""
    environ = made.hook_environ({"CACHECTL_HANDOUT": hooked.report["env"]["CACHECTL_HANDOUT"]})
    command = [sys.executable, "-c", PROGRAM, does]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)


def execute(made: MadeStore, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command under exec of the recipe."""
    words = [sys.executable, "-m", "cachectl", "exec", str(made.recipe), "--", *command]
    return subprocess.run(words, env=made.hook_environ(), capture_output=True, text=True, timeout=200, check=False)


def deaths(made: MadeStore) -> dict[str, int]:
    """Return how many deaths each entry has, by name; what is not settled yet is settled."""
    starts = Starts.of(made.warm_dir)
    starts.settle()
    assert [] == starts.problems
    return {item["name"].partition(" ")[0]: len(item["deaths"]) for item in starts.quarantined()}


def test_two_deaths_make_the_third_hook_cold(made: MadeStore) -> None:
    """The reason names the entry, when its starts died, and what lifts it."""
    codes = [start(made, BEGIN_AND_DIE) for _ in range(2)]

    hooked = made.hook("--strict")

    assert [-9, -9] == codes
    assert ("cold", QUARANTINE, 1) == (hooked.outcome, hooked.against, hooked.returncode)
    (reason,) = hooked.report["reasons"]
    assert reason["stored"].startswith("main_decode/b4 rank 0: starts died at 20")
    key = next(iter(Starts.of(made.warm_dir).quarantined()))["key"]
    assert reason["hint"].startswith(key)
    assert reason["hint"].endswith(f"run: cachectl release {key[7:19]}")
    assert {} == hooked.report["env"]
    assert QUARANTINE == made.hook().against
    assert QUARANTINE == made.hook("--read-only").against


def test_one_death_is_warm(made: MadeStore) -> None:
    """A start may die of anything."""
    start(made, BEGIN_AND_DIE)

    assert "warm" == made.hook().outcome
    assert {"main_decode/b4": 1} == deaths(made)


def test_success_in_between_forgets_the_deaths(made: MadeStore) -> None:
    """Two in a row count."""
    for does in (BEGIN_AND_DIE, SUCCEED, BEGIN_AND_DIE):
        start(made, does)

    assert "warm" == made.hook().outcome
    assert {"main_decode/b4": 1} == deaths(made)


def test_death_after_a_success_is_none(made: MadeStore) -> None:
    """What happens in steady state is not the artifact's doing."""
    for _ in range(3):
        start(made, f"{SUCCEED}; die(signal.SIGSEGV)")

    assert {} == deaths(made)
    assert "warm" == made.hook().outcome


def test_entry_that_died_is_told_from_the_one_that_came_through(made: MadeStore) -> None:
    """Only what was begun and did not come back is kept away from."""
    for _ in range(2):
        start(made, f"{SUCCEED}; watch.begin(b2); die()")

    assert {"main_decode/b2": 2} == deaths(made)


def test_death_before_anything_was_loaded_counts_for_what_was_held(made: MadeStore) -> None:
    """Nobody knows what it died of; never worse than cold."""
    for _ in range(2):
        start(made, "die()")

    assert {"main_decode/b4": 2, "main_decode/b2": 2} == deaths(made)
    assert made.hook().report["reasons"][0]["hint"].count(" ") > 0
    assert QUARANTINE == made.hook().against


def test_death_after_a_cold_call_is_none(made: MadeStore) -> None:
    """A start that went cold and was killed later did not die of what it left alone; of what it began it did."""
    for _ in range(3):
        start(made, "watch.cold(); die()")
    assert {} == deaths(made)

    for _ in range(2):
        start(made, "watch.cold(); watch.begin(b4); die()")
    assert {"main_decode/b4": 2} == deaths(made)


def test_process_without_a_method_is_no_start(made: MadeStore) -> None:
    """A pool's workers have the hand-out in their environment and end as they like: nothing of it is to blame."""
    hooked = made.hook()
    environ = made.hook_environ({"CACHECTL_HANDOUT": hooked.report["env"]["CACHECTL_HANDOUT"]})
    for does in ("os._exit(0)", "die()"):
        subprocess.run([sys.executable, "-c", PROGRAM, does, "bystander"], env=environ, timeout=200, check=False)

    assert {} == deaths(made)


def test_exec_child_that_vanishes_from_a_program_that_ends_well_is_no_death(made: MadeStore) -> None:
    """CMD has done what it was started for."""
    launcher = "import subprocess, sys; subprocess.run(sys.argv[1:])"

    done = execute(made, sys.executable, "-c", launcher, sys.executable, "-c", PROGRAM, "os._exit(0)")

    assert (0, {}) == (done.returncode, deaths(made))


@pytest.mark.parametrize("does", ["sys.exit(1)", "raise RuntimeError('weights are missing')", "pass", "watch.end()"])
def test_end_of_its_own_will_before_loading_is_no_death(made: MadeStore, does: str) -> None:
    """A program that fails by itself is not the cache's doing."""
    for _ in range(3):
        start(made, does)

    assert {} == deaths(made)
    assert [] == list((made.warm_dir / "starts" / "open").iterdir())


def test_first_call_that_raises_is_a_death(made: MadeStore) -> None:
    """As the runtime's own assertion at each restart: the program ends by itself, and would for ever."""
    for _ in range(2):
        assert 1 == start(made, "watch.begin(b4); raise AssertionError('expect size 4')")

    hooked = made.hook()

    assert QUARANTINE == hooked.against
    assert "its first call failed" in hooked.report["reasons"][0]["hint"]


def test_load_that_was_withdrawn_is_no_death(made: MadeStore) -> None:
    """The runtime refused it and the program went on cold, or somebody pressed Ctrl-C."""
    for _ in range(3):
        start(made, "watch.begin(b4); watch.withdraw(b4); sys.exit(1)")

    assert {} == deaths(made)


def test_live_start_is_not_settled(made: MadeStore) -> None:
    """Whatever another hook finds meanwhile."""
    hooked = made.hook()
    environ = made.hook_environ({"CACHECTL_HANDOUT": hooked.report["env"]["CACHECTL_HANDOUT"]})
    command = [sys.executable, "-c", PROGRAM, "watch.begin(b4); print('begun', flush=True); time.sleep(600)"]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        made.hook()
        assert {} == deaths(made)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert {"main_decode/b4": 1} == deaths(made)


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        ("watch.begin(b4)\nif os.fork() == 0: die()\nos.wait(); watch.success(b4)", {}),
        ("watch.begin(b4)\nif os.fork() == 0: watch.begin(b2); die()\nos.wait(); watch.success(b4)", {"b2": 1}),
        ("watch.begin(b4)\nif os.fork() == 0: time.sleep(600)\ndie()", {"b4": 1}),
        ("if os.fork() == 0: sys.exit(0)\nos.wait(); watch.begin(b4); die()", {"b4": 1}),
    ],
    ids=["child dies", "child loads and dies", "child outlives", "child ends"],
)
def test_forked_child_is_a_start_of_its_own(made: MadeStore, does: str, expected: dict[str, int]) -> None:
    """A data loader's worker that is killed is no death; its life hides no death of its parent."""
    hooked = made.hook()
    environ = made.hook_environ({"CACHECTL_HANDOUT": hooked.report["env"]["CACHECTL_HANDOUT"]})
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, does], env=environ, start_new_session=True)
    process.wait()
    wanted = {f"main_decode/{name}": count for name, count in expected.items()}
    try:
        # A child that was made a moment before its parent died lets go of its log when it first runs.
        deadline_s = time.monotonic() + 120
        while (found := deaths(made)) != wanted and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert wanted == found
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def test_restart_without_a_hook_is_cold_at_the_third(made: MadeStore) -> None:
    """A container started again after its init container has ended runs no hook: the process looks by itself."""
    hooked = made.hook()
    codes = [start(made, BEGIN_AND_DIE, hooked) for _ in range(2)]

    third = run(made, "print(*watch.refused(b4), '|', *watch.refused(b2))", hooked)

    assert [-9, -9] == codes
    assert third.stdout.startswith("policy: quarantine: stored main_decode/b4")
    assert third.stdout.endswith("|\n")
    assert 0 == third.returncode


def test_entry_built_anew_has_a_new_chance(made: MadeStore) -> None:
    """Another artifact under the same key is another thing; release is not wanted."""
    (entry,) = (item.entry for item in read(made).entries if item.entry.case == "b4")
    other = type(entry)(**{**vars(entry), "files": entry.files[:1]})

    assert describe(entry)[0] != describe(other)[0]
    assert describe(entry)[1:] == describe(other)[1:]


def test_older_set_that_is_well_serves(made: MadeStore) -> None:
    """The entries of the newest set are kept away from, another set's are not, and the reason is told."""
    newest = made.publish("newer")
    for _ in range(2):
        start(made, BEGIN_AND_DIE)

    hooked = made.hook()

    assert ("warm", QUARANTINE) == (hooked.outcome, hooked.against)
    assert newest.warm_set != hooked.report["warm_set"]


def read(made: MadeStore) -> Handout:
    """Hook and read what was handed out."""
    return Handout.read(Path(made.hook().report["env"]["CACHECTL_HANDOUT"]))


def item(name: str = "a") -> tuple[str, str, str]:
    """Return an entry as the logs hold it."""
    return name, f"sha256:{name}", f"decode/{name} rank 0"


def test_note_death_of_one_start_counts_once(tmp_path: Path) -> None:
    """Whoever finds out, and however often: a kill between noting and removing the log changes nothing."""
    starts = Starts.of(tmp_path)
    for _ in range(3):
        assert starts.note_death(item(), Death("start", time.time(), "exit code 137"))

    assert [1] == [len(found["deaths"]) for found in starts.quarantined()]


def test_deaths_are_bounded_and_grow_old(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A week later the entry is tried again; a crash loop's file does not grow (field report D3)."""
    handed = read(made).entries[0]
    starts = Starts.of(made.warm_dir)
    for number in range(20):
        starts.note_death(describe(handed.entry), Death(str(number), time.time(), "exit code 139"))

    assert [8] == [len(found["deaths"]) for found in starts.quarantined()]
    assert starts.refusal(handed.entry) is not None
    assert starts.refusal(handed.entry, time.time() + (DEATH_DAYS + 1) * 86400) is None
    monkeypatch.setattr(starts_module, "_ENTRIES_KEPT", 3)
    for name in "abcdef":
        starts.note_death(item(name), Death("start", time.time(), "x"))
    assert 3 == len(starts.quarantined())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"schema": "cachectl/deaths/v9"}', b"[" * 100_000, b"\xff"])
def test_unreadable_state_is_ignored_and_told(made: MadeStore, data: bytes) -> None:
    """Never an exception, and never a reason to go cold."""
    start(made, BEGIN_AND_DIE)
    deaths(made)
    (state,) = (made.warm_dir / "starts" / "entries").iterdir()
    state.write_bytes(data)
    (made.warm_dir / "starts" / "open" / "strange").write_bytes(data)

    hooked = made.hook()

    assert ("warm", {("store", "starts", "corrupt")}) == (hooked.outcome, set(hooked.against))
    assert str(state) in str(hooked.report["reasons"])
    # A log that can't be read is told once.
    assert [] == list((made.warm_dir / "starts" / "open").iterdir())


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
@pytest.mark.parametrize("place", ["", "open", "open/x", "entries", "lock"])
def test_planted_state_is_not_followed(tmp_path: Path, place: str, kind: str) -> None:
    """Nothing hangs, nothing raises, and nothing is written through a link (field report P9)."""
    path = tmp_path / "warm" / "starts" / place
    (tmp_path / "victim").mkdir()
    path.parent.mkdir(mode=0o700, parents=True)
    if kind == "link":
        path.symlink_to(tmp_path / "victim")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    starts = Starts.of(tmp_path / "warm")

    starts.settle()
    noted = starts.note_death(item(), Death("start", time.time(), "x"))
    starts.succeeded("a")
    starts.quarantined()

    # A FIFO is as good a lock as a file.
    assert noted is (place == "open/x" or (place, kind) == ("lock", "fifo") or (place != "lock" and kind == "folder"))
    assert [] == list((tmp_path / "victim").iterdir())


def test_log_that_breaks_off_is_read_as_far_as_it_goes(made: MadeStore) -> None:
    """Its process died while it wrote."""
    start(made, 'watch.begin(b4); os.write(watch._descriptor, b\'{"success": "abc\'); die()')

    assert {"main_decode/b4": 1} == deaths(made)


def test_log_without_a_beginning_goes(made: MadeStore) -> None:
    """A process that was killed before its log was whole leaves it under another name, for a minute."""
    made.hook()
    opened = made.warm_dir / "starts" / "open"
    opened.mkdir(parents=True, exist_ok=True)
    for name, age_s in ((".old", 90), (".young", 0)):
        (opened / name).touch()
        os.utime(opened / name, (time.time() - age_s,) * 2)

    assert {} == deaths(made)
    assert [".young"] == [path.name for path in opened.iterdir()]


def test_watch_without_room_or_locks_says_so_and_goes_on(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that can't be noted runs the same."""
    handout = read(made)
    mkdir = os.mkdir

    def fail(path: Any, *arguments: Any, **named: Any) -> None:
        if "starts" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        mkdir(path, *arguments, **named)

    monkeypatch.setattr(os, "mkdir", fail)
    watch = StartWatch(handout)
    for call in (watch.begin, watch.success, watch.withdraw):
        call(handout.entries[0])
    watch.end()

    assert [("store", "starts")] == [(problem.part, problem.name) for problem in watch.problems]


def test_watch_of_a_handout_elsewhere_notes_nothing(made: MadeStore, tmp_path: Path) -> None:
    """A hand-out that was copied out of its warm dir still starts."""
    source = Path(made.hook().report["cache_dir"])
    source.rename(tmp_path / "copy")
    handout = Handout.read(tmp_path / "copy" / "handout.json")

    watch = StartWatch(handout)
    watch.begin(handout.entries[0])

    assert (None, []) == (watch.against, watch.problems)
    assert not (tmp_path / "starts").exists()


# Under exec


def test_exec_command_that_is_killed_without_python_is_a_death(made: MadeStore) -> None:
    """exec knows how CMD ended; the third start is cold and runs."""
    codes = [execute(made, "sh", "-c", f"kill -{number} $$").returncode for number in (9, 11)]
    third = execute(made, "sh", "-c", "echo ran")

    assert ([137, 139], 0, "ran\n") == (codes, third.returncode, third.stdout)
    assert "quarantine" in third.stderr
    assert {"main_decode/b4": 2, "main_decode/b2": 2} == deaths(made)
    for path in (made.warm_dir / "starts" / "entries").iterdir():
        document = json.loads(path.read_bytes())
        assert {"schema", "key", "name", "deaths"} == set(document)
        assert ["exit code 137", "exit code 139"] == [death["how"] for death in document["deaths"]]


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 3", 3), ("exit 255", 255), ("kill -15 $$", 143)],
    ids=["fails", "fails above the signals", "terminated"],
)
def test_exec_command_that_fails_or_was_asked_to_end_is_no_death(made: MadeStore, command: str, code: int) -> None:
    """A rollout is no crash, and a program that fails before it loads anything is not the cache's doing."""
    done = execute(made, "sh", "-c", command)

    assert code == done.returncode
    assert {} == deaths(made)


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        ("os._exit(1)", {}),
        ("die(signal.SIGTERM)", {}),
        ("die(signal.SIGSEGV)", {"b4": 1, "b2": 1}),
        ("watch.begin(b4); os._exit(1)", {"b4": 1}),
        ("watch.begin(b4); die(signal.SIGTERM)", {"b4": 1}),
        ("watch.begin(b4); watch.success(b4); die(signal.SIGSEGV)", {}),
    ],
)
def test_exec_process_of_the_command(made: MadeStore, does: str, expected: dict[str, int]) -> None:
    """What is known of CMD's own process decides; one that hung in its first call until it was terminated died."""
    execute(made, sys.executable, "-c", PROGRAM, does)

    assert {f"main_decode/{name}": count for name, count in expected.items()} == deaths(made)
    assert [] == list((made.warm_dir / "starts" / "open").iterdir())


def test_exec_ranks_that_die_under_a_launcher_are_one_death_each_entry(made: MadeStore) -> None:
    """CMD ends by itself with a code of its own, as torchrun does; four ranks on one entry are one start."""
    launcher = (
        "import subprocess, sys; [p.wait() for p in [subprocess.Popen(sys.argv[1:]) for _ in range(4)]]; sys.exit(1)"
    )

    done = execute(made, sys.executable, "-c", launcher, sys.executable, "-c", PROGRAM, BEGIN_AND_DIE)

    assert 1 == done.returncode
    assert {"main_decode/b4": 1} == deaths(made)


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    deadline_s = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def logged(opened: Path, starts: int) -> bool:
    """Say whether so many starts have a log: exec alone, or with a program that has begun an entry."""
    logs = [path for path in opened.iterdir() if path.name[0] != "."] if opened.exists() else []
    return len(logs) == starts and (starts == 1 or any(b"begin" in path.read_bytes() for path in logs))


def test_exec_that_is_killed_with_its_program_is_settled_by_the_next_hook(made: MadeStore) -> None:
    """As when the kernel kills a whole container for its memory."""
    opened = made.warm_dir / "starts" / "open"
    for command in ([sys.executable, "-c", PROGRAM, "watch.begin(b4); time.sleep(600)"], ["sleep", "600"]):
        words = [sys.executable, "-m", "cachectl", "exec", str(made.recipe), "--", *command]
        process = subprocess.Popen(words, env=made.hook_environ(), stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            until(functools.partial(logged, opened, 2 if "-c" in command else 1))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # CMD's process ends by itself: until it has, its start lives, and a hook leaves it alone.
        until(lambda: made.hook().returncode == 0 and not any(opened.iterdir()))

    assert {"main_decode/b4": 2, "main_decode/b2": 1} == deaths(made)
