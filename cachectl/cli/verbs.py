"""The table of verbs: name, where the command is, one line of help, and the group it is shown in.

`cachectl --help` prints from here, so that it imports no command. Names that this version does not have yet are
reserved: they are not shown, and calling one says so.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RESERVED", "VERBS", "Verb"]


@dataclass(frozen=True)
class Verb:
    """One command; `group` None marks the first, bold ones.

    `target` is `module:attribute` of its click command; None for what runs without click (cachectl.__main__).
    """

    name: str
    target: str | None
    help: str
    group: str | None = None


VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb("plan", "cachectl.cli.plan:command", "Say entry by entry what is ready, missing or stale, and why."),
        Verb("record", "cachectl.cli.record:command", "Run a program and write the recipe of what it compiled."),
        Verb("check", "cachectl.cli.check:command", "Say whether a model is ready for graph mode and a cache."),
        Verb("build", "cachectl.cli.build:command", "Build what plan says is missing."),
        Verb("verify", "cachectl.cli.verify:command", "Check digests, closure, and the database against the files."),
        Verb("hook", None, "Hand out a private warm copy of the recipe's compile cache."),
        Verb("exec", None, "Run an unchanged program, warm where it can be."),
        Verb("explain", "cachectl.cli.explain:command", "Say why a start is warm or why not, and what mends it."),
        Verb("init", "cachectl.cli.init:command", "Make a store.", "Store"),
        Verb("ls", "cachectl.cli.ls:command", "List entries.", "Store"),
        Verb("show", "cachectl.cli.show:command", "Print an entry's whole manifest.", "Store"),
        Verb("diff", "cachectl.cli.diff:command", "Say in what two entries differ.", "Store"),
        Verb("db", "cachectl.cli.db:command", "Migrate, check or rebuild the store's database.", "Store"),
        Verb(
            "inspect", "cachectl.cli.inspect:command", "Read an artifact without running it.", "Machine and artifacts"
        ),
        Verb(
            "audit",
            "cachectl.cli.audit:command",
            "Say what an unmanaged cache directory holds, and what is wrong.",
            "Machine and artifacts",
        ),
        Verb(
            "release",
            "cachectl.cli.release:command",
            "Let an entry start again on this node.",
            "Machine and artifacts",
        ),
        Verb(
            "triage",
            "cachectl.cli.triage:command",
            "Find the first stage at which a recipe goes wrong.",
            "Machine and artifacts",
        ),
        Verb(
            "simulate", "cachectl.cli.simulate:command", "Run a command on the simulated CANN.", "Machine and artifacts"
        ),
        Verb(
            "doctor", "cachectl.cli.doctor:command", "Check what this machine has and lacks.", "Machine and artifacts"
        ),
    )
}

RESERVED = frozenset(
    {
        "config",
        "export",
        "import",
        "invalidate",
        "keys",
        "pin",
        "prune",
        "pull",
        "push",
        "quarantine",
        "report",
        "selftest",
        "serve",
        "stats",
        "unpin",
    }
)
