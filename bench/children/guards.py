"""Record the decoder's guards, or prove them: `python guards.py record|prove LAYERS SHEET`; prints one document."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from tiny_decoder.inputs import decode
from tiny_decoder.model import build

from cachectl.boot.proof import prove
from cachectl.schemas.canonical import canonical_bytes

phase, layers, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
model = build(layers=layers)
method = model.main_decode
with torch.no_grad():
    inputs = decode(model, 0)
    if phase == "record":
        from cachectl.build.guards import GuardRecorder

        recorder = GuardRecorder(method.__func__.__code__)
        with recorder:
            torch.compile(method, backend="eager", dynamic=False, fullgraph=True)(**inputs)
        recorded = recorder.recorded()
        data = canonical_bytes(recorded.sheet)
        path.write_bytes(data)
        print(
            json.dumps({"guards": recorded.guard_count, "size_bytes": len(data), "left": len(recorded.unrepresented)})
        )
    else:
        sheet = json.loads(path.read_bytes())
        # The program has imported Dynamo when it calls a compiled method, and some guards look at what it imported.
        import torch._dynamo

        arguments = {"self": model, **inputs}
        found = []
        for _ in range(6):
            started = time.perf_counter()
            proof = prove(sheet, arguments=arguments, function=method.__func__, torch=torch)
            found.append(time.perf_counter() - started)
            if proof.failed:
                sys.exit(f"the proof failed: {proof.failed[0]}")
        print(json.dumps({"guards": proof.guards, "seconds": found[0], "again_seconds": min(found[1:])}))
