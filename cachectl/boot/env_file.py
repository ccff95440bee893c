"""The hand-out's environment as a file that another container's shell sources, and as lines for `eval`.

Owns the file's place, its text, and that an old hand-out is never left in it: it is rewritten at every hook, cold ones
too. It lies in the warm dir, which the program's container mounts at the same path. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from cachectl.boot.acting import acting_as
from cachectl.boot.handout import HANDOUT_VARIABLE, STARTUP
from cachectl.boot.options import HookOptions
from cachectl.boot.warmdir import WarmDir, choose_warm_dir

__all__ = ["ENV_FILE", "env_file_of", "shell_lines", "write_env_file"]

ENV_FILE = "cachectl.env"

# What no shell takes for anything but itself.
_PLAIN = "%+,-./0123456789:=@ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"
_COLD = "# Left by cachectl hook: it was cold, nothing is handed out.\n"
_WARM = """\
# Left by cachectl hook. Source it in the program's shell, before the program.
if [ "${{CACHECTL_DISABLE:-}}" != 1 ]; then
  if [ -f {document} ] && [ -f {module} ]; then
    # The program's own PYTHONPATH stays, behind ours.
{exports}  else
    printf '%s\\n' {missing} >&2
  fi
fi
"""


def env_file_of(options: HookOptions, environ: Mapping[str, str]) -> Path | None:
    """Return where this hook's file belongs; None where nothing may be written, or no warm dir can be this user's."""
    if options.read_only:
        return None
    if options.env_file:
        return Path(os.path.abspath(options.env_file))
    chosen = choose_warm_dir(options.warm_dir, environ, options.uid)
    return chosen.root / ENV_FILE if isinstance(chosen, WarmDir) else None


def write_env_file(path: Path, env: Mapping[str, str], uid: int | None = None) -> None:
    """Replace the file; a reader sees the old one or the new one.

    Args:
        path: its place.
        env: what the hook hands out; empty after a cold one.
        uid: whose hand-out it is, and so whose file; None for this process's user.

    Raises:
        OSError: it can't be written.
    """
    text = _COLD
    if env:
        document = env[HANDOUT_VARIABLE]
        text = _WARM.format(
            document=_quoted(document),
            module=_quoted(str(STARTUP / "sitecustomize.py")),
            exports=shell_lines(env),
            missing=_quoted(f"cachectl: cold: no {document} or no cachectl in this container"),
        )
    with acting_as(os.geteuid() if uid is None else uid):
        _replace(path, os.fsencode(text))


def _replace(path: Path, data: bytes) -> None:
    pending = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    descriptor = os.open(pending, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(pending, path)
    except BaseException:
        pending.unlink(missing_ok=True)
        raise


def shell_lines(env: Mapping[str, str]) -> str:
    """Return export lines for a POSIX shell; PYTHONPATH is put in front of what the shell has, not in its place."""
    lines = [f"export {name}={_quoted(value)}\n" for name, value in env.items() if name != "PYTHONPATH"]
    if "PYTHONPATH" in env:
        lines.append(f'export PYTHONPATH={_quoted(str(STARTUP))}"${{PYTHONPATH:+:$PYTHONPATH}}"\n')
    return "".join(lines)


def _quoted(text: str) -> str:
    """Return a text as one word of a POSIX shell; as shlex.quote, whose module took 1 ms of the hook's start."""
    if text and not text.strip(_PLAIN):
        return text
    return "'" + text.replace("'", "'\"'\"'") + "'"
