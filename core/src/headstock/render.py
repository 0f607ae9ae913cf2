"""A decision in words for people: in full for `explain`, in eight lines for an error. Plain text, torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NoReturn

from headstock.decision import IN_FULL, Choice, Decision, Refusal
from headstock.errors import NegotiationError
from headstock.requirement import Requirement

NEAREST = 3
"""How many refusals are shown unless all are asked for."""

Key = tuple[str, str]  # group and role


def explain(decision: Decision, all: bool = False) -> list[str]:
    """The lines of a full account: what is needed, who serves it and why, and why nobody else does.

    Without `all`, the three nearest refusals and the first three outranked candidates stand for the rest.
    """
    wheres = _wheres(decision)
    lines = ["Needed", *(f"  {need}" for need in decision.requirements)]
    if decision.conflict:
        lines += ["Conflict", f"  {decision.conflict}"]
    if decision.solved:
        lines += ["Chosen", *(f"  {line}" for choice in decision.choices for line in _chosen(choice))]
        lines += ["KV cache", *(f"  {line}" for line in _kv_cache(decision.choices))]
    lines += _section("Notices", (*decision.ungranted, *decision.notices))

    refused = _nearest_first(decision)
    shown = refused if all else refused[:NEAREST]
    lines += _section("Refused", (line for refusal in shown for line in _refused(refusal, wheres, all)))
    lines += _section("Every backend lacks", lacking(decision))
    outranked = decision.outranked if all else decision.outranked[:NEAREST]
    lines += _section("Outranked", (f"{wheres[o.group, o.role]}: {o.backend} ({o.record}): {o.why}" for o in outranked))
    return lines + _more(len(refused) - len(shown) + len(decision.outranked) - len(outranked))


def error_lines(decision: Decision) -> str:
    """At most eight lines: the conflict, the need behind it, the three nearest refusals, what every backend lacks."""
    wheres = _wheres(decision)
    refused = _nearest_first(decision)
    lines = [decision.conflict]
    stuck = _stuck(decision)
    if stuck and str(stuck[0]) not in decision.conflict:
        lines.append(f"  needed: {stuck[0]}")
    for refusal in refused[:NEAREST]:
        lines.append(f"  {wheres[refusal.group, refusal.role]}: {refusal.backend}: {refusal.fault or refusal.closest}")
    lines += [f"  every backend lacks {line}" for line in lacking(decision)[:2]]
    return "\n".join(lines + _more(len(refused) - NEAREST))


def raise_unsolved(decision: Decision) -> NoReturn:
    """Raises NegotiationError with the first eight lines of a decision without a solution."""
    raise NegotiationError(error_lines(decision), decision=decision)


def lacking(decision: Decision) -> list[str]:
    """The axes that no working backend covers for a role, as "axis value (role)"; none where the role can be served."""
    lines = []
    for need in _stuck(decision):
        refusals = [r for r in decision.refused if (r.group, r.role) == (need.group, need.role) and r.nearest]
        misses = [{m.axis: m for m in miss.mismatches} for refusal in refusals for miss in refusal.nearest]
        for axis in misses[0] if misses else ():
            if all(axis in miss for miss in misses):
                lines.append(f"{axis} {misses[0][axis].needed} ({need.where})")
    return lines


def _wheres(decision: Decision) -> dict[Key, str]:
    return {(need.group, need.role): need.where for need in decision.requirements}


def _stuck(decision: Decision) -> list[Requirement]:
    """The roles without a winner and without a candidate that could be one, nor an alternative that has one."""
    able = {(o.group, o.role) for o in decision.outranked} | {(c.group, c.role) for c in decision.choices if c.winners}
    helped = {(need.group, need.either) for need in decision.requirements if (need.group, need.role) in able}
    return [
        need
        for need in decision.requirements
        if (need.group, need.role) not in able and (need.either is None or (need.group, need.either) not in helped)
    ]


def _nearest_first(decision: Decision) -> list[Refusal]:
    """Refusals by how little is missing, those of roles that nobody can serve, or may, before all others."""
    stuck: set[Key] = {(need.group, need.role) for need in _stuck(decision)}
    stuck |= {  # a backend that was asked for stands in the way of others: the conflict alone tells of it
        key for key, where in _wheres(decision).items() if f" cannot serve {where}: " in decision.conflict
    }

    def distance(refusal: Refusal) -> tuple[bool, int]:
        missing = len(refusal.closest.mismatches) if refusal.closest else 1
        return (refusal.group, refusal.role) not in stuck, missing

    return sorted(decision.refused, key=distance)


def _chosen(choice: Choice) -> Iterator[str]:
    where = choice.requirement.where
    if not choice.winners:
        yield f"{where}: left to its alternative"
    for share, winner in choice.shares():
        yield f"{share}: {winner.backend} ({winner.record}; {winner.source}): {winner.why}"


def _kv_cache(choices: Iterable[Choice]) -> Iterator[str]:
    """One line per group: groups share the page size, roles of a group also layout and dtype."""
    choices = list(choices)
    needs = {choice.group: choice.requirement for choice in choices if choice.requirement.cached}
    expanded = {choice.group: choice.requirement for choice in choices if choice.role == "expand"}
    for group, need in needs.items():
        of_group = "" if group == "all" else f"group {group}: "
        yield f"{of_group}page size {need.page_size}, layout {need.kv_layout}, dtype {need.kv_dtype}"
        if group in expanded:
            yield f"{of_group}{_in_place_of(expanded[group], need)}"
    if not needs:
        yield "none"


def _in_place_of(whole: Requirement, latent: Requirement) -> str:
    """What a token of a latent cache takes, beside the keys and values that it stands for."""
    size = int(re.findall(r"\d+", latent.kv_dtype)[0]) // 8
    expanded = whole.num_kv_heads * (whole.head_dim + whole.v_head_dim) * size
    return f"{latent.head_dim * size} bytes per token and layer; keys and values of all heads would take {expanded}"


def _refused(refusal: Refusal, wheres: dict[Key, str], all: bool) -> Iterator[str]:
    """The fault, or the axes of the closest record (of every nearest one)."""
    where = wheres[refusal.group, refusal.role]
    if refusal.fault:
        yield f"{where}: {refusal.backend} ({refusal.source}): {refusal.fault}"
    for miss in refusal.nearest if all else filter(None, [refusal.closest]):
        yield f"{where}: {refusal.backend} ({miss.record}; {refusal.source})"
        for mismatch in miss.mismatches:
            yield f"  {mismatch}; try {mismatch.remedy}"


def _section(title: str, lines: Iterable[str]) -> list[str]:
    indented = [f"  {line}" for line in lines]
    return [title, *indented] if indented else []


def _more(hidden: int) -> list[str]:
    return [f"  and {hidden} more: {IN_FULL}"] if hidden > 0 else []
