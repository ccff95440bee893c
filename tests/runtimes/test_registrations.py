"""What a process has registered: only what others than torch and torch_npu put there, and all of that."""

from __future__ import annotations

import ast
import functools
import importlib.util
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from cachectl.identity.callables import Undigestible
from cachectl.runtimes.registrations import changed_config, registered_operators, registrations

pytestmark = pytest.mark.real


def entry(default: Any, **extra: Any) -> types.SimpleNamespace:
    """Return an entry as torch's configuration modules keep them."""
    return types.SimpleNamespace(**{"default": default, "alias": None, "deprecated": False, **extra})


def config(defaults: dict[str, Any], **changed: Any) -> types.SimpleNamespace:
    """Return a configuration module with these defaults and values."""
    values = {name: item.default for name, item in defaults.items()}
    return types.SimpleNamespace(_config=defaults, **{**values, **changed})


def test_changed_config_says_what_is_not_default() -> None:
    """Only fields that differ; what only logs, aliases and deprecated names are left out; sets have one order."""
    defaults = {
        "limit": entry(8),
        "names": entry({"b", "a"}),
        "hook": entry(None),
        "verbose": entry(False),
        "old_limit": entry(8, alias="limit"),
        "gone": entry(1, deprecated=True),
        "kind": entry(int),
    }

    assert {} == changed_config(config(defaults))
    assert {} == changed_config(config(defaults, verbose=True, old_limit=9, gone=2))
    assert {"limit": 9} == changed_config(config(defaults, limit=9))
    assert {"limit": True} == changed_config(config(defaults, limit=True))
    assert {"names": ["a", "c"]} == changed_config(config(defaults, names={"c", "a"}))
    assert {"kind": "builtins.str"} == changed_config(config(defaults, kind=str))
    assert {} == changed_config(None)
    first, second = (changed_config(config(defaults, hook=hook))["hook"] for hook in (lambda x: x, lambda x: -x))
    assert first.startswith("sha256:")
    assert first != second


def test_registrations_of_torch_alone_are_none() -> None:
    """What torch registers itself is the toolchain's."""
    import torch._decomp
    import torch._dynamo.config
    import torch.distributed  # noqa: F401

    assert {} == registrations(strict=True)


def test_registrations_dynamo_field_shows_and_goes() -> None:
    """A field that a program sets is found while it is set; what only says when compiling stops is none."""
    import torch._dynamo.config as dynamo

    with dynamo.patch(specialize_int=True, recompile_limit=3):
        assert {"dynamo": {"specialize_int": True}} == registrations(strict=True)
    with dynamo.patch(cache_size_limit=3, accumulated_cache_size_limit=4, suppress_errors=True):
        assert {} == registrations(strict=True)
    with dynamo.patch(fail_on_cache_limit_hit=True):
        assert {} == registrations(strict=True)
    assert {} == registrations(strict=True)


def test_registrations_foreign_decomposition_counts_by_its_code() -> None:
    """A decomposition that somebody registers is known by operator and code, torch's own are not told."""
    import torch
    from torch._decomp import decomposition_table

    def digest(function: Any) -> Any:
        decomposition_table[torch.ops.aten.silu.default] = function
        return registrations(strict=True)["decompositions"]

    before = decomposition_table[torch.ops.aten.silu.default]
    try:
        found = [digest(function) for function in (lambda x: x, lambda x: x + 1, lambda x: x)]
        with pytest.raises(Undigestible, match="lock"):
            digest(functools.partial(print, threading.Lock()))
        assert "can't be digested" in str(registrations(strict=False))
    finally:
        decomposition_table[torch.ops.aten.silu.default] = before

    assert ["post_autograd aten.silu.default"] == list(found[0])
    assert found[0] == found[2] != found[1]
    assert {} == registrations(strict=True)


def test_registrations_patched_collective_is_told_by_name() -> None:
    """A collective that somebody replaced traces to other operators."""
    import torch.distributed as distributed

    before = distributed.all_reduce
    distributed.all_reduce = json_dumps
    try:
        assert {"collectives": {"all_reduce": f"{__name__}:json_dumps"}} == registrations(strict=True)
    finally:
        distributed.all_reduce = before


def json_dumps(*_: Any) -> None:
    """Stand in for a collective."""


@pytest.mark.parametrize(
    ("name", "operator"),
    [("plus", "cachectl_fakes.plus.default"), ("minus.of", "cachectl_fakes.minus.of")],
    ids=["default", "overload"],
)
def test_registered_operators_fake_of_a_library_counts_by_its_code(name: str, operator: str) -> None:
    """A fake that a module registers for an operator of a library counts, though torch puts a check around it."""
    import torch

    def fake(x: Any) -> Any:
        return torch.empty_like(x)

    def other_fake(x: Any) -> Any:
        return torch.empty_like(x + 1)

    def registered(function: Any) -> Any:
        library = torch.library.Library("cachectl_fakes", "DEF")
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x + 1, "CPU")
        torch.library.register_fake(f"cachectl_fakes::{name}", function, lib=library)
        try:
            return next(iter(registered_operators([operator], strict=True).values()))
        finally:
            library._destroy()

    found = [registered(function)["kernels"] for function in (fake, other_fake, fake)]

    assert [["fake"]] * 3 == [list(kernels) for kernels in found]
    assert found[0] == found[2] != found[1]


def test_registered_operators_schema_and_fake_kernel_count() -> None:
    """An operator counts by its schema and fake implementation, by name and version it does not (field report W9)."""
    import torch

    def register(name: str, argument: str, fake: int) -> Any:
        operator = torch.library.custom_op(
            f"cachectl_test::{name}",
            lambda x: x.clone(),
            mutates_args=["x"] if "!" in argument else [],
            schema=f"({argument} x) -> Tensor",
        )
        if fake:
            operator.register_fake(lambda x: x.new_empty(x.shape) if fake else x)
        return registered_operators([f"cachectl_test.{name}.default", "aten.mm.default"], strict=True)

    found = [
        next(iter(register(name, argument, fake).values()))
        for name, argument, fake in (
            ("plain", "Tensor", 0),
            ("writes", "Tensor(a!)", 0),
            ("fake", "Tensor", 1),
            ("fake2", "Tensor", 2),
        )
    ]

    schemas = [item["schema"].partition("(")[2] for item in found]
    assert "Tensor x) -> Tensor" == schemas[0] == schemas[2]
    assert "Tensor(a!) x) -> Tensor" == schemas[1]
    assert [[], [], ["fake"], ["fake"]] == [list(item["kernels"]) for item in found]
    assert found[2]["kernels"] != found[3]["kernels"]


def test_registered_operators_unknown_one_is_none() -> None:
    """An operator that this process does not have is not the one of the artifact."""
    assert {"cachectl_nobody.op.default": None} == registered_operators(["cachectl_nobody.op.default"], strict=False)


def test_npugraph_ex_of_this_wheel_never_asks_for_converters_or_size_hints() -> None:
    """Why GE converters and a dynamic size's hint are in no part: nothing of npugraph_ex asks for them (W11)."""
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None
    assert spec.origin is not None
    texts = [file.read_text() for file in (Path(spec.origin).parent / "dynamo" / "npugraph_ex").rglob("*.py")]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]

    assert 20 < len(texts)
    assert [] == [name for name in imported if "torchair" in name]
    assert [] == [text for text in texts if "size_hint" in text or "hint_override" in text]
