"""The device part: one spelling of each SoC, and a simulated one never equal to a real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachectl.identity.device import canonical_soc, device_part, in_simulation, one_soc, simulated_soc


@pytest.mark.parametrize(
    ("spellings", "wanted"),
    [
        (("Ascend910B1", "ascend910b1", "910B1", " Ascend 910B1\n", "ASCEND910B1"), "ascend910b1"),
        (("Ascend910_9391", "ascend910-9391", "910_9391"), "ascend910_9391"),
        (("Ascend310P3", "310P3"), "ascend310p3"),
        (("Ascend950", "950", "ascend950", "ASCEND 950"), "ascend950"),
        (("Ascend910_93", "910-93"), "ascend910_93"),
        (("", " "), ""),
    ],
)
def test_canonical_soc_every_spelling_is_one(spellings: tuple[str, ...], wanted: str) -> None:
    """What torch_npu, SOC_VERSION, npu-smi and node labels say of one SoC is equal (field report V10)."""
    assert {wanted} == {canonical_soc(text) for text in spellings}
    assert wanted == canonical_soc(canonical_soc(spellings[0]))


def test_canonical_soc_different_devices_differ() -> None:
    """No two SoCs fall together."""
    names = ["Ascend910A", "Ascend910B1", "Ascend910B2", "Ascend910_9391", "Ascend910_9392", "Ascend310P3"]

    assert len(names) == len({canonical_soc(name) for name in names})


@pytest.mark.parametrize(
    ("device", "environ", "wanted"),
    [
        ("simulated", {}, {"simulated": True, "soc": "ascend910b1"}),
        ("simulated", {"CACHECTL_SIM_SOC": "910_9391"}, {"simulated": True, "soc": "ascend910_9391"}),
        ("simulated", {"SOC_VERSION": "ascend310p3"}, {"simulated": True, "soc": "ascend910b1"}),
        ("npu", {"CACHECTL_SIMULATED": "1"}, {"simulated": True, "soc": "ascend910b1"}),
        ("npu", {"SOC_VERSION": "Ascend910B1"}, {"simulated": False, "soc": "ascend910b1"}),
    ],
)
def test_device_part_tells_simulated_from_real(device: str, environ: dict[str, str], wanted: dict[str, object]) -> None:
    """The simulated CANN reports real names, so that it is one stands beside the name."""
    assert (wanted, []) == device_part(device, environ)


@pytest.mark.parametrize("soc_version", [None, "", "  ", "Ascend910", "ascend910b", "module-910b-8", "950"])
def test_device_part_unnamed_is_a_reason(soc_version: str | None) -> None:
    """A SoC that nothing names is absent, as one of which only the family is named: no name equals another's."""
    environ = {} if soc_version is None else {"SOC_VERSION": soc_version}
    part, (reason,) = device_part("npu", environ)

    assert {"simulated": False, "soc": None} == part
    assert ("device", "soc", "absent") == (reason.part, reason.name, reason.kind)
    assert "SOC_VERSION" in reason.hint


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("910B3", "ascend910b3"),
        ("huawei-Ascend910B3", "ascend910b3"),
        ("Ascend910B4-1", "ascend910b4_1"),
        ("910B2C", "ascend910b2c"),
        ("910PremiumA", "ascend910premiuma"),
        ("910ProB", "ascend910prob"),
        ("Ascend910_9391", "ascend910_9391"),
        ("Ascend950PR_9589", "ascend950pr_9589"),
        ("310P3", "ascend310p3"),
        ("310", "ascend310"),
        ("huawei-Ascend910", None),
        ("huawei-Ascend310P", None),
        ("huawei-npu", None),
        ("Ascend910C", None),
        ("910B", None),
        ("module-a3-16-super-pod", None),
        ("card-300i-duo", None),
        ("nvidia-a100", None),
        ("B3", None),
        ("", None),
    ],
)
def test_one_soc_family_or_server_is_none(name: str, wanted: str | None) -> None:
    """Labels name a SoC, a family or a server; only the first can be compared."""
    assert wanted == one_soc(name)


@pytest.mark.parametrize(
    ("lines", "environ", "wanted"),
    [
        (['node.kubernetes.io/npu.chip.name="910B3"'], {}, "ascend910b3"),
        (['huawei.com/npu.chip.name="Ascend910_9391"'], {}, "ascend910_9391"),
        (['huawei.com/npu.chip.name="910B3"', 'node.kubernetes.io/npu.chip.name="Ascend910B3"'], {}, "ascend910b3"),
        (['huawei.com/npu.chip.name="910B3"', 'node.kubernetes.io/npu.chip.name="910B2"'], {}, None),
        (['accelerator="huawei-Ascend910"', 'node.kubernetes.io/npu.chip.name="910B3"'], {}, "ascend910b3"),
        (['accelerator="huawei-Ascend910"', 'accelerator-type="module-910b-8"'], {}, None),
        (['accelerator="ascend910b3"'], {}, "ascend910b3"),
        (['accelerator="huawei-Ascend910"'], {"SOC_VERSION": "910B1"}, "ascend910b1"),
        # An image carries the variable from where it was built; the label is the node's.
        (['node.kubernetes.io/npu.chip.name="910B3"'], {"SOC_VERSION": "ascend910b1"}, "ascend910b3"),
        (["node.kubernetes.io/npu.chip.name=910B3", 'npu.chip.name="910B3"', "=", "x", '"'], {}, None),
        (['a="\\x41"', 'b="1"extra', 'node.kubernetes.io/npu.chip.name="910B3"', 'c="\xff"'], {}, "ascend910b3"),
        ([], {}, None),
    ],
)
def test_device_part_node_labels(tmp_path: Path, lines: list[str], environ: dict[str, str], wanted: str | None) -> None:
    """In an init container the downward API's file names the SoC; what names none, or two, is left open."""
    labels = tmp_path / "labels"
    labels.write_text("\n".join(lines), encoding="latin-1")

    part, reasons = device_part("npu", {"CACHECTL_NODE_LABELS": str(labels), **environ})

    assert {"simulated": False, "soc": wanted} == part
    assert (0 if wanted else 1) == len(reasons)


def test_device_part_labels_file_that_is_none(tmp_path: Path) -> None:
    """A missing file, a folder and a simulated device leave the labels out of it."""
    (tmp_path / "labels").write_text('node.kubernetes.io/npu.chip.name="910B3"')
    named = {"CACHECTL_NODE_LABELS": str(tmp_path / "labels")}

    assert None is device_part("npu", {"CACHECTL_NODE_LABELS": str(tmp_path / "none")})[0]["soc"]
    assert None is device_part("npu", {"CACHECTL_NODE_LABELS": str(tmp_path)})[0]["soc"]
    assert "ascend910b1" == device_part("simulated", named)[0]["soc"]


def test_in_simulation_is_only_the_flag() -> None:
    """Settings of the simulation don't make one."""
    assert in_simulation({"CACHECTL_SIMULATED": "1"})
    assert not in_simulation({"CACHECTL_SIM_SOC": "Ascend910B1", "CACHECTL_SIMULATED": "0"})
    assert {"ascend910b1"} == {simulated_soc({"CACHECTL_SIM_SOC": text}) for text in ("", "  ", "910B1")}
