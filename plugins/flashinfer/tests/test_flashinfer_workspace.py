"""Workspaces from shapes: FlashInfer's own figures to the byte, and never less than a plan needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from standin import StandinAttention

from headstock import BackendSpec, ForwardBatch, HeadstockError, Workspace
from headstock_flashinfer.choice import choose
from headstock_flashinfer.options import Options
from headstock_flashinfer.workspace import Planner, segments, tile

LLAMA = BackendSpec(
    device="cpu", compute_capability=90, num_sms=132, dtype="bfloat16", kv_dtype="bfloat16", num_heads=32,
    num_kv_heads=8, head_dim=128, v_head_dim=128, scale=0.1, page_size=16, kv_layout="nhd", max_batch=64,
    max_tokens=512, max_context=4096,
)  # fmt: skip
LARGE = replace(LLAMA, num_heads=64)
MIB = 2**20


def graph_floats(spec, rows, version="0.7.0"):
    return Planner(spec, choose(spec), version).graph(rows, 1, 0).floats


@pytest.mark.parametrize(
    ("spec", "rows", "version", "mib"),
    [
        (LLAMA, 256, "0.7.0", 80),
        (LLAMA, 512, "0.7.0", 160),
        (LARGE, 256, "0.7.0", 192),
        (LARGE, 512, "0.7.0", 386),
        (LLAMA, 256, "0.7.4", 20),
        (LLAMA, 512, "0.7.4", 40),
        (LARGE, 256, "0.7.4", 24),
        (LARGE, 512, "0.7.4", 48),
    ],
)
def test_known_graphs_take_what_flashinfer_is_known_to_ask_for(spec, rows, version, mib):
    assert graph_floats(spec, rows, version) / MIB == pytest.approx(mib, rel=0.01)


def test_a_reported_overflow_is_reproduced_to_the_byte():
    """FlashInfer asked a server for 536346624 bytes of partial outputs where 394 MiB were reserved."""
    spec = replace(LLAMA, num_heads=32, num_kv_heads=2, head_dim=256, v_head_dim=256)
    outputs, sums = 32 * 1023 * 16 * 256 * 4, 32 * 1023 * 16 * 4
    assert outputs == 536_346_624
    assert graph_floats(spec, 512) == outputs + sums


@pytest.mark.parametrize(("packed", "dim", "rows"), [(16, 128, 16), (17, 128, 64), (64, 128, 64), (65, 128, 128),
                                                     (65, 256, 64), (4, 256, 16)])  # fmt: skip
def test_tiles_are_those_of_the_planner(packed, dim, rows):
    assert tile(packed, dim) == rows


@given(st.integers(1, 300), st.sampled_from((1, 2, 4, 7, 8)), st.sampled_from((64, 128, 256)))
def test_a_level_has_as_many_segments_as_keep_the_largest_tile(tokens, group, dim):
    most, largest = segments(tokens, group, dim), tile(tokens * group, dim)
    assert 1 <= most <= tokens
    assert tile((tokens - most + 1) * group, dim) == largest
    assert most == tokens or tile((tokens - most) * group, dim) < largest


SPECS = st.builds(
    lambda heads, ratio, dim, page, kernel, **fields: replace(
        LLAMA, num_heads=heads * ratio, num_kv_heads=heads, head_dim=dim, v_head_dim=dim, page_size=page,
        options=Options(prefill=kernel, ragged=kernel), **fields,
    ),
    st.sampled_from((1, 2, 8)), st.sampled_from((1, 3, 4, 8)), st.sampled_from((64, 128, 256)),
    st.sampled_from((1, 16, 64)), st.sampled_from(("fa2", "fa3")), max_batch=st.integers(1, 40),
    max_plans=st.integers(1, 3), num_sms=st.sampled_from((0, 132)),
    window=st.sampled_from((None, 100)),
)  # fmt: skip


def planned(spec, query_lens, seq_lens, phase, levels=()):
    """Plans a batch in exactly the memory that the backend asked for; nothing is run."""
    sizes = StandinAttention.workspace_bytes(spec)
    backend = StandinAttention(spec, Workspace(*(torch.zeros(n, dtype=torch.uint8) for n in sizes)))
    width = -(-max(seq_lens) // spec.page_size)
    table = torch.zeros(len(seq_lens), width, dtype=torch.int32)
    batch = ForwardBatch.from_lengths(query_lens, seq_lens, table, spec.page_size, phase=phase, shared_levels=levels)
    backend.init_forward_metadata(batch)
    return backend, batch


@settings(deadline=None, max_examples=40)
@given(SPECS, st.data())
def test_any_batch_within_the_spec_can_be_planned_in_what_was_asked_for(spec, data):
    rows = data.draw(st.integers(1, spec.max_batch))
    if data.draw(st.booleans()):
        n = data.draw(st.integers(1, 8))
        spec = replace(spec, query_lens=frozenset({n}), max_tokens=max(spec.max_tokens, spec.max_batch * n))
        lens = data.draw(st.lists(st.integers(n, spec.max_context), min_size=rows, max_size=rows))
        planned(replace(spec, phases=frozenset({"decode"})), [n] * rows, lens, "decode")
        return
    new = data.draw(st.lists(st.integers(1, spec.max_tokens // rows), min_size=rows, max_size=rows))
    lens = [n + data.draw(st.integers(0, spec.max_context - n)) for n in new]
    planned(replace(spec, phases=frozenset({"extend"})), new, lens, "extend")


@pytest.mark.parametrize("options", [Options(decode="cuda-cores"), Options()])
def test_invariant_and_cuda_core_decode_can_be_planned(options):
    spec = replace(LLAMA, batch_invariant=options == Options(), options=options, phases=frozenset({"decode"}))
    backend, batch = planned(spec, [1] * 64, [4096] * 64, "decode")
    assert backend.describe(batch)["tensor_cores"] is (options == Options())


def test_a_workspace_that_is_too_small_is_named_with_what_is_needed_when_the_backend_starts():
    scratch, state = (torch.zeros(n, dtype=torch.uint8) for n in StandinAttention.workspace_bytes(LLAMA))
    with pytest.raises(HeadstockError, match=f"too small.*{len(scratch) - 1}.*{len(scratch)}"):
        StandinAttention(LLAMA, Workspace(scratch[:-1], state))


def test_the_stand_in_overflows_where_flashinfer_would():
    spec = replace(LLAMA, phases=frozenset({"decode"}))
    backend, batch = planned(spec, [1] * 4, [4096] * 4, "decode")
    backend.make.scratch = backend.make.scratch[:1024]
    backend.pool._slots[0]._wrappers.clear()
    with pytest.raises(RuntimeError, match="Buffer overflow when allocating memory for batch_prefill_tmp_v"):
        backend.init_forward_metadata(replace(batch, metadata=None))
