"""Planted faults of multi-head latent attention: specimens with one thing wrong where the cache holds latents."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headstock.batch import ForwardBatch
from headstock.layer import AttentionLayer
from headstock.testing.specimen import Plan, Specimen


class LatentRopeDropped(Specimen):
    """Scores leave the rope part of a latent out."""

    def scores(self, q: Tensor, keys: Tensor, layer: AttentionLayer, plan: Plan) -> Tensor:
        if self.spec.attention == "mla":
            q, keys = q[..., : self.spec.v_head_dim], keys[..., : self.spec.v_head_dim]
        return super().scores(q, keys, layer, plan)


class LatentRopeFirst(Specimen):
    """The rope part of a query is taken to come first."""

    def scores(self, q: Tensor, keys: Tensor, layer: AttentionLayer, plan: Plan) -> Tensor:
        if self.spec.attention == "mla":
            q = q.roll(self.spec.v_head_dim, -1)
        return super().scores(q, keys, layer, plan)


class LatentScaledByItsWidth(Specimen):
    """Scores over latents are scaled by the root of R + P, not by the model's scale."""

    def scores(self, q: Tensor, keys: Tensor, layer: AttentionLayer, plan: Plan) -> Tensor:
        if self.spec.attention == "mla":
            keys = keys * (self.spec.head_dim**-0.5 / self.spec.scale)
        return super().scores(q, keys, layer, plan)


class LatentValuesFromTheEnd(Specimen):
    """Values are the last R of a latent, rope part and all."""

    def content(self, latents: Tensor) -> Tensor:
        return latents[..., -self.spec.v_head_dim :]


class LatentScaleIgnored(Specimen):
    """Latents are read as they are stored, whatever the scale."""

    def read(self, plan: Plan, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        return super().read(plan, k, v, replace(layer, k_scale=1.0) if self.spec.attention == "mla" else layer)


class LatentScaleOfKeysOnly(Specimen):
    """A latent is scaled where it is a key, and where it is a value by the scale of values."""

    def read(self, plan: Plan, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        keys, values = super().read(plan, k, v, layer)
        return keys, values * (layer.v_scale / layer.k_scale) if self.spec.attention == "mla" else values


class LatentLseInBaseTwo(Specimen):
    """The log-sum-exp over latents is a logarithm to the base 2."""

    def forward(self, q: Tensor, k: Any, v: Any, layer: AttentionLayer, batch: ForwardBatch, *, out: Tensor,
                lse: Tensor | None = None) -> None:  # fmt: skip
        super().forward(q, k, v, layer, batch, out=out, lse=lse)
        if lse is not None and self.spec.attention == "mla":
            lse.div_(math.log(2))


class LatentRopeNotWritten(Specimen):
    """The rope part of a new token does not reach the cache."""

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        if self.spec.attention == "mla":
            k = torch.cat((k[..., : self.spec.v_head_dim], torch.zeros_like(k[..., self.spec.v_head_dim :])), -1)
        super().write(layer, k, v, batch)


class LatentOfSixteenHeads(Specimen):
    """Heads after the sixteenth ask what the sixteenth before them asked."""

    def scores(self, q: Tensor, keys: Tensor, layer: AttentionLayer, plan: Plan) -> Tensor:
        heads = torch.arange(q.shape[1], device=q.device)
        asked = q[:, heads % 16] if self.spec.attention == "mla" else q
        return super().scores(asked, keys, layer, plan)


class LatentTakenContiguous(Specimen):
    """Latents are read as if nothing lay between them."""

    def read(self, plan: Plan, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        if self.spec.attention != "mla":
            return super().read(plan, k, v, layer)
        cache: Any = layer.kv
        pages, page, width = cache.latent.shape
        packed = cache.latent.as_strided((pages, page, width), (cache.latent.stride(0), width, 1))
        found = packed.flatten(0, 1)[plan.slots.flatten(), None]  # type: ignore[union-attr]
        return self.decode(found, layer.k_scale, plan), self.decode(self.content(found), layer.k_scale, plan)


class PrefixMaskedAsNew(Specimen):
    """A chunk of the prefix, given without a mask, is masked as the new tokens are."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        causal = batch.causal or (self.spec.attention == "ragged" and self.spec.lse)
        return super().sees(replace(batch, causal=causal), plan, keys, own, first)


class OffsetsOfLatentsOf32Bits(Specimen):
    """Offsets into a cache of latents are computed in 32 bits."""

    def read(self, plan: Plan, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        cache = getattr(layer.kv, "latent", None)
        if cache is None:
            return super().read(plan, k, v, layer)
        offsets = plan.slots // self.spec.page_size * cache.stride(0)  # type: ignore[operator]
        wrapped = torch.where(offsets > 2**31 - 1, 0, plan.slots)  # type: ignore[arg-type]
        return super().read(replace(plan, slots=wrapped), k, v, layer)
