"""Reasons: what makes a winner the one, by what every other able candidate was outranked, and what was lost."""

from __future__ import annotations

from headstock.decision import Choice, Outranked, Refusal, Winner
from headstock.offer import Candidate
from headstock.refusals import Agreement, sizes_in_words, words
from headstock.requirement import Requirement
from headstock.solver import Entry, Group, Pick, Ranking, Role


class Reasons:
    """Answers for the outcome of one negotiation, role by role. Every statement is read off costs and masks."""

    def __init__(self, groups: list[Group], pick: Pick | None, agreement: Agreement, ranking: Ranking):
        self.groups, self.pick, self.agreement, self.ranking = groups, pick, agreement, ranking
        self.policy = ranking.policy

    def winner(self, role: Role) -> Entry | None:
        return self.pick.entries.get(role.key) if self.pick else None

    def settled(self, need: Requirement) -> tuple[int | None, str | None]:
        """The page size and KV layout of a role in the solution."""
        if self.pick is None or not need.cached:
            return None, None
        return self.pick.page_size, self.pick.layouts[need.group]

    def choice(self, role: Role) -> Choice:
        """What was settled for a role."""
        entry, (page_size, layout) = self.winner(role), self.settled(role.requirement)
        need = role.requirement.model_copy(update={"page_size": page_size, "kv_layout": layout})
        if entry is None:
            return Choice(requirement=need, winners=())
        winner = Winner(
            backend=entry.candidate.name,
            record=str(entry.record),
            source=entry.candidate.source,
            why=self.why_won(role, entry),
            granted=entry.granted,
        )
        return Choice(requirement=need, winners=(winner,))

    def why_won(self, role: Role, winner: Entry) -> str:
        """What sets a winner apart from the runner-up on the same page size and layout."""
        if chosen := self.policy.chosen(role.requirement):
            return f"asked for ({self.policy.origin(chosen[0])})"
        at = self.settled(role.requirement)
        others = [entry for entry in role.covering if entry.candidate is not winner.candidate]
        fitting = [entry for entry in others if entry.fits(*at)]
        if fitting:
            return self.advantage(role, winner, min(fitting, key=lambda entry: self._cost(role, entry)))
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
        need, winner = role.requirement, self.winner(role)
        if chosen := self.policy.chosen(need):
            return f"{chosen[1]} was asked for ({self.policy.origin(chosen[0])})"
        if f"{need.group}/{need.role}" in self.policy.unserved:
            return "the role is left to its alternatives, as asked for"
        if self.pick is None:
            return self._why_unsolved()
        if winner is not None and fits:
            return f"{winner.candidate.name}: {self.advantage(role, winner, entry)}"
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

    def advantage(self, role: Role, better: Entry, other: Entry) -> str:
        """Why `better` stands before `other` on the settled configuration: the first column in which costs differ."""
        name, at = other.candidate.name, self.settled(role.requirement)
        *mine, measured, seconds, preference = self._cost(role, better)
        *theirs, their_measured, their_seconds, their_preference = self._cost(role, other)
        for wish, have, lack in zip(self.ranking.wishes, mine, theirs, strict=True):
            if have != lack:
                return f"grants {wish}, unlike {name}"
        if measured != their_measured:
            return f"measured on this machine, unlike {name}"
        if seconds != their_seconds:
            times = [self.ranking.measured(role.requirement, entry, *at) or 0.0 for entry in (better, other)]
            return f"measured {times[0] * 1e6:.4g} µs a layer against {times[1] * 1e6:.4g} µs of {name}"
        if preference != their_preference:
            return f"preference {better.record.preference:g} against {other.record.preference:g} of {name}"
        return f"level with {name}, first by name"

    def ungranted(self, role: Role) -> list[str]:
        """Wishes that the winner cannot grant."""
        need, winner = role.requirement, self.winner(role)
        if winner is None:
            return []
        name = winner.candidate.name
        off = (wish for wish in need.wishes if wish not in winner.granted)
        return [f"{wish} is off for {need.where}: {name} does not declare it" for wish in off]

    def notices(self, role: Role, refused: list[Refusal]) -> list[str]:
        """Winners of another group that cannot serve this one."""
        need, winner = role.requirement, self.winner(role)
        if winner is None:
            return []
        name = winner.candidate.name
        notices = []
        elsewhere = {
            served.candidate.name: other.requirement.where
            for group in self.groups
            for other in group.roles
            if other.key[1] == need.role and other is not role and (served := self.winner(other))
        }
        for each in refused:
            if (each.group, each.role) == role.key and each.backend in elsewhere and each.closest:
                where = elsewhere[each.backend]
                notices.append(f"{name} serves {need.where}: {each.backend}, which serves {where}, {each.closest}")
        return notices

    def _cost(self, role: Role, entry: Entry) -> tuple[int, ...]:
        return self.ranking.cost(role.requirement, entry, *self.settled(role.requirement))


def _configuration(page_size: int | None, layout: str | None) -> str:
    return f"page size {page_size} and layout {layout}" if page_size else "no cache"
