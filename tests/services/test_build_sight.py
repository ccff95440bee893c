"""What a build can see: whatever may have been mended makes another digest, and noise makes none."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from cachectl.services.build_sight import seen_digest
from cachectl.services.request import RecipeRequest, read_request
from tests.services.standin import Site


@pytest.fixture
def request_of(site: Site, monkeypatch: pytest.MonkeyPatch) -> Callable[[], RecipeRequest]:
    """Read the site's recipe as a build there would."""
    for name, value in site.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(site.folder / "site"))
    path = site.recipe({"b2": "build"})
    (site.folder / "model.py").write_text("x = 1\n")
    (site.folder / "weights.bin").write_bytes(bytes(300 << 10))
    # A package that lies elsewhere, and links that lead up, which nobody follows for ever.
    (site.folder.parent / "elsewhere").mkdir()
    (site.folder.parent / "elsewhere" / "layers.py").write_text("x = 1\n")
    (site.folder / "layers").symlink_to("../elsewhere")
    (site.folder / "up").symlink_to("..")
    (site.folder / "root").symlink_to("/")
    return lambda: read_request(path)


def _edit(site: Site) -> None:
    (site.folder / "model.py").write_text("x = 2\n")


def _large(site: Site) -> None:
    os.utime(site.folder / "weights.bin", (1, 1))


def _new(site: Site) -> None:
    (site.folder / "data").mkdir()
    (site.folder / "data" / "words").write_text("a")


def _installed(site: Site) -> None:
    (site.folder / "site" / "own-2.0.dist-info").mkdir()


def _linked(site: Site) -> None:
    (site.folder.parent / "elsewhere" / "layers.py").write_text("x = 2\n")


def _touched(site: Site) -> None:
    os.utime(site.folder / "model.py", (1, 1))


def _cached(site: Site) -> None:
    for name in ("__pycache__", ".git", "store"):
        (site.folder / name).mkdir()
        (site.folder / name / "model.pyc").write_bytes(b"x")


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (_edit, True),
        (_large, True),
        (_new, True),
        (_installed, True),
        (_linked, True),
        (_touched, False),
        (_cached, False),
    ],
)
def test_seen_digest_of_files(
    site: Site, request_of: Callable[[], RecipeRequest], change: Callable[[Site], None], seen: bool
) -> None:
    """Content, new files, links' ends, other packages count; a small file's new time and what a build writes don't."""
    before = seen_digest(request_of(), site.layout.root)
    change(site)

    assert before is not None
    assert seen is (before != seen_digest(request_of(), site.layout.root))


@pytest.mark.parametrize(
    ("name", "seen"), [("MODEL_FLAG", True), ("HCCL_ALGO", True), ("HOSTNAME", False), ("OLDPWD", False)]
)
def test_seen_digest_of_the_environment(
    site: Site, request_of: Callable[[], RecipeRequest], name: str, seen: bool
) -> None:
    """Any variable but those that say where a process runs."""
    request = request_of()
    other = replace(request, environ={**request.environ, name: "another"})

    assert seen is (seen_digest(request, site.layout.root) != seen_digest(other, site.layout.root))
