"""The environment part: absence is a value, placement never counts, secrets stay out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachectl
from cachectl.identity.environment import (
    FAMILIES,
    IGNORED,
    IGNORED_ENDINGS,
    IGNORED_PREFIXES,
    PLACEMENT,
    PLACEMENT_PREFIXES,
    PRESENCE,
    check_declared,
    check_environment,
    check_observed,
    declared_part,
    environment_part,
    family_part,
    in_family,
    is_placement,
    observed_part,
    recorded_value,
    starting_environment,
)
from cachectl.schemas.canonical import canonical_bytes
from tests.strategies import TEXTS

ROOT = str(Path(cachectl.__file__).resolve().parents[1])
NAMES = st.sampled_from(["N_LAYERS", "VLLM_FUSE", "HUB_TOKEN", "HOME", "POD_IP", "CACHECTL_STORE", "MAX_TOKENS"])
ENVIRONS = st.dictionaries(NAMES, TEXTS)


@given(st.frozensets(NAMES), ENVIRONS)
def test_observed_then_check_same_environment_holds(names: frozenset[str], environ: dict[str, str]) -> None:
    """What was recorded holds where it was recorded, and placement is left out."""
    observed = observed_part(names, environ)

    assert [] == check_observed(observed, environ)
    assert {name for name in names if not is_placement(name)} == observed.keys()
    canonical_bytes(observed)


@given(ENVIRONS, ENVIRONS)
def test_check_observed_reports_exactly_what_differs(before: dict[str, str], after: dict[str, str]) -> None:
    """One reason for each recorded name whose value or absence changed, both values in it."""
    observed = observed_part({"N_LAYERS", "VLLM_FUSE"}, before)

    reasons = check_observed(observed, after)

    changed = [name for name in ("N_LAYERS", "VLLM_FUSE") if before.get(name) != after.get(name)]
    assert changed == [reason.name for reason in reasons]
    assert [(before.get(name), after.get(name)) for name in changed] == [
        (reason.stored, reason.wanted) for reason in reasons
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, ""), ("", None), ("0", "1"), ("1", "1 "), (None, "1"), ("1", None)],
)
def test_check_observed_absence_and_emptiness_are_values(before: str | None, after: str | None) -> None:
    """Unset, empty and set are three things: `.get`, `in` and float(...) tell them apart (field report W3)."""
    name = "N_LAYERS"
    observed = observed_part([name], {} if before is None else {name: before})

    assert 1 == len(check_observed(observed, {} if after is None else {name: after}))


def test_secret_value_never_recorded_but_its_presence_is() -> None:
    """A token's text is in no document and no reason; that there is one is (field report O4)."""
    observed = observed_part(["HUB_TOKEN"], {"HUB_TOKEN": "hunter2"})
    (reason,) = check_observed(observed, {})

    assert {"HUB_TOKEN": {"set": True}} == observed
    assert [] == check_observed(observed, {"HUB_TOKEN": "another"})
    assert "hunter2" not in f"{reason} {reason.hint} {observed}"
    assert {"set": True} == check_observed(observed_part(["HUB_TOKEN"], {}), {"HUB_TOKEN": "x"})[0].wanted


def test_url_credentials_never_recorded() -> None:
    """The place counts, who may go there does not."""
    assert "https://mirror.example/x" == recorded_value("INDEX_URL", "https://me:hunter2@mirror.example/x")
    assert [] == check_observed(
        {"INDEX_URL": "https://mirror.example/x"}, {"INDEX_URL": "https://you:x@mirror.example/x"}
    )


@pytest.mark.parametrize("name", [*PLACEMENT, "CACHECTL_STORE", "TORCHELASTIC_RUN_ID", "XDG_CACHE_HOME", "LC_ALL"])
def test_placement_never_counts(name: str) -> None:
    """Where a process runs is not what it computes (field reports S1, S3, S5)."""
    assert {} == observed_part([name], {name: "changes at every start"})


@pytest.mark.parametrize("name", ["HOMES", "PATHS", "TASK_QUEUE_ENABLE", "VLLM_USE_V1", "ASCEND_LAUNCH_BLOCKING"])
def test_what_is_no_placement_counts(name: str) -> None:
    """A name is placement by being listed, not by looking like it."""
    assert {name: "1"} == observed_part([name], {name: "1"})


def test_placement_has_a_reason_for_each_name() -> None:
    """A name is ignored for a reason that can be read."""
    lists = (PLACEMENT, PLACEMENT_PREFIXES, IGNORED, IGNORED_PREFIXES, IGNORED_ENDINGS, PRESENCE)

    assert all(all(reasons.values()) for reasons in lists)
    assert all(name.startswith(FAMILIES) for name in (*IGNORED, *IGNORED_PREFIXES, *PRESENCE))


def test_declared_part_is_text_and_sorted() -> None:
    """Declared values are what the ranks get: text; a recipe without any has an empty part."""
    assert {"A": "1", "B": "x", "MY_KEY": {"set": True}} == declared_part(
        {"environment": {"B": "x", "A": 1, "MY_KEY": "s"}}
    )
    assert {} == declared_part({}) == declared_part({"environment": None})


def test_check_declared_differences_name_the_variable() -> None:
    """What the recipe declares has to be in the program's environment, with that value."""
    declared = declared_part({"environment": {"TASK_QUEUE_ENABLE": "1", "B": "x"}})

    assert [] == check_declared(declared, {"TASK_QUEUE_ENABLE": "1", "B": "x", "C": "y"})
    reasons = check_declared(declared, {"TASK_QUEUE_ENABLE": "2"})
    assert [("B", "x", None), ("TASK_QUEUE_ENABLE", "1", "2")] == [
        (reason.name, reason.stored, reason.wanted) for reason in reasons
    ]
    assert all(reason.name in reason.hint for reason in reasons)


def test_observed_values_that_are_no_text_are_recorded() -> None:
    """A variable's bytes need not be UTF-8; the document still has a canonical form."""
    observed = observed_part(["PATTERN"], {"PATTERN": "\udcff"})

    assert b"PATTERN" in canonical_bytes(observed)
    assert [] == check_observed(observed, {"PATTERN": "\udcff"})


@pytest.mark.parametrize(
    "name",
    [
        "TASK_QUEUE_ENABLE",
        "HCCL_BUFFSIZE",
        "HCCL_OP_EXPANSION_MODE",
        "HCCL_DETERMINISTIC",
        "ASCEND_LAUNCH_BLOCKING",
        "ASCEND_CUSTOM_OPP_PATH",
        "ASCEND_FOO",
        "TORCHDYNAMO_DISABLE",
        "TORCH_NPU_USE_COMPATIBLE_IMPL",
        "VLLM_USE_V1",
        "VLLM_ASCEND_ENABLE_NZ",
        "VLLM_TIMEOUTS",
        "VLLM_PORTABLE",
    ],
)
def test_family_member_counts_unless_it_is_listed(name: str) -> None:
    """An unknown member of a family is in the key before anybody knows what it does (field report W14)."""
    assert in_family(name)
    assert [name] == list(family_part({name: "1"}))
    assert {} == family_part({name: "1"}, known=[name])


@pytest.mark.parametrize(
    "name",
    [
        *IGNORED,
        "VLLM_LOGGING_CONFIG_PATH",
        "TORCHELASTIC_RUN_ID",
        "HCCL_NEW_TIMEOUT",
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "ASCEND_NEW_LOG_LEVEL",
        "VLLM_DECODE_SERVICE_HOST",
        "VLLM_DECODE_SERVICE_PORT_HTTP",
        "VLLM_DECODE_PORT_8000_TCP_ADDR",
        "VLLM_DECODE_PORT",
        "VLLM_API_KEY",
        "NPU_FOO",
        "PYTORCH_NPU_ALLOC_CONF",
    ],
)
def test_family_ignores_what_is_listed_and_strangers(name: str) -> None:
    """Addresses, ports, paths, time-outs, logs, run ids and visible devices change at every start (S1, S3, S5)."""
    assert not in_family(name)
    assert {} == family_part({name: "changes at every start"})


def test_family_of_custom_operators_counts_by_presence() -> None:
    """A folder of custom operators counts by being there, and a secret of the family does not count at all."""
    part = family_part({"VLLM_API_KEY": "hunter2", "ASCEND_CUSTOM_OPP_PATH": "/opt/ops"})

    assert {"ASCEND_CUSTOM_OPP_PATH": {"set": True}} == part
    assert part == family_part({"ASCEND_CUSTOM_OPP_PATH": "/other"})


def test_check_environment_names_a_variable_once() -> None:
    """A family's variable that model code read, or the recipe declares, is compared in one way."""
    environ = {"VLLM_A": "1", "VLLM_B": "1", "VLLM_C": "1"}
    part = environment_part({"environment": {"VLLM_A": "1"}}, ["VLLM_B"], environ, environ)

    assert (["VLLM_A"], ["VLLM_B"], ["VLLM_C"], {}) == (
        [*part["declared"]],
        [*part["observed"]],
        [*part["families"]],
        part["start"],
    )
    assert ["VLLM_B", "VLLM_C"] == [reason.name for reason in check_environment(part, {})]


def test_check_environment_of_an_entry_without_families_holds_without_any() -> None:
    """An entry that recorded no families was built under none."""
    part = {"declared": {}, "observed": {"N": "1"}}

    assert [] == check_environment(part, {"N": "1", "NOBODY": "x"})
    assert ["VLLM_A"] == [reason.name for reason in check_environment(part, {"N": "1", "VLLM_A": "x"})]


def test_starting_environment_is_not_what_the_process_made_of_it() -> None:
    """The environment at the start of a process, whatever it set since."""
    script = "import os; from cachectl.identity.environment import starting_environment\n"
    script += "os.environ['A'] = '2'; os.environ.pop('B'); started = starting_environment(os.environ)\n"
    script += "print(started['A'], started['B'], started['C'])"
    environ = {"A": "1", "B": "x=y", "C": "\u00e4", "PYTHONPATH": ROOT, "PYTHONUTF8": "1"}

    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)

    assert "1 x=y \u00e4" == done.stdout.strip()
    assert {} == {name: value for name, value in starting_environment({}).items() if "=" in name}
