"""The language of workloads, what a workload has to do at least, and the trace of an engine as workloads."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.bench.recorded import read_trace, representatives
from headstock.bench.shapes import PRESETS, preset
from headstock.bench.workload import Workload, parse
from headstock.engine.trace import Trace
from headstock.errors import HeadstockError
from headstock.requirement import Requirement

MANY = "{" + ",".join(map(str, range(1, 40))) + "}"


def test_each_kind_says_new_tokens_and_keys():
    decode, extend, cascade = parse("decode:3x40, extend:2x8+16 cascade:4x32+5")
    assert (decode.query_lens, decode.seq_lens, decode.phase) == ((1, 1, 1), (40, 40, 40), "decode")
    assert (extend.query_lens, extend.seq_lens, extend.phase) == ((8, 8), (24, 24), "extend")
    assert (cascade.query_lens, cascade.seq_lens, cascade.shared) == ((1,) * 4, (37,) * 4, 32)
    assert cascade.phase == "decode"


def test_sets_are_combined_and_repetitions_left_out():
    names = [load.name for load in parse(["decode:{1,8}x{16,64}", "decode:8x16,extend:1x4"])]
    assert names == ["decode:1x16", "decode:1x64", "decode:8x16", "decode:8x64", "extend:1x4"]


@given(st.integers(1, 999), st.integers(1, 9999), st.integers(0, 9999))
def test_what_is_written_is_what_is_read(rows, new, cached):
    (load,) = parse(f"extend:{rows}x{new}+{cached}")
    assert (load.rows, load.tokens, load.context) == (rows, rows * new, new + cached)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no workload"),
        ("decode", "no such workload"),
        ("prefill:1x2", "no such workload"),
        ("decode:4096", "decode:4096: cannot be read"),
        ("decode:1x2+3", "cannot be read"),
        ("cascade:1x2", "cannot be read"),
        ("cascade:1x2+0", "out of range"),
        ("decode:0x2", "out of range"),
        ("decode:1x99999999999", "out of range"),
        (f"decode:{'9' * 5000}x1", "cannot be read"),
        ("decode:{1,8x4", "braces do not match"),
        ("decode:1}x4", "braces do not match"),
        ("decode:{1,}x4", "cannot be read"),
        (f"decode:{MANY}x{MANY}", "too many"),
    ],
)
def test_what_is_wrong_is_said(text, said):
    with pytest.raises(HeadstockError, match=said):
        parse(text)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=3),
    st.none() | st.integers(1, 8),
    st.integers(0, 3),
)
def test_work_is_what_one_counts(rows, window, shared):
    """Bytes and FLOPs against a count over every pair of a query and a key."""
    shared = min([shared, *(cached for _, cached in rows)])
    load = Workload("extend", tuple(n for n, _ in rows), tuple(n + c for n, c in rows), shared)
    need = Requirement(
        role="extend", phase="extend", attention="paged", device="cpu", dtype="float32", kv_dtype="float32",
        num_heads=6, num_kv_heads=2, head_dim=5, v_head_dim=3, max_context=99, sliding_window=window,
    )  # fmt: skip
    pairs, seen = 0, set()
    for row, (new, cached) in enumerate(rows):
        for query in range(cached, cached + new):
            keys = [key for key in range(query + 1) if window is None or query - key < window]
            pairs += len(keys)
            seen |= {(-1 if key < shared and window is None else row, key) for key in keys}
    tokens = sum(new for new, _ in rows)
    work = load.work(need, 4, 1)
    assert work.flops == pairs * 6 * (2 * 5 + 2 * 3)
    stored = tokens * 2 * (5 + 3) * (4 + 1)
    assert work.num_bytes == len(seen) * 2 * (5 + 3) * 1 + tokens * 6 * 5 * 4 + tokens * 6 * 3 * 4 + stored


def test_presets_are_shapes_that_are_known():
    assert {name: preset(name).layers[0].head_dim for name in PRESETS}["llama-8b"] == 128
    assert {shape.window for shape in preset("gemma-3-1b").layers} == {512, None}
    with pytest.raises(HeadstockError, match="llama-8b, perhaps"):
        preset("lama-8b")


@pytest.fixture
def trace(tmp_path):
    """A trace as an engine writes it: a prompt, twenty decode steps of growing rows, and a mixed step."""
    file = tmp_path / "trace.jsonl"
    written = Trace(file, page_size=16)
    written.write([40], [40], split=True, graph=False, seconds=0.02)
    for step in range(20):
        written.write([1, 1], [41 + step, 45 + step], split=True, graph=step % 2 == 0, seconds=0.003)
    written.write([1, 1, 30], [70, 71, 30], split=True, graph=False, seconds=0.01)
    written.close()
    return file


def test_a_trace_becomes_the_workloads_that_stand_for_it(trace):
    forwards = read_trace(trace)
    assert len(forwards) == 22
    loads = representatives(forwards)
    assert sum(load.weight for load in loads) == 23  # the mixed step ran in two segments
    most = loads[0]
    assert (most.phase, most.rows, most.weight) == ("decode", 2, 20)
    assert most.seq_lens in [forward.kv_lens for forward in forwards]
    assert {load.phase for load in loads} == {"decode", "extend"}
    assert len(representatives(forwards, most=1)) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ('{"phase": "decode"}', "required"),
        (json.dumps({"phase": "decode", "query_lens": [1], "kv_lens": [1, 2], "ms": 1}), "differ in length"),
        (json.dumps({"phase": "decode", "query_lens": [3], "kv_lens": [2], "ms": 1}), "more new tokens than keys"),
    ],
)
def test_a_line_that_is_no_forward_is_named(trace, line, said):
    whole = trace.read_text(encoding="utf-8")
    trace.write_text(f"{line}\n{whole}", encoding="utf-8")
    with pytest.raises(HeadstockError, match=f"trace.jsonl:1 .*{said}"):
        read_trace(trace)


def test_a_torn_last_line_is_left_out_and_an_empty_trace_refused(trace):
    trace.write_text(trace.read_text(encoding="utf-8") + '{"phase": "dec', encoding="utf-8")
    assert len(read_trace(trace)) == 22
    trace.write_text("", encoding="utf-8")
    with pytest.raises(HeadstockError, match="no forward"):
        read_trace(trace)
