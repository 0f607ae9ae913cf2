"""What the suite's small problems do not reach: schedules of all lengths, every FP8 byte, many splits, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock import HeadstockError, PagedView, Workspace
from headstock.testing.problem import make_problem
from headstock.testing.rig import Rig
from headstock_triton import INTERPRETED, OFFER, attention_backends
from headstock_triton.backend import TritonAttention
from headstock_triton.config import SHARED_MEMORY, Config, find, shared_bytes
from headstock_triton.hopper import FORMS
from headstock_triton.launch import Launch
from headstock_triton.plan import Part, Plan, Shape, carried_rows, partial_rows, schedule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), min_size=1, max_size=9),
    group=st.integers(1, 9),
    slots=st.integers(0, 20),
    less=st.integers(0, 20),
    fixed=st.sampled_from([0, 0, 3]),
    window=st.sampled_from([0, 0, 50]),
    shared=st.booleans(),
    far=st.sampled_from([3, 2**31 - 1]),
)
@settings(max_examples=40, deadline=None)
def test_a_schedule_holds_every_split_of_every_tile_once_within_its_bounds(
    rows, group, slots, less, fixed, window, shared, far
):
    counts, lens = [count for count, _ in rows], [length for _, length in rows]
    firsts = [sum(counts[:i]) for i in range(len(rows) + 1)]
    begins = [7 * i % (length + 1) if shared else 0 for i, length in enumerate(lens)]
    starts = [far * i - (5 if shared else 0) for i in range(len(rows))]
    queries, keys = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (firsts, lens))
    tiles = [-(-count * group // 16) for count in counts]
    spare = 2  # tiles more than there are
    bound = (sum(tiles) + spare) * fixed if fixed else sum(tiles) + spare + slots
    items = torch.full((bound + 1, 8), 7, dtype=torch.int32, device=DEVICE)
    origins = torch.full((bound + 1,), 7, dtype=torch.int64, device=DEVICE)
    counters = torch.full((bound + 1, 3), 7, dtype=torch.int32, device=DEVICE)
    most_tiles = bound // fixed if fixed else bound - slots
    leaders = torch.full((most_tiles + 1,), 7, dtype=torch.int32, device=DEVICE)
    launch = Launch(
        "schedule",
        {"GROUP": group, "WINDOW": window, "BLOCK_M": 16, "MIN_KEYS": 16, "FIXED": fixed, "KV_HEADS": 3, "ROWS": 16,
         "BLOCK": 8, "BLOCK_H": 4},
    )  # fmt: skip
    launch(
        (-(-bound // 8),),
        {
            "queries": queries, "lens": keys, "items": items, "origins": origins,
            "begins": torch.tensor(begins, dtype=torch.int32, device=DEVICE) if shared else None,
            "starts": torch.tensor(starts, device=DEVICE) if shared else None,
            "counters": counters if slots else None,
            "leaders": leaders if far == 3 else None,
            "num_rows": len(rows), "num_items": bound, "slots": slots,
            "even": max(slots - less, 0), "width": far,
        },
    )  # fmt: skip
    *found, guard = items.tolist()
    assert guard == [7] * 8
    real = [tuple(item) for item in found if item[0] >= 0]
    assert [item[0] for item in found] == [item[0] for item in real] + [-1] * (bound - len(real))
    ways = {row: splits for row, _, _, splits, *_ in real}
    expected = [
        (row, tile, split, ways[row], firsts[row], counts[row], begins[row], lens[row])
        for row in ways for tile in range(tiles[row]) for split in range(ways[row])
    ]  # fmt: skip
    assert Counter(real) == Counter(expected)
    assert set(ways) == {row for row, count in enumerate(tiles) if count}
    assert all(splits == 1 or splits * 16 <= lens[row] - begins[row] for row, splits in ways.items())
    for item, nearer in pairwise(real):  # the splits of a tile follow each other
        assert nearer[2] == 0 if item[2] == item[3] - 1 else nearer == (*item[:2], item[2] + 1, *item[3:])
    assert origins.tolist() == [starts[row] for row, *_ in real] + [-(2**62)] * (bound - len(real)) + [7]
    starting = [i for i, item in enumerate(real) if item[2] == 0]
    told = starting + [-1] * (most_tiles - len(starting)) + [7]
    assert leaders.tolist() == told if far == 3 else (leaders == 7).all()
    assert counters.tolist() == [[0] * 3] * bound + [[7] * 3] if slots else (counters == 7).all()


@pytest.mark.parametrize(
    ("lens", "splits"),
    [
        ([320] * 4, [2] * 4),
        ([320, 300, 310, 320], [2] * 4),
        ([320, 320, 320, 1], [2, 2, 2, 1]),  # the last is padding
        ([320, 320, 320, 0], [2, 2, 2, 1]),
        ([320, 160, 40, 40], [6, 3, 1, 1]),
        ([320, 1, 1, 1], [11, 1, 1, 1]),
    ],
)
def test_equally_long_rows_have_splits_of_their_own_number(lens, splits):
    config = Config(16, 16, stages=1, keys=16)
    part = Part(
        Shape(config, 1, 4, 12, even=8),
        queries=torch.arange(5, dtype=torch.int32, device=DEVICE),
        lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
    )
    problem = make_problem([1], [1], device=DEVICE, num_heads=2, num_kv_heads=2)
    schedule(problem.spec, part)
    found = {item[0]: item[3] for item in part.items.tolist() if item[0] >= 0}
    assert [found[row] for row in range(4)] == splits


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_float16_is_cached_as_torch_encodes_it(dtype):
    limit = torch.finfo(dtype).max
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).to(DEVICE)
    values = torch.where(values.isnan(), 0.0, values.float()) * 1.0009765625  # beside the ties, as well as on them
    for x in (values, values.half().float()):
        x = x.view(16, 8, 512)
        cache = torch.zeros(16, 1, 8, 512, dtype=torch.uint8, device=DEVICE)
        launch = Launch(
            "write",
            {
                "PAGE": 1, "KV_HEADS": 8, "HEAD_DIM": 512, "V_HEAD_DIM": 512, "BLOCK_H": 8, "BLOCK_D": 512,
                "BLOCK_V": 512, "SCALED": False, "DIVIDE": True, "FP8": 3 if dtype == torch.float8_e4m3fn else 2,
            },
        )  # fmt: skip
        launch(
            (16,),
            {"k": x, "v": x, "k_cache": cache, "v_cache": cache, "slots": torch.arange(16, device=DEVICE)}
            | {"k_factor": 1.0, "v_factor": 1.0, "limit": limit}
            | {"k_token": 4096, "k_head": 512, "v_token": 4096, "v_head": 512}
            | {f"{name}_cache_{part}": 4096 for name in "kv" for part in ("page", "slot")}
            | {"k_cache_head": 512, "v_cache_head": 512},
        )
        want = x.clamp(-limit, limit).to(dtype).view(torch.uint8)
        assert torch.equal(cache[:, 0], want)


@pytest.mark.parametrize("features", [{}, {"window": 100}, {"query_mask": True}, {"batch_invariant": True}])
@pytest.mark.parametrize(
    ("new", "phase", "joined"), [(1, "decode", 1024), (1, "decode", 0), (3, "decode", 1024), (9, "extend", 1024)]
)
def test_long_contexts_are_split_and_merged(new, phase, features, joined, monkeypatch):
    monkeypatch.setattr("headstock_triton.plan.JOINED", joined)
    fields = {"num_heads": 4, "num_kv_heads": 1, "page_size": 16, "lse": True, "sinks": True}
    problem = make_problem([new] * 3, [new, 400, 77], device=DEVICE, phase=phase, **fields, **features)
    shape = Shape.of(problem.spec, 3, 3 * new, new, phase == "decode")
    assert shape.split or "batch_invariant" in features
    assert shape.joined(problem.spec) == (shape.split and joined > 0 and new < 9)
    problem.check(TritonAttention)


@pytest.mark.parametrize("features", [{}, {"window": 30}, {"query_mask": True}, {"causal": False}])
def test_wide_tiles_mask_only_what_some_of_their_rows_do_not_see(features, monkeypatch):
    wide = Config(64, block_n=16, stages=1, programs=1, keys=16)
    monkeypatch.setattr("headstock_triton.plan.find", lambda *_, **__: wide)
    problem = make_problem([40, 3], [90, 40], device=DEVICE, phase="extend", page_size=16, **features)
    problem.check(TritonAttention)


@pytest.mark.parametrize("new", [1, 40])
def test_values_may_lie_otherwise_than_keys(new):
    """Addresses of keys are those of values too only where both lie alike."""
    problem = make_problem([new] * 2, [90, new], device=DEVICE, phase="extend", page_size=16, num_kv_heads=2)
    rig, (batch, storage) = Rig(TritonAttention, problem.spec), problem.fresh()
    view = problem.layer(storage).kv
    elsewhere = view.v.transpose(1, 2).contiguous().transpose(1, 2)
    assert elsewhere.stride() != view.k.stride() == view.v.stride()
    rig.plan(batch)
    layer = replace(problem.layer(storage), kv=PagedView(view.k, elsewhere))
    problem.compare(rig.forward(problem, batch, storage, layer)._replace(storage=None))


@pytest.mark.parametrize("joined", [1024, 0])
def test_layers_that_share_a_plan_are_merged_alike(joined, monkeypatch):
    """As a graph replays a step: the counters of one layer are those of the next, whatever the scratch holds."""
    monkeypatch.setattr("headstock_triton.plan.JOINED", joined)
    problem = make_problem([1] * 3, [1, 400, 77], device=DEVICE, phase="decode", num_heads=4, num_kv_heads=2)
    rig, (batch, storage) = Rig(TritonAttention, problem.spec), problem.fresh()
    rig.plan(batch)
    outs = []
    for poison in (0, 255, 1):
        rig.scratch.fill_(poison)
        outs.append(torch.full_like(problem.q, torch.nan))
        rig.instance.forward(problem.q, problem.k, problem.v, problem.layer(storage), batch, out=outs[-1])
        counters = batch.metadata.parts[-1].counters
        assert counters is None if joined == 0 else not counters.any()
    assert all(torch.equal(outs[0], out) for out in outs[1:])
    problem.compare(rig.run(problem))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_extreme_logits_neither_overflow_nor_vanish(dtype):
    problem = make_problem([1, 4], [60, 50], device=DEVICE, dtype=dtype, lse=True)
    problem = replace(problem, q=problem.q * 0.0 - 40.0)  # every logit of a row far below what exp can hold
    problem.compare(Rig(TritonAttention, problem.spec).run(problem))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention": "mla", "kv_layout": "latent"}, "2 key heads"),
        ({"attention": "mla", "kv_layout": "latent", "window": 9}, "sliding_window"),
        ({"dtype": "float64", "kv_dtype": "float64"}, "float64"),
        ({"page_size": 257}, "257"),
        ({"kv_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_a_spec_beyond_the_offer_is_refused_at_construction(change, named):
    spec = replace(make_problem([1], [1], device=DEVICE).spec, **change)
    with pytest.raises(HeadstockError, match=named):
        TritonAttention(spec, _workspace(make_problem([1], [1], device=DEVICE).spec))


def test_scales_reach_a_cache_that_is_as_wide_as_the_keys():
    make_problem([1, 7], [30, 20], device=DEVICE, dtype="float16", k_scale=0.5, v_scale=3.0).check(TritonAttention)


def test_a_batch_beyond_the_workspace_goes_unsplit():
    few = {"phase": "decode", "phases": frozenset({"decode"}), "max_batch": 2}
    problem = make_problem([1] * 9, [99] * 9, device=DEVICE, **few)
    room, kv_heads = partial_rows(problem.spec), problem.spec.num_kv_heads
    assert Shape.of(problem.spec, 2, 2, 1, True).within(room, kv_heads).split
    assert not Shape.of(problem.spec, 9, 9, 1, True).within(room, kv_heads).split
    problem.check(TritonAttention)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("heads", [1, 16, 32, 128])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bfloat16", {"head_dim": 576, "v_head_dim": 512}), ("float32", {"head_dim": 320, "v_head_dim": 256})],
)
def test_a_latent_tile_fits_the_gpu(capability, heads, dtype, size):
    spec = replace(
        make_problem([1], [1], attention="mla").spec, device="cuda", compute_capability=capability, num_sms=132,
        num_heads=heads, page_size=64, dtype=dtype, kv_dtype=dtype, **size,
    )  # fmt: skip
    config = find(spec, heads)
    assert shared_bytes(config, spec) <= 1024 * SHARED_MEMORY[capability]
    assert config.block_m <= 64


def test_shared_prefixes_of_more_tokens_than_there_is_room_to_carry_are_read_row_by_row():
    fields = {"attention": "mla", "shared": (((2, 2), (1, 0)),), "phase": "extend", "max_batch": 2}
    problem = make_problem([9, 9, 9], [30, 20, 12], device=DEVICE, **fields)
    batch, _ = problem.fresh()
    assert problem.batch.num_tokens * problem.spec.num_heads > carried_rows(problem.spec)
    assert len(Plan.of(problem.spec, batch, partial_rows(problem.spec)).parts) == 1
    problem.check(TritonAttention)


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles_for_a_gpu_that_is_not_here(capability):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiled.py")
    done = subprocess.run([sys.executable, script, str(capability)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = {"attend", "latent", "merge", "schedule", "write"} | ({*FORMS} if capability == 90 else set())
    assert {line.split()[0] for line in done.stdout.splitlines()} == kernels


def test_the_manifest_needs_neither_torch_nor_the_compiler():
    code = "import sys, headstock_triton as m; m.attention_backends(); print({'torch', 'triton'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"set()\n"


def test_only_the_gpu_is_on_offer():
    assert attention_backends() == [OFFER]
    assert {device for record in OFFER.capabilities for device in record.devices} == {"cuda"}
    assert INTERPRETED.backend == OFFER.backend


@pytest.mark.skipif(DEVICE == "cuda", reason="needs a machine without a GPU")
def test_a_cpu_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr("headstock_triton.backend.INTERPRETING", False)
    spec = make_problem([1], [1]).spec
    with pytest.raises(HeadstockError, match="TRITON_INTERPRET=1"):
        TritonAttention(spec, _workspace(spec))


def _workspace(spec):
    size = TritonAttention.workspace_bytes(spec)
    return Workspace(*(torch.zeros(count, dtype=torch.uint8, device=spec.device) for count in size))
