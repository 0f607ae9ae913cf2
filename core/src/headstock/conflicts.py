"""Conflicts: what no combination of backends covers, and what to type so that one does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headstock.capabilities import PHASES
from headstock.decision import AGAIN, IN_FULL, Refusal
from headstock.offer import Candidate
from headstock.policy import Policy, flag
from headstock.ranking import Entry, Ranking
from headstock.refusals import sizes_in_words, words
from headstock.requirement import Requirement
from headstock.solver import Group, Pick, Role, answering, cover, groups_of, solve

PAGE_SIZE, LAYOUT = "--page-size", "--kv-layout"
LISTING = "headstock plugins"
"""What tells why there is no backend: none is installed, or the environment leaves all of them out."""


def conflict(
    requirements: Sequence[Requirement],
    field: list[Candidate],
    groups: list[Group],
    refused: Sequence[Refusal],
    ranking: Ranking,
) -> str:
    """What stands in the way of every joint solution, in one line, and what to type."""
    sets = [alternatives for group in groups for alternatives in group.alternatives]
    barren = next((each for each in sets if not any(role.entries for role in each)), None)
    what = _unserved(barren, field, refused, ranking.policy) if barren else _apart(groups)
    cure = _choice_that_works(requirements, field, ranking) if field else LISTING
    return f"{what}; type: {cure or IN_FULL}"


def _unserved(alternatives: list[Role], field: list[Candidate], refused: Sequence[Refusal], policy: Policy) -> str:
    """Why nobody serves a role: what the backend asked for lacks, or the whole need."""
    needs = " or ".join(str(role.requirement) for role in alternatives)
    if not field:
        return f"there is no backend to serve {needs}"
    lines = []
    for role in alternatives:
        scope, name = policy.chosen(role.requirement) or ("", "")
        named = answering(name, field) if name else set()
        for each in _of(role, refused):
            if each.backend in named:
                why = each.fault or each.closest
                lines.append(f"{each.backend} ({policy.origin(scope)}) cannot serve {role.requirement.where}: {why}")
    return "; ".join(lines) or f"no installed backend serves {needs}"


def _apart(groups: list[Group]) -> str:
    """Who could serve each cached role, and on which page sizes and layouts."""
    roles = [role for group in groups for role in group.roles if role.requirement.cached]
    return "no page size and KV layout suit every role: " + "; ".join(
        f"{role.requirement.where}: {', '.join(_on(entry) for entry in role.entries[:3])}" for role in roles
    )


def _on(entry: Entry) -> str:
    return f"{entry.candidate.name} {sizes_in_words(entry.sizes)} on {words(entry.layouts)}"


def _choice_that_works(requirements: Sequence[Requirement], field: list[Candidate], ranking: Ranking) -> str:
    """The first of the user's choices that, changed alone, lets a solution exist: what to type instead."""
    if ranking.policy.pinned:
        return AGAIN

    def solved(policy: Policy) -> Pick | None:
        other = Ranking(policy, ranking.wishes)
        return solve(groups_of([cover(need, field, other) for need in requirements], policy), other)

    for narrowed, policy in _narrowings(ranking.policy):
        if solved(policy) is not None:
            return narrowed
    for fixed, relaxed in _relaxations(ranking.policy):
        if pick := solved(relaxed):
            return _instead(fixed, pick, requirements, ranking.policy)
    return ""


def _narrowings(policy: Policy) -> Iterator[tuple[str, Policy]]:
    """The backend asked for in every phase, asked for in one alone: what to type, and the policy."""
    rest = dict(policy.backends)
    name = rest.pop("all", None)
    for phase in PHASES:
        if name is not None and phase not in rest:
            typed = f"{flag(phase)} {name}, without {flag('all')}"
            yield typed, policy.model_copy(update={"backends": {**rest, phase: name}})


def _relaxations(policy: Policy) -> Iterator[tuple[list[str], Policy]]:
    """What the user fixed, one by one and then all of it (flags, scopes), and the policy without it."""
    if policy.page_size is not None:
        yield [PAGE_SIZE], policy.model_copy(update={"page_size": None})
    if policy.kv_layouts:
        yield [LAYOUT], policy.model_copy(update={"kv_layouts": {}})
    for scope in policy.backends:
        rest = {other: name for other, name in policy.backends.items() if other != scope}
        yield [scope], policy.model_copy(update={"backends": rest})
    fixed = [PAGE_SIZE] * (policy.page_size is not None) + [LAYOUT] * bool(policy.kv_layouts) + [*policy.backends]
    if len(fixed) > 1:
        yield fixed, policy.model_copy(update={"page_size": None, "kv_layouts": {}, "backends": {}})


def _instead(fixed: list[str], pick: Pick, requirements: Sequence[Requirement], policy: Policy) -> str:
    """The choice that a solution found without `fixed` makes there; without a single one, to leave it out."""
    values: set[object] = set()
    if fixed == [PAGE_SIZE]:
        values = {pick.page_size}
    elif fixed == [LAYOUT]:
        values = {layout for layout in pick.layouts.values() if layout}
    elif len(fixed) == 1:
        ruled = [need for need in requirements if (policy.chosen(need) or ("",))[0] == fixed[0]]
        servers = (pick.servers.get((need.group, need.role), ()) for need in ruled)
        values = {entry.candidate.name for each in servers for _, entry in each}
    flags = [each if each in (PAGE_SIZE, LAYOUT) else flag(each) for each in fixed]
    return f"{flags[0]} {values.pop()}" if len(values) == 1 else f"the same without {', '.join(flags)}"


def _of(role: Role, refused: Sequence[Refusal]) -> list[Refusal]:
    return [each for each in refused if (each.group, each.role) == role.key]
