"""The backend: caches the new keys and values, attends part by part, and merges what was split."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from headstock import (
    AttentionBackend,
    AttentionLayer,
    BackendSpec,
    ForwardBatch,
    HeadstockError,
    KVView,
    Workspace,
    WorkspaceBytes,
)  # fmt: skip
from headstock_triton import INTERPRETED, OFFER
from headstock_triton.choice import form_of, kernel_of, launches
from headstock_triton.config import padded
from headstock_triton.keys import Cache, Keys
from headstock_triton.launch import INTERPRETING
from headstock_triton.plan import Part, Plan, carried_rows, partial_rows


class TritonAttention(AttentionBackend):
    """Attention by Triton kernels, all planning on the device, so that one plan serves eager steps and every replay.

    Raises HeadstockError for a spec that its offer does not cover, an AMD GPU, and a CPU without the interpreter.
    """

    def __init__(self, spec: BackendSpec, workspace: Workspace):
        super().__init__(spec, workspace)
        cpu = spec.device == "cpu"
        if cpu != INTERPRETING:
            here, there = ("a CPU", "a GPU") if cpu else ("a GPU", "a CPU")
            raise HeadstockError(
                "Triton's kernels run on a GPU, or on a CPU in its interpreter", given=here, works=there,
                type="TRITON_INTERPRET=1 for a CPU, unset for a GPU",
            )  # fmt: skip
        if torch.version.hip is not None:
            raise HeadstockError("these kernels were shown on NVIDIA GPUs alone", given="an AMD GPU")
        (INTERPRETED if cpu else OFFER).check(spec)
        if spec.attention == "mla" and (spec.v_head_dim > spec.head_dim or spec.num_kv_heads != 1):
            raise HeadstockError(
                "all heads share one latent, and values are a part of it",
                works="1 key head, head_dim R + P, v_head_dim R",
                given=f"{spec.num_kv_heads} key heads, head_dim {spec.head_dim}, v_head_dim {spec.v_head_dim}",
            )  # fmt: skip
        self.caches: WeakKeyDictionary[KVView, Cache] = WeakKeyDictionary()
        self.partials = partial_rows(spec)
        self.partial_out, self.partial_lse, self.carried_out, self.carried_lse = self._cut(workspace.scratch)

    @classmethod
    def workspace_bytes(cls, spec: BackendSpec) -> WorkspaceBytes:
        """float32 states: those of split tiles, and with shared prefixes one for each token and head."""
        pairs = partial_rows(spec) + carried_rows(spec)
        return WorkspaceBytes(scratch=pairs * (spec.v_head_dim + 1) * 4)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        if batch.graph != "replay":  # what the host decides depends on bounds, which a graph has frozen
            batch.metadata = Plan.of(self.spec, batch, self.partials)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        batch.metadata.schedule(self.spec, batch)

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, *,
        out: Tensor, lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        if lse is not None and not self.spec.lse:
            raise HeadstockError("this instance was made without log-sum-exp", works="BackendSpec(lse=True)")
        if batch.page_table is not None:
            cache = self._cache(layer)
            if k is not None and batch.out_cache_loc is not None:
                cache.write(k, v, batch.out_cache_loc)
            keys: Keys = cache
        elif k is None or v is None:
            raise HeadstockError(
                "ragged attention has no cache to read from", given="k or v is None", works="both given"
            )
        else:
            keys = Keys(self.spec, layer, k[None], v[None])
        parts: list[Part] = batch.metadata.parts
        for part in parts:
            self._attend(part, q, keys, layer, batch, *(self._carry(out) if part.shared else (out, lse)))

    def describe(self, batch: ForwardBatch) -> Mapping[str, str | int | bool]:
        """The kernel and tile of the rows' own part, how many items its splits may add, and the shared levels read."""
        *levels, own = batch.metadata.parts
        config, kernel = own.shape.config, kernel_of(self.spec, own, batch)
        form = form_of(config, kernel)
        told: dict[str, str | int | bool] = {
            "kernel": f"{kernel} {config.block_m}×{form.keys}",
            "head_dim": padded(self.spec),
            "tensor_cores": self.spec.device != "cpu",  # float32 too, as three products of TF32
            "warps": form.warps,
            "stages": form.stages,
            "splits": own.shape.items - own.shape.tiles,
            "levels": len(levels),
        }
        if self.spec.kv_dtype.startswith("float8"):
            told["upcast"] = self.spec.dtype
        if config.kernel not in ("", kernel):
            told["faster"] = config.kernel
        return told

    # ---- launches

    def _cache(self, layer: AttentionLayer) -> Cache:
        """What is known of a layer's cache, found out when it is first seen."""
        assert layer.kv is not None, "a batch with pages has a cache"
        cache = self.caches.get(layer.kv)
        if cache is None or not cache.serves(layer):
            cache = self.caches[layer.kv] = Cache(self.spec, layer)
        return cache

    def _attend(
        self, part: Part, q: Tensor, keys: Keys, layer: AttentionLayer, batch: ForwardBatch, out: Tensor,
        lse: Tensor | None,
    ) -> None:  # fmt: skip
        tree, carry, sinks = part.tree(batch), part.carried, None if part.shared else layer.sinks
        asked = keys.aligned, lse is not None, sinks is not None, layer.alibi_slopes is not None
        if asked not in part.launches:
            part.launches[asked] = launches(self.spec, part, batch, *asked)
        (q_token, q_head, _), (out_token, out_head, _) = q.stride(), out.stride()
        lse_token, lse_head = (0, 0) if lse is None else lse.stride()
        arguments = {
            "q": q, "pages": part.pages, "items": part.items, "origins": part.origins, "counters": part.counters,
            "leaders": part.leaders, "total": part.shape.items * self.spec.num_kv_heads,
            "positions": batch.positions if tree or part.shared else None,
            "mask": batch.query_mask.view(torch.uint8) if tree and batch.query_mask is not None else None,
            "mask_indptr": batch.mask_indptr if tree else None, "slopes": layer.alibi_slopes, "sinks": sinks,
            "partial_out": self.partial_out, "partial_lse": self.partial_lse,
            "carried_out": self.carried_out if carry else None, "carried_lse": self.carried_lse if carry else None,
            "out": out, "lse": lse, "q_token": q_token, "q_head": q_head, "out_token": out_token, "out_head": out_head,
            "lse_token": lse_token, "lse_head": lse_head,
        }  # fmt: skip
        for grid, launch in part.launches[asked]:
            launch(grid, arguments | keys.told(launch.kernel))

    # ---- memory

    def _carry(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """What shared prefixes give, float32 [T, Hq, Dv] and [T, Hq], to be merged with the next part."""
        tokens, heads, dim = out.shape
        return (
            self.carried_out[: tokens * heads * dim].view(tokens, heads, dim),
            self.carried_lse[: tokens * heads].view(tokens, heads),
        )

    def _cut(self, scratch: Tensor) -> list[Tensor]:
        """Outputs and log-sum-exps of partial states, and of those carried over."""
        pairs, dim = (self.partials, carried_rows(self.spec)), self.spec.v_head_dim
        sizes = [pairs[0] * dim, pairs[0], pairs[1] * dim, pairs[1]]
        return list(torch.split(scratch.view(torch.float32), sizes))
