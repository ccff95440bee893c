"""Calls that say where a model lies: on the NPU, on CUDA.

Owns reading one call's text for it.
"""

from __future__ import annotations

import ast

from cachectl.services.checks.state_rules import text_of

__all__ = ["moves_to_device", "names_cuda"]

_OWNERS = frozenset({"self", "cls", "config", "cfg", "args", "opt", "options", "settings"})
_SETTERS = frozenset({"set_default_device", "set_device"})


def names_cuda(node: ast.Call) -> str | None:
    """Return the text of a call that puts something on CUDA, None of any other."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if name == "cuda" and not node.args and not node.keywords:
        return text_of(node)
    places = [keyword.value for keyword in node.keywords if keyword.arg == "device"]
    if name in {"to", "device", "to_empty", *_SETTERS}:
        places += node.args
    texts = [place.value for place in places if isinstance(place, ast.Constant)]
    return text_of(node) if any(isinstance(text, str) and text.startswith("cuda") for text in texts) else None


def moves_to_device(node: ast.Call) -> bool:
    """Say whether a call may move a model to a device: `.npu()`, `.to(device)`, `device=` a device; not `x.device`."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if name in {"npu", *_SETTERS}:
        return True
    places = [keyword.value for keyword in node.keywords if keyword.arg == "device"]
    if name in ("to", "to_empty", "device"):
        places += node.args
    return any(map(_is_device, places))


def _is_device(place: ast.expr) -> bool:
    text = text_of(place).lower()
    if "npu" in text:
        return True
    root = place
    while isinstance(root, (ast.Attribute, ast.Subscript)):
        root = root.value
    # A tensor's own device, as in x.device, is where the model already is.
    own = isinstance(place, ast.Name) or (isinstance(root, ast.Name) and root.id in _OWNERS)
    return own and ("dev" in text or "rank" in text) and "cpu" not in text
