"""Asks torch and the proof about every change of the zoo: `record` in one process, `prove` in another.

    python -m verdicts record FOLDER     writes a sheet for each animal, and both verdicts on each change
    python -m verdicts prove FOLDER      reads the sheets, and writes the proof's verdicts of this process

Run with this folder on sys.path; the names of the models' classes have to be the same in both processes.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from absences import ABSENCES
from models import ZOO, Animal, Change
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

from cachectl.boot.proof import Proof, prove
from cachectl.build.guard_reading import RecordedGuards
from cachectl.build.guards import GuardRecorder
from cachectl.schemas.canonical import canonical_bytes


def record(animal: Animal) -> tuple[RecordedGuards, Any]:
    """Compile a fresh model's call; return what was recorded, and torch's own guard manager with its model."""
    torch._dynamo.reset()
    torch._dynamo.utils.orig_code_map.clear()
    model, call = animal.build(), animal.call()
    code = type(model).decode.__code__
    with torch.no_grad(), GuardRecorder(code) as recorder:
        compiled = torch.compile(model.decode, backend="eager", fullgraph=True, dynamic=animal.dynamic)
        more, named = call.pop("more", ()), call.pop("named", {})
        compiled(*call.values(), *more, **named) if more else compiled(**call, **named)
    assert recorder.compilations == 1
    entries = _debug_get_cache_entry_list(code)
    assert len(entries) == 1
    return recorder.recorded(), entries[0].guard_manager


def bound(model: Any, call: dict[str, Any]) -> dict[str, Any]:
    """Return the call's locals as the compiled frame has them: receiver, arguments, defaults."""
    function = type(model).decode
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    filled = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | (function.__kwdefaults__ or {})
    return {"self": model} | filled | call


def verdicts(animal: Animal, sheet: dict[str, Any], manager: Any) -> dict[str, dict[str, Any]]:
    """Apply each change to a fresh model and ask both; torch's verdict is None without a guard manager."""
    found = {}
    for name, change in animal.changes.items():
        model, call = animal.build(), animal.call()
        apply = change.apply if isinstance(change, Change) else change
        with torch.no_grad():
            context = apply(model, call)
            # A change may return what its last call gave; only a context manager is one.
            context = context if hasattr(context, "__enter__") else nullcontext()
            with context:
                proof = ask(sheet, model, call)
                torch_says = None if manager is None else bool(manager.check(bound(model, call)))
        found[name] = {
            "torch": torch_says,
            "ours": change.ours if isinstance(change, Change) else None,
            "proof": proof.holds,
            "failed": [str(reason) for reason in proof.failed],
        }
    return found


def ask(sheet: dict[str, Any], model: Any, call: dict[str, Any]) -> Proof:
    """Prove a call as a program's process does."""
    return prove(sheet, arguments=bound(model, call), function=model.decode, torch=torch)


def main(verb: str, folder: Path) -> None:
    """Write every animal's result as JSON, named after it and the verb."""
    for name, animal in {**ZOO, **ABSENCES}.items():
        sheet_path = folder / f"{name}.sheet"
        manager, facts = None, {}
        if verb == "record":
            recorded, manager = record(animal)
            sheet_path.write_bytes(canonical_bytes(recorded.sheet))
            facts = {"unrepresented": recorded.unrepresented, "dynamic": recorded.dynamic}
        sheet = json.loads(sheet_path.read_bytes())
        result = {**facts, "verdicts": verdicts(animal, sheet, manager)}
        (folder / f"{name}.{verb}").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
