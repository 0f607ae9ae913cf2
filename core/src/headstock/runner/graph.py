"""The graph runner: decode steps captured per batch size, replayed with padding, and counted where they run eagerly."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headstock.backend import AttentionBackend, BackendSpec, GraphBucket, GraphFallback
from headstock.batch import ForwardBatch
from headstock.device import Device, DeviceGraph
from headstock.errors import HeadstockError
from headstock.runner.static_batch import StaticBatches

Run = Callable[[Tensor, Tensor, Mapping[str, ForwardBatch]], Tensor]
"""What is captured: (token ids [T], positions [T], each group's planned batch) to logits [T, vocab]."""

DEFAULT_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


class GraphBackend(NamedTuple):
    """The decode backend of one layer group, and the group's page table on the device, int32 [slots + 1, W]."""

    name: str
    backend: AttentionBackend
    spec: BackendSpec
    table: Tensor


class Replayed(NamedTuple):
    """What a replay left: logits [R, vocab] and the greedy token of each row, int64 [R]; the next one reuses both."""

    logits: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What one captured size cost: seconds, device bytes, and why it has no graph, if it has none."""

    bucket: GraphBucket
    seconds: float
    num_bytes: int
    failure: str = ""


@dataclass(slots=True)
class _Captured:
    graph: DeviceGraph
    logits: Tensor
    tokens: Tensor
    described: Mapping[str, Mapping[str, str | int | bool]]


def bucket_sizes(max_batch: int, sizes: Sequence[int] = DEFAULT_SIZES) -> tuple[int, ...]:
    """The batch sizes to capture: `sizes` up to `max_batch`, and `max_batch` itself, always."""
    if any(size < 1 for size in sizes):
        raise HeadstockError("captured batch sizes are 1 or more", given=list(sizes))
    return tuple(sorted({size for size in sizes if size < max_batch} | {max_batch}))


class GraphRunner:
    """Every captured decode step of a model, over buffers that all sizes share.

    `run` is captured from the token ids to the greedy token, once for each of the specs' buckets, largest first and in
    one memory pool. Afterwards `step` replays the smallest size that holds a batch. What cannot be replayed is counted
    in `fallbacks` by its reason, and the caller runs it eagerly.
    """

    def __init__(self, device: Device, groups: Mapping[str, GraphBackend], run: Run):
        self.device, self.groups, self.run = device, groups, run
        self.fallbacks: Counter[str] = Counter()
        self.replays = 0
        self.static = {name: StaticBatches(group.spec, group.table) for name, group in groups.items()}
        self.buckets = list(next(iter(self.static.values())).batches)
        tokens = max(bucket.batch * bucket.query_len for bucket in self.buckets)
        self._ids = torch.zeros(tokens, dtype=torch.int64, device=device.torch)
        self._staged = [device.pinned((tokens,), torch.int64) for _ in range(2)]
        self._captured: dict[GraphBucket, _Captured] = {}
        self._failures: dict[GraphBucket, str] = {}

    def capture(self, report: Callable[[CaptureReport], None] = lambda report: None) -> list[CaptureReport]:
        """Captures every size; one that fails is reported, and its batches run eagerly from then on."""
        for name, group in self.groups.items():
            group.backend.init_cuda_graph_state(list(self.static[name].batches.values()))
        reports, pool = [], self.device.graph_pool()
        with torch.inference_mode(), _quiet_gc():
            for bucket in self.buckets:
                reports.append(self._capture(bucket, pool))
                report(reports[-1])
        return reports

    def bucket_for(self, num_rows: int, query_len: int = 1) -> GraphBucket | None:
        """The smallest captured size that holds a batch."""
        holding = [b for b in self.buckets if b.query_len == query_len and b.batch >= num_rows]
        return min(holding, default=None)

    @torch.inference_mode()
    def step(self, slots: Sequence[int], seq_lens: Sequence[int], tokens: Sequence[int]) -> Replayed | None:
        """Replays one decode step: slots, keys each with the new ones, and the new tokens, row after row.

        None where the step has to run eagerly; nothing has been run then.
        """
        n = len(tokens) // len(slots)
        bucket = self.bucket_for(len(slots), n)
        if bucket is None:
            return self._eagerly(f"no graph for {len(slots)} rows of {n} tokens")
        if bucket not in self._captured:
            return self._eagerly(self._failures.get(bucket, "not captured"))
        try:
            self._plan(bucket, slots, seq_lens)
        except GraphFallback as fallback:
            return self._eagerly(fallback.reason)
        self._staged.append(self._staged.pop(0))
        staged = self._staged[0][: len(tokens)]
        staged.copy_(torch.tensor(tokens))
        self._ids[: len(tokens)].copy_(staged, non_blocking=True)
        captured = self._captured[bucket]
        captured.graph.replay()
        self.replays += 1
        return Replayed(captured.logits[: len(tokens)], captured.tokens[: len(tokens)])

    def _eagerly(self, reason: str) -> Replayed | None:
        self.fallbacks[reason] += 1
        return None

    def _plan(self, bucket: GraphBucket, slots: Sequence[int], seq_lens: Sequence[int]) -> None:
        for name, group in self.groups.items():
            batch = self.static[name].fill(bucket, slots, seq_lens, "replay")
            group.backend.init_forward_metadata_replay_cuda_graph(batch)

    def _capture(self, bucket: GraphBucket, pool: object) -> CaptureReport:
        started, before = time.perf_counter(), self.device.free_memory()
        try:
            self._captured[bucket] = self._record(bucket, pool)
            self._verify(bucket)
        except KeyboardInterrupt:
            raise
        except Exception as error:
            self._captured.pop(bucket, None)
            self._failures[bucket] = f"capture of {bucket.batch} rows failed: {error}".splitlines()[0]
        self.device.synchronize()
        used = before - self.device.free_memory() if self.device.torch.type != "cpu" else 0
        return CaptureReport(bucket, time.perf_counter() - started, max(used, 0), self._failures.get(bucket, ""))

    def _record(self, bucket: GraphBucket, pool: object) -> _Captured:
        """One capture as the contract has it: planned once, run twice to warm up, and recorded."""
        batches = {}
        for name, group in self.groups.items():
            batches[name] = self.static[name].fill(bucket, [], [], "capture")
            group.backend.init_forward_metadata_capture_cuda_graph(batches[name])
        count = bucket.batch * bucket.query_len
        results: list[Tensor] = []

        def run() -> None:
            for name, group in self.groups.items():
                group.backend.init_forward_metadata_in_graph(batches[name])
            positions = next(iter(batches.values())).positions
            logits = self.run(self._ids[:count], positions, batches)
            results[:] = [logits, logits.argmax(-1)]

        with self.device.warming_up():
            run()
            run()
        graph = self.device.capture(run, pool)
        logits, tokens = results
        described = {name: dict(group.backend.describe(batches[name])) for name, group in self.groups.items()}
        return _Captured(graph, logits, tokens, described)

    def _verify(self, bucket: GraphBucket) -> None:
        """Plans a replay of the longest rows and refuses a backend that would break the laws of replays."""
        for name, group in self.groups.items():
            null, longest = len(group.table) - 1, group.spec.max_context
            batch = self.static[name].fill(bucket, [null] * bucket.batch, [longest] * bucket.batch, "replay")
            before = self.device.allocations()
            with self.device.no_sync(group.spec.host_lengths != "exact"):
                group.backend.init_forward_metadata_replay_cuda_graph(batch)
            if made := self.device.allocations() - before:
                raise HeadstockError(f"{group.name} allocates device memory {made} times when it plans a replay")
            captured, now = self._captured[bucket].described[name], dict(group.backend.describe(batch))
            if now != captured:
                raise HeadstockError(f"{group.name} captured {captured} and would replay {now}")


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
