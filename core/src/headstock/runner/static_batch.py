"""Static batches: one set of device buffers for every captured size, refreshed before each replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstock.backend import BackendSpec, GraphBucket
from headstock.batch import ForwardBatch
from headstock.device import Device, DeviceGraph, GraphPool
from headstock.errors import HeadstockError
from headstock.kv.mirror import Mirror
from headstock.runner.host_inputs import HostInputs, Rows, sections
from headstock.runner.levels import Shared
from headstock.runner.refresh import GroupPages, refresh
from headstock.runner.static_levels import StaticLevels

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
        self._sections = {bucket: sections(bucket, len(mirrors)) for bucket in self.buckets}
        size = max(own["levels"].stop for own in self._sections.values())
        self._inputs = torch.zeros(size, dtype=torch.int64, device=device.torch)
        self._written, self._fetched = device.pinned((size,), torch.int64), device.event()
        numbers = self._written.numpy()
        self._host = {
            bucket: HostInputs(bucket, own, numbers, mirrors, self.null) for bucket, own in self._sections.items()
        }
        _check_levels(groups)
        self._groups = {name: _Group(spec, pages) for name, (spec, pages) in groups.items() if spec.graph_buckets}
        self.batches = {
            bucket: {name: own.batch(bucket) for name, own in self._groups.items() if bucket in own.spec.graph_buckets}
            for bucket in self.buckets
        }
        self._telling = {
            bucket: [(self._groups[name], batch) for name, batch in batches.items() if _asks(batch)]
            for bucket, batches in self.batches.items()
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
        tokens: Rows = (), shared: Shared | None = None,
    ) -> dict[str, ForwardBatch]:  # fmt: skip
        """The bucket's batches with these rows: their slots, their keys, new ones included, and their new `tokens`.

        Rows are padded to the bucket's size as the contract has it: `query_len` tokens and keys on the null page. They
        run in the order of `shared`, whose levels a bucket with levels reads.
        """
        host = self._host[bucket]
        self._fetched.synchronize()  # a host that runs ahead waits until the step before has begun
        host.write(slots, seq_lens, tokens, shared)
        self._refreshes[bucket].replay()
        for mirror in self.mirrors:
            mirror.settled()
        batches, count = self.batches[bucket], len(slots)
        for batch in batches.values():
            batch.graph, batch.num_real_reqs = graph, count
        for group, batch in self._telling[bucket]:
            group.tell(batch, host)
        return batches

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
                group.derive_levels(bucket, batch, levels)

        self._host[bucket].write([], [])
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
        self._lens: dict[GraphBucket, Iterator[tuple[Tensor, NDArray[np.int32]]]] = {}

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
        if batch.seq_lens_cpu is not None:
            twice = batch.seq_lens_cpu, batch.seq_lens_cpu.clone()  # what the step before was told stays as it is
            self._lens[bucket] = cycle([(each, each.numpy()) for each in twice])
        if bucket.levels and spec.max_levels:
            own = StaticLevels(rows, self.width, bucket.levels, batch.seq_lens.device)
            self._levels[bucket], batch.shared_levels = own, own.levels
        return batch

    def tell(self, batch: ForwardBatch, host: HostInputs) -> None:
        """What the host knows of the rows, from what it wrote."""
        if batch.shared_levels:
            batch.shared_levels = self._levels[host.bucket].told(host.levels)
        if batch.seq_lens_cpu is not None:
            lens = host.lens
            if self.pages.of is not None:
                lens = lens - self.pages.first(lens, self.spec, batch.query_len) * batch.page_size
            batch.seq_lens_cpu, own = next(self._lens[host.bucket])
            own[:] = lens
            batch._csr.clear()

    def derive_levels(self, bucket: GraphBucket, batch: ForwardBatch, levels: Tensor) -> None:
        """What follows on the device from the batch's pages and where shared runs end, as the host wrote it."""
        if batch.shared_levels:
            assert batch.page_table is not None, "graphs are of paged batches"
            self._levels[bucket].derive(levels, batch.page_table)


def _asks(batch: ForwardBatch) -> bool:
    """Whether a batch has what the host tells it before each replay."""
    return batch.seq_lens_cpu is not None or bool(batch.shared_levels)


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
