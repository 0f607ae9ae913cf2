"""FlashInfer's planners, followed step by step: what they take of both workspaces, and the numbers that they fix."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

SMS = 132
BLOCKS = 4


class Shape(NamedTuple):
    """What plans of one wrapper have in common; `window` is -1 where there is none."""

    heads: int
    kv_heads: int
    v_head_dim: int
    page: int
    window: int


def ceil(a: int, b: int) -> int:
    return -(-a // b)


class Allocator:
    def __init__(self, buffer: Tensor):
        assert buffer.dtype == torch.uint8
        assert buffer.data_ptr() % 16 == 0, "the workspace is not aligned to 16 bytes"
        self.size, self.offset = len(buffer), 0

    def take(self, size: int, name: str, alignment: int = 16) -> int:
        start = ceil(self.offset, alignment) * alignment
        if start + size > self.size:
            raise RuntimeError(f"Buffer overflow when allocating memory for {name} with size {size}")
        self.offset = start + size
        return start


def plan_fa3(ints: Allocator, shape: Shape, queries: list[int], graph_rows: int | None) -> list[int]:
    """A list of work for every multiprocessor; `graph_rows` are the tokens that a graph was planned for first."""
    per_head = ceil(graph_rows or queries[-1], 128) + len(queries) - 2
    works = per_head * (1 if per_head > 4096 else shape.heads)
    offsets = [ints.take(4 * works, "sm90") for _ in range(7)] + [ints.take(4 * (SMS + 1), "sm90")]
    return [*offsets, per_head > 4096]


def plan_fa2(
    ints: Allocator, floats: Allocator, shape: Shape, queries: list[int], pages: list[int], graph_rows: int | None,
    fixed: int, uniform: int,
) -> list[int]:  # fmt: skip
    """Tiles of queries and chunks of pages; -1 and 0 for no fixed chunk and no uniform query length."""
    rows, group, graph = len(pages), shape.heads // shape.kv_heads, graph_rows is not None
    packed = [(b - a) * group for a, b in pairwise(queries)]

    def tile(n: int) -> int:
        return 128 if n > 64 and shape.v_head_dim < 256 else 64 if n > 16 else 16

    most, total = 2 * SMS // shape.kv_heads, graph_rows or queries[-1]
    if graph and uniform:
        assert set(packed) == {uniform * group}
        size = tile(uniform * group)
        tiles = rows * ceil(uniform * group, size)
    elif graph:
        size = tile((total - rows + 1) * group)
        tiles = ceil(total * group, size) + rows - 1
    else:
        size = tile(sum(packed) // rows)
        tiles = sum(ceil(n, size) for n in packed)
    seen = [min(ceil(shape.window + size, shape.page), n) if shape.window >= 0 else n for n in pages]
    chunk, split = (fixed, False) if fixed > 0 else search(packed, seen, size, most, max(128 // shape.page, 1))
    chunks = [ceil(max(n, 1), chunk) for n in seen]
    split = split or (graph and fixed <= 0) or (fixed > 0 and max(chunks) > 1)
    blocks = sum(ceil(n, size) * k for n, k in zip(packed, chunks, strict=True))
    padded = max(most, tiles) if graph else blocks
    assert blocks <= padded, "new batch size should not exceed padded batch size"
    offsets = [ints.take(4 * padded, "indices") for _ in range(3)] + [ints.take(4 * (rows + 1), "o_indptr")]
    offsets.append(ints.take(4, "kv_chunk_size", 1))
    if graph:
        offsets.append(ints.take(4, "total_num_rows"))
    if split:
        offsets.append(floats.take(shape.heads * padded * size * shape.v_head_dim * 4, "batch_prefill_tmp_v"))
        offsets.append(floats.take(shape.heads * padded * size * 4, "batch_prefill_tmp_s"))
        offsets.append(ints.take(4 * (total + 1), "merge_indptr"))
        offsets.append(ints.take(padded, "block_valid_mask"))
    offsets = [*offsets, *[0] * 10][:9]
    return [padded, total, 0, size, *offsets, graph, split]


def plan_cuda_cores(ints: Allocator, floats: Allocator, shape: Shape, pages: list[int], graph: bool) -> list[int]:
    """Decode on CUDA cores: chunks of pages, and blocks of one key head each, of which BLOCKS fit a multiprocessor."""
    rows, most = len(pages), BLOCKS * SMS
    if rows * shape.kv_heads >= most:
        blocks, split = rows, False
    else:
        chunk, _ = search([1] * rows, pages, 1, most // shape.kv_heads, max(128 // shape.page, 1))
        blocks = sum(ceil(max(n, 1), chunk) for n in pages)
        split = graph or blocks > rows
    padded = most // shape.kv_heads if graph and split else blocks
    offsets = [ints.take(4 * padded, "indices") for _ in range(2)] + [ints.take(4 * (padded + 1), "o_indptr")]
    offsets.append(ints.take(4, "kv_chunk_size", 1))
    states = [0, 0]
    if split:
        states = [floats.take(4 * shape.heads * padded * size, "batch_decode_tmp") for size in (shape.v_head_dim, 1)]
        offsets.append(ints.take(padded, "block_valid_mask"))
    return [padded, *states, *[*offsets, 0][:5], graph, split]


def search(packed: list[int], pages: list[int], size: int, most: int, least: int) -> tuple[int, bool]:
    """The smallest chunk, of `least` pages or more, that gives no more blocks than run at once; whether it splits."""
    low, high = least, max([1, *pages])
    longest = high
    while low < high:
        middle = (low + high) // 2
        blocks = sum(ceil(n, size) * ceil(max(k, 1), middle) for n, k in zip(packed, pages, strict=True))
        low, high = (middle + 1, high) if blocks > most else (low, middle)
    return low, low < longest
