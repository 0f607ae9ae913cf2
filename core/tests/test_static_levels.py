"""Static levels: what they tell a backend is what levels made for the batch would, and empty runs at the end."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock import ForwardBatch
from headstock.batch import SharedLevel
from headstock.kv.sharing import Run, Sharing
from headstock.runner.static_levels import StaticLevels

WIDTH, PAGE = 8, 4


@st.composite
def chains(draw):
    """Rows that share as beams do: each goes on from some page of an earlier one, or begins anew."""
    rows, pages = [], iter(range(1, 1000))
    for _ in range(draw(st.integers(1, 6))):
        kept = draw(st.sampled_from([(), *rows]))
        kept = kept[: draw(st.integers(0, len(kept)))]
        new = draw(st.integers(0, WIDTH - len(kept)))
        rows.append((*kept, *(next(pages) for _ in range(new))))
    return rows


@st.composite
def batches(draw):
    """(levels, each row's pages in the order of the levels, rows and levels that the static ones have room for)."""
    sharing = Sharing(draw(chains()))
    levels = sharing.levels(draw(st.integers(0, 3)), 0)
    rows = [sharing.chains[place] for place in sharing.order]
    return levels, rows, len(rows) + draw(st.integers(0, 3)), max(len(levels) + draw(st.integers(0, 1)), 1)


def filled(static, levels, pages):
    """The static levels of these, as after a fill."""
    numbers = np.array(StaticLevels.encode(levels, static.rows, len(static.levels)))
    assert len(numbers) == StaticLevels.numbers(static.rows, len(static.levels))
    table = torch.zeros(static.rows, WIDTH, dtype=torch.int32)
    for row, own in zip(table, pages, strict=False):
        row[: len(own)] = torch.tensor(own)
    static.derive(torch.from_numpy(numbers), table)
    return static.told(numbers), table


@settings(max_examples=100, deadline=None)
@given(drawn=batches())
def test_static_levels_tell_what_levels_of_the_batch_would(drawn):
    levels, pages, rows, count = drawn
    static = StaticLevels(rows, WIDTH, count, torch.device("cpu"))
    told, _ = filled(static, levels, pages)
    for number, level in enumerate(told):
        want = SharedLevel.of(levels[number] if number < len(levels) else [(len(pages), ())])
        assert torch.equal(level.row_indptr, level.row_indptr_cpu)
        assert torch.equal(level.page_indptr, level.page_indptr_cpu)
        runs, used = len(want.row_indptr), int(want.page_indptr[-1])
        if number < len(levels):
            assert torch.equal(level.row_indptr[:runs], want.row_indptr)
            assert torch.equal(level.page_indptr[:runs], want.page_indptr)
        assert torch.equal(level.page_indices[:used], want.page_indices)
        assert not level.page_indices[used:].any(), "what no run has is the null page"
        assert int(level.page_indptr[-1]) == used, "runs at the end have no page"
        assert len(level.row_indptr) == len(level.page_indptr) == rows + 1
        assert level.row_indptr[0] == 0
        assert level.row_indptr[-1] == rows, "padding is in a run too"
        assert bool((level.row_indptr.diff() >= 0).all())


@settings(max_examples=100, deadline=None)
@given(drawn=batches(), data=st.data())
def test_the_rows_own_pages_are_those_that_no_level_holds(drawn, data):
    levels, pages, rows, count = drawn
    static = StaticLevels(rows, WIDTH, count, torch.device("cpu"))
    told, table = filled(static, levels, pages)
    lens = [max(len(own), 1) * PAGE - data.draw(st.integers(0, PAGE - 1)) for own in pages]
    lens += [1] * (rows - len(lens))
    batch = ForwardBatch.from_lengths([1] * rows, lens, table, PAGE, phase="decode", shared_levels=told)
    exact = tuple(SharedLevel.of([*level, Run(rows - len(pages), ())]) for level in levels)
    own, want = batch.csr("own"), replace(batch, shared_levels=exact, _csr={}).csr("own")
    for name in ("page_indptr", "page_indices", "last_page_len"):
        assert torch.equal(getattr(own, name), getattr(want, name)), name


@settings(max_examples=50, deadline=None)
@given(fills=st.lists(chains(), min_size=2, max_size=4))
def test_nothing_is_left_of_the_fill_before_and_addresses_stay(fills):
    rows = 6
    static = StaticLevels(rows, WIDTH, 2, torch.device("cpu"))
    where = [level.page_indices.data_ptr() for level in static.levels]
    for given_chains in fills:
        sharing = Sharing(given_chains)
        levels, pages = sharing.levels(2, 0), [given_chains[place] for place in sharing.order]
        told, _ = filled(static, levels, pages)
        fresh, _ = filled(StaticLevels(rows, WIDTH, 2, torch.device("cpu")), levels, pages)
        for level, new in zip(told, fresh, strict=True):
            for name in SharedLevel.__dataclass_fields__:
                assert torch.equal(getattr(level, name), getattr(new, name)), name
        assert [level.page_indices.data_ptr() for level in told] == where


@settings(max_examples=100, deadline=None)
@given(drawn=batches())
def test_a_run_has_the_pages_of_its_first_row_after_those_of_coarser_levels(drawn):
    levels, pages, rows, count = drawn
    told, table = filled(StaticLevels(rows, WIDTH, count, torch.device("cpu")), levels, pages)
    begins = [0] * rows
    for level in told:
        runs = zip(pairwise(level.row_indptr.tolist()), pairwise(level.page_indptr.tolist()), strict=True)
        for (first, stop), (a, b) in runs:
            for row in range(first, stop):
                own = table[row, begins[row] : begins[row] + b - a]
                assert torch.equal(own, level.page_indices[a:b]), f"row {row} has other pages there"
                begins[row] += b - a
