"""Offline inference: prefill eagerly, then decode through compiled graphs, main and draft model.

    python infer.py --config config/static.yaml

On a machine without NPUs write `cachectl simulate --` in front. Prints one JSON line a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from executor.inference_config import InferenceConfig

ROOT = Path(__file__).resolve().parent


def main() -> None:
    args = parse_arguments()
    config = InferenceConfig.from_yaml(args.config)
    started = time.perf_counter()
    # Only now: reading the configuration has set what torch_npu looks for when it is imported.
    from executor.engine import ExecutionEngine

    seconds = {"import": time.perf_counter() - started}
    engine = ExecutionEngine(config, ROOT)
    engine.seconds = seconds
    engine.timed("build", engine.init)
    engine.timed("warm_up", engine.warm_up)
    prompts = build_prompts(config, engine.comm.dp_rank)
    result = engine.generate(prompts, args.steps)
    document = {
        "rank": config.parallel_config.global_rank,
        "tokens": result.tokens,
        "drafted": result.drafted,
        "accepted": result.accepted,
        "seconds": {name: round(value, 6) for name, value in engine.seconds.items()},
    }
    # One write, so that the lines of several ranks stay whole.
    os.write(1, (json.dumps(document) + "\n").encode())
    engine.comm.close()


def build_prompts(config: InferenceConfig, copy: int) -> list[list[int]]:
    """Return the prompts of one copy of the model, each of another length."""
    rows, limit = config.batch_size_per_dp_rank, config.data_config.input_truncated_len
    return [[(7 + 11 * copy + 5 * row + 3 * place) % 89 + 1 for place in range(4 + row)][:limit] for row in range(rows)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Offline inference with a main and a draft model.")
    parser.add_argument("--config", type=Path, default=ROOT / "config" / "static.yaml", help="inference configuration")
    parser.add_argument("--steps", type=int, default=32, help="decode steps after the prefill")
    return parser.parse_args()


if __name__ == "__main__":
    main()
