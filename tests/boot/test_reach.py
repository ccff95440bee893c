"""Which setting kept a program under exec from its hand-out."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachectl.boot.reach import isolation, unreached


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("python -I serve.py", "python -I"),
        ("/usr/bin/python3.11 -uE serve.py", "python -E"),
        ("python -W error -S -m serve", "python -S"),
        ("python -Werror -X dev -I -c pass", "python -I"),
        ("python --check-hash-based-pycs always -I serve.py", "python -I"),
        ("env -i PATH=/bin python serve.py", "env -i"),
        ("env - python serve.py", "env -i"),
        ("env -u PYTHONPATH python serve.py", "env -u PYTHONPATH"),
        ("env A=1 python -I serve.py", "python -I"),
        ("python serve.py -I", None),
        ("python -c -I", None),
        ("python -m serve -E", None),
        ("python -WI serve.py", None),
        ("python -u -- -I", None),
        ("env -u OTHER python serve.py", None),
        ("torchrun -I", None),
        ("sh -c python", None),
        ("env", None),
        ("python", None),
    ],
)
def test_isolation_is_read_off_the_command_line(command: str, said: str | None) -> None:
    """Python's own options before the program's, and env's; a script's own doing can't be seen."""
    assert said == isolation(command.split())


@pytest.mark.parametrize(
    ("stages", "isolated", "name"),
    [
        ((), None, "python"),
        ((), "python -I", "python -I"),
        (("python",), None, "torch"),
        (("python",), "env -i", "env -i"),
        (("python", "torch"), None, "cache_compile"),
        (("python", "torch", "runtime"), None, "cache_compile"),
    ],
)
def test_unreached_names_the_first_thing_that_is_missing(
    tmp_path: Path, stages: tuple[str, ...], isolated: str | None, name: str
) -> None:
    """How far a program came says which setting made the rest inert; each with what to do."""
    for stage in stages:
        (tmp_path / f"seen.{stage}").touch()

    reason = unreached(tmp_path, isolated)

    assert ("policy", name) == (reason.part, reason.name)
    assert reason.hint
