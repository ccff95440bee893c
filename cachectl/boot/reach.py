"""How far a program under exec came on its way to a cached call, and which setting kept it from there.

Owns the marks that the start-up module leaves in the note's folder, and what is said where no process found anything to
tell: a Python that was never reached, no torch, no call of cache_compile. Standard library only.

    <folder>/seen.python     a Python process obeyed PYTHONPATH, and ran the start-up module
    <folder>/seen.torch      one of them imported torch
    <folder>/seen.runtime    one of them imported a runtime's inference module
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cachectl.schemas.boot import Reason

__all__ = ["isolation", "unreached"]

# Python's options that take the rest of the word, or the next one.
_WITH_VALUE = "WX"
_ENDS_OPTIONS = "cm"
_ISOLATING = {"I": "isolated mode", "E": "ignores PYTHONPATH", "S": "runs no start-up module"}


def isolation(command: Sequence[str]) -> str | None:
    """Return what of a command line keeps the start-up module out, as `python -I`; None where nothing is seen.

    Of `env` and Python's own options only: what a script starts in its turn can't be read off the command line.
    """
    words = list(command)
    while words and os.path.basename(words[0]) == "env":
        words.pop(0)
        while words and (words[0].startswith("-") or "=" in words[0]):
            word = words.pop(0)
            if word in ("-i", "-", "--ignore-environment"):
                return "env -i"
            if word in ("-u", "--unset") and words and words.pop(0) == "PYTHONPATH":
                return "env -u PYTHONPATH"
    if not words or not os.path.basename(words[0]).startswith("python"):
        return None
    words.pop(0)
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        word = words.pop(0)
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                # The one long option with a value.
                del words[:1]
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter in _ISOLATING:
                return f"python -{letter}"
            if letter in _ENDS_OPTIONS:
                return None
            if letter in _WITH_VALUE:
                if place == len(word):
                    del words[:1]
                break
    return None


def unreached(folder: Path, isolated: str | None) -> Reason:
    """Return why no process had anything to tell.

    Args:
        folder: the note's.
        isolated: what `isolation` saw in CMD.
    """

    def seen(stage: str) -> bool:
        return (folder / f"seen.{stage}").exists()

    apart = "one that is started with an environment of its own (env -i, ssh, another container) is not reached"
    if seen("runtime"):
        hint = "CMD ended before it called cache_compile"
        return Reason("policy", "cache_compile", kind="absent", hint=hint)
    if seen("torch"):
        hint = (
            "CMD called no cache_compile. For torch.compile(backend='npugraph_ex', fullgraph=True) of a bound method "
        )
        return Reason("policy", "cache_compile", kind="absent", hint=f"{hint}run: cachectl exec --lift")
    if isolated is not None:
        hint = f"CMD is reached by PYTHONPATH, which {isolated} keeps away from it: leave that out"
        return Reason("policy", isolated, kind="policy", hint=hint)
    if seen("python"):
        hint = f"no Python process that was reached imported torch; {apart}"
        return Reason("policy", "torch", kind="absent", hint=hint)
    hint = f"no Python process of CMD obeyed PYTHONPATH (python -I, -E or -S in a script); {apart}"
    return Reason("policy", "python", kind="absent", hint=hint)
