"""Latent attention in a step: both forms over a paged latent cache, against dense attention in float64."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headstock.backend import BackendSpec, Workspace
from headstock.batch import ForwardBatch
from headstock.kv.layout import Latent
from headstock.kv.pool import KVPool
from headstock.layer import AttentionLayer
from headstock.models.config import LayerShape
from headstock.models.deepseek_config import MLAConfig
from headstock.models.mla import UpProjection
from headstock.runner.latent import (
    MAX_CHUNKS,
    AbsorbedSegment,
    ExpandedSegment,
    break_even,
    cut,
    expand_from,
    expansion_bytes,
)
from headstock.testing.specimen import Specimen

MLA = MLAConfig(q_rank=None, kv_rank=8, nope_dim=5, rope_dim=2, v_dim=3)
HEADS, PAGE, SCALE = 3, 4, 0.4
LIMITS = {"max_batch": 8, "max_tokens": 64, "max_context": 64}
ABSORBED = BackendSpec(
    device="cpu", dtype="float32", kv_dtype="float32", attention="mla", num_heads=HEADS, num_kv_heads=1, head_dim=10,
    v_head_dim=8, scale=SCALE, page_size=PAGE, kv_layout="latent", **LIMITS,
)  # fmt: skip
EXPANDED = BackendSpec(
    device="cpu", dtype="float32", kv_dtype="float32", attention="ragged", num_heads=HEADS, num_kv_heads=HEADS,
    head_dim=7, v_head_dim=3, scale=SCALE, lse=True, non_causal=True, **LIMITS,
)  # fmt: skip

Rows = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 20)), min_size=1, max_size=5)


def backend(spec: BackendSpec) -> Specimen:
    return Specimen(spec, Workspace(torch.zeros(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)))


class Scene:
    """Rows of (new, cached) tokens with their latent vectors in shuffled pages, and what attention should give."""

    def __init__(self, rows: list[tuple[int, int]], seed: int = 0):
        torch.manual_seed(seed)
        self.up = UpProjection(MLA, torch.randn(HEADS * 8, 8) / 3)
        lens = [new + cached for new, cached in rows]
        width = -(-max(lens) // PAGE)
        pages = torch.randperm(len(rows) * width) + 1
        self.table = pages.view(len(rows), width).int()
        self.pool = KVPool(ABSORBED, Latent, 1, len(pages) + 1)
        self.layer = AttentionLayer(0, self.pool.views[0])
        self.batch = ForwardBatch.from_lengths([new for new, _ in rows], lens, self.table, PAGE, phase="extend")
        self.sequences = [torch.randn(total, 1, 10) for total in lens]
        self.q = torch.randn(sum(new for new, _ in rows), HEADS, 7)
        self.new = torch.cat([s[-new:] for s, (new, _) in zip(self.sequences, rows, strict=True)])
        for row, (sequence, (_, cached)) in enumerate(zip(self.sequences, rows, strict=True)):
            self.layer.kv.write(sequence[:cached], None, self.slots(row, cached))
        self.expected = self.dense(rows)

    def slots(self, row: int, count: int) -> torch.Tensor:
        places = torch.arange(count)
        return self.table[row].long()[places // PAGE] * PAGE + places % PAGE

    def dense(self, rows: list[tuple[int, int]]) -> torch.Tensor:
        weight, out, start = self.up.weight.double().view(HEADS, 8, 8), [], 0
        for sequence, (new, cached) in zip(self.sequences, rows, strict=True):
            content, rope = sequence[:, 0].double().split((8, 2), -1)
            keys = torch.cat((torch.einsum("hnr,sr->shn", weight[:, :5], content), rope[:, None].expand(-1, 3, -1)), -1)
            values = torch.einsum("hvr,sr->shv", weight[:, 5:], content)
            q = self.q[start : start + new].double()
            hidden = torch.arange(new)[:, None] + cached < torch.arange(new + cached)
            scores = (torch.einsum("qhd,shd->hqs", q, keys) * SCALE).masked_fill(hidden, -torch.inf)
            out.append(torch.einsum("hqs,shv->qhv", scores.softmax(-1), values))
            start += new
        return torch.cat(out).float()

    def run(self, segment) -> torch.Tensor:
        segment.plan()
        out = torch.full((len(self.q), HEADS, 3), torch.nan)
        segment.run(self.q, self.new, self.up, self.layer, out)
        return out


@settings(deadline=None)
@given(Rows, st.integers(1, 30), st.integers(0, 2**31))
def test_both_forms_are_attention_over_all_keys_and_leave_the_same_cache(rows, chunk_tokens, seed):
    scene, caches = Scene(rows, seed), []
    absorbing, expanding = backend(ABSORBED), backend(EXPANDED)
    for segment in (
        AbsorbedSegment(absorbing, scene.batch),
        ExpandedSegment.of(expanding, scene.batch, None, chunk_tokens),
    ):
        before = scene.pool.storage.clone()
        torch.testing.assert_close(scene.run(segment), scene.expected, atol=1e-5, rtol=1e-5)
        caches.append(scene.pool.storage.clone())
        scene.pool.storage.copy_(before)
    assert torch.equal(*caches)
    scene.pool.storage.copy_(caches[0])
    for row, sequence in enumerate(scene.sequences):
        stored, _ = scene.layer.kv.gather(scene.slots(row, len(sequence)))
        assert torch.equal(stored, sequence)


@settings(deadline=None)
@given(Rows, st.integers(1, 9))
def test_chunks_hold_every_cached_token_once_and_only_rows_that_have_some(rows, chunk_tokens):
    scene = Scene(rows)
    chunks, held = cut(scene.batch, chunk_tokens), []
    starts = scene.batch.query_indptr.tolist()
    for chunk in chunks:
        held += chunk.loc.tolist()
        assert int(chunk.batch.seq_lens.sum()) == len(chunk.loc) == int(chunk.batch.kv_indptr[-1])
        assert chunk.batch.num_tokens == chunk.rows.stop - chunk.rows.start
        assert {chunk.rows.start, chunk.rows.stop} <= set(starts)
        assert chunk.batch.seq_lens[0] > 0
        assert chunk.batch.seq_lens[-1] > 0
        assert not chunk.batch.causal
    assert held == [slot for row, (_, cached) in enumerate(rows) for slot in scene.slots(row, cached).tolist()]
    assert len(chunks) <= MAX_CHUNKS
    sizes = [len(chunk.loc) for chunk in chunks]
    assert len(set(sizes[:-1])) <= 1


def test_a_scaled_cache_is_scaled_back_before_it_is_expanded():
    scene = Scene([(2, 9), (3, 0)])
    scene.layer = AttentionLayer(0, KVPool(ABSORBED, Latent, 1, len(scene.pool.storage[0]), [(0.5, 0.5)]).views[0], 0.5)
    for row, (sequence, cached) in enumerate(zip(scene.sequences, (9, 0), strict=True)):
        scene.layer.kv.write(sequence[:cached], None, scene.slots(row, cached))
    segment = ExpandedSegment.of(backend(EXPANDED), scene.batch, None, 4)
    torch.testing.assert_close(scene.run(segment), scene.expected, atol=1e-5, rtol=1e-5)


def shape(heads: int, nope: int, rope: int, rank: int, v: int) -> LayerShape:
    return LayerShape(
        num_heads=heads, num_kv_heads=heads, head_dim=nope + rope, v_head_dim=v, scale=1.0, latent=(rank, rope)
    )


@pytest.mark.parametrize("tokens", [100, 170, 171, 400])
def test_expanding_breaks_even_where_it_takes_fewer_multiplications(tokens):
    """Counted for one head and a prefix so long that the row's own tokens do not matter."""
    cached, rank, nope, rope, v = 10_000_000, 512, 128, 64, 128
    absorbed = tokens * cached * (rank + rope + rank)
    expanded = tokens * cached * (nope + rope + v) + cached * rank * (nope + v)
    assert (tokens >= break_even(shape(16, nope, rope, rank, v))) == (expanded < absorbed)
    assert expand_from(shape(16, nope, rope, rank, v)) == 1026


def test_a_latent_no_wider_than_a_head_is_never_worth_expanding():
    assert expand_from(shape(1, 64, 8, 16, 64)) > 1_000_000


class Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside and alive at once; `others` are there before."""

    def __init__(self, *others: torch.Tensor):
        super().__init__()
        self.before = {each.untyped_storage().data_ptr() for each in others}
        self.alive: Counter[int] = Counter()  # tensors by their storage
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        for each in made if isinstance(made, tuple | list) else (made,):
            storage = each.untyped_storage()
            if storage.data_ptr() not in self.before:
                self.now += 0 if self.alive[storage.data_ptr()] else storage.nbytes()
                self.alive[storage.data_ptr()] += 1
                weakref.finalize(each, self.drop, storage.data_ptr(), storage.nbytes())
        self.most = max(self.most, self.now)
        return made

    def drop(self, key, size):
        self.alive[key] -= 1
        self.now -= 0 if self.alive[key] else size


class Still(Specimen):
    """A backend that takes no memory of its own."""

    def forward(self, q, k, v, layer, batch, *, out, lse=None):
        out.zero_()
        if lse is not None:
            lse.zero_()


@pytest.mark.parametrize(
    ("rows", "chunk"), [([(6, 34)], 8), ([(6, 14), (6, 14)], 12), ([(12, 0)], 64), ([(4, 60), (4, 60), (4, 60)], 1)]
)
def test_what_expanding_takes_is_planned_for_and_little_more(rows, chunk, monkeypatch):
    """Of several chunks one at a time, of one chunk all of it, of new tokens alone nothing that merges."""
    monkeypatch.setattr("headstock.runner.latent.CHUNK_TOKENS", chunk)
    scene, context, tokens = Scene(rows), max(map(sum, rows)), sum(new for new, _ in rows)
    limits = {"context": context, "max_batch": len(rows), "max_tokens": tokens, "least": 1, "size": 4}
    planned = expansion_bytes(shape(HEADS, 5, 2, 8, 3), **limits)
    spec = Still(EXPANDED, Workspace(*(torch.zeros(0, dtype=torch.uint8) for _ in range(2))))
    segment = ExpandedSegment.of(spec, scene.batch, None)
    segment.plan()
    out = torch.empty(tokens, HEADS, 3)
    with torch.inference_mode(), Allocated(scene.q, scene.new, out, scene.pool.storage, scene.up.weight) as allocated:
        segment.run(scene.q, scene.new, scene.up, scene.layer, out)
    assert allocated.most <= planned
    if segment.chunks:
        assert planned <= 1.4 * allocated.most


@pytest.mark.parametrize(
    ("fields", "keys", "tokens"),
    [
        ({}, 3 * 163840 // 16, 2048),  # three rows of 513 new tokens or more, their prefixes in sixteen chunks
        ({"context": 4096}, 8192, 2048),
        ({"max_batch": 1, "context": 4096}, 4096, 2048),
        ({"max_batch": 1, "context": 1024, "max_tokens": 8192}, 1024, 1024),
        ({"least": 2}, 32 * 163840 // 16, 2048),
        ({"max_tokens": 512}, 0, 0),
    ],
)
def test_a_plan_for_expanding_is_of_the_largest_chunk_of_the_rows_that_can_be_expanded(fields, keys, tokens):
    """With DeepSeek-V3's dimensions: 128 heads of 128 + 64 and 128, and vectors of 512 + 64, in two bytes a number."""
    limits = {"context": 163840, "max_batch": 32, "max_tokens": 2048, "least": 513, "size": 2} | fields
    per_key, per_token = 2 * (576 + 128 * (192 + 256)), 128 * (128 * (2 + 4 + 4) + 3 * 4)
    assert expansion_bytes(shape(128, 128, 64, 512, 128), **limits) == keys * per_key + tokens * per_token
