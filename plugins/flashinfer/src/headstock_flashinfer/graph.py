"""A captured bucket: wrappers over static buffers, planned before every replay, and what the graph itself works out."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headstock import ForwardBatch, GraphFallback
from headstock_flashinfer.memory import Buffers, Memory, level_segments
from headstock_flashinfer.plan import Plan, Slots
from headstock_flashinfer.wrappers import Counts, Wrappers


class Bucket:
    """One captured size: decode wrappers for the rows' own keys, and a paged one for each level.

    The host plans from lengths alone; page numbers never leave the device, where the graph puts them in compressed rows
    before it attends.
    """

    def __init__(
        self, make: Wrappers, memory: Memory, ints: tuple[Tensor, ...], rows: int, query_len: int, levels: int
    ):
        self.page, self.width, self.query_len, self.counting = (
            make.spec.page_size, memory.width, query_len, memory.counting,
        )  # fmt: skip
        segments = (level_segments(make.spec, rows, query_len),) * levels
        self.buffers: Buffers = memory.buffers(rows, segments)
        self.own = make.decode(ints[0], self.buffers)
        self.levels = [
            make.paged("fa2", each, level) for each, level in zip(ints[1:], self.buffers.levels, strict=False)
        ]
        self.plan = Plan("cascade" if levels else "decode", [self.own, *self.levels])
        self.captured: list[tuple[int, ...] | None] = [None] * (1 + levels)
        self._indptr = np.zeros(rows + 1, dtype=np.int32)

    def prepare(self, batch: ForwardBatch) -> Plan:
        """Plans for a capture or a replay, on the host, into what was there before; nothing where no page came or went.

        Raises GraphFallback where a replay's plan is not the captured one in what a graph holds by value.
        """
        assert batch.seq_lens_cpu is not None, "exact host lengths are declared"
        replay, lens = batch.graph == "replay", batch.seq_lens_cpu.numpy()
        if self.levels:
            lens = lens - self._plan_levels(batch, replay)
        pages = (lens + (self.page - 1)) // self.page
        np.cumsum(pages, out=self._indptr[1:])
        # No page number is given, and no buffer written: the graph does that itself, before anything reads it.
        if replay and self.own.again is not None:
            self._again(0, self._indptr)
        else:
            last = torch.from_numpy(lens - (pages - 1) * self.page)
            indptr = torch.from_numpy(self._indptr.copy())
            self.own.plan(indptr, self.buffers.page_indices[:0], last, self.query_len, graph=True)
            self._check(0, replay)
        return self.plan

    def refresh(self, batch: ForwardBatch) -> None:
        """Recorded into the graph: the page table in compressed rows, and the slots of new tokens."""
        page, table = self.page, batch.page_table
        assert table is not None, "graphs are of paged batches"
        width = min(self.width, table.shape[1])  # a window's table holds no more than it shows
        if self.levels:
            self._refresh_levels(batch)
        indptr, last, indices, shared, _ = self.buffers
        lens = batch.seq_lens - shared if self.levels else batch.seq_lens
        pages = torch.div(lens + (page - 1), page, rounding_mode="floor")
        torch.cumsum(pages, 0, dtype=torch.int32, out=indptr[1:])
        torch.sub(lens, (pages - 1) * page, out=last)
        columns = self.counting[:width]
        places = torch.where(columns < pages[:, None], indptr[:-1, None] + columns, len(indices) - 1)
        if self.levels:
            first = torch.div(shared, page, rounding_mode="floor")
            table = table[:, :width].gather(1, (columns + first[:, None]).clamp(max=width - 1).long())
        indices.scatter_(0, places.flatten().long(), table[:, :width].flatten())
        self.plan.slots = Slots.of(batch, self.counting)

    def _again(self, place: int, indptr: Counts, queries: Counts | None = None) -> None:
        """Plans one of the wrappers again, unless its plan is the one for these rows already."""
        wrapper = self.plan.wrappers[place]
        if not wrapper.holds(indptr, queries):
            wrapper.plan_again(indptr, queries)
            self._check(place, True)

    def _check(self, place: int, replay: bool) -> None:
        """Remembers what a capture's plan fixed, and holds a replay's against it."""
        wrapper = self.plan.wrappers[place]
        found = wrapper.info
        if not replay:
            self.captured[place] = found
        elif found != self.captured[place]:
            wrapper.drop()
            raise GraphFallback("FlashInfer's plan differs from the captured one")

    def _plan_levels(self, batch: ForwardBatch, replay: bool) -> Counts:
        """Plans every level, with the segments it was captured for; returns the keys each row has in levels, [B]."""
        shared = np.zeros(batch.num_reqs, dtype=np.int32)
        for place, (level, buffers) in enumerate(zip(batch.shared_levels, self.buffers.levels, strict=True), 1):
            size = len(buffers.row_indptr)
            rows, indptr = (_sized(each.numpy(), size) for each in (level.row_indptr_cpu, level.page_indptr_cpu))
            if rows[-1] < batch.num_reqs:
                raise GraphFallback("more shared prefixes than the captured level holds")
            counts = np.diff(indptr)
            shared += np.repeat(counts * self.page, np.diff(rows))
            queries, wrapper = rows * self.query_len, self.levels[place - 1]
            if replay and wrapper.again is not None:
                self._again(place, indptr, queries)
                continue
            told = [torch.from_numpy(each) for each in (queries, indptr, (counts > 0).astype(np.int32) * self.page)]
            wrapper.plan(told[0], told[1], level.page_indices[: int(indptr[-1])], told[2], causal=False, graph=True)
            self._check(place, replay)
        return shared

    def _refresh_levels(self, batch: ForwardBatch) -> None:
        """The part of `refresh` about levels: their runs, and the keys that each row has in them."""
        rows = self.counting[: batch.num_reqs]
        self.buffers.shared.zero_()
        for level, (row_indptr, indptr, last, indices) in zip(batch.shared_levels, self.buffers.levels, strict=True):
            at = self.counting[: len(indptr)].clamp(max=len(level.row_indptr) - 1)  # cut, or the last one repeated
            ends = level.row_indptr[at]
            torch.mul(ends, self.query_len, out=row_indptr)
            torch.index_select(level.page_indptr, 0, at, out=indptr)
            counts = indptr.diff()
            torch.mul(counts.clamp(max=1), self.page, out=last)
            indices[: len(level.page_indices)].copy_(level.page_indices)
            run = torch.searchsorted(ends[1:], rows, right=True).clamp_(max=len(counts) - 1)
            self.buffers.shared.add_(counts[run], alpha=self.page)


def _sized(values: Counts, size: int) -> Counts:
    """The first `size` numbers; where there are fewer, the last one stands for all that follow."""
    found = values[:size].astype(np.int32)
    return np.pad(found, (0, size - len(found)), mode="edge") if len(found) < size else found
