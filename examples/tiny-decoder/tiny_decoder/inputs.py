"""Example inputs, as a recipe names them: `fn(model, rank, **args)` returns main_decode's keyword arguments.

They have to look exactly as in serving: shapes, strides, dtypes, devices, and lists where serving passes lists. A case
is found by these, and one that differs in anything is another graph.
"""

from __future__ import annotations

from typing import Any

import torch

from tiny_decoder.model import TinyDecoder

__all__ = ["decode", "decode_fia", "prompts", "step_inputs"]


def decode(model: TinyDecoder, rank: int, batch: int = 4, start: int = 5) -> dict[str, Any]:
    """Prefill `batch` prompts of `start` tokens and more, and return the arguments of the first step after it.

    The prefill is there so that the build's comparison of outputs sees a cache with something in it. Called again, it
    writes the same cache and returns equal values in fresh tensors.
    """
    return _first_step(model, rank, batch, start, host_lengths=False)


def decode_fia(model: TinyDecoder, rank: int, batch: int = 4, start: int = 5) -> dict[str, Any]:
    """Return what `decode` does, with the lengths as the host list that the fused operator takes."""
    return _first_step(model, rank, batch, start, host_lengths=True)


def prompts(batch: int, start: int, vocab: int, rank: int = 0) -> list[list[int]]:
    """Return `batch` prompts, each one token longer than the one before; data-parallel ranks read other texts."""
    return [[(7 + 11 * rank + 5 * row + 3 * place) % vocab for place in range(start + row)] for row in range(batch)]


def step_inputs(tokens: torch.Tensor, lengths: list[int], host_lengths: bool) -> dict[str, Any]:
    """Return main_decode's arguments for one step.

    Args:
        tokens: [batch, 1], the newest token of each row, on the model's device.
        lengths: tokens in the cache per row, before this step. Kept by the host, which counts them anyway: reading
            them back from the device would stall it at every step.
        host_lengths: whether actual_seq_lengths_kv is a list ("fia") or a tensor ("torch").
    """
    kv_len = torch.tensor(lengths, device=tokens.device)
    return {
        "input_ids": tokens,
        # Not a view of kv_len: arguments that share memory are one more thing to be guarded.
        "position_ids": torch.tensor([[length] for length in lengths], device=tokens.device),
        "kv_len": kv_len,
        "actual_seq_lengths_kv": [length + 1 for length in lengths] if host_lengths else kv_len + 1,
    }


def _first_step(model: TinyDecoder, rank: int, batch: int, start: int, host_lengths: bool) -> dict[str, Any]:
    device = model.head.weight.device
    texts = prompts(batch, start, vocab=model.head.out_features, rank=rank)
    lengths = [len(text) for text in texts]
    padded = torch.tensor([text + [0] * (max(lengths) - len(text)) for text in texts], device=device)
    logits = model.prefill(padded, torch.tensor(lengths, device=device))
    return step_inputs(logits.argmax(-1, keepdim=True), lengths, host_lengths)
