"""Planted faults: what is computed: scales, caps, sinks, heads and log-sum-exps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headstock.batch import ForwardBatch
from headstock.layer import AttentionLayer
from headstock.testing.specimen import NOTHING, Plan, Specimen

State = tuple[Tensor, Tensor]


class ScaleOfValues(Specimen):
    """Scores are scaled by the size of a value head."""

    def scores(self, q: Tensor, keys: Tensor, layer: AttentionLayer, plan: Plan) -> Tensor:
        return super().scores(q, keys * (self.spec.v_head_dim / self.spec.head_dim) ** -0.5, layer, plan)


class HeadDimOfPowersOfTwo(Specimen):
    """The tail of a head beyond a power of two is left out."""

    def scores(self, q: Tensor, keys: Tensor, layer: AttentionLayer, plan: Plan) -> Tensor:
        whole = 2 ** int(math.log2(q.shape[-1]))
        return super().scores(q[..., :whole], keys[..., :whole], layer, plan)


class SoftcapMissing(Specimen):
    """Logits are not capped."""

    def cap(self, logits: Tensor, softcap: float) -> Tensor:
        return logits


class SoftcapBeforeScale(Specimen):
    """The cap is put on what is not scaled yet."""

    def cap(self, logits: Tensor, softcap: float) -> Tensor:
        return super().cap(logits / self.spec.scale, softcap) * self.spec.scale


class SinksMissing(Specimen):
    """Sinks are not in the denominator."""

    def sink(self, out: Tensor, total: Tensor, layer: AttentionLayer) -> State:
        return out, total


class SinksScaled(Specimen):
    """Sinks are scaled as logits of keys are."""

    def sink(self, out: Tensor, total: Tensor, layer: AttentionLayer) -> State:
        return super().sink(out, total, replace(layer, sinks=layer.sinks * self.spec.scale))  # type: ignore[arg-type, operator]


class SinksOfFirstLayer(Specimen):
    """Sinks are kept from the first layer that ran."""

    kept: Tensor | None = None

    def sink(self, out: Tensor, total: Tensor, layer: AttentionLayer) -> State:
        self.kept = layer.sinks.clone() if self.kept is None else self.kept  # type: ignore[union-attr]
        return super().sink(out, total, replace(layer, sinks=self.kept))


class SinksNotInLse(Specimen):
    """The log-sum-exp leaves the sink out."""

    def sink(self, out: Tensor, total: Tensor, layer: AttentionLayer) -> State:
        return super().sink(out, total, layer)[0], total


class AlibiUpsideDown(Specimen):
    """Far keys are favoured."""

    def bias(self, logits: Tensor, slopes: Tensor, plan: Plan) -> Tensor:
        return super().bias(logits, -slopes, plan)


class AlibiOfHeadsReversed(Specimen):
    """Slopes go to heads from the last to the first."""

    def bias(self, logits: Tensor, slopes: Tensor, plan: Plan) -> Tensor:
        return super().bias(logits, slopes.flip(0), plan)


class HeadsInterleaved(Specimen):
    """Query head h reads key head h modulo their number, not the one of its group."""

    def to_queries(self, x: Tensor) -> Tensor:
        return x.repeat(*[1] * (x.ndim - 2), self.spec.num_heads // self.spec.num_kv_heads, 1)


class GroupsOfPowersOfTwo(Specimen):
    """A group of query heads is taken to be a power of two."""

    def to_queries(self, x: Tensor) -> Tensor:
        group = 2 ** math.ceil(math.log2(self.spec.num_heads // self.spec.num_kv_heads))
        return x.repeat_interleave(group, dim=-2)[..., : self.spec.num_heads, :]


class ValueHeadsSwapped(Specimen):
    """Values of the last key head come first."""

    def attend(self, scores: Tensor, values: Tensor, seen: Tensor, layer: AttentionLayer) -> State:
        return super().attend(scores, values.flip(-2), seen, layer)


class LseInBaseTwo(Specimen):
    """The log-sum-exp is a logarithm to the base 2."""

    def forward(self, q: Tensor, k: Any, v: Any, layer: AttentionLayer, batch: ForwardBatch, *, out: Tensor,
                lse: Tensor | None = None) -> None:  # fmt: skip
        super().forward(q, k, v, layer, batch, out=out, lse=lse)
        if lse is not None:
            lse.div_(math.log(2))


class LseWithoutMaximum(Specimen):
    """The log-sum-exp is that of logits less their maximum."""

    def forward(self, q: Tensor, k: Any, v: Any, layer: AttentionLayer, batch: ForwardBatch, *, out: Tensor,
                lse: Tensor | None = None) -> None:  # fmt: skip
        super().forward(q, k, v, layer, batch, out=out, lse=lse)
        if lse is not None:
            lse.sub_(lse.clamp(min=-100) * 0.5)


class EmptyRowsFinite(Specimen):
    """A row without keys has a finite log-sum-exp."""

    def attend(self, scores: Tensor, values: Tensor, seen: Tensor, layer: AttentionLayer) -> State:
        out, total = super().attend(scores, values, seen, layer)
        return out, total.clamp(min=-1e4)


class EmptyRowsNaN(Specimen):
    """A row without keys is 0 divided by 0."""

    def attend(self, scores: Tensor, values: Tensor, seen: Tensor, layer: AttentionLayer) -> State:
        out, total = super().attend(scores, values, seen, layer)
        return out.masked_fill((total == NOTHING)[..., None], math.nan), total


class DenominatorOfAllLanes(Specimen):
    """Lanes past the length count in the denominator with a logit of 0."""

    def attend(self, scores: Tensor, values: Tensor, seen: Tensor, layer: AttentionLayer) -> State:
        out, total = super().attend(scores, values, seen, layer)
        lanes = (-seen.shape[1]) % 8 + (~seen).sum(-1)
        more = torch.logaddexp(total, lanes.to(total.dtype).log()[:, None])
        return out * (total - more.masked_fill(more == NOTHING, 0.0)).exp()[..., None], total


class ScaleIgnored(Specimen):
    """Scores are scaled by the head's size, whatever the model's scale."""

    def scores(self, q: Tensor, keys: Tensor, layer: AttentionLayer, plan: Plan) -> Tensor:
        return super().scores(q, keys * (self.spec.head_dim**-0.5 / self.spec.scale), layer, plan)


class NoMaximum(Specimen):
    """Logits are raised as they are, so that large ones overflow."""

    def attend(self, scores: Tensor, values: Tensor, seen: Tensor, layer: AttentionLayer) -> State:
        weights = scores.masked_fill(~seen[:, None], NOTHING).exp()
        norm = weights.sum(-1)
        out = (weights.transpose(1, 2)[..., None] * self.to_queries(values)).sum(1) / norm.clamp(min=1e-30)[..., None]
        return out, norm.log()


class LogitsClamped(Specimen):
    """Logits beyond 30 count as 30."""

    def scores(self, q: Tensor, keys: Tensor, layer: AttentionLayer, plan: Plan) -> Tensor:
        return super().scores(q, keys, layer, plan).clamp(-30, 30)


class TwoKeyHeads(Specimen):
    """Key heads after the second are not read."""

    def to_queries(self, x: Tensor) -> Tensor:
        return super().to_queries(x[..., torch.arange(x.shape[-2], device=x.device).clamp(max=1), :])


class SixteenRows(Specimen):
    """Rows after the sixteenth see nothing."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        batch.metadata.seen &= (batch.metadata.rows < 16)[:, None]


class ThousandKeys(Specimen):
    """Keys after the 1024th are not read."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        seen = batch.metadata.seen
        seen[:, 1024:] = False


class FirstLayerOnly(Specimen):
    """Layers after the first read no keys but the new ones."""

    def attend(self, scores: Tensor, values: Tensor, seen: Tensor, layer: AttentionLayer) -> State:
        return super().attend(scores, values, seen if layer.index == 0 else seen.tril(), layer)


class StridesOfKeys(Specimen):
    """Values are taken to be laid out as keys are."""

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        if v is None:
            super().write(layer, k, v, batch)
            return
        room = (v.untyped_storage().nbytes() // v.itemsize) - v.storage_offset()
        reach = sum((n - 1) * step for n, step in zip(v.shape, k.stride(), strict=True)) + 1
        super().write(layer, k, v.as_strided(v.shape, k.stride()) if k.shape == v.shape and reach <= room else v, batch)
