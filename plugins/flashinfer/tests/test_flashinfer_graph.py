"""The life of a captured size, on a CPU: replays of other rows, planned again or not, and what they fall back from."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import standin
import torch
from standin import SMALL, StandinAttention

from headstock import GraphFallback
from headstock.testing.draw import page_table, shared_levels
from headstock.testing.graphs import Device, GraphBucket
from headstock.testing.problem import Problem, Result, make_problem
from headstock.testing.rig import Rig
from headstock_flashinfer.accessor import Library


class Captured:
    """One captured size, with static buffers that this test writes as the host does, and a graph over them."""

    def __init__(self, backend, rows: int, levels: int, n: int = 1, context: int = 64):
        self.rows, self.n, self.context = rows, n, context
        fields = SMALL | {
            "graph_buckets": (GraphBucket(rows, n, levels),),
            "max_context": context,
            "max_levels": levels,
        }
        self.fields = fields | {"lse": n == 1 and not levels, "phase": "decode", "query_lens": [n] * rows}
        self.spec = self.problem([context] * rows, ()).spec
        self.spec = replace(self.spec, max_levels=levels)
        self.rig = Rig(backend, self.spec)
        self.rig.instance.init_cuda_graph_state([])
        self.width = context // self.spec.page_size
        self.batch = None

    def problem(self, lens, shared) -> Problem:
        fields = {name: value for name, value in self.fields.items() if name != "query_lens"}
        return make_problem([self.n] * len(lens), lens, **fields, shared=shared, seed=sum(lens))

    def load(self, given: Problem, graph: str):
        """The problem's batch in static tensors, padded to the captured rows."""
        lens = given.batch.seq_lens.tolist()
        missing = self.rows - len(lens)
        table = torch.zeros(self.rows, self.width, dtype=torch.int32)
        table[: len(lens), : given.batch.page_table.shape[1]] = given.batch.page_table
        batch = type(given.batch).from_lengths(
            [self.n] * self.rows, lens + [self.n] * missing, table, self.spec.page_size, phase="decode",
            max_seq_len=self.context,
        )  # fmt: skip
        levels = tuple(self.padded(level, missing) for level in given.batch.shared_levels)
        if self.batch is None:
            self.batch, self.batch.shared_levels = batch, tuple(self.static(level) for level in levels)
        for name in ("query_indptr", "seq_lens", "positions", "page_table", "out_cache_loc"):
            getattr(self.batch, name).copy_(getattr(batch, name))
        for static, level in zip(self.batch.shared_levels, levels, strict=True):
            for name in ("row_indptr", "page_indptr"):
                getattr(static, name).copy_(getattr(level, name))
                getattr(static, f"{name}_cpu").copy_(getattr(level, name))
            static.page_indices[: len(level.page_indices)].copy_(level.page_indices)
        self.batch.seq_lens_cpu, self.batch.graph = batch.seq_lens_cpu, graph
        self.batch._csr.clear()
        return self.batch

    def padded(self, level, missing: int):
        """The level as the host has it: as many runs as rows, and more of no rows and no pages."""
        rows, pages = level.row_indptr_cpu, level.page_indptr_cpu
        more = self.rows + 1 - len(rows)
        rows = torch.cat((rows, rows.new_full((more,), self.rows)))
        pages = torch.cat((pages, pages[-1:].expand(more)))
        assert not missing or more, "the first of them takes the rows that are padding"
        return replace(level, row_indptr=rows, page_indptr=pages, row_indptr_cpu=rows, page_indptr_cpu=pages)

    def static(self, level):
        """A level of the same sizes whose tensors stay."""
        room = torch.zeros(self.rows * self.width, dtype=torch.int32)
        indptrs = [level.row_indptr.clone() for _ in range(4)]
        return replace(
            level, row_indptr=indptrs[0], page_indptr=indptrs[1], row_indptr_cpu=indptrs[2],
            page_indptr_cpu=indptrs[3], page_indices=room,
        )  # fmt: skip

    def capture(self, given: Problem):
        batch, tokens = self.load(given, "capture"), self.rows * self.n
        self.rig.instance.init_forward_metadata_capture_cuda_graph(batch)
        self.q, self.k, self.v = (
            torch.zeros(tokens, heads, 64, dtype=torch.bfloat16)
            for heads in (self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads)
        )
        self.out = torch.zeros_like(self.q)
        self.lse = torch.zeros(tokens, self.spec.num_heads) if self.spec.lse else None
        self.storage = torch.zeros(300, given.storage.shape[1], dtype=torch.uint8)
        layer = given.layer(self.storage)

        def step():
            self.rig.instance.init_forward_metadata_in_graph(batch)
            self.rig.instance.forward(self.q, self.k, self.v, layer, batch, out=self.out, lse=self.lse)

        step()
        self.graph = Device.open("cpu").capture(step)

    def replay(self, given: Problem):
        batch = self.load(given, "replay")
        self.rig.instance.init_forward_metadata_replay_cuda_graph(batch)
        tokens = given.batch.num_tokens
        self.storage.fill_(255)[: len(given.storage)].copy_(given.storage)
        for static, x in ((self.q, given.q), (self.k, given.k), (self.v, given.v)):
            static[:tokens].copy_(x)
        self.graph.replay()
        lse = None if self.lse is None else self.lse[:tokens]
        given.compare(Result(self.out[:tokens], lse, self.storage[: len(given.storage)]))


def grouped(draw: random.Random, rows: int, depth: int, page: int = 4, context: int = 64):
    """Random groups of rows with pages in common, each level within the groups of the one before, and lengths."""
    shared, begin, groups = [], [0] * rows, [rows]
    for _ in range(depth):
        runs = []
        for left in groups:
            while left:
                runs.append((draw.randint(1, left), draw.choice((0, 1, 3))))
                left -= runs[-1][0]
        shared.append(tuple(runs))
        groups = [count for count, _ in runs]
        pages = [width for count, width in runs for _ in range(count)]
        begin = [start + width * page for start, width in zip(begin, pages, strict=True)]
    return tuple(shared), [start + draw.randint(1, context - start) for start in begin]


@pytest.mark.parametrize(("rows", "levels"), [(4, 1), (6, 2), (24, 1)])
def test_replays_read_other_prefixes_than_were_captured(rows, levels):
    stand, draw = Captured(StandinAttention, rows, levels), random.Random(rows)
    stand.capture(stand.problem([1] * rows, (((rows, 0),),) * levels))
    done = 0
    while done < 12:
        shared, lens = grouped(draw, draw.randint(max(rows - 3, 1), rows), levels)
        given = stand.problem(lens, shared)
        try:
            stand.replay(given)
            done += 1
        except GraphFallback as fallback:
            assert "more shared prefixes" in fallback.reason  # noqa: PT017


def test_more_prefixes_than_a_level_was_captured_for_run_eagerly():
    stand = Captured(StandinAttention, 24, 1)
    stand.capture(stand.problem([1] * 24, (((24, 0),),)))
    alone = stand.problem([9] * 24, (tuple((1, 1) for _ in range(24)),))
    with pytest.raises(GraphFallback, match="more shared prefixes"):
        stand.rig.instance.init_forward_metadata_replay_cuda_graph(stand.load(alone, "replay"))


def test_a_stale_plan_is_told_by_the_stand_in():
    stand = Captured(StandinAttention, 4, 0)
    stand.capture(stand.problem([1] * 4, ()))
    stand.load(stand.problem([9, 30, 2, 17], ()), "replay")
    with pytest.raises(AssertionError, match="a stale plan"):
        stand.graph.replay()


def planned(stand: Captured) -> list[list[int]]:
    """The pages of every plan from here on."""
    own, found = stand.rig.instance.buckets[stand.rows, stand.n, 0].own, []
    plan = own.again._plan

    def counted(*arguments):
        found.append(arguments[4].diff().tolist() if own.kernel != "cuda-cores" else arguments[3].diff().tolist())
        return plan(*arguments)

    own.again._plan = counted
    return found


@pytest.mark.parametrize("n", [1, 2])
def test_a_replay_is_planned_only_where_a_row_has_other_pages(n):
    stand = Captured(StandinAttention, 3, 0, n)
    stand.capture(stand.problem([n] * 3, ()))
    found = planned(stand)
    for lens in ([5, 6, 9], [6, 7, 10], [7, 8, 11], [8, 9, 12], [8, 9], [8, 9, 2]):
        stand.replay(stand.problem(lens, ()))
    assert found == [[2, 2, 3], [2, 3, 3], [2, 3, 1]]


def test_after_a_plan_that_could_not_be_used_the_same_rows_are_planned_anew():
    stand = Captured(StandinAttention, 3, 0)
    stand.capture(stand.problem([1] * 3, ()))
    bucket = stand.rig.instance.buckets[3, 1, 0]
    kept, bucket.captured = bucket.captured, [(0,)]
    given, found = stand.problem([9, 30, 2], ()), planned(stand)
    for _ in range(2):
        with pytest.raises(GraphFallback, match="differs from the captured one"):
            stand.replay(given)
    bucket.captured = kept
    stand.replay(given)
    assert len(found) == 3


# What is not FlashInfer's public API


class Elsewhere(standin.BatchDecodeWithPagedKVCacheWrapper):
    """A wrapper whose source has none of the names."""


class Moved(Library):
    """A release that keeps its plans, and what makes them, elsewhere."""

    def __init__(self):
        super().__init__(SimpleNamespace(**{name: getattr(standin, name) for name in dir(standin) if name[0] != "_"}))
        self.decode_wrapper = Elsewhere

    @staticmethod
    def plan_info(wrapper):
        return None


def test_without_private_attributes_replays_are_planned_in_full_and_still_right():
    moved = Moved()

    class Backend(StandinAttention):
        @staticmethod
        def library():
            return moved

    stand = Captured(Backend, 4, 0)
    stand.capture(stand.problem([1] * 4, ()))
    for lens in ([9, 30, 2, 17], [64], [1, 2]):
        stand.replay(stand.problem(lens, ()))
    assert moved.lacks()[0].startswith("no planner to call")


def test_nothing_is_lacking_in_what_the_stand_in_stands_for():
    assert StandinAttention.library().lacks() == []


def test_the_levels_of_this_file_are_those_of_the_suite():
    shared = (((2, 2), (1, 0)),)
    table, _ = page_table([9, 10, 3], 3, 4, torch.Generator().manual_seed(0), shared=shared)
    [level] = shared_levels(table, shared, "cpu")
    assert level.row_indptr.tolist() == [0, 2, 3]
    assert level.page_indptr.tolist() == [0, 2, 2]
