"""KV layouts: what a slot's bytes are, written exactly there and read back, whatever lies underneath."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock import BackendSpec
from headstock.kv.layout import BUILTIN_LAYOUTS, HND, NHD, Latent, encode
from headstock.kv.pool import KVPool

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def spec(page_size=4, heads=3, k_dim=8, v_dim=8, dtype="float32", kv_dtype=None):
    return BackendSpec(
        device="cpu", dtype=dtype, kv_dtype=kv_dtype or dtype, num_heads=heads, num_kv_heads=heads, head_dim=k_dim,
        v_head_dim=v_dim, scale=1.0, page_size=page_size, max_batch=1, max_tokens=8, max_context=64,
    )  # fmt: skip


def storage(layout, shape, num_pages):
    """Pages of random bytes that are finite numbers in every dtype."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 60, (num_pages, layout.bytes_per_page(shape)), dtype=torch.uint8, generator=generator)


def where(layout, shape, kind, loc, head):
    """The element offset of (slot, head) from the start of the storage, by the layout's definition."""
    page, offset = divmod(loc, shape.page_size)
    dim = shape.head_dim if kind == "k" else shape.v_head_dim
    row = page * shape.page_size * shape.num_kv_heads * (shape.head_dim + shape.v_head_dim)
    if kind == "v":
        row += shape.page_size * shape.num_kv_heads * shape.head_dim
    if layout is HND:
        return row + (head * shape.page_size + offset) * dim
    return row + (offset * shape.num_kv_heads + head) * dim


shapes = st.builds(
    spec,
    page_size=st.sampled_from([1, 2, 3, 4, 7, 16]),
    heads=st.integers(1, 4),
    k_dim=st.sampled_from([1, 2, 6, 8, 12]),
    v_dim=st.sampled_from([1, 2, 6, 8, 12]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)


@settings(max_examples=120, deadline=None)
@given(shape=shapes, layout=st.sampled_from([NHD, HND]), data=st.data())
def test_a_write_changes_its_slots_and_nothing_else_and_gather_reads_it_back(shape, layout, data):
    num_pages = data.draw(st.integers(1, 4))
    slots = num_pages * shape.page_size
    loc = data.draw(st.lists(st.integers(0, slots - 1), min_size=1, max_size=8, unique=True))
    pages = storage(layout, shape, num_pages)
    dtype = getattr(torch, shape.kv_dtype)
    expected = pages.clone().view(dtype).flatten()
    k = torch.randn(len(loc), shape.num_kv_heads, shape.head_dim).to(dtype)
    v = torch.randn(len(loc), shape.num_kv_heads, shape.v_head_dim).to(dtype)
    for row, slot in enumerate(loc):
        for head in range(shape.num_kv_heads):
            for kind, x in (("k", k), ("v", v)):
                start = where(layout, shape, kind, slot, head)
                expected[start : start + x.shape[2]] = x[row, head]

    view = layout.view(pages, shape, 1.0, 1.0)
    view.write(k, v, torch.tensor(loc))
    assert torch.equal(pages.view(dtype).flatten().view(torch.uint8), expected.view(torch.uint8))
    for got, given_ in zip(view.gather(torch.tensor(loc)), (k, v), strict=True):
        assert torch.equal(got, given_)
        assert got.is_contiguous()
    page, offset = torch.tensor(loc) // shape.page_size, torch.tensor(loc) % shape.page_size
    assert torch.equal(view.k[page, offset], k)
    assert torch.equal(view.v[page, offset], v)


@pytest.mark.parametrize("layout", [NHD, HND])
def test_views_are_logical_share_the_storage_and_have_last_stride_1(layout):
    shape = spec(page_size=4, heads=3, k_dim=8, v_dim=6)
    pages = storage(layout, shape, 5)
    view = layout.view(pages, shape, 0.5, 2.0)
    assert view.k.shape == (5, 4, 3, 8)
    assert view.v.shape == (5, 4, 3, 6)
    assert (view.k.stride(-1), view.v.stride(-1)) == (1, 1)
    assert (view.k_scale, view.v_scale) == (0.5, 2.0)
    for x in (view.k, view.v):
        assert x.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr()
    token_stride, head_stride = view.k.stride()[1:3]
    assert (token_stride, head_stride) == ((24, 8) if layout is NHD else (8, 32))


@pytest.mark.parametrize("name", ["nhd", "hnd"])
@pytest.mark.parametrize(("kv_dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float8_e4m3fn", 1)])
def test_a_page_takes_the_bytes_of_its_keys_and_values(name, kv_dtype, size):
    shape = spec(page_size=16, heads=2, k_dim=24, v_dim=10, kv_dtype=kv_dtype)
    assert BUILTIN_LAYOUTS[name].bytes_per_page(shape) == 16 * 2 * (24 + 10) * size


@pytest.mark.parametrize("layout", [NHD, HND])
def test_strided_keys_and_values_are_stored_as_their_logical_values(layout):
    shape = spec(heads=2, k_dim=8, v_dim=8)
    qkv = torch.randn(5, 9, 8)
    k, v = qkv[:, 4:6], qkv[:, 6:8]
    view = layout.view(storage(layout, shape, 3), shape, 1.0, 1.0)
    loc = torch.tensor([11, 0, 5, 6, 2])
    view.write(k, v, loc)
    assert torch.equal(view.gather(loc)[0], k)
    assert torch.equal(view.gather(loc)[1], v)


@pytest.mark.parametrize("layout", [NHD, HND])
def test_nan_in_other_slots_stays_where_it_is(layout):
    shape = spec(heads=2)
    pages = storage(layout, shape, 3)
    pages.view(torch.float32).fill_(math.nan)
    view = layout.view(pages, shape, 1.0, 1.0)
    loc = torch.tensor([4, 9])
    view.write(torch.ones(2, 2, 8), torch.ones(2, 2, 8), loc)
    assert bool((view.gather(loc)[0] == 1).all())
    assert int(view.k.isnan().sum()) == (3 * 4 - 2) * 2 * 8


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_latent_page_is_one_vector_per_token(kv_dtype):
    shape = spec(page_size=4, heads=1, k_dim=24, v_dim=16, dtype="bfloat16", kv_dtype=kv_dtype)
    pages = storage(Latent, shape, 3)
    dtype = getattr(torch, kv_dtype)
    assert pages.shape == (3, 4 * 24 * dtype.itemsize)
    view = Latent.view(pages, shape, 1.0, 1.0)
    assert view.latent.shape == (3, 4, 24)
    expected = view.latent.clone()
    k = torch.randn(2, 1, 24).bfloat16()
    view.write(k, None, torch.tensor([10, 3]))
    expected[2, 2], expected[0, 3] = k[0, 0].to(dtype), k[1, 0].to(dtype)
    assert torch.equal(pages.view(dtype).view(torch.uint8).flatten(), expected.view(torch.uint8).flatten())
    got, nothing = view.gather(torch.tensor([10, 3]))
    assert nothing is None
    assert torch.equal(got.float(), k.to(dtype).float())


def grid(dtype):
    """Every finite value of an 8-bit dtype, ascending."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return values[values.isfinite()].unique()


def nearest_even(x, values):
    """x rounded to the nearest of `values`, ties to the one of even place from zero on, beyond them the last."""
    positive = values[values >= 0]
    at = torch.searchsorted(positive, x.abs()).clamp(1, len(positive) - 1)
    low, high = positive[at - 1], positive[at]
    below, above = x.abs() - low, high - x.abs()
    up = (above < below) | ((above == below) & (at % 2 == 0))
    return torch.where(up, high, low).copysign(x)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("scale", [1.0, 0.04, 3.0])
@pytest.mark.parametrize("given_dtype", [torch.float32, torch.bfloat16])
def test_fp8_holds_x_over_scale_rounded_to_nearest_even_and_saturated(dtype, scale, given_dtype):
    values = grid(dtype)
    ties = (values[1:] + values[:-1]) / 2
    beyond = torch.tensor([1e9, -1e9, math.inf, -math.inf, 0.0])
    x = torch.cat([values, ties, torch.randn(500).double() * 20, beyond.double()])
    x = (x * scale).to(given_dtype)
    exact = (x.float() / scale).double()
    expected = nearest_even(exact.clamp(values[0], values[-1]), values)
    assert torch.equal(encode(x, dtype, scale).double(), expected)


def test_keys_and_values_have_scales_of_their_own_in_each_layer():
    shape = spec(heads=1, k_dim=8, v_dim=8, kv_dtype="float8_e4m3fn")
    pool = KVPool(shape, NHD, 2, 3, scales=[(0.04, 0.05), (1.0, 2.0)])
    k, v, loc = torch.randn(4, 1, 8), torch.randn(4, 1, 8), torch.tensor([4, 5, 6, 7])
    for view, (k_scale, v_scale) in zip(pool.views, [(0.04, 0.05), (1.0, 2.0)], strict=True):
        view.write(k, v, loc)
        stored_k, stored_v = view.gather(loc)
        torch.testing.assert_close(stored_k.float() * k_scale, k, rtol=0.07, atol=0.01 * k_scale)
        torch.testing.assert_close(stored_v.float() * v_scale, v, rtol=0.07, atol=0.01 * v_scale)


def test_a_pool_is_zeroed_and_its_layers_are_apart():
    shape = spec(heads=2)
    pool = KVPool(shape, HND, 3, 4)
    assert pool.storage.shape == (3, 4, HND.bytes_per_page(shape))
    assert int(pool.storage.count_nonzero()) == 0
    ones = torch.ones(1, 2, 8)
    pool.views[1].write(ones, ones, torch.tensor([7]))
    assert pool.storage[0].count_nonzero() == pool.storage[2].count_nonzero() == 0
    assert pool.storage[1].view(torch.float32).sum() == 32
