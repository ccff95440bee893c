"""What the notes of a program's processes say together: one program, its methods and calls, its world.

Owns merging: which processes are ranks of one program, which of their compiles one recipe can say, and what is said of
the others. Nothing is written or printed here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachectl.errors import ConfigError
from cachectl.programs_calls import call_kind
from cachectl.programs_command import ScriptCommand, read_command

__all__ = ["Findings", "FoundMethod", "find_program", "is_below"]


@dataclass
class FoundMethod:
    """One method as all ranks that have it compile it.

    Attributes:
        name: as the recipe says it.
        calls: the first call's input spec of each kind, as the first rank had it.
        ranks: those that have the method.
        more: whether there were more kinds of call than are told apart.
    """

    method: str
    owner: str
    kind: str
    how: str
    dynamic: bool
    options: dict[str, Any]
    code_options: dict[str, str | None]
    calls: list[Mapping[str, Any]]
    at: float
    grad: bool
    more: bool
    ranks: list[int] = field(default_factory=list)
    name: str = ""


@dataclass(frozen=True)
class Findings:
    """One program, as a recipe can say it.

    Attributes:
        command: as its processes were started.
        folder: its working folder.
        found: its methods.
        launcher: what a launcher of ranks has set for it.
        search_path: where its modules came from, absolute.
        files: its own files around a compile, absolute.
        opened: configuration files that it has read, absolute.
        environ: of the declared families.
        set_by_program: of these, what the program itself sets.
        sizes: of the topology, as far as they are known.
    """

    command: ScriptCommand
    folder: Path
    found: tuple[FoundMethod, ...]
    world_size: int
    sizes: Mapping[str, int]
    launcher: tuple[str, ...]
    search_path: tuple[str, ...]
    files: tuple[str, ...]
    opened: tuple[str, ...]
    environ: Mapping[str, str]
    set_by_program: frozenset[str]
    simulated: bool
    versions: Mapping[str, str]
    dynamo: Mapping[str, Any]
    warnings: tuple[str, ...]

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods' names as the recipe says them."""
        return tuple(method.name for method in self.found)


def find_program(notes: Sequence[Mapping[str, Any]]) -> Findings | tuple[str, ...]:
    """Return the program whose compiles a recipe can say; else what was seen instead, in words.

    Args:
        notes: of all processes, in the order in which they began.
    """
    warnings = _left(notes)
    programs: dict[tuple[tuple[str, ...], str], list[Mapping[str, Any]]] = {}
    for note in notes:
        if not any(method["calls"] for method in note["methods"]):
            warnings += [
                f"{method['method']} of {method['class']} is compiled and never called" for method in note["methods"]
            ]
            continue
        try:
            if note["forked"]:
                raise ConfigError(
                    "compiles in a process that multiprocessing or a fork has started, which no recipe can start by "
                    "itself",
                    hint="start one process a rank, as torchrun does",
                )
            command = read_command(_shared(note["command"]))
        except ConfigError as error:
            warnings.append(f"process {note['pid']}: {error}")
            continue
        programs.setdefault((tuple(command.words()), note["cwd"]), []).append(note)
    if not programs:
        return tuple(dict.fromkeys(warnings))
    (words, folder), ranks = next(iter(programs.items()))
    for other, _ in list(programs)[1:]:
        # Not its arguments, which may hold a secret.
        name = read_command(other).target
        warnings.append(f"another program compiles, too, and is not in the recipe: {name}")
    ranks = sorted(ranks, key=_rank_of)
    world_size = max((note["world_size"] or 1 for note in ranks), default=1)
    if len({_rank_of(note) for note in ranks}) < len(ranks):
        warnings.append("several processes of one rank compile: the recipe says what the first of them does")
    warnings += _one_device(ranks)
    methods = _methods(ranks, warnings)
    if not methods:
        return tuple(dict.fromkeys(warnings))
    first = ranks[0]
    if "-O" in words or "-OO" in words:
        warnings.append("the program runs under python -O, and a build does not: asserts are part of the code")
    return Findings(
        command=read_command(words),
        folder=Path(folder),
        found=tuple(methods),
        world_size=world_size,
        sizes=_sizes(ranks, world_size),
        launcher=tuple(first["launcher"]),
        search_path=tuple(dict.fromkeys(path for note in ranks for path in note["search_path"])),
        files=tuple(dict.fromkeys(path for note in ranks for path in note["stack"])),
        opened=tuple(dict.fromkeys(path for note in ranks for path in note["opened"])),
        environ=_environ(ranks, warnings),
        set_by_program=frozenset(first["read_at_start"]),
        simulated=bool(first["simulated"]),
        versions=first["versions"],
        dynamo=first["dynamo"],
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _shared(command: Sequence[str]) -> list[str]:
    """Return a rank's command as all ranks have it. Raises ConfigError: words that no recipe can hold."""
    words = []
    for word in command:
        try:
            word.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(f"the argument {word!r} is no text", hint="name files and values in UTF-8") from error
        # torch.distributed.launch tells each rank its number so, and in LOCAL_RANK too.
        if not re.fullmatch(r"--local[-_]rank=\d+", word):
            words.append(word)
    return words


def _left(notes: Sequence[Mapping[str, Any]]) -> list[str]:
    left = [item for note in notes for item in note["left"]]
    return list(dict.fromkeys(f"{item['what']}: {item['why']}" for item in left))


def _rank_of(note: Mapping[str, Any]) -> int:
    if note["rank"] is not None:
        return int(note["rank"])
    given = [method["global_rank"] for method in note["methods"] if "global_rank" in method]
    return int(given[0]) if given else 0


def _one_device(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say which ranks run on one device: in a build each has its own, and what names one is cold on another."""
    ranks_of: dict[int, set[int]] = {}
    for note in ranks:
        devices = [call.get("device") for method in note["methods"] for call in method["calls"]]
        if devices and devices[0] is not None:
            ranks_of.setdefault(devices[0], set()).add(_rank_of(note))
    for device, numbers in sorted(ranks_of.items()):
        if len(numbers) > 1:
            yield (
                f"ranks {', '.join(map(str, sorted(numbers)))} all run on device {device}, and a build gives each rank "
                "one of its own: call torch.npu.set_device(local_rank) before the model is made, or starts are cold"
            )


def _methods(ranks: Sequence[Mapping[str, Any]], warnings: list[str]) -> list[FoundMethod]:
    """Return the methods that one recipe can say, in the order of their first calls."""
    merged: dict[tuple[str, str], FoundMethod] = {}
    seen: set[int] = set()
    for note in ranks:
        rank = _rank_of(note)
        if rank in seen:
            continue
        seen.add(rank)
        for (owner, method), found in _of_process(note).items():
            known = merged.setdefault((owner, method), found)
            known.ranks.append(rank)
            if known is not found:
                _compare(known, found, rank, warnings)
    nameless = [place for place, item in merged.items() if not item.method.isidentifier()]
    warnings += [f"{merged.pop(place).method}: a method without a name of its own is not written" for place in nameless]
    called = sorted((item for item in merged.values() if item.calls), key=lambda item: item.at)
    warnings += [
        f"{item.method} of {item.kind} is compiled and never called, so it is not in the recipe"
        for item in merged.values()
        if not item.calls
    ]
    kept: list[FoundMethod] = []
    for item in called:
        first = called[0]
        if (item.dynamic, item.options, item.code_options) == (first.dynamic, first.options, first.code_options):
            kept.append(item)
        else:
            warnings.append(
                f"{item.method} is compiled with dynamic={item.dynamic} and options {item.options}, "
                f"{first.method} with dynamic={first.dynamic} and options {first.options}: a recipe has one of each, "
                f"so {item.method} is left out"
            )
        if item.more:
            warnings.append(
                f"{item.method} is called with more than {len(item.calls)} kinds of input, each compiled anew: "
                "compile it with dynamic=True, or pad its inputs to fewer shapes; the recipe has the first ones"
            )
    names = [item.method for item in kept]
    for item in kept:
        item.name = item.method if names.count(item.method) == 1 else f"{item.owner}.{item.method}"
    return kept


def _of_process(note: Mapping[str, Any]) -> dict[tuple[str, str], FoundMethod]:
    """Return one process's methods; what was compiled twice is one, with the calls of both."""
    found: dict[tuple[str, str], FoundMethod] = {}
    calls: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for item in note["methods"]:
        place = (item["owner"], item["method"])
        calls.setdefault(place, []).extend(item["calls"])
        method = found.setdefault(
            place,
            FoundMethod(
                method=item["method"],
                owner=item["owner"],
                kind=item["class"],
                how=item["how"],
                dynamic=bool(item["dynamic"]),
                options=dict(item["options"]),
                code_options=dict(item["code_options"]),
                calls=[],
                at=float("inf"),
                grad=False,
                more=False,
            ),
        )
        method.more = method.more or bool(item["more"])
    for place, method in found.items():
        kinds: list[Any] = []
        for call in sorted(calls[place], key=lambda call: call["at"]):
            kind = call_kind(call["spec"], dynamic=method.dynamic)
            if kind not in kinds:
                kinds.append(kind)
                method.calls.append(call["spec"])
                method.at = min(method.at, call["at"])
                method.grad = method.grad or bool(call["grad"])
    return found


def _compare(known: FoundMethod, other: FoundMethod, rank: int, warnings: list[str]) -> None:
    """Hold what another rank compiles against the first one's; the recipe has one answer for all."""
    if (known.dynamic, known.options) != (other.dynamic, other.options):
        warnings.append(
            f"rank {rank} compiles {known.method} with dynamic={other.dynamic} and options {other.options}, rank "
            f"{known.ranks[0]} with dynamic={known.dynamic} and options {known.options}: the recipe has the latter"
        )
    if len(known.calls) != len(other.calls):
        warnings.append(
            f"rank {rank} calls {known.method} with {len(other.calls)} kinds of input, rank {known.ranks[0]} with "
            f"{len(known.calls)}: the recipe has those that both have"
        )
        del known.calls[max(1, min(len(known.calls), len(other.calls))) :]


def _sizes(ranks: Sequence[Mapping[str, Any]], world_size: int) -> dict[str, int]:
    """Return the topology's sizes that the ranks given to cache_compile tell."""
    sizes = {}
    for name, given in (("tensor_parallel", "tp_rank"), ("pipeline_parallel", "pp_rank")):
        told = [method[given] for note in ranks for method in note["methods"] if given in method]
        if told and max(told) > 0:
            sizes[name] = max(told) + 1
    rest, over = divmod(world_size, max(1, sizes.get("tensor_parallel", 1) * sizes.get("pipeline_parallel", 1)))
    if sizes and not over and rest > 1:
        sizes["data_parallel"] = rest
    return sizes


def _environ(ranks: Sequence[Mapping[str, Any]], warnings: list[str]) -> dict[str, str]:
    common = dict(ranks[0]["environ"])
    for note in ranks[1:]:
        for name in sorted(common.keys() | note["environ"].keys()):
            if common.get(name) != note["environ"].get(name):
                common.pop(name, None)
                told = f"ranks have different values of {name}: it is not declared, and is part of each rank's key"
                warnings.append(told)
    return common


def is_below(path: str, folder: Path) -> bool:
    """Say whether a path lies in a folder or below it."""
    real = os.path.realpath(folder)
    return os.path.realpath(path) == real or os.path.realpath(path).startswith(real.rstrip(os.sep) + os.sep)
