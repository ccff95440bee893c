"""What Dynamo and the runtime say, read: where it is, what kind of fault it is, and what to do next.

Owns the words of triage's advice, which follow the vendor's guides (the recompile ladder, the table of the fused
attention operator). Pure functions over texts; no torch.

Forms: torch 2.13 `_dynamo/guards.py` (log `__recompiles`) and `_dynamo/exc.py` ("from user code:"); torch_npu 2.13
`_acl_concrete_graph/static_kernel.py` (warnings).
"""

from __future__ import annotations

import math
import os
import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = [
    "Recompile",
    "attention_fault",
    "break_advice",
    "finding",
    "is_host_list_guard",
    "one_line",
    "place_of",
    "read_recompiles",
    "recompile_advice",
    "refusal_kind",
    "runtime_notes",
    "user_frames",
    "user_place",
    "value_advice",
]

_TEXT_LIMIT: Final = 1500
# Frames in these are nobody's model.
_UPSTREAM: Final = tuple(
    f"{os.sep}{name}{os.sep}" for name in ("torch", "torch_npu", "torchair", "npugraph_ex", "cachectl")
)
# Python's own library.
_STANDARD: Final = os.path.dirname(os.__file__) + os.sep
_ATTENTION: Final = re.compile(
    r"\bnpu_(?:fused_infer_attention_score(?:_v2)?|incre_flash_attention|prompt_flash_attention)\b"
)
_LENGTHS: Final = re.compile(r"actual_(?:seq|shared)\w*|\w*len(?:gth)?s?\w*")
_LIST_WORDS: Final = re.compile(
    r"(?i)PendingUnbackedSymbolNotFound|unbacked symbol|SymInt\[\]|list\[int\]|List\[int\]|IntArrayRef|int\[\]"
)


@dataclass(frozen=True)
class Recompile:
    """One recompile: the function, the guard that failed, where it was made and the line that stands there."""

    function: str
    guard: str
    where: str | None
    line: str


def finding(kind: str, what: str, next_step: str, *, where: str | None = None, **more: Any) -> dict[str, Any]:
    """Return a finding as a rank's document says it; `more` are numbers and names.

    A difference that is no number, of NaN or of shapes, is left out: JSON has none.
    """
    kept = {name: value for name, value in more.items() if not isinstance(value, float) or math.isfinite(value)}
    return {"kind": kind, "what": one_line(what), "where": where, "next": next_step, **kept}


def one_line(text: str) -> str:
    """Return a text on one line, cut where it is longer than anybody reads."""
    words = " ".join(text.split())
    return words if len(words) <= _TEXT_LIMIT else f"{words[: _TEXT_LIMIT - 1]}…"


def place_of(file: str, line: int | None, function: str | None, roots: Mapping[str, Path]) -> str:
    """Return a place as a report says it: relative to the recipe's folders or to site-packages, never absolute."""
    path = Path(file)
    named = path.name
    for root in sorted(roots.values(), key=lambda root: -len(root.parts)):
        if path.is_relative_to(root):
            named = path.relative_to(root).as_posix()
            break
    else:
        for mark in ("site-packages", "dist-packages"):
            if mark in path.parts:
                named = "/".join(path.parts[path.parts.index(mark) + 1 :])
    return named + (f":{line}" if line else "") + (f" in {function}" if function else "")


def user_place(frames: Iterable[tuple[str, int | None, str]], roots: Mapping[str, Path]) -> str | None:
    """Return the innermost place that is the model's own code, of frames from the outermost to the innermost.

    Where all of it is upstream's, the innermost frame; None without frames.
    """
    listed = list(frames)
    own = [frame for frame in listed if _is_own(frame[0], roots)]
    return place_of(*(own or listed)[-1], roots) if listed else None


def user_frames(text: str) -> list[traceback.FrameSummary]:
    """Return the frames of the model's code that stand in the text of an error of Dynamo or of FX, outermost first."""
    code = "".join(re.split(r"from user code:|Original traceback:", text, maxsplit=1)[1:])
    return [
        traceback.FrameSummary(file, int(number), name, lookup_line=False, line=line.strip())
        for file, number, name, line in re.findall(r'File "(.+?)", line (\d+), in (\S+)\n([^\n]*)', code)
    ]


def _is_own(file: str, roots: Mapping[str, Path]) -> bool:
    if file.startswith("<") or (file.startswith(_STANDARD) and "-packages" not in file):
        return False
    return any(Path(file).is_relative_to(root) for root in roots.values()) or not any(
        folder in file for folder in _UPSTREAM
    )


def read_recompiles(texts: Iterable[str], roots: Mapping[str, Path]) -> list[Recompile]:
    """Return the recompiles that Dynamo logged (`torch._logging.set_logs(recompiles=True)`), one a text.

    Of several graphs that didn't fit, the newest one's guard counts: it is the one that the last step made.
    """
    found = []
    for text in texts:
        head = re.match(r"Recompiling function (\S+) in (.+?):(\d+)\s*$", text.partition("\n")[0])
        guard = re.search(r"^ *- \d+/\d+: (.*)$", text, re.MULTILINE)
        if head is None:
            continue
        expression, _, comment = (guard[1] if guard else "").partition("  # ")
        line, _, _ = comment.partition("  # ")
        stack = re.search(r'- +File "(.+?)", line (\d+), in (\S+)', text)
        where = (
            place_of(stack[1], int(stack[2]), stack[3], roots)
            if stack is not None
            else place_of(head[2], int(head[3]), head[1], roots)
        )
        found.append(Recompile(head[1], one_line(expression), where, one_line(line.partition("(HINT:")[0])))
    return found


def is_host_list_guard(recompile: Recompile) -> bool:
    """Say whether a guard holds one element of a list of lengths, on a line that calls the fused attention."""
    element = re.match(r"(?:L\[')?([\w.]+)(?:'\])?\[\d+\] == -?\d+$", recompile.guard)
    return element is not None and (
        _ATTENTION.search(recompile.line) is not None or _LENGTHS.search(element[1]) is not None
    )


# Which guard failed, in order: the first that fits names the kind of the recompile and what to do. Where dynamic is
# true already the last of each counts, if it is another advice.
_RECOMPILES: Final[tuple[tuple[str, str, str, str | None], ...]] = (
    (
        r"size mismatch|stride mismatch|\.size\(|\.shape\b|\.stride\(|rank mismatch",
        "recompile-shape",
        (
            "a shape changes from step to step: allocate it once at its largest and write in place; where it has to "
            "change set compile.dynamic: true"
        ),
        (
            "a size is fixed although dynamic is true: the code branches on it, or it is 0 or 1; give that size a case "
            "of its own"
        ),
    ),
    (
        r"\blen\(|^not [\w.\[\]']+$|^KeyError|dict\.keys|___dict_contains|DICT_",
        "recompile-container",
        (
            "a list or dict grows or changes its keys from step to step: keep its length, and pass what changes as an "
            "argument; compile.dynamic: true does not help"
        ),
        None,
    ),
    (
        r"^(?:L\['self'\]|self)\.[\w.\[\]']+ is (?:not )?None$",
        "recompile-attribute",
        (
            "an attribute is None in one step and something in the next: make it in __init__ or in the factory, before "
            "the first step"
        ),
        None,
    ),
    (
        r"(?:dtype|device(?: index)?|dispatch key set) mismatch|expected type of|___check_type_id| is (?:not )?None",
        "recompile-value",
        (
            "a tensor's dtype or device, or an argument's type, changes from step to step: cast it once before the "
            "call, and pass the same arguments each time"
        ),
        None,
    ),
    (
        r"Duplicate tensors",
        "recompile-identity",
        (
            "two names are one tensor in one step and two in another: give each memory of its own, and write it in "
            "place with copy_"
        ),
        None,
    ),
    (
        r"___check_obj_id|\bid\(| is [\w.\[\]']|data_ptr|___check_obj",
        "recompile-identity",
        (
            "an object is replaced between steps while the shapes stay: write buffers in place with copy_; where the "
            "graph doesn't depend on it keep compile.dynamic: false and run the steady steps under "
            "torch.compiler.set_stance(skip_guard_eval_unsafe=True)"
        ),
        None,
    ),
    (
        r"GLOBAL_STATE|requires_grad|grad_mode|torch_function|autocast|deterministic|default dtype|num_threads",
        "recompile-ambient",
        "the state around the call changes: call every step in the same grad mode, autocast and determinism",
        None,
    ),
    (
        r"(?:^|\W)(?:L\['self'\]|self)\.[\w.\[\]']+ == ",
        "recompile-attribute",
        (
            "an attribute changes from step to step: pass its value to the method as an argument, as a tensor; "
            "compile.dynamic: true does not help"
        ),
        None,
    ),
    (
        r" == ",
        "recompile-value",
        (
            "a plain value changes from step to step and is a constant of the graph: pass it as a tensor, or set "
            "compile.dynamic: true"
        ),
        "a plain value is a constant of the graph although dynamic is true: pass it as a tensor",
    ),
)


def recompile_advice(recompile: Recompile, *, dynamic: bool) -> tuple[str, str]:
    """Return the kind of a recompile and what to do, by the guard that failed."""
    guard = recompile.guard
    if is_host_list_guard(recompile):
        if dynamic:
            return "recompile-value", (
                "the graph reads this element as a constant although dynamic is true: pass the list to the operator as "
                "it is, without arithmetic or a branch on its elements"
            )
        return "attention-lengths", (
            "lengths as list[int] go with compile.dynamic: true; with dynamic: false pass them as a Tensor, where the "
            "operator takes one"
        )
    for pattern, kind, advice, when_dynamic in _RECOMPILES:
        if re.search(pattern, guard):
            return kind, when_dynamic if dynamic and when_dynamic is not None else advice
    return "recompile", (
        "the shapes stay, and a guard fails all the same: take what it names out of the method; where the graph "
        "doesn't depend on it keep compile.dynamic: false and run the steady steps under "
        "torch.compiler.set_stance(skip_guard_eval_unsafe=True)"
    )


def attention_fault(text: str, line: str, *, dynamic: bool) -> str | None:
    """Return what to do where an error is the fused attention's lengths of the wrong type; None for another error.

    Args:
        text: the error's text.
        line: the model's line it came from, "" if unknown.
        dynamic: of the recipe.
    """
    if _ATTENTION.search(f"{text} {line}") is None or _LIST_WORDS.search(text) is None:
        return None
    if "Tensor" in text.partition("from user code")[0] or "unbacked" in text.lower():
        has = "" if dynamic else ", and set compile.dynamic: true"
        return (
            f"the operator takes its lengths as list[int]: pass a list, not a Tensor{has}; a Tensor goes with dynamic: "
            "false, and only with an operator that has a Tensor argument"
        )
    return "pass the lengths as a flat list[int] with compile.dynamic: true, one number a row of the batch"


# Words of Dynamo's reasons, the kind of break, and what the guides say to do.
_BREAKS: Final = (
    (
        r"\.item\(|_local_scalar_dense|data.dependent (?:value|expr)|unbacked",
        "host-read",
        "keep the value a tensor, or pass it to the method as an argument; see docs/model-rules.md, rule 5",
    ),
    (
        r"generic_jump|Data-dependent branching|data-dependent (?:jump|assert)",
        "branch",
        "decide with torch.where, or pass a mode as an argument; see docs/model-rules.md, rule 6",
    ),
    (
        r"`?\bprint\b|logging\.|logger|LoggingLogger|\blogging function",
        "print",
        "take the output out of the method; see docs/model-rules.md, rule 11",
    ),
    (
        # npugraph_ex's own words for a size that only the values say (torch_npu 2.13).
        r"nonzero|dynamic (?:output )?shape|masked_select|boolean mask|unique|'ValuePack' and 'int'",
        "dynamic-shape",
        "keep shapes fixed: torch.where instead of a mask that selects; see docs/model-rules.md, rule 7",
    ),
    (
        # npugraph_ex's own words for a stream that is waited for (torch_npu 2.13).
        r"synchronize|\b[Ss]tream\b|\b[Ee]vent\b|unhashable type: 'dict'",
        "stream",
        "take the synchronisation out of the method; see docs/model-rules.md, rule 11",
    ),
    (
        r"backward|autograd|requires_grad",
        "backward",
        "graphs are for inference: requires_grad_(False), no backward in the method",
    ),
    (
        r"(?i)\brand|dropout|bernoulli|multinomial",
        "random",
        "draw outside and pass a tensor; see docs/model-rules.md, rule 10",
    ),
    (
        r"(?i)\bmeta\b|fake (?:impl|kernel|tensor)|no kernel",
        "no-meta",
        "give the operator a meta kernel (torch.library.register_fake), so that it can be traced",
    ),
)


def break_advice(text: str, line: str = "") -> tuple[str, str]:
    """Return the kind of a graph break and what to do, by Dynamo's reason and the line it names."""
    for pattern, kind, advice in _BREAKS:
        if re.search(pattern, text) or (line and kind in ("print", "host-read") and re.search(pattern, line)):
            return kind, advice
    return "graph-break", "rewrite what the text names so that Dynamo can trace it; see docs/model-rules.md"


# What the runtime warns of, the kind of finding, and what it means for a cache.
_NOTES: Final = (
    (
        r"mismatch between the cached CANN version",
        "static-kernel",
        "static kernels are of another CANN and are left out: build the cache anew on this CANN",
    ),
    (
        r"deterministic (?:configuration|level) has changed",
        "static-kernel",
        "static kernels were compiled under another determinism and are left out: set it as it was, or build anew",
    ),
    (
        r"cann_version and compile_cache_dir must be set",
        "static-kernel",
        "the cache doesn't say which CANN its static kernels are of: delete it and compile anew",
    ),
    (
        r"Permission denied.*\.run|\.run.*(?:Permission denied|install failed)",
        "static-kernel",
        "chmod u+x the .run file, or delete its folder",
    ),
    (
        r"skip\w* static kernel|LOCAL_WORLD_SIZE",
        "static-kernel",
        "set LOCAL_WORLD_SIZE as the launcher does: without it static kernels are skipped",
    ),
    (
        r"op_compiler error",
        "static-kernel",
        "compiling static kernels failed: see the rank's log, and whether CANN's op_compiler is installed",
    ),
    (
        r"capture_limit|[Cc]apture limit",
        "capture-limit",
        "each new shape or address is captured again, and beyond capture_limit all is eager: keep shapes and buffers",
    ),
    (
        r"Clear broken cache",
        "inert",
        "the runtime deleted what it could not load: keep the cache's owner, mode 0600 and torch_npu version",
    ),
    (r"Skip cache", "not-saved", "what the graph captures must be serialisable, and one case must be one graph"),
)


def runtime_notes(texts: Iterable[str]) -> list[dict[str, Any]]:
    """Return the findings in what the runtime warned of; what is not known here is not one."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        for pattern, kind, advice in _NOTES:
            if re.search(pattern, text):
                found.setdefault(one_line(text), finding(kind, text, advice))
                break
    return list(found.values())


# What a build's gates say, and the kind of finding it is here.
_REFUSALS: Final = (
    (r"^traced ", "recompile"),
    (r"^the runtime did not save|^holds a handle", "not-saved"),
    (r"^the runtime could not trace", "graph-break"),
    (r"^draws random numbers", "random"),
    (r" calls \.item\(\)", "host-read"),
    (r"^the step writes the parameter", "parameter-written"),
    (r"^a fresh process (?:does not load|has another key)", "inert"),
    (r"^(?:re)?loaded and eager differ|later call of the loaded artifact", "reload-differs"),
    (r" and eager differ | overwrites ", "differs"),
)


def refusal_kind(what: str) -> str:
    """Return the kind of a build's refusal, by its words without method and case."""
    return next((kind for pattern, kind in _REFUSALS if re.search(pattern, what)), "refused")


def value_advice(stage: str, rebound: Iterable[str]) -> str:
    """Return what to do where a stage's values differ from eager's; "" where another finding says it."""
    names = list(rebound)
    if names:
        return f"each step binds {', '.join(names[:3])} anew: write it in place with copy_ or add_"
    if stage == "aot_eager":
        return (
            "no backend ran yet: the model reads or writes something that a graph doesn't see (a view of an input, a "
            "value read at trace time); see docs/model-rules.md"
        )
    if stage == "force_eager":
        return (
            "the graph ran operator by operator, without options: look at decompositions, patterns and converters that "
            "compile.setup registers, and at operators whose meta kernel says another shape or dtype"
        )
    # Restoring the options one by one says more.
    return ""
