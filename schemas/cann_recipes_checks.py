"""The sizes of a cann-recipes config: what the framework derives from them, and what it refuses.

Owns the framework's arithmetic, so that a config fails here, in one line, and not on every rank. Facts:
executor/core/config/inference_config.py, executor/offline/infer.py, models/*/infer.py and check_model_settings of
cann-recipes-infer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cachectl.schemas.cann_recipes_fields import DERIVED
from cachectl.schemas.cann_recipes_reading import Config
from cachectl.schemas.recipe_words import show

__all__ = ["check_model", "derive", "is_afd", "model_kind"]

_TP_SIZES = (
    "attn_tp_size",
    "moe_tp_size",
    "embed_tp_size",
    "lmhead_tp_size",
    "dense_tp_size",
    "shared_tp_size",
    "o_proj_tp_size",
)
# How many draft steps a model takes.
_MOST_DRAFTS = {"deepseek_r1": 3, "deepseek_v4": 3, "kimi_k2_thinking": 3, "longcat_flash": 2, "glm_5_2": 3}


def model_kind(config: Config) -> str:
    """Return a model's name as its folder is spelled: GLM-5.2 is glm_5_2."""
    name = str(config.values.get("model_name") or "")
    return name.lower().replace("-", "_").replace(".", "_")


def is_afd(config: Config) -> bool:
    """Say whether attention and feed-forward run on ranks of their own, so that ranks hold different methods."""
    return bool(config.custom_params.get("enable_afd", False))


def derive(config: Config, *, offline: bool | None = None) -> dict[str, Any]:
    """Return the sizes that the framework works out, after refusing what it refuses.

    Args:
        config: as it was read; notes are added to it.
        offline: whether the framework's infer.py reads it, which refuses more than its server; None where that is not
            known.

    Raises:
        ConfigError: sizes that do not fit each other.
    """
    _refuse_unfit(config)
    values = config.values
    world, batch = values["world_size"], values["batch_size"]
    effective = world // 2 if is_afd(config) else world
    derived: dict[str, Any] = {
        "attn_dp_size": effective // values["attn_tp_size"],
        "moe_ep_size": effective // values["moe_tp_size"],
        "embed_dp_size": effective // values["embed_tp_size"],
    }
    if config.family == "A":
        derived["cp_prefill_dp_size"] = world // (values["attn_tp_size"] * values["cp_size"])
    else:
        derived["moe_dp_size"] = derived["moe_ep_size"]
    ranks = derived["embed_dp_size"] if model_kind(config).startswith("pangu") else derived["attn_dp_size"]
    if batch % ranks:
        what = f"{batch} is not divisible by the {ranks} data-parallel groups of world_size {world}"
        if config.family == "B" or offline:
            config.fail("batch_size", what, f"write a multiple of {ranks}")
        if offline is None:
            config.notes.append(f"scheduler_config.batch_size: {what}; the framework's infer.py refuses it")
    derived["batch_size_per_dp_rank"] = batch // ranks
    if config.family == "A":
        _derive_prefill(config, derived)
    else:
        _derive_lengths(config, derived)
        if model_kind(config) == "glm_5_2":
            _overwrite_weight_nz(config, derived)
    _drop_stated(config, derived)
    return derived


def check_model(config: Config, derived: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Hold the sizes against the model's own config.json, as the framework does.

    Raises:
        ConfigError: heads or experts that can't be cut so.
    """
    for name, size, label in (
        ("num_experts", derived["moe_ep_size"], "moe_ep_size"),
        ("num_attention_heads", config.values["attn_tp_size"], "attn_tp_size"),
    ):
        count = model.get(name)
        if type(count) is int and size > 0 and count % size:
            field = "moe_tp_size" if label == "moe_ep_size" else label
            config.fail(
                field,
                f"{name} {count} of the model's config.json is not divisible by {label} {size}",
                "choose sizes that divide it",
            )


def _refuse_unfit(config: Config) -> None:
    values = config.values
    world = values["world_size"]
    for name in (*_TP_SIZES, "cp_size"):
        if world % values[name]:
            config.fail(name, f"{values[name]} does not divide world_size {world}", f"write a divisor of {world}")
    if values["cp_size"] > 1:
        if values["cp_size"] != world:
            config.fail("cp_size", f"{values['cp_size']} is not world_size {world}", f"write 1 or {world}")
        if config.family == "A" and values["attn_tp_size"] != 1:
            config.fail(
                "attn_tp_size", f"{values['attn_tp_size']} beside cp_size {values['cp_size']}", "write attn_tp_size: 1"
            )
    if values["enable_static_kernel"] and values["exe_mode"] != "npugraph_ex":
        config.fail(
            "enable_static_kernel",
            f"true beside exe_mode {values['exe_mode']}: only npugraph_ex compiles static kernels",
            "write exe_mode: npugraph_ex, or enable_static_kernel: false",
        )
    group = values.get("offline_prefill_dp_group_size", 1)
    if group < 1 or world % group:
        config.fail(
            "offline_prefill_dp_group_size",
            f"{group} does not divide world_size {world}",
            f"write a divisor of {world}",
        )
    if is_afd(config):
        _refuse_unfit_afd(config)
    most = next((limit for name, limit in _MOST_DRAFTS.items() if model_kind(config) == name), None)
    if most is not None and values["next_n"] > most:
        config.fail("next_n", f"{values['next_n']} is more than {values['model_name']} drafts", f"write 0 to {most}")
    _refuse_unfit_models(config)


def _refuse_unfit_afd(config: Config) -> None:
    values = config.values
    world = values["world_size"]
    if world % 2:
        config.fail("world_size", f"{world} is odd, and enable_afd cuts it in two", "write an even number")
    for name in _TP_SIZES:
        if name != "shared_tp_size" and (world // 2) % values[name]:
            config.fail(
                name,
                f"{values[name]} does not divide {world // 2}, half of world_size {world} (enable_afd)",
                f"write a divisor of {world // 2}",
            )


def _refuse_unfit_models(config: Config) -> None:
    """Refuse what the models of family B refuse in their own infer.py."""
    values, kind = config.values, model_kind(config)
    if config.family != "B":
        return
    if kind == "glm_5_2":
        attn, embed = values["attn_tp_size"], values["embed_tp_size"]
        if attn > 1 and values["o_proj_tp_size"] > 1:
            config.fail(
                "o_proj_tp_size", f"{values['o_proj_tp_size']} beside attn_tp_size {attn}", "write 1 for one of them"
            )
        if embed % attn:
            config.fail(
                "embed_tp_size", f"{embed} is no multiple of attn_tp_size {attn}", f"write a multiple of {attn}"
            )
    elif kind == "kimi_k3":
        attn = values["attn_tp_size"]
        if attn not in (1, values["world_size"]):
            config.fail(
                "attn_tp_size",
                f"{attn}: this model takes attention whole or over all of world_size",
                f"write 1 or {values['world_size']}",
            )
        if "o_proj_tp_size" in config.written and values["o_proj_tp_size"] != attn:
            config.fail("o_proj_tp_size", f"{values['o_proj_tp_size']} is not attn_tp_size {attn}", f"write {attn}")
        if values["moe_tp_size"] != 1:
            config.fail("moe_tp_size", f"{values['moe_tp_size']}: this model does not cut experts", "write 1")
        if config.document.get("model_config", {}).get("draft_model_type", "none") == "none" and values["next_n"]:
            config.fail("next_n", f"{values['next_n']} beside draft_model_type none", "write 0, or name a draft model")
    elif kind.startswith("pangu") and values["batch_size"] % (values["world_size"] // values["moe_tp_size"]):
        ranks = values["world_size"] // values["moe_tp_size"]
        config.fail(
            "batch_size",
            f"{values['batch_size']} is not divisible by moe_ep_size {ranks}",
            f"write a multiple of {ranks}",
        )


def _derive_prefill(config: Config, derived: dict[str, Any]) -> None:
    """Work out max_prefill_tokens where it is 0, which stands for as many as one prefill can hold."""
    values = config.values
    per_rank, group = derived["batch_size_per_dp_rank"], values["offline_prefill_dp_group_size"]
    if group > 1 and per_rank % group:
        config.fail(
            "offline_prefill_dp_group_size",
            f"{group} does not divide the {per_rank} requests of a rank",
            f"write a divisor of {per_rank}",
        )
    tokens = values["max_prefill_tokens"]
    if not tokens:
        requests = per_rank
        if values["cp_size"] > 1:
            requests = values["batch_size"] // derived["cp_prefill_dp_size"]
            if values["cp_mini_batch"] > 0:
                requests = min(requests, values["cp_mini_batch"])
        tokens = values["input_truncated_len"] * requests
    derived["max_prefill_tokens"] = tokens


def _derive_lengths(config: Config, derived: dict[str, Any]) -> None:
    """Work out how long a sequence of family B may get, where the file says how long its input is."""
    values = config.values
    length = values.get("input_truncated_len")
    if length is None:
        return
    if model_kind(config) == "glm_5_2" and values["cp_size"] > 1:
        length = _align_up(length, 2 * values["cp_size"])
    longest = values["max_new_tokens"] * (values["next_n"] + 1) + length
    derived["max_position_embeddings"] = longest
    if model_kind(config) == "glm_5_2":
        derived["pa_max_length"] = _align_up(longest, values["block_size"])


def _overwrite_weight_nz(config: Config, derived: dict[str, Any]) -> None:
    """GLM-5.2 overwrites enable_weight_nz by the platform, whatever the file says."""
    derived["enable_weight_nz"] = config.values["platform_version"] != "950"
    if config.values.get("enable_weight_nz") not in (None, derived["enable_weight_nz"]):
        config.notes.append(
            f"model_config.enable_weight_nz: this model overwrites it with {derived['enable_weight_nz']} on "
            f"{config.values['platform_version']}"
        )
    config.document["model_config"].pop("enable_weight_nz", None)


def _drop_stated(config: Config, derived: Mapping[str, Any]) -> None:
    """Tell of derived sizes that the file states otherwise: the framework overwrites them without a word.

    One that this family does not derive is a field like any other.
    """
    for name in DERIVED:
        place = config.written.get(name)
        if place is None:
            continue
        if name not in derived:
            holder = config.document.setdefault(str(place[0]), {}) if len(place) > 1 else config.document
            holder[name] = config.values[name]
        elif config.values[name] != derived[name]:
            config.notes.append(
                f"{'.'.join(str(step) for step in place)}: the framework overwrites "
                f"{show(config.values[name])} with {derived[name]}"
            )


def _align_up(value: int, step: int) -> int:
    return -(-value // step) * step
