"""Softmax states: an output over some keys with its log-sum-exp, and how the last of them becomes the result.

Inside kernels log-sum-exps are of base 2, which the hardware computes; in memory that others read they are natural.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finite(x):
    """x with 0 for −inf: what to subtract from exponents that may all be of nothing."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def log2(x):
    """log2 of a sum of weights, −inf where it is 0."""
    return tl.where(x > 0, tl.log2(tl.where(x > 0, x, 1.0)), float("-inf"))


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
