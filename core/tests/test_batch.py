"""ForwardBatch: positions, slots, offsets and compressed page tables against brute force over rows and tokens."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock import ForwardBatch
from headstock.batch import SharedLevel
from headstock.errors import HeadstockError


@st.composite
def batches(draw):
    """(query_lens, seq_lens, page_size, table): pages in any order, the rest of each row the null page."""
    page_size, rows = draw(st.sampled_from([1, 2, 3, 4, 16])), draw(st.integers(1, 5))
    query_lens = draw(st.lists(st.integers(1, 6), min_size=rows, max_size=rows))
    seq_lens = [q + draw(st.integers(0, 20)) for q in query_lens]
    needed = [-(-n // page_size) for n in seq_lens]
    width = max(needed) + draw(st.integers(0, 2))
    ids = iter(draw(st.permutations(range(1, 1 + rows * width))))
    table = torch.tensor([[next(ids) if i < n else 0 for i in range(width)] for n in needed], dtype=torch.int32)
    return query_lens, seq_lens, page_size, table


@settings(max_examples=150, deadline=None)
@given(batches())
def test_a_paged_batch_by_brute_force(case):
    query_lens, seq_lens, page_size, table = case
    batch = ForwardBatch.from_lengths(query_lens, seq_lens, table, page_size)
    positions, loc, indptr = [], [], [0]
    for row, (queries, keys) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for position in range(keys - queries, keys):
            positions.append(position)
            loc.append(int(table[row, position // page_size]) * page_size + position % page_size)
        indptr.append(indptr[-1] + queries)
    assert batch.positions.tolist() == positions
    assert batch.out_cache_loc.tolist() == loc
    assert batch.query_indptr.tolist() == batch.query_indptr_cpu.tolist() == indptr
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == seq_lens
    assert batch.prefix_lens.tolist() == [keys - queries for queries, keys in zip(query_lens, seq_lens, strict=True)]
    assert (batch.num_reqs, batch.num_real_reqs, batch.num_tokens) == (len(seq_lens), len(seq_lens), len(positions))
    assert (batch.max_query_len, batch.max_seq_len) == (max(query_lens), max(seq_lens))
    decode = set(query_lens) == {1}
    assert (batch.phase, batch.query_len) == (("decode", 1) if decode else ("extend", 0))
    assert (batch.kv_indptr, batch.kv_indptr_cpu, batch.metadata, batch.graph) == (None, None, None, None)
    int32 = (batch.query_indptr, batch.seq_lens, batch.query_indptr_cpu, batch.seq_lens_cpu, batch.page_table)
    assert {x.dtype for x in int32} == {torch.int32}
    assert batch.positions.dtype == batch.out_cache_loc.dtype == torch.int64


def pages_of(lens, first, table, page_size):
    """The compressed rows of keys first × page_size … length, by brute force: (indptr, indices, last_page_len)."""
    indptr, indices, last = [0], [], []
    for row, (length, skip) in enumerate(zip(lens, first, strict=True)):
        keys = range(skip * page_size, max(length, skip * page_size))
        pages = sorted({key // page_size for key in keys})
        indices += [int(table[row, page]) for page in pages]
        indptr.append(len(indices))
        last.append(keys[-1] % page_size + 1 if pages else 0)
    return indptr, indices, last


def check_csr(csr, expected):
    indptr, indices, last = expected
    assert csr.page_indptr.tolist() == csr.page_indptr_cpu.tolist() == indptr
    assert csr.page_indices.tolist() == indices
    assert csr.last_page_len.tolist() == csr.last_page_len_cpu.tolist() == last
    assert {x.dtype for x in (csr.page_indptr, csr.page_indices, csr.last_page_len)} == {torch.int32}


@settings(max_examples=60, deadline=None)
@given(batches(), st.data())
def test_compressed_rows_by_brute_force(case, data):
    query_lens, seq_lens, page_size, table = case
    none = [0] * len(seq_lens)
    # A level of shared prefixes: runs of rows, each with whole pages from the left that its rows all have.
    runs = data.draw(st.lists(st.integers(1, 3), min_size=5, max_size=5))
    bounds = [0]
    for run in runs:
        bounds.append(min(bounds[-1] + run, len(seq_lens)))
    shared = []
    for start, end in itertools.pairwise(bounds):
        prefixes = [k - q for q, k in zip(query_lens[start:end], seq_lens[start:end], strict=True)]
        shared.append(data.draw(st.integers(0, min(prefixes) // page_size)) if end > start else 0)
    row_indptr = torch.tensor(bounds, dtype=torch.int32)
    page_indptr = torch.tensor([0, *torch.tensor(shared).cumsum(0).tolist()], dtype=torch.int32)
    level = SharedLevel(row_indptr, page_indptr, torch.empty(0, dtype=torch.int32), row_indptr, page_indptr)
    first = [pages for pages, run in zip(shared, row_indptr.diff().tolist(), strict=True) for _ in range(run)]

    batch = ForwardBatch.from_lengths(query_lens, seq_lens, table, page_size, shared_levels=(level,))
    prefixes = [keys - queries for queries, keys in zip(query_lens, seq_lens, strict=True)]
    check_csr(batch.csr(), pages_of(seq_lens, none, table, page_size))
    check_csr(batch.csr("prefix"), pages_of(prefixes, none, table, page_size))
    check_csr(batch.csr("own"), pages_of(seq_lens, first, table, page_size))
    assert batch.csr() is batch.csr("all"), "made once"


def test_without_shared_levels_every_page_is_a_rows_own():
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    batch = ForwardBatch.from_lengths([1, 1], [7, 4], table, 4)
    check_csr(batch.csr("own"), ([0, 2, 3], [3, 1, 2], [3, 4]))


def test_two_levels_of_shared_prefixes_add_up():
    table = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 10], [5, 1, 2, 0]], dtype=torch.int32)
    coarse = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3], [0, 1], [5])]
    fine = [torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [0, 1, 1], [6])]
    levels = tuple(SharedLevel(rows, pages, ids, rows, pages) for rows, pages, ids in (coarse, fine))
    batch = ForwardBatch.from_lengths([1, 1, 1], [13, 16, 9], table, 4, shared_levels=levels)
    check_csr(batch.csr("own"), ([0, 2, 4, 6], [7, 8, 9, 10, 1, 2], [1, 4, 1]))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=4))
def test_a_ragged_batch_has_keys_of_its_own_and_no_cache(rows):
    query_lens, seq_lens = (list(lens) for lens in zip(*rows, strict=True))
    batch = ForwardBatch.from_lengths(query_lens, seq_lens, None, phase="extend", causal=False)
    indptr = [0, *torch.tensor(seq_lens).cumsum(0).tolist()]
    assert batch.kv_indptr.tolist() == batch.kv_indptr_cpu.tolist() == indptr
    assert (batch.page_table, batch.out_cache_loc, batch.page_size, batch.causal) == (None, None, 0, False)
    with pytest.raises(HeadstockError, match="needs pages"):
        batch.csr()


def test_cross_attention_reads_a_table_and_writes_nothing():
    table = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
    positions = torch.tensor([40, 41, 42, 7])
    batch = ForwardBatch.from_lengths([3, 1], [2, 0], table, 1, causal=False, write=False, positions=positions)
    assert batch.out_cache_loc is None
    assert batch.positions is positions
    assert batch.prefix_lens.tolist() == [-1, -1]
    check_csr(batch.csr(), ([0, 2, 2], [1, 2], [1, 0]))
    check_csr(batch.csr("prefix"), ([0, 0, 0], [], [0, 0]))


def test_speculative_verify_is_a_decode_batch_with_a_mask_between_new_tokens():
    table = torch.arange(1, 7, dtype=torch.int32).view(2, 3)
    mask = torch.ones(2 * 9, dtype=torch.bool)
    batch = ForwardBatch.from_lengths([3, 3], [9, 4], table, 4, phase="decode", query_mask=mask, num_real_reqs=1)
    assert (batch.phase, batch.query_len, batch.num_real_reqs) == ("decode", 3, 1)
    assert batch.mask_indptr.tolist() == [0, 9, 18]
    assert batch.mask_indptr.dtype == torch.int64


def test_host_lengths_below_exact_withhold_the_host_copies():
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    batch = ForwardBatch.from_lengths([1], [5], table, 4, host_lengths="bound", max_seq_len=8)
    assert (batch.query_indptr_cpu, batch.seq_lens_cpu, batch.max_seq_len) == (None, None, 8)
    assert batch.seq_lens.tolist() == [5]
    with pytest.raises(HeadstockError, match="exact host lengths"):
        batch.csr()


def test_lengths_may_be_tensors():
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    batch = ForwardBatch.from_lengths(torch.tensor([2]), torch.tensor([5], dtype=torch.int32), table, 4)
    assert batch.positions.tolist() == [3, 4]


TABLE = torch.ones(2, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        (([], [], None), {}, "one query length"),
        (([1, 1], [4], TABLE, 4), {}, "one query length"),
        (([0, 1], [4, 4], TABLE, 4), {}, "one query length"),
        (([1, 1], [4, -1], TABLE, 4), {}, "key length ≥ 0"),
        (([1, 2], [4, 4], TABLE, 4), {"phase": "decode"}, "uniform query length"),
        (([3, 1], [2, 1], TABLE, 4), {}, "at least as many keys"),
        (([1, 1], [4, 4], TABLE, 0), {}, "page size 0"),
        (([1, 1], [4, 4], TABLE.long(), 4), {}, "torch.int64"),
        (([1], [4], TABLE, 4), {}, "1 rows"),
        (([1, 1], [4, 9], TABLE, 4), {}, "too narrow"),
        (([1, 1], [4, 4], TABLE, 4), {"positions": torch.tensor([1, 2, 3])}, "one per token"),
        (([2, 2], [4, 4], TABLE, 4), {"query_mask": torch.ones(4, dtype=torch.bool)}, "new × new"),
        (([1, 1], [4, 8], TABLE, 4), {"max_seq_len": 7}, "upper bound"),
        (([1, 1], [4, 8], TABLE, 4), {"num_real_reqs": 3}, "num_real_reqs"),
    ],
)
def test_what_does_not_fit_together_is_refused_in_one_line(arguments, options, said):
    with pytest.raises(HeadstockError) as caught:
        ForwardBatch.from_lengths(*arguments, **options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
