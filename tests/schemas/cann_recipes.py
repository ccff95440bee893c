"""What the tests of cann-recipes configs share: the configs written for them, changed at one place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from cachectl.errors import ConfigError
from cachectl.schemas.cann_recipes import Framework, read_framework

__all__ = ["CONFIGS", "base", "changed", "framework", "note_of", "raw", "refused"]

CONFIGS = Path(__file__).parents[1] / "fixtures" / "cann_recipes"


def base(name: str) -> dict[str, Any]:
    """Return one of the configs as plain values."""
    document: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return document


def changed(document: Mapping[str, Any], section: str, field: str, value: Any) -> dict[str, Any]:
    """Return a config with one field set; the section "" is what stands outside of all."""
    copy: dict[str, Any] = yaml.safe_load(yaml.safe_dump(dict(document)))
    holder = copy if section == "" else copy.setdefault(section, {})
    holder[field] = value
    return copy


def raw(document: Mapping[str, Any] | str) -> bytes:
    """Return a config's bytes."""
    return (document if isinstance(document, str) else yaml.safe_dump(dict(document))).encode()


def framework(document: Mapping[str, Any] | str, model: str | bytes | None = None, *command: str) -> Framework:
    """Read a config that is called config.yaml, whose model's config.json holds `model`; None where there is none."""
    data = model.encode() if isinstance(model, str) else model
    models = {} if data is None else {"model_path": ("weights/config.json", data)}
    return read_framework("config.yaml", raw(document), models, command=command)


def note_of(found: Framework, name: str) -> str | None:
    """Return what is noted of a field, None where nothing is."""
    notes = [note.partition(": ")[2] for note in found.notes if note.partition(": ")[0] == name]
    return notes[0] if notes else None


def refused(document: Any) -> str:
    """Return the one line with which a config is refused."""
    with pytest.raises(ConfigError) as raised:
        framework(document)
    text = str(raised.value)
    assert "\n" not in text
    return text.removeprefix("config.yaml: ")
