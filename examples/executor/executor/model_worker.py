"""One model: loaded, bound to its KV cache, compiled, and run; prefill eagerly, decode as a graph."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from executor.comm_manager import CommManager
from executor.dummy_loader import load_model, read_hf_config
from executor.graph_utils import compile_model_forward
from executor.inference_config import InferenceConfig

__all__ = ["ModelWorker"]


class ModelWorker:
    """The main model or the draft model; `method` is the one that is compiled."""

    def __init__(self, config: InferenceConfig, comm: CommManager, root: Path, method: str) -> None:
        self.config, self.comm, self.method = config, comm, method
        self.hf_config = read_hf_config(root / config.model_config.model_path)
        self.dtype = getattr(torch, config.model_config.dtype)
        kind = config.model_config.custom_params.get("device", "npu")
        self.device = torch.device(kind, config.parallel_config.local_rank) if kind == "npu" else torch.device(kind)
        self.model: nn.Module
        self.compiled: Any = None

    def load_model(self, model_class: Any, main_model: Any = None) -> None:
        """Make the model; a draft model takes embedding and head of the main one."""
        self.model = model_class(self.hf_config, self.config, self.comm)
        load_model(self.model, self.comm.tp_size, self.comm.tp_rank, self.dtype, self.device)
        if main_model is not None:
            self.model.embed_tokens = main_model.embed_tokens
            self.model.lm_head = main_model.lm_head

    def init_kvcache(self) -> None:
        """Bind the KV cache to each attention: once, at its largest, never replaced."""
        rows, scheduler = self.config.batch_size_per_dp_rank, self.config.scheduler_config
        slots = rows * self.config.blocks_per_row * scheduler.block_size
        for module in self.model.modules():
            if hasattr(module, "k_cache") and hasattr(module, "v_cache"):
                shape = (slots, module.kv_heads, module.head_dim)
                module.k_cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
                module.v_cache = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def compile_model(self) -> None:
        """Compile the decode method; nothing is traced before its first call."""
        method = getattr(self.model, self.method, None)
        if method is None:
            raise AttributeError(f"{type(self.model).__name__} has no {self.method}, which graph mode compiles")
        if self.config.model_config.exe_mode == "npugraph_ex":
            self.compiled = compile_model_forward(method, self.config)

    def prefill(self, model_inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Run the eager prefill: every prompt has another length."""
        with torch.no_grad():
            return self.model.prefill(**model_inputs)

    def decode(self, model_inputs: dict[str, Any], is_warm_up: bool) -> tuple[Tensor, Tensor]:
        """Run one decode step; once the graph is there, its guards are not evaluated at each call."""
        run = getattr(self.model, self.method) if self.compiled is None else self.compiled
        steady = self.compiled is not None and self.config.model_config.enable_cache_compile and not is_warm_up
        stance = torch.compiler.set_stance(skip_guard_eval_unsafe=True) if steady else contextlib.nullcontext()
        with torch.no_grad(), stance:
            output = run(**model_inputs)
        torch.npu.synchronize()
        return output
