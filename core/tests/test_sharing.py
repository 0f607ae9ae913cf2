"""Shared prefixes: levels that partition the rows, tell the truth about pages, and cost the least that can be."""

from __future__ import annotations

from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.batch import SharedLevel
from headstock.kv.sharing import MAX_DEPTH, Sharing


@st.composite
def trees(draw):
    """Rows that each go down a random tree of pages some way; a page has one parent."""
    parents = [draw(st.integers(0, max(page - 1, 0))) for page in range(draw(st.integers(1, 14)))]
    paths = [()]
    for page, parent in enumerate(parents, 1):
        paths.append((*paths[min(parent, page - 1)], page))
    return draw(st.lists(st.sampled_from(paths), min_size=1, max_size=7))


def branches(chains):
    """Every set of two rows or more that have a beginning in common, with how long it is: brute force."""
    longest = {}
    for length in range(1, max(map(len, chains), default=0) + 1):
        together = {}
        for row, pages in enumerate(chains):
            if len(pages) >= length:
                together.setdefault(tuple(pages[:length]), set()).add(row)
        longest |= {frozenset(rows): length for rows in together.values() if len(rows) > 1}
    return longest


def least(chains, most, cost):
    """The cheapest way to read all pages: every choice of branches that are read at once, each after those above it."""
    longest = branches(chains)
    best = sum(map(len, chains))
    for chosen in chain.from_iterable(combinations(longest, n) for n in range(1, len(longest) + 1)):
        saved, depths = 0, []
        for rows in chosen:
            above = [longest[other] for other in chosen if other > rows]
            saved += (longest[rows] - max(above, default=0)) * (len(rows) - 1)
            depths.append(len(above) + 1)
        if max(depths) <= most:
            best = min(best, sum(map(len, chains)) - saved + max(depths) * cost)
    return best


def read(chains, levels, cost):
    """What reading in levels costs: the pages of each run once, the others of each row, and the levels themselves."""
    shared = sum(run.rows * len(run.pages) for level in levels for run in level)
    once = sum(len(run.pages) for level in levels for run in level)
    return sum(map(len, chains)) - shared + once + len(levels) * cost


@settings(max_examples=300, deadline=None)
@given(chains=trees(), most=st.integers(0, 3), cost=st.sampled_from([0, 0.5, 1, 3]))
def test_levels_partition_the_rows_hold_their_leading_pages_and_cost_the_least(chains, most, cost):
    sharing = Sharing(chains)
    levels = sharing.levels(most, cost)
    assert sorted(sharing.order) == list(range(len(chains)))
    assert len(levels) <= most
    begins = [0] * len(chains)
    for level in levels:
        rows = iter(sharing.order)
        for run in level:
            assert run.rows > 0
            for _ in range(run.rows):
                row = next(rows)
                assert tuple(chains[row][begins[row] : begins[row] + len(run.pages)]) == run.pages
                begins[row] += len(run.pages)
        assert next(rows, None) is None
    assert read(chains, levels, cost) == least(chains, most, cost)
    assert read(chains, levels, cost) <= sum(map(len, chains))


@settings(max_examples=100, deadline=None)
@given(chains=trees(), data=st.data())
def test_rows_that_share_lie_together_and_the_same_rows_give_the_same(chains, data):
    sharing = Sharing(chains)
    for rows in branches(chains):
        places = sorted(sharing.order.index(row) for row in rows)
        assert places == list(range(places[0], places[0] + len(rows)))
    again = Sharing(chains)
    assert (again.order, again.levels(3, 1)) == (sharing.order, sharing.levels(3, 1))
    shuffled = data.draw(st.permutations(chains))
    assert read(chains, Sharing(shuffled).levels(3, 1), 1) == read(chains, sharing.levels(3, 1), 1)


def test_two_levels_of_six_rows():
    chains = [[1, 2, 3], [7], [1, 2, 4, 5], [1, 2, 4, 5, 6], [], [1, 2, 3]]
    sharing = Sharing(chains)
    assert sharing.order == [0, 5, 2, 3, 1, 4]
    first, second = sharing.levels(3, 0)
    assert first == ((4, (1, 2)), (2, ()))
    assert second == ((2, (3,)), (2, (4, 5)), (2, ()))
    longer = (((2, (1, 2, 3)), (2, (1, 2, 4, 5)), (2, ())),)
    assert sharing.levels(1, 0) == longer, "in one level it saves 7 reads, the shorter prefix of four rows 6"
    assert sharing.levels(3, 2) == longer, "two levels save 9"
    assert sharing.levels(3, 7) == ()


def test_rows_that_share_nothing_make_one_run():
    """A captured level has room for so many runs."""
    sharing = Sharing([[7], [1], [8], [2], [1], [], [2]])
    assert sharing.order == [1, 4, 3, 6, 0, 2, 5]
    assert sharing.levels(1, 0) == (((2, (1,)), (2, (2,)), (3, ())),)


def test_prefixes_that_part_too_often_are_cut_off_there():
    rows = 3 * MAX_DEPTH
    chains = [list(range(1, row + 2)) for row in range(rows)]
    sharing = Sharing(chains)
    assert sorted(sharing.order) == list(range(rows))
    assert sum(len(level) for level in sharing.levels(3, 0)) >= 3


@pytest.mark.parametrize("runs", [[(4, (1, 2)), (2, ())], [(1, ()), (2, (9,)), (3, (4, 5, 6))]])
def test_a_level_as_a_batch_has_it(runs):
    level = SharedLevel.of(runs)
    rows, pages = level.row_indptr.tolist(), level.page_indptr.tolist()
    assert [end - start for start, end in pairwise(rows)] == [count for count, _ in runs]
    assert [tuple(level.page_indices[a:b].tolist()) for a, b in pairwise(pages)] == [own for _, own in runs]
    assert (level.row_indptr_cpu.tolist(), level.page_indptr_cpu.tolist()) == (rows, pages)
