"""How `check` gets from a recipe to the source of its methods, and what it makes of what it can't know."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachectl.errors import ConfigError
from cachectl.services.check import check
from tests.services.checked import MODEL, document, told, written


def test_model_that_nothing_moves_to_the_npu_is_found(tmp_path: Path) -> None:
    """A recipe for NPUs whose factory leaves the model on the CPU."""
    recipe = written(tmp_path, document(device="npu"))

    assert [("not-on-npu", "error", 9)] == told(recipe)


@pytest.mark.parametrize("moved", [".npu()", '.to("npu")', ".to(device)"])
def test_model_that_is_moved_is_good(tmp_path: Path, moved: str) -> None:
    """Each way of moving it counts."""
    model = MODEL.replace("def build():", 'def build(device="npu"):').replace(".eval()", f".eval(){moved}")

    assert [] == told(written(tmp_path, document(device="npu"), model))


def test_configuration_that_keeps_the_model_off_the_npu_is_found_at_its_line(tmp_path: Path) -> None:
    """A configuration copied from a simulated recipe says cpu."""
    model = MODEL.replace("def build():", 'def build(device="npu"):').replace(".eval()", ".eval().to(device)")
    config = {"factory": "model:build", "path": ["."], "config": {"device": "cpu"}}
    recipe = written(tmp_path, document(device="npu", model=config), model)

    line = next(number for number, text in enumerate(recipe.read_text().splitlines(), 1) if '"cpu"' in text)
    assert [("not-on-npu", "error", line)] == told(recipe)


@pytest.mark.parametrize("own", ["x.to(x.device)", "x.to(torch.float32)", "torch.zeros(2, device=x.device)"])
def test_tensor_of_the_same_device_moves_no_model(tmp_path: Path, own: str) -> None:
    """What the method does with its arguments says nothing of where the model lies."""
    model = MODEL.replace("x * 2", own)

    assert [("not-on-npu", "error", 9)] == told(written(tmp_path, document(device="npu"), model))


FACTORIES = {
    "class": ("", "model:Model"),
    "class method": ("    @classmethod\n    def make(cls):\n        return cls()\n", "model:Model.make"),
    "lambda": ("\nmake = lambda: Model()\n", "model:make"),
    "partial": ("\ndef made(kind):\n    return kind()\n\nmake = functools.partial(made, Model)\n", "model:make"),
    "decorated": (
        (
            "\ndef mark(function):\n    def call(*args):\n        return function(*args)\n    return call\n\n"
            "@mark\ndef make():\n    return Model()\n"
        ),
        "model:make",
    ),
    "module's own": ("\nMODEL = Model()\ndef make():\n    return MODEL\n", "model:make"),
    "one of two": ("\ndef make():\n    return None if id(0) else Model()\n", "model:make"),
}


@pytest.mark.parametrize("form", FACTORIES)
def test_factory_of_any_form_leads_to_the_model(tmp_path: Path, form: str) -> None:
    """Recipes name classes, class methods, partials and what decorators made of a function."""
    more, factory = FACTORIES[form]
    head, _, tail = (
        MODEL.replace("x * 2", "x.item()")
        .replace("import torch", "import functools\n\nimport torch")
        .partition("\n\ndef build")
    )
    recipe = document(model={"factory": factory, "path": ["."]})

    report = check(written(tmp_path, recipe, f"{head}{more}\n\ndef build{tail}"), traces=False)

    assert [("host-sync", 8)] == [(item.rule, item.line) for item in report.findings if item.severity == "error"]
    assert ("not traced: --no-trace",) == report.notes


def test_lengths_that_may_be_none_are_left_to_the_trace(tmp_path: Path) -> None:
    """A field that is a list in one configuration and None in another is no finding without its call."""
    model = MODEL.replace("import torch\n", "import torch\nimport torch_npu\n").replace(
        "x: torch.Tensor):\n        return x * 2",
        "x: torch.Tensor, lens: list[int] | None = None):\n"
        "        return torch_npu.npu_fused_infer_attention_score(x, x, x, actual_seq_lengths_kv=lens)[0]",
    )
    recipe = document(model={"factory": "elsewhere:load", "path": ["."]})
    recipe["functions"][0]["cases"][0]["inputs"] = "elsewhere:inputs"

    assert [] == told(written(tmp_path, recipe, model))


ENDLESS = {
    "calls itself": "        return self.main_decode(x)",
    "grows its arguments": "        return self.main_decode((x, x))",
    "loops in loops": "".join(f"{' ' * (8 + 4 * i)}for i{i} in x:\n" for i in range(14)) + " " * 64 + "x = x + 1",
    "many branches": "".join(f"        if self.flag{i}:\n            x = x + {i}\n" for i in range(150)),
}


@pytest.mark.parametrize("form", ENDLESS)
def test_code_without_an_end_is_read_in_bounded_time(tmp_path: Path, form: str) -> None:
    """Recursion and many paths end in a report."""
    body = ENDLESS[form]
    recipe = written(tmp_path, document(), MODEL.replace("        return x * 2", body))

    assert [] == told(recipe)


def test_function_on_the_instance_is_no_method(tmp_path: Path) -> None:
    """What is set in __init__ can't be cached."""
    model = MODEL.replace(
        "    def main_decode(self, x: torch.Tensor):\n        return x * 2\n",
        "    def __init__(self):\n        super().__init__()\n        self.main_decode = lambda x: x * 2\n",
    )

    assert [("not-a-method", "error", 7)] == told(written(tmp_path, document(), model))


def test_property_that_returns_a_method_is_followed(tmp_path: Path) -> None:
    """Real models compile forward under another name that way."""
    model = MODEL.replace("def main_decode(self, x: torch.Tensor)", "def forward(self, x: torch.Tensor)").replace(
        "def build", "def build"
    )
    model = model.replace(
        "        return x * 2\n",
        "        return x * 2\n\n    @property\n    def main_decode(self):\n        return self.forward\n",
    )

    assert [] == told(written(tmp_path, document(), model))


def test_two_methods_that_are_one_function_are_found(tmp_path: Path) -> None:
    """The runtime keeps no artifact of a second trace."""
    model = MODEL.replace("        return x * 2\n", "        return x * 2\n\n    mtp_decode = main_decode\n")
    cases = [{"name": "one", "inputs": "model:inputs"}]
    functions = [{"method": "main_decode", "cases": cases}, {"method": "mtp_decode", "cases": cases}]

    assert [("several-traces", "warning", 5)] == told(written(tmp_path, document(functions=functions), model))


def test_flag_in_metadata_of_the_call_is_advice_once(tmp_path: Path) -> None:
    """Frameworks pass plain data that says which phase this is; the other branches are read as decode."""
    model = MODEL.replace(
        "import torch\n",
        "import dataclasses\n\nimport torch\n\n\n@dataclasses.dataclass\nclass Meta:\n    is_prefill: bool = False\n",
    )
    model = model.replace(
        "x: torch.Tensor):\n        return x * 2",
        "x: torch.Tensor, meta: Meta):\n        if meta.is_prefill:\n            x = x + torch.arange(4)\n"
        "        if not meta.is_prefill:\n            return x * 2\n        return x + torch.randn(4)",
    ).replace('{"x": torch.ones(2)}', '{"x": torch.ones(2), "meta": Meta()}')

    assert [("prefill-flag", "advice", 13)] == told(written(tmp_path, document(), model))


def test_what_is_not_reached_is_not_read(tmp_path: Path) -> None:
    """Prefill, factory, __init__, comments, texts and branches that the configuration rules out break no rule."""
    model = MODEL.replace(
        "    def main_decode",
        "    def __init__(self, loud=False):\n        super().__init__()\n"
        "        self.loud = loud\n        self.register_buffer('rows', torch.arange(4))\n"
        "        self.noise = torch.randn(4).tolist()\n\n"
        "    def prefill(self, x):\n        print(x.sum().item())\n        return x + torch.randn(4)\n\n"
        "    def main_decode",
    ).replace(
        "        return x * 2\n",
        '        # torch.randn(4).item()\n        text = "print(torch.arange(4))"\n'
        "        if self.loud:\n            print(x)\n        return x * len(text)\n",
    )

    assert [] == told(written(tmp_path, document(), model))


def test_helpers_of_other_files_are_followed(tmp_path: Path) -> None:
    """A finding in a helper names its file and the method that reaches it."""
    model = MODEL.replace("import torch\n", "import torch\nfrom helper import twice\n").replace("x * 2", "twice(x)")
    recipe = written(tmp_path, document(), model, helper="def twice(y):\n    return y * y.max().item()\n")

    report = check(recipe, traces=False)

    found = report.findings[0]
    assert ("host-sync", "helper.py", 2, "main_decode") == (found.rule, found.path, found.line, found.method)


def test_factory_outside_of_the_path_leaves_the_classes_with_the_method(tmp_path: Path) -> None:
    """Where the model comes from elsewhere, what lies here is read by the method's name."""
    model = MODEL.replace("x * 2", "x * x.sum().item()")
    recipe = written(tmp_path, document(model={"factory": "elsewhere.models:load", "path": ["."]}), model)

    report = check(recipe, traces=False)

    assert [("host-sync", 6)] == [(item.rule, item.line) for item in report.findings if item.severity == "error"]
    assert "elsewhere.models:load is not below model.path: classes there that have the method are read" in report.notes


def test_method_that_nobody_looked_at_is_no_pass(tmp_path: Path) -> None:
    """Where neither source nor trace is to be had, the check does not say good."""
    recipe = written(tmp_path, document(model={"factory": "elsewhere:load", "path": ["."]}), "import torch\n")

    report = check(recipe, traces=False)

    assert [("unseen", "warning")] == [(item.rule, item.severity) for item in report.findings if item.method]
    assert 1 == report.exit_code


def test_set_up_that_is_made_up_for_is_not_followed(tmp_path: Path) -> None:
    """Tables that __init__ makes, and a branch that need not be taken makes anew, are the usual form of real models."""
    model = MODEL.replace(
        "    def main_decode(self, x: torch.Tensor):\n        return x * 2\n",
        "    def __init__(self):\n        super().__init__()\n        self.tables(8)\n\n"
        "    def tables(self, n):\n        self.known = n\n"
        '        self.register_buffer("cos_cached", torch.arange(n).cos())\n\n'
        "    def main_decode(self, x: torch.Tensor):\n        if x.shape[0] > self.known:\n"
        "            self.tables(x.shape[0])\n        return x * self.cos_cached[0]\n",
    )

    assert [] == told(written(tmp_path, document(), model))


def test_model_that_can_not_be_parsed_is_refused_with_its_line(tmp_path: Path) -> None:
    """A file with an error in it is the user's to mend."""
    recipe = written(tmp_path, document(), MODEL.replace("return x * 2", "return x *"))

    with pytest.raises(ConfigError, match=r"model\.py:6: can't be parsed"):
        check(recipe, traces=False)


def test_unknown_method_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    """A typo in the recipe is no finding, but a wrong recipe."""
    functions = [{"method": "main_decod", "cases": [{"name": "one", "inputs": "model:inputs"}]}]

    with pytest.raises(ConfigError, match="no method 'main_decod'; it has: main_decode"):
        check(written(tmp_path, document(functions=functions)), traces=False)


def test_unknown_factory_is_refused(tmp_path: Path) -> None:
    """The file is there, and has no such function."""
    recipe = written(tmp_path, document(model={"factory": "model:bild", "path": ["."]}))

    with pytest.raises(ConfigError, match="model has no function 'bild'"):
        check(recipe, traces=False)
