"""Timing by turns: every contestant once per round, so that what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch

from headstock.device import Device, torch_dtype

Key = TypeVar("Key")
SAMPLE_SECONDS = 2e-3
"""A sample repeats what is shorter than this, so that the clock is no part of it."""


class Times(NamedTuple):
    """Seconds of one thing, measured several times over."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The bounds of the middle half."""
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """The width of the middle half, as a part of the median."""
        low, high = self.quartiles
        return (high - low) / self.median if self.median else 0.0


def by_turns(
    device: Device, runs: Mapping[Key, Callable[[], None]], rounds: int, stop: Callable[[], bool] = lambda: False
) -> dict[Key, Times]:
    """Device seconds of each of `runs`, sampled `rounds` times, every other round backwards.

    Whole rounds only: `stop` is asked between them, once there are three.
    """
    repeat: dict[Key, int] = {}
    for key, run in runs.items():
        run()
        repeat[key] = max(1, min(round(SAMPLE_SECONDS / max(device.seconds(run), 1e-7)), 200))
    samples: dict[Key, list[float]] = {key: [] for key in runs}
    for number in range(rounds):
        if number >= 3 and stop():
            break
        for key in list(runs)[:: -1 if number % 2 else 1]:
            samples[key].append(device.seconds(_repeated(runs[key], repeat[key])) / repeat[key])
    return {key: Times(tuple(each)) for key, each in samples.items()}


def on_host(device: Device, run: Callable[[], None], rounds: int) -> Times:
    """Seconds that the host spends in `run`, without waiting for what it issues."""
    run()
    samples = []
    for _ in range(rounds):
        device.synchronize()
        started = time.perf_counter()
        run()
        samples.append(time.perf_counter() - started)
    device.synchronize()
    return Times(tuple(samples))


class Limits(NamedTuple):
    """What a device was measured to do at best: bytes moved and floating-point operations, per second."""

    bytes_per_second: float
    flops_per_second: float

    def share(self, num_bytes: int, flops: int, seconds: float) -> tuple[float, str]:
        """The larger part of a limit that so much work in so many seconds comes to, and which limit it is."""
        memory = num_bytes / seconds / self.bytes_per_second
        matrix = flops / seconds / self.flops_per_second
        return max((memory, "memory"), (matrix, "matrix"))


def measure_limits(device: Device, dtype: str, *, num_bytes: int | None = None, size: int | None = None) -> Limits:
    """The memory limit as the faster of a copy and a read, the matrix limit as a square product in `dtype`.

    `num_bytes` of memory are gone through, which has to be more than any cache, and matrices have `size` rows.
    """
    large = device.torch.type != "cpu"
    count = (num_bytes or (1 << 30 if large else 1 << 28)) // 4
    source = torch.ones(count, device=device.torch)
    target = torch.empty_like(source)
    kind, n = torch_dtype(dtype), size or (8192 if large else 1024)
    a, b = (torch.randn(n, n, device=device.torch).to(kind) for _ in range(2))
    product = torch.empty_like(a)

    def copy() -> None:
        target.copy_(source)

    def read() -> None:
        source.sum()

    def multiply() -> None:
        torch.mm(a, b, out=product)

    runs: dict[str, Callable[[], None]] = {"copy": copy, "read": read, "product": multiply}
    with device.active():
        times = by_turns(device, runs, 5)
    rates = [8 * count / min(times["copy"].samples), 4 * count / min(times["read"].samples)]
    return Limits(max(rates), 2 * n**3 / min(times["product"].samples))


def _repeated(run: Callable[[], None], times: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(times):
            run()

    return repeated
