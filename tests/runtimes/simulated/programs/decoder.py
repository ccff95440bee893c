"""A decoder-like model through cache_compile, step by step against eager: python decoder.py CACHE_DIR CASE...

Each case has a folder of its name in CACHE_DIR. Prints one JSON object for each case: the largest error of any output
at any step, the largest error of the model's state at the end, and the number of graphs captured, the empty one that
AclGraph begins with not counted.
"""

import json
import sys
import warnings

import torch
import torch_npu
from torch import nn

warnings.filterwarnings("ignore")
WIDTH, LENGTH = 16, 12


class Layer(nn.Module):
    def __init__(self, batch):
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("keys", torch.zeros(batch, LENGTH, WIDTH))
        self.register_buffer("values", torch.zeros(batch, LENGTH, WIDTH))

    def forward(self, x, position, mask):
        query, key, value = self.mix(x).chunk(3, -1)
        self.keys.index_copy_(1, position, key)
        self.values.index_copy_(1, position, value)
        return x + self.out(torch.softmax(query @ self.keys.transpose(1, 2) / 4 + mask, -1) @ self.values)


class Decoder(nn.Module):
    def __init__(self, batch=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer(batch) for _ in range(2))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def main_decode(self, x, position, mask):
        self.steps.add_(1)
        for layer in self.layers:
            x = layer(x, position, mask)
        return x, self.steps * 2

    def stateless(self, x):
        return self.layers[0].out(x).relu(), x.sum(-1)

    def aliasing(self, x, scratch):
        scratch.mul_(0.5)
        return self.layers[0].out(x), x, scratch.view(-1)


def decode_inputs(step):
    mask = torch.full((1, 1, LENGTH), float("-inf"))
    mask[..., : step + 1] = 0
    return torch.randn(2, 1, WIDTH, generator=torch.Generator().manual_seed(step)), torch.tensor([step]), mask


def batch_inputs(step):
    return (torch.randn([2, 5, 3][step % 3], 4, WIDTH, generator=torch.Generator().manual_seed(step)),)


SCRATCH = [torch.ones(3), torch.ones(3)]


def aliasing_inputs(step):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)), SCRATCH[step % 2]


# name: method, inputs of a step, dynamic, options beyond frozen_parameter
CASES = {
    "plain": ("main_decode", decode_inputs, False, {}),
    "cloned": ("main_decode", decode_inputs, False, {"clone_output": True}),
    "inputs-kept": ("main_decode", decode_inputs, False, {"clone_input": False}),
    "keys": ("stateless", batch_inputs, True, {}),
    "keys-cloned": ("stateless", batch_inputs, True, {"clone_output": True}),
    "keys-apart": ("stateless", batch_inputs, True, {"reuse_graph_pool_in_same_fx": False}),
    "keys-limited": ("stateless", batch_inputs, True, {"capture_limit": 2}),
    "keys-inputs-kept": ("stateless", batch_inputs, True, {"clone_input": False}),
    "aliasing": ("aliasing", aliasing_inputs, False, {}),
    "super-kernel": ("main_decode", decode_inputs, False, {"super_kernel_optimize": True}),
    "unfrozen": ("main_decode", decode_inputs, False, {"frozen_parameter": False}),
}


def twin():
    torch.manual_seed(0)
    return Decoder().eval()


def largest(pairs):
    return max((got.double() - want.double()).abs().max().item() for got, want in pairs)


CAPTURES = []


def count_captures():
    begin = torch_npu.npu.NPUGraph.capture_begin

    def counted(*args, **kwargs):
        CAPTURES.append(None)
        return begin(*args, **kwargs)

    torch_npu.npu.NPUGraph.capture_begin = counted


def run(cache_dir, case):
    method, inputs, dynamic, options = CASES[case]
    torch._dynamo.reset()
    CAPTURES.clear()
    model, plain = twin(), twin()
    decode = torch.npu.npugraph_ex.inference.cache_compile(
        getattr(model, method), cache_dir=cache_dir, dynamic=dynamic, options={"frozen_parameter": True, **options}
    )
    error, given_error, held = 0.0, 0.0, []
    with torch.no_grad():
        for step in range(7):
            given = inputs(step)
            before = [tensor.clone() for tensor in given]
            wanted = getattr(plain, method)(*(tensor.clone() for tensor in given))
            got = decode(*given)
            error = max(error, largest(zip(got, wanted, strict=True)))
            if method != "aliasing":
                given_error = max(given_error, largest(zip(given, before, strict=True)))
            held.append((got[0], wanted[0].clone()))
    return {
        "error": error,
        "given_error": given_error,
        "state_error": largest(zip(model.buffers(), plain.buffers(), strict=True)),
        "captures": len(CAPTURES) - 1,
        "held_are_intact": largest(held[:1]) == 0,
        "held_share_memory": held[0][0].data_ptr() == held[3][0].data_ptr(),
    }


def main(cache_dir, *cases):
    count_captures()
    json.dump({case: run(f"{cache_dir}/{case}", case) for case in cases}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
