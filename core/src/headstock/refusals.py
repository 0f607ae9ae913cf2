"""Refusals: every axis on which the nearest records of a candidate fail a role, its own and those it shares."""

from __future__ import annotations

from functools import partial
from typing import Any

from headstock.capabilities import AXES, Capabilities
from headstock.decision import Mismatch, NearMiss, Refusal
from headstock.offer import Candidate
from headstock.solver import ALL_SIZES, Group, Pick, Role, accepted, open_to, union

OPEN_AXES = ("page_sizes", "kv_layouts")
"""The axes that a requirement leaves open, to be settled for all roles at once, unless the user fixed them."""


class Agreement:
    """What the roles of a model accept of each other's page sizes and KV layouts, computed once per role and layout."""

    def __init__(self, groups: list[Group], pick: Pick | None):
        self.groups, self.pick = groups, pick
        self._by_group = {
            group.name: union(self._of_group(group, layout, None) for layout in group.layouts) for group in groups
        }
        self._by_role: dict[tuple[str, str], dict[str, int]] = {}
        self._because: dict[tuple[str, str, str], str] = {}
        self._mismatches: dict[tuple[Any, ...], Mismatch] = {}

    def of_others(self, role: Role) -> dict[str, int]:
        """The layouts, each with a mask of page sizes, on which every other role can be served."""
        if role.key not in self._by_role:
            sizes, own = ALL_SIZES, self.groups[0]
            for group in self.groups:
                if role in group.roles:
                    own = group
                else:
                    sizes &= self._by_group[group.name]
            records = (record for records in role.failing.values() for record, _ in records)
            layouts = {layout for record in records for layout in record.kv_layouts}
            masks = ((layout, sizes & self._of_group(own, layout, role)) for layout in layouts)
            self._by_role[role.key] = {layout: mask for layout, mask in masks if mask}
        return self._by_role[role.key]

    @staticmethod
    def _of_group(group: Group, layout: str | None, but: Role | None) -> int:
        """What a group accepts, without the alternatives of `but`; a role that nobody can serve demands nothing."""
        sizes = ALL_SIZES
        for alternatives in group.alternatives:
            if but not in alternatives and any(role.entries for role in alternatives):
                sizes &= accepted(alternatives, layout)
        return sizes

    def at_odds(self, role: Role, record: Capabilities) -> dict[str, str]:
        """The joint axes on which a record is at odds with the other roles, each with what they accept, in words.

        Where the others have nothing in common among themselves, it is no fault of this record.
        """
        if not role.requirement.cached:
            return {}
        sizes, layouts = open_to(role.requirement, record)
        others = self.of_others(role)
        if not others or any(sizes & others.get(layout, 0) for layout in layouts):
            return {}
        common = layouts & others.keys()
        wanted = union(others[layout] for layout in common or others)
        found = {} if common else {"kv_layouts": words(frozenset(others))}
        if not sizes & wanted:
            found["page_sizes"] = sizes_in_words(wanted)
        return found

    def possible(self, role: Role, record: Capabilities) -> bool:
        """Whether a record that covers a role is part of some joint solution, as far as the other roles have one."""
        return not self.at_odds(role, record)

    def because(self, role: Role, axis: str) -> str:
        """Who shares a joint axis with a role: the other cached roles, and who serves, or could serve, them."""
        key = (*role.key, axis)
        if key not in self._because:
            group = role.requirement.group
            within = [g for g in self.groups if axis == "page_sizes" or g.name == group]
            others = [other for g in within for other in g.roles if other is not role and other.requirement.cached]
            shared = ", ".join(f"{other.requirement.where} ({self._servers(other)})" for other in others)
            self._because[key] = f"shared with {shared}" if shared else ""
        return self._because[key]

    def mismatch(self, role: Role, name: str, offered: Any, shared: str | None) -> Mismatch:
        """One failing axis in words; `shared` is what the other roles accept, where that is what it fails."""
        key = (*role.key, name, offered, shared)
        if key not in self._mismatches:
            self._mismatches[key] = self._mismatch(role, name, offered, shared)
        return self._mismatches[key]

    def _mismatch(self, role: Role, name: str, offered: Any, shared: str | None) -> Mismatch:
        axis, needed = AXES[name], AXES[name].needed(role.requirement)
        if shared is not None and needed is None:
            needed_words, remedy, because = shared, "another backend for one of them", self.because(role, name)
        else:
            needed_words, remedy = words(needed), axis.cure(offered, needed)
            because = "asked for" if name in OPEN_AXES else self.because(role, name) if axis.joint else ""
        return Mismatch(axis=name, needed=needed_words, offered=words(offered), remedy=remedy, because=because)

    def _servers(self, role: Role) -> str:
        servers = self.pick.servers.get(role.key, ()) if self.pick else ()
        names = list(dict.fromkeys(entry.candidate.name for _, entry in servers))
        names = names or sorted({entry.candidate.name for entry in role.entries})
        return ", ".join(names[:3]) + (", …" if len(names) > 3 else "") or "nobody"


def refusal(role: Role, candidate: Candidate, agreement: Agreement) -> Refusal | None:
    """Why a candidate cannot serve a role, or None if it could in some joint solution: its fault, or its offer.

    Its nearest records are the antichain: those of which no other fails a strict subset of the axes.
    """
    need = role.requirement
    refuse = partial(Refusal, group=need.group, role=need.role, backend=candidate.name, source=candidate.source)
    if candidate.fault is None:
        records = role.failing[candidate.name]
    else:
        records = [(record, need.unmet(record)) for record in (candidate.offer.capabilities if candidate.offer else ())]
        if not records or any(not failed for _, failed in records):
            return refuse(fault=candidate.fault)  # otherwise its cure would help nobody here
    misses = []
    for record, failed in records:
        odds = {} if candidate.fault else agreement.at_odds(role, record)
        if not failed and not odds:
            return None
        misses.append((record, odds, {*failed, *odds}))
    nearest = (
        NearMiss(record=str(record), mismatches=_mismatches(role, record, axes, odds, agreement))
        for record, odds, axes in misses
        if not any(other < axes for *_, other in misses)
    )
    return refuse(nearest=tuple(nearest))


def _mismatches(
    role: Role, record: Capabilities, axes: set[str], odds: dict[str, str], agreement: Agreement
) -> tuple[Mismatch, ...]:
    return tuple(agreement.mismatch(role, name, getattr(record, name), odds.get(name)) for name in AXES if name in axes)


def words(value: Any) -> str:
    """A needed or offered value as a person reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset):
        return "{" + ", ".join(sorted(map(str, value))) + "}" if value else "none"
    return "none" if value is None else str(value)


def sizes_in_words(mask: int) -> str:
    """A mask of page sizes: "any", or its smallest members."""
    if mask == ALL_SIZES:
        return "any"
    sizes: list[str] = []
    while mask and len(sizes) < 6:
        lowest = mask & -mask
        sizes.append(str(lowest.bit_length() - 1))
        mask ^= lowest
    return "{" + ", ".join([*sizes, "…"] if mask else sizes) + "}"
