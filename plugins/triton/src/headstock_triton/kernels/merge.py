"""Merging: the partial states of a tile whose keys were split, as one."""
# mypy: ignore-errors

import triton
import triton.language as tl

from headstock_triton.kernels.state import finish, finite, log2


@triton.jit
def merge(
    queries, items, partial_out, partial_lse, sinks, carried_out, carried_lse, out, lse,
    out_token, out_head, lse_token, lse_head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    CARRY: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """One program per key head, tile and BLOCK_R of its rows, which takes BLOCK_S splits at a time (see `attend`)."""
    head, item = tl.program_id(0), tl.program_id(1)
    row, tile = tl.load(items + item * 4), tl.load(items + item * 4 + 1)
    split, splits = tl.load(items + item * 4 + 2), tl.load(items + item * 4 + 3)
    if (row >= 0) & (split == 0) & (splits > 1):
        first = tl.load(queries + row)
        count = tl.load(queries + row + 1) - first
        r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
        m = tile * BLOCK_M + r
        real = (m < count * GROUP) & (r < ROWS)
        d = tl.arange(0, BLOCK_V)

        top = tl.full([BLOCK_R], float("-inf"), tl.float32)
        norm = tl.zeros([BLOCK_R], tl.float32)
        acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
        for begin in range(0, splits, BLOCK_S):
            s = begin + tl.arange(0, BLOCK_S)
            at = ((item + s).to(tl.int64) * KV_HEADS + head)[:, None] * ROWS + r[None, :]
            inside = (s < splits)[:, None] & real[None, :]
            totals = tl.load(partial_lse + at, mask=inside, other=float("-inf"))
            outs = tl.load(
                partial_out + at[:, :, None] * V_HEAD_DIM + d[None, None, :],
                mask=inside[:, :, None] & (d < V_HEAD_DIM)[None, None, :], other=0.0,
            )  # fmt: skip
            new = tl.maximum(top, tl.max(totals, 0))
            base = finite(new)
            weights, shrink = tl.exp2(totals - base[None, :]), tl.exp2(top - base)
            norm = norm * shrink + tl.sum(weights, 0)
            acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * outs, 0)
            top = new
        acc = acc / tl.where(norm > 0, norm, 1.0)[:, None]
        finish(
            acc, finite(top) + log2(norm), first + m // GROUP, head * GROUP + m % GROUP, real,
            sinks, carried_out, carried_lse, out, lse, out_token, out_head, lse_token, lse_head,
            GROUP * KV_HEADS, V_HEAD_DIM, BLOCK_V, CARRY, SINKS, LSE,
        )  # fmt: skip
