"""One infer.py a rank, as the framework's launch script starts them: LOCAL_RANK and RANK_OFFSET, and no RANK.

    python launch.py --config config/static_rank4.yaml

Every further argument is infer.py's. `torchrun --nproc-per-node 4 infer.py --config ...` does as well.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description="Start one rank a device.")
    parser.add_argument("--config", type=Path, required=True, help="inference configuration")
    args, others = parser.parse_known_args()
    world = yaml.safe_load(args.config.read_text())["parallel_config"]["world_size"]
    environ = {
        **os.environ,
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "RANK_OFFSET": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, str(ROOT / "infer.py"), "--config", str(args.config), *others]
    ranks = [
        subprocess.Popen(command, env={**environ, "LOCAL_RANK": str(rank), "RANK_ID": str(rank)})
        for rank in range(world)
    ]
    try:
        return follow(ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def follow(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all; the first that fails ends the others, which would wait for it in a collective."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [code for code in codes if code]
        if failed or None not in codes:
            return abs(failed[0]) if failed else 0
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
