"""What can't reach a graph leaves it warm, in fresh processes of the real runtime: all of it at once, and one by one.

The one process that has everything changed about it is the check of every day; where it fails, the single ones, which
run at night, tell which it was.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.changes import Changing, built_once

pytestmark = [pytest.mark.real, pytest.mark.slow]

UID, HOST = 54321, "pod-7"
AS_HOST = ("unshare", "--uts", "sh", "-c", f'echo {HOST} >/proc/sys/kernel/hostname && exec "$@"', "sh")


@dataclass(frozen=True)
class Noise:
    """Something that is otherwise, and what `play.py` then has to say of its process.

    Args:
        environ: variables.
        edits: of the clone's files: (file, old, new).
        start: for play.py.
        before: words in front of the command, innermost first.
        umask: of the process; -1 for the usual one.
        seen: what the process says of itself.
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    edits: Sequence[tuple[str, str, str]] = ()
    start: Mapping[str, Any] = field(default_factory=dict)
    before: Sequence[str] = ()
    umask: int = -1
    seen: Mapping[str, Any] = field(default_factory=dict)

    def __add__(self, other: Noise) -> Noise:
        return Noise(
            {**self.environ, **other.environ},
            (*self.edits, *other.edits),
            {**self.start, **other.start},
            (*other.before, *self.before),
            max(self.umask, other.umask),
            {**self.seen, **other.seen},
        )


core = min(os.sched_getaffinity(0))
NOISES = {
    "hash seed": Noise({"PYTHONHASHSEED": "7"}),
    "home": Noise({"HOME": "/nowhere", "XDG_CACHE_HOME": "/nowhere/.cache", "XDG_CONFIG_HOME": "/nowhere/.config"}),
    "working folder": Noise(start={"cwd": "/"}),
    "address": Noise(
        {"POD_IP": "10.1.2.3", "POD_NAME": "pod-7", "HOSTNAME": "pod-7", "HCCL_IF_IP": "10.1.2.3", "MASTER_PORT": "9"}
    ),
    "user's name": Noise({"USER": "somebody", "LOGNAME": "somebody"}),
    "locale": Noise({"LC_ALL": "C", "LANG": "tr_TR.UTF-8"}),
    "time zone": Noise({"TZ": "Asia/Tokyo"}),
    "umask": Noise(umask=0o077),
    "clock and order of files": Noise(start={"noise": True}),
    "cores": Noise(before=("taskset", "-c", str(core)), seen={"cores": 1}),
    "threads": Noise({"OMP_NUM_THREADS": "3"}),
    "comments": Noise(
        edits=[
            ("model.py", "class Model(", "# One of many.\nclass Model("),
            ("model.py", "Quantised inputs are scaled", "Some inputs are scaled"),
            ("helpers.py", "HALF = 0.5", "HALF = 0.5  # as ever"),
        ]
    ),
    # Parameters are no constants of an npugraph_ex artifact (W12).
    "weights": Noise(start={"config": {"seed": 5}}),
    "prefill": Noise(edits=[("model.py", "self.linear(x) * 2", "self.linear(x).relu() * 7")]),
}
OTHERS = {
    "user": Noise(start={"uid": UID}, seen={"uid": UID}),
    "host": Noise(before=AS_HOST, seen={"host": HOST}),
}


@functools.cache
def possible(name: str) -> str | None:
    """Return why a process can't be another user's or on another host here; None if it can."""
    if os.getuid():
        return "needs root"
    done = subprocess.run([*OTHERS[name].before, "true"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip()


@pytest.fixture
def clone(shared_folder: Path) -> Iterator[Changing]:
    """A folder that everybody may enter, with a store of the program as it was built elsewhere."""
    base = built_once(shared_folder)
    folder = Path(tempfile.mkdtemp(prefix="cachectl-noise."))
    try:
        folder.chmod(0o755)
        shutil.copytree(base.store, folder / "store", symlinks=True)
        clone = Changing(folder)
        # The simulated toolkit, too, has to be where everybody may read it; its folder is private to who made it.
        clone.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        assert 0 == clone.run("simulate", "--", "true").returncode
        for place in (folder / "cache").rglob("*"):
            if place.is_dir() and not place.is_symlink():
                place.chmod(0o755)
        yield clone
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start(clone: Changing, noise: Noise) -> dict[str, Any]:
    """Start the program in a clone of its own, with the noise."""
    folder = clone.lay("another clone/of it", noise.edits)
    os.utime(folder / "model.py", (0, 0))
    if "uid" in noise.start:
        # The store is somebody else's, the warm dir is not.
        (clone.folder / "warm").mkdir(mode=0o700)
        os.chown(clone.folder / "warm", UID, UID)
    (found,) = clone.play(
        [{"folder": str(folder), "runtime": "cachectl", **noise.start}],
        before=noise.before,
        umask=noise.umask,
        inside=noise.environ,
    )
    return found


def test_all_noise_at_once_is_warm_and_right(clone: Changing) -> None:
    """Hash seed, home, folders, address, user, host, locale, zone, umask, clock, cores, comments, prefill, weights."""
    noises = [*NOISES.values(), *(noise for name, noise in OTHERS.items() if possible(name) is None)]

    found = start(clone, sum(noises[1:], noises[0]))

    (call,) = found["calls"]
    assert ("warm", []) == (call["outcome"], found["reasons"])
    assert call["error"] < 1e-5
    for noise in noises:
        assert noise.seen.items() <= found.items()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user on another host")
def test_other_user_and_host_are_among_the_noise() -> None:
    """As root, as CI is, the test above ran as another user on another host."""
    assert dict.fromkeys(OTHERS) == {name: possible(name) for name in OTHERS}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*NOISES, *OTHERS])
def test_noise_is_warm_and_right(clone: Changing, name: str) -> None:
    """Each alone, in a process of its own."""
    if name in OTHERS and (why := possible(name)) is not None:
        pytest.skip(why)

    found = start(clone, {**NOISES, **OTHERS}[name])

    (call,) = found["calls"]
    assert ("warm", []) == (call["outcome"], found["reasons"])
    assert call["error"] < 1e-5
