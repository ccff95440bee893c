"""What is shipped: the wheel, the sdist, and the part that works from the standard library alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import cachectl

ROOT = Path(__file__).resolve().parents[1]
# Looked up before the tests get a home of their own.
PYENV = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"

STANDARD_LIBRARY_ONLY = re.compile(
    r"cachectl/(__init__|__main__|errors|config|cli/(__init__|hook)|(boot|identity)/.+"
    r"|store/(__init__|layout|blobs|records|reading)|schemas/(__init__|canonical|envelope|boot|keying)"
    r"|runtimes/__init__|runtimes/simulated/[a-z_]+)\.py"
)

IMPORT_ALL = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
foreign = [m for m in ("torch", "pydantic", "sqlalchemy", "click", "yaml") if m in sys.modules]
assert not foreign, foreign
"""


def build(kind: str, folder: Path, source: Path = ROOT) -> Path:
    """Build the wheel or sdist of `source` with the build backend that is installed."""
    pytest.importorskip("hatchling", reason="needs the build backend: make venv")
    pytest.importorskip("build", reason="needs the build front end: make venv")
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(folder), str(source)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert 0 == result.returncode, result.stdout + result.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built once."""
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of this checkout, built once."""
    return build("sdist", tmp_path_factory.mktemp("sdist"))


def names(wheel: Path) -> list[str]:
    """Return the names in a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if ".dist-info/" not in name]


def sources() -> list[str]:
    """Return every file below cachectl/, through the symlinks."""
    found = []
    for folder, folders, files in os.walk(ROOT / "cachectl", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [os.path.relpath(os.path.join(folder, name), ROOT) for name in files if not name.endswith(".pyc")]
    return sorted(found)


def test_wheel_holds_each_source_once_below_cachectl(wheel: Path) -> None:
    """store, schemas and migrations lie under cachectl/, and nothing lies beside it or twice."""
    assert sources() == sorted(names(wheel))


@pytest.mark.parametrize(
    "name",
    [
        "cachectl/py.typed",
        "cachectl/store/layout.py",
        "cachectl/schemas/canonical.py",
        "cachectl/migrations/env.py",
        "cachectl/migrations/script.py.mako",
        "cachectl/runtimes/simulated/native/runtime.c",
        "cachectl/runtimes/simulated/native/sim.h",
        "cachectl/boot/startup/sitecustomize.py",
        "cachectl/runtimes/simulated/startup/sitecustomize.py",
    ],
)
def test_wheel_holds_what_is_read_at_run_time(wheel: Path, name: str) -> None:
    """Files that are no imported modules are shipped, too."""
    assert name in names(wheel)


def test_wheel_metadata_has_version_license_and_command(wheel: Path) -> None:
    """The wheel says its version, its licence and its command."""
    with zipfile.ZipFile(wheel) as archive:
        info = f"cachectl-{cachectl.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()

        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert f"\nVersion: {cachectl.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "cachectl = cachectl.__main__:main" in entry_points


def test_sdist_holds_each_file_once_and_gives_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    """The sdist has real files below cachectl/ and no second copy; the wheel made of it has the same files."""
    with tarfile.open(sdist) as archive:
        members = [member.name.partition("/")[2] for member in archive.getmembers()]
    for name in ("source", "wheel"):
        (tmp_path / name).mkdir()
    subprocess.run(["tar", "-xf", str(sdist), "-C", str(tmp_path / "source")], timeout=240, check=True)
    (source,) = (tmp_path / "source").iterdir()

    again = build("wheel", tmp_path / "wheel", source)

    assert not [name for name in members if name.startswith(("store/", "schemas/", "migrations/"))]
    assert "cachectl/store/layout.py" in members
    assert sorted(names(wheel)) == sorted(names(again))


def interpreter(minor: str) -> str | None:
    """Return a CPython of this minor version that starts, from PATH or from pyenv's versions."""
    candidates = [shutil.which(f"python{minor}"), *map(str, sorted(PYENV.glob(f"{minor}.*/bin/python")))]
    for candidate in candidates:
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


@pytest.mark.parametrize("minor", ["3.10", "3.11", "3.12", "3.13"])
def test_boot_path_imports_from_the_standard_library_alone(wheel: Path, tmp_path: Path, minor: str) -> None:
    """The boot path needs nothing but Python: it imports with site-packages switched off."""
    python = interpreter(minor)
    if python is None:
        pytest.skip(f"no CPython {minor} here")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    files = [name for name in names(wheel) if STANDARD_LIBRARY_ONLY.fullmatch(name)]
    modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files]

    command = [python, "-I", "-S", "-W", "error", "-c", IMPORT_ALL, str(tmp_path), *modules]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    assert "" == result.stderr
    assert 0 == result.returncode


@pytest.mark.skipif(not os.environ.get("CACHECTL_TEST_INSTALLED"), reason="set by make test, which installs the wheel")
def test_tests_run_on_the_installed_wheel() -> None:
    """What is tested is what is shipped, not the checkout; and the checkout's folders are no top-level modules."""
    assert "site-packages" in Path(cachectl.__file__).parts
    command = [sys.executable, "-c", "import cachectl, store"]
    result = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=240, check=False)
    assert "No module named 'store'" in result.stderr
