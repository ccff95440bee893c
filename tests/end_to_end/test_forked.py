"""A process that is forked after a warm start: the child calls the warm method, as the parent does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.changes import built_once, copy_of

pytestmark = [pytest.mark.real, pytest.mark.slow]

PROGRAM = """
import json, os, signal, sys
import torch, torch_npu
import cachectl
import model

recipe = json.load(open("recipe.yaml"))
arguments = recipe["functions"][0]["cases"][0]["args"]
decoder = model.build()
usual, other = model.inputs(decoder, 0, **arguments), model.inputs(decoder, 0, **arguments)
other["x"] = other["x"] + 3
warm = cachectl.warm_start("recipe.yaml")
with torch.no_grad():
    options = recipe["compile"]["options"]
    method = cachectl.cache_compile(decoder.main_decode, warm=warm, dynamic=False, options=options)


def told(who):
    with torch.no_grad():
        right = all(torch.allclose(method(**call), decoder.main_decode(**call)) for call in (usual, other))
    print(who, warm.outcome, right, flush=True)


if sys.argv[1] == "late":
    told("before")
if not (child := os.fork()):
    # A child that hangs ends, and says nothing.
    signal.alarm(120)
    told("child")
    os._exit(0)
assert 0 == os.waitpid(child, 0)[1]
told("parent")
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_child_of_a_warm_process_is_warm_and_right(shared_folder: Path, tmp_path: Path, when: str) -> None:
    """Forked before its first call or after it: parent and child are warm, their values right, and neither hangs."""
    copy = copy_of(built_once(shared_folder), tmp_path)
    folder = copy.folder / "usual"
    (folder / "forking.py").write_text(PROGRAM)

    words = [*(["before warm True"] if when == "late" else []), "child warm True", "parent warm True"]
    done = copy.run("simulate", "--", "env", "-C", str(folder), sys.executable, "forking.py", when)

    assert (0, words) == (done.returncode, done.stdout.splitlines()), done.stderr
