"""What hooks leave behind, in real processes: nothing in the store, nothing outside warm dir and node, nothing torn."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cachectl.boot.hook import run_hook
from cachectl.boot.options import HookOptions, parse_arguments
from tests.boot.hook_stores import overwrite
from tests.stores import OBSERVED, MadeStore, make_store, tree

# Arguments, environment, and the outcome: all that a hook is likely to meet in its life.
KINDS: list[tuple[tuple[str, ...], dict[str, str | None], str]] = [
    ((), {}, "warm"),
    (("--format", "shell"), {}, "warm"),
    (("--rank", "0"), {}, "warm"),
    (("--rank", "7"), {}, "cold"),
    ((), {"N_LAYERS": None}, "warm"),
    ((), {"N_LAYERS": "5"}, "cold"),
    ((), {"CACHECTL_SIM_SOC": "Ascend310P3"}, "cold"),
    ((), {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "16"}, "cold"),
    (("--read-only",), {}, "warm"),
    (("--deadline", "0"), {}, "cold"),
    (("--no-such-option", "7"), {}, "cold"),
    (("--store", "/nowhere"), {}, "cold"),
    (("--strict", "-q"), {"ASCEND_FOO": "1"}, "cold"),
    ((), {"CACHECTL_DISABLE": "1"}, "disabled"),
]


@pytest.fixture
def busy(tmp_path: Path) -> MadeStore:
    """A store with several sets: one that holds, two that may, one that is damaged, one of another device."""
    made = make_store(tmp_path / "made")
    made.publish("other", request={"device": {"simulated": True, "soc": "ascend910_9391"}}, size_bytes=300)
    made.publish("a", size_bytes=300)
    for mode in ("damaged", "fast", "slow"):
        made.publish(mode, observed={**OBSERVED, "MODE": mode}, size_bytes=300)
    overwrite(made.blob("damaged"), b"other bytes")
    return made


@pytest.mark.timeout(900)
def test_a_thousand_hooks_leave_the_store_byte_identical(busy: MadeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm or cold, whatever they are asked: not a byte, a mode or a time stamp changes (field reports P13, S16)."""
    monkeypatch.syspath_prepend(str(busy.site))
    before = tree(busy.layout.root)
    kinds = [kind for kind in KINDS if kind[2] != "disabled" and "--no-such-option" not in kind[0]]

    seen = set()
    for arguments, environ, outcome in itertools.islice(itertools.cycle(kinds), 1000):
        options = parse_arguments([str(busy.recipe), *arguments])
        seen.add((outcome, run_hook(options, busy.hook_environ(environ)).outcome))

    assert {("warm", "warm"), ("cold", "cold")} == seen
    assert before == tree(busy.layout.root)


def test_hooks_of_all_kinds_leave_the_store_byte_identical(busy: MadeStore) -> None:
    """The same as processes of their own."""
    before = tree(busy.layout.root)

    outcomes = [busy.hook(*arguments, "--json", environ=environ).outcome for arguments, environ, _ in KINDS]

    assert [outcome for _, _, outcome in KINDS] == outcomes
    assert before == tree(busy.layout.root)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_thousand_hook_processes_leave_the_store_byte_identical(busy: MadeStore) -> None:
    """A thousand of them, each its own process."""
    before = tree(busy.layout.root)

    for arguments, environ, outcome in itertools.islice(itertools.cycle(KINDS), 1000):
        assert outcome == busy.hook(*arguments, "--json", environ=environ).outcome

    assert before == tree(busy.layout.root)


# System calls that change a file system, as strace groups them and with those that it leaves out.
CHANGING = (
    "open,openat,openat2,creat,mkdir,mkdirat,rmdir,unlink,unlinkat,rename,renameat,renameat2,link,linkat,symlink,"
)
CHANGING += "symlinkat,mknod,mknodat,chmod,fchmod,fchmodat,chown,fchown,lchown,fchownat,truncate,ftruncate,utimensat,"
CHANGING += "setxattr,lsetxattr,fsetxattr,removexattr,fallocate,mount"
_CALL = re.compile(r"^(?:\d+ +)?(\w+)\((.*)\) += (-?\d+)(?:<(.*?)(?:<char [^>]*>)?>)?")
_WORD = re.compile(r"(?:AT_FDCWD|\d+)<((?:[^<>\\]|\\.)*)>(?:, )?(?:\"((?:[^\"\\]|\\.)*)\")?|\"((?:[^\"\\]|\\.)*)\"")


def changed_paths(trace: Path) -> Iterator[str]:
    """Yield every path that was changed, or opened to be, by what strace has written down."""
    for line in trace.read_text("utf-8", "backslashreplace").splitlines():
        match = _CALL.match(line)
        if match is None or match[3].startswith("-"):
            continue
        name, words, _, opened = match.groups()
        if name.startswith(("open", "creat")):
            if re.search(r"O_(WRONLY|RDWR|CREAT|TRUNC|APPEND)", words) or name == "creat":
                yield opened or words
            continue
        for folder, relative, alone in _WORD.findall(words):
            yield os.path.normpath(os.path.join(folder, relative, alone))


@pytest.fixture
def traced(busy: MadeStore) -> Callable[..., list[str]]:
    """Run a command under strace and return the paths that it and its children changed."""
    probe = subprocess.run(["strace", "-f", "true"], capture_output=True, check=False) if _has_strace() else None
    if probe is None or probe.returncode:
        pytest.skip("needs strace, and the right to trace")
    numbers = itertools.count()

    def run(command: Sequence[str | Path], environ: dict[str, str | None] | None = None) -> list[str]:
        trace = busy.folder / f"trace-{next(numbers)}"
        subprocess.run(
            ["strace", "-f", "-qq", "-y", "-s", "4096", "-e", f"trace={CHANGING}", "-o", trace, *command],
            cwd=busy.folder,
            env={**busy.hook_environ(environ), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=280,
            check=True,
        )
        return [path for path in changed_paths(trace) if path != os.devnull]

    return run


def _has_strace() -> bool:
    return any(os.access(Path(folder) / "strace", os.X_OK) for folder in os.environ["PATH"].split(os.pathsep))


@pytest.mark.timeout(900)
def test_hooks_of_all_kinds_change_nothing_outside_the_warm_dir(
    busy: MadeStore, traced: Callable[..., list[str]]
) -> None:
    """Every system call of every kind of hook is looked at; the audit itself sees what a warm one writes."""
    command = [sys.executable, "-m", "cachectl", "hook", busy.recipe]
    warm = []
    for arguments, environ, outcome in KINDS:
        asked = [item for item in arguments if item != "--strict"]

        changed = traced([*command, *asked], environ)

        outside = [path for path in changed if not f"{path}/".startswith(f"{busy.warm_dir}/")]
        assert [] == outside, (arguments, environ)
        if "--read-only" in arguments or outcome == "disabled":
            assert [] == changed, (arguments, environ)
        warm += changed if outcome == "warm" else []
    assert any(path.endswith("/compiled_module") for path in warm)
    assert any("cachectl.env" in path for path in warm)


@pytest.mark.timeout(900)
def test_exec_changes_nothing_outside_warm_dir_and_report(busy: MadeStore, traced: Callable[..., list[str]]) -> None:
    """Neither does exec: what its program writes is the program's, and the report is where it was asked for."""
    # The simulated CANN is compiled once a machine, elsewhere: not part of what is looked at.
    subprocess.run([sys.executable, "-m", "cachectl", "simulate", "--", "true"], env=busy.hook_environ(), check=True)
    command = [sys.executable, "-m", "cachectl", "exec", busy.recipe, "--report", "r.json", "--", "true"]

    changed = traced(command)

    report = re.compile(re.escape(str(busy.folder)) + r"/\.?r\.json(\.\d+)?\Z")
    assert [] == [path for path in changed if not f"{path}/".startswith(f"{busy.warm_dir}/") and not report.match(path)]
    assert "unused" == json.loads((busy.folder / "r.json").read_text())["outcome"]


# At once


def hook_processes(made: MadeStore, number: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """Start so many hooks, which begin together: each waits until all are there."""
    together = "import os, sys; os.read(0, 1); from cachectl.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", together, "hook", str(made.recipe), "-q", *arguments]
    reading, writing = os.pipe()
    processes = [
        subprocess.Popen(
            command, env=made.hook_environ(), stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(number)
    ]
    os.close(reading)
    os.close(writing)
    return processes


def reports_of(processes: Sequence[subprocess.Popen[str]]) -> list[dict[str, object]]:
    """Return what they printed, once all have ended."""
    reports = []
    for process in processes:
        printed, said = process.communicate(timeout=600)
        assert (0, "") == (process.returncode, said)
        reports.append(json.loads(printed))
    return reports


def refuse_torn(made: MadeStore, report: dict[str, object]) -> None:
    """Assert that every file of a hand-out has the bytes of some artifact of its case, whole."""
    entries = report["entries"]
    assert isinstance(entries, list)
    for entry in entries:
        module = (Path(entry["path"]) / "compiled_module").read_bytes()
        published = made.folder.glob(f"artifacts/*-{entry['case']}-{entry['rank']}*/compiled_module")
        assert any(module == path.read_bytes() for path in published), entry["path"]
        assert (Path(entry["path"]) / "kernels" / "common.run").read_bytes() == b"#!/bin/sh\n"


@pytest.mark.timeout(900)
def test_hooks_sixty_four_at_once_all_warm(made: MadeStore) -> None:
    """Hooks on one store and one empty warm dir don't disturb each other (field reports C8, C9, C14)."""
    # They share the cores: together they take as long as sixty-four.
    reports = reports_of(hook_processes(made, 64, "--deadline", "600"))

    assert ["warm"] * 64 == [report["outcome"] for report in reports]
    assert [[]] * 64 == [report["reasons"] for report in reports]
    assert 64 == len({report["cache_dir"] for report in reports})
    for report in reports:
        refuse_torn(made, report)


def test_hooks_two_on_an_empty_node_are_both_warm(made: MadeStore) -> None:
    """Who makes the folders first does not matter, ten times over (field report C14)."""
    for number in range(10):
        reports = reports_of(hook_processes(made, 2, "--warm-dir", str(made.folder / f"node-{number}" / "warm")))

        assert ["warm", "warm"] == [report["outcome"] for report in reports]
        for report in reports:
            refuse_torn(made, report)


def test_hooks_beside_a_rebuild_loop_are_warm_and_whole(made: MadeStore) -> None:
    """While the same entries are built again and again, with other bytes, each hook hands out one build (C8)."""
    stop = threading.Event()
    builds = []

    def rebuild() -> None:
        while not stop.is_set():
            # A folder of its own: an artifact's bytes depend on its name, its key does not.
            elsewhere = MadeStore(made.folder)
            size_bytes = 3000 + 17 * len(builds)
            builds.append(elsewhere.publish("a", size_bytes=size_bytes))
            for case in ("b4", "b2"):
                artifact = made.folder / "artifacts" / f"a-{case}-0"
                kept = artifact.with_name(f"{artifact.name}.{len(builds)}")
                kept.mkdir()
                (kept / "compiled_module").write_bytes((artifact / "compiled_module").read_bytes())

    builder = threading.Thread(target=rebuild)
    builder.start()
    try:
        hooked = [made.hook() for _ in range(25)]
        while len(builds) <= 5 and builder.is_alive():
            hooked.append(made.hook())
    finally:
        stop.set()
        builder.join()

    assert {"warm"} == {hook.outcome for hook in hooked}
    assert [] == [reason for hook in hooked for reason in hook.against]
    for hook in hooked:
        refuse_torn(made, hook.report)
    assert len(builds) > 5
    assert 1 == len({build.warm_set for build in builds})


def test_hook_options_unknown_to_this_version_never_reach_the_work() -> None:
    """What can't be read is listed, in any order and number."""
    options = parse_arguments(["--newer", "r.yaml", "--deadline", "soon", "--format", "toml", "more"])

    assert ("r.yaml", ("--newer", "--deadline soon", "more", "--format toml")) == (options.recipe, options.unknown)
    assert HookOptions().deadline_s == options.deadline_s
