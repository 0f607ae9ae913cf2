"""Who sees whom: the visibility of keys to queries, for a batch of rows at once."""

from __future__ import annotations

import torch
from torch import Tensor


def distances(first: Tensor, keys: Tensor, queries: int) -> Tensor:
    """How many positions back each key lies, int64 [B, n, S], where positions are consecutive.

    first [B, 1] is the key index of each row's first query, keys [B, S] the key indices.
    """
    indices = first + torch.arange(queries, device=keys.device)
    return indices[:, :, None] - keys[:, None, :]


def tree_distances(first: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """As `distances`, for new tokens that form a tree: positions [B, n] are absolute, siblings share one."""
    new = keys - first
    at = new.clamp(0, positions.shape[1] - 1)
    key_positions = torch.where(new < 0, positions[:, :1] + new, positions.gather(1, at))
    return positions[:, :, None] - key_positions[:, None, :]


def visible(distance: Tensor, *, ordered: bool, window: int | None) -> Tensor:
    """Which keys each query sees by distance alone, bool [B, n, S]; a window of `w` shows 0 ≤ distance < w."""
    seen = distance >= 0 if ordered else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance < window)


def tree_visible(
    distance: Tensor, first: Tensor, keys: Tensor, mask: Tensor, *, ordered: bool, window: int | None
) -> Tensor:
    """As `visible`, where `mask` bool [B, n, n] replaces the order among new tokens; a window still bounds it."""
    new = (keys - first)[:, None, :].expand_as(distance)
    among_new = mask.gather(2, new.clamp(0, mask.shape[1] - 1))
    seen = torch.where(new >= 0, among_new, visible(distance, ordered=ordered, window=None))
    return seen if window is None else seen & (distance < window)
