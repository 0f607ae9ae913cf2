"""Static batches: one set of device buffers for every captured size, refreshed before each replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from headstock.backend import BackendSpec, GraphBucket
from headstock.batch import ForwardBatch
from headstock.device import Device, DeviceGraph

BUFFERS = ("query_indptr", "seq_lens", "positions", "page_table", "out_cache_loc")


class StaticBatches:
    """The decode batches that graphs of one layer group are captured with, one per bucket of `spec.graph_buckets`.

    `table` is the group's page table on the device, int32 [slots + 1, W]; its last row is all zeros, the null page, and
    serves padding. The host sends no more than the slot and length of each row: the rest is worked out on the device,
    by a little graph of its own. Every bucket's tensors are prefix slices of the same buffers, so all sizes read the
    same addresses. `batches` has the batches by bucket, largest first.
    """

    def __init__(self, spec: BackendSpec, table: Tensor):
        self.spec, self.table, self.device = spec, table, Device.open(spec.device)
        buckets = sorted(spec.graph_buckets, reverse=True)
        rows, tokens = max(b.batch for b in buckets), max(b.batch * b.query_len for b in buckets)

        def buffer(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=spec.device)

        self._buffers = {
            "query_indptr": buffer(torch.int32, rows + 1),
            "seq_lens": buffer(torch.int32, rows),
            "positions": buffer(torch.int64, tokens),
            "page_table": buffer(torch.int32, rows, table.shape[1]),
            "out_cache_loc": buffer(torch.int64, tokens),
        }
        self._inputs = buffer(torch.int64, 2, rows)  # slots and lengths
        self._staged = [self.device.pinned((2, rows), torch.int64) for _ in range(2)]  # two, for the step before runs
        self._refresh: dict[GraphBucket, DeviceGraph] = {}
        self.batches = {bucket: self._make(bucket) for bucket in buckets}

    def fill(
        self, bucket: GraphBucket, slots: Sequence[int], seq_lens: Sequence[int], graph: Literal["capture", "replay"]
    ) -> ForwardBatch:
        """The bucket's batch with these rows: their slots in the table, and their keys, new ones included.

        Rows are padded to the bucket's size as the contract has it: `query_len` tokens and keys on the null page.
        """
        batch, missing = self.batches[bucket], bucket.batch - len(slots)
        rows = [[*slots, *[len(self.table) - 1] * missing], [*seq_lens, *[bucket.query_len] * missing]]
        self._staged.append(self._staged.pop(0))
        staged = self._staged[0][:, : bucket.batch]
        staged.copy_(torch.tensor(rows))
        self._inputs[:, : bucket.batch].copy_(staged, non_blocking=True)
        self._refresh[bucket].replay()
        batch.graph, batch.num_real_reqs = graph, len(slots)
        if self.spec.host_lengths == "exact":
            batch.seq_lens_cpu = staged[1].int()
        batch._csr.clear()
        return batch

    def _make(self, bucket: GraphBucket) -> ForwardBatch:
        """The batch over the buffers, all padding, and the graph that brings them up to date."""
        spec, rows, n = self.spec, bucket.batch, bucket.query_len
        table = torch.zeros(rows, self.table.shape[1], dtype=torch.int32)
        batch = ForwardBatch.from_lengths(
            [n] * rows, [n] * rows, table, spec.page_size, phase="decode", max_seq_len=spec.max_context,
            host_lengths=spec.host_lengths,
        )  # fmt: skip
        for name in BUFFERS:
            given = getattr(batch, name)
            part = self._buffers[name][: len(given)]
            part.copy_(given)
            setattr(batch, name, part)
        self._inputs[0, :rows] = len(self.table) - 1
        self._inputs[1, :rows] = n
        with self.device.warming_up():
            self._derive(batch)
        self._refresh[bucket] = self.device.capture(lambda: self._derive(batch))
        return batch

    def _derive(self, batch: ForwardBatch) -> None:
        """Everything about rows that follows from their slots and lengths."""
        assert batch.page_table is not None, "graphs are of paged batches"
        assert batch.out_cache_loc is not None, "which cache their tokens"
        rows, n, page = batch.num_reqs, batch.query_len, batch.page_size
        slots, lens = self._inputs[0, :rows], self._inputs[1, :rows]
        batch.seq_lens.copy_(lens)
        torch.index_select(self.table, 0, slots, out=batch.page_table)
        positions = (lens - n)[:, None] + torch.arange(n, device=lens.device)
        batch.positions.copy_(positions.flatten())
        pages = batch.page_table.gather(1, positions // page).long()
        batch.out_cache_loc.copy_((pages * page + positions % page).flatten())
