"""The cached method's decisions, without torch: a runtime of the test's own says what it was asked to do.

What the real runtime makes of them is in tests/test_program.py.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cachectl.boot.cases import UNGUARDED, CaseState
from cachectl.boot.handout import HandedEntry, HandedMember, HandedSet, Handout
from cachectl.boot.instrument import CachedMethod
from cachectl.identity.guard_paths import parse_source
from cachectl.identity.guards import SHEET_SCHEMA, SheetBuilder
from cachectl.identity.inputs import describe_call
from cachectl.schemas.boot import Reason, StoredEntry
from cachectl.schemas.keying import KEY_VERSION, compute_key
from tests.boot.memory_store import MemoryStore
from tests.identity.calls import TORCH, Nested, Tensor, contiguous, format_of
from tests.stores import NO_RAW_SOURCES, NO_SOURCES

RUNTIME_PATH = "Model_static_aclgraphcache_0/decode"
REQUEST = {"key_version": KEY_VERSION}


class Model:
    """A model without torch."""

    scale = 2

    def decode(self, x: Any, n: int = 1, *, flag: bool = False) -> str:
        """Say that the plain method ran."""
        return f"eager {n}"


@dataclass
class Loader:
    """A runtime that keeps account, and fails where it is told to."""

    against: list[Reason] = field(default_factory=list)
    fails: BaseException | None = None
    load_s: float = 0.0
    expected: str = RUNTIME_PATH
    loads: list[Path] = field(default_factory=list)
    compiles: list[Path] = field(default_factory=list)
    contexts: int = 0
    running: int = 0
    at_once: int = 0
    # The same when the first run was over.
    at_first: int = 0
    group: tuple[int, int] | None = None
    devices: int | None = 8
    store: Any = field(default_factory=MemoryStore)
    stands: str = ""
    captured: Any = None
    name: str = "stand-in"
    torch: Any = field(default_factory=lambda: types.SimpleNamespace(**TORCH))
    tensor_type: type = Tensor

    format_of = staticmethod(format_of)

    @property
    def plain_tensor_types(self) -> tuple[type, ...]:
        return (self.tensor_type,)

    def stance(self) -> str:
        return self.stands

    def ambient_watch(self) -> Callable[[], bool]:
        return lambda: True

    def call_context(self) -> contextlib.AbstractContextManager[None]:
        self.contexts += 1
        return contextlib.nullcontext()

    def process_reasons(self, request: Mapping[str, Any], options: Mapping[str, Any], dynamic: bool) -> list[Reason]:
        return list(self.against)

    def found_reasons(self, part: Mapping[str, Any], options: Mapping[str, Any]) -> list[Reason]:
        return []

    def captures(self) -> Any:
        return self.captured

    def placed_reasons(self, topology: Mapping[str, Any], environ: Mapping[str, str]) -> list[Reason]:
        return []

    def process_group(self) -> tuple[int, int] | None:
        return self.group

    def device_count(self) -> int:
        if self.devices is None:
            raise RuntimeError("no device was found")
        return self.devices

    def rendezvous_store(self) -> Any:
        return self.store

    def expected_folder(self, method: Any, *, dynamic: bool, options: Mapping[str, Any], cache_dir: Path) -> Path:
        return Path(cache_dir).resolve() / self.expected

    def compile(self, method: Any, *, dynamic: bool, options: Mapping[str, Any], cache_dir: Path) -> Callable[..., str]:
        self.compiles.append(cache_dir)
        return lambda *args, **kwargs: "cold"

    def load(self, method: Any, folder: Path) -> Callable[..., str]:
        self.loads.append(folder)
        time.sleep(self.load_s)
        if self.fails is not None:
            raise self.fails
        text = (folder / "compiled_module").read_text()

        def run(*args: Any, **kwargs: Any) -> str:
            self.running += 1
            self.at_once = max(self.at_once, self.running)
            time.sleep(self.load_s)
            self.at_first = self.at_first or self.at_once
            self.running -= 1
            return text

        return run


def handed(folder: Path, case: str, arguments: Mapping[str, Any], **parts: Any) -> HandedEntry:
    """Return an entry for a call with these arguments, its artifact laid down below `folder`."""
    document = {
        "schema": "cachectl/entry/v1",
        "key_version": KEY_VERSION,
        "recipe": "own",
        "method": parts.get("model", {}).get("method", "decode"),
        "case": case,
        "rank": parts.get("topology", {}).get("rank", 0),
        "parts": {
            "model": {"method": "decode"},
            "sources": NO_SOURCES,
            "inputs": describe_call(arguments, Tensor, format_of),
            "topology": {"world_size": 1, "rank": 0},
            "options": {},
            "toolchain": {},
            "device": {},
            "environment": {"declared": {}, "observed": {}},
            "guards": {"schema": SHEET_SCHEMA, "ambient": {}, "nodes": [], "expressions": []},
            **parts,
        },
        "raw_sources": NO_RAW_SOURCES,
        "artifact": {
            "runtime": "npugraph_ex",
            "format_version": "1.0.6",
            "runtime_path": RUNTIME_PATH,
            "files": [{"path": "compiled_module", "digest": "sha256:" + "0" * 64, "size_bytes": 1, "mode": "0600"}],
        },
        "evidence": {"kind": "simulated", "soc": "ascend910b1", "cann": "8.5.0", "torch_npu": "2.13.0"},
        "provenance": {"created_at": "2026-03-01T12:00:00Z", "builder": "cachectl tests"},
    }
    document["key"] = compute_key(document["parts"])
    path = folder / case / RUNTIME_PATH
    path.mkdir(parents=True)
    (path / "compiled_module").write_text(f"warm {case}")
    return HandedEntry(StoredEntry.from_document(document), path, document)


def members(entries: Iterable[HandedEntry]) -> tuple[HandedMember, ...]:
    """Return the members of a set that has these entries only."""
    found = (item.entry for item in entries)
    return tuple(HandedMember(entry.rank, entry.method, entry.case, entry.key) for entry in found)


@dataclass
class Made:
    """A cached method with its parts."""

    model: Model
    runtime: Loader
    cached: CachedMethod


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Made]:
    """Return a maker of cached methods that were handed cases for 2 and for 4 rows."""

    def build(
        runtime: Loader | None = None,
        outcome: str = "warm",
        observe: bool = False,
        prove_each_call: bool = False,
        **parts: Any,
    ) -> Made:
        runtime = runtime or Loader()
        entries = tuple(
            handed(tmp_path / "handout", f"b{rows}", {"x": contiguous(rows, 4), "n": 1, "flag": False}, **parts)
            for rows in (2, 4)
        )
        sets = (HandedSet("sha256:" + "0" * 64, REQUEST, entries, members(entries)),)
        handout = Handout(outcome, tmp_path / "recipe.yaml", sets=sets if outcome == "warm" else ())
        model = Model()
        cached = CachedMethod(
            model.decode,  # type: ignore[arg-type]
            handout,
            runtime,
            dynamic=False,
            options={},
            new_cold_folder=lambda: tmp_path / f"cold{len(runtime.compiles)}",
            environ={},
            observe=observe,
            prove_each_call=prove_each_call,
        )
        return Made(model, runtime, cached)

    return build


TWO, FOUR, SEVEN = contiguous(2, 4), contiguous(4, 4), contiguous(7, 4)


def test_call_that_fits_a_case_runs_what_was_loaded_for_it(make: Callable[..., Made]) -> None:
    """Each case is loaded once, at its first call; positional and keyword calls are one case."""
    made = make()

    assert "unused" == made.cached.outcome
    assert ["warm b2", "warm b4", "warm b2"] == [made.cached(TWO), made.cached(x=FOUR), made.cached(TWO, 1, flag=False)]
    assert (2, [], "warm", []) == (
        len(made.runtime.loads),
        made.runtime.compiles,
        made.cached.outcome,
        made.cached.reasons,
    )


@dataclass
class Captured:
    """What a runtime counts of its captures."""

    graphs: set[int] = field(default_factory=set)
    fallen: set[int] = field(default_factory=set)
    seconds: float = 0.0

    def since(self, before: Captured) -> Captured:
        """Return what came since."""
        return Captured(self.graphs - before.graphs, self.fallen - before.fallen, self.seconds - before.seconds)


def test_method_whose_graph_fell_back_to_eager_is_degraded_and_says_why(make: Callable[..., Made]) -> None:
    """Warm still, and slow from here on; another method's graph is another method's matter."""
    runtime = Loader(captured=Captured())
    made = make(runtime)
    counts = iter([Captured(), Captured({7}, seconds=0.5)])

    class Counting(Loader):
        def captures(self) -> Any:
            return next(counts, runtime.captured)

    runtime.__class__ = Counting
    made.cached(TWO)
    runtime.captured = Captured({7, 8}, {8})
    others = made.cached.outcome
    runtime.captured = Captured({7, 8}, {7, 8})

    assert ("warm", "degraded", "degraded") == (others, made.cached.outcome, made.cached.outcome)
    assert [("options", "capture_limit")] == [(reason.part, reason.name) for reason in made.cached.reasons]
    assert 0.5 == made.cached.cases[0].seconds["capture"]


def test_call_that_fits_no_case_is_compiled_once_and_explained(make: Callable[..., Made]) -> None:
    """The reason is against the nearest case; other calls go on warm; the outcome says that one was not."""
    made = make()

    assert ["warm b2", "cold", "cold", "warm b2"] == [made.cached(call) for call in (TWO, SEVEN, SEVEN, TWO)]
    assert (1, "cold") == (len(made.runtime.compiles), made.cached.outcome)
    assert ["L['x']"] == [reason.name for reason in made.cached.reasons]


def test_calls_that_fit_no_case_are_explained_a_few_times_only(make: Callable[..., Made]) -> None:
    """A cold program with ever other shapes does not gather reasons without bound."""
    made = make()

    for rows in range(10, 60):
        made.cached(contiguous(rows, 4))

    assert 1 < len(made.cached.reasons) <= 8


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((TWO, 1, False), {}), ((TWO,), {"x": TWO}), ((TWO,), {"y": 1}), ((), {"n": 1})]
)
def test_call_with_wrong_arguments_raises_what_the_method_raises(
    make: Callable[..., Made], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Python's own TypeError; nothing is loaded, compiled or called cold for it."""
    made = make()
    with pytest.raises(TypeError) as plain:
        made.model.decode(*args, **kwargs)

    with pytest.raises(TypeError) as ours:
        made.cached(*args, **kwargs)

    assert str(plain.value) == str(ours.value)
    assert ("unused", [], [], []) == (
        made.cached.outcome,
        made.cached.reasons,
        made.runtime.loads,
        made.runtime.compiles,
    )


@pytest.mark.parametrize("value", [None, "text", 3, [TWO], {"x": TWO}, Nested((2, 4)), object()])
def test_call_with_another_kind_of_argument_is_cold(make: Callable[..., Made], value: Any) -> None:
    """Whatever stands where a tensor stood: no exception of ours, a cold call with a reason."""
    made = make()

    assert "cold" == made.cached(value)
    assert made.cached.reasons


def test_check_that_fails_is_cold_and_asked_once(make: Callable[..., Made]) -> None:
    """What the process is compared with is compared at the first call of a case, not at each."""
    made = make(Loader(against=[Reason("toolchain", "cann.CANN", "8.5.0", "8.6.0")]))

    assert ["cold", "cold"] == [made.cached(TWO), made.cached(TWO)]
    assert ([], 1, "cold") == (made.runtime.loads, len(made.runtime.compiles), made.cached.outcome)
    assert ["cann.CANN"] == [reason.name for reason in made.cached.reasons]


def test_declared_environment_that_differs_is_cold(make: Callable[..., Made]) -> None:
    """The process's own environment counts."""
    made = make(environment={"declared": {"TASK_QUEUE_ENABLE": "1"}, "observed": {}})

    assert "cold" == made.cached(TWO)
    assert ["TASK_QUEUE_ENABLE"] == [reason.name for reason in made.cached.reasons]


def test_proof_that_can_not_be_read_is_cold(make: Callable[..., Made]) -> None:
    """A sheet of another version proves nothing."""
    made = make(guards={"schema": "cachectl/guards/v99", "ambient": {}, "nodes": [], "expressions": []})

    assert "cold" == made.cached(TWO)
    assert ["guards"] == [reason.part for reason in made.cached.reasons]


@pytest.mark.parametrize("error", [RuntimeError("version"), OSError(28, "full"), ImportError("x"), KeyError("y")])
def test_load_that_fails_is_inert_and_never_reaches_the_program(make: Callable[..., Made], error: Exception) -> None:
    """Proved and not loadable: the program runs cold, the outcome says which it is, the artifact stays."""
    made = make(Loader(fails=error))

    assert ["cold", "cold"] == [made.cached(TWO), made.cached(TWO)]
    assert (1, "inert") == (len(made.runtime.loads), made.cached.outcome)
    assert [("artifact", "load")] == [(reason.part, reason.name) for reason in made.cached.reasons]
    assert (made.runtime.loads[0] / "compiled_module").is_file()


def test_load_that_is_interrupted_is_not_taken_for_a_refusal(make: Callable[..., Made]) -> None:
    """Ctrl-C while loading passes through; the next call decides anew."""
    made = make(Loader(fails=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        made.cached(TWO)

    made.runtime.fails = None

    assert ("warm b2", "warm") == (made.cached(TWO), made.cached.outcome)


def test_observed_call_is_proved_and_not_loaded(make: Callable[..., Made]) -> None:
    """With observe everything is checked and everything runs cold."""
    made = make(observe=True)

    assert ("cold", "observed", []) == (made.cached(TWO), made.cached.outcome, made.runtime.loads)
    assert made.cached.cases[0].proof is not None


def test_cold_handout_compiles_and_keeps_the_hooks_reasons(make: Callable[..., Made]) -> None:
    """Nothing was handed out: as if cachectl were not there."""
    made = make(outcome="cold")

    assert ("cold", "cold") == (made.cached(TWO), made.cached.outcome)


def test_first_calls_from_many_threads_load_once_and_run_one_by_one(make: Callable[..., Made]) -> None:
    """Nobody sees half a decision; the first run, in which a runtime captures its graph, has the case for itself."""
    made = make(Loader(load_s=0.02))
    start, results = threading.Barrier(8), []

    def run() -> None:
        start.wait()
        results.append(made.cached(TWO))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (["warm b2"] * 8, 1, 8, "warm") == (
        results,
        len(made.runtime.loads),
        made.cached.cases[0].calls,
        made.cached.outcome,
    )
    assert 1 == made.runtime.at_first


def test_artifact_at_another_folder_is_copied_whole_for_the_runtime(make: Callable[..., Made], tmp_path: Path) -> None:
    """The runtime's md5 differs: a copy stands where it looks, and what was handed out stays as it is."""
    other = "Model_static_aclgraphcache_other/decode"
    made = make(Loader(expected=other))

    assert "warm b2" == made.cached(TWO)
    assert [(tmp_path / "handout" / "b2" / other).resolve()] == made.runtime.loads
    assert (tmp_path / "handout" / "b2" / RUNTIME_PATH / "compiled_module").is_file()
    assert ["compiled_module"] == [path.name for path in made.runtime.loads[0].parent.rglob("*") if path.is_file()]


def test_artifact_that_another_process_copied_meanwhile_serves(make: Callable[..., Made], tmp_path: Path) -> None:
    """Several processes of one hand-out: who comes second takes what is there."""
    other = "Model_static_aclgraphcache_other/decode"
    made = make(Loader(expected=other))
    there = tmp_path / "handout" / "b2" / other
    there.mkdir(parents=True)
    (there / "compiled_module").write_text("theirs")

    assert "theirs" == made.cached(TWO)


def test_deep_copy_decides_anew_for_the_copied_object(make: Callable[..., Made]) -> None:
    """Nothing that was proved of one object holds for another."""
    made = make()
    made.cached(TWO)

    twin = copy.deepcopy(made.cached)

    assert (True, "unused") == (twin.method.__self__ is not made.model, twin.outcome)
    assert ("warm b2", 2) == (twin(TWO), len(made.runtime.loads))


def test_call_while_the_program_bars_compiled_code_is_inert(make: Callable[..., Made]) -> None:
    """force_eager and the like: nothing is decided, loaded or counted as cold; the setting is the reason."""
    made = make(Loader(stands="force_eager"))

    assert ("cold", "inert", []) == (made.cached(TWO), made.cached.outcome, made.runtime.loads)
    assert [("policy", "torch.compiler.set_stance", "force_eager")] == [
        (reason.part, reason.name, reason.wanted) for reason in made.cached.reasons
    ]
    made.runtime.stands = ""
    assert ("warm b2", "warm") == (made.cached(TWO), made.cached.outcome)


def test_call_proved_each_time_sees_what_changed_in_between(make: Callable[..., Made]) -> None:
    """As torch.compile's guards would; put back, it is warm again, and inside a stance the program vouches for it."""
    sheet = SheetBuilder()
    sheet.add(parse_source("L['self'].scale"), ["equals", 2])
    made = make(prove_each_call=True, guards=sheet.sheet())
    assert ["warm b2"] * 2 == [made.cached(TWO), made.cached(TWO)]

    made.model.scale = 3
    changed = made.cached(TWO)
    made.model.scale = 2
    again = made.cached(TWO)
    made.model.scale, made.runtime.stands = 3, UNGUARDED
    vouched = made.cached(TWO)

    assert ("cold", "warm b2", "warm b2", "cold") == (changed, again, vouched, made.cached.outcome)
    assert ["self.scale"] == [reason.name for reason in made.cached.reasons]


def _compared(*args: Any, **kwargs: Any) -> bool:
    raise AssertionError("a call was compared")


def test_unguarded_call_of_the_one_warm_case_is_not_compared(make: Callable[..., Made]) -> None:
    """The program vouches for its steady state: neither inputs nor the state around calls are looked at."""
    made = make()
    made.cached(TWO)
    for case in made.cached.cases:
        case.fits = case.ambient_holds = _compared
    made.runtime.stands = UNGUARDED

    assert ["warm b2"] * 3 == [made.cached(TWO), made.cached(TWO), made.cached(x=TWO)]
    assert (4, "warm") == (made.cached.cases[0].calls, made.cached.outcome)


def test_unguarded_calls_of_several_kinds_are_told_apart(make: Callable[..., Made]) -> None:
    """Two warm cases, or a warm one and a compiled one: which of them a call is has to be seen."""
    made = make()
    assert ["warm b2", "warm b4"] == [made.cached(TWO), made.cached(FOUR)]
    made.runtime.stands = UNGUARDED

    assert ["warm b4", "warm b2", "cold"] == [made.cached(FOUR), made.cached(TWO), made.cached(SEVEN)]


def test_unguarded_first_call_is_checked_as_ever(make: Callable[..., Made]) -> None:
    """Nothing is loaded unproved."""
    made = make(Loader(stands=UNGUARDED, against=[Reason("toolchain", "cann.CANN", "8.5.0", "8.6.0")]))

    assert ("cold", []) == (made.cached(TWO), made.runtime.loads)


def test_unguarded_call_beside_a_compiled_one_is_compared(make: Callable[..., Made]) -> None:
    """A call that no case fits stays cold, although one case is warm."""
    made = make()
    made.cached(TWO)
    made.cached(SEVEN)
    made.runtime.stands = UNGUARDED

    assert ["cold", "warm b2"] == [made.cached(SEVEN), made.cached(TWO)]


def test_other_ranks_entries_are_left_alone(make: Callable[..., Made]) -> None:
    """A hand-out for all ranks of a node holds what this rank must not load."""
    made = make()
    other = CachedMethod(
        made.model.decode,  # type: ignore[arg-type]
        made.cached.handout,
        made.runtime,
        dynamic=False,
        options={},
        new_cold_folder=lambda: Path("cold"),
        environ={"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
    )

    assert ("cold", "cold") == (other(TWO), other.outcome)
    assert [("topology", "rank")] == [(reason.part, reason.name) for reason in other.reasons][:1]


TWO_RANKS = {"topology": {"world_size": 2, "rank": 1}}


def test_rank_that_nothing_names_is_cold(make: Callable[..., Made]) -> None:
    """A process of several ranks that knows not which it is loads none of them (field reports T1, T3)."""
    made = make(**TWO_RANKS)

    assert ("cold", []) == (made.cached(TWO), made.runtime.loads)
    (reason,) = made.cached.reasons
    assert ("topology", "rank", 1, "absent") == (reason.part, reason.name, reason.stored, reason.kind)


def test_process_group_names_the_rank_of_a_program_without_variables(make: Callable[..., Made]) -> None:
    """A program that spawns its ranks without variables has the rank from torch.distributed."""
    made = make(Loader(group=(0, 2)), topology={"world_size": 2, "rank": 0})

    assert "warm b2" == made.cached(TWO)


def test_process_group_that_comes_late_is_compared(make: Callable[..., Made]) -> None:
    """A cached method made before the process group still never loads another rank's artifact."""
    made = make(**TWO_RANKS)
    made.runtime.group = (0, 2)

    assert ("cold", []) == (made.cached(TWO), made.runtime.loads)
    assert [("rank", 1, [0])] == [(reason.name, reason.stored, reason.wanted) for reason in made.cached.reasons]


def test_process_group_that_contradicts_the_environment_is_cold(make: Callable[..., Made]) -> None:
    """The launcher's variables say one rank and the process group another: neither is believed."""
    made = make(Loader(group=(0, 2)), topology={"world_size": 2, "rank": 0})
    made.cached.environ = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}

    assert ("cold", []) == (made.cached(TWO), made.runtime.loads)
    assert ("torch.distributed rank 0 of 2", "RANK=1") == (
        made.cached.reasons[0].stored,
        made.cached.reasons[0].wanted,
    )


# Several sets


@dataclass
class OfDevice(Loader):
    """A runtime that runs on one device, and keeps account of what it was compared with."""

    soc: str = "a"
    compared: list[str] = field(default_factory=list)

    def process_reasons(self, request: Mapping[str, Any], options: Mapping[str, Any], dynamic: bool) -> list[Reason]:
        self.compared.append(request["device"]["soc"])
        return (
            []
            if request["device"]["soc"] == self.soc
            else [Reason("device", "soc", request["device"]["soc"], self.soc)]
        )


@pytest.fixture
def make_sets(tmp_path: Path) -> Callable[..., Made]:
    """Return a maker of cached methods that were handed sets for devices a and b, each under MODE fast and slow."""

    def build(runtime: Loader, mode: str | None, rows: Mapping[str, int] | None = None, **options: Any) -> Made:
        sets = []
        for soc in ("a", "b"):
            for stored in ("fast", "slow"):
                name = f"{soc}-{stored}"
                environment = {"declared": {}, "observed": {"MODE": stored}}
                sizes = (2, 4) if rows is None else (rows[name],)
                entries = tuple(
                    handed(
                        tmp_path / name,
                        f"b{size}-{name}",
                        {"x": contiguous(size, 4), "n": 1, "flag": False},
                        environment=environment,
                        device={"soc": soc},
                    )
                    for size in sizes
                )
                request = {**REQUEST, "device": {"soc": soc}}
                sets.append(HandedSet(f"sha256:{len(sets):064x}", request, entries, members(entries)))
        model = Model()
        cached = CachedMethod(
            model.decode,  # type: ignore[arg-type]
            Handout("warm", tmp_path / "recipe.yaml", sets=tuple(sets)),
            runtime,
            dynamic=False,
            options={},
            new_cold_folder=lambda: tmp_path / f"cold{len(runtime.compiles)}",
            environ={} if mode is None else {"MODE": mode},
            **options,
        )
        return Made(model, runtime, cached)

    return build


@pytest.mark.parametrize("soc", ["a", "b"])
@pytest.mark.parametrize("mode", ["fast", "slow"])
def test_first_set_that_holds_is_taken(make_sets: Callable[..., Made], soc: str, mode: str) -> None:
    """What the hook could not see, the process sees: device and environment choose the set, for all its cases."""
    made = make_sets(OfDevice(soc=soc), mode)

    assert [f"warm b2-{soc}-{mode}", f"warm b4-{soc}-{mode}", f"warm b2-{soc}-{mode}"] == [
        made.cached(call) for call in (TWO, FOUR, TWO)
    ]
    assert ("warm", [], 2) == (made.cached.outcome, made.cached.reasons, len(made.runtime.loads))
    assert {f"b2-{soc}-{mode}", f"b4-{soc}-{mode}"} == {case.handed.entry.case for case in made.cached.cases}


def test_sets_that_were_left_behind_are_not_compared_again(make_sets: Callable[..., Made]) -> None:
    """The second case is looked for in the set that holds, and nowhere else."""
    runtime = OfDevice(soc="b")
    made = make_sets(runtime, "fast")
    made.cached(TWO)

    made.cached(FOUR)

    assert ["a", "a", "b", "b"] == runtime.compared


def test_no_set_that_holds_is_cold_and_each_says_why(make_sets: Callable[..., Made]) -> None:
    """The reasons of all of them are told, each once; all of them are in the account of proofs."""
    made = make_sets(OfDevice(soc="b"), "third")

    assert ["cold", "cold"] == [made.cached(TWO), made.cached(TWO)]
    assert ("cold", [], 4) == (made.cached.outcome, made.runtime.loads, sum(case.decided for case in made.cached.cases))
    assert [("device", "a"), ("environment", "fast"), ("environment", "slow")] == [
        (reason.part, reason.stored) for reason in made.cached.reasons
    ]


def test_call_that_only_a_later_sets_case_fits_takes_that_set(make_sets: Callable[..., Made]) -> None:
    """Where the sets' inputs differ, too, the call finds its own."""
    rows = {"a-fast": 2, "a-slow": 4, "b-fast": 2, "b-slow": 4}
    made = make_sets(OfDevice(soc="b"), "slow", rows)

    assert ("warm b4-b-slow", "warm", []) == (made.cached(FOUR), made.cached.outcome, made.cached.reasons)


def test_set_that_holds_and_does_not_load_is_inert(make_sets: Callable[..., Made]) -> None:
    """No other set is tried: what held is what should have been loaded."""
    made = make_sets(OfDevice(soc="a", fails=RuntimeError("no")), "slow")

    assert ("cold", "inert", 1) == (made.cached(TWO), made.cached.outcome, len(made.runtime.loads))


def test_observed_set_is_the_one_that_holds(make_sets: Callable[..., Made]) -> None:
    """With observe the choice is the same, and nothing is loaded."""
    made = make_sets(OfDevice(soc="b"), "slow", observe=True)

    assert ("cold", "observed", []) == (made.cached(TWO), made.cached.outcome, made.runtime.loads)
    assert {"b2-b-slow", "b4-b-slow"} == {case.handed.entry.case for case in made.cached.cases}


def test_first_calls_of_two_cases_at_once_settle_on_one_set(make_sets: Callable[..., Made]) -> None:
    """A thread that waits while another one settles takes that set, too."""
    made = make_sets(OfDevice(soc="b", load_s=0.02), "slow")
    start, results = threading.Barrier(8), []

    def run(call: Any) -> None:
        start.wait()
        results.append(made.cached(call))

    threads = [threading.Thread(target=run, args=(call,)) for call in (TWO, FOUR) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert ["warm b2-b-slow"] * 4 + ["warm b4-b-slow"] * 4 == sorted(results)
    assert ("warm", [], 2) == (made.cached.outcome, made.cached.reasons, len(made.runtime.loads))


@pytest.fixture
def make_cuts(tmp_path: Path) -> Callable[..., Made]:
    """Return a maker of rank 0's cached method in a world of four, which was handed a set of each cut into nodes."""

    def build(environ: Mapping[str, str], devices: int | None = 8, order: tuple[int, ...] = (1, 2, 4)) -> Made:
        sets = []
        for each in order:
            request = {**REQUEST, "topology": {"world_size": 4}}
            topology = {"world_size": 4, "rank": 0}
            entry = handed(
                tmp_path / f"of-{each}", f"of-{each}", {"x": contiguous(2, 4), "n": 1, "flag": False}, topology=topology
            )
            sets.append(HandedSet(f"sha256:{each:064x}", request, (entry,), members((entry,)), ranks_per_node=each))
        runtime, model = Loader(group=None, devices=devices), Model()
        cached = CachedMethod(
            model.decode,  # type: ignore[arg-type]
            Handout("warm", tmp_path / "recipe.yaml", sets=tuple(sets)),
            runtime,
            dynamic=False,
            options={},
            new_cold_folder=lambda: tmp_path / "cold",
            environ={"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", **environ},
        )
        return Made(model, runtime, cached)

    return build


@pytest.mark.parametrize("order", [(1, 2, 4), (4, 2, 1)])
@pytest.mark.parametrize(
    ("environ", "devices", "taken"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, 8, 2),
        ({"LOCAL_WORLD_SIZE": "4"}, 4, 4),
        ({"LOCAL_WORLD_SIZE": "1"}, 1, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 1, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 3, None),
        ({"LOCAL_WORLD_SIZE": "4"}, None, None),
        ({"LOCAL_WORLD_SIZE": "3"}, 8, None),
        ({"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "3"}, 8, None),
        ({}, 8, None),
    ],
    ids=["two nodes", "one", "four", "own device", "few devices", "no answer", "unequal", "contradiction", "unknown"],
)
def test_rank_that_all_cuts_fit_takes_the_one_that_the_others_can_take(
    make_cuts: Callable[..., Made],
    environ: dict[str, str],
    devices: int | None,
    taken: int | None,
    order: tuple[int, ...],
) -> None:
    """Rank 0 has device 0 in each cut: what it takes follows from what all ranks know, else it is the first one."""
    made = make_cuts(environ, devices, order)

    assert f"warm of-{order[0] if taken is None else taken}" == made.cached(TWO)


def test_handout_of_another_key_version_is_cold(make: Callable[..., Made]) -> None:
    """The hook may be of another version than the program's cachectl: what keys mean has to be the same."""
    made = make()
    made.cached.cases = [
        CaseState(case.handed, replace(case.of_set, request={"key_version": 1}), fits=case.fits)
        for case in made.cached.cases
    ]

    assert ("cold", [("policy", "key_version")]) == (
        made.cached(TWO),
        [(reason.part, reason.name) for reason in made.cached.reasons],
    )
