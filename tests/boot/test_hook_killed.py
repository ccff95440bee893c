"""kill -9 at any moment of a hook: what it leaves is never taken for whole, the next hook is warm, the debris goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.stores import MadeStore

# Runs hooks in forked children, killed before their k-th system call that changes something, for every k; each is
# followed by one that is let through. Forked, so that a hundred of them take two seconds.
KILLER = """
import fcntl, hashlib, json, os, signal, sys
from cachectl.boot.hook import HookOptions, run_hook

recipe, warm_dir, fresh = sys.argv[1], sys.argv[2], sys.argv[3] == "fresh"
CALLS = [(os, name) for name in ("open", "write", "pwrite", "mkdir", "rename", "replace", "unlink", "rmdir", "fchmod",
                                 "chmod", "close", "utime", "ftruncate", "lseek", "fchown", "listdir", "scandir")]
CALLS += [(fcntl, "flock"), (fcntl, "ioctl")]


def hook(place, kill_at):
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        data = b""
        while chunk := os.read(reading, 1 << 20):
            data += chunk
        os.close(reading)
        return os.waitpid(child, 0)[1], data
    count = 0

    def counted(call):
        def wrapper(*args, **kwargs):
            nonlocal count
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return wrapper

    plain = os.write
    for module, name in CALLS:
        setattr(module, name, counted(getattr(module, name)))
    handout = run_hook(HookOptions(recipe=recipe, warm_dir=place))
    report = handout.report()
    report["wrong"] = [
        str(entry.path / file.path)
        for item in handout.sets for entry in item.entries for file in entry.entry.files
        if "sha256:" + hashlib.sha256(open(entry.path / file.path, "rb").read()).hexdigest() != file.digest
    ]
    report["calls"] = count
    plain(writing, json.dumps(report).encode())
    os._exit(0)


told = {"killed": 0, "cold": [], "wrong": []}
kill_at, through = 0, False
while not through:
    kill_at += 1
    place = f"{warm_dir}/{kill_at}" if fresh else warm_dir
    status, data = hook(place, kill_at)
    through = status == 0
    told["killed"] += not through
    status, data = hook(place, 0)
    report = json.loads(data)
    if report["outcome"] != "warm":
        told["cold"].append([kill_at, report["reasons"]])
    told["wrong"] += report["wrong"]
print(json.dumps(told))
"""


def kill_at_every_call(made: MadeStore, how: str, **environ: str) -> dict[str, Any]:
    """Run the killer; return what it found."""
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(made.recipe), str(made.warm_dir), how],
        env=made.hook_environ(environ),
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def age(warm_dir: Path, seconds: float) -> None:
    """Make a warm dir's hand-outs older."""
    for folder in (warm_dir / "handouts").iterdir():
        for path in (folder, folder / ".claim"):
            if path.exists():
                os.utime(path, (time.time() - seconds,) * 2)
    os.utime(warm_dir / ".swept", (0, 0))


def test_hook_killed_at_any_call_on_an_empty_node_next_one_warm_and_right(made: MadeStore) -> None:
    """Before each of its system calls in turn, each time in a new warm dir (field reports C4, D16)."""
    told = kill_at_every_call(made, "fresh", CACHECTL_NODE_COPY="always")

    assert ([], []) == (told["cold"], told["wrong"])
    assert told["killed"] > 80


def test_hook_killed_at_any_call_debris_goes(made: MadeStore) -> None:
    """In one warm dir: the next one is warm; what was half made goes with it, what is whole stays for its program."""
    told = kill_at_every_call(made, "shared", CACHECTL_NODE_COPY="always")
    age(made.warm_dir, 120)

    hooked = made.hook(environ={"CACHECTL_NODE_COPY": "always"})

    assert ([], []) == (told["cold"], told["wrong"])
    assert "warm" == hooked.outcome
    left = list((made.warm_dir / "handouts").iterdir())
    assert all((folder / "handout.json").exists() and (folder / ".claim").exists() for folder in left)
    # One after each killed hook, ours, and those that were killed after all was written.
    assert told["killed"] < len(left) <= 2 * told["killed"]
    blobs = [path for path in (made.warm_dir / "node" / "blobs").rglob("*") if path.is_file()]
    assert [] == [path for path in blobs if path.name.startswith(".")]
    age(made.warm_dir, 2 * 3600)
    made.hook()
    assert 1 == len(list((made.warm_dir / "handouts").iterdir()))


def test_hook_killed_at_random_times_next_one_warm(made: MadeStore) -> None:
    """Real processes, wherever they are after so many milliseconds; the store is read only."""
    for attempt in range(12):
        command = [sys.executable, "-m", "cachectl", "hook", str(made.recipe), "-q"]
        process = subprocess.Popen(command, env=made.hook_environ(), stdout=subprocess.DEVNULL, start_new_session=True)
        time.sleep(0.02 + attempt * 0.012)
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            pass  # It was done.
        process.wait()

    assert ("warm", []) == ((hooked := made.hook()).outcome, hooked.against)
