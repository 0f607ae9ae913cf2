"""Triton kernels of a mixture of experts for few tokens; all sums are float32, in an order that no other token changes.

A pair is a token and one of its k experts, numbered token × k + place. A token's experts are distinct.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def logits(
    x, weight, out, tokens, x_row, K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [T, E] float32 = x [T, K] · weight [E, K]ᵀ, float32: not by tensor cores, which would round."""
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)[None, :, None]
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None, None]
    at = tl.arange(0, BLOCK_K)[None, None, :]
    total = tl.zeros([BLOCK_T, BLOCK_E, BLOCK_K], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        inside = start + at < K
        row = tl.load(x + token * x_row + start + at, mask=inside & (token < tokens), other=0.0)
        column = tl.load(weight + expert * K + start + at, mask=inside & (expert < EXPERTS), other=0.0)
        total += row.to(tl.float32) * column
    token, expert = tl.reshape(token, [BLOCK_T, 1]), tl.reshape(expert, [1, BLOCK_E])
    tl.store(out + token * EXPERTS + expert, tl.sum(total, 2), mask=(token < tokens) & (expert < EXPERTS))


@triton.jit
def choose(
    logits, bias, weights, experts, scaling, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr, NORMALISED: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A token's best experts [T, k] int64 and their weights [T, k], best first, of logits [T, E], all float32.

    Groups are judged by their best score, or best two where scores are sigmoids. NaN counts as the best, as in torch,
    and what is chosen is an expert and chosen once, whatever the logits: others read memory by it.
    """
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_E)[None, :]
    size: tl.constexpr = EXPERTS // GROUPS
    inside = (group < GROUPS) & (member < size)
    expert = tl.where(inside, group * size + member, EXPERTS)
    value = tl.load(logits + row * EXPERTS + expert, mask=inside, other=-float("inf"))
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-value))
    else:
        value = tl.exp(value - tl.max(value))
        score = value / tl.sum(value)
    judged = score
    if bias is not None:
        judged += tl.load(bias + expert, mask=inside, other=0.0)
    judged = tl.where(judged < 1e30, tl.where(judged > -1e30, judged, -1e30), 1e30)
    judged = tl.where(inside, judged, -float("inf"))
    if TOP_GROUPS < GROUPS:
        best = tl.max(judged, 1, keep_dims=True)
        if SIGMOID:
            first = tl.min(tl.where(judged == best, member, BLOCK_E), 1, keep_dims=True)
            best += tl.max(tl.where(member == first, -float("inf"), judged), 1, keep_dims=True)
        taken = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            pick = group == tl.min(tl.where(best == tl.max(best), group, BLOCK_G))
            best = tl.where(pick, -float("inf"), best)
            taken = taken | pick
        judged = tl.where(taken, judged, -float("inf"))
    place = tl.arange(0, BLOCK_K)
    chosen, share = tl.zeros([BLOCK_K], tl.int32), tl.zeros([BLOCK_K], tl.float32)
    for i in tl.static_range(TOP_K):
        pick = tl.min(tl.where(judged == tl.max(judged), expert, EXPERTS))
        chosen = tl.where(place == i, pick, chosen)
        share = tl.where(place == i, tl.sum(tl.where(expert == pick, score, 0.0)), share)
        judged = tl.where(expert == pick, -float("inf"), judged)
    if NORMALISED:
        share /= tl.sum(share) + 1e-20
    tl.store(experts + row * TOP_K + place, chosen.to(tl.int64), mask=place < TOP_K)
    tl.store(weights + row * TOP_K + place, share * scaling, mask=place < TOP_K)


@triton.jit
def _work(experts, slot, tokens, TOP_K: tl.constexpr, BY_PAIR: tl.constexpr, BLOCK_T: tl.constexpr):
    """The expert of a slot, int64; each token's pair with it [BLOCK_T], -1 where there is none; whether it is idle.

    A slot is an expert, which may be nobody's; or, BY_PAIR, a pair, and its expert falls to the first such pair.
    """
    place = tl.arange(0, triton.next_power_of_2(TOP_K))[None, :]
    token = tl.arange(0, BLOCK_T)[:, None]
    pair = token * TOP_K + place
    chosen = tl.load(experts + pair, mask=(token < tokens) & (place < TOP_K), other=-1)
    expert = tl.load(experts + slot) if BY_PAIR else slot.to(tl.int64)
    own = chosen == expert
    first = tl.min(tl.where(own, pair, BLOCK_T * TOP_K))
    idle = first < slot if BY_PAIR else first == BLOCK_T * TOP_K
    return expert, tl.max(tl.where(own, pair, -1), 1), idle


@triton.jit(do_not_specialize=["tokens"])
def gate_up(
    x, weight, experts, out, tokens, x_row, K: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr,
    BY_PAIR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [T × k, N] = silu(gate) × up of x [T, K] for each pair; weight [E, 2 N, K] has the gates first; T ≤ BLOCK_T.

    A program takes BLOCK_N columns of one expert, for all of its tokens: weights are read once. They are the first
    operand, as Hopper's products take 64 rows of that, but as few as 8 columns of the second.
    """
    expert, pair, idle = _work(experts, tl.program_id(1), tokens, TOP_K, BY_PAIR, BLOCK_T)
    if idle:
        return
    token, own = tl.arange(0, BLOCK_T)[:, None], (pair >= 0)[:, None]
    row, at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)[None, :]
    rows, weights = x + token * x_row + at, weight + expert * (2 * N * K) + row[:, None] * K + at
    gate = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = gate
    for start in range(0, K, BLOCK_K):
        columns = tl.load(rows + start, mask=own, other=0.0).T
        gate = tl.dot(tl.load(weights + start, eviction_policy="evict_first"), columns, gate)
        up = tl.dot(tl.load(weights + N * K + start, eviction_policy="evict_first"), columns, up)
    gate = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + pair[:, None] * N + row[None, :], gate.T.to(out.dtype.element_ty), mask=own)


@triton.jit(do_not_specialize=["tokens"])
def down(
    x, weight, experts, shares, out, tokens, K: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr,
    BY_PAIR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [T × k, N] float32 = share × x · weight for each pair; x [T × k, K], shares [T × k], weight [E, K, N]."""
    expert, pair, idle = _work(experts, tl.program_id(1), tokens, TOP_K, BY_PAIR, BLOCK_T)
    if idle:
        return
    own = pair >= 0
    column, at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :], tl.arange(0, BLOCK_K)
    rows, weights = x + pair[:, None] * K + at[None, :], weight + expert * (K * N) + at[:, None] * N + column
    total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        row = tl.load(rows + start, mask=own[:, None], other=0.0)
        total = tl.dot(row, tl.load(weights + start * N, eviction_policy="evict_first"), total)
    total *= tl.load(shares + pair, mask=own, other=0.0)[:, None]
    tl.store(out + pair[:, None] * N + column, total, mask=own[:, None])


@triton.jit
def add(hidden, parts, width, hidden_row, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """hidden [T, H] += the sum over a token's pairs of parts [T, k, H] float32, in order."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        total += tl.load(parts + (token * TOP_K + place) * width + at, mask=inside, other=0.0)
    value = tl.load(hidden + token * hidden_row + at, mask=inside, other=0.0)
    tl.store(hidden + token * hidden_row + at, (value.to(tl.float32) + total).to(value.dtype), mask=inside)
