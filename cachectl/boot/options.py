"""The hook's options: what its command line may say, read so that nothing on it can end a boot.

Owns the options' names and defaults. What this version does not know is listed, not raised: an older hook in a newer
pod answers with a cold start. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from cachectl.values import dataclass, field

__all__ = ["DEFAULT_DEADLINE_S", "HookOptions", "parse_arguments"]

DEFAULT_DEADLINE_S = 30.0


@dataclass(frozen=True)
class HookOptions:
    """What the command line says; every field has the contract's default."""

    recipe: str | None = None
    store: str | None = None
    warm_dir: str | None = None
    output: str = "json"
    rank: int | None = None
    strict: bool = False
    read_only: bool = False
    deadline_s: float = DEFAULT_DEADLINE_S
    uid: int | None = None
    quiet: bool = False
    env_file: str | None = None
    # Options this version doesn't know: a newer manifest may name them, and the pod must still start.
    unknown: tuple[str, ...] = field(default=())


def parse_arguments(arguments: Sequence[str]) -> HookOptions:
    """Read the hook's command line without failing: what is not understood is listed in `unknown`."""
    values: dict[str, object] = {}
    unknown: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, _, inline = word.partition("=")
        target = _OPTIONS.get(name)
        if target is None:
            if word.startswith("-") or "recipe" in values:
                unknown.append(word)
            else:
                values["recipe"] = word
            continue
        attribute, kind = target
        if kind is bool:
            values[attribute] = True
            continue
        text = inline if "=" in word else (rest.pop(0) if rest else "")
        try:
            values[attribute] = kind(text)
        except ValueError:
            unknown.append(f"{name} {text}".strip())
            continue
        if not text or values[attribute] != values[attribute]:
            # --store "$UNSET" must not mean the default store; "nan" is a number to Python, and no deadline.
            unknown.append(f"{name} {text}".strip())
    if values.pop("json", False):
        values["output"] = "json"
    values.pop("verbose", None)
    if values.get("output", "json") not in ("json", "shell", "env"):
        unknown.append(f"--format {values.pop('output')}")
    return HookOptions(**values, unknown=tuple(unknown))  # type: ignore[arg-type]


_OPTIONS: dict[str, tuple[str, type]] = {
    "--store": ("store", str),
    "--warm-dir": ("warm_dir", str),
    "--env-file": ("env_file", str),
    "--format": ("output", str),
    "--rank": ("rank", int),
    "--strict": ("strict", bool),
    "--read-only": ("read_only", bool),
    "--deadline": ("deadline_s", float),
    "--uid": ("uid", int),
    "--json": ("json", bool),
    "-v": ("verbose", bool),
    "--verbose": ("verbose", bool),
    "--quiet": ("quiet", bool),
    "-q": ("quiet", bool),
}
