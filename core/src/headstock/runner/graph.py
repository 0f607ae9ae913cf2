"""The graph runner: decode steps captured per batch size, replayed with padding, and counted where they run eagerly."""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headstock.backend import AttentionBackend, BackendSpec, GraphBucket, GraphFallback
from headstock.batch import ForwardBatch
from headstock.device import Device, GraphPool
from headstock.errors import HeadstockError
from headstock.kv.mirror import Mirror
from headstock.plugins import Observers, describe_fault
from headstock.runner.captured import Captured, CaptureReport, Done
from headstock.runner.host_inputs import Rows
from headstock.runner.levels import Shared
from headstock.runner.refresh import GroupPages
from headstock.runner.sampler import Sampled, greedy
from headstock.runner.static_batch import StaticStep
from headstock.runner.step import Steps

Run = Callable[[Tensor, Tensor, Mapping[str, ForwardBatch], Tensor | None], Tensor]
"""What is captured: (token ids [T], positions [T], each group's planned batch, rows [R] or None) to logits [R, vocab].
`rows` picks, in the order of the caller, what goes through the head; None is all of it as it runs."""


class GraphBackend(NamedTuple):
    """A decode backend of one layer group, captured in its spec's `graph_buckets`, and where the group's rows lie."""

    group: str
    name: str
    backend: AttentionBackend
    spec: BackendSpec
    pages: GroupPages

    @property
    def key(self) -> str:
        """What tells it from the others, of its group and of others."""
        return f"{self.group}/{self.name}"


Cause = Literal["size", "capture", "backend"]
"""What keeps a step from a graph: no captured size holds it, the one that does has no graph, or a backend says so."""


class Fallback(NamedTuple):
    """Why a step ran eagerly, for programs and in words."""

    kind: Cause
    reason: str

    def __str__(self) -> str:
        return self.reason


class GraphRunner:
    """Every captured decode step of a model, over buffers that all sizes share.

    `run` is captured from the token ids to the greedy token, once for each of the specs' buckets, largest first and in
    one memory pool. Afterwards `step` replays the smallest size that holds a batch, counted in `replays`. What cannot
    be replayed is counted in `fallbacks` by its reason, and the caller runs it eagerly. Each replay brings `mirrors` up
    to date; `observers` hear of each forward. `buffer_bytes` are the buffers', with the graphs that refresh them. One
    of the `backends` serves each bucket and layer group: `serving`; and `batches` has its batch. `levels` of shared
    prefixes are the most that any graph reads.
    """

    def __init__(
        self,
        device: Device,
        backends: Sequence[GraphBackend],
        run: Run,
        mirrors: Sequence[Mirror] = (),
        observers: Observers | None = None,
    ):
        self.device, self.backends, self.run = device, backends, run
        self.observers = observers or Observers([], lambda notice: None)
        self.fallbacks: Counter[Fallback] = Counter()
        self.reports: list[CaptureReport] = []
        before = device.free_memory()
        with _quiet_gc():
            self.static = StaticStep(device, {each.key: (each.spec, each.pages) for each in backends}, mirrors)
        self.buffer_bytes = max(self._taken(before), self.static.num_bytes)  # from memory that torch had, or new
        self.serving = {
            bucket: {each.group: each for each in backends if bucket in each.spec.graph_buckets}
            for bucket in self.static.buckets
        }
        self.batches = {
            bucket: {group: self.static.batches[bucket][each.key] for group, each in serving.items()}
            for bucket, serving in self.serving.items()
        }
        self._kinds: dict[tuple[int, int], list[GraphBucket]] = {}  # smallest first, by tokens per row and levels
        for bucket in reversed(self.static.buckets):
            self._kinds.setdefault(bucket[1:], []).append(bucket)
        self._logits: Tensor | None = None  # of every size: those in a graph's pool would be kept once for each
        self.levels = 0
        self._captured: dict[GraphBucket, Captured] = {}
        self._failures: dict[GraphBucket, str] = {}

    def capture(self, report: Callable[[CaptureReport], None] = lambda report: None) -> list[CaptureReport]:
        """Captures every size; one that fails is reported, and its batches run eagerly from then on."""
        broken: dict[GraphBucket, BaseException] = {}
        for each in self.backends:
            own = {bucket: batches[each.key] for bucket, batches in self.static.batches.items() if each.key in batches}
            try:
                if own:
                    each.backend.init_cuda_graph_state(list(own.values()))
            except (Exception, SystemExit) as error:
                broken |= dict.fromkeys(own, error)
        pool = self.device.graph_pool()
        with torch.no_grad(), _quiet_gc():  # not in inference mode: replays write to what this makes
            for bucket in self.static.buckets:
                self.reports.append(self._capture(bucket, pool, broken.get(bucket)))
                report(self.reports[-1])
        for bucket in sorted(self._captured, key=lambda bucket: (bucket.batch, -bucket.levels)):
            self._captured[bucket] = self._captured.pop(bucket)  # in the order in which `fitting` looks
        self.levels = max((bucket.levels for bucket in self._captured), default=0)
        return self.reports

    @property
    def num_bytes(self) -> int:
        """Device bytes of all captures, and of the buffers that they share with what refreshes them."""
        return self.buffer_bytes + sum(each.num_bytes for each in self.reports)

    def cost(self) -> str:
        """What the captures cost, in words."""
        sizes = sorted({bucket.batch for bucket in self._captured})
        seconds, size = sum(each.seconds for each in self.reports), self.num_bytes
        rows = f"{len(self._captured)} captured, up to {sizes[-1]} rows" if sizes else "none captured"
        return f"{rows}, in {seconds:.1f} s and {size / 2**20:.0f} MiB"

    @property
    def replays(self) -> Counter[GraphBucket]:
        """How many times each size was replayed, those alone that were."""
        return Counter({bucket: each.replays for bucket, each in self._captured.items() if each.replays})

    def fitting(self, num_rows: int, query_len: int = 1) -> GraphBucket | None:
        """The smallest size with a graph that holds such rows, with as many levels of shared prefixes as it has."""
        for bucket in self._captured:
            if bucket.batch >= num_rows and bucket.query_len == query_len:
                return bucket
        return None

    def bucket_for(self, num_rows: int, query_len: int = 1, levels: int = 0) -> GraphBucket | None:
        """The smallest captured size that holds a batch."""
        kind = self._kinds.get((query_len, levels), [])
        place = bisect_left(kind, (num_rows, query_len, levels))
        return kind[place] if place < len(kind) else None

    def step(self, slots: Rows, seq_lens: Rows, tokens: Rows, shared: Shared | None = None) -> Done | None:
        """Replays one decode step: slots, keys each with the new ones, the new tokens, and what prefixes are shared.

        What a graph with levels cannot hold is replayed without. None where the step has to run eagerly; nothing has
        been run then.
        """
        if shared and shared.levels:
            fitting = self.fitting(len(slots), len(tokens) // len(slots))
            if fitting and fitting.levels:
                done = self._replay(fitting.levels, slots, seq_lens, tokens, shared)
                if isinstance(done, Done):
                    return done
        done = self._replay(0, slots, seq_lens, tokens)
        if isinstance(done, Done):
            return done
        self.fallbacks[done] += 1
        return None

    def _replay(
        self, levels: int, slots: Rows, seq_lens: Rows, tokens: Rows, shared: Shared | None = None
    ) -> Done | Fallback:
        """Replays the smallest size of so many levels that holds the rows, or says why not."""
        rows, n = len(slots), len(tokens) // len(slots)
        bucket = self.bucket_for(rows, n, levels)
        if bucket is None:
            return Fallback("size", f"no graph for {_described(GraphBucket(rows, n, levels))}")
        captured = self._captured.get(bucket)
        if captured is None:
            return Fallback("capture", self._failures.get(bucket, "not captured"))
        self.static.fill(bucket, slots, seq_lens, "replay", tokens, shared)
        try:
            return captured.replay(len(tokens), self.observers)
        except GraphFallback as fallback:
            return Fallback("backend", fallback.reason)

    def _capture(self, bucket: GraphBucket, pool: GraphPool, broken: BaseException | None) -> CaptureReport:
        started, before = time.perf_counter(), self.device.free_memory()
        try:
            if broken is not None:
                raise broken
            self._captured[bucket] = self._record(bucket, pool)
            self._verify(bucket)
        except (Exception, SystemExit) as error:
            self._captured.pop(bucket, None)
            failure = f"capture of {_described(bucket)} failed: {describe_fault(error).what}"
            self._failures[bucket] = failure.splitlines()[0]
        used = self._taken(before)
        return CaptureReport(bucket, time.perf_counter() - started, used, self._failures.get(bucket, ""))

    def _taken(self, before: int) -> int:
        """Device bytes taken since so many were free; on a CPU others take and give them all the time."""
        self.device.synchronize()
        return max(before - self.device.free_memory(), 0) if self.device.torch.type != "cpu" else 0

    def _record(self, bucket: GraphBucket, pool: GraphPool) -> Captured:
        """One capture as the contract has it: planned once, run twice to warm up, and recorded."""
        self.static.fill(bucket, [], [], "capture")
        batches, serving = self.batches[bucket], self.serving[bucket]
        for group, each in serving.items():
            each.backend.init_forward_metadata_capture_cuda_graph(batches[group])
        ids, positions = self.static.ids(bucket), next(iter(batches.values())).positions
        rows = self.static.places(bucket)
        results: list[tuple[Tensor, Sampled]] = []

        def run() -> None:
            for group, each in serving.items():
                each.backend.init_forward_metadata_in_graph(batches[group])
            logits = self.run(ids, positions, batches, rows)
            if self._logits is None:
                most = max(each.batch * each.query_len for each in self.static.buckets)
                self._logits = logits.new_empty(most, *logits.shape[1:])
            kept = self._logits[: len(logits)]
            results[:] = [(kept, greedy(logits, kept))]

        with self.device.warming_up(pool):
            run()
            run()
        graph = self.device.capture(run, pool)
        plans = [
            (serving[group].backend.init_forward_metadata_replay_cuda_graph, each) for group, each in batches.items()
        ]
        described = {group: dict(each.backend.describe(batches[group])) for group, each in serving.items()}
        return Captured(graph, *results[0], plans, described)

    def _verify(self, bucket: GraphBucket) -> None:
        """Plans a replay of the longest rows and refuses a backend that would break the laws of replays."""
        rows, longest = bucket.batch, min(each.spec.max_context for each in self.serving[bucket].values())
        self.static.fill(bucket, [self.static.null] * rows, [longest] * rows, "replay")
        batches = self.batches[bucket]
        for group, each in self.serving[bucket].items():
            before = self.device.allocations()
            with self.device.no_sync(each.spec.host_lengths != "exact"):
                each.backend.init_forward_metadata_replay_cuda_graph(batches[group])
            if made := self.device.allocations() - before:
                raise HeadstockError(f"{each.name} allocates device memory {made} times when it plans a replay")
            captured, now = self._captured[bucket].described[group], dict(each.backend.describe(batches[group]))
            if now != captured:
                raise HeadstockError(f"{each.name} captured {captured} and would replay {now}")


def decode_graphs(steps: Steps, forward: Callable[..., Tensor]) -> GraphRunner:
    """The graphs of a runner's decode steps, still to be captured; `forward` is its model's."""
    device, pages = steps.device, steps.pages
    table, backends = pages.mirror(device), []
    windows = {window: own.mirror(device) for window, own in pages.windows.items()}
    for group, window in steps.windows.items():
        where = GroupPages(table.tensor, None if window is None else windows[window].tensor)
        for instance in steps.roles[group, "decode"].instances:
            assert instance.backend is not None, "backends are started when they are chosen"
            backends.append(GraphBackend(group, instance.candidate.name, instance.backend, instance.spec, where))

    def run(ids: Tensor, positions: Tensor, batches: Mapping[str, ForwardBatch], rows: Tensor | None) -> Tensor:
        return forward(ids, positions, steps.attend(steps.captured(batches)), rows)

    return GraphRunner(device, backends, run, [table, *windows.values()], steps.observers)


def _described(bucket: GraphBucket) -> str:
    shared = f", {bucket.levels} shared level{'s' * (bucket.levels > 1)}" if bucket.levels else ""
    return f"{bucket.batch} rows of {bucket.query_len} token{'s' * (bucket.query_len > 1)}{shared}"


@contextmanager
def _quiet_gc() -> Iterator[None]:
    """No garbage collection inside: freeing a tensor of another pool breaks a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
