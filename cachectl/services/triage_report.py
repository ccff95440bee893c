"""Triage's report as a Markdown file to attach, and what may not stand in it.

Owns the page's order and the hiding: values of variables whose names are those of secrets, credentials in URLs, this
machine's name, and absolute paths. No printing.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cachectl import __version__
from cachectl.schemas.keying import is_secret_name, without_credentials
from cachectl.schemas.triage import TriageFinding, TriageReport, TriageStage
from cachectl.services.request import RecipeRequest

__all__ = ["Redaction", "markdown", "tail_of", "versions"]

_TAIL_BYTES: Final = 16 << 10
_TAIL_LINES: Final = 60
_SHORT_SECRET: Final = 4
# `API_TOKEN=…`, `"password": "…"`, as programs print their settings. A model's own names may hold `key` and `token`.
_SETTING: Final = re.compile(
    r"\b(?P<name>[A-Z][A-Z0-9_]*|\w*(?:api_?key|access_?key|secret|password|passwd|(?:hub|hf|auth|access)_token))"
    r"(?P<quote>[\"']?)(?P<sign>\s*[=:]\s*)(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;&})=]+)"
)


@dataclass(frozen=True)
class Redaction:
    """What is hidden in every text of a report.

    Attributes:
        values: secrets, the longest first.
        places: folders with the words that stand for them, the deepest first.
    """

    values: tuple[str, ...]
    places: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, request: RecipeRequest, workspace: Path) -> Redaction:
        """Return what is to be hidden in a report on this recipe, made on this machine."""
        environ = {**os.environ, **request.environ, **request.loaded.recipe.environment}
        values = {value for name, value in environ.items() if is_secret_name(name) and len(value) >= _SHORT_SECRET}
        places = {
            str(request.loaded.folder): ".",
            str(workspace): "<workspace>",
            sysconfig.get_paths()["purelib"]: "<site-packages>",
            sys.prefix: "<python>",
            sys.base_prefix: "<python>",
            os.path.dirname(os.path.dirname(__file__)): "<cachectl>",
        }
        # A container's user may have no name and no home.
        if environ.get("HOME"):
            places[environ["HOME"]] = "~"
        if environ.get("ASCEND_HOME_PATH"):
            places[environ["ASCEND_HOME_PATH"]] = "<CANN>"
        names = {
            real.rstrip("/"): word
            for place, word in places.items()
            for real in (place, os.path.realpath(place))
            if real.startswith("/") and real.strip("/")
        }
        return cls(
            tuple(sorted(values, key=len, reverse=True)),
            tuple(sorted(names.items(), key=lambda item: -len(item[0]))),
        )

    def text(self, text: str) -> str:
        """Return a text with what is hidden replaced."""
        for value in self.values:
            text = text.replace(value, "***")
        text = without_credentials(text)
        text = _SETTING.sub(_hidden, text)
        for place, word in self.places:
            text = re.sub(rf"{re.escape(place)}(?![\w.-])", word.replace("\\", r"\\"), text)
        host = socket.gethostname()
        return re.sub(rf"\b{re.escape(host)}\b", "<host>", text) if len(host) > _SHORT_SECRET else text

    def document(self, document: Any) -> Any:
        """Return a JSON document with every text in it hidden so; names of fields stay."""
        if isinstance(document, str):
            return self.text(document)
        if isinstance(document, list):
            return [self.document(item) for item in document]
        if isinstance(document, dict):
            return {name: self.document(value) for name, value in document.items()}
        return document


def _hidden(match: re.Match[str]) -> str:
    return f"{match['name']}{match['quote']}{match['sign']}***" if is_secret_name(match["name"]) else match[0]


def versions(request: RecipeRequest) -> dict[str, str]:
    """Return the versions that a report names, what is not known left out."""
    toolchain, device = request.request["toolchain"], request.request["device"]
    found = {
        "cachectl": __version__,
        "python": platform.python_version(),
        "torch": toolchain["torch"]["version"],
        "torch_npu": toolchain["torch_npu"]["version"],
        "CANN": toolchain["cann"]["CANN"],
        "SoC": device["soc"],
        "system": f"{platform.system()} {platform.machine()}",
    }
    simulated = " (simulated)" if device["simulated"] else ""
    return {
        name: f"{version}{simulated if name in ('CANN', 'SoC') else ''}" for name, version in found.items() if version
    }


def markdown(report: TriageReport, request: RecipeRequest, logs: Sequence[tuple[str, Path]], hide: Redaction) -> str:
    """Return the report as one page: result, versions, stages, advice, recipe, logs' ends.

    Args:
        report: with everything hidden already.
        logs: what each log is of, and where it lies.
    """
    lines = [f"# cachectl triage: {report.recipe}", ""]
    if report.stage is None:
        lines += ["Every stage is right.", ""]
    else:
        lines += [f"Stopped at **{report.stage}**.", ""]
    if report.evidence == "simulated":
        lines += ["Shown on the simulated CANN, on no NPU.", ""]
    lines += ["## Versions", "", "| what | version |", "|---|---|"]
    lines += [f"| {name} | {_cell(version)} |" for name, version in report.versions.items()]
    lines += ["", "## Stages", "", "| stage | verdict | seconds | what |", "|---|---|---|---|"]
    lines += [
        f"| {stage.stage} | {stage.verdict} | {stage.seconds:.1f} | {_cell(_summary(stage))} |"
        for stage in report.stages
    ]
    for stage in report.stages:
        if stage.findings or (stage.notes and stage.verdict != "skipped"):
            lines += ["", f"### {stage.stage}", ""]
            lines += [line for found in stage.findings for line in _finding_lines(found)]
            lines += [f"- note: {note}" for note in stage.notes]
    lines += ["", "## What to do next", ""]
    lines += [f"{number}. {step}" for number, step in enumerate(report.advice, 1)]
    lines += ["", "## Recipe", "", *_fenced(_recipe_text(request, hide), "yaml")]
    tails = [(name, tail_of(path)) for name, path in logs]
    lines += ["", "## Logs, their ends"]
    for name, tail in tails:
        if tail:
            lines += ["", f"### {name}", "", *_fenced(hide.text(tail), "text")]
    return "\n".join(lines) + "\n"


def tail_of(path: Path) -> str:
    """Return the last lines of a log, "" where there is none."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    lines = text.strip().splitlines()
    printable = [
        "".join(character if character.isprintable() or character == "\t" else "?" for character in line)
        for line in lines
    ]
    return "\n".join(printable[-_TAIL_LINES:])


def _summary(stage: TriageStage) -> str:
    if stage.findings:
        more = f" (and {len(stage.findings) - 1} more)" if len(stage.findings) > 1 else ""
        return f"{stage.findings[0].kind}: {stage.findings[0].what[:200]}{more}"
    return stage.notes[0] if stage.notes else ""


def _finding_lines(found: TriageFinding) -> list[str]:
    of = f"{found.method} [{found.case}], rank {found.rank}: " if found.method else ""
    lines = [f"- **{found.kind}** {of}{found.what}"]
    if found.where:
        lines.append(f"  - at `{found.where}`")
    if found.next:
        lines.append(f"  - next: {found.next}")
    return lines


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _fenced(text: str, language: str) -> list[str]:
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}{language}", *text.splitlines(), fence]


def _recipe_text(request: RecipeRequest, hide: Redaction) -> str:
    try:
        text = request.loaded.path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"# the recipe can't be read any more: {error.strerror}"
    return hide.text(_without_secrets(text, request.loaded.recipe.environment))


def _without_secrets(text: str, environment: Mapping[str, str]) -> str:
    for name, value in environment.items():
        if is_secret_name(name) and value:
            text = text.replace(value, "***")
    return text
