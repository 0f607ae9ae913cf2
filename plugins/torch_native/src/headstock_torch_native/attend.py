"""The two ways to attend: torch's fused SDPA where it can, explicit matrix products for everything else.

Both take B rows of n queries [B, n, Hq, D] against keys [B, S, Hkv, D] and values [B, S, Hkv, Dv], and never repeat a
key head: the G query heads that share one are folded into the query dimension, or the key head is expanded by stride.
Values may be wider than `out`, which takes the first Dv of each, so that a latent is given as both.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

NOTHING = float("-inf")

# The other two read misaligned addresses for masks and strides such as these (torch 2.11 on an H200).
CUDA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def sdpa_bias(seen: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Visibility bool [B, n, S] as the additive mask that `sdpa` wants, [B, 1, n or G·n, S].

    It has four dimensions because the CPU's flash kernel takes no mask of three.
    """
    bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, NOTHING)[:, None]
    rows, _, n, keys = bias.shape
    return bias if rows == 1 or n == 1 else bias.expand(rows, group, n, keys).reshape(rows, 1, group * n, keys)


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, mask: Tensor | None, causal: bool, scale: float, v_scale: float
) -> None:
    """Attends by `scaled_dot_product_attention` into out [B, n, Hq, Dv]; `mask` from `sdpa_bias`.

    The flash kernels want one size of heads, so smaller values are widened by zeros.
    """
    n, kv_heads, dim = q.shape[1], k.shape[2], out.shape[-1]
    if v.shape[-1] < k.shape[-1]:
        v = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if len(q) == 1 and n > 1:  # key heads as the batch, each expanded over its group: is_causal and one mask serve all
        group = q.shape[2] // kv_heads
        q, out = grouped(q, kv_heads)[0], grouped(out, kv_heads)[0]
        k, v = k[0, :, None].expand(-1, group, -1, -1), v[0, :, None].expand(-1, group, -1, -1)
    elif n > 1:
        q, out = fold(q, kv_heads), grouped(out, kv_heads)
    else:
        q, out = fold(q, kv_heads), fold(out, kv_heads)
    with sdpa_kernel(CUDA_KERNELS) if q.is_cuda else nullcontext():
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    if v_scale != 1.0:
        result = result * v_scale
    out.copy_(result[..., :dim] if n == 1 else result[..., :dim].view(out.shape))


def matmul(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    mask: Tensor | None,
    distance: Tensor | None,
    scale: float,
    v_scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> None:
    """Attends in float32 (float64 for float64) with every axis, into out [B, n, Hq, Dv] and lse [B, n, Hq].

    mask bool [B, n, S], None where every key is visible; distance [B, n, S] as ALiBi needs it; sinks, slopes [Hq].
    """
    rows, n, heads, _ = q.shape
    keys, kv_heads = k.shape[1:3]
    per_head = (kv_heads, heads // kv_heads, 1, 1)
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = fold(q, kv_heads).to(exact) @ k.permute(0, 2, 3, 1).to(exact) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(rows, kv_heads, heads // kv_heads, n, keys)
    if slopes is not None and distance is not None:
        scores = scores - slopes.view(per_head).to(exact) * distance[:, None, None]
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], NOTHING)
    total = scores.logsumexp(-1, keepdim=True)
    empty = total == NOTHING
    if sinks is not None:
        total = torch.logaddexp(total, sinks.view(per_head).to(exact)).masked_fill(empty, NOTHING)
    weights = (scores - total.masked_fill(empty, 0.0)).exp_()
    result = (weights.flatten(2, 3) @ v[..., : out.shape[-1]].transpose(1, 2).to(exact)).view(*weights.shape[:-1], -1)
    # an empty row's weights are 0, but what it read may be NaN
    grouped(out, kv_heads).copy_((result * v_scale).masked_fill(empty, 0.0))
    if lse is not None:
        grouped(lse[..., None], kv_heads).copy_(total)


def fold(x: Tensor, kv_heads: int) -> Tensor:
    """[B, n, Hq, D] → [B, Hkv, G·n, D]; a view where there is one query per row."""
    rows, n, heads, dim = x.shape
    return x.view(rows, kv_heads, heads // kv_heads, dim) if n == 1 else grouped(x, kv_heads).flatten(2, 3)


def grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[B, n, Hq, D] → its view [B, Hkv, G, n, D]."""
    rows, n, heads, dim = x.shape
    return x.view(rows, n, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
