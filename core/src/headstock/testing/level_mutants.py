"""Planted faults of captured code that reads shared prefixes, and of padding beside real rows; `mutants` has others.

Eager steps do not show them: what was right for the batch that was captured, one of padding that shares nothing, is
wrong for the one that is replayed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headstock.backend import BackendSpec, Workspace
from headstock.batch import ForwardBatch, SharedLevel
from headstock.testing.specimen import Plan, Specimen


class RunsAtCapture(Specimen):
    """A replay reads the shared runs that were captured, and the rows' own keys from where runs end now."""

    def part(self, batch: ForwardBatch, plan: Plan, number: int) -> Tensor:
        holds = super().part(batch, plan, number)
        captured = _levels(self, batch, _told(batch.shared_levels), plan) == number
        return holds if number == len(batch.shared_levels) else holds & captured


class OwnKeysAtCapture(Specimen):
    """A replay reads the shared runs of now, and the rows' own keys from where runs ended at capture."""

    def part(self, batch: ForwardBatch, plan: Plan, number: int) -> Tensor:
        holds = super().part(batch, plan, number)
        captured = _levels(self, batch, _told(batch.shared_levels), plan) == number
        return holds if number < len(batch.shared_levels) else captured


class RunPagesAtCapture(Specimen):
    """Captured code reads a copy of the pages of shared runs, made at capture."""

    def __init__(self, spec: BackendSpec, workspace: Workspace):
        super().__init__(spec, workspace)
        self.kept: dict[int, tuple[SharedLevel, ...]] = {}

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_capture_cuda_graph(batch)
        copied = (replace(level, page_indices=level.page_indices.clone()) for level in batch.shared_levels)
        self.kept[id(batch)] = tuple(copied)

    def slots(self, batch: ForwardBatch, rows: Tensor, keys: Tensor) -> Tensor:
        if batch.graph and batch.shared_levels:
            batch = replace(batch, shared_levels=self.kept[id(batch)])
        return super().slots(batch, rows, keys)


class OneRunCaptured(Specimen):
    """Captured code has room for one shared run of each level, and leaves those after it out."""

    def part(self, batch: ForwardBatch, plan: Plan, number: int) -> Tensor:
        holds = super().part(batch, plan, number)
        if not batch.graph or number == len(batch.shared_levels):
            return holds
        level = batch.shared_levels[number]
        assert plan.rows is not None, "planned before it is run"
        run = torch.searchsorted(level.row_indptr[1:], plan.rows, right=True)
        return holds & (level.page_indptr[run] == 0)[:, None]


class LongestRunsKept(Specimen):
    """Captured code keeps the longest that each run ever was, and reads the rows' own keys from there."""

    def __init__(self, spec: BackendSpec, workspace: Workspace):
        super().__init__(spec, workspace)
        self.kept: dict[int, tuple[SharedLevel, ...]] = {}

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_capture_cuda_graph(batch)
        copied = (replace(level, page_indptr=level.page_indptr.clone()) for level in batch.shared_levels)
        self.kept[id(batch)] = tuple(copied)

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_replay_cuda_graph(batch)
        for kept, now in zip(self.kept[id(batch)], batch.shared_levels, strict=True):
            longest = torch.maximum(kept.page_indptr.diff(), now.page_indptr.diff())
            kept.page_indptr[1:].copy_(longest.cumsum(0))

    def part(self, batch: ForwardBatch, plan: Plan, number: int) -> Tensor:
        holds = super().part(batch, plan, number)
        if not batch.graph or number < len(batch.shared_levels):
            return holds
        return holds & (_levels(self, batch, self.kept[id(batch)], plan) == number)


class PaddingTimesZero(Specimen):
    """Rows are told apart by a product with ones and zeros, which carries what is NaN in padding to every row."""

    def merge(self, states: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        out, total = super().merge(states)
        ones = torch.eye(len(out), dtype=out.dtype, device=out.device)
        return (ones @ out.flatten(1)).view_as(out), total


def _levels(backend: Specimen, batch: ForwardBatch, levels: tuple[SharedLevel, ...], plan: Plan) -> Tensor:
    """The level that holds each key, [T, S], were these the batch's."""
    assert plan.rows is not None, "planned before it is run"
    keys = torch.arange(backend.width(batch), device=plan.rows.device)
    return backend.levels(replace(batch, shared_levels=levels), plan.rows, keys)


def _told(levels: tuple[SharedLevel, ...]) -> tuple[SharedLevel, ...]:
    """Levels as the host knows them, which recorded code sees once, at capture."""
    return tuple(replace(each, row_indptr=each.row_indptr_cpu, page_indptr=each.page_indptr_cpu) for each in levels)
