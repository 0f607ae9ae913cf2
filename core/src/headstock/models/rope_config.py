"""What a model's files say of its rotary position embedding, without torch."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from headstock.models.record import Factor, Record, Size, bad_config, parse

Weight = Annotated[float, Field(ge=0, le=1e6)]
RopeType = Literal["default", "linear", "llama3", "yarn"]


class RopeConfig(Record):
    """The rotary position embedding: its base wavelength and how a longer context stretches it.

    Field names follow `rope_parameters` of Hugging Face transformers; which of them count depends on `rope_type`.
    """

    rope_type: RopeType = "default"
    rope_theta: Factor = 10_000.0
    factor: Factor | None = None
    original_max_position_embeddings: Size | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    attention_factor: Factor | None = None
    beta_fast: Factor = 32.0
    beta_slow: Factor = 1.0
    mscale: Weight | None = None
    mscale_all_dim: Weight | None = None
    truncate: bool = True

    def temperature(self, weight: float) -> float:
        """YaRN's temperature at a weight: 1 + 0.1 · weight · ln(factor)."""
        return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor and self.factor > 1 else 1.0

    @property
    def softmax_factor(self) -> float:
        """What YaRN multiplies the scale of latent attention by: there `mscale_all_dim` is for unrotated parts too."""
        return self.temperature(self.mscale_all_dim or 0.0) ** 2 if self.rope_type == "yarn" else 1.0


# What each rope type needs and what it may have besides `rope_theta`.
_ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, set()),
    "yarn": ({"factor"}, {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
}


def read_ropes(
    raw: dict[str, Any], max_context: int, thetas: tuple[float, float] | None
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rope in a `config.json`, and that of windowed layers where `thetas` gives them one of their own.

    `thetas` are the defaults for full and for windowed layers. Such a model has `rope_parameters` by kind of layer
    (transformers 5), or `rope_theta` with `rope_scaling` for full layers and an unscaled `rope_local_base_freq` for
    windowed ones (before). Raises ModelError for what is contradictory, incomplete or not supported.
    """
    if thetas is None:
        return _rope(raw, max_context), None
    kinds = {"full_attention": raw, "sliding_attention": {"rope_theta": raw.get("rope_local_base_freq")}}
    own = raw.get("rope_parameters") or {}
    if not isinstance(own, dict) or not own.keys() <= kinds.keys():
        raise bad_config("rope_parameters must be by kind of layer", given=own, works=", ".join(kinds))
    full, local = ({**top, "rope_parameters": own.get(kind)} for kind, top in kinds.items())
    return _rope(full, max_context, thetas[0]), _rope(local, max_context, thetas[1])


def _rope(raw: dict[str, Any], max_context: int, theta: float = 10_000.0) -> RopeConfig:
    """One record from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    given: dict[str, Any] = {}
    keys = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    sources = {name: raw.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    sources["the top level"] = {key: raw.get(key) for key in keys}
    for name, entries in sources.items():
        if not isinstance(entries, dict):
            raise bad_config(f"{name} must be an object", given=repr(entries))
        for key, value in entries.items():
            key = "rope_type" if key == "type" else key
            if value is not None and given.setdefault(key, value) != value:
                raise bad_config(f"contradictory {key}", given=f"{given[key]!r} and, in {name}, {value!r}")
    if (part := given.pop("partial_rotary_factor", 1)) != 1:
        raise bad_config("this partial_rotary_factor is not supported", given=f"{part!r:.80}", works="1")
    given.setdefault("rope_theta", theta)
    return _complete_rope(parse(RopeConfig, given, "rope_parameters"), set(given), max_context)


def _complete_rope(rope: RopeConfig, given: set[str], max_context: int) -> RopeConfig:
    """Check the keys against the rope type and fill in what transformers derives from the context length."""
    original = rope.original_max_position_embeddings or max_context
    needed, optional = _ROPE_KEYS[rope.rope_type]
    if rope.rope_type == "yarn" and rope.factor is None:
        rope, given = rope.model_copy(update={"factor": max_context / original}), given | {"factor"}
    if missing := needed - given:
        raise bad_config(f"rope_type {rope.rope_type!r} needs {', '.join(sorted(missing))}")
    known = needed | optional | {"rope_type", "rope_theta", "original_max_position_embeddings"}
    if unread := given - known:
        raise bad_config(f"rope_type {rope.rope_type!r} does not read {', '.join(sorted(unread))}")
    if rope.rope_type == "yarn" and rope.rope_theta <= 1:
        raise bad_config("yarn needs a rope_theta above 1", given=rope.rope_theta)
    if rope.low_freq_factor and rope.high_freq_factor and rope.low_freq_factor >= rope.high_freq_factor:
        factors = f"{rope.low_freq_factor}, {rope.high_freq_factor}"
        raise bad_config("rope low_freq_factor must be below high_freq_factor", given=factors)
    return rope.model_copy(update={"original_max_position_embeddings": original})
