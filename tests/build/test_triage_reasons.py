"""Dynamo's and the runtime's words, read: places, kinds of fault, and what to do next."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cachectl.build.triage_reasons import (
    Recompile,
    attention_fault,
    break_advice,
    finding,
    is_host_list_guard,
    one_line,
    place_of,
    read_recompiles,
    recompile_advice,
    refusal_kind,
    runtime_notes,
    user_frames,
    user_place,
    value_advice,
)

ROOTS = {"recipe": Path("/home/somebody/models/decoder"), "path:0": Path("/home/somebody/models/decoder/src")}
# As torch 2.13 logs them.
ATTRIBUTE = """\
Recompiling function counts in /home/somebody/models/decoder/src/model.py:51
    triggered by the following guard failure(s):
    - 0/1: self.steps == 2           # self.steps += 1  # decoder/src/model.py:52 in counts (HINT: make it a tensor.)
    - User stack trace:
    -   File "/home/somebody/models/decoder/src/model.py", line 52, in counts
    -     self.steps += 1
    - 0/0: self.steps == 1           # self.steps += 1  # decoder/src/model.py:52 in counts"""
BARE = """\
Recompiling function step in /usr/lib/python3/dist-packages/pkg/layers.py:7
    triggered by the following guard failure(s):
    - 0/0: tensor 'x' size mismatch at index 0. expected 4, actual 2"""
FIA = "return torch.ops.npu.npu_fused_infer_attention_score(q, k, v, actual_seq_lengths_kv=lengths)[0]"
UNBACKED = "PendingUnbackedSymbolNotFound: Pending unbacked symbols {u1, u0} not in returned outputs FakeTensor(...)"


def test_read_recompiles_takes_the_newest_graphs_guard_and_its_place() -> None:
    """Of two graphs that did not fit, the last one made; the model's own file, relative to the deepest root."""
    assert [Recompile("counts", "self.steps == 2", "model.py:52 in counts", "self.steps += 1")] == read_recompiles(
        [ATTRIBUTE], ROOTS
    )


def test_read_recompiles_without_a_stack_names_the_function() -> None:
    """Older torch logs no user stack; a package's file is said from site-packages on."""
    (found,) = read_recompiles([BARE], ROOTS)

    assert ("pkg/layers.py:7 in step", "") == (found.where, found.line)


def test_read_recompiles_leaves_out_what_is_none() -> None:
    """Other lines of the same logger."""
    assert [] == read_recompiles(["", "compile time 3 s", "Recompiling"], ROOTS)


@pytest.mark.parametrize(
    ("guard", "line", "dynamic", "kind", "words"),
    [
        ("tensor 'x' size mismatch at index 0. expected 4, actual 2", "", False, "recompile-shape", "dynamic: true"),
        ("tensor 'x' size mismatch at index 0. expected 4, actual 2", "", True, "recompile-shape", "a case of its own"),
        ("L['lengths'][0] == 3", FIA, False, "attention-lengths", "compile.dynamic: true"),
        ("actual_seq_lengths_kv[1] == 3", "", False, "attention-lengths", "pass them as a Tensor"),
        ("lengths[0] == 3", FIA, True, "recompile-value", "although dynamic is true"),
        ("len(self.hist) == 1", "self.hist.append(1)", False, "recompile-container", "does not help"),
        ("not self.hist", "", False, "recompile-container", "grows"),
        ("self.steps == 1", "self.steps += 1", False, "recompile-attribute", "as a tensor"),
        ("L['self'].layers[0].n == 1", "", False, "recompile-attribute", "as an argument"),
        ("L['step'] == 1", "", False, "recompile-value", "compile.dynamic: true"),
        ("___check_obj_id(L['self'].cache, 1234)", "", False, "recompile-identity", "skip_guard_eval_unsafe=True"),
        ("tensor 'x' dtype mismatch. expected Float, actual Half", "", False, "recompile-value", "cast it once"),
        ("expected type of 'x' to be a tensor type, but found int", "", False, "recompile-value", "cast it once"),
        ("___check_type_id(L['mask'], 94)", "", True, "recompile-value", "the same arguments"),
        ("self.lazy is None", "", False, "recompile-attribute", "make it in __init__"),
        ("L['mask'] is None", "", False, "recompile-value", "the same arguments"),
        ('Duplicate tensors found: ["self.k", "self.v"]', "", False, "recompile-identity", "memory of its own"),
        ("tensor 'x' requires_grad mismatch. expected requires_grad=0", "", False, "recompile-ambient", "grad mode"),
        ("GLOBAL_STATE changed: grad_mode", "", False, "recompile-ambient", "the same grad mode"),
        ("something nobody knows", "", False, "recompile", "skip_guard_eval_unsafe=True"),
    ],
)
def test_recompile_advice_goes_by_the_guard(guard: str, line: str, dynamic: bool, kind: str, words: str) -> None:
    """The guide's ladder: a shape, a list of lengths, a value, an object; each with the way out."""
    found, advice = recompile_advice(Recompile("step", guard, None, line), dynamic=dynamic)

    assert kind == found
    assert words in advice


def test_recompile_advice_never_skips_guards_on_a_value() -> None:
    """With another value the first graph would answer wrong."""
    values = ("self.steps == 1", "L['n'] == 2", "len(x) == 1", "tensor 'x' size mismatch", "lengths[0] == 3")
    kinds = ("tensor 'x' dtype mismatch", "L['mask'] is None", "___check_type_id(L['x'], 7)", "Duplicate tensors found")
    for guard in (*values, *kinds):
        for dynamic in (False, True):
            _, advice = recompile_advice(Recompile("step", guard, None, FIA), dynamic=dynamic)
            assert "unsafe" not in advice


@pytest.mark.parametrize("guard", ["x[0] == 3", "lengths == 3", "len(lengths) == 3", "lengths[0].n == 3"])
def test_host_list_guard_is_one_element_of_lengths(guard: str) -> None:
    """Not any list, and not the list's own length."""
    assert not is_host_list_guard(Recompile("step", guard, None, ""))


@pytest.mark.parametrize(
    ("text", "line", "dynamic", "words"),
    [
        (UNBACKED, FIA, False, "list[int]: pass a list, not a Tensor, and set compile.dynamic: true"),
        (UNBACKED, FIA, True, "list[int]: pass a list, not a Tensor; a Tensor goes with dynamic: false"),
        (
            "npu::npu_incre_flash_attention() Expected a value of type 'Optional[List[int]]' but found type 'Tensor'.",
            "",
            True,
            "not a Tensor",
        ),
        (
            "npu_prompt_flash_attention(): argument 'actual_seq_lengths' must be SymInt[], not list",
            "",
            True,
            "flat list",
        ),
    ],
)
def test_attention_fault_says_which_type_goes_with_which_dynamic(
    text: str, line: str, dynamic: bool, words: str
) -> None:
    """The table of the guide: list[int] with dynamic: true, a Tensor with dynamic: false."""
    assert words in str(attention_fault(text, line, dynamic=dynamic))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (UNBACKED, "n = x.max().item()"),
        ("npu_fused_infer_attention_score: the simulation's reference covers other layouts", FIA),
        ("mat1 and mat2 shapes cannot be multiplied", ""),
    ],
)
def test_attention_fault_is_not_every_error_near_it(text: str, line: str) -> None:
    """Another operator's symbols, and another error of the same operator."""
    assert attention_fault(text, line, dynamic=False) is None


@pytest.mark.parametrize(
    ("text", "line", "kind", "rule"),
    [
        ("Unsupported Tensor.item() call with capture_scalar_outputs=False", "", "host-read", "rule 5"),
        ("aten._local_scalar_dense.default reads a tensor's value on the host", "", "host-read", "rule 5"),
        ("Cannot compare GetAttrVariable(LoggingLoggerVariable(), name)", "", "print", "rule 11"),
        ("TypeError: unhashable type: 'dict'", "", "stream", "rule 11"),
        ("Failed to trace builtin operator", 'print("y", y.shape)', "print", "rule 11"),
        ("generic_jump TensorVariable()", "if y.sum() > 0:", "branch", "rule 6"),
        ("Dynamic shape operator: aten.nonzero.default", "", "dynamic-shape", "rule 7"),
        ("'>=' not supported between instances of 'ValuePack' and 'int'", "x[x > 0]", "dynamic-shape", "rule 7"),
        ("torch.npu.synchronize() can't be traced", "", "stream", "rule 11"),
        ("aten.randn.default can't be captured", "", "random", "rule 10"),
        ("Something new in the next torch", "", "graph-break", "model-rules"),
    ],
)
def test_break_advice_goes_by_dynamos_words_and_the_line(text: str, line: str, kind: str, rule: str) -> None:
    """Each break has a rule to read."""
    found, advice = break_advice(text, line)

    assert kind == found
    assert rule in advice


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (
            "There is a mismatch between the cached CANN version 8.2 and the current CANN version 8.5, it is",
            "static-kernel",
            "another CANN",
        ),
        ("The deterministic level has changed (from 0 to 1), it is recommended", "static-kernel", "determinism"),
        ("[Errno 13] Permission denied: '/c/ts1_pid2_outputs/static.run'", "static-kernel", "chmod u+x"),
        ("Clear broken cache /c/compiled_module as Version mismatch: 1.0.5 != 1.0.6", "inert", "torch_npu version"),
        ("Skip cache as main_decode recompiled", "not-saved", "one graph"),
    ],
)
def test_runtime_notes_say_what_a_warning_means(text: str, kind: str, words: str) -> None:
    """In torch_npu's own words, once, with what to do."""
    (found,) = runtime_notes([text, "a warning nobody knows", text])

    assert (kind, one_line(text)) == (found["kind"], found["what"])
    assert words in found["next"]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_finding_has_no_number_that_json_lacks(value: float) -> None:
    """A difference of shapes is infinite, one of NaN no number."""
    assert "difference" not in finding("differs", "x", "", difference=value)
    assert {"difference": 0.5, "times": 2}.items() <= finding("differs", "x", "", difference=0.5, times=2).items()


def test_one_line_is_cut_where_nobody_reads_on() -> None:
    """Dynamo's texts can be long."""
    assert ("a b", 1500) == (one_line(" a\n  b"), len(one_line("x " * 2000)))


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("/home/somebody/models/decoder/src/layers/norm.py", "layers/norm.py:3 in f"),
        ("/home/somebody/models/decoder/run.py", "run.py:3 in f"),
        ("/opt/venv/lib/python3.11/site-packages/pkg/a.py", "pkg/a.py:3 in f"),
        ("/home/somebody/elsewhere/b.py", "b.py:3 in f"),
    ],
)
def test_place_of_is_never_absolute(file: str, place: str) -> None:
    """Nothing of a home folder in a report."""
    assert place == place_of(file, 3, "f", ROOTS)


def test_user_place_is_the_innermost_of_the_models_own() -> None:
    """Upstream's frames below it say less."""
    frames = [
        ("/opt/app/cachectl/build/triage.py", 1, "run"),
        ("/home/somebody/models/decoder/src/model.py", 5, "decode"),
        ("/opt/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", 9, "forward"),
    ]

    assert "model.py:5 in decode" == user_place(frames, ROOTS)
    assert "torch/nn/modules/linear.py:9 in forward" == user_place(frames[2:], ROOTS)
    assert "model.py:5 in decode" == user_place([*frames, (logging.__file__, 7, "getLogger")], ROOTS)
    assert user_place([], ROOTS) is None


def test_user_frames_are_those_that_a_graph_under_interpretation_says() -> None:
    """A backend that runs the graph's nodes raises in its own code, and FX adds where the node came from."""
    text = (
        "TypeError: '>=' not supported\n\nWhile executing %ge : [num_users=1] = ...\nOriginal traceback:\n"
        '  File "/home/somebody/models/decoder/src/model.py", line 7, in decode\n    x = x[x > 0]\n        ^^^^^\n'
    )

    assert [("decode", 7, "x = x[x > 0]")] == [(frame.name, frame.lineno, frame.line) for frame in user_frames(text)]


def test_user_frames_are_those_that_dynamo_says() -> None:
    """An error inside of Dynamo has no frame of the model's but in its words."""
    text = (
        f"{UNBACKED}\n\nfrom user code:\n"
        '   File "/home/somebody/models/decoder/src/model.py", line 5, in decode\n'
        f"    {FIA}\n           ^^^^\n\nSet TORCHDYNAMO_VERBOSE=1"
    )

    (frame,) = user_frames(text)

    assert ("/home/somebody/models/decoder/src/model.py", 5, "decode", FIA) == (
        frame.filename,
        frame.lineno,
        frame.name,
        frame.line,
    )
    assert [] == user_frames(UNBACKED)


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("traced 2 times, the runtime keeps no artifact then", "recompile"),
        ("the runtime did not save the artifact: found 0 saved graphs, wanted 1", "not-saved"),
        ("compiled and eager differ in the first step: output: largest difference 1", "differs"),
        ("reloaded and eager differ in the first step: output: largest difference 1", "reload-differs"),
        ("a fresh process does not load what was saved: inputs: x", "inert"),
        ("draws random numbers in the graph; the runtime can't capture them", "random"),
        ("3 guards can't be kept: x", "refused"),
    ],
)
def test_refusal_kind_goes_by_the_gates_words(what: str, kind: str) -> None:
    """The words are cachectl/build/gates.py's own."""
    assert kind == refusal_kind(what)


def test_value_advice_names_what_is_bound_anew_before_anything_else() -> None:
    """Then what the stage itself points at."""
    assert "binds past, state anew" in value_advice("npugraph_ex", ["past", "state"])
    assert "compile.setup" in value_advice("force_eager", [])
    assert "docs/model-rules.md" in value_advice("aot_eager", [])
    assert "" == value_advice("npugraph_ex", [])
