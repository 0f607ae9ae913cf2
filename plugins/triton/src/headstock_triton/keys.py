"""Keys and values as kernels are told of them: those given with a batch, and those of a layer's cache."""

from __future__ import annotations

import math
import operator
from typing import Any, cast

import torch
from torch import Tensor

from headstock import AttentionLayer, BackendSpec, LatentView, PagedView
from headstock_triton import hopper
from headstock_triton.config import power_of_two
from headstock_triton.launch import Launch

LOG2E = math.log2(math.e)


class Keys:
    """What a layer attends to: keys and values [pages, page, Hkv, D], or latents, which are both, of one head.

    `aligned` tells whether Hopper's kernels can load them.
    """

    aligned = False

    def __init__(self, spec: BackendSpec, layer: AttentionLayer, k: Tensor, v: Tensor):
        self.spec, self.k, self.v = spec, k, v
        self.scales = layer.k_scale, layer.v_scale
        self._told: dict[str, dict[str, Any]] = {}

    def told(self, kernel: str) -> dict[str, Any]:
        """The arguments of a kernel that say where keys lie and how they are scaled; `merge` has none."""
        if kernel not in self._told:
            self._told[kernel] = self._tell(kernel)
        return self._told[kernel]

    def _tell(self, kernel: str) -> dict[str, Any]:
        spec, k, v, (k_scale, v_scale) = self.spec, self.k, self.v, self.scales
        scale, cap = spec.scale * k_scale, spec.softcap or 0.0
        scales = {"scale": scale * LOG2E, "v_scale": k_scale if spec.attention == "mla" else v_scale}
        match kernel:
            case "attend":
                places = _strides("k_page k_slot k_head", k) | _strides("v_page v_slot v_head", v)
                alike = {"v_page": None, "v_slot": None} if k.stride()[:2] == v.stride()[:2] else {}
                capped = {"scale": scale / cap if cap else scale * LOG2E, "cap": cap * LOG2E}
                return {"k": k, "v": v} | places | alike | scales | capped
            case "latent":
                return {"cache": k} | _strides("page_stride slot_stride", k) | scales
            case "attend_hopper":
                return hopper.boxes(k, v) | scales
            case "latent_hopper":
                return hopper.latent_boxes(k, spec.v_head_dim) | scales
        return {}


class Cache(Keys):
    """The cache of a layer: what kernels are told of it does not change as long as its view is there."""

    def __init__(self, spec: BackendSpec, layer: AttentionLayer):
        self._tensors = _tensors(layer)
        k, v = self._tensors if len(self._tensors) == 2 else 2 * (self._tensors[0][:, :, None],)
        super().__init__(spec, layer, k, v)
        self.aligned = hopper.aligned(spec, k, v)
        fp8, limit = 0, 0.0
        if k.itemsize == 1:
            fp8, limit = (3 if k.dtype == torch.float8_e4m3fn else 2), torch.finfo(k.dtype).max
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        # The bytes are those of `view.write`, where torch divides on a CPU and multiplies by the reciprocal on a GPU.
        divide = spec.device == "cpu"
        k_factor, v_factor = self.scales if divide else map(_reciprocal, self.scales)
        self._written = (
            {"k_cache": k, "v_cache": v, "k_factor": k_factor, "v_factor": v_factor, "limit": limit}
            | _strides("k_cache_page k_cache_slot k_cache_head", k)
            | _strides("v_cache_page v_cache_slot v_cache_head", v)
        )
        self._launch = Launch(
            "write",
            {
                "PAGE": spec.page_size,
                "KV_HEADS": spec.num_kv_heads,
                "HEAD_DIM": spec.head_dim,
                "V_HEAD_DIM": 0 if spec.attention == "mla" else spec.v_head_dim,
                "BLOCK_H": power_of_two(spec.num_kv_heads),
                "BLOCK_D": power_of_two(spec.head_dim),
                "BLOCK_V": power_of_two(spec.v_head_dim),
                "SCALED": bool(fp8) or self.scales != (1.0, 1.0),
                "DIVIDE": divide,
                "FP8": fp8,
            },
        )

    def serves(self, layer: AttentionLayer) -> bool:
        """Whether it is this layer's: the same tensors and scales."""
        here, there = self._tensors, _tensors(layer)
        return self.scales == (layer.k_scale, layer.v_scale) and all(map(operator.is_, here, there))

    def write(self, k: Tensor, v: Tensor | None, slots: Tensor) -> None:
        """Caches k [T, Hkv, D] and v [T, Hkv, Dv], or where it is of latents None, in `slots` int64 [T]."""
        new = {"k": k, "v": v, "slots": slots} | _strides("k_token k_head", k) | _strides("v_token v_head", v)
        self._launch((slots.shape[0],), self._written | new)


def _tensors(layer: AttentionLayer) -> tuple[Tensor, ...]:
    """A view's keys and values, or its latents."""
    if isinstance(layer.kv, LatentView):
        return (layer.kv.latent,)
    view = cast(PagedView, layer.kv)  # what nhd and hnd are seen through
    return view.k, view.v


def _strides(names: str, x: Tensor | None) -> dict[str, int]:
    """The first strides of x by the names of a kernel's arguments, 0 where there is no tensor."""
    found = names.split()
    return dict.fromkeys(found, 0) if x is None else dict(zip(found, x.stride(), strict=False))


def _reciprocal(scale: float) -> float:
    """1 / scale in float32, as torch has it on a GPU."""
    return float(torch.tensor(scale, dtype=torch.float32).reciprocal())
