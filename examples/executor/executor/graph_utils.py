"""How a decode method is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_npu  # noqa: F401  -- brings torch.npu and the npugraph_ex backend

from executor.inference_config import InferenceConfig

__all__ = ["compile_model_forward"]


def compile_model_forward(method: Callable[..., Any], config: InferenceConfig) -> Callable[..., Any]:
    """Return the method as one graph, kept on disk where the configuration says so."""
    torch._dynamo.config.inline_inbuilt_nn_modules = False
    model = config.model_config
    options = {
        "frozen_parameter": True,
        "static_kernel_compile": model.enable_static_kernel,
        "super_kernel_optimize": model.custom_params.get("enable_superkernel", False),
        "super_kernel_optimize_options": {"dcci_disable_on_kernel": [".*"]},
    }
    if model.enable_cache_compile:
        return torch.npu.npugraph_ex.inference.cache_compile(
            method, cache_dir=config.cache_dir, dynamic=model.enable_dynamic_graph, options=options
        )
    return torch.compile(
        method, dynamic=model.enable_dynamic_graph, fullgraph=True, backend="npugraph_ex", options=options
    )
