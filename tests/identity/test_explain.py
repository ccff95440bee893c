"""Explain: every part's difference has its name, noise counts for nothing, and what always changes is an alarm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachectl.identity.explain import (
    Asked,
    Commands,
    changing_name,
    compare_entries,
    compare_entry,
    distance,
    mended,
)
from cachectl.identity.guards import SheetBuilder
from cachectl.schemas.boot import Reason
from cachectl.schemas.keying import KEY_PARTS
from tests.stores import raw_sources, source_document

SOURCE = "SCALE = 2\n\n\ndef main_decode(x):\n    # doubles\n    return x * SCALE\n"
BUILD = "cachectl build recipe.yaml --store /store"


def sheet(eps: float = 1e-6, *, layers: int = 3) -> dict[str, Any]:
    """Return a guard sheet of equal layers under one root."""
    builder = SheetBuilder()
    for layer in range(layers):
        builder.add(("L:self", "._modules", ":layers", "._modules", f":{layer}", ".eps"), ["equals", eps])
    builder.add_ambient({"grad_mode": False})
    builder.add_expression(["==", ["at", "L:x", "@size:0"], 4])
    return builder.sheet()


def document(folder: Path) -> dict[str, Any]:
    """Return a manifest's document about a source file in `folder`."""
    source = folder / "decoder.py"
    if not source.exists():
        source.write_text(SOURCE)
    return {
        "key_version": 1,
        "recipe": "made-up",
        "case": "b4",
        "parts": {
            "model": {"factory": "decoder:build", "config": {"layers": 4}, "args": {"batch": 4}},
            "sources": source_document(source),
            "inputs": {"L['x']": {"tensor": {"shape": [4, 8], "dtype": "float32"}}, "L['n']": {"value": 1}},
            "topology": {"world_size": 8, "rank": 0},
            "options": {"mode": "npugraph_ex", "options": {"frozen_parameter": True}},
            "toolchain": {"cann": {"CANN": "8.5.0"}, "torch": {"version": "2.13.0", "git": "c" * 40}},
            "device": {"simulated": True, "soc": "ascend910b1"},
            "environment": {"declared": {"DEPTH": "4"}, "observed": {"FAST": None, "WIDTH": "2"}},
            "guards": sheet(),
        },
        "raw_sources": raw_sources(source),
        "artifact": {
            "runtime_path": "Model_0123/main_decode",
            "files": [{"path": "compiled_module", "digest": "sha256:" + "a" * 64}],
        },
        "provenance": {"builder": "cachectl 0.1.0", "created_at": "2026-03-01T12:00:00Z"},
    }


def asked(folder: Path, stored: dict[str, Any], **changes: Any) -> Asked:
    """Return the request line that `stored` was built for; `changes` are fields of it."""
    parts = copy.deepcopy(stored["parts"])
    request = {
        "key_version": 1,
        "topology": {"world_size": parts["topology"]["world_size"]},
        "options": parts["options"],
        "environment": parts["environment"]["declared"],
        "toolchain": parts["toolchain"],
        "device": parts["device"],
    }
    fields: dict[str, Any] = {
        "model": parts["model"],
        "request": request,
        "rank": 0,
        "roots": {"path:0": folder},
        "environ": {"DEPTH": "4", "WIDTH": "2"},
        "commands": Commands("recipe.yaml", "/store"),
        **changes,
    }
    return Asked(**fields)


def named(reasons: list[Reason]) -> list[tuple[str, str, Any, Any, str]]:
    """Return what tells reasons apart, without their hints."""
    return [(reason.part, reason.name, reason.stored, reason.wanted, reason.kind) for reason in reasons]


def test_compare_entry_equal_line_has_no_reason(tmp_path: Path) -> None:
    """What an entry was built for differs from it in nothing."""
    stored = document(tmp_path)

    assert [] == compare_entry(stored, asked(tmp_path, stored))


def test_compare_entry_of_another_cut_says_so(tmp_path: Path) -> None:
    """An entry whose place would be another one in the cut that is asked for differs from it, and building mends it."""
    stored = document(tmp_path)
    topology = stored["parts"]["topology"]
    topology["rank"], topology["found"] = 5, {"device_index": 5}
    stored["provenance"]["ranks_per_node"] = 8

    found = compare_entry(stored, asked(tmp_path, stored, rank=5, ranks_per_node=4))

    assert [("topology", "node cut", "1 node of 8", "2 nodes of 4", "semantic")] == named(found)
    assert [] == compare_entry(stored, asked(tmp_path, stored, rank=5, ranks_per_node=8))


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        (("model", "config", "layers"), 8, ("model", "config.layers", 4, 8)),
        (("model", "args", "batch"), 8, ("model", "args.batch", 4, 8)),
        (("model", "new"), True, ("model", "new", None, True)),
        (("request", "topology", "world_size"), 16, ("topology", "world_size", 8, 16)),
        (("rank",), 9, ("topology", "rank", 0, 9)),
        (
            ("request", "options", "options", "frozen_parameter"),
            False,
            ("options", "options.frozen_parameter", True, False),
        ),
        (("request", "toolchain", "cann", "CANN"), "9.0.0", ("toolchain", "cann.CANN", "8.5.0", "9.0.0")),
        (("request", "device", "soc"), "ascend910_9391", ("device", "soc", "ascend910b1", "ascend910_9391")),
        (("request", "environment", "DEPTH"), "8", ("environment", "DEPTH", "4", "8")),
        (("environ", "WIDTH"), "3", ("environment", "WIDTH", "2", "3")),
        (("environ", "FAST"), "1", ("environment", "FAST", None, "1")),
    ],
)
def test_compare_entry_names_the_one_thing_that_changed(
    tmp_path: Path, place: tuple[str, ...], value: Any, expected: tuple[Any, ...]
) -> None:
    """One changed value of the request is one reason with both values and a command."""
    stored = document(tmp_path)
    fields: dict[str, Any] = copy.deepcopy(vars(asked(tmp_path, stored)))
    inner: Any = fields
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value

    reasons = compare_entry(stored, Asked(**fields))

    assert [(*expected, "semantic")] == named(reasons)
    assert BUILD in reasons[0].hint
    assert 1 == distance(reasons)


def test_compare_entry_edited_code_is_named_and_edited_comment_is_noise(tmp_path: Path) -> None:
    """The changed function is the reason; where only its comment changed, the file is noise."""
    stored = document(tmp_path)
    line = asked(tmp_path, stored)

    (tmp_path / "decoder.py").write_text(SOURCE.replace("doubles", "twice"))
    comment = compare_entry(stored, line)
    (tmp_path / "decoder.py").write_text(SOURCE.replace("x * SCALE", "x + SCALE"))
    code = compare_entry(stored, line)
    (tmp_path / "decoder.py").unlink()
    gone = compare_entry(stored, line)

    assert [("sources", "decoder.py", "noise")] == [(item.part, item.name, item.kind) for item in comment]
    assert [("sources", "decoder.py: main_decode", "semantic")] == [(item.part, item.name, item.kind) for item in code]
    assert [("sources", "decoder.py", "absent")] == [(item.part, item.name, item.kind) for item in gone]
    assert [0, 1, 1] == [distance(reasons) for reasons in (comment, code, gone)]
    assert BUILD in code[0].hint


def test_compare_entry_rehearsed_version_leaves_out_what_nobody_knows(tmp_path: Path) -> None:
    """The git revision of a version that isn't here is no difference; the version is."""
    stored = document(tmp_path)
    line = asked(tmp_path, stored, unknown=("torch.git",))
    line.request["toolchain"]["torch"] = {"version": "2.14.0", "git": "d" * 40}

    assert [("toolchain", "torch.version", "2.13.0", "2.14.0", "semantic")] == named(compare_entry(stored, line))


def test_compare_entry_malformed_document_is_a_reason(tmp_path: Path) -> None:
    """A manifest of a strange form is corrupt, not a crash."""
    stored = document(tmp_path)
    line = asked(tmp_path, stored)
    stored["parts"]["environment"] = []

    (reason,) = compare_entry(stored, line)

    assert ("artifact", "manifest", "corrupt") == (reason.part, reason.name, reason.kind)
    assert "--force" in reason.hint


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        (Reason("environment", "A", "two words", "3"), "run: export A='two words'; or, to build for the value here: "),
        (Reason("environment", "A", None, "3"), "run: unset A; or, to build for the value here: "),
        (Reason("environment", "HF_TOKEN", {"set": True}, None), "run: export HF_TOKEN=...; or, to build"),
        (Reason("topology", "world_size", 8, 16), "have world 8, asked 16; run: "),
        (Reason("topology", "rank", [0, 1], 2), "have rank 0,1, asked 2; run: "),
        (Reason("artifact", "digest", "other bytes", kind="corrupt"), "run: cachectl build recipe.yaml --force"),
        (Reason("toolchain", "torch", kind="absent", hint="install torch"), "install torch"),
        (Reason("sources", "a.py", hint="star import; build again with `cachectl build RECIPE`"), "star import; build"),
        (Reason("options", "dynamic", True, False), f"run: {BUILD}"),
    ],
)
def test_mended_hint_is_a_command(reason: Reason, hint: str) -> None:
    """What mends a reason is said as a command with its recipe and store."""
    text = mended(reason, Commands("recipe.yaml", "/store")).hint

    assert text.startswith(hint)
    assert "RECIPE" not in text


def test_commands_quote_what_a_shell_would_take_apart() -> None:
    """A command can be pasted whatever the paths hold."""
    commands = Commands("my recipe.yaml", "/a b")

    assert "cachectl build 'my recipe.yaml' --store '/a b'" == commands.build()


# Two entries.


def change(place: tuple[Any, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    """Return the change of one value in a manifest's document."""

    def apply(found: dict[str, Any]) -> None:
        inner: Any = found
        for step in place[:-1]:
            inner = inner[step]
        inner[place[-1]] = value

    return apply


@pytest.mark.parametrize(
    ("apply", "expected"),
    [
        (change(("parts", "model", "config", "layers"), 8), ("model", "config.layers", 4, 8)),
        (
            change(("parts", "sources", "files", 0, "definitions", "main_decode"), "sha256:" + "b" * 64),
            ("sources", "decoder.py: main_decode", ..., "sha256:" + "b" * 64),
        ),
        (change(("parts", "sources", "attributes"), ["decode"]), ("sources", "attributes", [], ["decode"])),
        (
            change(("parts", "sources", "packages"), [{"name": "einops", "distribution": "einops", "version": "0.8"}]),
            ("sources", "package einops", None, "0.8"),
        ),
        (change(("parts", "inputs", "L['x']", "tensor", "shape", 0), 2), ("inputs", "L['x'].shape[0]", 4, 2)),
        (change(("parts", "inputs", "L['n']", "value"), True), ("inputs", "L['n']", {"value": 1}, {"value": True})),
        (change(("parts", "topology", "rank"), 1), ("topology", "rank", 0, 1)),
        (
            change(("parts", "options", "options", "frozen_parameter"), False),
            ("options", "options.frozen_parameter", True, False),
        ),
        (change(("parts", "toolchain", "cann", "CANN"), "9.0.0"), ("toolchain", "cann.CANN", "8.5.0", "9.0.0")),
        (change(("parts", "device", "soc"), "ascend310p3"), ("device", "soc", "ascend910b1", "ascend310p3")),
        (change(("parts", "environment", "declared", "DEPTH"), "8"), ("environment", "DEPTH", "4", "8")),
        (change(("parts", "environment", "observed", "NEW"), None), ("environment", "NEW", "not observed", None)),
        (change(("parts", "guards", "ambient", "grad_mode"), True), ("guards", "ambient.grad_mode", False, True)),
        (change(("parts", "guards", "expressions"), []), ("guards", "(x.size(0) == 4)", True, False)),
        (change(("parts", "guards", "added"), 1), ("guards", "document", ..., ...)),
    ],
)
def test_compare_entries_names_what_differs_in_each_part(
    tmp_path: Path, apply: Callable[[dict[str, Any]], None], expected: tuple[Any, ...]
) -> None:
    """One changed value in any of the nine parts is one reason; a value of ... may be anything."""
    stored, wanted = document(tmp_path), document(tmp_path)
    apply(wanted)

    (reason,) = compare_entries(stored, wanted, "run: cachectl show 0123")

    found = (reason.part, reason.name, reason.stored, reason.wanted)
    assert expected == tuple(... if want is ... else have for want, have in zip(expected, found, strict=True))
    assert ("semantic", "run: cachectl show 0123") == (reason.kind, reason.hint)


@pytest.mark.parametrize("part", KEY_PARTS)
def test_compare_entries_never_overlooks_a_part(tmp_path: Path, part: str) -> None:
    """Two keys that differ have a reason, whatever form a part's document has."""
    stored, wanted = document(tmp_path), document(tmp_path)
    wanted["parts"][part] = {"quite": ["another", {"form": 1}]}

    reasons = compare_entries(stored, wanted, "")

    assert {part} == {reason.part for reason in reasons}


def test_compare_entries_guard_is_named_by_its_place(tmp_path: Path) -> None:
    """A guard that differs in every one of equal layers is named at each place, and only there."""
    stored, wanted = document(tmp_path), document(tmp_path)
    wanted["parts"]["guards"] = sheet(eps=1e-5, layers=2)

    reasons = compare_entries(stored, wanted, "")

    assert [
        ("guards", "self.layers[0].eps: equals", 1e-06, 1e-05, "semantic"),
        ("guards", "self.layers[1].eps: equals", 1e-06, 1e-05, "semantic"),
        ("guards", "self.layers[2].eps", [["equals", 1e-06]], None, "semantic"),
    ] == named(reasons)


def test_compare_entries_labels_and_upstream_names_are_noise(tmp_path: Path) -> None:
    """What stands beside the key is told apart from it: the runtime's own directory name, files, labels (S10)."""
    stored, wanted = document(tmp_path), document(tmp_path)
    wanted["artifact"]["runtime_path"] = "Model_4567/main_decode"
    wanted["raw_sources"]["files"]["path:0/decoder.py"] = "sha256:" + "b" * 64
    wanted["recipe"] = "renamed"

    reasons = compare_entries(stored, wanted, "")

    assert {("artifact", "runtime_path"), ("sources", "path:0/decoder.py"), ("store", "recipe")} == {
        (reason.part, reason.name) for reason in reasons
    }
    assert 0 == distance(reasons)
    assert all(reason.hint for reason in reasons)


# History.


def history(tmp_path: Path, place: tuple[Any, ...], *values: Any) -> list[dict[str, Any]]:
    """Return the parts of a line's entries, newest first, that differ in one place."""
    entries = []
    for value in values:
        found = document(tmp_path)
        change(("parts", *place), value)(found)
        entries.append(found["parts"])
    return entries


def test_changing_name_is_an_alarm(tmp_path: Path) -> None:
    """A variable that has another value in each of three builds is named, with the last two values (S1)."""
    alarm = changing_name(history(tmp_path, ("environment", "observed", "RUN_ID"), "c", "b", "a"))

    assert alarm is not None
    assert ("environment", "changes at every build: RUN_ID", "b", "c", "noise") == named([alarm])[0]


def test_changing_name_sees_a_value_in_a_free_form_dict(tmp_path: Path) -> None:
    """So is an id within the model's config (S2), also where a guard on it follows."""
    entries = history(tmp_path, ("model", "config", "run"), "c", "b", "a")
    for number, parts in enumerate(entries):
        parts["guards"] = sheet(eps=number)

    alarm = changing_name(entries)

    assert alarm is not None
    assert ("model", "changes at every build: config.run") == (alarm.part, alarm.name)


@pytest.mark.parametrize(
    ("place", "values"),
    [
        (("model", "config", "layers"), (8, 4)),
        (("model", "config", "layers"), (4, 8, 4)),
        (("model", "config", "layers"), (8, 8, 8)),
        (("model", "config", "layers"), (8, 8, 4)),
        (("sources", "attributes"), (["c"], ["b"], ["a"])),
    ],
)
def test_changing_name_ordinary_histories_are_none(
    tmp_path: Path, place: tuple[Any, ...], values: tuple[Any, ...]
) -> None:
    """Two builds, a value that comes back, rebuilds of one key, and edited code raise no alarm."""
    assert changing_name(history(tmp_path, place, *values)) is None


def test_changing_name_two_names_that_change_are_none(tmp_path: Path) -> None:
    """Where first one and then another name changed, nothing changes always."""
    entries = history(tmp_path, ("model", "config", "layers"), 4, 4, 8)
    entries[0]["device"] = {"simulated": True, "soc": "ascend310p3"}

    assert changing_name(entries) is None


def test_compare_entry_models_config_that_is_not_mounted_here_is_noise(tmp_path: Path) -> None:
    """Where plan runs the weights may be missing; the program's process proves what it loads."""
    stored = document(tmp_path)
    stored["parts"]["model"]["framework"] = {"models": {"main": "sha256:a"}}
    unseen = {**stored["parts"]["model"], "framework": {"models": {"main": None}}}
    other = {**stored["parts"]["model"], "framework": {"models": {"main": "sha256:b"}}}

    (here,) = compare_entry(stored, asked(tmp_path, stored, model=unseen))
    (elsewhere,) = compare_entry(stored, asked(tmp_path, stored, model=other))

    assert ("framework.models.main", "sha256:a", None, "noise") == (here.name, here.stored, here.wanted, here.kind)
    assert ("framework.models.main", "sha256:b", "semantic") == (elsewhere.name, elsewhere.wanted, elsewhere.kind)
