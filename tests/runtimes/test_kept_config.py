"""Dynamo's configuration after a call that raised, on the real torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from cachectl.runtimes.kept_config import KeptConfig

pytestmark = [pytest.mark.real, pytest.mark.skipif(find_spec("torch") is None, reason="needs torch: make venv")]


def config() -> Any:
    from torch._dynamo import config

    return config


def patched() -> tuple[bool, bool]:
    return config().automatic_dynamic_shapes, config().assume_static_by_default


def compiled_and_skipped() -> Any:
    """Return a compiled method whose code Dynamo has been told to skip: torch raises, and leaves its config patched."""
    import torch
    from torch._dynamo.eval_frame import skip_code

    class Model(torch.nn.Module):
        def decode(self, x: Any) -> Any:
            return x + 1

    model = Model()
    skip_code(Model.decode.__code__)
    return torch.compile(model.decode, backend="eager", fullgraph=True, dynamic=False)


def test_call_that_raises_leaves_the_configuration() -> None:
    """What torch leaves patched would turn every later method cold, and is put back."""
    import torch

    before = patched()
    with pytest.raises(RuntimeError, match="no compiled frames"):
        KeptConfig(compiled_and_skipped())(torch.ones(2))
    assert before == patched()

    # The fault itself: should torch mend it, this wrapper can go.
    with config().patch(automatic_dynamic_shapes=True, assume_static_by_default=True):
        with pytest.raises(RuntimeError, match="no compiled frames"):
            compiled_and_skipped()(torch.ones(2))
        assert (False, True) == patched()
    assert before == patched()


def test_call_that_returns_may_change_the_configuration() -> None:
    """A method that sets a field on purpose keeps it; and what the runtime made shows through."""

    def method(value: bool) -> bool:
        config().automatic_dynamic_shapes = value
        return value

    kept = KeptConfig(method)

    with config().patch(automatic_dynamic_shapes=True):
        assert kept(False) is False
        assert config().automatic_dynamic_shapes is False
    assert "method" == kept.__name__
