"""The backend: caches the new keys and values, attends part by part, and merges what was split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from headstock import (
    AttentionBackend,
    AttentionLayer,
    BackendSpec,
    ForwardBatch,
    HeadstockError,
    LatentView,
    PagedView,
    Workspace,
    WorkspaceBytes,
)  # fmt: skip
from headstock_triton import INTERPRETED, OFFER, hopper
from headstock_triton.config import padded, power_of_two
from headstock_triton.hopper import LOG2E, kernel_of
from headstock_triton.launch import INTERPRETING, launch
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
        self.group = spec.num_heads // spec.num_kv_heads
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
            caches = _cache(layer)
            if k is not None and batch.out_cache_loc is not None:
                self._write(k, v, *caches, layer, batch.out_cache_loc)
            k, v = caches
        if k is None or v is None:
            raise HeadstockError(
                "ragged attention has no cache to read from", given="k or v is None", works="both given"
            )
        parts: list[Part] = batch.metadata.parts
        for part in parts:
            self._attend(part, q, k, v, layer, batch, *(self._carry(out) if part.shared else (out, lse)))

    def describe(self, batch: ForwardBatch) -> Mapping[str, str | int | bool]:
        """The kernel and tile of the rows' own part, how many items its splits may add, and the shared levels read."""
        *levels, own = batch.metadata.parts
        config, kernel = own.shape.config, kernel_of(self.spec, own, batch)
        keys, warps, stages = hopper.FORMS.get(kernel, (config.block_n, config.warps, config.stages))
        told: dict[str, str | int | bool] = {
            "kernel": f"{kernel} {config.block_m}×{keys}",
            "head_dim": padded(self.spec),
            "tensor_cores": self.spec.device != "cpu",  # float32 too, as three products of TF32
            "warps": warps,
            "stages": stages,
            "splits": own.shape.items - own.shape.tiles,
            "levels": len(levels),
        }
        if self.spec.kv_dtype.startswith("float8"):
            told["upcast"] = self.spec.dtype
        if config.kernel not in ("", kernel):
            told["faster"] = config.kernel
        return told

    # ---- launches

    def _write(
        self, k: Tensor, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, layer: AttentionLayer, slots: Tensor
    ) -> None:
        spec, limit, fp8 = self.spec, 0.0, 0
        if k_cache.itemsize == 1:
            fp8, limit = (3 if k_cache.dtype == torch.float8_e4m3fn else 2), torch.finfo(k_cache.dtype).max
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        # The bytes are those of `view.write`, where torch divides on a CPU and multiplies by the reciprocal on a GPU.
        divide = not k.is_cuda
        k_factor, v_factor = (scale if divide else _reciprocal(scale) for scale in (layer.k_scale, layer.v_scale))
        launch(
            "write",
            (len(slots),),
            {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots},
            {"k_factor": k_factor, "v_factor": v_factor, "limit": limit}
            | _strides("k_token k_head", k)
            | _strides("v_token v_head", v)
            | _strides("k_cache_page k_cache_slot k_cache_head", k_cache)
            | _strides("v_cache_page v_cache_slot v_cache_head", v_cache),
            {
                "PAGE": spec.page_size,
                "KV_HEADS": spec.num_kv_heads,
                "HEAD_DIM": spec.head_dim,
                "V_HEAD_DIM": 0 if v is None else spec.v_head_dim,
                "BLOCK_H": power_of_two(spec.num_kv_heads),
                "BLOCK_D": power_of_two(spec.head_dim),
                "BLOCK_V": power_of_two(spec.v_head_dim),
                "SCALED": bool(fp8) or (layer.k_scale, layer.v_scale) != (1.0, 1.0),
                "DIVIDE": divide,
                "FP8": fp8,
            },
        )

    def _attend(
        self, part: Part, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch,
        out: Tensor, lse: Tensor | None,
    ) -> None:  # fmt: skip
        spec, shape, carry = self.spec, part.shape, part.carried
        sinks = None if part.shared else layer.sinks
        result: dict[str, Tensor | None] = {
            "items": part.items, "partial_out": self.partial_out,
            "partial_lse": self.partial_lse, "sinks": sinks, "carried_out": self.carried_out if carry else None,
            "carried_lse": self.carried_lse if carry else None, "out": out, "lse": lse,
        }  # fmt: skip
        strides = _strides("out_token out_head", out) | _strides("lse_token lse_head", lse)
        constants = {
            "GROUP": self.group, "KV_HEADS": spec.num_kv_heads, "V_HEAD_DIM": spec.v_head_dim,
            "BLOCK_M": shape.config.block_m, "BLOCK_V": power_of_two(spec.v_head_dim, 16), "ROWS": shape.rows,
            "CARRY": carry, "SINKS": sinks is not None, "LSE": lse is not None,
        }  # fmt: skip
        tree = batch.query_mask is not None and not part.shared
        tensors = result | {
            "q": q, "pages": part.pages, "origins": part.origins,
            "mask": batch.query_mask.view(torch.uint8) if tree and batch.query_mask is not None else None,
            "mask_indptr": batch.mask_indptr if tree else None,
        }  # fmt: skip
        numbers = _strides("q_token q_head", q) | strides
        compiled = constants | {
            "PAGE": batch.page_size, "BLOCK_N": shape.config.block_n, "TREE": tree, "SPLIT": shape.split,
            "ORDERED": batch.causal and not part.shared,
            "num_warps": shape.config.warps, "num_stages": shape.config.stages,
        }  # fmt: skip
        if shape.config.registers:
            compiled["maxnreg"] = shape.config.registers
        match kernel_of(spec, part, batch, layer):
            case "attend_hopper":
                hopper.attend_hopper(spec, part, k, v, layer, tensors, numbers, compiled)
            case "latent_hopper":
                hopper.latent_hopper(spec, part, k, layer, tensors, numbers, compiled)
            case "latent":
                self._latents(part, k, layer, tensors, numbers, compiled)
            case _:
                self._keys(part, k, v, layer, batch, tensors, numbers, compiled)
        if part.leaders is not None:
            rows, splits = shape.merging(spec)
            launch(
                "merge",
                (spec.num_kv_heads, shape.tiles, -(-shape.rows // rows)),
                result | {"leaders": part.leaders},
                strides,
                constants | {"BLOCK_R": rows, "BLOCK_S": splits},
            )

    def _keys(
        self, part: Part, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch,
        tensors: dict[str, Tensor | None], numbers: dict[str, int], compiled: dict[str, int | bool],
    ) -> None:  # fmt: skip
        """Keys and values, paged or given."""
        spec, paged = self.spec, batch.page_table is not None
        window = 0 if part.shared else spec.window or 0
        rows, splits = part.shape.merging(spec)
        wide = part.shape.config.block_m >= 64
        scale = spec.scale * layer.k_scale
        launch(
            "attend",
            (spec.num_kv_heads, part.shape.items),
            tensors
            | {
                "k": k, "v": v, "positions": batch.positions if compiled["TREE"] or part.shared else None,
                "slopes": layer.alibi_slopes, "counters": part.counters,
            },
            {
                "scale": scale / spec.softcap if spec.softcap else scale * LOG2E,
                "cap": (spec.softcap or 0.0) * LOG2E,
                "v_scale": layer.v_scale,
            }
            | _strides("k_page k_slot k_head", k if paged else k[None])
            | _strides("v_page v_slot v_head", v if paged else v[None])
            | numbers,
            compiled
            | {
                "HEAD_DIM": spec.head_dim, "BLOCK_D": power_of_two(spec.head_dim, 16), "WINDOW": window,
                "SHARED": part.shared, "ORDERED": bool(compiled["ORDERED"]) or window > 0,
                "CAP": spec.softcap is not None, "ALIBI": layer.alibi_slopes is not None,
                "PEEL": wide, "AHEAD": paged and not wide, "BLOCK_R": rows, "BLOCK_S": splits,
            },
        )  # fmt: skip

    def _latents(
        self, part: Part, latents: Tensor, layer: AttentionLayer,
        tensors: dict[str, Tensor | None], numbers: dict[str, int], compiled: dict[str, int | bool],
    ) -> None:  # fmt: skip
        """MLA's latents, keys and values in one."""
        spec = self.spec
        rope = spec.head_dim - spec.v_head_dim
        launch(
            "latent",
            (part.shape.items,),
            tensors | {"cache": latents},
            {"scale": spec.scale * layer.k_scale * LOG2E, "v_scale": layer.k_scale}
            | _strides("page_stride slot_stride", latents)
            | numbers,
            compiled
            | {
                "ROPE_DIM": rope, "BLOCK_P": power_of_two(rope, 16),
                "WITHIN": spec.page_size % part.shape.config.block_n == 0,
            },
        )  # fmt: skip

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


def _cache(layer: AttentionLayer) -> tuple[Tensor, Tensor]:
    """A layer's cached keys and values, [pages, page, Hkv, D]; latents are both, of one head."""
    if isinstance(layer.kv, LatentView):
        latents = layer.kv.latent[:, :, None]
        return latents, latents
    view = cast(PagedView, layer.kv)  # what nhd and hnd are seen through
    return view.k, view.v


def _strides(names: str, x: Tensor | None) -> dict[str, int]:
    """The first strides of x by the names of a kernel's arguments, 0 where there is no tensor."""
    return {name: 0 if x is None else x.stride(i) for i, name in enumerate(names.split())}


def _reciprocal(scale: float) -> float:
    """1 / scale in float32, as torch has it on a GPU."""
    return float(torch.tensor(scale, dtype=torch.float32).reciprocal())
