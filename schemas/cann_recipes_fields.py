"""The fields of a cann-recipes config, each with what it can reach: the graph, its shapes, prefill only, or nothing.

Owns which of them are in the key, and why. What is not listed here goes in: a field that nobody knows may shape the
graph. Where a field stands in the two schema families that compile is told beside it.

Facts: cann-recipes-infer, executor/core/config/inference_config.py (family A), executor/model_runner.py and the models'
own infer.py (family B).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

__all__ = [
    "CUSTOM_PARAMS",
    "DERIVED",
    "FIELDS",
    "KNOWN_CUSTOM_PARAMS",
    "TOP",
    "ConfigField",
    "Use",
    "address_reason",
    "field_named",
    "fields_of",
    "in_key",
]

Use: TypeAlias = Literal["graph", "shape", "prefill", "none"]

# The section of what stands outside of all sections.
TOP = ""


@dataclass(frozen=True)
class ConfigField:
    """One field: its type, what it can reach and why, where it stands in families A and B, and its default there.

    A section of None: the family does not have the field. A default of None: the framework has none, or finds one out.
    """

    name: str
    kind: type
    use: Use
    why: str
    a: str | None = None
    b: str | None = None
    default: Any = None
    b_default: Any = None
    synonyms: tuple[str, ...] = ()

    def section(self, family: str) -> str | None:
        """Return the section that holds the field in a family."""
        return self.a if family == "A" else self.b

    def default_of(self, family: str) -> Any:
        """Return the value that the framework takes where the file says none."""
        return self.default if family == "A" else self.b_default


def _size(name: str, what: str, *synonyms: str) -> ConfigField:
    place = "parallel_config"
    return ConfigField(name, int, "graph", f"cuts {what}: shapes and groups", place, place, 1, 1, synonyms)


_MODEL, _DATA, _PARALLEL, _SCHEDULER = "model_config", "data_config", "parallel_config", "scheduler_config"
_SAMPLING = "sampling happens outside of the graph"
_WHERE = "where files lie is no identity"

FIELDS: tuple[ConfigField, ...] = (
    ConfigField("model_name", str, "graph", "chooses the model's class", _MODEL, TOP, "model"),
    ConfigField("exe_mode", str, "graph", "which compiler makes the graph, if any", _MODEL, TOP, "eager"),
    ConfigField("enable_static_kernel", bool, "graph", "an option of the compiler", _MODEL, _MODEL, False, False),
    ConfigField("enable_dynamic_graph", bool, "graph", "static or dynamic dimensions", _MODEL, _MODEL, True, True),
    ConfigField("next_n", int, "graph", "draft steps: methods, and tokens a step", _MODEL, _MODEL, 0, 0),
    ConfigField("platform_version", str, "graph", "models branch on it", _MODEL, _MODEL, None, "A3"),
    ConfigField("dtype", str, "graph", "data type of weights and computation", _MODEL, _MODEL, "bfloat16"),
    ConfigField("enable_weight_nz", bool, "graph", "memory format of weights", _MODEL, _MODEL, True),
    ConfigField("enable_hadamard", bool, "graph", "adds operators to the graph", _MODEL, _MODEL, False),
    ConfigField(
        "force_eplb", bool, "graph", "adds an input to the graph", _MODEL, _MODEL, False, False, ("perfect_eplb",)
    ),
    ConfigField("custom_params", dict, "graph", "switches that the model's code reads", _MODEL, _MODEL),
    ConfigField("world_size", int, "graph", "how many ranks", _PARALLEL, TOP, 1),
    _size("attn_tp_size", "attention"),
    _size("moe_tp_size", "the experts"),
    _size("embed_tp_size", "the embedding"),
    _size("lmhead_tp_size", "the head"),
    _size("dense_tp_size", "dense layers"),
    _size("shared_tp_size", "shared experts"),
    _size("o_proj_tp_size", "the output projection", "oproj_tp_size"),
    _size("cp_size", "the context"),
    ConfigField("batch_size", int, "graph", "shapes of a step", _SCHEDULER, _DATA, 1, 1),
    ConfigField("block_size", int, "graph", "shapes of the KV cache", _SCHEDULER, _MODEL, 128, 128, ("pa_block_size",)),
    ConfigField("max_new_tokens", int, "shape", "length of the KV cache and of its tables", _SCHEDULER, _DATA, 32, 32),
    ConfigField(
        "input_truncated_len",
        int,
        "shape",
        "length of the KV cache and of its tables",
        _DATA,
        _DATA,
        256,
        None,
        ("input_max_len",),
    ),
    ConfigField("max_prefill_tokens", int, "shape", "memory left for KV blocks", _SCHEDULER, None, 0),
    ConfigField("mem_fraction_static", float, "shape", "number of KV blocks", _SCHEDULER, None, 0.85),
    ConfigField("cp_mini_batch", int, "prefill", "prefill is never cached", _SCHEDULER, None, -1),
    ConfigField("offline_prefill_dp_group_size", int, "prefill", "prefill is never cached", _PARALLEL, None, 1),
    ConfigField("model_path", str, "none", f"{_WHERE}; the model's config.json counts", _MODEL, TOP, ""),
    ConfigField("draft_model_path", str, "none", f"{_WHERE}; the draft's config.json counts", _MODEL, TOP),
    ConfigField("hadamard_weight_path", str, "none", f"{_WHERE}; weights are no part of the graph", _MODEL, None, ""),
    ConfigField("output_path", str, "none", _WHERE, _MODEL, _MODEL, ""),
    ConfigField("with_ckpt", bool, "none", "values of weights are no part of the graph", _MODEL, _MODEL, True, True),
    ConfigField("enable_cache_compile", bool, "none", "whether to cache, not what", _MODEL, _MODEL, False, False),
    ConfigField("enable_profiler", bool, "none", "watches, changes nothing", _MODEL, _MODEL, False, False),
    ConfigField("dataset", str, "none", "which prompts", _DATA, _DATA, "default", "default"),
    ConfigField("dataset_path", str, "none", _WHERE, _DATA, _DATA, ""),
    ConfigField("temperature", float, "none", _SAMPLING, _DATA, _DATA, 0.0),
    ConfigField("top_p", float, "none", _SAMPLING, _DATA, _DATA, 1.0),
    ConfigField("top_k", int, "none", _SAMPLING, _DATA, _DATA, 0),
    ConfigField("seed", int, "none", _SAMPLING, _DATA, _DATA),
    ConfigField("num_reserved_decode_tokens", int, "none", "admission of requests", _SCHEDULER, None, 64),
)

CUSTOM_PARAMS = "custom_params"

# What models read of custom_params, for the nearest name to a typo: the framework drops nothing there and says nothing.
KNOWN_CUSTOM_PARAMS = (
    "attn_res_mode",
    "enable_afd",
    "enable_flash_kda",
    "enable_fused_recurrent_kda",
    "enable_gdn_solve_triangular",
    "enable_limit_core",
    "enable_limit_core_num",
    "enable_mega_moe",
    "enable_mla_prolog",
    "enable_mm_all_reduce_base",
    "enable_moe_bf16_mode",
    "enable_moe_mc2_dispatch",
    "enable_moe_stream_overlap",
    "enable_multi_streams",
    "enable_o_proj_alltoall",
    "enable_offload",
    "enable_online_mxfp8_quantization",
    "enable_prefetch",
    "enable_pypto",
    "enable_sp",
    "enable_superkernel",
    "kernel_config",
    "max_position_embeddings",
    "micro_batch_mode",
    "moe_chunk_max_len",
    "ngram_embed_tp_size",
    "num_hidden_layers",
    "online_mxfp8_ignored_layers",
    "online_mxfp8_quant_layers",
)

# Sizes that the framework works out itself; what a file says of them it overwrites.
DERIVED = (
    "attn_dp_size",
    "moe_ep_size",
    "moe_dp_size",
    "embed_dp_size",
    "batch_size_per_dp_rank",
    "cp_prefill_dp_size",
)

_ADDRESS = re.compile(r"(?:.*_)?(?:host|hosts|hostname|port|ports|ip|ips|addr|addrs|address|url)\Z")


def address_reason(name: str) -> str | None:
    """Return why a field of this name is not in the key, None unless it says where something is reached."""
    return "an address or a port" if _ADDRESS.fullmatch(name) else None


def in_key(use: Use) -> bool:
    """Say whether fields of this class are part of the request, and so of every key."""
    return use in ("graph", "shape")


def fields_of(family: str, section: str) -> tuple[ConfigField, ...]:
    """Return the fields that a family has in a section."""
    return tuple(item for item in FIELDS if item.section(family) == section)


def field_named(family: str, section: str, name: str) -> ConfigField | None:
    """Return the field that a name stands for, by its own name or a synonym; None for one nobody knows."""
    for item in fields_of(family, section):
        if name == item.name or name in item.synonyms:
            return item
    return None
