"""The plan of a batch: blocks of rows that attend together, with the slots of their keys and who sees whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstock import BackendSpec, ForwardBatch
from headstock_torch_native.attend import sdpa_bias
from headstock_torch_native.mask import distances, tree_distances, visible

QUERY_CHUNK = 2048
"""Most queries of one row in an extend block, so that a mask has at most this many rows."""


@dataclass(frozen=True, slots=True)
class Block:
    """`rows` rows of `queries` queries each, from token `start` on, against `keys` keys each.

    loc int64 [rows × keys] says where each key lies, a cache slot or a row of the ragged keys; past a row's end it
    repeats the last key, so that nothing unwritten is read. `seen` bool [rows, queries, keys] is None where every query
    sees every key, and where they form the triangle of a prompt (`causal`). `bias` is `seen` as SDPA wants it,
    `distance` int64 [rows, queries, keys] what ALiBi wants. `fused` says that SDPA may serve the block.
    """

    start: int
    rows: int
    queries: int
    keys: int
    loc: Tensor
    causal: bool
    fused: bool
    seen: Tensor | None
    bias: Tensor | None
    distance: Tensor | None


@dataclass(frozen=True, slots=True)
class _Extent:
    """Which part of a batch a block is: rows first…last, queries `offset` … `offset + queries` of each, and its keys.

    begin int64 [rows, 1] is each row's first key, `keys` the number from there on. `full`: every row has them all;
    `nonempty`: every query sees one.
    """

    first: int
    last: int
    offset: int
    queries: int
    start: int
    begin: Tensor
    keys: int
    full: bool
    nonempty: bool


def plan(spec: BackendSpec, batch: ForwardBatch, dtype: torch.dtype) -> list[Block]:
    """A decode batch is one block, whatever its lengths; an extend batch is a block per row, or per chunk of one."""
    extents = [_decode(spec, batch)] if batch.phase == "decode" else _extend(spec, batch)
    return [_block(spec, batch, extent, dtype) for extent in extents]


def _decode(spec: BackendSpec, batch: ForwardBatch) -> _Extent:
    """All rows at once, as wide as the longest may be; the host need not know more than that."""
    n, host = batch.query_len, batch.seq_lens_cpu
    lens = batch.seq_lens.long()[:, None]
    keys, begin = batch.max_seq_len, torch.zeros_like(lens)
    if spec.window is not None and batch.query_mask is None and spec.window + n - 1 < keys:
        keys = spec.window + n - 1
        begin = (lens - keys).clamp_(min=0)
    shortest = (n if batch.causal and batch.page_table is not None else 0) if host is None else int(host.min())
    return _Extent(
        first=0,
        last=batch.num_reqs,
        offset=0,
        queries=n,
        start=0,
        begin=begin,
        keys=max(keys, 1),
        full=host is not None and shortest >= keys > 0,
        nonempty=shortest >= (n if _ordered(spec, batch) else 1),
    )


def _extend(spec: BackendSpec, batch: ForwardBatch) -> list[_Extent]:
    indptr, lens = batch.query_indptr_cpu, batch.seq_lens_cpu
    assert indptr is not None and lens is not None, "the extend record declares exact host lengths"
    starts, ordered = indptr.tolist(), _ordered(spec, batch) and batch.query_mask is None
    extents = []
    for row, total in enumerate(lens.tolist()):
        queries = starts[row + 1] - starts[row]
        chunk = QUERY_CHUNK if batch.query_mask is None else queries
        for offset in range(0, queries, chunk):
            count = min(chunk, queries - offset)
            first = total - queries + offset  # the key that stands where the first query does
            stop = max(first + count, 0) if ordered else total
            begin = max(first - spec.window + 1, 0) if spec.window is not None and ordered else 0
            extents.append(
                _Extent(
                    first=row,
                    last=row + 1,
                    offset=offset,
                    queries=count,
                    start=starts[row] + offset,
                    begin=torch.full((1, 1), begin, dtype=torch.long, device=batch.seq_lens.device),
                    keys=max(stop - begin, 1),
                    full=stop > begin,
                    nonempty=first >= 0 if ordered else total > 0,
                )
            )
    return extents


def _ordered(spec: BackendSpec, batch: ForwardBatch) -> bool:
    """Whether a query sees no key after its own position."""
    return batch.causal or spec.window is not None


def _block(spec: BackendSpec, batch: ForwardBatch, extent: _Extent, dtype: torch.dtype) -> Block:
    rows, queries, keys = extent.last - extent.first, extent.queries, extent.keys
    lens = batch.seq_lens[extent.first : extent.last].long()[:, None]
    indptr = batch.query_indptr[extent.first : extent.last + 1].long()
    prefix = lens - indptr.diff()[:, None]
    indices = extent.begin + torch.arange(keys, device=lens.device)
    plain = extent.full and extent.nonempty and batch.query_mask is None
    everything = plain and (queries == 1 or not _ordered(spec, batch))
    causal = plain and not everything and queries == keys and (spec.window is None or spec.window >= keys)
    seen = distance = None
    if spec.alibi or not (everything or causal):
        tree = None if batch.query_mask is None else _tree(batch, extent, indices - prefix)
        if tree is None:
            distance = distances(prefix + extent.offset, indices, queries)
        else:
            positions = batch.positions[extent.start : extent.start + rows * queries].view(rows, queries)
            distance = tree_distances(positions, prefix, indices)
        seen = visible(distance, indices < lens, causal=batch.causal, window=spec.window, tree=tree)
    fused = extent.nonempty and batch.query_mask is None and not (spec.softcap or spec.sinks or spec.alibi)
    masked = fused and seen is not None
    return Block(
        start=extent.start,
        rows=rows,
        queries=queries,
        keys=keys,
        loc=_locate(batch, extent, indices.minimum(lens - 1).clamp_(min=0)),
        causal=causal,
        fused=fused,
        seen=seen,
        bias=sdpa_bias(seen, spec.num_heads // spec.num_kv_heads, dtype) if masked and seen is not None else None,
        distance=distance if spec.alibi else None,
    )


def _tree(batch: ForwardBatch, extent: _Extent, new: Tensor) -> tuple[Tensor, Tensor]:
    """The rows' masks among new tokens, bool [rows, q, q], and each key's index among those, [rows, keys]."""
    assert batch.query_mask is not None
    area = extent.queries**2
    if batch.phase == "decode":
        start = 0
    else:
        assert batch.query_indptr_cpu is not None
        start = int((batch.query_indptr_cpu.diff()[: extent.first].long() ** 2).sum())
    rows = extent.last - extent.first
    mask = batch.query_mask[start : start + rows * area]
    return mask.view(rows, extent.queries, extent.queries), new


def _locate(batch: ForwardBatch, extent: _Extent, indices: Tensor) -> Tensor:
    """Key indices [rows, keys] as cache slots, or as rows of the ragged keys: int64 [rows × keys]."""
    if batch.page_table is None:
        assert batch.kv_indptr is not None
        return (batch.kv_indptr[extent.first : extent.last].long()[:, None] + indices).flatten()
    table = batch.page_table[extent.first : extent.last]
    pages = table.gather(1, indices // batch.page_size).long()
    return (pages * batch.page_size + indices % batch.page_size).flatten()
