"""The rows of a batch as FlashInfer's planners are told them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headstock import ForwardBatch, HeadstockError

MOST_KEYS = 1 << 31
"""Keys that the places of all rows in the page table hold, which kernels count in 32 bits."""


class Rows(NamedTuple):
    """queries [R+1], starts [R+1] and lens [R], int32 on the host; `blind` int64 [N], the tokens that see no key.

    A row of latents starts where its pages do in the flat page table, a row of given keys at its first one. Tokens that
    see no key are rows of their own, of no keys: FlashInfer's causal kernels want as many keys as queries.
    """

    queries: Tensor
    starts: Tensor
    lens: Tensor
    blind: Tensor | None

    @classmethod
    def of(cls, batch: ForwardBatch) -> Rows:
        """Those of a batch with exact host lengths."""
        assert batch.seq_lens_cpu is not None, "exact host lengths are declared"
        assert batch.query_indptr_cpu is not None, "exact host lengths are declared"
        lens, ends = batch.seq_lens_cpu.numpy().astype(np.int64), batch.query_indptr_cpu.numpy()
        queries = np.diff(ends)
        unseeing = np.maximum(queries - lens, 0) if batch.causal else np.where(lens == 0, queries, 0)
        stride = 0 if batch.page_table is None else batch.page_table.stride(0)
        starts, blind = np.arange(len(lens)) * stride, None
        if unseeing.any():
            tokens = [np.arange(first, first + n) for first, n in zip(ends[:-1], unseeing, strict=True)]
            blind = torch.from_numpy(np.concatenate(tokens).astype(np.int64))
            halves = np.stack((unseeing, queries - unseeing), 1).ravel()
            lens = np.stack((np.zeros_like(lens), lens), 1).ravel()[halves > 0]
            queries, starts = halves[halves > 0], np.repeat(starts, 2)[halves > 0]
        if batch.page_table is None:
            starts = np.cumsum(lens) - lens
        end = starts[-1] + (stride or lens[-1])
        if end * max(batch.page_size, 1) >= MOST_KEYS:
            raise HeadstockError("the page table is too large for FlashInfer", given=int(end), works="fewer rows")
        unseen = None if blind is None else blind.to(batch.seq_lens.device, non_blocking=True)
        return cls(_int32(np.append(0, np.cumsum(queries))), _int32(np.append(starts, end)), _int32(lens), unseen)


def flat(page_table: Tensor) -> Tensor:
    """The page table int32 [B, W] as one row, without a copy: row i starts at i times its stride."""
    rows, width = page_table.shape
    return page_table.as_strided(((rows - 1) * page_table.stride(0) + width,), (1,))


def _int32(values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
