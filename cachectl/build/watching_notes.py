"""The notes that `cachectl record` gets of each process of a program, and the folder where they are left.

Owns the notes' document:

    <folder>/
      seen.*          how far CMD's processes came; see cachectl.boot.reach
      <pid>-<n>.json  what one process compiled; replaced after each new thing

    {"pid", "started_at", "command": [word], "cwd",
     "forked": true,                another process started this one without a command, as multiprocessing does
     "search_path": [folder],       of sys.path, those that modules of the program came from
     "stack": [file],               the program's files that stood around a compile or a first call
     "opened": [file],              small configuration files that it had read by the first compile
     "environ": {name: value},      the families' variables as they were at the first compile
     "read_at_start": [name],       of these, those that were set otherwise when the process started
     "launcher": [name], "rank", "world_size", "simulated", "versions": {name: version}, "dynamo": {name: value},
     "methods": [{"method", "class", "module", "owner", "how", "dynamic", "options", "code_options", "calls": [...],
                  "more", "global_rank", "tp_rank", "pp_rank"}],
     "left": [{"what", "why", "foreign"}]}

Values of secrets are in no note. Light: no torch; what is asked of it is looked up in the program's process.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cachectl.boot.report import say
from cachectl.build.job import write_json
from cachectl.identity.environment import in_family, recorded_value, starting_environment
from cachectl.identity.options import DYNAMO_NOISE
from cachectl.identity.ranks import find_ranks
from cachectl.programs_script import LAUNCHER_VARIABLES
from cachectl.schemas.keying import is_secret_name

__all__ = ["RECORD_VARIABLE", "ProcessNotes", "process_notes", "read_notes"]

RECORD_VARIABLE = "CACHECTL_RECORD"
_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
# What is larger is data. What lies in there is the machine's.
_CONFIGURATION_BYTES = 1 << 20
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/lib/")
_first_pid = os.getpid()
_count = itertools.count()
_making = threading.Lock()
_notes: dict[tuple[str, int], ProcessNotes] = {}


class ProcessNotes:
    """What one process compiles, written anew with each new thing. Nothing here raises into the program."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / f"{os.getpid()}-{next(_count)}.json"
        self._lock = threading.RLock()
        self._owners: dict[str, Any] = {}
        self._document: dict[str, Any] = {
            "pid": os.getpid(),
            "started_at": time.time(),
            "command": list(getattr(sys, "orig_argv", [sys.executable, *sys.argv])),
            "cwd": _started_in(),
            "forked": os.getpid() != _first_pid or _is_spawned(),
            "search_path": [],
            "stack": [],
            "opened": [],
            "environ": {},
            "read_at_start": [],
            "launcher": [name for name in LAUNCHER_VARIABLES if name in os.environ],
            "rank": None,
            "world_size": None,
            "simulated": False,
            "versions": {},
            "dynamo": {},
            "methods": [],
            "left": [],
        }

    def method(self, method: types.MethodType, how: Mapping[str, Any]) -> dict[str, Any]:
        """Note a compiled method; return its note, to be handed back with its calls.

        Args:
            method: the program's bound method.
            how: `how`, `runtime`, `dynamic`, `options` and the ranks given.
        """
        from cachectl.programs_calls import owner_name

        with self._lock:
            kind = type(method.__self__)
            owner = owner_name(method.__self__, self._owners)
            self._owners[owner] = method.__self__
            options, code = _sayable(how["options"])
            note = {
                **how,
                "method": method.__name__,
                "class": kind.__qualname__,
                "module": kind.__module__,
                "owner": owner,
                "options": options,
                "code_options": code,
                "calls": [],
                "more": False,
            }
            if not self._document["methods"]:
                self._note_process()
            self._document["methods"].append(note)
            self._note_stack()
            self.write()
            return note

    def called(self, note: dict[str, Any], call: Mapping[str, Any], group: tuple[int, int] | None) -> None:
        """Note a method's call of a new kind.

        Args:
            note: the method's.
            call: `spec` and what else is known of it.
            group: rank and world size of the default process group.
        """
        with self._lock:
            note["calls"].append(dict(call))
            if group is not None:
                self._document["rank"], self._document["world_size"] = group
            self._note_stack()
            self.write()

    def leave(self, what: str, why: str, *, foreign: bool = False) -> None:
        """Note a compile of which no recipe can be made.

        Args:
            what: the method's or function's name.
            why: in words.
            foreign: whether another compiler made it, which is no business of a recipe's.
        """
        with self._lock:
            left = {"what": what, "why": " ".join(why.split())[:500], "foreign": foreign}
            if left not in self._document["left"] and len(self._document["left"]) < 32:
                self._document["left"].append(left)
                self.write()

    def write(self) -> None:
        """Leave the notes as they are now; a reader sees all of them or the ones before."""
        with self._lock:
            if os.getpid() != self._document["pid"]:
                return  # A forked child has its parent's notes, and its own process is another one.
            try:
                self._document["search_path"] = list(_search_path())
                write_json(self._path, self._document)
            except FileNotFoundError:
                pass  # CMD has ended, and this process was left behind by it.
            except (OSError, TypeError, ValueError) as error:
                say(f"what this process compiles is not recorded: {error}")

    def _note_process(self) -> None:
        """Note what of the process is known when it compiles for the first time."""
        document, environ = self._document, os.environ
        started = starting_environment(environ)
        document["environ"] = {
            name: value
            for name in sorted(environ)
            if in_family(name) and isinstance(value := recorded_value(name, environ[name]), str)
        }
        document["read_at_start"] = [name for name, value in document["environ"].items() if started.get(name) != value]
        document["opened"] = list(_opened())
        document["dynamo"] = _changed_dynamo()
        here = find_ranks(environ)
        if here.ranks is not None and len(here.ranks) == 1:
            document["rank"] = here.ranks[0]
            document["world_size"] = next((fact.world_size for fact in here.facts if fact.world_size), None)
        document["versions"] = {
            name: str(getattr(sys.modules.get(name), "__version__", "")) for name in ("torch", "torch_npu")
        }
        document["versions"]["python"] = ".".join(map(str, sys.version_info[:3]))
        from cachectl.runtimes.simulated import loaded_is_simulated

        document["simulated"] = loaded_is_simulated()

    def _note_stack(self) -> None:
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if not _is_ours(str(frame.f_globals.get("__name__"))) and _is_programs(file):
                path = os.path.realpath(file)
                if path not in self._document["stack"]:
                    self._document["stack"].append(path)
            frame = frame.f_back


def process_notes() -> ProcessNotes | None:
    """Return this process's notes; None where nobody records. A forked process has its own."""
    folder = os.environ.get(RECORD_VARIABLE)
    if not folder:
        return None
    with _making:
        known = _notes.get((folder, os.getpid()))
        if known is None:
            known = _notes[folder, os.getpid()] = ProcessNotes(Path(folder))
        return known


def read_notes(folder: Path) -> list[dict[str, Any]]:
    """Return the notes in a folder, in the order in which their processes began to leave any."""
    found = []
    for path in folder.glob("[0-9]*.json"):
        try:
            document = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue  # Gone, or not ours: the others count.
        if isinstance(document, dict) and isinstance(document.get("methods"), list):
            found.append(document)
    return sorted(found, key=lambda document: (document["started_at"], document["pid"]))


def _started_in() -> str:
    """Return the folder in which the process works, before its script has changed it where that can be told."""
    # PWD is the shell's word for it, and stays what it was.
    told = starting_environment(os.environ).get("PWD")
    try:
        here = os.getcwd()
    except OSError:
        return told or os.sep  # It is gone.
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if told and told != here and os.path.isdir(told) and len(sys.argv) and isinstance(script, str):
        given = sys.argv[0]
        if not os.path.isabs(given) and os.path.realpath(os.path.join(told, given)) == os.path.realpath(script):
            return told
    return here


def _is_spawned() -> bool:
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _sayable(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Return the options that a recipe can say by value, and where those are from that are functions.

    A function of the script itself has no name in another process: None.
    """
    plain: dict[str, Any] = {}
    code: dict[str, str | None] = {}
    for name, value in options.items():
        if callable(value):
            home, where = getattr(value, "__module__", None), getattr(value, "__qualname__", "<")
            found: Any = sys.modules.get(str(home))
            for step in where.split("."):
                found = getattr(found, step, None)
            code[name] = f"{home}:{where}" if found is value and home != "__main__" else None
        elif not is_secret_name(name):
            plain[name] = json.loads(json.dumps(value, default=str))
    return plain, code


def _changed_dynamo() -> dict[str, Any]:
    """Return what of Dynamo's configuration is no default, as far as a recipe can say it."""
    config: Any = sys.modules.get("torch._dynamo.config")
    entries = getattr(config, "_config", {})
    changed = {}
    for name, entry in sorted(entries.items()):
        # Past the configuration's own reading, which warns of names that it has given up.
        value = getattr(entry, "user_override", None)
        plain = type(value) in (bool, int, float, str)
        if plain and name not in DYNAMO_NOISE and value != getattr(entry, "default", None):
            changed[name] = value
    return changed


def _opened() -> Iterator[str]:
    """Yield the configuration files that this process has read, of the program's own and of its models'."""
    for file in list(getattr(sys, "_cachectl_opened", ())):
        path = os.path.realpath(file)
        try:
            small = os.path.isfile(path) and os.path.getsize(path) <= _CONFIGURATION_BYTES
        except OSError:
            continue
        if small and not path.startswith(_SYSTEM) and _is_programs(path):
            yield path


def _search_path() -> Iterator[str]:
    """Yield the folders of sys.path that modules of the program came from, in its order."""
    files = [
        file
        for name, module in list(sys.modules.items())
        if not _is_ours(name) and (file := _file_of(module)) and _is_programs(file)
    ]
    for entry in dict.fromkeys(sys.path):
        folder = os.path.realpath(entry or os.getcwd())
        if any(os.path.realpath(file).startswith(folder.rstrip(os.sep) + os.sep) for file in files):
            yield folder


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "cachectl" or module == "sitecustomize"


def _file_of(module: object) -> str | None:
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else None


def _is_programs(file: str) -> bool:
    """Say whether a file is the program's own: neither ours, nor installed, nor of the standard library."""
    path = os.path.realpath(file)
    if not file.endswith(".py") and not os.path.isfile(path):
        return False
    standard = [os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")]
    site = any(f"{os.sep}{part}{os.sep}" in path for part in ("site-packages", "dist-packages"))
    return not site and not path.startswith((_OURS, *standard)) and not file.startswith("<")
