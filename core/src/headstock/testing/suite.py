"""The conformance suite of one backend: its cases and claims, run one by one, with a verdict each."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any, Literal

from headstock.backend import AttentionBackend, BackendSpec, Workspace, WorkspaceBytes
from headstock.capabilities import ATTENTION_KINDS, AXES
from headstock.device import Device
from headstock.errors import HeadstockError
from headstock.ints import Ints
from headstock.load import load_backend, load_options
from headstock.offer import Candidate, Offer
from headstock.plugins import discover
from headstock.testing.cases import Case, cases, relays
from headstock.testing.honesty import Claim, check_latents, claims, examine, exercised
from headstock.testing.laws import LAWS, other_reads_what_was_written
from headstock.testing.sizes import Level

LONGEST = 2000
"""Characters of an exception's message that are worth showing."""
Status = Literal["passed", "failed", "refused", "could be declared"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case or claim; `message` says what failed, on what, and how to run it again."""

    name: str
    law: str
    status: Status
    message: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.status != "failed"


class Suite:
    """Everything that can be asked of a backend on a device. `backend` is an installed one by name, or an offer.

    `device` is a torch device, "auto" the first GPU that the offer declares, else the CPU. `phase`, `kinds` of
    attention and the glob `only` narrow the cases; `options` are the backend's own, by default those of its model. With
    `pairs` other installed backends read what this one has cached.

    Raises HeadstockError for a name nobody offers, a backend that does not load, a device that it does not declare,
    latent attention that no model can ask for, and a pattern that no case has.
    """

    def __init__(
        self,
        backend: str | Offer,
        *,
        device: str = "auto",
        level: Level = "quick",
        phase: str | None = None,
        only: str | None = None,
        kinds: Sequence[str] = ATTENTION_KINDS,
        options: Mapping[str, Any] | None = None,
        pairs: bool = True,
    ):
        others = discover()
        self.candidate = Candidate.of(backend) if isinstance(backend, Offer) else _find(backend, others)
        assert self.candidate.offer is not None, "a usable candidate has an offer"
        self.offer = self.candidate.offer
        check_latents(self.offer)
        configured = load_options(self.offer, options or {})
        self.backend: type[AttentionBackend] = _configured(load_backend(self.candidate), configured)
        self.device = _device(self.offer, device)
        self.level = level
        kind, capability = self.device.torch.type, self.device.compute_capability
        self._others = {other.name: other for other in others if other.usable and other.name != self.offer.name}
        every = cases(self.offer, device=kind, capability=capability, level=level)
        every += self._pairs(kind, capability) if pairs and phase is None else []
        about = claims(self.offer, device=kind, capability=capability)
        self.cases = [case for case in every if _wanted(case, phase, only, kinds)]
        self.claims = [claim for claim in about if _wanted(claim, phase, only, kinds)]
        served = frozenset().union(*(record.phases for record in self.offer.capabilities))
        if phase is not None and phase not in served:
            what = f"{self.offer.name} does not serve this phase"
            raise HeadstockError(what, given=phase, works=", ".join(sorted(served)))
        if not self.cases and not self.claims:
            names = [*(case.name for case in every), *(claim.name for claim in about)]
            near = get_close_matches(only or "", names, 1)
            works = near[0] if near else f"one of {len(names)}, such as {names[0]}" if names else None
            raise HeadstockError(f"{self.offer.name} has no such case", given=only or phase, works=works)

    def run(self) -> Iterator[Outcome]:
        """Every case, smallest first, and then every claim."""
        for each in self.everything():
            yield self.outcome(each)

    def everything(self) -> list[Case | Claim]:
        """Cases and claims, in the order in which they run."""
        return [*self.cases, *self.claims]

    def outcome(self, each: Case | Claim) -> Outcome:
        """The verdict on one; what fails, with whatever exception, fails that one alone."""
        started = time.perf_counter()
        law = each.law if isinstance(each, Case) else "honesty"
        try:
            status: Status = self.check(each)
            message = ""
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            status, message = "failed", self.describe(each, error)
        return Outcome(each.name, law, status, message, time.perf_counter() - started)

    def check(self, each: Case | Claim) -> Status:
        """Runs one; raises what it raises."""
        with self.device.active():
            if isinstance(each, Claim):
                return examine(self.backend, self.offer, each)
            if each.other:
                other_reads_what_was_written(self.backend, load_backend(self._others[each.other]), each.fields)
            else:
                LAWS[each.law](self.backend, each.fields)
        return "passed"

    def describe(self, each: Case | Claim, error: BaseException) -> str:
        """A failure for people: what is wrong, the problem it is wrong on, and the command that runs it again."""
        what = _said(error)
        problem = "\n".join(f"    {name} = {_shown(value)}" for name, value in sorted(each.fields.items()))
        again = f"headstock check {self.offer.name} --case {each.name}"
        if self.level == "full":
            again += " --full"
        if self.device.torch.type != "cpu":
            again += f" --device {self.device.torch}"
        law = LAWS[each.law].__doc__ if isinstance(each, Case) and each.law in LAWS else None
        return f"{what}\n  {law or 'What is not declared is refused, or right.'}\n{problem}\n  again: {again}"

    def coverage(self) -> dict[str, list[str]]:
        """The values of each axis that some case asks for, in words; an axis no case asks for has none."""
        values: dict[str, set[str]] = {name: set() for name in AXES}
        for case in self.cases:
            for name, value in exercised(case.fields).items():
                values[name].add(value)
            if case.law == "graph":
                values["graph"].add("True")
        if self.cases and self.device.compute_capability:
            values["compute_capability"].add(str(self.device.compute_capability))
        return {name: sorted(found, key=lambda word: (len(word), word)) for name, found in values.items()}

    def untested(self) -> dict[str, list[str]]:
        """Names that some record declares one by one and no case asks for: another device, above all."""
        covered, left = self.coverage(), {}
        for name in AXES:
            offered = [getattr(record, name) for record in self.offer.capabilities]
            words = set().union(*({str(value) for value in _listed(each)} for each in offered)) - {"same"}
            asked = {part for value in covered[name] for part in value.split(", ")}
            left[name] = sorted(words - asked)
        return left

    def _pairs(self, kind: str, capability: int | None) -> list[Case]:
        """Caches that this backend writes, read by every other installed one that covers the same."""
        found = []
        for name, other in self._others.items():
            assert other.offer is not None, "usable"
            for what, fields in relays(self.offer, other.offer, kind, capability):
                found.append(Case(f"both-{fields['attention']}-read-by-{name}-{what}", "continues", fields, 0, name))
        return found


def _said(error: BaseException) -> str:
    """What an exception says, whatever it holds, and where a backend raised it."""
    try:
        said = str(error).strip() or "no word of what is wrong"
    except Exception:
        said = "its message cannot be read"
    said = said[:LONGEST].encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(error, AssertionError):
        return said
    frames = traceback.extract_tb(error.__traceback__)
    where = f"\n  at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""
    return f"{type(error).__name__}: {said}{where}"


def _configured(backend: type[AttentionBackend], options: Any) -> type[AttentionBackend]:
    """The class with `options` in every spec that names none, as the runner puts them there."""
    if options is None:
        return backend

    def given(spec: BackendSpec) -> BackendSpec:
        return replace(spec, options=options) if spec.options is None else spec

    class Configured(backend):  # type: ignore[misc, valid-type]
        def __init__(self, spec: BackendSpec, workspace: Workspace):
            super().__init__(given(spec), workspace)

        @classmethod
        def workspace_bytes(cls, spec: BackendSpec) -> WorkspaceBytes:
            return backend.workspace_bytes(given(spec))

    Configured.__name__, Configured.__doc__ = backend.__name__, backend.__doc__
    return Configured


def _find(name: str, candidates: list[Candidate]) -> Candidate:
    found = next((candidate for candidate in candidates if candidate.answers_to(name)), None)
    if found is None:
        known = ", ".join(candidate.name for candidate in candidates) or "none is installed"
        raise HeadstockError("no such backend is installed", given=name, works=known, type="headstock backends")
    if not found.usable:
        assert found.fault is not None, "what is not usable has a fault"
        error = HeadstockError(f"the backend {found.name} ({found.source}) cannot be used: {found.fault}")
        if found.fault.detail:
            error.add_note(found.fault.detail)  # which a traceback shows
        raise error
    return found


def _device(offer: Offer, name: str) -> Device:
    kinds = frozenset().union(*(record.devices for record in offer.capabilities))
    device = Device.open(name)
    if name == "auto" and device.torch.type not in kinds:
        device = Device.open("cpu")
    if device.torch.type not in kinds:
        raise HeadstockError(f"{offer.name} does not run here", given=device.torch.type, works=", ".join(sorted(kinds)))
    return device


def _listed(offered: Any) -> Iterable[Any]:
    """The values that a record names one by one."""
    if isinstance(offered, Ints):
        return offered.values or ()
    return offered if isinstance(offered, Set) else ()


def _wanted(each: Case | Claim, phase: str | None, only: str | None, kinds: Sequence[str]) -> bool:
    name, asked = each.name, each.name.split("-")[1]
    at = (phase is None or name.startswith(f"{phase}-")) and asked in kinds
    return at and (only is None or name == only or fnmatch(name, only))


def _shown(value: Any) -> str:
    return "{" + ", ".join(map(repr, sorted(value))) + "}" if isinstance(value, frozenset) else repr(value)
