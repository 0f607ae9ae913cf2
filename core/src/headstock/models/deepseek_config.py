"""What a `config.json` of the DeepSeek family says beyond a llama's: latent attention and experts. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headstock.models.record import Factor, Record, Size, bad_config, parse


class MLAConfig(Record):
    """Multi-head latent attention: one vector per token, [kv_rank + rope_dim], is cached for all heads.

    A query head is nope_dim + rope_dim wide, its rotated part last; a value head v_dim. Queries come through a vector
    of q_rank, or straight from the hidden state where that is None. With `interleaved`, rotated pairs are neighbours in
    the checkpoint's weights.
    """

    q_rank: Size | None
    kv_rank: Size
    nope_dim: Size
    rope_dim: Size
    v_dim: Size
    interleaved: bool = True

    @property
    def head_dim(self) -> int:
        """The width of a query head."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """The numbers cached per token."""
        return self.kv_rank + self.rope_dim


class MoEConfig(Record):
    """A mixture of experts: of `num_experts` gated layers each token runs `top_k`, beside a shared one that all run.

    Scores are a softmax, or sigmoids of which the choice, but not the weight, is shifted by a learned bias. Experts are
    chosen within the best `top_groups` of `num_groups`. Weights are multiplied by `scaling`, after they are made to add
    up to one where `normalised`. The first `first_layer` layers have an ordinary feed-forward layer.
    """

    num_experts: Size
    top_k: Size
    intermediate_size: Size
    shared_size: Size
    scoring: Literal["softmax", "sigmoid"]
    num_groups: Size = 1
    top_groups: Size = 1
    normalised: bool = False
    scaling: Factor = 1.0
    first_layer: Annotated[int, Field(ge=0)] = 0


class _Keys(BaseModel):
    """The keys read from `config.json`, with the defaults that transformers gives both families."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    q_lora_rank: Size | None = 1536
    kv_lora_rank: Size = 512
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Size = 64
    v_head_dim: Size = 128
    rope_interleave: bool = True
    mlp_bias: Literal[False] = False

    n_routed_experts: Size
    n_shared_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    moe_layer_freq: Literal[1] = 1
    first_k_dense_replace: Annotated[int, Field(ge=0)]
    scoring_func: Literal["softmax", "sigmoid"] | None = None
    topk_method: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    n_group: Size | None = None
    topk_group: Size | None = None
    norm_topk_prob: bool
    routed_scaling_factor: Factor


DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "first_k_dense_replace": 0,
        "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": {
        "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
        "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4,
        "num_experts_per_tok": 8,
    },
}  # fmt: skip
"""By `model_type`, the defaults in which the two families differ in transformers."""


def read_deepseek(raw: dict[str, Any]) -> tuple[MLAConfig, MoEConfig]:
    """The latent attention and the experts of a `config.json`; raises ModelError for what is not supported."""
    kind = raw["model_type"]
    keys = parse(_Keys, {**DEFAULTS[kind], **raw})
    if keys.num_key_value_heads not in (None, keys.num_attention_heads):
        given = f"num_key_value_heads={keys.num_key_value_heads}, num_attention_heads={keys.num_attention_heads}"
        raise bad_config("latent attention has a key head for each query head", given=given)
    if keys.qk_rope_head_dim % 2:
        given = f"qk_rope_head_dim={keys.qk_rope_head_dim}"
        raise bad_config("rotary embeddings need an even qk_rope_head_dim", given=given)
    mla = MLAConfig(
        q_rank=keys.q_lora_rank, kv_rank=keys.kv_lora_rank, nope_dim=keys.qk_nope_head_dim,
        rope_dim=keys.qk_rope_head_dim, v_dim=keys.v_head_dim, interleaved=keys.rope_interleave,
    )  # fmt: skip
    return mla, _experts(keys, kind)


def _experts(keys: _Keys, kind: str) -> MoEConfig:
    scoring: Literal["softmax", "sigmoid"] = "sigmoid" if kind == "deepseek_v3" else "softmax"
    methods = ("noaux_tc",) if kind == "deepseek_v3" else ("greedy", "group_limited_greedy")
    if keys.topk_method not in methods or keys.scoring_func not in (None, scoring):
        given = f"topk_method={keys.topk_method!r}, scoring_func={keys.scoring_func!r}"
        works = f"{' or '.join(methods)} with {scoring} scores"
        raise bad_config(f"not the routing of {kind}", given=given, works=works)
    if keys.norm_topk_prob and kind == "deepseek_v2":
        raise bad_config(
            "norm_topk_prob is not supported in a deepseek_v2, whose definitions differ on what it does",
            given="norm_topk_prob=true", works="false, as in every published model",
        )  # fmt: skip
    limited = keys.topk_method != "greedy"
    groups, top_groups = (keys.n_group or 1, keys.topk_group or 1) if limited else (1, 1)
    experts, top_k = keys.n_routed_experts, keys.num_experts_per_tok
    size, rest = divmod(experts, groups)
    least = 2 if scoring == "sigmoid" else 1  # a group of sigmoid scores is judged by its best two
    if rest or top_groups > groups or top_k > top_groups * size or size < least:
        given = f"n_routed_experts={experts}, n_group={groups}, topk_group={top_groups}, num_experts_per_tok={top_k}"
        works = f"groups of equal size, {least} or more, of which the best hold num_experts_per_tok"
        raise bad_config("experts cannot be chosen like this", given=given, works=works)
    shared_size = keys.moe_intermediate_size * keys.n_shared_experts
    if shared_size > 2**31:
        given = f"n_shared_experts={keys.n_shared_experts}, moe_intermediate_size={keys.moe_intermediate_size}"
        raise bad_config("shared experts are too large together", given=given, works="a product up to 2³¹")
    return MoEConfig(
        num_experts=experts, top_k=top_k, intermediate_size=keys.moe_intermediate_size, shared_size=shared_size,
        scoring=scoring, num_groups=groups, top_groups=top_groups, normalised=keys.norm_topk_prob,
        scaling=keys.routed_scaling_factor, first_layer=keys.first_k_dense_replace,
    )  # fmt: skip
