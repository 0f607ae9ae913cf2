"""Shared levels of a static batch: buffers of fixed sizes, filled for each replay from where runs of rows end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstock.batch import Ints, SharedLevel
from headstock.kv.sharing import Level


class StaticLevels:
    """The shared levels of one captured size of `rows` rows, whose tables are `width` pages wide.

    The host writes where runs of rows end, and their pages, for `count` levels: `numbers` of them. Which pages those
    are, the device reads in the table of each run's first row. What is left over are runs of no rows and no pages.
    """

    def __init__(self, rows: int, width: int, count: int, device: torch.device):
        self.rows, self.width = rows, width
        self.levels = tuple(_empty(rows, width, device) for _ in range(count))
        self._told = cycle([self._on_host(), self._on_host()])  # what the step before was told stays as it is

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers on the device."""
        return sum(x.nbytes for own in self.levels for x in (own.row_indptr, own.page_indptr, own.page_indices))

    @staticmethod
    def numbers(rows: int, count: int) -> int:
        """How many numbers the host writes."""
        return 2 * count * (rows + 1)

    @staticmethod
    def encode(levels: Sequence[Level], rows: int, count: int) -> list[int]:
        """The numbers of these levels, coarse to fine and no more than `count`, padded with ones that share nothing."""
        numbers: list[int] = []
        for place in range(count):
            ends, pages = [0], [0]
            for run in levels[place] if place < len(levels) else ():
                ends.append(ends[-1] + run.rows)
                pages.append(pages[-1] + len(run.pages))
            padding = rows + 1 - len(ends)  # the first of them takes the rows that are padding
            numbers += [*ends, *[rows] * padding, *pages, *pages[-1:] * padding]
        return numbers

    def told(self, numbers: Ints) -> tuple[SharedLevel, ...]:
        """The levels with what the host knows of them, as it wrote it. They hold until the next but one are told."""
        levels, own = next(self._told)
        own[:] = numbers
        return levels

    def _on_host(self) -> tuple[tuple[SharedLevel, ...], NDArray[np.int32]]:
        """The levels with host copies of their own, and these copies' memory."""
        halves = torch.zeros(len(self.levels), 2, self.rows + 1, dtype=torch.int32)
        levels = (
            replace(level, row_indptr_cpu=ends, page_indptr_cpu=pages)
            for level, (ends, pages) in zip(self.levels, halves, strict=True)
        )
        return tuple(levels), halves.view(-1).numpy()

    def derive(self, numbers: Tensor, table: Tensor) -> None:
        """Fills the levels on the device; `numbers` as written, `table` the rows' pages, int32 [B, W]."""
        rows = torch.arange(self.rows, device=table.device)
        begins = torch.zeros_like(rows)
        for level, own in zip(self.levels, numbers.view(len(self.levels), 2, -1), strict=True):
            ends, pages = own
            level.row_indptr.copy_(ends)
            level.page_indptr.copy_(pages)
            places = torch.arange(len(level.page_indices), device=table.device)
            run = torch.searchsorted(pages[1:], places, right=True).clamp_(max=self.rows - 1)
            first = ends[run].clamp_(max=self.rows - 1)
            column = (places - pages[run] + begins[first]).clamp_(min=0, max=self.width - 1)
            found = table.take(first * self.width + column)
            level.page_indices.copy_(found.masked_fill_(places >= pages[-1], 0))
            begins = begins + pages.diff()[torch.searchsorted(ends[1:], rows, right=True)]


def _empty(rows: int, width: int, device: torch.device) -> SharedLevel:
    """A level with room for as many pages as rows can share, two and two."""

    def buffer(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    on_host = torch.zeros(2, rows + 1, dtype=torch.int32)
    return SharedLevel(buffer(rows + 1), buffer(rows + 1), buffer(max(rows // 2, 1) * width), *on_host)
