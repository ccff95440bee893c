"""How a framework's config is shown under plan and explain."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cachectl.cli.output import Output
    from cachectl.schemas.cann_recipes_report import FrameworkReport

__all__ = ["show_framework"]


def show_framework(out: Output, blocks: Iterable[FrameworkReport]) -> None:
    """Write what each config is read as, and what the framework would do with it."""
    for block in blocks:
        out.line()
        out.line(f"{block.recipe}: {block.config}, {block.kind} family {block.family}")
        methods = ", ".join(
            f"{method.name} (ranks {method.ranks[0]} to {method.ranks[-1]})" if method.ranks else method.name
            for method in block.methods
        )
        out.line(f"  methods      {methods}")
        out.line(f"  compiled by  {block.mode}, dynamic {_text(block.dynamic)}")
        out.line(f"  options      {_pairs({**block.options, **block.compiler_config})}")
        out.line(f"  environment  {_pairs(block.environment)}")
        out.line(f"  topology     {_pairs(block.topology)}")
        out.line(f"  ranks        {block.rank_rule}")
        out.line(f"  its cache    {block.cache_dir}")
        left_out = ", ".join(item.name for item in block.not_in_key)
        out.line(f"  not in key   {left_out or 'nothing'}")
        if block.inert is not None:
            out.line(f"  inert        {block.inert}")
        for note in block.notes:
            out.line(f"  note         {note}")


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_text(value)}" for name, value in values.items()) or "none"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
