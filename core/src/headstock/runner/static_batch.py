"""Static batches: one set of device buffers for every captured size, refreshed before each replay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headstock.backend import BackendSpec, GraphBucket
from headstock.batch import ForwardBatch

BUFFERS = ("query_indptr", "seq_lens", "positions", "page_table", "out_cache_loc")


class StaticBatches:
    """The decode batches that graphs of one layer group are captured with, one per bucket of `spec.graph_buckets`.

    Their tensors are prefix slices of buffers made for the largest, so that every size reads the same addresses.
    `batches` has them by bucket.
    """

    def __init__(self, spec: BackendSpec):
        self.spec = spec
        buckets = sorted(spec.graph_buckets, reverse=True)
        rows, tokens = max(b.batch for b in buckets), max(b.batch * b.query_len for b in buckets)
        width = -(-spec.max_context // spec.page_size)

        def buffer(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=spec.device)

        self._buffers = {
            "query_indptr": buffer(torch.int32, rows + 1),
            "seq_lens": buffer(torch.int32, rows),
            "positions": buffer(torch.int64, tokens),
            "page_table": buffer(torch.int32, rows, width),
            "out_cache_loc": buffer(torch.int64, tokens),
        }
        self.batches = {bucket: self._make(bucket) for bucket in buckets}

    def fill(self, bucket: GraphBucket, seq_lens: Sequence[int], table: Tensor | None, graph: str) -> ForwardBatch:
        """The bucket's batch with these rows (keys each, and page table int32 [R, W] on the CPU), padded to its size.

        `graph` is "capture" or "replay". Padding is the contract's: `query_len` tokens and keys on the null page.
        """
        batch = self.batches[bucket]
        host = self._host(bucket, seq_lens, table)
        for name in BUFFERS:
            getattr(batch, name).copy_(getattr(host, name), non_blocking=True)
        batch.graph = graph  # type: ignore[assignment]
        batch.num_real_reqs = len(seq_lens)
        batch.query_indptr_cpu, batch.seq_lens_cpu = host.query_indptr_cpu, host.seq_lens_cpu
        batch._csr.clear()
        return batch

    def _host(self, bucket: GraphBucket, seq_lens: Sequence[int], table: Tensor | None) -> ForwardBatch:
        spec, rows, n = self.spec, bucket.batch, bucket.query_len
        full = torch.zeros(rows, self._buffers["page_table"].shape[1], dtype=torch.int32)
        if table is not None:
            full[: len(table), : table.shape[1]] = table
        lens = [*seq_lens, *[n] * (rows - len(seq_lens))]
        return ForwardBatch.from_lengths(
            [n] * rows, lens, full, spec.page_size, phase="decode", max_seq_len=spec.max_context,
            num_real_reqs=len(seq_lens), host_lengths=spec.host_lengths,
        )  # fmt: skip

    def _make(self, bucket: GraphBucket) -> ForwardBatch:
        batch = self._host(bucket, [bucket.query_len] * bucket.batch, None)
        for name in BUFFERS:
            setattr(batch, name, self._buffers[name][: len(getattr(batch, name))])
        return batch
