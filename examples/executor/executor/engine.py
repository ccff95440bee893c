"""The loop: prompts in, warm-up, greedy decoding with one drafted token per step, tokens out."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models.decoder import DecoderForCausalLM, DecoderMTP

from executor.comm_manager import CommManager
from executor.forward_metadata import ForwardMetaData
from executor.inference_config import InferenceConfig
from executor.model_worker import ModelWorker

__all__ = ["ExecutionEngine"]


class ExecutionEngine:
    """Main and draft worker, and the host's side of every step."""

    def __init__(self, config: InferenceConfig, root: Path) -> None:
        self.config, self.seconds = config, {}
        self.comm = CommManager(config.parallel_config)
        self.main = ModelWorker(config, self.comm, root, "main_decode")
        self.mtp = ModelWorker(config, self.comm, root, "mtp_decode") if config.model_config.next_n else None
        self.device = self.main.device
        self.batch, self.query_len = config.batch_size_per_dp_rank, config.query_len
        self.row_slots = config.blocks_per_row * config.scheduler_config.block_size
        # Rows stand in a fixed part of the cache. The same tensor at every step.
        self.block_table = torch.arange(self.batch * config.blocks_per_row, dtype=torch.int32, device=self.device)
        self.block_table = self.block_table.view(self.batch, -1)

    def init(self) -> None:
        """Load both models, bind their caches, and compile their decode methods."""
        self.main.load_model(DecoderForCausalLM)
        if self.mtp is not None:
            self.mtp.load_model(DecoderMTP, self.main.model)
        for worker in self.workers():
            worker.init_kvcache()
            worker.compile_model()

    def warm_up(self) -> None:
        """Run two steps of a request that nobody made: the first compiles, or loads, the second replays."""
        state = self.prefill([[1, 2, 3]] * self.batch)
        for _ in range(2):
            self.step(state, is_warm_up=True)

    def generate(self, prompts: list[list[int]], steps: int) -> Generation:
        """Decode greedily for so many steps, and return what came of it."""
        state = self.timed("prefill", lambda: self.prefill(prompts))
        started = time.perf_counter()
        for _ in range(steps):
            self.step(state, is_warm_up=False)
        self.seconds["steady_step"] = (time.perf_counter() - started) / max(steps, 1)
        return state

    def prefill(self, prompts: list[list[int]]) -> Generation:
        """Read the prompts into both caches; the first token, and the first draft, come from here."""
        lengths = [len(prompt) for prompt in prompts]
        padded = self.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts])
        inputs = {"input_ids": padded, "lengths": self.tensor(lengths), "slots": self.slots_of(0, max(lengths))}
        logits, hidden = self.main.prefill(inputs)
        newest = logits.argmax(-1)
        state = Generation(kv_len=lengths, tokens=[[token] for token in newest.tolist()])
        if self.mtp is not None:
            # Each token's place is taken by the next one, the last one's by what came after the prompt.
            shifted = padded.roll(-1, 1)
            shifted[torch.arange(self.batch, device=self.device), inputs["lengths"] - 1] = newest
            logits, _ = self.mtp.prefill({**inputs, "input_ids": shifted, "prev_hidden_states": hidden})
            state.drafted = [[token] for token in logits.argmax(-1).tolist()]
        return state

    def step(self, state: Generation, is_warm_up: bool) -> None:
        """Verify what was drafted, keep what the main model agrees with, draft anew."""
        rows = range(self.batch)
        given = [[state.tokens[row][-1], *(state.drafted[row][-1:] if self.mtp else [])] for row in rows]
        inputs = self.decode_inputs(state.kv_len)
        tokens = self.tensor(given).view(-1)
        logits, hidden = self.run(self.main, {"input_ids": tokens, **inputs}, is_warm_up)
        chosen = logits.argmax(-1).view(self.batch, self.query_len)
        decided = chosen.tolist()
        accepted = [int(self.mtp is not None and decided[row][0] == given[row][-1]) for row in rows]
        if self.mtp is not None:
            draft_inputs = {"input_ids": chosen.view(-1), **inputs, "prev_hidden_states": hidden}
            logits, _ = self.run(self.mtp, draft_inputs, is_warm_up)
            drafted = logits.argmax(-1).view(self.batch, self.query_len).tolist()
            for row in rows:
                state.drafted[row].append(drafted[row][accepted[row]])
        for row in rows:
            state.tokens[row] += decided[row][: 1 + accepted[row]]
            state.kv_len[row] += 1 + accepted[row]
            state.accepted += accepted[row]

    def decode_inputs(self, kv_len: list[int]) -> dict[str, Any]:
        """Return positions and metadata of a step, in fresh tensors of the same shapes."""
        query = self.query_len
        if max(kv_len) + query > self.row_slots:
            raise ValueError(f"{max(kv_len) + query} slots are needed and {self.row_slots} there: raise max_new_tokens")
        positions = [length + place for length in kv_len for place in range(query)]
        slots = [self.row_slots * row + length + place for row, length in enumerate(kv_len) for place in range(query)]
        metadata = ForwardMetaData(self.tensor(kv_len), self.tensor(slots), self.block_table)
        lengths = [length + query for length in kv_len]
        if self.config.model_config.enable_dynamic_graph:
            metadata.actual_seq_lengths_list_kv = lengths
            metadata.actual_seq_lengths_cu_list_q = [query * (row + 1) for row in range(len(kv_len))]
        else:
            metadata.actual_seq_lengths_kv = self.tensor(lengths)
        return {"position_ids": self.tensor(positions), "forward_metadata": metadata}

    def run(self, worker: ModelWorker, inputs: dict[str, Any], is_warm_up: bool) -> Any:
        """Run a worker's decode; its first call is the one that compiles, or loads."""
        name = f"first_{worker.method}"
        if name in self.seconds:
            return worker.decode(inputs, is_warm_up)
        return self.timed(name, lambda: worker.decode(inputs, is_warm_up))

    def slots_of(self, first: int, count: int) -> Any:
        """Return the slots of `count` places of every row, packed."""
        starts = [self.row_slots * row + first for row in range(self.batch)]
        return self.tensor([start + place for start in starts for place in range(count)])

    def workers(self) -> list[ModelWorker]:
        return [self.main] if self.mtp is None else [self.main, self.mtp]

    def tensor(self, values: Any) -> Any:
        return torch.tensor(values, device=self.device)

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        self.seconds[name] = time.perf_counter() - started
        return result


class Generation:
    """The rows of a batch: tokens so far, tokens in the cache, and what was drafted and accepted."""

    def __init__(self, kv_len: list[int], tokens: list[list[int]]) -> None:
        self.kv_len, self.tokens = kv_len, tokens
        self.drafted: list[list[int]] = [[] for _ in tokens]
        self.accepted = 0
