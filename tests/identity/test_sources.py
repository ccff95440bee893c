"""The key part `sources`: which edits leave an entry warm, which do not, and that no state of a file is an error."""

from __future__ import annotations

import importlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cachectl.build.sources import SourceRecorder
from cachectl.identity.sources import check_files, check_modules
from cachectl.schemas.boot import Reason
from cachectl.schemas.canonical import canonical_bytes

MODEL = '''"""A model."""

from __future__ import annotations

import functools
import logging
import math

import sampled.options as options
from sampled import layers
from sampled.config import EPS

logger = logging.getLogger(__name__)
SCALE = 2
LIMIT = SCALE * 8
TABLE = {"a": 1}
TABLE["b"] = 2
LEVEL = 1
WIDE = max(3, SCALE)
UNREAD = 5

if math.pi > 3:
    def pick(x):
        return x
else:
    def pick(x):
        return -x

act = lambda x: x * SCALE


def doubled(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return wrapper


def make(factor):
    def inner(x):
        return x * factor

    return inner


triple = make(3)


def set_level(level):
    global LEVEL
    LEVEL = level + 0


def built():
    return [entry * 2 for entry in (1, 2)]


BUILT = built()


def helper(x, shift=1):
    """Add."""
    # a comment
    return x + shift + TABLE["a"] + EPS + options.DEPTH + LEVEL + BUILT[0]


def report(x):
    logger.info("value %s", x)


class Meta(type):
    def __call__(cls, *args):
        return super().__call__(*args)


class Base(metaclass=Meta):
    gain = 1

    def mix(self, x):
        return x * self.gain

    def unmixed(self, x):
        return x


class Decoder(Base):
    """Decodes."""

    width: int = 4

    def __init__(self):
        self.state = 0

    @property
    def size(self):
        return self.width

    @staticmethod
    def clip(x):
        return min(x, LIMIT)

    @doubled
    def main_decode(self, x: int, bias: float = 0.5) -> int:
        """Take a step."""

        def nested(value):
            return value + WIDE

        hidden = self.mix(helper(pick(x))) + bias
        return self.clip(nested(act(triple(hidden)))) + self.size + layers.project(x)

    def prefill(self, x):
        return x * 100
'''
CONFIG = """EPS = 3
OTHER = 4
"""
OPTIONS = """DEPTH = 7
UNREAD = 8
"""
LAYERS = """from sampled.config import OTHER


def project(x):
    return x * OTHER


def unprojected(x):
    return x
"""
TRACED = (
    "sampled.model:Decoder.main_decode",
    "sampled.model:Decoder.main_decode.<locals>.nested",
    "sampled.model:Decoder.size",
    "sampled.model:Decoder.clip",
    "sampled.model:Base.mix",
    "sampled.model:helper",
    "sampled.model:pick",
    "sampled.model:make.<locals>.inner",
    "sampled.model:<lambda>",
    "sampled.layers:project",
)


@dataclass
class Project:
    """Modules in a folder, imported; `document` and `raw` as they were before any edit."""

    folder: Path
    document: dict[str, Any]
    raw: dict[str, Any]

    @property
    def model(self) -> Path:
        return self.folder / "sampled" / "model.py"

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.folder / "sampled" / name
        text = path.read_text()
        assert old in text, f"{old!r} is not in {name}"
        path.write_text(text.replace(old, new))

    def check(self) -> list[Reason]:
        return check_files(self.document, self.raw, {"path:0": self.folder})

    def check_process(self) -> list[Reason]:
        return check_modules(self.document, self.raw, sys.modules)

    def module(self, name: str) -> ModuleType:
        return sys.modules[f"sampled.{name}"]


def write_project(folder: Path, **files: str) -> None:
    """Write the sampled package below `folder`, with some of its files replaced or added."""
    package = folder / "sampled"
    package.mkdir(parents=True)
    texts = {"__init__": "", "model": MODEL, "config": CONFIG, "options": OPTIONS, "layers": LAYERS, **files}
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)


def record(folder: Path, traced: tuple[str, ...] = TRACED) -> Project:
    """Import the project's modules and make its document."""
    for name in sorted({name.partition(":")[0] for name in traced}):
        importlib.import_module(name)
    return Project(folder, *SourceRecorder().document({"path:0": folder, "recipe": folder}, traced))


@pytest.fixture
def imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path whose modules are forgotten afterwards."""
    folder = tmp_path / "project"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def project(imports: Path) -> Project:
    """The sampled project, recorded."""
    write_project(imports)
    return record(imports)


def names(reasons: list[Reason]) -> list[str]:
    """Return what the reasons are about."""
    assert all(reason.part == "sources" and reason.hint for reason in reasons)
    return [reason.name for reason in reasons]


WARM = {
    "comment": ("model", "# a comment", "# another, longer\n    # comment"),
    "docstring of a function": ("model", '"""Add."""', '"""Add up."""'),
    "docstring removed": ("model", '    """Add."""\n', ""),
    "docstring of a class": ("model", '"""Decodes."""', '"""Decodes tokens."""'),
    "docstring of a module": ("model", '"""A model."""', '"""The model."""'),
    "blank lines": ("model", "def helper", "\n\n\ndef helper"),
    "layout": ("model", "return x + shift +", "return (\n        x\n        + shift\n    ) +"),
    "quotes": ("model", 'TABLE["a"] +', "TABLE['a'] +"),
    "prefill": ("model", "return x * 100", "return x * 101"),
    "logging in an unrelated function": ("model", '"value %s"', '"new value %s"'),
    "logger": ("model", "logging.getLogger(__name__)", 'logging.getLogger("mine")'),
    "unrelated class": ("model", "class Base", "class Extra:\n    gain = 9\n\n\nclass Base"),
    "unrelated method": (
        "model",
        "    def prefill",
        "    def prefill_more(self):\n        return 0\n\n    def prefill",
    ),
    "unrelated function": ("model", "def report", "def report_more():\n    return SCALE\n\n\ndef report"),
    "unrelated global": ("model", "UNREAD = 5", "UNREAD = 6"),
    "unrelated import": ("model", "import math\n", "import math\nimport os\n"),
    "unrelated method of a base": (
        "model",
        "    def unmixed(self, x):\n        return x",
        "    def unmixed(self, x):\n        return 2",
    ),
    "constructor, whose results are guarded": ("model", "self.state = 0", "self.state = 1"),
    "annotation of an undecorated function": ("model", "def mix(self, x):", "def mix(self, x: int) -> int:"),
    "global of an imported module": ("options", "UNREAD = 8", "UNREAD = 9"),
    "function of an imported module": (
        "layers",
        "def unprojected(x):\n    return x",
        "def unprojected(x):\n    return 1",
    ),
    "comment in an imported module": ("config", "EPS = 3", "EPS = 3  # small"),
    "main block": ("config", "OTHER = 4\n", 'OTHER = 4\n\nif __name__ == "__main__":\n    shown = repr(3)\n'),
}


@pytest.mark.parametrize("edit", WARM.values(), ids=list(WARM))
def test_check_files_edit_that_shapes_nothing_holds(project: Project, edit: tuple[str, str, str]) -> None:
    """What neither traced code nor anything it reads is made of leaves the entry warm."""
    name, old, new = edit
    project.edit(f"{name}.py", old, new)

    assert [] == project.check()


COLD = {
    "constant in a helper": ("model", "x + shift +", "x + 2 * shift +", "model.py: helper"),
    "default argument": ("model", "shift=1", "shift=2", "model.py: helper"),
    "default of a decorated method": (
        "model",
        "bias: float = 0.5",
        "bias: float = 0.6",
        "model.py: Decoder.main_decode",
    ),
    "decorator added": ("model", "    def mix", "    @doubled\n    def mix", "model.py: Base.mix"),
    "decorator removed": ("model", "    @doubled\n", "", "model.py: Decoder.main_decode"),
    "decorator's body": ("model", "return 2 * function", "return 3 * function", "model.py: doubled"),
    "annotation under a decorator": ("model", "x: int, bias", "x: float, bias", "model.py: Decoder.main_decode"),
    "global": ("model", "SCALE = 2", "SCALE = 3", "model.py: SCALE"),
    "global made from another": ("model", "SCALE * 8", "SCALE * 9", "model.py: LIMIT"),
    "item of a global": ("model", 'TABLE["b"] = 2', 'TABLE["b"] = 3', "model.py: TABLE"),
    "method call on a global": ("model", "UNREAD = 5", "TABLE.update(a=5)", "model.py: TABLE"),
    "global bound again": ("model", "UNREAD = 5", "LEVEL = 5", "model.py: LEVEL"),
    "global bound by a loop": ("model", "UNREAD = 5", "for LEVEL in (1, 2): pass", "model.py: LEVEL"),
    "global bound in a function": ("model", "level + 0", "level + 1", "model.py: LEVEL"),
    "function that runs at import": ("model", "entry * 2", "entry * 3", "model.py: built"),
    "closure's constant": ("model", "make(3)", "make(4)", "model.py: triple"),
    "closure's maker": ("model", "x * factor", "x + factor", "model.py: make"),
    "lambda": ("model", "lambda x: x * SCALE", "lambda x: x + SCALE", "model.py: <lambda>"),
    "nested function": ("model", "value + WIDE", "value - WIDE", "model.py: Decoder.main_decode"),
    "global of a nested function": ("model", "max(3, SCALE)", "max(4, SCALE)", "model.py: WIDE"),
    "property": ("model", "return self.width", "return self.width + 1", "model.py: Decoder.size"),
    "property to method": ("model", "    @property\n", "", "model.py: Decoder.size"),
    "static method": ("model", "min(x, LIMIT)", "max(x, LIMIT)", "model.py: Decoder.clip"),
    "class attribute": ("model", "width: int = 4", "width: int = 5", "model.py: class Decoder"),
    "class attribute of a base": ("model", "gain = 1", "gain = 2", "model.py: class Base"),
    "class attribute set outside": ("model", "UNREAD = 5", "UNREAD = 5\nsetattr(Base, 'gain', 3)", "model.py: Base"),
    "base's method": ("model", "x * self.gain", "x + self.gain", "model.py: Base.mix"),
    "method overridden": (
        "model",
        "    def prefill",
        "    def mix(self, x):\n        return 0\n\n    def prefill",
        "model.py: class Decoder",
    ),
    "attribute access taken over": (
        "model",
        "    def prefill",
        "    def __getattr__(self, x):\n        return 0\n\n    def prefill",
        "model.py: class Decoder",
    ),
    "base class": ("model", "class Decoder(Base)", "class Decoder(Base, dict)", "model.py: class Decoder"),
    "metaclass": ("model", "return super().__call__", "return None or super().__call__", "model.py: Meta"),
    "condition": ("model", "math.pi > 3", "math.pi > 4", "model.py: pick"),
    "other branch": ("model", "return -x", "return -2 * x", "model.py: pick"),
    "imported constant": ("config", "EPS = 3", "EPS = 4", "config.py: EPS"),
    "constant that an imported function reads": ("config", "OTHER = 4", "OTHER = 5", "config.py: OTHER"),
    "constant through a module": ("options", "DEPTH = 7", "DEPTH = 6", "options.py: DEPTH"),
    "function of an imported module": ("layers", "x * OTHER", "x + OTHER", "layers.py: project"),
    "import from elsewhere": (
        "model",
        "from sampled.config import EPS",
        "from sampled.options import EPS",
        "model.py: EPS",
    ),
    "import under another name": ("model", "import EPS", "import OTHER as EPS", "model.py: EPS"),
    "builtin hidden": ("model", "UNREAD = 5", "def min(x, y): return y", "model.py: min"),
    "global becomes unbound": ("model", "LIMIT = SCALE * 8", "del SCALE", "model.py: LIMIT"),
    "int to float": ("model", "SCALE = 2", "SCALE = 2.0", "model.py: SCALE"),
    "int to bool": ("model", "LEVEL = 1", "LEVEL = True", "model.py: LEVEL"),
    "definition removed": ("model", "def helper", "def helped", "model.py: helper"),
}


@pytest.mark.parametrize("edit", COLD.values(), ids=list(COLD))
def test_check_files_edit_that_shapes_the_graph_names_it(project: Project, edit: tuple[str, str, str, str]) -> None:
    """What traced code is, or what it reads, is a reason by its name."""
    name, old, new, wanted = edit
    project.edit(f"{name}.py", old, new)

    assert f"sampled/{wanted}" in names(project.check())


def test_check_files_untouched_holds_without_parsing(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bytes are not parsed, which is what keeps a boot fast."""
    monkeypatch.setattr("cachectl.identity.source_digest.SourceIndex", None)

    assert [] == project.check()
    assert [] == project.check_process()


def test_check_files_reason_says_both_digests_and_what_to_do(project: Project) -> None:
    """A reason carries what was stored and what is there."""
    project.edit("model.py", "shift=1", "shift=2")
    entry = next(entry for entry in project.document["files"] if entry["path"] == "sampled/model.py")

    (reason,) = project.check()

    assert entry["definitions"]["helper"] == reason.stored
    assert reason.wanted.startswith("sha256:")
    assert reason.stored != reason.wanted
    assert reason.kind == "semantic"
    assert "cachectl build" in reason.hint


def test_check_files_functions_in_another_order_hold(project: Project) -> None:
    """The place of a definition in its file is layout."""
    start, end = MODEL.index("def helper"), MODEL.index("def report")
    project.model.write_text(MODEL[:start] + MODEL[end:] + "\n\n" + MODEL[start:end])

    assert [] == project.check()


def test_check_files_other_line_ends_hold(project: Project) -> None:
    """CRLF is layout."""
    project.model.write_bytes(MODEL.replace("\n", "\r\n").encode())

    assert [] == project.check()


def test_check_files_other_encoding_of_the_same_text_holds(imports: Path) -> None:
    """Text is compared as decoded by its cookie, not by its bytes."""
    write_project(imports, model="# -*- coding: latin-1 -*-\nNAME = 'é'\n\n\ndef call(x):\n    return NAME\n")
    path = imports / "sampled" / "model.py"
    text = path.read_text()
    path.write_bytes(text.encode("latin-1"))
    project = record(imports, ("sampled.model:call",))

    path.write_bytes(text.replace("latin-1", "utf-8").encode())
    assert [] == project.check()

    path.write_bytes(text.encode())  # the cookie still says latin-1: another string
    assert ["sampled/model.py: NAME"] == names(project.check())


def _delete(path: Path) -> None:
    path.unlink()


def _rename(path: Path) -> None:
    path.rename(path.with_name("renamed.py"))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere.py")


@pytest.mark.parametrize("change", [_delete, _rename, _folder, _fifo, _dangling])
def test_check_files_file_not_there_is_absent(project: Project, change: Callable[[Path], None]) -> None:
    """A file that can't be read where it should be is one reason, and no error."""
    change(project.model)

    (reason,) = project.check()

    assert ("sampled/model.py", "absent", "missing") == (reason.name, reason.kind, reason.wanted)


@pytest.mark.parametrize(
    "data", [b"def broken(:\n", b"\0", b"# coding: nonsense\n", b"\xff\xfe", b"x = " + b"(" * 500 + b")" * 500]
)
def test_check_files_unparsable_file_is_a_reason(project: Project, data: bytes) -> None:
    """What this interpreter can't parse is one reason, and no error."""
    project.model.write_bytes(data)

    (reason,) = project.check()

    assert ("sampled/model.py", "corrupt") == (reason.name, reason.kind)
    assert "can't be parsed" in reason.hint


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("from sampled.config import *\n", "star import at line 1"),
        ("exec('X = 1')\n", "exec at line 1"),
        ("vars()['X'] = 1\n", "vars at line 1"),
        ("from inspect import getsource\n", "inspect.getsource at line 1"),
        ("globals()['X'] = 1\n", "globals at line 1"),
        ("import sys\nsetattr(sys.modules[__name__], 'X', 1)\n", "sys.modules at line 2"),
        ("def __getattr__(name):\n    return 1\n", "module __getattr__ at line 1"),
    ],
)
def test_document_names_not_knowable_counts_whole(imports: Path, text: str, why: str) -> None:
    """A file whose names its text doesn't tell counts by every byte, says so, and so do the files of a star import."""
    write_project(imports, model=f"{text}\n\ndef call(x):\n    return x\n")
    project = record(imports, ("sampled.model:call",))

    assert any(why in note for note in project.raw["notes"])
    assert [] == project.check()
    project.edit("model.py", "return x", "return x  # same")
    if "star" in why:
        project.edit("config.py", "OTHER = 4", "OTHER = 5")

    wanted = ["sampled/config.py", "sampled/model.py"] if "star" in why else ["sampled/model.py"]
    assert wanted == names(project.check())


def test_document_harmless_look_at_modules_leaves_names_knowable(imports: Path) -> None:
    """Asking whether something was imported, or for an object's attributes, does not make a file count whole."""
    text = "import sys\n\nHAS = 'torch' in sys.modules\n\n\ndef call(x):\n    return vars(x) if HAS else x\n"
    write_project(imports, model=text)
    project = record(imports, ("sampled.model:call",))

    assert [] == project.raw["notes"]


def test_check_files_name_no_longer_knowable_is_a_reason(project: Project) -> None:
    """A file that has come to write its globals by name can't be compared by names any more."""
    project.edit("model.py", "UNREAD = 5", "globals()['SCALE'] = 5")

    assert ["sampled/model.py"] == names(project.check())


def test_document_module_passed_as_an_object_counts_whole(imports: Path) -> None:
    """When code hands a module around, any of its names may be read."""
    write_project(imports, model="from sampled import config\n\n\ndef call(x):\n    return getattr(config, x)\n")
    project = record(imports, ("sampled.model:call",))
    project.edit("config.py", "OTHER = 4", "OTHER = 5")

    assert ["sampled/config.py"] == names(project.check())


def test_document_name_passed_on_by_a_package_is_followed(imports: Path) -> None:
    """A constant re-exported with a relative import is followed to where it is made."""
    write_project(
        imports,
        __init__="from .config import EPS as THRESHOLD\n",
        model="import sampled\n\n\ndef call(x):\n    return x + sampled.THRESHOLD\n",
    )
    project = record(imports, ("sampled.model:call",))
    project.edit("config.py", "EPS = 3", "EPS = 4")

    assert ["sampled/config.py: EPS"] == names(project.check())


@pytest.mark.parametrize(
    "text", ["from sampled.config import EPS", "from sampled import config", "import sampled.config as config"]
)
def test_document_import_inside_a_function_is_followed(imports: Path, text: str) -> None:
    """A name that a function imports when it runs counts like one of its module."""
    value = "EPS" if text.endswith("EPS") else "config.EPS"
    write_project(imports, model=f"def call(x):\n    {text}\n\n    return x + {value}\n")
    project = record(imports, ("sampled.model:call",))
    project.edit("config.py", "EPS = 3", "EPS = 4")

    assert ["sampled/config.py"] == [name.partition(":")[0] for name in names(project.check())]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("try:\n    import nothing_here\n    FLAG = 1\nexcept ImportError:\n    FLAG = {}", "FLAG"),
        ("with open(__file__) as FLAG:\n    LEFT = {}", "LEFT"),
        ("if (FLAG := {}):\n    pass", "FLAG"),
        ("match [{}]:\n    case [FLAG]:\n        pass", "FLAG"),
        ("FLAG, *REST = [1, 2, {}]", "REST"),
        ("FLAG = [1]\nFLAG += [{}]", "FLAG"),
        ("FLAG = [1]\nFLAG.append({})", "FLAG"),
        ("FLAG = [1]\nREST = [FLAG.append(y) for y in [{}]]", "FLAG"),
        ("class FLAG:\n    class Inner:\n        value = {}", "FLAG.Inner.value"),
        ("class FLAG:\n    if True:\n        value = {}", "FLAG.value"),
        ("FLAG = type('FLAG', (), dict(value={}))", "FLAG.value"),
        ("def noted(function, /, *, by={}):\n    return function\n\n\n@noted\ndef FLAG():\n    pass", "FLAG()"),
        ("FLAG = lambda y=(lambda: {}): y()", "FLAG()"),
        ("FLAG = {{y: z for y in range(3) for z in range({}) if y}}", "FLAG"),
        ("_hidden = {}\n\n\ndef __dir__():\n    return []\n\n\nFLAG = _hidden", "FLAG"),
    ],
)
def test_document_every_way_to_bind_a_name_counts(imports: Path, text: str, value: str) -> None:
    """Whatever statement makes a value that traced code reads, an edit of it is a reason."""
    write_project(imports, model=f"{text.format(2)}\n\n\ndef call(x):\n    return x, {value}\n")
    project = record(imports, ("sampled.model:call",))
    assert [] == project.check()

    project.edit("model.py", text.format(2), text.format(3))

    assert [] != names(project.check())


def test_document_overload_and_redefinition_count_in_order(imports: Path) -> None:
    """All definitions of one name count."""
    write_project(
        imports, model="def call(x):\n    return x\n\n\nfirst = call\n\n\ndef call(x):\n    return first(x)\n"
    )
    project = record(imports, ("sampled.model:call",))
    project.edit("model.py", "return x\n", "return x + 1\n")

    assert ["sampled/model.py: call"] == names(project.check())


def test_document_extra_file_counts_whole(project: Project) -> None:
    """The recipe's own sources count by every byte, whatever they are."""
    (project.folder / "shapes.json").write_text("{}")
    document, raw = SourceRecorder().document({"path:0": project.folder}, (), [project.folder / "shapes.json"])
    project = Project(project.folder, document, raw)

    assert [] == project.check()
    assert [] == check_modules(document, raw, {}, {"path:0": project.folder})
    (project.folder / "shapes.json").write_text("{} ")

    assert ["shapes.json"] == names(project.check())


def test_document_is_canonical_and_names_no_folder(project: Project) -> None:
    """The document has a canonical form and holds no absolute path."""
    text = canonical_bytes(project.document).decode()

    assert json.loads(text) == project.document
    assert str(project.folder) not in text + json.dumps(project.raw)
    assert {"path:0"} == {entry["root"] for entry in project.document["files"]}


# The program's own process.


def test_check_modules_untouched_holds(project: Project) -> None:
    """What was recorded holds in the process that it was recorded in."""
    assert [] == project.check_process()


@pytest.mark.parametrize("name", ["docstring of a function", "docstring removed", "comment", "prefill"])
def test_check_modules_fresh_import_of_a_harmless_edit_holds(project: Project, name: str) -> None:
    """A docstring changes a code object's constants, but not what it does."""
    file, old, new = WARM[name]
    project.edit(f"{file}.py", old, new)
    importlib.reload(project.module("model"))

    assert [] == project.check_process()


def test_check_modules_edit_after_the_import_is_a_reason(project: Project) -> None:
    """A file that was edited and put back leaves the process with the code it loaded in between."""
    project.edit("model.py", "shift=1", "shift=1 - 0")
    project.edit("model.py", "x + shift", "x - shift")
    importlib.reload(project.module("model"))
    project.model.write_text(MODEL)

    assert [] == project.check()
    assert ["sampled/model.py: helper"] == names(project.check_process())


def test_check_modules_stale_bytecode_is_a_reason(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A .pyc with the same time and size as an edited source is loaded by Python in its place."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    stamp = 1_700_000_000
    project.edit("model.py", "x + shift", "x - shift")
    os.utime(project.model, (stamp, stamp))
    py_compile.compile(str(project.model), doraise=True)
    project.model.write_text(MODEL)
    os.utime(project.model, (stamp, stamp))
    for name in [name for name in sys.modules if name.startswith("sampled")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    importlib.import_module("sampled.model")

    assert [] == project.check()
    assert ["sampled/model.py: helper"] == names(project.check_process())


def _patched(x: int, shift: int = 1) -> int:
    return x


def test_check_modules_patched_function_is_a_reason(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that was replaced in the process is not what was traced."""
    monkeypatch.setattr(project.module("model"), "helper", _patched)

    assert ["sampled/model.py: helper"] == names(project.check_process())


def test_check_modules_wrapped_function_is_a_reason(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch that calls the original shows as well."""
    model = project.module("model")
    monkeypatch.setattr(model, "helper", model.doubled(model.helper))

    assert ["sampled/model.py: helper"] == names(project.check_process())


@pytest.mark.parametrize(("kind", "member"), [("Base", "mix"), ("Decoder", "size"), ("Decoder", "clip")])
def test_check_modules_patched_method_is_a_reason(
    project: Project, monkeypatch: pytest.MonkeyPatch, kind: str, member: str
) -> None:
    """Methods, properties and static methods are looked at as they are."""
    monkeypatch.setattr(getattr(project.module("model"), kind), member, _patched)

    assert [f"sampled/model.py: {kind}.{member}", f"sampled/model.py: class {kind}"] == names(project.check_process())


def test_check_modules_method_added_to_a_class_is_a_reason(project: Project) -> None:
    """A subclass that has come to override a traced method is called in its place."""
    project.module("model").Decoder.mix = _patched

    assert ["sampled/model.py: class Decoder"] == names(project.check_process())


def test_check_modules_patch_no_longer_applied_is_a_reason(imports: Path) -> None:
    """A method that came from elsewhere at build has to come from there again."""
    patch = "from sampled import model\n\n\ndef mix(self, x):\n    return x\n\n\nmodel.Base.mix = mix\n"
    write_project(imports, patches=patch)
    project = record(imports, ("sampled.patches:mix", "sampled.model:Decoder.main_decode"))
    assert [] == project.check_process()

    importlib.reload(project.module("model"))

    assert ["sampled/model.py: class Base"] == names(project.check_process())


def test_check_modules_member_deleted_is_absent(project: Project) -> None:
    """What can't be found by its name any more is a reason."""
    del project.module("model").helper

    (reason,) = project.check_process()

    assert ("sampled/model.py: helper", "absent", "missing") == (reason.name, reason.kind, reason.wanted)


def test_check_modules_file_edited_is_a_reason(project: Project) -> None:
    """The file behind the module counts, as for the hook."""
    project.edit("model.py", "shift=1", "shift=2")

    assert ["sampled/model.py: helper"] == names(project.check_process())


def test_check_modules_not_imported_is_absent(project: Project) -> None:
    """What was traced must have been imported; what was only read from is looked for on disk."""
    without = {name: module for name, module in sys.modules.items() if not name.startswith("sampled")}

    reasons = check_modules(project.document, project.raw, without, {"path:0": project.folder})

    assert ["sampled/layers.py", "sampled/model.py"] == names(reasons)
    assert {"absent"} == {reason.kind for reason in reasons}


def test_check_modules_sourceless_module_is_absent(project: Project) -> None:
    """Without source there is nothing to compare, and that is cold."""
    for loaded in ("bytecode", "zip"):
        if loaded == "bytecode":
            py_compile.compile(str(project.model), cfile=str(project.model.with_suffix(".pyc")), doraise=True)
            project.module("model").__file__ = str(project.model.with_suffix(".pyc"))
        else:
            archive = project.folder / "sampled.zip"
            with zipfile.ZipFile(archive, "w") as writer:
                writer.write(project.model, "sampled/model.py")
            project.module("model").__file__ = str(archive / "sampled" / "model.py")

        (reason,) = project.check_process()

        assert ("sampled/model.py", "absent") == (reason.name, reason.kind)
        assert "no source file" in reason.hint


def test_check_modules_main_script_is_found_by_its_file(imports: Path) -> None:
    """A model that was imported at build may be the main program later, and the other way round."""
    write_project(imports)
    project = record(imports)
    main = ModuleType("__main__")
    main.__dict__.update(vars(project.module("model")))
    modules = {name: module for name, module in sys.modules.items() if name != "sampled.model"}
    modules["__main__"] = main

    assert [] == check_modules(project.document, project.raw, modules)
    assert [] == check_modules(project.document, project.raw, modules, {"path:0": project.folder})
    assert ["sampled/model.py"] == names(
        check_modules(project.document, project.raw, modules, {"path:0": project.folder.parent})
    )


# Installed packages.


def test_check_packages_version_and_bytes_count(imports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package counts by version and by every byte of the files that were traced."""
    site = tmp_path / "site-packages"
    (site / "wheeled").mkdir(parents=True)
    (site / "wheeled" / "__init__.py").write_text("def scale(x):\n    return x\n\n\ndef other(x):\n    return x\n")
    metadata = site / "wheeled-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: wheeled\nVersion: 1.2\n")
    (metadata / "top_level.txt").write_text("wheeled\n")
    (metadata / "RECORD").write_text("wheeled/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(site))
    write_project(imports)
    project = record(imports, ("wheeled:scale",))
    (entry,) = project.document["files"]

    assert ("package:wheeled", "wheeled/__init__.py") == (entry["root"], entry["path"])
    assert [{"name": "wheeled", "distribution": "wheeled", "version": "1.2"}] == project.document["packages"]
    assert [] == project.check()
    assert [] == project.check_process()

    (site / "wheeled" / "__init__.py").write_text("def scale(x):\n    return 2 * x\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: wheeled\nVersion: 1.3\n")
    importlib.invalidate_caches()
    assert ["package wheeled", "wheeled/__init__.py"] == names(project.check())

    shutil.rmtree(site)
    del sys.modules["wheeled"]
    importlib.invalidate_caches()
    reasons = project.check()
    assert ["package wheeled", "wheeled/__init__.py"] == names(reasons)
    assert {"absent"} == {reason.kind for reason in reasons}


# Documents that are not ours.


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"version": 2, "files": [], "packages": [], "attributes": []},
        {"version": 1, "files": [{"path": "../secret.py"}], "packages": [], "attributes": []},
        {"version": 1, "files": [{"path": "/etc/passwd"}], "packages": [], "attributes": []},
        {"version": 1, "files": [3], "packages": [], "attributes": []},
        {"version": 1, "files": [], "packages": [{"name": 3}], "attributes": []},
    ],
)
def test_check_malformed_document_is_corrupt(document: Any) -> None:
    """A document that can't be used is a reason for both sides, never an exception."""
    for reasons in (check_files(document, {"files": {}}, {}), check_modules(document, {"files": {}}, {})):
        assert ["corrupt"] == [reason.kind for reason in reasons]


def test_check_files_unknown_root_is_absent(project: Project) -> None:
    """A recipe that no longer has the folder is told so."""
    reasons = check_files(project.document, project.raw, {})

    assert {"absent"} == {reason.kind for reason in reasons}
    assert all("model.path" in reason.hint for reason in reasons)


SCRIPT = """
import json, sys
sys.path[:0] = [{repository!r}, {folder!r}]
from pathlib import Path
import sampled.model, sampled.layers
from cachectl.build.sources import SourceRecorder
from cachectl.identity.sources import check_files, check_modules
document, raw = SourceRecorder().document({{"path:0": Path({folder!r})}}, {traced!r})
before = [str(reason) for reason in check_files(document, raw, {{"path:0": Path({folder!r})}})]
before += [str(reason) for reason in check_modules(document, raw, sys.modules)]
model = Path({folder!r}) / "sampled" / "model.py"
text = model.read_text()
model.write_text(text.replace("x * 100", "x * 101").replace("# a comment", "# another"))
harmless = [str(reason) for reason in check_files(document, raw, {{"path:0": Path({folder!r})}})]
model.write_text(text.replace("shift=1", "shift=2").replace("gain = 1", "gain = 2"))
cold = [reason.name for reason in check_files(document, raw, {{"path:0": Path({folder!r})}})]
model.write_text(text)
print(json.dumps([document, raw, before, harmless, cold], sort_keys=True))
"""


def run_script(python: str, repository: Path, folder: Path, cwd: Path, seed: str) -> tuple[str, list[Any]]:
    """Record and check the project in a fresh interpreter; return its output, and the same as a value."""
    script = SCRIPT.format(repository=str(repository), folder=str(folder), traced=TRACED)
    environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([python, "-c", script], cwd=cwd, env=environ, check=True, capture_output=True, text=True)
    return done.stdout, json.loads(done.stdout)


def test_document_is_equal_in_every_process_folder_and_clone(tmp_path: Path, repository: Path) -> None:
    """Hash seed, working folder and the clone's place leave no trace."""
    outputs = set()
    for seed, place in (("1", "here"), ("2", "deep/er/there"), ("random", "sp ace")):
        folder = tmp_path / place
        write_project(folder)
        outputs.add(run_script(sys.executable, repository, folder, folder, seed)[0])

    assert 1 == len(outputs)


@pytest.mark.slow
@pytest.mark.parametrize("minor", ["3.10", "3.11", "3.12", "3.13"])
def test_check_works_on_every_supported_minor(tmp_path: Path, repository: Path, minor: str) -> None:
    """The standard library part records, holds and refuses on each CPython that a pod may have."""
    python = shutil.which(f"python{minor}")
    if python is None or subprocess.run([python, "-c", ""], check=False, capture_output=True).returncode:
        pytest.skip(f"needs python{minor}")
    write_project(tmp_path / "project")

    _, (document, _, before, harmless, cold) = run_script(python, repository, tmp_path / "project", tmp_path, "0")

    assert [] == before
    assert [] == harmless
    assert {"sampled/model.py: helper", "sampled/model.py: class Base"} == set(cold)
    assert 4 == len(document["files"])
