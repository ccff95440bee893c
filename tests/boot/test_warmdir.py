"""Which folder is ours: the contract's order, owned by this uid, 0700, no link anywhere we write."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from cachectl.boot.warmdir import WarmDir, choose_warm_dir
from cachectl.schemas.boot import Reason

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a folder away")


def root_of(chosen: WarmDir | Reason) -> Path:
    """Return the chosen folder; there has to be one."""
    assert isinstance(chosen, WarmDir), chosen
    return chosen.root


def mode(path: Path) -> int:
    """Return a path's permission bits."""
    return path.stat().st_mode & 0o7777


def test_choose_order_of_the_contract(tmp_path: Path) -> None:
    """Option, CACHECTL_WARM_DIR, XDG_CACHE_HOME, HOME: the first that is given counts."""
    environ = {
        "CACHECTL_WARM_DIR": str(tmp_path / "variable"),
        "XDG_CACHE_HOME": str(tmp_path / "xdg"),
        "HOME": str(tmp_path / "home"),
    }
    chosen = [root_of(choose_warm_dir(str(tmp_path / "asked"), environ))]
    for name in ("CACHECTL_WARM_DIR", "XDG_CACHE_HOME", None):
        chosen.append(root_of(choose_warm_dir(None, environ)))
        if name is not None:
            del environ[name]

    assert [
        tmp_path / "asked",
        tmp_path / "variable",
        tmp_path / "xdg" / "cachectl" / "warm",
        tmp_path / "home" / ".cache" / "cachectl" / "warm",
    ] == chosen


def test_choose_without_home_takes_var_tmp_by_uid() -> None:
    """No user's name is looked up: the number is in the path (field reports P4, P6)."""
    expected = Path(f"/var/tmp/cachectl-{os.getuid()}")
    existed = expected.exists()
    try:
        chosen = choose_warm_dir(None, {"HOME": "relative", "XDG_CACHE_HOME": ""})

        assert expected.resolve() == root_of(chosen)
        assert 0o700 == mode(expected)
    finally:
        if not existed:
            with suppress(OSError):  # Somebody else's test may be in it by now.
                expected.rmdir()


def test_choose_home_that_cannot_be_written_goes_on(tmp_path: Path) -> None:
    """A home that is a file, or lies below one, is passed over for the next default."""
    (tmp_path / "file").touch()
    environ = {"XDG_CACHE_HOME": str(tmp_path / "file"), "HOME": str(tmp_path / "home")}

    assert tmp_path / "home" / ".cache" / "cachectl" / "warm" == root_of(choose_warm_dir(None, environ))


def test_choose_asked_folder_that_cannot_be_ours_is_a_reason(tmp_path: Path) -> None:
    """What was asked for is taken or refused, never replaced by a default behind the user's back."""
    (tmp_path / "file").touch()

    reason = choose_warm_dir(str(tmp_path / "file"), {"HOME": str(tmp_path)})

    assert isinstance(reason, Reason)
    assert ("store", "warm dir", "policy") == (reason.part, reason.name, reason.kind)
    assert str(tmp_path / "file") in reason.hint
    assert ["file"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_choose_every_folder_made_is_private(tmp_path: Path, umask: int) -> None:
    """Folders above are ours alone, too: else others could put another folder in place (field reports P7, P9)."""
    before = os.umask(umask)
    try:
        warm = WarmDir(root_of(choose_warm_dir(str(tmp_path / "a" / "b" / "warm"), {})))
        folders = [warm.new_handout(), warm.new_cold()]
    finally:
        os.umask(before)

    made = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert {0o700} == {mode(path) for path in made if path.is_dir()}
    assert {0o600} == {mode(path) for path in made if path.is_file()}
    assert {"handouts", "cold"} == {folder.parent.name for folder in folders}


def test_choose_open_folder_of_ours_is_tightened(tmp_path: Path) -> None:
    """A folder of this uid that others may write is closed before anything is put into it."""
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm").chmod(0o2777)

    assert 0o700 == mode(root_of(choose_warm_dir(str(tmp_path / "warm"), {})))


@needs_root
def test_choose_folder_of_another_uid_is_a_reason(tmp_path: Path) -> None:
    """Its owner could change what was verified."""
    (tmp_path / "warm").mkdir()
    os.chown(tmp_path / "warm", 1234, 1234)

    reason = choose_warm_dir(str(tmp_path / "warm"), {})

    assert isinstance(reason, Reason)
    assert "owned by uid 1234" in reason.hint


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo"])
def test_choose_no_folder_is_a_reason(tmp_path: Path, kind: str) -> None:
    """Links and special files are not followed, opened or replaced (field report P9)."""
    path = tmp_path / "warm"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / ("nowhere" if "dangling" in kind else "."))

    assert isinstance(choose_warm_dir(str(path), {}), Reason)
    assert not (tmp_path / "nowhere").exists()


def test_choose_link_above_is_resolved(tmp_path: Path) -> None:
    """The runtime refuses links where it looks for static kernels: what we hand out has none."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    assert tmp_path / "real" / "warm" == root_of(choose_warm_dir(str(tmp_path / "link" / "warm"), {}))


def test_choose_relative_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program may run in another folder than the hook (field report P5)."""
    monkeypatch.chdir(tmp_path)

    assert tmp_path / "warm" == root_of(choose_warm_dir("warm", {}))


def test_choose_where_nothing_can_be_made_ends(tmp_path: Path) -> None:
    """A file system that takes no folders, as /proc, is a reason and no endless attempt."""
    assert isinstance(choose_warm_dir("/proc/nowhere/deeper/warm", {}), Reason)


@pytest.mark.parametrize("kind", ["link", "file", pytest.param("foreign", marks=needs_root)])
@pytest.mark.parametrize("name", ["handouts", "cold"])
def test_new_folder_in_a_planted_parent_refused(tmp_path: Path, name: str, kind: str) -> None:
    """What others planted while the folder was open is not written through (field report P9)."""
    warm = WarmDir(root_of(choose_warm_dir(str(tmp_path / "warm"), {})))
    planted = warm.root / name
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        planted.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        planted.touch()
    else:
        planted.mkdir()
        os.chown(planted, 1234, 1234)

    with pytest.raises(OSError, match=r"symbolic|directory|owned by"):
        warm.new_handout() if name == "handouts" else warm.new_cold()
    assert not (tmp_path / "elsewhere").exists() or [] == list((tmp_path / "elsewhere").iterdir())


def test_new_handouts_are_all_different(tmp_path: Path) -> None:
    """Two hooks never share a folder."""
    warm = WarmDir(root_of(choose_warm_dir(str(tmp_path / "warm"), {})))

    assert 50 == len({warm.new_handout() for _ in range(50)})
