"""Greedy generation with the tiny decoder: prefill eagerly, then decode through a cached graph.

    cachectl simulate -- python generate.py            warm where `cachectl build recipe.yaml` was run, else cold
    cachectl simulate -- python generate.py --plain    the runtime's own cache_compile, in --cache-dir
    cachectl simulate -- python generate.py --eager    no graph at all: what the other two have to agree with

On a machine with NPUs leave out `cachectl simulate --`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

# npugraph_ex takes 0 or 1. torch_npu reads it when it is imported, and the recipe declares the same.
os.environ.setdefault("TASK_QUEUE_ENABLE", "1")

import torch
import torch_npu  # noqa: F401  -- brings torch.npu and the npugraph_ex backend
import yaml
from tiny_decoder.inputs import prompts, step_inputs
from tiny_decoder.model import build

SECONDS: dict[str, float] = {}


def main() -> None:
    args = parse_arguments()
    # The recipe says what shapes the graph. Read here too, it can't say something else than what runs.
    recipe = yaml.safe_load(args.recipe.read_text())
    config, dynamic, options = recipe["model"]["config"], recipe["compile"]["dynamic"], recipe["compile"]["options"]
    host_lengths = config["attention"] == "fia"
    if host_lengths and args.batch != config["max_batch"]:
        raise SystemExit(f"--batch has to be max_batch ({config['max_batch']}) with the fused operator")

    model = timed("build", lambda: build(**config))
    for layer in model.layers:
        layer.attention.scale *= args.scale
    outcome, reasons = "eager" if args.eager else "plain", []
    if args.eager:
        decode = model.main_decode
    elif args.plain:
        decode = torch.npu.npugraph_ex.inference.cache_compile(
            model.main_decode, cache_dir=str(args.cache_dir), dynamic=dynamic, options=options
        )
    else:
        import cachectl

        # Once, before the first call. It never raises: with no store, or nothing in it that fits, it says cold.
        warm = timed("warm_start", lambda: cachectl.warm_start(args.recipe))
        decode = cachectl.cache_compile(model.main_decode, warm=warm, dynamic=dynamic, options=options)

    texts = prompts(args.batch, start=5, vocab=config.get("vocab", 128))
    lengths = [len(text) for text in texts]  # stays on the host, which needs no device to count
    padded = torch.tensor([text + [0] * (max(lengths) - len(text)) for text in texts], device=config["device"])

    # Grad mode is one of the graph's guards: the same around every call.
    with torch.no_grad():
        # Eager, since every prompt has another length.
        logits = timed("prefill", lambda: model.prefill(padded, torch.tensor(lengths, device=padded.device)))
        generated = [logits.argmax(-1, keepdim=True)]

        def step() -> None:
            nonlocal logits
            # Fresh arguments of the same shapes, by keyword. The new token stays on the device.
            logits = decode(**step_inputs(generated[-1], lengths, host_lengths))
            generated.append(logits.argmax(-1, keepdim=True))
            lengths[:] = [length + 1 for length in lengths]

        def other_steps() -> None:
            for _ in range(args.steps - 1):
                step()

        # Compiled, or loaded and proved: the warm-up, before any user waits for it.
        timed("first_call", step)
        # Model and shapes stay as they are from here on, so evaluating the guards at each step is lost time.
        with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
            timed("other_calls", other_steps)

    tokens = torch.hstack(generated).tolist()  # read back once, at the end
    if not (args.eager or args.plain):
        outcome, reasons = warm.outcome, [str(reason) for reason in warm.reasons]
    if args.json:
        last = {"logits": logits.tolist()}
        print(json.dumps({"tokens": tokens, "outcome": outcome, "reasons": reasons, "seconds": SECONDS, **last}))
    else:
        for row in tokens:
            print(*row)
        for reason in reasons:
            print(f"not warm because of {reason}")
        print(f"{outcome}:", ", ".join(f"{name} {seconds:.3f} s" for name, seconds in SECONDS.items()))


def timed(name: str, call: Any) -> Any:
    started = time.perf_counter()
    result = call()
    SECONDS[name] = time.perf_counter() - started
    return result


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Greedy generation with the tiny decoder.")
    parser.add_argument("--recipe", type=Path, default=Path(__file__).resolve().parent / "recipe.yaml")
    parser.add_argument("--batch", type=int, default=4, help="rows; a batch the recipe has no case for is cold")
    parser.add_argument("--steps", type=int, default=16, help="decode steps after the prefill")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="multiply every attention's scale: an attribute changes"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--plain", action="store_true", help="the runtime's own cache_compile")
    how.add_argument("--eager", action="store_true", help="no graph")
    parser.add_argument("--cache-dir", type=Path, default=Path(".torchair_cache"), help="of --plain")
    return parser.parse_args()


if __name__ == "__main__":
    main()
