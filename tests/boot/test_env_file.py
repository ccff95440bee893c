"""The hook's environment as a file: what a shell in another container makes of it, and that it is never an old one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from cachectl.boot.env_file import ENV_FILE, shell_lines, write_env_file
from cachectl.boot.handout import STARTUP
from tests.stores import MadeStore


def sourced(path: Path, environ: Mapping[str, str] | None = None) -> tuple[dict[str, str], str]:
    """Source a file in a strict shell; return what it exports and what it says on stderr."""
    done = subprocess.run(
        ["/bin/sh", "-euc", '. "$1"; exec env -0', "sh", str(path)],
        env={"PATH": os.environ["PATH"], **(environ or {})},
        capture_output=True,
        check=True,
    )
    pairs = (item.partition("=") for item in os.fsdecode(done.stdout).split("\0") if item)
    exported = {name: value for name, _, value in pairs if name in ("CACHECTL_HANDOUT", "PYTHONPATH")}
    return exported, done.stderr.decode()


def test_env_file_of_a_warm_hook_hands_out(made: MadeStore) -> None:
    """The file in the warm dir has what the report has, private, whole, and nothing is left beside it."""
    hooked = made.hook()
    path = made.warm_dir / ENV_FILE

    exported, said = sourced(path)

    assert ({**hooked.report["env"], "PYTHONPATH": str(STARTUP)}, "") == (exported, said)
    assert 0o600 == path.stat().st_mode & 0o7777
    assert [ENV_FILE] == [item.name for item in made.warm_dir.iterdir() if ENV_FILE in item.name]


@pytest.mark.parametrize("behind", ["/my/code", "/a b:/it's", ":", "/x:"], ids=["plain", "spaces", "empty", "trailing"])
def test_env_file_keeps_the_shells_python_path(made: MadeStore, behind: str) -> None:
    """Ours stands in front of the program's own, not in its place; the hook's own PYTHONPATH is not carried over."""
    made.hook()

    exported, _ = sourced(made.warm_dir / ENV_FILE, {"PYTHONPATH": behind})

    assert f"{STARTUP}:{behind}" == exported["PYTHONPATH"]


def test_env_file_where_cachectl_is_off_hands_out_nothing(made: MadeStore) -> None:
    """The program's container may say CACHECTL_DISABLE=1 after the init container's hook was warm."""
    made.hook()

    assert ({}, "") == sourced(made.warm_dir / ENV_FILE, {"CACHECTL_DISABLE": "1"})


def test_env_file_without_its_handout_is_cold_with_one_line(made: MadeStore) -> None:
    """A volume that is mounted elsewhere, or was emptied: the program starts cold, and the shell goes on."""
    hooked = made.hook()
    shutil.rmtree(hooked.report["cache_dir"])

    exported, said = sourced(made.warm_dir / ENV_FILE)

    assert {} == exported
    assert said == f"cachectl: cold: no {hooked.report['cache_dir']}/handout.json or no cachectl in this container\n"


@pytest.mark.parametrize("arguments", [("--rank", "9"), ("--no-such-option",), ("--deadline", "0")])
def test_env_file_of_a_cold_hook_hands_out_nothing(made: MadeStore, arguments: tuple[str, ...]) -> None:
    """What an earlier hook left is gone, for whatever reason this one is cold; the file can be sourced all the same."""
    made.hook()

    assert "cold" == made.hook(*arguments).outcome
    assert ({}, "") == sourced(made.warm_dir / ENV_FILE)


def test_env_file_of_a_first_cold_hook_is_there(made: MadeStore) -> None:
    """A shell that sources the file must not end because the hook was cold."""
    shutil.rmtree(made.layout.root)

    assert "cold" == made.hook().outcome
    assert ({}, "") == sourced(made.warm_dir / ENV_FILE)


@pytest.mark.parametrize("name", ["own.env", "it's $HOME `x`\n.env", "ünï 模型.env"])
def test_env_file_elsewhere(made: MadeStore, name: str) -> None:
    """--env-file names another place; then there is none in the warm dir."""
    hooked = made.hook("--env-file", made.folder / name)

    exported, said = sourced(made.folder / name)

    assert (hooked.report["env"]["CACHECTL_HANDOUT"], "") == (exported["CACHECTL_HANDOUT"], said)
    assert not (made.warm_dir / ENV_FILE).exists()


def test_env_file_with_strange_paths_in_it(made: MadeStore) -> None:
    """Whatever the paths are, they are no shell words and come out as they are."""
    strange = made.copy(made.folder.parent / "it's $(touch x) `y`\n; \\ 模")

    hooked = strange.hook()

    exported, said = sourced(strange.warm_dir / ENV_FILE)
    assert (hooked.report["env"]["CACHECTL_HANDOUT"], "") == (exported["CACHECTL_HANDOUT"], said)


def test_env_file_that_can_not_be_written_is_told(made: MadeStore) -> None:
    """The hand-out is there, and the reason says that the file is not."""
    hooked = made.hook("--env-file", made.folder / "no" / "folder")

    assert ("warm", [("policy", "env file", "policy")]) == (hooked.outcome, hooked.against)


@pytest.mark.parametrize(("arguments", "environ"), [(("--read-only",), {}), ((), {"CACHECTL_DISABLE": "1"})])
def test_env_file_is_not_written_where_nothing_is(
    made: MadeStore, arguments: tuple[str, ...], environ: dict[str, str]
) -> None:
    """--read-only and the switch leave no file, and touch no old one."""
    made.hook(*arguments, environ=environ)

    assert not made.warm_dir.exists()


def test_env_file_is_not_written_through_a_link(made: MadeStore) -> None:
    """A link in its place is replaced, not followed (field report P9)."""
    made.warm_dir.mkdir(mode=0o700)
    (made.folder / "victim").write_text("mine")
    (made.warm_dir / ENV_FILE).symlink_to(made.folder / "victim")

    assert "warm" == made.hook().outcome
    assert "mine" == (made.folder / "victim").read_text()
    assert not (made.warm_dir / ENV_FILE).is_symlink()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to hand out for another user")
def test_env_file_belongs_to_whom_the_handout_is_for(made: MadeStore) -> None:
    """An init container of root's leaves a file that the program's user can read."""
    hooked = made.hook("--uid", "12345", "--warm-dir", made.folder / "theirs")

    if hooked.outcome == "warm":
        (path,) = (made.folder / "theirs").rglob(ENV_FILE)
        assert (12345, 0o600) == (path.stat().st_uid, path.stat().st_mode & 0o7777)


def test_env_file_is_replaced_whole(tmp_path: Path) -> None:
    """Who reads while it is rewritten sees one hook's file or another's, never half of one."""
    path = tmp_path / ENV_FILE
    handed = {"CACHECTL_HANDOUT": f"/{'x' * 4000}/handout.json", "PYTHONPATH": "/p"}
    writer = (
        "import sys, pathlib; from cachectl.boot.env_file import write_env_file\n"
        f"for _ in range(300): write_env_file(pathlib.Path(sys.argv[1]), {handed!r}); "
        "write_env_file(pathlib.Path(sys.argv[1]), {})"
    )
    write_env_file(path, handed)
    warm = path.read_text()
    write_env_file(path, {})
    cold = path.read_text()
    # Elsewhere than in the checkout, whose cachectl would have another start-up folder.
    processes = [subprocess.Popen([sys.executable, "-c", writer, str(path)], cwd=tmp_path) for _ in range(2)]

    seen = set()
    while any(process.poll() is None for process in processes):
        seen.add(path.read_text())

    assert {0} == {process.returncode for process in processes}
    assert seen <= {warm, cold}
    assert [ENV_FILE] == os.listdir(tmp_path)


def test_shell_lines_of_a_cold_hook_are_none() -> None:
    """Nothing to evaluate."""
    assert "" == shell_lines({})
