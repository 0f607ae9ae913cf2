"""A backend for reading and for breaking: every axis of the contract in plain torch, one small method a thought.

It spends memory without shame, [T, S, Hkv, D] for keys alone, and knows nothing on the host: what a batch holds is
worked out on the device from the batch's own tensors, so that one code serves eager steps, captures and replays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.backend import AttentionBackend
from headstock.batch import ForwardBatch, SharedLevel
from headstock.capabilities import Capabilities
from headstock.ints import ANY
from headstock.layer import AttentionLayer
from headstock.offer import Offer

NOTHING = -math.inf


@dataclass(slots=True)
class Plan:
    """lens [B] keys per row; then, filled by the device-only hook, per token: its row [T], the slots of its keys
    [T, S], which of them it sees [T, S], how far back they are [T, S], and the shared level that holds each [T, S]."""

    lens: Tensor
    rows: Tensor | None = None
    slots: Tensor | None = None
    seen: Tensor | None = None
    back: Tensor | None = None
    level: Tensor | None = None


class Specimen(AttentionBackend):
    """Attention by explicit products in float32 (float64 for float64) over every key that the longest row may have."""

    # ---- planning

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Copies the lengths; a replay copies them to where its capture found them."""
        if batch.graph == "replay":
            batch.metadata.lens.copy_(batch.seq_lens)
        else:
            batch.metadata = Plan(batch.seq_lens.long())

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        plan: Plan = batch.metadata
        plan.rows = torch.searchsorted(batch.query_indptr[1:], self._arange(batch.num_tokens), right=True)
        keys = self._arange(self.width(batch))
        valid = keys < plan.lens[plan.rows][:, None]
        plan.slots = torch.where(valid, self.slots(batch, plan.rows, keys), 0)
        own = self._arange(batch.num_tokens) - batch.query_indptr[plan.rows]  # a token's number in its row
        first = plan.lens - batch.query_indptr.diff()  # a row's first new key
        plan.back = batch.positions[:, None] - self.key_positions(batch, plan, keys, first)
        plan.seen = valid & self.sees(batch, plan, keys, own, first)
        plan.level = self.levels(batch, plan.rows, keys)

    def width(self, batch: ForwardBatch) -> int:
        """S, the keys to look at: a bound, so that it may be frozen; always the same where bits must be."""
        return self.spec.max_context if self.spec.batch_invariant else batch.max_seq_len

    def slots(self, batch: ForwardBatch, rows: Tensor, keys: Tensor) -> Tensor:
        """Where each key lies, [T, S]: a cache slot, or a row of the ragged keys."""
        if batch.page_table is None:
            assert batch.kv_indptr is not None, "ragged batches have it"
            return (batch.kv_indptr[rows].long()[:, None] + keys).clamp(max=batch.kv_indptr[-1] - 1)
        pages, columns = batch.page_table.shape[1], keys // batch.page_size
        page, begin = batch.page_table[rows][:, columns.clamp(max=pages - 1)], torch.zeros_like(rows)[:, None]
        for level in batch.shared_levels:
            page, begin = self.shared_pages(level, rows, columns, page, begin)
        return page.long() * batch.page_size + keys % batch.page_size

    def shared_pages(
        self, level: SharedLevel, rows: Tensor, columns: Tensor, page: Tensor, begin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The page of each column, [T, columns], those of the level's run put in; and where the run ends, [T, 1]."""
        run = torch.searchsorted(level.row_indptr[1:], rows, right=True)[:, None]
        end = begin + level.page_indptr.diff()[run]
        place = (level.page_indptr[run] + columns - begin).clamp(0, len(level.page_indices))
        own = F.pad(level.page_indices, (0, 1))[place]
        return torch.where((columns >= begin) & (columns < end), own, page), end

    def key_positions(self, batch: ForwardBatch, plan: Plan, keys: Tensor, first: Tensor) -> Tensor:
        """Absolute positions of keys, [T, S]: new ones have their token's, cached ones count back from the first."""
        rows = plan.rows
        assert rows is not None, "planned in this order"
        start = batch.query_indptr[rows].long()[:, None]
        new = keys - first[rows][:, None]
        last = (batch.query_indptr[rows + 1].long()[:, None] - 1 - start).clamp(min=0)
        return torch.where(
            new < 0, batch.positions[start] + new, batch.positions[start + new.clamp(min=0).minimum(last)]
        )

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        """Which keys each token sees, [T, S], lengths aside."""
        assert plan.rows is not None, "planned in this order"
        assert plan.back is not None, "planned in this order"
        new = keys - first[plan.rows][:, None]
        window = self.spec.window
        seen = torch.ones_like(new, dtype=torch.bool)
        if batch.query_mask is not None:
            seen = torch.where(new >= 0, self.among_new(batch, plan.rows, own, new), plan.back >= 0)
        elif batch.causal:
            seen = new <= own[:, None]
        elif window is not None:
            seen = plan.back >= 0
        return seen if window is None else seen & (plan.back < window)

    def among_new(self, batch: ForwardBatch, rows: Tensor, own: Tensor, new: Tensor) -> Tensor:
        """The mask among new tokens, [T, S]; meaningless for cached keys."""
        assert batch.query_mask is not None, "asked only with a mask"
        assert batch.mask_indptr is not None, "a mask comes with its pointers"
        lens = batch.query_indptr.diff()[rows].long()[:, None]
        at = batch.mask_indptr[rows][:, None] + own[:, None] * lens + new.clamp(min=0).minimum(lens - 1)
        return batch.query_mask[at]

    def levels(self, batch: ForwardBatch, rows: Tensor, keys: Tensor) -> Tensor:
        """The shared level that holds each key, [T, S], counted from 0; the row's own keys come after the last."""
        level = torch.zeros(len(rows), len(keys), dtype=torch.long, device=keys.device)
        end = torch.zeros(len(rows), 1, dtype=torch.long, device=keys.device)
        for shared in batch.shared_levels:
            segment = torch.searchsorted(shared.row_indptr[1:], rows, right=True)
            end = end + shared.page_indptr.diff()[segment].long()[:, None] * batch.page_size
            level = level + (keys >= end)
        return level

    def part(self, batch: ForwardBatch, plan: Plan, number: int) -> Tensor:
        """Which keys a part holds, [T, S]: those of a shared level, or after the last level the rows' own."""
        assert plan.level is not None, "planned before it is run"
        return plan.level == number

    # ---- one layer

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, *,
        out: Tensor, lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        plan: Plan = batch.metadata
        assert plan.seen is not None, "planned before it is run"
        if layer.kv is not None and k is not None and batch.out_cache_loc is not None:
            self.write(layer, k, v, batch)
        keys, values = self.read(plan, k, v, layer)
        scores = self.scores(q, keys, layer, plan)
        parts = range(len(batch.shared_levels) + 1)
        states = [self.attend(scores, values, plan.seen & self.part(batch, plan, part), layer) for part in parts]
        result, total = self.merge(states)
        if layer.sinks is not None:
            result, total = self.sink(result, total, layer)
        out.copy_(result)
        if lse is not None:
            lse.copy_(total)

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        assert layer.kv is not None, "asked only with a cache"
        assert batch.out_cache_loc is not None, "asked only with slots"
        layer.kv.write(k, v, batch.out_cache_loc)

    def read(self, plan: Plan, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """Keys [T, S, Hkv, D] and values [T, S, Hkv, Dv], scales applied, 0 where a token sees none."""
        assert plan.slots is not None, "planned before it is run"
        v_scale = layer.v_scale
        if layer.kv is not None:
            k, v = layer.kv.gather(plan.slots.flatten())
            if v is None:  # a latent's first R are its values
                v, v_scale = self.content(k), layer.k_scale
        elif k is not None and v is not None:
            k, v = (torch.cat((x, x.new_zeros(1, *x.shape[1:])))[plan.slots.flatten()] for x in (k, v))  # even of none
        assert k is not None, "paged, or given"
        assert v is not None, "paged, or given"
        return self.decode(k, layer.k_scale, plan), self.decode(v, v_scale, plan)

    def content(self, latents: Tensor) -> Tensor:
        """[N, 1, R + P] → the part that is not rope, [N, 1, R]."""
        return latents[..., : self.spec.v_head_dim]

    def decode(self, x: Tensor, scale: float, plan: Plan) -> Tensor:
        assert plan.seen is not None, "planned before it is run"
        assert plan.slots is not None, "planned before it is run"
        exact = torch.float64 if self.spec.dtype == "float64" else torch.float32
        x = x.to(exact).view(*plan.slots.shape, *x.shape[1:])
        return torch.where(plan.seen[:, :, None, None], x * scale, 0.0)

    def scores(self, q: Tensor, keys: Tensor, layer: AttentionLayer, plan: Plan) -> Tensor:
        """Logits [T, Hq, S]: scaled, capped, biased."""
        logits = (q.to(keys.dtype)[:, None] * self.to_queries(keys)).sum(-1).transpose(1, 2) * self.spec.scale
        if self.spec.softcap is not None:
            logits = self.cap(logits, self.spec.softcap)
        if layer.alibi_slopes is not None:
            logits = self.bias(logits, layer.alibi_slopes, plan)
        return logits

    def cap(self, logits: Tensor, softcap: float) -> Tensor:
        return softcap * torch.tanh(logits / softcap)

    def bias(self, logits: Tensor, slopes: Tensor, plan: Plan) -> Tensor:
        assert plan.back is not None, "planned before it is run"
        return logits - slopes.to(logits.dtype)[:, None] * plan.back[:, None]

    def to_queries(self, x: Tensor) -> Tensor:
        """[…, Hkv, D] → […, Hq, D]: a key head for each query head of its group."""
        return x.repeat_interleave(self.spec.num_heads // self.spec.num_kv_heads, dim=-2)

    def attend(self, scores: Tensor, values: Tensor, seen: Tensor, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """Output [T, Hq, Dv] and log-sum-exp [T, Hq] over the keys seen; 0 and −inf where there are none."""
        scores = scores.masked_fill(~seen[:, None], NOTHING)
        total = scores.logsumexp(-1)
        weights = (scores - total.masked_fill(total == NOTHING, 0.0)[..., None]).exp()
        return (weights.transpose(1, 2)[..., None] * self.to_queries(values)).sum(1), total

    def merge(self, states: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Partial states over disjoint keys as one; states of no key weigh nothing."""
        out, total = states[0]
        for other, lse in states[1:]:
            both = torch.logaddexp(total, lse)
            base = both.masked_fill(both == NOTHING, 0.0)
            out = out * (total - base).exp()[..., None] + other * (lse - base).exp()[..., None]
            total = both
        return out, total

    def sink(self, out: Tensor, total: Tensor, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """One more logit in the denominator, with nothing to give; a row without keys stays empty."""
        assert layer.sinks is not None, "asked only with sinks"
        both = torch.where(total == NOTHING, NOTHING, torch.logaddexp(total, layer.sinks.to(total.dtype)))
        return out * (total - both.masked_fill(both == NOTHING, 0.0)).exp()[..., None], both

    def describe(self, batch: ForwardBatch) -> Mapping[str, str | int | bool]:
        return {"kernel": "products", "keys": self.width(batch)}

    def _arange(self, stop: int) -> Tensor:
        return torch.arange(stop, device=self.spec.device)


CAPABILITIES = Capabilities(
    devices={"cpu"}, phases={"extend", "decode"}, attention={"paged", "ragged"},
    dtypes={"float32", "float16", "bfloat16", "float64"}, head_dims=ANY, v_head_dims=ANY, page_sizes=ANY,
    kv_layouts={"nhd", "hnd"}, kv_dtypes={"same", "float8_e4m3fn", "float8_e5m2"}, kv_scales=True,
    sliding_window=True, softcap=True, sinks=True, alibi=True, non_causal=True, query_mask=True, cascade=True, lse=True,
    graph=True, batch_invariant=True, query_lens=ANY,
)  # fmt: skip

LATENT = CAPABILITIES.model_copy(update={"attention": frozenset({"mla"}), "kv_layouts": frozenset({"latent"})})


def _on_gpus(record: Capabilities) -> Capabilities:
    """A record for GPUs, where torch's reductions depend on the shape of the whole."""
    return record.model_copy(update={"devices": frozenset({"cuda"}), "batch_invariant": False})


OFFER = Offer(
    name="specimen", backend=Specimen, capabilities=(CAPABILITIES, LATENT, _on_gpus(CAPABILITIES), _on_gpus(LATENT))
)
"""The specimen as an offer: everything that a backend can declare."""
