"""The refresh of static batches: what follows on the device from what the host wrote. In torch, or fused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from headstock.backend import BackendSpec
from headstock.batch import ForwardBatch, Ints
from headstock.fusing import fusing
from headstock.kv.mirror import Mirror

Lens = TypeVar("Lens", Tensor, Ints)


class GroupPages(NamedTuple):
    """Where the rows of a layer group lie, on the device.

    `table` int32 [slots + 1, W] has each slot's pages; the last row is all zeros, the null page, and serves padding. A
    group whose window has a cache of its own reads `of` int32 [table pages] too: that cache's page for each of these.
    """

    table: Tensor
    of: Tensor | None = None

    def bound(self, spec: BackendSpec, n: int) -> int:
        """The most keys that a row of `n` new tokens has here."""
        if self.of is None or spec.window is None:
            return spec.max_context
        return min(spec.window + n + spec.page_size - 2, spec.max_context)

    def first(self, lens: Lens, spec: BackendSpec, n: int) -> Lens:
        """The first page that the `n` new tokens of each row can see, where the window has a cache of its own."""
        assert spec.window is not None, "a cache of its own is of a window"
        return (lens - (n + spec.window - 1)).clip(min=0) // spec.page_size


class Refresh:
    """The refresh as torch has it."""

    def fetch(self, written: Tensor, inputs: Tensor, mirrors: Sequence[Mirror], changes: slice) -> None:
        """Brings what the host wrote, int64 [N], to the device, and with it the mirrors up to date.

        `changes` is where theirs lie, one after the other, each as it said was pending.
        """
        inputs.copy_(written, non_blocking=True)
        if mirrors:
            for mirror, own in zip(mirrors, inputs[changes].chunk(len(mirrors)), strict=True):
                mirror.put(own)

    def derive(self, batch: ForwardBatch, pages: GroupPages, spec: BackendSpec, slots: Tensor, lens: Tensor) -> None:
        """Fills a batch's tensors in place from its rows' slots and lengths, int64 [B] on the device."""
        assert batch.page_table is not None, "graphs are of paged batches"
        assert batch.out_cache_loc is not None, "which cache their tokens"
        n, page, (table, of), width = batch.query_len, batch.page_size, pages, batch.page_table.shape[1]
        columns = torch.arange(width, device=lens.device)[None]
        own, keys = columns, lens
        if of is None:
            rows = table[:, :width].index_select(0, slots)
        else:
            first = pages.first(lens, spec, n)
            own, keys = columns + first[:, None], lens - first * page
            flat = slots[:, None] * table.shape[1] + own.clamp(max=table.shape[1] - 1)
            rows = of.take(table.take(flat).long())
        batch.page_table.copy_(rows.masked_fill_(columns * page >= keys[:, None], 0))
        batch.seq_lens.copy_(keys)
        new = torch.arange(n, device=lens.device) - n
        batch.positions.copy_((lens[:, None] + new).flatten())
        places = keys[:, None] + new
        found = batch.page_table.gather(1, places // page).long()
        batch.out_cache_loc.copy_((found * page + places % page).flatten())


def refresh(device: torch.device) -> Refresh:
    """The refresh for a device."""
    if not fusing(device).able:
        return Refresh()
    from headstock.runner.fused import FusedRefresh

    return FusedRefresh()
