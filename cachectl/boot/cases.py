"""What a cached method works with: its runtime's adapter, one handed-out case, and where the runtime looks for it.

Owns the order in which sets are tried, and the state of a case between its first call and the end of the process.
Standard library only.
"""

from __future__ import annotations

import os
import shutil
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cachectl.boot.handout import HandedEntry, HandedSet
from cachectl.boot.proof import Proof
from cachectl.identity.node_cut import of_other_cut, ranks_per_node
from cachectl.schemas.boot import Reason
from cachectl.schemas.keying import KEY_VERSION

__all__ = [
    "REPLACED",
    "UNGUARDED",
    "CaseState",
    "ColdCalls",
    "Runtime",
    "at_expected_folder",
    "key_version_reasons",
    "sets_in_order",
]

# Attribute of the function that stands in a runtime's place of cache_compile under exec: the runtime's own.
REPLACED = "_cachectl_replaced"

# What a runtime's `stance` says inside skip_guard_eval_unsafe.
UNGUARDED = "skip_guard_eval_unsafe"


class Runtime(Protocol):
    """What a compile runtime's adapter answers; see cachectl.runtimes."""

    name: str
    torch: Any

    @property
    def tensor_type(self) -> type: ...
    def format_of(self, tensor: Any) -> int | None: ...
    @property
    def plain_tensor_types(self) -> Sequence[type]: ...
    def call_context(self) -> Any: ...
    def ambient_watch(self) -> Callable[[], bool]: ...
    def stance(self) -> str: ...
    def process_reasons(
        self, request: Mapping[str, Any], options: Mapping[str, Any], dynamic: bool
    ) -> list[Reason]: ...
    def found_reasons(self, part: Mapping[str, Any], options: Mapping[str, Any]) -> list[Reason]: ...
    def expected_folder(
        self, method: types.MethodType, *, dynamic: bool, options: Mapping[str, Any], cache_dir: Path
    ) -> Path: ...
    def compile(
        self, method: types.MethodType, *, dynamic: bool, options: Mapping[str, Any], cache_dir: Path
    ) -> Callable[..., Any]: ...
    def load(self, method: types.MethodType, folder: Path) -> Callable[..., Any]: ...
    def captures(self) -> Any: ...
    def process_group(self) -> tuple[int, int] | None: ...
    def device_count(self) -> int: ...
    def rendezvous_store(self) -> Any: ...
    def placed_reasons(self, topology: Mapping[str, Any], environ: Mapping[str, str]) -> list[Reason]: ...


class ColdCalls(Protocol):
    """What records the cold calls of one method, where exec was asked to; see cachectl.build.drafting."""

    def compiled(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
        """Return what runs this cold call, None for the method's own cold code; never raises."""


@dataclass(eq=False)
class CaseState:
    """One handed-out case of the method: not decided yet, warm with its loaded code, or cold with reasons."""

    handed: HandedEntry
    # The set it was handed out with: what it was built for, and which entries the job's ranks have beside it.
    of_set: HandedSet
    # What is taken in its place, since this set does not hold and another one does.
    instead: CaseState | None = None
    loaded: Callable[..., Any] | None = None
    reasons: tuple[Reason, ...] = ()
    decided: bool = False
    # Its first call came back.
    begun: bool = False
    # All checks held, and then the runtime could not load it.
    inert: bool = False
    proof: Proof | None = None
    # What its proofs share.
    prepared: dict[int, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    # Whether the state around calls is as it was proved.
    ambient_holds: Callable[[], bool] = lambda: False
    # What has to hold between a call's sizes and integers where the graph is dynamic.
    relations: list[Any] = field(default_factory=list)
    # The generated comparison of a call with the case; None where the slow one serves.
    fits: Callable[..., bool] | None = None


def at_expected_folder(
    case: CaseState, runtime: Runtime, method: types.MethodType, *, dynamic: bool, options: Mapping[str, Any]
) -> Path:
    """Return the folder where the runtime looks for a case's artifact, with the artifact in it.

    The runtime's md5 takes in the module's repr, so the folder's name can differ from the one at build time, though
    nothing that matters does.

    Raises:
        OSError: no artifact was handed out, or it can't be copied.
    """
    path = case.handed.path
    if path is None:
        raise FileNotFoundError("the hand-out holds no files")
    folder = path
    for _ in Path(case.handed.entry.runtime_path).parts:
        folder = folder.parent
    expected = runtime.expected_folder(method, dynamic=dynamic, options=options, cache_dir=folder)
    if expected != Path(os.path.realpath(path)) and not expected.exists():
        expected.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Several processes may start from one hand-out: each sees the whole copy or none.
        pending = expected.with_name(f".{expected.name}.{os.getpid()}.{threading.get_ident()}")
        shutil.copytree(path, pending)
        try:
            os.rename(pending, expected)
        except OSError:
            shutil.rmtree(pending, ignore_errors=True)
            if not expected.is_dir():
                raise
    return expected


def key_version_reasons(request: Mapping[str, Any]) -> list[Reason]:
    """Compare the version of the key that a set was built for with this program's."""
    # The hook may be of another version than what runs here.
    stored = request.get("key_version")
    if stored == KEY_VERSION:
        return []
    hint = "run the hook with the cachectl that the program has"
    return [Reason("policy", "key_version", stored, KEY_VERSION, "policy", hint)]


def sets_in_order(sets: Sequence[HandedSet], runtime: Runtime, environ: Mapping[str, str]) -> Sequence[HandedSet]:
    """Return a hand-out's sets as they are tried: those that are tied to another cut into nodes last.

    An artifact of another cut may fit this rank and not the next one, and then no set would be taken by all. So the
    order follows from what is equal in all ranks.
    """
    if len(sets) < 2 or all(handed.ranks_per_node is None for handed in sets):
        return sets
    topology = sets[0].request.get("topology")
    each = ranks_per_node(environ, topology.get("world_size") if isinstance(topology, dict) else None)
    here = each if each is None else _cut_of_devices(each, runtime)
    return sorted(sets, key=lambda handed: of_other_cut(handed.ranks_per_node, here))


def _cut_of_devices(each: int, runtime: Runtime) -> int | None:
    """Return how many ranks a node runs as far as device numbers go; None where nobody knows."""
    try:
        devices = runtime.device_count()
    except Exception:  # noqa: BLE001 - boot's broad handler; what the vendor's library raises must not end a boot
        return None
    # A rank that sees its own device only calls it 0, as one does that has a node of its own.
    return each if devices >= each else 1 if devices == 1 else None
