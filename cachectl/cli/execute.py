"""`cachectl exec`: its help text. The command itself is cachectl.execution and does without click.

Standard library only, and no imports of ours: `exec --help` is as light as exec.
"""

from __future__ import annotations

import sys

__all__ = ["HELP", "print_help"]

HELP = """\
Usage: cachectl exec RECIPE [OPTIONS] -- CMD...

  Run an unchanged program, warm where it can be.

  Runs the hook, then CMD. In CMD's Python processes the runtime's own
  cache_compile proves and loads what was handed out; what does not hold is
  compiled in a private folder, and the cache directory that the program passes
  is neither read nor written. CMD gets the environment that the recipe
  declares, and the simulated CANN where the recipe says device: simulated. It
  runs whether the hook was warm or cold. stdout, signals and exit code are
  CMD's own; CACHECTL_DISABLE=1 runs CMD and nothing else.

  Example:

    cachectl exec recipe.yaml --report report.json -- python serve.py

Options:
  --report FILE               Write what was proved, and how long each stage
                              took; replaced after each method's first call.
  --observe                   Prove and report, but run cold.
  --record                    Publish what CMD had to compile, once a fresh
                              process has proved it: the next start is warm.
  --record-timeout SECONDS    Bound on that, after CMD's end.  [default: 600]
  --lift                      Turn a full-graph torch.compile of a bound method
                              (backend npugraph_ex) into a cached call.
  --store DIR|URL             The store.  [env: CACHECTL_STORE]
  --warm-dir DIR              Where the warm copy is laid out.
                              [env: CACHECTL_WARM_DIR; default: the cache dir
                              of the user, else /var/tmp/cachectl-<uid>]
  --rank N                    Hand out for one rank; without it the ranks that
                              the environment names, else all.
  --deadline SECONDS          Cold when the hook is not done by then.
                              [default: 30]
  -v                          Accepted.
  -q                          Say nothing of outcome and reasons on stderr.
  -h, --help                  Show this message and exit.
"""


def print_help() -> int:
    """Print the help text; return exit code 0."""
    sys.stdout.write(HELP)
    return 0
