"""A program with two models of one class: every rank steps through both, and through a draft head where it has one.

    torchrun --nproc-per-node 2 serve_pair.py

Prints one line a rank, which is a document.
"""

from __future__ import annotations

import json
import os

import model as zoo
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  -- brings torch.npu


def main() -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    pair = zoo.build_pair()
    rank = dist.get_rank()
    methods = {"draft": pair.draft.main_decode, "main": pair.main.main_decode}
    if hasattr(pair.main, "mtp_decode"):
        methods["head"] = pair.main.mtp_decode
    equal = {}
    with torch.no_grad():
        for name, method in methods.items():
            compiled = torch.npu.npugraph_ex.inference.cache_compile(
                method, dynamic=False, options={"frozen_parameter": True}
            )
            cache = method.__self__.cache
            for step in range(2):
                given = zoo.pair_inputs(pair, rank)
                given["x"] += step
                before = cache.clone()
                expected = method(**given).clone()
                cache.copy_(before)
                equal[f"{name} {step}"] = torch.allclose(compiled(**given), expected, atol=1e-5)
    os.write(1, (json.dumps({"rank": rank, "equal": equal}) + "\n").encode())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
