"""Command lines read: which script or module a Python process runs, and what can't be run in another process."""

from __future__ import annotations

import pytest

from cachectl.errors import ConfigError
from cachectl.programs_command import ScriptCommand, is_launcher, is_python, read_command

SCRIPT = ScriptCommand("infer.py", False, ("--config", "a.yaml"))
MODULE = ScriptCommand("pkg.serve", True, ("-m", "x"))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("python infer.py --config a.yaml", SCRIPT),
        ("/usr/bin/python3.11 infer.py --config a.yaml", SCRIPT),
        ("python3.13t infer.py --config a.yaml", SCRIPT),
        ("infer.py --config a.yaml", SCRIPT),
        ("python -- infer.py --config a.yaml", SCRIPT),
        ("python -m pkg.serve -m x", MODULE),
        ("python -mpkg.serve -m x", MODULE),
        ("python -um pkg.serve -m x", ScriptCommand("pkg.serve", True, ("-m", "x"), ("-u",))),
        ("python -u -W ignore infer.py", ScriptCommand("infer.py", False, (), ("-u", "-W", "ignore"))),
        ("python -Xdev -Wignore infer.py", ScriptCommand("infer.py", False, (), ("-Xdev", "-Wignore"))),
        ("python -uX dev infer.py", ScriptCommand("infer.py", False, (), ("-uX", "dev"))),
        (
            "python --check-hash-based-pycs always infer.py",
            ScriptCommand("infer.py", False, (), ("--check-hash-based-pycs", "always")),
        ),
        ("python infer.py -c 1 -", ScriptCommand("infer.py", False, ("-c", "1", "-"))),
        ("torchrun --standalone --nproc-per-node 4 infer.py --config a.yaml", SCRIPT),
        ("/opt/bin/torchrun --nproc_per_node=4 --master_port 29501 infer.py --config a.yaml", SCRIPT),
        ("torchrun --nproc-per-node=2 -m pkg.serve -m x", MODULE),
        ("python -m torch.distributed.run --nnodes 1 infer.py --config a.yaml", SCRIPT),
        ("python -m torch.distributed.launch --use-env infer.py --config a.yaml", SCRIPT),
        ("python /opt/bin/torchrun --nproc-per-node 2 infer.py --config a.yaml", SCRIPT),
        ("torchrun --no-python python infer.py --config a.yaml", SCRIPT),
    ],
)
def test_read_command_forms_are_understood(line: str, found: ScriptCommand) -> None:
    """Interpreter, its options and torch's launcher stand before the script, in every way Python takes them."""
    assert found == read_command(line.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "empty"),
        (["python"], "stdin"),
        (["python", "-"], "stdin"),
        (["python", "-u"], "stdin"),
        (["python", "-c", "print(1)"], "behind -c"),
        (["python", "-m"], "-m without a module"),
        (["bash", "infer.sh"], "'bash' is no Python"),
        (["torchrun", "--nproc-per-node", "2"], "starts nothing"),
    ],
)
def test_read_command_without_a_file_is_refused(words: list[str], said: str) -> None:
    """What has no script or module can't be run in a rank process, and that is said."""
    with pytest.raises(ConfigError, match=said):
        read_command(words)


def test_words_leave_out_the_interpreters_path() -> None:
    """What a recipe says of a command is the same on every machine, and reads back as itself."""
    read = read_command(["/opt/venv/bin/python3", "-u", "-m", "pkg.serve", "a b"])

    assert ["python", "-u", "-m", "pkg.serve", "a b"] == read.words()
    assert read == read_command(read.words())


def test_is_python_is_said_of_interpreters_only() -> None:
    """A tool whose name begins with python is none."""
    assert [True, True, False, False] == [is_python(word) for word in ("python", "/x/python3.12", "pythonize", "bash")]
    assert is_launcher(ScriptCommand("torch.distributed.run", True, ()))
