"""A requirement: what one role of one layer group asks of a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, field_validator, model_validator

from headstock.capabilities import AXES, Axis, Capabilities

if TYPE_CHECKING:
    from headstock.backend import BackendSpec

Role = Literal["extend", "decode", "expand", "verify", "cross", "encode"]
Count = Annotated[int, Field(ge=1)]
_sorted = PlainSerializer(sorted, when_used="json")


class Requirement(BaseModel):
    """What must be covered by one record of one offer, for one (layer group, role).

    Features ask by their value: a window in keys, a cap, True. `wishes` names features that are wanted but refused to
    nobody, most wanted first. Roles of a group that share an `either` tag stand in for each other: one is enough.
    `page_size` and `kv_layout` are set where the user fixed them, or once they are settled. `max_context` and
    `page_size` are in tokens; `num_heads` and `num_kv_heads` count those of one rank.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    group: str = "all"
    role: Role
    phase: Literal["extend", "decode"]
    attention: Literal["paged", "ragged", "mla"]
    layers: Count = 1
    either: str | None = None
    wishes: tuple[str, ...] = ()

    device: str
    compute_capability: int | None = None
    dtype: str
    head_dim: Count
    v_head_dim: Count
    num_heads: Count
    num_kv_heads: Count
    max_context: Count
    page_size: Count | None = None
    kv_layout: str | None = None
    kv_dtype: str

    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    non_causal: bool = False
    query_mask: bool = False
    cascade: bool = False
    lse: bool = False
    kv_scales: bool = False
    graph: bool = False
    batch_invariant: bool = False
    query_lens: Annotated[frozenset[int], _sorted] | None = None
    host_lengths: Literal["none", "bound", "exact"] = "exact"
    extra_inputs: Annotated[frozenset[str], _sorted] = frozenset()

    @field_validator("wishes")
    @classmethod
    def _known_wishes(cls, wishes: tuple[str, ...]) -> tuple[str, ...]:
        features = [name for name, axis in AXES.items() if axis.kind == "feature"]
        if unknown := [wish for wish in wishes if wish not in features]:
            raise ValueError(f"no feature is called {unknown[0]!r}, known: {', '.join(features)}")
        return wishes

    @model_validator(mode="after")
    def _whole_ratio(self) -> Requirement:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not share {self.num_kv_heads} key heads evenly")
        return self

    @classmethod
    def of(cls, spec: BackendSpec, phase: str) -> Requirement:
        """What an instance made for `spec` must cover in one of its phases."""
        decode = phase == "decode"
        return cls(
            group=spec.group,
            role="decode" if decode else "extend",
            phase="decode" if decode else "extend",
            attention=spec.attention,
            device=spec.device.partition(":")[0],
            compute_capability=spec.compute_capability,
            dtype=spec.dtype,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            max_context=spec.max_context,
            page_size=spec.page_size or None,
            kv_layout=spec.kv_layout or None,
            kv_dtype=spec.kv_dtype,
            sliding_window=spec.window,
            softcap=spec.softcap,
            sinks=spec.sinks,
            alibi=spec.alibi,
            non_causal=spec.non_causal,
            query_mask=spec.query_mask,
            cascade=spec.max_levels > 0,
            lse=spec.lse,
            graph=decode and bool(spec.graph_buckets),
            batch_invariant=spec.batch_invariant,
            query_lens=spec.query_lens if decode else None,
            host_lengths=spec.host_lengths,
        )

    def asked(self) -> list[tuple[str, Axis, Any]]:
        """What can be refused: (field of a record, its axis, what is needed)."""
        axes = [(name, axis, axis.needed(self)) for name, axis in AXES.items() if self.cached or not axis.joint]
        return [(name, axis, needed) for name, axis, needed in axes if axis.asks(needed)]

    def unmet(self, record: Capabilities) -> list[str]:
        """The axes that `record` does not cover, by their fields."""
        return [name for name, axis, needed in self.asked() if not axis.covers(getattr(record, name), needed, self)]

    @property
    def gqa_ratio(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def cached(self) -> bool:
        """Whether this role reads a cache, and so has a say in page size and layout."""
        return self.attention != "ragged"

    @property
    def where(self) -> str:
        """The group and role in words: "decode", or "decode of group window-4096" where there are several groups."""
        return self.role if self.group == "all" else f"{self.role} of group {self.group}"

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads × {self.head_dim}"
        if self.v_head_dim != self.head_dim:
            heads += f" (v {self.v_head_dim})"
        device = f"{self.device} sm_{self.compute_capability}" if self.compute_capability else self.device
        parts = [self.attention, heads, self.dtype, f"context {self.max_context}", device]
        if self.kv_dtype != self.dtype:
            parts.append(f"kv {self.kv_dtype}")
        if self.page_size:
            parts.append(f"page size {self.page_size}")
        if self.kv_layout:
            parts.append(f"layout {self.kv_layout}")
        for axis in AXES.values():
            value = axis.needed(self)
            if axis.kind == "feature" and value:
                words = axis.need.replace("_", " ")
                parts.append(words if value is True else f"{words} {value:g}")
        return f"{self.where}: {', '.join(parts)}"
