"""What a backend declares: every axis once, as a field with its kind, its check and its doc line.

Negotiation, the capability matrix, the docs, the messages and the conformance suite are all generated from the axes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator, model_validator

from headstock.ints import ANY, Ints, IntSet, to_ints
from headstock.vocabulary import CACHED, DEVICES, DTYPES, nearest

if TYPE_CHECKING:
    from headstock.requirement import Requirement

MAX_PAGE_SIZE = 4096
"""The largest page size, in tokens, that negotiation considers."""

PHASES = ("extend", "decode")
ATTENTION_KINDS = ("paged", "ragged", "mla")
KV_DTYPES = ("same", *CACHED)
HOST_LENGTHS = ("none", "bound", "exact")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One question that a requirement asks of a record: is the `need` attribute of the requirement covered?

    `remedy` says what a person can change when it is not: a flag, which gets a value that the record offers, or words.
    `joint` axes are settled for several roles at once.
    """

    kind: ClassVar[str]
    verbs: ClassVar[tuple[str, str]] = ("needs", "offers")

    need: str
    doc: str
    remedy: str = "another backend"
    joint: bool = False
    values: tuple[str, ...] = ()  # the closed vocabulary of a set of names, if it has one

    def needed(self, requirement: Requirement) -> Any:
        return getattr(requirement, self.need)

    def asks(self, needed: Any) -> bool:
        """Whether this need can be refused at all; lets negotiation skip the axes nobody asked about."""
        return needed is not None

    def covers(self, offered: Any, needed: Any, requirement: Requirement) -> bool:
        return offered is not None and needed in offered

    def cure(self, offered: Any, needed: Any) -> str:
        """What to change, or to type, so that a record with `offered` covers."""
        if not self.remedy.startswith("--") or " " in self.remedy or not offered:
            return self.remedy
        if isinstance(offered, Ints):
            return f"{self.remedy} {offered.nearest(needed)}"
        return f"{self.remedy} {'auto' if 'same' in offered else min(offered)}"


class Domain(Axis):
    """Required: forgetting one is an error that names it, and a new one raises the API version."""

    kind = "domain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coupled(Axis):
    """Equal to another need unless declared otherwise, so that nobody claims a mix by accident."""

    kind = "coupled"
    same: str

    def covers(self, offered: Any, needed: Any, requirement: Requirement) -> bool:
        same = bool(needed == getattr(requirement, self.same))
        if offered == "same":
            return same
        if isinstance(offered, frozenset):  # in which "same" is no name of a dtype
            return needed in offered - {"same"} or (same and "same" in offered)
        return needed in offered


class Feature(Axis):
    """Off unless declared, so that a new feature never refuses an older plugin to those who do not need it."""

    kind = "feature"

    def asks(self, needed: Any) -> bool:
        return bool(needed)

    def covers(self, offered: Any, needed: Any, requirement: Requirement) -> bool:
        return bool(offered)


class Limit(Axis):
    """Unlimited unless declared."""

    kind = "limit"

    def covers(self, offered: Any, needed: Any, requirement: Requirement) -> bool:
        return all(n in offered for n in needed) if isinstance(needed, frozenset) else needed in offered


class Need(Axis):
    """What the backend wants from the host or the model, which the requirement says they can give."""

    kind = "need"
    verbs = ("given", "wants")

    def covers(self, offered: Any, needed: Any, requirement: Requirement) -> bool:
        if self.need == "host_lengths":
            return HOST_LENGTHS.index(offered) <= HOST_LENGTHS.index(needed)
        return bool(offered <= needed)


def _names(value: Any) -> frozenset[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"expected a set of names, given {value!r}")
    names = frozenset(value)
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"expected a set of names, given {value!r}")
    return names


def _same_or_ints(value: Any) -> Any:
    return value if value == "same" else to_ints(value)


def _at_most(value: Any) -> Ints:
    return Ints(last=value) if type(value) is int and value > 0 else to_ints(value)


_sorted = PlainSerializer(sorted, return_type=list[str], when_used="json")
_worded = PlainSerializer(str, return_type=str, when_used="json")
Names = Annotated[Set[str], PlainValidator(_names), _sorted]
SameOrInts = Annotated[Literal["same"] | Ints, BeforeValidator(_same_or_ints), _worded]
AtMost = Annotated[Ints, BeforeValidator(_at_most), _worded]


class Capabilities(BaseModel):
    """One box of what an offer can do: it covers a requirement only if this one record covers every axis of it.

    An offer lists several records where it can do a *or* b but not both. `label` names the record in messages;
    `preference` is the author's own cardinal score against other backends, at most a million either way, used where
    nothing was measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    label: str = ""
    preference: float = Field(default=0.0, ge=-1e6, le=1e6, allow_inf_nan=False)

    devices: Annotated[
        Names, Domain(need="device", doc="torch device types the kernels run on", remedy="--device", values=DEVICES)
    ]
    phases: Annotated[
        Names, Domain(need="phase", doc="extend (any query lengths), decode (one query length)", values=PHASES)
    ]
    attention: Annotated[
        Names,
        Domain(need="attention", doc="paged K/V, ragged K/V (no cache), mla (latent cache)", values=ATTENTION_KINDS),
    ]
    dtypes: Annotated[Names, Domain(need="dtype", doc="dtypes of queries and outputs", remedy="--dtype", values=DTYPES)]
    head_dims: Annotated[IntSet, Domain(need="head_dim", doc="sizes of a query and key head")]
    page_sizes: Annotated[
        IntSet | None,
        Domain(need="page_size", doc="page sizes that forward accepts, in tokens", remedy="--page-size", joint=True),
    ] = None
    kv_layouts: Annotated[
        Names,
        Domain(need="kv_layout", doc="named arrangements of a page's bytes", remedy="--kv-layout", joint=True),
    ] = frozenset()

    kv_dtypes: Annotated[
        Names,
        Coupled(
            need="kv_dtype",
            same="dtype",
            doc="dtypes the cache may hold",
            remedy="--kv-dtype",
            joint=True,
            values=KV_DTYPES,
        ),
    ] = frozenset({"same"})
    v_head_dims: Annotated[SameOrInts, Coupled(need="v_head_dim", same="head_dim", doc="sizes of a value head")] = (
        "same"
    )

    sliding_window: Annotated[bool, Feature(need="sliding_window", doc="each position sees its last w keys")] = False
    softcap: Annotated[bool, Feature(need="softcap", doc="logits bounded by cap·tanh(x/cap)")] = False
    sinks: Annotated[bool, Feature(need="sinks", doc="one extra learned logit per head")] = False
    alibi: Annotated[bool, Feature(need="alibi", doc="linear position biases per head")] = False
    non_causal: Annotated[bool, Feature(need="non_causal", doc="every query sees every key")] = False
    query_mask: Annotated[bool, Feature(need="query_mask", doc="an explicit mask among new tokens (tree verify)")] = (
        False
    )
    cascade: Annotated[
        bool, Feature(need="cascade", doc="shared prefixes read once for all rows", remedy="--cascade auto")
    ] = False
    lse: Annotated[bool, Feature(need="lse", doc="log-sum-exp of each row returned")] = False
    kv_scales: Annotated[bool, Feature(need="kv_scales", doc="cache scales other than 1", remedy="--kv-dtype auto")] = (
        False
    )
    graph: Annotated[
        bool, Feature(need="graph", doc="captured and replayed as a device graph", remedy="--graph auto")
    ] = False
    batch_invariant: Annotated[
        bool,
        Feature(need="batch_invariant", doc="a row's bits do not depend on its batch", remedy="--batch-invariant auto"),
    ] = False

    compute_capability: Annotated[
        IntSet, Limit(need="compute_capability", doc="major × 10 + minor, as in sm_90", remedy="another GPU")
    ] = ANY
    gqa_ratios: Annotated[IntSet, Limit(need="gqa_ratio", doc="query heads per key head")] = ANY
    num_heads: Annotated[IntSet, Limit(need="num_heads", doc="query heads on one rank")] = ANY
    max_context: Annotated[
        AtMost, Limit(need="max_context", doc="longest context, in tokens", remedy="--max-context")
    ] = ANY
    query_lens: Annotated[IntSet, Limit(need="query_lens", doc="query lengths of a decode batch")] = Ints(
        values=frozenset({1})
    )

    host_lengths: Annotated[
        Literal["none", "bound", "exact"], Need(need="host_lengths", doc="lengths wanted on the host for planning")
    ] = "none"
    extra_inputs: Annotated[
        Names, Need(need="extra_inputs", doc="keyword-only tensors of forward that the model must pass")
    ] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            record = f"record {given['label']!r}" if given.get("label") else "a record"
            check_names(cls, given, "axis", record)
        return given

    @model_validator(mode="after")
    def _check(self) -> Capabilities:
        for name, axis in AXES.items():
            offered = getattr(self, name)
            if axis.values and (unknown := sorted(offered - set(axis.values))):
                near = f"did you mean {meant!r}? " if (meant := nearest(unknown[0], axis.values)) else ""
                raise ValueError(f"{name}: unknown {', '.join(unknown)}, {near}known: {', '.join(axis.values)}")
            if axis.kind in ("domain", "coupled") and offered == frozenset() and name != "kv_layouts":
                raise ValueError(f"{name}: an empty set covers nothing")
        if self.attention & {"paged", "mla"}:
            missing = [name for name in ("page_sizes", "kv_layouts") if not getattr(self, name)]
            if missing:
                raise ValueError(f"{' and '.join(missing)}: required with paged or mla attention")
            if not self.page_mask:
                raise ValueError(f"page_sizes: {self.page_sizes} holds none of 1…{MAX_PAGE_SIZE}")
        return self

    @cached_property
    def page_mask(self) -> int:
        """The page sizes as an integer whose bit n stands for size n."""
        return self.page_sizes.mask(MAX_PAGE_SIZE) if self.page_sizes else 0

    def __str__(self) -> str:
        return self.label or "/".join(phase for phase in PHASES if phase in self.phases)


def check_names(model: type[BaseModel], given: Mapping[str, Any], noun: str, owner: str) -> None:
    """Refuses unknown and forgotten names of fields in one line: the nearest known one, and all that are required."""
    problems = []
    for name in given:
        if name not in model.model_fields:
            near = difflib.get_close_matches(name, model.model_fields, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(model.model_fields)}"
            problems.append(f"unknown {noun} {name!r} in {owner}: {hint}")
    forgotten = [name for name, field in model.model_fields.items() if field.is_required() and name not in given]
    if forgotten:
        problems.append(f"{owner} forgets {', '.join(forgotten)}: required")
    if problems:
        raise ValueError("; ".join(problems))


def _axes() -> dict[str, Axis]:
    return {
        name: next(axis for axis in info.metadata if isinstance(axis, Axis))
        for name, info in Capabilities.model_fields.items()
        if any(isinstance(item, Axis) for item in info.metadata)
    }


AXES: dict[str, Axis] = _axes()
"""Every axis by the name of its field, in declaration order."""
