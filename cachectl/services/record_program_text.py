"""The recipe of a recorded program as text, with a comment for each line that says where it came from.

Owns the recipe's YAML: the form in which plan, build and exec accept it, and what is to be looked at. Paths are
relative to the recipe's folder. Secrets are not written.
"""

from __future__ import annotations

import glob
import os
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from cachectl import __version__
from cachectl.schemas.keying import is_secret_name, without_credentials
from cachectl.services.record_program_findings import Findings, FoundMethod, is_below

__all__ = ["recipe_text"]

_WIDTH = 110
_CONFIG_ENDINGS = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf")


def recipe_text(found: Findings, folder: Path, name: str) -> tuple[str, list[str]]:
    """Return the recipe's text and what is to be told beside it.

    Args:
        found: the program.
        folder: the recipe's folder, absolute.
        name: the recipe's name.
    """
    writer = _Writer(found, folder)
    return "".join(f"{line}\n" for line in writer.lines(name)), writer.warnings


class _Writer:
    def __init__(self, found: Findings, folder: Path) -> None:
        self.found = found
        self.folder = folder
        self.warnings: list[str] = []
        self.command = self._command()

    def lines(self, name: str) -> Iterator[str]:
        found = self.found
        versions = ", ".join(f"{what} {version}" for what, version in sorted(found.versions.items()) if version)
        yield from _comment(
            f"Recorded by cachectl {__version__} from: {shlex.join(self.command)}",
            f"It was compiled there with {versions}. A build runs the program until its compiled methods were called, "
            "and takes model and inputs from there. Each comment says where a line came from, and what to check.",
        )
        yield "schema: cachectl/recipe/v1"
        yield f"name: {_flow(name)}"
        if found.simulated:
            yield from _comment("The program ran on the simulated CANN: leave the line out for NPUs.")
            yield "device: simulated"
        yield from self._model()
        yield from self._compile()
        yield "functions:"
        for method in found.found:
            yield from self._function(method)
        yield from self._topology()
        yield from self._environment()

    def _command(self) -> list[str]:
        """Return the command without secrets; what it says of paths stays as it is."""
        words, hidden = [], []
        command, folder = self.found.command, self.found.folder
        target = command.target
        if not command.is_module and os.path.isabs(target):
            target = os.path.relpath(target, folder)
        # Python's own options are not those of a rank process.
        given = replace(command, target=target, flags=()).words()
        while given:
            word = given.pop(0)
            option, inline, value = word.partition("=")
            if option.startswith("-") and is_secret_name(option.strip("-").replace("-", "_")):
                hidden.append(option)
                if not inline and given and not given[0].startswith("-"):
                    given.pop(0)
                continue
            if (clean := without_credentials(word)) != word:
                hidden.append(f"the credentials in {option if inline else clean}")
            words.append(clean)
            if os.path.isabs(value if inline else word):
                self.warnings.append(f"{word} is an absolute path: it is in the key, and has to be the same elsewhere")
        for what in hidden:
            self.warnings.append(f"{what} is a secret and is not in the recipe: let the program read a variable")
        return words

    def _model(self) -> Iterator[str]:
        found = self.found
        yield "model:"
        yield from _comment("Runs the program in each rank process of a build; see docs/record.md.", indent=2)
        yield '  factory: "cachectl.programs:model"'
        yield "  config:"
        yield from _comment(
            "CMD as the process that compiled was started, without a launcher. It is part of the key: an argument that "
            "changes nothing of the graph can be left out.",
            indent=4,
        )
        yield f"    command: {_flow(self.command)}"
        if (where := self._relative(str(found.folder))) != ".":
            yield from _comment("Its working folder, relative to this file.", indent=4)
            yield f"    folder: {_flow(where)}"
        yield f"    methods: {_flow(list(found.methods))}"
        if counts := {method.name: len(method.calls) for method in found.found if len(method.calls) > 1}:
            yield from _comment("How many kinds of input the program calls them with.", indent=4)
            yield f"    calls: {_flow(counts)}"
        if some := {m.name: m.ranks for m in found.found if len(m.ranks) < found.world_size}:
            yield from _comment("The ranks that have a method, where not all do.", indent=4)
            yield f"    ranks: {_flow(some)}"
        # torchrun, which starts the ranks of a build, sets the others.
        if launcher := [name for name in found.launcher if found.world_size == 1 or name == "RANK_OFFSET"]:
            yield from _comment("What its launcher has set and a build's does not.", indent=4)
            yield f"    launcher: {_flow(launcher)}"
        yield from _comment("Where the program's modules came from; relative to this file.", indent=2)
        yield f"  path: {_flow(self._path())}"
        if sources := self._sources():
            yield from _comment(
                "Files that say which model is made and how it is called: a changed byte in them is a new build. What "
                "is traced counts by itself, function by function. Leave a file out if it changes for other reasons; "
                "each start proves the model all the same.",
                indent=2,
            )
            yield f"  sources: {_flow(sources)}"

    def _compile(self) -> Iterator[str]:
        first = self.found.found[0]
        yield "compile:"
        said = "cache_compile" if first.how == "cache_compile" else "torch.compile"
        yield from _comment(f"As the program passes it to {said}; what is left out is the wheel's default.", indent=2)
        yield f"  dynamic: {_flow(first.dynamic)}"
        options = dict(first.options)
        for name, place in first.code_options.items():
            if place is None:
                what = f"the option {name} is a function without a name that another process can import"
                self.warnings.append(f"{what}: move it into a module, and write {name}: package.module:function")
                yield from _comment(f"CHECK: {what}; it is left out, so no start is warm.", indent=2)
            else:
                options[name] = place
        yield f"  options: {_flow(options)}"
        if self.found.dynamo:
            changed = _flow(dict(self.found.dynamo))
            told = f"The program changes Dynamo's configuration by itself, in a build too: {changed}"
            yield from _comment(told, indent=2)
        if any(method.how == "torch.compile" for method in self.found.found):
            lifted = [method.name for method in self.found.found if method.how == "torch.compile"]
            told = f"{', '.join(lifted)} is compiled by torch.compile: start the program with cachectl exec --lift"
            self.warnings.append(told)
            yield from _comment(f"CHECK: {told}.", indent=2)
            if any(method.grad for method in self.found.found):
                told = "it is called with gradients: call it under torch.no_grad(), or no start is warm"
                self.warnings.append(told)
                yield from _comment(f"CHECK: {told}.", indent=2)

    def _function(self, method: FoundMethod) -> Iterator[str]:
        where = "" if len(method.ranks) == self.found.world_size else f", in ranks {_flow(method.ranks)}"
        yield from _comment(f"{method.kind}.{method.method}, given to {method.how}{where}.", indent=2)
        yield f"  - method: {_flow(method.name)}"
        yield "    cases:"
        for number, spec in enumerate(method.calls):
            yield from _comment(_shapes(spec), indent=6)
            arguments = _flow({"method": method.name, "number": number})
            yield f'      - {{name: call{number}, inputs: "cachectl.programs:call", args: {arguments}}}'
        if method.dynamic:
            yield from _comment("dynamic: sizes and integers of later calls may be others.", indent=6)

    def _topology(self) -> Iterator[str]:
        found = self.found
        sizes = {"world_size": found.world_size, **found.sizes}
        if found.world_size == 1:
            yield from _comment("One process compiled, without a process group of several ranks.")
        elif found.sizes:
            yield from _comment("From the process group, and the tp_rank and pp_rank that cache_compile was given.")
        else:
            yield from _comment(
                "From the process group. CHECK: how the model is cut over the ranks was not told; write "
                "tensor_parallel and the like, which plan and explain show."
            )
        yield f"topology: {_flow(sizes)}"

    def _environment(self) -> Iterator[str]:
        environ = {name: value for name, value in self.found.environ.items() if not is_secret_name(name)}
        if not environ:
            return
        yield from _comment(
            "What libraries read (TASK_QUEUE_ENABLE, HCCL_*, ASCEND_*, TORCH*, VLLM_*), as it was when the program "
            "compiled; exec exports it. CHECK that each line is meant for every start."
        )
        yield "environment:"
        for name, value in environ.items():
            own = "  # the program sets it itself" if name in self.found.set_by_program else ""
            yield f"  {name}: {_flow(value, text=True)}{own}"

    def _path(self) -> list[str]:
        folders = [self._relative(path) for path in self.found.search_path]
        return list(dict.fromkeys(folders)) or ["."]

    def _sources(self) -> list[str]:
        roots = [Path(path) for path in self.found.search_path] + [self.folder]
        files = dict.fromkeys([*self._config_files(), *self.found.opened, *self.found.files])
        inside = [file for file in files if any(is_below(file, root) for root in roots)]
        outside = [file for file in files if file not in inside]
        if outside:
            names = ", ".join(list(dict.fromkeys(os.path.basename(file) for file in outside))[:6])
            more = f" and others, {len(outside)} in all" if len(outside) > 6 else ""
            told = f"{names}{more}: read, and outside of model.path, so that plan sees no change in them; a start does"
            self.warnings.append(told)
        return [glob.escape(self._relative(file)) for file in inside]

    def _config_files(self) -> Iterator[str]:
        for word in self.found.command.arguments:
            value = word.partition("=")[2] if word.startswith("-") else word
            path = os.path.join(self.found.folder, value)
            if value.lower().endswith(_CONFIG_ENDINGS) and os.path.isfile(path):
                yield os.path.realpath(path)

    def _relative(self, path: str) -> str:
        return os.path.relpath(os.path.realpath(path), os.path.realpath(self.folder)).replace(os.sep, "/")


def _shapes(spec: Mapping[str, Any]) -> str:
    """Return a call's inputs in a line: the tensors by dtype and shape, the rest by value."""
    told = []
    for place, leaf in spec.items():
        name = place.removeprefix("L['").replace("']", "", 1)
        if "tensor" in leaf:
            tensor = leaf["tensor"]
            told.append(f"{name}: {tensor['dtype']}{tensor['shape']}")
        elif "value" in leaf and leaf["value"] is not None:
            told.append(f"{name}: {leaf['value']!r}"[:40])
    shown = ", ".join(told[:12])
    return shown + (f", and {len(told) - 12} more" if len(told) > 12 else "") if told else "no arguments"


def _flow(value: Any, *, text: bool = False) -> str:
    """Return a value as YAML on one line, strings in quotes where another reader could take them for something else."""
    dumped = yaml.safe_dump(
        value,
        default_flow_style=True,
        width=float("inf"),
        allow_unicode=True,
        sort_keys=False,
        default_style='"' if text else None,
    )
    return dumped.removesuffix("\n").removesuffix("\n...").strip()


def _comment(*texts: str, indent: int = 0) -> Iterator[str]:
    before = f"{' ' * indent}# "
    for text in texts:
        clean = "".join(character if character.isprintable() else "?" for character in text)
        yield from textwrap.wrap(
            clean,
            _WIDTH,
            initial_indent=before,
            subsequent_indent=before,
            break_long_words=False,
            break_on_hyphens=False,
        )
