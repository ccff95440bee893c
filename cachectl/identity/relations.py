"""What has to hold between the sizes and integers of one call: the relations of a dynamic graph.

Owns the part of a guard sheet's expressions that reads nothing but the call's arguments, as that `x` and `y` have one
batch. The proof holds all expressions once; these have to hold at every later call too, since a dynamic case fits
calls of other sizes. Standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cachectl.identity.guard_expressions import evaluate, paths_in, render
from cachectl.identity.guard_values import Unsayable
from cachectl.schemas.boot import Reason

__all__ = ["check_relations", "relation_term", "relations_of"]

# Operators that mean in Python what they mean in a sheet.
_INFIX = frozenset({"==", "!=", "<", "<=", ">", ">=", "+", "-", "*", "//", "%"})


def relations_of(sheet: Mapping[str, Any], parameters: Collection[str]) -> list[Any]:
    """Return the sheet's expressions that read only these parameters, and at least one of them."""
    relations = []
    for tree in sheet.get("expressions", ()):
        paths = list(paths_in(tree))
        if paths and all(path[0].startswith("L:") and path[0][2:] in parameters for path in paths):
            relations.append(tree)
    return relations


def check_relations(relations: Sequence[Any], arguments: Mapping[str, Any]) -> list[Reason]:
    """Hold relations against a call's arguments by name; one reason for each that does not hold. Never raises."""
    reasons = []
    for tree in relations:
        try:
            holds = bool(evaluate(tree, lambda path: _value_at(path, arguments)))
        except (Unsayable, ArithmeticError, ValueError, TypeError, LookupError, AttributeError):
            holds = False
        if not holds:
            hint = (
                "the compiled graph takes only calls for which this holds: add a case with these inputs to the recipe"
            )
            reasons.append(Reason("inputs", render(tree), True, False, hint=hint))
    return reasons


def relation_term(tree: Any, parameters: Collection[str]) -> str | None:
    """Return a relation as Python text over the parameters' names; None for what is left to `check_relations`."""
    if type(tree) in (int, bool):
        return repr(tree)
    if type(tree) is not list or not tree:
        return None
    kind, operands = tree[0], tree[1:]
    if kind == "at":
        return _place_term(operands, parameters)
    terms = [relation_term(operand, parameters) for operand in operands]
    texts = [term for term in terms if term is not None]
    if len(texts) != len(terms) or not texts:
        return None
    if kind in ("and", "or") or (kind in _INFIX and len(texts) == 2):
        return "(" + f" {kind} ".join(texts) + ")"
    return f"(not {texts[0]})" if kind == "not" and len(texts) == 1 else None


def _place_term(path: Sequence[str], parameters: Collection[str]) -> str | None:
    name = path[0][2:]
    if not path[0].startswith("L:") or name not in parameters:
        return None
    text = name
    for step in path[1:]:
        kind, _, index = step.partition(":")
        if kind == "@size" and index.isdigit():
            text += f".shape[{index}]"
        elif step.startswith("#") and step[1:].isdigit():
            text += f"[{step[1:]}]"
        else:
            return None
    return text


def _value_at(path: Sequence[str], arguments: Mapping[str, Any]) -> Any:
    value: Any = arguments[path[0][2:]]
    for step in path[1:]:
        if step.startswith("@size:"):
            value = value.shape[int(step[6:])]
        elif step.startswith("@stride:"):
            value = value.stride()[int(step[8:])]
        elif step.startswith("#"):
            value = value[int(step[1:])]
        elif step.startswith(":"):
            value = value[step[1:]]
        elif step.startswith("."):
            value = getattr(value, step[1:])
        else:
            raise Unsayable(f"the step {step!r}")
    return value
