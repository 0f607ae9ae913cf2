"""Latent attention in a step: segments in its two forms, and cached prefixes expanded chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headstock.backend import AttentionBackend
from headstock.batch import ForwardBatch, Ints, to_device
from headstock.layer import AttentionLayer
from headstock.models.config import LayerShape
from headstock.models.mla import UpProjection, merge
from headstock.runner.segment import Segment

CHUNK_TOKENS = 8192
"""Tokens that are expanded together, at the least: enough to fill a device, in few megabytes per head."""

MAX_CHUNKS = 16
"""The most chunks of a step, whose plans are all alive at once; longer prefixes make larger chunks."""


WORTH = 6
"""How many times the break-even a row must have to be expanded, which costs more launches and memory. On an H200 a row
of V2-Lite's shape after 16384 tokens takes flashinfer-mla 28 ms absorbed and 51 expanded with 512 new tokens, 42 and 46
with 1024."""


def break_even(shape: LayerShape) -> int:
    """New tokens of a row from which expanding its keys takes fewer multiplications than leaving them absorbed.

    A row of n tokens after a long prefix has n pairs per cached key. Absorbed each costs 2R + P, expanded N + P + V,
    and the key once R (N + V): 171 tokens with the dimensions of DeepSeek-V2 and V3.
    """
    absorbed = shape.absorbed
    pair = absorbed.head_dim + absorbed.v_head_dim - shape.head_dim - shape.v_head_dim
    nope = shape.head_dim - (absorbed.head_dim - absorbed.v_head_dim)
    key = absorbed.v_head_dim * (nope + shape.v_head_dim)
    return -(-key // pair) if pair > 0 else 1 << 32


def expand_from(shape: LayerShape) -> int:
    """New tokens of a row from which its keys are expanded where nobody says otherwise: 1026 with DeepSeek's."""
    return WORTH * break_even(shape)


def expansion_bytes(shape: LayerShape, *, context: int, max_batch: int, max_tokens: int, least: int, size: int) -> int:
    """The most that expanding a step takes at once in a layer, in bytes; the layers take turns.

    Rows of `least` new tokens or more are expanded, `max_batch` of them with `max_tokens` in all, each of `context`
    tokens at most. Of keys, the largest chunk's vectors are gathered and expanded; of new tokens, a part of the output,
    and the sum of parts and the part in float32, with their log-sum-exps. A number of the model's dtype takes `size`.
    """
    assert shape.latent is not None, "asked of layers that cache latent vectors"
    rank, rope = shape.latent
    total = min(max_batch, max_tokens // least) * context
    keys, tokens = min(total, max(chunk_size(total, CHUNK_TOKENS), max_tokens)), min(total, max_tokens)
    per_key = (rank + rope + shape.num_heads * (2 * shape.head_dim - rope + shape.v_head_dim)) * size
    per_token = shape.num_heads * (shape.v_head_dim * (size + 8) + 12)
    return keys * per_key + tokens * per_token


class AbsorbedSegment(Segment):
    """A segment that attends in the latent space, as `mla` backends do."""

    def run(self, q: Tensor, k: Tensor, v: Tensor | UpProjection, layer: AttentionLayer, out: Tensor) -> None:
        """Takes queries into the latent space, where k is, and by v what the backend makes of them back."""
        assert isinstance(v, UpProjection), "models with latent attention pass theirs"
        attended = q.new_empty(*q.shape[:2], v.config.kv_rank)
        self.backend.forward(v.absorb(q), k, None, layer, self.batch, out=attended)
        v.restore(attended, out)


class Chunk(NamedTuple):
    """A run of cached tokens: the slots that hold them, int64 [S], and the batch of those who attend to them.

    `rows` are these tokens among the segment's own.
    """

    loc: Tensor
    batch: ForwardBatch
    rows: slice


@dataclass(frozen=True, slots=True)
class ExpandedSegment:
    """A segment that attends to expanded keys, as `ragged` backends do: to some of each row's in one go, and to chunks.

    `loc` are the slots in which the latent vectors of its tokens are cached. `batch` attends to those at `keys`, int64
    [S], in which all of a row are where they are few; None are the segment's own tokens, and `chunks` hold the others.
    """

    backend: AttentionBackend
    batch: ForwardBatch
    loc: Tensor
    keys: Tensor | None
    chunks: Sequence[Chunk]
    rows: slice | None = None

    @classmethod
    def of(
        cls, backend: AttentionBackend, cached: ForwardBatch, rows: slice | None, chunk_tokens: int | None = None
    ) -> ExpandedSegment:
        """The segment of rows by the batch that they would have in the page table."""
        assert cached.out_cache_loc is not None, "new tokens are cached"
        most = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
        own, lens = _query_lens(cached), _seq_lens(cached)
        keys, chunks = None, []
        if own.sum() == lens.sum() or lens.sum() > most:
            lens, chunks = own, cut(cached, most)
        else:
            keys = _slots(cached, np.repeat(np.arange(len(lens)), lens), _places(lens))
        batch = ForwardBatch.from_lengths(
            own.tolist(), lens.tolist(), None, phase="extend", positions=cached.positions,
            device=cached.positions.device,
        )  # fmt: skip
        return cls(backend, batch, cached.out_cache_loc, keys, chunks, rows)

    def plan(self) -> None:
        """Plans the batch and those of the chunks, once per step."""
        for batch in (self.batch, *(chunk.batch for chunk in self.chunks)):
            self.backend.init_forward_metadata(batch)
            self.backend.init_forward_metadata_in_graph(batch)

    def run(self, q: Tensor, latent: Tensor, up: Tensor | UpProjection, layer: AttentionLayer, out: Tensor) -> None:
        """Caches the latent vectors, attends to all keys, and merges by log-sum-exps in float32."""
        assert isinstance(up, UpProjection), "models with latent attention pass theirs"
        assert layer.kv is not None, "latent vectors are cached"
        layer.kv.write(latent, None, self.loc)
        ragged = AttentionLayer(layer.index)
        keys = latent if self.keys is None else _read(layer, self.keys, q.dtype)
        if not self.chunks:
            self.backend.forward(q, *up.expand(keys), ragged, self.batch, out=out)
            return
        part, lse = torch.empty_like(out), q.new_empty(q.shape[:2], dtype=torch.float32)
        self.backend.forward(q, *up.expand(keys), ragged, self.batch, out=part, lse=lse)
        whole = part.to(torch.float32, copy=True)  # and `part` is free for the chunks
        for chunk in self.chunks:
            own, other, other_lse = q[chunk.rows], part[chunk.rows], torch.empty_like(lse[chunk.rows])
            latent = _read(layer, chunk.loc, q.dtype)  # with no name for what it becomes: one chunk's at a time
            self.backend.forward(own, *up.expand(latent), ragged, chunk.batch, out=other, lse=other_lse)
            merge(whole[chunk.rows], lse[chunk.rows], other, other_lse)
        out.copy_(whole)


def chunk_size(total: int, chunk_tokens: int) -> int:
    """Tokens of a chunk of so many cached ones in all: as asked for, or more where the chunks would be too many."""
    return max(chunk_tokens, -(-total // MAX_CHUNKS))


def cut(batch: ForwardBatch, chunk_tokens: int) -> list[Chunk]:
    """The cached prefixes of all rows, one after the other, in chunks of equal size; a chunk's rows are neighbours."""
    query_lens = _query_lens(batch)
    indptr = np.concatenate(([0], np.cumsum(query_lens)))
    prefixes = _seq_lens(batch) - query_lens
    ends = np.cumsum(prefixes)
    total, device = int(ends[-1]), batch.positions.device
    size = chunk_size(total, chunk_tokens)
    chunks = []
    for start in range(0, total, size):
        stop = min(start + size, total)
        lens = ends.clip(start, stop) - (ends - prefixes).clip(start, stop)
        held = lens.nonzero()[0]
        first, last = int(held[0]), int(held[-1]) + 1
        row = np.repeat(np.arange(len(lens)), lens)
        rows = slice(int(indptr[first]), int(indptr[last]))
        reading = ForwardBatch.from_lengths(
            query_lens[first:last].tolist(), lens[first:last].tolist(), None, phase="extend", causal=False,
            positions=batch.positions[rows], device=device,
        )  # fmt: skip
        chunks.append(Chunk(_slots(batch, row, np.arange(start, stop) - (ends - prefixes)[row]), reading, rows))
    return chunks


def _query_lens(batch: ForwardBatch) -> Ints:
    assert batch.query_indptr_cpu is not None, "the host knows the lengths of an eager step"
    lens: Ints = np.diff(batch.query_indptr_cpu.numpy()).astype(np.int64)
    return lens


def _seq_lens(batch: ForwardBatch) -> Ints:
    assert batch.seq_lens_cpu is not None, "the host knows the lengths of an eager step"
    return batch.seq_lens_cpu.numpy().astype(np.int64)


def _places(lens: Ints) -> Ints:
    """0 … n − 1 for each length n, one after the other."""
    return np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)


def _slots(batch: ForwardBatch, rows: Ints, places: Ints) -> Tensor:
    """The slots of tokens, int64 [S] on the device, by their rows and by their places in these."""
    assert batch.page_table is not None, "latent vectors are cached in pages"
    device, size = batch.positions.device, batch.page_size
    pages = batch.page_table.take(to_device(device, rows * batch.page_table.shape[1] + places // size))
    return torch.add(to_device(device, places % size), pages, alpha=size)


def _read(layer: AttentionLayer, loc: Tensor, dtype: torch.dtype) -> Tensor:
    """Latent vectors [S, 1, R + P] as they were before they were cached."""
    assert layer.kv is not None, "latent vectors are cached"
    cached, _ = layer.kv.gather(loc)
    return cached.to(dtype) if layer.k_scale == 1.0 else (cached.float() * layer.k_scale).to(dtype)
