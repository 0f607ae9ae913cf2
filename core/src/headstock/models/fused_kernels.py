"""Triton kernels of a decoder layer, a row or a few heads of one token per program; all arithmetic is float32."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def norm(x, delta, weight, out, eps, width, x_row, delta_part, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, H] = rms_norm(x) × weight, after x += the sum of delta [PARTS, T, H]. delta and out may be one tensor."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_row + at, mask=inside, other=0.0)
    if PARTS:
        added = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            added += tl.load(delta + part * delta_part + row * width + at, mask=inside, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) + added).to(value.dtype)  # what the next layer reads is what is normalised
        tl.store(x + row * x_row + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / width + eps)
    tl.store(out + row * width + at, (wide * scale * factor).to(value.dtype), mask=inside)


@triton.jit
def product(
    x, weight, out, tokens, x_row, K: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """out [PARTS, T, N] = x [T, K] · weight [N, K]ᵀ, each part the sum over its share of K; T ≤ BLOCK_T.

    With GATED, of one part, the weight is [2 N, K], the gates first, and out is silu(gate) × up. What is multiplied is
    weight · xᵀ, as Hopper's products take 64 rows of what comes first, but as few as 8 columns of what comes second.
    """
    part = tl.program_id(1)
    share: tl.constexpr = K // PARTS
    token = tl.arange(0, BLOCK_T)[:, None]
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = part * share + tl.arange(0, BLOCK_K)[None, :]
    rows, weights = x + token * x_row + at, weight + row[:, None].to(tl.int64) * K + at
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = total
    for start in range(0, share, BLOCK_K):
        columns = tl.load(rows + start, mask=token < tokens, other=0.0).T
        total = tl.dot(tl.load(weights + start, eviction_policy="evict_first"), columns, total)
        if GATED:
            up = tl.dot(tl.load(weights + N * K + start, eviction_policy="evict_first"), columns, up)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up
    place = out + (part * tokens + token) * N + row[None, :]
    tl.store(place, total.T.to(out.dtype.element_ty), mask=token < tokens)


@triton.jit
def rotate(
    heads, cos, sin, norm, eps, count, token_stride, head_stride, table_row,
    DIM: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """heads [T, H, D] in place: normalised by `norm` [H, D] if it is given, then rotated, element i with i ± D/2.

    The tables cos and sin [T, D] carry the sign of the sine, − in the left half.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    at = tl.arange(0, HALF)[None, :]
    right = at + DIM // 2
    half = at < DIM // 2
    inside = (head < count) & half
    place = heads + token * token_stride + head * head_stride
    a = tl.load(place + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + right, mask=inside, other=0.0).to(tl.float32)
    if norm is not None:
        scale = 1.0 / tl.sqrt_rn((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
        a *= scale * tl.load(norm + head * DIM + at, mask=inside, other=0.0).to(tl.float32)
        b *= scale * tl.load(norm + head * DIM + right, mask=inside, other=0.0).to(tl.float32)
    table = token * table_row
    cos_a, cos_b = tl.load(cos + table + at, mask=half, other=0.0), tl.load(cos + table + right, mask=half, other=0.0)
    sin_a, sin_b = tl.load(sin + table + at, mask=half, other=0.0), tl.load(sin + table + right, mask=half, other=0.0)
    tl.store(place + at, (a * cos_a + b * sin_a).to(heads.dtype.element_ty), mask=inside)
    tl.store(place + right, (b * cos_b + a * sin_b).to(heads.dtype.element_ty), mask=inside)


@triton.jit
def tables(positions, frequencies, cos, sin, factor, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """A token's cos and sin [T, 2 × HALF] at its position times each frequency [HALF], times `factor`; the sine of the
    left half negated."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + at, mask=inside, other=0.0)
    c, s = (tl.cos(angle) * factor).to(cos.dtype.element_ty), (tl.sin(angle) * factor).to(sin.dtype.element_ty)
    left = token * 2 * HALF + at
    tl.store(cos + left, c, mask=inside)
    tl.store(cos + left + HALF, c, mask=inside)
    tl.store(sin + left, -s, mask=inside)
    tl.store(sin + left + HALF, s, mask=inside)


@triton.jit
def silu_gate(gate_up, out, width, row_stride, BLOCK: tl.constexpr):
    """out [T, I] = silu(gate) × up, of gate_up [T, 2 I] with the gates first."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)
