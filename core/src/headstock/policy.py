"""The policy of one negotiation: what the user fixed, what is wished for, and how ties are broken. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from headstock.capabilities import MAX_PAGE_SIZE
from headstock.offer import canonical
from headstock.requirement import Requirement

Mode = Literal["auto", "on", "off"]
"""Of a feature that is worth having but not needed: where it serves and pays, always, or never."""
PageSize = Annotated[int, Field(ge=1, le=MAX_PAGE_SIZE)]

GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Rows of the decode steps that are captured where nobody says otherwise, as far as they go."""

FLAGS = {
    "all": "--attention-backend",
    "extend": "--prefill-attention-backend",
    "decode": "--decode-attention-backend",
}
"""The flag that makes an explicit choice of backend, by its scope."""


def flag(scope: str) -> str:
    """What a person typed to choose a backend for `scope`."""
    return FLAGS.get(scope, f"the choice for {scope}")


Rows = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
"""A duration that can have been measured: of 30 years at most."""
Schedule = tuple[tuple[Rows | None, str], ...]
"""Backends by batch size: each serves at most so many rows and more than the one before it; None, and last, any."""


def ascending(sizes: Sequence[int | None]) -> bool:
    """Whether batch sizes grow up to any (None), which comes last; as none at all do."""
    return (not sizes or sizes[-1] is None) and all(a is not None and (b is None or a < b) for a, b in pairwise(sizes))


class Measurement(NamedTuple):
    """Seconds that one layer of a role took on a backend, under one KV configuration (None where nothing is cached).

    They hold for batches of at most `max_batch` rows, down to where a smaller bucket of the role ends; None is any.
    `tokens` is how many new ones were worked on meanwhile: roles and buckets are weighed by seconds per token.
    """

    group: str
    role: str
    backend: str
    page_size: PageSize | None
    kv_layout: str | None
    seconds: Seconds
    max_batch: Rows | None = None
    tokens: Annotated[int, Field(ge=1)] = 1


class Crossover(NamedTuple):
    """New tokens of a row from which expanding its latent vectors was measured to be faster, by who serves both forms.

    `page_size` and `kv_layout` are those on which the absorbed form was measured.
    """

    group: str
    absorbed: str
    expanded: str
    page_size: PageSize | None
    kv_layout: str | None
    tokens: Annotated[int, Field(ge=2)]


class Policy(BaseModel):
    """What steers a negotiation beyond validity, which is the plugins' own word.

    `backends` holds explicit choices by scope: "group/role", a role, a phase, or "all", the narrowest first.
    `page_size` (in tokens) and `kv_layouts` (by group, or "all") are explicit too: such choices work or are refused,
    and are never replaced. `origins` tells by scope where a choice of backend was made, `pinned` by "group/role" who
    must serve, to the letter. `graph` says whether decoding is captured into device graphs, and `cascade` whether it
    reads shared prefixes once: where a backend can and it pays, always, or never. Roles in `unserved`, as "group/role",
    are left to their alternatives. `schedules` are explicit choices by batch size, by "group/role". `page_sizes` and
    `layouts` only order what else is equal. `profile` holds what was measured on this machine, and `profile_file` says
    where that lies. With `by_batch` a role that was measured by batch size may have a backend per size; otherwise one
    serves a role at all sizes. `notices` tell what the user should know of how the policy came to be. `expand_from` is
    from how many new tokens on a row of a model with latent attention is attended to in expanded form, where both forms
    are served; by default from where that was measured to be faster, as `crossovers` have it, else from where it is
    well worth its multiplications.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backends: Mapping[str, str] = Field(default_factory=dict)
    origins: Mapping[str, str] = Field(default_factory=dict)
    pinned: Mapping[str, str] = Field(default_factory=dict)
    schedules: Mapping[str, Schedule] = Field(default_factory=dict)
    page_size: PageSize | None = None
    kv_layouts: Mapping[str, str] = Field(default_factory=dict)
    graph: Mode = "auto"
    cascade: Mode = "auto"
    unserved: frozenset[str] = frozenset()
    page_sizes: tuple[PageSize, ...] = (16, 32, 64, 128, 8, 4, 2, 1)
    layouts: tuple[str, ...] = ("nhd", "hnd", "latent")
    profile: tuple[Measurement, ...] = ()
    profile_file: str = ""
    crossovers: tuple[Crossover, ...] = ()
    expand_from: Annotated[int, Field(ge=2)] | None = None
    by_batch: bool = False
    notices: tuple[str, ...] = ()

    @field_validator("schedules")
    @classmethod
    def _whole(cls, value: Mapping[str, Schedule]) -> Mapping[str, Schedule]:
        for scope, schedule in value.items():
            if not schedule or not ascending([most for most, _ in schedule]):
                raise ValueError(f"the schedule of {scope} has no backends for ever more rows, and last for any: None")
        return value

    @field_validator("backends")
    @classmethod
    def _canonical(cls, value: Mapping[str, str]) -> dict[str, str]:
        return {scope: canonical(name) for scope, name in value.items()}

    def chosen(self, requirement: Requirement) -> tuple[str, str] | None:
        """The explicit choice that rules a role, as (scope, backend name), or None."""
        role = requirement
        for scope in (f"{role.group}/{role.role}", role.role, role.phase, "all"):
            if scope in self.backends:
                return scope, self.backends[scope]
        return None

    def scheduled(self, requirement: Requirement) -> Schedule:
        """The explicit choice by batch size for a role, empty where there is none."""
        return self.schedules.get(f"{requirement.group}/{requirement.role}", ())

    def origin(self, scope: str) -> str:
        """Where the choice of backend for `scope` was made: a flag, a key of a file, a pinned decision."""
        return self.origins.get(scope) or flag(scope)

    def layout(self, group: str) -> str | None:
        """The KV layout fixed for a group, or None."""
        return self.kv_layouts.get(group, self.kv_layouts.get("all"))

    def page_rank(self, page_size: int | None) -> tuple[int, int]:
        """The order of page sizes where nothing else decides: those listed, then from small to large."""
        if page_size in self.page_sizes:
            return 0, self.page_sizes.index(page_size)
        return 1, page_size or 0

    def layout_rank(self, layout: str | None) -> tuple[int, str]:
        """The order of KV layouts where nothing else decides: those listed, then by name."""
        if layout in self.layouts:
            return self.layouts.index(layout), ""
        return len(self.layouts), layout or ""
