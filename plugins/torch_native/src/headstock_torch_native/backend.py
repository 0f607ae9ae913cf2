"""The backend: caches the new keys and values, collects what each block reads, and attends."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headstock import AttentionBackend, AttentionLayer, BackendSpec, ForwardBatch, HeadstockError, Workspace
from headstock_torch_native import OFFER
from headstock_torch_native.attend import matmul, sdpa
from headstock_torch_native.plan import Block, plan
from headstock_torch_native.state import State


class TorchNative(AttentionBackend):
    """Attention in plain torch, on any device: SDPA where it can serve, matrix products in float32 elsewhere.

    A plan is a list of blocks (see `plan`). Keys are gathered slot by slot, never past a row's length, so bits left in
    unused slots cannot reach an output. Raises HeadstockError for a spec that its offer does not cover.
    """

    def __init__(self, spec: BackendSpec, workspace: Workspace):
        super().__init__(spec, workspace)
        OFFER.check(spec)
        self.dtype: torch.dtype = getattr(torch, spec.dtype)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        batch.metadata = plan(self.spec, batch, self.dtype)

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, *,
        out: Tensor, lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        if lse is not None and not self.spec.lse:
            raise HeadstockError("this instance was made without log-sum-exp", works="BackendSpec(lse=True)")
        if layer.kv is not None and k is not None and batch.out_cache_loc is not None:
            layer.kv.write(k, v, batch.out_cache_loc)
        if batch.shared_levels:
            self._cascade(q, k, v, layer, batch, out, lse)
            return
        for block in batch.metadata:
            self._attend(block, q, *self._read(block, k, v, layer), layer, out, lse, layer.sinks)

    def describe(self, batch: ForwardBatch) -> Mapping[str, str | int | bool]:
        """The way to attend ("sdpa" or "matmul"), into how many blocks the batch was cut, and in which dtype it is."""
        blocks: list[Block] = batch.metadata
        fused = blocks[0].fused
        told: dict[str, str | int | bool] = {"kernel": "sdpa" if fused else "matmul", "blocks": len(blocks)}
        if batch.shared_levels:
            told["levels"] = len(batch.shared_levels)
        computed = self.dtype if fused else torch.promote_types(self.dtype, torch.float32)
        if str(computed) != f"torch.{self.spec.kv_dtype}":
            told["upcast"] = str(computed).removeprefix("torch.")
        if batch.seq_lens.is_cuda:
            told["tensor_cores"] = computed.itemsize == 2
        return told

    def _read(self, block: Block, k: Tensor | None, v: Tensor | None, layer: AttentionLayer) -> tuple[Tensor, Tensor]:
        """A block's keys and values, [rows, keys, Hkv, D] and [rows, keys, Hkv, Dv], in a dtype to compute with.

        Latents serve as both: values are their first R, and the rest of what they give is not taken.
        """
        if layer.kv is not None:
            k, v = layer.kv.gather(block.loc)
            v = k if v is None else v
        elif k is not None and v is not None:
            if len(k) == 0:  # no row has a key: one that nobody sees stands in
                k, v = (x.new_zeros(1, *x.shape[1:]) for x in (k, v))
            k, v = k.index_select(0, block.loc), v.index_select(0, block.loc)
        if k is None or v is None:
            raise HeadstockError(
                "ragged attention has no cache to read from", given="k or v is None", works="both given"
            )
        if k.itemsize == 1:  # FP8 is exact in any wider dtype; its scales are applied to the scores and the output
            k, v = (k.to(self.dtype),) * 2 if v is k else (k.to(self.dtype), v.to(self.dtype))
        return k.view(block.rows, block.keys, *k.shape[1:]), v.view(block.rows, block.keys, *v.shape[1:])

    def _cascade(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch,
        out: Tensor, lse: Tensor | None,
    ) -> None:  # fmt: skip
        """Attends block by block, a token in one block of every level, and merges what each of them gives."""
        exact = torch.promote_types(q.dtype, torch.float32)
        whole, part = (State.empty(out.shape, exact, out.device) for _ in range(2))
        for block in batch.metadata:
            self._attend(block, q, *self._read(block, k, v, layer), layer, *part, None)
            State(*map(block.part, whole)).merge(State(*map(block.part, part)))
        if layer.sinks is not None:
            whole.sink(layer.sinks)
        out.copy_(whole.out)
        if lse is not None:
            lse.copy_(whole.lse)

    def _attend(
        self, block: Block, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, out: Tensor, lse: Tensor | None,
        sinks: Tensor | None,
    ) -> None:  # fmt: skip
        spec, whole, whole_lse = self.spec, out, lse
        q, out = block.part(q), block.part(out)
        lse = None if lse is None else block.part(lse)
        scale = spec.scale * layer.k_scale
        v_scale = layer.k_scale if spec.attention == "mla" else layer.v_scale
        if block.fused:
            sdpa(q, k, v, out, mask=block.mask, causal=block.causal, scale=scale, v_scale=v_scale)
        else:
            matmul(
                q, k, v, out, lse, mask=block.mask, distance=block.distance, scale=scale, v_scale=v_scale,
                softcap=spec.softcap, sinks=sinks, slopes=layer.alibi_slopes,
            )  # fmt: skip
        block.put(whole, out)
        if lse is not None and whole_lse is not None:
            block.put(whole_lse, lse)
