"""Runs a script in this process as Python would, with its own `__main__`, arguments, working folder and search path.

Owns what a script sees of its process, and how what it raises is told. Its `__main__` stays in sys.modules when it has
ended: what it compiles belongs to that module, in the process that builds as in the program's own. Standard library
only.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cachectl.errors import ConfigError
from cachectl.programs_command import ScriptCommand
from cachectl.programs_ending import ScriptEnd

__all__ = ["LAUNCHER_VARIABLES", "run_script", "script_error"]

_OURS = str(Path(__file__).resolve().parent) + os.sep
# What launchers of ranks tell their processes, and a program may ask for; with what they say in a world of one.
LAUNCHER_VARIABLES = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "RANK_OFFSET": "0",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "0",
    "ROLE_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def run_script(command: ScriptCommand, folder: Path, end: ScriptEnd, launcher: tuple[str, ...] = ()) -> None:
    """Run a script to its end; what it raises passes through.

    Args:
        command: what to run.
        folder: the working folder it is started in; left again when it ends.
        end: of this script; told when its code has been left.
        launcher: variables that a launcher sets for the program, which the script may ask for.

    Raises:
        ConfigError: no such script, module or folder.
        BaseException: what the script raises, SystemExit among it.
    """
    for name in launcher:
        if name in LAUNCHER_VARIABLES:
            os.environ.setdefault(name, LAUNCHER_VARIABLES[name])
    with _standing_in(folder):
        code, attributes = _module(command) if command.is_module else _file(command)
        main = types.ModuleType("__main__")
        vars(main).update(attributes)
        sys.modules["__main__"] = main
        sys.argv = [str(attributes["__file__"]) if command.is_module else command.target, *command.arguments]
        try:
            exec(code, vars(main))  # noqa: S102 - the program that the recipe names
        finally:
            end.left = True


def script_error(error: BaseException, command: ScriptCommand) -> ConfigError:
    """Return what a script raised before it was done, with the script's own line."""
    if isinstance(error, SystemExit):
        return ConfigError(
            f"{command.target} ended with exit code {_exit_code(error)} before its methods were called",
            hint="run the command by itself; see the rank's log for what it said",
        )
    if isinstance(error, SyntaxError) and error.filename:
        place, said = f"{os.path.basename(error.filename)}:{error.lineno}", error.msg
    else:
        place, said = _place(error), str(error)
    text = " ".join(said.split())[:800]
    return ConfigError(
        f"{command.target} raised {type(error).__name__}{': ' if text else ''}{text} ({place})",
        hint="run the command by itself; see the rank's log for the traceback",
    )


def _place(error: BaseException) -> str:
    """Return file and line of the innermost frame that is the program's: neither ours nor an installed package's."""
    frames = [item for item in traceback.extract_tb(error.__traceback__) if not _is_ours(item.filename)]
    own = [item for item in frames if "site-packages" not in item.filename and not item.filename.startswith("<")]
    standard = os.path.realpath(os.path.dirname(os.__file__)) + os.sep
    own = [item for item in own if not os.path.realpath(item.filename).startswith(standard)] or own or frames
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else "no line"


def _is_ours(file: str) -> bool:
    return os.path.realpath(file).startswith(_OURS)


def _exit_code(error: SystemExit) -> object:
    return 0 if error.code is None else error.code


def _file(command: ScriptCommand) -> tuple[types.CodeType, Mapping[str, Any]]:
    path = Path(os.path.abspath(command.target))
    if path.is_dir():
        # As Python runs a folder: its __main__.py, with the folder itself on the path.
        path = path / "__main__.py"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"command: {command.target}: {error.strerror} in {Path.cwd()}",
            hint="paths of a command are relative to model.config.folder, and that to the recipe's folder",
        ) from error
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    # Of a text in any encoding, as Python reads a script.
    code = compile(data, str(path), "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader("__main__", str(path))
    return code, {"__file__": str(path), "__loader__": loader, "__package__": None, "__cached__": None}


def _module(command: ScriptCommand) -> tuple[types.CodeType, Mapping[str, Any]]:
    sys.path.insert(0, os.getcwd())
    name = command.target
    spec = _found(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _found(name)
    code = spec.loader.get_code(name) if spec is not None and hasattr(spec.loader, "get_code") else None
    if spec is None or code is None:
        raise ConfigError(
            f"command: no module named {name} that can be run",
            hint="a module is looked for in model.config.folder and in model.path",
        )
    return code, {
        "__file__": spec.origin,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__cached__": spec.cached,
        "__spec__": spec,
    }


def _found(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None  # A parent that is no package, or not there.


@contextlib.contextmanager
def _standing_in(folder: Path) -> Iterator[None]:
    """Have a working folder for the block; the process's own may be gone by then."""
    before = os.getcwd()
    try:
        os.chdir(folder)
    except OSError as error:
        raise ConfigError(
            f"model.config.folder {folder}: {error.strerror}", hint="it is relative to the recipe's folder"
        ) from error
    try:
        yield
    finally:
        os.chdir(before)
