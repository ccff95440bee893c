"""Checks of the attention references for operators.py: a loop over batches, heads and query rows."""

import math

import torch
import torch_npu
from operators import check, close

BATCH, HEADS, KV_HEADS, SIZE, LENGTH = 2, 4, 2, 8, 12
SCALE = SIZE**-0.5


def naive(queries, keys, values, lengths=None, hidden=None, sink=None, scale=SCALE):
    """Attend [B, N, S, D] over [B, KV heads, L, D], element by element."""
    batches, heads, rows, _ = queries.shape
    out = torch.zeros(batches, heads, rows, values.shape[-1])
    sums = torch.zeros(batches, heads, rows, 1)
    for batch in range(batches):
        for head in range(heads):
            shared = head // (heads // keys.shape[1])
            for row in range(rows):
                seen = range(keys.shape[2] if lengths is None else lengths[batch])
                seen = [at for at in seen if hidden is None or not hidden(batch, row, at)]
                scores = [math.exp(scale * float(queries[batch, head, row] @ keys[batch, shared, at])) for at in seen]
                total = sum(scores) + (math.exp(float(sink[head])) if sink is not None else 0)
                sums[batch, head, row] = math.log(total)
                for score, at in zip(scores, seen, strict=True):
                    out[batch, head, row] += score / total * values[batch, shared, at]
    return out, sums


def inputs(rows=1):
    return (
        torch.randn(BATCH, HEADS, rows, SIZE),
        torch.randn(BATCH, KV_HEADS, LENGTH, SIZE),
        torch.randn(BATCH, KV_HEADS, LENGTH, SIZE),
    )


def to_layout(tensor, layout):
    if layout == "BNSD":
        return tensor
    tensor = tensor.transpose(1, 2).contiguous()
    return tensor if layout == "BSND" else tensor.flatten(2)


def options(layout, **more):
    return {"num_heads": HEADS, "num_key_value_heads": KV_HEADS, "scale": SCALE, "input_layout": layout, **more}


@check("npu_fused_infer_attention_score", "npu_fused_infer_attention_score.out")
def fused_infer():
    lengths = [3, LENGTH]
    for layout in ("BSH", "BSND", "BNSD"):
        tensors = inputs()
        got, lse = torch_npu.npu_fused_infer_attention_score(
            *(to_layout(tensor, layout) for tensor in tensors),
            actual_seq_lengths_kv=lengths,
            softmax_lse_flag=True,
            **options(layout),
        )
        wanted, sums = naive(*tensors, lengths)
        close(got, to_layout(wanted, layout))
        close(lse, sums)
    made = [torch.zeros_like(got), torch.zeros_like(lse)]
    torch_npu.npu_fused_infer_attention_score.out(
        *tensors,
        actual_seq_lengths_kv=[5, 6],
        **options("BNSD", softmax_lse_flag=True),
        workspace=torch.empty(1),
        out=made,
    )
    close(made[0], naive(*tensors, [5, 6])[0])


@check("npu_prompt_flash_attention")
def masks():
    queries, keys, values = inputs(rows=4)
    mask = torch.rand(BATCH, 1, 4, LENGTH) < 0.3
    mask[..., 0] = False
    got = torch_npu.npu_fused_infer_attention_score(queries, keys, values, atten_mask=mask, **options("BNSD"))[0]
    close(got, naive(queries, keys, values, hidden=lambda b, row, at: bool(mask[b, 0, row, at]))[0])
    triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    got = torch_npu.npu_fused_infer_attention_score(
        queries, keys, values, atten_mask=triangle, sparse_mode=3, **options("BNSD")
    )[0]
    causal = naive(queries, keys, values, hidden=lambda b, row, at: at > row + LENGTH - 4)[0]
    close(got, causal)
    prompt = {"num_heads": HEADS, "num_key_value_heads": KV_HEADS, "scale_value": SCALE, "input_layout": "BNSD"}
    got = torch_npu.npu_prompt_flash_attention(queries, keys, values, atten_mask=triangle, sparse_mode=3, **prompt)
    close(got, causal)


@check("npu_incre_flash_attention")
def incre_flash():
    tensors = inputs()
    got = torch_npu.npu_incre_flash_attention(
        *tensors,
        actual_seq_lengths=[4, 9],
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale_value=SCALE,
        input_layout="BNSD",
    )
    close(got, naive(*tensors, [4, 9])[0])


@check("paged attention")
def paged():
    queries, keys, values = inputs()
    block, lengths = 4, [5, 11]
    table = torch.tensor([[5, 0, 3], [2, 4, 1]], dtype=torch.int32)

    def pages(tensor, kind):
        made = torch.zeros(6, block, KV_HEADS, SIZE)
        for batch in range(BATCH):
            for at in range(LENGTH):
                made[table[batch, at // block], at % block] = tensor[batch, :, at]
        if kind == "flat":
            return made.flatten(2)
        return made.transpose(1, 2).contiguous() if kind == "heads" else made

    wanted = naive(queries, keys, values, lengths)[0]
    for layout, kind in (("BSH", "flat"), ("BNSD", "heads")):
        got = torch_npu.npu_fused_infer_attention_score(
            to_layout(queries, layout),
            pages(keys, kind),
            pages(values, kind),
            actual_seq_lengths_kv=lengths,
            block_table=table,
            block_size=block,
            **options(layout),
        )[0]
        close(got, to_layout(wanted, layout))


@check("npu_fused_infer_attention_score_v2", "npu_fused_infer_attention_score_v2.out")
def second_version():
    queries, keys, values = inputs(rows=3)
    sink = torch.randn(HEADS)
    ends, kv_ends = [3, 6], [LENGTH, 2 * LENGTH]
    got = torch_npu.npu_fused_infer_attention_score_v2(
        queries.transpose(1, 2).flatten(0, 1).contiguous(),
        keys.transpose(1, 2).flatten(0, 1).contiguous(),
        values.transpose(1, 2).flatten(0, 1).contiguous(),
        actual_seq_qlen=ends,
        actual_seq_kvlen=kv_ends,
        num_query_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        softmax_scale=SCALE,
        input_layout="TND",
        learnable_sink=sink,
    )[0]
    close(got, naive(queries, keys, values, sink=sink)[0].transpose(1, 2).flatten(0, 1))


@check("rope parts")
def rope_parts():
    queries, keys, values = torch.randn(2, 4, 1, 16), torch.randn(2, 1, 6, 16), torch.randn(2, 1, 6, 16)
    query_rope, key_rope = torch.randn(2, 4, 1, 4), torch.randn(2, 1, 6, 4)
    got = torch_npu.npu_fused_infer_attention_score(
        queries,
        keys,
        values,
        query_rope=query_rope,
        key_rope=key_rope,
        num_heads=4,
        num_key_value_heads=1,
        scale=0.2,
        input_layout="BNSD",
        actual_seq_lengths_kv=[6, 2],
    )[0]
    wanted = naive(torch.cat((queries, query_rope), -1), torch.cat((keys, key_rope), -1), values, [6, 2], scale=0.2)[0]
    close(got, wanted)


@check("refused arguments")
def refused_arguments():
    tensors, said = inputs(), "nothing"
    try:
        torch_npu.npu_fused_infer_attention_score(
            *tensors, pse_shift=torch.zeros(1, HEADS, 1, LENGTH), **options("BNSD")
        )
    except NotImplementedError as error:
        said = str(error)
    assert said.startswith("npu::npu_fused_infer_attention_score with pse_shift=")
