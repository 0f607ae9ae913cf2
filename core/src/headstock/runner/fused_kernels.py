"""Triton kernels of what a decode step does beside its layers: the refresh of its batch, and the greedy token."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def fetch(written, inputs, mirror, count, start, rows, BLOCK: tl.constexpr):
    """inputs [count] = written, which may be pinned memory of the host, and mirror[places] = numbers.

    Places are the `rows` entries from `start` on, their numbers as many after them.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(written + at, mask=inside, other=0, volatile=True)
    tl.store(inputs + at, value, mask=inside)
    if mirror is not None:
        places = (at >= start) & (at < start + rows)
        number = tl.load(written + at + rows, mask=places, other=0, volatile=True)
        tl.store(mirror + value, number.to(tl.int32), mask=places)


@triton.jit
def _pages(table, of, place, inside):
    """The page at a place of the table, in the window's own cache if it has one."""
    page = tl.load(table + place, mask=inside, other=0)
    if of is not None:
        page = tl.load(of + page, mask=inside, other=0)
    return page


@triton.jit
def derive(
    slots, lens, table, of, page_table, seq_lens, positions, out_cache_loc, table_width, width,
    WINDOW: tl.constexpr, N: tl.constexpr, NEW: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's pages [B, width], and its length, positions and cache slots, from its slot and its length [B].

    The row's N new tokens are its last. With `of`, a table of the window's own pages, the row begins with the first
    page that they can see.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lens + row)
    keys, begin = length, tl.load(slots + row) * table_width
    if of is not None:
        first = tl.maximum(length - (N + WINDOW - 1), 0) // PAGE
        keys, begin = length - first * PAGE, begin + first
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    page = _pages(table, of, begin + column, inside & (column * PAGE < keys))
    tl.store(page_table + row * width + column, page, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(seq_lens + row, keys.to(tl.int32))
        new = tl.arange(0, NEW)
        real = new < N
        tl.store(positions + row * N + new, length - N + new, mask=real)
        place = keys - N + new
        where = _pages(table, of, begin + place // PAGE, real).to(tl.int64)
        tl.store(out_cache_loc + row * N + new, where * PAGE + place % PAGE, mask=real)


@triton.jit
def peaks(logits, kept, peaks, places, size, row_stride, kept_stride, BLOCK: tl.constexpr):
    """The greatest logit of each part of a row, float32 [R, parts], and the first place [R, parts] where it stands.

    NaN counts as +inf: either makes a row fail. `kept`, if given, takes a copy of the logits.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * row_stride + at, mask=at < size, other=-float("inf"))
    if kept is not None:
        tl.store(kept + row * kept_stride + at, value, mask=at < size)
    wide = value.to(tl.float32)
    peak, place = tl.max(tl.where(wide != wide, float("inf"), wide), 0, return_indices=True)
    into = row * tl.num_programs(1) + part
    tl.store(peaks + into, peak)
    tl.store(places + into, part * BLOCK + place)


@triton.jit
def greatest(peaks, places, tokens, failed, parts, BLOCK: tl.constexpr):
    """The first place of the greatest of a row's parts, and whether that is no number to go by."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(peaks + row * parts + at, mask=at < parts, other=-float("inf"))
    place = tl.load(places + row * parts + at, mask=at < parts, other=0)
    peak, part = tl.max(value, 0, return_indices=True)
    tl.store(tokens + row, tl.sum(tl.where(at == part, place, 0), 0))
    tl.store(failed + row, tl.abs(peak) == float("inf"))
