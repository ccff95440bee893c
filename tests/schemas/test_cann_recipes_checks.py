"""The sizes of cann-recipes configs: derived as the framework derives them, refused as it refuses them, in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cachectl.errors import ConfigError
from tests.schemas.cann_recipes import base, changed, framework, note_of, refused


@pytest.mark.parametrize(
    ("place", "value", "what", "hint"),
    [
        ("parallel_config.attn_tp_size", 3, "3 does not divide world_size 8", "write a divisor of 8"),
        ("parallel_config.shared_tp_size", 16, "16 does not divide world_size 8", "write a divisor of 8"),
        ("parallel_config.moe_tp_size", 0, "0 is less than 1", "write 1 or more"),
        ("parallel_config.world_size", -8, "-8 is less than 1", "write 1 or more"),
        ("parallel_config.world_size", "8", "'8' is text, wanted a number", "write it plain, such as 4"),
        ("parallel_config.world_size", 10**12, "1000000000000 is more than 131072 ranks", "check the number"),
        ("parallel_config.cp_size", 2, "2 is not world_size 8", "write 1 or 8"),
        ("parallel_config.offline_prefill_dp_group_size", 3, "3 does not divide world_size 8", "write a divisor of 8"),
        ("model_config.exe_mode", "npugraph", "'npugraph' is no mode that the framework knows", "write npugraph_ex"),
        (
            "model_config.exe_mode",
            "cuda",
            "'cuda' is no mode that the framework knows",
            "write one of eager, ge_graph, npugraph_ex",
        ),
        ("model_config.platform_version", "a3", "'a3' is no platform that the framework knows", 'write "A3"'),
        ("model_config.next_n", -1, "-1 is negative", "write 0 or more"),
        (
            "model_config.next_n",
            1.5,
            "1.5 is a number with a point, wanted a whole number",
            "write it plain, such as 4",
        ),
        (
            "model_config.enable_weight_nz",
            "False",
            "'False' is text, and text counts as true",
            "write true or false, without quotes",
        ),
        ("model_config.enable_weight_nz", 2, "2 is no switch", "write true or false"),
        ("model_config.dtype", None, "is empty", "fill it in or remove the line"),
        ("model_config.model_name", 7, "7 is a whole number to YAML, wanted text", 'quote it: "7"'),
        ("model_config.custom_params", [1], "is a list, wanted a mapping", "write name: value pairs"),
        ("data_config.temperature", -1.0, "-1.0 is negative", "write 0 or more"),
        ("data_config.top_p", 1.5, "1.5 is not between 0 and 1", "write a share, such as 0.85"),
        ("data_config.input_truncated_len", 0, "0 is less than 1", "write 1 or more"),
        ("scheduler_config.mem_fraction_static", 85, "85.0 is not between 0 and 1", "write a share, such as 0.85"),
        ("scheduler_config.batch_size", True, "True is a boolean, wanted a number", "write it plain, such as 4"),
    ],
)
def test_config_that_the_framework_refuses_is_refused_in_one_line(place: str, value: Any, what: str, hint: str) -> None:
    """File, field, value and the way out, before any rank starts."""
    section, _, field = place.partition(".")

    assert f"{place}: {what}; {hint}" == refused(changed(base("a_decode"), section, field, value))


def test_context_parallel_beside_attention_parallel_is_refused() -> None:
    """The framework cuts the context over all ranks, and then takes attention whole."""
    document = changed(base("a_decode"), "parallel_config", "cp_size", 8)

    assert "parallel_config.attn_tp_size: 2 beside cp_size 8; write attn_tp_size: 1" == refused(document)


def test_static_kernel_without_npugraph_ex_is_refused() -> None:
    """The framework's own check, with both values in the line."""
    document = changed(base("a_decode"), "model_config", "exe_mode", "ge_graph")

    text = refused(changed(document, "model_config", "enable_static_kernel", True))

    assert "model_config.enable_static_kernel: true beside exe_mode ge_graph: only npugraph_ex compiles" in text


@pytest.mark.parametrize(("command", "outcome"), [("infer.py", "refused"), ("server.py", "silent"), ("x.py", "noted")])
def test_batch_that_ranks_cannot_share_is_refused_where_the_framework_does(command: str, outcome: str) -> None:
    """infer.py refuses it, the server does not ask; where neither is known it is a note."""
    document = changed(base("a_decode"), "scheduler_config", "batch_size", 6)
    try:
        note = note_of(framework(document, None, "python", command), "scheduler_config.batch_size")
    except ConfigError as error:
        note = str(error)
        assert outcome == "refused"
    else:
        assert outcome == ("noted" if note else "silent")

    assert (note is None) is (outcome == "silent")
    assert note is None or "6 is not divisible by the 4 data-parallel groups of world_size 8" in note


@pytest.mark.parametrize(
    ("name", "section", "field", "value", "words"),
    [
        ("b_glm", "model_config", "next_n", 4, "next_n: 4 is more than GLM-5.2 drafts"),
        ("b_glm", "data_config", "batch_size", 6, "data_config.batch_size: 6 is not divisible by the 4"),
        ("b_kimi", "model_config", "next_n", 1, "next_n: 1 beside draft_model_type none"),
        ("b_kimi", "parallel_config", "attn_tp_size", 2, "attn_tp_size: 2: this model takes attention whole"),
        ("b_kimi", "parallel_config", "moe_tp_size", 2, "moe_tp_size: 2: this model does not cut experts"),
        ("b_kimi", "parallel_config", "oproj_tp_size", 1, "oproj_tp_size: 1 is not attn_tp_size 4"),
        ("a_afd", "parallel_config", "world_size", 7, "world_size: 7"),
        ("a_afd", "parallel_config", "lmhead_tp_size", 8, "lmhead_tp_size: 8 does not divide 4, half of world_size 8"),
    ],
)
def test_models_own_rule_is_kept(name: str, section: str, field: str, value: Any, words: str) -> None:
    """What a model's infer.py or AFD refuses."""
    document = changed(base(name), section, field, value)
    if field == "world_size":
        document["parallel_config"]["attn_tp_size"] = 1
        document["scheduler_config"]["batch_size"] = 7

    assert words in refused(document)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "a_decode",
            {
                "attn_dp_size": 4,
                "moe_ep_size": 4,
                "embed_dp_size": 4,
                "cp_prefill_dp_size": 4,
                "batch_size_per_dp_rank": 4,
                "max_prefill_tokens": 1024,
            },
        ),
        ("a_afd", {"attn_dp_size": 2, "moe_ep_size": 4, "embed_dp_size": 4, "batch_size_per_dp_rank": 4}),
        ("a_prefill_tokens", {"cp_prefill_dp_size": 1, "batch_size_per_dp_rank": 2, "max_prefill_tokens": 3000}),
        ("b_executor", {"attn_dp_size": 2, "moe_dp_size": 4, "max_position_embeddings": 64 * 2 + 512}),
        ("b_glm", {"max_position_embeddings": 64 * 4 + 4104, "pa_max_length": 4480, "enable_weight_nz": False}),
    ],
)
def test_derived_sizes_are_those_of_the_framework(name: str, expected: dict[str, Any]) -> None:
    """World over tensor parallel, batch over the groups, and lengths, each as the framework rounds them."""
    derived = framework(base(name)).document["derived"]

    assert expected == {size: derived[size] for size in expected}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"num_attention_heads": 7}, "attn_tp_size: num_attention_heads 7 of the model's config.json is not divisible"),
        ({"num_experts": 6}, "moe_tp_size: num_experts 6 of the model's config.json is not divisible by moe_ep_size 4"),
    ],
)
def test_sizes_are_held_against_the_model(model: dict[str, int], message: str) -> None:
    """Heads and experts that can't be cut so, as the framework finds on every rank."""
    with pytest.raises(ConfigError) as raised:
        framework(base("a_decode"), json.dumps(model))

    assert message in str(raised.value)
