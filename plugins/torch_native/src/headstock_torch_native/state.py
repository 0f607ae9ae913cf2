"""The state of attention over some of the keys: an output and a log-sum-exp, which merge with those of other keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headstock_torch_native.attend import NOTHING


class State(NamedTuple):
    """out [T, Hq, Dv] and lse [T, Hq] in one dtype; 0 and −inf where no key was seen, which weighs nothing."""

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> State:
        """The state of no key, for outputs of `shape`."""
        lse = torch.full(shape[:-1], NOTHING, dtype=dtype, device=device)
        return cls(torch.zeros(shape, dtype=dtype, device=device), lse)

    def merge(self, other: State) -> None:
        """Takes in the state of other keys."""
        total = torch.logaddexp(self.lse, other.lse)
        mine, theirs = self._share(self.lse, total), self._share(other.lse, total)
        self.out.mul_(mine).add_(other.out * theirs)
        self.lse.copy_(total)

    def sink(self, sinks: Tensor) -> None:
        """Takes in one more logit per head, [Hq], that gives nothing; what saw no key stays empty."""
        total = torch.logaddexp(self.lse, sinks.to(self.lse.dtype)).masked_fill(self.lse == NOTHING, NOTHING)
        self.out.mul_(self._share(self.lse, total))
        self.lse.copy_(total)

    @staticmethod
    def _share(lse: Tensor, total: Tensor) -> Tensor:
        return (lse - total.masked_fill(total == NOTHING, 0.0)).exp()[..., None]
