"""Each rule of the source reader: the wrong form is found at its line, by that rule alone; the right one finds none."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from cachectl.schemas.check import RULES, Finding
from cachectl.services.check import check

MARK = "# here"
MODEL = """\
import logging
import math

import torch
import torch.nn.functional as F
import torch_npu
from torch import nn

logger = logging.getLogger(__name__)
STEPS = 0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("key_cache", torch.zeros(2, 8, 4))
        self.register_buffer("state", torch.zeros(2, 4))
        self.register_buffer("slots", torch.arange(8))
        self.register_buffer("cos_cached", torch.zeros(8, 4))
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 4, 2) / 4))
        self.past_key = torch.zeros(2, 1, 4)
        self.count = 0
        self.names = ("q", "k")
        self.max_seq = 8

%s


def build():
    return Model().requires_grad_(False)%s


def inputs(model, rank):
    return {%s}
"""
SIGNATURE = "def main_decode(self, x, position_ids, kv_len):\n"
INPUTS = {
    "x": "torch.ones(2, 1, 4)",
    "position_ids": "torch.zeros(2, 1, dtype=torch.long)",
    "kv_len": "torch.ones(2, dtype=torch.long)",
    "past_key": "torch.ones(2, 8, 4)",
    "past_key_values": "[torch.ones(2, 8, 4)]",
    "lens": "[3, 4]",
    "is_prefill": "False",
}


class Planted(NamedTuple):
    """A rule, its wrong form with the mark on the line, and the right one; both without the method's signature."""

    rule: str
    wrong: str
    right: str
    more: Mapping[str, Any] = MappingProxyType({})


TABLE = {
    "rand": Planted("random-numbers", "return x + torch.randn(4)  # here", "return x + 1"),
    "rand_like": Planted("random-numbers", "noise = torch.rand_like(x)  # here\nreturn x + noise", "return x"),
    "bernoulli method": Planted("random-numbers", "y = x.clone()\ny.bernoulli_(0.5)  # here\nreturn y", "return x"),
    "initialiser": Planted(
        "random-numbers",
        "nn.init.normal_(y := x.clone())  # here\nreturn y",
        "nn.init.zeros_(y := x.clone())\nreturn y",
    ),
    "functional dropout": Planted(
        "random-numbers", "return F.dropout(x, 0.1)  # here", "return F.dropout(x, 0.1, False)"
    ),
    "dropout of a model that trains": Planted(
        "random-numbers", "return self.drop(x)  # here", "return self.linear(x)", {"eval": ""}
    ),
    "attention that drops": Planted(
        "random-numbers",
        "return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)  # here",
        "return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1 if self.training else 0.0)",
    ),
    "multinomial": Planted(
        "random-numbers", "return torch.multinomial(x.softmax(-1), 1)  # here", "return x.argmax(-1)"
    ),
    "item": Planted("host-sync", "n = kv_len.max().item()  # here\nreturn x * n", "return x * self.max_seq"),
    "tolist": Planted("host-sync", "n = kv_len.tolist()  # here\nreturn x * n[0]", "return x * kv_len[0]"),
    "cpu": Planted("host-sync", "return x.cpu()  # here", "return x.contiguous()"),
    "numpy": Planted("host-sync", "y = x.detach().numpy()  # here\nreturn x", "return x.detach()"),
    "to cpu": Planted("host-sync", 'return x.to("cpu")  # here', "return x.to(self.weight.device)"),
    "int": Planted("host-sync", "n = int(kv_len[0])  # here\nreturn x * n", "return x * kv_len[0]"),
    "bool": Planted("host-sync", "flag = bool(x.sum() > 0)  # here\nreturn x", "return x"),
    "math": Planted("host-sync", "return x * math.sqrt(kv_len.sum())  # here", "return x * kv_len.sum().sqrt()"),
    "cut at a tensor": Planted(
        "host-sync", "return self.key_cache[:, : kv_len[0]].sum(1)  # here", "return self.key_cache[:, :4].sum(1)"
    ),
    "if": Planted(
        "tensor-branch", "if x.sum() > 0:  # here\n    x = x * 2\nreturn x", "return torch.where(x > 0, x * 2, x)"
    ),
    "while": Planted("tensor-branch", "while x.sum() < 9:  # here\n    x = x * 2\nreturn x", "return x * 2"),
    "assert": Planted(
        "tensor-branch",
        "assert (kv_len < 8).all()  # here\nreturn x",
        "assert x.dim() == 3 and x.shape[-1] == 4\nreturn x",
    ),
    "ternary": Planted("tensor-branch", "return x if kv_len.any() else -x  # here", "return x if self.count else -x"),
    "not": Planted("tensor-branch", "flag = not kv_len.any()  # here\nreturn x", "flag = not self.count\nreturn x"),
    "and": Planted("tensor-branch", "if self.count == 0 and x.max() > 1:  # here\n    x = -x\nreturn x", "return x"),
    "max of two": Planted("tensor-branch", "return max(x.sum(), kv_len.sum())  # here", "return torch.maximum(x, x)"),
    "nonzero": Planted("data-dependent-shape", "return x[0].nonzero()  # here", "return x.ne(0)"),
    "mask that selects": Planted("data-dependent-shape", "return x[x > 0]  # here", "return torch.where(x > 0, x, 0)"),
    "where with one": Planted("data-dependent-shape", "rows = torch.where(x > 0)  # here\nreturn x", "return x"),
    "print": Planted("print", "print(x.shape)  # here\nreturn x", "return x"),
    "logger": Planted("print", 'logger.info("step")  # here\nreturn x', "return x"),
    "logging": Planted("print", 'logging.warning("step")  # here\nreturn x', "return x"),
    "cache that grows": Planted(
        "grown-cache",
        "self.past_key = torch.cat((self.past_key, x), dim=1)  # here\nreturn self.past_key.sum(1)",
        "self.key_cache[:, 0] = x[:, 0]\nreturn self.key_cache.sum(1)",
    ),
    "cache that is passed in and grows": Planted(
        "grown-cache",
        "key = torch.cat([past_key, x], dim=1)  # here\nreturn key.sum(1)",
        "past_key[:, 0] = x[:, 0]\nreturn past_key.sum(1)",
        {
            "signature": "def main_decode(self, x, past_key: torch.Tensor):\n",
        },
    ),
    "list that grows": Planted(
        "grown-cache",
        "self.keys.append(x)  # here\nreturn x",
        "keys = []\nkeys.append(x)\nreturn keys[0]",
        {"init": "self.keys = []"},
    ),
    "cache returned": Planted(
        "returned-cache",
        "self.key_cache[:, 0] = x[:, 0]\nreturn x, self.key_cache  # here",
        "self.key_cache[:, 0] = x[:, 0]\nreturn x",
    ),
    "cache returned in a dict": Planted(
        "returned-cache",
        'self.key_cache[:, 0] = x[:, 0]\nreturn {"logits": x, "past_key_values": (self.key_cache,)}  # here',
        'self.key_cache[:, 0] = x[:, 0]\nreturn {"logits": x, "past_key_values": None}',
    ),
    "cache returned in a record": Planted(
        "returned-cache",
        "past = [self.key_cache]\nreturn CausalLMOutput(logits=x, past_key_values=past)  # here",
        "return CausalLMOutput(logits=x, past_key_values=None)",
        {"head": "from transformers.modeling_outputs import CausalLMOutput"},
    ),
    "cache passed in and returned": Planted(
        "returned-cache",
        "return x, past_key_values  # here",
        "return x + past_key_values[0]",
        {
            "signature": "def main_decode(self, x, past_key_values: list[torch.Tensor]):\n",
        },
    ),
    "buffer bound anew": Planted(
        "rebound-buffer",
        "self.state = self.state + x[:, 0]  # here\nreturn self.state",
        "self.state.add_(x[:, 0])\nreturn x",
    ),
    "tensor of an attribute bound anew": Planted(
        "rebound-buffer", "self.past_key = x * 2  # here\nreturn x", "self.past_key.copy_(x * 2)\nreturn x"
    ),
    "data bound anew": Planted(
        "rebound-buffer", "self.state.data = x[:, 0]  # here\nreturn x", "self.state.copy_(x[:, 0])\nreturn x"
    ),
    "parameter bound anew": Planted(
        "rebound-buffer", "self.linear.weight = self.weight  # here\nreturn self.linear(x)", "return self.linear(x)"
    ),
    "parameter written": Planted(
        "parameter-written", "self.weight.mul_(2)  # here\nreturn x * self.weight", "return x * self.weight"
    ),
    "counter": Planted(
        "changed-attribute", "self.count += 1  # here\nreturn x * self.count", "return x * kv_len[:, None, None]"
    ),
    "global counter": Planted("changed-attribute", "global STEPS\nSTEPS += 1  # here\nreturn x", "return x * STEPS"),
    "arange": Planted(
        "computed-positions",
        "rows = torch.arange(8)  # here\nreturn x + self.key_cache[:, rows].sum(1)",
        "return x + self.key_cache[:, self.slots].sum(1)",
    ),
    "size of a sequence": Planted(
        "shape-as-length",
        "seq_len = x.size(1)  # here\nreturn x + self.cos_cached[:seq_len]",
        "return x + torch.index_select(self.cos_cached, 0, position_ids.view(-1))[:, None]",
    ),
    "shape of a sequence": Planted(
        "shape-as-length",
        "cos = self.cos_cached[: x.shape[1]]  # here\nreturn x + cos",
        "batch, length, dim = x.shape\nreturn x.view(batch, length, 2, dim // 2).flatten(2)",
    ),
    "unpacked shape": Planted(
        "shape-as-length",
        "batch, q_len, _ = x.shape  # here\nreturn x + self.cos_cached[:q_len]",
        "batch, q_len, _ = x.shape\nreturn x.reshape(batch, q_len, -1)",
    ),
    "rotary computed": Planted(
        "computed-rotary",
        "angles = position_ids[..., None] * self.inv_freq\nreturn x * torch.cat((angles, angles), -1).cos()  # here",
        "return x * torch.index_select(self.cos_cached, 0, position_ids.view(-1))[:, None]",
    ),
    "triangle": Planted(
        "large-mask",
        "mask = torch.ones(8, 8).tril()  # here\nreturn x + mask[0, :4]",
        "return x + (self.slots < kv_len[:, None])[:, :4]",
    ),
    "full mask": Planted(
        "large-mask",
        "seq = self.max_seq\nmask = torch.full((2, 1, seq, seq), -1.0)  # here\nreturn x + mask[0, 0, 0, :4]",
        "return x + torch.full((2, 1, 4), -1.0)",
    ),
    "flag for prefill": Planted(
        "prefill-flag",
        "if is_prefill:  # here\n    x = x + torch.arange(4)\nreturn x",
        "return self.step(x, is_prefill=False)\n\ndef step(self, x, is_prefill):\n"
        "    if is_prefill:\n        return x + torch.arange(4)\n    return x",
        {
            "signature": "def main_decode(self, x, is_prefill=False):\n",
            "right_signature": "def main_decode(self, x):\n",
        },
    ),
    "flag for prefill, not asked": Planted(
        "prefill-flag",
        "return self.linear(x)",
        "return self.linear(x)",
        {
            "signature": "def main_decode(self, x, is_prefill=False):  # here\n",
            "right_signature": "def main_decode(self, x):\n",
        },
    ),
    "slice into an operator": Planted(
        "non-contiguous",
        "return torch_npu.npu_swiglu(x[..., :2])  # here",
        "torch_npu.scatter_update_(self.key_cache, kv_len, x[..., :2], -2)\n"
        "return torch_npu.npu_swiglu(x[..., :2].contiguous())",
    ),
    "decorated": Planted(
        "decorated-method",
        "return x",
        "with torch.no_grad():\n    return x",
        {
            "signature": "@torch.no_grad()  # here\ndef main_decode(self, x):\n",
            "right_signature": "def main_decode(self, x):\n",
        },
    ),
    "static method": Planted(
        "not-a-method",
        "return x",
        "return x",
        {"signature": "@staticmethod  # here\ndef main_decode(x):\n", "right_signature": "def main_decode(self, x):\n"},
    ),
    "synchronize": Planted("stream-sync", "torch.npu.synchronize()  # here\nreturn x", "return x"),
    "synchronize a stream": Planted(
        "stream-sync",
        "stream = torch.npu.current_stream()\nstream.synchronize()  # here\nreturn x",
        "stream = torch.npu.current_stream()\nstream.wait_event(torch.npu.Event())\nreturn x",
    ),
    "backward": Planted("backward", "x.sum().backward()  # here\nreturn x", "return x"),
    "gradients": Planted("backward", "x.requires_grad_(True)  # here\nreturn x", "x.requires_grad_(False)\nreturn x"),
    "cuda": Planted("not-on-npu", "return x.cuda()  # here", "return x"),
    "loop over a set": Planted(
        "hash-order",
        'for name in {"q", "k"}:  # here\n    x = x + len(name)\nreturn x',
        "for name in self.names:\n    x = x + len(name)\nreturn x",
    ),
    "no reference": Planted(
        "simulated-operator", "return torch_npu.npu_geglu(x)[0]  # here", "return torch_npu.npu_swiglu(x)"
    ),
    "triton": Planted(
        "triton-kernel",
        "add[(1,)](x, 4)  # here\nreturn x",
        "return x + 4",
        {"head": "import triton\n\n\n@triton.jit\ndef add(x, n):\n    pass\n"},
    ),
    "break of the graph": Planted("graph-break", "torch._dynamo.graph_break()  # here\nreturn x", "return x"),
    "lengths as a list, static": Planted(
        "fia-lengths",
        "return torch_npu.npu_fused_infer_attention_score(x, x, x, actual_seq_lengths_kv=lens)[0]  # here",
        "return torch_npu.npu_fused_infer_attention_score(x, x, x, atten_mask=self.slots < kv_len[:, None])[0]",
        {
            "signature": "def main_decode(self, x, lens: list[int]):\n",
            "right_signature": "def main_decode(self, x, kv_len):\n",
        },
    ),
    "lengths as a tensor, to an operator of lists": Planted(
        "fia-lengths",
        "return torch_npu.npu_incre_flash_attention(x, x, x, actual_seq_lengths=kv_len + 1)  # here",
        "return torch_npu.npu_incre_flash_attention(x, x, x)",
    ),
    "lengths as a tensor, dynamic": Planted(
        "fia-lengths",
        "return torch_npu.npu_fused_infer_attention_score(x, x, x, actual_seq_lengths_kv=kv_len)[0]  # here",
        "return torch_npu.npu_fused_infer_attention_score(x, x, x, actual_seq_lengths_kv=lens)[0]",
        {
            "signature": "def main_decode(self, x, lens: list[int], kv_len=None):\n",
            "dynamic": True,
        },
    ),
}


def written(folder: Path, planted: Planted, *, right: bool) -> tuple[Path, int | None]:
    """Write a model and its recipe; return the recipe and the marked line."""
    more = planted.more
    signature = more.get("signature", SIGNATURE)
    if right:
        signature = more.get("right_signature", signature)
    body = textwrap.indent(signature, "    ") + textwrap.indent(planted.right if right else planted.wrong, " " * 8)
    if "\n\ndef " in (planted.right if right else ""):
        first, _, rest = planted.right.partition("\n\ndef ")
        body = textwrap.indent(signature, "    ") + textwrap.indent(first, " " * 8)
        body += "\n\n" + textwrap.indent(f"def {rest}", "    ")
    taken = [name for name in INPUTS if re.search(rf"\b{name}\b", signature)]
    inputs = ", ".join(f'"{name}": {INPUTS[name]}' for name in taken)
    text = MODEL % (body, more.get("eval", ".eval()"), inputs)
    text = text.replace(
        "        self.max_seq = 8", f"        self.max_seq = 8\n        {more.get('init', '')}".rstrip()
    )
    text = text.replace("\n\nclass Model", f"\n\n{more.get('head', '')}\n\nclass Model", 1)
    (folder / "model.py").write_text(text)
    lines = [number for number, line in enumerate(text.splitlines(), 1) if MARK in line]
    recipe = {
        "schema": "cachectl/recipe/v1",
        "name": "planted",
        "device": "simulated",
        "model": {"factory": "model:build", "path": ["."]},
        "compile": {"dynamic": more.get("dynamic", False), "options": {"frozen_parameter": True}},
        "functions": [{"method": "main_decode", "cases": [{"name": "one", "inputs": "model:inputs"}]}],
        "environment": {"TASK_QUEUE_ENABLE": "1"},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder / "recipe.yaml", lines[0] if lines else None


def graver(findings: tuple[Finding, ...]) -> list[tuple[str, str | None, int | None]]:
    return [(item.rule, item.path, item.line) for item in findings if item.severity != "advice"]


@pytest.mark.parametrize("name", TABLE)
def test_planted_violation_is_found_at_its_line_by_its_rule_alone(name: str, tmp_path: Path) -> None:
    """The wrong form of a rule gives one finding, with the rule's own rewrite."""
    planted = TABLE[name]
    recipe, line = written(tmp_path, planted, right=False)

    report = check(recipe, traces=False, search_path=[])

    assert [(planted.rule, "model.py", line)] == graver(report.findings)
    assert all(item.rewrite for item in report.findings)
    assert 1 == report.exit_code


@pytest.mark.parametrize("name", TABLE)
def test_rewritten_form_finds_nothing(name: str, tmp_path: Path) -> None:
    """What a finding says to write instead is found good."""
    recipe, _ = written(tmp_path, TABLE[name], right=True)

    report = check(recipe, traces=False, search_path=[])

    assert [] == graver(report.findings)
    assert 0 == report.exit_code


def test_every_rule_has_its_words() -> None:
    """A rule without a text or a rewrite would print an empty line."""
    assert all(rule and rewrite for rule, rewrite in RULES.values())
    assert {planted.rule for planted in TABLE.values()} <= RULES.keys()
