"""Planted faults: where keys and queries are: pages, strides and offsets."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headstock.batch import ForwardBatch
from headstock.kv.layout import PagedView
from headstock.layer import AttentionLayer
from headstock.testing.specimen import Plan, Specimen


class PagesInOrder(Specimen):
    """A row's pages are read in the order of their numbers."""

    def slots(self, batch: ForwardBatch, rows: Tensor, keys: Tensor) -> Tensor:
        if batch.page_table is None:
            return super().slots(batch, rows, keys)
        far = torch.where(batch.page_table == 0, 2**30, batch.page_table)
        ordered = far.sort(-1).values
        return super().slots(replace(batch, page_table=torch.where(ordered == 2**30, 0, ordered)), rows, keys)


class PagesAdjacent(Specimen):
    """A row's pages are taken to follow its first."""

    def slots(self, batch: ForwardBatch, rows: Tensor, keys: Tensor) -> Tensor:
        if batch.page_table is None:
            return super().slots(batch, rows, keys)
        return batch.page_table[rows, 0].long()[:, None] * batch.page_size + keys


class PageSizeFixed(Specimen):
    """The page size is taken to be 4."""

    def slots(self, batch: ForwardBatch, rows: Tensor, keys: Tensor) -> Tensor:
        return super().slots(batch if batch.page_table is None else replace(batch, page_size=4), rows, keys)


class FirstTwoPages(Specimen):
    """A row has two pages at most."""

    def slots(self, batch: ForwardBatch, rows: Tensor, keys: Tensor) -> Tensor:
        if batch.page_table is None:
            return super().slots(batch, rows, keys)
        return super().slots(replace(batch, page_table=batch.page_table[:, :2]), rows, keys)


class SharedPagesOnce(Specimen):
    """A page that an earlier row has is not found by a later one."""

    def slots(self, batch: ForwardBatch, rows: Tensor, keys: Tensor) -> Tensor:
        if batch.page_table is None or batch.num_reqs == 1:
            return super().slots(batch, rows, keys)
        table = batch.page_table
        taken = torch.stack([torch.isin(row, table[:i]) if i else row < 0 for i, row in enumerate(table)])
        return super().slots(replace(batch, page_table=table.masked_fill(taken, 0)), rows, keys)


class RaggedRowsEqual(Specimen):
    """Ragged keys are taken to be as many for every row."""

    def slots(self, batch: ForwardBatch, rows: Tensor, keys: Tensor) -> Tensor:
        if batch.kv_indptr is None:
            return super().slots(batch, rows, keys)
        even = torch.arange(batch.num_reqs + 1, device=rows.device) * batch.kv_indptr[-1] // batch.num_reqs
        return super().slots(replace(batch, kv_indptr=even.int()), rows, keys)


class OffsetsOf32Bits(Specimen):
    """Offsets into the cache are computed in 32 bits."""

    def read(self, plan: Plan, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        cache = getattr(layer.kv, "k", None)
        if cache is None:
            return super().read(plan, k, v, layer)
        offsets = plan.slots // self.spec.page_size * cache.stride(0)  # type: ignore[operator]
        wrapped = torch.where(offsets > 2**31 - 1, 0, plan.slots)  # type: ignore[arg-type]
        return super().read(replace(plan, slots=wrapped), k, v, layer)


class CacheTakenContiguous(Specimen):
    """Keys and values are read as if each filled its half of a page."""

    def read(self, plan: Plan, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        if not isinstance(layer.kv, PagedView):
            return super().read(plan, k, v, layer)
        cache = layer.kv
        shape, dim = cache.k.shape, cache.k.shape[-1]
        strides = (cache.k.stride(0), shape[2] * dim, dim, 1)
        keys = cache.k.as_strided(shape, strides).flatten(0, 1)[plan.slots.flatten()]  # type: ignore[union-attr]
        values = super().read(plan, k, v, layer)[1]
        return self.decode(keys, layer.k_scale, plan), values


class QueriesTakenContiguous(Specimen):
    """Queries are read as if no other tensor lay between them."""

    def scores(self, q: Tensor, keys: Tensor, layer: AttentionLayer, plan: Plan) -> Tensor:
        packed = q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1)) if len(q) > 1 else q
        return super().scores(packed, keys, layer, plan)


class PoisonTimesZero(Specimen):
    """Keys that are not seen weigh 0, but what their slots hold is multiplied all the same."""

    def decode(self, x: Tensor, scale: float, plan: Plan) -> Tensor:
        exact = torch.float64 if self.spec.dtype == "float64" else torch.float32
        return x.to(exact).view(*plan.slots.shape, *x.shape[1:]) * scale  # type: ignore[union-attr]

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        keys = self._arange(self.width(batch))
        batch.metadata.slots = self.slots(batch, batch.metadata.rows, keys)
