"""The program's entry: tells `hook` and `exec` apart from the rest before anything heavy is imported.

They run at every pod start, from the standard library alone; click and the rest are for the other commands.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command in sys.argv and return its exit code; never raises for what a command may meet."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["hook"]:
        if any(argument in ("--help", "-h") for argument in arguments[1:]):
            from cachectl.cli.hook import print_help

            return print_help()
        from cachectl.boot.hook import main as run_hook

        try:
            return run_hook(arguments[1:])
        except KeyboardInterrupt:
            # Somebody at a terminal: 128 + SIGINT, as the other commands say.
            sys.stderr.write("cachectl: interrupted\n")
            return 130
    if arguments[:1] == ["exec"]:
        ours = arguments[1 : arguments.index("--")] if "--" in arguments else arguments[1:]
        if any(argument in ("--help", "-h") for argument in ours):
            from cachectl.cli.execute import print_help as print_exec_help

            return print_exec_help()
        from cachectl.execution import main as run_exec

        return run_exec(arguments[1:])
    from cachectl.cli.main import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
