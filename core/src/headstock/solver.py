"""The search behind `negotiate`: what covers which role, and the best joint solution among it.

Page sizes are bit masks, so that the sizes every role accepts are an intersection of unions. Given a page size and a
layout, roles are independent, and the cost stays linear in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from headstock.capabilities import MAX_PAGE_SIZE, Capabilities
from headstock.offer import Candidate
from headstock.policy import Policy, Schedule
from headstock.ranking import Cost, Entry, Ranking, Servers
from headstock.requirement import Requirement

ALL_SIZES = (1 << (MAX_PAGE_SIZE + 1)) - 2
"""The mask of every page size, 1…MAX_PAGE_SIZE."""


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
    """One joint solution. A role without servers is left to its alternatives."""

    key: tuple[object, ...]
    page_size: int | None
    layouts: dict[str, str | None]  # by group
    servers: dict[tuple[str, str], Servers]  # by (group, role)


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
    chosen, schedule = policy.chosen(need), policy.scheduled(need)
    if chosen is None and not schedule:
        return covering.copy()
    named = answering(chosen[1], field) if chosen else {name for _, name in schedule}
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
        scope = f"{need.group}/{need.role}" if policy.scheduled(need) else (policy.chosen(need) or ("",))[0]
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
    picks = (_solve_at(groups, page_size, ranking) for page_size in page_sizes(groups, ranking.policy))
    return min((pick for pick in picks if pick is not None), key=lambda pick: pick.key, default=None)


def page_sizes(groups: list[Group], policy: Policy) -> Iterator[int | None]:
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
    servers: dict[tuple[str, str], Servers]


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
    return Pick(key, page_size, layouts, {key: each for part in parts for key, each in part.servers.items()})


def _solve_group(group: Group, page_size: int | None, layout: str | None, ranking: Ranking) -> _Part | None:
    servers: dict[tuple[str, str], Servers] = {}
    costs: list[Cost] = []
    unserved = 0
    for role in group.roles:
        need = role.requirement
        at = (page_size, layout) if need.cached else (None, None)
        best = _cheapest(role, at, ranking)
        if not best:
            unserved += need.layers
        else:
            servers[role.key] = best
            costs.append(ranking.cost_of(need, best, *at))
    if not all(any(role.key in servers for role in alternatives) for alternatives in group.alternatives):
        return None
    names = tuple(entry.candidate.name for each in servers.values() for _, entry in each)
    return _Part(unserved, _total(costs), ranking.policy.layout_rank(layout), names, layout, servers)


def _cheapest(role: Role, at: tuple[int | None, str | None], ranking: Ranking) -> Servers:
    """The best servers of a role, none where nobody fits; several where batch sizes were measured and it pays."""
    need = role.requirement
    fitting = [entry for entry in role.entries if entry.fits(*at)]
    if schedule := ranking.policy.scheduled(need):
        return _scheduled(need, schedule, fitting, at, ranking)
    if not ranking.seconds or not fitting:
        return tuple((None, entry) for entry in fitting[:1])
    costs = [ranking.cost(need, entry, *at) for entry in fitting]
    best = min(costs)
    sizes = ranking.buckets(need) if ranking.policy.by_batch else [None]
    if len(sizes) == 1 or best[-3]:
        return ((None, fitting[costs.index(best)]),)
    # wishes and being measured come before seconds, so only entries that are equal in them can share a role
    rivals = [entry for entry, cost in zip(fitting, costs, strict=True) if cost[:-2] == best[:-2]]
    figures = {id(entry): ranking.figures(need, entry, *at) or [] for entry in rivals}
    servers: list[tuple[int | None, Entry]] = []
    for i, most in enumerate(sizes):
        before = servers[-1][1] if servers else None
        entry = min(rivals, key=lambda rival: (figures[id(rival)][i], rival.cost[-1], rival is not before))
        if entry is before:
            servers.pop()
        servers.append((most, entry))
    return tuple(servers)


def _scheduled(
    need: Requirement, schedule: Schedule, fitting: list[Entry], at: tuple[int | None, str | None], ranking: Ranking
) -> Servers:
    """The servers that the user named by batch size; none where one of them does not fit."""
    servers = []
    for most, name in schedule:
        own = [entry for entry in fitting if entry.candidate.name == name]
        if not own:
            return ()
        servers.append((most, min(own, key=lambda entry: ranking.cost(need, entry, *at))))
    return tuple(servers)


def union(masks: Iterable[int]) -> int:
    """The union of page-size masks."""
    result = 0
    for mask in masks:
        result |= mask
    return result


def _total(costs: Iterable[Cost]) -> Cost:
    return tuple(map(sum, zip(*costs, strict=True)))
