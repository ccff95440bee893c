"""Which of Dynamo's guards are about an environment variable: those belong to the part `environment`.

Owns the recognition of a variable among Dynamo's sources. Dynamo follows a read of a variable that is set into
os.environ's own dict and guards the value there (torch 2.13: `os.environ[X]`, `.get(X)` and `X in os.environ`; a name
that is not set has no guard). The environment part records every name that was read, set or not, compares it in plan,
hook and process, and says what mends it; a guard sheet would hold the value a second time.
"""

from __future__ import annotations

import os
from typing import Any

from cachectl.identity.environment import is_placement
from cachectl.identity.guard_values import Unsayable
from cachectl.schemas.keying import is_secret_name

__all__ = ["guarded_variable"]


def guarded_variable(builder: Any, guard: Any) -> str | None:
    """Return the name of the variable whose value a guard is about, None for every other guard.

    Args:
        builder: Dynamo's GuardBuilder, which knows the value behind a source.
        guard: one of its guards.

    Raises:
        Unsayable: the graph depends on a variable that the environment part does not hold: placement, or a secret.
    """
    source = guard.originating_source
    base, key = getattr(source, "base", None), getattr(source, "index", None)
    if base is None or not isinstance(key, bytes) or builder.get(base) is not getattr(os.environ, "_data", os):
        return None
    name = os.fsdecode(key)
    if is_placement(name):
        raise Unsayable(f"the graph depends on the variable {name}, which only says where a process runs")
    if is_secret_name(name):
        raise Unsayable(f"the graph depends on the variable {name}, which may be a secret: rename it")
    return name
