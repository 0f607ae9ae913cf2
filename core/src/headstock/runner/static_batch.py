"""Static batches: one set of device buffers for every captured size, refreshed before each replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstock.backend import BackendSpec, GraphBucket
from headstock.batch import ForwardBatch
from headstock.device import Device, DeviceGraph, GraphPool
from headstock.kv.mirror import Mirror
from headstock.runner.levels import Shared
from headstock.runner.static_levels import StaticLevels

BUFFERS = ("query_indptr", "seq_lens", "positions", "page_table", "out_cache_loc")


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


class StaticStep:
    """The decode batches that graphs are captured with, one for each of `groups` and bucket of its `graph_buckets`.

    A layer group that several backends decode counts once for each of them, with the buckets that are that one's.
    The host writes no more than the slot, the length and the new tokens of each row, for all groups at once, what has
    changed in the `mirrors`, and where shared runs of rows end. A little graph of its own fetches that and works out
    the rest on the device. Every bucket's tensors are prefix slices of the same buffers, so all sizes read the same
    addresses. `batches` has the batches by bucket, largest first, and group.
    """

    def __init__(
        self, device: Device, groups: Mapping[str, tuple[BackendSpec, GroupPages]], mirrors: Sequence[Mirror] = ()
    ):
        self.device, self.mirrors = device, mirrors
        _, pages = next(iter(groups.values()))
        self.null = len(pages.table) - 1
        self.buckets = sorted({bucket for spec, _ in groups.values() for bucket in spec.graph_buckets}, reverse=True)
        self._sections = {bucket: self._cut(bucket) for bucket in self.buckets}
        size = max(sections["levels"].stop for sections in self._sections.values())
        self._inputs = torch.zeros(size, dtype=torch.int64, device=device.torch)
        self._written, self._fetched = device.pinned((size,), torch.int64), device.event()
        self._numbers = self._written.numpy()
        self._groups = {name: _Group(spec, pages) for name, (spec, pages) in groups.items() if spec.graph_buckets}
        self.batches = {
            bucket: {name: own.batch(bucket) for name, own in self._groups.items() if bucket in own.spec.graph_buckets}
            for bucket in self.buckets
        }
        pool = device.graph_pool()
        self._refresh = {bucket: self._record(bucket, pool) for bucket in self.buckets}

    def ids(self, bucket: GraphBucket) -> Tensor:
        """The new tokens of a bucket's rows, int64 [B × n]; padding's are 0."""
        return self._inputs[self._sections[bucket]["ids"]]

    def places(self, bucket: GraphBucket) -> Tensor | None:
        """Where each row of the caller's runs, int64 [B]; None where no levels ask for another order."""
        return self._inputs[self._sections[bucket]["places"]] if bucket.levels else None

    def fill(
        self, bucket: GraphBucket, slots: Sequence[int], seq_lens: Sequence[int], graph: Literal["capture", "replay"],
        tokens: Sequence[int] | None = None, shared: Shared | None = None,
    ) -> dict[str, ForwardBatch]:  # fmt: skip
        """The bucket's batches with these rows: their slots, their keys, new ones included, and their new `tokens`.

        Rows are padded to the bucket's size as the contract has it: `query_len` tokens and keys on the null page. They
        run in the order of `shared`, whose levels a bucket with levels reads.
        """
        values = self._values(bucket, slots, seq_lens, tokens, shared)
        self._fetched.synchronize()  # a host that runs ahead waits until the step before has begun
        self._numbers[: len(values)] = values
        self._refresh[bucket].replay()
        for mirror in self.mirrors:
            mirror.settled()
        told, sections = self._numbers[: len(values)].astype(np.int32), self._sections[bucket]
        for name, batch in self.batches[bucket].items():
            lens, levels = told[sections["lens"]], told[sections["levels"]]
            self._groups[name].tell(batch, lens, levels, len(slots), graph)
        return self.batches[bucket]

    def _values(
        self, bucket: GraphBucket, slots: Sequence[int], seq_lens: Sequence[int], tokens: Sequence[int] | None,
        shared: Shared | None,
    ) -> list[int]:  # fmt: skip
        """What the host writes, part by part as `_cut` has them."""
        rows, n = bucket.batch, bucket.query_len
        padding, ids = rows - len(slots), tokens or [0] * (len(slots) * n)
        order, levels = shared.rows(len(slots)) if shared else (list(range(len(slots))), ())
        if bucket.levels:
            slots, seq_lens, ids = ([own[place] for place in order] for own in (slots, seq_lens, ids))
        values = [*slots, *[self.null] * padding, *seq_lens, *[n] * padding, *ids, *[0] * (padding * n)]
        for mirror in self.mirrors:
            values += mirror.pending(rows)
        if bucket.levels:
            values += [*np.argsort(order), *range(len(slots), rows), *StaticLevels.encode(levels, rows, bucket.levels)]
        return values

    def _cut(self, bucket: GraphBucket) -> dict[str, slice]:
        """Where each part of what the host writes lies."""
        rows, levels = bucket.batch, bucket.levels
        sizes = {
            "slots": rows, "lens": rows, "ids": rows * bucket.query_len, "changes": 2 * rows * len(self.mirrors),
            "places": rows if levels else 0, "levels": StaticLevels.numbers(rows, levels),
        }  # fmt: skip
        ends = list(accumulate(sizes.values()))
        return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}

    def _record(self, bucket: GraphBucket, pool: GraphPool) -> DeviceGraph:
        sections = self._sections[bucket]
        used = slice(sections["levels"].stop)
        slots, lens, changes, levels = (self._inputs[sections[name]] for name in ("slots", "lens", "changes", "levels"))

        def refresh() -> None:
            self._inputs[used].copy_(self._written[used], non_blocking=True)
            self._fetched.record()
            for mirror, own in zip(self.mirrors, changes.view(len(self.mirrors), 2 * bucket.batch), strict=True):
                mirror.put(own)
            for name, batch in self.batches[bucket].items():
                self._groups[name].derive(batch, slots, lens, levels)

        self._numbers[used] = self._values(bucket, [], [], None, None)
        with self.device.warming_up(pool):
            refresh()
        return self.device.capture(refresh, pool)


class _Group:
    """The buffers of one layer group and backend, and what its batches are worked out from."""

    def __init__(self, spec: BackendSpec, pages: GroupPages):
        self.spec, self.pages, buckets = spec, pages, spec.graph_buckets
        rows, tokens = max(b.batch for b in buckets), max(b.batch * b.query_len for b in buckets)
        self.width = max(-(-pages.bound(spec, b.query_len) // spec.page_size) for b in buckets)
        self._levels: dict[GraphBucket, StaticLevels] = {}

        def buffer(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=spec.device)

        self._buffers = {
            "query_indptr": buffer(torch.int32, rows + 1),
            "seq_lens": buffer(torch.int32, rows),
            "positions": buffer(torch.int64, tokens),
            "page_table": buffer(torch.int32, rows, self.width),
            "out_cache_loc": buffer(torch.int64, tokens),
        }

    def batch(self, bucket: GraphBucket) -> ForwardBatch:
        """A batch over the buffers, all padding."""
        spec, rows, n = self.spec, bucket.batch, bucket.query_len
        batch = ForwardBatch.from_lengths(
            [n] * rows, [n] * rows, torch.zeros(rows, self.width, dtype=torch.int32), spec.page_size, phase="decode",
            max_seq_len=self.pages.bound(spec, n), host_lengths=spec.host_lengths,
        )  # fmt: skip
        for name in BUFFERS:
            given = getattr(batch, name)
            part = self._buffers[name][: len(given)]
            part.copy_(given)
            setattr(batch, name, part)
        if bucket.levels and spec.max_levels:
            own = StaticLevels(rows, self.width, bucket.levels, batch.seq_lens.device)
            self._levels[bucket], batch.shared_levels = own, own.levels
        return batch

    def tell(
        self, batch: ForwardBatch, lens: NDArray[np.int32], levels: NDArray[np.int32], num_real_reqs: int,
        graph: Literal["capture", "replay"],
    ) -> None:  # fmt: skip
        """What the host knows of the rows."""
        batch.graph, batch.num_real_reqs = graph, num_real_reqs
        batch._csr.clear()
        if batch.shared_levels:
            batch.shared_levels = self._levels[_bucket(batch)].told(levels)
        if self.spec.host_lengths == "exact":
            keys = torch.from_numpy(lens)
            batch.seq_lens_cpu = keys if self.pages.of is None else keys - self._first(keys, batch) * batch.page_size

    def derive(self, batch: ForwardBatch, slots: Tensor, lens: Tensor, levels: Tensor) -> None:
        """Everything about rows that follows from their slots, their lengths and where their shared runs end.

        All are int64 on the device, slots and lengths [B].
        """
        assert batch.page_table is not None, "graphs are of paged batches"
        assert batch.out_cache_loc is not None, "which cache their tokens"
        n, page, table, of = batch.query_len, batch.page_size, self.pages.table, self.pages.of
        columns = torch.arange(self.width, device=lens.device)[None]
        own, keys = columns, lens
        if of is None:
            rows = table[:, : self.width].index_select(0, slots)
        else:
            first = self._first(lens, batch)
            own, keys = columns + first[:, None], lens - first * page
            flat = slots[:, None] * table.shape[1] + own.clamp(max=table.shape[1] - 1)
            rows = of.take(table.take(flat).long())
        batch.page_table.copy_(rows.masked_fill_(columns * page >= keys[:, None], 0))
        batch.seq_lens.copy_(keys)
        new = torch.arange(n, device=lens.device) - n
        batch.positions.copy_((lens[:, None] + new).flatten())
        places = keys[:, None] + new
        pages = batch.page_table.gather(1, places // page).long()
        batch.out_cache_loc.copy_((pages * page + places % page).flatten())
        if batch.shared_levels:
            self._levels[_bucket(batch)].derive(levels, batch.page_table)

    def _first(self, lens: Tensor, batch: ForwardBatch) -> Tensor:
        """The first page that each row's new tokens can see."""
        assert self.spec.window is not None, "a cache of its own is of a window"
        return (lens - (batch.query_len + self.spec.window - 1)).clamp(min=0) // batch.page_size


def _bucket(batch: ForwardBatch) -> GraphBucket:
    return GraphBucket(batch.num_reqs, batch.query_len, len(batch.shared_levels))
