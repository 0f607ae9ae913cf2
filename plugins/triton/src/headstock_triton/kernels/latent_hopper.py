"""Attending to latents on Hopper: tensor cores are fed by hand, while the next tiles of keys are on their way."""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headstock_triton.kernels.hopper import barrier, finite, load_box, log2, work
from headstock_triton.kernels.state import ABSENT, LN2, LOG2E


@gluon.jit
def line_of(pages, n, high, page_rows, PAGE: gl.constexpr):
    """The row of the descriptors where the tile of key n begins."""
    return gl.load(pages + n // PAGE, mask=n < high, other=0) * page_rows + n % PAGE


@gluon.jit
def fetch(keys, ropes, content, rope, ready, tile, line, BYTES: gl.constexpr, pred):
    """Starts the load of a tile of keys, from row `line` of the descriptors on, into its buffer."""
    bar = ready.index(tile % 2)
    mbarrier.expect(bar, BYTES, pred=pred)
    load_box(keys, [line, 0], bar, content.index(tile % 2), pred=pred)
    load_box(ropes, [line, keys.block_type.shape[1]], bar, rope.index(tile % 2), pred=pred)


@gluon.jit
def score(q_content, q_rope, content, rope, tile, S: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """The products of queries and a tile of keys, under way."""
    none = gl.zeros([M, N], gl.float32, S)
    s = warpgroup_mma(q_content, content.index(tile % 2).permute([1, 0]), none, use_acc=False, is_async=True)
    return warpgroup_mma(q_rope, rope.index(tile % 2).permute([1, 0]), s, is_async=True)


@gluon.jit
def masked(s, n, i, real, high, prefix, S: gl.constexpr, N: gl.constexpr, ORDERED: gl.constexpr):
    """Scores of keys n … n + N, −inf where they are not seen."""
    j = n + gl.arange(0, N, gl.SliceLayout(0, S))
    seen = (j < high)[None, :] & real[:, None]
    if ORDERED:
        seen = seen & (j[None, :] <= (prefix + i)[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def weigh(s, top, acc, tops, weights, S: gl.constexpr, OUT: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """Weights of scores into shared memory, and outputs made smaller by what a greater maximum asks for.

    Each of two warp groups has half of the keys; they tell each other their maxima, at the cost of one barrier, where a
    reduction over all warps would have three.
    """
    tops.store(gl.max(gl.reshape(s, [M, 2, N // 2]), 2))
    barrier()
    new = gl.maximum(top, gl.max(tops.load(S), 1))
    base = finite(new)
    shrink, p = gl.exp2(top - base), gl.exp2(s - base[:, None])
    weights.store(p.to(weights.dtype))
    fence_async_shared()
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    barrier()
    return new, acc, p, shrink


@gluon.jit
def latent_hopper(
    q, keys, ropes, pages, items, origins, sinks,
    out, lse, carried_out, carried_lse, partial_out, partial_lse,
    scale, v_scale, page_rows,
    q_token, q_head, out_token, out_head, lse_token, lse_head,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, V_HEAD_DIM: gl.constexpr, ROPE_DIM: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr, ORDERED: gl.constexpr,
    SINKS: gl.constexpr, LSE: gl.constexpr, CARRY: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """`latent` without trees, for 16-bit latents of 512 and rope of 64, pages of whole tiles, and 64 pairs a tile.

    keys and ropes are descriptors of the cache as a matrix whose row page · page_rows + slot is a key, in blocks of
    BLOCK_N by V_HEAD_DIM and by ROPE_DIM. Two tiles fit in shared memory, and are keys and values at once. While a
    tile's products with its weights and the next tile's with the queries are under way, the one after takes the place
    of the first. Eight warps: a group of four has half of a tile's scores, and then half of all outputs' columns.
    """
    item = gl.program_id(0)
    row, tile, split, splits, first, count, low, high = work(items, item)
    origin = gl.load(origins + item)
    if (row < 0) & (origin == ABSENT):  # either would do, but then the other's load would come after the branch
        return
    pages += origin

    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    shared: gl.constexpr = keys.layout
    dtype: gl.constexpr = keys.dtype
    BYTES: gl.constexpr = BLOCK_N * (V_HEAD_DIM + ROPE_DIM) * 2

    prefix = high - count
    whole = high  # keys before this one are seen by the whole tile
    if ORDERED:
        whole = gl.minimum(high, prefix + tile * BLOCK_M // GROUP + 1)
        high = gl.minimum(high, prefix + gl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, count - 1) + 1)
    span = gl.cdiv(gl.cdiv(gl.maximum(high - low, 0), BLOCK_N), splits) * BLOCK_N
    low += split * span
    high = gl.minimum(high, low + span)
    tiles = gl.maximum(gl.cdiv(high - low, BLOCK_N), 1)  # where there are no keys, one whose keys are masked

    # loads that do not wait for each other, all of them before the first barrier
    line = line_of(pages, low, high, page_rows, PAGE)
    next_line = line_of(pages, low + BLOCK_N, high, page_rows, PAGE)
    ahead = line_of(pages, low + 2 * BLOCK_N, high, page_rows, PAGE)
    m = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, wide))
    place = (first + m // GROUP).to(gl.int64) * q_token + m % GROUP * q_head
    r = gl.arange(0, V_HEAD_DIM, gl.SliceLayout(0, wide))
    x = gl.load(q + place[:, None] + r[None, :], mask=(m // GROUP < count)[:, None], other=0.0)
    m = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, narrow))
    place = (first + m // GROUP).to(gl.int64) * q_token + m % GROUP * q_head
    r = V_HEAD_DIM + gl.arange(0, ROPE_DIM, gl.SliceLayout(0, narrow))
    y = gl.load(q + place[:, None] + r[None, :], mask=(m // GROUP < count)[:, None], other=0.0)

    content = gl.allocate_shared_memory(dtype, [2, BLOCK_N, V_HEAD_DIM], shared)
    rope = gl.allocate_shared_memory(dtype, [2, BLOCK_N, ROPE_DIM], shared)
    weights = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], shared)
    tops = gl.allocate_shared_memory(gl.float32, [BLOCK_M, 2], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    mbarrier.init(ready.index(1), count=1)
    fence_async_shared()
    barrier()
    fetch(keys, ropes, content, rope, ready, 0, line, BYTES, True)
    fetch(keys, ropes, content, rope, ready, 1, next_line, BYTES, tiles > 1)
    q_content = gl.allocate_shared_memory(dtype, [BLOCK_M, V_HEAD_DIM], shared, x)
    q_rope = gl.allocate_shared_memory(dtype, [BLOCK_M, ROPE_DIM], shared, y)
    fence_async_shared()
    barrier()

    m = tile * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, S))
    i, real = m // GROUP, m // GROUP < count
    top = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    sums = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S)  # of every thread for itself, added up at the end
    acc = gl.zeros([BLOCK_M, V_HEAD_DIM], gl.float32, OUT)
    mbarrier.wait(ready.index(0), 0)
    s = warpgroup_mma_wait(0, [score(q_content, q_rope, content, rope, 0, S, BLOCK_M, BLOCK_N)])
    for t in range(tiles - 1):
        n = low + t * BLOCK_N
        s = s * scale
        if ORDERED:  # noqa: SIM102, and no key of this tile is past the last
            if n + BLOCK_N > whole:
                s = masked(s, n, i, real, high, prefix, S, BLOCK_N, ORDERED)
        top, acc, p, shrink = weigh(s, top, acc, tops, weights, S, OUT, BLOCK_M, BLOCK_N)
        going = warpgroup_mma(weights, content.index(t % 2), acc, is_async=True)
        sums = sums * shrink[:, None] + p
        mbarrier.wait(ready.index((t + 1) % 2), ((t + 1) // 2) & 1)
        scores = score(q_content, q_rope, content, rope, t + 1, S, BLOCK_M, BLOCK_N)
        acc = warpgroup_mma_wait(2, [going])  # all but the two products of the scores
        barrier()  # both groups have read the buffer
        fetch(keys, ropes, content, rope, ready, t, ahead, BYTES, t + 2 < tiles)
        ahead = line_of(pages, n + 3 * BLOCK_N, high, page_rows, PAGE)
        s = warpgroup_mma_wait(0, [scores])

    last = (tiles - 1) % 2
    n = low + (tiles - 1) * BLOCK_N
    s = masked(s * scale, n, i, real, high, prefix, S, BLOCK_N, ORDERED)
    if n + BLOCK_N > high:  # what lies past the end may be anything, NaN too, which a weight of 0 does not undo
        j = n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, narrow))
        for c in gl.static_range(V_HEAD_DIM // 64):
            part = content.index(last).slice(c * 64, 64, dim=1)
            part.store(gl.where((j < high)[:, None], part.load(narrow), 0.0))
    top, acc, p, shrink = weigh(s, top, acc, tops, weights, S, OUT, BLOCK_M, BLOCK_N)
    going = warpgroup_mma(weights, content.index(last), acc, is_async=True)
    sums = sums * shrink[:, None] + p
    acc = warpgroup_mma_wait(0, [going])
    mbarrier.invalidate(ready.index(0))
    mbarrier.invalidate(ready.index(1))

    norm = gl.sum(sums, 1)
    total = gl.convert_layout(finite(top) + log2(norm), gl.SliceLayout(1, OUT))
    acc = acc * gl.convert_layout(v_scale / gl.where(norm > 0, norm, 1.0), gl.SliceLayout(1, OUT))[:, None]
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT))
    d = gl.arange(0, V_HEAD_DIM, gl.SliceLayout(0, OUT))
    m = tile * BLOCK_M + rows
    real = m // GROUP < count
    if SPLIT:  # noqa: SIM102, not compiled where nothing is split
        if splits > 1:
            kept = real & (rows < ROWS)
            partial = item.to(gl.int64) * ROWS + rows
            gl.store(partial_lse + partial, total, mask=kept)
            gl.store(partial_out + partial[:, None] * V_HEAD_DIM + d[None, :], acc, mask=kept[:, None])
            return
    finish(
        acc, total, (first + m // GROUP).to(gl.int64), m % GROUP, real, d, sinks, carried_out, carried_lse, out, lse,
        out_token, out_head, lse_token, lse_head, GROUP * KV_HEADS, V_HEAD_DIM, CARRY, SINKS, LSE,
    )  # fmt: skip


@gluon.jit
def finish(
    acc, total, token, head, real, d, sinks, carried_out, carried_lse, out, lse,
    out_token, out_head, lse_token, lse_head,
    HEADS: gl.constexpr, V_HEAD_DIM: gl.constexpr, CARRY: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """`state.finish`, for columns d."""
    if CARRY:
        at = token * HEADS + head
        before = gl.load(carried_lse + at, mask=real, other=float("-inf")) * LOG2E
        base = finite(gl.maximum(total, before))
        mine, theirs = gl.exp2(total - base), gl.exp2(before - base)
        norm = gl.where(mine + theirs > 0, mine + theirs, 1.0)
        other = gl.load(carried_out + at[:, None] * V_HEAD_DIM + d[None, :], mask=real[:, None], other=0.0)
        acc = acc * (mine / norm)[:, None] + other * (theirs / norm)[:, None]
        total = base + log2(mine + theirs)
        barrier()  # several threads may have loaded what one of them now stores in its place
    if SINKS:  # a row without keys stays empty, sink or not
        sink = gl.load(sinks + head, mask=real, other=0.0) * LOG2E
        base = gl.maximum(total, sink)
        weight = gl.exp2(total - base)
        norm = weight + gl.exp2(sink - base)
        acc = acc * (weight / norm)[:, None]
        total = gl.where(total == float("-inf"), total, base + gl.log2(norm))
    at = token[:, None] * out_token + head[:, None] * out_head + d[None, :]
    gl.store(out + at, acc.to(out.dtype.element_ty), mask=real[:, None])
    if LSE:
        gl.store(lse + token * lse_token + head * lse_head, total * LN2, mask=real)
