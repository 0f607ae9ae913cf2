"""The small work around a decode step as a few Triton kernels: its refresh, and the greatest logit of each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headstock.backend import BackendSpec
from headstock.batch import ForwardBatch
from headstock.kv.mirror import Mirror
from headstock.models.fused import power_of_two
from headstock.runner import fused_kernels as kernels
from headstock.runner.refresh import GroupPages, Refresh

PART = 1024
"""Logits that one program looks at: a row of a large vocabulary is then work for a whole GPU."""


class FusedRefresh(Refresh):
    """The refresh in a kernel for each mirror, or one where there is none, and one for each layer group."""

    def fetch(self, written: Tensor, inputs: Tensor, mirrors: Sequence[Mirror], changes: slice) -> None:
        """Reads what the host wrote where it lies, in pinned memory; with a second mirror it is read twice."""
        rows, block = (changes.stop - changes.start) // (2 * max(len(mirrors), 1)), 256
        for number, mirror in enumerate(mirrors or [None]):
            kernels.fetch[-(-len(written) // block),](
                written, inputs, None if mirror is None else mirror.tensor, len(written),
                changes.start + 2 * number * rows, rows, BLOCK=block, num_warps=4,
            )  # fmt: skip

    def derive(self, batch: ForwardBatch, pages: GroupPages, spec: BackendSpec, slots: Tensor, lens: Tensor) -> None:
        """Fills a batch's tensors in place from its rows' slots and lengths, int64 [B] on the device."""
        assert batch.page_table is not None, "graphs are of paged batches"
        width, window = batch.page_table.shape[1], 0 if pages.of is None else spec.window
        block = min(power_of_two(width), 1024)
        kernels.derive[batch.num_reqs, -(-width // block)](
            slots, lens, pages.table, pages.of, batch.page_table, batch.seq_lens, batch.positions, batch.out_cache_loc,
            pages.table.shape[1], width, WINDOW=window, N=batch.query_len, NEW=power_of_two(batch.query_len),
            PAGE=batch.page_size, BLOCK=block, num_warps=4,
        )  # fmt: skip


def greedy(logits: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """The first of the greatest of each row [R, vocab], with last stride 1, and whether there is none that counts.

    `kept` [R, vocab] takes a copy of the logits on the way.
    """
    rows, size = logits.shape
    block = min(power_of_two(size), PART)
    parts = -(-size // block)
    peaks = logits.new_empty(rows, parts, dtype=torch.float32)
    places, tokens = (logits.new_empty(shape, dtype=torch.int64) for shape in ((rows, parts), (rows,)))
    failed = logits.new_empty(rows, dtype=torch.bool)
    kernels.peaks[rows, parts](
        logits, kept, peaks, places, size, logits.stride(0), 0 if kept is None else kept.stride(0), BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    kernels.greatest[rows,](peaks, places, tokens, failed, parts, BLOCK=power_of_two(parts), num_warps=4)
    return tokens, failed
