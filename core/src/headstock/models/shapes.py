"""What a checkpoint holds: the name and shape of every tensor of a model, and their bytes, known before any is read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from headstock.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ROUTER = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")
"""What decides between experts, which stays in float32 whatever the model's dtype."""


def weight_shapes(config: ModelConfig) -> Shapes:
    """Name to shape of every tensor that a checkpoint of this model must hold, in the names of transformers."""
    table = (config.vocab_size, config.hidden_size)
    shapes: Shapes = {EMBEDDING: table, FINAL_NORM: (config.hidden_size,)}
    if not config.tie_embeddings:
        shapes[HEAD] = table
    for index in range(config.num_layers):
        shapes.update(layer_shapes(config, index))
    return shapes


def weight_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> int:
    """The bytes that a loaded model occupies; a tied embedding counts twice where the head holds a packed copy."""
    import torch

    from headstock.models.linear import packs

    sizes = {name: math.prod(shape) for name, shape in weight_shapes(config).items()}
    numbers = sum(sizes.values())
    if config.tie_embeddings and packs(dtype, torch.device(device)):
        numbers += config.vocab_size * config.hidden_size
    exact = sum(size for name, size in sizes.items() if name.endswith(ROUTER))
    return (numbers - exact) * dtype.itemsize + exact * torch.float32.itemsize


def layer_shapes(config: ModelConfig, index: int) -> Shapes:
    """The tensors of one layer, under their full names."""
    norms = ("input_layernorm", *inner_norms(config))
    shapes: Shapes = {f"{name}.weight": (config.hidden_size,) for name in norms}
    shapes |= _attention(config) if config.mla is None else _latent_attention(config)
    shapes |= _experts(config) if config.has_experts(index) else _gated("mlp", config, config.intermediate_size)
    return {f"model.layers.{index}.{name}": shape for name, shape in shapes.items()}


def inner_norms(config: ModelConfig) -> tuple[str, ...]:
    """The norm before the feed-forward layer; then, where there are any, those of what attention and that one add."""
    if config.output_norms:
        return "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
    return ("post_attention_layernorm",)


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _gated(name: str, config: ModelConfig, inner: int) -> Shapes:
    hidden, bias = config.hidden_size, config.mlp_bias
    return (
        _linear(f"{name}.gate_proj", inner, hidden, bias)
        | _linear(f"{name}.up_proj", inner, hidden, bias)
        | _linear(f"{name}.down_proj", hidden, inner, bias)
    )


def _attention(config: ModelConfig) -> Shapes:
    hidden, head = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head, config.num_kv_heads * head
    shapes: Shapes = {}
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
        shapes |= _linear(f"self_attn.{name}_proj", rows, hidden, config.attention_bias)
    return shapes | _linear("self_attn.o_proj", hidden, q_rows, config.output_bias)


def _latent_attention(config: ModelConfig) -> Shapes:
    mla, hidden, bias = config.mla, config.hidden_size, config.attention_bias
    assert mla is not None, "asked of layers with latent attention"
    q_rows = config.num_heads * mla.head_dim
    shapes = _linear("self_attn.q_proj", q_rows, hidden)
    if mla.q_rank is not None:
        shapes = _linear("self_attn.q_a_proj", mla.q_rank, hidden, bias)
        shapes |= {"self_attn.q_a_layernorm.weight": (mla.q_rank,)}
        shapes |= _linear("self_attn.q_b_proj", q_rows, mla.q_rank)
    shapes |= _linear("self_attn.kv_a_proj_with_mqa", mla.latent_dim, hidden, bias)
    shapes |= {"self_attn.kv_a_layernorm.weight": (mla.kv_rank,)}
    shapes |= _linear("self_attn.kv_b_proj", config.num_heads * (mla.nope_dim + mla.v_dim), mla.kv_rank)
    return shapes | _linear("self_attn.o_proj", hidden, config.num_heads * mla.v_dim, config.output_bias)


def _experts(config: ModelConfig) -> Shapes:
    moe = config.moe
    assert moe is not None, "asked of layers with experts"
    shapes: Shapes = {ROUTER[0]: (moe.num_experts, config.hidden_size)}
    if moe.scoring == "sigmoid":
        shapes[ROUTER[1]] = (moe.num_experts,)
    for expert in range(moe.num_experts):
        shapes |= _gated(f"mlp.experts.{expert}", config, moe.intermediate_size)
    return shapes | _gated("mlp.shared_experts", config, moe.shared_size)
