"""Caching: the new keys and values of each token into its slot, encoded as the contract says."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def encode_fp8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """float32 below the largest finite value of an FP8 format → its byte, rounded to nearest even.

    By integers, so that every GPU and the interpreter give the same byte: what a conversion instruction does differs
    with the architecture. Below the smallest normal number, adding a power of two makes the float adder round.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    MAGIC: tl.constexpr = (127 - BIAS + SHIFT + 1) << 23
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    magic = tl.full(bits.shape, MAGIC, tl.int32)
    small = (bits.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - magic
    odd = (bits >> SHIFT) & 1
    normal = (bits - ((127 - BIAS) << 23) + ((1 << (SHIFT - 1)) - 1) + odd) >> SHIFT
    return (tl.where(bits < ((128 - BIAS) << 23), small, normal) | sign).to(tl.uint8)


@triton.jit
def put(x, cache, at_x, at_cache, inside, factor, limit, SCALED: tl.constexpr, DIVIDE: tl.constexpr, FP8: tl.constexpr):
    """One tensor's part of a token; `factor` is the scale to divide by, or its reciprocal."""
    value = tl.load(x + at_x, mask=inside, other=0.0)
    if SCALED:
        scaled = value.to(tl.float32) / factor if DIVIDE else value.to(tl.float32) * factor
        value = scaled if FP8 else scaled.to(value.dtype)
    if FP8:
        value = tl.minimum(tl.maximum(value.to(tl.float32), -limit), limit)
        value = encode_fp8(value, 3, 7) if FP8 == 3 else encode_fp8(value, 2, 15)
    tl.store(cache + at_cache, value.to(cache.dtype.element_ty), mask=inside)


@triton.jit
def write(
    k, v, k_cache, v_cache, slots,
    k_factor, v_factor, limit,
    k_token, k_head, v_token, v_head,
    k_cache_page, k_cache_slot, k_cache_head, v_cache_page, v_cache_slot, v_cache_head,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    SCALED: tl.constexpr, DIVIDE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One program per token. k [T, Hkv, D], v [T, Hkv, Dv] or, where Dv is 0, none; slots int64 [T]. FP8 caches come as
    uint8, their mantissa bits as FP8 (3 or 2, 0 where the cache is wider)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    page, offset = slot // PAGE, slot % PAGE
    head = tl.arange(0, BLOCK_H)[:, None]
    d, dv = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_V)[None, :]
    real = head < KV_HEADS
    put(
        k, k_cache, token * k_token + head * k_head + d,
        page * k_cache_page + offset * k_cache_slot + head.to(tl.int64) * k_cache_head + d,
        real & (d < HEAD_DIM), k_factor, limit, SCALED, DIVIDE, FP8,
    )  # fmt: skip
    if V_HEAD_DIM > 0:
        put(
            v, v_cache, token * v_token + head * v_head + dv,
            page * v_cache_page + offset * v_cache_slot + head.to(tl.int64) * v_cache_head + dv,
            real & (dv < V_HEAD_DIM), v_factor, limit, SCALED, DIVIDE, FP8,
        )  # fmt: skip
