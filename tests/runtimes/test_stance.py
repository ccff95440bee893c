"""What torch.compiler.set_stance says, read without importing torch."""

from __future__ import annotations

import sys
import types

import pytest

from cachectl.boot.cases import UNGUARDED
from cachectl.runtimes.stance import stance


@pytest.mark.parametrize(
    ("said", "unguarded", "backend", "found"),
    [
        ("default", False, None, ""),
        ("default", True, None, UNGUARDED),
        ("force_eager", False, None, "force_eager"),
        ("force_eager", True, None, "force_eager"),
        ("default", False, "eager", "force_backend"),
        ("eager_on_recompile", False, None, ""),
        ("fail_on_recompile", True, None, UNGUARDED),
    ],
)
def test_stance_bars_compiled_code_or_vouches_for_calls(
    monkeypatch: pytest.MonkeyPatch, said: str, unguarded: bool, backend: str | None, found: str
) -> None:
    """What bars compiled code comes first; stances about recompiling bar none."""
    home = types.ModuleType("torch._dynamo.eval_frame")
    vars(home)["_stance"] = types.SimpleNamespace(stance=said, skip_guard_eval_unsafe=unguarded, backend=backend)
    monkeypatch.setitem(sys.modules, home.__name__, home)

    assert found == stance()


def test_stance_before_dynamo_is_imported_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can have set one; nothing is imported for it."""
    monkeypatch.delitem(sys.modules, "torch._dynamo.eval_frame", raising=False)

    assert "" == stance()
    assert "torch._dynamo.eval_frame" not in sys.modules


@pytest.mark.real
def test_stance_is_where_this_torch_keeps_it() -> None:
    """The private name, against torch's public function."""
    torch = pytest.importorskip("torch")

    with torch.compiler.set_stance("force_eager"):
        inside = stance()
    with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
        unguarded = stance()

    assert ("force_eager", UNGUARDED, "") == (inside, unguarded, stance())
