"""Each reference operator against a naive computation of its documented formula. Prints {operator: null or error}.

The naive side loops over elements, or writes the formula in another way than the reference does. Every call's results
must have the shapes and types that torch_npu's meta kernel infers, because graphs are compiled with these.
"""

import json
import math
import sys
import traceback
from pathlib import Path

import torch
import torch_npu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CHECKS = {}


def check(*names):
    def keep(function):
        for name in names:
            CHECKS[name] = function
        return function

    return keep


def close(got, want, tolerance=1e-5):
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
    error = (got.double() - want.double()).abs().max().item() if want.numel() else 0
    assert error <= tolerance, f"error {error}"


# ---- normalisation ----
def naive_rms(x, gamma, epsilon=1e-6):
    rows = [
        [v / math.sqrt(sum(w * w for w in row) / len(row) + epsilon) for v in row] for row in x.flatten(0, -2).tolist()
    ]
    return torch.tensor(rows).view_as(x) * gamma


@check("npu_rms_norm")
def rms_norm():
    x, gamma = torch.randn(2, 3, 8), torch.rand(8)
    y, rstd = torch_npu.npu_rms_norm(x, gamma)
    close(y, naive_rms(x, gamma))
    close(rstd, 1 / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt())
    assert torch_npu.npu_rms_norm(x.bfloat16(), gamma.bfloat16())[0].dtype is torch.bfloat16


@check("npu_gemma_rms_norm")
def gemma_rms_norm():
    x, gamma = torch.randn(2, 8), torch.rand(8)
    close(torch_npu.npu_gemma_rms_norm(x, gamma)[0], naive_rms(x, gamma + 1))


@check("npu_add_rms_norm")
def add_rms_norm():
    x, y, gamma = torch.randn(2, 8), torch.randn(2, 8), torch.rand(8)
    out, _, total = torch_npu.npu_add_rms_norm(x, y, gamma)
    close(out, naive_rms(x + y, gamma))
    close(total, x + y)


@check("npu_add_rms_norm_cast")
def add_rms_norm_cast():
    x, y, gamma = torch.randn(2, 8).half(), torch.randn(2, 8).half(), torch.rand(8).half()
    wide, narrow, _, total = torch_npu.npu_add_rms_norm_cast(x, y, gamma)
    close(wide, naive_rms((x + y).float(), gamma.float()))
    assert wide.dtype is torch.float32
    assert torch.equal(narrow, wide.half())
    assert torch.equal(total, x + y)


# ---- rotary ----
def naive_rotary(x, cos, sin, interleaved=False):
    out, half = torch.empty_like(x), x.shape[-1] // 2
    for i in range(x.shape[-1]):
        if interleaved:
            partner = -x[..., i + 1] if i % 2 == 0 else x[..., i - 1]
        else:
            partner = -x[..., i + half] if i < half else x[..., i - half]
        out[..., i] = x[..., i] * cos[..., i] + partner * sin[..., i]
    return out


@check("npu_rotary_mul")
def rotary_mul():
    x, cos, sin = torch.randn(2, 3, 4, 8), torch.rand(2, 3, 1, 8), torch.rand(2, 3, 1, 8)
    close(torch_npu.npu_rotary_mul(x, cos, sin), naive_rotary(x, cos, sin))
    close(torch_npu.npu_rotary_mul(x, cos, sin, "interleave"), naive_rotary(x, cos, sin, True))
    turn = torch.zeros(8, 8)
    turn[:4, 4:], turn[4:, :4] = torch.eye(4), -torch.eye(4)
    close(torch_npu.npu_rotary_mul(x, cos, sin, "half", turn), naive_rotary(x, cos, sin))


@check("npu_apply_rotary_pos_emb")
def apply_rotary_pos_emb():
    query, key = torch.randn(1, 2, 4, 64), torch.randn(1, 2, 1, 64)
    cos, sin = torch.rand(1, 2, 1, 64), torch.rand(1, 2, 1, 64)
    wanted = naive_rotary(query, cos, sin), naive_rotary(key, cos, sin)
    got = torch_npu.npu_apply_rotary_pos_emb(query, key, cos, sin)
    close(got[0], wanted[0])
    close(got[1], wanted[1])
    close(query, wanted[0])  # in place, as the document says


def naive_interleave_rope(x, cos, sin):
    pairs = x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).reshape(x.shape)
    return naive_rotary(pairs, cos, sin)


@check("npu_interleave_rope")
def interleave_rope():
    x, cos, sin = torch.randn(2, 4, 1, 64), torch.rand(2, 1, 1, 64), torch.rand(2, 1, 1, 64)
    close(torch_npu.npu_interleave_rope(x, cos, sin), naive_interleave_rope(x, cos, sin))


@check("npu_kv_rmsnorm_rope_cache")
def kv_rmsnorm_rope_cache():
    kv, gamma = torch.randn(2, 1, 3, 512 + 64), torch.rand(512)
    cos, sin = torch.rand(2, 1, 3, 64), torch.rand(2, 1, 3, 64)
    latent = naive_rms(kv[..., :512].contiguous(), gamma, 1e-5)
    rope = naive_interleave_rope(kv[..., 512:].contiguous(), cos, sin)
    index = torch.tensor([[0, 2, 1], [3, 4, 5]])
    k_cache, ckv_cache = torch.zeros(2, 1, 6, 64), torch.zeros(2, 1, 6, 512)
    torch_npu.npu_kv_rmsnorm_rope_cache(kv, gamma, cos, sin, index, k_cache, ckv_cache, epsilon=1e-5, cache_mode="Norm")
    for batch in range(2):
        for token in range(3):
            close(k_cache[batch, 0, index[batch, token]], rope[batch, 0, token], 1e-4)
            close(ckv_cache[batch, 0, index[batch, token]], latent[batch, 0, token], 1e-4)
    slots = torch.tensor([0, 5, 9, -1, 2, 11])
    k_pages, ckv_pages = torch.zeros(3, 4, 1, 64), torch.zeros(3, 4, 1, 512)
    torch_npu.npu_kv_rmsnorm_rope_cache(kv, gamma, cos, sin, slots, k_pages, ckv_pages, epsilon=1e-5, cache_mode="PA")
    wanted = torch.zeros(12, 1, 64)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            wanted[slot, 0] = rope[token // 3, 0, token % 3]
    close(k_pages.view(12, 1, 64), wanted, 1e-4)


# ---- activations ----
@check("npu_swiglu")
def swiglu():
    x = torch.randn(3, 8)
    wanted = [[row[i] / (1 + math.exp(-row[i])) * row[i + 4] for i in range(4)] for row in x.tolist()]
    close(torch_npu.npu_swiglu(x), torch.tensor(wanted))
    assert torch_npu.npu_swiglu(torch.randn(4, 6), 0).shape == (2, 6)


@check("npu_gelu")
def gelu():
    x = torch.randn(9)
    close(
        torch_npu.npu_gelu(x, approximate="none"),
        torch.tensor([v / 2 * (1 + math.erf(v / 2**0.5)) for v in x.tolist()]),
    )


@check("npu_fast_gelu")
def fast_gelu():
    x = torch.randn(9)
    # exp(0.851 (x - |x|)) / (1 + exp(-1.702 |x|)) is the sigmoid of 1.702 x
    close(torch_npu.npu_fast_gelu(x), torch.tensor([v / (1 + math.exp(-1.702 * v)) for v in x.tolist()]))


# ---- caches ----
@check("scatter_update_", "scatter_update")
def scatter_update():
    cache, new, starts = torch.zeros(2, 3, 6, 4), torch.randn(2, 3, 2, 4), torch.tensor([1, 4])
    wanted = cache.clone()
    for batch in range(2):
        for head in range(3):
            for token in range(2):
                wanted[batch, head, starts[batch] + token] = new[batch, head, token]
    close(torch_npu.scatter_update(cache, starts, new, -2), wanted)
    assert not cache.any()
    assert torch_npu.scatter_update_(cache, starts, new, -2).data_ptr() == cache.data_ptr()
    close(cache, wanted)


@check("npu_scatter_nd_update_", "npu_scatter_nd_update")
def scatter_nd_update():
    table, places, rows = torch.zeros(4, 5, 6), torch.tensor([[0, 1], [3, 4], [2, 2]]), torch.randn(3, 6)
    wanted = table.clone()
    for (i, j), row in zip(places.tolist(), rows, strict=True):
        wanted[i, j] = row
    close(torch_npu.npu_scatter_nd_update(table, places, rows), wanted)
    assert not table.any()
    torch_npu.npu_scatter_nd_update_(table, places, rows)
    close(table, wanted)


@check("npu_scatter_pa_kv_cache")
def scatter_pa_kv_cache():
    key, value, slots = torch.randn(3, 2, 16), torch.randn(3, 2, 16), torch.tensor([5, 0, 7])
    for mode in ("Norm", "PA_NZ"):
        shape = (2, 4, 2, 16) if mode == "Norm" else (2, 2, 4, 16)
        keys, values = torch.zeros(shape), torch.zeros(shape)
        torch_npu.npu_scatter_pa_kv_cache(key, value, keys, values, slots, cache_mode=mode)
        for token, slot in enumerate(slots.tolist()):
            for head in range(2):
                for cache, rows in ((keys, key), (values, value)):
                    page = cache[slot // 4]
                    close(page[slot % 4, head] if mode == "Norm" else page[head, slot % 4], rows[token, head])


@check("npu_gather_pa_kv_cache")
def gather_pa_kv_cache():
    pages, table, lengths = (
        torch.randn(4, 2, 1, 8),
        torch.tensor([[3, 1], [0, 2]], dtype=torch.int32),
        torch.tensor([3, 2]),
    )
    key, value = torch.zeros(5, 1, 8), torch.zeros(5, 1, 8)
    torch.ops.npu.npu_gather_pa_kv_cache(pages, pages + 1, table, lengths, key, value)
    close(key, torch.stack([pages[3, 0], pages[3, 1], pages[1, 0], pages[0, 0], pages[0, 1]]))
    close(value, key + 1)


@check("npu_format_cast", "npu_format_cast_", "npu_format_cast_.acl_format", "_npu_format_cast")
def format_cast():
    x = torch.randn(3, 4)
    y = torch_npu.npu_format_cast(x, 29)
    assert torch.equal(x, y)
    assert y.data_ptr() != x.data_ptr()
    assert torch_npu.npu_format_cast_(x, 29).data_ptr() == x.data_ptr()


@check("npu_dtype_cast", "_npu_dtype_cast")
def dtype_cast():
    x = torch.randn(3)
    assert torch.equal(torch_npu.npu_dtype_cast(x, torch.bfloat16), x.bfloat16())
    assert torch.equal(torch.ops.npu._npu_dtype_cast(x, torch.float16), x.half())


@check("npu_prefetch")
def prefetch():
    assert torch_npu.npu_prefetch(torch.ones(2), None, 16) is None


@check("npu_transpose")
def transpose():
    x = torch.randn(2, 3, 4)
    got = torch_npu.npu_transpose(x, [2, 0, 1])
    assert got.is_contiguous()
    close(got, torch.stack([x[:, :, i] for i in range(4)]))


# ---- products ----
@check("npu_linear")
def linear():
    x, weight, bias = torch.randn(2, 4), torch.randn(3, 4), torch.randn(3)
    close(torch_npu.npu_linear(x, weight, bias), torch.einsum("mk,nk->mn", x, weight) + bias)


@check("npu_bmmV2")
def bmm():
    x, y = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    close(torch_npu.npu_bmmV2(x, y, []), torch.einsum("bmk,bkn->bmn", x, y))


@check("npu_transpose_batchmatmul")
def transpose_batchmatmul():
    x, weight = torch.randn(3, 2, 4), torch.randn(2, 4, 5)
    got = torch_npu.npu_transpose_batchmatmul(x, weight, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2))
    close(got, torch.einsum("mbk,bkn->mbn", x, weight))


# ---- quantisation ----
def naive_int8(x):
    rows, scales = [], []
    for row in x.tolist():
        scales.append(max(abs(v) for v in row) / 127)
        rows.append([round(v / scales[-1]) for v in row])
    return torch.tensor(rows, dtype=torch.int8), torch.tensor(scales)


@check("npu_dynamic_quant")
def dynamic_quant():
    x, smooth = torch.randn(3, 8), torch.rand(8) + 0.5
    for got, want in zip(torch_npu.npu_dynamic_quant(x), naive_int8(x), strict=True):
        close(got, want)
    for got, want in zip(torch_npu.npu_dynamic_quant(x, smooth_scales=smooth), naive_int8(x * smooth), strict=True):
        close(got, want)
    grouped = torch.rand(2, 8) + 0.5
    got = torch_npu.npu_dynamic_quant(x, smooth_scales=grouped, group_index=torch.tensor([1, 3], dtype=torch.int32))
    close(got[0], naive_int8(torch.stack([x[0] * grouped[0], x[1] * grouped[1], x[2] * grouped[1]]))[0])
    assert not torch_npu.npu_dynamic_quant(torch.zeros(1, 4))[0].any()


@check("npu_add_rms_norm_dynamic_quant")
def add_rms_norm_dynamic_quant():
    x, y, gamma, smooth = torch.randn(2, 8), torch.randn(2, 8), torch.rand(8), torch.rand(8)
    out = torch_npu.npu_add_rms_norm_dynamic_quant(x, y, gamma, smooth_scale1=smooth)
    wanted, scale = naive_int8(naive_rms(x + y, gamma) * smooth)
    close(out[0], wanted)
    close(out[2], x + y)
    close(out[3], scale)
    both = torch_npu.npu_add_rms_norm_dynamic_quant(x, y, gamma, smooth_scale1=smooth, smooth_scale2=smooth)
    close(both[1], wanted)
    torch_npu.npu_add_rms_norm_dynamic_quant(x, y, gamma, output_mask=[False, True])


@check("npu_quantize")
def quantize():
    x, scales, zero = torch.randn(2, 4), torch.rand(4) + 0.1, torch.zeros(4)
    got = torch_npu.npu_quantize(x, scales, zero, torch.qint8, axis=1)
    wanted = [
        [min(127, max(-128, round(v / s))) for v, s in zip(row, scales.tolist(), strict=True)] for row in x.tolist()
    ]
    close(got, torch.tensor(wanted, dtype=torch.int8))


@check("npu_quant_matmul")
def quant_matmul():
    x, w = torch.randint(-9, 9, (3, 8), dtype=torch.int8), torch.randint(-9, 9, (8, 4), dtype=torch.int8)
    scale, token = torch.rand(4), torch.rand(3)
    product = torch.einsum("mk,kn->mn", x.int(), w.int())
    got = torch_npu.npu_quant_matmul(x, w, scale, pertoken_scale=token, output_dtype=torch.float16)
    close(got, (product * scale * token.unsqueeze(1)).half(), 0.05)
    assert torch.equal(torch_npu.npu_quant_matmul(x, w, scale, output_dtype=torch.int32), product)


@check("npu_weight_quant_batchmatmul")
def weight_quant_batchmatmul():
    x, w, scale, shift = torch.randn(2, 8), torch.randint(-9, 9, (8, 4), dtype=torch.int8), torch.rand(4), torch.rand(4)
    got = torch_npu.npu_weight_quant_batchmatmul(x.half(), w, scale.half(), shift.half())
    close(got, (x.half().float() @ ((w.float() + shift.half().float()) * scale.half().float())), 0.1)


@check("npu_dequant_swiglu_quant")
def dequant_swiglu_quant():
    x = torch.randint(-99, 99, (4, 8), dtype=torch.int32)
    weight, token = torch.rand(2, 8), torch.rand(4, 1)
    smooth, counts = torch.rand(2, 4) + 0.5, torch.tensor([1, 3])
    got, scales = torch_npu.npu_dequant_swiglu_quant(
        x,
        weight_scale=weight,
        activation_scale=token,
        quant_scale=smooth,
        group_index=counts,
        quant_mode=1,
        activate_left=True,
    )
    rows = []
    for row, group in enumerate((0, 1, 1, 1)):
        value = x[row] * weight[group] * token[row]
        rows.append(torch.nn.functional.silu(value[:4]) * value[4:] * smooth[group])
    wanted, wanted_scales = naive_int8(torch.stack(rows))
    close(got, wanted, 1)  # a tie may round the other way
    close(scales, wanted_scales, 1e-4)


# ---- experts ----
@check("npu_moe_gating_top_k_softmax")
def gating_top_k_softmax():
    x = torch.randn(3, 6)
    weights, experts, source = torch_npu.npu_moe_gating_top_k_softmax(x, k=2)
    for row in range(3):
        total = sum(math.exp(v) for v in x[row].tolist())
        best = sorted(range(6), key=lambda expert: -x[row, expert].item())[:2]
        assert experts[row].tolist() == best
        close(weights[row], torch.tensor([math.exp(x[row, expert].item()) / total for expert in best]))
    assert source.tolist() == [[0, 3], [1, 4], [2, 5]]


@check("npu_moe_gating_top_k")
def gating_top_k():
    x, bias = torch.randn(3, 8), torch.randn(8)
    weights, experts, _ = torch_npu.npu_moe_gating_top_k(
        x, 2, bias=bias, k_group=1, group_count=2, group_select_mode=1, norm_type=1, routed_scaling_factor=2.5
    )
    for row in range(3):
        plain = [1 / (1 + math.exp(-v)) for v in x[row].tolist()]
        ranked = [p + b for p, b in zip(plain, bias.tolist(), strict=True)]
        group = max((0, 1), key=lambda g: sum(sorted(ranked[g * 4 : g * 4 + 4])[-2:]))
        best = sorted(range(group * 4, group * 4 + 4), key=lambda expert: -ranked[expert])[:2]
        assert experts[row].tolist() == best
        total = sum(plain[expert] for expert in best)
        close(weights[row], torch.tensor([2.5 * plain[expert] / total for expert in best]))


@check("npu_moe_init_routing", "npu_moe_compute_expert_tokens")
def init_routing():
    x = torch.tensor([[0.1] * 4, [0.2] * 4, [0.3] * 4])
    rows = torch.tensor([[0, 3], [1, 4], [2, 5]], dtype=torch.int32)
    chosen = torch.tensor([[1, 2], [0, 1], [0, 2]], dtype=torch.int32)
    expanded, places, experts = torch_npu.npu_moe_init_routing(x, rows, chosen, 3)
    assert experts.tolist() == [0, 0, 1, 1, 2, 2]
    for row in range(3):
        for choice in range(2):
            close(expanded[places[rows[row, choice]]], x[row])
    assert torch_npu.npu_moe_compute_expert_tokens(experts, 3).tolist() == [2, 4, 6]


@check("npu_moe_init_routing_v2")
def init_routing_v2():
    x, chosen = torch.randn(3, 4), torch.tensor([[1, 2], [0, 1], [0, 2]], dtype=torch.int32)
    options = {
        "expert_num": 4,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, 4],
    }
    expanded, places, counts, _ = torch_npu.npu_moe_init_routing_v2(x, chosen, active_num=-1, **options)
    assert counts.tolist() == [2, 2, 2, 0]
    for flat in range(6):
        close(expanded[places[flat]], x[flat // 2])
    values, places, _, scales = torch_npu.npu_moe_init_routing_v2(x, chosen, quant_mode=1, row_idx_type=1, **options)
    for place, flat in enumerate(places.tolist()):
        wanted, scale = naive_int8(x[flat // 2 : flat // 2 + 1])
        close(values[place], wanted[0])
        close(scales[place : place + 1], scale)


@check("npu_moe_finalize_routing")
def finalize_routing():
    rows, scales, bias = torch.randn(6, 4), torch.rand(3, 2), torch.randn(5, 4)
    places = torch.randperm(6).int()
    experts, skip = torch.randint(0, 5, (3, 2)).int(), torch.randn(3, 4)
    got = torch_npu.npu_moe_finalize_routing(rows, skip, None, bias, scales, places, experts)
    wanted = skip.clone()
    for row in range(3):
        for choice in range(2):
            wanted[row] += scales[row, choice] * (rows[places[row + choice * 3]] + bias[experts[row, choice]])
    close(got, wanted)


@check("npu_moe_re_routing")
def re_routing():
    tokens, counts = torch.arange(6.0).view(6, 1), torch.tensor([[1, 2], [2, 1]])
    permuted, _, index, totals = torch_npu.npu_moe_re_routing(tokens, counts)
    # rank 0 sent token 0 to expert 0 and 1, 2 to expert 1; rank 1 sent 3, 4 and 5
    assert index.tolist() == [0, 3, 4, 1, 2, 5]
    assert permuted.flatten().tolist() == [0, 3, 4, 1, 2, 5]
    assert totals.tolist() == [3, 3]


@check("npu_grouped_matmul", "npu_grouped_matmul.List")
def grouped_matmul():
    x, weights = torch.randn(5, 4), torch.randn(3, 4, 2)
    groups = (0, 0, 1, 2, 2)
    wanted = torch.stack([x[row] @ weights[group] for row, group in enumerate(groups)])
    for counts, kind in ((torch.tensor([2, 1, 2]), 1), (torch.tensor([2, 3, 5]), 0)):
        got = torch_npu.npu_grouped_matmul(
            [x], [weights], group_list=counts, group_list_type=kind, split_item=3, group_type=0
        )
        close(got[0], wanted)
    apart = torch_npu.npu_grouped_matmul([x[:2], x[2:]], [weights[0], weights[1]], split_item=0, group_type=-1)
    close(apart[1], x[2:] @ weights[1])
    ints, packed = torch.randint(-9, 9, (5, 4), dtype=torch.int8), torch.randint(-9, 9, (3, 4, 2), dtype=torch.int8)
    scale, token = torch.rand(3, 2), torch.rand(5)
    got = torch_npu.npu_grouped_matmul(
        [ints],
        [packed],
        scale=[scale],
        per_token_scale=[token],
        group_list=torch.tensor([2, 1, 2]),
        group_list_type=1,
        split_item=3,
        group_type=0,
        output_dtype=torch.bfloat16,
    )
    for row, group in enumerate(groups):
        product = (ints[row].int().unsqueeze(1) * packed[group].int()).sum(0)
        close(got[0][row], (product * scale[group] * token[row]).bfloat16(), 0.5)


class AgreesWithMeta(TorchDispatchMode):
    """Fails when an npu operator's results differ in shape or type from those of torch_npu's own meta kernel."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        name = func.name()
        if func.namespace != "npu" or not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
            return made

        def to_meta(leaf):
            return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

        expected = func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
        for got, want in zip(tree_leaves(made), tree_leaves(expected), strict=True):
            if isinstance(want, torch.Tensor):
                assert (got.shape, got.dtype) == (want.shape, want.dtype), (
                    f"{name} gave {got.dtype} {tuple(got.shape)}, its meta kernel {want.dtype} {tuple(want.shape)}"
                )
        return made


def main():
    torch.manual_seed(0)
    sys.path.insert(0, str(Path(__file__).parent))
    import attention  # noqa: F401 - adds its checks

    results = {}
    for name, function in CHECKS.items():
        try:
            with AgreesWithMeta():
                function()
            results[name] = None
        except Exception:  # noqa: BLE001 - the next operator is to be checked all the same
            results[name] = traceback.format_exc()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    sys.modules["operators"] = sys.modules["__main__"]
    main()
