"""Planted faults: shared prefixes that are read once and merged."""

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
