"""Names what in an artifact ties it to a place, a process or chance, or runs code when it is loaded.

Owns the kinds of findings and their search in what the other readers made; it reads no bytes itself and judges
nothing: whether a finding matters here (a device index on a machine with one device) is the caller's to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from cachectl.runtimes.artifact.generated import GeneratedCode
from cachectl.runtimes.artifact.marshalled import CodeSummary
from cachectl.runtimes.artifact.signature import Signature, operators

__all__ = ["FINDING_KINDS", "Finding", "find_dangers", "group_names"]

# Each kind and what it means; the order is the order of a report.
FINDING_KINDS: Final = {
    "compiled-functions": "the runtime loads code with exactly one compiled function",
    "foreign-bytecode": "the bytecode is of no CPython minor this program knows",
    "unexpected-import": "loading imports a module the runtimes' code generators do not name",
    "user-class": "loading looks a class up by name and makes it a constant",
    "closure": "free variables are filled from the live function, unguarded",
    "device-index": "a device number is written into the code; another local rank needs another",
    "process-group": "a communication group's name or rank list is written into the code",
    "process-handle": "a number that means something only in the process that compiled",
    "random": "an operator draws random numbers",
    "tensor-constant": "a tensor's values are part of the artifact",
    "embedded-pickle": "loading unpickles bytes that the runtime's allow-list does not cover",
    "embedded-graph": "a serialised graph is part of the artifact",
    "static-kernel": "static kernels are bound to this CANN and deterministic setting",
    "absolute-path": "a path of the machine that built it",
    "unread-signature": "the signature text is not in the known form, or holds inputs in none",
}

_PATH: Final = re.compile(r"""["']((?:/[^/"'\s]+)+/?)["']""")
_SOURCE_FILE: Final = re.compile(r"^[ \t]*# File: (/.+?):\d+ in ", re.MULTILINE)
_DEVICE_TEXT: Final = re.compile(r"""["']((?:npu|privateuseone|cuda):\d{1,9})["']""")
_DEVICE_CALL: Final = re.compile(r"\bdevice\(type='(npu|privateuseone|cuda)', index=(\d{1,9})\)")
_DEVICE_FIELD: Final = re.compile(r"['\"]device_index['\"]: (\d{1,9})")
_CALL: Final = re.compile(r"\btorch\.ops\.([A-Za-z_][\w.]{0,200})\(([^;]*)")
_COLLECTIVE: Final = re.compile(
    r"c10d|npu_define|hcom|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast_|moe_distribute|\bsend\b|\brecv\b"
)
_QUOTED: Final = re.compile(r"'([^']*)'")
_NUMBERS: Final = re.compile(r"\[\d{1,9}(?:, \d{1,9})*\]")
_REDUCTIONS: Final = frozenset({"sum", "avg", "mean", "max", "min", "product", "band", "bor", "bxor", ""})
_USED_GROUPS: Final = re.compile(r"^\s*used_process_group = (\{.+\})$")
_HANDLE: Final = re.compile(
    r"\b(\w{0,80}wrapper\w{0,80}(?:\.\w{1,80}){0,3})\([^;]{0,200}?\b(\w{0,40}idx) ?= ?(\d{1,9})"
)
_OBJECT_HANDLE: Final = re.compile(r"\b(get_external_object_by_index)\((\d{1,9})\)")
_RANDOM: Final = re.compile(
    r"(?:^|[._])(?:rand|randn|randint|randperm|rand_like|randn_like|randint_like|dropout|dropout_v\d|bernoulli|"
    r"multinomial|normal|normal_functional|uniform|exponential|geometric|log_normal|cauchy|random|philox\w*)_?(?:\.|$)"
)
_EXPECTED_IMPORTS: Final = ("collections", "npugraph_ex", "numpy", "os", "threading", "torch", "torch_npu", "torchair")
_TEXT_LIMIT: Final = 400
_FINDINGS_PER_KIND: Final = 50


@dataclass(frozen=True)
class Finding:
    """One danger: a kind of FINDING_KINDS, the part that holds it, the text found, and how often.

    `where` is compiled_fn, py_code or signature. `detail` is at most 400 characters, as found but for control
    characters, which are written as escapes.
    """

    kind: str
    where: str
    detail: str
    count: int = 1


def find_dangers(
    code: CodeSummary, signature: Signature, signature_text: str, generated: GeneratedCode
) -> tuple[Finding, ...]:
    """Return the findings in order of kind, at most 50 of a kind, equal ones counted together."""
    counts: dict[tuple[str, str, str], int] = {}
    per_kind: dict[str, int] = {}
    found = chain(_in_bytecode(code), _in_signature(signature, signature_text), _in_generated(generated))
    for kind, where, detail in found:
        item = (kind, where, _printable(detail))
        if item not in counts:
            if per_kind.get(kind, 0) >= _FINDINGS_PER_KIND:
                continue
            per_kind[kind] = per_kind.get(kind, 0) + 1
        counts[item] = counts.get(item, 0) + 1
    order = list(FINDING_KINDS)
    findings = [Finding(kind, where, detail, count) for (kind, where, detail), count in counts.items()]
    return tuple(sorted(findings, key=lambda finding: (order.index(finding.kind), finding.where, finding.detail)))


def group_names(generated: GeneratedCode) -> tuple[str, ...]:
    """Return the texts by which collectives of the generated code may name their groups, sorted, all of them."""
    found: set[str] = set()
    for line in generated.live:
        if (call := _CALL.search(line)) and _COLLECTIVE.search(call[1]):
            found.update(_QUOTED.findall(call[2]))
        elif used := _USED_GROUPS.match(line):
            found.update(_QUOTED.findall(used[1]))
    return tuple(sorted(found - _REDUCTIONS))


def _in_bytecode(code: CodeSummary) -> Iterator[tuple[str, str, str]]:
    where = "compiled_fn"
    if len(code.compiled_functions) != 1:
        yield "compiled-functions", where, f"{len(code.compiled_functions)} compiled functions"
    if not code.minors:
        yield "foreign-bytecode", where, "no known instruction set fits"
    for name in _unexpected(code.imports):
        yield "unexpected-import", where, name
    for name in code.user_classes:
        yield "user-class", where, name.replace("|", ".", 1)
    for name in code.free_variables:
        yield "closure", where, name
    for device in code.devices:
        yield "device-index", where, device
    if code.filename.startswith("/"):
        yield "absolute-path", where, code.filename


def _in_signature(signature: Signature, text: str) -> Iterator[tuple[str, str, str]]:
    where = "signature"
    if not signature.complete:
        read = f"{len(signature.inputs)} inputs and {len(signature.options)} options were read"
        yield "unread-signature", where, read
    for match in _SOURCE_FILE.finditer(text):
        yield "absolute-path", where, match[1]
    for spec in signature.inputs:
        if spec.device is not None and ":" in spec.device:
            yield "device-index", where, spec.device


def _in_generated(generated: GeneratedCode) -> Iterator[tuple[str, str, str]]:
    where = "py_code"
    for name in _unexpected(generated.imports):
        yield "unexpected-import", where, name
    for name, size_bytes in generated.serialized.items():
        if name == "serialized_gm":
            yield "embedded-pickle", where, f"{name}, {size_bytes} characters"
        else:
            yield "embedded-graph", where, f"{name}, {size_bytes} characters"
    for name in generated.tensor_constants:
        yield "tensor-constant", where, name
    for name, value in generated.settings.items():
        # npugraph_ex and torchair name the same settings differently; an empty CANN version compares equal to another.
        if re.search(r"static_(?:shape_)?kernel\w{0,20}\.(?:cann_version|deterministic\w*)$", name):
            yield "static-kernel", where, f"{name}={value}"
    for line in generated.live:
        yield from _in_line(line, where)


def _in_line(line: str, where: str) -> Iterator[tuple[str, str, str]]:
    for match in _PATH.finditer(line):
        yield "absolute-path", where, match[1]
    for match in _DEVICE_TEXT.finditer(line):
        yield "device-index", where, match[1]
    for match in _DEVICE_CALL.finditer(line):
        yield "device-index", where, f"{match[1]}:{match[2]}"
    for match in _DEVICE_FIELD.finditer(line):
        yield "device-index", where, f"device_index {match[1]}"
    for match in _HANDLE.finditer(line):
        yield "process-handle", where, f"{match[1]}({match[2]}={match[3]})"
    for match in _OBJECT_HANDLE.finditer(line):
        yield "process-handle", where, f"{match[1]}({match[2]})"
    if used := _USED_GROUPS.match(line):
        yield "process-group", where, used[1]
    for name, count in operators(line).items():
        if _RANDOM.search(name):
            for _ in range(count):
                yield "random", where, name
    if call := _CALL.search(line):
        name, arguments = call.groups()
        if _COLLECTIVE.search(name):
            groups = [text for text in _QUOTED.findall(arguments) if text not in _REDUCTIONS]
            said = [repr(text) for text in groups] + _NUMBERS.findall(arguments)
            if said:
                yield "process-group", where, f"{name}: {', '.join(said)}"


def _unexpected(modules: Iterable[str]) -> Iterator[str]:
    return (name for name in modules if name.split(".", 1)[0] not in _EXPECTED_IMPORTS)


def _printable(text: str) -> str:
    if len(text) > _TEXT_LIMIT:
        text = f"{text[: _TEXT_LIMIT - 1]}…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
