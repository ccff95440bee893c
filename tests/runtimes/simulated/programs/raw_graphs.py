"""torch.npu.NPUGraph used directly on CPU tensors. Prints one JSON object, one true or false for each statement."""

import json
import sys

import torch
import torch_npu


def replay_follows_inputs():
    weight, given = torch.randn(4, 4), torch.randn(2, 4)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        made = (given @ weight).relu()
    for _ in range(3):
        given.copy_(torch.randn(2, 4))
        graph.replay()
        if not torch.equal(made, (given @ weight).relu()):
            return False
    return True


def capture_leaves_older_tensors_alone():
    counter, cache = torch.zeros(1), torch.zeros(4, 2)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        counter.add_(1)
        cache[1].copy_(torch.ones(2))
        torch.add(counter, 1, out=cache[3, :1])
    if counter.item() != 0 or cache.any():
        return False
    graph.replay()
    graph.replay()
    return counter.item() == 2 and cache[1].tolist() == [1, 1] and cache[3, 0].item() == 3


def undeclared_writers_leave_older_tensors_alone():
    query, key = torch.randn(1, 1, 2, 64), torch.randn(1, 1, 1, 64)
    cos = sin = torch.full((1, 1, 1, 64), 0.5)
    before = query.clone()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        torch_npu.npu_apply_rotary_pos_emb(query, key, cos, sin)
    untouched = torch.equal(query, before)
    graph.replay()
    return untouched and not torch.equal(query, before)


def host_reads_are_refused():
    given = torch.ones(1)
    try:
        with torch.npu.graph(torch.npu.NPUGraph()):
            given.mul(2).item()
    except RuntimeError as error:
        return "on the host while a graph is captured" in str(error)
    return False


def gradients_and_inference_tensors_replay():
    weight = torch.nn.Parameter(torch.ones(3))
    with torch.inference_mode():
        given = torch.ones(3)
    graph = torch.npu.NPUGraph()
    with torch.inference_mode(), torch.npu.graph(graph):
        made = given * weight
        given.add_(1)
    graph.replay()
    graph.replay()
    return made.tolist() == [2, 2, 2] and given.tolist() == [3, 3, 3]


def views_that_copy_replay():
    with torch.inference_mode():
        given = torch.randn(3, 4)
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            flat, same = given.t().reshape(-1), given.reshape(-1)
        given.copy_(torch.randn(3, 4))
        graph.replay()
        return torch.equal(flat, given.t().reshape(-1)) and same.data_ptr() == given.data_ptr()


def updates_reach_captured_attention():
    query, key, value = torch.randn(2, 1, 32), torch.randn(2, 6, 32), torch.randn(2, 6, 32)
    options = {"num_heads": 2, "input_layout": "BSH", "scale": 0.25}

    def attend(lengths):
        return torch_npu.npu_fused_infer_attention_score(query, key, value, actual_seq_lengths_kv=lengths, **options)[0]

    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        attended = attend([1, 1])
        made = attended * 2
    for length in range(1, 7):
        lengths = [length, 7 - length]
        if length % 2:  # both orders are lawful on a device: the graph waits for the update, or finds it done
            graph.replay()
            graph.update([{"actual_seq_lengths_kv": lengths}])
        else:
            graph.update([{"actual_seq_lengths_kv": lengths}])
            graph.replay()
        if not torch.allclose(made, attend(lengths) * 2):
            return False
    return True


def unfinished_update_is_reported():
    query = torch.randn(1, 1, 16)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        torch_npu.npu_fused_infer_attention_score(query, query, query, actual_seq_lengths_kv=[1], num_heads=1)
    graph.replay()
    try:
        graph.replay()
    except RuntimeError as error:
        return "waits for its update" in str(error)
    return False


def outputs_outlive_reset():
    given = torch.ones(1000)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        made = given * 3
    graph.replay()
    graph.reset()
    return made.sum().item() == 3000


STATEMENTS = (
    replay_follows_inputs,
    capture_leaves_older_tensors_alone,
    undeclared_writers_leave_older_tensors_alone,
    host_reads_are_refused,
    gradients_and_inference_tensors_replay,
    views_that_copy_replay,
    updates_reach_captured_attention,
    unfinished_update_is_reported,
    outputs_outlive_reset,
)

if __name__ == "__main__":
    torch.manual_seed(0)
    json.dump({statement.__name__: bool(statement()) for statement in STATEMENTS}, sys.stdout)
