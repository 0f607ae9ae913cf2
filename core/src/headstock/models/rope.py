"""The rotary position embedding: frequencies, the tables of a step, and the rotation itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headstock.models.rope_config import RopeConfig


class Rope:
    """The rotary embedding of one model: turns positions into the cos and sin that `rotate` takes.

    Definitions and the order of the halves are those of transformers' `modeling_rope_utils`, so weights need no change.
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device | str = "cpu"):
        frequencies, self.attention_factor = inverse_frequencies(config, head_dim)
        self.frequencies = torch.cat((frequencies, frequencies)).to(device)
        # The left half of the rotation is -sin, the right half +sin: the sign is paid once per step, not per layer.
        self.signs = torch.ones(head_dim, device=device)
        self.signs[: head_dim // 2] = -1

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions [T] to cos and signed sin, both [T, 1, head_dim]; computed in float32, once per step."""
        angles = positions[:, None, None].float() * self.frequencies
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return cos.to(dtype), sin.mul_(self.signs).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [T, H, D] by the tables of a step; the pair of element i is i ± D/2."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per token, float32 [head_dim / 2], and the factor that multiplies cos and sin."""
    frequencies = 1.0 / rope.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.rope_type:
        case "default":
            return frequencies, 1.0
        case "linear":
            return frequencies / _known(rope.factor), 1.0
        case "llama3":
            return _llama3(rope, frequencies), 1.0
        case "yarn":
            return _yarn(rope, frequencies, head_dim), _yarn_attention_factor(rope)


def _known(value: float | None) -> float:
    assert value is not None, "config.py fills in what the rope type needs"
    return value


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1: short wavelengths stay, long ones are stretched by `factor`, those between are blended."""
    factor, original = _known(rope.factor), _known(rope.original_max_position_embeddings)
    low, high = _known(rope.low_freq_factor), _known(rope.high_freq_factor)
    turns = original * frequencies / (2 * math.pi)  # full turns within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.lerp(frequencies / factor, frequencies, keep)


def _yarn(rope: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071): as Llama 3.1, but blended linearly over dimensions, not over frequencies."""
    factor, original = _known(rope.factor), _known(rope.original_max_position_embeddings)

    def dimension(turns: float) -> float:  # the dimension that makes so many full turns within the original context
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    return torch.lerp(frequencies, frequencies / factor, ramp.clamp(0, 1))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return rope.temperature(rope.mscale) / rope.temperature(rope.mscale_all_dim)
    return rope.temperature(1.0)
