"""`cachectl record`: runs a program and writes the recipe of what it compiled."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from cachectl.cli.options import HELP_NAMES, Session, example, session_options

__all__ = ["command"]


@click.command(
    "record",
    # What stands behind CMD belongs to CMD, also where it looks like one of our options.
    context_settings={**HELP_NAMES, "allow_interspersed_args": False},
    epilog=example(
        "cachectl record -- python infer.py --config config.yaml",
        "cachectl record -o decode.recipe.yaml -- torchrun --nproc-per-node 4 infer.py",
    ),
)
@click.argument("arguments", metavar="-- CMD...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The recipe.  [default: SCRIPT.recipe.yaml]")
@click.option("--name", help="The recipe's name.  [default: the script's]")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@session_options
def command(session: Session, arguments: tuple[str, ...], output: Path | None, name: str | None, force: bool) -> int:
    """Run a program and write the recipe of what it compiled.

    CMD runs unharmed to its end; its Python processes note what they give to the runtime's cache_compile, or to a
    full-graph torch.compile with npugraph_ex. plan, build and exec take the recipe as it is written; its comments say
    where each line came from. stdout, signals and exit code are CMD's own; 1 where it ended well and compiled nothing.
    With --json CMD's stdout goes to stderr.
    """
    from cachectl.boot.command import run_command
    from cachectl.services.record_program import open_recording, refuse_early

    refuse_early(output, arguments, name=name, force=force)
    as_json = session.out.mode == "json"
    with open_recording(arguments) as recording:
        environ = dict(os.environ) if _disabled() else recording.environment(os.environ)
        sys.stdout.flush()
        code = run_command(arguments, environ, stdout=2 if as_json else None)
        if _disabled():
            session.out.log("CACHECTL_DISABLE=1: CMD ran, and nothing was recorded")
            return code
        recorded = recording.write_recipe(output, name=name, force=force, code=code)
    warnings = [*recorded.warnings, *recorded.seen]
    path = os.path.relpath(recorded.recipe) if recorded.recipe is not None else None
    if as_json:
        whole = str(recorded.recipe) if recorded.recipe is not None else None
        session.out.document({"recipe": whole, "methods": list(recorded.methods), "warnings": warnings})
    elif path is None:
        session.out.stderr.write("cachectl: nothing was compiled that a recipe can say\n")
    for text in warnings:
        session.out.log(f"  {text}")
    if path is None:
        return code or 1
    session.out.log(f"{path}: {', '.join(recorded.methods)}; run: cachectl build {path}")
    return code


def _disabled() -> bool:
    return os.environ.get("CACHECTL_DISABLE") == "1"
