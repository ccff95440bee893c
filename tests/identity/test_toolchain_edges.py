"""A torch that lies there without its version files."""

from __future__ import annotations

from pathlib import Path

from cachectl.identity.toolchain import toolchain_part


def test_toolchain_part_of_packages_without_their_files_names_each(tmp_path: Path) -> None:
    """A folder that can be imported and says no version is as good as none: no format, and a reason for each."""
    for name in ("torch", "torch_npu"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")

    document, reasons = toolchain_part({}, simulated=True, search_path=[str(tmp_path)])

    assert {"version": None, "git": None} == document["torch"] == document["torch_npu"]
    assert {None} == set(document["formats"].values())
    assert [("torch", "absent"), ("torch_npu", "absent")] == [(reason.name, reason.kind) for reason in reasons]
