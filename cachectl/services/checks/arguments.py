"""Configuration and arguments as the reader of source text has them.

Owns the way from a recipe's plain values to the reader's, and what marks a value as passed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cachectl.services.checks.values import (
    NONE,
    Const,
    Map,
    Obj,
    Seq,
    Tensor,
    Union,
    Value,
    alternatives,
    is_host,
    named,
)

__all__ = ["given", "has_number", "plain"]


def plain(value: Any) -> Value:
    """Return a configuration's value as the reader has it."""
    if isinstance(value, Mapping):
        return Map({key: plain(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return Seq("list", tuple(map(plain, value)))
    return Const(value)


def given(value: Value, name: str) -> Value:
    """Return a value as an argument of the compiled method: known, but passed in."""
    if isinstance(value, Const):
        return Const(value.value, given=True) if value != NONE else value
    if isinstance(value, Tensor):
        return replace(value, name=name, argument=True, ramp=False, angles=False, sliced="")
    if isinstance(value, Seq):
        items = tuple(given(item, name) for item in value.items) if value.items is not None else None
        element = given(value.element, name) if value.element is not None else None
        return replace(value, items=items, element=element, name=name)
    if isinstance(value, Map):
        known = {key: given(item, str(key)) for key, item in value.known.items()}
        return Map(known, given(value.rest, name) if value.rest is not None else None)
    if isinstance(value, Union):
        return Union(tuple(given(item, name) for item in value.members))
    if isinstance(value, Obj):
        return Obj(value.cls, {key: given(item, key) for key, item in value.attrs.items()})
    return named(value, name)


def has_number(value: Value) -> bool:
    """Say whether a value is a number, or holds one: what `dynamic` makes a symbol."""
    for member in alternatives(value):
        if isinstance(member, Const):
            if type(member.value) in (int, float):
                return True
        elif isinstance(member, Seq):
            items = member.items if member.items is not None else (member.element,)
            if any(_is_number(item) for item in items):
                return True
        elif isinstance(member, (Map, Obj)):
            values = [*member.known.values(), member.rest] if isinstance(member, Map) else member.attrs.values()
            if any(has_number(item) for item in values):
                return True
    return False


def _is_number(item: Value) -> bool:
    return (
        item is not None
        and item != NONE
        and is_host(item)
        and not (isinstance(item, Const) and not isinstance(item.value, (int, float)))
    )
