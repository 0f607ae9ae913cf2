"""The limits of a run: how much of everything a forward, and so each of its backends, must be able to take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headstock.device import Device
from headstock.errors import HeadstockError
from headstock.policy import GRAPH_SIZES, Policy

MAX_LEVELS = 3
"""Most levels of shared prefixes in a batch: a system prompt, an example or a document, a conversation."""


class Limits(NamedTuple):
    """What an instance must be able to serve: rows and tokens of a forward, a token per row or more, plans, levels."""

    max_batch: int
    max_tokens: int
    max_plans: int = 1  # alive at once, beside those of graphs
    max_levels: int = 0  # of shared prefixes, for backends that read them once
    graph_sizes: tuple[int, ...] = ()  # rows of the decode steps to capture, where every backend can be

    @classmethod
    def of(
        cls, policy: Policy, device: Device, max_batch: int, max_tokens: int, mixed: str, graph_sizes: Sequence[int]
    ) -> Limits:
        """The limits of a run under a policy; decode steps are captured on a CPU only where it insists."""
        sizes = bucket_sizes(max_batch, graph_sizes)
        captures = policy.graph == "on" or (policy.graph == "auto" and device.torch.type != "cpu")
        return cls(
            max_batch,
            max_tokens,
            max_plans=1 if mixed == "extend" else 2,
            max_levels=0 if policy.cascade == "off" else MAX_LEVELS,
            graph_sizes=sizes if captures else (),
        )


def bucket_sizes(max_batch: int, sizes: Sequence[int] = GRAPH_SIZES) -> tuple[int, ...]:
    """The batch sizes to capture: `sizes` up to `max_batch`, and `max_batch` itself, always."""
    if not isinstance(sizes, Iterable) or any(type(size) is not int or size < 1 for size in sizes):
        raise HeadstockError("captured batch sizes are 1 or more", given=repr(sizes)[:80], works="(1, 2, 4)")
    return tuple(sorted({size for size in sizes if size < max_batch} | {max_batch}))
