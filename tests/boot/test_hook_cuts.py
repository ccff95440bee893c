"""The hook's choice among sets of one world in several cuts into nodes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cachectl.boot.handout import Handout
from cachectl.errors import DocumentError
from cachectl.schemas.boot import WarmSet
from tests.boot.hook_stores import overwrite, record_of
from tests.boot.test_hook import handed_sets
from tests.stores import OBSERVED, MadeStore, make_store

TWO_NODES = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}
ONE_NODE = {"LWS_WORKER_INDEX": "0", "LWS_GROUP_SIZE": "1", "LOCAL_WORLD_SIZE": "8"}


@pytest.fixture
def world(tmp_path: Path) -> MadeStore:
    """A store without a set, for eight ranks."""
    return make_store(tmp_path / "made", world_size=8)


def publish(made: MadeStore, name: object, **options: Any) -> WarmSet:
    """Publish a small set of eight ranks."""
    return made.publish(str(name), ranks=range(8), cases=("b4",), size_bytes=100, **options)


@pytest.mark.parametrize("newest", [4, 8])
def test_hook_own_cut_comes_first_in_either_order(world: MadeStore, newest: int) -> None:
    """Whichever cut was built last, a start takes its own; the other one's is there for ranks with other devices."""
    sets = {each: publish(world, each, ranks_per_node=each).warm_set for each in (12 - newest, newest)}

    assert [sets[4], sets[8]] == handed_sets(world.hook(environ=TWO_NODES))
    assert [sets[8], sets[4]] == handed_sets(world.hook(environ=ONE_NODE))
    assert [sets[newest], sets[12 - newest]] == handed_sets(world.hook())


@pytest.mark.parametrize("wrong", ["8", -1.5, [4]])
def test_handout_says_which_cut_a_set_is_tied_to(world: MadeStore, wrong: object) -> None:
    """The program's process reads it back; a set that is tied to none says nothing, and no other word is read."""
    publish(world, 8, ranks_per_node=8)
    publish(world, "free", ranks_per_node=4, tied=False)
    mode = {"observed": {**OBSERVED, "MODE": "fast"}}
    publish(world, 4, ranks_per_node=4, **mode)
    path = Path(world.hook(environ=TWO_NODES).report["env"]["CACHECTL_HANDOUT"])

    document = json.loads(path.read_bytes())
    found = [handed.ranks_per_node for handed in Handout.read(path).sets]
    document["sets"][0]["ranks_per_node"] = wrong
    path.write_text(json.dumps(document))

    assert [4, None] == found
    assert ["ranks_per_node" in handed for handed in document["sets"]] == [True, False]
    with pytest.raises(DocumentError, match="ranks_per_node"):
        Handout.read(path)


def test_hook_before_any_launcher_hands_out_a_set_of_each_cut(world: MadeStore) -> None:
    """The rebuilds of one cut don't take all four places from another one that is older."""
    mode = {"observed": {**OBSERVED, "MODE": "fast"}}
    apart = publish(world, "apart", ranks_per_node=4, **mode)
    newer = [publish(world, number, ranks_per_node=8, **mode) for number in range(5)]

    found = handed_sets(world.hook())

    assert [newer[4].warm_set, apart.warm_set, newer[3].warm_set, newer[2].warm_set] == found


def test_hook_set_that_names_no_device_is_one_for_all_cuts(world: MadeStore) -> None:
    """Built in two cuts it is one and the same; nothing of a cut is noted of it, and it ends the list alone."""
    first = publish(world, "same", ranks_per_node=8, tied=False)
    second = publish(world, "same", ranks_per_node=4, tied=False)

    hooked = [world.hook(environ=environ) for environ in (TWO_NODES, ONE_NODE, {})]

    assert (first.warm_set, None) == (second.warm_set, second.ranks_per_node)
    assert [[first.warm_set]] * 3 == [handed_sets(item) for item in hooked]


def test_hook_set_that_names_no_device_is_behind_a_newer_one_of_another_cut(world: MadeStore) -> None:
    """Where it alone fits, it comes first; where the newer one may fit, it is the second."""
    fits_all = publish(world, "free", ranks_per_node=8, tied=False).warm_set
    newer = publish(world, "newer", ranks_per_node=4).warm_set

    assert [fits_all] == handed_sets(world.hook(environ=ONE_NODE))
    assert [newer, fits_all] == handed_sets(world.hook(environ=TWO_NODES))
    assert [newer, fits_all] == handed_sets(world.hook())


def test_hook_of_unequal_nodes_takes_the_newest_first(world: MadeStore) -> None:
    """Where nodes can't be equal no rank has a cut, and all look at the sets in the same order."""
    older = publish(world, 8, ranks_per_node=8).warm_set
    newer = publish(world, 4, ranks_per_node=4).warm_set

    found = world.hook(environ={"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "3"})

    assert [newer, older] == handed_sets(found)


def test_hook_set_of_the_own_cut_that_is_damaged_leaves_the_other(world: MadeStore) -> None:
    """The program's process tells whether it fits; the damage is told."""
    other = publish(world, 8, ranks_per_node=8).warm_set
    publish(world, 4, ranks_per_node=4)
    blob = world.blob("4", rank=5)
    blob.unlink()

    hooked = world.hook(environ=TWO_NODES)

    assert ([other], [("artifact", "blob", "absent")]) == (handed_sets(hooked), hooked.against)


def test_hook_whose_places_are_taken_looks_at_no_other_set(world: MadeStore) -> None:
    """Other cuts' sets are compared for a place only: what is wrong with them is nobody's matter here."""
    publish(world, 8, ranks_per_node=8)
    found = [publish(world, 4, ranks_per_node=4).warm_set]
    mode = {"observed": {**OBSERVED, "MODE": "fast"}}
    found += [publish(world, number, ranks_per_node=4, **mode).warm_set for number in range(3)]
    _, record = record_of(world)
    (member,) = [member for member in record.sets[-1].members if member.rank == 5]
    overwrite(world.layout.manifest(member.key, member.manifest), b"{}")

    hooked = world.hook(environ=TWO_NODES)

    assert ([found[3], found[2], found[1], found[0]], []) == (handed_sets(hooked), hooked.against)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount")
def test_hook_disk_that_is_full_with_one_set_is_not_filled_again(world: MadeStore, tmp_path: Path) -> None:
    """Each other cut's set would be written up to where the disk is full, and be thrown away."""
    for number, each in enumerate((1, 2, 4, 8)):
        world.publish(str(number), ranks=range(8), cases=("b4",), size_bytes=400_000, ranks_per_node=each)
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2600k,mode=0700", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        hooked = world.hook("--warm-dir", disk / "warm", environ=TWO_NODES)
        sets = handed_sets(hooked)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)

    assert (1, [("store", "store", "absent")]) == (len(sets), hooked.against)
