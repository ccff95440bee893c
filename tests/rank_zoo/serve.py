"""A program that never heard of cachectl: every rank makes its part, steps through a cached graph, and says what came.

    torchrun --nproc-per-node 2 serve.py '{"tensor_parallel": 2}' [STEPS]

Prints one line a rank, which is a document; a rank that ends badly prints none.
"""

from __future__ import annotations

import json
import os
import sys

import model as zoo
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  -- brings torch.npu


def main() -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    for ranks in json.loads(os.environ.get("GROUPS_BEFORE", "[]")):
        dist.new_group(ranks)
    model = zoo.build(**json.loads(sys.argv[1]))
    rank, steps = dist.get_rank(), int(sys.argv[2]) if len(sys.argv) > 2 else 2
    names = [name for name in ("main_decode", "mtp_decode") if hasattr(model, name)]
    inputs = zoo.inputs(model, rank)
    equal = True
    compiled = {
        name: torch.npu.npugraph_ex.inference.cache_compile(
            getattr(model, name), dynamic=False, options={"frozen_parameter": True}
        )
        for name in names
    }
    with torch.no_grad():
        for step in range(steps):
            given = {**inputs, "x": inputs["x"] + step}
            for name in names:
                before = model.cache.clone()
                expected = getattr(model, name)(**given).clone()
                model.cache.copy_(before)
                equal &= torch.allclose(compiled[name](**given), expected, atol=1e-5)
    os.write(1, (json.dumps({"rank": rank, "equal": equal, "methods": names}) + "\n").encode())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
