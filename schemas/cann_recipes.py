"""A cann-recipes config as cachectl takes it: what is in the key, and what the framework would do with it.

Owns methods, options, environment and cache directory that cann-recipes-infer derives from a config, and the recipe
document that means the same. Facts: executor/utils/graph_utils.py, executor/core/model_worker/model_worker.py,
executor/scripts/function.sh, models/{glm_5_2,kimi_k3,pangu_7b}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from cachectl.schemas.cann_recipes_checks import check_model, derive, is_afd, model_kind
from cachectl.schemas.cann_recipes_reading import Config, LeftOut, read_config
from cachectl.schemas.canonical import digest_of
from cachectl.schemas.recipe_words import fault

__all__ = ["FACTORY", "INPUTS", "Framework", "model_files", "read_framework"]

FACTORY = "cachectl.programs:model"
INPUTS = "cachectl.programs:call"
RANK_RULE = "global rank = LOCAL_RANK + RANK_OFFSET"

# Of a model's config.json what says where it came from, not what it is.
_MODEL_LABELS = ("_name_or_path", "transformers_version")


@dataclass(frozen=True)
class Framework:
    """One config, understood.

    Attributes:
        document: what is in the key: the config's fields by section, derived sizes, and the models' config.json.
        notes: what a reader has to be told, one sentence each.
        mode: `npugraph_ex`, `ge_graph` or `eager`.
        environment: variables that the framework overwrites, whatever is set.
        launch: variables without which the program fails, as the framework's launch script exports them.
        dynamo: what of torch._dynamo.config the program sets itself.
        methods: the cached methods, in the order in which the program compiles them.
        ranks: for a method that not all ranks hold, which ones do.
        unsupported: why this version can't build it, None if it can.
        inert: what keeps the program from ever reading a cache by itself, None if nothing does.
        lifted: whether that is no setting: the program calls torch.compile, so `exec --lift` reads what is built.
    """

    name: str
    family: str
    document: dict[str, Any]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]
    mode: str
    methods: tuple[str, ...]
    ranks: dict[str, tuple[int, ...]]
    dynamic: bool
    options: dict[str, Any]
    compiler_config: dict[str, Any]
    dynamo: dict[str, Any]
    topology: dict[str, int]
    environment: dict[str, str]
    launch: dict[str, str]
    cache_dir: str
    rank_rule: str
    case: str
    unsupported: str | None
    inert: str | None
    lifted: bool

    @property
    def inert_hint(self) -> str:
        """What mends an inert config."""
        lift = "run the program under: cachectl exec --lift"
        return lift if self.lifted else f"set enable_cache_compile: true, or {lift}"

    @property
    def against(self) -> tuple[str, str] | None:
        """What keeps anything from being built of this config, and the way out; None for a config that can be built."""
        why = self.inert if self.mode == "eager" else self.unsupported
        return None if why is None else (f"{self.name}: {why}", "set exe_mode: npugraph_ex")


def model_files(raw: bytes, name: str, folders: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return where the config.json of each model that a config names may lie, by field, likeliest first.

    Raises:
        ConfigError: the config is wrong.

    Args:
        folders: what a relative model path may be relative to: it is the program's working folder, which is not known.
    """
    config = read_config(name, raw)
    found = {}
    for field in ("model_path", "draft_model_path"):
        path = config.values.get(field)
        if path:
            places = [PurePath(folder, path) for folder in ([""] if PurePath(path).is_absolute() else folders)]
            found[field] = tuple(
                str(place / below / "config.json") for place in dict.fromkeys(places) for below in ("", "rank_0")
            )
    return found


def read_framework(
    name: str, raw: bytes, models: Mapping[str, tuple[str, bytes]], *, command: Sequence[str] = ()
) -> Framework:
    """Read a config and work out what the framework would do with it.

    Args:
        name: the file, as messages name it.
        raw: its bytes.
        models: place and bytes of the config.json of each model that is there, by the field that names it.
        command: the program that reads it, empty where that is not known.

    Raises:
        ConfigError: the config is wrong, or of a kind of which nothing can be cached.
    """
    config = read_config(name, raw)
    derived = derive(config, offline=_is_offline(command))
    seen = {field: _model(place, data) for field, (place, data) in models.items()}
    main = seen.get("model_path")
    if main is not None:
        check_model(config, derived, main)
    document = {
        "family": config.family,
        "config": config.document,
        "derived": derived,
        "models": {field: digest_of(_identity_of(model)) for field, model in seen.items()},
    }
    if main is None:
        place = config.values.get("model_path") or "model_path, which is empty"
        config.notes.append(
            f"the model's config.json is not seen at {place}: a changed model with an unchanged config is found by its "
            "guards only"
        )
    kind = model_kind(config)
    methods, ranks = _methods(config, kind, main)
    options, dynamic, dynamo = _options(config, kind)
    methods = _only_of_one_options(config, kind, methods)
    return Framework(
        name=name,
        family=config.family,
        document=document,
        left_out=tuple(config.left_out),
        notes=tuple(config.notes),
        mode=config.values["exe_mode"],
        methods=methods,
        ranks=ranks,
        dynamic=dynamic,
        options=options,
        compiler_config=_compiler_config(config),
        dynamo=dynamo,
        topology=_topology(config, derived),
        environment={"TASK_QUEUE_ENABLE": _task_queue(config)},
        launch=_launch(config, kind),
        cache_dir=_cache_dir(config, kind),
        rank_rule=RANK_RULE,
        case=_case_name(config),
        unsupported=_unsupported(config, kind),
        inert=_inert(config, kind),
        lifted=_is_lifted(config, kind),
    )


def _is_offline(command: Sequence[str]) -> bool | None:
    names = {PurePath(word).name for word in command}
    return True if "infer.py" in names else False if "server.py" in names else None


def _model(place: str, data: bytes) -> dict[str, Any]:
    """Return a model's config.json; raises ConfigError for a file that is none."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise fault(f"{place}: not JSON: {error}", "mend the model's config.json") from error
    if not isinstance(document, dict):
        raise fault(f"{place}: holds no mapping", "name the folder of a model")
    return document


def _identity_of(model: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in model.items() if key not in _MODEL_LABELS}


def _methods(
    config: Config, kind: str, model: Mapping[str, Any] | None
) -> tuple[tuple[str, ...], dict[str, tuple[int, ...]]]:
    """Return the methods that the program caches, and which ranks hold those that not all do."""
    drafts = config.values["next_n"]
    if kind.startswith("pangu") and config.family == "B":
        return ("decode",), {}
    if kind == "kimi_k3" and config.family == "B":
        return ("decode", "forward_spec_decode") if drafts else ("decode",), {}
    if kind == "glm_5_2" and config.family == "B":
        return _glm_methods(drafts, model), {}
    methods = ("main_decode", "mtp_decode") if drafts else ("main_decode",)
    if is_afd(config) and drafts:
        half = config.values["world_size"] // 2
        # The others run feed-forward only, for both of the model's parts.
        return methods, {"mtp_decode": tuple(range(half, 2 * half))}
    return methods, {}


def _glm_methods(drafts: int, model: Mapping[str, Any] | None) -> tuple[str, ...]:
    if not drafts:
        return ("main_decode",)
    if not (model or {}).get("index_share_for_mtp_iteration", True):
        return ("main_decode", "main_decode_mtp")
    # The second step of a draft is the first that reuses what the first one chose.
    reuse = ("main_decode_mtp_reuse",) if drafts > 1 else ()
    return ("main_decode", "main_decode_mtp_compute", *reuse)


def _only_of_one_options(config: Config, kind: str, methods: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out the methods that the program compiles with other options: a recipe has one set of them."""
    if not _shares_indexer(config, kind) or len(methods) == 1:
        return methods
    config.notes.append(
        f"shared_indexer_offload: the program compiles main_decode with clone_input false and {', '.join(methods[1:])} "
        "without it; a recipe has one set of options, so these start cold"
    )
    return methods[:1]


def _shares_indexer(config: Config, kind: str) -> bool:
    model = config.document.get("model_config", {})
    return bool(config.family == "B" and kind == "glm_5_2" and model.get("shared_indexer_offload"))


def _options(config: Config, kind: str) -> tuple[dict[str, Any], bool, dict[str, Any]]:
    """Return options, `dynamic` and Dynamo's settings with which the program compiles for npugraph_ex."""
    if config.values["exe_mode"] != "npugraph_ex":
        return {}, False, {"inline_inbuilt_nn_modules": False}
    static = {"static_kernel_compile": config.values["enable_static_kernel"]}
    if config.family == "B" and kind == "glm_5_2":
        shared = {"clone_input": False} if _shares_indexer(config, kind) else {}
        return {"frozen_parameter": True, **static, **shared}, False, {"inline_inbuilt_nn_modules": False}
    if config.family == "B" and kind == "kimi_k3":
        return {"frozen_parameter": True, **static}, True, {"inline_inbuilt_nn_modules": False}
    if config.family == "B" and kind.startswith("pangu"):
        return {"frozen_parameter": True, "remove_noop_ops": False}, True, {}
    switches = {**config.document.get("model_config", {}), **config.custom_params}
    options = {
        "frozen_parameter": True,
        **static,
        "super_kernel_optimize": bool(switches.get("enable_superkernel", False)),
        "super_kernel_optimize_options": {"dcci_disable_on_kernel": [".*"]},
    }
    return options, config.values["enable_dynamic_graph"], {"inline_inbuilt_nn_modules": False}


def _compiler_config(config: Config) -> dict[str, Any]:
    """Return the fields of CompilerConfig with which the program compiles for GE."""
    if config.values["exe_mode"] != "ge_graph":
        return {}
    return {
        "experimental_config.frozen_parameter": True,
        "experimental_config.tiling_schedule_optimize": True,
        "experimental_config.topology_sorting_strategy": "StableRDFS",
    }


def _topology(config: Config, derived: Mapping[str, Any]) -> dict[str, int]:
    return {
        "world_size": config.values["world_size"],
        "tensor_parallel": config.values["attn_tp_size"],
        "pipeline_parallel": 1,
        "expert_parallel": derived["moe_ep_size"],
        "data_parallel": derived["attn_dp_size"],
        "context_parallel": config.values["cp_size"],
    }


def _task_queue(config: Config) -> str:
    graph = config.values["exe_mode"] == "npugraph_ex" or config.values["platform_version"] == "950"
    return "1" if graph else "2"


def _launch(config: Config, kind: str) -> dict[str, str]:
    # These two join it into a path, and so fail where it is not set.
    return {"CASE_NAME": _run_name(config)} if _keeps_cache_beside_code(config, kind) else {}


def _keeps_cache_beside_code(config: Config, kind: str) -> bool:
    return config.family == "B" and (kind == "glm_5_2" or kind.startswith("pangu"))


def _run_name(config: Config) -> str:
    """Return a run's name as the launch script makes it."""
    return f"{config.values['model_name']}_{PurePath(config.name).stem}"


def _cache_dir(config: Config, kind: str) -> str:
    case = _run_name(config)
    if _keeps_cache_beside_code(config, kind):
        suffix = ", _compute and _reuse behind it for the draft's two graphs" if kind == "glm_5_2" else ""
        return f"compile_cache/{case} beside the model's code{suffix}"
    output = config.values.get("output_path")
    if output:
        return f"{output}/compile_cache"
    return f"$WORK_DIR/res/<date>/{case}/compile_cache: a new folder each day, so every midnight would start cold"


def _case_name(config: Config) -> str:
    """Return the case's name: the file's, with the platform, since two platforms have files of one name."""
    parts = [PurePath(config.name).stem, config.values["platform_version"] or ""]
    if "platform_version" not in config.written:
        parts.pop()
    text = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts)).strip("-._")
    return text[:128] or "config"


def _unsupported(config: Config, kind: str) -> str | None:
    where = ".".join(str(step) for step in config.written.get("exe_mode", ("exe_mode",)))
    if config.values["exe_mode"] == "ge_graph":
        return f"{where} ge_graph: this version builds npugraph_ex only; the program runs as it did without cachectl"
    if kind.startswith("pangu") and config.family == "B" and config.values["exe_mode"] == "npugraph_ex":
        return f"{where} acl_graph: {config.values['model_name']} compiles through torchair, which is not built here"
    return None


def _is_lifted(config: Config, kind: str) -> bool:
    return kind == "kimi_k3" and config.family == "B"


def _inert(config: Config, kind: str) -> str | None:
    if config.values["exe_mode"] == "eager":
        where = ".".join(str(step) for step in config.written.get("exe_mode", ("model_config", "exe_mode")))
        return f"{where} eager: nothing is compiled, so there is nothing to cache"
    if _is_lifted(config, kind):
        return "kimi_k3 calls torch.compile whatever enable_cache_compile says: run it under exec --lift"
    if not config.values["enable_cache_compile"]:
        return "model_config.enable_cache_compile false: the program calls torch.compile, whose graphs it does not keep"
    return None
