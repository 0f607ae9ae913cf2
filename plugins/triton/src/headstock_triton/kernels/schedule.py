"""Scheduling: which program works on which tile of queries, and on which split of its keys, from lengths alone."""
# mypy: ignore-errors

import triton
import triton.language as tl

from headstock_triton.kernels.state import ABSENT


@triton.jit
def schedule(
    queries, lens, begins, starts, items, origins, counters, leaders, num_rows, num_items, slots, even, width,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, MIN_KEYS: tl.constexpr, FIXED: tl.constexpr,
    KV_HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """items int32 [num_items, 8]: row, tile, split and splits of each work item, or row −1 past the last; and of its
    row what each layer would look up: first token, count of tokens, begin and end of keys. origins int64 [num_items]:
    where key 0 of the row would be, starts[row], or row · width where there are none, and ABSENT past the last. No
    `begins`: all are 0. Where asked for, counters int32 [num_items, Hkv] become 0 (see `conclude`), and leaders int32
    the first item of each tile, −1 past the last (see `merge`), as many as there are items without splits.

    A row's share of `slots` is its share of all key reads, so that every split takes about as long, but a split has
    MIN_KEYS at least. Where most rows are equally long and others have hardly any keys, as padding, they share `even`.
    FIXED > 0 splits by the row's own length alone, FIXED ways at most. Heavy tiles, the last ones where attention is
    causal, come first. The items of a tile follow each other, split by split.
    """
    r = tl.arange(0, ROWS)
    inside = r < num_rows
    count = tl.load(queries + r + 1, mask=inside, other=0) - tl.load(queries + r, mask=inside, other=0)
    keys = tl.load(lens + r, mask=inside, other=0)
    if begins is not None:
        keys -= tl.load(begins + r, mask=inside, other=0)
    if WINDOW > 0:
        keys = tl.minimum(keys, WINDOW + count)
    keys = tl.maximum(keys, 0)
    tiles = tl.cdiv(count * GROUP, BLOCK_M)
    most = tl.maximum(keys // MIN_KEYS, 1)
    if FIXED > 0:
        splits = tl.minimum(most, FIXED)
    else:
        reads = keys.to(tl.int64)
        total = tl.sum(reads * tiles, 0)
        share = reads * slots // tl.maximum(total, 1)
        longest = tl.max(tl.where(tiles > 0, reads, 0), 0)
        long = 16 * reads > longest
        count_long = tl.sum(tl.where(long, tiles, 0), 0)
        equal = (9 * total >= 8 * count_long * longest) & (2 * count_long >= tl.sum(tiles, 0))
        share = tl.where(equal, tl.where(long, even // tl.maximum(count_long, 1), 1), share)
        splits = tl.minimum(tl.maximum(share, 1), most.to(tl.int64)).to(tl.int32)
    ends = tl.cumsum(tiles * splits, 0)

    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.sum((ends[:, None] <= item[None, :]).to(tl.int32), 0)
    own = r[:, None] == row[None, :]
    of_row = tl.sum(tl.where(own, splits[:, None], 0), 0)
    tiles_of_row = tl.sum(tl.where(own, tiles[:, None], 0), 0)
    before = tl.sum(tl.where(own, (ends - tiles * splits)[:, None], 0), 0)
    ways = tl.maximum(of_row, 1)
    local = item - before

    stored = item < num_items
    real = stored & (row < num_rows)
    first = tl.load(queries + row, mask=real, other=0)
    at = items + item * 8
    tl.store(at, tl.where(real, row, -1), mask=stored)
    tl.store(at + 1, tiles_of_row - 1 - local // ways, mask=stored)
    tl.store(at + 2, local % ways, mask=stored)
    tl.store(at + 3, ways, mask=stored)
    tl.store(at + 4, first, mask=stored)
    tl.store(at + 5, tl.load(queries + row + 1, mask=real, other=0) - first, mask=stored)
    begin = tl.zeros_like(first)
    if begins is not None:
        begin = tl.load(begins + row, mask=real, other=0)
    tl.store(at + 6, begin, mask=stored)
    tl.store(at + 7, tl.load(lens + row, mask=real, other=0), mask=stored)
    origin = row.to(tl.int64) * width
    if starts is not None:
        origin = tl.load(starts + row, mask=real, other=0).to(tl.int64)
    tl.store(origins + item, tl.where(real, origin, ABSENT), mask=stored)
    if leaders is not None:
        tiles_before = tl.sum(tl.where(r[:, None] < row[None, :], tiles[:, None], 0), 0)
        tl.store(leaders + tiles_before + local // ways, item, mask=real & (local % ways == 0))
        past = (item >= tl.sum(tiles, 0)) & (item < (num_items // FIXED if FIXED > 0 else num_items - slots))
        tl.store(leaders + item, tl.full([BLOCK], -1, tl.int32), mask=past)
    if counters is not None:
        h = tl.arange(0, BLOCK_H)
        mine = item.to(tl.int64)[:, None] * KV_HEADS + h[None, :]
        tl.store(counters + mine, tl.zeros_like(mine).to(tl.int32), mask=stored[:, None] & (h < KV_HEADS)[None, :])
