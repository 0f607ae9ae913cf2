"""Planted faults: specimens with one thing wrong each, of the kinds that users of attention backends have reported.

Each class says in its first line what is wrong, and overrides as little as that takes. The suite must catch every one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.backend import BackendSpec, Workspace, WorkspaceBytes
from headstock.batch import ForwardBatch
from headstock.kv.layout import PagedView
from headstock.layer import AttentionLayer
from headstock.testing import latent_mutants, level_mutants
from headstock.testing.specimen import NOTHING, Plan, Specimen

State = tuple[Tensor, Tensor]


# ---- who sees whom


class WindowOneMore(Specimen):
    """A window of w shows w + 1 keys."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return _with_window(self, 1).sees(batch, plan, keys, own, first)


class WindowOneLess(Specimen):
    """A window of w shows w − 1 keys, but one at least."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return _with_window(self, -1).sees(batch, plan, keys, own, first)


class WindowIgnoredInDecode(Specimen):
    """Decode reads the whole context of a windowed layer."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        mutant = _with_window(self, 10**6) if batch.phase == "decode" else _plain(self)
        return mutant.sees(batch, plan, keys, own, first)


class WindowIgnoredInExtend(Specimen):
    """Extend reads the whole context of a windowed layer."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        mutant = _with_window(self, 10**6) if batch.phase == "extend" else _plain(self)
        return mutant.sees(batch, plan, keys, own, first)


class WindowByIndex(Specimen):
    """The window is measured on the row's last key, not on each query."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        seen = _with_window(self, 10**6).sees(batch, plan, keys, own, first)
        last = plan.lens[plan.rows][:, None] - 1
        return seen if self.spec.window is None else seen & (last - keys < self.spec.window)


class CausalSeesOneMore(Specimen):
    """A query sees the key after its own."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return super().sees(batch, plan, keys, own + 1, first)


class CausalSeesOneLess(Specimen):
    """A query does not see its own key."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return super().sees(batch, plan, keys, own - 1, first)


class CausalTopLeft(Specimen):
    """Queries are aligned to the first key, not to the last."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return super().sees(batch, plan, keys, own, torch.zeros_like(first))


class CausalIgnored(Specimen):
    """Extend lets every query see every key of its row."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return super().sees(replace(batch, causal=False), plan, keys, own, first)


class NonCausalIgnored(Specimen):
    """Cross attention and encoders are masked as if they were causal."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return super().sees(replace(batch, causal=True), plan, keys, own, first)


class VerifySeesWholeBlock(Specimen):
    """All query tokens of a decode row see all of its keys, those after them too."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return super().sees(batch, plan, keys, own + batch.query_len, first)


class QueryMaskIgnored(Specimen):
    """New tokens see those before them, whatever the mask says."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return super().sees(replace(batch, query_mask=None), plan, keys, own, first)


class QueryMaskTransposed(Specimen):
    """The mask is read by columns."""

    def among_new(self, batch: ForwardBatch, rows: Tensor, own: Tensor, new: Tensor) -> Tensor:
        assert batch.query_mask is not None, "asked only with a mask"
        assert batch.mask_indptr is not None, "a mask comes with its pointers"
        lens = batch.query_indptr.diff()[rows].long()[:, None]
        return batch.query_mask[
            batch.mask_indptr[rows][:, None] + new.clamp(min=0).minimum(lens - 1) * lens + own[:, None]
        ]


class QueryMaskOfFirstRow(Specimen):
    """Every row uses the first row's mask."""

    def among_new(self, batch: ForwardBatch, rows: Tensor, own: Tensor, new: Tensor) -> Tensor:
        assert batch.mask_indptr is not None, "a mask comes with its pointers"
        return super().among_new(replace(batch, mask_indptr=torch.zeros_like(batch.mask_indptr)), rows, own, new)


class ReadsPastLength(Specimen):
    """The last page is read to its end."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        if batch.page_size:
            lens = batch.metadata.lens
            lens.copy_((lens + batch.page_size - 1) // batch.page_size * batch.page_size)


class ForgetsLastKey(Specimen):
    """A row's newest key is not read once there are others."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        plan: Plan = batch.metadata
        keys = torch.arange(plan.seen.shape[1], device=plan.seen.device)  # type: ignore[union-attr]
        plan.seen &= (keys < plan.lens[plan.rows][:, None] - 1) | (keys == 0)  # type: ignore[operator]


# ---- where keys are


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


# ---- what is computed


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


# ---- the cache


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


# ---- shared prefixes


class MergeInBaseTwo(Specimen):
    """Partial states are merged as if their log-sum-exps were to the base 2."""

    def merge(self, states: list[State]) -> State:
        out, _ = super().merge([(out, lse * math.log(2)) for out, lse in states])
        return out, super().merge(states)[1]


class MergeOfNothingIsNaN(Specimen):
    """Merging two empty states subtracts infinity from infinity."""

    def merge(self, states: list[State]) -> State:
        out, total = states[0]
        for other, lse in states[1:]:
            top = torch.maximum(total, lse)
            a, b = (total - top).exp(), (lse - top).exp()
            out, total = (out * a[..., None] + other * b[..., None]) / (a + b)[..., None], top + (a + b).log()
        return out, total


class MergeForgetsWeights(Specimen):
    """Partial states count alike, however many keys they stand for."""

    def merge(self, states: list[State]) -> State:
        weighed = [(out, torch.where(lse == NOTHING, lse, 0.0)) for out, lse in states]
        return super().merge(weighed)[0], super().merge(states)[1]


class PrefixCountedTwice(Specimen):
    """A row's own keys include those that it shares."""

    def forward(self, q: Tensor, k: Any, v: Any, layer: AttentionLayer, batch: ForwardBatch, *, out: Tensor,
                lse: Tensor | None = None) -> None:  # fmt: skip
        super().forward(q, k, v, layer, batch, out=out, lse=lse)
        plan: Plan = batch.metadata
        if batch.shared_levels and plan.level is not None and bool((plan.level == 0).any()):
            own = torch.empty_like(out)
            super().forward(q, None, None, layer, replace(batch, shared_levels=()), out=own)
            out.lerp_(own.roll(1, 0), 0.1)


class SegmentsOneRowLate(Specimen):
    """A segment of a shared level begins one row late."""

    def levels(self, batch: ForwardBatch, rows: Tensor, keys: Tensor) -> Tensor:
        return super().levels(batch, (rows - 1).clamp(min=0), keys)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        if batch.shared_levels:  # what no level of the row holds is not read
            right = Specimen.levels(self, batch, batch.metadata.rows, self._arange(self.width(batch)))
            batch.metadata.seen &= right == batch.metadata.level


# ---- instances, plans and workspaces


class PlanOnInstance(Specimen):
    """The plan is kept on the instance, so that the last one planned serves all."""

    last: Any = None

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.last = batch.metadata

    def forward(self, q: Tensor, k: Any, v: Any, layer: AttentionLayer, batch: ForwardBatch, *, out: Tensor,
                lse: Tensor | None = None) -> None:  # fmt: skip
        super().forward(q, k, v, layer, replace(batch, metadata=self.last), out=out, lse=lse)


class LargestBatchKept(Specimen):
    """A buffer grown by a larger batch keeps its lengths for rows of a smaller one."""

    def __init__(self, spec: BackendSpec, workspace: Workspace):
        super().__init__(spec, workspace)
        self.lens = torch.zeros(spec.max_batch, dtype=torch.long, device=spec.device)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        known = self.lens[: batch.num_reqs]
        known.copy_(torch.maximum(known, batch.seq_lens))
        batch.metadata.lens.copy_(known)


class BrokenAfterException(Specimen):
    """A forward that raised leaves the instance marked as busy, and the next does nothing."""

    busy = False

    def forward(self, q: Tensor, k: Any, v: Any, layer: AttentionLayer, batch: ForwardBatch, *, out: Tensor,
                lse: Tensor | None = None) -> None:  # fmt: skip
        if self.busy:
            out.zero_()
            return
        self.busy = True
        super().forward(q, k, v, layer, batch, out=out, lse=lse)
        self.busy = False


class PlanByLengths(Specimen):
    """Batches of lengths seen before are given the plan made then, pages and all."""

    def __init__(self, spec: BackendSpec, workspace: Workspace):
        super().__init__(spec, workspace)
        self.known: dict[tuple[int, ...], Plan] = {}

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        if batch.graph:
            super().init_forward_metadata_in_graph(batch)
            return
        key = (*batch.seq_lens.tolist(), *batch.query_indptr.tolist(), batch.page_size)
        if key not in self.known:
            super().init_forward_metadata_in_graph(batch)
            self.known[key] = batch.metadata
        batch.metadata = self.known[key]


class WritesBesideOut(Specimen):
    """The space between rows of the output is used."""

    def forward(self, q: Tensor, k: Any, v: Any, layer: AttentionLayer, batch: ForwardBatch, *, out: Tensor,
                lse: Tensor | None = None) -> None:  # fmt: skip
        super().forward(q, k, v, layer, batch, out=out, lse=lse)
        if out.stride(0) > out.shape[1] * out.stride(1):
            out.as_strided((len(out),), (out.stride(0),), out.storage_offset() + out.shape[1] * out.stride(1)).zero_()


class SeedsTheProcess(Specimen):
    """Random numbers of the whole process begin anew."""

    def forward(self, q: Tensor, k: Any, v: Any, layer: AttentionLayer, batch: ForwardBatch, *, out: Tensor,
                lse: Tensor | None = None) -> None:  # fmt: skip
        torch.manual_seed(layer.index + 1)
        super().forward(q, k, v, layer, batch, out=out, lse=lse)


class PlanInScratch(Specimen):
    """Lengths are kept in the scratch from planning to forward, where others overwrite them."""

    @classmethod
    def workspace_bytes(cls, spec: BackendSpec) -> WorkspaceBytes:
        return WorkspaceBytes(scratch=8 * spec.max_batch)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.workspace.scratch[: 8 * batch.num_reqs].view(torch.long).copy_(batch.metadata.lens)

    def forward(self, q: Tensor, k: Any, v: Any, layer: AttentionLayer, batch: ForwardBatch, *, out: Tensor,
                lse: Tensor | None = None) -> None:  # fmt: skip
        kept = self.workspace.scratch[: 8 * batch.num_reqs].view(torch.long)
        batch.metadata.lens = kept.clamp(0, batch.max_seq_len)
        super().init_forward_metadata_in_graph(batch)
        super().forward(q, k, v, layer, batch, out=out, lse=lse)


class OverrunsWorkspace(Specimen):
    """One byte more than was asked for is written."""

    @classmethod
    def workspace_bytes(cls, spec: BackendSpec) -> WorkspaceBytes:
        return WorkspaceBytes(scratch=64)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        scratch = self.workspace.scratch
        scratch.as_strided((scratch.numel() + 1,), (1,)).zero_()


class ChangesLengths(Specimen):
    """Planning rounds the batch's own lengths up to whole pages."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        page = batch.page_size or 4
        batch.seq_lens.copy_((batch.seq_lens + page - 1) // page * page)


class ChangesQueries(Specimen):
    """Queries are scaled in place."""

    def scores(self, q: Tensor, keys: Tensor, layer: AttentionLayer, plan: Plan) -> Tensor:
        return super().scores(q.mul_(2.0), keys * 0.5, layer, plan)


class BitsOfTheBatch(Specimen):
    """Weights are taken from the maximum over the batch, so that a row's bits depend on its neighbours."""

    def attend(self, scores: Tensor, values: Tensor, seen: Tensor, layer: AttentionLayer) -> State:
        out, total = super().attend(scores, values, seen, layer)
        shift = 1.0 + 1e-7 * scores.masked_fill(~seen[:, None], 0.0).abs().amax()
        return out * shift, total


# ---- graphs


class StaleLengths(Specimen):
    """A replay runs with the lengths that were captured."""

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch) -> None:
        return


class ReplannedElsewhere(Specimen):
    """A replay is planned into new memory, which the captured code does not read."""

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch) -> None:
        batch.metadata = Plan(batch.seq_lens.long())


class LongestAtCapture(Specimen):
    """Captured code looks at as many keys as the longest row had then."""

    def width(self, batch: ForwardBatch) -> int:
        host = batch.seq_lens_cpu
        return batch.max_seq_len if host is None else int(host.max())


class SlotsAtCapture(Specimen):
    """Captured code writes where the capture wrote."""

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        if batch.graph == "capture" and batch.out_cache_loc is not None:
            batch = replace(batch, out_cache_loc=torch.tensor([0] * batch.num_tokens, device=k.device))
        super().write(layer, k, v, batch)


class PaddedRowsSteal(Specimen):
    """Padded rows write to the first real row's last slot."""

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        loc = batch.out_cache_loc
        assert loc is not None, "asked only with slots"
        super().write(layer, k, v, replace(batch, out_cache_loc=torch.where(loc < batch.page_size, loc[0], loc)))


class AsksTheDevice(Specimen):
    """Captured code asks the device how long the longest row is."""

    def read(self, plan: Plan, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        assert int(plan.lens.max()) >= 0, "a host sync in every layer"
        return super().read(plan, k, v, layer)


class OneStaticPlan(Specimen):
    """All captured sizes share one plan, that of the last capture."""

    shared: Plan | None = None

    def init_cuda_graph_state(self, batches: Sequence[ForwardBatch]) -> None:
        self.shared = Plan(torch.zeros_like(batches[-1].seq_lens, dtype=torch.long))

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        if batch.graph and self.shared is not None:
            lens = F.pad(batch.seq_lens.long(), (0, max(len(self.shared.lens) - batch.num_reqs, 0)))
            self.shared.lens.copy_(lens[: len(self.shared.lens)])
            batch.metadata.lens = self.shared.lens[torch.arange(batch.num_reqs) % len(self.shared.lens)]


def mutants() -> list[type[Specimen]]:
    """Every planted fault, in the order of this page, and then those of captured levels and of MLA."""
    here = [*globals().values(), *vars(level_mutants).values(), *vars(latent_mutants).values()]
    return [kind for kind in here if isinstance(kind, type) and Specimen in kind.__mro__[1:]]


def _with_window(backend: Specimen, more: int) -> Specimen:
    """A plain specimen whose window is `more` keys wider."""
    window = backend.spec.window
    spec = replace(backend.spec, window=None if window is None else max(window + more, 1))
    return Specimen(spec, backend.workspace)


def _plain(backend: Specimen) -> Specimen:
    return Specimen(backend.spec, backend.workspace)
