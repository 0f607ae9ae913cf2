"""A captured decode step: the graph of one size, what is planned before each replay, and what a replay leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from headstock.backend import GraphBucket
from headstock.batch import ForwardBatch
from headstock.device import DeviceGraph
from headstock.plugins import Observers
from headstock.runner.sampler import Sampled

Plan = tuple[Callable[[ForwardBatch], None], ForwardBatch]
"""A backend's planning hook for replays, and the batch that it plans."""


class Done(NamedTuple):
    """What a step came to: logits [R, vocab], and where a graph was replayed the greedy token of each row too.

    The next replay writes over what this one left: `ModelRunner.forward` gives logits to keep.
    """

    logits: Tensor
    sampled: Sampled | None = None


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What one captured size cost: seconds, device bytes, and why it has no graph, if it has none."""

    bucket: GraphBucket
    seconds: float
    num_bytes: int
    failure: str = ""


@dataclass(slots=True)
class Captured:
    """The graph of one size, over batches that the host has filled, and the memory in which it leaves its results.

    `plans` has each group's, and `described` what its backend said of the capture; `replays` counts.
    """

    graph: DeviceGraph
    logits: Tensor
    sampled: Sampled
    plans: Sequence[Plan]
    described: Mapping[str, Mapping[str, str | int | bool]]
    replays: int = 0
    _done: dict[int, Done] = field(default_factory=dict)

    def replay(self, num_tokens: int, observers: Observers) -> Done:
        """Runs the graph, of which so many tokens are no padding. What a planning hook raises passes."""
        for plan, batch in self.plans:
            plan(batch)
        for _, batch in self.plans:
            observers.notify("before_forward", batch=batch)
        self.graph.replay()
        self.replays += 1
        for _, batch in self.plans:
            observers.notify("after_forward", batch=batch)
        return self._done.get(num_tokens) or self._first(num_tokens)

    def _first(self, count: int) -> Done:
        """The results of the first tokens, of which every replay leaves others: to be cut once."""
        sampled = Sampled(self.sampled.tokens[:count], self.sampled.failed[:count])
        self._done[count] = Done(self.logits[:count], sampled)
        return self._done[count]
