"""What a random problem is made of: page tables, shared levels, tokens, and trees of new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from headstock.backend import BackendSpec
from headstock.batch import SharedLevel
from headstock.device import torch_dtype

Order = Literal["random", "ordered", "reversed", "interleaved"]
Poison = Literal["nan", "inf", "huge"]
Segments = Sequence[Sequence[tuple[int, int]]]
"""Shared levels, coarse to fine, each a sequence of (rows, pages) over all rows of a batch."""


def page_table(
    lens: Sequence[int],
    real: int,
    page_size: int,
    random: torch.Generator,
    order: Order = "random",
    spare: int = 3,
    shared: Segments = (),
) -> tuple[Tensor, int]:
    """Pages dealt to rows, int32 [B, W], and how many there are, `spare` ones included. Padding has the null page."""
    counts = [-(-length // page_size) for length in lens[:real]]
    pages = torch.randperm(sum(counts) + spare, generator=random) + 1
    if order != "random":
        pages = pages.sort(descending=order != "reversed").values  # dealt from the end
    free, num_pages = pages.tolist(), len(pages) + 1
    table = torch.zeros(len(lens), max(*counts, -(-max(lens) // page_size), 1), dtype=torch.int32)
    places = [(row, column) for row in range(real) for column in range(counts[row])]
    for row, column in sorted(places, key=lambda place: place[::-1]) if order == "interleaved" else places:
        table[row, column] = free.pop()
    begin = [0] * len(lens)
    for level in shared:
        first = 0
        for rows, width in level:
            members = range(first, first + rows)
            for row in members:  # a segment has one place in the table, since rows are ordered by their prefixes
                start = begin[row]
                table[row, start : start + width] = table[first, start : start + width]
                begin[row] = start + width
            first += rows
    return table, num_pages


def shared_levels(table: Tensor, shared: Segments, device: str) -> tuple[SharedLevel, ...]:
    """The levels that `page_table` laid out, as a batch tells them."""
    levels, begin = [], [0] * len(table)
    for level in shared:
        row_indptr, page_indptr, indices = [0], [0], []
        for rows, width in level:
            first = row_indptr[-1]
            if width:
                indices += table[first, begin[first] : begin[first] + width].tolist()
            row_indptr.append(first + rows)
            page_indptr.append(len(indices))
            for row in range(first, first + rows):
                begin[row] += width
        on_cpu = [torch.tensor(values, dtype=torch.int32) for values in (row_indptr, page_indptr, indices)]
        rows_at, pages_at, pages = (values.to(device) for values in on_cpu)
        levels.append(SharedLevel(rows_at, pages_at, pages, on_cpu[0], on_cpu[1]))
    return tuple(levels)


def tokens(
    spec: BackendSpec, count: int, random: torch.Generator, heads_first: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """q, k and v of `count` tokens, as strided views of one fused projection; no v beside a latent k."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    widths = [heads * spec.head_dim, kv_heads * spec.head_dim, kv_heads * spec.v_head_dim]
    fused = torch.randn(count, sum(widths), generator=random, dtype=torch.float64)
    q, k, v = torch.split(fused.to(torch_dtype(spec.dtype)).to(spec.device), widths, dim=1)
    shapes = ((heads, spec.head_dim), (kv_heads, spec.head_dim), (kv_heads, spec.v_head_dim))
    q, k, v = (x.view(count, *shape) for x, shape in zip((q, k, v), shapes, strict=True))
    if heads_first:
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    return q, k, None if spec.attention == "mla" else v


def trees(q_lens: Sequence[int], lens: Sequence[int], random: torch.Generator) -> tuple[Tensor, Tensor]:
    """A random forest per row: who is whose ancestor or itself, bool [Σ q²], and positions by depth, int64 [T]."""
    masks, positions = [], []
    for new, length in zip(q_lens, lens, strict=True):
        seen, depth = torch.eye(new, dtype=torch.bool), torch.zeros(new, dtype=torch.long)
        for i in range(1, new):
            parent = int(torch.randint(-1, i, (), generator=random))
            if parent >= 0:
                seen[i] |= seen[parent]
                depth[i] = depth[parent] + 1
        masks.append(seen.flatten())
        positions.append(depth + length - new)
    return torch.cat(masks), torch.cat(positions)
