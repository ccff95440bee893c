"""What launcher and ranks tell each other: documents that survive the way, errors that keep their kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cachectl.build.job import CaseJob, EventLog, Job, failure_document, failure_of, write_json
from cachectl.errors import BuildError, CachectlError, ConfigError, DocumentError, EnvironmentFault, SimulationError

CASE = CaseJob(3, "main_decode", {"name": "b4", "inputs": "m:f", "args": {"batch": 4}})


def make_job(folder: Path, *cases: CaseJob) -> Job:
    """Return a job of a recipe that names nothing real."""
    recipe = {"model": {"path": ["."]}}
    return Job(recipe, folder / "recipe", folder, {"toolchain": {}}, cases or (CASE,), 1)


def test_job_written_and_read_is_the_same(tmp_path: Path) -> None:
    """A rank reads the job that the launcher wrote."""
    job = make_job(tmp_path, CASE, CaseJob(5, "mtp", {"name": "\u00e9", "inputs": "m:f", "args": {}}))

    assert job == Job.read(job.write())


def test_job_folders_differ_by_rank_and_case(tmp_path: Path) -> None:
    """No two cases of a rank share the runtime's cache: it would delete the one for the other."""
    job = make_job(tmp_path)
    other = CaseJob(4, "main_decode", CASE.case)

    folders = {job.case_folder(rank, case) for rank in (0, 1) for case in (CASE, other)}

    assert 4 == len(folders)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"recipe": {}, "cases": [{}]}', "\udcff"])
def test_job_damaged_is_a_document_error(tmp_path: Path, text: str) -> None:
    """A job.json that can't be read is named, whatever is wrong with it."""
    path = tmp_path / "job.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))

    with pytest.raises(DocumentError, match=r"job\.json"):
        Job.read(path)


def test_write_json_replaces_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    """A reader sees the old document or the new one."""
    path = tmp_path / "record.json"

    write_json(path, {"a": 1})
    write_json(path, {"a": 2})

    assert ({"a": 2}, [path]) == (json.loads(path.read_text()), list(tmp_path.iterdir()))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConfigError("c", hint="h"), ConfigError),
        (EnvironmentFault("e", hint="h"), EnvironmentFault),
        (SimulationError("s", hint="h"), EnvironmentFault),
        (BuildError("b", hint="h"), BuildError),
        (DocumentError("d", hint="h"), EnvironmentFault),
    ],
)
def test_failure_crosses_the_process_with_kind_message_and_hint(
    tmp_path: Path, error: CachectlError, kind: type[CachectlError]
) -> None:
    """What a rank raised the launcher raises again, with the exit code it had and the rank's number."""
    document = json.loads(json.dumps(failure_document(error, CASE)))

    found = failure_of(document, 2, tmp_path / "log")

    assert (kind, error.message, error.hint, error.exit_code, 2, 3) == (
        type(found),
        found.message,
        found.hint,
        found.exit_code,
        found.rank,
        document["case"],
    )


def test_failure_without_a_hint_or_with_the_log_in_it_names_the_log(tmp_path: Path) -> None:
    """What isn't a build error has no place for its log but its hint."""
    for hint in (None, "see the rank's log for its traceback"):
        found = failure_of(failure_document(ConfigError("c", hint=hint), CASE), 1, tmp_path / "rank1.log")

        assert str(found.hint).startswith(f"see {tmp_path / 'rank1.log'}")


def test_failure_of_an_unknown_kind_is_a_build_error_with_its_log(tmp_path: Path) -> None:
    """A document from another version still ends the build, with the log to look at."""
    found = failure_of({"kind": "new", "message": "m"}, 0, tmp_path / "log")

    assert (BuildError, tmp_path / "log") == (type(found), getattr(found, "log_path", None))


def test_event_log_is_readable_line_by_line_while_it_grows(tmp_path: Path) -> None:
    """Each phase is one whole line at once: the launcher reads while the rank writes."""
    events = EventLog(tmp_path / "rank0")
    events.phase(None, "import")
    events.phase(CASE, "compile")

    lines = [json.loads(line) for line in (tmp_path / "rank0" / "events.jsonl").read_text().splitlines()]
    events.close()

    assert [(None, "import"), (3, "compile")] == [(line["case"], line["phase"]) for line in lines]
