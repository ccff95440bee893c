"""`cachectl hook`: its help text. The hook itself is cachectl.boot.hook and does without click.

Standard library only, and no imports of ours: `hook --help` is as light as the hook.
"""

from __future__ import annotations

import sys

__all__ = ["HELP", "print_help"]

HELP = """\
Usage: cachectl hook RECIPE [OPTIONS]

  Hand out a private warm copy of the recipe's compile cache.

  Runs before the program, for instance in an init container: finds the ready
  warm sets that fit this machine, verifies every byte it copies, lays out the
  warm dir and prints the environment in which an unchanged program starts warm.
  Never writes to the store. Exits 0 whether warm or cold, so that no pod dies
  of its cache; CACHECTL_DISABLE=1 makes it do nothing.

  Example:

    eval "$(cachectl hook recipe.yaml --store /mnt/cache --format shell)"
    python serve.py

Options:
  --store DIR|URL             The store.  [env: CACHECTL_STORE]
  --warm-dir DIR              Where the warm copy is laid out.
                              [env: CACHECTL_WARM_DIR; default: the cache dir
                              of the user, else /var/tmp/cachectl-<uid>]
  --format json|shell|env     What is printed: the hook's document, export
                              lines, or name=value lines.  [default: json]
  --env-file FILE             Where to leave the environment for another shell.
                              [default: cachectl.env in the warm dir]
  --rank N                    Hand out for one rank; without it the ranks that
                              the environment names, else all.
  --strict                    Exit 1 when not warm.
  --read-only                 Change nothing on the node; only say what would
                              be handed out.
  --deadline SECONDS          Cold when not done by then, also where the store
                              hangs.  [default: 30]
  --uid N                     Owner of the warm copy, when run as root.
  --json                      The same as --format json.
  -v                          Say more on stderr.
  -q                          Print nothing but the outcome.
  -h, --help                  Show this message and exit.
"""


def print_help() -> int:
    """Print the help text; return exit code 0."""
    sys.stdout.write(HELP)
    return 0
