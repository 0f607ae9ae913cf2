"""The kernels at the sizes they are made for, on a GPU: bfloat16, real head counts, one graph replayed many times."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from headstock import ForwardBatch
from headstock.testing.problem import Problem, make_problem
from headstock.testing.rig import Rig
from headstock_triton.backend import TritonAttention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

REAL: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "device": "cuda"}
LATENT: dict[str, Any] = {
    "attention": "mla", "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "page_size": 64, "device": "cuda",
    "dtype": "bfloat16",
}  # fmt: skip


def big(new: list[int], lens: list[int], **fields: Any) -> tuple[Any, ForwardBatch, Any, Any, Any, torch.Tensor]:
    """A filled cache of real size, its batch, and the layer's q, k, v; too big for the float64 reference."""
    problem = make_problem([1], [1], **{**REAL, "dtype": "bfloat16", **fields, "max_context": max(lens)})
    page = problem.spec.page_size
    pages = [-(-length // page) for length in lens]
    order = torch.randperm(sum(pages)) + 1
    table = torch.zeros(len(lens), max(pages), dtype=torch.int32)
    for row, part in enumerate(order.split(pages)):
        table[row, : len(part)] = part
    gpu = torch.cuda.get_device_properties(0)
    spec = replace(
        problem.spec, max_batch=len(lens), max_tokens=max(sum(new), 64), query_lens=frozenset(new),
        compute_capability=gpu.major * 10 + gpu.minor, num_sms=gpu.multi_processor_count,
    )  # fmt: skip
    assert problem.layout is not None
    storage = torch.empty(sum(pages) + 1, problem.layout.bytes_per_page(spec), dtype=torch.uint8, device="cuda")
    storage.view(torch.bfloat16).normal_()
    batch = ForwardBatch.from_lengths(new, lens, table.cuda(), page, phase=fields.get("phase"))
    q, k, v = (torch.randn(sum(new), h, 128, dtype=torch.bfloat16, device="cuda") for h in (32, 8, 8))
    return spec, batch, q, k, v, storage


@pytest.mark.parametrize(
    ("new", "lens"),
    [
        ([1] * 64, [4096 - 37 * i for i in range(64)]),
        ([1], [32768]),
        ([1, 1, 1], [1, 70000, 17]),
        ([4] * 8, [4, 5, 1000, 4096, 64, 63, 65, 9000]),
        ([4096, 1, 700], [4096, 4096, 8000]),
    ],
)
def test_real_sizes_match_torch(new, lens):
    phase = "decode" if len(set(new)) == 1 else "extend"
    spec, batch, q, k, v, storage = big(new, lens, phase=phase)
    layer = make_problem([1], [1], **REAL, dtype="bfloat16")
    problem = Problem(spec=spec, batch=batch, layout=layer.layout, storage=storage, q=q, k=k, v=v)
    out = Rig(TritonAttention, spec).run(problem).out
    kv = problem.layer(storage.clone()).kv
    kv.write(k, v, batch.out_cache_loc)
    first = 0
    for row, (n, length) in enumerate(zip(new, lens, strict=True)):
        at = torch.arange(length, device="cuda")
        slots = batch.page_table[row, at // 16].long() * 16 + at % 16
        keys, values = (x.float().transpose(0, 1) for x in kv.gather(slots))
        queries = q[first : first + n].float().transpose(0, 1)
        mask = torch.ones(n, length, dtype=torch.bool, device="cuda").tril(length - n)
        want = scaled_dot_product_attention(queries[None], keys[None], values[None], mask, enable_gqa=True)[0]
        torch.testing.assert_close(out[first : first + n].float(), want.transpose(0, 1), atol=2e-2, rtol=0)
        first += n


@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize(
    ("new", "lens"),
    [
        ([1] * 64, [4096 - 37 * i for i in range(64)]),
        ([1, 1], [1, 20000]),
        ([2] * 4, [2, 65, 1000, 3000]),
        ([300, 1, 64], [300, 700, 2000]),
    ],
)
def test_latents_of_deepseeks_size_match_torch(new, lens, heads):
    phase = "decode" if len(set(new)) == 1 else "extend"
    problem = make_problem(new, [max(new)] * len(new), **LATENT, num_heads=heads, phase=phase)
    gpu = torch.cuda.get_device_properties(0)
    spec = replace(
        problem.spec, max_context=max(lens), compute_capability=gpu.major * 10 + gpu.minor,
        num_sms=gpu.multi_processor_count,
    )  # fmt: skip
    pages = [-(-length // 64) for length in lens]
    table = torch.zeros(len(lens), max(pages), dtype=torch.int32)
    for row, part in enumerate((torch.randperm(sum(pages)) + 1).split(pages)):
        table[row, : len(part)] = part
    storage = torch.empty(sum(pages) + 1, problem.layout.bytes_per_page(spec), dtype=torch.uint8, device="cuda")
    storage.view(torch.bfloat16).normal_()
    batch = ForwardBatch.from_lengths(new, lens, table.cuda(), 64, phase=phase)
    given = replace(problem, spec=spec, batch=batch, storage=storage)
    out = Rig(TritonAttention, spec).run(given).out
    kv, first = given.layer(storage.clone()).kv, 0
    kv.write(given.k, None, batch.out_cache_loc)
    for row, (n, length) in enumerate(zip(new, lens, strict=True)):
        keys = kv.latent[batch.page_table[row].long()].flatten(0, 1)[:length].float()
        scores = given.q[first : first + n].float() @ keys.T * spec.scale
        seen = torch.ones(n, length, dtype=torch.bool, device="cuda").tril(length - n)
        want = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ keys[:, :512]
        torch.testing.assert_close(out[first : first + n].float(), want, atol=2e-2, rtol=0)
        first += n


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"window": 200}, {"kv_dtype": "float8_e4m3fn", "k_scale": 0.5, "v_scale": 0.5},
        {"attention": "mla", "num_heads": 16, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512},
        {"attention": "mla", "num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "page_size": 32},
    ],
)  # fmt: skip
def test_two_hundred_replays_of_one_capture_have_an_eager_forwards_bits(fields):
    from headstock.testing.graphs import _Stand  # the suite's own stand, driven with other lengths and for longer

    stand = _Stand(TritonAttention, {**REAL, "num_heads": 8, "num_kv_heads": 2, "dtype": "bfloat16", **fields})
    draw = random.Random(3)
    for _ in range(200):
        stand.replay([draw.randint(1, 32) for _ in range(draw.randint(1, 4))])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch says so of its own switch
def test_no_layer_of_a_step_waits_for_the_device():
    spec, batch, q, k, v, storage = big([1] * 4, [100, 200, 300, 4000], phase="decode")
    rig = Rig(TritonAttention, spec)
    layer = make_problem([1], [1], **REAL, dtype="bfloat16")
    problem = Problem(spec=spec, batch=batch, layout=layer.layout, storage=storage, q=q, k=k, v=v)
    view, out = problem.layer(storage), torch.empty_like(q)
    for mode in ("default", "error"):  # compiled first
        torch.cuda.set_sync_debug_mode(mode)
        try:
            rig.instance.init_forward_metadata(batch)
            rig.instance.init_forward_metadata_in_graph(batch)
            rig.instance.forward(q, k, v, view, batch, out=out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
