"""Forms that one rule is broken in, as people write them: each is found by that rule, and by no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachectl.services.check import check
from tests.services.test_check_rules import Planted, written

# Rule, and the method's body; x and kv_len are tensors, self has buffers, a parameter and a cache.
FORMS = [
    ("random-numbers", "import numpy as np\nreturn x * np.random.rand()"),
    ("random-numbers", "import random\nreturn x * random.random()"),
    ("random-numbers", "return torch.empty(4).normal_() + x"),
    ("random-numbers", "return torch.distributions.Normal(0, 1).sample() + x"),
    ("random-numbers", "return F.dropout(x, p=0.1, training=True)"),
    ("random-numbers", "return x[:, :, torch.randperm(4)]"),
    ("random-numbers", "torch.manual_seed(0)\nreturn x"),
    ("host-sync", "return x * float(x.max())"),
    ("host-sync", "import numpy as np\ny = np.asarray(x)\nreturn x"),
    ("host-sync", "n = torch.Tensor.item(x.sum())\nreturn x"),
    ("tensor-branch", "if x.sum().is_nonzero(): x = -x\nreturn x"),
    ("host-sync", "for i in range(kv_len.max()): x = x + i\nreturn x"),
    ("host-sync", "n = kv_len.max().int().item()\nreturn x"),
    ("host-sync", "return x.narrow(1, 0, kv_len[0])"),
    ("tensor-branch", "while (x > 0).any(): x = x - 1\nreturn x"),
    ("tensor-branch", "assert x.min() >= 0, 'bad'\nreturn x"),
    ("tensor-branch", "if torch.any(x > 0): x = -x\nreturn x"),
    ("tensor-branch", "if torch.all(torch.isfinite(x)): x = -x\nreturn x"),
    ("tensor-branch", "if kv_len[0] == 1: x = -x\nreturn x"),
    ("tensor-branch", "return sum([y for y in (x, x) if y.sum() > 0])"),
    ("tensor-branch", "if any(y.sum() > 0 for y in (x, x)): x = -x\nreturn x"),
    ("tensor-branch", "if kv_len.max() > self.max_seq: raise ValueError('too long')\nreturn x"),
    ("host-sync", "if torch.equal(x, x): x = -x\nreturn x"),
    ("tensor-branch", "if x.sum() > 0 or self.count: x = -x\nreturn x"),
    ("tensor-branch", "x = x * (2 if kv_len.sum() > 3 else 1)\nreturn x"),
    ("print", "logging.getLogger(__name__).info('x')\nreturn x"),
    ("print", "import sys\nsys.stdout.write('x')\nreturn x"),
    ("print", "import sys\nsys.stderr.write('x')\nreturn x"),
    ("print", "import warnings\nwarnings.warn('x')\nreturn x"),
    ("print", "from pprint import pprint\npprint(x)\nreturn x"),
    ("grown-cache", "self.past_key = torch.concat([self.past_key, x], 1)\nreturn x"),
    ("grown-cache", "self.past_key = torch.hstack((self.past_key, x))\nreturn x"),
    ("rebound-buffer", "self.key_cache = F.pad(self.key_cache, (0, 0, 0, 1))\nreturn x"),
    ("rebound-buffer", "setattr(self, 'state', x[:, 0])\nreturn x"),
    ("rebound-buffer", "self._buffers['state'] = x[:, 0]\nreturn x"),
    ("rebound-buffer", "self.weight = nn.Parameter(x[0, 0])\nreturn x"),
    ("rebound-buffer", "self.state.set_(x[:, 0])\nreturn x"),
    ("rebound-buffer", "self.state, self.past_key = x[:, 0], x\nreturn x"),
    ("computed-positions", "y = torch.arange(0, kv_len.shape[0])\nreturn x"),
    ("computed-positions", "y = torch.linspace(0, 1, 4)\nreturn x + y"),
    ("shape-as-length", "seq_len = position_ids.shape[-1]\nreturn x + self.cos_cached[:seq_len]"),
    ("shape-as-length", "_, n = position_ids.shape\nreturn x + self.cos_cached[:n]"),
    ("shape-as-length", "seq_len = x.size(1)\nreturn x * seq_len"),
    (
        "computed-rotary",
        (
            "freqs = torch.outer(position_ids.view(-1).float(), self.inv_freq)\n"
            "return x * torch.cat((freqs, freqs), -1).cos()[:, None]"
        ),
    ),
    (
        "computed-rotary",
        (
            "freqs = torch.einsum('bi,j->bij', position_ids.float(), self.inv_freq)\n"
            "return x * torch.cat((freqs.sin(), freqs.cos()), -1)"
        ),
    ),
    (
        "computed-rotary",
        (
            "freqs = torch.outer(position_ids.view(-1).float(), self.inv_freq)\n"
            "return torch.view_as_real(torch.polar(torch.ones_like(freqs), freqs)).flatten(1)[:, None] * x"
        ),
    ),
    ("large-mask", "s = self.max_seq\nreturn x + torch.triu(torch.full((s, s), -1.0), 1)[0, :4]"),
    ("large-mask", "seq_len = self.max_seq\nm = torch.ones((seq_len, seq_len), dtype=torch.bool).tril()\nreturn x"),
    ("large-mask", "max_seq_len = 8\nm = torch.zeros(1, 1, max_seq_len, max_seq_len)\nreturn x"),
    ("large-mask", "return x + torch.tril(torch.ones(8, 8))[0, :4]"),
    ("stream-sync", "torch.npu.current_stream().synchronize()\nreturn x"),
    ("stream-sync", "e = torch.npu.Event()\ne.synchronize()\nreturn x"),
    ("stream-sync", "torch_npu.npu.synchronize()\nreturn x"),
    ("stream-sync", "torch.cuda.synchronize()\nreturn x"),
    ("stream-sync", "import torch.distributed as dist\ndist.barrier()\nreturn x"),
    ("backward", "torch.autograd.grad(x.sum(), x)\nreturn x"),
    ("backward", "with torch.enable_grad():\n    x = x * 2\nreturn x"),
    ("backward", "torch.set_grad_enabled(True)\nreturn x"),
    ("backward", "self.optimizer.step()\nreturn x"),
    ("backward", "x.requires_grad = True\nreturn x"),
    ("non-contiguous", "return torch_npu.npu_swiglu(x.narrow(-1, 0, 2))"),
    ("non-contiguous", "y = x[:, :, ::2]\nreturn torch_npu.npu_swiglu(y)"),
    ("non-contiguous", "return torch.ops.npu.npu_swiglu(input=x[..., 2:])"),
    ("data-dependent-shape", "return x.masked_select(x > 0)"),
    ("data-dependent-shape", "m = x.bool()\nreturn x[m]"),
    ("data-dependent-shape", "return torch.unique(kv_len)"),
    ("changed-attribute", "self.count = self.count + 1\nreturn x * self.count"),
    ("not-on-npu", "return x + torch.zeros(4, device='cuda:0')"),
    ("not-on-npu", "return x.to('cuda')"),
    ("hash-order", "for n in set(self.names): x = x + len(n)\nreturn x"),
]


@pytest.mark.parametrize(("rule", "body"), FORMS)
def test_other_form_is_found_by_its_rule_alone(rule: str, body: str, tmp_path: Path) -> None:
    """A rule does not hang on one spelling."""
    recipe, _ = written(tmp_path, Planted(rule, body, "return x"), right=False)

    report = check(recipe, traces=False, search_path=[])

    assert [rule] == [item.rule for item in report.findings if item.severity != "advice"]
