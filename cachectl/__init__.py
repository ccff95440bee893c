"""cachectl: builds, proves and hands out the compile caches of an Ascend NPU inference fleet.

The package's public names are resolved when they are first asked for, so that `import cachectl` costs nothing and
needs the standard library only.
"""

from __future__ import annotations

from importlib import import_module

__all__ = ["WarmStart", "__version__", "cache_compile", "warm_start"]

__version__ = "0.1.0"

# Public name -> "module:attribute". Imported on first use.
_LAZY: dict[str, str] = {
    "WarmStart": "cachectl.program:WarmStart",
    "cache_compile": "cachectl.program:cache_compile",
    "warm_start": "cachectl.program:warm_start",
}


def __getattr__(name: str) -> object:
    target = _LAZY.get(name)
    if target is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = target.partition(":")
    value: object = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
