"""The search behind `negotiate`: what covers which role, and the best joint solution among it.

Page sizes are bit masks, so that the sizes every role accepts are an intersection of unions. Given a page size and a
layout, roles are independent, and the cost stays linear in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headstock.capabilities import MAX_PAGE_SIZE, Capabilities
from headstock.offer import Candidate
from headstock.policy import Policy
from headstock.requirement import Requirement

ALL_SIZES = (1 << (MAX_PAGE_SIZE + 1)) - 2
"""The mask of every page size, 1…MAX_PAGE_SIZE."""

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


@dataclass(frozen=True, eq=False, slots=True)
class Role:
    """One requirement with everything that may serve it, and everything that could if the user had not chosen."""

    requirement: Requirement
    entries: list[Entry]  # within the user's choice, cheapest first where nothing was measured
    covering: list[Entry]  # all that cover, by name
    failing: dict[str, list[tuple[Capabilities, list[str]]]]  # candidate → its records and the axes each fails

    @property
    def key(self) -> tuple[str, str]:
        return self.requirement.group, self.requirement.role


@dataclass(frozen=True, eq=False, slots=True)
class Group:
    """The roles of one layer group, which share a KV layout; of each set of alternatives one role must be served."""

    roles: list[Role]
    alternatives: list[list[Role]]
    layouts: list[str | None]

    @property
    def name(self) -> str:
        return self.roles[0].requirement.group


class Pick(NamedTuple):
    """One joint solution. A role without an entry is left to its alternatives."""

    key: tuple[object, ...]
    page_size: int | None
    layouts: dict[str, str | None]  # by group
    entries: dict[tuple[str, str], Entry]  # by (group, role)


class Ranking:
    """The order of entries and solutions, as data."""

    def __init__(self, policy: Policy, wishes: Sequence[str]):
        self.policy, self.wishes = policy, wishes
        self.seconds = {measured[:-1]: measured.seconds for measured in policy.profile}

    def cost(self, need: Requirement, entry: Entry, page_size: int | None, layout: str | None) -> Cost:
        """Wishes granted, whether measured, femtoseconds, preference in millionths: each weighted by layers."""
        if not self.seconds:
            return entry.cost
        measured = self.measured(need, entry, page_size, layout)
        if measured is None:
            return entry.cost
        return (*entry.cost[:-3], 0, need.layers * round(measured * 1e15), entry.cost[-1])

    def unmeasured(self, need: Requirement, record: Capabilities, granted: Sequence[str]) -> Cost:
        """The cost of a record of which no measurement is known."""
        wishes = (-need.layers if wish in granted else 0 for wish in self.wishes)
        return (*wishes, need.layers, 0, -need.layers * round(record.preference * 1e6))

    def measured(self, need: Requirement, entry: Entry, page_size: int | None, layout: str | None) -> float | None:
        """Seconds of one layer, where this was measured."""
        return self.seconds.get((need.group, need.role, entry.candidate.name, page_size, layout))


def cover(need: Requirement, field: list[Candidate], ranking: Ranking) -> Role:
    """Checks every record against every axis that the requirement, completed by the user's choices, asks about."""
    policy = ranking.policy
    if need.cached:
        fixed = {"page_size": policy.page_size, "kv_layout": policy.layout(need.group)}
        need = need.model_copy(update={name: value for name, value in fixed.items() if value is not None})
    asked = need.asked()
    covering: list[Entry] = []
    failing: dict[str, list[tuple[Capabilities, list[str]]]] = {}
    for candidate in field:
        if candidate.offer is None or candidate.fault is not None:
            continue
        records = failing[candidate.name] = []
        for record in candidate.offer.capabilities:
            failed = [name for name, axis, needed in asked if not axis.covers(getattr(record, name), needed, need)]
            records.append((record, failed))
            if not failed:
                covering.append(_entry(need, candidate, record, ranking))
    entries = _within_choice(need, covering, field, policy)
    if not ranking.seconds:
        entries.sort(key=lambda entry: entry.cost)  # stable: by name, then in the offer's own order
    return Role(need, entries, covering, failing)


def _entry(need: Requirement, candidate: Candidate, record: Capabilities, ranking: Ranking) -> Entry:
    granted = tuple(wish for wish in need.wishes if getattr(record, wish))
    cost = ranking.unmeasured(need, record, granted)
    return Entry(candidate, record, *open_to(need, record), granted, cost)


def open_to(need: Requirement, record: Capabilities) -> tuple[int, frozenset[str]]:
    """The page sizes (a mask) and layouts that a record leaves to the other roles, given what the user fixed."""
    if not need.cached:
        return ALL_SIZES, frozenset()
    sizes, layouts = record.page_mask, frozenset(record.kv_layouts)
    if need.page_size is not None:
        sizes &= 1 << need.page_size
    if need.kv_layout is not None:
        layouts &= {need.kv_layout}
    return sizes, layouts


def _within_choice(need: Requirement, covering: list[Entry], field: list[Candidate], policy: Policy) -> list[Entry]:
    if f"{need.group}/{need.role}" in policy.unserved:
        return []
    chosen = policy.chosen(need)
    if chosen is None:
        return covering.copy()
    named = answering(chosen[1], field)
    return [entry for entry in covering if entry.candidate.name in named]


def answering(name: str, field: Iterable[Candidate]) -> set[str]:
    """The names of the candidates that `name` means: a backend's own name before anybody's alias."""
    names = {candidate.name for candidate in field if candidate.answers_to(name)}
    return {name} if name in names else names


def groups_of(roles: Iterable[Role], policy: Policy) -> list[Group]:
    """Roles sorted into layer groups, in order of first appearance."""
    members: dict[str, list[Role]] = {}
    for role in roles:
        members.setdefault(role.requirement.group, []).append(role)
    return [Group(group, _alternatives(group, policy), _layouts(group)) for group in members.values()]


def _alternatives(members: list[Role], policy: Policy) -> list[list[Role]]:
    sets: dict[tuple[str | None, str], list[Role]] = {}
    demanded = []
    for role in members:
        need = role.requirement
        sets.setdefault((need.either, "" if need.either else need.role), []).append(role)
        scope = (policy.chosen(need) or ("",))[0]
        if need.either and (scope == f"{need.group}/{need.role}" or scope == need.role != need.phase):
            demanded.append([role])  # a choice for this very role is not left to the alternatives
    return [*sets.values(), *demanded]


def _layouts(members: list[Role]) -> list[str | None]:
    cached = [role for role in members if role.requirement.cached]
    names = {name for role in cached for entry in role.entries for name in entry.layouts}
    return [*sorted(names)] if cached else [None]


def accepted(alternatives: list[Role], layout: str | None) -> int:
    """The mask of page sizes at which one of these roles is served under a layout."""
    sizes = 0
    for role in alternatives:
        for entry in role.entries:
            if not role.requirement.cached or layout in entry.layouts:
                sizes |= entry.sizes
    return sizes


def solve(groups: list[Group], ranking: Ranking) -> Pick | None:
    """The best joint solution, or None."""
    picks = (_solve_at(groups, page_size, ranking) for page_size in _page_sizes(groups, ranking.policy))
    return min((pick for pick in picks if pick is not None), key=lambda pick: pick.key, default=None)


def _page_sizes(groups: list[Group], policy: Policy) -> Iterator[int | None]:
    """The best-ranked page size of each class of sizes that the same entries accept; None if nothing is cached."""
    cached = [role for group in groups for role in group.roles if role.requirement.cached]
    if not cached:
        yield None
        return
    feasible = ALL_SIZES
    for group in groups:
        for alternatives in group.alternatives:
            feasible &= union(accepted(alternatives, layout) for layout in group.layouts)
    splits = {entry.sizes for role in cached for entry in role.entries}
    splits |= {1 << measured.page_size for measured in policy.profile if measured.page_size}
    classes = [feasible] if feasible else []
    for mask in splits:
        classes = [part for sizes in classes for part in (sizes & mask, sizes & ~mask) if part]
    for sizes in classes:
        listed = next((size for size in policy.page_sizes if sizes >> size & 1), None)
        yield (sizes & -sizes).bit_length() - 1 if listed is None else listed


class _Part(NamedTuple):
    """The best solution of one group under one page size and layout."""

    unserved: int  # layers of roles left to their alternatives
    cost: Cost
    layout_rank: tuple[int, str]
    names: tuple[str, ...]
    layout: str | None
    entries: dict[tuple[str, str], Entry]


def _solve_at(groups: list[Group], page_size: int | None, ranking: Ranking) -> Pick | None:
    """The best solution at one page size: groups are independent, and so are the roles under one layout."""
    parts = []
    for group in groups:
        solved = [part for layout in group.layouts if (part := _solve_group(group, page_size, layout, ranking))]
        if not solved:
            return None
        parts.append(min(solved, key=lambda part: part[:4]))
    key = (
        sum(part.unserved for part in parts),
        _total(part.cost for part in parts),
        ranking.policy.page_rank(page_size),
        tuple((part.layout_rank, part.names) for part in parts),
    )
    layouts = {group.name: part.layout for group, part in zip(groups, parts, strict=True)}
    return Pick(key, page_size, layouts, {key: entry for part in parts for key, entry in part.entries.items()})


def _solve_group(group: Group, page_size: int | None, layout: str | None, ranking: Ranking) -> _Part | None:
    entries: dict[tuple[str, str], Entry] = {}
    costs: list[Cost] = []
    unserved = 0
    for role in group.roles:
        need = role.requirement
        at = (page_size, layout) if need.cached else (None, None)
        best = _cheapest(role, at, ranking)
        if best is None:
            unserved += need.layers
        else:
            entries[role.key] = best
            costs.append(ranking.cost(need, best, *at))
    if not all(any(role.key in entries for role in alternatives) for alternatives in group.alternatives):
        return None
    names = tuple(entry.candidate.name for entry in entries.values())
    return _Part(unserved, _total(costs), ranking.policy.layout_rank(layout), names, layout, entries)


def _cheapest(role: Role, at: tuple[int | None, str | None], ranking: Ranking) -> Entry | None:
    fitting = (entry for entry in role.entries if entry.fits(*at))
    if not ranking.seconds:
        return next(fitting, None)
    return min(fitting, key=lambda entry: ranking.cost(role.requirement, entry, *at), default=None)


def union(masks: Iterable[int]) -> int:
    """The union of page-size masks."""
    result = 0
    for mask in masks:
        result |= mask
    return result


def _total(costs: Iterable[Cost]) -> Cost:
    return tuple(map(sum, zip(*costs, strict=True)))
