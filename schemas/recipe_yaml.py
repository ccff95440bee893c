"""A recipe file's YAML as plain values, each with the node it was written as.

YAML is read as YAML 1.1 (PyYAML), but what 1.1 silently turns into something else (012, 12:30, dates, on for a name) is
refused where it would change what the recipe means. Tags are not followed.
"""

from __future__ import annotations

import math
import re
from typing import Any, NoReturn

import yaml

from cachectl.schemas.recipe import RECIPE_SCHEMA
from cachectl.schemas.recipe_words import Place, fault, is_secret, kind_of, place_text, shorten

__all__ = ["RecipeYaml"]

_MAX_DEPTH = 32
_MAX_VALUES = 100_000
_MAX_DIGITS = 128


class _TooDeepError(yaml.MarkedYAMLError):
    pass


class _BoundedLoader(yaml.SafeLoader):
    """Composes nodes no deeper than a recipe is; PyYAML recurses once per level and would end in a RecursionError."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _TooDeepError(problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class RecipeYaml:
    """One recipe file's YAML: its values, and the node behind each, so that a message can quote what was written."""

    def __init__(self, name: str, raw: bytes, *, start: str = f"start it with 'schema: {RECIPE_SCHEMA}'") -> None:
        self.name = name
        self._start = start
        self.nodes: dict[Place, yaml.Node] = {}
        self._raw = raw
        self._open: set[int] = set()
        self._values = 0

    def document(self) -> dict[str, Any]:
        """Return the file's mapping; raises ConfigError for all that is wrong with it as YAML."""
        node = self._compose()
        if node is None:
            raise fault(f"{self.name}: is empty", self._start)
        value = self._value(node, ())
        if not isinstance(value, dict):
            raise fault(f"{self.name}: holds {kind_of(value)}, wanted a mapping", self._start)
        return value

    def fail(self, place: Place, what: str, hint: str) -> NoReturn:
        """Raise the ConfigError for a value."""
        where = place_text(place)
        raise fault(f"{self.name}: {where}: {what}" if where else f"{self.name}: {what}", hint)

    def written(self, place: Place) -> str | None:
        """Return a scalar as the file has it; None for lists, mappings and what is not in the file."""
        node = self.nodes.get(place)
        if not isinstance(node, yaml.ScalarNode):
            return None
        return "the value" if is_secret(place) else shorten(node.value)

    def line(self, place: Place) -> int:
        """Return the line of the value, or of the nearest thing around it."""
        while place and place not in self.nodes:
            place = place[:-1]
        node = self.nodes.get(place)
        return 0 if node is None else int(node.start_mark.line) + 1

    def _compose(self) -> yaml.Node | None:
        try:
            text = self._raw.decode("utf-8")
        except UnicodeDecodeError as error:
            byte = self._raw[error.start]
            raise fault(
                f"{self.name}: not UTF-8 (byte 0x{byte:02x} at offset {error.start})", "save it as UTF-8"
            ) from error
        try:
            loader = _BoundedLoader(text)
            try:
                return loader.get_single_node()
            finally:
                loader.dispose()
        except _TooDeepError as error:
            raise fault(
                f"{self.name}: line {_line_of(error)}: deeper than {_MAX_DEPTH} levels", "flatten it"
            ) from error
        except yaml.MarkedYAMLError as error:
            problem = ", ".join(part for part in (error.context, error.problem) if part)
            hint = "indent with spaces, not tabs" if "'\\t'" in problem else "check the indentation and quotes there"
            raise fault(f"{self.name}: line {_line_of(error)}: not YAML: {problem}", hint) from error
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise fault(
                f"{self.name}: line {line}: not YAML: the character U+{ord(text[error.position]):04X}", "remove it"
            ) from error

    def _value(self, node: yaml.Node, place: Place) -> Any:
        self.nodes.setdefault(place, node)
        self._values += 1
        if self._values > _MAX_VALUES:
            self.fail((), f"its aliases make more than {_MAX_VALUES} values", "write out what is meant")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, place)
        if node.tag not in ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"):
            self._refuse_tag(node, place)
        if id(node) in self._open:
            self.fail(place, "an alias that holds itself", "write out what is meant")
        if len(place) >= _MAX_DEPTH:
            self.fail((), f"its aliases nest deeper than {_MAX_DEPTH} levels", "write out what is meant")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, place)
            return [self._value(member, (*place, index)) for index, member in enumerate(node.value)]
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        document: dict[str, Any] = {}
        lines: dict[str, int] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            key = self._key(key_node, place)
            if key in lines:
                where = f"line {line}" if line == lines[key] else f"lines {lines[key]} and {line}"
                self.fail((*place, key), f"stands twice ({where})", "keep one")
            lines[key] = line
            document[key] = self._value(value_node, (*place, key))
        for other in merged:
            # What the mapping says itself wins over what it merges in, and the first merged over the next.
            values = self._value(other, place)
            if not isinstance(values, dict):
                self.fail(place, f"'<<' merges {kind_of(values)}, wanted a mapping", "name the anchor of a mapping")
            for key, value in values.items():
                document.setdefault(key, value)
        return document

    def _key(self, node: yaml.Node, place: Place) -> str:
        if not isinstance(node, yaml.ScalarNode):
            self.fail(place, f"a key on line {node.start_mark.line + 1} is a list or mapping", "write keys as text")
        value = self._scalar(node, (*place, shorten(node.value)))
        if not isinstance(value, str):
            self.fail(
                place,
                f"the key {node.value or 'null'} is {kind_of(value)} to YAML, keys are text",
                f'quote it: "{node.value}"',
            )
        return value

    def _scalar(self, node: yaml.ScalarNode, place: Place) -> Any:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        text = "the value" if is_secret(place) else shorten(node.value)
        quoted = f'quote it: "{text}"' if text != "the value" else "quote it"
        if kind == "timestamp":
            self.fail(place, f"{text} is a date to YAML", quoted)
        if kind in ("str", "value", "merge"):
            if any("\ud800" <= character <= "\udfff" for character in node.value):
                self.fail(place, "half a surrogate pair, which is no text", "write the character itself")
            return node.value
        if kind == "null":
            return None
        if kind == "bool":
            answer = yaml.SafeLoader.bool_values.get(node.value.lower())
            if answer is None:
                self.fail(place, f"{text} is no boolean", "write true or false")
            return answer
        if kind == "int":
            return self._int(node.value.replace("_", ""), place, text, quoted)
        if kind != "float":
            self._refuse_tag(node, place)
        return self._float(node.value.replace("_", ""), place, text, quoted)

    def _refuse_tag(self, node: yaml.Node, place: Place) -> NoReturn:
        # A secret that starts with an exclamation mark is a tag, too.
        tag = "a tag" if is_secret(place) else f"the tag {_tag_text(node.tag)}"
        self.fail(place, f"{tag} is not followed", "remove it, or quote what is text")

    def _int(self, digits: str, place: Place, text: str, quoted: str) -> int:
        if ":" in digits:
            self.fail(place, f"{text} is a number in base 60 to YAML", quoted)
        if re.fullmatch(r"[-+]?0[0-9]+", digits):
            self.fail(place, f"{text} is an octal number to YAML", f"{quoted}, or write it without leading zeros")
        # Python itself refuses to convert more than 4300 digits, and nothing in a recipe needs more than 64 bits.
        try:
            number = int(digits, 0) if len(digits) <= _MAX_DIGITS else 1 << 64
        except ValueError:
            self.fail(place, f"{text} is no whole number", quoted)
        if not -(1 << 63) <= number < 1 << 63:
            self.fail(place, f"{text} is beyond 64 bits", quoted)
        return number

    def _float(self, digits: str, place: Place, text: str, quoted: str) -> float:
        if ":" in digits:
            self.fail(place, f"{text} is a number in base 60 to YAML", quoted)
        try:
            number = float(digits.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            self.fail(place, f"{text} is no number", quoted)
        if not math.isfinite(number):
            self.fail(place, f"{text} is no number that JSON can say", f"write a finite number, or {quoted}")
        return number


def _tag_text(tag: str) -> str:
    return "!!" + tag.removeprefix("tag:yaml.org,2002:") if tag.startswith("tag:yaml.org,2002:") else tag


def _line_of(error: yaml.MarkedYAMLError) -> int:
    mark = error.problem_mark or error.context_mark
    return 0 if mark is None else int(mark.line) + 1
