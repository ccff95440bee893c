"""A user's script as a model: its own methods and calls, whatever it compiles them with."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import torch

from cachectl.errors import ConfigError
from tests.scripts import HEAD, Run, called, run

__all__ = ["run"]


def test_model_is_the_scripts_own_method_with_the_calls_arguments(run: Run) -> None:
    """The bound method is the program's, its owner is a child, and the arguments are by keyword, defaults left out."""
    model: Any = run("model = Model(3.0)\ncache_compile(model.main_decode)(torch.ones(2, 4))\nraise SystemExit(9)\n")

    owner = sys.modules["__main__"].model  # type: ignore[attr-defined]
    assert owner is model.main_decode.__self__
    assert owner in list(model.modules())
    assert ["x"] == list(called(model))
    # At the call: the step itself has not run.
    assert [0.0] * 4 == owner.seen.tolist()
    assert 3.0 == float(model.main_decode(**called(model)).max())


def test_model_script_finds_its_own_process(run: Run, tmp_path: Path) -> None:
    """Arguments, working folder, name, file and the folder on sys.path are as when Python runs the script."""
    (tmp_path / "below").mkdir()
    text = (
        "model = Model()\n"
        "own = sys.modules['__main__'].__dict__ is globals()\n"
        "said = [sys.argv, os.getcwd(), __name__, __file__, sys.path[0], own]\n"
        "cache_compile(model.main_decode)(torch.ones(1, 4))\n"
    )

    run(text, command=("python", "-u", "../script.py", "--layers", "2"), folder="below")

    script = str(tmp_path / "script.py")
    said = [["../script.py", "--layers", "2"], str(tmp_path / "below"), "__main__", script, str(tmp_path), True]
    assert said == sys.modules["__main__"].said  # type: ignore[attr-defined]


def test_model_module_is_run_by_name(run: Run, tmp_path: Path) -> None:
    """`-m package` runs its __main__, with the working folder on sys.path and relative imports."""
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "__init__.py").touch()
    (tmp_path / "served" / "scale.py").write_text("SCALE = 5.0\n")
    text = "from .scale import SCALE\nsaid = sys.argv\ncache_compile(Model(SCALE).main_decode)(torch.ones(1, 4))\n"
    (tmp_path / "served" / "__main__.py").write_text(HEAD + text)

    model: Any = run("", command=("python", "-m", "served", "x"))

    assert 5.0 == model.main_decode.__self__.scale
    assert [str(tmp_path / "served" / "__main__.py"), "x"] == sys.modules["__main__"].said  # type: ignore[attr-defined]


def test_model_of_several_methods_runs_until_the_last_is_called(run: Run) -> None:
    """The first method's call is kept as it was made, though the program writes its tensors afterwards."""
    text = """
main, draft = Model(), Draft(2.0)
main.main_decode = cache_compile(main.main_decode, dynamic=False)
draft.mtp_decode = cache_compile(draft.mtp_decode, dynamic=False)
x = torch.ones(2, 4)
for step in range(3):
    main.main_decode(x, [1, 2], cache=main.cache)
    x.fill_(7)
    if step == 1:
        draft.mtp_decode(x)
"""
    model: Any = run(text, "main_decode", "mtp_decode")

    kept = called(model)
    assert [1.0] * 8 == kept["x"].flatten().tolist()
    assert [1, 2] == kept["lengths"]
    # What is the model's stays itself: the graph has it at two places.
    assert kept["cache"][0] is model.main_decode.__self__.cache[0]
    assert [7.0] * 8 == called(model, "mtp_decode")["x"].flatten().tolist()
    assert ["Model", "Draft"] == [name for name, _ in model.named_children()]


def test_model_methods_of_one_name_are_told_by_their_modules(run: Run) -> None:
    """`Draft.main_decode` is the draft's, whose attribute the program has bound anew."""
    text = """
main, draft = Model(), Draft(2.0)
for each in (main, draft):
    each.main_decode = cache_compile(each.main_decode)
for each in (main, draft):
    each.main_decode(torch.ones(1, 4))
"""
    model: Any = run(text, "Model.main_decode", "Draft.main_decode")

    assert 2.0 == model.Draft.main_decode.__self__.scale
    assert model.Draft.owners["main_decode"] is model.Draft.main_decode.__self__
    assert 1 == len(model.calls.of["Model.main_decode"])


def test_model_kinds_of_calls_are_counted_once_each(run: Run) -> None:
    """Static: another batch is another kind, other values are not. The method may be compiled for each."""
    text = """
model = Model()
for batch in (4, 4, 2, 4, 1):
    cache_compile(model.main_decode, dynamic=False)(torch.full((batch, 4), float(batch)))
"""
    model = run(text, calls={"main_decode": 3})

    assert [4, 2, 1] == [len(called(model, number=number)["x"]) for number in range(3)]
    with pytest.raises(ConfigError, match="no call 3 on rank 0: 3 were seen"):
        called(model, number=3)


def test_model_dynamic_kinds_ignore_sizes_and_integers(run: Run) -> None:
    """Dynamic: sizes and lengths are symbols; another dtype is another kind."""
    text = """
compiled = cache_compile(Model().main_decode)
compiled(torch.ones(2, 4), [1, 2])
compiled(torch.ones(3, 4), [3, 9])
compiled(torch.ones(2, 4, dtype=torch.float64), [1, 2])
"""
    model = run(text, calls={"main_decode": 2})

    assert [torch.float32, torch.float64] == [called(model, number=number)["x"].dtype for number in range(2)]


def test_model_torch_compile_is_watched_where_exec_lifts_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full-graph compile with npugraph_ex runs eagerly; every other compile is torch's own."""
    from cachectl.runtimes import backends

    def read(_: Any, model: Any, kwargs: Any) -> Any:
        return (False, {}) if kwargs.get("backend") == "npugraph_ex" else backends.Reason("options", "backend")

    monkeypatch.setattr(backends, "read_compile", read)
    text = """
model = Model()
said = torch.compile(model.main_decode, backend="eager") is model.main_decode
torch.compile(backend="npugraph_ex", fullgraph=True)(model.main_decode)(torch.ones(1, 4))
"""
    assert ["x"] == list(called(run(text)))
    assert sys.modules["__main__"].said is False  # type: ignore[attr-defined]


def test_model_inputs_that_share_memory_still_do(run: Run) -> None:
    """Views of one tensor, one tensor twice, and strides stay what they were in the copies."""
    text = """
Model.cut = lambda self, x, lengths: x
Model.cut.__name__ = "cut"
model, other = Model(), Draft()
whole = torch.arange(16.).reshape(4, 4)
cache_compile(model.cut)(whole[:, ::2], {"a": whole, "b": [whole, whole.T]})
whole.zero_()
cache_compile(other.mtp_decode)(torch.ones(1))
"""
    kept = called(run(text, "cut", "mtp_decode"), "cut")

    whole, twice = kept["lengths"]["a"], kept["lengths"]["b"]
    assert whole is twice[0]
    assert [whole.data_ptr()] * 2 == [kept["x"].data_ptr(), twice[1].data_ptr()]
    assert ((4, 2), (1, 4)) == (kept["x"].stride(), twice[1].stride())
    # Dynamo guards the sizes of what a view is one of, too.
    assert kept["x"]._base is not None
    assert kept["x"]._base.data_ptr() == whole.data_ptr()
    assert 120.0 == float(whole.sum())


def test_model_views_of_one_tensor_are_views_of_one_copy(run: Run) -> None:
    """AOTAutograd takes two inputs of one storage, of which a step writes one, only if they have one base."""
    text = """
Model.cut = lambda self, x, lengths, cache: x.add_(lengths.sum() + cache.sum())
Model.cut.__name__ = "cut"
model, other = Model(), Draft()
whole = torch.arange(16.).reshape(4, 4).clone()
cache_compile(model.cut)(whole[0], whole[1], cache=whole)
cache_compile(other.mtp_decode)(torch.ones(1))
"""
    model: Any = run(text, "cut", "mtp_decode")
    kept = called(model, "cut")

    assert kept["cache"] is kept["x"]._base is kept["lengths"]._base
    made = torch.compile(model.cut, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert [142.0, 143.0, 144.0, 145.0] == made(**kept).tolist()
    assert [142.0, 143.0, 144.0, 145.0] == kept["cache"][0].tolist()


def test_model_parameter_among_inputs_is_copied_as_one(run: Run) -> None:
    """A parameter of no module that is compiled stays a parameter; Dynamo tells it from a plain tensor."""
    text = """
model, other, scale = Model(), Draft(), torch.nn.Parameter(torch.ones(4), requires_grad=False)
cache_compile(model.main_decode)(torch.ones(2, 4), cache=scale)
scale.zero_()
cache_compile(other.mtp_decode)(torch.ones(1))
"""
    cache = called(run(text, "main_decode", "mtp_decode"))["cache"]

    assert (torch.nn.Parameter, [1.0] * 4) == (type(cache), cache.tolist())


def test_model_launcher_variables_are_those_of_a_world_of_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that was started by torchrun finds its rank; what is set already stays."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "1234")
    text = """
said = [os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_PORT"]]
cache_compile(Model().main_decode)(torch.ones(1, 4))
"""
    run(text, launcher=["RANK", "WORLD_SIZE", "MASTER_PORT"])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)

    assert ["0", "1", "1234"] == sys.modules["__main__"].said  # type: ignore[attr-defined]


def test_model_compile_function_imported_later_is_a_stand_in(run: Run, tmp_path: Path) -> None:
    """A runtime that nobody has imported yet is seen to when the script imports it."""
    (tmp_path / "torchair").mkdir()
    (tmp_path / "torchair" / "__init__.py").touch()
    (tmp_path / "torchair" / "inference.py").write_text(
        "def cache_compile(*args, **kwargs):\n    raise SystemExit(7)\n"
    )
    text = "import torchair.inference\ntorchair.inference.cache_compile(Model().main_decode)(torch.ones(1, 4))\n"
    try:
        assert ["x"] == list(called(run(text)))
    finally:
        for name in ("torchair", "torchair.inference"):
            sys.modules.pop(name, None)


def test_model_folder_is_run_as_python_runs_it(run: Run, tmp_path: Path) -> None:
    """`python FOLDER` runs the folder's __main__.py and finds modules beside it."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "beside.py").write_text("SCALE = 4.0\n")
    text = "from beside import SCALE\ncache_compile(Model(SCALE).main_decode)(torch.ones(1, 4))\n"
    (tmp_path / "app" / "__main__.py").write_text(HEAD + text)
    try:
        model: Any = run("", command=("python", "app"))
    finally:
        sys.modules.pop("beside", None)

    assert 4.0 == model.main_decode.__self__.scale
