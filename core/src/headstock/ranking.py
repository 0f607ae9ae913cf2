"""The ranking of entries and of who serves a role by batch size: costs, read off each alone, as whole numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headstock.capabilities import Capabilities
from headstock.offer import Candidate
from headstock.policy import Policy
from headstock.requirement import Requirement

Key = tuple[str, str, str, int | None, str | None]
"""Group, role, backend, page size and KV layout: what was measured."""

Cost = tuple[int, ...]
"""Lower is better, column by column. Whole numbers, so that sums are exact and a loser can never tip a balance."""


class Entry(NamedTuple):
    """One record that covers one requirement; of page sizes and layouts, it holds those the user left open."""

    candidate: Candidate
    record: Capabilities
    sizes: int  # mask of the page sizes that fit
    layouts: frozenset[str]
    granted: tuple[str, ...]  # wishes
    cost: Cost  # where nothing was measured

    def fits(self, page_size: int | None, layout: str | None) -> bool:
        return (page_size is None or bool(self.sizes >> page_size & 1)) and (layout is None or layout in self.layouts)


Servers = tuple[tuple[int | None, Entry], ...]
"""Who serves a role: entries, each with the most rows that it serves, None for any; the last one always has None."""


class Ranking:
    """The order of entries and solutions, as data.

    A cost is wishes granted, whether measured, femtoseconds per token, and preference in millionths, each weighted by
    layers. Where a role was measured by batch size, its femtoseconds are the mean over its buckets.
    """

    def __init__(self, policy: Policy, wishes: Sequence[str]):
        self.policy, self.wishes = policy, wishes
        self.seconds: dict[Key, dict[int | None, tuple[float, int]]] = {}
        sizes: dict[tuple[str, str], set[int | None]] = {}
        for each in policy.profile:
            self.seconds.setdefault(each[:5], {})[each.max_batch] = each.seconds, each.tokens
            sizes.setdefault((each.group, each.role), set()).add(each.max_batch)
        self.sizes = {role: sorted(each, key=_by_size) for role, each in sizes.items()}

    def buckets(self, need: Requirement) -> list[int | None]:
        """The batch sizes up to which a role was measured, None for any, which is the last."""
        return self.sizes.get((need.group, need.role), [None])

    def cost(self, need: Requirement, entry: Entry, page_size: int | None, layout: str | None) -> Cost:
        """The cost of serving a role at all batch sizes by one entry."""
        figures = self.figures(need, entry, page_size, layout)
        return entry.cost if figures is None else self._with(need, entry.cost, figures, [entry])

    def cost_of(self, need: Requirement, servers: Servers, page_size: int | None, layout: str | None) -> Cost:
        """The cost of serving a role by several, each at its batch sizes."""
        if len(servers) == 1:
            return self.cost(need, servers[0][1], page_size, layout)
        sizes = self.buckets(need)
        each = [next(e for most, e in servers if most is None or (size or most + 1) <= most) for size in sizes]
        wishes = max(entry.cost[:-3] for entry in each)
        measured = [self.figures(need, entry, page_size, layout) for entry in each]
        if any(figures is None for figures in measured):
            return max(entry.cost for entry in each)
        figures = [own[i] for i, own in enumerate(measured) if own is not None]
        return self._with(need, (*wishes, 0, 0, 0), figures, each)

    def unmeasured(self, need: Requirement, record: Capabilities, granted: Sequence[str]) -> Cost:
        """The cost of a record of which no measurement is known."""
        wishes = (-need.layers if wish in granted else 0 for wish in self.wishes)
        return (*wishes, need.layers, 0, -need.layers * round(record.preference * 1e6))

    def figures(self, need: Requirement, entry: Entry, page_size: int | None, layout: str | None) -> list[int] | None:
        """Femtoseconds per token of one layer by bucket, None unless all of the role's buckets were measured."""
        if not self.seconds:
            return None
        found = self.seconds.get((need.group, need.role, entry.candidate.name, page_size, layout), {})
        sizes = self.buckets(need)
        if len(found) < len(sizes):
            return None
        return [round(seconds / tokens * 1e15) for seconds, tokens in map(found.__getitem__, sizes)]

    def knows(self, need: Requirement, entry: Entry) -> bool:
        """Whether an entry was measured for a role under a KV configuration that it can have."""
        own = (key[3:] for key in self.seconds if key[:3] == (need.group, need.role, entry.candidate.name))
        return any(entry.fits(*at) and self.figures(need, entry, *at) is not None for at in own)

    def measured(
        self, need: Requirement, entry: Entry, page_size: int | None, layout: str | None, most: int | None
    ) -> float:
        """Seconds of one layer in the bucket of batches of at most `most` rows, which was measured."""
        return self.seconds[need.group, need.role, entry.candidate.name, page_size, layout][most][0]

    @staticmethod
    def _with(need: Requirement, cost: Cost, figures: Sequence[int], entries: Sequence[Entry]) -> Cost:
        preference = sum(entry.cost[-1] for entry in entries) // len(entries)
        return (*cost[:-3], 0, need.layers * (sum(figures) // len(figures)), preference)


def _by_size(most: int | None) -> tuple[bool, int]:
    return most is None, most or 0
