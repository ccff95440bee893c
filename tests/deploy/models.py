"""The fields of Kubernetes objects that our manifests use, strictly: what is misspelt or misplaced is an error."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)]
Place = Annotated[str, Field(pattern=r"^/[^:]*$")]
# A number of bytes or of cores, as resource.Quantity reads it.
Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(m|[KMGT]i?)?$")]


class Strict(BaseModel):
    """A part of a manifest with the fields that ours use: the API server refuses what it doesn't know, or drops it."""

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class Metadata(Strict):
    name: Name
    labels: dict[str, str] = {}


class Variable(Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: str


class Mount(Strict):
    name: Name
    mount_path: Place
    read_only: bool = False


class Capabilities(Strict):
    drop: list[str]


class ContainerSecurity(Strict):
    allow_privilege_escalation: Literal[False]
    read_only_root_filesystem: Literal[True]
    capabilities: Capabilities


class Resources(Strict):
    requests: dict[str, Quantity]
    limits: dict[str, Quantity]


class Command(Strict):
    command: list[str]


class Probe(Strict):
    exec: Command
    period_seconds: int
    failure_threshold: int


class Container(Strict):
    name: Name
    image: str
    command: Annotated[list[str], Field(min_length=1)]
    args: list[str] = []
    working_dir: Place | None = None
    env: list[Variable] = []
    resources: Resources
    security_context: ContainerSecurity
    volume_mounts: list[Mount]
    readiness_probe: Probe | None = None


class Claim(Strict):
    claim_name: Name
    read_only: bool = False


class Scratch(Strict):
    size_limit: Quantity


class FieldReference(Strict):
    field_path: Literal["metadata.labels"]


class InfoItem(Strict):
    path: str
    field_ref: FieldReference


class Info(Strict):
    items: list[InfoItem]


class Volume(Strict):
    name: Name
    persistent_volume_claim: Claim | None = None
    empty_dir: Scratch | None = None
    downward_api: Annotated[Info | None, Field(alias="downwardAPI")] = None


class Selector(Strict):
    match_labels: dict[str, str]


class Seccomp(Strict):
    type: Literal["RuntimeDefault"]


class PodSecurity(Strict):
    run_as_user: int
    run_as_group: int
    run_as_non_root: Literal[True]
    fs_group: int
    fs_group_change_policy: Literal["OnRootMismatch"]
    seccomp_profile: Seccomp


class AffinityTerm(Strict):
    topology_key: Literal["kubernetes.io/hostname"]
    label_selector: Selector


class PodAffinity(Strict):
    required_during_scheduling_ignored_during_execution: list[AffinityTerm]


class Affinity(Strict):
    pod_affinity: PodAffinity


class PodSpec(Strict):
    node_selector: dict[str, str]
    affinity: Affinity | None = None
    automount_service_account_token: Literal[False]
    security_context: PodSecurity
    init_containers: list[Container] = []
    containers: list[Container]
    volumes: list[Volume]
    restart_policy: Literal["Always", "Never"] = "Always"


class TemplateMetadata(Strict):
    labels: dict[str, str]


class Template(Strict):
    metadata: TemplateMetadata
    spec: PodSpec


class DeploymentSpec(Strict):
    replicas: int
    selector: Selector
    template: Template


class Deployment(Strict):
    api_version: Literal["apps/v1"]
    kind: Literal["Deployment"]
    metadata: Metadata
    spec: DeploymentSpec


class JobSpec(Strict):
    completion_mode: Literal["Indexed"]
    completions: int
    parallelism: int
    backoff_limit: int
    active_deadline_seconds: int
    ttl_seconds_after_finished: int
    template: Template


class Job(Strict):
    api_version: Literal["batch/v1"]
    kind: Literal["Job"]
    metadata: Metadata
    spec: JobSpec


class GroupTemplate(Strict):
    size: int
    restart_policy: Literal["RecreateGroupOnPodRestart", "None"]
    worker_template: Template


class GroupSpec(Strict):
    replicas: int
    leader_worker_template: GroupTemplate


class LeaderWorkerSet(Strict):
    api_version: Literal["leaderworkerset.x-k8s.io/v1"]
    kind: Literal["LeaderWorkerSet"]
    metadata: Metadata
    spec: GroupSpec
