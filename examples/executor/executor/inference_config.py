"""The YAML configuration, section by section; what it doesn't know it drops, as the framework does."""

from __future__ import annotations

import datetime as dt
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

__all__ = ["InferenceConfig"]

Section = TypeVar("Section")


def read_section(kind: type[Section], document: dict[str, Any], name: str) -> Section:
    """Return one section with its defaults filled in."""
    given = document.get(name) or {}
    return kind(**{one.name: given[one.name] for one in fields(kind) if one.name in given})  # type: ignore[arg-type]


@dataclass
class ModelConfig:
    """Which model, and how its decode step is run."""

    model_name: str = "model"
    model_path: str = ""
    output_path: str = ""
    platform_version: str = "A3"
    dtype: str = "bfloat16"
    with_ckpt: bool = True
    next_n: int = 0
    exe_mode: str = "eager"
    enable_cache_compile: bool = False
    enable_static_kernel: bool = False
    enable_dynamic_graph: bool = True
    custom_params: dict[str, Any] = field(default_factory=dict)

    def validate(self) -> None:
        """Refuse what can't be run, before torch is imported."""
        if self.exe_mode not in ("eager", "npugraph_ex"):
            raise ValueError(f"exe_mode={self.exe_mode!r} is not one of eager, npugraph_ex")
        if self.platform_version not in ("A2", "A3", "950"):
            raise ValueError(f"platform_version={self.platform_version!r} is not one of 'A2', 'A3', '950'")
        if self.enable_static_kernel and self.exe_mode != "npugraph_ex":
            raise ValueError(f"enable_static_kernel needs exe_mode='npugraph_ex', not {self.exe_mode!r}")
        if self.next_n not in (0, 1):
            raise ValueError(f"next_n={self.next_n}: this executor drafts 0 or 1 tokens per step")
        if self.with_ckpt:
            raise ValueError("with_ckpt=True: this executor has no checkpoints, it draws its weights")


@dataclass
class DataConfig:
    """The prompts."""

    dataset: str = "default"
    input_truncated_len: int = 256


@dataclass
class ParallelConfig:
    """The ranks, and how the model is cut over them."""

    world_size: int = 1
    attn_tp_size: int = 1
    dense_tp_size: int = 1
    global_rank: int = 0
    local_rank: int = 0

    def validate(self) -> None:
        """Refuse a cut that doesn't come out even."""
        if self.attn_tp_size < 1 or self.world_size % self.attn_tp_size:
            raise ValueError(f"world_size={self.world_size} is not divisible by attn_tp_size={self.attn_tp_size}")
        if self.dense_tp_size != self.attn_tp_size:
            raise ValueError(
                f"dense_tp_size={self.dense_tp_size}: this executor cuts both alike, attn_tp_size={self.attn_tp_size}"
            )

    @property
    def attn_dp_size(self) -> int:
        """Copies of the model, each with its part of the batch."""
        return self.world_size // self.attn_tp_size


@dataclass
class SchedulerConfig:
    """Batch and KV cache."""

    batch_size: int = 1
    max_new_tokens: int = 32
    block_size: int = 128


@dataclass
class InferenceConfig:
    """All sections, and the sizes that follow from several of them."""

    case_name: str
    model_config: ModelConfig
    data_config: DataConfig
    parallel_config: ParallelConfig
    scheduler_config: SchedulerConfig

    @classmethod
    def from_yaml(cls, path: Path) -> InferenceConfig:
        """Read a file. The process's rank is LOCAL_RANK + RANK_OFFSET: no RANK is needed."""
        document = yaml.safe_load(path.read_text())
        if not isinstance(document, dict):
            raise ValueError(f"{path}: no sections in it: model_config, parallel_config and so on")  # noqa: TRY004
        model = read_section(ModelConfig, document, "model_config")
        config = cls(
            f"{model.model_name}_{path.stem}",
            model,
            read_section(DataConfig, document, "data_config"),
            read_section(ParallelConfig, document, "parallel_config"),
            read_section(SchedulerConfig, document, "scheduler_config"),
        )
        config.parallel_config.local_rank = int(os.getenv("LOCAL_RANK", "0"))
        config.parallel_config.global_rank = config.parallel_config.local_rank + int(os.getenv("RANK_OFFSET", "0"))
        config.validate()
        return config

    def validate(self) -> None:
        """Check each section, then what one has to do with another."""
        self.model_config.validate()
        self.parallel_config.validate()
        batch, copies = self.scheduler_config.batch_size, self.parallel_config.attn_dp_size
        if batch % copies:
            raise ValueError(f"batch_size={batch} is not divisible by attn_dp_size={copies}")
        # Whatever was set before. npugraph_ex takes 0 or 1; torch_npu reads it once, so it is set before the import.
        os.environ["TASK_QUEUE_ENABLE"] = "1" if self.model_config.exe_mode == "npugraph_ex" else "2"

    @property
    def batch_size_per_dp_rank(self) -> int:
        """Rows that one copy of the model decodes."""
        return self.scheduler_config.batch_size // self.parallel_config.attn_dp_size

    @property
    def query_len(self) -> int:
        """Tokens per row in one decode step: the newest one and what was drafted after it."""
        return self.model_config.next_n + 1

    @property
    def blocks_per_row(self) -> int:
        """Blocks of the KV cache that one row needs at its longest."""
        slots = self.data_config.input_truncated_len + self.scheduler_config.max_new_tokens
        return -(-slots // self.scheduler_config.block_size)

    @property
    def cache_dir(self) -> str:
        """Where cache_compile keeps its artifacts.

        The framework's launch script exports RES_PATH with the date in it, so that each day has a folder of its own.
        """
        results = os.getenv("RES_PATH") or f"res/{dt.datetime.now():%Y%m%d}/{self.case_name}"  # noqa: DTZ005
        base = self.model_config.output_path or os.path.join(os.getenv("WORK_DIR", "."), results)
        return os.path.join(base, "compile_cache")
