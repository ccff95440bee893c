"""Builds without torch: the real build command and the real worker, with a `torch` that answers in a rank's place.

Importing torch is the first thing a rank does. The one that stands here reads the job, does what the case's args say
and leaves the documents that a rank leaves. All around it is real: processes, launcher, store, database, boot record.
Where there are several ranks a torchrun stands in, too; or the real one, which needs the real torch: a site says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cachectl
from cachectl.store.layout import StoreLayout
from tests.stores import write_site

RANK = '''
import json, os, sys, time
from pathlib import Path

phase, job = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
number = int(os.environ.get("RANK", "0")) if job["world_size"] > 1 else 0
workspace = Path(job["workspace"])
rank = workspace / f"rank{number}"
document = {"rank": number, "cases": {}, "failure": None}
request, recipe = job["request"], job["recipe"]
# What ranks have in common, which is nearly all.
LINES = "".join(f"{chr(10)}line {n} of every rank" for n in range(60))


def find(case, do):
    """Return what recording finds of a case, its artifact beside."""
    folder = rank / f"case{case['index']}" / "cache" / "Model_static_aclgraphcache_0" / case["method"]
    folder.mkdir(parents=True)
    placed = {"found": {"device_index": int(os.environ["LOCAL_RANK"])}} if do == "tied" else {}
    (folder / "compiled_module").write_text(f"artifact of {case['method']} {do} of rank {number}" + LINES)
    return {
        "parts": {
            "model": {
                **{name: value for name, value in recipe["model"].items() if name != "path"},
                "method": case["method"],
                "inputs": case["case"]["inputs"],
                "args": case["case"].get("args") or {},
            },
            "sources": {"version": 1, "attributes": [], "files": [], "packages": []},
            "inputs": {"L['x']": {"value": str(case["case"].get("args"))}},
            "topology": {**request["topology"], "rank": number, **placed},
            "options": request["options"],
            "toolchain": request["toolchain"],
            "device": request["device"],
            "environment": {"declared": request["environment"], "observed": {}},
            "guards": {"name": "stand-in"},
        },
        "raw_sources": {"version": 1, "files": {}, "code": {}, "classes": {}, "notes": []},
        "runtime": "npugraph_ex",
        "runtime_path": f"Model_static_aclgraphcache_0/{case['method']}",
        "artifact": str(folder),
        "guard_count": 1,
        "cold_seconds": 2.0,
        "gates": {"first step": 0.0},
        "warnings": [],
    }


def meet(case):
    """Wait for the other ranks, as in a collective."""
    place = Path(os.environ.get("MEETING", workspace))
    place.mkdir(exist_ok=True)
    (place / f"met-{phase}-{case['index']}-{number}").touch()
    while not all((place / f"met-{phase}-{case['index']}-{there}").exists() for there in range(job["world_size"])):
        time.sleep(0.01)


def tell(case, found):
    """Leave what was found of one case, as soon as it is known."""
    folder = rank / f"case{case['index']}"
    folder.mkdir(exist_ok=True)
    (folder / f"told-{phase}.json").write_text(json.dumps(found))
    with open(rank / "events.jsonl", "a") as events:
        events.write(json.dumps({"case": case["index"], "told": phase}) + chr(10))


def leave():
    """Leave what was found; whole, also where this process is stopped meanwhile."""
    (rank / "partial").write_text(json.dumps(document))
    os.replace(rank / "partial", rank / f"{phase}.json")


def has_ended(pid):
    try:
        return ") Z" in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


# What the gates showed, where a test says it.
said = Path(job["recipe_folder"]) / "shown.json"
shown = json.loads(said.read_text()) if said.exists() else None

for case in job["cases"]:
    args = case["case"].get("args") or {}
    do = args.get("ranks", {}).get(str(number), args.get("do", "build"))
    with open(rank / "events.jsonl", "a") as events:
        events.write(json.dumps({"case": case["index"], "phase": phase, "at": time.time()}) + chr(10))
    marks = Path(os.environ.get("MARKS", job["recipe_folder"]))
    with open(marks / "ranks", "a") as ranks:
        ranks.write(f"{os.getpid()} {phase} {case['case']['name']}{chr(10)}")
    if (marks / "mended").exists():
        do = "build"
    failure = {"kind": "build", "hint": "see the rank's log", "case": case["index"], "at": time.time()}
    if do == f"doubt-{phase}" and not (rank / f"case{case['index']}" / "told-record.json").exists():
        # Of what an earlier build recorded, nothing holds.
        do = f"gate-{phase}"
    if do in (f"fail-{phase}", f"refuse-{phase}", f"gate-{phase}", f"echo-{phase}"):
        kind = "config" if do.startswith("refuse") else "build"
        text = f"{case['method']} [{case['case']['name']}]: does not work"
        text += os.environ.get("WORDS", "")
        refused = {"of_peer": do.startswith("echo"), "refused": do.startswith("gate")}
        document["failure"] = {**failure, "kind": kind, "message": text, **refused}
        if do.startswith("echo"):
            # The words come first, and then the end of every peer: nobody loses one that has not come so far yet.
            leave()
            ended, until = set(), time.monotonic() + 240
            while len(ended) < job["world_size"] - 1 and time.monotonic() < until:
                begun = [line.split(" ") for line in (marks / "ranks").read_text().splitlines()]
                ended = {pid for pid, there, _ in begun if there == phase and has_ended(pid)}
                time.sleep(0.02)
        break
    if do == f"lack-{phase}":
        files = {}
        if (Path(job["recipe_folder"]) / "model.py").exists():
            from cachectl.identity.source_files import imported_files

            sys.path.insert(0, job["recipe_folder"])
            __import__("model")
            files = imported_files({"path:0": Path(job["recipe_folder"])})
        absence = {"message": "functions: Model has no such method", "hint": "it has: others", "files": files}
        document["cases"][str(case["index"])] = {"absent": absence}
        meet(case)
        tell(case, {"absent": absence})
        continue
    if do == f"die-{phase}":
        os.kill(os.getpid(), 9)
    if do == f"wait-{phase}":
        while not (marks / "go").exists():
            time.sleep(0.02)
    meet(case)
    found = (
        find(case, do)
        if phase == "record"
        else {"warm_seconds": 0.5, "gates": {}, "seconds": {}, "proof_guards": 1, "shown": shown}
    )
    document["cases"][str(case["index"])] = found
    tell(case, found)
leave()
os._exit(0 if document["failure"] is None else 1)
'''

# What torchrun does for a build: starts the ranks in sessions of their own, and stops all when one ends badly.
TORCHRUN = """
import os, subprocess, sys, time, types


class ChildFailedError(Exception):
    pass


def main(words):
    options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
    command = words[[word.startswith("--") for word in words].index(False):]
    count = int(options["nproc-per-node"])
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)},
            start_new_session=True,
        )
        for rank in range(count)
    ]
    while not any(process.poll() for process in ranks) and any(process.poll() is None for process in ranks):
        time.sleep(0.02)
    failed = {rank: process.returncode for rank, process in enumerate(ranks) if process.poll()}
    for process in ranks:
        if process.poll() is None:
            os.killpg(process.pid, 15)
        process.wait()
    if failed:
        error = ChildFailedError()
        error.failures = {rank: types.SimpleNamespace(exitcode=code) for rank, code in failed.items()}
        raise error


for name in ("torch.distributed", "torch.distributed.elastic", "torch.distributed.elastic.multiprocessing"):
    sys.modules[name] = types.ModuleType(name)
errors = types.ModuleType("torch.distributed.elastic.multiprocessing.errors")
errors.ChildFailedError = ChildFailedError
sys.modules[errors.__name__] = errors
run = sys.modules["torch.distributed"].run = types.ModuleType("torch.distributed.run")
run.main = main
"""

# The `torch` of every process.
TORCH = """
import os, sys

if "cachectl.build.elastic" not in sys.orig_argv:
    exec(compile({rank!r}, "rank", "exec"), {{}})
elif "REAL_TORCHRUN" in os.environ:
    sys.path[:] = [folder for folder in sys.path if not __file__.startswith(folder + "/")]
    del sys.modules["torch"]
    import torch
else:
    exec(compile({torchrun!r}, "torchrun", "exec"), {{}})
"""


@dataclass(frozen=True)
class Site:
    """A folder with recipes, a store, a stand-in torch, and a folder for temporary files of its own."""

    folder: Path
    real_torchrun: bool = False

    @property
    def layout(self) -> StoreLayout:
        return StoreLayout(self.folder / "store")

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def environ(self) -> dict[str, str]:
        """Return the environment of a build."""
        package = Path(cachectl.__file__).resolve().parents[1]
        return {
            **os.environ,
            "PYTHONPATH": f"{self.folder / 'site'}{os.pathsep}{package}",
            "CACHECTL_STORE": str(self.layout.root),
            "CACHECTL_WARM_DIR": str(self.folder / "warm"),
            "TMPDIR": str(self.temporary),
            **({"REAL_TORCHRUN": "1"} if self.real_torchrun else {}),
        }

    def recipe(
        self,
        cases: Mapping[str, str],
        *,
        name: str = "own",
        file: str = "recipe.yaml",
        twins: bool = False,
        **fields: Any,
    ) -> Path:
        """Write a recipe whose cases do what is said: build, or fail-, refuse-, gate-, die- or wait-record or -reload.

        `die-record@1` does rank 1 alone, others build; several of these stand with commas between. Ranks of several
        also echo-: report that a peer is gone, and lack-record: report that there is no such method. doubt-reload:
        a gate refuses what an earlier build recorded, and no other. tied: the artifact names the local rank's device.

        Args:
            twins: whether cases that do the same are the same but for their names.
        """
        document = {
            "schema": "cachectl/recipe/v1",
            "name": name,
            "device": "simulated",
            "model": {"factory": "model:build", "path": ["."]},
            "functions": [
                {
                    "method": "main_decode",
                    "cases": [
                        {"name": case, "inputs": "model:inputs", "args": {**_does(do), **({} if twins else {"n": n})}}
                        for n, (case, do) in enumerate(cases.items())
                    ],
                }
            ],
            **fields,
        }
        path = self.folder / file
        path.write_text(json.dumps(document))
        return path

    def start(self, *arguments: str | Path, environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start `cachectl ARGUMENTS...`."""
        return subprocess.Popen(
            [sys.executable, "-m", "cachectl", *map(str, arguments)],
            cwd=self.folder,
            env={**self.environ(), **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str | Path) -> Done:
        """Run `cachectl ARGUMENTS...`; return how it ended."""
        return finish(self.start(*arguments))

    def build(self, *arguments: str | Path) -> Done:
        """Run `cachectl build --json ARGUMENTS...`."""
        return self.run("build", "--json", *arguments)

    def ranks(self) -> list[tuple[int, str, str]]:
        """Return process, phase and case of every case that a rank began, in order."""
        path = self.folder / "ranks"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), phase, case) for pid, phase, case in (line.split(" ") for line in lines)]

    def entries(self) -> Sequence[Path]:
        """Return the entry manifests in the store."""
        return sorted(self.layout.root.glob("entries/*/*/*.json"))

    def records(self) -> list[dict[str, Any]]:
        """Return the boot records."""
        return [json.loads(path.read_text()) for path in sorted(self.layout.root.glob("boot/recipes/*.json"))]


def _does(text: str) -> dict[str, Any]:
    if "@" not in text:
        return {"do": text}
    return {"ranks": {rank: do for do, _, rank in (part.partition("@") for part in text.split(","))}}


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def report(self) -> dict[str, Any]:
        """The document on stdout."""
        document: dict[str, Any] = json.loads(self.stdout)
        return document


def finish(process: subprocess.Popen[str], timeout_s: float = 600.0) -> Done:
    """Wait for a command and return how it ended; the bound is for what hangs, machines are slow at times."""
    stdout, stderr = process.communicate(timeout=timeout_s)
    return Done(process.returncode, stdout, stderr)


def make_site(folder: Path) -> Site:
    """Make a site with nothing built below `folder`."""
    site = Site(folder)
    site.temporary.mkdir(parents=True)
    write_site(folder / "site")
    (folder / "site" / "torch" / "__init__.py").write_text(TORCH.format(rank=RANK, torchrun=TORCHRUN))
    return site
