"""The backend: caches the new keys and values, collects what each block reads, and attends."""

from __future__ import annotations

import torch
from torch import Tensor

from headstock import AttentionBackend, AttentionLayer, BackendSpec, ForwardBatch, Workspace
from headstock_torch_native.attend import matmul, sdpa
from headstock_torch_native.plan import Block, plan


class TorchNative(AttentionBackend):
    """Attention in plain torch, on any device: SDPA where it can serve, matrix products in float32 elsewhere.

    A plan is a list of blocks (see `plan`). Keys are gathered slot by slot, never past a row's length, so bits left in
    unused slots cannot reach an output.
    """

    def __init__(self, spec: BackendSpec, workspace: Workspace):
        super().__init__(spec, workspace)
        self.dtype: torch.dtype = getattr(torch, spec.dtype)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        batch.metadata = plan(self.spec, batch, self.dtype)

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, *,
        out: Tensor, lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        if layer.kv is not None and k is not None:
            layer.kv.write(k, v, batch.out_cache_loc)
        for block in batch.metadata:
            self._attend(block, q, *self._read(block, k, v, layer), layer, out, lse)

    def _read(self, block: Block, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """A block's keys and values, [rows, keys, Hkv, D] and [rows, keys, Hkv, Dv], in a dtype to compute with."""
        if layer.kv is not None:
            k, v = layer.kv.gather(block.loc)
        else:
            assert k is not None and v is not None, "ragged attention is given its keys and values"
            k, v = k.index_select(0, block.loc), v.index_select(0, block.loc)
        if k.itemsize == 1:  # FP8: exact in the model's dtype, its scales are applied later
            k, v = k.to(self.dtype), v.to(self.dtype)
        return k.unflatten(0, (block.rows, block.keys)), v.unflatten(0, (block.rows, block.keys))

    def _attend(
        self, block: Block, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, out: Tensor, lse: Tensor | None
    ) -> None:
        rows = slice(block.start, block.start + block.rows * block.queries)
        shape = (block.rows, block.queries)
        q, out = q[rows].unflatten(0, shape), out[rows].unflatten(0, shape)
        scale = self.spec.scale * layer.k_scale
        if block.fused and lse is None:
            sdpa(q, k, v, out, bias=block.bias, causal=block.causal, scale=scale, v_scale=layer.v_scale)
            return
        seen = block.seen
        if block.causal:
            seen = torch.ones(block.queries, block.keys, dtype=torch.bool, device=q.device).tril_()[None]
        matmul(
            q, k, v, out, None if lse is None else lse[rows].unflatten(0, shape), seen=seen, distance=block.distance,
            scale=scale, v_scale=layer.v_scale, softcap=self.spec.softcap, sinks=layer.sinks,
            slopes=layer.alibi_slopes,
        )  # fmt: skip
