"""The backend: caches the new latents, runs the planned wrapper, and finishes what it leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from headstock import (
    AttentionBackend,
    AttentionLayer,
    BackendSpec,
    ForwardBatch,
    GraphFallback,
    HeadstockError,
    Offer,
    Progress,
    Workspace,
    WorkspaceBytes,
)  # fmt: skip
from headstock_flashinfer_mla import OFFER, compile
from headstock_flashinfer_mla.accessor import Library, library
from headstock_flashinfer_mla.choice import Choice, choose
from headstock_flashinfer_mla.memory import check_items, plan_bytes, workspace
from headstock_flashinfer_mla.plan import Rows
from headstock_flashinfer_mla.wrappers import Absorbed, Expanded, Plan, Room, Wrapper, take

LN2 = math.log(2)


class FlashInferMLA(AttentionBackend):
    """Latent attention by FlashInfer, planned once per batch on the host for all layers; `forward` only runs.

    Absorbed it reads the cache in pages, expanded the keys and values that it is given. Raises HeadstockError for a
    spec that its offer does not cover, for options that name a kernel which cannot do what the spec asks, and where a
    batch could have more tiles than FlashInfer can plan.
    """

    offer: ClassVar[Offer] = OFFER

    @classmethod
    def library(cls) -> Library:
        """The FlashInfer that instances use."""
        return library()

    @classmethod
    def completed(cls, spec: BackendSpec) -> BackendSpec:
        """The spec with what it leaves open of its GPU, where the GPU is here."""
        if not spec.device.startswith("cuda") or not torch.cuda.is_available():
            return spec
        found = torch.cuda.get_device_properties(torch.device(spec.device))
        capability = spec.compute_capability or found.major * 10 + found.minor
        return replace(spec, compute_capability=capability, num_sms=spec.num_sms or found.multi_processor_count)

    def __init__(self, spec: BackendSpec, workspace: Workspace):
        self.offer.check(spec)
        spec = self.completed(spec)
        super().__init__(spec, workspace)
        self.choice = Choice("fa3", "fa3")
        if spec.attention == "mla":
            check_items(spec)
            self.choice = choose(spec)
        self.flashinfer, needed = self.library(), self.workspace_bytes(spec)
        if workspace.scratch.numel() < needed.scratch or workspace.state.numel() < needed.state:
            given = (workspace.scratch.numel(), workspace.state.numel())
            raise HeadstockError("the workspace is too small", given=given, works=str(tuple(needed)))
        rooms = [Room(self._make, ints) for ints in workspace.state[: needed.state].view(-1, plan_bytes(spec))]
        self.eager, graphs = rooms[: spec.max_plans], rooms[spec.max_plans :]
        self.graphs = {bucket[:2]: room for bucket, room in zip(spec.graph_buckets, graphs, strict=True)}

    @classmethod
    def workspace_bytes(cls, spec: BackendSpec) -> WorkspaceBytes:
        """The states of split tiles, shared by all plans, and what each of them is planned into."""
        return workspace(cls.completed(spec))

    @classmethod
    def prepare(cls, spec: BackendSpec, report: Callable[[Progress], None]) -> None:
        """Compiles the modules that `spec` runs and that are not there yet."""
        compile.prepare(cls.completed(spec), report)

    def init_cuda_graph_state(self, batches: Sequence[ForwardBatch]) -> None:
        for room in self.graphs.values():
            room.wrapper(self.choice.decode)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        rows, causal = Rows.of(batch), batch.causal and batch.max_query_len > 1
        key = (batch.num_reqs, batch.query_len)
        if batch.graph is not None and key not in self.graphs:
            raise HeadstockError("no graph was announced for this batch", given=key, works=str(list(self.graphs)))
        room = take(self.eager) if batch.graph is None else self.graphs[key]
        kernel = self.choice.decode if batch.phase == "decode" else self.choice.extend
        batch.metadata = plan = Plan(room, kernel, rows.blind)
        captured = plan.wrapper.info
        plan.wrapper.plan(batch, rows, causal)
        if batch.graph == "replay" and plan.wrapper.info != captured:
            raise GraphFallback("FlashInfer's plan differs from the captured one")

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, *,
        out: Tensor, lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        plan: Plan = batch.metadata
        if lse is not None and not self.spec.lse:
            raise HeadstockError("this instance was made without log-sum-exp", works="BackendSpec(lse=True)")
        if k is not None and layer.kv is not None and batch.out_cache_loc is not None:
            layer.kv.write(k, v, batch.out_cache_loc)
        result = out if out.is_contiguous() else out.new_empty(out.shape)
        state = q.new_empty(q.shape[:2], dtype=torch.float32) if self.spec.lse else None
        plan.wrapper.run(q, k, v, layer, result, state)
        if plan.blind is not None:
            result.index_fill_(0, plan.blind, 0.0)
        if result is not out:
            out.copy_(result)
        if lse is not None and state is not None:
            torch.mul(state, LN2, out=lse)
            if plan.blind is not None:
                lse.index_fill_(0, plan.blind, -math.inf)

    def describe(self, batch: ForwardBatch) -> Mapping[str, str | int | bool]:
        """The form and the kernel, and of absorbed attention the blocks of its grid."""
        wrapper: Wrapper = batch.metadata.wrapper
        form = "absorbed" if self.spec.attention == "mla" else "expanded"
        told: dict[str, str | int | bool] = {"kernel": f"{form} {wrapper.kernel}", "tensor_cores": True}
        return told | ({"blocks": wrapper.info[0] * wrapper.info[1]} if wrapper.info else {})

    def _make(self, ints: Tensor, kernel: str) -> Wrapper:
        if self.spec.attention == "ragged":
            return Expanded(self.spec, self.flashinfer, self.workspace.scratch, ints)
        return Absorbed(self.spec, kernel, self.flashinfer, self.workspace.scratch, ints)
