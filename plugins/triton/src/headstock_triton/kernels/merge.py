"""Merging: the partial states of tiles whose keys were split, where their own programs do not (see `conclude`)."""
# mypy: ignore-errors

import triton
import triton.language as tl

from headstock_triton.kernels.state import join, work


@triton.jit
def merge(
    items, leaders, partial_out, partial_lse, sinks, carried_out, carried_lse, out, lse,
    out_token, out_head, lse_token, lse_head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    CARRY: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """One program per key head, tile and BLOCK_R of its rows, which takes BLOCK_S splits at a time (see `join`)."""
    head, item = tl.program_id(0), tl.load(leaders + tl.program_id(1))
    _, tile, _, splits, first, count, _, _ = work(items, tl.maximum(item, 0))
    if (item >= 0) & (splits > 1):
        join(
            item, tl.program_id(2) * BLOCK_R, splits, tile, first, count, head,
            partial_out, partial_lse, sinks, carried_out, carried_lse, out, lse,
            out_token, out_head, lse_token, lse_head,
            GROUP, KV_HEADS, V_HEAD_DIM, BLOCK_M, ROWS, BLOCK_V, BLOCK_R, BLOCK_S, CARRY, SINKS, LSE,
        )  # fmt: skip
