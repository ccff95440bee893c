"""The candidates of a start: the recipe's boot record, and which of its warm sets fit what can be seen from here.

Owns finding the record and comparing a set with this machine. What can't be seen from where the hook runs is pending,
not different: the program's process, which compares everything again, decides. Reads the store and the recipe's files
only; standard library only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from cachectl.boot.materialize import DEADLINE_HINT, DeadlineError
from cachectl.boot.options import HookOptions
from cachectl.errors import ArtifactCorruptedError, CachectlError, ConfigError, DocumentError
from cachectl.identity.device import device_part
from cachectl.identity.environment import check_environment
from cachectl.identity.node_cut import ranks_per_node, sets_in_turn
from cachectl.identity.ranks import RanksHere, check_ranks
from cachectl.identity.request import compare_requests, differences
from cachectl.identity.sources import check_files
from cachectl.identity.toolchain import toolchain_part
from cachectl.identity.topology import asked_topology, rank_topology
from cachectl.schemas.boot import BootRecord, Member, Reason, WarmSet
from cachectl.schemas.canonical import canonical_bytes_of_parsed, digest_bytes
from cachectl.schemas.keying import KEY_VERSION, warm_set_id
from cachectl.schemas.trail import MAX_STEPS, fold
from cachectl.store.layout import StoreLayout, read_bounded
from cachectl.store.reading import ReadManifest, read_boot_record, read_manifest, read_recipe_pointer
from cachectl.store.records import members_of_ranks
from cachectl.values import dataclass

TYPE_CHECKING = False  # typing took 3 ms of the hook's start
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Candidate", "candidate_sets", "compare_set", "declared_request", "find_record", "refuse_late"]

_RECIPE_LIMIT_BYTES = 16 << 20


@dataclass(frozen=True)
class Candidate:
    """A warm set that was compared with this machine, with the entries that these ranks need.

    `against` is what stands against handing it out. `pending` says that something of it could not be seen from here.
    """

    warm_set: WarmSet
    manifests: tuple[ReadManifest, ...] = ()
    against: tuple[Reason, ...] = ()
    pending: bool = False


def declared_request(options: HookOptions, environ: Mapping[str, str]) -> tuple[dict[str, str], bool]:
    """Return the environment that a recipe declares, and whether it is for the simulated device.

    From the boot record, else from the recipe's text. Secrets and the credentials of URLs are in neither, as in a
    build's rank processes.

    Raises:
        CachectlError: neither the store nor the recipe says so.
    """
    recipe_path = Path(os.path.abspath(options.recipe or ""))
    try:
        layout = StoreLayout.resolve(options.store or environ.get("CACHECTL_STORE") or None)
        layout.check()
        record = find_record(layout, recipe_path)
    except CachectlError:
        record = None  # The hook says why.
    if isinstance(record, BootRecord) and record.sets:
        request = record.sets[0].request
        declared, device = request.get("environment"), request.get("device")
        if isinstance(declared, dict) and isinstance(device, dict):
            texts = {name: value for name, value in declared.items() if isinstance(value, str)}
            return texts, device.get("simulated") is True
    try:
        from cachectl.schemas.recipe_reading import load_recipe  # needs pydantic and PyYAML, which a bare pod may lack
    except ImportError as error:
        raise ConfigError(
            f"what {recipe_path.name} declares can't be read here ({error})", hint="install pydantic and PyYAML"
        ) from error
    document = load_recipe(recipe_path).document
    return {name: str(value) for name, value in document["environment"].items()}, document["device"] == "simulated"


def find_record(layout: StoreLayout, recipe_path: Path, told: list[Reason] | None = None) -> BootRecord | Reason:
    """Return the recipe's boot record; a recipe that can't be read or is unknown is a reason.

    Args:
        told: gets what stands against ever using what the record names, though nothing keeps it from being handed out.
    """
    try:
        raw = read_bounded(recipe_path, _RECIPE_LIMIT_BYTES, follow=True)
    except OSError as error:
        hint = "pass the path of the recipe file"
        return Reason("policy", "recipe", str(recipe_path), error.strerror, "absent", hint)
    record = _record_by_bytes(layout, recipe_path, digest_bytes(raw))
    return record if record is not None else _record_by_meaning(layout, recipe_path, told)


def _record_by_bytes(layout: StoreLayout, recipe_path: Path, raw_digest: str) -> BootRecord | None:
    """Return the boot record that the bytes of a recipe, and of the files that it names, lead to; None for new bytes.

    A file that can't be read from here counts as one that is not there: the store may know that, too.
    """
    for _ in range(MAX_STEPS):
        pointer = read_recipe_pointer(layout, raw_digest)
        if pointer is None:
            return None
        if isinstance(pointer, str):
            return read_boot_record(layout, recipe_digest=pointer)
        raw_digest = fold(raw_digest, [_digest_of_file(recipe_path.parent / path) for path in pointer])
    return None


def _digest_of_file(path: Path) -> str | None:
    try:
        return digest_bytes(read_bounded(path, _RECIPE_LIMIT_BYTES, follow=True))
    except (OSError, ValueError):  # a NUL in the path
        return None


def _record_by_meaning(layout: StoreLayout, recipe_path: Path, told: list[Reason] | None) -> BootRecord | Reason:
    """Find the record of a recipe whose bytes are new but whose meaning may be known, as after an edited comment."""
    hint = f"run: cachectl build {recipe_path} --store {layout.root}"
    try:
        from cachectl.schemas.recipe_reading import load_recipe  # needs pydantic and PyYAML, which a bare pod may lack
    except ImportError as error:
        hint = f"the store does not know these bytes, and their meaning can't be read here ({error}): {hint}"
        return Reason("store", "boot record", kind="absent", hint=hint)
    loaded = load_recipe(recipe_path)
    if loaded.framework is not None:
        framework = loaded.framework.framework
        if framework.against is not None:
            return Reason("policy", "framework config", framework.against[0], None, "policy", framework.against[1])
        if framework.inert is not None and told is not None:
            told.append(Reason("policy", "framework config", framework.inert, None, "policy", framework.inert_hint))
    record = read_boot_record(layout, recipe_digest=loaded.digest)
    return record if record is not None else Reason("store", "boot record", kind="absent", hint=hint)


def candidate_sets(record: BootRecord, environ: Mapping[str, str]) -> list[WarmSet]:
    """Return a record's sets in the order in which they are compared: by the cut into nodes, then the newest first."""
    topology = record.sets[0].request.get("topology") if record.sets else None
    world_size = topology.get("world_size") if isinstance(topology, dict) else None
    return sets_in_turn(record.sets, ranks_per_node(environ, world_size))


def compare_set(
    layout: StoreLayout,
    warm_set: WarmSet,
    here: RanksHere,
    roots: Mapping[str, Path],
    environ: Mapping[str, str],
    deadline_s: float,
) -> Candidate:
    """Compare a warm set with this machine; a difference ends the comparison before what is dearer to read.

    What can't be seen from here is pending, and the program's process compares it: the SoC where no NPU is attached,
    the toolkit where none is sourced, torch where this interpreter has neither it nor torch_npu and so is not the
    program's, and variables that are not set: an init container has not the program's environment.

    Raises:
        CachectlError: the set is damaged.
    """
    wanted, missing, pending = _request_here(warm_set.request, environ)
    reasons = missing or compare_requests(warm_set.request, wanted)
    topology = warm_set.request.get("topology")
    reasons = reasons or check_ranks(topology if isinstance(topology, dict) else {}, here)
    if reasons:
        return Candidate(warm_set, against=tuple(reasons))
    if not warm_set.members or warm_set_id(member.key for member in warm_set.members) != warm_set.warm_set:
        raise DocumentError(f"warm set {warm_set.warm_set} has other members", hint="run: cachectl verify")
    members = members_of_ranks(warm_set, here.ranks)
    known = {member.rank for member in members} | {absence.rank for absence in warm_set.absent}
    lacking = sorted({*(here.ranks or ())} - known)
    if lacking:
        hint = "start as many ranks as the recipe's topology says"
        stored = sorted({member.rank for member in warm_set.members})
        wanted_ranks = lacking[0] if len(lacking) == 1 else lacking
        return Candidate(warm_set, against=(Reason("topology", "rank", stored, wanted_ranks, hint=hint),))
    manifests = []
    checked: set[str] = set()
    compared: set[bytes] = set()
    for member in members:
        refuse_late(deadline_s)
        read = read_manifest(layout, member.key, member.manifest)
        _refuse_other_entry(read, member, warm_set)
        manifests.append(read)
        parts = read.entry.parts
        # Ranks mostly have the same sources: 0.3 ms each for reading and hashing the files once more.
        documents = canonical_bytes_of_parsed([parts["sources"], read.document["raw_sources"], parts["environment"]])
        if documents in compared:
            continue
        compared.add(documents)
        for reason in (
            *check_files(parts["sources"], read.document["raw_sources"], roots),
            *check_environment(parts["environment"], environ, outside=True),
        ):
            if reason.part == "environment" and reason.wanted is None:
                pending = True
            elif str(reason) not in checked:
                checked.add(str(reason))
                reasons.append(reason)
    return Candidate(warm_set, tuple(manifests), tuple(reasons), pending)


def _refuse_other_entry(read: ReadManifest, member: Member, warm_set: WarmSet) -> None:
    """Raise unless an entry is what its warm set says: rank and all parts that the set was found by (T1, W19)."""
    entry, request = read.entry, warm_set.request
    try:
        environment = entry.parts["environment"]
        stored = {
            "place": [entry.method, entry.case, entry.rank],
            "topology": asked_topology(entry.parts["topology"]),
            "options": {name: value for name, value in entry.parts["options"].items() if name != "found"},
            **{name: entry.parts[name] for name in ("toolchain", "device")},
            "environment": environment["declared"],
        }
        wanted = {
            "place": [member.method, member.case, member.rank],
            "topology": rank_topology(request["topology"], member.rank),
            **{name: request[name] for name in ("options", "toolchain", "device", "environment")},
        }
        if not isinstance(read.document["raw_sources"], dict) or not isinstance(environment["observed"], dict):
            raise TypeError("raw_sources or observed is no object")
    except (KeyError, TypeError) as error:
        raise DocumentError(
            f"entry manifest {read.manifest} is malformed: {type(error).__name__}: {error}", hint="run: cachectl verify"
        ) from error
    if canonical_bytes_of_parsed(stored) == canonical_bytes_of_parsed(wanted):
        return  # As almost always; which value differs is a slower question.
    for name, left, right in differences(stored, wanted):
        raise ArtifactCorruptedError(
            f"entry {entry.key} says {name} {left!r}, its warm set says {right!r}", hint="run: cachectl verify"
        )


def refuse_late(deadline_s: float) -> None:
    """Raise DeadlineError when the deadline, on the monotonic clock, has passed."""
    if time.monotonic() > deadline_s:
        raise DeadlineError("the deadline passed before a warm set was found", hint=DEADLINE_HINT)


def _request_here(stored: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, Any], list[Reason], bool]:
    """Return the request as this machine has it; the recipe's own parts are known by its bytes.

    What is pending is taken as it is stored, and whether anything is comes third; what should be seen and is not is a
    reason.
    """
    device = stored.get("device")
    simulated = isinstance(device, dict) and device.get("simulated") is True
    toolchain, missing = toolchain_part(environ, simulated=simulated)
    found, unknown = device_part("simulated" if simulated else "npu", environ)
    reasons = {reason.name: reason for reason in [*missing, *unknown]}
    kept = stored.get("toolchain")
    before = kept if isinstance(kept, dict) else {}
    pending: list[str] = []
    unseen = False
    if "soc" in reasons and isinstance(device, dict):
        found = {**found, "soc": device.get("soc")}
        del reasons["soc"]
        unseen = True
    if "cann" in reasons:
        pending.append("cann")
    if toolchain["driver"] is None and not simulated:
        # Nothing of the driver is in an init container.
        pending.append("driver")
    if {"torch", "torch_npu"} <= set(reasons):
        pending += ["torch", "torch_npu", "python", "formats"]
    for name in pending:
        reasons.pop(name, None)
        toolchain[name] = before.get(name)
    wanted = {**stored, "key_version": KEY_VERSION, "toolchain": toolchain, "device": found}
    return wanted, list(reasons.values()), unseen or bool(pending)
