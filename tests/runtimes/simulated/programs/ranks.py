"""Two ranks with collectives in a captured graph: python ranks.py CACHE_DIR BACKEND. Prints errors by rank."""

import json
import os
import subprocess
import sys
import tempfile


def rank_main(cache_dir, backend):
    import warnings

    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401 - before the backend is named

    warnings.filterwarnings("ignore")
    # Not by a port that was free a moment ago.
    meeting = f"file://{os.environ['MEETING']}/store"
    dist.init_process_group(backend, init_method=meeting, rank=int(os.environ["RANK"]), world_size=2)
    assert dist.get_backend() == backend
    rank = dist.get_rank()

    class Parallel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.part = torch.nn.Linear(8, 8)

        def main_decode(self, x):
            y = self.part(x) * (rank + 1)
            dist.all_reduce(y)
            gathered = torch.empty(4, 8)
            dist.all_gather_into_tensor(gathered, y * (rank + 1))
            sent = torch.empty_like(y)
            dist.all_to_all_single(sent, y * (rank + 1))
            return y, gathered, sent

    torch.manual_seed(0)
    model = Parallel().eval()
    decode = torch.npu.npugraph_ex.inference.cache_compile(
        model.main_decode, cache_dir=cache_dir, dynamic=False, options={"frozen_parameter": True}
    )
    error = 0.0
    with torch.no_grad():
        for step in range(4):
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
            # One rank captures again while the other replays: capture must not take part in collectives.
            if step == 2 and rank == 1:
                with torch.npu.graph(torch.npu.NPUGraph()):
                    model.main_decode(x)
            for got, want in zip(decode(x), model.main_decode(x), strict=True):
                error = max(error, (got - want).abs().max().item())
    dist.destroy_process_group()
    json.dump(error, sys.stdout)


def main(cache_dir, backend):
    with tempfile.TemporaryDirectory() as meeting:
        shared = {**os.environ, "MEETING": meeting, "WORLD_SIZE": "2"}
        children = [
            subprocess.Popen(
                [sys.executable, __file__, cache_dir, backend],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        told = [child.communicate(timeout=900)[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"ranks ended with {[child.returncode for child in children]}")
    json.dump([json.loads(text.splitlines()[-1]) for text in told], sys.stdout)


if __name__ == "__main__":
    (rank_main if "RANK" in os.environ else main)(*sys.argv[1:])
