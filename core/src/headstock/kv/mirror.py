"""A mirror: page numbers of the host as a device has them, brought up to date by what has changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headstock.batch import Ints
from headstock.device import Device


class Mirror:
    """An int32 tensor on a device that follows numbers on the host: `note` what changes, `update` before it is read.

    Its memory never moves, so graphs may read it, and write the few changes of a step: those `pending`, until they are
    `settled`. `spare` is a place, counted through all rows, that is always 0.
    """

    def __init__(self, values: Tensor, device: Device, spare: int):
        self.tensor, self.spare = values.to(device.torch, torch.int32, copy=True), spare
        self._changed: dict[int, int] = {}

    def note(self, start: int, values: Sequence[int]) -> None:
        """The numbers from place `start` on, counted through all rows, are `values` now."""
        self._changed.update(zip(range(start, start + len(values)), values, strict=True))

    def pending(self, changes: Ints) -> None:
        """Writes what has changed, places and their numbers, over `changes` [2, N]: N times the spare place and its 0.

        They are for `put`. More changes than that are sent at once.
        """
        if len(self._changed) > changes.shape[1]:
            self.update()
        if self._changed:
            changes[:, : len(self._changed)] = list(self._changed), list(self._changed.values())

    def put(self, changes: Tensor) -> None:
        """Writes what was `pending`, int64 [2 × N] on the device."""
        places, numbers = changes.chunk(2)
        self.tensor.view(-1).index_copy_(0, places, numbers.int())

    def settled(self) -> None:
        """What was pending is written, or will be before anything reads it."""
        self._changed.clear()

    def update(self) -> None:
        """Sends all that was noted since the last time."""
        if self._changed:
            self.put(torch.tensor([*self._changed, *self._changed.values()]).to(self.tensor.device))
            self.settled()
