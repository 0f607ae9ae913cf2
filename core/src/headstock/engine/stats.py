"""What an engine has done and holds, as a person or a monitoring system wants to know it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, fields

BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, float("inf"))
"""The upper bounds of a latency's classes, in seconds."""


@dataclass(frozen=True, slots=True)
class Latency:
    """How long something took, many times over: how often, how long in all, and `counts` by class of BOUNDS."""

    counts: tuple[int, ...] = (0,) * len(BOUNDS)
    seconds: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Seconds, 0 where there is nothing yet."""
        return self.seconds / self.count if self.count else 0.0

    def quantile(self, part: float) -> float:
        """Seconds that `part` of all, 0 to 1, did not exceed: the upper bound of a class, so never too little."""
        left = part * self.count
        for bound, count in zip(BOUNDS, self.counts, strict=True):
            left -= count
            if left <= 0:
                return bound
        return BOUNDS[-1]


class Stopwatch:
    """A latency that is being measured."""

    def __init__(self) -> None:
        self._counts, self._seconds = [0] * len(BOUNDS), 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._seconds += seconds

    @property
    def latency(self) -> Latency:
        """What was measured so far."""
        return Latency(tuple(self._counts), self._seconds)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine has done so far, and what it holds now.

    Tokens run are prefill up to where a request begins to decode; what it runs again after a preemption counts again.
    The seconds of a step that does both are shared out by tokens. `cached_tokens` were found in the prefix cache.
    `finished` are samples by their finish reason. `first_token` is measured from a request's arrival, `next_token` from
    the token before, both as the engine hands tokens out. Of `pages`, those neither free nor cached are in use by
    running requests alone.
    """

    steps: int
    prefill_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float
    cached_tokens: int
    preemptions: int
    finished: Mapping[str, int]
    first_token: Latency
    next_token: Latency
    running: int
    waiting: int
    pages: int
    free_pages: int
    cached_pages: int  # by the prefix cache, those in use included

    @property
    def hit_rate(self) -> float:
        """The part of the tokens to prefill that was found in the prefix cache, 0 to 1."""
        asked = self.cached_tokens + self.prefill_tokens
        return self.cached_tokens / asked if asked else 0.0

    def prometheus(self) -> str:
        """The same in Prometheus' text format: gauges of what is held now, counters and histograms of what was done."""
        lines: list[str] = []
        for field in fields(self):
            value, name = getattr(self, field.name), f"headstock_{field.name}"
            if isinstance(value, Latency):
                lines += _histogram(f"{name}_seconds", value)
            elif isinstance(value, Mapping):
                lines += [f"# TYPE {name}_total counter"]
                lines += [f'{name}_total{{reason="{reason}"}} {count}' for reason, count in value.items()]
            elif field.name in HELD:
                lines += [f"# TYPE {name} gauge", f"{name} {value}"]
            else:
                lines += [f"# TYPE {name}_total counter", f"{name}_total {value}"]
        return "\n".join(lines) + "\n"


HELD = {"running", "waiting", "pages", "free_pages", "cached_pages"}


def _histogram(name: str, latency: Latency) -> list[str]:
    lines, so_far = [f"# TYPE {name} histogram"], 0
    for bound, count in zip(BOUNDS, latency.counts, strict=True):
        so_far += count
        shown = "+Inf" if bound == float("inf") else bound
        lines.append(f'{name}_bucket{{le="{shown}"}} {so_far}')
    return [*lines, f"{name}_sum {latency.seconds}", f"{name}_count {so_far}"]
