"""The options part as far as it can be known without torch: every compile option with the value the runtime will use.

Owns the reading of the wheel's option names and defaults, and of torch's Dynamo defaults, from their source text. So an
option that is written out with its default means what leaving it out means, and a misspelt one is found before anything
is started. What building finds (registrations, code of custom passes, Dynamo fields that somebody else changed) stands
in the entry's part under `found`; see `found_reasons`. Standard library only.

Facts: torch_npu 2.13, dynamo/npugraph_ex/configs/compiler_config.py (`CompilerConfig.__init__` assigns one value object
an option) and configs/_option_base.py (what those objects make of a value); torch/_dynamo/config.py.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachectl.errors import ConfigError
from cachectl.schemas.boot import Reason

__all__ = [
    "DYNAMO_NOISE",
    "HANDLES",
    "WheelOption",
    "dynamo_defaults",
    "found_reasons",
    "known_options",
    "options_part",
    "unknown_name",
    "wheel_options",
]

_CONFIG = "dynamo/npugraph_ex/configs/compiler_config.py"
_DYNAMO = "_dynamo/config.py"

# Options that are a handle of one process. No artifact can hold one, and none is identity.
HANDLES = {"use_graph_pool": "a memory pool of one process"}

# Fields of torch._dynamo.config and torch._functorch.config that can't reach the graph. Each with its reason. Limits
# and errors decide whether there is a graph, never which: an artifact is one graph of a first compile under fullgraph,
# where an error raises before suppress_errors is asked, and so does a limit (torch 2.13 convert_frame.py: `_compile`
# with one_graph, `ConvertFrame.__call__` with error_on_graph_break).
DYNAMO_NOISE = {
    "accumulated_recompile_limit": "when compiling anew stops",
    "base_dir": "path",
    "cprofile": "profiler",
    "debug_dir_root": "path",
    "dynamo_profiler": "profiler",
    "error_on_custom_op_aliasing": "whether a check of operators warns or raises",
    "fail_on_recompile_limit_hit": "which error a limit raises",
    "issue_3_13_0_warning": "warning",
    "log_compilation_metrics": "log",
    "log_file_name": "log",
    "log_graph_in_out_metadata": "log",
    "pt2_compile_id_prefix": "log",
    "recompile_limit": "when compiling anew stops",
    "record_compile_time_instruction_count": "log",
    "record_runtime_overhead": "log",
    "replay_record_enabled": "record for a fault report",
    "report_guard_failures": "log",
    "repro_after": "fault report",
    "repro_forward_only": "fault report",
    "repro_ignore_non_fp": "fault report",
    "repro_level": "fault report",
    "repro_tolerance": "fault report",
    "run_gc_after_compile": "garbage collection",
    "skip_code_recursive_on_recompile_limit_hit": "what is skipped after a limit",
    "suppress_errors": "whether an error raises; fullgraph always does",
    "verbose": "log",
}

# Fields that torch keeps under an older name, too.
_DYNAMO_ALIASES = {
    "accumulated_cache_size_limit": "accumulated_recompile_limit",
    "cache_size_limit": "recompile_limit",
    "fail_on_cache_limit_hit": "fail_on_recompile_limit_hit",
    "skip_code_recursive_on_cache_limit_hit": "skip_code_recursive_on_recompile_limit_hit",
}

# Value objects that keep what they are given; the others say it as text.
_AS_GIVEN = ("CallableValue", "DictOptionValue", "IntListValue")

_UNREADABLE = object()


@dataclass(frozen=True)
class WheelOption:
    """One compile option as the wheel defines it: the class of its value object, its default, and what it allows."""

    kind: str
    default: Any
    choices: tuple[Any, ...] | None = None

    @property
    def is_code(self) -> bool:
        """Whether its value is a function: a recipe names it, `pkg.mod:fn`."""
        return self.kind == "CallableValue"

    def effective(self, value: Any) -> Any:
        """Return what the runtime makes of a value that is given: text of all but None, bool, lists and dicts."""
        if self.kind == "IntListValue" and value is None:
            return []  # Given; left out it stays None.
        return self._said(value)

    @property
    def usual(self) -> Any:
        """The effective value where none is given."""
        return self._said(self.default)

    def _said(self, value: Any) -> Any:
        if self.kind in _AS_GIVEN or value is None or isinstance(value, bool):
            return value
        return str(value)


def wheel_options(npu_folder: Path | None) -> dict[str, WheelOption] | None:
    """Return the npugraph_ex options of the torch_npu in this folder, handles left out, without importing it.

    Returns:
        None where there is no such file or it has a form that is not known (torch_npu 2.10 nests its options): then an
        option counts as it is written.
    """
    tree = _parse(npu_folder, _CONFIG)
    initialiser = next(
        (
            part
            for node in (tree.body if tree is not None else ())
            if isinstance(node, ast.ClassDef) and node.name == "CompilerConfig"
            for part in node.body
            if isinstance(part, ast.FunctionDef) and part.name == "__init__"
        ),
        None,
    )
    if initialiser is None:
        return None
    names: dict[str, Any] = {}
    options: dict[str, WheelOption] = {}
    for statement in tree.body if tree is not None else ():
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            names[statement.targets[0].id] = _value(statement.value, names)
    for statement in initialiser.body:
        if not isinstance(statement, ast.Assign) or not isinstance(target := statement.targets[0], ast.Attribute):
            continue
        option = _option(statement.value, names)
        if target.attr in HANDLES:
            continue
        if option is None:
            return None
        options[target.attr] = option
    return options or None


def dynamo_defaults(torch_folder: Path | None) -> dict[str, Any] | None:
    """Return the fields of torch._dynamo.config with their defaults, those that are no plain value left as `...`.

    Returns:
        None where there is no such file.
    """
    tree = _parse(torch_folder, _DYNAMO)
    if tree is None:
        return None
    fields: dict[str, Any] = {}
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(target, ast.Name):
            value = _value(node.value, {}) if node.value is not None else _UNREADABLE
            # Assigned twice, as in an `if`: which one holds is not for us to say.
            fields[target.id] = ... if value is _UNREADABLE or target.id in fields else value
    return fields


def options_part(
    section: Mapping[str, Any], *, npu_folder: Path | None = None, torch_folder: Path | None = None
) -> dict[str, Any]:
    """Return the options part of a request: a recipe's `compile` section with what it leaves out filled in.

    Args:
        section: `compile` of a recipe document.
        npu_folder: where torch_npu lies; None if it isn't there.
        torch_folder: where torch lies; None if it isn't there.

    Raises:
        ConfigError: an option or a Dynamo field that these wheels do not have, a value that the wheel refuses, or a
            handle.
    """
    part = dict(section)
    options = dict(part.get("options") or {})
    for name, what in HANDLES.items():
        if options.pop(name, None) is not None:
            raise ConfigError(
                f"compile.options.{name} is {what}, which no artifact can hold",
                hint="leave it out of the recipe and of the program's options",
            )
    if part.get("mode", "npugraph_ex") == "npugraph_ex" and (wheel := wheel_options(npu_folder)) is not None:
        for name, value in options.items():
            _refuse_option(name, value, wheel)
        options = {
            name: option.effective(options[name]) if name in options else option.usual for name, option in wheel.items()
        }
    part["options"] = options
    fields = dict(part.get("dynamo") or {})
    if (defaults := dynamo_defaults(torch_folder)) is not None:
        for name in fields:
            if name not in defaults:
                raise unknown_name("compile.dynamo", "torch._dynamo.config has no field", name, defaults)
        given = {_DYNAMO_ALIASES.get(str(name), str(name)): value for name, value in fields.items()}
        fields = {name: value for name, value in given.items() if not _same(value, defaults.get(name, ...))}
    part["dynamo"] = {name: value for name, value in fields.items() if name not in DYNAMO_NOISE}
    return part


def known_options(stored: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored options with a wheel's defaults filled in, numbers as the wheel says them.

    Args:
        stored: as a request's part has them; of an entry that was built where the wheel's file could not be read, the
            recipe's own.
        defaults: the wheel's effective values, by name.
    """
    said = {
        name: str(value) if type(value) in (int, float) and isinstance(defaults.get(name), str) else value
        for name, value in stored.items()
        if name not in HANDLES
    }
    return {**defaults, **said}


def found_reasons(stored: Mapping[str, Any], found: Mapping[str, Any]) -> list[Reason]:
    """Compare what building found of the options with what a process has; one reason a difference.

    Args:
        stored: `found` of an entry's options part: groups of (name, what stands for it).
        found: the same of this process.
    """
    reasons = []
    for group in sorted({*stored, *found}):
        before, now = stored.get(group) or {}, found.get(group) or {}
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name) or (name in before) != (name in now):
                hint = _FOUND_HINTS.get(group, "run: cachectl build --force")
                reasons.append(Reason("options", f"{group}.{name}", before.get(name), now.get(name), hint=hint))
    return reasons


# plan can't see what a process has registered, and calls the entry ready.
_FOUND_HINTS = {
    "dynamo": "set torch._dynamo.config as at build time before the first call, or run: cachectl build --force",
    "functorch": "set torch._functorch.config as at build time before the first call, or run: cachectl build --force",
    "passes": "pass the function that the recipe names, or run: cachectl build --force",
    "patterns": "register exactly what the recipe's compile.setup registers, or run: cachectl build --force",
    "decompositions": "register exactly what the recipe's compile.setup registers, or run: cachectl build --force",
    "collectives": "patch torch.distributed as the recipe's compile.setup does, or run: cachectl build --force",
    "operators": "the operator is registered otherwise than at build time: run: cachectl build --force",
}


def unknown_name(place: str, what: str, name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a name that nobody knows, with the nearest one that is known."""
    public = [item for item in known if not item.startswith("_")]
    near = difflib.get_close_matches(name, public, n=1, cutoff=0.5)
    return ConfigError(
        f"{place}: {what} {name!r}", hint=f"did you mean {near[0]}?" if near else f"it has: {', '.join(sorted(public))}"
    )


def _refuse_option(name: str, value: Any, wheel: Mapping[str, WheelOption]) -> None:
    option = wheel.get(name)
    if option is None:
        raise unknown_name("compile.options", "this torch_npu has no option", name, wheel)
    if option.choices is not None and value not in option.choices:
        choices = ", ".join(repr(choice) for choice in option.choices)
        raise ConfigError(f"compile.options.{name}: {value!r} is no value of it", hint=f"it takes: {choices}")
    if option.is_code and not (value is None or (isinstance(value, str) and ":" in value)):
        raise ConfigError(f"compile.options.{name}: {value!r} names no function", hint='write "pkg.mod:fn"')


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(left == right)


def _parse(folder: Path | None, place: str) -> ast.Module | None:
    if folder is None:
        return None
    try:
        return ast.parse((folder / place).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _option(node: ast.expr, names: Mapping[str, Any]) -> WheelOption | None:
    """Return what `Kind(default, choices or range…)` says; None for another form."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.keywords:
        return None
    arguments = [_value(argument, names) for argument in node.args]
    if not arguments or any(argument is _UNREADABLE for argument in arguments):
        return None
    kind = node.func.id
    choices = tuple(arguments[1]) if kind == "OptionValue" and len(arguments) > 1 and arguments[1] is not None else None
    return WheelOption(kind, arguments[0], choices)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id, _UNREADABLE)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.Sub)):
        left, right = _value(node.left, names), _value(node.right, names)
        if type(left) is not int or type(right) is not int or not 0 <= right < 1 << 16:
            return _UNREADABLE
        return left**right if isinstance(node.op, ast.Pow) else left - right
    try:
        return ast.literal_eval(node)
    except ValueError:
        return _UNREADABLE
