"""Scheduling: which program works on which tile of queries, and on which split of its keys, from lengths alone."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def schedule(
    queries, lens, begins, items, num_rows, num_items, slots,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, MIN_KEYS: tl.constexpr, FIXED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """items int32 [num_items, 4]: row, tile, split, splits of each work item, or row −1 past the last.

    A row's share of `slots` is its share of all key reads, so that every split takes about as long, but a split has
    MIN_KEYS at least. FIXED > 0 splits by the row's own length alone, FIXED ways at most. Heavy tiles, the last ones
    where attention is causal, come first. The items of a tile follow each other, split by split.
    """
    r = tl.arange(0, ROWS)
    inside = r < num_rows
    count = tl.load(queries + r + 1, mask=inside, other=0) - tl.load(queries + r, mask=inside, other=0)
    keys = tl.load(lens + r, mask=inside, other=0) - tl.load(begins + r, mask=inside, other=0)
    if WINDOW > 0:
        keys = tl.minimum(keys, WINDOW + count)
    keys = tl.maximum(keys, 0)
    tiles = tl.cdiv(count * GROUP, BLOCK_M)
    most = tl.maximum(keys // MIN_KEYS, 1)
    if FIXED > 0:
        splits = tl.minimum(most, FIXED)
    else:
        reads = keys.to(tl.int64)
        share = reads * slots // tl.maximum(tl.sum(reads * tiles, 0), 1)
        splits = tl.minimum(tl.maximum(share, 1), most.to(tl.int64)).to(tl.int32)
    ends = tl.cumsum(tiles * splits, 0)

    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.sum((ends[:, None] <= item[None, :]).to(tl.int32), 0)
    own = r[:, None] == row[None, :]
    of_row = tl.sum(tl.where(own, splits[:, None], 0), 0)
    tiles_of_row = tl.sum(tl.where(own, tiles[:, None], 0), 0)
    first = tl.sum(tl.where(own, (ends - tiles * splits)[:, None], 0), 0)
    real = row < num_rows
    ways = tl.maximum(of_row, 1)
    local = item - first
    at, stored = items + item * 4, item < num_items
    tl.store(at, tl.where(real, row, -1), mask=stored)
    tl.store(at + 1, tiles_of_row - 1 - local // ways, mask=stored)
    tl.store(at + 2, local % ways, mask=stored)
    tl.store(at + 3, ways, mask=stored)
