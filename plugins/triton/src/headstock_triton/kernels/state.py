"""Softmax states: an output over some keys with its log-sum-exp, and how they become the result.

Inside kernels log-sum-exps are of base 2, which the hardware computes; in memory that others read they are natural.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
ABSENT = tl.constexpr(-(2**62))
"""The origin past the last work item; others may be negative, where a row's own keys begin late."""


@triton.jit
def finite(x):
    """x with 0 for −inf: what to subtract from exponents that may all be of nothing."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def log2(x):
    """log2 of a sum of weights, −inf where it is 0."""
    return tl.where(x > 0, tl.log2(tl.where(x > 0, x, 1.0)), float("-inf"))


@triton.jit
def work(items, item):
    """A work item as `schedule` leaves it, by loads that do not wait for each other."""
    at = items + item * 8
    row, tile, split, splits = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    first, count, low, high = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    return row, tile, split, splits, first, count, low, high


@triton.jit
def finish(
    acc, total, token, head, real, sinks, carried_out, carried_lse, out, lse,
    out_token, out_head, lse_token, lse_head,
    HEADS: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    CARRY: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Merges what earlier parts carried over and the sink into acc [M, Dv] and total [M], and writes the result.

    token, head and `real` are [M]; carried_out float32 [T, Hq, Dv] and carried_lse [T, Hq] natural, contiguous, may be
    out and lse themselves.
    """
    d = tl.arange(0, BLOCK_V)
    inside = real[:, None] & (d < V_HEAD_DIM)[None, :]
    token = token.to(tl.int64)
    if CARRY:
        at = token * HEADS + head
        before = tl.load(carried_lse + at, mask=real, other=float("-inf")) * LOG2E
        base = finite(tl.maximum(total, before))
        mine, theirs = tl.exp2(total - base), tl.exp2(before - base)
        norm = tl.where(mine + theirs > 0, mine + theirs, 1.0)
        other = tl.load(carried_out + at[:, None] * V_HEAD_DIM + d[None, :], mask=inside, other=0.0)
        acc = acc * (mine / norm)[:, None] + other * (theirs / norm)[:, None]
        total = base + log2(mine + theirs)
        tl.debug_barrier()  # several threads may have loaded what one of them now stores in its place
    if SINKS:  # a row without keys stays empty, sink or not
        sink = tl.load(sinks + head, mask=real, other=0.0) * LOG2E
        base = tl.maximum(total, sink)
        weight = tl.exp2(total - base)
        norm = weight + tl.exp2(sink - base)
        acc = acc * (weight / norm)[:, None]
        total = tl.where(total == float("-inf"), total, base + tl.log2(norm))
    at = token[:, None] * out_token + head[:, None] * out_head + d[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)
    if LSE:
        tl.store(lse + token * lse_token + head * lse_head, total * LN2, mask=real)


@triton.jit
def join(
    item, begin, splits, tile, first, count, head,
    partial_out, partial_lse, sinks, carried_out, carried_lse, out, lse,
    out_token, out_head, lse_token, lse_head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    CARRY: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Merges the partial states of BLOCK_R rows of a tile, from row `begin` on, and finishes them.

    Its splits are `item` and those that follow, taken in their order, so that the bits are the same whoever does it;
    the loads of BLOCK_S of them are under way at once.
    """
    r, d = begin + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    m = tile * BLOCK_M + r
    real = (m < count * GROUP) & (r < ROWS)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for n in range(0, splits, BLOCK_S):
        s = n + tl.arange(0, BLOCK_S)
        at = ((item + s).to(tl.int64) * KV_HEADS + head)[None, :] * ROWS + r[:, None]
        inside = real[:, None] & (s < splits)[None, :]
        # past the first-level cache, which may hold what was there before the other programs of this launch wrote
        totals = tl.load(partial_lse + at, mask=inside, other=float("-inf"), cache_modifier=".cg")
        outs = tl.load(
            partial_out + at[:, :, None] * V_HEAD_DIM + d[None, None, :],
            mask=inside[:, :, None] & (d < V_HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new = tl.maximum(top, tl.max(totals, 1))
        base = finite(new)
        weights, shrink = tl.exp2(totals - base[:, None]), tl.exp2(top - base)
        norm = norm * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * outs, 1)
        top = new
    acc = acc / tl.where(norm > 0, norm, 1.0)[:, None]
    finish(
        acc, finite(top) + log2(norm), first + m // GROUP, head * GROUP + m % GROUP, real,
        sinks, carried_out, carried_lse, out, lse, out_token, out_head, lse_token, lse_head,
        GROUP * KV_HEADS, V_HEAD_DIM, BLOCK_V, CARRY, SINKS, LSE,
    )  # fmt: skip


@triton.jit
def conclude(
    acc, total, item, split, splits, tile, first, count, head, counters,
    partial_out, partial_lse, sinks, carried_out, carried_lse, out, lse,
    out_token, out_head, lse_token, lse_head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    CARRY: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A tile's state to where it belongs: finished where it is of all keys, otherwise kept for merging.

    A split leaves float32 partial_out [items, Hkv, ROWS, Dv] and partial_lse [items, Hkv, ROWS]. With `counters`, 0
    before and after, the program that is the last of its tile and head to do so merges them all; else `merge` does.
    """
    if SPLIT:  # noqa: SIM102, not compiled where nothing is split
        if splits > 1:
            r, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_V)
            place = (item.to(tl.int64) * KV_HEADS + head) * ROWS + r
            kept = (tile * BLOCK_M + r < count * GROUP) & (r < ROWS)
            tl.store(partial_lse + place, total, mask=kept)
            tl.store(
                partial_out + place[:, None] * V_HEAD_DIM + d[None, :], acc,
                mask=kept[:, None] & (d < V_HEAD_DIM)[None, :],
            )  # fmt: skip
            if counters is not None:
                leader = item - split
                counter = counters + leader.to(tl.int64) * KV_HEADS + head
                tl.debug_barrier()  # one thread counts, and so releases what all of them have stored
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
                    tl.store(counter, 0)
                    join(
                        leader, 0, splits, tile, first, count, head,
                        partial_out, partial_lse, sinks, carried_out, carried_lse, out, lse,
                        out_token, out_head, lse_token, lse_head,
                        GROUP, KV_HEADS, V_HEAD_DIM, BLOCK_M, ROWS, BLOCK_V, BLOCK_R, BLOCK_S, CARRY, SINKS, LSE,
                    )  # fmt: skip
            return
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    finish(
        acc, total, first + m // GROUP, head * GROUP + m % GROUP, m < count * GROUP,
        sinks, carried_out, carried_lse, out, lse, out_token, out_head, lse_token, lse_head,
        GROUP * KV_HEADS, V_HEAD_DIM, BLOCK_V, CARRY, SINKS, LSE,
    )  # fmt: skip
