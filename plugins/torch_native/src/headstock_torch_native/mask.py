"""Who sees whom: the visibility of keys to queries, for a batch of rows at once."""

from __future__ import annotations

import torch
from torch import Tensor


def distances(first: Tensor, keys: Tensor, query_len: int) -> Tensor:
    """How many positions back each key lies, int64 [B, n, S], where positions are consecutive.

    first [B, 1] is the key index of each row's first query, keys [B, S] the key indices.
    """
    queries = first + torch.arange(query_len, device=keys.device)
    return queries[:, :, None] - keys[:, None, :]


def tree_distances(positions: Tensor, first: Tensor, keys: Tensor) -> Tensor:
    """As `distances`, for new tokens that form a tree: positions [B, n] are absolute, siblings share one."""
    new = keys - first
    at = new.clamp(0, positions.shape[1] - 1)
    key_positions = torch.where(new < 0, positions[:, :1] + new, positions.gather(1, at))
    return positions[:, :, None] - key_positions[:, None, :]


def visible(
    distance: Tensor, valid: Tensor, *, causal: bool, window: int | None, tree: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Which keys each query sees, bool [B, n, S].

    distance [B, n, S]; valid bool [B, S] marks the keys that exist. A window of `w` shows 0 ≤ distance < w. `tree` is a
    mask bool [B, n, n] among new tokens, which replaces causality there, with each key's index among them, [B, S].
    """
    seen = valid[:, None, :].expand_as(distance)
    if causal or window is not None:
        seen = seen & (distance >= 0)
    if tree is not None:
        mask, new = tree
        at = new.clamp(0, mask.shape[1] - 1)[:, None, :].expand_as(distance)
        seen = torch.where((new >= 0)[:, None, :], mask.gather(2, at) & valid[:, None, :], seen)
    if window is not None:
        seen = seen & (distance < window)
    return seen
