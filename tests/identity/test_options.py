"""The options part: every option with the wheel's default, none that is a handle, and the nearest name of a typo."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from cachectl.errors import ConfigError
from cachectl.identity.options import (
    DYNAMO_NOISE,
    HANDLES,
    dynamo_defaults,
    found_reasons,
    known_options,
    options_part,
    wheel_options,
)
from cachectl.schemas.canonical import digest_of
from tests.identity.wheels import WHEEL, write_options

USUAL = {
    "force_eager": False,
    "capture_limit": "64",
    "inplace_pass": True,
    "capture_error_mode": "global",
    "data_dump_dir": "./",
    "post_grad_custom_pre_pass": None,
    "sym_range": None,
    "super_kernel_optimize_options": None,
}


@pytest.fixture
def npu_folder(tmp_path: Path) -> Path:
    """A torch_npu with nine options, one of them a handle."""
    write_options(tmp_path)
    return tmp_path / "torch_npu"


@pytest.fixture
def torch_folder(tmp_path: Path) -> Path:
    """A torch with a few Dynamo fields."""
    write_options(tmp_path)
    return tmp_path / "torch"


def options(npu_folder: Path, **given: Any) -> dict[str, Any]:
    """Return the options of a recipe's part."""
    part = options_part({"mode": "npugraph_ex", "options": given}, npu_folder=npu_folder)
    found: dict[str, Any] = part["options"]
    return found


def test_options_part_fills_in_every_default(npu_folder: Path) -> None:
    """All options of the wheel but the handle, as the runtime says them: numbers are text."""
    assert USUAL == options(npu_folder)


@pytest.mark.parametrize(
    "given",
    [
        {"inplace_pass": True},
        {"capture_limit": 64},
        {"capture_error_mode": "global", "force_eager": False},
        {"data_dump_dir": "./"},
        {"super_kernel_optimize_options": None, "post_grad_custom_pre_pass": None},
        {"use_graph_pool": None},
    ],
    ids=str,
)
def test_options_part_explicit_default_is_the_omitted_one(npu_folder: Path, given: dict[str, Any]) -> None:
    """An option that is written out with its default makes no other key (field report S10)."""
    assert USUAL == options(npu_folder, **given)


@pytest.mark.parametrize(
    "given",
    [
        {"force_eager": True},
        {"force_eager": 0},
        {"inplace_pass": False},
        {"capture_limit": 65},
        {"capture_error_mode": "relaxed"},
        {"data_dump_dir": "/tmp"},
        {"post_grad_custom_pre_pass": "passes:fuse"},
        {"sym_range": [1, 2]},
        {"sym_range": None},
        {"super_kernel_optimize_options": {"dcci_disable_on_kernel": [".*"]}},
    ],
    ids=str,
)
def test_options_part_each_option_counts(npu_folder: Path, given: dict[str, Any]) -> None:
    """Each option changes the part, those that the runtime's own name forgets, too; 0 is not False to the runtime."""
    assert digest_of(USUAL) != digest_of(options(npu_folder, **given))


def test_options_part_order_is_none(npu_folder: Path) -> None:
    """Options in another order are the same part (field report S10)."""
    given = {"force_eager": True, "capture_limit": 8}

    assert digest_of(options(npu_folder, **given)) == digest_of(
        options(npu_folder, **dict(reversed(list(given.items()))))
    )


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"inplace_pas": True}, "no option 'inplace_pas'", "did you mean inplace_pass?"),
        ({"zzzz": True}, "no option 'zzzz'", "it has: capture_error_mode"),
        ({"capture_error_mode": "globl"}, "'globl' is no value of it", "'global', 'relaxed'"),
        ({"use_graph_pool": [1, 2]}, "use_graph_pool is a memory pool of one process", "leave it out"),
        ({"post_grad_custom_pre_pass": 3}, "3 names no function", "pkg.mod:fn"),
    ],
)
def test_options_part_wrong_option_is_one_line(
    npu_folder: Path, given: dict[str, Any], message: str, hint: str
) -> None:
    """The error names the option and the nearest one or what is allowed; it is the recipe's fault."""
    with pytest.raises(ConfigError, match=message) as caught:
        options(npu_folder, **given)

    assert 2 == caught.value.exit_code
    assert hint in str(caught.value.hint)
    assert 1 == len(str(caught.value).splitlines())


@pytest.mark.parametrize("text", ["", "class CompilerConfig:\n    pass\n", "class CompilerConfig(:\n", None])
def test_options_part_of_an_unknown_wheel_is_the_recipes(npu_folder: Path, text: str | None) -> None:
    """Where no defaults can be read an option counts as it is written, whatever its name."""
    file = npu_folder / "dynamo" / "npugraph_ex" / "configs" / "compiler_config.py"
    file.unlink()
    if text is not None:
        file.write_text(text)

    assert {"anything": 1} == options(npu_folder, anything=1)


def test_wheel_options_nested_form_is_unknown(npu_folder: Path) -> None:
    """torch_npu 2.10 nests its options in objects: no option can be read, so none is made up."""
    file = npu_folder / "dynamo" / "npugraph_ex" / "configs" / "compiler_config.py"
    file.write_text(WHEEL.replace("OptionValue(True, [True, False])", "_ExperimentalConfig()"))

    assert wheel_options(npu_folder) is None


def test_options_part_of_another_mode_is_the_recipes(npu_folder: Path) -> None:
    """GE has options of its own."""
    part = options_part({"mode": "ge_graph", "options": {"x": 1}}, npu_folder=npu_folder)

    assert {"x": 1} == part["options"]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"automatic_dynamic_shapes": True}, {}),
        ({"automatic_dynamic_shapes": False}, {"automatic_dynamic_shapes": False}),
        ({"recompile_limit": 9}, {}),
        ({"cache_size_limit": 9}, {}),
        ({"fail_on_recompile_limit_hit": True, "specialize_int": True}, {"specialize_int": True}),
        ({"specialize_int": 0}, {"specialize_int": 0}),
        ({"twice": 1}, {"twice": 1}),
        ({"verbose": True}, {}),
    ],
    ids=str,
)
def test_options_part_dynamo_fields_without_defaults_and_noise(
    torch_folder: Path, fields: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """A field at its default is as if left out, an older name is the newer one, and what only logs is left out."""
    assert wanted == options_part({"dynamo": fields}, torch_folder=torch_folder)["dynamo"]


def test_options_part_unknown_dynamo_field_names_the_nearest(torch_folder: Path) -> None:
    """A misspelt field is found before anything is started."""
    with pytest.raises(ConfigError, match="no field 'recompile_limt'") as caught:
        options_part({"dynamo": {"recompile_limt": 1}}, torch_folder=torch_folder)

    assert "did you mean recompile_limit?" == caught.value.hint


def test_known_options_fill_in_what_was_stored_without_a_wheel() -> None:
    """An entry that has the recipe's own options compares equal with what they mean; a handle never counts."""
    assert {**USUAL, "capture_limit": "8"} == known_options({"capture_limit": 8, "use_graph_pool": 3}, USUAL)
    assert USUAL == known_options(USUAL, USUAL)
    assert {**USUAL, "gone": True} == known_options({"gone": True}, USUAL)


@pytest.mark.parametrize(
    ("stored", "found", "names"),
    [
        ({}, {}, []),
        ({"dynamo": {"a": 1}}, {"dynamo": {"a": 1}}, []),
        ({"dynamo": {"a": 1}}, {}, ["dynamo.a"]),
        ({}, {"patterns": {"0 f": "x"}}, ["patterns.0 f"]),
        ({"passes": {"p": "x"}}, {"passes": {"p": "y"}}, ["passes.p"]),
        ({"dynamo": {"a": None}}, {"dynamo": {}}, ["dynamo.a"]),
        ({"operators": {"my.op": None}}, {"operators": {"my.op": {"schema": "s"}}}, ["operators.my.op"]),
    ],
    ids=str,
)
def test_found_reasons_both_ways(stored: dict[str, Any], found: dict[str, Any], names: list[str]) -> None:
    """What only one side has counts like what differs, and each reason says what to do."""
    reasons = found_reasons(stored, found)

    assert names == [reason.name for reason in reasons]
    assert all(reason.part == "options" and reason.hint for reason in reasons)


def test_lists_have_a_reason_each() -> None:
    """What is left out is left out for a reason that can be read."""
    assert all({**DYNAMO_NOISE, **HANDLES}.values())


@pytest.mark.real
def test_wheel_options_are_those_of_the_installed_wheel() -> None:
    """What is read from the wheel's text is what its own class says, name by name; so are torch's Dynamo fields."""
    import torch._dynamo.config as dynamo

    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None
    assert spec.origin is not None
    npu_folder = Path(spec.origin).parent
    found = wheel_options(npu_folder)
    defaults = dynamo_defaults(Path(torch_path(dynamo)))

    assert found is not None
    assert {"remove_cat_ops", "inplace_pass", "input_inplace_pass", "record_statistics_debug_info"} <= found.keys()
    assert {"post_grad_custom_pre_pass", "post_grad_custom_post_pass"} == {
        name for name, option in found.items() if option.is_code
    }
    assert "use_graph_pool" not in found
    assert defaults is not None
    config: Any = dynamo
    plain = {name: value for name, value in defaults.items() if value is not ... and name in config._config}
    assert 60 < len(plain)
    assert plain == {name: config._config[name].default for name in plain}


@pytest.mark.real
@pytest.mark.parametrize(
    "fields",
    [
        {"recompile_limit": 1},
        {"accumulated_recompile_limit": 2},
        {"cache_size_limit": 1000},
        {"suppress_errors": True},
        {"fail_on_recompile_limit_hit": True},
    ],
    ids=str,
)
def test_limits_and_errors_decide_whether_there_is_a_graph_and_never_which(fields: dict[str, Any]) -> None:
    """Under fullgraph the graph is the same, and what can't be one graph raises, whatever these fields say."""
    import torch
    import torch._dynamo.config as dynamo

    graphs: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module.print_readable(print_output=False))
        return module.forward

    def decode(x: Any) -> Any:
        return x.sin() * x.shape[0]

    def broken(x: Any) -> Any:
        torch._dynamo.graph_break()
        return x

    for given in ({}, fields):
        torch._dynamo.reset()
        with dynamo.patch(given):
            torch.compile(decode, backend=backend, fullgraph=True)(torch.ones(2))
            with pytest.raises(torch._dynamo.exc.Unsupported):
                torch.compile(broken, backend=backend, fullgraph=True)(torch.ones(2))
    torch._dynamo.reset()

    assert 2 == len(graphs)
    assert graphs[0] == graphs[1]


def torch_path(module: Any) -> str:
    """Return the folder of the torch that a module is of."""
    return str(Path(module.__file__).parents[1])
