"""What a program said with `torch.compiler.set_stance`: whether compiled code is to run, and whether it is compared.

Owns reading it, in well under a microsecond, since it is read at each call. Says nothing before torch's Dynamo is
imported: then nobody can have set it. torch need not be imported here.

Facts: torch 2.13 torch/_dynamo/eval_frame.py (`_stance`, a DynamoStance of stance, skip_guard_eval_unsafe, backend).
"""

from __future__ import annotations

import sys

from cachectl.boot.cases import UNGUARDED

__all__ = ["stance"]

_HOME = "torch._dynamo.eval_frame"


def stance() -> str:
    """Return "" for the default, UNGUARDED inside `skip_guard_eval_unsafe`, else the setting that bars compiled code.

    The stances that only say what a recompile does bar nothing: what is handed out needs none.
    """
    found = getattr(sys.modules.get(_HOME), "_stance", None)
    if found is None:
        return ""
    if found.stance == "force_eager":
        return "force_eager"
    if found.backend is not None:
        return "force_backend"
    return UNGUARDED if found.skip_guard_eval_unsafe else ""
