"""Planted faults: captured code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.batch import ForwardBatch
from headstock.layer import AttentionLayer
from headstock.testing.specimen import Plan, Specimen


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
