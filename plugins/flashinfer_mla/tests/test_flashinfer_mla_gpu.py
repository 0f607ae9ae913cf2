"""The kernels at the sizes they are made for, on a GPU: DeepSeek's latents in bfloat16, a graph replayed many times."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from headstock import ForwardBatch
from headstock.testing.graphs import replays_equal_eager
from headstock.testing.problem import Problem, make_problem
from headstock.testing.rig import Rig
from headstock_flashinfer_mla.backend import FlashInferMLA
from headstock_flashinfer_mla.choice import Options

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("flashinfer") is None, reason="needs a GPU and FlashInfer"
)

LATENT: dict[str, Any] = {
    "attention": "mla", "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "page_size": 64, "device": "cuda",
    "dtype": "bfloat16",
}  # fmt: skip


def big(new: list[int], lens: list[int], **fields: Any) -> Problem:
    """A problem of real size with a filled cache, too big for the float64 reference."""
    problem = make_problem(new, [max(new)] * len(new), **{**LATENT, **fields})
    pages = [-(-length // 64) for length in lens]
    table = torch.zeros(len(lens), max(pages), dtype=torch.int32)
    for row, part in enumerate((torch.randperm(sum(pages)) + 1).split(pages)):
        table[row, : len(part)] = part
    spec = replace(problem.spec, max_context=max(lens))
    assert problem.layout is not None
    storage = torch.empty(sum(pages) + 1, problem.layout.bytes_per_page(spec), dtype=torch.uint8, device="cuda")
    storage.view(torch.bfloat16).normal_()
    batch = ForwardBatch.from_lengths(new, lens, table.cuda(), 64, phase=fields.get("phase"))
    return replace(problem, spec=spec, batch=batch, storage=storage)


@pytest.mark.parametrize("kernel", ["fa3", "fa2"])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    ("new", "lens"),
    [
        ([1] * 64, [4096 - 37 * i for i in range(64)]),
        ([1, 1], [1, 20000]),
        ([2] * 4, [2, 65, 1000, 3000]),
        ([300, 1, 64], [300, 700, 2000]),
    ],
)
def test_latents_of_deepseeks_size_match_torch(new, lens, heads, kernel):
    phase = "decode" if len(set(new)) == 1 else "extend"
    problem = big(new, lens, num_heads=heads, phase=phase, lse=kernel == "fa3",
                  options=Options(decode=kernel, extend=kernel))  # fmt: skip
    result = Rig(FlashInferMLA, problem.spec).run(problem)
    kv, first = problem.layer(problem.storage.clone()).kv, 0
    kv.write(problem.k, None, problem.batch.out_cache_loc)
    for row, (n, length) in enumerate(zip(new, lens, strict=True)):
        keys = kv.latent[problem.batch.page_table[row].long()].flatten(0, 1)[:length].float()
        scores = problem.q[first : first + n].float() @ keys.T * problem.spec.scale
        seen = torch.ones(n, length, dtype=torch.bool, device="cuda").tril(length - n)
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        part = slice(first, first + n)
        torch.testing.assert_close(result.out[part].float(), scores.softmax(-1) @ keys[:, :512], atol=2e-2, rtol=0)
        if result.lse is not None:
            torch.testing.assert_close(result.lse[part], scores.logsumexp(-1), atol=2e-4, rtol=1e-5)
        first += n


def test_heads_that_divide_no_tile_decode_one_token():
    lens = [1, 63, 64, 65, 700]
    problem = make_problem([1] * 5, lens, **LATENT, num_heads=20, phase="decode", phases=frozenset({"decode"}))
    problem.check(FlashInferMLA)


@pytest.mark.parametrize("heads", [16, 128])
def test_two_hundred_replays_of_one_capture_have_an_eager_forwards_bits(heads):
    fields = {**LATENT, "num_heads": heads, "page_size": 32, "phase": "decode", "replays": 200}
    replays_equal_eager(FlashInferMLA, fields)


@pytest.mark.parametrize(("new", "lens"), [([1000, 3, 129], [1000, 3, 129]), ([64, 300], [2000, 0])])
def test_expanded_attention_and_its_log_sum_exp_match_torch(new, lens):
    causal = new == lens
    problem = make_problem(
        new, lens, attention="ragged", num_heads=16, num_kv_heads=16, head_dim=192, v_head_dim=128, device="cuda",
        dtype="bfloat16", phase="extend", phases=frozenset({"extend"}), lse=True, causal=causal,
    )  # fmt: skip
    result, first, begin = Rig(FlashInferMLA, problem.spec).run(problem), 0, 0
    for n, length in zip(new, lens, strict=True):
        part, own = slice(first, first + n), slice(begin, begin + length)
        q, k, v = (x.float().transpose(0, 1) for x in (problem.q[part], problem.k[own], problem.v[own]))
        scores = q @ k.transpose(1, 2) * problem.spec.scale
        if causal:
            scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool, device="cuda").tril(), -torch.inf)
        want = scores.softmax(-1).nan_to_num() @ v
        torch.testing.assert_close(result.out[part].float(), want.transpose(0, 1), atol=2e-2, rtol=0)
        torch.testing.assert_close(result.lse[part], scores.logsumexp(-1).T, atol=5e-5, rtol=1e-5)
        first, begin = first + n, begin + length


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch says so of its own switch
def test_no_step_waits_for_the_device():
    problem = big([1] * 4, [100, 200, 300, 4000], num_heads=16, phase="decode")
    rig = Rig(FlashInferMLA, problem.spec)
    layer, out = problem.layer(problem.storage), torch.empty_like(problem.q[..., :512])
    for mode in ("default", "error"):  # loaded first
        torch.cuda.set_sync_debug_mode(mode)
        try:
            rig.instance.init_forward_metadata(problem.batch)
            rig.instance.forward(problem.q, problem.k, None, layer, problem.batch, out=out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
