"""The llama family: Llama 2 and 3, Mistral, Qwen 2 and 3, SmolLM 2."""

from __future__ import annotations

from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.models.config import ModelConfig
from headstock.models.decoder import Attend, Decoder, Fuse
from headstock.models.linear import Linear
from headstock.models.shapes import inner_norms


class Layer:
    """The weights of one decoder layer: q, k and v are one linear layer, gate and up another."""

    __slots__ = ("down", "gate_up", "input_norm", "output", "output_norms", "post_norm", "qk_norm", "qkv")

    def __init__(self, config: ModelConfig, fuse: Fuse):
        self.input_norm = fuse.norm("input_layernorm")
        self.qkv = fuse.linear(*(f"self_attn.{x}_proj" for x in "qkv"), bias=config.attention_bias)
        self.qk_norm = _qk_norm(config, fuse) if config.qk_norm else None
        self.output = fuse.linear("self_attn.o_proj", bias=config.output_bias)
        self.post_norm, *self.output_norms = map(fuse.norm, inner_norms(config))
        self.gate_up = fuse.linear("mlp.gate_proj", "mlp.up_proj", bias=config.mlp_bias)
        self.down = fuse.linear("mlp.down_proj", bias=config.mlp_bias)


def _qk_norm(config: ModelConfig, fuse: Fuse) -> Tensor:
    """The norm weights of q and k heads side by side, [Hq + Hkv, D]: one norm serves both."""
    q_norm, k_norm = fuse.norm("self_attn.q_norm"), fuse.norm("self_attn.k_norm")
    return torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)))


class Llama(Decoder[Layer]):
    """A decoder of RMS norms, rotary grouped-query attention and gated SiLU layers; attention is the caller's."""

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        config, num_tokens = self.config, input_ids.shape[0]
        q_heads, qk_heads = config.num_heads, config.num_heads + config.num_kv_heads
        ops, eps = self.ops, config.rms_norm_eps
        cos, sin = ops.tables(self.rope, positions, self.dtype)
        hidden = F.embedding(input_ids, self.embedding)
        attended = hidden.new_empty(num_tokens, q_heads, config.head_dim)
        flat = attended.view(num_tokens, -1)
        norms = [*(layer.input_norm for layer in self.layers), self.final_norm]
        x = ops.norm(hidden, norms[0], eps)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(x).view(num_tokens, -1, config.head_dim)
            qk = ops.rotate(qkv[:, :qk_heads], cos, sin, layer.qk_norm, eps)
            attend(index, qk[:, :q_heads], qk[:, q_heads:], qkv[:, qk_heads:], attended)
            hidden, x = ops.add_norm(hidden, layer.output, flat, layer.post_norm, eps)
            x = ops.gate(layer.gate_up, x)
            hidden, x = ops.add_norm(hidden, layer.down, x, norms[index + 1], eps)
        return self.head(x if rows is None else x[rows])

    def linears(self) -> list[Linear]:
        parts = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in self.layers]
        return [*chain.from_iterable(parts), self.head]

    def _layer(self, index: int, fuse: Fuse) -> Layer:
        return Layer(self.config, fuse)
