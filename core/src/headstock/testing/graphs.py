"""The life of a captured graph, driven as the host drives it: capture by size, replay with other lengths, compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from headstock.backend import AttentionBackend, GraphBucket
from headstock.batch import ForwardBatch, SharedLevel
from headstock.device import Device
from headstock.kv.sharing import Level, Run
from headstock.runner.levels import Shared
from headstock.runner.refresh import GroupPages
from headstock.runner.static_batch import StaticStep
from headstock.testing.draw import Segments
from headstock.testing.problem import POISON, Problem, Result, make_problem
from headstock.testing.replays import Replays
from headstock.testing.rig import Rig

SIZES = (1, 2, 4)
"""Rows of the captured buckets."""
CONTEXT = 32
"""Tokens of the longest context, which is also the bound that graphs are captured with; with large pages four pages."""


def replays_equal_eager(backend: type[AttentionBackend], fields: Mapping[str, Any]) -> None:
    """Replays of other lengths than captured give the reference's numbers and an eager forward's bits, every time.

    Larger and smaller batches follow each other, padded and not, with eager forwards between them; each replay runs
    twice. Padding is NaN; no padded row touches a live slot. With `max_levels` among the fields graphs read shared
    prefixes, other ones at each replay; `replays` adds so many batches of any rows, lengths and sharing.
    """
    stand = _Stand(backend, fields)
    for lens, shared in stand.replays:
        try:
            given = stand.replay(lens, shared)
            stand.eager_between(given)
        except AssertionError as error:
            sharing = f" that share {shared}" if shared else ""
            raise AssertionError(f"{error}; in a replay of rows of {lens} keys{sharing}") from None


class _Stand:
    """Static inputs, captured graphs by size, and the one cache they read."""

    def __init__(self, backend: type[AttentionBackend], fields: Mapping[str, Any]):
        self.backend = backend
        self.fields = {name: value for name, value in fields.items() if name not in ("query_lens", "seq_lens")}
        self.n, drawn = int(self.fields.pop("query_len", 1)), int(self.fields.pop("replays", 0))
        levels, page = int(self.fields.get("max_levels", 0)), int(self.fields["page_size"])
        self.context = max(CONTEXT, 4 * page)
        self.replays = Replays(SIZES[-1], self.n, page, self.context, levels, drawn)
        buckets = [GraphBucket(size, self.n, levels) for size in SIZES if size > levels]
        if levels:
            buckets.append(GraphBucket(SIZES[-1], self.n))
        fixed = {"graph_buckets": tuple(buckets), "max_context": self.context}
        self.fields |= fixed | {"max_batch": SIZES[-1], "max_tokens": 64}
        largest = self._problem([self.context] * SIZES[-1])
        self.spec = largest.spec
        self.rig = Rig(backend, self.spec)
        width = -(-self.context // self.spec.page_size)
        self.table = torch.zeros(SIZES[-1] + 1, width, dtype=torch.int32, device=self.spec.device)
        assert largest.storage is not None, "graphs are of paged batches"
        of = None  # a window has a cache of its own, and so a table no wider than it shows: here with the same pages
        if self.spec.window is not None and not levels:
            of = torch.arange(len(largest.storage), dtype=torch.int32, device=self.spec.device)
        self.static = StaticStep(Device.open(self.spec.device), {"all": (self.spec, GroupPages(self.table, of))})
        self.rig.instance.init_cuda_graph_state([batches["all"] for batches in self.static.batches.values()])
        assert largest.k is not None, "and of new tokens"
        self.storage = torch.full_like(largest.storage, POISON)
        self.layer = largest.layer(self.storage)
        self.q, self.k = torch.zeros_like(largest.q), torch.zeros_like(largest.k)
        self.v = None if largest.v is None else torch.zeros_like(largest.v)  # none beside a latent
        self.out = torch.zeros(*largest.q.shape[:2], self.spec.v_head_dim, dtype=largest.q.dtype, device=self.q.device)
        self.lse = torch.zeros(largest.q.shape[:2], device=self.q.device) if self.spec.lse else None
        self.graphs = {bucket: self._capture(bucket) for bucket in self.static.batches}

    def replay(self, lens: list[int], shared: Segments) -> Problem:
        """Plans and runs the graph that holds these rows, twice, and the same batch eagerly; returns what was asked."""
        given = self._problem(lens, shared)
        fitting = (bucket for bucket in self.graphs if bucket.batch >= len(lens) and bucket.levels >= len(shared))
        bucket = min(fitting)
        assert given.batch.page_table is not None, "a paged problem"
        table = given.batch.page_table
        self.table[: len(table), : table.shape[1]] = table
        levels = {"all": tuple(_runs(level) for level in given.batch.shared_levels)}
        order = list(range(len(lens)))
        batch = self.static.fill(bucket, order, lens, "replay", shared=Shared(order, levels))["all"]
        self._load(given)
        device = Device.open(self.spec.device)
        before = device.allocations()
        self.rig.instance.init_forward_metadata_replay_cuda_graph(batch)
        made = device.allocations() - before
        assert made == 0, f"the replay hook allocated device memory {made} times; it plans into what the capture left"
        results = []
        for _ in range(2):
            self._load(given)
            self.rig.scratch.fill_(POISON)
            self.graphs[bucket].replay()
            results.append(self._result(given))
            given.compare(results[-1])
        eager = self._eager(given, batch)
        for replayed in results:
            assert torch.equal(replayed.out, eager.out), "a replay has other bits than an eager forward of the batch"
            if replayed.lse is not None and eager.lse is not None:
                assert torch.equal(replayed.lse, eager.lse), "a replay's log-sum-exp has other bits than an eager one"
        return given

    def eager_between(self, replayed: Problem) -> None:
        """Forwards that are not captured, on the same instance: with levels of what was replayed, unpadded; else one
        that raises, one of more rows than any bucket, and where the instance serves the other phase too, one of that.
        """
        if self.spec.max_levels:
            replayed.compare(self.rig.run(replayed))
            return
        given = self._problem([self.n + 6] * (SIZES[-1] + 1))
        self.rig.raises(given)
        given.compare(self.rig.run(given))
        if "extend" in self.spec.phases:
            other = make_problem([3, 1, 7], [3, 9, 8], **{**self.fields, "phase": "extend"})
            other.compare(self.rig.run(other))

    def _problem(self, lens: list[int], shared: Segments = ()) -> Problem:
        return make_problem([self.n] * len(lens), lens, **{**self.fields, "phase": "decode", "seed": sum(lens)},
                            slack=self.context - max(lens), shared=shared)  # fmt: skip

    def _capture(self, bucket: GraphBucket) -> Any:
        """One capture as the contract says: plan, run twice, record."""
        batch = self.static.fill(bucket, [], [], "capture")["all"]
        instance, tokens = self.rig.instance, bucket.batch * self.n
        instance.init_forward_metadata_capture_cuda_graph(batch)
        lse = None if self.lse is None else self.lse[:tokens]

        def run() -> None:
            instance.init_forward_metadata_in_graph(batch)
            instance.forward(*self._tokens(tokens), self.layer, batch, out=self.out[:tokens], lse=lse)

        device = Device.open(self.spec.device)
        with device.warming_up():
            run()
            run()
        return device.capture(run)

    def _tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """The first of the static q, k and v."""
        return self.q[:count], self.k[:count], None if self.v is None else self.v[:count]

    def _load(self, given: Problem) -> None:
        """The problem's numbers in the static inputs; all else, of tokens, cache and outputs, poisoned.

        So padding has NaN for q, k and v, and writes it into the null page.
        """
        tokens = given.batch.num_tokens
        assert given.storage is not None, "a paged problem"
        self.storage.fill_(POISON)[: len(given.storage)].copy_(given.storage)
        for static, x in ((self.q, given.q), (self.k, given.k), (self.v, given.v)):
            if static is not None and x is not None:
                static.fill_(torch.nan)[:tokens].copy_(x)
        self.out.fill_(torch.nan)
        if self.lse is not None:
            self.lse.fill_(torch.nan)
        if given.sinks is not None and self.layer.sinks is not None:
            self.layer.sinks.copy_(given.sinks)
        if given.alibi_slopes is not None and self.layer.alibi_slopes is not None:
            self.layer.alibi_slopes.copy_(given.alibi_slopes)

    def _result(self, given: Problem) -> Result:
        tokens = given.batch.num_tokens
        assert given.storage is not None, "a paged problem"
        rest = self.storage[len(given.storage) :]
        assert bool((rest == POISON).all()), "a replay wrote to pages that are in no row's table"
        lse = None if self.lse is None else self.lse[:tokens].clone()
        return Result(self.out[:tokens].clone(), lse, self.storage[: len(given.storage)].clone())

    def _eager(self, given: Problem, batch: ForwardBatch) -> Result:
        """The same padded batch and bounds, by a fresh instance that captures nothing."""
        self._load(given)
        rig = Rig(self.backend, self.spec)
        eager = replace(batch, graph=None, metadata=None, _csr={})
        rig.plan(eager)
        tokens = eager.num_tokens
        lse = None if self.lse is None else self.lse[:tokens]
        rig.scratch.fill_(POISON)
        rig.instance.forward(*self._tokens(tokens), self.layer, eager, out=self.out[:tokens], lse=lse)
        return self._result(given)


def _runs(level: SharedLevel) -> Level:
    """A level as the host tells it."""
    rows, pages = level.row_indptr_cpu.diff().tolist(), level.page_indices.tolist()
    parts = pairwise(level.page_indptr_cpu.tolist())
    return tuple(Run(count, tuple(pages[start:end])) for count, (start, end) in zip(rows, parts, strict=True))
