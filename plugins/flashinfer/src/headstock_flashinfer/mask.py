"""The mask that FlashInfer is given where new tokens have one of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from headstock import ForwardBatch


def full_mask(batch: ForwardBatch, window: int | None) -> Tensor:
    """Whether each query sees each key of its row: bool [Σ q · keys], row by row, on the batch's device.

    New tokens see each other as `batch.query_mask` says and all keys from before, of the last `window` positions only
    where there is a window. It is measured by positions, which are not those of the row's keys where tokens branch.
    """
    query_mask, starts = batch.query_mask, batch.mask_indptr
    assert query_mask is not None, "a batch with a mask"
    assert starts is not None, "and its offsets"
    assert batch.seq_lens_cpu is not None, "exact host lengths are declared"
    assert batch.query_indptr_cpu is not None, "exact host lengths are declared"
    device, total = query_mask.device, int((batch.query_indptr_cpu.diff().long() * batch.seq_lens_cpu.long()).sum())
    first, keys = batch.query_indptr[:-1].long(), batch.seq_lens.long()
    queries = batch.query_indptr.diff().long()
    pairs = queries * keys
    row = torch.repeat_interleave(torch.arange(batch.num_reqs, device=device), pairs, output_size=total)
    within = torch.arange(total, device=device) - (pairs.cumsum(0) - pairs)[row]
    query, key = within // keys[row], within % keys[row]
    new = key - (keys - queries)[row]  # the key's number among the row's new tokens, negative for one from before
    cached = new < 0
    mask = query_mask[(starts[row] + query * queries[row] + new).clamp(min=0)] | cached
    if window is not None:
        position = torch.where(
            cached, batch.positions[first[row]] + new, batch.positions[first[row] + new.clamp(min=0)]
        )
        mask &= batch.positions[first[row] + query] - position < window
    return mask
