"""A throw-away PostgreSQL cluster for the tests: one for the whole run, a database of its own for each test.

The server listens on a Unix socket in a temporary folder only, and does not wait for the disk (fsync is off). As root,
which initdb refuses, it runs as the user postgres or nobody. Where its programs are missing the tests that want it fail
and say so; CACHECTL_TEST_NO_POSTGRES=1 skips them instead.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read before a session fixture clears the environment of our settings.
_LEFT_OUT = os.environ.get("CACHECTL_TEST_NO_POSTGRES") == "1"
_BASE_URL = pytest.StashKey[str]()
_NUMBERS = itertools.count(1)
# A tenth of it on an idle machine.
_START_TIMEOUT_S = 120


def _program(name: str) -> str:
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: float(path.parts[-3]))
    found = shutil.which(name) or (str(installed[-1]) if installed else None)
    if found is None:
        pytest.fail(
            f"PostgreSQL's {name} is neither on PATH nor below /usr/lib/postgresql; install postgresql, or leave these"
            " tests out with CACHECTL_TEST_NO_POSTGRES=1"
        )
    return found


def _server_user() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    pytest.fail("initdb refuses root, and there is neither a user postgres nor a user nobody to run it as")


def _run(command: list[str], folder: Path, user: pwd.struct_passwd | None) -> None:
    with (folder / "setup.log").open("ab") as log:
        ended = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=_START_TIMEOUT_S,
            check=False,
            user=None if user is None else user.pw_uid,
            group=None if user is None else user.pw_gid,
            extra_groups=None if user is None else [],
        )
    if ended.returncode != 0:
        pytest.fail(f"{command[0]} exited with {ended.returncode}: {(folder / 'setup.log').read_text()}")


def _start(config: pytest.Config) -> str:
    user = _server_user()
    # Not below tmp_path: the server's user could not enter it, and a socket's path has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="cachectl-pg-"))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
    data = str(folder / "data")
    _run(
        [_program("initdb"), "-D", data, "-U", "cachectl", "--auth=trust", "--encoding=UTF8", "--locale=C", "-N"],
        folder,
        user,
    )
    settings = f"-k {folder} -c listen_addresses= -c fsync=off -c synchronous_commit=off -c full_page_writes=off"
    # It connects to databases by itself, which CREATE and DROP DATABASE would have to wait for.
    settings += " -c autovacuum=off"
    control = [_program("pg_ctl"), "-D", data, "-w", "-t", str(_START_TIMEOUT_S)]
    _run([*control, "-l", str(folder / "server.log"), "-o", settings, "start"], folder, user)
    config.add_cleanup(lambda: _run([*control, "-m", "immediate", "stop"], folder, user))
    return f"host={folder} user=cachectl"


def _administrate(base: str, statement: str) -> None:
    # The driver is an extra: without it the other tests of the folder must still be collected.
    try:
        import psycopg
    except ImportError:
        pytest.fail("psycopg is not installed; run `pip install 'psycopg[binary]'`, or set CACHECTL_TEST_NO_POSTGRES=1")
    with psycopg.connect(f"{base} dbname=postgres", autocommit=True) as connection:
        connection.execute(statement.encode())


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty PostgreSQL database."""
    if _LEFT_OUT:
        pytest.skip("CACHECTL_TEST_NO_POSTGRES=1")
    stash = request.config.stash
    if _BASE_URL not in stash:
        stash[_BASE_URL] = _start(request.config)
    base = stash[_BASE_URL]
    name = f"test_{next(_NUMBERS)}"
    _administrate(base, f"CREATE DATABASE {name}")
    yield f"postgresql://cachectl@/{name}?host={base.split()[0].removeprefix('host=')}"
    _administrate(base, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind: what `ManifestRepo.open` takes."""
    if request.param == "sqlite":
        return str(tmp_path / "manifest.db")
    return str(request.getfixturevalue("postgres_url"))
