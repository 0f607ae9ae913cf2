"""What all decoders share: how their weights are read, fused layer by layer and put where the model runs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from headstock.models.config import ModelConfig
from headstock.models.linear import Linear, linear, packs
from headstock.models.mla import UpProjection
from headstock.models.pointwise import pointwise
from headstock.models.rope import Rope
from headstock.models.shapes import EMBEDDING, FINAL_NORM, HEAD, layer_shapes, weight_shapes
from headstock.models.weights import WeightSource

Attend = Callable[[int, Tensor, Tensor, Tensor | UpProjection, Tensor], None]
"""What the model calls once per layer: (layer index, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], out [T, Hq, Dv]).
It writes out; q, k and v have last stride 1 and may share storage; out is used again by the next layer. With latent
attention k is the latent vector, [T, 1, R + P], and in the place of v stands what makes keys and values of it."""

Progress = Callable[[str, int, int], None]
"""(what is being done, steps done, steps in all)."""

Read = Callable[[list[str]], Mapping[str, Tensor]]
L = TypeVar("L")


class Decoder(ABC, Generic[L]):
    """A causal language model of layers `L`, all of whose mathematics but attention are its own.

    Nothing is allocated until `load` or `init_random`. `dtype` is that of weights, activations and logits.
    """

    neutral_norm = 1.0  # the stored weight with which a norm scales nothing

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.norm_dtype = dtype
        self.ops = pointwise(self.device)
        self.layers: list[L] = []

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Token ids [T] and positions [T], both int64, to logits [T, vocab] in the model's dtype.

        `rows` (int64 [R]) picks the rows that go through the head, for logits [R, vocab].
        """

    @abstractmethod
    def linears(self) -> list[Linear]:
        """Every linear layer as fused here, in the order in which a forward pass runs them; the head is last."""

    @abstractmethod
    def _layer(self, index: int, fuse: Fuse) -> L:
        """The weights of one layer, from what `fuse` joins."""

    def load(self, weights: WeightSource, progress: Progress | None = None) -> None:
        """Read, convert and fuse the weights, one layer at a time; raises ModelError before allocating any."""
        tied = {HEAD: EMBEDDING} if self.config.tie_embeddings else {}
        spare = range(self.config.num_layers, self.config.num_layers + self.config.spare_layers)
        weights.check(weight_shapes(self.config), tied, [f"model.layers.{index}." for index in spare])
        self._build(weights.read, progress)

    def init_random(self, seed: int = 0) -> None:
        """Draw weights where the model runs instead of loading them, for tests and benchmarks.

        The same seed gives the same weights, on every device.
        """
        shapes = weight_shapes(self.config)

        def draw(name: str) -> Tensor:  # from a seed of its own, so that it may be drawn again
            x = _drawn(math.prod(shapes[name]), seed + crc32(name.encode()), self.device).view(shapes[name])
            return x.add_(self.neutral_norm) if name.endswith("norm.weight") else x

        self._build(lambda names: {name: draw(name) for name in names}, None)

    def _rope(self) -> Rope:
        return Rope(self.config.rope, self.config.head_dim, self.device)

    def _build(self, read: Read, progress: Progress | None) -> None:
        """Fuse what `read` gives; only one layer exists twice at any time."""
        config, steps = self.config, self.config.num_layers + 1
        self.rope = self._rope()
        self._build_outer(read)
        self.layers = []
        for index in range(config.num_layers):
            tensors = read(list(layer_shapes(config, index)))
            fuse = Fuse(tensors, f"model.layers.{index}.", self.dtype, self.norm_dtype, self.device)
            self.layers.append(self._layer(index, fuse))
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


def _drawn(count: int, seed: int, device: torch.device) -> Tensor:
    """Numbers of mean 0 and deviation 0.02, evenly spread, float32 [count]: each a hash of its place (splitmix64)."""
    x = torch.arange(count, device=device).mul_(-0x61C8864680B583EB).add_(seed)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x.bitwise_xor_(x >> shift).mul_(factor)
    return x.bitwise_right_shift_(40).float().mul_(0.02 * 3**0.5 / 2**23)


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

    def exact(self, name: str) -> Tensor:
        """One tensor in float32, whatever the model's dtype."""
        return self.tensors[self.prefix + name].to(self.device, torch.float32, copy=True)

    def linear(self, *modules: str, bias: bool) -> Linear:
        biases = self(*(f"{module}.bias" for module in modules)) if bias else None
        return linear(self(*(f"{module}.weight" for module in modules)), biases)
