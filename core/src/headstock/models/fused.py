"""The operations between matrix products as one Triton kernel each: a step of decoding is bound by launches."""

from __future__ import annotations

import torch
from torch import Tensor

from headstock.models import fused_kernels as kernels
from headstock.models.linear import Linear
from headstock.models.pointwise import Pointwise
from headstock.models.rope import Rope

FEW, PARTS, BLOCK_N, BLOCK_K, NORMED, ROTATED = 32, 2, 64, 128, 512, 1024
"""Up to how many rows a product is the kernel's, in how many parts and in what blocks of the weight; then how many
elements each warp normalises, and each program rotates.

Measured on one H200 in bfloat16. A product of 1, 8 and 32 rows takes, and cuBLAS takes:
- with a weight of 4096 × 4096: 10.2, 10.5 and 11.0 µs (13.2, 13.4 and 14.0);
- with one of 4096 × 14336: 30.1, 30.5 and 31.5 µs (32.8, 33.0 and 34.3);
- with one of 28672 × 4096 and the gate, in one part: 57.5, 57.9 and 61.3 µs (62.9, 60.1 and 61.7, in two kernels).
A norm of one row of 4096 takes 1.85 µs, and 2.13 with 256 elements a warp. A step of one row through 32 layers takes
4.43 ms, and 4.45 with rotations of 4096 elements.
"""


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
        if _is_few(layer, x, BLOCK_N, PARTS * BLOCK_K):
            parts = x.new_empty(PARTS, *hidden.shape, dtype=torch.float32)
            delta, out = _product(layer, x, parts), torch.empty_like(hidden)
        else:
            delta = out = layer(x)
        self._norm(hidden, delta, weight, out, eps)
        return hidden, out

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        """Normalises and rotates heads [T, H, D] in place."""
        tokens, count, dim = heads.shape
        block = min(power_of_two(count), max(ROTATED // power_of_two(dim), 1))
        columns = -(-count // block)
        kernels.rotate[tokens, columns](
            heads, cos, sin, norm, eps, count, heads.stride(0), heads.stride(1), cos.stride(0), DIM=dim,
            BLOCK=block, HALF=power_of_two(dim // 2), num_warps=4,
        )  # fmt: skip
        return heads

    def tables(self, rope: Rope, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The tables of a step: positions [T] to cos and signed sin, both [T, 1, head_dim]."""
        dim = len(rope.frequencies)
        cos, sin = (positions.new_empty(len(positions), 1, dim, dtype=dtype) for _ in range(2))
        kernels.tables[len(positions),](
            positions, rope.frequencies, cos, sin, rope.attention_factor, HALF=dim // 2,
            BLOCK=power_of_two(dim // 2), num_warps=1,
        )  # fmt: skip
        return cos, sin

    def gate(self, layer: Linear, x: Tensor) -> Tensor:
        """silu(gate) × up of the linear layer of rows x [T, in], the gates first; of few rows in the product itself."""
        if not _is_few(layer, x, 2 * BLOCK_N, BLOCK_K):
            return super().gate(layer, x)
        return _product(layer, x, x.new_empty(1, len(x), len(layer.weight) // 2), gated=True)[0]

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
        block, parts = power_of_two(width), 0 if delta is None else len(delta) if delta.ndim == 3 else 1
        part = delta.stride(0) if delta is not None and delta.ndim == 3 else 0
        kernels.norm[tokens,](
            x, delta, weight, out, eps, width, x.stride(0), part, PARTS=parts, BLOCK=block,
            num_warps=min(max(block // NORMED, 4), 16),
        )  # fmt: skip


def _product(layer: Linear, x: Tensor, out: Tensor, gated: bool = False) -> Tensor:
    """The product in as many parts as `out` [P, T, N] has, which add up to it; gated, of one part, silu(gate) × up."""
    parts, tokens, rows = out.shape
    kernels.product[rows // BLOCK_N, parts](
        x, layer.weight, out, tokens, x.stride(0), K=x.shape[1], N=rows, BLOCK_T=max(power_of_two(tokens), 16),
        BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, PARTS=parts, GATED=gated, num_warps=4, num_stages=3 if gated else 5,
    )  # fmt: skip
    return out


def _is_few(layer: Linear, x: Tensor, block_n: int, block_k: int) -> bool:
    """Whether rows are so few that cuBLAS does not keep the memory busy, on a weight that the blocks divide."""
    rows, columns = layer.weight.shape
    return (
        len(x) <= FEW and layer.bias is None and x.dtype != torch.float32 and x.stride(-1) == 1
        and rows % block_n == 0 and columns % block_k == 0 and layer.weight.is_contiguous()
    )  # fmt: skip


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n ≥ 1: kernels take their blocks in these."""
    return 1 << (n - 1).bit_length()
