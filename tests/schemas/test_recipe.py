"""The recipe: its defaults, the digest of its meaning, and the one-line text of all that can be wrong with it."""

# ruff: noqa: E501  (a message stands on one line, as it is printed)

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cachectl.errors import ConfigError
from cachectl.schemas import recipe_words
from cachectl.schemas.canonical import digest_bytes, digest_of
from cachectl.schemas.recipe import Recipe
from cachectl.schemas.recipe_reading import MAX_RECIPE_BYTES, load_recipe
from tests.strategies import JSON_OBJECTS, JSON_SCALARS, TEXTS

MINIMAL = """\
schema: cachectl/recipe/v1
name: tiny-decoder
model: {factory: "tiny_decoder.model:build"}
functions:
  - method: main_decode
    cases:
      - {name: b4, inputs: "tiny_decoder.inputs:decode"}
"""

# The same recipe in another order, with every default written out and comments.
EXPLICIT = """\
# what the fleet runs
gates: {atol: 0.001, rtol: 1e-3}
environment: {}
topology:
  context_parallel: 1
  data_parallel: 1
  expert_parallel: 1
  pipeline_parallel: 1
  tensor_parallel: 1
  world_size: 1
functions:
- cases: [{args: {}, inputs: 'tiny_decoder.inputs:decode', name: "b4"}]  # one case
  method: main_decode
compile: {setup: null, dynamo: {}, config: {}, options: {}, dynamic: off, mode: npugraph_ex}
model:
  revision: ~
  sources: []
  path: ['.']
  config: {}
  factory: tiny_decoder.model:build
device: npu
name: 'tiny-decoder'
schema: "cachectl/recipe/v1"
"""

FRAMEWORK = """\
schema: cachectl/recipe/v1
name: deepseek-r1
framework: {kind: cann-recipes, config: config/deepseek_r1.yaml}
command: [python, infer.py]
"""

DEFAULTS: dict[str, Any] = {
    "schema": "cachectl/recipe/v1",
    "name": "tiny-decoder",
    "device": "npu",
    "model": {
        "factory": "tiny_decoder.model:build",
        "config": {},
        "path": ["."],
        "sources": [],
        "revision": None,
    },
    "compile": {"mode": "npugraph_ex", "dynamic": False, "options": {}, "config": {}, "dynamo": {}, "setup": None},
    "functions": [
        {"method": "main_decode", "cases": [{"name": "b4", "inputs": "tiny_decoder.inputs:decode", "args": {}}]}
    ],
    "topology": {
        "world_size": 1,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "expert_parallel": 1,
        "data_parallel": 1,
        "context_parallel": 1,
    },
    "environment": {},
    "gates": {"rtol": 0.001, "atol": 0.001},
}


def _write(folder: Path, text: str | bytes) -> Path:
    path = folder / "recipe.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def _error(path: Path) -> str:
    """Return the message of load_recipe's error without the folder, after the checks that hold for all of them."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)

    message = str(caught.value)
    assert 2 == caught.value.exit_code
    assert 1 == len(message.splitlines())
    assert message.startswith(str(path))
    return message.removeprefix(f"{path.parent}/")


def test_load_recipe_minimal_has_the_defaults_of_the_contract(tmp_path: Path) -> None:
    """What a recipe leaves out is filled in as the contract says."""
    assert DEFAULTS == load_recipe(_write(tmp_path, MINIMAL)).recipe.to_document()


def test_load_recipe_equal_meaning_has_equal_digest(tmp_path: Path) -> None:
    """Order, comments, quotes and written-out defaults change the raw digest only."""
    minimal = load_recipe(_write(tmp_path, MINIMAL))
    explicit = load_recipe(_write(tmp_path, EXPLICIT))

    assert minimal.digest == explicit.digest
    assert digest_of(DEFAULTS) == minimal.digest
    assert (digest_bytes(MINIMAL.encode()), digest_bytes(EXPLICIT.encode())) == (
        minimal.raw_digest,
        explicit.raw_digest,
    )
    assert MINIMAL.encode() == minimal.raw


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tiny-decoder", "tiny-decoder2"),
        ("model:build", "model:build2"),
        ("main_decode", "mtp_decode"),
        ("b4", "b8"),
        ('decode"}', 'decode", args: {batch: 4}}'),
        ("functions:", "device: simulated\nfunctions:"),
        ("functions:", "compile: {dynamic: true}\nfunctions:"),
        ("functions:", "compile: {options: {frozen_parameter: true}}\nfunctions:"),
        ("functions:", 'environment: {TASK_QUEUE_ENABLE: "1"}\nfunctions:'),
        ("functions:", "topology: {world_size: 2}\nfunctions:"),
        ("functions:", "gates: {rtol: 1.0e-2}\nfunctions:"),
    ],
)
def test_load_recipe_other_meaning_has_other_digest(tmp_path: Path, old: str, new: str) -> None:
    """What a recipe says is in its digest."""
    assert old in MINIMAL
    assert digest_of(DEFAULTS) != load_recipe(_write(tmp_path, MINIMAL.replace(old, new))).digest


@given(JSON_OBJECTS)
def test_recipe_free_fields_are_kept_as_they_are(values: dict[str, Any]) -> None:
    """config, options and args hold any JSON, and the document reads back to the same recipe."""
    document = DEFAULTS | {
        "model": DEFAULTS["model"] | {"config": values},
        "compile": DEFAULTS["compile"] | {"options": values},
    }
    recipe = Recipe.model_validate(document)

    assert recipe == Recipe.model_validate(recipe.to_document())


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.booleans() | st.integers(-9, 9) | st.floats(-1, 1)
    )
)
def test_load_recipe_document_written_by_pyyaml_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    """A recipe written by a YAML library means what the recipe it came from means."""
    document = DEFAULTS | {"model": DEFAULTS["model"] | {"config": values}}
    path = _write(tmp_path_factory.mktemp("recipe"), yaml.safe_dump(document))

    assert digest_of(document) == load_recipe(path).digest


def test_load_recipe_framework_document_has_its_own_form(tmp_path: Path) -> None:
    """A framework's recipe has neither model nor functions, and keeps the rest of the defaults."""
    config = tmp_path / "config" / "deepseek_r1.yaml"
    config.parent.mkdir()
    config.write_text("model_config: {exe_mode: npugraph_ex}\nscheduler_config: {}\n")

    document = load_recipe(_write(tmp_path, FRAMEWORK)).recipe.to_document()

    assert {"kind": "cann-recipes", "config": "config/deepseek_r1.yaml"} == document["framework"]
    assert ["python", "infer.py"] == document["command"]
    assert DEFAULTS.keys() - {"model", "functions"} | {"framework", "command"} == document.keys()


def test_load_recipe_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe's folder is known whatever the working directory becomes."""
    _write(tmp_path, MINIMAL)
    monkeypatch.chdir(tmp_path)

    loaded = load_recipe(Path("recipe.yaml"))

    assert (tmp_path / "recipe.yaml", tmp_path) == (loaded.path, loaded.folder)


def test_load_recipe_relative_path_is_named_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message names the file as the user did."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_recipe(Path("recipe.yaml"))

    assert "recipe.yaml: no such file; check the path" == str(caught.value)


def test_load_recipe_byte_order_mark_is_no_part_of_it(tmp_path: Path) -> None:
    """A file that an editor marked as UTF-8 reads as the same recipe."""
    assert digest_of(DEFAULTS) == load_recipe(_write(tmp_path, b"\xef\xbb\xbf" + MINIMAL.encode())).digest


def test_load_recipe_anchors_and_merges_are_resolved(tmp_path: Path) -> None:
    """Aliases and merge keys work; what a mapping says itself wins over what it merges."""
    text = MINIMAL.replace(
        'cases:\n      - {name: b4, inputs: "tiny_decoder.inputs:decode"}',
        'cases:\n      - &b4 {name: b4, inputs: "tiny_decoder.inputs:decode", args: {batch: 4}}'
        "\n      - {<<: *b4, name: b8, args: {batch: 8}}"
        "\n      - {<<: [{name: b9}, *b4]}",
    )
    recipe = load_recipe(_write(tmp_path, text)).recipe

    assert [("b4", {"batch": 4}), ("b8", {"batch": 8}), ("b9", {"batch": 4})] == [
        (case.name, case.args) for case in recipe.functions[0].cases
    ]


def test_to_document_leaves_secrets_out_and_recipe_keeps_them(tmp_path: Path) -> None:
    """The ranks get secrets; what is stored and hashed doesn't hold them."""
    text = MINIMAL + 'environment: {HF_TOKEN: "s3cret", PROXY: "http://me:s3cret@host:3128", TASK_QUEUE_ENABLE: "1"}\n'
    loaded = load_recipe(_write(tmp_path, text))

    assert "s3cret" == loaded.recipe.environment["HF_TOKEN"]
    assert {"PROXY": "http://host:3128", "TASK_QUEUE_ENABLE": "1"} == loaded.recipe.to_document()["environment"]
    assert loaded.digest == load_recipe(_write(tmp_path, text.replace("s3cret", "other"))).digest


@pytest.mark.parametrize(
    "value", ["12345", "yes", "2024-01-01", "12:30", "0123", "99999999999999999999", "!12345", ".inf", "{}"]
)
def test_load_recipe_secret_value_is_not_shown(tmp_path: Path, value: str) -> None:
    """Whatever is wrong with a secret, the message doesn't quote it."""
    message = _error(_write(tmp_path, MINIMAL + f"environment:\n  API_KEY: {value}\n"))

    assert "environment.API_KEY: " in message
    assert value not in message.removeprefix("recipe.yaml: environment.API_KEY: ")


def test_load_recipe_folder_says_so(tmp_path: Path) -> None:
    """A directory is no recipe."""
    assert f"{tmp_path.name}: is a directory; name the recipe file in it" == _error(tmp_path)


def test_load_recipe_unreadable_file_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system says comes through."""

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(recipe_words, "open", refuse, raising=False)

    message = _error(_write(tmp_path, MINIMAL))

    assert "recipe.yaml: can't be read: Permission denied; check the path and its permissions" == message


def test_load_recipe_path_below_a_file_says_why(tmp_path: Path) -> None:
    """A path through a file leads nowhere."""
    message = _error(_write(tmp_path, MINIMAL) / "x")

    assert "x: no such file; check the path" == message


def test_load_recipe_path_with_nul_is_config_error() -> None:
    """A path that no system call takes is the caller's mistake, too."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(Path("a\0b"))

    assert "'a\\x00b': no path: embedded null byte; check the path" == str(caught.value)


def test_load_recipe_file_name_with_line_break_stays_one_line(tmp_path: Path) -> None:
    """Even the file's name can't break the line."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path / "a\nb")

    assert f"{tmp_path}/a b: no such file; check the path" == str(caught.value)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "recipe.yaml: is empty; start it with 'schema: cachectl/recipe/v1'"),
        (b"# nothing yet\n", "recipe.yaml: is empty; start it with 'schema: cachectl/recipe/v1'"),
        (b"- a\n", "recipe.yaml: holds a list, wanted a mapping; start it with 'schema: cachectl/recipe/v1'"),
        (b"recipe\n", "recipe.yaml: holds text, wanted a mapping; start it with 'schema: cachectl/recipe/v1'"),
        (b"name: caf\xe9\n", "recipe.yaml: not UTF-8 (byte 0xe9 at offset 9); save it as UTF-8"),
        (b"\xff\xfen\0", "recipe.yaml: not UTF-8 (byte 0xff at offset 0); save it as UTF-8"),
        (
            b"a: 1\nb: c: d\n",
            "recipe.yaml: line 2: not YAML: mapping values are not allowed here; check the indentation and quotes there",
        ),
        (
            b"a: 1\nb: [1,\n",
            "recipe.yaml: line 3: not YAML: while parsing a flow node, expected the node content, but found '<stream end>'; check the indentation and quotes there",
        ),
        (
            b"a:\n\tb: 1\n",
            "recipe.yaml: line 2: not YAML: while scanning for the next token, found character '\\t' that cannot start any token; indent with spaces, not tabs",
        ),
        (
            b"a: 1\n---\nb: 1\n",
            "recipe.yaml: line 2: not YAML: expected a single document in the stream, but found another document; check the indentation and quotes there",
        ),
        (
            b"a: *b\n",
            "recipe.yaml: line 1: not YAML: found undefined alias 'b'; check the indentation and quotes there",
        ),
        (b"a: 1\nb: \0\n", "recipe.yaml: line 2: not YAML: the character U+0000; remove it"),
        (b"x" * (MAX_RECIPE_BYTES + 1), "recipe.yaml: more than 1048576 bytes; check that it is a recipe file"),
        (b"a: " + b"[" * 100_000, "recipe.yaml: line 1: deeper than 32 levels; flatten it"),
        (b"a: &a [*a]\n", "recipe.yaml: a[0]: an alias that holds itself; write out what is meant"),
        (
            b"a: &a0 [1]\n" + b"".join(b"a%d: &a%d [*a%d]\n" % (n, n, n - 1) for n in range(1, 40)),
            "recipe.yaml: its aliases nest deeper than 32 levels; write out what is meant",
        ),
        (
            b"a: &a0 [1]\n"
            + b"".join(b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 10)) for n in range(1, 9)),
            "recipe.yaml: its aliases make more than 100000 values; write out what is meant",
        ),
        (b"a: 1\nb: 2\na: 3\n", "recipe.yaml: a: stands twice (lines 1 and 3); keep one"),
        (b"a: {b: 1, b: 2}\n", "recipe.yaml: a.b: stands twice (line 1); keep one"),
        (b"a: {[1]: 2}\n", "recipe.yaml: a: a key on line 1 is a list or mapping; write keys as text"),
        (b"a: {4: 2}\n", 'recipe.yaml: a: the key 4 is a whole number to YAML, keys are text; quote it: "4"'),
        (b"on: 1\n", 'recipe.yaml: the key on is a boolean to YAML, keys are text; quote it: "on"'),
        (b"a: {<<: 1}\n", "recipe.yaml: a: '<<' merges a whole number, wanted a mapping; name the anchor of a mapping"),
        (
            b"a: !!python/object/apply:os.system [ls]\n",
            "recipe.yaml: a: the tag !!python/object/apply:os.system is not followed; remove it, or quote what is text",
        ),
        (b"a: !secret x\n", "recipe.yaml: a: the tag !secret is not followed; remove it, or quote what is text"),
        (b"a: !!binary eA==\n", "recipe.yaml: a: the tag !!binary is not followed; remove it, or quote what is text"),
        (b"a: !!set {x}\n", "recipe.yaml: a: the tag !!set is not followed; remove it, or quote what is text"),
        (b"a: !!bool x\n", "recipe.yaml: a: x is no boolean; write true or false"),
        (b"a: !!int x\n", 'recipe.yaml: a: x is no whole number; quote it: "x"'),
        (b"a: !!float x\n", 'recipe.yaml: a: x is no number; quote it: "x"'),
        (b"a: 2024-01-31\n", 'recipe.yaml: a: 2024-01-31 is a date to YAML; quote it: "2024-01-31"'),
        (b"a: 12:30\n", 'recipe.yaml: a: 12:30 is a number in base 60 to YAML; quote it: "12:30"'),
        (b"a: 1:30.5\n", 'recipe.yaml: a: 1:30.5 is a number in base 60 to YAML; quote it: "1:30.5"'),
        (
            b"a: 012\n",
            'recipe.yaml: a: 012 is an octal number to YAML; quote it: "012", or write it without leading zeros',
        ),
        (
            b"a: .nan\n",
            'recipe.yaml: a: .nan is no number that JSON can say; write a finite number, or quote it: ".nan"',
        ),
        (
            b"a: -.inf\n",
            'recipe.yaml: a: -.inf is no number that JSON can say; write a finite number, or quote it: "-.inf"',
        ),
        (
            b"a: 9223372036854775808\n",
            'recipe.yaml: a: 9223372036854775808 is beyond 64 bits; quote it: "9223372036854775808"',
        ),
        (b"a: " + b"9" * 5000 + b"\n", f'recipe.yaml: a: {"9" * 59}… is beyond 64 bits; quote it: "{"9" * 59}…"'),
        (b'a: ["\\ud800"]\n', "recipe.yaml: a[0]: half a surrogate pair, which is no text; write the character itself"),
    ],
)
def test_load_recipe_unusable_yaml_says_where_and_what(tmp_path: Path, data: bytes, expected: str) -> None:
    """What is no YAML, or YAML that would silently mean something else, is refused in one line."""
    assert expected == _error(_write(tmp_path, data))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: x\n", "schema: missing; add 'schema: cachectl/recipe/v1'"),
        (
            "schema: cachectl/recipe/v2\nmodell: x\n",
            "schema: 'cachectl/recipe/v2' is newer than this program, which reads 'cachectl/recipe/v1'; upgrade cachectl",
        ),
        (
            "schema: recipe/v1\n",
            "schema: 'recipe/v1' is no schema this program reads; write 'schema: cachectl/recipe/v1'",
        ),
        ("schema: 1\n", "schema: 1 is no schema this program reads; write 'schema: cachectl/recipe/v1'"),
        ("schema:\n", "schema: None is no schema this program reads; write 'schema: cachectl/recipe/v1'"),
    ],
)
def test_load_recipe_other_schema_comes_before_all_else(tmp_path: Path, text: str, expected: str) -> None:
    """A recipe for another program is told so, whatever its fields are."""
    assert f"recipe.yaml: {expected}" == _error(_write(tmp_path, text))


def test_load_recipe_framework_config_given_as_recipe_says_what_to_write(tmp_path: Path) -> None:
    """A cann-recipes config is what its users call a recipe; the message says how the two go together."""
    path = _write(tmp_path, "model_name: deepseek\nscheduler_config: {}\n")

    assert (
        "recipe.yaml: schema: missing, and scheduler_config is a field of a cann-recipes config; "
        f"write a recipe that names it: framework: {{kind: cann-recipes, config: {path}}}"
    ) == _error(path)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("method:", "methd:", "functions[0].methd: unknown field; did you mean 'method'?"),
        ("functions:", "function:", "function: unknown field; did you mean 'functions'?"),
        ("name: b4", "nam: b4", "functions[0].cases[0].nam: unknown field; did you mean 'name'?"),
        ("{factory", "{revison: x, factory", "model.revison: unknown field; did you mean 'revision'?"),
        ("functions:", "compile: {optoins: {}}\nfunctions:", "compile.optoins: unknown field; did you mean 'options'?"),
        ("functions:", "topology: {tp: 1}\nfunctions:", "topology.tp: unknown field; known here: world_size, tensor_parallel, pipeline_parallel, expert_parallel, data_parallel, context_parallel"),
        ("functions:", "topology: {worldsize: 1}\nfunctions:", "topology.worldsize: unknown field; did you mean 'world_size'?"),
        ("functions:", "gates: {rtoll: 1}\nfunctions:", "gates.rtoll: unknown field; did you mean 'rtol'?"),
        ("functions:", "options: {}\nfunctions:", "options: unknown field; did you mean 'compile.options'?"),
        ("functions:", "world_size: 2\nfunctions:", "world_size: unknown field; did you mean 'topology.world_size'?"),
        ("functions:", "schema_version: x\nfunctions:", "schema_version: unknown field; did you mean 'schema'?"),
        ("{factory", "{name: x, factory", "model.name: unknown field; did you mean 'name'?"),
        ("functions:", "zzz: x\nfunctions:", "zzz: unknown field; known here: schema, name, device, model, framework, command, compile, functions, topology, environment, gates"),
    ],
)  # fmt: skip
def test_load_recipe_unknown_field_names_the_nearest(tmp_path: Path, old: str, new: str, expected: str) -> None:
    """A typo at any level is an error that says which known field comes nearest."""
    assert old in MINIMAL
    assert f"recipe.yaml: {expected}" == _error(_write(tmp_path, MINIMAL.replace(old, new, 1)))


def test_load_recipe_unknown_framework_field_names_the_nearest(tmp_path: Path) -> None:
    """The framework's section is checked as the others are."""
    path = _write(tmp_path, FRAMEWORK.replace("config:", "confg:"))

    assert "recipe.yaml: framework.confg: unknown field; did you mean 'config'?" == _error(path)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("name: tiny-decoder\n", "", "name: missing; add 'name: tiny-decoder'"),
        ('{factory: "tiny_decoder.model:build"}', "{}", "model.factory: missing; add 'factory: package.module:build'"),
        ("method: main_decode\n    cases:", "cases:", "functions[0].method: missing; add 'method: main_decode'"),
        ("name: b4, ", "", "functions[0].cases[0].name: missing; add 'name: b4'"),
        (', inputs: "tiny_decoder.inputs:decode"', "", "functions[0].cases[0].inputs: missing; add 'inputs: package.module:function'"),
        ('\n    cases:\n      - {name: b4, inputs: "tiny_decoder.inputs:decode"}', "", "functions[0].cases: missing; add 'cases: [{name: b4, inputs: package.module:function}]'"),
    ],
)  # fmt: skip
def test_load_recipe_missing_field_says_what_to_add(tmp_path: Path, old: str, new: str, expected: str) -> None:
    """A missing field is named with an example of it."""
    assert old in MINIMAL
    assert f"recipe.yaml: {expected}" == _error(_write(tmp_path, MINIMAL.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("name: 950", 'name: 950 is a whole number to YAML, wanted text; quote it: "950"'),
        ("name: 9.5", 'name: 9.5 is a number with a point to YAML, wanted text; quote it: "9.5"'),
        ("name: on", 'name: on is a boolean to YAML, wanted text; quote it: "on"'),
        ("name: No", 'name: No is a boolean to YAML, wanted text; quote it: "No"'),
        ("name:", "name: is empty, wanted text; fill it in or remove the line"),
        ("name: [a]", "name: is a list, wanted text; write text"),
        ("name: Tiny Decoder", "name: 'Tiny Decoder' is no name; use a-z, 0-9, '.' and '-', and start with a letter or digit"),
        ("name: -tiny", "name: '-tiny' is no name; use a-z, 0-9, '.' and '-', and start with a letter or digit"),
        ("name: ../x", "name: '../x' is no name; use a-z, 0-9, '.' and '-', and start with a letter or digit"),
        ('name: "tiny\\n"', "name: 'tiny\\n' is no name; use a-z, 0-9, '.' and '-', and start with a letter or digit"),
        (f"name: {'a' * 129}", "name: a name of 129 characters; shorten it to 128"),
        ("device: cpu", "device: 'cpu' is not known; write npu or simulated"),
        ("device: on", "device: True is not known; write npu or simulated"),
        ("model: tiny", "model: 'tiny' is text, wanted a mapping; write name: value pairs"),
        ("model: [a]", "model: is a list, wanted a mapping; write name: value pairs"),
        ("model:", "model: missing; add model and functions, or framework and command"),
        ("model: {factory: build}", "model.factory: 'build' is no import path; write it as package.module:function"),
        ('model: {factory: "a.b:"}', "model.factory: 'a.b:' is no import path; write it as package.module:function"),
        ('model: {factory: "a/b.py:f"}', "model.factory: 'a/b.py:f' is no import path; write it as package.module:function"),
        ('model: {factory: "a:class"}', "model.factory: 'a:class' is no import path; write it as package.module:function"),
        ("model: {factory: 'a:b', path: .}", "model.path: '.' is text, wanted a list; write [.]"),
        ("model: {factory: 'a:b', path: [1]}", 'model.path[0]: 1 is a whole number to YAML, wanted text; quote it: "1"'),
        ("model: {factory: 'a:b', path: ['']}", "model.path[0]: '' is no usable text; write it without NUL characters, and not empty"),
        ("model: {factory: 'a:b', revision: 12}", 'model.revision: 12 is a whole number to YAML, wanted text; quote it: "12"'),
        ("model: {factory: 'a:b', config: [1]}", "model.config: is a list, wanted a mapping; write name: value pairs"),
        ("model: {factory: 'a:b', config:}", "model.config: is empty, wanted a mapping; fill it in or remove the line"),
        ("model: {factory: 'a:b', config: {eps: 1e-5}}", "model.config.eps: 1e-5 is text to YAML 1.1 and a number to 1.2; write 1.0e-5 or quote it"),
        ("functions: []", "functions: missing or empty; add at least one: {method: main_decode, cases: [...]}"),
        ("functions: {method: x}", "functions: is a mapping, wanted a list; write [...]"),
        ("functions: [main_decode]", "functions[0]: 'main_decode' is text, wanted a mapping; write name: value pairs"),
        ("functions: [{method: main-decode, cases: [{name: a, inputs: 'a:b'}]}]", "functions[0].method: 'main-decode' is no method name; write the name of a method of the model, such as main_decode"),
        ("functions: [{method: draft..decode, cases: [{name: a, inputs: 'a:b'}]}]", "functions[0].method: 'draft..decode' is no method name; write the name of a method of the model, such as main_decode"),
        ("functions: [{method: f, cases: []}]", "functions[0].cases: is empty; write at least one case: {name: b4, inputs: package.module:function}"),
        ("functions: [{method: f, cases: [{name: a/b, inputs: 'a:b'}]}]", "functions[0].cases[0].name: 'a/b' is no case name; use letters, digits, '.', '_' and '-', and start with a letter or digit"),
        (f"functions: [{{method: f, cases: [{{name: {'a' * 129}, inputs: 'a:b'}}]}}]", "functions[0].cases[0].name: a name of 129 characters; shorten it to 128"),
        ("functions: [{method: f, cases: [{name: 4, inputs: 'a:b'}]}]", 'functions[0].cases[0].name: 4 is a whole number to YAML, wanted text; quote it: "4"'),
        ("functions: [{method: f, cases: [{name: a, inputs: decode}]}]", "functions[0].cases[0].inputs: 'decode' is no import path; write it as package.module:function"),
        ("functions: [{method: f, cases: [{name: a, inputs: 'a:b', args: 4}]}]", "functions[0].cases[0].args: 4 is a whole number to YAML, wanted a mapping; write name: value pairs"),
        ("functions: [{method: f, cases: [{name: a, inputs: 'a:b', args: {at: 2024-01-31}}]}]", 'functions[0].cases[0].args.at: 2024-01-31 is a date to YAML; quote it: "2024-01-31"'),
        ("functions: [{method: f, cases: [{name: a, inputs: 'a:b'}, {name: a, inputs: 'a:c'}]}]", "functions[0].cases[1].name: 'a' stands in cases[0] too; give each case a name of its own"),
        ("functions: [{method: f, cases: [{name: a, inputs: 'a:b'}]}, {method: f, cases: [{name: b, inputs: 'a:b'}]}]", "functions[1].method: 'f' stands in functions[0] too; put its cases under one of them"),
        ("compile: {mode: ge}", "compile.mode: 'ge' is not known; write npugraph_ex or ge_graph"),
        ("compile: {dynamic: 1}", "compile.dynamic: 1 is a whole number to YAML, wanted true or false; write true or false"),
        ('compile: {dynamic: "no"}', "compile.dynamic: 'no' is text, wanted true or false; write true or false"),
        ("compile: {setup: patch}", "compile.setup: 'patch' is no import path; write it as package.module:function"),
        ("compile: {options: {level: .inf}}", 'compile.options.level: .inf is no number that JSON can say; write a finite number, or quote it: ".inf"'),
        ("compile: {options: {sizes: {4: x}}}", 'compile.options.sizes: the key 4 is a whole number to YAML, keys are text; quote it: "4"'),
        ("compile: {options: {passes: !!set {x}}}", "compile.options.passes: the tag !!set is not followed; remove it, or quote what is text"),
        ("topology: {world_size: 0}", "topology.world_size: 0 is less than 1; write 1 or more"),
        ("topology: {tensor_parallel: -2}", "topology.tensor_parallel: -2 is less than 1; write 1 or more"),
        ("topology: {world_size: 2.0}", "topology.world_size: 2.0 is a number with a point to YAML, wanted a whole number; write it plain, such as 4"),
        ('topology: {world_size: "2"}', "topology.world_size: '2' is text, wanted a whole number; write it plain, such as 4"),
        ("topology: {world_size: yes}", "topology.world_size: yes is a boolean to YAML, wanted a whole number; write it plain, such as 4"),
        ("topology:", "topology: is empty, wanted a mapping; fill it in or remove the line"),
        ("environment: {A: 1}", 'environment.A: 1 is a whole number to YAML, wanted text; quote it: "1"'),
        ("environment: {A: on}", 'environment.A: on is a boolean to YAML, wanted text; quote it: "on"'),
        ("environment: {A:}", "environment.A: is empty, wanted text; fill it in or remove the line"),
        ("environment: {API_KEY: 1}", "environment.API_KEY: the value is a whole number to YAML, wanted text; quote it"),
        ("environment: {A=B: x}", "environment.A=B: 'A=B' is no name of an environment variable; write NAME: \"value\""),
        ('environment: {A: "x\\0"}', "environment.A: the value holds a NUL character; remove it, no process can have it"),
        ("environment: [A=1]", "environment: is a list, wanted a mapping; write name: value pairs"),
        ("gates: {rtol: -0.5}", "gates.rtol: -0.5 is less than 0; write 0 or more"),
        ("gates: {steps: 2}", "gates.steps: 2 is less than 3; write 3 or more"),
        ("gates: {rtol: -1e-3}", "gates.rtol: -1e-3 is less than 0; write 0 or more"),
        ("gates: {rtol: 1e999}", "gates.rtol: '1e999' is text, wanted a number; write it plain, such as 1.0e-3"),
        ('gates: {atol: "0.1"}', "gates.atol: '0.1' is text, wanted a number; write it plain, such as 1.0e-3"),
        ("gates: {atol: no}", "gates.atol: no is a boolean to YAML, wanted a number; write it plain, such as 1.0e-3"),
        ("command: [python]", "command: stands beside model; keep model and functions, or framework and command"),
        ("framework: {kind: cann-recipes, config: a.yaml}", "framework: stands beside model; keep model and functions, or framework and command"),
    ],
)  # fmt: skip
def test_load_recipe_wrong_value_says_what_and_the_way_out(tmp_path: Path, lines: str, expected: str) -> None:
    """Each value that can't be is named with its field, the value as it was written, and what to write."""
    section = lines.partition(":")[0]
    document = {name: text for name, text in _sections(MINIMAL).items() if name != section}
    text = "".join(document.values()) + lines + "\n"

    assert f"recipe.yaml: {expected}" == _error(_write(tmp_path, text))


def _sections(text: str) -> dict[str, str]:
    sections: dict[str, str] = {}
    name = ""
    for line in text.splitlines(keepends=True):
        if not line.startswith(" "):
            name = line.partition(":")[0]
            sections[name] = ""
        sections[name] += line
    return sections


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("command: [python, infer.py]\n", "", "command: missing or empty; add command: [python, infer.py], the program to run"),
        ("[python, infer.py]", "[]", "command: missing or empty; add command: [python, infer.py], the program to run"),
        ("[python, infer.py]", "python infer.py", "command: 'python infer.py' is text, wanted a list; write [python infer.py]"),
        ("infer.py]", "--port, 8080]", 'command[2]: 8080 is a whole number to YAML, wanted text; quote it: "8080"'),
        ("framework: {kind: cann-recipes, config: config/deepseek_r1.yaml}\n", "", "framework: missing; add framework: {kind: cann-recipes, config: path.yaml}"),
        ("kind: cann-recipes, ", "", "framework.kind: missing; add 'kind: cann-recipes'"),
        ("cann-recipes", "vllm", "framework.kind: 'vllm' is not known; write cann-recipes"),
        (", config: config/deepseek_r1.yaml", "", "framework.config: missing; add 'config: path.yaml'"),
        ("name: deepseek-r1\n", "name: deepseek-r1\nfunctions: []\n", "framework: stands beside functions; keep model and functions, or framework and command"),
    ],
)  # fmt: skip
def test_load_recipe_wrong_framework_says_what_and_the_way_out(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    """A framework's recipe needs its two fields, and none of the other form."""
    assert old in FRAMEWORK
    assert f"recipe.yaml: {expected}" == _error(_write(tmp_path, FRAMEWORK.replace(old, new, 1)))


def test_load_recipe_neither_form_says_what_to_add(tmp_path: Path) -> None:
    """A recipe with a name only lacks what it is for."""
    path = _write(tmp_path, "schema: cachectl/recipe/v1\nname: tiny\n")

    assert "recipe.yaml: model: missing; add model and functions, or framework and command" == _error(path)


def _places(value: Any, place: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(deeper for step, member in members for deeper in _places(member, (*place, step)))]


@settings(max_examples=300)
@given(
    place=st.sampled_from(_places(DEFAULTS)[1:]),
    value=JSON_SCALARS | st.lists(JSON_SCALARS, max_size=2) | JSON_OBJECTS | st.floats(),
    name=st.none() | TEXTS,
)
def test_load_recipe_anything_anywhere_loads_or_is_one_config_error(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[str | int, ...], value: Any, name: str | None
) -> None:
    """Whatever stands at whatever place, under its name or another, the answer is a recipe or one line."""
    document = copy.deepcopy(DEFAULTS)
    target: Any = document
    for step in place[:-1]:
        target = target[step]
    if name is not None and isinstance(target, dict):
        del target[place[-1]]
        target[name] = value
    else:
        target[place[-1]] = value
    path = _write(tmp_path_factory.mktemp("recipe"), yaml.safe_dump(document))

    message = "a recipe"
    try:
        loaded = load_recipe(path).recipe.to_document()
    except ConfigError as error:
        loaded = DEFAULTS
        message = str(error)

    assert 1 == len(message.splitlines())
    assert loaded == Recipe.model_validate(loaded).to_document()


@settings(max_examples=300)
@given(st.binary(max_size=40) | st.text("ab:-[]{},&*!|>'\"#%@?<0123 \n\t", max_size=40).map(str.encode))
def test_load_recipe_any_bytes_are_one_config_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """No bytes make a traceback, and only a recipe is one."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(_write(tmp_path_factory.mktemp("recipe"), data))

    assert 1 == len(str(caught.value).splitlines())


def test_recipe_value_json_cannot_say_is_refused() -> None:
    """A recipe made by a program is held to the same rule as one read from a file."""
    document = DEFAULTS | {"compile": {"options": {"pass": object()}}}

    with pytest.raises(ValueError, match=r"\$\.pass: a value of type object has no canonical form"):
        Recipe.model_validate(document)


def test_load_recipe_method_of_a_module_inside_is_a_path(tmp_path: Path) -> None:
    """Main and draft model of one model are told apart by it."""
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL.replace("method: main_decode", "method: draft.main_decode"))

    assert "draft.main_decode" == load_recipe(path).recipe.functions[0].method
