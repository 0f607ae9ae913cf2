"""Negotiation: which backend serves which role, on which page size and KV layout. Pure, deterministic, torch-free.

A joint solution gives every role of every layer group one record that covers it, such that one page size suits the
model and one KV layout suits each group. Solutions are ordered by a key that is read off the solution alone: layers
left to an alternative role, wishes granted, layers measured, seconds, the plugins' own preference (each weighted by
layers and summed), page size, and for each group layout and names. Hence a losing offer cannot change the winner. Where
the host can switch and a role was measured by batch size, it may have several servers, each for its sizes.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence

from headstock.conflicts import conflict
from headstock.decision import (
    Choice,
    Decision,
    Mismatch,
    NearMiss,
    Outranked,
    Refusal,
    Winner,
    check_given_again,
    check_pin,
)
from headstock.errors import NegotiationError
from headstock.offer import Candidate, Fault, Offer
from headstock.policy import Measurement, Policy, flag
from headstock.ranking import Ranking
from headstock.reasons import Reasons
from headstock.refusals import Agreement, refusal
from headstock.requirement import Requirement
from headstock.solver import Role, answering, cover, groups_of, solve

__all__ = [
    "Candidate", "Choice", "Decision", "Fault", "Measurement", "Mismatch", "NearMiss", "Outranked", "Policy", "Refusal",
    "Requirement", "Winner", "check_pin", "negotiate",
]  # fmt: skip


def negotiate(
    requirements: Sequence[Requirement], candidates: Iterable[Candidate | Offer], policy: Policy | None = None
) -> Decision:
    """Settles backends, page size and KV layouts for `requirements` among `candidates`.

    Always returns a Decision; without a solution it has no choices and says what no combination covers. Raises
    NegotiationError where the question itself is wrong: a backend asked for that nobody offers, a choice for a role or
    group that the model does not have, two backends of one name, requirements that contradict each other, a pinned
    decision that cannot be given again.
    """
    policy = policy or Policy()
    field = _field(candidates)
    _check_requirements(requirements, policy)
    _check_choices(requirements, field, policy)
    ranking = Ranking(policy, tuple(dict.fromkeys(wish for need in requirements for wish in need.wishes)))
    roles = [cover(need, field, ranking) for need in requirements]
    groups = groups_of(roles, policy)
    pick = solve(groups, ranking)

    agreement = Agreement(groups, pick)
    reasons = Reasons(groups, pick, agreement, ranking)
    refused: list[Refusal] = []
    outranked: list[Outranked] = []
    for role in roles:
        winners = [entry.candidate for _, entry in reasons.servers(role)]
        for candidate in field:
            if any(candidate is winner for winner in winners):
                continue
            if why_not := refusal(role, candidate, agreement):
                refused.append(why_not)
            else:
                outranked.append(reasons.outranked(role, candidate))
    choices = tuple(reasons.choice(role) for role in roles) if pick else ()
    decision = Decision(
        page_size=pick.page_size if pick else None,
        choices=choices,
        refused=tuple(refused),
        outranked=tuple(outranked),
        notices=(
            *policy.notices,
            *(notice for role in roles for notice in reasons.notices(role, refused)),
            *_unused(policy, choices),
            *(_unused_profile(roles, ranking) if pick else ()),
        ),
        ungranted=tuple(wish for role in roles for wish in reasons.ungranted(role)),
        conflict="" if pick else conflict(requirements, field, groups, refused, ranking),
        requirements=tuple(requirements),
    )
    check_given_again(decision, policy)
    return decision


def _field(candidates: Iterable[Candidate | Offer]) -> list[Candidate]:
    """The candidates by name. Two that can be used under one name would be a guess; a broken namesake is no harm."""
    field = sorted((Candidate.of(candidate) for candidate in candidates), key=lambda c: (c.name, c.source))
    usable = [candidate for candidate in field if candidate.usable]
    for one, other in itertools.pairwise(usable):
        if one.name == other.name:
            raise NegotiationError(
                f"two backends are called {one.name!r}",
                given=f"{one.source} and {other.source}",
                works="one of them",
                type=f"pip uninstall {other.distribution}" if other.distribution else None,
            )
    return field


def _unused(policy: Policy, choices: Sequence[Choice]) -> list[str]:
    """What was asked for and makes no difference to what was settled."""
    served = {(choice.group, choice.role) for choice in choices if choice.winners}
    if policy.expand_from is None or not choices or any({(g, "extend"), (g, "expand")} <= served for g, _ in served):
        return []
    return [f"expanding from {policy.expand_from} tokens is not used: latent attention is not served in both forms"]


def _unused_profile(roles: Sequence[Role], ranking: Ranking) -> list[str]:
    """That a profile has nothing of what is to be chosen from here, and why."""
    policy = ranking.policy
    if not policy.profile or any(ranking.knows(role.requirement, entry) for role in roles for entry in role.entries):
        return []
    able = {entry.candidate.name for role in roles for entry in role.entries}
    names = sorted({each.backend for each in policy.profile})
    why = f"it is of {', '.join(names)}, and none of these can be chosen here"
    if own := [each for each in policy.profile if each.backend in able]:
        at = sorted({f"page size {each.page_size} {each.kv_layout}" for each in own if each.page_size})
        why = f"it is of {', '.join(sorted({each.backend for each in own}))} at {', '.join(at)}, which is not open here"
    name = f"the profile {policy.profile_file}".strip()
    return [f"{name} is not used: {why}; type: headstock tune"]


def _check_requirements(requirements: Sequence[Requirement], policy: Policy) -> None:
    if not requirements:
        raise NegotiationError("there is nothing to negotiate: the model has no attention layers")
    seen: set[tuple[str, str]] = set()
    settled: dict[tuple[str, str], object] = {}
    for need in requirements:
        if (need.group, need.role) in seen:
            raise NegotiationError(f"two requirements are for {need.where}")
        seen.add((need.group, need.role))
        if not need.cached:
            continue
        fixed = [
            ("", "page size", need.page_size),
            ("", "page size", policy.page_size),
            (need.group, "KV layout", need.kv_layout),
            (need.group, "KV layout", policy.layout(need.group)),
            (need.group, "KV dtype", need.kv_dtype),
        ]
        for group, what, value in fixed:
            if value is not None and settled.setdefault((group, what), value) != value:
                raise NegotiationError(
                    f"the cache has one {what}, and {need.where} asks for another",
                    given=f"{settled[group, what]} and {value}",
                )


def _check_choices(requirements: Sequence[Requirement], field: list[Candidate], policy: Policy) -> None:
    names = sorted({spelling for c in field for spelling in (c.name, *(c.offer.aliases if c.offer else ()))})
    for scope, name in policy.backends.items():
        meant = answering(name, field)
        if len(meant) > 1:
            raise NegotiationError(
                f"the alias {name!r} is ambiguous",
                given=" and ".join(sorted(meant)),
                works="a backend's own name",
                type=f"{flag(scope)} {min(meant)}",
            )
        if not meant:
            near = difflib.get_close_matches(name, names, 1)
            raise NegotiationError(
                f"there is no backend called {name!r} ({policy.origin(scope)})",
                works=f"{near[0]!r}, perhaps" if near else ", ".join(names) or "nothing: there is no backend",
                type="headstock plugins",
            )
    for scope, schedule in policy.schedules.items():
        if unknown := [name for _, name in schedule if name not in {candidate.name for candidate in field}]:
            raise NegotiationError(f"there is no backend called {unknown[0]!r} ({policy.origin(scope)})")
    own = {f"{need.group}/{need.role}" for need in requirements}
    scopes = {"all", *own} | {each for need in requirements for each in (need.role, need.phase)}
    _check_known("a backend is asked for a role", policy.backends, scopes)
    _check_known("backends are asked for by batch size for a role", policy.schedules, own)
    _check_known("a role is left to its alternatives", policy.unserved, own)
    _check_known("a KV layout is asked for a group", policy.kv_layouts, {"all"} | {need.group for need in requirements})


def _check_known(what: str, given: Iterable[str], known: set[str]) -> None:
    if unknown := sorted(set(given) - known):
        raise NegotiationError(
            f"{what} that this model does not have", given=unknown[0], works=", ".join(sorted(known))
        )
