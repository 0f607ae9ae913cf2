"""Reasons: what makes a winner the one, by what every other able candidate was outranked, and what was lost."""

from __future__ import annotations

from headstock.decision import Choice, Outranked, Refusal, Winner
from headstock.offer import Candidate
from headstock.ranking import Cost, Entry, Ranking, Servers
from headstock.refusals import Agreement, sizes_in_words, words
from headstock.requirement import Requirement
from headstock.solver import Group, Pick, Role

ALL_BATCHES = -1
"""In place of a bucket's batch size: all of them."""


class Reasons:
    """Answers for the outcome of one negotiation, role by role. Every statement is read off costs and masks."""

    def __init__(self, groups: list[Group], pick: Pick | None, agreement: Agreement, ranking: Ranking):
        self.groups, self.pick, self.agreement, self.ranking = groups, pick, agreement, ranking
        self.policy = ranking.policy

    def servers(self, role: Role) -> Servers:
        """Who serves a role in the solution: none, one, or several by batch size."""
        return self.pick.servers.get(role.key, ()) if self.pick else ()

    def settled(self, need: Requirement) -> tuple[int | None, str | None]:
        """The page size and KV layout of a role in the solution."""
        if self.pick is None or not need.cached:
            return None, None
        return self.pick.page_size, self.pick.layouts[need.group]

    def choice(self, role: Role) -> Choice:
        """What was settled for a role."""
        page_size, layout = self.settled(role.requirement)
        need = role.requirement.model_copy(update={"page_size": page_size, "kv_layout": layout})
        winners = (
            Winner(
                max_batch=most,
                backend=entry.candidate.name,
                record=str(entry.record),
                source=entry.candidate.source,
                why=self.why_won(role, most, entry),
                granted=entry.granted,
            )
            for most, entry in self.servers(role)
        )
        return Choice(requirement=need, winners=tuple(winners))

    def why_won(self, role: Role, most: int | None, winner: Entry) -> str:
        """What sets a winner apart from the runner-up on the same page size and layout, at its batch sizes."""
        if self.policy.scheduled(role.requirement):
            return f"asked for ({self.policy.origin(f'{role.key[0]}/{role.key[1]}')})"
        if chosen := self.policy.chosen(role.requirement):
            return f"asked for ({self.policy.origin(chosen[0])})"
        at = self.settled(role.requirement)
        others = [entry for entry in role.covering if entry.candidate is not winner.candidate]
        fitting = [entry for entry in others if entry.fits(*at)]
        if fitting:
            size = most if len(self.servers(role)) > 1 else ALL_BATCHES
            return self.advantage(role, winner, min(fitting, key=lambda entry: self._cost(role, entry, size)), size)
        if any(self.agreement.possible(role, entry.record) for entry in others):
            return f"the only one on {_configuration(*at)}, which suits the whole best"
        return "the only one that can"

    def outranked(self, role: Role, candidate: Candidate) -> Outranked:
        """Why a candidate that could serve a role in some joint solution does not."""
        own = (entry for entry in role.covering if entry.candidate is candidate)
        able = [entry for entry in own if self.agreement.possible(role, entry.record)]
        fitting = [entry for entry in able if self.pick and entry.fits(*self.settled(role.requirement))]
        best = min(fitting or able, key=lambda entry: self._cost(role, entry))
        why = self.why_lost(role, best, bool(fitting))
        need = role.requirement
        return Outranked(group=need.group, role=need.role, backend=candidate.name, record=str(best.record), why=why)

    def why_lost(self, role: Role, entry: Entry, fits: bool) -> str:
        need, servers = role.requirement, self.servers(role)
        if schedule := self.policy.scheduled(need):
            names = ", ".join(dict.fromkeys(name for _, name in schedule))
            return f"{names} were asked for ({self.policy.origin(f'{need.group}/{need.role}')})"
        if chosen := self.policy.chosen(need):
            return f"{chosen[1]} was asked for ({self.policy.origin(chosen[0])})"
        if f"{need.group}/{need.role}" in self.policy.unserved:
            return "the role is left to its alternatives, as asked for"
        if self.pick is None:
            return self._why_unsolved()
        if len(servers) == 1 and fits:
            return f"{servers[0][1].candidate.name}: {self.advantage(role, servers[0][1], entry)}"
        if servers and fits:
            each = (f"{server.candidate.name}: {self.advantage(role, server, entry, most)}" for most, server in servers)
            return "; ".join(each)
        page_size, layout = self.settled(need)
        differs = [f"page size {sizes_in_words(entry.sizes)}"] if not entry.fits(page_size, None) else []
        if not entry.fits(None, layout):
            differs.append(f"layout {words(entry.layouts)}")
        return f"needs {' and '.join(differs)}; the whole is best on {_configuration(page_size, layout)}"

    def _why_unsolved(self) -> str:
        barren = [sets[0] for group in self.groups for sets in group.alternatives if not any(r.entries for r in sets)]
        if barren:
            return f"could serve this role, but nothing serves {barren[0].requirement.where}"
        return "could serve this role, but the other roles share no page size and layout"

    def advantage(self, role: Role, better: Entry, other: Entry, most: int | None = ALL_BATCHES) -> str:
        """Why `better` stands before `other` on the settled configuration: the first column in which costs differ.

        At all batch sizes, or in the bucket of at most `most` rows.
        """
        name = other.candidate.name
        *mine, measured, seconds, preference = self._cost(role, better, most)
        *theirs, their_measured, their_seconds, their_preference = self._cost(role, other, most)
        for wish, have, lack in zip(self.ranking.wishes, mine, theirs, strict=True):
            if have != lack:
                return f"grants {wish}, unlike {name}"
        if measured != their_measured:
            return f"measured on this machine, unlike {name}"
        if seconds != their_seconds:
            return self._measured(role, better, other, most)
        if preference != their_preference:
            return f"preference {better.record.preference:g} against {other.record.preference:g} of {name}"
        return f"level with {name}, first by name"

    def _measured(self, role: Role, better: Entry, other: Entry, most: int | None) -> str:
        """Both figures, in the bucket asked about, or in each where the role was measured by batch size."""
        need, at, name = role.requirement, self.settled(role.requirement), other.candidate.name
        sizes = self.ranking.buckets(need)
        if most == ALL_BATCHES and len(sizes) > 1:
            times = ((self._micros(need, better, at, n), self._micros(need, other, at, n), n) for n in sizes)
            pairs = (f"{mine}/{theirs} µs at {_rows(sizes, n)}" for mine, theirs, n in times)
            return f"measured a layer in less time than {name}: {', '.join(pairs)}"
        size = sizes[-1] if most == ALL_BATCHES else most
        mine, theirs = self._micros(need, better, at, size), self._micros(need, other, at, size)
        where = f", at {_rows(sizes, size)}" if len(sizes) > 1 else ""
        return f"measured {mine} µs a layer against {theirs} µs of {name}{where}"

    def _micros(self, need: Requirement, entry: Entry, at: tuple[int | None, str | None], most: int | None) -> str:
        return f"{self.ranking.measured(need, entry, *at, most) * 1e6:.4g}"

    def ungranted(self, role: Role) -> list[str]:
        """Wishes that the winner cannot grant."""
        need = role.requirement
        lacking: dict[str, dict[str, None]] = {}
        for _, winner in self.servers(role):
            for wish in need.wishes:
                if wish not in winner.granted:
                    lacking.setdefault(wish, {})[winner.candidate.name] = None
        return [
            f"{wish} is off for {need.where}: {', '.join(names)} does not declare it" for wish, names in lacking.items()
        ]

    def notices(self, role: Role, refused: list[Refusal]) -> list[str]:
        """Winners of another group that cannot serve this one."""
        need, servers = role.requirement, self.servers(role)
        if not servers:
            return []
        name = ", ".join(dict.fromkeys(winner.candidate.name for _, winner in servers))
        notices = []
        elsewhere = {
            served.candidate.name: other.requirement.where
            for group in self.groups
            for other in group.roles
            if other.key[1] == need.role and other is not role
            for _, served in self.servers(other)
        }
        for each in refused:
            if (each.group, each.role) == role.key and each.backend in elsewhere and each.closest:
                where = elsewhere[each.backend]
                notices.append(f"{name} serves {need.where}: {each.backend}, which serves {where}, {each.closest}")
        return notices

    def _cost(self, role: Role, entry: Entry, most: int | None = ALL_BATCHES) -> Cost:
        """The cost of an entry on the settled configuration, at all batch sizes or in one bucket."""
        need, at = role.requirement, self.settled(role.requirement)
        cost, figures = self.ranking.cost(need, entry, *at), self.ranking.figures(need, entry, *at)
        if most == ALL_BATCHES or figures is None:
            return cost
        return (*cost[:-2], figures[self.ranking.buckets(need).index(most)], cost[-1])


def _rows(sizes: list[int | None], most: int | None) -> str:
    """A bucket in words."""
    if most is not None:
        return f"up to {most} rows"
    return f"more than {sizes[-2]} rows"


def _configuration(page_size: int | None, layout: str | None) -> str:
    return f"page size {page_size} and layout {layout}" if page_size else "no cache"
