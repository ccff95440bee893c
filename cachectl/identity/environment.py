"""The environment part: declared names, names that model code read, and families that libraries read.

Owns what of the environment is identity. A value read at build time may have shaped the graph, and Dynamo puts no guard
on it (measured: unset to set with `.get` stays stale), so every name that model code read is recorded with its value or
its absence. What torch_npu, HCCL, CANN and vLLM read no watch sees; so all variables of their families are recorded,
less a list of names with a reason each, and one that is set now and was not at build counts like one that changed.
Names that look like secrets are neither stored nor hashed; that they were set or not is all that is kept. Standard
library only.

The part's document:

    {"declared": {name: value},      what the recipe exports to its ranks
     "observed": {name: value},      what model code asked for, null for a name that was not set
     "families": {name: value},      what was set of the families when the graph was compiled
     "start":    {name: value},      of the last two, names that the process itself had changed by then: what they were
                                     when it started, which is all that plan and hook can see
     "whole": true}                  only where model code walked over the environment: observed holds all that was set,
                                     and one that is set now and was not then counts like one that changed

Facts: names from torch_npu 2.13 and vllm-ascend v0.11, CANN 8.5 and HCCL environment variable references.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from cachectl.schemas.boot import Reason
from cachectl.schemas.keying import is_secret_name, without_credentials

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "EVERY_NAME",
    "FAMILIES",
    "check_declared",
    "check_environment",
    "check_observed",
    "declared_part",
    "environment_part",
    "family_part",
    "in_family",
    "is_placement",
    "observed_part",
    "recorded_value",
    "starting_environment",
]

# Stands among names that were read for all of them: model code walked over the environment.
EVERY_NAME = "*"

# Where a process runs, not what it computes (field reports S1, S3, S5). Each with its reason.
PLACEMENT = {
    "HOME": "user's folder",
    "PWD": "working folder",
    "OLDPWD": "working folder",
    "USER": "user's name",
    "LOGNAME": "user's name",
    "HOSTNAME": "machine's name",
    "PATH": "search path for programs",
    "PYTHONPATH": "search path; the files found through it are hashed",
    "LD_LIBRARY_PATH": "search path; the toolkit found through it is in toolchain",
    "TMPDIR": "scratch folder",
    "HF_HOME": "folder of downloads",
    "HF_HUB_CACHE": "folder of downloads",
    "TRANSFORMERS_CACHE": "folder of downloads",
    "LANG": "language of messages",
    "TZ": "time zone",
    "SHELL": "user's shell",
    "TERM": "terminal",
    "OMP_NUM_THREADS": "thread count changes speed, not the graph",
    "PYTHONHASHSEED": "no key depends on hash order",
    "POD_IP": "address",
    "POD_NAME": "address",
    "MASTER_ADDR": "address",
    "MASTER_PORT": "address",
    "RANK": "in topology",
    "LOCAL_RANK": "in topology",
    "WORLD_SIZE": "in topology",
    "LOCAL_WORLD_SIZE": "in topology",
    "GROUP_RANK": "in topology",
    "GROUP_WORLD_SIZE": "in topology",
    "ROLE_NAME": "torchrun's name for its processes",
    "ROLE_RANK": "in topology",
    "ROLE_WORLD_SIZE": "in topology",
    "RANK_OFFSET": "in topology",
    "RANK_ID": "in topology",
    "RES_PATH": "folder of results; cann-recipes puts the date into it",
    "WORK_DIR": "working folder of cann-recipes' launch script",
}
PLACEMENT_PREFIXES = {
    "CACHECTL_": "cachectl's own settings",
    "TORCHELASTIC_": "run ids and error files of torchrun",
    "PET_": "torchrun's own arguments",
    "XDG_": "folders",
    "LC_": "language of messages",
    "KUBERNETES_": "addresses",
    "SSH_": "addresses",
}

# Variables of these beginnings count whoever reads them.
FAMILIES = ("TASK_QUEUE_ENABLE", "HCCL_", "ASCEND_", "TORCH", "VLLM_")

# Members of a family that can't reach the graph. Each with its reason.
IGNORED = {
    "ASCEND_AICPU_PATH": "path; the toolkit found through it is in toolchain",
    "ASCEND_CACHE_PATH": "path",
    "ASCEND_DEVICE_ID": "which device; in topology",
    "ASCEND_DOCKER_RUNTIME": "how the container got its devices",
    "ASCEND_DRIVER_PATH": "path; the driver is in toolchain",
    "ASCEND_GLOBAL_EVENT_ENABLE": "log",
    "ASCEND_HOME_PATH": "path; the toolkit found through it is in toolchain",
    "ASCEND_HOST_LOG_FILE_NUM": "log",
    "ASCEND_INSTALL_PATH": "path; the toolkit found through it is in toolchain",
    "ASCEND_LOG_SAVE_MODE": "log",
    "ASCEND_OPP_PATH": "path; the operators found through it are in toolchain",
    "ASCEND_PROCESS_LOG_PATH": "log",
    "ASCEND_RT_VISIBLE_DEVICES": "which devices; in topology",
    "ASCEND_RUNTIME_OPTIONS": "how the container got its devices",
    "ASCEND_SLOG_PRINT_TO_STDOUT": "log",
    "ASCEND_TOOLKIT_HOME": "path; the toolkit found through it is in toolchain",
    "ASCEND_VISIBLE_DEVICES": "which devices; in topology",
    "ASCEND_WORK_PATH": "path",
    "HCCL_DEBUG_CONFIG": "log",
    "HCCL_DFS_CONFIG": "fault reports",
    "HCCL_ENTRY_LOG_ENABLE": "log",
    "HCCL_HOST_SOCKET_PORT_RANGE": "port",
    "HCCL_IF_BASE_PORT": "port",
    "HCCL_IF_IP": "address",
    "HCCL_NPU_SOCKET_PORT_RANGE": "port",
    "HCCL_SOCKET_FAMILY": "address",
    "HCCL_SOCKET_IFNAME": "network interface",
    "HCCL_WHITELIST_DISABLE": "which addresses may connect",
    "HCCL_WHITELIST_FILE": "path; which addresses may connect",
    "TORCHAIR_CACHE_HOME": "path; cachectl passes its own folder",
    "TORCHDYNAMO_VERBOSE": "log",
    "TORCHINDUCTOR_CACHE_DIR": "path",
    "TORCHINDUCTOR_COMPILE_THREADS": "thread count",
    "TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING": "whether a check of operators warns or raises",
    "TORCH_COMPILE_DEBUG": "log",
    "TORCH_COMPILE_DEBUG_DIR": "path",
    "TORCH_CPP_LOG_LEVEL": "log",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "when torch_npu is imported, not what it does",
    "TORCH_DISTRIBUTED_DEBUG": "log",
    "TORCH_EXTENSIONS_DIR": "path",
    "TORCH_HOME": "path",
    "TORCH_LOGS": "log",
    "TORCH_LOGS_FORMAT": "log",
    "TORCH_LOGS_OUT": "log",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what a failed collective of NCCL does; torchrun sets it",
    "TORCH_SHOW_CPP_STACKTRACES": "log",
    "TORCH_TRACE": "log",
    "VLLM_ASSETS_CACHE": "path",
    "VLLM_CACHE_ROOT": "path",
    "VLLM_CONFIGURE_LOGGING": "log",
    "VLLM_CONFIG_ROOT": "path",
    "VLLM_DO_NOT_TRACK": "usage reports",
    "VLLM_DP_MASTER_IP": "address",
    "VLLM_DP_MASTER_PORT": "port",
    "VLLM_DP_RANK": "in topology",
    "VLLM_DP_RANK_LOCAL": "in topology",
    "VLLM_DP_SIZE": "in topology",
    "VLLM_HOST_IP": "address",
    "VLLM_INSTANCE_ID": "run id",
    "VLLM_NO_USAGE_STATS": "usage reports",
    "VLLM_PORT": "port",
    "VLLM_RAY_BUNDLE_INDICES": "placement of an engine's workers",
    "VLLM_RPC_BASE_PATH": "path",
    "VLLM_TORCH_PROFILER_DIR": "path",
}
IGNORED_PREFIXES = {
    "VLLM_LOGGING_": "log",
    "VLLM_USAGE_": "usage reports",
    "VLLM_NIXL_SIDE_CHANNEL_": "addresses",
}
# Endings by which a family's member is ignored, too: new releases bring new names of these kinds.
IGNORED_ENDINGS = {
    r"_TIMEOUT(_S|_MS|_SEC|_SECONDS)?": "time-out",
    r"_LOG_(LEVEL|PATH|DIR|FILE)": "log",
    r"_SERVICE_(HOST|PORT(_\w+)?)": "address that Kubernetes sets for a service",
    r"_PORT(_\d+_(TCP|UDP)(_(ADDR|PORT|PROTO))?)?": "port, or address that Kubernetes sets for a service",
    r"_IP": "address",
}
# A text, which re compiles when it is first asked for, as in most hooks it is not.
_IGNORED_ENDING = rf"(?:{'|'.join(IGNORED_ENDINGS)})\Z"
# Paths whose place is nobody's business while their being set is: other operators than the toolkit's are found there.
PRESENCE = {"ASCEND_CUSTOM_OPP_PATH": "custom operator packages"}


def is_placement(name: str) -> bool:
    """Say whether a variable tells where a process runs and can't reach the graph."""
    return name in PLACEMENT or name in IGNORED or name.startswith((*PLACEMENT_PREFIXES, *IGNORED_PREFIXES))


def in_family(name: str) -> bool:
    """Say whether a variable counts whoever reads it. A secret lets somebody in and shapes no graph."""
    return (
        name.startswith(FAMILIES)
        and not is_placement(name)
        and not is_secret_name(name)
        and re.search(_IGNORED_ENDING, name) is None
    )


def recorded_value(name: str, value: str | None) -> str | dict[str, bool] | None:
    """Return what is recorded of a variable: its text without URL credentials, None if unset.

    A secret is `{"set": true}`: told from none, and from no other secret.
    """
    if value is None:
        return None
    return {"set": True} if is_secret_name(name) or name in PRESENCE else without_credentials(value)


def declared_part(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of the environment that a recipe declares and exports to its ranks."""
    declared = recipe.get("environment") or {}
    return {name: recorded_value(name, str(declared[name])) for name in sorted(declared)}


def observed_part(names: Iterable[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the document of the variables that model code read, with their values now; placement is left out."""
    return {name: recorded_value(name, environ.get(name)) for name in sorted(set(names)) if not is_placement(name)}


def family_part(environ: Mapping[str, str], known: Iterable[str] = ()) -> dict[str, Any]:
    """Return the document of the families' variables that are set, less those that are `known` by another way."""
    names = {name for name in environ if in_family(name)} - set(known)
    return {name: recorded_value(name, environ[name]) for name in sorted(names)}


def environment_part(
    recipe: Mapping[str, Any], read: Iterable[str], environ: Mapping[str, str], started: Mapping[str, str]
) -> dict[str, Any]:
    """Return the environment part of an entry.

    Args:
        recipe: its `environment` is declared.
        read: the names that model code read.
        environ: the environment as it was when the graph was compiled.
        started: the environment in which the process started.
    """
    declared = declared_part(recipe)
    names = set(read)
    whole = EVERY_NAME in names
    if whole:
        names = {*names - {EVERY_NAME}, *(name for name in environ if _is_anybodys(name) and name not in declared)}
    observed = observed_part(names, environ)
    families = family_part(environ, known={*declared, *observed})
    # A family's variable that the process took away is no member any more, but one that plan will see.
    gone = family_part({name: value for name, value in started.items() if name not in environ}, {*declared, *observed})
    start = {}
    for name in sorted({*observed, *families, *gone}):
        before = recorded_value(name, started.get(name))
        if before != recorded_value(name, environ.get(name)):
            start[name] = before
    part = {"declared": declared, "observed": observed, "families": families, "start": start}
    return {**part, "whole": True} if whole else part


def _is_anybodys(name: str) -> bool:
    """Say whether a variable counts where all were read. `_` and the shell's depth are each shell's own."""
    return not (is_placement(name) or is_secret_name(name) or in_family(name) or name in ("_", "SHLVL"))


def starting_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which this process started; `environ` where the system does not tell."""
    try:
        data = Path("/proc/self/environ").read_bytes()
    except OSError:
        return dict(environ)
    pairs = (item.decode("utf-8", "surrogateescape").partition("=") for item in data.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def check_declared(declared: Mapping[str, Any], environ: Mapping[str, str]) -> list[Reason]:
    """Compare what the recipe declares with the environment a program runs in; one reason a difference."""
    return _differences(
        declared,
        environ,
        "the recipe declares {}: export it to the program, or change the recipe and run: cachectl build",
    )


def check_observed(observed: Mapping[str, Any], environ: Mapping[str, str]) -> list[Reason]:
    """Compare the variables that model code read at build time with an environment; one reason a difference."""
    return _differences(observed, environ, "model code reads {}: set it as at build time, or run: cachectl build")


def _differences(variables: Mapping[str, Any], environ: Mapping[str, str], hint: str) -> list[Reason]:
    found = ((name, stored, recorded_value(name, environ.get(name))) for name, stored in sorted(variables.items()))
    return [
        Reason("environment", name, stored, wanted, hint=hint.format(name))
        for name, stored, wanted in found
        if wanted != stored
    ]


def check_environment(part: Mapping[str, Any], environ: Mapping[str, str], *, outside: bool = False) -> list[Reason]:
    """Compare what model code read and the families with an environment; one reason a difference, both ways.

    Args:
        part: an entry's environment part; what it declares is compared by `check_declared` or with the request.
        environ: the environment to hold it against.
        outside: `environ` is that of a process that only starts, or before it: a name that the building process itself
            had changed by the time it compiled may still have its first value.
    """
    observed, families = part["observed"], part.get("families") or {}
    start = (part.get("start") or {}) if outside else {}
    reasons = check_observed(observed, environ)
    now = family_part(environ, known={*part["declared"], *observed})
    for name in sorted({*families, *now}):
        stored, wanted = families.get(name), now.get(name)
        if stored != wanted:
            hint = f"libraries read {name}: set it as at build time, or run: cachectl build"
            reasons.append(Reason("environment", name, stored, wanted, hint=hint))
    if part.get("whole") and not outside:
        # Outside, a start-up's own variables would count; the program's process sees what its model code sees.
        new = {name for name in environ if _is_anybodys(name)} - {*part["declared"], *observed}
        for name in sorted(new):
            hint = "model code reads the whole environment: let it read names, os.environ.get(NAME), and build again"
            reasons.append(Reason("environment", name, None, recorded_value(name, environ[name]), hint=hint))
    return [reason for reason in reasons if reason.name not in start or start[reason.name] != reason.wanted]
