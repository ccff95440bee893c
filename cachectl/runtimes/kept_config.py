"""Dynamo's configuration after a call that raised.

Owns the mending of one fault of torch's: a compiled function with `dynamic` given sets fields of torch._dynamo.config
for the call, and leaves them set where it raises "fullgraph=True found no compiled frames", since that is raised in
front of the clean-up (torch 2.13 _dynamo/eval_frame.py `compile_wrapper`, `make_set_enable_dynamic`). Every method that
the program compiles or proves afterwards would find other options than at build. torch is looked up when it is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["KeptConfig"]

_FIELDS = ("automatic_dynamic_shapes", "assume_static_by_default")


class KeptConfig:
    """A compiled function that leaves Dynamo's configuration as it found it, whatever it raises.

    Args:
        compiled: what the runtime made; its attributes are this object's, too.
    """

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self._compiled = compiled
        self._config = importlib.import_module("torch._dynamo.config")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        config = self._config
        before = [getattr(config, name, None) for name in _FIELDS]
        try:
            return self._compiled(*args, **kwargs)
        except BaseException:
            for name, value in zip(_FIELDS, before, strict=True):
                if getattr(config, name, None) != value:
                    setattr(config, name, value)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)
