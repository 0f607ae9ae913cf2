"""Attending: a tile of queries against a run of keys, paged or given, for every phase and feature."""
# mypy: ignore-errors

import triton
import triton.language as tl

from headstock_triton.kernels.state import ABSENT, LOG2E, conclude, finite, log2, work


@triton.jit
def tanh(x):
    """By a power that cannot overflow; the absolute error is that of float32."""
    small = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def unsigned(j):
    """Indices of keys, none of them negative, as numbers whose division by a page's size is a shift and no more."""
    return j.to(tl.uint32, bitcast=True)


@triton.jit
def attend(
    q, k, v, pages, items, origins, positions, mask, mask_indptr, slopes, sinks,
    out, lse, carried_out, carried_lse, partial_out, partial_lse, counters,
    scale, cap, v_scale,
    q_token, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, out_token, out_head, lse_token, lse_head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
    ORDERED: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr, SHARED: tl.constexpr,
    CAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, CARRY: tl.constexpr,
    SPLIT: tl.constexpr, PEEL: tl.constexpr, AHEAD: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program per key head and work item (see `schedule`).

    An item's row has `count` tokens from `first` on, the last of its keys, and sees keys low … high at most; key j lies
    in page pages[origin + j // PAGE], or, where PAGE is 0, in row origin + j of the keys given; no v_page and v_slot:
    values lie as keys do, and each address is computed once. A tile is BLOCK_M (token, head of the group) pairs, heads
    fastest, so that the heads that share a key head share its loads and fill the matrix units; a decode step has a few
    tokens, an extend step many, and nothing else is different.

    ORDERED: no query sees a later key. TREE: `mask` says who sees whom among new tokens, and distances are those of
    positions. SHARED: the part is a shared prefix, all of it seen by all. `scale` and `cap` are of base 2: the logit
    is scale · qk, or cap · tanh(scale · qk) with CAP. AHEAD: page numbers are loaded one block of keys ahead, so that a
    load of keys waits for none. What becomes of a tile, split or not, `conclude` says.
    """
    head, item = tl.program_id(0), tl.program_id(1)
    row, tile, split, splits, first, count, low, high = work(items, item)
    origin = tl.load(origins + item)
    if (row < 0) & (origin == ABSENT):  # either would do, but then the other's load would come after the branch
        return

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    i = m // GROUP
    real = i < count
    token, q_heads = first + i, head * GROUP + m % GROUP
    d, dv, offsets = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_N)

    # Where queries stand, in key indices; which keys the tile sees at all, [low, high), and which all of it sees.
    prefix = high - count
    earliest, latest = tile * BLOCK_M // GROUP, tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, count - 1)
    stand = prefix + i
    shift = 0
    if SHARED and ALIBI:
        stand = tl.load(positions + token, mask=real, other=0).to(tl.int32)
    if TREE:
        shift = tl.load(positions + first).to(tl.int32) - prefix
        stand = tl.load(positions + token, mask=real, other=0).to(tl.int32) - shift
        area = tl.load(mask_indptr + row)
    if ORDERED and not TREE:
        high = tl.minimum(high, prefix + latest + 1)
    if WINDOW > 0:
        low = tl.maximum(low, prefix - WINDOW + 1 + (0 if TREE else earliest))
    span = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BLOCK_N), splits) * BLOCK_N
    low += split * span
    high = tl.minimum(high, low + span)
    whole_low, whole_high = low, high
    if PEEL:
        if WINDOW > 0:
            whole_low += tl.cdiv(tl.maximum(prefix + latest - WINDOW + 1 - low, 0), BLOCK_N) * BLOCK_N
        if TREE:
            whole_high = tl.minimum(high, prefix)
        elif ORDERED:
            whole_high = tl.minimum(high, prefix + earliest + 1)
        whole_high = whole_low + tl.maximum(whole_high - whole_low, 0) // BLOCK_N * BLOCK_N

    if AHEAD:  # before the queries, whose way into shared memory all that follows waits for
        page = tl.load(pages + origin + unsigned(low + offsets) // PAGE, mask=low + offsets < high, other=0)
    at = token.to(tl.int64)[:, None] * q_token + q_heads[:, None] * q_head + d[None, :]
    queried = tl.load(q + at, mask=real[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    if ALIBI:
        slope = tl.load(slopes + q_heads, mask=real, other=0.0) * LOG2E
    k += head.to(tl.int64) * k_head
    v += head.to(tl.int64) * v_head
    # Plain logits are scaled where they are raised, by the multiplication that the subtraction brings along.
    factor = 1.0 if CAP or ALIBI else scale
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # A narrow tile sums its weights at the end, which spares a meeting of all warps for each block of keys.
    norm = tl.zeros([BLOCK_M] if PEEL else [BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    # Stretch 1 is what all queries see whole; others are masked. Only a window makes the first. It is left out, not
    # left empty: there the compiler waits for products that nobody began, at which Triton 3.6's ptxas crashes.
    for stretch in tl.static_range(1 if PEEL and WINDOW == 0 else 0, 3 if PEEL else 1):
        begin, end = low, high
        if PEEL:
            if stretch == 0:
                end = tl.minimum(whole_low, high)
            elif stretch == 1:
                begin, end = whole_low, whole_high
            else:
                begin = whole_high
        for n in range(begin, end, BLOCK_N):
            j = n + offsets
            inside = j < high
            if PAGE == 0:
                here, slot = tl.zeros_like(j), origin + j
            else:
                if AHEAD:
                    here = page.to(tl.int64)
                    page = tl.load(pages + origin + unsigned(j + BLOCK_N) // PAGE, mask=j + BLOCK_N < high, other=0)
                elif stretch != 1:
                    here = tl.load(pages + origin + unsigned(j) // PAGE, mask=inside, other=0).to(tl.int64)
                else:
                    here = tl.load(pages + origin + unsigned(j) // PAGE).to(tl.int64)
                slot = (unsigned(j) % PAGE).to(tl.int32)
            at_k = here * k_page + slot * k_slot
            at_v = at_k if v_slot is None else here * v_page + slot * v_slot
            if stretch != 1 or HEAD_DIM != BLOCK_D:
                found = inside[:, None] & (d < HEAD_DIM)[None, :]
                keys = tl.load(k + at_k[:, None] + d[None, :], mask=found, other=0.0)
            else:
                keys = tl.load(k + at_k[:, None] + d[None, :])
            s = tl.dot(queried, tl.trans(keys.to(queried.dtype)), input_precision="tf32x3")
            if CAP:
                s = cap * tanh(s * scale)
            elif ALIBI:
                s *= scale
            key_stand = j
            if TREE:
                new = inside & (j >= prefix)
                key_stand = tl.where(
                    j < prefix, j, tl.load(positions + first + j - prefix, mask=new, other=0).to(tl.int32) - shift
                )
            if ALIBI:
                s -= slope[:, None] * (stand[:, None] - key_stand[None, :]).to(tl.float32)
            if stretch != 1:
                seen = inside[None, :] & real[:, None]
                if TREE:
                    asked = new[None, :] & real[:, None]
                    bit = tl.load(mask + area + i[:, None] * count + (j - prefix)[None, :], mask=asked, other=0)
                    seen = seen & ((j < prefix)[None, :] | (bit != 0))
                elif ORDERED:
                    seen = seen & (key_stand[None, :] <= stand[:, None])
                if WINDOW > 0:
                    seen = seen & (stand[:, None] - key_stand[None, :] < WINDOW)
                s = tl.where(seen, s, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            base = finite(new_top) if stretch != 1 else new_top
            shrink, weights = tl.exp2((top - base) * factor), tl.exp2(s * factor - (base * factor)[:, None])
            norm = norm * shrink + tl.sum(weights, 1) if PEEL else norm * shrink[:, None] + weights
            if stretch != 1 or V_HEAD_DIM != BLOCK_V:
                found = inside[:, None] & (dv < V_HEAD_DIM)[None, :]
                values = tl.load(v + at_v[:, None] + dv[None, :], mask=found, other=0.0)
            else:
                values = tl.load(v + at_v[:, None] + dv[None, :])
            values = values.to(queried.dtype)
            acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="tf32x3")
            top = new_top

    if not PEEL:
        norm = tl.sum(norm, 1)
    acc = acc * (v_scale / tl.where(norm > 0, norm, 1.0))[:, None]
    total = finite(top) * factor + log2(norm)
    conclude(
        acc, total, item, split, splits, tile, first, count, head, counters,
        partial_out, partial_lse, sinks, carried_out, carried_lse, out, lse,
        out_token, out_head, lse_token, lse_head,
        GROUP, KV_HEADS, V_HEAD_DIM, BLOCK_M, ROWS, BLOCK_V, BLOCK_R, BLOCK_S, CARRY, SINKS, LSE, SPLIT,
    )  # fmt: skip
