"""Each field of a cann-recipes config in both directions: those in the key change it, those that are not don't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cachectl.schemas.cann_recipes_fields import (
    DERIVED,
    FIELDS,
    KNOWN_CUSTOM_PARAMS,
    TOP,
    ConfigField,
    address_reason,
    field_named,
    in_key,
)
from tests.schemas.cann_recipes import base, changed, framework

# Another value than the base config's, one that the framework takes beside it.
OTHER: dict[str, Any] = {
    "model_name": "tiny_other",
    "exe_mode": "ge_graph",
    "enable_dynamic_graph": True,
    "next_n": 2,
    "platform_version": "A2",
    "dtype": "float16",
    "custom_params": {"enable_multi_streams": False},
    "world_size": 16,
    "cp_size": 8,
    "batch_size": 32,
    "block_size": 256,
    "enable_weight_nz": False,
    "with_ckpt": False,
    "enable_cache_compile": False,
    "seed": 7,
    "mem_fraction_static": 0.5,
    "temperature": 0.25,
    "top_p": 0.5,
    "offline_prefill_dp_group_size": 2,
}
PLACES = [
    (family, section, field) for family in "AB" for field in FIELDS if (section := field.section(family)) is not None
]


def base_of(family: str) -> dict[str, Any]:
    """Return a config that all single changes of this module leave valid."""
    if family == "A":
        return base("a_decode")
    return base("b_executor")


def other_value(field: ConfigField) -> Any:
    """Return a value that no base config has for the field."""
    if field.name in OTHER:
        return OTHER[field.name]
    return {bool: True, int: 8 if field.name.endswith("_size") else 99, float: 0.5, str: "elsewhere"}[field.kind]


@pytest.mark.parametrize(("family", "section", "field"), PLACES, ids=[f"{f}-{i.name}" for f, _, i in PLACES])
def test_field_changes_the_key_exactly_if_its_class_says_so(family: str, section: str, field: ConfigField) -> None:
    """One other value, everything else as it was."""
    document = base_of(family)
    if field.name == "cp_size":
        # The framework takes context and attention parallel together only where one of them is 1.
        document = changed(document, "parallel_config", "attn_tp_size", 1)
        document = changed(document, "parallel_config", "cp_size", 1)
    value = other_value(field)
    if family == "B" and field.name.endswith("_size"):
        value = {"cp_size": 4, "world_size": 8, "batch_size": 32, "block_size": 256}.get(field.name, 4)

    for synonym in field.synonyms:
        if synonym in document.get(section, document):
            document = changed(document, section, field.name, document.get(section, document)[synonym])
            document.get(section, document).pop(synonym)
    after = changed(document, section, field.name, value)

    assert in_key(field.use) is (framework(document).document != framework(after).document)


@pytest.mark.parametrize(("family", "section", "field"), PLACES, ids=[f"{f}-{i.name}" for f, _, i in PLACES])
def test_field_left_out_is_told_with_its_reason(family: str, section: str, field: ConfigField) -> None:
    """What is in the file and not in the key is listed, and nothing else is."""
    document = (
        changed(base_of(family), section, field.name, other_value(field)) if not in_key(field.use) else base_of(family)
    )
    label = f"{section}.{field.name}" if section else field.name

    left_out = {item.name: item.why for item in framework(document).left_out}

    assert (None if in_key(field.use) else field.why) == left_out.get(label)


@pytest.mark.parametrize(
    ("family", "section", "field", "synonym"),
    [(family, section, field, synonym) for family, section, field in PLACES for synonym in field.synonyms],
)
def test_synonym_is_the_field_itself(family: str, section: str, field: ConfigField, synonym: str) -> None:
    """Either name gives one key, and two values under two names are refused."""
    document = base_of(family)
    for spelling in (field.name, *field.synonyms):
        document.get(section, document).pop(spelling, None)
    value = {"force_eplb": True, "o_proj_tp_size": 1}.get(field.name, 64)

    one = framework(changed(document, section, field.name, value))
    other = framework(changed(document, section, synonym, value))

    assert one.document == other.document
    assert one.document != framework(document).document or field.name == "o_proj_tp_size"


@pytest.mark.parametrize("family", ["A", "B"])
@pytest.mark.parametrize("section", ["model_config", "parallel_config", "data_config", TOP])
def test_unknown_field_is_in_the_key(family: str, section: str) -> None:
    """A field that nobody knows may shape the graph: both its being there and its value count (field report W5)."""
    document = base_of(family)
    values = [framework(changed(document, section, "novel_switch", value)).document for value in (1, 2)]

    assert framework(document).document not in values
    assert values[0] != values[1]


@pytest.mark.parametrize(
    "name", ["master_port", "serve_port", "bootstrap_host", "hosts", "ips", "store_url", "local_ip"]
)
def test_address_is_not_in_the_key(name: str) -> None:
    """Hosts and ports say where, not what, at whatever place they stand."""
    document = base("a_decode")

    found = framework(changed(document, TOP, name, "10.0.0.7"))

    assert framework(document).document == found.document
    assert "an address or a port" == address_reason(name)
    assert [name] == [item.name for item in found.left_out if item.name == name]


@pytest.mark.parametrize("name", ["report", "export_mode", "shipping", "hosted_experts", "support_nz"])
def test_address_reason_takes_no_other_name(name: str) -> None:
    """A name that only holds the letters of one is a field like any other."""
    assert address_reason(name) is None


@pytest.mark.parametrize("name", KNOWN_CUSTOM_PARAMS)
def test_custom_param_is_in_the_key(name: str) -> None:
    """All of custom_params counts, at least one level deep."""
    document = base("a_decode")
    # Whatever the switch does, the sizes of this config have to stay valid.
    value = 2 if name != "enable_afd" else False

    after = changed(
        document, "model_config", "custom_params", {**document["model_config"]["custom_params"], name: value}
    )

    assert (
        framework(document).document != framework(after).document or name in document["model_config"]["custom_params"]
    )


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("enable_multi_streams", True, 1),
        ("enable_multi_streams", False, 0),
        ("micro_batch_mode", True, 1),
        ("nested", {"enable_x": [1, 0], "level": [True]}, {"enable_x": [True, False], "level": [1]}),
    ],
)
def test_custom_param_zero_and_one_are_booleans(name: str, one: Any, other: Any) -> None:
    """The framework asks for truth only; a level of 2 stays a number."""
    document = base("a_decode")
    found = [
        framework(changed(document, "model_config", "custom_params", {name: value})).document["config"]
        for value in (one, other, 2)
    ]

    assert found[0] == found[1]
    assert repr(found[0]) == repr(found[1])
    assert found[1] != found[2]


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("model_config", "hub_token", "hf_abc"),
        ("model_config", "custom_params", {"api_key": "abc", "n": {"pass_key": "x"}}),
    ],
)
def test_secret_is_neither_in_the_key_nor_shown(section: str, name: str, value: Any) -> None:
    """By its name, at whatever depth; that it was left out is told."""
    found = framework(changed(base("a_decode"), section, name, value))

    assert "abc" not in repr(found)
    assert [item.why for item in found.left_out if item.why == "a secret by its name"]


def test_document_lists_every_field_with_its_class_and_reason() -> None:
    """The table of docs/cann-recipes.md is this table."""
    text = (Path(__file__).parents[2] / "docs" / "cann-recipes.md").read_text(encoding="utf-8")
    rows = [line for line in text.partition("| field | section |")[2].splitlines() if line.startswith("| `")]
    named = {None: "-", TOP: "(top)"}

    expected = [
        f"| {', '.join(f'`{name}`' for name in (field.name, *field.synonyms))} "
        f"| {named.get(field.a, field.a)} / {named.get(field.b, field.b)} | {field.use} | {field.why} |"
        for field in FIELDS
    ]

    assert expected == rows[: len(expected)]


def test_fields_have_one_name_each() -> None:
    """No name or synonym means two fields in one section, so a file can't be read in two ways."""
    for family in "AB":
        names = [
            (section, name) for f, section, field in PLACES if f == family for name in (field.name, *field.synonyms)
        ]
        assert len(names) == len(set(names))
    assert not [
        name for name in DERIVED if any(field_named(f, s, name) for f in "AB" for s in ("parallel_config", TOP))
    ]
