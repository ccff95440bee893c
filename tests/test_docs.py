"""The documents say what is there: files, commands, fields, reasons, operators, and examples that can be run."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import click
import pytest

from cachectl import config
from cachectl.boot.claims import UNUSED_KEPT, USED_KEPT
from cachectl.boot.hook import parse_arguments
from cachectl.cli.execute import HELP as EXEC_HELP
from cachectl.cli.hook import HELP as HOOK_HELP
from cachectl.cli.verbs import RESERVED, VERBS
from cachectl.errors import ConfigError
from cachectl.execution import parse_options
from cachectl.identity.environment import FAMILIES, IGNORED, IGNORED_PREFIXES, PLACEMENT, PLACEMENT_PREFIXES
from cachectl.identity.options import DYNAMO_NOISE, HANDLES
from cachectl.schemas.boot import KINDS, PARTS
from cachectl.schemas.fields import Document
from cachectl.schemas.keying import KEY_PARTS, KEY_VERSION
from cachectl.schemas.recipe import Recipe
from cachectl.schemas.recipe_reading import load_recipe
from cachectl.schemas.report import FindingKind, Outcome
from cachectl.store.records import SETS_KEPT

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
# Where the map of files has to be complete. cachectl's symlinked folders are named by their own paths.
MAPPED = ("cachectl", "store", "schemas", "migrations", "examples", "bench", "deploy")
OPERATORS = ROOT / "cachectl" / "runtimes" / "simulated" / "process"


def text_of(name: str) -> str:
    """Return a document's text."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language, without the indentation of a list around them."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return ["".join(line.removeprefix(indent) for line in body.splitlines(keepends=True)) for indent, body in found]


def section(text: str, title: str) -> str:
    """Return what stands below a heading, up to the next of its level."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no section {title!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """Return the cells of every table row, head and rule left out, escaped bars as bars."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("|---"):
            found.pop()
        elif line.startswith("| "):
            found.append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


def first_names(text: str) -> list[str]:
    """Return the code words in the first cell of every table row."""
    return [name for cells in rows(text) for name in re.findall(r"`([^`]+)`", cells[0])]


def command_of(verb: str) -> click.Command:
    """Return a verb's click command."""
    module, _, attribute = str(VERBS[verb].target).partition(":")
    found: click.Command = getattr(import_module(module), attribute)
    return found


def sources() -> Iterator[str]:
    """Yield every Python and C file that the map has to name."""
    for top in MAPPED:
        for folder, folders, files in os.walk(ROOT / top):
            folders[:] = [name for name in folders if name != "__pycache__"]
            yield from (
                (Path(folder) / name).relative_to(ROOT).as_posix() for name in files if name.endswith((".py", ".c"))
            )


def test_architecture_names_each_file_once_and_none_that_is_not_there() -> None:
    """The map of files is complete and true."""
    named = re.findall(r"^\| `([^`]+\.(?:py|c))` \|", text_of("ARCHITECTURE.md"), re.MULTILINE)

    assert sorted(sources()) == sorted(named)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    """Every relative link leads to a file of the repository, and an anchor to a heading in it."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (document.parent / path).resolve() if path else document
        if not file.is_file() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            broken.append(target)

    assert [] == broken


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as forges make them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_documents_that_messages_name_are_there() -> None:
    """A hint that sends somebody to a document doesn't send them nowhere."""
    named = {
        name
        for file in sources()
        for name in re.findall(r"docs/[a-z-]+\.md", (ROOT / file).read_text(encoding="utf-8"))
    }

    assert set() == {name for name in named if not (ROOT / name).is_file()}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_examples_compile(document: Path) -> None:
    """Every Python example is Python."""
    assert all(ast.parse(block).body for block in blocks(document.read_text(encoding="utf-8"), "python"))


# Commands.


def examples() -> list[tuple[str, str]]:
    """Return every `$ …cachectl …` line of the documents, with the document's name."""
    found = []
    for document in DOCUMENTS:
        for block in blocks(document.read_text(encoding="utf-8"), "console"):
            found += [(document.name, line) for line in block.splitlines() if re.search(r"\bcachectl [a-z]", line)]
    return [(name, line) for name, line in found if line.startswith("$ ")]


@pytest.mark.parametrize(("document", "line"), examples())
def test_command_examples_parse(document: str, line: str) -> None:
    """Every command in a document is one that this version takes."""
    found = re.search(r'(?:^\$ |\$\()(cachectl [^)#"]*)', line)
    assert found is not None, f"{document}: {line}"
    _, verb, *arguments = shlex.split(found[1])

    if verb == "hook":
        assert () == parse_arguments(arguments).unknown
        return
    if verb == "exec":
        assert parse_options(arguments).command
        return
    command = command_of(verb)
    if isinstance(command, click.Group):
        verb, *arguments = arguments
        command = command.commands[verb]
    command.make_context(verb, arguments).close()


def test_commands_document_has_a_section_for_each_verb() -> None:
    """No command is undocumented, and none is documented that isn't there."""
    assert sorted(VERBS) == sorted(re.findall(r"^## `([a-z]+)`$", text_of("docs/commands.md"), re.MULTILINE))


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_commands_section_has_the_options_and_an_example(verb: str) -> None:
    """A verb's section lists its options, all of them and no other, and shows how it is called."""
    text = section(text_of("docs/commands.md"), f"`{verb}`")
    options = {name.partition(" ")[0] for name in first_names(text) if name.startswith("-")}

    assert re.search(rf"^\$ (eval \"\$\()?cachectl {verb}\b", text, re.MULTILINE)
    assert own_options(verb) == options


def own_options(verb: str) -> set[str]:
    """Return a verb's visible options without those that every command takes."""
    if verb in ("hook", "exec"):
        text = HOOK_HELP if verb == "hook" else EXEC_HELP
        return set(re.findall(r"^  (?:-h, )?(-{1,2}[a-z][a-z-]*)", text, re.MULTILINE)) - {"--help"}
    shared = {"--store", "--json", "--verbose", "-v", "--quiet", "-q"}
    return {
        name
        for parameter in command_of(verb).params
        if isinstance(parameter, click.Option) and not parameter.hidden
        for name in parameter.opts
    } - shared


def test_commands_document_lists_the_reserved_names() -> None:
    """The names that come later are the ones the program knows as reserved."""
    found = re.findall(r"`([a-z]+)`", section(text_of("docs/commands.md"), "Reserved names"))

    assert sorted(RESERVED) == sorted(found)


def test_commands_document_lists_the_environment_variables() -> None:
    """Every setting's variable is documented."""
    names = first_names(text_of("docs/commands.md"))

    assert set() == {spec.env for spec in config.SETTINGS.values()} - set(names)


def test_commands_document_lists_the_findings_of_verify() -> None:
    """Every kind of finding is explained."""
    names = first_names(section(text_of("docs/commands.md"), "`verify`"))

    assert set(get_args(FindingKind)) <= set(names)


# The recipe.


def recipe_blocks() -> list[str]:
    """Return the whole recipes in the documents."""
    found = [block for document in DOCUMENTS for block in blocks(document.read_text(encoding="utf-8"), "yaml")]
    return [block for block in found if block.startswith("schema:")]


@pytest.mark.parametrize("number", range(len(recipe_blocks())))
def test_recipe_examples_load(tmp_path: Path, number: int) -> None:
    """Every whole recipe in a document is one."""
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_blocks()[number], encoding="utf-8")
    for named in re.findall(r"config: ([\w/.]+\.yaml)", recipe_blocks()[number]):
        (tmp_path / named).parent.mkdir(exist_ok=True)
        (tmp_path / named).write_bytes((ROOT / "tests/fixtures/cann_recipes/a_decode.yaml").read_bytes())

    assert load_recipe(path).recipe.name in recipe_blocks()[number]


def test_recipe_document_spells_out_the_defaults(tmp_path: Path) -> None:
    """The smallest recipe and the one with every default written out mean the same."""
    digests = []
    for number, block in enumerate(blocks(text_of("docs/recipe.md"), "yaml")[:2]):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block, encoding="utf-8")
        digests.append(load_recipe(path).digest)

    assert digests[0] == digests[1]


def fields(model: type[Document], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each field of a recipe by its place, with its default as the document writes it."""
    for name, field in model.model_fields.items():
        place = f"{prefix}{field.alias or name}"
        inner = next((kind for kind in documents_in(field.annotation)), None)
        if inner is not None:
            many = "tuple" in str(field.annotation)
            yield from fields(inner, f"{place}[]." if many else f"{place}.")
        else:
            default = field.get_default(call_default_factory=True)
            yield place, "required" if field.is_required() else written(default)


def documents_in(annotation: Any) -> Iterator[type[Document]]:
    """Yield the section types inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, Document):
        yield annotation
    for part in get_args(annotation):
        yield from documents_in(part)


def written(value: Any) -> str:
    """Return a default as YAML writes it in one line."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(str, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def test_recipe_document_lists_every_field_with_its_default() -> None:
    """The tables of fields are the recipe's own."""
    tables = [cells for cells in rows(text_of("docs/recipe.md")) if len(cells) == 3 and cells[0].startswith("`")]
    found = {
        cells[0].strip("`"): cells[1].strip("`") for cells in tables if " " not in cells[0] and ":" not in cells[0]
    }

    assert dict(fields(Recipe)) == found


def error_rows() -> list[tuple[str, str, str]]:
    """Return what to replace, what to write, and the message, of each row of the recipe document's tables of errors."""
    text = section(text_of("docs/recipe.md"), "Errors").partition("### ")[0]
    return [(cells[0].strip("`"), cells[1].strip("`"), cells[2]) for cells in rows(text)]


@pytest.mark.parametrize(("old", "new", "message"), error_rows())
def test_recipe_errors_are_as_documented(tmp_path: Path, old: str, new: str, message: str) -> None:
    """Each mistake in the table gives the message beside it."""
    text = blocks(text_of("docs/recipe.md"), "yaml")[0]
    path = tmp_path / "recipe.yaml"
    assert old == "(a line more)" or old in text
    path.write_text(f"{new}\n{text}" if old == "(a line more)" else text.replace(old, new, 1), encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        load_recipe(path)

    assert f"{path}: {message}" == str(caught.value)


# Identity, reasons, the hook.


def test_identity_document_has_a_section_for_each_key_part() -> None:
    """Every key part is explained, in the key's order."""
    found = [
        title for title in re.findall(r"^## (\w+)$", text_of("docs/identity.md"), re.MULTILINE) if title in KEY_PARTS
    ]

    assert list(KEY_PARTS) == found
    assert f"`schemas/keying.py` is {KEY_VERSION}." in text_of("docs/identity.md")
    assert f"up to {SETS_KEPT} ready sets" in text_of("docs/identity.md")


def test_identity_document_lists_the_placement_variables() -> None:
    """What is left out of the environment is listed, each with its reason."""
    table = {cells[0].strip("`"): cells[1] for cells in rows(section(text_of("docs/identity.md"), "environment"))}
    prefixes = {f"{prefix}*": why for prefix, why in {**PLACEMENT_PREFIXES, **IGNORED_PREFIXES}.items()}

    assert {**PLACEMENT, **IGNORED, **prefixes} == table
    assert all(family.rstrip("_") in text_of("docs/identity.md") for family in FAMILIES)


def test_identity_document_lists_the_dynamo_fields_that_do_not_count() -> None:
    """So are Dynamo's fields."""
    table = {cells[0].strip("`"): cells[1] for cells in rows(section(text_of("docs/identity.md"), "options"))}

    assert DYNAMO_NOISE.items() <= table.items()
    assert [*HANDLES] == [name for name in HANDLES if f"`{name}`" in text_of("docs/identity.md")]


def test_troubleshooting_has_parts_kinds_and_outcomes() -> None:
    """Whatever a reason or an outcome says, there is something to read about it."""
    text = text_of("docs/troubleshooting.md")

    assert set(PARTS) == set(re.findall(r"^### (\w+)$", section(text, "Parts"), re.MULTILINE))
    assert set(KINDS) == set(first_names(section(text, "Kinds of reasons")))
    assert set(get_args(Outcome)) == set(first_names(section(text, "Outcomes")))


def test_hook_document_lists_the_options() -> None:
    """The hook's own document has the options of its help text."""
    found = {name.partition(" ")[0] for name in first_names(section(text_of("docs/hook.md"), "Options"))}

    assert own_options("hook") == found
    assert f"newest {USED_KEPT}" in text_of("docs/hook.md")
    assert f"newest {UNUSED_KEPT}" in text_of("docs/hook.md")


# The simulation.


def references() -> dict[str, str]:
    """Return name and coverage of every reference operator, read from the source without importing torch."""
    found = {}
    for path in sorted(OPERATORS.glob("operators_*.py")):
        tree = ast.parse(path.read_bytes())
        texts: dict[str, str] = {}
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                value = constant_text(statement.value, texts)
                if value is not None:
                    texts[statement.targets[0].id] = value
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "Reference":
                name, covers = constant_text(call.args[0], texts), constant_text(call.args[2], texts)
                assert name is not None
                assert covers is not None
                found[name] = covers
    return found


def constant_text(node: ast.expr, known: dict[str, str]) -> str | None:
    """Return the text that an expression of literals and earlier names is; None for any other."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = constant_text(node.left, known), constant_text(node.right, known)
        return None if left is None or right is None else left + right
    return None


def test_simulation_document_lists_the_reference_operators() -> None:
    """The table of operators is the simulation's own, with what of each is covered."""
    text = section(text_of("docs/simulation.md"), "Operators with a CPU reference")
    table = {cells[0].strip("`"): cells[1] for cells in rows(text)}

    assert references() == table
    assert f"{len(table)} `npu` operators" in text_of("CHANGELOG.md")
