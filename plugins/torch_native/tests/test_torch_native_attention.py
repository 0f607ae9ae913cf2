"""torch-native against the float64 reference, over every axis that it declares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock import ForwardBatch
from headstock.testing.problem import Problem, Result, make_problem
from headstock.testing.rig import Rig
from headstock_torch_native.backend import TorchNative

DTYPES = ("float32", "bfloat16", "float16", "float64")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def features(draw: st.DrawFn, longest: int) -> dict[str, Any]:
    """Everything that changes a result but the lengths and the kind of batch."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 5, 7]))
    fields: dict[str, Any] = {
        "num_heads": kv_heads * group,
        "num_kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([8, 16, 24, 64, 80, 96])),
        "v_head_dim": draw(st.sampled_from([8, 16, 40, 96])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 2**16)),
        "lse": draw(st.booleans()),
    }
    if draw(st.booleans()):
        fields["window"] = draw(st.integers(1, longest + 1))
    if draw(st.booleans()):
        fields["softcap"] = draw(st.sampled_from([0.5, 2.0, 50.0]))
    for name in ("sinks", "alibi"):
        fields[name] = draw(st.booleans() if draw(st.booleans()) else st.just(False))
    return fields


@st.composite
def paged(draw: st.DrawFn) -> dict[str, Any]:
    """Paged self-attention, lengths near page edges, extend or decode of one length, tree masks, FP8, padding."""
    page = draw(st.sampled_from([1, 2, 4, 16, 64]))
    decode = draw(st.booleans())
    rows, uniform = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    new = [uniform if decode else draw(st.integers(1, 9)) for _ in range(rows)]
    prefixes = [draw(st.sampled_from([0, 1, page - 1, page, page + 1, 2 * page + 3])) for _ in range(rows)]
    lens = [n + prefix for n, prefix in zip(new, prefixes, strict=True)]
    fields = features(draw, max(lens)) | {
        "query_lens": new,
        "seq_lens": lens,
        "phase": "decode" if decode else "extend",
        "page_size": page,
        "kv_layout": draw(st.sampled_from(["nhd", "hnd"])),
        "causal": draw(st.sampled_from([True, True, False])),
        "query_mask": draw(st.sampled_from([False, False, True])),
        "padded_rows": draw(st.integers(0, 2)),
    }
    if draw(st.booleans()):
        fields |= {"kv_dtype": draw(st.sampled_from(["float8_e4m3fn", "float8_e5m2"]))}
        fields |= {"k_scale": draw(st.sampled_from([1.0, 0.04])), "v_scale": draw(st.sampled_from([1.0, 0.05]))}
    if decode:
        fields["host_lengths"] = draw(st.sampled_from(["exact", "bound"]))
    return fields


@st.composite
def given_or_cross(draw: st.DrawFn) -> dict[str, Any]:
    """Ragged keys, or cross attention to cached ones: more queries than keys, and rows of no key at all."""
    decode, rows = draw(st.booleans()), draw(st.integers(1, 4))
    uniform = draw(st.integers(1, 4))
    lens = [draw(st.sampled_from([0, 1, 3, 8, 17])) for _ in range(rows)]
    kind = {"attention": "ragged", "causal": draw(st.booleans())} if draw(st.booleans()) else {"cross": True}
    return (
        features(draw, max(*lens, 1))
        | {"causal": False}
        | kind
        | {
            "query_lens": [uniform if decode else draw(st.integers(1, 6)) for _ in range(rows)],
            "seq_lens": lens,
            "phase": "decode" if decode else "extend",
            "host_lengths": draw(st.sampled_from(["exact", "bound"])) if decode else "exact",
        }
    )


@st.composite
def shared(draw: st.DrawFn) -> dict[str, Any]:
    """Rows that share prefixes at one to three levels, some with no run of their own."""
    rows, page = draw(st.integers(1, 5)), draw(st.sampled_from([1, 4, 16]))
    levels, begins = [], [0] * rows
    for _ in range(draw(st.integers(1, 3))):
        level, first = [], 0
        while first < rows:
            count = draw(st.integers(1, rows - first))
            same = len(set(begins[first : first + count])) == 1
            pages = draw(st.integers(0, 2)) if same else 0
            begins[first : first + count] = [begin + pages * page for begin in begins[first : first + count]]
            level.append((count, pages))
            first += count
        levels.append(tuple(level))
    decode = draw(st.booleans())
    uniform = draw(st.integers(1, 3))
    new = [uniform if decode else draw(st.integers(1, 5)) for _ in range(rows)]
    lens = [begin + n + draw(st.integers(0, 2 * page)) for begin, n in zip(begins, new, strict=True)]
    return features(draw, max(lens)) | {
        "query_lens": new,
        "seq_lens": lens,
        "phase": "decode" if decode else "extend",
        "page_size": page,
        "shared": tuple(levels),
        "query_mask": draw(st.sampled_from([False, False, True])),
        "padded_rows": 0,
        "host_lengths": draw(st.sampled_from(["exact", "bound"])) if decode else "exact",
    }


@given(fields=shared())
@settings(max_examples=120, deadline=None)
def test_prefixes_read_once_for_all_of_their_rows_match_the_reference(fields):
    make_problem(**fields).check(TorchNative)


@given(fields=paged())
@settings(max_examples=150, deadline=None)
def test_paged_attention_matches_the_reference(fields):
    make_problem(**fields).check(TorchNative)


@given(fields=given_or_cross())
@settings(max_examples=80, deadline=None)
def test_ragged_and_cross_attention_match_the_reference(fields):
    make_problem(**fields).check(TorchNative)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "fields",
    [
        {"query_lens": [1, 1, 1], "seq_lens": [1, 16, 33]},
        {"query_lens": [4, 4], "seq_lens": [4, 20], "phase": "decode"},
        {"query_lens": [3, 3], "seq_lens": [9, 20], "phase": "decode", "query_mask": True},
        {"query_lens": [17, 1, 16], "seq_lens": [17, 40, 20]},
        {"query_lens": [9, 4], "seq_lens": [9, 20], "window": 3},
        {"query_lens": [6, 6], "seq_lens": [6, 6], "window": 5},
        {"query_lens": [6, 6], "seq_lens": [6, 6], "window": 6},
        {"query_lens": [1, 1], "seq_lens": [9, 20], "window": 5, "dropped": 64},
        {"query_lens": [3, 3], "seq_lens": [9, 20], "window": 5, "dropped": 64, "query_mask": True},
        {"query_lens": [5, 2], "seq_lens": [9, 0], "cross": True, "causal": False},
        {"query_lens": [5, 2], "seq_lens": [9, 0], "cross": True, "causal": False, "sinks": True, "lse": True},
        {"query_lens": [1, 1], "seq_lens": [9, 0], "cross": True, "causal": False, "window": 3},
        {"query_lens": [1, 1], "seq_lens": [9, 0], "cross": True, "causal": False, "host_lengths": "bound"},
        {"query_lens": [5, 2], "seq_lens": [9, 3], "attention": "ragged", "lse": True},
        {"query_lens": [2, 2], "seq_lens": [3, 0], "attention": "ragged", "phase": "decode", "lse": True},
        {"query_lens": [5, 2], "seq_lens": [9, 3], "softcap": 2.0, "sinks": True, "alibi": True, "lse": True},
    ],
)
def test_every_way_to_attend_in_every_dtype(fields, dtype, device):
    heads = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    make_problem(**heads, page_size=16, dtype=dtype, device=device, **fields).check(TorchNative)


@pytest.mark.parametrize("elements", [1, 64, 400])
@pytest.mark.parametrize(
    "extra", [{}, {"window": 5}, {"causal": False, "alibi": True, "lse": True}, {"alibi": True, "lse": True}]
)
def test_cutting_a_long_row_into_blocks_changes_nothing(monkeypatch, elements, extra):
    monkeypatch.setattr("headstock_torch_native.plan.CHUNK_ELEMENTS", elements)
    make_problem([50, 7, 40], [61, 7, 40], **extra).check(TorchNative)


@pytest.mark.parametrize("window", [None, 4])
def test_a_prompt_in_chunks_and_then_by_decoding_is_the_prompt_in_one(window):
    whole = make_problem([11], [11], dtype="float64", window=window)
    want, _, cached = run(whole)
    out, storage, done = [], whole.storage, 0
    for count in (4, 4, 1, 2):
        part = rows_of(whole, 0, slice(done, done + count), done + count)
        got, _, storage = run(replace(part, storage=storage))
        out.append(got)
        done += count
    torch.testing.assert_close(torch.cat(out), want, rtol=0, atol=1e-12)
    assert torch.equal(storage, cached)


@pytest.mark.parametrize("fields", [{"query_lens": [1] * 4}, {"query_lens": [3, 3, 3, 3], "phase": "decode"}])
def test_a_row_alone_is_that_row_in_a_batch(fields):
    batch = make_problem(**fields, seq_lens=[5, 40, 17, 16], dtype="float64", window=20)
    want, _, _ = run(batch)
    n = batch.batch.query_len
    for row, length in enumerate([5, 40, 17, 16]):
        tokens = slice(row * n, (row + 1) * n)
        alone, _, _ = run(rows_of(batch, row, tokens, length, phase="decode"))
        torch.testing.assert_close(alone, want[tokens], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kv_dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("query_lens", [[1, 1], [5, 2]])
def test_neither_layout_nor_page_size_changes_a_bit(query_lens, kv_dtype):
    fields = {"query_lens": query_lens, "seq_lens": [9, 33], "v_head_dim": 24, "kv_dtype": kv_dtype}
    want, _, _ = run(make_problem(**fields, page_size=64, kv_layout="nhd"))
    for page_size in (1, 2, 4, 16, 64):
        for kv_layout in ("nhd", "hnd"):
            got, _, _ = run(make_problem(**fields, page_size=page_size, kv_layout=kv_layout))
            assert torch.equal(got, want)


def test_no_query_at_all_gives_the_mean_of_the_values_that_exist():
    problem = make_problem([1, 1], [3, 30], causal=False, cross=True, page_size=16)
    problem = replace(problem, q=torch.zeros_like(problem.q))
    problem.check(TorchNative)


@pytest.mark.parametrize("lens", [[3, 3], [3, 8]])
@pytest.mark.parametrize("phase", ["extend", "decode"])
@pytest.mark.parametrize("lse", [True, False])
def test_a_mask_that_shows_no_new_token_leaves_only_what_is_cached(lens, phase, lse):
    problem = make_problem([3, 3], lens, phase=phase, query_mask=True, lse=lse)
    assert problem.batch.query_mask is not None
    blank = replace(problem.batch, query_mask=torch.zeros_like(problem.batch.query_mask))
    replace(problem, batch=blank).check(TorchNative)


def test_keys_cached_already_are_read_and_not_written_again():
    problem = make_problem([1, 1], [5, 9])
    stored = problem.expected[2]
    again = replace(problem, k=None, v=None, storage=stored)
    again.check(TorchNative)


def run(problem: Problem) -> Result:
    """What torch-native makes of a problem."""
    return Rig(TorchNative, problem.spec).run(problem)


def rows_of(problem: Problem, row: int, tokens: slice, length: int, **arguments: Any) -> Problem:
    """Some tokens of one row as a problem of its own, on the same cache."""
    assert problem.k is not None
    assert problem.v is not None
    assert problem.batch.page_table is not None
    count = tokens.stop - tokens.start
    table = problem.batch.page_table[row : row + 1]
    batch = ForwardBatch.from_lengths([count], [length], table, problem.spec.page_size, **arguments)
    return replace(problem, batch=batch, q=problem.q[tokens], k=problem.k[tokens], v=problem.v[tokens])
