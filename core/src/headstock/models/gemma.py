"""The text models of Gemma 3."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.models.config import ModelConfig
from headstock.models.decoder import Attend, Progress, Read
from headstock.models.llama import Llama
from headstock.models.rope import Rope, rotate


class Gemma3(Llama):
    """The llama family's decoder with norms on both sides of attention and feed-forward, and GELU gates.

    Norms store what they add to one and multiply in float32, embeddings are scaled by the root of their width, and
    layers with a window have a rope of their own. Definitions are those of transformers' `modeling_gemma3`.
    """

    neutral_norm = 0.0

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"):
        super().__init__(config, dtype, device)
        self.norm_dtype = torch.float32
        self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype).item()  # rounded, as it was trained

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        config, num_tokens = self.config, input_ids.shape[0]
        q_heads, qk_heads = config.num_heads, config.num_heads + config.num_kv_heads
        full, local = (self.ops.tables(rope, positions, self.dtype) for rope in (self.rope, self.local_rope))
        hidden = F.embedding(input_ids, self.embedding) * self.embedding_scale
        attended = hidden.new_empty(num_tokens, q_heads, config.head_dim)
        flat = attended.view(num_tokens, -1)
        for index, (shape, layer) in enumerate(zip(config.layers, self.layers, strict=True)):
            assert layer.qk_norm is not None, "the family has them"
            attention_norm, feed_forward_norm = layer.output_norms
            x = self._norm(hidden, layer.input_norm)
            qkv = layer.qkv(x).view(num_tokens, -1, config.head_dim)
            qk = self._norm(qkv[:, :qk_heads], layer.qk_norm)
            qk = rotate(qk, *(local if shape.window else full))
            attend(index, qk[:, :q_heads], qk[:, q_heads:], qkv[:, qk_heads:], attended)
            hidden = hidden + self._norm(layer.output(flat), attention_norm)
            x = self._norm(hidden, layer.post_norm)
            gate, up = layer.gate_up(x).chunk(2, -1)
            x = layer.down(F.gelu(gate, approximate="tanh").mul_(up))
            hidden = hidden + self._norm(x, feed_forward_norm)
        if rows is not None:
            hidden = hidden[rows]
        return self.head(self._norm(hidden, self.final_norm))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return (F.rms_norm(x.float(), x.shape[-1:], None, self.config.rms_norm_eps) * weight).to(x.dtype)

    def _build(self, read: Read, progress: Progress | None) -> None:
        def with_ones(names: list[str]) -> dict[str, Tensor]:
            return {name: x.float() + 1 if name.endswith("norm.weight") else x for name, x in read(names).items()}

        assert self.config.local_rope is not None, "the family has one"
        self.local_rope = Rope(self.config.local_rope, self.config.head_dim, self.device)
        super()._build(with_ones, progress)
