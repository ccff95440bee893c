"""The toolchain part: every version from the file that tells it, and none that can't be read is equal to another."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cachectl.identity.request import differences
from cachectl.identity.toolchain import (
    CANN_PACKAGES,
    process_toolchain,
    read_cann,
    read_driver,
    simulated_cann,
    toolchain_part,
)
from tests.stores import write_site


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with torch's and torch_npu's version files."""
    write_site(tmp_path / "site")
    return tmp_path / "site"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A CANN toolkit's version files."""
    for name, package in CANN_PACKAGES.items():
        folder = tmp_path / "cann" / "share" / "info" / package
        folder.mkdir(parents=True)
        (folder / "version.info").write_text(f"package_name={name}\nVersion=8.5.0\ntimestamp=1\n")
    return tmp_path / "cann"


def part(site: Path, environ: dict[str, str] | None = None, *, simulated: bool = True) -> dict[str, object]:
    """Return the toolchain document; nothing may be missing."""
    document, reasons = toolchain_part(environ or {}, simulated=simulated, search_path=[str(site)])
    assert [] == reasons
    return document


def test_toolchain_part_names_every_version(site: Path) -> None:
    """The whole document, field by field."""
    assert {
        "python": {
            "implementation": sys.implementation.name,
            "minor": f"{sys.version_info[0]}.{sys.version_info[1]}",
            "magic": importlib.util.MAGIC_NUMBER.hex(),
        },
        "torch": {"version": "2.13.0+cpu", "git": "c" * 40},
        "torch_npu": {"version": "2.13.0", "git": "d" * 40},
        "formats": {"npugraph_ex": "1.0.6", "torchair": "1.0.5"},
        "cann": dict.fromkeys(CANN_PACKAGES, "8.5.0"),
        "driver": None,
        "arch": platform.machine(),
    } == part(site)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("torch", "torch.version"),
        ("torch_git", "torch.git"),
        ("torch_npu", "torch_npu.version"),
        ("torch_npu_git", "torch_npu.git"),
        ("npugraph_ex", "formats.npugraph_ex"),
        ("torchair", "formats.torchair"),
    ],
)
def test_toolchain_part_each_version_counts(site: Path, change: str, name: str) -> None:
    """Local suffixes and post releases are other versions (field report V6)."""
    before = part(site)
    write_site(site, **{change: "2.13.0.post2+git1234"})

    assert [name] == [found for found, _, _ in differences(before, part(site))]


def test_toolchain_part_metadata_alone_changes_nothing(site: Path) -> None:
    """Files that are imported tell the version, not the package's metadata, which can lie (field report V5)."""
    before = part(site)
    (site / "torch-9.9.dist-info").mkdir()
    (site / "torch-9.9.dist-info" / "METADATA").write_text("Name: torch\nVersion: 9.9\n")

    assert before == part(site)


def test_toolchain_part_module_alone_changes_it(site: Path) -> None:
    """The other way round: an in-place downgrade shows (field report V5)."""
    (site / "torch-2.13.0.dist-info").mkdir()
    (site / "torch-2.13.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.13.0\n")
    write_site(site, torch="2.12.0")

    assert {"version": "2.12.0", "git": "c" * 40} == part(site)["torch"]


@pytest.mark.parametrize("text", ["", "__version__ = ''\n", "__version__ = get_version()\n"], ids=repr)
@pytest.mark.parametrize("package", ["torch", "torch_npu"])
def test_toolchain_part_unreadable_version_is_a_reason(site: Path, package: str, text: str) -> None:
    """No version, an empty one or a computed one is absent, and equal to nothing."""
    (site / package / "version.py").write_text(text)

    document, (reason,) = toolchain_part({}, simulated=True, search_path=[str(site)])

    assert {"version": None, "git": None} == document[package]
    assert ("toolchain", package, "absent") == (reason.part, reason.name, reason.kind)
    assert sys.executable in reason.hint


def test_toolchain_part_annotated_assignment_is_read(site: Path) -> None:
    """torch writes some of its version file with annotations."""
    (site / "torch" / "version.py").write_text(
        "from typing import Optional\n__all__ = ['__version__', 'git_version']\n"
        "__version__: str = '2.13.0'\ncuda: Optional[str] = None\ngit_version: Optional[str] = 'abc'\n"
    )

    assert {"version": "2.13.0", "git": "abc"} == part(site)["torch"]


def test_toolchain_part_does_not_import_torch(site: Path) -> None:
    """The fake modules raise when they are imported."""
    part(site)

    assert str(site) not in str(getattr(sys.modules.get("torch"), "__file__", ""))


def test_toolchain_part_first_on_the_path_counts(site: Path, tmp_path: Path) -> None:
    """Of two installed torches the one that would be imported is read; a mere folder of the name is none."""
    write_site(tmp_path / "other", torch="9.9")
    (tmp_path / "namespace" / "torch").mkdir(parents=True)
    path = [str(tmp_path / "namespace"), str(site), str(tmp_path / "other")]

    document, reasons = toolchain_part({}, simulated=True, search_path=path)

    assert ([], "2.13.0+cpu") == (reasons, document["torch"]["version"])


def test_toolchain_part_is_equal_in_fresh_interpreters(site: Path) -> None:
    """Two processes with other hash seeds give the same bytes (field report S6)."""
    script = (
        "import sys; from cachectl.identity.toolchain import toolchain_part\n"
        "from cachectl.schemas.canonical import digest_of\n"
        "print(digest_of(toolchain_part({}, simulated=True, search_path=[sys.argv[1]])[0]))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script, str(site)],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(3)
    }

    assert 1 == len(digests)


def test_cann_packages_are_read_one_by_one(site: Path, home: Path) -> None:
    """Each package's version counts (field report V9)."""
    environ = {"ASCEND_HOME_PATH": str(home)}
    before = part(site, environ, simulated=False)
    for name, package in CANN_PACKAGES.items():
        file = home / "share" / "info" / package / "version.info"
        text = file.read_text()
        file.write_text(text.replace("8.5.0", "8.5.1"))
        assert [f"cann.{name}"] == [
            found for found, _, _ in differences(before, part(site, environ, simulated=False)) if found != "driver"
        ]
        file.write_text(text)


@pytest.mark.parametrize("text", ["", "Version=\n", "version=8.5.0\n", None], ids=repr)
def test_cann_empty_version_is_a_reason(site: Path, home: Path, text: str | None) -> None:
    """torch_npu says "" where it can't read, and "" equals ""; here it is absent."""
    file = home / "share" / "info" / "runtime" / "version.info"
    file.unlink()
    if text is not None:
        file.write_text(text)

    document, (reason,) = toolchain_part({"ASCEND_HOME_PATH": str(home)}, simulated=False, search_path=[str(site)])

    assert document["cann"]["CANN"] is None
    assert ("cann.CANN", "absent") == (reason.name, reason.kind)
    assert str(file) in reason.hint


@pytest.mark.parametrize("text", ["", "Version=\n", "Version=  \n", "version=8.5.0\n"], ids=repr)
@pytest.mark.parametrize("name", CANN_PACKAGES)
def test_cann_package_without_a_version_is_a_reason(site: Path, home: Path, name: str, text: str) -> None:
    """A package that is there has a version; without one it is equal to nothing."""
    file = home / "share" / "info" / CANN_PACKAGES[name] / "version.info"
    file.write_text(text)

    document, (reason,) = toolchain_part({"ASCEND_HOME_PATH": str(home)}, simulated=False, search_path=[str(site)])

    assert document["cann"][name] is None
    assert ("toolchain", f"cann.{name}", "absent") == (reason.part, reason.name, reason.kind)
    assert str(file) in reason.hint


@pytest.mark.parametrize("name", [name for name in CANN_PACKAGES if name != "CANN"])
def test_cann_package_that_is_not_installed_is_none(site: Path, home: Path, name: str) -> None:
    """A toolkit need not have every package; that it has none of the name is recorded, and differs from any version."""
    environ = {"ASCEND_HOME_PATH": str(home)}
    before = part(site, environ, simulated=False)
    (home / "share" / "info" / CANN_PACKAGES[name] / "version.info").unlink()

    after = part(site, environ, simulated=False)

    assert [(f"cann.{name}", "8.5.0", None)] == list(differences(before, after))


@pytest.mark.parametrize("environ", [{}, {"ASCEND_HOME_PATH": ""}])
def test_cann_without_home_is_a_reason(site: Path, environ: dict[str, str]) -> None:
    """Without a toolkit's home the hint says what to source."""
    document, (reason,) = toolchain_part(environ, simulated=False, search_path=[str(site)])

    assert dict.fromkeys(CANN_PACKAGES) == document["cann"]
    assert "set_env.sh" in reason.hint


def test_cann_simulated_outside_and_inside_agree(site: Path, home: Path) -> None:
    """What the simulation will say is known without it; inside, its files are read."""
    outside = part(site)
    inside = part(site, {"CACHECTL_SIMULATED": "1", "ASCEND_HOME_PATH": str(home)})
    other = part(site, {"CACHECTL_SIM_CANN": "8.2.RC1"})

    assert outside == inside
    assert dict.fromkeys(CANN_PACKAGES, "8.2.RC1") == other["cann"] == simulated_cann({"CACHECTL_SIM_CANN": "8.2.RC1"})


def test_read_cann_of_nothing_is_none_each(tmp_path: Path) -> None:
    """A home that isn't there has no versions, and raises nothing."""
    assert dict.fromkeys(CANN_PACKAGES) == read_cann(tmp_path / "nowhere")


def test_read_driver_follows_the_install_note(tmp_path: Path) -> None:
    """The note names the folder, the folder has the version; without any of them there is none."""
    note = tmp_path / "ascend_install.info"
    folder = tmp_path / "driver"
    folder.mkdir()
    default = tmp_path / "default"
    steps = [read_driver(note, default)]
    note.write_text(f"UserName=x\nDriver_Install_Path_Param={tmp_path}\n")
    steps.append(read_driver(note, default))
    (folder / "version.info").write_text("Version=24.1.rc3\nascendhal_version=7.35\n")
    steps.append(read_driver(note, default))

    assert [None, None, "24.1.rc3"] == steps


def test_read_driver_without_a_note_looks_at_the_default_folder(tmp_path: Path) -> None:
    """A container with only the driver's folder mounted has a driver; a note that names another comes first."""
    (tmp_path / "default" / "driver").mkdir(parents=True)
    (tmp_path / "default" / "driver" / "version.info").write_text("Version=25.5.0\n")
    note = tmp_path / "ascend_install.info"

    assert "25.5.0" == read_driver(note, tmp_path / "default")
    note.write_text(f"Driver_Install_Path_Param={tmp_path}\n")
    assert None is read_driver(note, tmp_path / "default")


def test_toolchain_part_driver_of_the_node_label(site: Path, home: Path, tmp_path: Path) -> None:
    """Where no driver is installed the node's label names it; the simulated CANN has none whatever a label says."""
    labels = tmp_path / "labels"
    labels.write_text('huawei.com/driver.version="25.5.0"\n')
    environ = {"ASCEND_HOME_PATH": str(home), "CACHECTL_NODE_LABELS": str(labels)}

    assert (read_driver() or "25.5.0") == part(site, environ, simulated=False)["driver"]
    assert None is part(site, environ)["driver"]


def test_process_toolchain_says_what_runs(site: Path) -> None:
    """The imported modules have the last word, each field by itself (field reports V5, W19)."""
    document = part(site)

    def seen(**changes: str) -> list[str]:
        said = {"torch": "2.13.0+cpu", "torch_git": "c" * 40, "npu": "2.13.0", "npu_git": "d" * 40, **changes}
        torch = SimpleNamespace(__version__=said["torch"], version=SimpleNamespace(git_version=said["torch_git"]))
        torch_npu = SimpleNamespace(__version__=said["npu"], version=SimpleNamespace(git_version=said["npu_git"]))
        return [reason.name for reason in process_toolchain(document, torch, torch_npu)]

    assert [] == seen()
    assert ["torch.version"] == seen(torch="2.13.1")
    assert ["torch.git"] == seen(torch_git="x")
    assert ["torch_npu.version"] == seen(npu="2.13.0.post2")
    assert ["torch_npu.git"] == seen(npu_git="x")


@pytest.mark.parametrize("version", ["2.13.0+gitabc", "2.13.0.post2+gitabc", "2.13.0"])
def test_process_toolchain_local_suffix_is_the_version(site: Path, version: str) -> None:
    """A build of one's own is equal to itself only, with its suffix (field report V6)."""
    write_site(site, torch_npu=version)
    document = part(site)

    def names(seen: str) -> list[str]:
        torch = SimpleNamespace(__version__="2.13.0+cpu", version=SimpleNamespace(git_version="c" * 40))
        torch_npu = SimpleNamespace(__version__=seen, version=SimpleNamespace(git_version="d" * 40))
        return [reason.name for reason in process_toolchain(document, torch, torch_npu)]

    assert [] == names(version)
    assert ["torch_npu.version"] == names("2.13.0.post9")
    assert ["torch_npu.version"] == names("")


def test_process_toolchain_build_without_revision_is_equal(site: Path) -> None:
    """A build from an archive has no revision in file and module; its version alone stands for it."""
    (site / "torch" / "version.py").write_text("__version__ = '2.13.0'\ngit_version = None\n")
    document = part(site)
    torch = SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(git_version=None))
    torch_npu = SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(git_version="d" * 40))

    assert [] == process_toolchain(document, torch, torch_npu)


def test_process_toolchain_of_an_incomplete_document_differs(site: Path) -> None:
    """A document without a version fits no process."""
    torch = SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(git_version="c"))

    names = {reason.name for reason in process_toolchain({}, torch, torch)}

    assert {"python.minor", "python.magic", "torch.version", "torch_npu.git"} <= names


@pytest.mark.real
def test_toolchain_part_of_the_installed_wheels_equals_the_imported_modules() -> None:
    """Files and process agree on the real torch and torch_npu; torch_npu's version file is read without CANN."""
    import torch

    document, reasons = toolchain_part({}, simulated=True)
    folder = importlib.util.find_spec("torch_npu")
    assert folder is not None
    assert folder.origin is not None
    said: dict[str, str] = {}
    exec((Path(folder.origin).parent / "version.py").read_text(), said)
    torch_npu = SimpleNamespace(
        __version__=said["__version__"], version=SimpleNamespace(git_version=said["git_version"])
    )

    assert ([], []) == (reasons, process_toolchain(document, torch, torch_npu))
    assert document["formats"]["npugraph_ex"]
    assert document["formats"]["torchair"]
