"""The life of a captured graph, driven as the host drives it: capture by size, replay with other lengths, compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from headstock.backend import AttentionBackend, GraphBucket
from headstock.batch import ForwardBatch
from headstock.device import Device
from headstock.runner.static_batch import StaticBatches
from headstock.testing.problem import POISON, Problem, Result, make_problem
from headstock.testing.rig import Rig

SIZES = (1, 2, 4)
"""Rows of the captured buckets."""
CONTEXT = 32
"""Tokens of the longest context, which is also the bound that graphs are captured with."""


def replays_equal_eager(backend: type[AttentionBackend], fields: Mapping[str, Any]) -> None:
    """Replays of other lengths than captured give the reference's numbers and an eager forward's bits, every time.

    Larger and smaller batches follow each other, padded and not, with eager forwards between them; each replay runs
    twice. No padded row touches a live slot.
    """
    stand = _Stand(backend, fields)
    for lens in stand.lengths():
        stand.replay(lens)
        stand.eager_between()


class _Stand:
    """Static inputs, captured graphs by size, and the one cache they read."""

    def __init__(self, backend: type[AttentionBackend], fields: Mapping[str, Any]):
        self.backend = backend
        self.fields = {name: value for name, value in fields.items() if name not in ("query_lens", "seq_lens")}
        self.n = int(self.fields.pop("query_len", 1))
        buckets = tuple(GraphBucket(size, self.n) for size in SIZES)
        fixed = {"graph_buckets": buckets, "max_context": CONTEXT}
        self.fields |= fixed | {"max_batch": SIZES[-1], "max_tokens": 64}
        largest = self._problem([CONTEXT] * SIZES[-1])
        self.spec = largest.spec
        self.rig = Rig(backend, self.spec)
        width = -(-CONTEXT // self.spec.page_size)
        self.table = torch.zeros(SIZES[-1] + 1, width, dtype=torch.int32, device=self.spec.device)
        self.static = StaticBatches(self.spec, self.table)
        self.rig.instance.init_cuda_graph_state(list(self.static.batches.values()))
        assert largest.storage is not None, "graphs are of paged batches"
        assert largest.k is not None, "and of new tokens"
        assert largest.v is not None, "and of new tokens"
        self.storage = torch.full_like(largest.storage, POISON)
        self.layer = largest.layer(self.storage)
        self.q, self.k, self.v = (torch.zeros_like(x) for x in (largest.q, largest.k, largest.v))
        self.out = torch.zeros(*largest.q.shape[:2], self.spec.v_head_dim, dtype=largest.q.dtype, device=self.q.device)
        self.lse = torch.zeros(largest.q.shape[:2], device=self.q.device) if self.spec.lse else None
        self.graphs = {bucket: self._capture(bucket) for bucket in self.static.batches}

    def lengths(self) -> list[list[int]]:
        """Rows of the replays: full and padded, growing and shrinking, at page edges, to the bound and to the least."""
        n, page = self.n, self.spec.page_size
        rows = [[n + 1, page + n, n, 2 * page + n], [CONTEXT], [n, page + n + 1], [page + n, n, n + 2],
                [CONTEXT, CONTEXT - 1, n, n], [n]]  # fmt: skip
        return [[min(length, CONTEXT) for length in lens] for lens in rows]

    def replay(self, lens: list[int]) -> None:
        given = self._problem(lens)
        bucket = min(bucket for bucket in self.graphs if bucket.batch >= len(lens))
        assert given.batch.page_table is not None, "a paged problem"
        table = given.batch.page_table
        self.table[: len(table), : table.shape[1]] = table
        batch = self.static.fill(bucket, range(len(lens)), lens, "replay")
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

    def eager_between(self) -> None:
        """Forwards that are not captured, on the same instance: one that raises, one of more rows than any bucket, and
        where the instance serves the other phase too, one of that."""
        given = self._problem([self.n + 6] * (SIZES[-1] + 1))
        self.rig.raises(given)
        given.compare(self.rig.run(given))
        if "extend" in self.spec.phases:
            other = make_problem([3, 1, 7], [3, 9, 8], **{**self.fields, "phase": "extend"})
            other.compare(self.rig.run(other))

    def _problem(self, lens: list[int]) -> Problem:
        return make_problem([self.n] * len(lens), lens, **{**self.fields, "phase": "decode", "seed": sum(lens)},
                            slack=CONTEXT - max(lens))  # fmt: skip

    def _capture(self, bucket: GraphBucket) -> Any:
        """One capture as the contract says: plan, run twice, record."""
        batch = self.static.fill(bucket, [], [], "capture")
        instance, tokens = self.rig.instance, bucket.batch * self.n
        instance.init_forward_metadata_capture_cuda_graph(batch)
        lse = None if self.lse is None else self.lse[:tokens]

        def run() -> None:
            instance.init_forward_metadata_in_graph(batch)
            q, k, v = (x[:tokens] for x in (self.q, self.k, self.v))
            instance.forward(q, k, v, self.layer, batch, out=self.out[:tokens], lse=lse)

        device = Device.open(self.spec.device)
        with device.warming_up():
            run()
            run()
        return device.capture(run)

    def _load(self, given: Problem) -> None:
        """The problem's numbers in the static inputs; the rest of the cache and of the outputs poisoned."""
        tokens = given.batch.num_tokens
        assert given.storage is not None, "a paged problem"
        self.storage.fill_(POISON)[: len(given.storage)].copy_(given.storage)
        for static, x in ((self.q, given.q), (self.k, given.k), (self.v, given.v)):
            assert x is not None, "a problem with new tokens"
            static[:tokens].copy_(x)
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
        q, k, v = (x[:tokens] for x in (self.q, self.k, self.v))
        rig.instance.forward(q, k, v, self.layer, eager, out=self.out[:tokens], lse=lse)
        return self._result(given)
