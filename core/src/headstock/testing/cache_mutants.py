"""Planted faults: what is written to the cache and read from it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headstock.batch import ForwardBatch
from headstock.layer import AttentionLayer
from headstock.testing.specimen import Plan, Specimen


class WritesNextSlot(Specimen):
    """New tokens are stored one slot too far."""

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        super().write(layer, k, v, replace(batch, out_cache_loc=batch.out_cache_loc + 1))  # type: ignore[arg-type, operator]


class WritesValuesAsKeys(Specimen):
    """Values are stored where keys should be, where they fit."""

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        super().write(layer, v if v is not None and v.shape == k.shape else k, v, batch)


class WritesNothingInDecode(Specimen):
    """Decode leaves its new tokens out of the cache but for the numbers it reads itself."""

    def forward(self, q: Tensor, k: Any, v: Any, layer: AttentionLayer, batch: ForwardBatch, *, out: Tensor,
                lse: Tensor | None = None) -> None:  # fmt: skip
        super().forward(q, k, v, layer, batch, out=out, lse=lse)
        if batch.phase == "decode" and layer.kv is not None and k is not None and batch.out_cache_loc is not None:
            layer.kv.write(torch.zeros_like(k), None if v is None else torch.zeros_like(v), batch.out_cache_loc)


class WritesPaddingToPageOne(Specimen):
    """Padded rows are stored in page 1."""

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        loc, page = batch.out_cache_loc, batch.page_size
        assert loc is not None, "asked only with slots"
        super().write(layer, k, v, replace(batch, out_cache_loc=torch.where(loc < page, loc + page, loc)))


class WritesWithoutScale(Specimen):
    """Keys are stored as they are, whatever the scale."""

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        super().write(layer, (k.float() * layer.k_scale).to(k.dtype), v, batch)


class WritesWithoutSaturation(Specimen):
    """What FP8 cannot hold becomes NaN."""

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        limit = torch.finfo(getattr(torch, self.spec.kv_dtype)).max * layer.k_scale
        super().write(layer, k.masked_fill(k.float().abs() > limit, math.nan), v, batch)


class ReadsWithoutScale(Specimen):
    """Values are read as they are stored, whatever the scale."""

    def read(self, plan: Plan, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        return super().read(plan, k, v, replace(layer, v_scale=1.0))


class OneScaleForBoth(Specimen):
    """Values are read with the keys' scale."""

    def read(self, plan: Plan, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        return super().read(plan, k, v, replace(layer, v_scale=layer.k_scale))


class TransposedPages(Specimen):
    """Pages of the heads-first layout are read as if tokens came first."""

    def read(self, plan: Plan, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        keys, values = super().read(plan, k, v, layer)
        if self.spec.kv_layout != "hnd":
            return keys, values
        cache: Any = layer.kv
        pages, page, heads, dim = cache.k.shape
        strides = (cache.k.stride(0), heads * dim, dim, 1)
        wrong = cache.k.as_strided((pages, page, heads, dim), strides).flatten(0, 1)
        return self.decode(wrong[plan.slots.flatten()], layer.k_scale, plan), values  # type: ignore[union-attr]
