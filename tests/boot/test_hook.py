"""The hook in real processes: warm when all is equal, else cold with the reason, and never worse than that."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cachectl.boot.handout import STARTUP, Handout
from cachectl.boot.hook import HookOptions, parse_arguments, run_hook
from tests.boot.hook_stores import overwrite, record_of
from tests.identity.rank_tables import levels, written
from tests.stores import OBSERVED, Hooked, MadeStore, make_store, tree, write_site

PYENV = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"


# Warm


def test_hook_equal_machine_hands_out_all_files(made: MadeStore) -> None:
    """Every file of every entry lies where the report says, with the bytes that were published."""
    hooked = made.hook()

    assert ("warm", [], 0) == (hooked.outcome, hooked.against, hooked.returncode)
    assert ["b2", "b4"] == [entry["case"] for entry in hooked.report["entries"]]
    for entry in hooked.report["entries"]:
        artifact = made.folder / "artifacts" / f"a-{entry['case']}-0"
        folder = Path(entry["path"])
        for name in ("compiled_module", "kernels/common.run"):
            assert (artifact / name).read_bytes() == (folder / name).read_bytes()
        assert "Model_static_aclgraphcache_0123/main_decode" == folder.relative_to(folder.parents[1]).as_posix()
    python_path = os.pathsep.join([str(STARTUP), made.hook_environ()["PYTHONPATH"]])
    handed = {"CACHECTL_HANDOUT": hooked.report["cache_dir"] + "/handout.json", "PYTHONPATH": python_path}
    assert handed == hooked.report["env"]
    assert {"resolve", "verify", "materialize", "total"} == hooked.report["seconds"].keys()
    assert "cachectl hook: warm\n" == hooked.stderr


def test_hook_handout_document_reads_back(made: MadeStore) -> None:
    """The process that gets CACHECTL_HANDOUT finds the request, the roots and each entry's whole manifest."""
    hooked = made.hook()

    handout = Handout.read(Path(hooked.report["env"]["CACHECTL_HANDOUT"]))

    record = record_of(made)[1]
    assert record.sets[0].warm_set == handout.warm_set
    assert record.sets[0].request == handout.sets[0].request
    assert {"path:0": made.recipe.parent, "recipe": made.recipe.parent} == handout.roots
    assert [entry["path"] for entry in hooked.report["entries"]] == [str(item.path) for item in handout.entries]
    assert {member.key for member in record.sets[0].members} == {item.entry.key for item in handout.entries}
    assert [("b2", 0), ("b4", 0)] == [(member.case, member.rank) for member in handout.sets[0].members]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], ids=oct)
def test_hook_umask_any_hands_out_private_files(made: MadeStore, umask: int) -> None:
    """Files are 0600, or 0700 where they are run, and folders 0700, whatever the umask (field reports P7, K10)."""
    shell = ("/bin/sh", "-c", f'umask {umask:04o}; exec "$@"', "sh", sys.executable)

    hooked = made.hook("--warm-dir", made.folder / "deep" / "er" / "warm", python=shell)

    assert "warm" == hooked.outcome
    modes = {
        path.relative_to(made.folder).as_posix(): path.stat().st_mode & 0o7777
        for path in [made.folder / "deep", *(made.folder / "deep").rglob("*")]
    }
    assert {0o700} == {mode for name, mode in modes.items() if (made.folder / name).is_dir()}
    assert {0o700} == {mode for name, mode in modes.items() if name.endswith(".run")}
    assert {0o600} == {mode for name, mode in modes.items() if name.endswith(("compiled_module", "handout.json"))}


def test_hook_many_times_leaves_the_store_byte_identical(made: MadeStore) -> None:
    """Warm, cold and strange hooks change nothing in the store, not even a time stamp (field reports P13, S16)."""
    before = tree(made.layout.root)

    outcomes = [
        made.hook().outcome,
        made.hook("--read-only").outcome,
        made.hook(environ={"N_LAYERS": "5"}).outcome,
        made.hook("--rank", "7").outcome,
        made.hook("--no-such-option").outcome,
        made.hook("--deadline", "0").outcome,
        made.hook(recipe=made.folder / "nowhere.yaml").outcome,
    ]

    assert ["warm", "warm", "cold", "cold", "cold", "cold", "cold"] == outcomes
    assert before == tree(made.layout.root)


def test_hook_store_without_write_permission_warm(made: MadeStore) -> None:
    """A store whose folders nobody may write, as on a read-only mount, is as good as any (field report P13)."""
    for folder in [made.layout.root, *made.layout.root.rglob("*")]:
        if folder.is_dir():
            folder.chmod(0o555)

    outcome = made.hook().outcome

    for folder in [made.layout.root, *made.layout.root.rglob("*")]:
        if folder.is_dir():
            folder.chmod(0o755)
    assert "warm" == outcome


def test_hook_copied_store_elsewhere_warm(made: MadeStore, tmp_path: Path) -> None:
    """A store and its recipe that were copied to another place are found again: no path is identity."""
    elsewhere = made.copy(tmp_path / "else where" / "ünïcode 模型")

    hooked = elsewhere.hook(cwd=Path("/"))

    assert ("warm", []) == (hooked.outcome, hooked.against)
    assert elsewhere.folder in Path(hooked.report["cache_dir"]).parents


def test_hook_relative_paths_from_another_folder_warm(made: MadeStore) -> None:
    """Recipe and warm dir may be relative; what is printed is absolute (field report P5)."""
    hooked = made.hook("--warm-dir", "w", "--store", "../store", recipe=Path("recipe.yaml"), cwd=made.recipe.parent)

    assert "warm" == hooked.outcome
    assert made.recipe.parent / "w" in Path(hooked.report["cache_dir"]).parents


def test_hook_recipe_behind_links_warm(made: MadeStore) -> None:
    """A mounted ConfigMap is a chain of links; the recipe's folder is where the caller says."""
    folder = made.folder / "config"
    folder.mkdir()
    (folder / "..data").mkdir()
    shutil.copy(made.recipe, folder / "..data" / "recipe.yaml")
    (folder / "recipe.yaml").symlink_to("..data/recipe.yaml")
    shutil.copy(made.source, folder)

    assert "warm" == made.hook(recipe=folder / "recipe.yaml").outcome


def test_hook_two_names_for_one_case_warm(made: MadeStore) -> None:
    """Two cases that differ in their names only have one key, whose files are laid down once."""
    made.recipe.write_text(made.recipe.read_text().replace("batch: 2", "batch: 4"))
    made.publish("same")

    hooked = made.hook()

    assert ("warm", ["b2", "b4"]) == (hooked.outcome, sorted(entry["case"] for entry in hooked.report["entries"]))
    assert 1 == len({entry["key"] for entry in hooked.report["entries"]})
    assert 1 == len({entry["path"] for entry in hooked.report["entries"]})


def test_hook_entry_under_another_case_cold(made: MadeStore) -> None:
    """A record that gives a case the entry of another one is noticed, where the keys are the same, too."""
    path, record = record_of(made)
    first, second = record.sets[0].members
    swapped = (replace(first, case=second.case), replace(second, case=first.case))
    overwrite(path, replace(record, sets=(replace(record.sets[0], members=swapped),)).to_bytes())

    hooked = made.hook()

    assert ("cold", [("artifact", "digest", "corrupt")]) == (hooked.outcome, hooked.against)


# Differences are cold


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"torch": "2.13.1+cpu"}, "torch.version"),
        ({"torch_git": "e" * 40}, "torch.git"),
        ({"torch_npu": "2.13.0.post2"}, "torch_npu.version"),
        ({"torch_npu_git": "e" * 40}, "torch_npu.git"),
        ({"npugraph_ex": "1.0.7"}, "formats.npugraph_ex"),
        ({"torchair": "1.0.6"}, "formats.torchair"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hook_other_toolchain_cold(made: MadeStore, change: dict[str, str], name: str) -> None:
    """Each version that files tell is compared, git versions too (field report W19)."""
    write_site(made.site, **change)

    hooked = made.hook()

    assert ("cold", [("toolchain", name, "semantic")]) == (hooked.outcome, hooked.against)
    assert next(iter(change.values())) == hooked.report["reasons"][0]["wanted"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("implementation", "pypy"), ("minor", "3.9"), ("magic", "00000000")],
)
def test_hook_other_python_cold(made: MadeStore, field: str, value: str) -> None:
    """Bytecode of another interpreter is never handed out: it would crash the program."""
    toolchain = dict(record_of(made)[1].sets[0].request["toolchain"])
    shutil.rmtree(made.layout.root)
    fresh = make_store(made.folder / "again")
    fresh.publish(request={"toolchain": {**toolchain, "python": {**toolchain["python"], field: value}}})

    hooked = fresh.hook()

    assert ("cold", [("toolchain", f"python.{field}", "semantic")]) == (hooked.outcome, hooked.against)
    assert value == hooked.report["reasons"][0]["stored"]


@pytest.mark.parametrize(
    ("part", "change"),
    [("arch", "riscv64"), ("driver", "24.1.rc3")],
)
def test_hook_other_machine_cold(made: MadeStore, part: str, change: str) -> None:
    """Architecture and driver are compared."""
    fresh = make_store(made.folder / "again")
    toolchain = dict(record_of(made)[1].sets[0].request["toolchain"])
    fresh.publish(request={"toolchain": {**toolchain, part: change}})

    hooked = fresh.hook()

    assert ("cold", [("toolchain", part, "semantic")]) == (hooked.outcome, hooked.against)


def test_hook_other_cann_cold(made: MadeStore) -> None:
    """Another CANN is another toolchain, package by package (field report V9)."""
    hooked = made.hook(environ={"CACHECTL_SIM_CANN": "8.2.RC1"})

    names = [f"cann.{package}" for package in ("CANN", "COMPILER", "HCCL", "OPP")]
    assert ("cold", [("toolchain", name, "semantic") for name in names]) == (hooked.outcome, hooked.against)


@pytest.mark.parametrize("missing", ["torch", "torch_npu"])
def test_hook_without_torch_cold(made: MadeStore, missing: str) -> None:
    """A version that can't be read is a reason, and equal to nothing."""
    shutil.rmtree(made.site / missing)

    hooked = made.hook(python=(sys.executable, "-S"))

    assert ("cold", [("toolchain", missing, "absent")]) == (hooked.outcome, hooked.against)


def test_hook_other_soc_cold(made: MadeStore) -> None:
    """Another SoC is another device; another spelling of the same one is not (field report V10)."""
    other = made.hook(environ={"CACHECTL_SIM_SOC": "Ascend910_9391"})
    spelt = made.hook(environ={"CACHECTL_SIM_SOC": "910B1"})

    assert ("cold", [("device", "soc", "semantic")]) == (other.outcome, other.against)
    assert ("ascend910b1", "ascend910_9391") == (
        other.report["reasons"][0]["stored"],
        other.report["reasons"][0]["wanted"],
    )
    assert "warm" == spelt.outcome


def test_hook_real_device_never_gets_simulated_entries(made: MadeStore) -> None:
    """A process on a device with the same SoC name asks for another device part."""
    made.recipe.write_text(made.recipe.read_text().replace("device: simulated", "device: npu"))

    hooked = made.hook(environ={"SOC_VERSION": "ascend910b1"})

    assert ("cold", [("store", "boot record", "absent")]) == (hooked.outcome, hooked.against)


def test_hook_edited_source_cold(made: MadeStore) -> None:
    """Changed code is cold, and named; a changed comment or an added function is not (field report W7)."""
    text = made.source.read_text()
    made.source.write_text(text.replace("# doubles", "# times two") + "\n\ndef prefill(x):\n    return x\n")
    comment = made.hook()
    made.source.write_text(text.replace("x * SCALE", "x + SCALE"))
    code = made.hook()
    made.source.write_text(text.replace("SCALE = 2", "SCALE = 3"))
    constant = made.hook()
    made.source.unlink()
    gone = made.hook()

    assert ("warm", []) == (comment.outcome, comment.against)
    assert ("cold", [("sources", "decoder.py: main_decode", "semantic")]) == (code.outcome, code.against)
    assert ("cold", [("sources", "decoder.py: SCALE", "semantic")]) == (constant.outcome, constant.against)
    assert ("cold", [("sources", "decoder.py", "absent")]) == (gone.outcome, gone.against)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"N_LAYERS": "5"}, "N_LAYERS"),
        ({"N_LAYERS": ""}, "N_LAYERS"),
        ({"FAST_PATH": "1"}, "FAST_PATH"),
        ({"FAST_PATH": ""}, "FAST_PATH"),
        ({"ASCEND_FOO": "1"}, "ASCEND_FOO"),
        ({"TASK_QUEUE_ENABLE": "2"}, "TASK_QUEUE_ENABLE"),
    ],
    ids=["changed", "emptied", "set", "set empty", "of a family", "torch_npu's"],
)
def test_hook_environment_differs_cold(made: MadeStore, environ: dict[str, str | None], name: str) -> None:
    """What is set otherwise than model code read it, or of a family and was not set, is refused (W3, W14)."""
    hooked = made.hook(environ=environ)

    assert ("cold", [("environment", name, "semantic")]) == (hooked.outcome, hooked.against)
    assert "hunter2" not in hooked.stdout + hooked.stderr


@pytest.mark.parametrize("name", ["N_LAYERS", "HUB_TOKEN"])
def test_hook_unset_variable_is_pending(made: MadeStore, name: str) -> None:
    """An init container has not the program's environment: what is not set there is for the program to compare."""
    hooked = made.hook(environ={name: None})

    assert ("warm", []) == (hooked.outcome, hooked.against)


def handed_sets(hooked: Hooked) -> list[str | None]:
    """Return the ids of the sets that a hook handed out."""
    return [handed.warm_set for handed in Handout.read(Path(hooked.report["env"]["CACHECTL_HANDOUT"])).sets]


def test_hook_set_about_which_nothing_is_pending_ends_the_list(made: MadeStore) -> None:
    """A newer set that needs a variable which is not set comes first, and behind it the one that holds for sure."""
    older = made.hook()
    newer = made.publish("b", observed={**OBSERVED, "N_LAYERS": "4", "MODE": "fast"}, created_at="2026-04-01T12:00:00Z")
    unset = made.hook()
    fast = made.hook(environ={"MODE": "fast"})
    slow = made.hook(environ={"MODE": "slow"})

    assert [older.report["warm_set"]] == handed_sets(older)
    assert [newer.warm_set, older.report["warm_set"]] == handed_sets(unset)
    assert newer.warm_set == unset.report["warm_set"]
    assert [newer.warm_set] == handed_sets(fast)
    assert [older.report["warm_set"]] == handed_sets(slow)


def test_hook_hands_out_four_sets_at_most_the_last_one_sure(made: MadeStore) -> None:
    """Of six sets the three newest that may hold and the one that holds; without such a one, the four newest."""
    sure = made.hook().report["warm_set"]
    modes = [made.publish(mode, observed={**OBSERVED, "MODE": mode}).warm_set for mode in ("a", "b", "c", "d", "e")]
    with_sure = made.hook()
    without = made.hook(environ={"N_LAYERS": None})

    assert [*modes[:1:-1], sure] == handed_sets(with_sure)
    assert modes[:0:-1] == handed_sets(without)
    folder = Path(with_sure.report["cache_dir"])
    assert 8 == len([path for path in folder.iterdir() if path.is_dir()])


def test_hook_entries_that_sets_share_are_laid_down_once(made: MadeStore) -> None:
    """Two sets with one entry in common hold it in one place."""
    made.publish("a", cases=("b4",), observed={**OBSERVED, "MODE": "fast"})
    both = made.publish("a", cases=("b4", "b2"), observed={**OBSERVED, "MODE": "fast"})

    hooked = made.hook()

    first, second, third = Handout.read(Path(hooked.report["env"]["CACHECTL_HANDOUT"])).sets
    assert both.warm_set == first.warm_set
    assert {item.path for item in second.entries} < {item.path for item in first.entries}
    assert not {item.path for item in third.entries} & {item.path for item in first.entries}


def test_hook_damaged_set_among_several_is_left_out(made: MadeStore) -> None:
    """A pending set whose files are damaged leaves nothing in the hand-out; the others are handed out."""
    sure = made.hook().report["warm_set"]
    made.publish("b", observed={**OBSERVED, "MODE": "b"})
    newest = made.publish("c", observed={**OBSERVED, "MODE": "c"})
    overwrite(made.blob("b"), b"other")

    hooked = made.hook()

    assert [newest.warm_set, sure] == handed_sets(hooked)
    assert [("artifact", "digest", "corrupt")] == hooked.against
    folders = [path for path in Path(hooked.report["cache_dir"]).iterdir() if path.is_dir()]
    assert 4 == len(folders)


def test_hook_in_another_image_hands_out(made: MadeStore) -> None:
    """An interpreter with neither torch nor torch_npu is not the program's: the toolchain is pending."""
    shutil.rmtree(made.site / "torch")
    shutil.rmtree(made.site / "torch_npu")

    hooked = made.hook(python=(sys.executable, "-S"))

    assert ("warm", []) == (hooked.outcome, hooked.against)


def test_hook_without_device_hands_out(made: MadeStore) -> None:
    """An init container has no NPU, no driver and no toolkit sourced: that is pending."""
    fresh = make_store(made.folder / "again")
    toolchain = dict(record_of(made)[1].sets[0].request["toolchain"])
    device = {"simulated": False, "soc": "ascend910b1"}
    fresh.publish(request={"toolchain": {**toolchain, "driver": "24.1.rc3"}, "device": device})

    seen = [fresh.hook(environ=environ) for environ in ({}, {"SOC_VERSION": "910B1"}, {"SOC_VERSION": "310P3"})]

    assert [
        ("warm", []),
        ("warm", []),
        ("cold", [("device", "soc", "semantic")]),
    ] == [(hooked.outcome, hooked.against) for hooked in seen]


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        ('node.kubernetes.io/npu.chip.name="910B1"\nhuawei.com/driver.version="24.1.rc3"\n', []),
        ('accelerator="huawei-Ascend910"\naccelerator-type="module-910b-8"\n', []),
        ('node.kubernetes.io/npu.chip.name="910B3"\n', [("device", "soc", "semantic")]),
        (
            'node.kubernetes.io/npu.chip.name="910B1"\nhuawei.com/driver.version="25.5.0"\n',
            [("toolchain", "driver", "semantic")],
        ),
    ],
    ids=["equal", "family", "other soc", "other driver"],
)
def test_hook_node_labels_are_what_is_wanted(made: MadeStore, labels: str, wanted: list[tuple[str, str, str]]) -> None:
    """An init container knows SoC and driver from its node's labels; a label that names no one SoC is pending."""
    fresh = make_store(made.folder / "again")
    toolchain = dict(record_of(made)[1].sets[0].request["toolchain"])
    device = {"simulated": False, "soc": "ascend910b1"}
    fresh.publish(request={"toolchain": {**toolchain, "driver": "24.1.rc3"}, "device": device})
    path = made.folder / "labels"
    path.write_text(labels)

    hooked = fresh.hook(environ={"CACHECTL_NODE_LABELS": str(path)})

    assert ("cold" if wanted else "warm", wanted) == (hooked.outcome, hooked.against)


def test_hook_placement_and_other_secret_warm(made: MadeStore) -> None:
    """Where a pod runs and which token it holds is no identity (field reports S1, S3, S5)."""
    environ = {"POD_IP": "10.0.0.9", "HUB_TOKEN": "other", "HOSTNAME": "x", "UNRELATED": "1", "PYTHONHASHSEED": "7"}

    assert "warm" == made.hook(environ=environ).outcome


def test_hook_unknown_recipe_cold(made: MadeStore) -> None:
    """A recipe that was never built says which command builds it."""
    made.recipe.write_text(made.recipe.read_text().replace("batch: 4", "batch: 8"))

    hooked = made.hook()

    assert ("cold", [("store", "boot record", "absent")]) == (hooked.outcome, hooked.against)
    hint = f"run: cachectl build {made.recipe} --store {made.layout.root}"
    assert hint == hooked.report["reasons"][0]["hint"]


def test_hook_recipe_other_comment_warm_where_it_can_be_parsed(made: MadeStore) -> None:
    """Unknown bytes of a known meaning are warm; a bare pod without pydantic says why it can't tell."""
    made.recipe.write_text("# a comment\n" + made.recipe.read_text())

    whole = made.hook()
    bare = made.hook(python=(sys.executable, "-S"))

    assert ("warm", []) == (whole.outcome, whole.against)
    assert ("cold", [("store", "boot record", "absent")]) == (bare.outcome, bare.against)
    assert "their meaning can't be read here" in bare.report["reasons"][0]["hint"]


def test_hook_recipe_that_is_none_cold(made: MadeStore) -> None:
    """A recipe with a fault says which."""
    made.recipe.write_text("schema: cachectl/recipe/v1\nnmae: x\n")

    hooked = made.hook()

    assert ("cold", [("policy", "recipe", "policy")]) == (hooked.outcome, hooked.against)
    assert "nmae" in hooked.report["reasons"][0]["stored"]


def test_hook_second_toolchain_of_a_record_warm(made: MadeStore) -> None:
    """While a fleet moves between toolchains, each node finds its own set, whichever is newer."""
    write_site(made.site, torch_npu="2.14.0")
    newer = made.publish("upgraded")
    upgraded = made.hook()
    write_site(made.site)
    rolled_back = made.hook()

    assert (newer.warm_set, "warm") == (upgraded.report["warm_set"], upgraded.outcome)
    assert ("warm", []) == (rolled_back.outcome, rolled_back.against)
    assert newer.warm_set != rolled_back.report["warm_set"]


# Ranks


@pytest.fixture(scope="module")
def _ranks_template(tmp_path_factory: pytest.TempPathFactory) -> MadeStore:
    made = make_store(tmp_path_factory.mktemp("ranks") / "made", world_size=8)
    made.publish(ranks=range(8), cases=("b4",), size_bytes=100)
    return made


@pytest.fixture
def ranks(_ranks_template: MadeStore, tmp_path: Path) -> MadeStore:
    """A store with a set of eight ranks."""
    return _ranks_template.copy(tmp_path / "made")


@pytest.mark.parametrize(
    ("arguments", "environ", "wanted"),
    [
        ((), {}, list(range(8))),
        (("--rank", "3"), {"RANK": "3"}, [3]),
        (("--rank", "3"), {"RANK": "0", "LOCAL_RANK": "0,1,2,3"}, [3]),
        ((), {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, [5]),
        ((), {"LOCAL_RANK": "1", "RANK_OFFSET": "4"}, [5]),
        ((), {"RANK": "1", "LOCAL_RANK": "0,1,2,3", "WORLD_SIZE": "8"}, [4, 5, 6, 7]),
        ((), {"RANK": "1", "PET_NODE_RANK": "1", "WORLD_SIZE": "2"}, list(range(8))),
        ((), {"PET_NODE_RANK": "1", "PET_NNODES": "4", "PET_NPROC_PER_NODE": "2"}, [2, 3]),
        ((), {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2"}, list(range(8))),
        ((), {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, [4, 5, 6, 7]),
    ],
    ids=["none", "option", "pod", "torchrun", "offline", "ascendjob", "pytorchjob", "pet", "lws", "lws sized"],
)
def test_hook_ranks_of_the_environment_are_handed_out(
    ranks: MadeStore, arguments: tuple[str, ...], environ: dict[str, str], wanted: list[int]
) -> None:
    """Each launcher's variables mean the global ranks that they mean, and no others (field report T3)."""
    hooked = ranks.hook(*arguments, environ=environ)

    assert ("warm", wanted) == (hooked.outcome, [entry["rank"] for entry in hooked.report["entries"]])


@pytest.mark.parametrize("size", [16, 1, 4])
def test_hook_other_world_size_cold(ranks: MadeStore, size: int) -> None:
    """Built for 8 ranks, started with another number of them: said in just these words (field report T7)."""
    hooked = ranks.hook(environ={"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size)})

    assert ("cold", [("topology", "world_size", "semantic")]) == (hooked.outcome, hooked.against)
    assert (8, size) == (hooked.report["reasons"][0]["stored"], hooked.report["reasons"][0]["wanted"])


@pytest.mark.parametrize(
    ("arguments", "environ", "name"),
    [
        (("--rank", "3"), {"RANK": "5"}, "rank"),
        ((), {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, "rank"),
        ((), {"RANK": "two"}, "RANK"),
        (("--rank", "9"), {"RANK_TABLE_FILE": "hccl.json"}, "rank"),
        ((), {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "RANK_TABLE_FILE": "hccl.json"}, "world_size"),
    ],
)
def test_hook_contradicting_ranks_cold(
    ranks: MadeStore, arguments: tuple[str, ...], environ: dict[str, str], name: str
) -> None:
    """Two sources that disagree on the rank, or one that can't be read, are never guessed at (field report T3)."""
    if "RANK_TABLE_FILE" in environ:
        environ = {**environ, "RANK_TABLE_FILE": str(written(ranks.recipe.parent / "hccl.json", levels(8)))}

    hooked = ranks.hook(*arguments, environ=environ)

    assert "cold" == hooked.outcome
    assert ("topology", name) == hooked.against[0][:2]


def test_hook_absent_rank_cold(ranks: MadeStore) -> None:
    """A rank that no entry is for is named (field report T7)."""
    hooked = ranks.hook("--rank", "8")

    assert ("cold", [("topology", "rank", "semantic")]) == (hooked.outcome, hooked.against)
    assert (list(range(8)), 8) == (hooked.report["reasons"][0]["stored"], hooked.report["reasons"][0]["wanted"])


def test_hook_swapped_ranks_cold(ranks: MadeStore) -> None:
    """A record that gives rank 1 the entry of rank 0 is noticed (field report T1)."""
    path, record = record_of(ranks)
    first, second, *others = record.sets[0].members
    swapped = (replace(first, rank=second.rank), replace(second, rank=first.rank), *others)
    overwrite(path, replace(record, sets=(replace(record.sets[0], members=swapped),)).to_bytes())

    hooked = ranks.hook("--rank", "1")

    assert ("cold", [("artifact", "digest", "corrupt")]) == (hooked.outcome, hooked.against)


def test_hook_one_damaged_rank_leaves_the_others_warm(ranks: MadeStore) -> None:
    """A rank whose own files are whole is handed out; the ranks agree later, in the processes (field report T5)."""
    ranks.blob("a", "b4", 3).unlink()

    assert "warm" == ranks.hook("--rank", "2").outcome
    assert "cold" == ranks.hook("--rank", "3").outcome
    assert "cold" == ranks.hook().outcome


# The command line


@pytest.mark.parametrize(
    "arguments",
    [
        ("--no-such-option",),
        ("--no-such-option=3",),
        ("-x",),
        ("--rank", "one"),
        ("--rank",),
        ("--deadline", "soon"),
        ("--deadline", "nan"),
        ("--format", "xml"),
        ("--store", ""),
        ("--warm-dir",),
        ("second.yaml",),
    ],
    ids=" ".join,
)
def test_hook_unknown_option_cold_exits_0(made: MadeStore, arguments: tuple[str, ...]) -> None:
    """An older hook must not kill a pod whose manifest was written for a newer one."""
    hooked = made.hook(*arguments)

    assert (0, "cold", [("policy", "hook option", "policy")]) == (
        hooked.returncode,
        hooked.outcome,
        hooked.against,
    )
    assert arguments[0] in hooked.report["reasons"][0]["wanted"]


def test_hook_no_recipe_named_cold(made: MadeStore) -> None:
    """Without a recipe there is nothing to hand out, and nothing to die of."""
    result = subprocess.run(
        [sys.executable, "-m", "cachectl", "hook"],
        env=made.hook_environ(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert (0, "cold") == (result.returncode, json.loads(result.stdout)["outcome"])


def test_hook_strict_exit_codes(made: MadeStore) -> None:
    """--strict is 1 for cold and for an unknown option, 0 for warm and for disabled (field report D5)."""
    codes = [
        made.hook("--strict").returncode,
        made.hook("--strict", environ={"N_LAYERS": "9"}).returncode,
        made.hook("--strict", "--no-such-option").returncode,
        made.hook("--strict", "--store", made.folder / "nowhere").returncode,
        made.hook("--strict", environ={"CACHECTL_DISABLE": "1"}).returncode,
    ]

    assert [0, 1, 1, 1, 0] == codes


def test_hook_format_shell_and_env(made: MadeStore) -> None:
    """The lines carry the same path, for eval and for env files; cold prints no line."""
    spaced = made.copy(made.folder.parent / "it's spaced")

    shell, env, cold = (
        spaced.hook("--format", "shell"),
        spaced.hook("--format=env"),
        spaced.hook("--format", "env", "--rank", "9"),
    )

    evaluated = subprocess.run(
        ["/bin/sh", "-c", f'{shell.stdout}printf %s "$CACHECTL_HANDOUT"'], capture_output=True, text=True, check=True
    )
    assert Path(evaluated.stdout).is_file()
    lines = dict(line.split("=", 1) for line in env.stdout.splitlines())
    assert ["CACHECTL_HANDOUT", "PYTHONPATH"] == list(lines)
    assert Path(lines["CACHECTL_HANDOUT"]).is_file()
    assert [str(STARTUP), *spaced.hook_environ()["PYTHONPATH"].split(os.pathsep)] == lines["PYTHONPATH"].split(":")
    assert ("", 0) == (cold.stdout, cold.returncode)


def test_hook_format_env_path_with_a_line_break_is_cold(made: MadeStore) -> None:
    """Such a line would set another variable; a shell's quotes hold it."""
    warm_dir = made.folder.parent / "warm\nEVIL=1"

    env = made.hook("--format", "env", "--warm-dir", warm_dir)
    shell = made.hook("--format", "shell", "--warm-dir", warm_dir)

    assert ("", 0) == (env.stdout, env.returncode)
    assert "cachectl hook: cold" in env.stderr
    assert "--format shell" in env.stderr
    script = f'{shell.stdout}printf "%s/%s" "$EVIL" "$CACHECTL_HANDOUT"'
    evaluated = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True)
    assert evaluated.stdout.startswith(f"/{warm_dir}/")


@pytest.mark.parametrize(
    "locale", [{"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}]
)
def test_hook_path_without_encoding_exits_0(made: MadeStore, locale: dict[str, str]) -> None:
    """Paths that the locale can't say, or that are no text at all, come out as the bytes they are."""
    folder = Path(os.fsdecode(os.fsencode(made.folder.parent) + b"/\xff\xe9 \xe6\xa8\xa1"))
    strange = made.copy(folder)

    hooked = strange.hook("--format", "env", environ=locale)

    assert 0 == hooked.returncode, hooked.stderr
    assert f"CACHECTL_HANDOUT={folder}" in hooked.stdout
    assert ("warm", 0) == ((again := strange.hook(environ=locale)).outcome, again.returncode)


@pytest.mark.parametrize("redirect", [">&-", ">/dev/full", "2>&-", ">&- 2>&-"])
def test_hook_nobody_listens_exits_0(made: MadeStore, redirect: str) -> None:
    """A closed or full output is no reason to end a boot."""
    if "full" in redirect and not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    result = subprocess.run(
        ["/bin/sh", "-c", f'"$@" {redirect}', "sh", sys.executable, "-m", "cachectl", "hook", str(made.recipe)],
        env=made.hook_environ(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert 0 == result.returncode
    assert "Traceback" not in result.stderr
    assert (made.warm_dir / "handouts").is_dir()


def test_hook_read_only_writes_nothing(made: MadeStore) -> None:
    """--read-only says what would be handed out, and makes no folder (field report P13)."""
    hooked = made.hook("--read-only")

    assert ("warm", {}, None) == (hooked.outcome, hooked.report["env"], hooked.report["cache_dir"])
    assert [None, None] == [entry["path"] for entry in hooked.report["entries"]]
    assert not made.warm_dir.exists()


def test_hook_quiet_prints_the_document_only(made: MadeStore) -> None:
    """-q leaves stderr empty."""
    hooked = made.hook("-q", "-v", "--json")

    assert ("", "warm") == (hooked.stderr, hooked.outcome)


# One line an event, written at once: the hook works in a child process, and ends past every exit handler.
AUDIT = """
import os, sys
report = os.open(os.environ["TEST_AUDIT"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Which argument is what is changed, and which the folder that it is relative to.
CHANGES = {"mkdir": (0, 2), "remove": (0, 1), "rmdir": (0, 1), "chmod": (0, 2), "chown": (0, 3), "link": (1, 3),
           "symlink": (1, 2), "utime": (0, 3), "truncate": (0, 9), "setxattr": (0, 9), "rename": (1, 3)}
def tell(kind, path, folder=-1):
    if isinstance(path, int):
        path = os.readlink(f"/proc/self/fd/{path}")
    path = os.fsdecode(path)
    base = os.readlink(f"/proc/self/fd/{folder}") if folder is not None and folder >= 0 else os.getcwd()
    os.write(report, f"{kind} {os.path.normpath(os.path.join(base, path))}\\n".encode("utf-8", "surrogateescape"))
def note(event, arguments):
    if event == "open":
        path, flags = arguments[0], arguments[2]
        if isinstance(path, int) or (relative and not os.path.isabs(path)):
            return
        tell("write" if isinstance(flags, int) and flags & WRITES else "read", path)
    elif event == "os.rename":
        tell("write", arguments[0], arguments[2])
        tell("write", arguments[1], arguments[3])
    elif event.startswith("os.") and event[3:] in CHANGES:
        which, folder = CHANGES[event[3:]]
        tell("write", arguments[which], arguments[folder] if folder < len(arguments) else -1)
    elif event in ("os.scandir", "os.listdir"):
        tell("read", "." if arguments[0] is None else arguments[0])
# The event of an opened file does not say which folder its name is relative to.
relative, real_open = [], os.open
def open_in(path, flags, mode=0o777, *, dir_fd=None):
    if dir_fd is None:
        return real_open(path, flags, mode)
    tell("write" if flags & WRITES else "read", path, dir_fd)
    relative.append(path)
    try:
        return real_open(path, flags, mode, dir_fd=dir_fd)
    finally:
        relative.pop()
os.open = open_in
sys.addaudithook(note)
"""


@pytest.fixture
def audited(made: MadeStore) -> Callable[..., list[str]]:
    """Run a hook and return the file events of its processes, the ones of the interpreter's own modules left out."""
    folder = made.folder / "audit"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(AUDIT)
    numbers = itertools.count()

    def run(*arguments: str, **environ: str) -> list[str]:
        report = folder / f"events-{next(numbers)}"
        path = os.pathsep.join([str(folder), made.hook_environ()["PYTHONPATH"]])
        made.hook(
            *arguments,
            environ={"PYTHONPATH": path, "TEST_AUDIT": str(report), "PYTHONDONTWRITEBYTECODE": "1", **environ},
        )
        lines = [line for line in report.read_text().splitlines() if line != f"write {os.devnull}"]
        own = (str(made.layout.root), str(made.recipe.parent), str(made.warm_dir), str(made.site))
        return [line for line in lines if line.startswith("write") or line.partition(" ")[2].startswith(own)]

    return run


def test_hook_disabled_touches_no_file(made: MadeStore, audited: Callable[..., list[str]]) -> None:
    """CACHECTL_DISABLE=1 opens neither store, recipe nor warm dir, and writes nothing (field report O8)."""
    events = audited(CACHECTL_DISABLE="1")
    hooked = made.hook("--strict", environ={"CACHECTL_DISABLE": "1"})

    # The site's folder is on sys.path: the interpreter lists it when it looks for modules.
    assert [] == [event for event in events if not event.endswith(str(made.site))]
    assert ("disabled", [], {}, 0) == (hooked.outcome, hooked.against, hooked.report["env"], hooked.returncode)
    assert not made.warm_dir.exists()


def test_hook_warm_writes_below_the_warm_dir_only(made: MadeStore, audited: Callable[..., list[str]]) -> None:
    """No write, lock or marker outside the warm dir (field reports P13, S16)."""
    events = audited()

    writes = [event.partition(" ")[2] for event in events if event.startswith("write")]
    assert [] == [path for path in writes if not path.startswith(str(made.warm_dir))]
    assert any(path.endswith("compiled_module") for path in writes)


# Where no process can be made the hook works in its own; so what it imports can be seen.
DUMP = """
import os, sys
def fork():
    raise BlockingIOError(11, "Resource temporarily unavailable")
os.fork = fork
from cachectl.__main__ import main
sys.argv[0] = "cachectl"
code = main()
heavy = {"torch", "torch_npu", "pydantic", "sqlalchemy", "click", "yaml", "filelock", "rich", "cryptography", "alembic"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
sys.exit(code)
"""


def test_hook_imports_standard_library_only(made: MadeStore) -> None:
    """A warm hook imports nothing that has to be installed, torch least of all."""
    hooked = made.hook("-q", program=("-c", DUMP))

    assert ("warm", "[]\n") == (hooked.outcome, hooked.stderr)


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_hook_bare_interpreter_warm(tmp_path: Path, version: str) -> None:
    """Each supported CPython runs the hook without any installed package, for entries of its own kind."""
    pythons = sorted(PYENV.glob(f"{version}.*/bin/python"))
    if not pythons:
        pytest.skip(f"needs CPython {version}")
    python = (str(pythons[-1]), "-S", "-E", "-c")
    made = make_store(tmp_path / "made")
    # -E hides PYTHONPATH, as -I does; the paths come in by the program itself.
    program = f"import sys; sys.path[:0] = {made.hook_environ()['PYTHONPATH'].split(os.pathsep)!r}\n"
    tell = f"{program}import json; from cachectl.identity.toolchain import toolchain_part\n"
    tell += f"print(json.dumps(toolchain_part({{}}, simulated=True, search_path=[{str(made.site)!r}])[0]))"
    told = subprocess.run([*python, tell], capture_output=True, text=True, timeout=200, check=True)
    toolchain = json.loads(told.stdout)
    made.publish(request={"toolchain": toolchain})

    hooked = made.hook(python=python[:-1], program=("-c", program + DUMP))

    assert version == toolchain["python"]["minor"]
    assert ("warm", "cachectl hook: warm\n[]\n") == (hooked.outcome, hooked.stderr)
    if (version, sys.version_info[:2]) != ("3.11", (3, 11)):
        assert {"toolchain"} == {part for part, _, _ in made.hook().against}


# As a value


def test_run_hook_never_raises_for_a_fault_of_its_own(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug is a cold start that asks for a report, not the end of a boot."""

    def fail(spec: str | None) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("cachectl.store.layout.StoreLayout.resolve", fail)

    handout = run_hook(HookOptions(recipe=str(made.recipe)), made.hook_environ())

    assert ("cold", ["ZeroDivisionError: a bug"]) == (handout.outcome, [reason.stored for reason in handout.reasons])
    assert handout.seconds.total > 0


def test_run_hook_broken_system_call_cold(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input/output error while documents are read is cold with its own words (field report D5)."""
    real = os.fstat

    def fail(descriptor: int) -> os.stat_result:
        if str(made.layout.root) in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(5, "Input/output error")
        return real(descriptor)

    monkeypatch.setattr(os, "fstat", fail)

    handout = run_hook(HookOptions(recipe=str(made.recipe)), made.hook_environ())

    assert ("cold", 1) == (handout.outcome, len(handout.reasons))
    assert "Input/output error" in str(handout.reasons[0].stored)


def test_parse_arguments_reads_every_option() -> None:
    """All options of the contract, in both ways of writing them."""
    options = parse_arguments(
        [
            *("r.yaml", "--store=s", "--warm-dir", "w", "--format", "env", "--rank", "2"),
            *("--strict", "--read-only"),
            *("--deadline", "1.5", "--uid=7", "-v", "-q"),
        ]
    )

    assert HookOptions("r.yaml", "s", "w", "env", 2, True, True, 1.5, 7, True) == options


def test_parse_arguments_json_wins_over_format() -> None:
    """--json is what every command has."""
    assert "json" == parse_arguments(["--format", "shell", "--json"]).output
