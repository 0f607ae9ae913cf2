"""Whether a backend is what it declares: a value that it does not declare is refused, or comes out right after all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headstock.backend import AttentionBackend
from headstock.capabilities import AXES, Capabilities
from headstock.errors import HeadstockError
from headstock.negotiate import negotiate
from headstock.offer import Offer
from headstock.requirement import Requirement
from headstock.testing.box import Box
from headstock.testing.cases import boxes
from headstock.testing.problem import make_problem, make_spec
from headstock.testing.rig import Rig, Trespass
from headstock.testing.rows import Fields
from headstock.testing.sizes import LATENTS

Verdict = Literal["refused", "could be declared"]

FEATURES: Mapping[str, Fields] = {
    "sliding_window": {"window": 3},
    "softcap": {"softcap": 0.5},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "non_causal": {"causal": False},
    "query_mask": {"query_mask": True},
    "lse": {"lse": True},
}
"""How a problem asks for each feature whose neglect is a wrong number."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that the offer does not declare: the axis, the value, and a problem that asks for it."""

    name: str
    axis: str
    fields: Mapping[str, Any] = field(hash=False)


MOST = 4096
"""More heads, and more numbers in one, than any model has."""


def check_latents(offer: Offer) -> None:
    """Raises HeadstockError for a record with latent attention that no model can ask for.

    A latent is R + P numbers, P of them the rope part, and the one key of all query heads; its first R are the value.
    """
    for record in offer.capabilities:
        if "mla" in record.attention and (wrong := _out_of_reach(record)):
            what = f"no model can ask for the latent attention of the record {str(record)!r} of {offer.name}"
            works = "head_dims of R + P and v_head_dims of R; gqa_ratios as num_heads, since all of them share one key"
            raise HeadstockError(what, given=wrong, works=works)


def _out_of_reach(record: Capabilities) -> str:
    """The axes of a record that no latent covers together, in words; empty where one does."""
    keys, values = record.head_dims, record.v_head_dims
    if isinstance(values, str) or values.nearest(1) >= keys.nearest(MOST):
        return f"head_dims {keys}, v_head_dims {values}"
    if not record.num_heads.mask(MOST) & record.gqa_ratios.mask(MOST):
        return f"num_heads {record.num_heads}, gqa_ratios {record.gqa_ratios}"
    return ""


def claims(offer: Offer, *, device: str = "cpu", capability: int | None = None) -> list[Claim]:
    """One claim or more for each axis that is not declared in full, about what no record of the offer covers."""
    found: dict[str, Claim] = {}
    for box in boxes(offer, device, capability, "quick"):
        for axis, what, change in _changes(box):
            fields = box.batched({**box.base, **change})
            need = Requirement.of(make_spec(fields, fields["query_lens"]), fields["phase"])
            elsewhere = axis == "attention" and any(  # in another record, which refuses this for its sizes
                what in record.attention and box.phase in record.phases for record in offer.capabilities
            )
            if not elsewhere and all(need.unmet(record) for record in offer.capabilities):
                name = f"{box.phase}-{box.kind}-{axis}-{what}"
                found.setdefault(name, Claim(name, axis, fields))
    return list(found.values())


def examine(backend: type[AttentionBackend], offer: Offer, claim: Claim) -> Verdict:
    """Holds a claim against negotiation and against the backend itself.

    Raises AssertionError where negotiation does not name the axis, or where the backend, called all the same, gives
    a wrong result without a word.
    """
    spec = make_spec(claim.fields, claim.fields["query_lens"])
    need = Requirement.of(spec, claim.fields["phase"])
    decision = negotiate([need], [offer])
    named = {mismatch.axis for refusal in decision.refused for near in refusal.nearest for mismatch in near.mismatches}
    assert claim.axis in named, f"negotiation refuses it for {sorted(named)}, and does not name {claim.axis}"
    problem = make_problem(**claim.fields)
    try:
        result = Rig(backend, problem.spec).run(problem)
    except Trespass:
        raise
    except Exception:
        return "refused"
    try:
        problem.compare(result)
    except AssertionError as error:
        raise AssertionError(
            f"{claim.axis} is not declared; asked for it all the same, the backend neither raises nor is right: {error}"
        ) from None
    return "could be declared"


def _changes(box: Box) -> Iterator[tuple[str, str, Fields]]:
    """(axis, what, fields) that differ from the base configuration in one axis, whether declared or not."""
    base = box.base
    yield from _latents(box) if box.latent else _heads(box)
    for dtype in ("float32", "float16", "bfloat16"):
        cache = {"kv_dtype": dtype} if box.cached else {}
        yield "dtypes", dtype, {"dtype": dtype, **cache}
    for name, fields in FEATURES.items():
        if name != "query_mask" or box.cached:
            yield name, "on", fields
    if box.phase == "decode":
        for n in (2, 3):
            yield "query_lens", str(n), {"query_len": n}
    if box.cached:
        for page in (1, 2, 8, 16, 32):
            yield "page_sizes", str(page), {"page_size": page}
        for layout in () if box.latent else ("nhd", "hnd"):
            yield "kv_layouts", layout, {"kv_layout": layout}
        for kv in ("float8_e4m3fn", "float8_e5m2"):
            yield "kv_dtypes", kv, {"kv_dtype": kv}
    for other, layout in (("paged", "nhd"), ("mla", "latent"), ("ragged", "")):
        if other != box.kind:
            cached = {"page_size": 4, "kv_layout": layout, "kv_dtype": base["dtype"]} if layout else {"page_size": 0}
            latent = {"num_kv_heads": 1, "head_dim": 24, "v_head_dim": 16} if other == "mla" else {}
            yield "attention", other, {"attention": other, **cached, **latent}


def _heads(box: Box) -> Iterator[tuple[str, str, Fields]]:
    for dim in (8, 16, 24, 64, 80, 96, 128, 192, 256):
        axis = "v_head_dims" if dim in box.record.head_dims else "head_dims"
        yield axis, str(dim), {"head_dim": dim, "v_head_dim": dim}
    yield "v_head_dims", "other", {"v_head_dim": box.base["head_dim"] // 2}
    for ratio in (1, 2, 3, 5, 7, 8):
        yield "gqa_ratios", str(ratio), {"num_kv_heads": 2, "num_heads": 2 * ratio}


def _latents(box: Box) -> Iterator[tuple[str, str, Fields]]:
    for rank, rope in LATENTS:
        axis = "v_head_dims" if rank + rope in box.record.head_dims else "head_dims"
        yield axis, f"{rank}-{rope}", {"head_dim": rank + rope, "v_head_dim": rank}
    for count in (1, 3, 16, 128):
        axis = "gqa_ratios" if count in box.record.num_heads else "num_heads"
        yield axis, str(count), {"num_heads": count}


def exercised(fields: Mapping[str, Any]) -> dict[str, str]:
    """Which value of each axis a case asks for, in words."""
    need = Requirement.of(make_spec(fields, fields["query_lens"]), fields["phase"])
    values = {name: axis.needed(need) for name, axis in AXES.items() if need.cached or not axis.joint}
    if fields.get("k_scale", 1.0) != 1.0:
        values["kv_scales"] = True
    words = {name: value for name, value in values.items() if value not in (None, False, frozenset())}
    return {name: ", ".join(map(str, sorted(v))) if isinstance(v, frozenset) else str(v) for name, v in words.items()}
