"""The operations between matrix products as one Triton kernel each: a step of decoding is bound by launches."""

from __future__ import annotations

import torch
from torch import Tensor

from headstock.models import fused_kernels as kernels
from headstock.models.linear import Linear
from headstock.models.pointwise import Pointwise

FEW, PARTS, BLOCK_N, BLOCK_K = 32, 2, 64, 128
"""Up to how many rows a product is summed in two parts, and in what blocks. On an H200 one of 8 rows with 4096 × 4096
weights then takes 10.6 µs, not 13.3, and one with 4096 × 14336 takes 30.0, not 31.8 (in bfloat16)."""


class Fused(Pointwise):
    """The operations in one pass over their rows each, float32 inside, and in place where their result replaces one."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The RMS norm of rows [T, H], scaled by `weight` [H]."""
        out = x.new_empty(x.shape)
        self._norm(x, None, weight, out, eps)
        return out

    def add_norm(self, hidden: Tensor, layer: Linear, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Adds the linear layer of x to `hidden`, rows [T, H], and gives the RMS norm of that too.

        The product of few rows is summed in two parts, which keeps more of the GPU busy; the norm adds them up.
        """
        if _is_few(layer, x):
            delta, out = _product(layer, x), torch.empty_like(hidden)
        else:
            delta = out = layer(x)
        self._norm(hidden, delta, weight, out, eps)
        return hidden, out

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        """Normalises and rotates heads [T, H, D] in place."""
        tokens, count, dim = heads.shape
        block = min(_power_of_two(count), max(4096 // _power_of_two(dim), 1))
        columns = -(-count // block)
        kernels.rotate[tokens, columns](
            heads, cos, sin, norm, eps, count, heads.stride(0), heads.stride(1), cos.stride(0), DIM=dim,
            BLOCK=block, HALF=_power_of_two(dim // 2), num_warps=4,
        )  # fmt: skip
        return heads

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) × up of rows [T, 2 I], the gates first."""
        tokens, width = gate_up.shape
        out = gate_up.new_empty(tokens, width // 2)
        columns = -(-width // 2048)
        kernels.silu_gate[tokens, columns](gate_up, out, width // 2, gate_up.stride(0), BLOCK=1024, num_warps=4)
        return out

    def _norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
        """`delta` [T, H], or its parts float32 [P, T, H]."""
        tokens, width = x.shape
        block, parts = _power_of_two(width), 0 if delta is None else len(delta) if delta.ndim == 3 else 1
        part = delta.stride(0) if delta is not None and delta.ndim == 3 else 0
        kernels.norm[tokens,](
            x, delta, weight, out, eps, width, x.stride(0), part, PARTS=parts, BLOCK=block,
            num_warps=min(max(block // 256, 4), 16),
        )  # fmt: skip


def _product(layer: Linear, x: Tensor) -> Tensor:
    """The product in parts float32 [PARTS, T, N], which add up to it."""
    rows, columns = layer.weight.shape
    out = x.new_empty(PARTS, len(x), rows, dtype=torch.float32)
    kernels.product[rows // BLOCK_N, PARTS](
        x, layer.weight, out, len(x), x.stride(0), K=columns, N=rows, BLOCK_T=max(_power_of_two(len(x)), 16),
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, PARTS=PARTS, num_warps=4, num_stages=5,
    )  # fmt: skip
    return out


def _is_few(layer: Linear, x: Tensor) -> bool:
    """Whether rows are so few that cuBLAS does not keep the memory busy, on a weight that the kernel can divide."""
    rows, columns = layer.weight.shape
    return (
        len(x) <= FEW and layer.bias is None and x.dtype != torch.float32 and x.stride(-1) == 1
        and rows % BLOCK_N == 0 and columns % (PARTS * BLOCK_K) == 0 and layer.weight.is_contiguous()
    )  # fmt: skip


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
