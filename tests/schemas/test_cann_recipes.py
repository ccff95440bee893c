"""Whole cann-recipes configs: families, traps, derived sizes, methods and options, and what the framework refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachectl.errors import ConfigError
from cachectl.schemas.cann_recipes import Framework, model_files, read_framework
from cachectl.schemas.cann_recipes_fields import FIELDS
from cachectl.schemas.cann_recipes_reading import read_config
from cachectl.schemas.canonical import digest_of
from cachectl.schemas.recipe_reading import load_recipe
from tests.schemas.cann_recipes import CONFIGS, base, changed, framework, note_of, raw, refused

_SHARED = os.environ.get("CACHECTL_RECIPES_YAML") or Path(__file__).parents[3] / "shared" / "recipes_yaml"


def summary(found: Framework) -> str:
    """Return one line of what a config is read as."""
    sizes = "/".join(str(found.topology[name]) for name in found.topology if name != "pipeline_parallel")
    flags = [f"dynamic={found.dynamic}", f"notes={len(found.notes)}"]
    flags += [name for name in ("unsupported", "inert") if getattr(found, name) is not None]
    return " ".join([found.family, found.mode, "+".join(found.methods), sizes, *flags])


@pytest.mark.skipif(not Path(_SHARED).is_dir(), reason="CACHECTL_RECIPES_YAML names no folder of configs")
def test_real_configs_are_read_as_the_golden_summary_says() -> None:
    """Every published config is parsed, or refused for the stated reason."""
    lines = []
    for path in sorted(Path(_SHARED).rglob("*.yaml")):
        name = path.relative_to(_SHARED).as_posix()
        try:
            found = summary(read_framework(name, path.read_bytes(), {}))
        except ConfigError as error:
            found = "refused: " + str(error).removeprefix(f"{name}: ").partition(":")[0]
        lines.append(f"{name}: {found}\n")

    assert (CONFIGS / "golden.txt").read_text() == "".join(lines)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a_decode", "A npugraph_ex main_decode+mtp_decode 8/2/4/4/1 dynamic=False notes=1"),
        ("a_traps", "A npugraph_ex main_decode 4/1/4/4/1 dynamic=True notes=13 inert"),
        ("a_afd", "A npugraph_ex main_decode+mtp_decode 8/2/4/2/1 dynamic=True notes=1"),
        ("a_prefill_tokens", "A npugraph_ex main_decode 4/1/4/4/4 dynamic=True notes=1"),
        ("b_executor", "B npugraph_ex main_decode+mtp_decode 4/2/4/2/1 dynamic=False notes=1"),
        (
            "b_glm",
            "B npugraph_ex main_decode+main_decode_mtp_compute+main_decode_mtp_reuse 4/1/4/4/4 dynamic=False notes=2",
        ),
        ("b_pangu", "B npugraph_ex decode 1/1/1/1/1 dynamic=True notes=1 unsupported"),
        ("b_kimi", "B npugraph_ex decode 4/4/4/1/1 dynamic=True notes=1 inert"),
    ],
)
def test_config_of_families_a_and_b_is_understood(name: str, expected: str) -> None:
    """Mode, methods and sizes: world, tensor, expert, data and context parallel."""
    assert expected == summary(framework((CONFIGS / f"{name}.yaml").read_text()))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (base("c_script"), ["entry_script and model_args", "cache_compile", "cachectl record -- CMD"]),
        (base("d_program"), ["exe and devices", "C++", "cachectl record -- CMD"]),
        ({"model_config": {}, "x": 1}, ["it has model_config, x", "scheduler_config (family A)", "entry_script"]),
        ({"exe_mode": "eager", "world_size": 1}, ["exe_mode, world_size, model_config (family B)"]),
        ("", ["is empty", "name a cann-recipes config"]),
        ("- a", ["holds a list, wanted a mapping"]),
        ("a: [", ["not YAML"]),
    ],
)
def test_config_of_another_kind_is_refused_with_what_was_looked_for(document: Any, words: list[str]) -> None:
    """Families C and D by their reason, everything else by what it lacks."""
    text = refused(document)

    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("exe_mode", "drops it without a word; did you mean model_config.exe_mode?"),
        ("model_config.exe_mode", "older versions of the framework call npugraph_ex"),
        ("model_config.platform_version", 'taken as "950"'),
        ("model_config.perfect_eplb", "counted as force_eplb"),
        (
            "model_config.enable_cache_complie",
            "drops it without a word; did you mean model_config.enable_cache_compile?",
        ),
        ("model_config.enable_multi_streams", "did you mean model_config.custom_params.enable_multi_streams?"),
        ("model_config.custom_params", "present but empty, taken as absent"),
        ("parallel_config.oproj_tp_size", "counted as o_proj_tp_size"),
        ("parallel_config.moe_ep_size", "overwrites 2 with 4"),
        ("parallel_config.pp_size", "the framework drops it without a word"),
        ("scheduler_config.pa_block_size", "counted as block_size"),
    ],
)
def test_trap_is_told_by_its_name(field: str, words: str) -> None:
    """What the framework says nothing of is said here, at the field."""
    note = note_of(framework((CONFIGS / "a_traps.yaml").read_text()), field)

    assert note is not None
    assert words in note


def test_trap_free_config_has_no_notes() -> None:
    """A config in which nothing is dropped, whose model is there, is read in silence."""
    found = framework(base("a_decode"), "{}")

    assert () == found.notes


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"platform_version": 950}, {"platform_version": "950"}),
        ({"enable_weight_nz": 1}, {"enable_weight_nz": True}),
        ({"force_eplb": 0}, {}),
        ({"custom_params": None}, {"custom_params": {}}),
        ({"exe_mode": "acl_graph"}, {"exe_mode": "npugraph_ex"}),
        ({"dtype": "bfloat16"}, {}),
        ({"model_path": "/a/b"}, {"model_path": "c"}),
    ],
)
def test_same_meaning_is_the_same_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Spellings, written-out defaults and paths don't count."""
    start = base("a_decode")
    for name in {*one, *other}:
        start["model_config"].pop(name, None)
    documents = []
    for fields in (one, other):
        copy = changed(start, "model_config", "exe_mode", "npugraph_ex")
        copy["model_config"].update(fields)
        documents.append(json.dumps(framework(copy).document, sort_keys=True))

    assert documents[0] == documents[1]


def test_empty_section_is_an_absent_one() -> None:
    """The framework ends in an AttributeError there, which is said."""
    empty = framework({**base("a_decode"), "data_config": None})
    absent = {name: value for name, value in base("a_decode").items() if name != "data_config"}

    assert framework(absent).document == empty.document
    assert "present but empty" in str(note_of(empty, "data_config"))


@pytest.mark.parametrize(("name", "next_n", "share", "expected"), [
    ("a_decode", 0, None, ["main_decode"]),
    ("a_decode", 2, None, ["main_decode", "mtp_decode"]),
    ("b_glm", 0, None, ["main_decode"]),
    ("b_glm", 1, True, ["main_decode", "main_decode_mtp_compute"]),
    ("b_glm", 2, True, ["main_decode", "main_decode_mtp_compute", "main_decode_mtp_reuse"]),
    ("b_glm", 2, False, ["main_decode", "main_decode_mtp"]),
])  # fmt: skip
def test_methods_are_those_that_the_program_caches(
    name: str, next_n: int, share: bool | None, expected: list[str]
) -> None:
    """By draft steps, and for GLM by what the model's config.json says of shared choices."""
    model = json.dumps({"index_share_for_mtp_iteration": share}) if share is not None else None

    found = framework(changed(base(name), "model_config", "next_n", next_n), model)

    assert expected == list(found.methods)


def test_afd_ranks_hold_different_methods() -> None:
    """The upper half drafts, the lower half runs feed-forward only."""
    assert {"mtp_decode": (4, 5, 6, 7)} == framework(base("a_afd")).ranks


def test_glm_with_a_shared_indexer_caches_what_one_set_of_options_allows() -> None:
    """main_decode is compiled with clone_input false, the draft's graphs are not: that is told."""
    found = framework(changed(base("b_glm"), "model_config", "shared_indexer_offload", True))

    assert (("main_decode",), False) == (found.methods, found.options["clone_input"])
    assert "clone_input" in str(note_of(found, "shared_indexer_offload"))


@pytest.mark.parametrize(
    ("mode", "static", "options", "compiler_config"),
    [
        (
            "npugraph_ex",
            True,
            {
                "frozen_parameter": True,
                "static_kernel_compile": True,
                "super_kernel_optimize": False,
                "super_kernel_optimize_options": {"dcci_disable_on_kernel": [".*"]},
            },
            {},
        ),
        (
            "ge_graph",
            False,
            {},
            {
                "experimental_config.frozen_parameter": True,
                "experimental_config.tiling_schedule_optimize": True,
                "experimental_config.topology_sorting_strategy": "StableRDFS",
            },
        ),
    ],
)
def test_options_are_those_that_the_framework_passes(
    mode: str, static: bool, options: dict[str, Any], compiler_config: dict[str, Any]
) -> None:
    """Switches of the config end up in the options of its compiler."""
    document = changed(base("a_decode"), "model_config", "exe_mode", mode)

    found = framework(changed(document, "model_config", "enable_static_kernel", static))

    assert (options, compiler_config) == (found.options, found.compiler_config)


@pytest.mark.parametrize(
    ("mode", "platform", "expected"),
    [("npugraph_ex", "A3", "1"), ("ge_graph", "A3", "2"), ("eager", "A2", "2"), ("ge_graph", "950", "1")],
)
def test_task_queue_is_what_the_framework_overwrites_it_with(mode: str, platform: str, expected: str) -> None:
    """1 for npugraph_ex and on the 950, else 2, whatever the pod sets."""
    document = changed(base("a_decode"), "model_config", "exe_mode", mode)

    found = framework(changed(document, "model_config", "platform_version", platform))

    assert {"TASK_QUEUE_ENABLE": expected} == found.environment


@pytest.mark.parametrize(("platform", "case"), [("A3", "glm_w8a8-A3"), ("950", "glm_w8a8-950"), (None, "glm_w8a8")])
def test_case_name_holds_the_platform(platform: str | None, case: str) -> None:
    """Two platforms have files of one name (GLM-5.2): their cases are two."""
    document = base("a_decode")
    document["model_config"].pop("platform_version")
    if platform is not None:
        document["model_config"]["platform_version"] = platform

    assert case == read_framework(f"config/ci_{platform}/glm_w8a8.yaml", raw(document), {}).case


@pytest.mark.parametrize(("name", "launch"), [("a_decode", {}), ("b_glm", {"CASE_NAME": "GLM-5.2_config"})])
def test_launch_holds_what_the_program_fails_without(name: str, launch: dict[str, str]) -> None:
    """GLM-5.2 joins CASE_NAME into a path; the launch script makes it of the model's and the file's names."""
    assert launch == framework(base(name)).launch


def test_cache_dir_of_the_framework_holds_the_date() -> None:
    """Without cachectl every midnight is a cold start; an output_path of the file's own ends that."""
    assert "every midnight would start cold" in framework(base("a_decode")).cache_dir
    assert "/out/compile_cache" == framework(changed(base("a_decode"), "model_config", "output_path", "/out")).cache_dir


@pytest.mark.parametrize(
    ("field", "value", "attribute", "words"),
    [
        ("enable_cache_compile", False, "inert", "enable_cache_compile false: the program calls torch.compile"),
        ("exe_mode", "eager", "inert", "exe_mode eager: nothing is compiled"),
        ("exe_mode", "ge_graph", "unsupported", "exe_mode ge_graph: this version builds npugraph_ex only"),
    ],
)
def test_setting_that_makes_caching_inert_is_named(field: str, value: Any, attribute: str, words: str) -> None:
    """Which one it is, so that one edit mends it."""
    found = framework(changed(base("a_decode"), "model_config", field, value))

    assert words in str(getattr(found, attribute))


def test_models_config_is_in_the_key_where_it_is_there() -> None:
    """By its content: another layer count is another key, other spaces, labels and places are not."""
    document = base("a_decode")
    texts = ['{"num_hidden_layers": 4}', '{ "num_hidden_layers":4, "_name_or_path": "/x" }', '{"num_hidden_layers": 5}']

    one, same, other = [framework(document, text).document for text in texts]

    assert one == same
    assert one != other
    assert one != framework(document).document


def test_models_config_that_is_not_there_is_told() -> None:
    """The key then says nothing of the model, and the reader knows."""
    (note,) = framework(base("a_decode")).notes

    assert "config.json is not seen at weights" in note


@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff"])
def test_models_config_that_is_none_is_refused(data: bytes) -> None:
    """Damaged weights folders are told by their file."""
    with pytest.raises(ConfigError) as raised:
        framework(base("a_decode"), data)

    assert "weights/config.json" in str(raised.value)


def test_model_files_are_looked_for_beside_recipe_and_script() -> None:
    """An absolute path is one place; a relative one may be relative to either; ranks may have folders of their own."""
    document = changed(base("a_decode"), "model_config", "model_path", "/data/m")

    absolute = model_files(raw(document), "c.yaml", ["", "app"])
    relative = model_files(raw(base("a_decode")), "c.yaml", ["", "app"])

    assert {"model_path": ("/data/m/config.json", "/data/m/rank_0/config.json")} == absolute
    assert ("weights", "weights/rank_0", "app/weights", "app/weights/rank_0") == tuple(
        str(Path(place).parent) for place in relative["model_path"]
    )


# What a field may hold in a file that somebody edited in a hurry.
_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 10**12),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "A3", "npugraph_ex", "http://user:word@host/x", "../up", "/", "\u00e9", "8"]),
    st.lists(st.integers(0, 2), max_size=2),
    st.dictionaries(st.sampled_from(["enable_afd", "a", "api_key"]), st.booleans(), max_size=2),
)
_NAMES = [field.name for field in FIELDS] + ["novel", "moe_ep_size", "master_port", "model_config", "parallel_config"]


@settings(max_examples=50)
@given(
    name=st.sampled_from(["a_decode", "a_afd", "b_executor", "b_glm", "b_kimi"]),
    section=st.sampled_from(["", "model_config", "data_config", "parallel_config", "scheduler_config"]),
    fields=st.dictionaries(st.sampled_from(_NAMES), _ODD, max_size=3),
)
def test_config_of_odd_values_is_read_or_refused_in_one_line(name: str, section: str, fields: dict[str, Any]) -> None:
    """Nothing that YAML can hold ends in anything but an answer, the same one twice, without what stands in URLs."""
    document = base(name)
    holder = document.setdefault(section, {}) if section else document
    holder.update(fields)

    answers = []
    for _ in range(2):
        try:
            found = framework(document)
            assert "user:word" not in repr(found.document)
            answers.append(digest_of(found.document))
        except ConfigError as error:
            answers.append(str(error))

    assert answers[0] == answers[1]
    assert "\n" not in answers[0]


@pytest.mark.parametrize("place", ["c.yaml", "weights/config.json"])
def test_pipe_in_a_files_place_is_refused_and_not_waited_for(tmp_path: Path, place: str) -> None:
    """Opening a pipe waits for its writer, and there is none."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "c.yaml").write_bytes(raw(changed(base("a_decode"), "model_config", "model_path", "weights")))
    (tmp_path / place).unlink(missing_ok=True)
    os.mkfifo(tmp_path / place)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "schema: cachectl/recipe/v1\nname: piped\nframework: {kind: cann-recipes, config: c.yaml}\n"
        "command: [python, infer.py]\n"
    )

    with pytest.raises(ConfigError, match=f"{place}: is a pipe"):
        load_recipe(recipe)


def test_config_of_many_unknown_names_is_refused_in_a_line_that_can_be_read() -> None:
    """The first names say what kind of file it is."""
    raw = "\n".join(f"field_{number}: 1" for number in range(2000)).encode()

    with pytest.raises(ConfigError) as raised:
        read_config("c.yaml", raw)

    assert "field_11, more; looked for" in raised.value.message
    assert "field_12" not in raised.value.message
