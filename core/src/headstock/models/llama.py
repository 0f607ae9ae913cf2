"""The llama family: Llama 2 and 3, Mistral, Qwen 2 and 3, SmolLM 2."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import chain
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.models.config import ModelConfig
from headstock.models.linear import Linear, linear, packs
from headstock.models.rope import Rope, rotate
from headstock.models.weights import WeightSource

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""What the model calls once per layer: (layer index, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], out [T, Hq, Dv]).
It writes out; q, k and v have last stride 1 and may share storage; out is used again by the next layer."""

Progress = Callable[[str, int, int], None]
"""(what is being done, steps done, steps in all)."""

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Llama:
    """A decoder of RMS norms, rotary grouped-query attention and gated SiLU layers; attention itself is the caller's.

    Nothing is allocated until `load` or `init_random`. `dtype` is that of weights, activations and logits.
    """

    neutral_norm = 1.0  # the stored weight with which a norm scales nothing

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.norm_dtype = dtype
        self.layers: list[Layer] = []

    def load(self, weights: WeightSource, progress: Progress | None = None) -> None:
        """Read, convert and fuse the weights, one layer at a time; raises ModelError before allocating any."""
        tied = {HEAD: EMBEDDING} if self.config.tie_embeddings else {}
        weights.check(weight_shapes(self.config), tied)
        self._build(weights.read, progress)

    def init_random(self, seed: int = 0) -> None:
        """Draw weights instead of loading them, for tests and benchmarks; the same seed gives the same weights."""
        shapes = weight_shapes(self.config)

        def draw(name: str) -> Tensor:  # from a seed of its own, so that it may be drawn again
            generator = torch.Generator().manual_seed(seed + crc32(name.encode()))
            x = torch.randn(shapes[name], generator=generator).mul_(0.02)
            return x.add_(self.neutral_norm) if name.endswith("norm.weight") else x

        self._build(lambda names: {name: draw(name) for name in names}, None)

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Token ids [T] and positions [T], both int64, to logits [T, vocab] in the model's dtype.

        `rows` (int64 [R]) picks the rows that go through the head, for logits [R, vocab].
        """
        config, num_tokens = self.config, input_ids.shape[0]
        q_heads, qk_heads = config.num_heads, config.num_heads + config.num_kv_heads
        hidden_shape, head_shape, eps = (config.hidden_size,), (config.head_dim,), config.rms_norm_eps
        cos, sin = self.rope.tables(positions, self.dtype)
        hidden = F.embedding(input_ids, self.embedding)
        attended = hidden.new_empty(num_tokens, q_heads, config.head_dim)
        flat = attended.view(num_tokens, -1)
        for index, layer in enumerate(self.layers):
            x = F.rms_norm(hidden, hidden_shape, layer.input_norm, eps)
            qkv = layer.qkv(x).view(num_tokens, -1, config.head_dim)
            qk = qkv[:, :qk_heads]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, head_shape, None, eps) * layer.qk_norm
            qk = rotate(qk, cos, sin)
            attend(index, qk[:, :q_heads], qk[:, q_heads:], qkv[:, qk_heads:], attended)
            hidden = layer.output.add_to(hidden, flat)
            x = F.rms_norm(hidden, hidden_shape, layer.post_norm, eps)
            gate, up = layer.gate_up(x).chunk(2, -1)
            hidden = layer.down.add_to(hidden, F.silu(gate).mul_(up))
        if rows is not None:
            hidden = hidden[rows]
        return self.head(F.rms_norm(hidden, hidden_shape, self.final_norm, eps))

    def linears(self) -> list[Linear]:
        """Every linear layer as fused here, in the order in which a forward pass runs them; the head is last."""
        parts = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in self.layers]
        return [*chain.from_iterable(parts), self.head]

    def _build(self, read: Read, progress: Progress | None) -> None:
        """Fuse what `read` gives; only one layer exists twice at any time."""
        config, steps = self.config, self.config.num_layers + 1
        self.rope = Rope(config.rope, config.head_dim, self.device)
        self._build_outer(read)
        self.layers = []
        for index in range(config.num_layers):
            tensors = read(list(_layer_shapes(config, index)))
            fuse = Fuse(tensors, f"model.layers.{index}.", self.dtype, self.norm_dtype, self.device)
            self.layers.append(Layer(config, fuse))
            if progress:
                progress("loading weights", index + 1, steps)
        if progress:
            progress("loading weights", steps, steps)

    def _build_outer(self, read: Read) -> None:
        """The head, the embedding and the last norm.

        A tied embedding that is packed for the head is read a second time: rows are looked up in the file as mapped,
        where only those touched take up memory, and packing has touched every one of the first mapping.
        """
        tied = self.config.tie_embeddings

        def place(name: str) -> Tensor:
            return read([name])[name].to(self.device, self.dtype)

        self.head = linear(place(EMBEDDING if tied else HEAD))
        shared = tied and not packs(self.dtype, self.device)
        self.embedding = self.head.weight if shared else place(EMBEDDING)
        self.final_norm = read([FINAL_NORM])[FINAL_NORM].to(self.device, self.norm_dtype, copy=True)


Read = Callable[[list[str]], Mapping[str, Tensor]]


class Fuse:
    """Joins tensors of one layer along their rows and puts the result where the model runs."""

    def __init__(
        self, tensors: Mapping[str, Tensor], prefix: str, dtype: torch.dtype, norm_dtype: torch.dtype,
        device: torch.device,
    ):  # fmt: skip
        self.tensors, self.prefix, self.device = tensors, prefix, device
        self.dtype, self.norm_dtype = dtype, norm_dtype

    def __call__(self, *names: str) -> Tensor:
        return torch.cat([self.tensors[self.prefix + name] for name in names]).to(self.device, self.dtype)

    def norm(self, module: str) -> Tensor:
        return self.tensors[f"{self.prefix}{module}.weight"].to(self.device, self.norm_dtype, copy=True)

    def linear(self, *modules: str, bias: bool) -> Linear:
        biases = self(*(f"{module}.bias" for module in modules)) if bias else None
        return linear(self(*(f"{module}.weight" for module in modules)), biases)


class Layer:
    """The weights of one decoder layer: q, k and v are one linear layer, gate and up another."""

    __slots__ = ("down", "gate_up", "input_norm", "output", "output_norms", "post_norm", "qk_norm", "qkv")

    def __init__(self, config: ModelConfig, fuse: Fuse):
        self.input_norm = fuse.norm("input_layernorm")
        self.qkv = fuse.linear(*(f"self_attn.{x}_proj" for x in "qkv"), bias=config.attention_bias)
        self.qk_norm = _qk_norm(config, fuse) if config.qk_norm else None
        self.output = fuse.linear("self_attn.o_proj", bias=config.output_bias)
        self.post_norm, *self.output_norms = map(fuse.norm, _inner_norms(config))
        self.gate_up = fuse.linear("mlp.gate_proj", "mlp.up_proj", bias=config.mlp_bias)
        self.down = fuse.linear("mlp.down_proj", bias=config.mlp_bias)


def _qk_norm(config: ModelConfig, fuse: Fuse) -> Tensor:
    """The norm weights of q and k heads side by side, [Hq + Hkv, D]: one norm serves both."""
    q_norm, k_norm = fuse.norm("self_attn.q_norm"), fuse.norm("self_attn.k_norm")
    return torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)))


def _inner_norms(config: ModelConfig) -> tuple[str, ...]:
    """The norm before the feed-forward layer; then, where there are any, those of what attention and that one add."""
    if config.output_norms:
        return "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
    return ("post_attention_layernorm",)


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor that a checkpoint of this model must hold, in the names of transformers."""
    shapes = dict(_outer_shapes(config))
    for index in range(config.num_layers):
        shapes.update(_layer_shapes(config, index))
    return shapes


def weight_bytes(config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> int:
    """The bytes that a loaded model occupies; a tied embedding counts twice where the head holds a packed copy."""
    numbers = sum(math.prod(shape) for shape in weight_shapes(config).values())
    if config.tie_embeddings and packs(dtype, torch.device(device)):
        numbers += config.vocab_size * config.hidden_size
    return numbers * dtype.itemsize


def _outer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: table, FINAL_NORM: (config.hidden_size,)}
    return shapes if config.tie_embeddings else {**shapes, HEAD: table}


def _layer_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head, config.num_kv_heads * head
    norms = ("input_layernorm", *_inner_norms(config))
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms}
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    for name, rows, columns, bias in (
        ("self_attn.q_proj", q_rows, hidden, config.attention_bias),
        ("self_attn.k_proj", kv_rows, hidden, config.attention_bias),
        ("self_attn.v_proj", kv_rows, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, q_rows, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ):
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return {f"model.layers.{index}.{name}": shape for name, shape in shapes.items()}
