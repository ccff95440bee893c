"""The rules of a compiled method on what the NPU does: its operators, their lengths, where tensors are.

Owns the table of attention lengths and `dynamic`. Facts: torch_npu 2.13's documentation of its operators.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from cachectl.schemas.check import STRIDED_OPERATORS
from cachectl.services.checks.calls import CallReader
from cachectl.services.checks.state_rules import Findings, StateRules, text_of
from cachectl.services.checks.values import (
    NONE,
    Const,
    Dim,
    Ext,
    Func,
    Seq,
    Tensor,
    Value,
    alternatives,
    words,
)
from cachectl.services.checks.watcher import Frame

__all__ = ["NpuRules", "Setting"]

_FIA = words(
    "npu_fused_infer_attention_score npu_fused_infer_attention_score_v2 npu_incre_flash_attention "
    "npu_prompt_flash_attention npu_fused_infer_attention_score_v3 npu_fused_infer_attention_score.out"
)

# Those of torch_npu whose lengths are list[int] and nothing else (torch_npu 2.13, their schemas).
_LISTS_ONLY = words(
    "npu_fused_infer_attention_score npu_fused_infer_attention_score_v2 npu_incre_flash_attention "
    "npu_prompt_flash_attention"
)

_LENGTH_ARGUMENTS = words(
    "actual_seq_lengths actual_seq_lengths_kv actual_seq_qlen actual_seq_kvlen actual_seq_lengths_q"
)


@dataclass(frozen=True)
class Setting:
    """What the rules have to know of the recipe: how it compiles, where it runs, and what of the model is known.

    `references` are the operators that the simulation has; None where it is not what runs. `trains` is whether a module
    trains that the factory says nothing of; `marked` whether something calls torch._dynamo.mark_static.
    """

    mode: str = "npugraph_ex"
    dynamic: bool = False
    on_npu: bool = False
    references: Collection[str] | None = None
    trains: bool = False
    marked: bool = False


class NpuRules(StateRules):
    """Rules on the NPU's operators and devices."""

    def __init__(self, findings: Findings, setting: Setting) -> None:
        super().__init__(findings)
        self.setting = setting
        self.reader: CallReader | None = None
        # FIA's length arguments met, by what they are: for the recipe's advice.
        self.lengths: set[str] = set()
        self._turned: set[int] = set()

    def lengths_in(self, frame: Frame, value: Value, how: str) -> None:
        for member in alternatives(value):
            if isinstance(member, Dim):
                self.length_used(frame, member, how)
            elif isinstance(member, Seq):
                for item in member.items if member.items is not None else (member.element,):
                    self.lengths_in(frame, item, how)

    def foreign_place(
        self,
        frame: Frame,
        node: ast.Call,
        kwargs: Mapping[str, Value],
        args: Collection[Value] = (),
        name: str = "",
    ) -> None:
        """Report what moves a tensor off the NPU: to CUDA, or to the CPU."""
        places = [value.value for value in (*args, *kwargs.values()) if isinstance(value, Const) and not value.given]
        texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
        if name == "cuda" or any(isinstance(place, str) and place.startswith("cuda") for place in places):
            self.report(frame, node, "not-on-npu", "error", f"`{text_of(node)}` names CUDA")
        elif name == "to" and "cpu" in places and "cpu" in texts:
            self.report(frame, node, "host-sync", "error", f"`{text_of(node)}` reads a tensor on the host")

    def npu_operator(
        self, frame: Frame, node: ast.Call, operator: str, args: list[Value], kwargs: Mapping[str, Value]
    ) -> None:
        sources = [*node.args, *(keyword.value for keyword in node.keywords)]
        values = [*args, *(kwargs.get(keyword.arg or "") for keyword in node.keywords)]
        for source, value in zip(sources, values, strict=False):
            for member in alternatives(value):
                if isinstance(member, Tensor) and member.sliced and operator not in STRIDED_OPERATORS:
                    what = f"`{text_of(source)}`, {member.sliced}, goes into {operator}"
                    self.report(frame, node, "non-contiguous", "warning", what)
        if operator in _FIA or any(name in _LENGTH_ARGUMENTS for name in kwargs):
            for name in sorted(_LENGTH_ARGUMENTS & kwargs.keys()):
                self._fia_lengths(frame, node, operator, name, kwargs[name], lists_only=operator in _LISTS_ONLY)
        known = self.setting.references
        if known is not None and operator not in known:
            what = f"{operator} has no reference in the simulation"
            self.report(frame, node, "simulated-operator", "error", what)

    def torchair_operator(self, frame: Frame, node: ast.Call, operator: str, kwargs: Mapping[str, Value]) -> None:
        """Look at a call of torchair's own operators, which are GE's."""
        # Where a configuration that isn't known chooses between torch_npu's and torchair's, it will know the mode.
        if operator not in _FIA or (self.reader is not None and self.reader.choices > 1):
            return
        if self.setting.mode == "npugraph_ex":
            what = f"torchair's {operator} is what GE alone can run"
            rewrite = f"torch_npu.{operator}, with list[int] lengths and dynamic: true"
            self.report(frame, node, "fia-lengths", "error", what, rewrite)
            return
        for name in sorted(_LENGTH_ARGUMENTS & kwargs.keys()):
            self._fia_lengths(frame, node, operator, name, kwargs[name])

    def _fia_lengths(
        self, frame: Frame, node: ast.Call, operator: str, name: str, value: Value, *, lists_only: bool = False
    ) -> None:
        self.lengths_in(frame, value, f"as {name} of {operator}")
        if NONE in alternatives(value):
            return  # None or lengths: which, the call says, and it isn't known.
        dynamic, mode = self.setting.dynamic, self.setting.mode
        kinds = {kind for member in alternatives(value) if (kind := _length_kind(member)) is not None}
        self.lengths |= kinds
        if kinds == {"list"}:
            if mode == "ge_graph" and not (dynamic and self.setting.marked):
                what = f"{name} is a list[int] of torch_npu's {operator} under GE"
                rewrite = (
                    "torchair.ops' operator with a Tensor and dynamic: false; if the list has to stay, dynamic: true "
                    "and torch._dynamo.mark_static for every tensor whose shape is fixed"
                )
                self.report(frame, node, "fia-lengths", "warning" if dynamic else "error", what, rewrite)
            elif mode == "npugraph_ex" and not dynamic:
                what = f"{name} is a list[int], and dynamic is false: each step's values are another graph"
                self.report(frame, node, "fia-lengths", "error", what)
        elif kinds == {"tensor"} and lists_only:
            what = f"{name} is a Tensor, and torch_npu's {operator} takes list[int]"
            rewrite = (
                "lengths as list[int], with dynamic: true"
                if mode == "npugraph_ex"
                else "torchair.ops' operator, which takes a Tensor, with dynamic: false"
            )
            self.report(frame, node, "fia-lengths", "error", what, rewrite)
        elif kinds == {"tensor"} and dynamic:
            what = f"{name} is a Tensor, and dynamic is true"
            rewrite = "dynamic: false; the lengths are read on the device, and the graph stays one"
            self.report(frame, node, "fia-lengths", "warning", what, rewrite)

    def entered(self, frame: Frame, node: ast.AST, func: Func) -> None:
        if self.reader is None:
            return
        for mark in func.decorators:
            value = self.reader.quietly(
                mark.func if isinstance(mark, ast.Call) else mark, self.reader.module_frame(func.module)
            )
            path = value.path if isinstance(value, Ext) else ""
            if path in ("torch.compiler.disable", "torch._dynamo.disable", "torch._disable_dynamo"):
                self.report(frame, node, "graph-break", "error", f"{func.name} is decorated with {path}")


def _length_kind(value: Value) -> str | None:
    """Return `list` or `tensor` for lengths that change; a list of constants is none of them."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, Seq):
        items = value.items if value.items is not None else (value.element,)
        if all(isinstance(item, Dim) or (isinstance(item, Const) and not item.given) for item in items):
            return None  # The same at every step, as long as the shapes are.
        return "list"
    return None
