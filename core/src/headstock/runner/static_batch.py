"""Static batches: one set of device buffers for every captured size, refreshed before each replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headstock.backend import BackendSpec, GraphBucket
from headstock.batch import ForwardBatch, Ints
from headstock.device import Device, DeviceGraph, GraphPool
from headstock.errors import HeadstockError
from headstock.kv.mirror import Mirror
from headstock.runner.levels import Shared
from headstock.runner.refresh import GroupPages, refresh
from headstock.runner.static_levels import StaticLevels

Rows = Sequence[int] | Ints
"""A number for each row, or for each token."""
BUFFERS = ("query_indptr", "seq_lens", "positions", "page_table", "out_cache_loc")


class StaticStep:
    """The decode batches that graphs are captured with, one for each of `groups` and bucket of its `graph_buckets`.

    A layer group that several backends decode counts once for each of them, with the buckets that are that one's. The
    host writes no more than the slot, the length and the new tokens of each row, for all groups at once, what has
    changed in the `mirrors`, and where shared runs of rows end. A little graph of its own fetches that and works out
    the rest on the device. Shared levels are one group's and hold for all that read some: such groups read the same
    pages, and so none of them may have a window with a cache of its own. Every bucket's tensors are prefix slices of
    the same buffers, so all sizes read the same addresses. `batches` has the batches by bucket, largest first, and
    group.
    """

    def __init__(
        self, device: Device, groups: Mapping[str, tuple[BackendSpec, GroupPages]], mirrors: Sequence[Mirror] = ()
    ):
        self.device, self.mirrors, self.refresh = device, mirrors, refresh(device.torch)
        _, pages = next(iter(groups.values()))
        self.null = len(pages.table) - 1
        self.buckets = sorted({bucket for spec, _ in groups.values() for bucket in spec.graph_buckets}, reverse=True)
        self._sections = {bucket: self._cut(bucket) for bucket in self.buckets}
        size = max(sections["levels"].stop for sections in self._sections.values())
        self._inputs = torch.zeros(size, dtype=torch.int64, device=device.torch)
        self._written, self._fetched = device.pinned((size,), torch.int64), device.event()
        self._numbers = self._written.numpy()
        self._parts = {bucket: self._parted(bucket, self._numbers) for bucket in self.buckets}
        self._padding = {bucket: self._all_padding(bucket) for bucket in self.buckets}
        _check_levels(groups)
        self._groups = {name: _Group(spec, pages) for name, (spec, pages) in groups.items() if spec.graph_buckets}
        self.batches = {
            bucket: {name: own.batch(bucket) for name, own in self._groups.items() if bucket in own.spec.graph_buckets}
            for bucket in self.buckets
        }
        pool = device.graph_pool()
        self._refreshes = {bucket: self._record(bucket, pool) for bucket in self.buckets}

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers on the device."""
        return self._inputs.nbytes + sum(group.num_bytes for group in self._groups.values())

    def ids(self, bucket: GraphBucket) -> Tensor:
        """The new tokens of a bucket's rows, int64 [B × n]; padding's are 0."""
        return self._inputs[self._sections[bucket]["ids"]]

    def places(self, bucket: GraphBucket) -> Tensor | None:
        """Where each new token of the caller's rows runs, int64 [B × n]; None where no levels ask for another order."""
        return self._inputs[self._sections[bucket]["places"]] if bucket.levels else None

    def fill(
        self, bucket: GraphBucket, slots: Rows, seq_lens: Rows, graph: Literal["capture", "replay"],
        tokens: Rows | None = None, shared: Shared | None = None,
    ) -> dict[str, ForwardBatch]:  # fmt: skip
        """The bucket's batches with these rows: their slots, their keys, new ones included, and their new `tokens`.

        Rows are padded to the bucket's size as the contract has it: `query_len` tokens and keys on the null page. They
        run in the order of `shared`, whose levels a bucket with levels reads.
        """
        self._fetched.synchronize()  # a host that runs ahead waits until the step before has begun
        self._write(bucket, slots, seq_lens, tokens, shared)
        self._refreshes[bucket].replay()
        for mirror in self.mirrors:
            mirror.settled()
        parts = self._parts[bucket]
        for name, batch in self.batches[bucket].items():
            self._groups[name].tell(batch, parts["lens"], parts["levels"], len(slots), graph)
        return self.batches[bucket]

    def _write(
        self, bucket: GraphBucket, slots: Rows, seq_lens: Rows, tokens: Rows | None = None, shared: Shared | None = None
    ) -> None:
        """Writes what the device fetches, part by part as `_cut` has them."""
        padding, parts, ids = self._padding[bucket], self._parts[bucket], () if tokens is None else tokens
        self._numbers[: len(padding)] = padding
        if bucket.levels:
            runs_as, levels = shared.rows(len(slots)) if shared else (range(len(slots)), ())
            order = np.array(runs_as, dtype=np.int64)
            slots, seq_lens, ids = (_reordered(each, order) for each in (slots, seq_lens, ids))
            places = parts["places"][: len(order) * bucket.query_len]
            places[:] = _reordered(places, order.argsort())
            parts["levels"][:] = StaticLevels.encode(levels, bucket.batch, bucket.levels)
        parts["slots"][: len(slots)], parts["lens"][: len(slots)], parts["ids"][: len(ids)] = slots, seq_lens, ids
        for mirror, changes in zip(self.mirrors, parts["changes"], strict=True):
            mirror.pending(changes)

    def _all_padding(self, bucket: GraphBucket) -> Ints:
        """What the host writes where there are no rows and nothing has changed."""
        numbers = np.zeros(self._sections[bucket]["levels"].stop, dtype=np.int64)
        parts = self._parted(bucket, numbers)
        parts["slots"][:], parts["lens"][:] = self.null, bucket.query_len
        parts["places"][:] = range(len(parts["places"]))
        for mirror, (places, _) in zip(self.mirrors, parts["changes"], strict=True):
            places[:] = mirror.spare
        return numbers

    def _parted(self, bucket: GraphBucket, numbers: Ints) -> dict[str, Ints]:
        """What the host writes, or would write, part by part; "changes" are [mirrors, 2, rows]."""
        parts = {name: numbers[section] for name, section in self._sections[bucket].items()}
        return parts | {"changes": parts["changes"].reshape(len(self.mirrors), 2, bucket.batch)}

    def _cut(self, bucket: GraphBucket) -> dict[str, slice]:
        """Where each part of what the host writes lies."""
        rows, levels, tokens = bucket.batch, bucket.levels, bucket.batch * bucket.query_len
        sizes = {
            "slots": rows, "lens": rows, "ids": tokens, "changes": 2 * rows * len(self.mirrors),
            "places": tokens if levels else 0, "levels": StaticLevels.numbers(rows, levels),
        }  # fmt: skip
        ends = list(accumulate(sizes.values()))
        return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}

    def _record(self, bucket: GraphBucket, pool: GraphPool) -> DeviceGraph:
        sections = self._sections[bucket]
        used = slice(sections["levels"].stop)
        slots, lens, levels = (self._inputs[sections[name]] for name in ("slots", "lens", "levels"))

        def refresh() -> None:
            self.refresh.fetch(self._written[used], self._inputs[used], self.mirrors, sections["changes"])
            self._fetched.record()
            for name, batch in self.batches[bucket].items():
                group = self._groups[name]
                self.refresh.derive(batch, group.pages, group.spec, slots, lens)
                group.derive_levels(batch, levels)

        self._write(bucket, [], [])
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

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(own.nbytes for own in self._buffers.values()) + sum(own.num_bytes for own in self._levels.values())

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
        self, batch: ForwardBatch, lens: Ints, levels: Ints, num_real_reqs: int, graph: Literal["capture", "replay"]
    ) -> None:
        """What the host knows of the rows, from what it wrote."""
        batch.graph, batch.num_real_reqs = graph, num_real_reqs
        batch._csr.clear()
        if batch.shared_levels:
            batch.shared_levels = self._levels[_bucket(batch)].told(levels.astype(np.int32))
        if self.spec.host_lengths == "exact":
            if self.pages.of is not None:
                lens = lens - self.pages.first(lens, self.spec, batch.query_len) * batch.page_size
            batch.seq_lens_cpu = torch.from_numpy(lens.astype(np.int32))

    def derive_levels(self, batch: ForwardBatch, levels: Tensor) -> None:
        """What follows on the device from the batch's pages and where shared runs end, as the host wrote it."""
        if batch.shared_levels:
            assert batch.page_table is not None, "graphs are of paged batches"
            self._levels[_bucket(batch)].derive(levels, batch.page_table)


def _bucket(batch: ForwardBatch) -> GraphBucket:
    return GraphBucket(batch.num_reqs, batch.query_len, len(batch.shared_levels))


def _reordered(values: Rows, order: Ints) -> Ints:
    """The values of rows, as many of each, with the rows in this order."""
    rows = np.asarray(values, dtype=np.int64)
    return rows.reshape(len(order), -1)[order].flatten() if len(rows) else rows


def _check_levels(groups: Mapping[str, tuple[BackendSpec, GroupPages]]) -> None:
    """Refuses what levels of the page table would be wrong for."""
    for name, (spec, pages) in groups.items():
        levels = max((bucket.levels for bucket in spec.graph_buckets), default=0)
        if levels and spec.max_levels and (pages.of is not None or levels > spec.max_levels):
            own = " and a cache of its window's own" if pages.of is not None else ""
            raise HeadstockError(
                f"decode steps of the layer group {name} cannot be captured with levels of shared prefixes",
                given=f"buckets of up to {levels}, max_levels={spec.max_levels}{own}",
                works="as many levels as max_levels, of rows whose table holds all their pages; max_levels=0",
            )
