"""Planted faults: instances, plans and workspaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headstock.backend import BackendSpec, Workspace, WorkspaceBytes
from headstock.batch import ForwardBatch
from headstock.layer import AttentionLayer
from headstock.testing.specimen import Plan, Specimen

State = tuple[Tensor, Tensor]


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
