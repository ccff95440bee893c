"""A model with one method for each rule that tracing can show: `bad_…` breaks it, `good_…` is the rewrite."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch_npu  # noqa: F401 - registers torch.ops.npu
from torch import Tensor, nn

ROWS, WIDTH, SLOTS = 2, 4, 8
log = logging.getLogger(__name__)
_library = torch.library.Library("checking_zoo", "DEF")
for _name in ("without_meta", "with_meta"):
    _library.define(f"{_name}(Tensor x) -> Tensor")
    _library.impl(_name, lambda x: x * 2, "CPU")
# torchair's own attention operator, as far as tracing goes; the real one needs protobuf.
_air = torch.library.Library("air", "FRAGMENT")
_air.define(
    "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? actual_seq_lengths_kv=None, "
    "int num_heads=1, str input_layout='BSH', float scale=1.0) -> (Tensor, Tensor)"
)
torch.library.register_fake(
    "air::npu_fused_infer_attention_score",
    lambda query, key, value, **options: (torch.empty_like(query), torch.empty_like(query)),
    lib=_air,
)
torch.library.register_fake("checking_zoo::with_meta", torch.empty_like, lib=_library)


class Model(nn.Module):
    """One method a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("kv_cache", torch.zeros(ROWS, SLOTS, WIDTH))
        self.register_buffer("steps", torch.zeros(ROWS, WIDTH))
        self.register_buffer("slots", torch.arange(SLOTS))
        self.register_buffer("cos_cached", torch.zeros(SLOTS, WIDTH))
        self.register_buffer("mask", torch.ones(SLOTS, SLOTS).tril())
        self.past = torch.zeros(ROWS, 1, WIDTH)
        self.kv_list = [torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)]
        self.count = 1

    def bad_random_numbers(self, x: Tensor) -> Tensor:
        return x + torch.randn(ROWS, WIDTH)

    def bad_dropout(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True)

    def good_dropout(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=False)

    def good_attention(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])

    def bad_item(self, x: Tensor) -> Tensor:
        return x * x.sum().item()

    def bad_int(self, x: Tensor) -> Tensor:
        return x * int(x.sum())

    def bad_tolist(self, x: Tensor) -> Tensor:
        return x * x.sum(1).tolist()[0]

    def bad_numpy(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)

    def good_item(self, x: Tensor) -> Tensor:
        return x * x.sum()

    def bad_tensor_branch(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x

    def bad_tensor_loop(self, x: Tensor) -> Tensor:
        while x.sum() < 3:
            x = x + 1
        return x

    def good_tensor_branch(self, x: Tensor) -> Tensor:
        return torch.where(x.sum() > 0, x, -x)

    def bad_data_dependent_shape(self, x: Tensor) -> Tensor:
        return x[x > 0]

    def good_data_dependent_shape(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0)

    def bad_print(self, x: Tensor) -> Tensor:
        print("step", x.shape)  # noqa: T201 - planted
        return x + 1

    def bad_logging(self, x: Tensor) -> Tensor:
        log.warning("step")
        return x + 1

    def bad_grown_cache(self, x: Tensor) -> Tensor:
        self.past = torch.cat((self.past, x[:, None]), dim=1)
        return self.past.sum(1)

    def bad_grown_argument(self, x: Tensor, past_key: Tensor) -> Any:
        key = torch.cat([past_key, x[:, None]], dim=1)
        return key.sum(1), key

    def good_grown_cache(self, x: Tensor, kv_len: Tensor) -> Tensor:
        self.kv_cache[self.slots[:ROWS], kv_len] = x
        return self.kv_cache.sum(1)

    def good_cat(self, x: Tensor) -> Tensor:
        cos = torch.index_select(self.cos_cached, 0, self.slots[:ROWS])
        return torch.cat((cos, cos), -1) + torch.cat((x, x * 2), -1)

    def bad_returned_cache(self, x: Tensor) -> Any:
        self.kv_cache[:, 0] = x
        return x * 2, self.kv_cache

    def bad_returned_argument(self, x: Tensor, past: list[tuple[Tensor, Tensor]]) -> Any:
        for key, value in past:
            key[:, :1].copy_(x[:, :1])
            value.add_(x)
        return x * 2, past

    def good_returned_cache(self, x: Tensor) -> Tensor:
        self.kv_cache[:, 0] = x
        return x * 2

    def bad_rebound_buffer(self, x: Tensor) -> Tensor:
        self.steps = self.steps + x
        return self.steps * 2

    def bad_rebound_list(self, x: Tensor) -> Tensor:
        for layer in range(2):
            self.kv_list[layer] = self.kv_list[layer] + x
        return self.kv_list[1] * 2

    def good_rebound_buffer(self, x: Tensor) -> Tensor:
        self.steps.add_(x)
        return self.steps * 2

    def bad_parameter_written(self, x: Tensor) -> Tensor:
        self.weight.add_(1.0)
        return x * self.weight

    def bad_changed_attribute(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count

    def good_changed_attribute(self, x: Tensor, count: Tensor) -> Tensor:
        return x * count

    def bad_computed_positions(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.size(1))

    def good_computed_positions(self, x: Tensor) -> Tensor:
        return x + self.slots[:WIDTH]

    def bad_computed_rotary(self, x: Tensor) -> Tensor:
        return x * torch.cos(x)

    def good_computed_rotary(self, x: Tensor, positions: Tensor) -> Tensor:
        return x * torch.index_select(self.cos_cached, 0, positions)

    def bad_large_mask(self, x: Tensor) -> Tensor:
        mask = torch.ones(1024, 1024, dtype=torch.bool).tril()
        return x.sum() + mask[0, 0]

    def good_large_mask(self, x: Tensor) -> Tensor:
        return x.sum() + self.mask[0, 0]

    def bad_non_contiguous(self, x: Tensor) -> Tensor:
        return torch.ops.npu.npu_rms_norm(x.t(), self.weight[:ROWS])[0]

    def good_non_contiguous(self, x: Tensor) -> Tensor:
        return torch.ops.npu.npu_rms_norm(x.t().contiguous(), self.weight[:ROWS])[0]

    def good_strided_write(self, x: Tensor, kv_len: Tensor) -> Tensor:
        torch.ops.npu.scatter_update_(self.kv_cache, kv_len, x.repeat(1, 2)[:, None, :WIDTH], -2)
        return x * self.kv_cache.sum(1)

    def bad_stream_sync(self, x: Tensor) -> Tensor:
        torch.npu.synchronize()
        return x + 1

    def bad_backward(self, x: Tensor) -> Tensor:
        self.linear(x).sum().backward()
        return x

    def bad_gradients(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.linear(x)

    def good_gradients(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.weight

    def bad_fia_lengths(self, q: Tensor, k: Tensor, lengths: list[int]) -> Tensor:
        attended, _ = torch.ops.npu.npu_fused_infer_attention_score(
            q, k, k, actual_seq_lengths_kv=lengths, num_heads=2, input_layout="BNSD", scale=1.0
        )
        return attended

    def bad_fia_tensor(self, q: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
        attended, _ = torch.ops.npu.npu_fused_infer_attention_score(
            q, k, k, actual_seq_lengths_kv=lengths, num_heads=2, input_layout="BNSD"
        )
        return attended

    def bad_fia_air(self, q: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
        attended, _ = torch.ops.air.npu_fused_infer_attention_score(
            q, k, k, actual_seq_lengths_kv=lengths, num_heads=2, input_layout="BNSD"
        )
        return attended

    def bad_recompile(self, x: Tensor, sizes: list[int]) -> Tensor:
        return x * sizes[0]

    def good_recompile(self, x: Tensor, sizes: Tensor) -> Tensor:
        return x * sizes[0]

    def bad_simulated_operator(self, x: Tensor) -> Tensor:
        return torch.ops.npu.npu_silu(x)

    def bad_no_meta_kernel(self, x: Tensor) -> Tensor:
        return torch.ops.checking_zoo.without_meta(x)

    def good_no_meta_kernel(self, x: Tensor) -> Tensor:
        return torch.ops.checking_zoo.with_meta(x)

    def bad_does_not_run(self, x: Tensor) -> Tensor:
        return x @ x

    def bad_raises(self, x: Tensor) -> Tensor:
        raise ValueError("no such layout")

    def bad_graph_break(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    def bad_graph_breaks_twice(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        x = x + torch.randn(ROWS, WIDTH)
        print("step")  # noqa: T201 - planted
        return x + 1

    def bad_input_type(self, x: Tensor, options: Any) -> Tensor:
        return x * options.scale

    def bad_shared_input(self, x: Tensor, view: Tensor) -> Tensor:
        view.add_(1.0)
        return x * 2

    def bad_no_graph(self, x: Tensor) -> int:
        return 3

    def bad_several_traces(self, x: Tensor) -> Tensor:
        return x + 1

    def bad_collectives(self, x: Tensor) -> Tensor:
        return torch.distributed._functional_collectives.all_reduce(x, "sum", torch.distributed.group.WORLD)

    def good_fia_lengths(self, q: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
        return q * lengths[:, None, None, None]

    def bad_static_graph(self, x: Tensor) -> Tensor:
        return x + 1

    def bad_cpu(self, x: Tensor) -> Tensor:
        return x.cpu() * 2


class Pair(Model):
    """A model with a draft of its own class."""

    def __init__(self) -> None:
        super().__init__()
        self.draft = Model()


def build(values: bool = False, broken: bool = False) -> Model:
    """Return the model. `values`: read one while building, as no fake can. `broken`: raise."""
    if broken:
        raise RuntimeError("no such checkpoint")
    model = Pair().requires_grad_(False).eval()
    if values:
        model.count = int(model.weight.sum().item()) - WIDTH + 1
    return model


def inputs(model: Model, rank: int, method: str) -> dict[str, Any]:
    """Return a call of a method."""
    x = torch.ones(ROWS, WIDTH)
    more: dict[str, Any] = {
        "bad_grown_argument": {"past_key": torch.zeros(ROWS, 1, WIDTH)},
        "good_grown_cache": {"kv_len": torch.zeros(ROWS, dtype=torch.long)},
        "good_strided_write": {"kv_len": torch.zeros(ROWS, dtype=torch.long)},
        "good_changed_attribute": {"count": torch.ones(())},
        "good_computed_rotary": {"positions": torch.zeros(ROWS, dtype=torch.long)},
        "bad_recompile": {"sizes": [3, 4]},
        "good_recompile": {"sizes": torch.tensor([3, 4])},
        "bad_input_type": {"options": type("Options", (), {"scale": 2.0})()},
        "bad_shared_input": {"view": x[:1]},
        "bad_returned_argument": {"past": [(torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH))]},
    }
    if "fia" in method:
        lengths: Any = [3, 4] if method == "bad_fia_lengths" else torch.tensor([3, 4])
        return {"q": torch.ones(ROWS, 2, 1, 16), "k": torch.ones(ROWS, 2, SLOTS, 16), "lengths": lengths}
    return {"x": x, **more.get(method, {})}
