"""Cache directories as the runtime lays them, of artifacts that the real runtime saved."""

from __future__ import annotations

import os
from pathlib import Path

from cachectl.schemas.audit import AuditFinding, AuditReport, AuditSeen

DATA = Path(__file__).resolve().parents[1] / "runtimes" / "artifact" / "data"
STATIC = (DATA / "npugraph_ex_static.bin").read_bytes()
KIND = "Decoder_static_aclgraphcache"


def md5(number: int) -> str:
    """Return one of many md5s."""
    return f"{number:032x}"


def seen(**fields: object) -> AuditSeen:
    """Return who starts next: this user, with the toolchain of the stored artifacts unless `fields` say otherwise."""
    base = {
        "uid": os.getuid(),
        "python": "3.11",
        "torch_npu": "2.13.0",
        "npugraph_ex": "1.0.6",
        "torchair": "1.0.5",
        "cann": "8.5.0",
    }
    return AuditSeen.model_validate({**base, **fields})


def lay(
    cache: Path,
    data: bytes = STATIC,
    *,
    number: int = 1,
    rank: str = "",
    method: str = "main_decode",
    kind: str = KIND,
    mode: int = 0o600,
) -> Path:
    """Lay an artifact down as the runtime does; return its file."""
    path = cache / f"{kind}_{md5(number)}" / rank / method / "compiled_module"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)
    return path


def said(report: AuditReport) -> list[tuple[str, str]]:
    """Return kind and effect of every finding."""
    return [(found.kind, found.effect) for found in report.findings]


def the_one(report: AuditReport) -> AuditFinding:
    """Return the only finding."""
    (found,) = report.findings
    return found
