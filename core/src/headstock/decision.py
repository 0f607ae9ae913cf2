"""What a negotiation came to: winners, the shared KV configuration, and a reason for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from headstock.capabilities import AXES
from headstock.errors import NegotiationError
from headstock.offer import Candidate, Fault
from headstock.policy import PageSize, Policy, ascending
from headstock.requirement import Requirement
from headstock.solver import answering


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Mismatch(_Record):
    """One axis that one record does not cover: what was needed, what was offered, what to change, and who set it."""

    axis: str
    needed: str
    offered: str
    remedy: str
    because: str = ""

    def __str__(self) -> str:
        needs, offers = AXES[self.axis].verbs if self.axis in AXES else ("needs", "offers")
        because = f" ({self.because})" if self.because else ""
        return f"{self.axis}: {needs} {self.needed}{because}, {offers} {self.offered}"


class NearMiss(_Record):
    """One record of a refused offer with every axis it fails."""

    record: str
    mismatches: tuple[Mismatch, ...]

    def __str__(self) -> str:
        remedies = dict.fromkeys(mismatch.remedy for mismatch in self.mismatches)
        return f"{'; '.join(map(str, self.mismatches))}; try {', '.join(remedies)}"


class Refusal(_Record):
    """Why a candidate cannot serve a role: its fault, or its nearest records, where it could not without a fault.

    A record is nearest if no other record of the offer fails only some of the axes that it fails.
    """

    group: str
    role: str
    backend: str
    source: str
    fault: Fault | None = None
    nearest: tuple[NearMiss, ...] = ()

    @property
    def closest(self) -> NearMiss | None:
        """The record that fails the fewest axes, those for the role's phase first; None where there is a fault."""
        return min(
            self.nearest,
            key=lambda miss: (any(mismatch.axis == "phases" for mismatch in miss.mismatches), len(miss.mismatches)),
            default=None,
        )


class Outranked(_Record):
    """A candidate that could have served a role, and why it does not."""

    group: str
    role: str
    backend: str
    record: str
    why: str


class Winner(_Record):
    """The backend that serves a role for batches of at most `max_batch` rows (None: any), and what makes it the one."""

    max_batch: int | None = None
    backend: str
    record: str
    source: str
    why: str
    granted: tuple[str, ...] = ()

    def __str__(self) -> str:
        limit = "" if self.max_batch is None else f" for at most {self.max_batch} rows"
        return f"{self.backend} of {self.source}, record {self.record}{limit}"


class Choice(_Record):
    """What was settled for one role: the requirement, completed by the KV configuration, and who serves it.

    `winners` go by batch size, the last one serves any. They are none only for a role whose alternative is served.
    """

    requirement: Requirement
    winners: tuple[Winner, ...]

    @property
    def group(self) -> str:
        return self.requirement.group

    @property
    def role(self) -> str:
        return self.requirement.role

    @property
    def served(self) -> str:
        """Who serves the role, to the letter."""
        return "; ".join(map(str, self.winners)) or "nobody"

    def winner(self, rows: int) -> Winner:
        """Who serves batches of so many rows."""
        return next(each for each in self.winners if each.max_batch is None or rows <= each.max_batch)

    def within(self, max_batch: int | None = None) -> tuple[Winner, ...]:
        """The winners that batches of at most `max_batch` rows (None: any) can reach."""
        if max_batch is None or not self.winners:
            return self.winners
        return self.winners[: self.winners.index(self.winner(max_batch)) + 1]

    def shares(self, max_batch: int | None = None) -> list[tuple[str, Winner]]:
        """Those winners, each with what it serves in words: "decode up to 8 rows", "decode beyond", or "decode"."""
        where, winners = self.requirement.where, self.within(max_batch)
        if len(winners) < 2:
            return [(where, each) for each in winners]
        sized = [(f"{where} up to {each.max_batch} rows", each) for each in winners[:-1]]
        return [*sized, (f"{where} beyond", winners[-1])]


class Decision(_Record):
    """The outcome of `negotiate`, as data: what runs, on which KV configuration, and why nothing else does.

    Without a solution `choices` is empty and `conflict` says what no combination covers. `notices` tells of backends
    that serve one layer group and not another, `ungranted` of wishes that the winners cannot grant, which is no news to
    who never asked. JSON and back gives an equal decision; one that was edited must still agree with itself.
    """

    version: Literal[1] = 1
    page_size: PageSize | None = None
    choices: tuple[Choice, ...] = ()
    refused: tuple[Refusal, ...] = ()
    outranked: tuple[Outranked, ...] = ()
    notices: tuple[str, ...] = ()
    ungranted: tuple[str, ...] = ()
    conflict: str = ""
    requirements: tuple[Requirement, ...] = ()

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Decision:
        """There is one choice for each requirement, one page size, and one KV layout in each group.

        What a requirement asks of them is what it got. Winners of a role serve ever larger batches, the last one any.
        """
        made_for = [(need.group, need.role) for need in self.requirements]
        if self.choices and [(choice.group, choice.role) for choice in self.choices] != made_for:
            raise ValueError("choices: not one for each of the requirements, in their order")
        layouts: dict[str, str | None] = {}
        for choice, need in zip(self.choices, self.requirements, strict=False):
            settled = choice.requirement
            if not ascending([winner.max_batch for winner in choice.winners]):
                raise ValueError(f"choices: the winners for {need.where} do not go up to any number of rows")
            layout = layouts.setdefault(need.group, settled.kv_layout) if need.cached else None
            size = self.page_size if need.cached else None
            if settled.model_copy(update={"page_size": need.page_size, "kv_layout": need.kv_layout}) != need:
                raise ValueError(f"choices: that of {need.where} is for another requirement")
            if (settled.page_size, settled.kv_layout) != (size, layout):
                given = f"page size {settled.page_size} and KV layout {settled.kv_layout}"
                raise ValueError(f"choices: {need.where} has {given}, others have {size} and {layout}")
            asked = (need.page_size or size, need.kv_layout or layout)
            if need.cached and asked != (size, layout):
                given = f"page size {asked[0]} and KV layout {asked[1]}"
                raise ValueError(f"choices: {need.where} asks for {given}, it has {size} and {layout}")
        return self

    def cached(self, group: str) -> Requirement:
        """What a layer group caches, as one of its roles asks for it."""
        served = (each for each in self.choices if each.group == group and each.winners)
        return next(each.requirement for each in served if each.requirement.cached)

    @property
    def solved(self) -> bool:
        """Whether every role, or its alternative, is served."""
        return bool(self.choices)

    @property
    def outcome(self) -> tuple[Any, ...]:
        """What runs, without the reasons: two decisions of one outcome drive a model alike."""
        served = ((c.requirement, tuple((w.max_batch, w.backend, w.record) for w in c.winners)) for c in self.choices)
        return self.page_size, tuple(served)

    def unused(self, options: Iterable[str], max_batch: int | None = None) -> list[str]:
        """What to say of options for backends that serve no role at up to `max_batch` rows (None: any)."""
        serving = {winner.backend for choice in self.choices for winner in choice.within(max_batch)}
        unused = [name for name in options if name not in serving]
        return [f"the options of {name} are not used: another backend was chosen" for name in unused]

    def choice(self, group: str, role: str) -> Choice:
        """What was settled for one role; KeyError where the decision has no such role."""
        for choice in self.choices:
            if (choice.group, choice.role) == (group, role):
                return choice
        raise KeyError((group, role))

    def pin(self, policy: Policy, candidates: Iterable[Candidate] = ()) -> Policy:
        """`policy` with this outcome as the user's explicit choice: it is given again, or refused, never replaced.

        `candidates` tell which names are aliases of one backend. Raises NegotiationError where there is no outcome, or
        where `policy` explicitly chooses another.
        """
        if not self.solved:
            raise NegotiationError("the decision has no solution to pin", given=self.conflict)
        field = list(candidates)
        for choice in self.choices:
            _check_agreement(choice, policy, field)
        served = [choice for choice in self.choices if choice.winners]
        return policy.model_copy(
            update={
                "backends": {f"{c.group}/{c.role}": c.winners[0].backend for c in served if len(c.winners) == 1},
                "schedules": {
                    f"{c.group}/{c.role}": tuple((w.max_batch, w.backend) for w in c.winners)
                    for c in served
                    if len(c.winners) > 1
                },
                "origins": {f"{c.group}/{c.role}": "the pinned decision" for c in served},
                "pinned": {f"{c.group}/{c.role}": c.served for c in self.choices},
                "page_size": self.page_size,
                "kv_layouts": {c.group: c.requirement.kv_layout for c in served if c.requirement.kv_layout},
                "unserved": frozenset(f"{c.group}/{c.role}" for c in self.choices if not c.winners),
            }
        )


def _check_agreement(choice: Choice, policy: Policy, field: list[Candidate]) -> None:
    """Refuses an explicit choice that says something else than the pinned one."""
    need = choice.requirement
    backends, chosen = {winner.backend for winner in choice.winners}, policy.chosen(need)
    asked: list[tuple[str, object, object]] = []
    if chosen and not backends <= answering(chosen[1], field):
        asked.append(("backend", chosen[1], ", ".join(sorted(backends))))
    if need.cached:
        asked.append(("page size", policy.page_size, need.page_size))
        asked.append(("KV layout", policy.layout(need.group), need.kv_layout))
    for what, wanted, pinned in asked:
        if wanted is not None and pinned is not None and wanted != pinned:
            raise NegotiationError(
                f"the pinned decision has another {what} for {need.where}",
                given=f"{wanted}, pinned: {pinned}",
                works="either the decision or the choice",
            )


def check_pin(decision: Decision, requirements: Sequence[Requirement]) -> None:
    """Refuses a decision that was made for other requirements: another model, device or dtype.

    Raises NegotiationError naming the first role and every field that differs. What negotiation itself settles (page
    size, layout) and mere wishes may differ.
    """
    made_for = {(need.group, need.role): need for need in decision.requirements}
    asked = {(need.group, need.role): need for need in requirements}
    if made_for.keys() != asked.keys():
        names = (", ".join(need.where for need in needs.values()) or "none" for needs in (made_for, asked))
        raise NegotiationError("the pinned decision is for other roles: {}; needed: {}".format(*names), type=AGAIN)
    for key, need in asked.items():
        old, new = (each.model_dump(exclude={"page_size", "kv_layout", "wishes"}) for each in (made_for[key], need))
        if differing := [f"{name} {old[name]}, needed: {new[name]}" for name in old if old[name] != new[name]]:
            raise NegotiationError(
                f"the pinned decision was made for another {need.where}: {'; '.join(differing)}", type=AGAIN
            )


def check_given_again(decision: Decision, policy: Policy) -> None:
    """Refuses what is not, to the letter, the outcome that was pinned: another record or version, more winners."""
    for choice in decision.choices:
        pinned = policy.pinned.get(f"{choice.group}/{choice.role}", choice.served)
        if choice.served != pinned:
            raise NegotiationError(
                f"what is installed cannot serve {choice.requirement.where} as the pinned decision has it",
                given=pinned,
                works=choice.served,
                type=AGAIN,
            )


AGAIN = "headstock explain --json, to decide again"
IN_FULL = "the same flags after headstock explain --all"
