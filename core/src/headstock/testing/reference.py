"""Attention in float64, one query and one head at a time: slow, and meant to be obviously right.

It shares no code with any backend and uses nothing of a batch but its tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headstock.backend import BackendSpec
from headstock.batch import ForwardBatch
from headstock.kv.layout import LatentView, PagedView
from headstock.layer import AttentionLayer


def attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, spec: BackendSpec
) -> tuple[Tensor, Tensor]:
    """The output [T, Hq, Dv] and log-sum-exp [T, Hq] that `forward` owes, both float64 on the CPU.

    Paged attention and MLA read every key from the cache, new ones included, so they must be stored before; ragged
    attention reads k [Σ keys, Hkv, D] and v [Σ keys, Hkv, Dv]. The log-sum-exp is natural and that of the softmax's own
    denominator, so it includes the sink; a query that sees no key has output 0 and log-sum-exp −inf, sink or not.
    """
    tokens, heads, _ = q.shape
    out = torch.zeros(tokens, heads, spec.v_head_dim, dtype=torch.float64)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64)
    queries, group = q.double().cpu(), heads // spec.num_kv_heads
    starts, lens = batch.query_indptr.tolist(), batch.seq_lens.tolist()
    for row, length in enumerate(lens):
        keys, values = _cached(layer, batch, row, length, spec) if k is None or v is None else _given(k, v, lens, row)
        first, stop = starts[row], starts[row + 1]
        query_positions, key_positions = _positions(batch, first, stop, length)
        for i in range(stop - first):
            seen = [j for j in range(length) if _sees(batch, spec, row, i, j, query_positions, key_positions)]
            if not seen:
                continue
            back = torch.tensor([key_positions[j] - query_positions[i] for j in seen], dtype=torch.float64)
            for head in range(heads):
                logits = keys[seen, head // group] @ queries[first + i, head] * spec.scale
                if spec.softcap is not None:
                    logits = spec.softcap * torch.tanh(logits / spec.softcap)
                if layer.alibi_slopes is not None:
                    logits = logits + float(layer.alibi_slopes[head]) * back
                total = torch.logsumexp(logits, 0)
                if layer.sinks is not None:
                    total = torch.logaddexp(total, layer.sinks[head].double().cpu())
                lse[first + i, head] = total
                out[first + i, head] = torch.exp(logits - total) @ values[seen, head // group]
    return out, lse


def _cached(
    layer: AttentionLayer, batch: ForwardBatch, row: int, length: int, spec: BackendSpec
) -> tuple[Tensor, Tensor]:
    """A row's keys [length, Hkv, D] and values [length, Hkv, Dv] from its pages; a latent's values are its first R."""
    assert batch.page_table is not None, "keys that are not given are in pages"
    if isinstance(layer.kv, LatentView):
        k = layer.kv.latent[:, :, None]
        v, v_scale = k[..., : spec.v_head_dim], layer.k_scale
    else:
        assert isinstance(layer.kv, PagedView), "of a cache that can be looked into"
        k, v, v_scale = layer.kv.k, layer.kv.v, layer.v_scale
    pages = batch.page_table[row].tolist()
    slots = [(pages[j // batch.page_size], j % batch.page_size) for j in range(length)]
    if not slots:
        return torch.zeros(0, *k.shape[2:]).double(), torch.zeros(0, *v.shape[2:]).double()
    keys = torch.stack([k[page, offset].double() for page, offset in slots])
    values = torch.stack([v[page, offset].double() for page, offset in slots])
    return keys.cpu() * layer.k_scale, values.cpu() * v_scale  # at once: a GPU is waited for twice a row, not a key


def _given(k: Tensor, v: Tensor, lens: list[int], row: int) -> tuple[Tensor, Tensor]:
    """A row's keys and values from the ragged ones, which follow each other row by row."""
    start = sum(lens[:row])
    stop = start + lens[row]
    return k[start:stop].double().cpu(), v[start:stop].double().cpu()


def _positions(batch: ForwardBatch, first: int, stop: int, length: int) -> tuple[list[int], list[int]]:
    """Absolute positions of a row's queries and of its keys.

    The new tokens are the last keys and have their queries' positions; cached keys count back from the first query.
    """
    queries: list[int] = batch.positions[first:stop].tolist()
    prefix = length - len(queries)
    keys = [queries[0] - prefix + j if j < prefix else queries[j - prefix] for j in range(length)]
    return queries, keys


def _sees(
    batch: ForwardBatch, spec: BackendSpec, row: int, i: int, j: int, queries: list[int], keys: list[int]
) -> bool:
    """Whether query i of a row sees key j of that row."""
    prefix, back = len(keys) - len(queries), queries[i] - keys[j]
    if spec.window is not None and back >= spec.window:
        return False
    if batch.query_mask is not None and batch.mask_indptr is not None and j >= prefix:
        start = int(batch.mask_indptr[row])
        return bool(batch.query_mask[start + i * len(queries) + (j - prefix)])
    if batch.causal and j > prefix + i:
        return False
    return spec.window is None or back >= 0
