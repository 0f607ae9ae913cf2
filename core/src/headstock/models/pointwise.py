"""What a decoder does between its matrix products: norms, rotations, gates. In torch, or fused where a GPU runs it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.models.linear import Linear
from headstock.models.rope import rotate


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

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) × up of rows [T, 2 I], the gates first."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)


def pointwise(device: torch.device) -> Pointwise:
    """The operations for a device: fused on an NVIDIA GPU, where torch has brought along what compiles them."""
    if device.type != "cuda" or torch.version.hip is not None:
        return Pointwise()
    try:
        from headstock.models.fused import Fused
    except ImportError:
        return Pointwise()
    return Fused()
