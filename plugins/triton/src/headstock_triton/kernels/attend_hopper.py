"""Attending in wide tiles of queries on Hopper, where one warp loads keys and two warpgroups of four multiply.

A warpgroup computes the weights of one tile of keys while tensor cores multiply those of the tile before by values, or
work for the other warpgroup. Compilers do not find this by themselves, so it is written in Gluon, where one says it.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headstock_triton import hopper
from headstock_triton.kernels.hopper import barrier, finite, load_box, log2, work
from headstock_triton.kernels.state import LN2

RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
KEYS = gl.constexpr(hopper.FORMS["attend_hopper"].keys)
"""Keys of a tile."""
STAGES = gl.constexpr(hopper.FORMS["attend_hopper"].stages)
"""Tiles of keys, and of values, in shared memory."""
HALF = gl.constexpr(hopper.HALF)
"""Elements of a row that lie together in shared memory: a tile is the left halves of its rows, then the right ones."""
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=4))
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def seen_as(buffer, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory as tiles of another shape."""
    if RENAMED:
        return buffer.reinterpret(buffer.dtype, shape, layout)
    else:  # noqa: RET505, or the compiler sees both
        return buffer._reinterpret(buffer.dtype, shape, layout)


@gluon.jit
def place(items, turn, total, BLOCK_M: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
          ORDERED: gl.constexpr):  # fmt: skip
    """A program's next unit of work: its keys low … high in `steps` tiles, of which the last `masked` need masks.

    Turns go forth and back over the programs, so that each has as many of the heavy units, which come first.
    """
    programs, program = gl.num_programs(0), gl.program_id(0)
    unit = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    inside = unit < total
    head, item = unit % KV_HEADS, gl.where(inside, unit // KV_HEADS, 0)
    row, tile, split, splits, first, count, low, high = work(items, item)
    real = inside & (row >= 0)
    begin, count = gl.where(real, tile * BLOCK_M, 0), gl.where(real, count, 0)
    low, high = gl.where(real, low, 0), gl.where(real, high, 0)

    prefix = high - count
    earliest, latest = begin // GROUP, gl.minimum((begin + BLOCK_M - 1) // GROUP, count - 1)
    if ORDERED:
        high = gl.minimum(high, prefix + latest + 1)
    span = gl.cdiv(gl.cdiv(gl.maximum(high - low, 0), KEYS), splits) * KEYS
    low += split * span
    high = gl.minimum(high, low + span)
    whole = gl.minimum(high, prefix + earliest + 1) if ORDERED else high
    steps = gl.cdiv(gl.maximum(high - low, 0), KEYS)
    masked = steps - gl.maximum(whole - low, 0) // KEYS
    return head, item, low, high, steps, masked, prefix, begin, first, count, splits


@gluon.jit
def fetch(cache, buffer, full, empty, step, n, pages, head, high, PAGE: gl.constexpr):
    """Loads the keys n … n + KEYS of a head into the stage of a step, once its readers have released it."""
    ROWS: gl.constexpr = min(PAGE, KEYS)
    stage = step % STAGES
    numbers = ()
    for r in gl.static_range(KEYS // ROWS):
        numbers = numbers + (gl.load(pages + n // PAGE + r, mask=n + r * ROWS < high, other=0),)  # noqa: RUF005
    slot = n % PAGE if PAGE > KEYS else 0  # tiles begin where pages do
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), KEYS * 2 * HALF * 2)
    pieces = seen_as(buffer, [STAGES * 2 * (KEYS // ROWS), 1, ROWS, 1, HALF], BOX)
    for r in gl.static_range(KEYS // ROWS):
        for half in gl.static_range(2):
            piece = pieces.index((stage * 2 + half) * (KEYS // ROWS) + r)
            load_box(cache, [numbers[r], slot, head, half * HALF], full.index(stage), piece)


@gluon.jit
def produce(k, v, k_buffer, v_buffer, k_full, k_empty, v_full, v_empty, pages, items, origins, total,
            BLOCK_M: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr,
            ORDERED: gl.constexpr):  # fmt: skip
    """Loads keys and values, those of a unit of work from the last tile, which needs masks, to the first."""
    done = 0
    for turn in range(gl.cdiv(total, gl.num_programs(0))):
        head, item, low, high, steps = place(items, turn, total, BLOCK_M, GROUP, KV_HEADS, ORDERED)[:5]
        table = pages + gl.load(origins + item)
        for t in range(steps):
            n = low + (steps - 1 - t) * KEYS
            fetch(k, k_buffer, k_full, k_empty, done + t, n, table, head, high, PAGE)
            fetch(v, v_buffer, v_full, v_empty, done + t, n, table, head, high, PAGE)
        done += steps


@gluon.jit
def blank(values, since):
    """Zeroes the rows of a tile of values from `since` on: they may be anything, and 0 · NaN is not 0.

    Both warpgroups do, and write the same.
    """
    ROWS: gl.constexpr = 16
    pieces = seen_as(values, [2 * (KEYS // ROWS), ROWS, HALF], TILE)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, NARROW))
    for r in range(since // ROWS, KEYS // ROWS):
        for half in gl.static_range(2):
            piece = pieces.index(half * (KEYS // ROWS) + r)
            x = piece.load(NARROW)
            piece.store(gl.where((r * ROWS + row < since)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    barrier()


@gluon.jit
def ask(q, mine, first, count, begin, head, q_token, q_head, GROUP: gl.constexpr):
    """The queries of a warpgroup into shared memory, where products read them."""
    m = begin + gl.arange(0, mine.shape[0], gl.SliceLayout(1, WIDE))
    d = gl.arange(0, mine.shape[1], gl.SliceLayout(0, WIDE))
    at = (first + m // GROUP).to(gl.int64) * q_token + (head * GROUP + m % GROUP) * q_head
    x = gl.load(q + at[:, None] + d[None, :], mask=(m < count * GROUP)[:, None], other=0.0)
    barrier()  # all products with the queries before are done
    mine.store(x)
    fence_async_shared()
    barrier()


@gluon.jit
def multiply(mine, buffer, step, S: gl.constexpr):
    """The products of queries and a tile of keys, on their way."""
    M: gl.constexpr = mine.shape[0]
    none = gl.zeros([M, KEYS], gl.float32, S)
    return warpgroup_mma(mine, buffer.index(step % STAGES).permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def release(empty, step):
    """Says that this warpgroup has read a stage, all of whose threads have waited for their products."""
    barrier()
    mbarrier.arrive(empty.index(step % STAGES))


@gluon.jit
def weigh(s, top, norm, scale, stand, n, high, MASKED: gl.constexpr, ORDERED: gl.constexpr, S: gl.constexpr):
    """Weights of the keys n … against the new maximum, and by how much that shrinks what was there."""
    if MASKED:
        j = n + gl.arange(0, KEYS, gl.SliceLayout(0, S))
        last = gl.minimum(stand, high - 1) if ORDERED else gl.zeros_like(stand) + (high - 1)
        s = gl.where(j[None, :] <= last[:, None], s, float("-inf"))
    new = gl.maximum(top, gl.max(s, 1))
    base = finite(new) if MASKED else new
    weights = gl.exp2(s * scale - (base * scale)[:, None])
    shrink = gl.exp2((top - base) * scale)
    return weights, shrink, new, norm * shrink + gl.sum(weights, 1)


@gluon.jit
def consume(
    q, q_buffer, k_buffer, v_buffer, k_full, k_empty, v_full, v_empty, items, total, scale, v_scale,
    out, lse, partial_out, partial_lse, q_token, q_head, out_token, out_head, lse_token, lse_head,
    PART: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, ROWS: gl.constexpr,
    ORDERED: gl.constexpr, LSE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """One warpgroup: half of each tile's (token, head) pairs against all keys."""
    M: gl.constexpr = q_buffer.shape[1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * HALF, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, R, 2)
    mine = q_buffer.index(PART)
    done = 0  # steps, of all units before
    for turn in range(gl.cdiv(total, gl.num_programs(0))):
        head, item, low, high, steps, masked, prefix, begin, first, count, splits = place(
            items, turn, total, 2 * M, GROUP, KV_HEADS, ORDERED
        )
        begin += PART * M
        ask(q, mine, first, count, begin, head, q_token, q_head, GROUP)
        stand = prefix + (begin + gl.arange(0, M, gl.SliceLayout(1, S))) // GROUP
        top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        norm = gl.zeros([M], gl.float32, gl.SliceLayout(1, S))
        acc = gl.zeros([M, 2 * HALF], gl.float32, R)
        if steps > 0:
            n = low + (steps - 1) * KEYS
            mbarrier.wait(k_full.index(done % STAGES), done // STAGES & 1)
            s = warpgroup_mma_wait(0, deps=[multiply(mine, k_buffer, done, S)])
            release(k_empty, done)
            weights, shrink, top, norm = weigh(s, top, norm, scale, stand, n, high, True, ORDERED, S)
            p = gl.convert_layout(weights.to(q_buffer.dtype), P)
            if n + KEYS > high:
                mbarrier.wait(v_full.index(done % STAGES), done // STAGES & 1)
                blank(v_buffer.index(done % STAGES), high - n)
            mbarrier.wait(k_full.index((done + 1) % STAGES), (done + 1) // STAGES & 1, pred=steps > 1)
            for stretch in gl.static_range(2):  # with masks, and without
                since = 1 if stretch == 0 else gl.maximum(masked, 1)
                until = masked if stretch == 0 else steps
                for t in range(since, until):
                    n = low + (steps - 1 - t) * KEYS
                    now, before, after = done + t, done + t - 1, done + t + 1
                    scores = multiply(mine, k_buffer, now, S)
                    mbarrier.wait(v_full.index(before % STAGES), before // STAGES & 1)
                    going = warpgroup_mma(p, v_buffer.index(before % STAGES), acc, is_async=True)
                    s = warpgroup_mma_wait(1, deps=[scores])
                    release(k_empty, now)
                    weights, shrink, top, norm = weigh(s, top, norm, scale, stand, n, high, stretch == 0, ORDERED, S)
                    p_next = gl.convert_layout(weights.to(q_buffer.dtype), P)
                    # No weights are moved past the branch of this wait: they are computed while values are multiplied,
                    # where otherwise the assembler leaves them for after the wait for those.
                    mbarrier.wait(k_full.index(after % STAGES), after // STAGES & 1, pred=t + 1 < steps)
                    acc, p = warpgroup_mma_wait(0, deps=[going, p])
                    release(v_empty, before)
                    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, R))[:, None]
                    p = p_next
            done += steps
            last = done - 1
            mbarrier.wait(v_full.index(last % STAGES), last // STAGES & 1)
            going = warpgroup_mma(p, v_buffer.index(last % STAGES), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[going, p])
            release(v_empty, last)

        divisor = gl.where(norm > 0, norm, 1.0)
        state = finite(top) * scale + log2(norm)
        state = gl.convert_layout(state, gl.SliceLayout(1, WIDE))
        acc = acc * gl.convert_layout(v_scale / divisor, gl.SliceLayout(1, R))[:, None]
        m = begin + gl.arange(0, M, gl.SliceLayout(1, WIDE))
        if SPLIT and splits > 1:
            keep(acc, state, item * KV_HEADS + head, PART * M, m < count * GROUP, partial_out, partial_lse, ROWS)
        else:
            token, heads, real = (first + m // GROUP).to(gl.int64), head * GROUP + m % GROUP, m < count * GROUP
            d = gl.arange(0, 2 * HALF, gl.SliceLayout(0, WIDE))
            at = (token * out_token + heads * out_head)[:, None] + d[None, :]
            gl.store(out + at, gl.convert_layout(acc.to(out.dtype.element_ty), WIDE), mask=real[:, None])
            if LSE:
                gl.store(lse + token * lse_token + heads * lse_head, state * LN2, mask=real)


@gluon.jit
def keep(acc, state, unit, begin, real, partial_out, partial_lse, ROWS: gl.constexpr):
    """The state of a split, from row `begin` of its tile on, for `merge`."""
    r = begin + gl.arange(0, acc.shape[0], gl.SliceLayout(1, WIDE))
    d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, WIDE))
    row, kept = unit.to(gl.int64) * ROWS + r, real & (r < ROWS)
    gl.store(partial_lse + row, state, mask=kept)
    at = (row * acc.shape[1])[:, None] + d[None, :]
    gl.store(partial_out + at, gl.convert_layout(acc, WIDE), mask=kept[:, None])


@gluon.jit(do_not_specialize=["total"])
def attend_hopper(
    q, k, v, pages, items, origins, out, lse, partial_out, partial_lse, total, scale, v_scale,
    q_token, q_head, out_token, out_head, lse_token, lse_head,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
    ORDERED: gl.constexpr, LSE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """`attend` over pages of 16-bit keys and values of 128 elements, and nothing that is optional.

    k and v are descriptors of [pages, page, Hkv, 128], in boxes of one half of a head's keys in a page, KEYS at most.

    A unit of work is a key head of an item, heads fastest; programs share all `total` of them, so that a program loads
    the keys of its next unit while it finishes one. The default warps and a worker's four take 64 (token, head) pairs
    of the tile each, and the one warp of another worker loads.
    """
    gl.static_assert(BLOCK_M == 128)
    DTYPE: gl.constexpr = q.dtype.element_ty
    ONE: gl.constexpr = mbarrier.MBarrierLayout()
    q_buffer = gl.allocate_shared_memory(DTYPE, [2, BLOCK_M // 2, 2 * HALF], TILE)
    k_buffer = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, 2 * HALF], TILE)
    v_buffer = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, 2 * HALF], TILE)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (q, q_buffer, k_buffer, v_buffer, k_full, k_empty, v_full, v_empty, items, total, scale, v_scale,
                       out, lse, partial_out, partial_lse, q_token, q_head, out_token, out_head, lse_token, lse_head,
                       0, GROUP, KV_HEADS, ROWS, ORDERED, LSE, SPLIT)),
            (consume, (q, q_buffer, k_buffer, v_buffer, k_full, k_empty, v_full, v_empty, items, total, scale, v_scale,
                       out, lse, partial_out, partial_lse, q_token, q_head, out_token, out_head, lse_token, lse_head,
                       1, GROUP, KV_HEADS, ROWS, ORDERED, LSE, SPLIT)),
            (produce, (k, v, k_buffer, v_buffer, k_full, k_empty, v_full, v_empty, pages, items, origins, total,
                       BLOCK_M, GROUP, KV_HEADS, PAGE, ORDERED)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
