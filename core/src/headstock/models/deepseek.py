"""DeepSeek-V2 and V3: latent attention and mixtures of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.models.config import ModelConfig
from headstock.models.decoder import Attend, Decoder, Fuse, Progress, Read
from headstock.models.deepseek_config import MLAConfig
from headstock.models.linear import Linear, linear
from headstock.models.mla import UpProjection
from headstock.models.moe import GatedMLP, MoE
from headstock.models.pointwise import Pointwise
from headstock.models.rope import Rope

INNER_EPS = 1e-6
"""The epsilon of the norms of compressed vectors, whatever the config says of the others."""


class Layer:
    """The weights of one decoder layer: all that reads the hidden state for attention is one linear layer."""

    __slots__ = ("entry", "feed_forward", "input_norm", "kv_norm", "output", "post_norm", "q_norm", "q_up", "up")

    def __init__(self, config: ModelConfig, mla: MLAConfig, fuse: Fuse, has_experts: bool, ops: Pointwise):
        self.input_norm, self.post_norm = fuse.norm("input_layernorm"), fuse.norm("post_attention_layernorm")
        self.entry = _entry(config, mla, fuse)
        self.q_norm = fuse.norm("self_attn.q_a_layernorm") if mla.q_rank else None
        self.q_up = fuse.linear("self_attn.q_b_proj", bias=False) if mla.q_rank else None
        self.kv_norm = fuse.norm("self_attn.kv_a_layernorm")
        self.up = UpProjection(mla, fuse("self_attn.kv_b_proj.weight"))
        self.output = fuse.linear("self_attn.o_proj", bias=config.output_bias)
        self.feed_forward: GatedMLP | MoE
        if has_experts:
            assert config.moe is not None, "what has experts says how many"
            self.feed_forward = MoE(config.moe, fuse, ops)
        else:
            self.feed_forward = GatedMLP(fuse, "mlp", ops)


def _entry(config: ModelConfig, mla: MLAConfig, fuse: Fuse) -> Linear:
    """Queries, compressed or not, and the latent vector; queries that are not compressed have no bias."""
    names = ["self_attn.q_a_proj" if mla.q_rank else "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"]
    if mla.q_rank or not config.attention_bias:
        return fuse.linear(*names, bias=config.attention_bias)
    bias = fuse(f"{names[1]}.bias")
    return linear(fuse(*(f"{name}.weight" for name in names)), F.pad(bias, (config.num_heads * mla.head_dim, 0)))


class Deepseek(Decoder[Layer]):
    """A decoder of RMS norms, latent attention and experts; attention itself is the caller's.

    Definitions are those of transformers' `modeling_deepseek_v2` and `_v3`. Where the checkpoint rotates neighbours,
    the rows of weights that make them are put in halves when they are loaded, which changes queries and keys alike.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"):
        super().__init__(config, dtype, device)
        assert config.mla is not None, "the family has latent attention"
        self.mla = config.mla

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        config, num_tokens = self.config, input_ids.shape[0]
        ops, eps = self.ops, config.rms_norm_eps
        cos, sin = self.ops.tables(self.rope, positions, self.dtype)
        hidden = F.embedding(input_ids, self.embedding)
        attended = hidden.new_empty(num_tokens, config.num_heads, self.mla.v_dim)
        flat = attended.view(num_tokens, -1)
        norms = [*(layer.input_norm for layer in self.layers), self.final_norm]
        x = ops.norm(hidden, norms[0], eps)
        for index, layer in enumerate(self.layers):
            q, latent = self._queries_and_latent(layer, x, cos, sin)
            attend(index, q, latent, layer.up, attended)
            hidden, x = ops.add_norm(hidden, layer.output, flat, layer.post_norm, eps)
            hidden, x = layer.feed_forward.add_norm(hidden, x, norms[index + 1], eps)
        return self.head(x if rows is None else x[rows])

    def linears(self) -> list[Linear]:
        found = []
        for layer in self.layers:
            found += [layer.entry, *([layer.q_up] if layer.q_up else []), layer.output, *layer.feed_forward.linears()]
        return [*found, self.head]

    def _queries_and_latent(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, Hq, N + P] and latent vectors [T, 1, R + P], both rotated."""
        mla, ops, num_tokens = self.mla, self.ops, len(x)
        widths = [mla.q_rank or self.config.num_heads * mla.head_dim, mla.kv_rank, mla.rope_dim]
        q, compressed, k_rope = torch.split(layer.entry(x), widths, -1)
        if layer.q_up is not None and layer.q_norm is not None:
            q = layer.q_up(ops.norm(q, layer.q_norm, INNER_EPS))
        q = q.view(num_tokens, self.config.num_heads, mla.head_dim)
        q_rope = q[..., mla.nope_dim :]
        rotated = ops.rotate(q_rope, cos, sin, None, eps=0.0)
        if rotated is not q_rope:
            q_rope.copy_(rotated)
        compressed = ops.norm(compressed, layer.kv_norm, INNER_EPS)
        k_rope = ops.rotate(k_rope[:, None], cos, sin, None, eps=0.0)
        return q, torch.cat((compressed[:, None], k_rope), -1)

    def _rope(self) -> Rope:
        return Rope(self.config.rope, self.mla.rope_dim, self.device)

    def _layer(self, index: int, fuse: Fuse) -> Layer:
        return Layer(self.config, self.mla, fuse, self.config.has_experts(index), self.ops)

    def _build(self, read: Read, progress: Progress | None) -> None:
        def in_halves(names: list[str]) -> dict[str, Tensor]:
            return {name: self._in_halves(name, x) for name, x in read(names).items()}

        super()._build(in_halves if self.mla.interleaved else read, progress)

    def _in_halves(self, name: str, x: Tensor) -> Tensor:
        """Weights with the rows that make a rotated pair moved apart, from neighbours to opposite halves."""
        if "self_attn.kv_a_proj_with_mqa." in name:
            heads = x[None]
        elif name.endswith(("self_attn.q_proj.weight", "self_attn.q_b_proj.weight")):
            heads = x.view(self.config.num_heads, self.mla.head_dim, -1)
        else:
            return x
        plain, pairs = torch.split(heads, [heads.shape[1] - self.mla.rope_dim, self.mla.rope_dim], 1)
        return torch.cat((plain, pairs[:, 0::2], pairs[:, 1::2]), 1).flatten(0, 1)
