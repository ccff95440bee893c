"""Build job and deployment on the real runtime: what is published is what the pod starts warm with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import cachectl
from cachectl.runtimes.simulated import environment
from tests.deploy.pods import Ended, Image, pod_of, programs
from tests.end_to_end.conftest import Program, RankedProgram, lay_program

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount and to become another user"),
]


@pytest.fixture
def image(folder: Path) -> Image:
    """An image with the example of one layer: it compiles in a third of the time of four, and shows the same."""
    return image_of(folder, lay_program(folder / "program", folder / "none").folder)


def image_of(folder: Path, program: Path, *python_path: str) -> Image:
    """Return an image with a program and the simulated CANN, its variables set as CANN's set_env.sh would."""
    workspace = folder / "workspace"
    shutil.copytree(program, workspace, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    programs(workspace)
    base = {
        "PATH": f"/workspace/bin:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(Path(cachectl.__file__).parent.parent), *python_path]),
        "XDG_CACHE_HOME": str(folder / "cann"),
        "OMP_NUM_THREADS": "1",
    }
    environ = environment(base)
    del environ["XDG_CACHE_HOME"]
    subprocess.run(["chmod", "-R", "a+rX", str(folder / "cann"), str(workspace)], check=True)
    return Image(workspace, environ, (folder / "cann",))


@pytest.mark.timeout(900)
def test_deployment_starts_the_unchanged_program_warm(
    image: Image, built: tuple[Program, Any], manifests: dict[str, dict[str, Any]]
) -> None:
    """From a read-only claim that another user filled, with no passwd entry and a read-only image."""
    init, program, report, ready = start(image, built[0].store, manifests["deployment"]["spec"]["template"])

    assert "warm" == json.loads(init.stdout)["outcome"], init.stderr
    assert 0 == program.returncode, program.stderr
    assert ("warm", []) == (report["outcome"], report["reasons"])
    # It calls the runtime's own cache_compile, and knows of nothing else.
    assert "plain" == json.loads(program.stdout)["outcome"]
    assert 0 == ready.returncode


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_job_fills_the_claim_that_the_deployment_starts_warm_from(
    folder: Path, image: Image, manifests: dict[str, dict[str, Any]]
) -> None:
    """Both parts of the build at once, as the job's user, confined; then the servers' pod on the same claim."""
    claim = folder / "claim"
    claim.mkdir()
    # As a volume plugin leaves a claim's root for a pod with fsGroup.
    os.chown(claim, 0, 1000)
    claim.chmod(0o2775)

    def part(index: int) -> Ended:
        template, injected = manifests["build-job"]["spec"]["template"], {"JOB_COMPLETION_INDEX": str(index)}
        with pod_of(template, image, {"cachectl-store": claim}, injected) as job:
            (ended,) = job.run_to_end()
            return ended

    with ThreadPoolExecutor(2) as pods:
        parts = list(pods.map(part, range(2)))
    again = part(1)
    _, program, report, _ = start(image, claim, manifests["deployment"]["spec"]["template"])

    assert [0, 0, 0] == [ended.returncode for ended in (*parts, again)], [ended.stderr for ended in (*parts, again)]
    assert 0 == program.returncode, program.stderr
    assert ("warm", []) == (report["outcome"], report["reasons"])


def start(
    image: Image, store: Path, template: dict[str, Any], injected: Mapping[str, str] | None = None
) -> tuple[Ended, Ended, dict[str, Any], Ended]:
    """Run a server's pod over a store; return init container, program, report and readiness probe."""
    with pod_of(template, image, {"cachectl-store": store}, injected) as pod:
        init, program = pod.run_to_end()
        (container,) = pod.spec["containers"]
        ready = pod.run({**container, **container["readinessProbe"]["exec"], "args": []})
        return init, program, json.loads((pod.volumes["warm"] / "report.json").read_text()), ready


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_deployment_with_an_empty_claim_compiles_and_is_ready(
    folder: Path, image: Image, manifests: dict[str, dict[str, Any]]
) -> None:
    """Nothing was built: the pod compiles in its scratch volume, as it would without cachectl, and says so."""
    claim = folder / "claim"
    claim.mkdir()

    init, program, report, ready = start(image, claim, manifests["deployment"]["spec"]["template"])

    assert (0, "cold") == (init.returncode, json.loads(init.stdout)["outcome"])
    assert (0, "cold", 0) == (program.returncode, report["outcome"], ready.returncode), program.stderr
    assert report["reasons"]


# Stands where the manifest's program does.
SERVE = """\
import runpy, sys
sys.argv[1:] = ['{"tensor_parallel": 2}']
runpy.run_path("/workspace/serve.py", run_name="__main__")
"""


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("pods", "outcome", "against"), [(1, "warm", set()), (2, "cold", {"device_index"})])
def test_leaderworkerset_pods_start_with_right_values(
    folder: Path,
    ranked: Callable[[int], RankedProgram],
    manifests: dict[str, dict[str, Any]],
    pods: int,
    outcome: str,
    against: set[str],
) -> None:
    """Each pod hands out its own ranks, and torchrun joins them over the leader's address.

    An artifact that names its device is warm in the node cut that it was built in; in another all ranks agree on cold.
    """
    program = ranked(2)
    image = image_of(folder, program.folder, "/workspace")
    (image.workspace / "generate.py").write_text(SERVE)
    template = manifests["leaderworkerset"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    each = 2 // pods
    for container in (*template["spec"]["initContainers"], *template["spec"]["containers"]):
        container["env"] = [
            {**variable, "value": str(each)} if variable["name"] == "LOCAL_WORLD_SIZE" else variable
            for variable in container["env"]
            # This recipe declares none, and what libraries read is compared.
            if variable["name"] != "TASK_QUEUE_ENABLE"
        ]

    def pod(index: int) -> tuple[Ended, Ended, dict[str, Any], Ended]:
        lws = {"LWS_LEADER_ADDRESS": "127.0.0.1", "LWS_GROUP_SIZE": str(pods), "LWS_WORKER_INDEX": str(index)}
        return start(image, program.store, template, lws)

    with ThreadPoolExecutor(pods) as group:
        ended = list(group.map(pod, range(pods)))

    for index, (init, served, report, _) in enumerate(ended):
        here = list(range(index * each, (index + 1) * each))
        assert here == [entry["rank"] for entry in json.loads(init.stdout)["entries"]]
        assert 0 == served.returncode, served.stderr
        said = [json.loads(line) for line in served.stdout.splitlines() if line.startswith('{"rank"')]
        assert [(rank, True) for rank in here] == sorted((document["rank"], document["equal"]) for document in said)
        assert outcome == report["outcome"], json.dumps(report["reasons"])
        for name in against:
            assert name in json.dumps(report["reasons"])
