"""A segment: one backend's share of a step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from headstock.backend import AttentionBackend
from headstock.batch import ForwardBatch
from headstock.layer import AttentionLayer
from headstock.models.mla import UpProjection


class Segment(NamedTuple):
    """One backend's share of a step: the batch it plans, and its rows of q, k, v and out (None: all)."""

    backend: AttentionBackend
    batch: ForwardBatch
    rows: slice | None = None

    def plan(self) -> None:
        """Plans the batch, once per step."""
        self.backend.init_forward_metadata(self.batch)
        self.backend.init_forward_metadata_in_graph(self.batch)

    def run(self, q: Tensor, k: Tensor, v: Tensor | UpProjection, layer: AttentionLayer, out: Tensor) -> None:
        """Attends in one layer, to its rows."""
        assert isinstance(v, Tensor), "models without latent attention pass values"
        self.backend.forward(q, k, v, layer, self.batch, out=out)
