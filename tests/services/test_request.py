"""From a recipe file to its request: what is read, what is exported, what this version refuses."""

from __future__ import annotations

import pytest

from cachectl.errors import ConfigError
from cachectl.services.request import read_request
from tests.stores import MadeStore


@pytest.fixture
def made(made: MadeStore, monkeypatch: pytest.MonkeyPatch) -> MadeStore:
    """A recipe, with its toolchain where this interpreter finds it."""
    monkeypatch.syspath_prepend(str(made.site))
    return made


def edit(made: MadeStore, old: str, new: str) -> None:
    """Replace what stands once in the recipe."""
    text = made.recipe.read_text()
    assert 1 == text.count(old)
    made.recipe.write_text(text.replace(old, new))


def test_request_numbers_the_cases_in_the_recipes_order(made: MadeStore) -> None:
    """Index, method and name of each case, methods one after the other."""
    edit(made, "functions:\n", "functions:\n  - {method: mtp, cases: [{name: b1, inputs: 'decoder:inputs'}]}\n")

    cases = [(case.index, case.method, case.name) for case in read_request(made.recipe).cases()]

    assert [(0, "mtp", "b1"), (1, "main_decode", "b4"), (2, "main_decode", "b2")] == cases


def test_request_exports_the_declared_environment_over_the_callers(
    made: MadeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks get the recipe's value, whatever the shell had; the rest of the shell's comes along."""
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    monkeypatch.setenv("N_LAYERS", "4")
    edit(made, "topology:", 'environment: {TASK_QUEUE_ENABLE: "1"}\ntopology:')

    request = read_request(made.recipe)

    assert ("1", "4") == (request.environ["TASK_QUEUE_ENABLE"], request.environ["N_LAYERS"])


def test_request_of_a_simulated_recipe_is_of_the_simulated_device(
    made: MadeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CACHECTL_SIM_SOC and CACHECTL_SIM_CANN say what it is, and nothing is missing."""
    monkeypatch.setenv("CACHECTL_SIM_SOC", "Ascend910_9391")
    monkeypatch.setenv("CACHECTL_SIM_CANN", "8.6.0")

    request = read_request(made.recipe)

    assert (True, "ascend910_9391") == tuple(request.request["device"][name] for name in ("simulated", "soc"))
    assert "8.6.0" == request.request["toolchain"]["cann"]["CANN"]
    assert () == request.missing


def test_request_for_a_device_that_is_not_here_says_what_is_missing(made: MadeStore) -> None:
    """device: npu without CANN: no error yet, reasons that plan and build can give."""
    edit(made, "device: simulated", "device: npu")

    assert {"toolchain"} <= {reason.part for reason in read_request(made.recipe).missing}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("topology:", "compile: {mode: ge_graph}\ntopology:", "ge_graph"),
    ],
)
def test_request_refuses_what_this_version_does_not_build(made: MadeStore, old: str, new: str, words: str) -> None:
    """Exit 2, the field and its value, before any process starts."""
    edit(made, old, new)

    with pytest.raises(ConfigError) as raised:
        read_request(made.recipe)

    assert words in raised.value.message
    assert raised.value.message.startswith("recipe.yaml: ")
