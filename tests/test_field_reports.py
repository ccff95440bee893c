"""Which test shows which field report of concurrency, damage, rights, ranks and storage, as far as a boot meets it.

Field reports are public issues of other compile caches, by number. Each that a boot can meet has a test with real
processes or real files; the others name the room that answers. A test that is renamed has to be renamed here.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

# What happened elsewhere, and the tests that show what a boot makes of it here.
AT_BOOT: dict[str, tuple[str, list[str]]] = {
    # Concurrency
    "C2": ("a reader sees half a file", ["store/test_blobs.py::test_write_atomically_readers_see_old_or_new"]),
    "C4": (
        "killed between data and ready mark",
        [
            "boot/test_hook_killed.py::test_hook_killed_at_any_call_on_an_empty_node_next_one_warm_and_right",
            "boot/test_hook_killed.py::test_hook_killed_at_random_times_next_one_warm",
        ],
    ),
    "C6": (
        "temp files churn in a listed folder",
        ["boot/test_hook_storage.py::test_hook_stray_files_in_the_store_reach_no_handout"],
    ),
    "C7": (
        "clean-up removes what is not its own",
        ["boot/test_claims.py::test_sweep_leaves_links_files_and_strangers"],
    ),
    "C8": (
        "a rebuild removes the file that a loader saw",
        [
            "boot/test_hook_traces.py::test_hooks_beside_a_rebuild_loop_are_warm_and_whole",
            "boot/test_claims.py::test_sweep_never_takes_what_a_process_holds",
        ],
    ),
    "C9": ("sixteen processes do the same work", ["boot/test_hook_traces.py::test_hooks_sixty_four_at_once_all_warm"]),
    "C10": (
        "a holder sleeps forever",
        [
            "boot/test_node.py::test_lay_down_lock_held_for_good_reads_from_the_store",
            "boot/test_bounded.py::test_hook_store_that_hangs_is_cold_in_time",
        ],
    ),
    "C14": (
        "two set-ups race on an empty node",
        ["boot/test_hook_traces.py::test_hooks_two_on_an_empty_node_are_both_warm"],
    ),
    # Damage
    "D3": (
        "a failure stays although its cause is gone",
        [
            "boot/test_starts.py::test_entry_built_anew_has_a_new_chance",
            "services/test_build_refusals.py::test_build_of_what_a_gate_refused_is_told_again_until_something_has_changed",
        ],
    ),
    "D4": ("truncated to half, to nothing, by a byte", ["boot/test_hook_faults.py::test_hook_damaged_blob_cold"]),
    "D5": (
        "a failing read stops the job",
        [
            "boot/test_hook.py::test_run_hook_broken_system_call_cold",
            "boot/test_hook_faults.py::test_hook_store_unreadable_cold",
        ],
    ),
    "D6": (
        "a flipped bit fails every job",
        [
            "boot/test_hook_faults.py::test_hook_damaged_blob_cold",
            "boot/test_node.py::test_hook_rotten_node_copy_is_warm_and_told",
        ],
    ),
    "D7": (
        "an empty or endless answer is taken for the value",
        ["boot/test_materialize.py::test_lay_down_endless_blob_stops_soon_after_its_size"],
    ),
    "D8": (
        "a member is listed and missing",
        [
            "boot/test_hook_faults.py::test_hook_record_with_other_members_cold",
            "boot/test_hook_faults.py::test_hook_damaged_newest_set_older_one_warm",
        ],
    ),
    "D10": (
        "used before the copy was whole",
        [
            "boot/test_hook_killed.py::test_hook_killed_at_any_call_debris_goes",
            "boot/test_materialize.py::test_lay_down_deadline_passed_stops",
        ],
    ),
    "D15": ("a poisoned local entry spreads", ["boot/test_node.py::test_lay_down_damaged_blob_is_not_kept"]),
    "D16": (
        "a pair of files that do not belong together",
        ["boot/test_hook_faults.py::test_hook_manifest_of_another_key_cold"],
    ),
    # Rights
    "P2": ("a root that is not there yet", ["boot/test_warmdir.py::test_choose_every_folder_made_is_private"]),
    "P4": (
        "a numeric uid without passwd entry and HOME",
        [
            "boot/test_hook_faults.py::test_hook_uid_without_passwd_entry_and_home_warm",
            "deploy/test_fleet.py::test_deployment_starts_the_unchanged_program_warm",
        ],
    ),
    "P5": ("the working folder is /", ["boot/test_hook.py::test_hook_relative_paths_from_another_folder_warm"]),
    "P6": (
        "the first user owns the shared folder",
        ["boot/test_hook_faults.py::test_hook_two_uids_one_store_both_warm"],
    ),
    "P7": (
        "modes by umask, too wide or too narrow",
        [
            "boot/test_hook.py::test_hook_umask_any_hands_out_private_files",
            "boot/test_hook_storage.py::test_hook_store_of_a_group_only",
        ],
    ),
    "P9": (
        "a link planted, or swapped in after the check",
        [
            "boot/test_hook_faults.py::test_hook_planted_link_inside_warm_dir_cold",
            "boot/test_hook_uid.py::test_hook_for_another_uid_folders_swapped_meanwhile_lead_nowhere",
        ],
    ),
    "P13": (
        "a store that can't be written",
        [
            "boot/test_hook.py::test_hook_store_without_write_permission_warm",
            "boot/test_hook_traces.py::test_a_thousand_hooks_leave_the_store_byte_identical",
        ],
    ),
    # Ranks
    "T1": ("rank 1 gets rank 0's code", ["boot/test_hook.py::test_hook_swapped_ranks_cold"]),
    "T3": (
        "the wrong number is taken for the rank",
        [
            "identity/test_ranks.py::test_ranks_here_each_launcher",
            "boot/test_hook.py::test_hook_contradicting_ranks_cold",
        ],
    ),
    "T5": (
        "one rank is cold or read-only, the others wait",
        [
            "end_to_end/test_agreement.py::test_rank_with_a_damaged_copy_makes_all_cold_and_right",
            "end_to_end/test_agreement.py::test_rank_that_is_late_finds_all_cold_and_right",
            "end_to_end/test_agreement.py::test_rank_whose_mount_is_read_only_makes_all_cold_and_right",
        ],
    ),
    "T6": ("the same world, split in another way", ["identity/test_topology.py::test_topology_part_each_size_counts"]),
    "T7": (
        "have 8, asked for 16",
        [
            "boot/test_hook.py::test_hook_other_world_size_cold",
            "services/test_explain.py::test_explain_other_world_says_what_is_there_and_what_is_asked",
        ],
    ),
    "T10": (
        "one node is filled, another stays empty",
        ["boot/test_hook_storage.py::test_hook_warm_dirs_of_two_nodes_are_filled_each"],
    ),
    # Storage
    "F2": ("the shared file system fails now and then", ["boot/test_node.py::test_lay_down_fills_the_node_copy_once"]),
    "F5": (
        "no locks on this file system, or a stale one",
        [
            "boot/test_node.py::test_lay_down_node_copy_that_fails_is_done_without",
            "boot/test_claims.py::test_sweep_without_locks_goes_by_age",
        ],
    ),
    "F7": ("the database is garbled or gone", ["boot/test_hook_storage.py::test_hook_needs_no_database"]),
    "F8": ("the database is locked", ["boot/test_hook_storage.py::test_hook_needs_no_database"]),
    "F9": ("out of inodes", ["boot/test_node.py::test_lay_down_no_room_for_both_goes_without"]),
    "F10": ("a full disk", ["boot/test_hook_faults.py::test_hook_full_disk_cold_leaves_nothing"]),
    "F11": (
        "temp files in another file system",
        ["boot/test_hook_storage.py::test_hook_temporary_folder_elsewhere_or_gone_is_none_of_its_business"],
    ),
    "F12": ("denied is told as missing", ["boot/test_hook_faults.py::test_hook_store_unreadable_cold"]),
    "F15": (
        "clocks and times of files",
        [
            "boot/test_hook_storage.py::test_hook_times_of_files_say_nothing",
            "boot/test_claims.py::test_sweep_clock_that_jumped_keeps_the_fresh_and_bounds_the_rest",
        ],
    ),
}

# No boot meets these: where they are answered, and by which tests; none where that part is not there yet.
ELSEWHERE: dict[str, tuple[str, list[str]]] = {
    "C1": ("publishing", ["store/test_writing.py::test_publish_eight_at_once_keeps_all_sets"]),
    "C3": ("publishing", ["store/test_writing.py::test_publish_eight_at_once_keeps_all_sets"]),
    "C13": ("publishing", ["store/test_writing.py::test_publish_eight_at_once_keeps_all_sets"]),
    "D1": ("building", ["services/test_plan.py::test_plan_shows_the_last_failure_of_a_line_while_it_is_kept"]),
    "D11": ("building", ["build/test_gates.py::test_saved_artifact_missing_is_refused_with_the_runtimes_words"]),
    "D12": ("building", ["build/test_gates.py::test_refuse_uncacheable_says_what_it_cannot_read"]),
    "D13": (
        "building",
        ["end_to_end/test_bad_input.py::test_build_of_a_wrong_recipe_says_one_line_and_publishes_nothing"],
    ),
    "P11": ("signatures, which are not there yet", []),
    "T8": (
        "topology; that static kernels then run, no NPU has shown yet",
        ["runtimes/test_placing.py::test_static_kernels_of_several_ranks_need_the_local_world_size"],
    ),
    "T11": (
        "plan and build of other topologies",
        ["services/test_explain.py::test_explain_other_world_says_what_is_there_and_what_is_asked"],
    ),
    "T12": ("building", ["services/test_build.py::test_build_leaves_the_workspace_of_a_living_build_and_of_others"]),
    "F1": ("publishing", ["store/test_writing.py::test_publish_failing_at_any_call_shows_nothing_new"]),
    "F13": ("remotes, which are not there yet", []),
    "F14": ("remotes, which are not there yet", []),
}

NUMBERED = {
    *(f"C{number}" for number in (1, 2, 3, 4, 6, 7, 8, 9, 10, 13, 14)),
    *(f"D{number}" for number in (1, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 15, 16)),
    *(f"P{number}" for number in (2, 4, 5, 6, 7, 9, 11, 13)),
    *(f"T{number}" for number in (1, 3, 5, 6, 7, 8, 10, 11, 12)),
    *(f"F{number}" for number in (1, 2, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15)),
}


@cache
def names_in(file: str) -> frozenset[str]:
    """Return the names of a test file's tests."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_report_has_its_place() -> None:
    """None is forgotten, and none stands in both tables."""
    assert NUMBERED == AT_BOOT.keys() | ELSEWHERE.keys()
    assert not AT_BOOT.keys() & ELSEWHERE.keys()
    assert all(tests for _, tests in AT_BOOT.values())


@pytest.mark.parametrize("report", sorted(NUMBERED))
def test_reports_tests_exist(report: str) -> None:
    """A test that shows a report is there under its name."""
    for place in {**AT_BOOT, **ELSEWHERE}[report][1]:
        file, _, name = place.partition("::")
        assert name in names_in(file), f"{report}: no test {name} in tests/{file}"
