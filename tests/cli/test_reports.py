"""The reports of verify, ls, inspect and doctor for people."""

from __future__ import annotations

import io

from cachectl.cli import doctor, inspect, ls, verify
from cachectl.cli.output import Output
from cachectl.schemas.canonical import digest_bytes
from cachectl.schemas.report import (
    DoctorCheck,
    DoctorReport,
    Finding,
    InspectInput,
    InspectPython,
    InspectReport,
    LsEntry,
    LsReport,
    VerifyReport,
)

KEY = digest_bytes(b"key")


def test_verify_findings_are_a_table() -> None:
    """Each finding is a row with what, where and why."""
    stdout = io.StringIO()
    finding = Finding(kind="corrupt-blob", key=KEY, path="blobs/sha256/ab/abc", detail="digest differs")

    verify.render(Output(stdout=stdout), VerifyReport(checked=3, findings=[finding]))

    assert (
        "KIND          KEY           PATH                 DETAIL\n"
        f"corrupt-blob  {KEY[7:19]}  blobs/sha256/ab/abc  digest differs\n"
        "\n"
        "3 checked, 1 finding\n"
    ) == stdout.getvalue()


def test_verify_nothing_found_is_one_line() -> None:
    """A whole store is one line."""
    stdout = io.StringIO()

    verify.render(Output(stdout=stdout), VerifyReport(checked=3, findings=[]))

    assert "3 checked, no findings\n" == stdout.getvalue()


def test_ls_shows_entries_and_their_size() -> None:
    """Each entry is a row; the last line adds them up."""
    stdout = io.StringIO()
    entry = LsEntry(
        key=KEY,
        recipe="tiny",
        method="main_decode",
        case="b4",
        rank=0,
        state="ready",
        size_bytes=455_427,
        created_at="2026-01-02T03:04:05Z",
        last_used_at=None,
        pinned=False,
    )

    ls.render(Output(stdout=stdout), LsReport(entries=[entry]))

    header, row, _, total = stdout.getvalue().splitlines()
    assert "KEY" == header.split("  ")[0]
    assert KEY[7:19] == row.split("  ")[0]
    assert "2026-01-02T03:04:05Z" in row
    assert "1 entry, 444.8 KiB" == total


def test_inspect_says_what_the_artifact_is_for() -> None:
    """Format, Python, options, inputs and operators are told; foreign bytecode stands out."""
    stdout = io.StringIO()
    report = InspectReport(
        key=None,
        path="compiled_module",
        runtime="npugraph_ex",
        format_version="1.0.6",
        name="main_decode",
        created_at=None,
        python=InspectPython(implementation="CPython", minor="3.9", magic_ok=False),
        inputs=[
            InspectInput(
                name="arg0", kind="user", source="L['x']", shape=[4, "s0"], dtype="torch.float16", device="npu:0"
            )
        ],
        options={"frozen_parameter": True},
        graph_ops=["aten.mm"],
        size_bytes=1024,
        findings=["bytecode of CPython 3.9"],
    )

    inspect.render(Output(stdout=stdout), report)

    text = stdout.getvalue()
    assert "npugraph_ex 1.0.6" in text
    assert "CPython 3.9: other bytecode than this Python's" in text
    assert "option frozen_parameter  true" in text
    assert "(4, s0)" in text
    assert "1 operators: aten.mm" in text
    assert text.endswith("finding: bytecode of CPython 3.9\n")


def test_doctor_hints_only_for_what_is_not_ok() -> None:
    """What to do stands below the table, for what needs doing."""
    stdout = io.StringIO()
    checks = [
        DoctorCheck(name="python", state="ok", detail="CPython 3.11.7", hint="unused"),
        DoctorCheck(name="torch", state="fail", detail="not installed", hint="pip install torch"),
    ]

    doctor.render(Output(stdout=stdout), DoctorReport(checks=checks))

    assert (
        "CHECK   STATE  DETAIL\n"
        "python  ok     CPython 3.11.7\n"
        "torch   fail   not installed\n"
        "\n"
        "hint: pip install torch\n"
    ) == stdout.getvalue()
