"""What a decoder does between its matrix products: norms, rotations, gates. In torch, or fused where a GPU runs it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.fusing import fusing
from headstock.models.linear import Linear
from headstock.models.rope import Rope, rotate


class Pointwise:
    """The operations as torch has them. Any may write over the tensors it is given and return them."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The RMS norm of rows [T, H], scaled by `weight` [H]."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_norm(self, hidden: Tensor, layer: Linear, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`hidden + layer(x)`, rows [T, H], and the RMS norm of that."""
        hidden = layer.add_to(hidden, x)
        return hidden, self.norm(hidden, weight, eps)

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        """Heads [T, H, D], first normalised and scaled by `norm` [H, D] if it is given, rotated by a step's tables."""
        if norm is not None:
            heads = F.rms_norm(heads, heads.shape[-1:], None, eps) * norm
        return rotate(heads, cos, sin)

    def tables(self, rope: Rope, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The tables of a step: positions [T] to cos and signed sin, both [T, 1, head_dim]."""
        return rope.tables(positions, dtype)

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) × up of rows [T, 2 I], the gates first."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def gate(self, layer: Linear, x: Tensor) -> Tensor:
        """silu(gate) × up of the linear layer of rows x [T, in], the gates first."""
        return self.silu_gate(layer(x))


def pointwise(device: torch.device) -> Pointwise:
    """The operations for a device: fused where it runs such kernels."""
    if not fusing(device).able:
        return Pointwise()
    from headstock.models.fused import Fused

    return Fused()
