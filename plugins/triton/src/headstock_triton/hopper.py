"""The kernels of Hopper, in Gluon: which batches they serve in place of `attend` and `latent`, and how they start."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from headstock import AttentionLayer, BackendSpec, ForwardBatch, LatentView
from headstock_triton.config import able
from headstock_triton.launch import KERNELS, launch
from headstock_triton.plan import Part

LOG2E = math.log2(math.e)
FORMS = {"attend_hopper": (128, 9, 2), "latent_hopper": (64, 8, 2)}
"""Keys of a tile, warps and stages, which these kernels are written for, whatever the configuration has."""
HALF = 64
"""Elements of a key that one load of `attend_hopper` brings."""


def kernel_of(spec: BackendSpec, part: Part, batch: ForwardBatch, layer: AttentionLayer | None = None) -> str:
    """The kernel that attends to a part: the one its configuration names where that can, else the one that can all.

    Neither of those reads trees of new tokens. `attend_hopper` starts from nothing and ends with what it found: it
    merges no states of earlier parts and no sinks. It could read shared prefixes, but `attend` is as fast there: 61 µs
    against 66 of a layer with 8192 shared tokens, 111 against 109 with 4096 (H200). Where a layer lies in memory
    decides too, if one is given.
    """
    config = part.shape.config
    plain = "latent" if spec.attention == "mla" else "attend"
    tree = batch.query_mask is not None and not part.shared
    if tree or batch.page_table is None or not able(spec, config):
        return plain
    if config.kernel == "attend_hopper" and (part.shared or part.carried or spec.sinks):
        return plain
    return config.kernel if layer is None or _aligned(layer) else plain


def attend_hopper(
    spec: BackendSpec, part: Part, k: Tensor, v: Tensor, layer: AttentionLayer,
    tensors: dict[str, Tensor | None], numbers: dict[str, int], compiled: dict[str, int | bool],
) -> None:  # fmt: skip
    """Keys and values of pages [pages, page, Hkv, 128], read by as many programs as run at once."""
    total = part.shape.items * spec.num_kv_heads
    box = [1, min(k.shape[1], FORMS["attend_hopper"][0]), 1, HALF]
    launch(
        "attend_hopper",
        (min(spec.num_sms or total, total),),
        _taken("attend_hopper", tensors) | {"k": _described(k, box), "v": _described(v, box)},
        {"total": total, "scale": spec.scale * layer.k_scale * LOG2E, "v_scale": layer.v_scale} | numbers,
        _taken("attend_hopper", compiled) | {"num_warps": 4},
    )


def latent_hopper(
    spec: BackendSpec, part: Part, latents: Tensor, layer: AttentionLayer,
    tensors: dict[str, Tensor | None], numbers: dict[str, int], compiled: dict[str, int | bool],
) -> None:  # fmt: skip
    """Latents [pages, page, 1, D] as a matrix of slots, of which page_rows are from one page to the next."""
    pages, page, _, columns = latents.shape
    page_rows = latents.stride(0) // latents.stride(1)
    slots = latents.as_strided([(pages - 1) * page_rows + page, columns], [latents.stride(1), 1])
    rows, width = part.shape.config.block_n, spec.v_head_dim
    launch(
        "latent_hopper",
        (part.shape.items,),
        _taken("latent_hopper", tensors)
        | {"keys": _described(slots, [rows, width]), "ropes": _described(slots, [rows, columns - width])},
        {"scale": spec.scale * layer.k_scale * LOG2E, "v_scale": layer.k_scale, "page_rows": page_rows} | numbers,
        _taken("latent_hopper", compiled) | {"ROPE_DIM": columns - width, "num_warps": 8},
    )


def _taken(kernel: str, given: dict[str, Any]) -> dict[str, Any]:
    """Of what the general kernels are given, what this one asks for."""
    return {name: x for name, x in given.items() if name in KERNELS[kernel].arg_names}


def _aligned(layer: AttentionLayer) -> bool:
    """Whether a layer's cache begins, and goes on, in whole 16 bytes, as loads take it; pages of latents in slots."""
    kv: Any = layer.kv
    latent = isinstance(kv, LatentView)
    if latent and kv.latent.stride(0) % kv.latent.stride(1):
        return False
    caches = (kv.latent,) if latent else (kv.k, kv.v)
    return not any(n % 16 for x in caches for n in (x.data_ptr(), *(step * x.itemsize for step in x.stride()[:-1])))


def _described(x: Tensor, box: list[int]) -> Any:
    """x as the hardware that loads boxes of it is told of it."""
    from triton.experimental.gluon.language import NVMMASharedLayout  # type: ignore[import-untyped]
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-untyped]

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(box))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)
