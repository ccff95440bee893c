"""torchrun's elastic launcher for the ranks of one build: `python -m cachectl.build.elastic PARENT PHASE JOB`.

Owns nothing but the start: one `cachectl.build.worker` a rank, none of them tried again, and `ended.json` in the
workspace, which says how those ended that ended badly. It does not outlive the build whose process id it was given, and
no rank outlives it. Imports torch, which the build itself does not.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from cachectl.build.job import ENDED, Job, die_with, write_json

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run one phase of a job on all its ranks; return 0, or 1 when one of them ended badly."""
    parent, phase, job_path = arguments
    die_with(int(parent))
    job = Job.read(Path(job_path))
    # torchrun reads its own options from these, which were meant for the program that the pod is for.
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = {
        "nnodes": "1:1",
        "nproc-per-node": job.world_size,
        "max-restarts": 0,
        "local-addr": "localhost",
        # Else it leaves a folder behind at each start.
        "log-dir": job.workspace / "torchrun",
    }
    words = ["--standalone", "--no-python", *(f"--{name}={value}" for name, value in options.items())]
    # Each rank is a session of its own and dies with this process.
    worker = [sys.executable, "-m", "cachectl.build.worker", phase, job_path, str(os.getpid())]
    try:
        run.main([*words, *worker])
    except ChildFailedError as error:
        codes = {str(rank): failure.exitcode for rank, failure in error.failures.items()}
        # torchrun counts those among them that it stopped because of another one.
        own = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM}
        write_json(job.workspace / ENDED, {"phase": phase, "exit_codes": own or codes})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
