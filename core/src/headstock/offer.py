"""An offer: a backend as data, with everything needed to choose it and nothing that imports its kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from headstock.capabilities import AXES, Capabilities, check_names
from headstock.errors import HeadstockError
from headstock.requirement import Requirement
from headstock.vocabulary import nearest

if TYPE_CHECKING:
    from headstock.backend import BackendSpec

API_VERSION = 1
"""The version of the backend contract that this host speaks."""


def canonical(name: str) -> str:
    """One spelling of a backend's name: lower case, runs of `-`, `_` and `.` as one `-` (as PEP 503 does)."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Offer(BaseModel):
    """A backend on offer: its name, where its class is, and what it can do.

    `backend` is "package.module:Class", imported only when chosen, or the class itself for a backend in this process.
    `capabilities` lists one record or more; a requirement is covered if one of them covers it whole. `kv_layouts` maps
    names of layouts that the plugin brings to "package.module:Class". `options` names a pydantic model of the backend's
    own settings. Names and aliases are compared in their canonical spelling.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str
    backend: str | type
    capabilities: tuple[Capabilities, ...] = Field(min_length=1)
    api_version: int = API_VERSION
    aliases: tuple[str, ...] = ()
    kv_layouts: Mapping[str, str | type] = Field(default_factory=dict)
    options: str | type | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            check_names(cls, given, "field", f"offer {given['name']!r}" if given.get("name") else "an offer")
        return given

    @field_validator("capabilities", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, Capabilities) else value

    @field_validator("name")
    @classmethod
    def _canonical_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", value):
            raise ValueError(f"a backend's name is letters, digits, '-', '_' and '.', given {value!r}")
        return canonical(value)

    @field_validator("aliases")
    @classmethod
    def _canonical_aliases(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(canonical(alias) for alias in value)

    def check(self, spec: BackendSpec) -> None:
        """For a backend's constructor: raises HeadstockError, naming the axes, where no record covers `spec`."""
        for phase in sorted(spec.phases):
            try:
                need = Requirement.of(spec, phase)
            except ValidationError as error:
                raise HeadstockError(f"{self.name}: {describe_validation_error(error)}") from None
            unmet = min((need.unmet(record) for record in self.capabilities), key=len)
            if unmet:
                needs = ", ".join(f"{name} {AXES[name].needed(need)}" for name in unmet)
                raise HeadstockError(f"{self.name} does not offer this for {phase}", given=needs)

    @model_validator(mode="after")
    def _check_targets(self) -> Offer:
        for what, target in (("backend", self.backend), ("options", self.options), *self.kv_layouts.items()):
            if isinstance(target, str) and not re.fullmatch(r"[\w.]+:\w+", target):
                raise ValueError(f'{what}: expected "package.module:Class", given {target!r}')
        return self


def describe_validation_error(error: ValidationError) -> str:
    """What a pydantic model refused, in one line: each field by its path, with the reason and what was given."""
    return "; ".join(_describe(problem) for problem in error.errors(include_url=False))


def _describe(problem: Mapping[str, Any]) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    reason = " ".join(problem["msg"].removeprefix("Value error, ").split())
    match problem["type"]:
        case "value_error":
            return f"{path}: {reason}" if path else reason
        case "extra_forbidden":
            return f"unknown name {path!r}"
        case "missing":
            return f"{path}: required"
        case "json_invalid":
            return reason[:1].lower() + reason[1:]
        case "literal_error":
            near = nearest(problem["input"], re.findall(r"'([^']*)'", problem["ctx"]["expected"]))
            reason += f" (did you mean {near!r}?)" if near else ""
    where = f"{path}: " if path else ""
    return f"{where}{reason[:1].lower()}{reason[1:]}, given {problem['input']!r:.80}"


class Fault(BaseModel):
    """Why something installed cannot be used: one line, its cure, and the detail for those who ask."""

    model_config = ConfigDict(frozen=True)

    what: str
    cure: str = ""
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.what}; {self.cure}" if self.cure else self.what


class Candidate(BaseModel):
    """What negotiation weighs: an offer, or the fault that took its place, with where it came from."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    name: str
    offer: Offer | None = None
    fault: Fault | None = None
    distribution: str = ""
    version: str = ""

    @model_validator(mode="after")
    def _check(self) -> Candidate:
        if self.offer is None and self.fault is None:
            raise ValueError(f"the candidate {self.name!r} has neither an offer nor a fault")
        return self

    @classmethod
    def of(cls, offer: Offer | Candidate) -> Candidate:
        """An in-process offer as a candidate; a candidate as it is."""
        return offer if isinstance(offer, Candidate) else cls(name=offer.name, offer=offer)

    @property
    def source(self) -> str:
        """The distribution and version, or how else it came to be here."""
        return f"{self.distribution} {self.version}".strip() or "in this process"

    def answers_to(self, name: str) -> bool:
        """Whether `name` is this candidate's name or one of its aliases."""
        return canonical(name) in (canonical(self.name), *(self.offer.aliases if self.offer else ()))

    @property
    def usable(self) -> bool:
        """Whether there is an offer and nothing is known to be wrong with it."""
        return self.offer is not None and self.fault is None

    def failed(self, fault: Fault) -> Candidate:
        """The same candidate with a fault found later, so that negotiating again passes it by."""
        return self.model_copy(update={"fault": fault})


def own_names(
    options: Mapping[str, Mapping[str, Any]], candidates: Sequence[Candidate]
) -> dict[str, Mapping[str, Any]]:
    """Options by the names that their backends have themselves; those for a backend unheard of are refused."""
    own = {}
    for name, values in options.items():
        found = next((each.name for each in candidates if each.answers_to(name)), None)
        if found is None:
            names = [each.name for each in candidates]
            near = [f"{each}, perhaps" for each in get_close_matches(name, names, 1)]
            works = ", ".join(near or names) or "nothing: there is no backend (headstock plugins says why)"
            raise HeadstockError("there are options for a backend that nobody offers", given=name, works=works)
        own[found] = values
    return own
