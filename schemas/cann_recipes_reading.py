"""Reads a cann-recipes config: which schema family it is of, and its fields under one name and in one type each.

Owns what is taken for the same (synonyms, 0/1 and booleans, 950 and "950", an empty section), what is left out of the
key, and what a reader has to be told: fields that the framework drops without a word. Whether the sizes fit stands in
schemas/cann_recipes_checks.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from cachectl.schemas.cann_recipes_fields import (
    CUSTOM_PARAMS,
    DERIVED,
    FIELDS,
    KNOWN_CUSTOM_PARAMS,
    TOP,
    ConfigField,
    address_reason,
    field_named,
    fields_of,
    in_key,
)
from cachectl.schemas.keying import is_secret_name, without_credentials
from cachectl.schemas.recipe_words import Place, fault, kind_of, show
from cachectl.schemas.recipe_yaml import RecipeYaml

__all__ = ["FAMILIES", "Config", "LeftOut", "family_of", "read_config"]

# What each schema family is known by, in the order in which they are looked for.
FAMILIES: dict[str, tuple[str, ...]] = {
    "A": ("scheduler_config",),
    "B": ("exe_mode", "world_size", "model_config"),
    "C": ("entry_script", "model_args"),
    "D": ("exe", "tensor_parallel", "devices"),
}
_REFUSED = {
    "C": (
        "a config of entry_script and model_args: its script reads arguments, and never calls cache_compile",
        "run: cachectl record -- CMD, which writes a recipe if the script compiles anything",
    ),
    "D": (
        "a config of exe and devices: it starts a C++ program, which has no graphs of torch to cache",
        "run: cachectl record -- CMD for the Python program that compiles, if there is one",
    ),
}
_SECTIONS = {
    "A": ("model_config", "data_config", "parallel_config", "scheduler_config"),
    "B": ("model_config", "data_config", "parallel_config"),
}
_MODES = ("eager", "ge_graph", "npugraph_ex")
_PLATFORMS = ("A2", "A3", "950")
_SWITCHES = ("enable_", "use_", "with_", "is_", "force_", "skip_")
_SHORT = 8
_SHOWN = 12
_MOST_RANKS = 1 << 17
_START = "name a cann-recipes config, with model_config, parallel_config and scheduler_config"


@dataclass(frozen=True)
class LeftOut:
    """One field of the file that is not in the key, and why."""

    name: str
    why: str


@dataclass
class Config:
    """One config as it was read.

    `values` holds every known field of the family by its name, defaults filled in; `document` what is in the key, by
    section as in the file; `written` the places of those that the file itself has.
    """

    name: str
    family: str
    source: RecipeYaml
    values: dict[str, Any] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)
    written: dict[str, Place] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def custom_params(self) -> dict[str, Any]:
        """The model's own switches."""
        found: dict[str, Any] = self.values.get(CUSTOM_PARAMS) or {}
        return found

    def fail(self, name: str, what: str, hint: str) -> NoReturn:
        """Raise the ConfigError for a field, at its place in the file."""
        self.source.fail(self.written.get(name, (name,)), what, hint)


def family_of(document: Mapping[str, Any]) -> str | None:
    """Return the schema family of a config, None for one that is of none."""
    for family, fields in FAMILIES.items():
        if all(name in document for name in fields):
            return family
    return None


def read_config(name: str, raw: bytes) -> Config:
    """Read a config.

    Args:
        name: the file, as messages name it.
        raw: its bytes.

    Raises:
        ConfigError: it isn't YAML, is of a family that nothing can be cached of, or holds a value that the framework
            refuses; one line with the file, the field, the value and the way out.
    """
    source = RecipeYaml(name, raw, start=_START)
    document = source.document()
    family = family_of(document)
    if family is None:
        looked = "; ".join(f"{', '.join(names)} (family {key})" for key, names in FAMILIES.items())
        present = ", ".join([*list(document)[:_SHOWN], *(["more"] if len(document) > _SHOWN else [])]) or "nothing"
        raise fault(
            f"{name}: no cann-recipes config that is known here: it has {present}; looked for {looked}",
            "name the framework's config, or run: cachectl record -- CMD",
        )
    if family in _REFUSED:
        what, hint = _REFUSED[family]
        raise fault(f"{name}: {what}", hint)
    config = Config(name, family, source)
    for section in (TOP, *_SECTIONS[family]):
        _read_section(config, section, document)
    _fill_defaults(config)
    _check_values(config)
    return config


def _read_section(config: Config, section: str, document: Mapping[str, Any]) -> None:
    """Take one section's fields into `values` and `document`."""
    held: Any = document if section == TOP else document.get(section, {})
    if held is None:
        config.notes.append(
            f"{section}: present but empty, taken as absent; the framework ends in an AttributeError there"
        )
        held = {}
    if not isinstance(held, Mapping):
        config.source.fail((section,), f"is {kind_of(held)}, wanted a mapping", "write name: value pairs")
    for written, value in held.items():
        place = (written,) if section == TOP else (section, written)
        if section == TOP and (written in _SECTIONS[config.family]):
            continue
        known = field_named(config.family, section, written)
        if known is not None:
            _take(config, known, written, value, place)
        else:
            _take_unknown(config, section, written, value, place)


def _take(config: Config, known: ConfigField, written: str, value: Any, place: Place) -> None:
    typed = _typed(config, known, value, place)
    if known.name in config.written:
        other = config.written[known.name]
        if config.values[known.name] != typed:
            config.source.fail(
                place,
                f"{show(value)} and {'.'.join(str(step) for step in other)} {show(config.values[known.name])} are two "
                "names of one field",
                "keep one",
            )
    if written != known.name and config.family == "A":
        config.notes.append(
            f"{'.'.join(str(step) for step in place)}: counted as {known.name}, which is the name that the framework's "
            "newer versions read; they drop this one"
        )
    config.values[known.name] = typed
    config.written.setdefault(known.name, place)
    if not in_key(known.use):
        config.left_out.append(LeftOut(".".join(str(step) for step in place), known.why))


def _take_unknown(config: Config, section: str, written: str, value: Any, place: Place) -> None:
    """Take a field that nobody knows here into the key; say so where the framework drops it without a word."""
    label = ".".join(str(step) for step in place)
    if (why := address_reason(written)) is not None:
        config.left_out.append(LeftOut(label, why))
        return
    if is_secret_name(written) and isinstance(value, str):
        config.left_out.append(LeftOut(label, "a secret by its name"))
        return
    if written in DERIVED:
        # The derived value itself is in the key; a stated one that differs is told of when it is known.
        config.written.setdefault(written, place)
        config.values[written] = _plain(written, value)
        return
    holder = config.document if section == TOP else config.document.setdefault(section, {})
    holder[written] = _plain(written, value)
    near = _nearest(config.family, section, written)
    if config.family == "A":
        text = "the framework drops it without a word"
        config.notes.append(f"{label}: {text}" + (f"; did you mean {near}?" if near else ""))
    elif near:
        config.notes.append(f"{label}: unknown here, and counted; did you mean {near}?")


def _nearest(family: str, section: str, name: str) -> str | None:
    """Return where the field should stand that a name seems to mean, None for one that resembles nothing."""
    for other in ("model_config", "data_config", "parallel_config", "scheduler_config", TOP):
        if other != section and (known := field_named(family, other, name)) is not None:
            return f"{other}.{known.name}" if other else known.name
    if name in KNOWN_CUSTOM_PARAMS:
        # Family B reads its models' switches from model_config itself.
        return None if family == "B" else f"model_config.{CUSTOM_PARAMS}.{name}"
    here = [spelling for item in fields_of(family, section) for spelling in (item.name, *item.synonyms)]
    # pp_size is no typo of cp_size.
    close = difflib.get_close_matches(name, here, n=1, cutoff=0.8 if len(name) > _SHORT else 0.9)
    if close:
        return f"{section}.{close[0]}" if section else close[0]
    return None


def _typed(config: Config, known: ConfigField, value: Any, place: Place) -> Any:
    """Return a known field's value in its type: what is the same to the framework becomes the same."""
    source = config.source
    if known.kind is dict:
        return _custom_params(config, value, place)
    if value is None:
        if known.name in ("seed", "platform_version"):
            return None
        source.fail(place, "is empty", "fill it in or remove the line")
    if known.kind is bool:
        if isinstance(value, (bool, int)) and value in (0, 1):
            return bool(value)
        if isinstance(value, str):
            source.fail(place, f"{show(value)} is text, and text counts as true", "write true or false, without quotes")
        source.fail(place, f"{show(value)} is no switch", "write true or false")
    if known.name == "platform_version":
        return _platform(config, value, place)
    if known.name == "exe_mode":
        return _mode(config, value, place)
    if known.kind is str:
        if isinstance(value, str):
            return without_credentials(value)
        source.fail(
            place, f"{show(value)} is {kind_of(value)} to YAML, wanted text", f'quote it: "{source.written(place)}"'
        )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        source.fail(place, f"{show(value)} is {kind_of(value)}, wanted a number", "write it plain, such as 4")
    if known.kind is float:
        return float(value)
    if isinstance(value, float):
        source.fail(
            place, f"{show(value)} is a number with a point, wanted a whole number", "write it plain, such as 4"
        )
    return value


def _custom_params(config: Config, value: Any, place: Place) -> dict[str, Any]:
    if value is None:
        config.notes.append(
            "model_config.custom_params: present but empty, taken as absent; the framework ends in an AttributeError "
            "there: write custom_params: {} or remove the line"
        )
        return {}
    if not isinstance(value, Mapping):
        config.source.fail(place, f"is {kind_of(value)}, wanted a mapping", "write name: value pairs")
    params = {}
    for name, item in value.items():
        if is_secret_name(name) and isinstance(item, str):
            config.left_out.append(LeftOut(f"model_config.{CUSTOM_PARAMS}.{name}", "a secret by its name"))
            continue
        params[name] = _plain(name, item)
        if name not in KNOWN_CUSTOM_PARAMS:
            _note_custom_param(config, name)
    return params


def _note_custom_param(config: Config, name: str) -> None:
    label = f"model_config.{CUSTOM_PARAMS}.{name}"
    known = next((item for item in FIELDS if name in (item.name, *item.synonyms)), None)
    if known is not None and known.section(config.family):
        where = f"{known.section(config.family)}.{known.name}"
        config.notes.append(f"{label}: the framework does not look for it there; did you mean {where}?")
        return
    close = difflib.get_close_matches(name, KNOWN_CUSTOM_PARAMS, n=1, cutoff=0.85)
    if close:
        config.notes.append(
            f"{label}: unknown here, and counted; a model drops what it does not look for; did you mean {close[0]}?"
        )


def _plain(name: str, value: Any) -> Any:
    """Return a value of no known type as it is compared: one spelling for a switch, no credentials in a URL.

    A switch may be written as 0 and 1, and a level (0, 1, 2) as true: what a name looks like decides which it is.
    """
    if isinstance(value, (bool, int)) and value in (0, 1):
        return bool(value) if name.startswith(_SWITCHES) else int(value)
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, Mapping):
        return {
            key: _plain(key, item) for key, item in value.items() if not (is_secret_name(key) and isinstance(item, str))
        }
    if isinstance(value, list):
        return [_plain(name, item) for item in value]
    return value


def _platform(config: Config, value: Any, place: Place) -> str:
    text = str(value)
    if not isinstance(value, str):
        config.notes.append(
            f"{'.'.join(str(step) for step in place)}: {text} without quotes is a number, which the framework refuses; "
            f'taken as "{text}"'
        )
    if text not in _PLATFORMS:
        near = next((item for item in _PLATFORMS if item.lower() in text.lower()), None)
        hint = f'write "{near}"' if near else f"write one of {', '.join(_PLATFORMS)}"
        config.source.fail(place, f"{show(value)} is no platform that the framework knows", hint)
    return text


def _mode(config: Config, value: Any, place: Place) -> str:
    if value == "acl_graph":
        if config.family == "A":
            config.notes.append(
                "model_config.exe_mode: acl_graph is what older versions of the framework call npugraph_ex; newer ones "
                "refuse it"
            )
        return "npugraph_ex"
    if value not in _MODES:
        close = difflib.get_close_matches(str(value), _MODES, n=1, cutoff=0.4)
        hint = f"write {close[0]}" if close else f"write one of {', '.join(_MODES)}"
        config.source.fail(place, f"{show(value)} is no mode that the framework knows", hint)
    return str(value)


def _fill_defaults(config: Config) -> None:
    """Fill in what the framework fills in, and put what is in the key into the document, by section."""
    for known in FIELDS:
        section = known.section(config.family)
        if section is None:
            continue
        value = config.values.setdefault(known.name, known.default_of(config.family))
        if in_key(known.use) and (value is not None or known.name in config.written):
            holder = config.document if section == TOP else config.document.setdefault(section, {})
            holder[known.name] = value
    config.values[CUSTOM_PARAMS] = config.custom_params
    config.document.setdefault("model_config", {})[CUSTOM_PARAMS] = config.custom_params


def _check_values(config: Config) -> None:
    """Refuse single values that the framework, or anything after it, can't take."""
    for known in FIELDS:
        value = config.values.get(known.name)
        if known.name not in config.written or value is None:
            continue
        if known.kind is int and known.use == "graph" and known.name != "next_n" and value < 1:
            config.fail(known.name, f"{value} is less than 1", "write 1 or more")
        if known.name == "world_size" and value > _MOST_RANKS:
            config.fail(known.name, f"{value} is more than {_MOST_RANKS} ranks", "check the number")
        if known.name in ("next_n", "temperature", "top_k", "max_prefill_tokens") and value < 0:
            config.fail(known.name, f"{value} is negative", "write 0 or more")
        if known.name in ("max_new_tokens", "input_truncated_len") and value < 1:
            config.fail(known.name, f"{value} is less than 1", "write 1 or more")
        if known.name in ("top_p", "mem_fraction_static") and not 0 <= value <= 1:
            config.fail(known.name, f"{value} is not between 0 and 1", "write a share, such as 0.85")
