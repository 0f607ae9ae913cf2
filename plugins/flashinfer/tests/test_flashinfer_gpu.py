"""The kernels at the sizes they are made for, on a GPU: bfloat16, real head counts, one graph replayed many times."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from headstock import ForwardBatch
from headstock.testing.graphs import replays_equal_eager
from headstock.testing.problem import Problem, make_problem
from headstock.testing.rig import Rig
from headstock_flashinfer.accessor import library
from headstock_flashinfer.backend import FlashInferAttention
from headstock_flashinfer.options import Options

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("flashinfer") is None, reason="needs a GPU and FlashInfer"
)

REAL: dict[str, Any] = {
    "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "device": "cuda", "dtype": "bfloat16",
}  # fmt: skip


def big(new: list[int], lens: list[int], **fields: Any) -> Problem:
    """A problem of real size with a filled cache, too big for the float64 reference."""
    problem = make_problem([1], [1], **{**REAL, **fields, "max_context": max(lens)})
    page = problem.spec.page_size
    pages = [-(-length // page) for length in lens]
    table = torch.zeros(len(lens), max(pages), dtype=torch.int32)
    for row, part in enumerate((torch.randperm(sum(pages)) + 1).split(pages)):
        table[row, : len(part)] = part
    spec = replace(
        problem.spec, max_batch=len(lens), max_tokens=max(sum(new), 64), query_lens=frozenset(new),
    )  # fmt: skip
    assert problem.layout is not None
    storage = torch.empty(sum(pages) + 1, problem.layout.bytes_per_page(spec), dtype=torch.uint8, device="cuda")
    storage.view(torch.bfloat16).normal_()
    batch = ForwardBatch.from_lengths(new, lens, table.cuda(), page, phase=fields.get("phase"))
    q, k, v = (torch.randn(sum(new), heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (32, 8, 8))
    return Problem(spec=spec, batch=batch, layout=problem.layout, storage=storage, q=q, k=k, v=v)


@pytest.mark.parametrize(
    "options",
    [Options(prefill="fa2"), Options(), Options(prefill="fa2", extend="split"), Options(extend="split"),
     Options(decode="cuda-cores")],
    ids=["fa2", "table", "fa2-split", "table-split", "cuda-cores"],
)  # fmt: skip
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
def test_real_sizes_match_torch(new, lens, options):
    phase = "decode" if len(set(new)) == 1 else "extend"
    if options.decode == "cuda-cores" and set(new) != {1}:
        pytest.skip("CUDA cores decode one token per row")
    problem = big(new, lens, phase=phase, options=options)
    out = Rig(FlashInferAttention, problem.spec).run(problem).out
    kv = problem.layer(problem.storage.clone()).kv
    kv.write(problem.k, problem.v, problem.batch.out_cache_loc)
    first = 0
    for row, (n, length) in enumerate(zip(new, lens, strict=True)):
        at = torch.arange(length, device="cuda")
        slots = problem.batch.page_table[row, at // 16].long() * 16 + at % 16
        keys, values = (x.float().transpose(0, 1) for x in kv.gather(slots))
        queries = problem.q[first : first + n].float().transpose(0, 1)
        mask = torch.ones(n, length, dtype=torch.bool, device="cuda").tril(length - n)
        want = scaled_dot_product_attention(queries[None], keys[None], values[None], mask, enable_gqa=True)[0]
        torch.testing.assert_close(out[first : first + n].float(), want.transpose(0, 1), atol=2e-2, rtol=0)
        first += n


@pytest.mark.parametrize("fields", [{}, {"window": 200}, {"kv_dtype": "float8_e4m3fn", "k_scale": 0.5, "v_scale": 0.5}])
def test_two_hundred_replays_of_one_capture_have_an_eager_forwards_bits(fields):
    replays_equal_eager(
        FlashInferAttention, {**REAL, "num_heads": 8, "num_kv_heads": 2, "phase": "decode", "replays": 200, **fields}
    )


def test_shared_levels_are_read_as_if_every_row_had_its_own():
    shared = (((40, 64), (24, 0)), ((20, 8), (20, 0), (24, 3)))
    begin = [72 * 16] * 20 + [64 * 16] * 20 + [3 * 16] * 24
    lens = [start + 1 + 7 * row for row, start in enumerate(begin)]
    fields = {**REAL, "num_heads": 8, "num_kv_heads": 2, "phase": "decode", "shared": shared}
    outs = []
    for levels in (True, False):
        problem = make_problem([1] * 64, lens, **fields, levels=levels)
        outs.append(Rig(FlashInferAttention, problem.spec).run(problem).out.float())
    torch.testing.assert_close(*outs, atol=2e-2, rtol=0)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch says so of its own switch
def test_no_layer_of_a_step_waits_for_the_device():
    problem = big([1] * 4, [100, 200, 300, 4000], phase="decode")
    rig = Rig(FlashInferAttention, problem.spec)
    layer, out = problem.layer(problem.storage), torch.empty_like(problem.q)
    for mode in ("default", "error"):  # compiled first
        rig.instance.init_forward_metadata(problem.batch)
        torch.cuda.set_sync_debug_mode(mode)
        try:
            rig.instance.init_forward_metadata_in_graph(problem.batch)
            rig.instance.forward(problem.q, problem.k, problem.v, layer, problem.batch, out=out)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_this_release_has_all_that_is_looked_for_inside_it():
    assert library().lacks() == []
