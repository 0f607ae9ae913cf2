"""What the wrappers are told, on a CPU: plans, page tables, and parts that are merged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import standin
import torch
from standin import SMALL, StandinAttention

from headstock import HeadstockError
from headstock.testing.problem import Problem, Result, make_problem
from headstock.testing.rig import Rig
from headstock_flashinfer import choice
from headstock_flashinfer.options import Options


@pytest.fixture(autouse=True)
def told():
    """The plans made in a test."""
    standin.calls.clear()
    return standin.calls


def run(problem: Problem, backend=StandinAttention) -> Result:
    result = Rig(backend, problem.spec).run(problem)
    problem.compare(result)
    return result


def test_a_batch_is_planned_once_for_all_layers(told):
    problem = make_problem([1, 1], [9, 5], **SMALL)
    rig, (batch, storage) = Rig(StandinAttention, problem.spec), problem.fresh()
    rig.plan(batch)
    for _ in range(3):
        problem.compare(rig.forward(problem, batch, storage))
    assert [wrapper for wrapper, _ in told] == ["decode"]
    assert told[0][1]["lens"] == [9, 5]


@pytest.mark.parametrize("phase", ["decode", "extend"])
@pytest.mark.parametrize("k_scale", [2.0**-12, 0.001, 0.01])
def test_no_scale_of_keys_is_so_small_that_hidden_keys_weigh_something(phase, k_scale):
    new = [1] * 6 if phase == "decode" else [3, 1, 4, 1, 1, 2]
    run(make_problem(new, [3, 1, 40, 2, 1, 5], **SMALL | {"dtype": "float16"}, phase=phase, k_scale=k_scale))


@pytest.mark.parametrize(
    ("new", "lens", "fields", "expected"),
    [
        ([1, 1], [9, 5], {"phase": "decode"}, ["decode"]),
        ([3, 3], [9, 5], {"phase": "decode"}, ["decode"]),
        ([3, 3], [9, 5], {"phase": "decode", "causal": False, "cross": True}, ["paged"]),
        ([3, 3], [9, 5], {"phase": "decode", "query_mask": True}, ["paged"]),
        ([3, 2], [9, 2], {}, ["paged"]),
        ([3, 2], [9, 0], {"attention": "ragged", "causal": False, "phases": frozenset({"extend"})}, ["ragged"]),
        ([3, 2], [0, 0], {"attention": "ragged", "causal": False, "phases": frozenset({"extend"}), "lse": True}, []),
        ([1, 1], [9, 5], {"phase": "decode", "lse": True}, ["decode"]),
        ([3, 3], [9, 5], {"phase": "decode", "lse": True}, ["paged"]),
        ([1, 1, 1], [9, 5, 30], {"phase": "decode", "lse": True, "num_heads": 10}, ["paged"]),
        ([3, 2], [9, 2], {"options": Options(extend="split")}, ["ragged", "paged"]),
        ([3, 2], [3, 2], {"options": Options(extend="split")}, ["ragged"]),
        ([1, 1, 1], [13, 15, 9], {"phase": "decode", "shared": (((2, 2), (1, 0)),)}, ["decode", "paged"]),
        ([2, 1, 1], [13, 15, 9], {"phase": "extend", "shared": (((2, 2), (1, 0)), ((1, 1), (2, 0)))}, ["paged"] * 3),
        ([1, 1, 1], [13, 15, 9], {"phase": "decode", "window": 4, "shared": (((2, 2), (1, 0)),)}, ["decode"]),
    ],
)
def test_the_wrappers_of_a_batch_and_what_comes_out(told, new, lens, fields, expected):
    run(make_problem(new, lens, **SMALL | fields))
    assert [wrapper for wrapper, _ in told] == expected


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("fields", [{}, {"sinks": True}, {"softcap": 5.0}])
def test_a_prefix_in_one_call_and_in_two_that_are_merged_are_the_same(lse, fields):
    lens = [4, 11, 30, 9], [4, 19, 31, 40]
    one, two = (
        run(make_problem(*lens, **SMALL, **fields, lse=lse, options=Options(extend=extend)))
        for extend in ("paged", "split")
    )
    torch.testing.assert_close(one.out, two.out, atol=2e-2, rtol=0)


def test_extend_runs_on_the_kernel_of_the_table_and_decode_and_levels_on_fa2(told):
    shared = (((2, 2), (1, 0)),)
    run(make_problem([2, 1, 1], [13, 15, 9], **SMALL, phase="extend", shared=shared))
    run(make_problem([2, 2], [9, 5], **SMALL, phase="decode", causal=False, cross=True))
    assert [plan["kernel"] for _, plan in told] == ["fa3", "fa2", "fa2"]


@pytest.mark.parametrize(("new", "fields"), [([1, 1], {"phase": "decode"}), ([2, 3], {})])
def test_the_log_sum_exp_of_fa2_is_too_rough_to_be_told(monkeypatch, new, fields):
    monkeypatch.setattr(choice, "_tells_lse", lambda use, spec: False)
    fa2 = Options(prefill="fa2", decode="tensor-cores")
    with pytest.raises(AssertionError, match=r"lse \[token, head\] is wrong"):
        run(make_problem(new, [90, 77], **SMALL, **fields, lse=True, options=fa2))


def test_rows_of_one_step_after_the_other_are_planned_without_another_full_plan(told):
    problem = make_problem([1, 1, 1], [9, 5, 14], **SMALL, max_batch=4)
    rig = Rig(StandinAttention, problem.spec)
    for lens in ([9, 5, 14], [10, 6, 15], [3, 60, 1]):
        given = replace(make_problem([1, 1, 1], lens, **SMALL, seed=sum(lens)), spec=problem.spec)
        given.compare(rig.run(given))
    assert len(told) == 1
    fewer = replace(make_problem([1, 1], [7, 8], **SMALL), spec=problem.spec)
    fewer.compare(rig.run(fewer))
    assert len(told) == 2


def test_a_split_prefix_reads_new_tokens_from_the_cache_where_they_are_not_given(told):
    problem = make_problem([4, 11], [9, 19], **SMALL, options=Options(extend="split"))
    cached = replace(problem, k=None, v=None, storage=problem.expected[2])
    run(cached)
    assert [wrapper for wrapper, _ in told] == ["ragged", "paged"]


def test_a_mixed_step_is_the_same_in_one_segment_and_in_two():
    whole = make_problem([1, 1, 7], [20, 9, 12], **SMALL, phase="extend", max_plans=2)
    together, (batch, storage) = run(whole), whole.fresh()
    assert batch.page_table is not None
    rig, outs = Rig(StandinAttention, whole.spec), []
    for rows, phase, tokens in ((slice(0, 2), "decode", slice(0, 2)), (slice(2, 3), "extend", slice(2, 9))):
        part = type(batch).from_lengths(
            batch.query_indptr.diff()[rows], batch.seq_lens[rows], batch.page_table[rows], batch.page_size, phase=phase
        )
        rig.plan(part)
        outs.append((replace(whole, batch=part, q=whole.q[tokens], k=whole.k[tokens], v=whole.v[tokens]), part))
    apart = torch.cat([rig.forward(problem, part, storage).out for problem, part in outs])
    torch.testing.assert_close(apart, together.out, atol=2e-2, rtol=0)


def test_the_mask_of_a_tree_carries_the_window():
    for window in (1, 3, 100):
        run(make_problem([5, 3, 4], [21, 3, 9], **SMALL, phase="extend", query_mask=True, window=window, dropped=8))


def test_a_plan_that_was_given_up_says_so_instead_of_running():
    problem = make_problem([1, 1], [9, 5], **SMALL)
    rig, (first, storage), (second, _) = Rig(StandinAttention, problem.spec), problem.fresh(), problem.fresh()
    rig.plan(first)
    rig.plan(second)
    with pytest.raises(HeadstockError, match="given up for a later one"):
        rig.forward(problem, first, storage)
    problem.compare(rig.forward(problem, second, storage))


def test_a_plan_that_is_forgotten_makes_room_for_the_next():
    problem = make_problem([1, 1], [9, 5], **SMALL, max_plans=2)
    rig, (kept, storage) = Rig(StandinAttention, problem.spec), problem.fresh()
    rig.plan(kept)
    for _ in range(3):
        rig.plan(problem.fresh()[0])
    problem.compare(rig.forward(problem, kept, storage))
