"""The manifests' structure: the fields that are used exist, and what has to be equal in two places is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from cachectl.boot.env_file import ENV_FILE
from cachectl.boot.options import parse_arguments
from tests.deploy.models import Claim, Container, Deployment, Job, LeaderWorkerSet, Template

NAMES = ("build-job", "deployment", "leaderworkerset")
SERVERS = ("deployment", "leaderworkerset")
MODELS: dict[str, type[BaseModel]] = {"build-job": Job, "deployment": Deployment, "leaderworkerset": LeaderWorkerSet}


def template_of(manifest: Mapping[str, Any]) -> Template:
    spec = manifest["spec"]
    found = spec["template"] if "template" in spec else spec["leaderWorkerTemplate"]["workerTemplate"]
    return Template.model_validate(found)


def containers(template: Template) -> Iterator[Container]:
    yield from template.spec.init_containers
    yield from template.spec.containers


def test_every_manifest_is_tested(manifests: dict[str, Any]) -> None:
    """A new manifest has to be named here."""
    assert set(NAMES) == set(manifests) == set(MODELS)


@pytest.mark.parametrize("name", NAMES)
def test_manifest_has_only_fields_that_exist(manifests: dict[str, Any], name: str) -> None:
    """A field in the wrong place, of the wrong type or misspelt is found."""
    read = MODELS[name].model_validate(manifests[name])

    assert manifests[name] == read.model_dump(mode="json", by_alias=True, exclude_unset=True)


@pytest.mark.parametrize("name", NAMES)
def test_manifest_mounts_its_volumes(manifests: dict[str, Any], name: str) -> None:
    """Each mount is of a declared volume with exactly one source, each volume is mounted, no path twice."""
    template = template_of(manifests[name])
    volumes = {volume.name: volume for volume in template.spec.volumes}

    assert len(volumes) == len(template.spec.volumes)
    for volume in volumes.values():
        assert 1 == sum(
            source is not None for source in (volume.persistent_volume_claim, volume.empty_dir, volume.downward_api)
        )
    for container in containers(template):
        places = [mount.mount_path for mount in container.volume_mounts]
        assert len(places) == len(set(places))
        assert set(volumes) == {mount.name for mount in container.volume_mounts}
        for mount in container.volume_mounts:
            claim = volumes[mount.name].persistent_volume_claim
            assert claim is None or claim.read_only == mount.read_only


@pytest.mark.parametrize("name", NAMES)
def test_manifest_passes_the_restricted_standard(manifests: dict[str, Any], name: str) -> None:
    """All of the pod security standard `restricted`: no root, no capability, no escalation; and one user throughout."""
    template = template_of(manifests[name])

    assert template.spec.security_context.run_as_user == template.spec.security_context.fs_group == 1000
    assert {("ALL",)} == {tuple(container.security_context.capabilities.drop) for container in containers(template)}


@pytest.mark.parametrize("name", NAMES)
def test_manifest_device_is_a_limit_too(manifests: dict[str, Any], name: str) -> None:
    """An extended resource's request has to equal its limit; no init container asks for a device."""
    template = template_of(manifests[name])
    for container in containers(template):
        devices = {key: value for key, value in container.resources.requests.items() if "/" in key}
        assert devices == {key: value for key, value in container.resources.limits.items() if "/" in key}
        assert bool(devices) == (container in template.spec.containers)


@pytest.mark.parametrize("name", SERVERS)
def test_server_init_container_is_the_programs_twin(manifests: dict[str, Any], name: str) -> None:
    """Image, environment and mounts of both are equal: the hook compares the image's wheels, and hands paths over."""
    template = template_of(manifests[name])
    (init,), (program,) = template.spec.init_containers, template.spec.containers

    assert (init.image, init.env, init.volume_mounts) == (program.image, program.env, program.volume_mounts)


@pytest.mark.parametrize("name", SERVERS)
def test_server_hook_is_understood_and_fits_the_program(manifests: dict[str, Any], name: str) -> None:
    """The hook knows every option; store, warm dir, file, recipe, user and report are those of the program."""
    template = template_of(manifests[name])
    (init,), (program,) = template.spec.init_containers, template.spec.containers
    environ = {variable.name: variable.value for variable in init.env}
    mounts = {mount.name: mount for mount in init.volume_mounts}
    options = parse_arguments(init.command[2:])

    assert ["cachectl", "hook"] == init.command[:2]
    assert () == options.unknown
    assert template.spec.security_context.run_as_user == options.uid
    assert environ["CACHECTL_STORE"] == mounts["store"].mount_path
    # Below the mount, which is root's: the hook makes its own folder in it, 0700.
    assert environ["CACHECTL_WARM_DIR"].startswith(f"{mounts['warm'].mount_path}/")
    assert f"{mounts['podinfo'].mount_path}/labels" == environ["CACHECTL_NODE_LABELS"]
    (script,) = program.args
    assert f". {environ['CACHECTL_WARM_DIR']}/{ENV_FILE}\n" in script
    assert f"cachectl exec {options.recipe} --report " in script
    report = re.search(r"--report (\S+)", script)
    assert report is not None
    assert program.readiness_probe is not None
    assert ["test", "-s", report[1]] == program.readiness_probe.exec.command
    # A report of the container before would call the next one ready.
    assert script.startswith(f"rm -f {report[1]}\n")


@pytest.mark.parametrize("name", SERVERS)
def test_server_label_is_the_nodes(manifests: dict[str, Any], name: str) -> None:
    """The downward API reads the pod's labels: one that the node selector asks for is the node's, too."""
    template = template_of(manifests[name])

    assert template.spec.node_selector.items() <= template.metadata.labels.items()


def test_deployment_selector_is_stable(manifests: dict[str, Any]) -> None:
    """The selector can't change later: it holds no label that a roll-out to another chip would."""
    manifest = Deployment.model_validate(manifests["deployment"])

    assert manifest.spec.selector.match_labels.items() <= manifest.spec.template.metadata.labels.items()
    assert {"app.kubernetes.io/name"} == set(manifest.spec.selector.match_labels)


def test_build_job_writes_where_the_servers_read(manifests: dict[str, Any]) -> None:
    """The same claim, image, recipe and chip; the job may write."""
    job = template_of(manifests["build-job"])
    (build,) = job.spec.containers

    for name in SERVERS:
        server = template_of(manifests[name])
        (program,) = server.spec.containers
        assert job.spec.node_selector == server.spec.node_selector
        assert build.image == program.image
        assert f"cachectl build {server.spec.init_containers[0].command[2]} --store " in build.args[0]
        assert _claim(job).claim_name == _claim(server).claim_name
        assert (False, True) == (_claim(job).read_only, _claim(server).read_only)
    assert "Never" == job.spec.restart_policy
    mounts = {mount.name: mount.mount_path for mount in build.volume_mounts}
    assert f"--store {mounts['store']} " in build.args[0]


def test_build_job_deals_all_of_its_parts_out(manifests: dict[str, Any]) -> None:
    """As many pods as parts, each with its index, at the same time and on one node, where the database's file is."""
    job = Job.model_validate(manifests["build-job"])
    (build,) = job.spec.template.spec.containers
    affinity = job.spec.template.spec.affinity

    assert f'--shard "$JOB_COMPLETION_INDEX/{job.spec.completions}"' in build.args[0]
    assert job.spec.completions == job.spec.parallelism
    assert affinity is not None
    (term,) = affinity.pod_affinity.required_during_scheduling_ignored_during_execution
    assert term.label_selector.match_labels == job.spec.template.metadata.labels


def _claim(template: Template) -> Claim:
    (claim,) = [
        item.persistent_volume_claim for item in template.spec.volumes if item.persistent_volume_claim is not None
    ]
    return claim
