"""A decoder with fused attention and list[int] lengths, dynamic=True, eight steps: python lengths.py CACHE_DIR."""

import json
import sys
import warnings

import torch
import torch_npu
from torch import nn

warnings.filterwarnings("ignore")
HEADS, KV_HEADS, SIZE, LENGTH = 4, 2, 16, 16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(HEADS * SIZE, (HEADS + 2 * KV_HEADS) * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, HEADS * SIZE, bias=False)
        self.register_buffer("keys", torch.zeros(2, LENGTH, KV_HEADS * SIZE))
        self.register_buffer("values", torch.zeros(2, LENGTH, KV_HEADS * SIZE))

    def main_decode(self, x, starts, lengths):
        query, key, value = self.mix(x).split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], -1)
        torch_npu.scatter_update_(self.keys, starts, key, 1)
        torch_npu.scatter_update_(self.values, starts, value, 1)
        attended, _ = torch_npu.npu_fused_infer_attention_score(
            query.contiguous(),
            self.keys,
            self.values,
            num_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            input_layout="BSH",
            scale=SIZE**-0.5,
            actual_seq_lengths_kv=lengths,
        )
        return x + self.out(attended)


def twin():
    torch.manual_seed(0)
    return Attention().eval()


def main(cache_dir):
    captures = []
    begin = torch_npu.npu.NPUGraph.capture_begin

    def counted(*args, **kwargs):
        captures.append(None)
        return begin(*args, **kwargs)

    torch_npu.npu.NPUGraph.capture_begin = counted
    model, plain = twin(), twin()
    decode = torch.npu.npugraph_ex.inference.cache_compile(
        model.main_decode, cache_dir=cache_dir, dynamic=True, options={"frozen_parameter": True}
    )
    error = 0.0
    with torch.no_grad():
        for step in range(8):
            x = torch.randn(2, 1, HEADS * SIZE, generator=torch.Generator().manual_seed(step))
            given = (x, torch.tensor([step, step + 2]), [step + 1, step + 3])
            error = max(error, (decode(*given) - plain.main_decode(*given)).abs().max().item())
    json.dump({"error": error, "captures": len(captures) - 1}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
