"""What a plan promises beyond right results: no syncs, no loop over decode rows, bounded masks, clear refusals."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headstock import ForwardBatch, HeadstockError, Workspace
from headstock.testing.problem import Problem, make_problem
from headstock.testing.rig import Rig
from headstock_torch_native import attention_backends
from headstock_torch_native import plan as plan_module
from headstock_torch_native.backend import TorchNative
from headstock_torch_native.plan import CHUNK_ELEMENTS, _cut, plan

SYNCS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "item", "is_nonzero"}
NONE = Workspace(torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8))


class Recorder(TorchDispatchMode):
    """The operators that run inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def recorded(problem: Problem) -> tuple[list[str], list[str]]:
    """The operators of planning and of one layer."""
    backend = TorchNative(problem.spec, NONE)
    layer, batch = problem.layer(problem.storage), replace(problem.batch)
    out = torch.empty(batch.num_tokens, problem.spec.num_heads, problem.spec.v_head_dim)
    with Recorder() as planning:
        backend.init_forward_metadata(batch)
    with Recorder() as layers:
        backend.forward(problem.q, problem.k, problem.v, layer, batch, out=out)
    return planning.names, layers.names


@pytest.mark.parametrize("extra", [{}, {"window": 3}, {"softcap": 2.0}, {"query_mask": True}, {"alibi": True}])
@pytest.mark.parametrize("query_len", [1, 3])
def test_decoding_never_asks_the_device_and_never_loops_over_rows(query_len, extra):
    lens = [5, 9, 17, 4, 30, 8]
    few, many = (
        make_problem([query_len] * rows, lens[:rows], phase="decode", host_lengths="bound", **extra) for rows in (3, 6)
    )
    planning, layer = recorded(many)
    assert not SYNCS & {*planning, *layer}
    assert recorded(few) == (planning, layer)


@pytest.mark.parametrize("extra", [{}, {"window": 3}, {"softcap": 2.0}, {"query_mask": True}])
def test_extending_never_asks_the_device_in_a_layer(extra):
    _, layer = recorded(make_problem([4, 1, 9], [4, 8, 20], **extra))
    assert not SYNCS & set(layer)


def test_a_plan_is_kept_by_its_batch_so_several_live_at_once():
    first, second = make_problem([1, 1], [5, 9]), make_problem([3], [12])
    backend = TorchNative(first.spec, NONE)
    for problem in (first, second):
        backend.init_forward_metadata(problem.batch)
    for problem in (first, second):
        want, _, _ = problem.expected
        out = torch.empty(problem.batch.num_tokens, 4, 16)
        layer = problem.layer(problem.storage)
        backend.forward(problem.q, problem.k, problem.v, layer, problem.batch, out=out)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=problem.tolerance()[0])


@pytest.mark.parametrize("host_lengths", ["exact", "bound"])
def test_the_keys_of_a_shared_prefix_are_gathered_once_for_all_of_its_rows(host_lengths):
    shared = (((5, 6), (1, 0)), ((2, 2), (3, 1), (1, 0)))
    lens = [33, 35, 31, 29, 30, 4]
    problem = make_problem([1] * 6, lens, shared=shared, host_lengths=host_lengths)
    backend, view = TorchNative(problem.spec, NONE), problem.layer(problem.storage).kv
    read: list[int] = []

    class Counting:
        """The cache, which notes which slots are read."""

        def write(self, *tokens: torch.Tensor) -> None:
            view.write(*tokens)

        def gather(self, loc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            read.extend(loc.tolist())
            return view.gather(loc)

    batch = replace(problem.batch)
    backend.init_forward_metadata(batch)
    out = torch.empty(6, problem.spec.num_heads, problem.spec.v_head_dim)
    backend.forward(problem.q, problem.k, problem.v, replace(problem.layer(None), kv=Counting()), batch, out=out)
    assert batch.page_table is not None
    reads = Counter(slot // 4 for slot in read)
    for level in batch.shared_levels:
        assert {reads[page] for page in level.page_indices.tolist()} == {4}, "each of its 4 slots, once"
    own = 4 if host_lengths == "exact" else max(lens)  # all that the host knows of the row that shares nothing
    assert len(read) == (6 + 2 + 1) * 4 + 6 * own


def test_masks_of_a_long_prompt_share_bounded_memory():
    table = torch.arange(1, 1 + 3 * 2048, dtype=torch.int32).view(3, 2048)
    batch = ForwardBatch.from_lengths([4000, 2000, 1000], [20_000, 30_000, 1000], table, 16)
    spec = make_problem([1], [1], page_size=16).spec
    masks = [block.mask for block in plan(spec, batch, torch.float32)]
    assert masks[-1] is None, "a prompt without prefix is a plain triangle"
    memory = {mask.untyped_storage().data_ptr(): mask.untyped_storage().nbytes() for mask in masks if mask is not None}
    assert sum(memory.values()) <= 4 * CHUNK_ELEMENTS


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention": "mla"}, "mla"),
        ({"graph_buckets": ((4, 1, 0),)}, "graph"),
        ({"batch_invariant": True}, "batch_invariant"),
        ({"kv_dtype": "bfloat16"}, "kv_dtypes bfloat16"),
        ({"num_kv_heads": 3}, "4 query heads do not share 3"),
    ],
)
def test_a_spec_beyond_the_offer_is_refused_at_construction(change, named):
    spec = replace(make_problem([1], [1]).spec, **change)
    with pytest.raises(HeadstockError, match=named):
        TorchNative(spec, NONE)


def test_lse_that_was_not_planned_is_refused():
    problem = make_problem([1], [4])
    backend, batch = TorchNative(problem.spec, NONE), problem.batch
    backend.init_forward_metadata(batch)
    layer, out, lse = problem.layer(problem.storage), torch.empty(1, 4, 16), torch.empty(1, 4)
    with pytest.raises(HeadstockError, match="lse=True"):
        backend.forward(problem.q, problem.k, problem.v, layer, batch, out=out, lse=lse)


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({}, {"kernel": "sdpa"}),
        ({"sinks": True}, {"kernel": "matmul"}),
        ({"lse": True}, {"kernel": "matmul"}),
        ({"kv_dtype": "float8_e4m3fn"}, {"kernel": "sdpa", "upcast": "float32"}),
        ({"dtype": "bfloat16"}, {"kernel": "sdpa"}),
        ({"dtype": "bfloat16", "softcap": 5.0}, {"kernel": "matmul", "upcast": "float32"}),
    ],
)
def test_describe_names_the_way_to_attend_and_its_dtype(extra, told):
    problem = make_problem([1, 1], [4, 5], **extra)
    backend = TorchNative(problem.spec, NONE)
    backend.init_forward_metadata(problem.batch)
    assert backend.describe(problem.batch) == {"blocks": 1, **told}


def test_the_manifest_needs_no_torch():
    code = "import sys, headstock_torch_native as m; m.attention_backends(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_offer_covers_both_phases_and_both_kinds():
    (offer,) = attention_backends()
    assert (offer.name, offer.aliases) == ("torch-native", ("torch",))
    extend, decode, *latent = offer.capabilities
    assert (extend.phases, extend.host_lengths) == ({"extend"}, "exact")
    assert (decode.phases, decode.host_lengths) == ({"decode"}, "bound")
    assert extend.attention == decode.attention == {"paged", "ragged"}
    assert [record.attention for record in latent] == [{"mla"}, {"mla"}]


@pytest.mark.parametrize(
    "fields",
    [{}, {"window": 3}, {"softcap": 5.0, "sinks": True}, {"alibi": True, "lse": True}, {"query_len": 2, "lse": True},
     {"attention": "mla", "num_kv_heads": 1, "head_dim": 24, "v_head_dim": 16}],
    ids=["plain", "window", "softcap", "lse", "two-tokens", "latent"],
)  # fmt: skip
def test_rows_of_other_lengths_may_be_blocks_of_their_own(monkeypatch, fields):
    fields = dict(fields)
    n = fields.pop("query_len", 1)
    lens = [40, 3, 38, 4, 17, 2, 40]
    problem = make_problem([n] * len(lens), lens, phase="decode", **fields)
    monkeypatch.setattr(plan_module, "BLOCK_BYTES", {"cpu": 1})
    rig = Rig(TorchNative, problem.spec)
    problem.compare(rig.run(problem))
    rig.plan(problem.batch)
    blocks = problem.batch.metadata
    assert len(blocks) > 1
    assert sorted(token for block in blocks for token in block.apart.tolist()) == list(range(n * len(lens)))


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30), st.integers(0, 1000))
def test_a_cut_has_every_row_once_and_no_block_wastes_more_than_it_costs(lengths, cost):
    blocks = _cut(lengths, cost)
    assert sorted(row for rows in blocks for row in rows) == list(range(len(lengths)))
    for rows in blocks:
        assert sum(lengths[rows[0]] - lengths[row] for row in rows) <= cost
