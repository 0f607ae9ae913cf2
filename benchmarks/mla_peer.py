"""FlashInfer's wrapper of latent attention called directly, in the form of a backend, for `mla_attention.py`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from torch import Tensor

from headstock import AttentionBackend, AttentionLayer, BackendSpec, ForwardBatch, WorkspaceBytes


class FlashInferDirect(AttentionBackend):
    """What its own examples do: a float workspace of 128 MiB, buffers for a graph, one plan, and `run` for each layer.

    New latents are cached by torch. `describe` says which kernel runs.
    """

    kernel: ClassVar[str]

    @classmethod
    def workspace_bytes(cls, spec: BackendSpec) -> WorkspaceBytes:
        return WorkspaceBytes(scratch=128 << 20)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        spec, csr, device = self.spec, batch.csr("all"), self.workspace.scratch.device
        sizes = (batch.num_reqs + 1, batch.num_reqs + 1, len(csr.page_indices), batch.num_reqs)
        buffers = [torch.zeros(size, dtype=torch.int32, device=device) for size in sizes]
        batch.metadata = wrapper = BatchMLAPagedAttentionWrapper(
            self.workspace.scratch, True, *buffers, backend=self.kernel
        )
        dtype = getattr(torch, spec.dtype)
        wrapper.plan(
            batch.query_indptr_cpu, csr.page_indptr_cpu, csr.page_indices, batch.seq_lens_cpu, spec.num_heads,
            spec.v_head_dim, spec.head_dim - spec.v_head_dim, spec.page_size, batch.query_len > 1, spec.scale, dtype,
            dtype,
        )  # fmt: skip

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, *,
        out: Tensor, lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        kv: Any = layer.kv
        if k is not None:
            kv.write(k, None, batch.out_cache_loc)
        rank = self.spec.v_head_dim
        batch.metadata.run(q[..., :rank], q[..., rank:], kv.latent[..., :rank], kv.latent[..., rank:], out=out)

    def describe(self, batch: ForwardBatch) -> dict[str, str | int | bool]:
        return {"kernel": self.kernel}


class Fa2(FlashInferDirect):
    kernel = "fa2"


class Fa3(FlashInferDirect):
    kernel = "fa3"
