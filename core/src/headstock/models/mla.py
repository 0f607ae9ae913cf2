"""Multi-head latent attention: one cached vector per token, from which keys and values are expanded, or never are.

With c the compressed part of a token's vector, of R numbers, a head's unrotated key is W_UK c and its value W_UV c
(DeepSeek-V2, arXiv 2405.04434). As q · W_UK c = (W_UKᵀ q) · c, queries may be taken into the latent space instead, and
sums of c brought back by W_UV. The two forms give the same numbers. Absorbed attention reads the cache as it is, for
2R + P multiplications per pair of query and key; expanded attention takes but N + P + V of them, and R (N + V) for each
key.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.models.deepseek_config import MLAConfig


class UpProjection:
    """What makes one layer's keys and values of its latent vectors: `kv_b_proj`, [Hq × (N + V), R].

    Latent vectors are [S, 1, R + P] and queries [T, Hq, N + P], both with the rotated part last.
    """

    def __init__(self, config: MLAConfig, weight: Tensor):
        self.config, self.weight = config, weight
        heads = weight.view(-1, config.nope_dim + config.v_dim, config.kv_rank)
        self.num_heads = len(heads)
        self._keys, self._values = torch.split(heads, [config.nope_dim, config.v_dim], 1)

    def absorb(self, q: Tensor) -> Tensor:
        """Queries in the latent space, [T, Hq, R + P]."""
        nope, rank = self.config.nope_dim, self.config.kv_rank
        absorbed = q.new_empty(*q.shape[:2], self.config.latent_dim)
        torch.bmm(q[..., :nope].transpose(0, 1), self._keys, out=absorbed[..., :rank].transpose(0, 1))
        absorbed[..., rank:] = q[..., nope:]
        return absorbed

    def restore(self, attended: Tensor, out: Tensor) -> None:
        """Weighted sums of compressed vectors, [T, Hq, R], as the heads' outputs, `out` [T, Hq, V]."""
        torch.bmm(attended.transpose(0, 1), self._values.transpose(1, 2), out=out.transpose(0, 1))

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [S, Hq, N + P] and values [S, Hq, V] of all heads."""
        nope, rank = self.config.nope_dim, self.config.kv_rank
        up = F.linear(latent[:, 0, :rank], self.weight).view(len(latent), self.num_heads, -1)
        keys = up.new_empty(len(latent), self.num_heads, self.config.head_dim)
        keys[..., :nope] = up[..., :nope]
        keys[..., nope:] = latent[..., rank:]
        return keys, up[..., nope:]


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Joins attention over other keys into `out` [T, Hq, V] and `lse` [T, Hq], float32, natural log, in place.

    A row that sees no key on one side, with an lse of −inf there, keeps the other side's; none may see none on both.
    """
    share = (lse - other_lse).sigmoid_()[..., None]
    torch.lerp(other.to(out.dtype), out, share, out=out)
    torch.logaddexp(lse, other_lse, out=lse)
