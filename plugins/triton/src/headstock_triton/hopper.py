"""The kernels of Hopper, in Gluon: the form that they are written in, and how they are told of keys."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from headstock import BackendSpec

HALF = 64
"""Elements of a key that one load of `attend_hopper` brings."""


class Form(NamedTuple):
    """Keys of a tile, warps, of which a kernel starts its `workers` itself, and tiles of keys in flight."""

    keys: int
    warps: int
    stages: int
    workers: int = 0


FORMS = {"attend_hopper": Form(128, 9, 2, workers=5), "latent_hopper": Form(64, 8, 2)}
"""What these kernels are written for, whatever the configuration has."""


def aligned(spec: BackendSpec, k: Tensor, v: Tensor) -> bool:
    """Whether a cache begins, and goes on, in whole 16 bytes, as loads take it; pages of latents in slots."""
    if spec.attention == "mla" and k.stride(0) % k.stride(1):
        return False
    return not any(n % 16 for x in (k, v) for n in (x.data_ptr(), *(step * x.itemsize for step in x.stride()[:-1])))


def boxes(k: Tensor, v: Tensor) -> dict[str, Any]:
    """Keys and values of pages [pages, page, Hkv, 128] as `attend_hopper` is told of them."""
    box = [1, min(k.shape[1], FORMS["attend_hopper"].keys), 1, HALF]
    return {"k": _described(k, box), "v": _described(v, box)}


def latent_boxes(latents: Tensor, width: int) -> dict[str, Any]:
    """Latents [pages, page, 1, D], of which `width` are values, as `latent_hopper` is told of them: a matrix of slots,
    of which page_rows are from one page to the next."""
    pages, page, _, columns = latents.shape
    page_rows = latents.stride(0) // latents.stride(1)
    slots = latents.as_strided([(pages - 1) * page_rows + page, columns], [latents.stride(1), 1])
    rows = FORMS["latent_hopper"].keys
    keys, ropes = (_described(slots, [rows, part]) for part in (width, columns - width))
    return {"keys": keys, "ropes": ropes, "page_rows": page_rows}


def _described(x: Tensor, box: list[int]) -> Any:
    """x as the hardware that loads boxes of it is told of it."""
    from triton.experimental.gluon.language import NVMMASharedLayout  # type: ignore[import-untyped]
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # type: ignore[import-untyped]

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(box))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)
