"""The manifests' containers as real processes: the hook's hand-out reaches the program, warm or cold."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import cachectl
from tests.boot.hook_stores import overwrite
from tests.deploy.pods import Image, pod_of, programs
from tests.stores import OBSERVED, MadeStore, make_store, tree

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount and to become another user")

# In place of the program: says what reached it.
SHOW = """\
#!/bin/sh
printf '{"handout": "%s", "words": "%s"}\\n' "${CACHECTL_HANDOUT:-}" "$*"
"""
# What the manifests set and libraries read.
TASKS = {"TASK_QUEUE_ENABLE": "1"}


def made_image(made: MadeStore) -> Image:
    """Return an image with the made-up store's recipe and toolchain, and a program that shows its environment."""
    programs(made.recipe.parent, python=SHOW, torchrun=SHOW)
    path = os.pathsep.join([str(made.site), str(Path(cachectl.__file__).parent.parent)])
    environ = {"PATH": f"/workspace/bin:{os.environ['PATH']}", "PYTHONPATH": path, **made.environ}
    return Image(made.recipe.parent, environ, (made.site,))


def made_pod(folder: Path, template: Mapping[str, Any], world_size: int = 1, **injected: str) -> Any:
    """Lay out a template's pod over a made-up store of so many ranks."""
    made = make_store(folder / "made", world_size=world_size)
    made.publish(ranks=range(world_size), observed={**OBSERVED, **TASKS})
    return made, pod_of(template, made_image(made), {"cachectl-store": made.layout.root}, injected)


def test_deployment_init_container_hands_out_to_the_program(folder: Path, manifests: dict[str, dict[str, Any]]) -> None:
    """The hook lays its copy into the emptyDir; the program's shell sources it, and exec takes it."""
    made, laid = made_pod(folder, manifests["deployment"]["spec"]["template"])
    before = tree(made.layout.root)
    with laid as pod:
        init, program = pod.run_to_end()
        report = json.loads((pod.volumes["warm"] / "report.json").read_text())

    hooked = json.loads(init.stdout)
    assert ("warm", 0) == (hooked["outcome"], init.returncode), init.stderr
    assert hooked["cache_dir"].startswith("/mnt/cachectl/warm/own/")
    shown = json.loads(program.stdout)
    assert hooked["env"]["CACHECTL_HANDOUT"] == shown["handout"]
    assert "/workspace/generate.py --plain --json" == shown["words"]
    # No cache_compile was called, and exec says so.
    assert ("unused", hooked["warm_set"], 0) == (report["outcome"], report["warm_set"], program.returncode)
    assert before == tree(made.layout.root)


def test_deployment_restarted_program_finds_its_handout_again(
    folder: Path, manifests: dict[str, dict[str, Any]]
) -> None:
    """A container that restarts runs no init container: the emptyDir still holds copy and environment."""
    _, laid = made_pod(folder, manifests["deployment"]["spec"]["template"])
    with laid as pod:
        init, first = pod.run_to_end()
        again = pod.run(pod.spec["containers"][0])

    handout = json.loads(init.stdout)["env"]["CACHECTL_HANDOUT"]
    assert [handout, handout] == [json.loads(ended.stdout)["handout"] for ended in (first, again)]


@pytest.mark.parametrize("store", ["empty", "damaged", "newer"])
def test_deployment_store_that_is_none_is_cold_and_runs(
    folder: Path, manifests: dict[str, dict[str, Any]], store: str
) -> None:
    """Whatever is in the claim, the init container ends well, says why, and the program runs without a hand-out."""
    made, laid = made_pod(folder, manifests["deployment"]["spec"]["template"])
    if store == "empty":
        for path in made.layout.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif store == "damaged":
        for case in ("b4", "b2"):
            made.blob(case=case).unlink()
    else:
        overwrite(made.layout.mark, b'{"schema": "cachectl/store/v99"}')
    with laid as pod:
        init, program = pod.run_to_end()

    assert (0, "cold") == (init.returncode, json.loads(init.stdout)["outcome"])
    assert json.loads(init.stdout)["reasons"]
    assert (0, "") == (program.returncode, json.loads(program.stdout)["handout"]), program.stderr


def test_deployment_init_container_as_root_hands_out_to_the_pods_user(
    folder: Path, manifests: dict[str, dict[str, Any]]
) -> None:
    """Where the init container runs as root, --uid makes the copy the program's all the same.

    It needs three capabilities for that: to give a folder away, to look into it, and to act as the program's user.
    """
    becomes = {"drop": ["ALL"], "add": ["CHOWN", "DAC_OVERRIDE", "SETUID"]}
    _, laid = made_pod(folder, manifests["deployment"]["spec"]["template"])
    with laid as pod:
        init = pod.run(pod.spec["initContainers"][0], runAsUser=0, runAsGroup=0, capabilities=becomes)
        program = pod.run(pod.spec["containers"][0])
        owners = {path.stat().st_uid for path in (pod.volumes["warm"] / "own").rglob("*")}

    assert ("warm", {1000}) == (json.loads(init.stdout)["outcome"], owners), init.stderr
    assert json.loads(init.stdout)["env"]["CACHECTL_HANDOUT"] == json.loads(program.stdout)["handout"]


def test_leaderworkerset_each_pod_gets_its_ranks(folder: Path, manifests: dict[str, dict[str, Any]]) -> None:
    """Each pod of the group hands out its own ranks, by the index that LeaderWorkerSet gives every container."""
    template = manifests["leaderworkerset"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    handed = []
    for index in range(2):
        base = folder / str(index)
        base.mkdir()
        lws = {
            "LWS_LEADER_ADDRESS": "tiny-decoder-0.tiny-decoder.default",
            "LWS_GROUP_SIZE": "2",
            "LWS_WORKER_INDEX": str(index),
        }
        _, laid = made_pod(base, template, world_size=4, **lws)
        with laid as pod:
            init, program = pod.run_to_end()
        hooked, shown = json.loads(init.stdout), json.loads(program.stdout)
        assert "warm" == hooked["outcome"], init.stderr
        assert hooked["env"]["CACHECTL_HANDOUT"] == shown["handout"]
        assert f"--nnodes 2 --node-rank {index} --nproc-per-node 2 --master-addr tiny-decoder-0" in shown["words"]
        handed.append(sorted({entry["rank"] for entry in hooked["entries"]}))

    assert [[0, 1], [2, 3]] == handed


def test_leaderworkerset_unsized_pod_gets_all_ranks(folder: Path, manifests: dict[str, dict[str, Any]]) -> None:
    """LeaderWorkerSet knows pods, not ranks: without LOCAL_WORLD_SIZE each pod gets all copies, which is safe."""
    template = manifests["leaderworkerset"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    init = template["spec"]["initContainers"][0]
    init["env"] = [variable for variable in init["env"] if variable["name"] != "LOCAL_WORLD_SIZE"]
    _, laid = made_pod(folder, template, world_size=4, LWS_GROUP_SIZE="2", LWS_WORKER_INDEX="1")
    with laid as pod:
        hooked = json.loads(pod.run(init).stdout)

    assert ("warm", {0, 1, 2, 3}) == (hooked["outcome"], {entry["rank"] for entry in hooked["entries"]})


def test_pod_is_confined_as_its_manifest_says(folder: Path, manifests: dict[str, dict[str, Any]]) -> None:
    """What these tests run in has teeth: no write to image or store, no rights, none of this machine's variables."""
    _, laid = made_pod(folder, manifests["deployment"]["spec"]["template"])
    script = """
    for place in /workspace /mnt/cachectl/store /mnt/cachectl/podinfo /mnt /usr /var/tmp / /etc; do
      touch $place/written 2>/dev/null && echo "wrote to $place"
    done
    touch /tmp/written /mnt/cachectl/warm/written && stat -c '%u %g' /mnt/cachectl/warm/written
    id -u; id -G; grep -E '^(NoNewPrivs|CapEff)' /proc/self/status; cat /mnt/cachectl/podinfo/labels
    env | grep -c PYTEST; getent passwd 1000
    """
    with laid as pod:
        shown = pod.run({**pod.spec["initContainers"][0], "command": ["sh", "-c", script]}).stdout.split("\n")

    assert [
        "1000 1000",
        "1000",
        "1000",
        "CapEff:\t0000000000000000",
        "NoNewPrivs:\t1",
        'app.kubernetes.io/name="tiny-decoder"',
        'node.kubernetes.io/npu.chip.name="910B1"',
        "0",
        "",
    ] == shown
