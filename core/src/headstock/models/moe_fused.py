"""A mixture of experts for few tokens in five Triton kernels: router's product, choice, gates, down, sum."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.models import moe_kernels as kernels
from headstock.models.fused import power_of_two
from headstock.models.moe import Experts, Router
from headstock.models.pointwise import Pointwise


class Tile(NamedTuple):
    """What a program takes of a weight: outputs, inputs at a time, and how many times of these are in flight."""

    outputs: int
    inputs: int
    stages: int


FEW = 32
"""The most tokens whose experts are run so; of more, the router's choice alone."""

GATES, DOWN = Tile(64, 128, 3), Tile(64, 128, 4)


class FusedRouter(Router):
    """The choice in one kernel, and the product in another where tokens are few."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T, H] → weights [T, k] float32 and experts [T, k] int64, the best first."""
        config, logits = self.config, self._logits(x)
        weights = logits.new_empty(len(x), config.top_k)
        experts = torch.empty_like(weights, dtype=torch.int64)
        kernels.choose[len(x),](
            logits, self.bias, weights, experts, config.scaling, EXPERTS=config.num_experts, TOP_K=config.top_k,
            GROUPS=config.num_groups, TOP_GROUPS=config.top_groups, SIGMOID=config.scoring == "sigmoid",
            NORMALISED=config.normalised, BLOCK_G=power_of_two(config.num_groups),
            BLOCK_E=power_of_two(config.num_experts // config.num_groups), BLOCK_K=power_of_two(config.top_k),
            num_warps=1,
        )  # fmt: skip
        return weights, experts

    def _logits(self, x: Tensor) -> Tensor:
        if len(x) > FEW or x.stride(-1) != 1:
            return F.linear(x.float(), self.weight)
        experts, width = self.weight.shape
        logits = x.new_empty(len(x), experts, dtype=torch.float32)
        kernels.logits[-(-experts // 4), -(-len(x) // 4)](
            x, self.weight, logits, len(x), x.stride(0), K=width, EXPERTS=experts, BLOCK_T=4, BLOCK_E=4, BLOCK_K=512,
            num_warps=4,
        )  # fmt: skip
        return logits


class FusedExperts(Experts):
    """Experts that read each chosen one's weights once where tokens are few; the pairs' outputs are summed after."""

    def __init__(self, gate_up: Tensor, down: Tensor, ops: Pointwise):
        super().__init__(gate_up, down, ops)
        _, inner, hidden = down.shape
        sizes = ((inner, GATES.outputs), (hidden, GATES.inputs), (hidden, DOWN.outputs), (inner, DOWN.inputs))
        divisible = all(size % block == 0 for size, block in sizes)
        self.fusible = divisible and down.dtype in (torch.float16, torch.bfloat16)

    def add_to(self, hidden: Tensor, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """`hidden + self(x, weights, experts)`, in place where tokens are few."""
        if not self.fusible or len(x) > FEW or x.stride(-1) != 1:
            return super().add_to(hidden, x, weights, experts)
        parts = self._parts(x, weights, experts)
        width = hidden.shape[-1]
        kernels.add[len(x), -(-width // 1024)](
            hidden, parts, width, hidden.stride(0), TOP_K=experts.shape[1], BLOCK=1024, num_warps=4
        )
        return hidden

    def _parts(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """What each of a token's experts adds, [T, k, H] float32.

        Programs go by the pairs of tokens and experts, or by experts where those are the fewer.
        """
        (tokens, top_k), (count, width, outputs) = experts.shape, self.down.shape
        inner, parts = x.new_empty(tokens * top_k, width), weights.new_empty(tokens, top_k, outputs)
        slots = min(tokens * top_k, count)
        shape = {"TOP_K": top_k, "BY_PAIR": slots < count, "BLOCK_T": max(power_of_two(tokens), 16), "num_warps": 4}
        kernels.gate_up[width // GATES.outputs, slots](
            x, self.gate_up, experts, inner, tokens, x.stride(0), K=outputs, N=width, BLOCK_N=GATES.outputs,
            BLOCK_K=GATES.inputs, num_stages=GATES.stages, **shape,
        )  # fmt: skip
        kernels.down[outputs // DOWN.outputs, slots](
            inner, self.down, experts, weights, parts, tokens, K=width, N=outputs, BLOCK_N=DOWN.outputs,
            BLOCK_K=DOWN.inputs, num_stages=DOWN.stages, **shape,
        )  # fmt: skip
        return parts
