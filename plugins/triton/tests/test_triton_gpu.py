"""The kernels at the sizes they are made for, on a GPU: bfloat16, real head counts, one graph replayed many times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from headstock import AttentionLayer, BackendSpec, ForwardBatch
from headstock.testing import reference
from headstock.testing.graphs import replays_equal_eager
from headstock.testing.problem import Problem, Result, make_problem
from headstock.testing.rig import Rig
from headstock_triton.backend import TritonAttention
from headstock_triton.table import compiles

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def here() -> dict[str, Any]:
    """What a spec tells of this GPU, by which configurations are found."""
    if not torch.cuda.is_available():
        return {}
    gpu = torch.cuda.get_device_properties(0)
    return {"device": "cuda", "compute_capability": gpu.major * 10 + gpu.minor, "num_sms": gpu.multi_processor_count}


REAL: dict[str, Any] = {
    "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": "bfloat16", **here(),
}  # fmt: skip
LATENT: dict[str, Any] = {
    "attention": "mla", "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "page_size": 64, "dtype": "bfloat16",
    **here(),
}  # fmt: skip
HOPPER = REAL.get("compute_capability") == 90 and compiles(triton.__version__)


def big(new: list[int], lens: list[int], **fields: Any) -> Problem:
    """A problem of real size, its cache filled with random numbers, unused slots too."""
    problem = make_problem(new, [max(new)] * len(new), **fields)
    spec = replace(problem.spec, max_context=max(lens))
    pages = [-(-length // spec.page_size) for length in lens]
    table = torch.zeros(len(lens), max(pages), dtype=torch.int32)
    for row, part in enumerate((torch.randperm(sum(pages)) + 1).split(pages)):
        table[row, : len(part)] = part
    assert problem.layout is not None
    storage = torch.empty(sum(pages) + 1, problem.layout.bytes_per_page(spec), dtype=torch.uint8, device="cuda")
    storage.view(torch.bfloat16).normal_()
    batch = ForwardBatch.from_lengths(new, lens, table.cuda(), spec.page_size, phase=fields.get("phase"))
    return replace(problem, spec=spec, batch=batch, storage=storage)


def tokens(
    spec: BackendSpec, count: int, random: torch.Generator, heads_first: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The suite's random tokens, drawn on the device."""
    assert not heads_first
    heads, seed = spec.num_heads + spec.num_kv_heads, int(torch.randint(2**31, (), generator=random))
    widths = [heads * spec.head_dim, spec.num_kv_heads * spec.v_head_dim]
    draw = torch.Generator(spec.device).manual_seed(seed)
    fused = torch.randn(count, sum(widths), generator=draw, dtype=getattr(torch, spec.dtype), device=spec.device)
    qk, v = fused.split(widths, 1)
    q, k = qk.unflatten(1, (heads, -1)).split([spec.num_heads, spec.num_kv_heads], 1)
    return q, k, None if spec.attention == "mla" else v.unflatten(1, (spec.num_kv_heads, -1))


def attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, spec: BackendSpec
) -> tuple[Tensor, Tensor]:
    """The suite's reference, out and natural log-sum-exp in float64, on the device, a row of the batch at a time."""
    assert k is v is batch.query_mask is spec.softcap is layer.alibi_slopes is None
    assert batch.page_table is not None
    firsts, outs, lses = batch.query_indptr.tolist(), [], []
    for row, length in enumerate(batch.seq_lens.tolist()):
        at = torch.arange(length, device=q.device)
        slots = batch.page_table[row, at // spec.page_size].long() * spec.page_size + at % spec.page_size
        keys, values = layer.kv.gather(slots)
        keys = keys.double().view(length, spec.num_kv_heads, spec.head_dim)
        values = keys[..., : spec.v_head_dim] if values is None else values.double()
        keys, values = keys * layer.k_scale, values * (layer.k_scale if spec.attention == "mla" else layer.v_scale)
        asked = q[firsts[row] : firsts[row + 1]].double().unflatten(1, (spec.num_kv_heads, -1))
        scores = torch.einsum("ihgd,jhd->ihgj", asked, keys) * spec.scale
        seen = torch.ones(len(asked), length, dtype=torch.bool, device=q.device)
        if batch.causal:
            seen = seen.tril(length - len(asked))
        if spec.window is not None:
            seen = seen.triu(length - len(asked) - spec.window + 1)
        scores.masked_fill_(~seen[:, None, None], -torch.inf)
        total = scores.logsumexp(-1)
        if layer.sinks is not None:
            total = torch.logaddexp(total, layer.sinks.double().view(spec.num_kv_heads, -1))
        out = torch.einsum("ihgj,jhd->ihgd", (scores - total[..., None]).exp(), values)
        outs.append(out.flatten(1, 2))
        lses.append(total.flatten(1))
    return torch.cat(outs), torch.cat(lses)


@pytest.fixture(autouse=True)
def on_the_device(monkeypatch):
    """The suite draws its numbers and computes what is right on the CPU, which at these sizes takes minutes."""
    monkeypatch.setattr("headstock.testing.problem.tokens", tokens)
    monkeypatch.setattr("headstock.testing.problem.attention", attention)


def check(problem: Problem, kernel: str = "") -> Result:
    """Compares with float64; on a Hopper the rows' own part is left to the kernel named."""
    rig = Rig(TritonAttention, problem.spec)
    result = rig.run(problem)
    batch, _ = problem.fresh()
    rig.plan(batch)
    told = rig.instance.describe(batch)
    if HOPPER and kernel:
        assert str(told["kernel"]).split()[0] == kernel, told
    out, lse, _ = problem.expected
    torch.testing.assert_close(result.out.double(), out, atol=2e-2, rtol=8e-3)
    if result.lse is not None:
        torch.testing.assert_close(result.lse.double(), lse, atol=2e-3, rtol=0)
    return result


@pytest.mark.parametrize(
    "fields",
    [
        {"lse": True, "sinks": True, "shared": (((2, 2), (1, 0)),)},
        {"window": 7, "v_scale": 0.5},
        {"causal": False, "k_scale": 2.0},
        {"kv_dtype": "float8_e4m3fn", "k_scale": 0.5, "v_scale": 3.0},
        {"attention": "mla", "sinks": True, "k_scale": 0.5},
    ],
)
def test_what_is_right_here_is_what_the_suite_says(fields):
    problem = make_problem([3, 1, 9], [40, 33, 9], **here(), **fields, phase="extend")
    (out, lse, storage), layer = problem.expected, problem.layer(problem.expected[2])
    assert storage is not None
    right = reference.attention(problem.q, None, None, layer, problem.batch, problem.spec)
    torch.testing.assert_close((out.cpu(), lse.cpu()), right, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("new", "lens", "kernel"),
    [
        ([1] * 64, [4096 - 37 * i for i in range(64)], "attend"),
        ([1] * 40, [1024 - 7 * i for i in range(40)], "attend"),
        ([1], [32768], "attend"),
        ([1, 1, 1], [1, 70000, 17], "attend"),
        ([4] * 8, [4, 5, 1000, 4096, 64, 63, 65, 9000], "attend"),
        ([4096, 1, 700], [4096, 4096, 8000], "attend_hopper"),
        ([100], [9000], "attend_hopper"),
    ],
)
def test_real_sizes_match_torch(new, lens, kernel):
    check(big(new, lens, **REAL, phase="decode" if max(new) == min(new) < 9 else "extend"), kernel)


NEW, CACHED = [1, 300, 33, 128, 17, 64, 5, 2, 257], [0, 1000, 777, 0, 15, 1000, 127, 126, 1]


@pytest.mark.parametrize(
    ("page", "layout", "group", "fields"),
    [
        (8, "nhd", 4, {}),
        (16, "hnd", 4, {"lse": True}),
        (16, "nhd", 7, {"causal": False, "lse": True}),
        (64, "nhd", 8, {"k_scale": 0.5, "v_scale": 3.0}),
        (256, "hnd", 1, {"lse": True, "num_kv_heads": 8}),
    ],
)
def test_wide_tiles_read_scattered_pages_and_nothing_that_was_not_written(page, layout, group, fields):
    fields = {"num_kv_heads": 2, **fields}
    sizes = {"num_heads": group * fields["num_kv_heads"], "page_size": page, "kv_layout": layout}
    lens = [new + cached for new, cached in zip(NEW, CACHED, strict=True)]
    check(make_problem(NEW, lens, **{**REAL, **sizes, **fields}, phase="extend"), "attend_hopper")


@pytest.mark.parametrize("phase", ["decode", "extend"])
@pytest.mark.parametrize("shared", [(((40, 64),),), (((24, 40), (16, 3)), ((20, 8), (4, 0), (16, 2)))])
def test_shared_prefixes_are_read_in_wide_tiles(phase, shared):
    new = 1 if phase == "decode" else 9
    begins = [sum([pages for rows, pages in level for _ in range(rows)][row] for level in shared) for row in range(40)]
    lens = [16 * begin + new + 7 * row for row, begin in enumerate(begins)]
    fields = {"shared": shared, "lse": True, "sinks": True}
    check(make_problem([new] * 40, lens, **REAL, **fields, phase=phase), "attend")


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
    wide = heads * max(new) >= 64
    phase = "decode" if len(set(new)) == 1 else "extend"
    check(big(new, lens, **LATENT, num_heads=heads, phase=phase), "latent_hopper" if wide else "latent")


@pytest.mark.parametrize(
    ("heads", "new", "fields", "kernel"),
    [
        (128, 1, {}, "latent_hopper"),
        (128, 2, {"sinks": True, "lse": True}, "latent_hopper"),
        (16, 4, {"page_size": 128, "lse": True}, "latent_hopper"),
        (20, 4, {"page_size": 256, "k_scale": 0.5}, "latent_hopper"),
        (128, 1, {"page_size": 16, "lse": True}, "latent"),
        (128, 1, {"batch_invariant": True}, "latent"),
    ],
)
def test_latents_read_scattered_pages_and_nothing_that_was_not_written(heads, new, fields, kernel):
    lens = [new + cached for cached in (0, 63, 64, 60, 1000, 4090, 127, 77)]
    check(make_problem([new] * 8, lens, **{**LATENT, "num_heads": heads, **fields}, phase="decode"), kernel)


def test_one_row_of_latents_is_split_over_the_whole_gpu():
    check(big([1], [4096], **LATENT, num_heads=128, phase="decode", lse=True), "latent_hopper")


def test_shared_latents_are_carried_to_the_rows_own():
    fields = {"num_heads": 128, "shared": (((8, 10),),), "lse": True, "sinks": True}
    problem = make_problem([1] * 8, [641 + 9 * row for row in range(8)], **LATENT, **fields, phase="decode")
    check(problem, "latent_hopper")


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"window": 200}, {"kv_dtype": "float8_e4m3fn", "k_scale": 0.5, "v_scale": 0.5},
        {"num_heads": 64, "num_kv_heads": 1, "max_levels": 1, "lse": True},
        {**LATENT, "num_heads": 16},
        {**LATENT, "num_heads": 64, "lse": True},
        {**LATENT, "num_heads": 128, "page_size": 32},
    ],
)  # fmt: skip
def test_two_hundred_replays_of_one_capture_have_an_eager_forwards_bits(fields):
    few = {"num_heads": 8, "num_kv_heads": 2}
    replays_equal_eager(TritonAttention, {**REAL, **few, "phase": "decode", "replays": 200, **fields})


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch says so of its own switch
@pytest.mark.parametrize(("new", "phase"), [(1, "decode"), (90, "extend")])
def test_no_layer_of_a_step_waits_for_the_device(new, phase):
    problem = big([new] * 4, [100, 200, 300, 4000], **REAL, phase=phase)
    rig, (batch, storage) = Rig(TritonAttention, problem.spec), problem.fresh()
    view, out = problem.layer(storage), torch.empty_like(problem.q)
    for mode in ("default", "error"):  # compiled first
        torch.cuda.set_sync_debug_mode(mode)
        try:
            rig.instance.init_forward_metadata(batch)
            rig.instance.init_forward_metadata_in_graph(batch)
            rig.instance.forward(problem.q, problem.k, problem.v, view, batch, out=out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
