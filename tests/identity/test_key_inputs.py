"""The key as a whole: each input that can reach a graph changes exactly its own part, and no noise changes any.

One case an input. What only a traced call shows (sources, inputs, guards) has its own tests, and
tests/end_to_end/test_identity.py plays these changes on the real runtime.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import cachectl
from cachectl.identity.environment import check_environment, environment_part
from cachectl.identity.options import found_reasons
from cachectl.identity.request import compare_requests, differences, entry_model_part, recipe_request
from cachectl.identity.toolchain import CANN_PACKAGES
from cachectl.identity.topology import rank_topology
from cachectl.schemas.keying import KEY_PARTS, compute_key, part_digests
from tests.identity.wheels import write_options
from tests.stores import write_site

# cachectl as it is tested, installed or not, and the tests themselves.
PATHS = os.pathsep.join(str(Path(file).resolve().parents[up]) for file, up in ((cachectl.__file__, 1), (__file__, 2)))
RECIPE: dict[str, Any] = {
    "name": "tiny",
    "device": "npu",
    "model": {
        "factory": "tiny.model:build",
        "config": {"layers": 4},
        "path": ["."],
        "sources": [],
        "revision": None,
    },
    "compile": {
        "mode": "npugraph_ex",
        "dynamic": False,
        "options": {"force_eager": True},
        "config": {},
        "dynamo": {},
        "setup": "tiny.model:setup",
    },
    "functions": [
        {"method": "decode", "cases": [{"name": "b4", "inputs": "tiny.inputs:decode", "args": {"batch": 4}}]}
    ],
    "topology": {"world_size": 1},
    "environment": {"TASK_QUEUE_ENABLE": "1"},
}


@dataclass
class World:
    """All that an entry's parts are made from, but for what a traced call shows."""

    site: Path
    home: Path
    recipe: dict[str, Any] = field(default_factory=lambda: copy.deepcopy(RECIPE))
    environ: dict[str, str] = field(default_factory=dict)
    started: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=lambda: {"N_LAYERS", "FAST_PATH", "HUB_TOKEN"})
    found: dict[str, Any] = field(
        default_factory=lambda: {
            "dynamo": {"allow_rnn": True},
            "passes": {"post_grad_custom_pre_pass": "sha256:a"},
            "patterns": {"0 fuse": "sha256:b"},
            "decompositions": {"post_autograd aten.silu.default": "sha256:c"},
            "operators": {"my.op.default": {"schema": "my::op(Tensor x) -> Tensor", "kernels": {"fake": "sha256:d"}}},
        }
    )
    rank: int = 0

    def parts(self) -> dict[str, Any]:
        """Return the nine parts; the three that a traced call shows are empty."""
        request, missing = recipe_request(self.recipe, self.environ, search_path=[str(self.site)])
        assert [] == missing
        function = self.recipe["functions"][0]
        return {
            "model": entry_model_part(self.recipe, function["method"], function["cases"][0]),
            "sources": {},
            "inputs": {},
            "guards": {},
            "topology": rank_topology(request["topology"], self.rank),
            "options": {**request["options"], "found": copy.deepcopy(self.found)},
            "toolchain": request["toolchain"],
            "device": request["device"],
            "environment": environment_part(self.recipe, self.read, self.environ, self.started),
        }


def make_world(folder: Path) -> World:
    """Return a world with wheels and a toolkit of its own."""
    site, home = folder / "site", folder / "cann"
    write_site(site)
    write_options(site)
    for package in CANN_PACKAGES.values():
        (home / "share" / "info" / package).mkdir(parents=True)
        (home / "share" / "info" / package / "version.info").write_text("Version=8.5.0\n")
    environ = {
        "ASCEND_HOME_PATH": str(home),
        "SOC_VERSION": "Ascend910B1",
        "N_LAYERS": "4",
        "HUB_TOKEN": "hunter2",
        "VLLM_ASCEND_ENABLE_X": "1",
        "TASK_QUEUE_ENABLE": "1",
    }
    return World(site, home, environ=environ, started=dict(environ))


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A world of the test's own."""
    return make_world(tmp_path)


Change = Callable[[World], object]


def options(**values: Any) -> Change:
    return lambda world: world.recipe["compile"]["options"].update(values)


def compile_(**values: Any) -> Change:
    return lambda world: world.recipe["compile"].update(values)


def model(**values: Any) -> Change:
    return lambda world: world.recipe["model"].update(values)


def case(**values: Any) -> Change:
    return lambda world: world.recipe["functions"][0]["cases"][0].update(values)


def topology(**values: Any) -> Change:
    return lambda world: world.recipe["topology"].update(values)


def declared(**values: str) -> Change:
    return lambda world: world.recipe["environment"].update(values)


def environ(**values: str | None) -> Change:
    def change(world: World) -> None:
        for name, value in values.items():
            for place in (world.environ, world.started):
                place.pop(name, None) if value is None else place.update({name: value})

    return change


def found(group: str, **values: Any) -> Change:
    return lambda world: world.found.setdefault(group, {}).update(values)


def not_found(group: str) -> Change:
    return lambda world: world.found.pop(group)


def wheel(**versions: str) -> Change:
    return lambda world: write_site(world.site, **versions)


def cann(package: str, text: str = "Version=8.5.1\n") -> Change:
    return lambda world: (world.home / "share" / "info" / package / "version.info").write_text(text)


REACHES: dict[str, tuple[str, Change]] = {
    # model
    "factory": ("model", model(factory="tiny.model:other")),
    "config value": ("model", model(config={"layers": 5})),
    "config type": ("model", model(config={"layers": 4.0})),
    "config bool for int": ("model", model(config={"layers": True})),
    "config field nobody knows": ("model", model(config={"layers": 4, "new": None})),
    "model field nobody knows": ("model", model(unheard=0)),
    "revision": ("model", model(revision="abc")),
    "extra files": ("model", model(sources=["*.json"])),
    "inputs": ("model", case(inputs="tiny.inputs:other")),
    "arguments of inputs": ("model", case(args={"batch": 2})),
    "method": ("model", lambda world: world.recipe["functions"][0].update(method="mtp_decode")),
    # topology
    "world size": ("topology", topology(world_size=2)),
    "tensor parallel": ("topology", topology(tensor_parallel=2)),
    "expert parallel": ("topology", topology(expert_parallel=2)),
    "data parallel": ("topology", topology(data_parallel=2)),
    "pipeline parallel": ("topology", topology(pipeline_parallel=2)),
    "context parallel": ("topology", topology(context_parallel=2)),
    "rank": ("topology", lambda world: setattr(world, "rank", 1)),
    # options
    "mode": ("options", compile_(mode="ge_graph")),
    "dynamic": ("options", compile_(dynamic=True)),
    "compile field nobody knows": ("options", compile_(unheard=0)),
    "option off": ("options", options(force_eager=False)),
    "option that the runtime forgets": ("options", options(inplace_pass=False)),
    "number option": ("options", options(capture_limit=8)),
    "choice option": ("options", options(capture_error_mode="relaxed")),
    "dict option": ("options", options(super_kernel_optimize_options={"a": [".*"]})),
    "custom pass by name": ("options", options(post_grad_custom_pre_pass="tiny.passes:fuse")),
    "dynamo field": ("options", compile_(dynamo={"automatic_dynamic_shapes": False})),
    "setup": ("options", compile_(setup="tiny.model:other")),
    "no setup": ("options", compile_(setup=None)),
    "dynamo field that code sets": ("options", found("dynamo", automatic_dynamic_shapes=False)),
    "another dynamo field that code sets": ("options", found("dynamo", specialize_int=True)),
    "code of a custom pass": ("options", found("passes", post_grad_custom_pre_pass="sha256:x")),
    "pattern": ("options", found("patterns", **{"0 fuse": "sha256:x"})),
    "second pattern": ("options", found("patterns", **{"1 fuse": "sha256:b"})),
    "no pattern": ("options", not_found("patterns")),
    "decomposition": ("options", found("decompositions", **{"post_autograd aten.silu.default": "sha256:x"})),
    "collective": ("options", found("collectives", all_reduce="tiny.patches:all_reduce")),
    "schema of an operator": ("options", found("operators", **{"my.op.default": {"schema": "my::op(Tensor(a!) x)"}})),
    "fake of an operator": ("options", lambda world: world.found["operators"]["my.op.default"]["kernels"].clear()),
    "one more operator": ("options", found("operators", **{"my.other.default": None})),
    "caching flag of torch": ("options", found("functorch", enable_autograd_cache=True)),
    "default of the wheel": (
        "options",
        lambda world: next(world.site.rglob("compiler_config.py")).write_text(
            next(world.site.rglob("compiler_config.py")).read_text().replace("OptionValue(True", "OptionValue(False")
        ),
    ),
    # toolchain
    "torch": ("toolchain", wheel(torch="2.13.1+cpu")),
    "torch's local suffix": ("toolchain", wheel(torch="2.13.0")),
    "torch's revision": ("toolchain", wheel(torch_git="e" * 40)),
    "torch_npu's post release": ("toolchain", wheel(torch_npu="2.13.0.post2")),
    "torch_npu's local suffix": ("toolchain", wheel(torch_npu="2.13.0+gitabc")),
    "torch_npu's revision": ("toolchain", wheel(torch_npu_git="e" * 40)),
    "format of npugraph_ex": ("toolchain", wheel(npugraph_ex="1.0.7")),
    "format of torchair": ("toolchain", wheel(torchair="1.0.6")),
    "CANN": ("toolchain", cann("runtime")),
    "CANN's suffix": ("toolchain", cann("runtime", "Version=8.5.0.RC1\n")),
    "compiler": ("toolchain", cann("bisheng-compiler")),
    "HCCL": ("toolchain", cann("hccl")),
    "operators": ("toolchain", cann("ops-legacy")),
    "a package less": (
        "toolchain",
        lambda world: (world.home / "share" / "info" / "hccl" / "version.info").unlink(),
    ),
    # device
    "SoC": ("device", environ(SOC_VERSION="Ascend910B2")),
    "SoC of the same family": ("device", environ(SOC_VERSION="Ascend910_9391")),
    # environment
    "declared value": ("environment", declared(TASK_QUEUE_ENABLE="2")),
    "declared name": ("environment", declared(NEW="")),
    "observed value": ("environment", environ(N_LAYERS="5")),
    "observed emptied": ("environment", environ(N_LAYERS="")),
    "observed unset": ("environment", environ(N_LAYERS=None)),
    "observed set": ("environment", environ(FAST_PATH="1")),
    "observed set to nothing": ("environment", environ(FAST_PATH="")),
    "secret unset": ("environment", environ(HUB_TOKEN=None)),
    "one more name read": ("environment", lambda world: world.read.add("NEW")),
    "of a family": ("environment", environ(VLLM_ASCEND_ENABLE_X="0")),
    "of a family unset": ("environment", environ(VLLM_ASCEND_ENABLE_X=None)),
    "of a family nobody knows": ("environment", environ(ASCEND_FOO="1")),
    "HCCL's": ("environment", environ(HCCL_BUFFSIZE="200")),
    "torch's": ("environment", environ(TORCHDYNAMO_DISABLE="1")),
    "custom operators set": ("environment", environ(ASCEND_CUSTOM_OPP_PATH="/opt/ops")),
    "changed by the process": ("environment", lambda world: world.environ.update(VLLM_ASCEND_ENABLE_X="2")),
}


@pytest.mark.parametrize("name", REACHES)
def test_key_changes_with(world: World, name: str) -> None:
    """One changed input changes the key, by exactly its own part, and the difference can be said (W5, W19)."""
    part, change = REACHES[name]
    before = world.parts()
    change(world)
    after = world.parts()

    left, right = part_digests(before), part_digests(after)
    assert [part] == [other for other in KEY_PARTS if left[other] != right[other]]
    assert compute_key(before) != compute_key(after)
    assert list(differences(before[part], after[part]))


# Declared names are compared with the request, and a program does not tell which names it reads.
OBSERVABLE = [
    name
    for name, (part, _) in REACHES.items()
    if part == "environment" and not name.startswith(("declared", "one more"))
]


@pytest.mark.parametrize("name", OBSERVABLE)
def test_environment_that_changes_the_key_is_refused(world: World, name: str) -> None:
    """What changes the key of a build is what a program is refused for: nothing is recorded that nobody compares."""
    stored = world.parts()["environment"]
    assert [] == check_environment(stored, world.environ)
    REACHES[name][1](world)

    assert 1 == len(check_environment(stored, world.environ))


@pytest.mark.parametrize("name", [name for name, (part, _) in REACHES.items() if part == "options"])
def test_options_that_change_the_key_are_refused(world: World, name: str) -> None:
    """Each changed option is one difference of the request or of what was found, never none."""
    before = world.parts()["options"]
    REACHES[name][1](world)
    after = world.parts()["options"]

    requests = [{"options": {key: value for key, value in part.items() if key != "found"}} for part in (before, after)]
    reasons = [*compare_requests(*requests), *found_reasons(before["found"], after["found"])]
    assert reasons
    assert {"options"} == {reason.part for reason in reasons}


NOISE: dict[str, Change] = {
    "recipe's name": lambda world: world.recipe.update(name="other"),
    "case's name": case(name="renamed"),
    "path of the code": model(path=["src", "."]),
    "order of options": compile_(options={"capture_limit": 64, "force_eager": True}),
    "default written out": options(inplace_pass=True, capture_limit=64, data_dump_dir="./"),
    "handle left empty": options(use_graph_pool=None),
    "dynamo default written out": compile_(dynamo={"automatic_dynamic_shapes": True}),
    "dynamo field that limits compiles": compile_(dynamo={"recompile_limit": 16}),
    "dynamo field that limits compiles, by its older name": compile_(dynamo={"cache_size_limit": 16}),
    "dynamo field that only logs": compile_(dynamo={"verbose": True}),
    "default size written out": topology(tensor_parallel=1),
    "HOME": environ(HOME="/x"),
    "user": environ(USER="x", LOGNAME="x"),
    "host": environ(HOSTNAME="x", POD_NAME="x", POD_IP="10.0.0.9"),
    "locale": environ(LANG="de_DE.UTF-8", LC_ALL="C", TZ="Asia/Shanghai"),
    "threads": environ(OMP_NUM_THREADS="1"),
    "hash seed": environ(PYTHONHASHSEED="7"),
    "address of HCCL": environ(HCCL_IF_IP="10.0.0.9", HCCL_IF_BASE_PORT="50000", HCCL_SOCKET_IFNAME="eth1"),
    "time-outs": environ(HCCL_CONNECT_TIMEOUT="1", HCCL_NEW_TIMEOUT="1", VLLM_ENGINE_ITERATION_TIMEOUT_S="1"),
    "logs": environ(ASCEND_GLOBAL_LOG_LEVEL="1", TORCH_LOGS="dynamo", VLLM_LOGGING_LEVEL="DEBUG"),
    "paths": environ(ASCEND_WORK_PATH="/x", TORCHINDUCTOR_CACHE_DIR="/y", VLLM_CACHE_ROOT="/z"),
    "run ids": environ(TORCHELASTIC_RUN_ID="1", VLLM_INSTANCE_ID="2"),
    "visible devices": environ(ASCEND_RT_VISIBLE_DEVICES="3", ASCEND_VISIBLE_DEVICES="3", VLLM_RAY_BUNDLE_INDICES="1"),
    "services of Kubernetes": environ(VLLM_SERVICE_HOST="10.0.0.9", VLLM_PORT_8000_TCP_ADDR="10.0.0.9", VLLM_PORT="x"),
    "autoload": environ(TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
    "secret": environ(HUB_TOKEN="another"),
    "secret of a family": environ(VLLM_API_KEY="hunter2"),
    "name nobody reads": environ(NOBODY="1"),
    "spelling of the SoC": environ(SOC_VERSION="910B1"),
    "another spelling": environ(SOC_VERSION="ascend 910b1 "),
    "metadata of torch": lambda world: (
        (world.site / "torch-9.9.dist-info").mkdir(),
        (world.site / "torch-9.9.dist-info" / "METADATA").write_text("Name: torch\nVersion: 9.9\n"),
    ),
}


@pytest.mark.parametrize("name", NOISE)
def test_key_does_not_change_with(world: World, name: str) -> None:
    """What can't reach the graph is in no part (S1, S2, S3, S5, S10, W18)."""
    before = world.parts()
    NOISE[name](world)
    after = world.parts()

    assert [] == [part for part in KEY_PARTS if part_digests(before)[part] != part_digests(after)[part]]
    assert [] == check_environment(before["environment"], world.environ)


def test_key_does_not_change_with_the_order_of_functions(world: World) -> None:
    """An entry is known by what it is: two methods and two cases in swapped order have the keys they had (W8)."""
    functions = world.recipe["functions"]
    functions[0]["cases"].append({"name": "b2", "inputs": "tiny.inputs:decode", "args": {"batch": 2}})
    functions.append({"method": "mtp_decode", "cases": [{"name": "b4", "inputs": "tiny.inputs:mtp", "args": {}}]})

    def keys() -> dict[tuple[str, str], str]:
        parts = world.parts()
        return {
            (function["method"], case["name"]): compute_key(
                {**parts, "model": entry_model_part(world.recipe, function["method"], case)}
            )
            for function in world.recipe["functions"]
            for case in function["cases"]
        }

    before = keys()
    functions.reverse()
    functions[1]["cases"].reverse()

    assert before == keys()
    assert 3 == len(set(before.values()))


def test_key_does_not_change_with_another_toolkits_place(world: World, tmp_path: Path) -> None:
    """A toolkit and wheels of the same versions elsewhere are the same (field report S3)."""
    other = make_world(tmp_path / "elsewhere")

    assert compute_key(world.parts()) == compute_key(other.parts())


@pytest.mark.parametrize(
    ("change", "inside", "outside"),
    [
        ({}, [], []),
        ({"TASK": "x"}, [], []),
        ({"VLLM_ASCEND_ENABLE_X": "1"}, ["VLLM_ASCEND_ENABLE_X"], []),
        ({"VLLM_ASCEND_ENABLE_X": "3"}, ["VLLM_ASCEND_ENABLE_X"], ["VLLM_ASCEND_ENABLE_X"]),
        ({"ASCEND_GONE": "1"}, ["ASCEND_GONE"], []),
        ({"ASCEND_GONE": "2"}, ["ASCEND_GONE"], ["ASCEND_GONE"]),
    ],
    ids=str,
)
def test_variables_that_the_process_changes(
    world: World, change: dict[str, str], inside: list[str], outside: list[str]
) -> None:
    """A library that sets a variable by itself: before the start the old value holds, in the program the new one.

    cann-recipes overwrites TASK_QUEUE_ENABLE whatever the pod sets; plan and hook see the pod's, the program its own.
    """
    world.started["ASCEND_GONE"] = "1"
    world.environ["VLLM_ASCEND_ENABLE_X"] = "2"
    stored = world.parts()["environment"]
    seen = {**world.environ, **change}

    assert inside == [reason.name for reason in check_environment(stored, seen)]
    assert outside == [reason.name for reason in check_environment(stored, seen, outside=True)]


SCRIPT = """\
import json, os, sys, time
from pathlib import Path

if os.environ.get("TEST_CLOCK"):
    time.time, time.time_ns = lambda: 0.0, lambda: 0
if os.environ.get("TEST_CORES"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if os.environ.get("TEST_ORDER"):
    listdir, scandir = os.listdir, os.scandir
    os.listdir = lambda *args: sorted(listdir(*args), reverse=True)

    class Reversed(list):
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    os.scandir = lambda *args: Reversed(sorted(scandir(*args), key=lambda item: item.name, reverse=True))

from cachectl.identity.environment import environment_part, starting_environment
from cachectl.identity.request import entry_model_part, recipe_request
from cachectl.identity.topology import rank_topology
from cachectl.schemas.keying import compute_key
from cachectl.schemas.recipe_reading import load_recipe
from tests.stores import source_document

folder = Path(sys.argv[1])
document = load_recipe(folder / "recipe.yaml").recipe.to_document()
request, missing = recipe_request(document, os.environ, search_path=[str(folder / "site")])
assert not missing, missing
function = document["functions"][0]
print(compute_key({
    "model": entry_model_part(document, function["method"], function["cases"][0]),
    "sources": source_document(folder / "decoder.py"),
    "inputs": {}, "guards": {},
    "topology": rank_topology(request["topology"], 0),
    "options": {**request["options"], "found": {}},
    "toolchain": request["toolchain"],
    "device": request["device"],
    "environment": environment_part(document, {"N", "HOME"}, os.environ, starting_environment(os.environ)),
}))
"""
TEXT = """\
schema: cachectl/recipe/v1
name: made-up
device: simulated
model: {factory: "decoder:build", config: {layers: 2, hidden: 8}}
compile: {options: {force_eager: true, capture_limit: 8}, dynamo: {specialize_int: true}}
functions:
  - method: main_decode
    cases:
      - {name: b4, inputs: "decoder:inputs", args: {batch: 4}}
environment: {A: "1", B: "2"}
"""
OTHER_TEXT = """\
# Another hand wrote this one.
environment:
  B: "2"
  A: "1"
functions:
  - cases: [{args: {batch: 4}, inputs: "decoder:inputs", name: b4}]
    method: main_decode
compile:
  dynamo: {specialize_int: true, recompile_limit: 8}
  options:
    capture_limit: 8
    inplace_pass: true    # as ever
    force_eager: true
  dynamic: false
  mode: npugraph_ex
topology: {tensor_parallel: 1}
model: {config: {hidden: 8, layers: 2}, factory: "decoder:build", path: [.]}
device: simulated
name: made-up
schema: cachectl/recipe/v1
"""


def test_key_is_equal_in_fresh_processes(tmp_path: Path) -> None:
    """Hash seed, home, folders, address, user, host, locale, zone, umask, clock, cores, order: one key (S1, S3, S6)."""
    for place, text in (("here", TEXT), ("another clone/of it", TEXT), ("rewritten", OTHER_TEXT)):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(text)
        (folder / "decoder.py").write_text("SCALE = 2\n\n\ndef main_decode(x):\n    return x * SCALE\n")
        write_site(folder / "site")
        write_options(folder / "site")

    def key(place: str = "here", cwd: str = "/", umask: int = -1, **environ: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / place)],
            cwd=cwd,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": PATHS, "N": "1", **environ},
            umask=umask,
            capture_output=True,
            text=True,
            check=False,
        )
        assert 0 == done.returncode, done.stderr
        return done.stdout

    first = key()
    others = {
        "seed and home": key(PYTHONHASHSEED="1", HOME="/x"),
        "clone": key("another clone/of it", cwd=str(tmp_path), PYTHONHASHSEED="2"),
        "recipe": key("rewritten", umask=0o077),
        "pod": key(POD_IP="10.1.2.3", HOSTNAME="pod-7", USER="somebody", LOGNAME="somebody", HCCL_IF_IP="10.1.2.3"),
        "locale": key(LC_ALL="C", LANG="tr_TR.UTF-8", TZ="Asia/Tokyo", PYTHONUTF8="0"),
        "machine": key(OMP_NUM_THREADS="1", TEST_CLOCK="1", TEST_CORES="1", TEST_ORDER="1"),
    }

    assert dict.fromkeys(others, first) == others
    assert first != key(N="2")
    assert first != key(ASCEND_FOO="1")


def test_every_recorded_name_of_the_request_is_compared(world: World) -> None:
    """Each leaf of a request, altered alone, is a difference: nothing is recorded and not read (field report W19)."""
    request, _ = recipe_request(world.recipe, world.environ, search_path=[str(world.site)])
    stored = json.loads(json.dumps(request))

    for path in leaves(stored):
        altered = json.loads(json.dumps(stored))
        place = altered
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = ["altered"]
        assert compare_requests(altered, request), path


def leaves(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of a document's leaves."""
    items = document.items() if isinstance(document, Mapping) else enumerate(document)
    found: list[tuple[Any, ...]] = []
    for step, value in items:
        found += leaves(value, (*path, step)) if isinstance(value, (dict, list)) and value else [(*path, step)]
    return found


def test_frameworks_config_is_part_of_every_entrys_model() -> None:
    """What a framework's config says shapes the program, whatever the command is."""
    function = RECIPE["functions"][0]
    case = function["cases"][0]

    plain = entry_model_part(RECIPE, function["method"], case)
    configured = entry_model_part({**RECIPE, "framework": {"config": {"next_n": 1}}}, function["method"], case)

    assert {**plain, "framework": {"config": {"next_n": 1}}} == configured
