"""The walk through modules that are not ours, can't be read, or are taken whole."""

from __future__ import annotations

import pytest

from cachectl.identity.source_closure import FoundModule, SourceClosure
from cachectl.identity.source_digest import SourceIndex

MODULES = {
    "model": """\
import os
import pinned
from broken import LOST
from helpers import SCALE, inner as aliased
from pinned import WIDTH


class Outer:
    class Inner:
        def run(self, x):
            return x * SCALE

    def widen(self, x):
        return x * WIDTH + LOST


def listed(x):
    return os.getpid() + x


def borrowed():
    import os
    return os
""",
    "helpers": "from os import sep\nimport helpers.inner\n\nSCALE = 2\nSEPARATOR = sep\n",
    "helpers.inner": "DEPTH = 3\n",
    "calls": "def outer(x):\n    return inner(x)\n\n\ndef inner(x):\n    return x\n",
    "pinned": "WIDTH = 4\n",
    "dynamic": "from helpers import *\nfrom gone import *\nx = globals()\n",
}


def closure() -> SourceClosure:
    found = {name: FoundModule(name, SourceIndex(text.encode())) for name, text in MODULES.items()}
    found["pinned"].pinned = True
    found["helpers"].is_package = True
    found["broken"] = FoundModule("broken", None)
    return SourceClosure(found.get)


def test_add_function_of_a_foreign_module_counts_nowhere() -> None:
    """What nobody finds leaves no record."""
    walk = closure()

    assert not walk.add_function("torch.nn", "relu")
    walk.add_class("torch.nn", "Module")
    walk.add_whole("torch.nn", "used as an object")
    assert {} == walk.modules


def test_add_function_of_an_unreadable_module_takes_it_whole() -> None:
    """A text that can't be parsed counts by its bytes, with all that it holds."""
    walk = closure()

    assert walk.add_function("broken", "anything")
    walk.add_class("broken", "Anything")
    walk.add_whole("broken", "asked for")
    assert "it can't be parsed" == walk.modules["broken"].whole


def test_add_function_that_the_source_does_not_name_takes_the_module_whole() -> None:
    """A function made at run time can stand on anything in its module."""
    walk = closure()

    assert not walk.add_function("helpers", "made_later")
    assert "no definition of made_later" == walk.modules["helpers"].whole
    walk.add_whole("helpers", "again")
    assert "no definition of made_later" == walk.modules["helpers"].whole


def test_add_whole_does_not_take_the_modules_that_it_binds() -> None:
    """Names that are modules would bring their files; those taken from modules count."""
    walk = closure()
    walk.add_whole("helpers", "asked for")

    assert {"SCALE", "SEPARATOR", "sep"} <= walk.modules["helpers"].bindings
    walk.add_whole("model", "asked for")
    assert "aliased" not in walk.modules["model"].bindings
    assert "helpers.inner" not in walk.modules


@pytest.mark.parametrize(("qualname", "known"), [("Outer.Inner", True), ("listed", False)])
def test_add_class_is_known_by_its_header(qualname: str, known: bool) -> None:
    """A class counts by its header; a name that is none adds nothing."""
    walk = closure()
    walk.add_class("model", qualname)

    assert known == (qualname in walk.modules["model"].classes)


def test_add_function_in_nested_classes_counts_each_header() -> None:
    """A method stands on every class around it and on the constants it reads."""
    walk = closure()

    assert walk.add_function("model", "Outer.Inner.run")
    assert {"Outer", "Outer.Inner"} == walk.modules["model"].classes
    assert {"SCALE"} == walk.modules["helpers"].bindings


def test_add_function_names_from_pinned_and_broken_modules_are_not_followed() -> None:
    """A version or the raw bytes stand for such a module: no name in it counts."""
    walk = closure()
    walk.add_function("model", "Outer.widen")

    assert set() == walk.modules["pinned"].bindings == walk.modules["broken"].bindings
    assert walk.modules["pinned"].whole
    assert walk.modules["broken"].whole


def test_add_function_foreign_module_used_as_an_object_is_left_out() -> None:
    """The standard library is the toolchain's."""
    walk = closure()
    walk.add_function("model", "listed")
    walk.add_function("model", "borrowed")

    assert {"model"} == set(walk.modules)


def test_add_function_dynamic_module_takes_its_star_imports_whole() -> None:
    """Whatever a star brings in may be what is read; a module that is not ours is not."""
    walk = closure()
    walk.add_function("dynamic", "x")

    assert "star import in dynamic" == walk.modules["helpers"].whole
    assert "gone" not in walk.modules


def test_function_that_ran_as_it_is_takes_what_it_calls_along() -> None:
    """One that was traced names what it calls; one that ran untraced has run all of it."""
    traced, ran = closure(), closure()
    assert traced.add_function("calls", "outer")
    assert ran.add_function("calls", "outer", runs=True)

    assert {"outer"} == traced.modules["calls"].definitions
    assert {"outer", "inner"} == ran.modules["calls"].definitions


def test_function_that_the_recipe_asks_for_is_not_traced() -> None:
    """A graph may hold nothing of it, so a program that never imports it is as good."""
    walk = closure()
    walk.add_function("calls", "inner", asked=True)

    assert (True, False) == (walk.modules["calls"].asked, walk.modules["calls"].traced)
