"""Which kernel and tile a batch gets on an H200, which is not here, and why not the faster one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from headstock import AttentionLayer, PagedView
from headstock.testing.problem import make_problem
from headstock_triton.choice import kernel_of, launches
from headstock_triton.config import find
from headstock_triton.hopper import FORMS
from headstock_triton.keys import Cache
from headstock_triton.plan import Part, Shape, partial_rows
from headstock_triton.table import compiles

H200 = {"device": "cuda", "compute_capability": 90, "num_sms": 132, "dtype": "bfloat16", "kv_dtype": "bfloat16"}
PAGED = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128, "page_size": 16}
LATENT = {"attention": "mla", "num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "page_size": 64}
CUT = ("shared", "carried")
"""Fields of a part, where others are the batch's."""


def on_hopper(monkeypatch, sizes, **fields):
    """A spec of an H200 with Triton's kernels in Gluon, which is not here."""
    monkeypatch.setattr("headstock_triton.config.KERNELS", {*FORMS})
    return replace(make_problem([1], [1]).spec, **{**H200, **sizes, **fields})


@pytest.mark.parametrize(
    ("fields", "part", "kernel"),
    [
        ({}, {}, "attend_hopper"),
        ({"window": 100}, {}, "attend"),
        ({"softcap": 30.0}, {}, "attend"),
        ({"alibi": True}, {}, "attend"),
        ({"batch_invariant": True}, {}, "attend"),
        ({"kv_dtype": "float8_e4m3fn"}, {}, "attend"),
        ({"page_size": 4}, {}, "attend"),
        ({"compute_capability": 100}, {}, "attend"),
        ({"v_head_dim": 64}, {}, "attend"),
        ({}, {"page_table": None}, "attend"),
        ({}, {"query_mask": torch.ones(1)}, "attend"),
        ({}, {"shared": True}, "attend"),
        ({}, {"carried": True}, "attend"),
        ({"sinks": True}, {}, "attend"),
        (LATENT, {}, "latent_hopper"),
        (LATENT | {"sinks": True}, {"carried": True}, "latent_hopper"),
        (LATENT, {"query_mask": torch.ones(1)}, "latent"),
        (LATENT, {"query_mask": torch.ones(1), "shared": True}, "latent_hopper"),
        (LATENT | {"page_size": 32}, {}, "latent"),
        (LATENT | {"batch_invariant": True}, {}, "latent"),
        (LATENT | {"v_head_dim": 256}, {}, "latent"),
    ],
)
def test_a_kernel_of_hopper_serves_only_what_it_can(fields, part, kernel, monkeypatch):
    spec = on_hopper(monkeypatch, PAGED, **fields)
    batch = replace(make_problem([1], [1]).batch, **{name: part[name] for name in part if name not in CUT})
    config = replace(find(spec, 512), kernel="latent_hopper" if spec.attention == "mla" else "attend_hopper")
    cut = Part(Shape(config, 64, 1, 0), **{name: part[name] for name in part if name in CUT})
    assert kernel_of(spec, cut, batch) == kernel


@pytest.mark.parametrize("offset", [0, 1])
def test_a_cache_that_begins_between_loads_is_read_by_the_general_kernel(offset, monkeypatch):
    spec = on_hopper(monkeypatch, PAGED)
    problem = make_problem([1], [1])
    memory = torch.zeros(2 * 3 * 16 * 8 * 128 + 8, dtype=torch.bfloat16)
    k, v = memory[offset:][: 2 * 3 * 16 * 8 * 128].view(3, 2, 16, 8, 128).unbind(1)
    cut = Part(Shape(replace(find(spec, 512), kernel="attend_hopper"), 128, 1, 0))
    aligned = Cache(spec, AttentionLayer(0, PagedView(k, v))).aligned
    assert kernel_of(spec, cut, problem.batch, aligned) == ("attend" if offset else "attend_hopper")


@pytest.mark.parametrize(("num_sms", "programs"), [(132, 132), (1000, 512), (0, 512)])
def test_all_work_is_shared_by_the_programs_that_run_at_once(num_sms, programs, monkeypatch):
    monkeypatch.setattr("headstock_triton.choice.Launch", lambda kernel, constants, **options: kernel)
    spec = on_hopper(monkeypatch, PAGED, num_sms=num_sms)
    cut = Part(Shape(replace(find(spec, 512), kernel="attend_hopper"), 128, 64, 0))
    found = launches(spec, cut, make_problem([1], [1]).batch, aligned=True, lse=False, sinks=False, alibi=False)
    assert found == [((programs,), "attend_hopper")]


def test_measured_tiles_name_the_kernels_of_hopper(monkeypatch):
    spec, latent = on_hopper(monkeypatch, PAGED), on_hopper(monkeypatch, LATENT)
    assert {find(spec, 128, filled=filled).kernel for filled in (True, False)} == {"attend_hopper"}
    assert {find(latent, 128, filled=filled).kernel for filled in (True, False)} == {"latent_hopper"}
    one = Shape.of(latent, 1, 1, 1, True).config  # the whole tile, unless the general kernel has to do it
    monkeypatch.setattr("headstock_triton.config.KERNELS", {})
    assert (one.block_m, Shape.of(latent, 1, 1, 1, True).config.block_m) == (64, 32)


def test_gluon_is_used_in_the_releases_of_triton_that_were_tried():
    releases = {"3.5.1": False, "3.6.0": True, "3.7.1": True, "3.9.0+git1234": True, "3.10.0": False, "4.0.0": False}
    assert {release: compiles(release) for release in releases} == releases
    assert not compiles("main")


@pytest.mark.parametrize("sizes", [PAGED, LATENT])
def test_where_bits_may_not_depend_on_the_batch_neither_does_the_tile(sizes, monkeypatch):
    spec = on_hopper(monkeypatch, sizes, batch_invariant=True)
    assert len({Shape.of(spec, rows, rows, 1, True).config for rows in range(1, 257)}) == 1
    assert len({Shape.of(spec, rows, 64 * rows, 64, False).config for rows in range(1, 65)}) == 1


def test_there_is_room_for_the_splits_of_fewer_rows_than_the_largest_batch(monkeypatch):
    spec = on_hopper(monkeypatch, PAGED, max_batch=64, phases=frozenset({"decode"}))
    room = partial_rows(spec)
    shapes = [Shape.of(spec, rows, rows, 1, True) for rows in range(1, 65)]
    assert [shape.within(room, 8).split for shape in shapes] == [shape.split for shape in shapes]
    assert {shape.config.warps for shape in shapes} == {2, 4}


@pytest.mark.parametrize(
    ("rows", "warps", "ways"),
    [(1, 4, 33), (8, 4, 4), (16, 4, 2), (24, 4, 2), (32, 2, 2), (48, 4, 1), (64, 2, 1), (72, 4, 2), (96, 4, 1),
     (128, 2, 1), (256, 2, 1)],
)  # fmt: skip
def test_rows_of_a_decode_step_are_whole_waves_of_programs(rows, warps, ways, monkeypatch):
    spec = on_hopper(monkeypatch, PAGED, max_batch=256)
    shape = Shape.of(spec, rows, rows, 1, True)
    assert (shape.config.warps, max(shape.even // rows, 1)) == (warps, ways)
    waves = ways * rows * 8 / (132 * shape.config.resident)
    assert waves < 1 if rows <= 16 else math.ceil(waves) <= 1.04 * waves
    assert shape.slots == max(shape.even, min(3 * rows, 255))
    assert shape.joined(spec)
