"""Attending to latents: MLA in its absorbed form, where a tile of keys is loaded once and serves as values too."""
# mypy: ignore-errors

import triton
import triton.language as tl

from headstock_triton.kernels.state import ABSENT, conclude, finite, log2, work


@triton.jit
def latent(
    q, cache, pages, items, origins, mask, mask_indptr, sinks,
    out, lse, carried_out, carried_lse, partial_out, partial_lse,
    scale, v_scale,
    q_token, q_head, page_stride, slot_stride, out_token, out_head, lse_token, lse_head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, V_HEAD_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_P: tl.constexpr, ROWS: tl.constexpr,
    WITHIN: tl.constexpr, ORDERED: tl.constexpr, TREE: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, CARRY: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program per work item (see `schedule`); rows, tiles, splits and masks are those of `attend`.

    A query and a key are V_HEAD_DIM elements of latent and ROPE_DIM of rope, which count for scores alone. All GROUP
    query heads share the one key, so that heads fill a tile even where there is one token. cache [pages, PAGE, …]
    holds key j of an item in page pages[origin + j // PAGE]; WITHIN: no tile of keys leaves its page. `scale` is of
    base 2.
    """
    item = tl.program_id(0)
    row, tile, split, splits, first, count, low, high = work(items, item)
    origin = tl.load(origins + item)
    if (row < 0) & (origin == ABSENT):  # either would do, but then the other's load would come after the branch
        return

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    i, head = m // GROUP, m % GROUP
    real, token = i < count, first + i
    r, p, offsets = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    at = token.to(tl.int64) * q_token + head * q_head
    content = tl.load(q + at[:, None] + r[None, :], mask=real[:, None] & (r < V_HEAD_DIM)[None, :], other=0.0)
    at += V_HEAD_DIM
    rope = tl.load(q + at[:, None] + p[None, :], mask=real[:, None] & (p < ROPE_DIM)[None, :], other=0.0)

    prefix = high - count
    whole = high  # keys before this one are seen by the whole tile
    if TREE:
        area = tl.load(mask_indptr + row)
        whole = tl.minimum(high, prefix)
    elif ORDERED:
        whole = tl.minimum(high, prefix + tile * BLOCK_M // GROUP + 1)
        high = tl.minimum(high, prefix + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, count - 1) + 1)
    span = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BLOCK_N), splits) * BLOCK_N
    low += split * span
    high = tl.minimum(high, low + span)
    whole = tl.minimum(whole, high)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for n in range(low, high, BLOCK_N):
        j = n + offsets
        inside = j < high
        if WITHIN:
            page = tl.load(pages + origin + n // PAGE).to(tl.int64)
            slot = page * page_stride + (n % PAGE + offsets) * slot_stride
        else:
            page = tl.load(pages + origin + j // PAGE, mask=inside, other=0).to(tl.int64)
            slot = page * page_stride + j % PAGE * slot_stride
        key = tl.load(cache + slot[:, None] + r[None, :], mask=inside[:, None] & (r < V_HEAD_DIM)[None, :], other=0.0)
        slot += V_HEAD_DIM
        turned = tl.load(cache + slot[:, None] + p[None, :], mask=inside[:, None] & (p < ROPE_DIM)[None, :], other=0.0)
        key = key.to(content.dtype)
        # Scaled before they are added, and masked in a branch: so the compiler does not see that one product feeds the
        # next, for which it would put all warps along the rows, where a tile of 64 has work for half of them.
        s = tl.dot(content, tl.trans(key), input_precision="tf32x3") * scale
        s += tl.dot(rope, tl.trans(turned.to(content.dtype)), input_precision="tf32x3") * scale
        if n + BLOCK_N > whole:
            seen = inside[None, :] & real[:, None]
            if TREE:
                asked = seen & (j >= prefix)[None, :]
                bit = tl.load(mask + area + i[:, None] * count + (j - prefix)[None, :], mask=asked, other=0)
                seen = seen & ((j < prefix)[None, :] | (bit != 0))
            elif ORDERED:
                seen = seen & (j[None, :] <= (prefix + i)[:, None])
            s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        base = finite(new_top)
        shrink, weights = tl.exp2(top - base), tl.exp2(s - base[:, None])
        norm = norm * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(key.dtype), key, acc * shrink[:, None], input_precision="tf32x3")
        top = new_top

    acc = acc * (v_scale / tl.where(norm > 0, norm, 1.0))[:, None]
    total = finite(top) + log2(norm)
    conclude(
        acc, total, item, split, splits, tile, first, count, 0, None,
        partial_out, partial_lse, sinks, carried_out, carried_lse, out, lse,
        out_token, out_head, lse_token, lse_head,
        GROUP, KV_HEADS, V_HEAD_DIM, BLOCK_M, ROWS, BLOCK_V, 1, 1, CARRY, SINKS, LSE, SPLIT,
    )  # fmt: skip
