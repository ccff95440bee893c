"""What `cachectl check` finds: one finding, and the table of rules with how to write it instead.

Owns the rules' names and words, which both readers share: the one of source text (services/check*.py) and the one that
traces (build/checking*.py). Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from cachectl.errors import DocumentError

__all__ = ["RULES", "SEVERITIES", "STRIDED_OPERATORS", "CheckReport", "Finding", "Severity", "rule_finding"]

Severity = Literal["error", "warning", "advice"]
# The gravest first.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "advice")

# Operators that take views with gaps, by their vendor's documents (op-plugin, docs/context): each says so of all of its
# tensors. Most others are silent, or want contiguous ones.
STRIDED_OPERATORS = frozenset({"scatter_update", "scatter_update_", "npu_scatter_nd_update", "npu_scatter_nd_update_"})

# Rule: what it asks, and how to write the code instead.
RULES: dict[str, tuple[str, str]] = {
    "random-numbers": (
        "no random numbers in the graph",
        "draw outside of the method and pass the tensor in; take dropout out, or call model.eval() in the factory",
    ),
    "host-sync": (
        "no value of a tensor on the host",
        "keep it a tensor, take a constant of the configuration, or pass the number in as an argument",
    ),
    "tensor-branch": (
        "no Python branch on a tensor's value",
        "write torch.where(condition, one, other), or decide outside and pass the result in",
    ),
    "data-dependent-shape": (
        "no shape that depends on a tensor's values",
        "keep the whole tensor and mask it: torch.where(mask, values, 0)",
    ),
    "print": ("no print and no logging in the compiled path", "print outside, from what the method returns"),
    "grown-cache": (
        "the KV cache has one size",
        (
            "allocate it once at its largest as a buffer, and write in place: cache[rows, kv_len] = new, or "
            "torch.ops.npu.scatter_update_(cache, kv_len, new, -2)"
        ),
    ),
    "returned-cache": (
        "the KV cache is not returned",
        "it is written in place: return the logits only",
    ),
    "rebound-buffer": (
        "buffers and parameters keep their place",
        "write in place: self.name.copy_(new), .add_(…), .fill_(…)",
    ),
    "parameter-written": ("parameters don't change", "register what changes as a buffer, and write it in place"),
    "changed-attribute": (
        "no attribute that changes from step to step",
        "pass it in as an argument, a count as a tensor",
    ),
    "computed-positions": (
        "positions and row numbers are no work of the graph",
        "pass position_ids in, or register torch.arange(max_seq) as a buffer in __init__ and look it up",
    ),
    "shape-as-length": (
        "a sequence length is an argument",
        "pass actual_seq_lengths or kv_len in, or take a constant of the configuration",
    ),
    "computed-rotary": (
        "cos and sin are looked up",
        (
            "compute tables of all positions in __init__ as buffers; decode: torch.index_select(self.cos_cached, 0, "
            "positions); prefill: self.cos_cached[:tokens]"
        ),
    ),
    "large-mask": (
        "no mask of all positions by all positions",
        (
            "pass the lengths to the fused operator, or compare: self.slots < lengths[:, None]; register "
            "what is constant as a buffer"
        ),
    ),
    "prefill-flag": (
        "prefill and decode are two methods",
        "write prefill() for the eager path, and a method without the flag for decode",
    ),
    "compiled-prefill": (
        "prefill stays eager",
        "compile the decode method only: prompts differ in length, and each length would be another graph",
    ),
    "fused-attention": (
        "attention is one operator of the NPU",
        (
            "torch.ops.npu.npu_fused_infer_attention_score(query, key, value, actual_seq_lengths_kv=lengths, …): no "
            "scores and no mask in memory"
        ),
    ),
    "non-contiguous": (
        "operators get contiguous tensors",
        "call .contiguous() on it, or keep the data in the layout that the operator reads",
    ),
    "decorated-method": (
        "the method carries no decorator",
        "move what the decorator does into the caller: with torch.no_grad(): decode(x=x)",
    ),
    "not-a-method": (
        "what is compiled is a method of the model",
        "write it as a method of the torch.nn.Module, and pass model.main_decode",
    ),
    "several-traces": (
        "one method, one trace",
        "give each use a method of its own: main_decode for the model, mtp_decode for the draft",
    ),
    "stream-sync": ("no synchronisation in a graph", "synchronise outside, around the call"),
    "backward": (
        "inference only",
        "take it out of the compiled path; model.requires_grad_(False).eval() in the factory",
    ),
    "not-on-npu": (
        "model and tensors are on the NPU",
        "move the model before it is compiled: model.npu(), or .to(device) with a device from the configuration",
    ),
    "backend": (
        "a backend that the NPU has",
        'backend="npugraph_ex", or torchair.get_npu_backend(compiler_config=config)',
    ),
    "fullgraph": ("one whole graph", "fullgraph=True: a break is an error then, not a slower graph"),
    "fia-lengths": (
        "list[int] lengths with dynamic=True, a Tensor with dynamic=False",
        (
            "npugraph_ex: lengths as list[int] and dynamic: true; or an operator that takes them as a Tensor and "
            "dynamic: false"
        ),
    ),
    "dynamic": (
        "the program compiles as the recipe says",
        "pass dynamic= with the recipe's value; left out, cache_compile takes True and torch.compile decides by itself",
    ),
    "static-graph": (
        "a static graph where no list comes in",
        "compile: {dynamic: false}, enable_dynamic_graph: False in cann-recipes: the graph is reused more surely",
    ),
    "unknown-option": ("only options that the wheel has", "write its name as the installed torch_npu has it"),
    "option-value": ("only values that the option takes", "write a value that the installed torch_npu takes"),
    "forgotten-option": ("options that inference wants", "set it in compile.options"),
    "torch-version": ("PyTorch 2.6 or newer", "install torch>=2.6 with the torch_npu for it"),
    "triton-kernel": (
        "no Triton kernel in what is cached",
        "use the operator of torch_npu, or register the kernel as a custom operator with a meta function",
    ),
    "simulated-operator": (
        "operators that the simulation has",
        "build on an NPU (device: npu), or use operators of docs/simulation.md",
    ),
    "input-type": (
        "arguments are tensors, numbers, texts, enumerations and containers of them",
        "pass the tensors one by one, or a dataclass or a named tuple of them",
    ),
    "hash-order": (
        "no order of a set of texts, no hash() of a text",
        "write a tuple, or sorted(names): both change from process to process",
    ),
    # What tracing finds.
    "collectives": (
        "collectives are part of the graph",
        "name a function in compile.setup that calls torchair.patch_for_hcom()",
    ),
    "graph-break": (
        "one whole graph, without a break",
        "take what breaks it out of the method; TORCH_LOGS=graph_breaks shows each one",
    ),
    "recompile": (
        "one trace serves every step",
        (
            "pass what changes in as a tensor; list[int] lengths want dynamic: true; fixed shapes and still a "
            "recompile: torch.compiler.set_stance(skip_guard_eval_unsafe=True) after the first call"
        ),
    ),
    "no-meta-kernel": (
        "operators can be traced",
        "register a meta function: torch.library.register_fake(name)",
    ),
    "no-graph": (
        "the method computes something",
        "compile the method that calls the operators",
    ),
    "shared-input": (
        "no argument shares memory with one that the step writes",
        "pass the whole tensor once, and take the view inside of the method",
    ),
    "unseen": (
        "each method is looked at",
        "name the folder of the model's source in model.path, or check where torch and torch_npu are installed",
    ),
    "does-not-run": ("eager is right first", "let the method run eagerly with the recipe's inputs, then check again"),
    # Advice on the way.
    "mode": (
        "the runtime fits its purpose",
        "npugraph_ex for fast adaptation, compile.mode: ge_graph where maturity counts",
    ),
    "ladder": ("one step after another", "eager, then the graph, then accuracy, then the cache, then static kernels"),
}


@dataclass(frozen=True)
class Finding:
    """One place that breaks a rule.

    `path` is relative to the recipe's folder where the file lies below it, else as the reader found it; `line` counts
    from 1. Both are None for what no file says. `method` is the recipe's method that reaches the place.
    """

    rule: str
    severity: Severity
    path: str | None
    line: int | None
    what: str
    rewrite: str
    method: str | None = None

    def as_document(self) -> dict[str, Any]:
        """Return the finding as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Finding:
        """Read a finding. Raises DocumentError."""
        try:
            found = cls(**document)
        except TypeError as error:
            raise DocumentError(f"no finding: {error}") from error
        texts = (found.rule, found.what, found.rewrite)
        optional = (found.path, found.method)
        if (
            not all(isinstance(text, str) for text in texts)
            or not all(text is None or isinstance(text, str) for text in optional)
            or not (found.line is None or type(found.line) is int)
            or found.severity not in SEVERITIES
        ):
            raise DocumentError(f"no finding: {dict(document)!r}")
        return found


def rule_finding(
    rule: str,
    severity: Severity,
    what: str,
    *,
    path: str | None = None,
    line: int | None = None,
    rewrite: str | None = None,
    method: str | None = None,
) -> Finding:
    """Return a finding of a rule, with the rule's own rewrite where none is given."""
    return Finding(rule, severity, path, line, what, RULES[rule][1] if rewrite is None else rewrite, method)


@dataclass(frozen=True)
class CheckReport:
    """What a check came to.

    `traced` are the (method, case) pairs that were traced; `notes` say what was not looked at, and why.
    """

    findings: tuple[Finding, ...]
    traced: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def count(self, severity: Severity) -> int:
        """Return how many findings have this severity."""
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """1 with an error or a warning; advice is none of them."""
        return 1 if self.count("error") or self.count("warning") else 0

    def as_document(self) -> dict[str, Any]:
        """Return what --json prints."""
        return {
            "findings": [finding.as_document() for finding in self.findings],
            "errors": self.count("error"),
            "warnings": self.count("warning"),
            "advice": self.count("advice"),
            "traced": [list(pair) for pair in self.traced],
            "notes": list(self.notes),
        }
