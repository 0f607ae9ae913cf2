"""Mixtures of experts: gated feed-forward layers of which each token runs a few, chosen by a router.

What it costs, with k of E experts per token: a token alone must read k experts, and T tokens soon read all E. These
forms compute the same, and which one is used depends on shapes and device alone:

- *fused* (`moe_fused`), for few tokens where a GPU runs such kernels: a program has some columns of one expert, and
  finds its tokens by itself. Each chosen expert is read once, and nothing else of the experts is;
- *gathered*, for so few tokens that copying their experts is cheap: reads those T × k experts, writes and reads a copy;
- *every expert* on every token, with weights of 0: reads all experts once, and multiplies E / k times more than needed,
  which hides behind the reading while tokens are few;
- *sorted* by expert, each expert on its own tokens: nothing in excess. Where the device has a grouped product it asks
  the host for nothing, and serves what every expert does not; elsewhere it is a loop that waits for the counts, so that
  it cannot be captured in a graph, with three launches per expert.

On an H200 in bfloat16, with 64 experts of 2048 × 1408 and 6 per token, the experts of a layer and their router take 39,
155 and 267 µs fused for 1, 8 and 32 tokens, of which 24, 141 and 245 are for reading at the rate of a copy. In torch's
forms it is 100, 291 and 323: a dozen small kernels, and a grouped product that reads at two thirds of that rate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.fusing import fusing
from headstock.models.decoder import Fuse
from headstock.models.deepseek_config import MoEConfig
from headstock.models.linear import Linear
from headstock.models.pointwise import Pointwise

TOGETHER = {"cpu": 32}
"""The most tokens for which every expert is run, by device type; 256 elsewhere. More are sorted."""

TOGETHER_OR_GROUPED = 160
"""The same where there is a grouped product, which is faster for more."""


class GatedMLP:
    """The feed-forward layer down(silu(gate(x)) · up(x)), gate and up as one linear layer."""

    def __init__(self, fuse: Fuse, name: str, ops: Pointwise):
        self.ops = ops
        self.gate_up = fuse.linear(f"{name}.gate_proj", f"{name}.up_proj", bias=False)
        self.down = fuse.linear(f"{name}.down_proj", bias=False)

    def add_norm(self, hidden: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`hidden` with what this layer makes of x added, rows [T, H], and the RMS norm of that."""
        return self.ops.add_norm(hidden, self.down, self.ops.gate(self.gate_up, x), weight, eps)

    def linears(self) -> list[Linear]:
        return [self.gate_up, self.down]


class Router:
    """Chooses the experts of each token, and their weights, in float32."""

    def __init__(self, config: MoEConfig, weight: Tensor, bias: Tensor | None):
        self.config, self.weight, self.bias = config, weight, bias

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T, H] → weights [T, k] float32 and experts [T, k] int64, in no order."""
        config = self.config
        logits = F.linear(x.float(), self.weight)
        scores = logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(-1)
        weights, experts = self._choose(scores if self.bias is None else scores + self.bias)
        if self.bias is not None:
            weights = scores.gather(1, experts)
        if config.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights if config.scaling == 1.0 else weights * config.scaling, experts

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The best k within the best groups, and who they are: groups are judged by their best, or their best two."""
        config = self.config
        if config.top_groups < config.num_groups:
            groups = scores.view(len(scores), config.num_groups, -1)
            best = groups.topk(2, -1).values.sum(-1) if config.scoring == "sigmoid" else groups.amax(-1)
            chosen = best.topk(config.top_groups, -1, sorted=False).indices
            shut = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
            scores = groups.masked_fill(shut[..., None], -torch.inf).flatten(1)
        values, experts = scores.topk(config.top_k, -1, sorted=False)
        return values, experts


class Experts:
    """The routed experts' weights: `gate_up` [E, 2I, H] and `down` [E, I, H]."""

    def __init__(self, gate_up: Tensor, down: Tensor, ops: Pointwise):
        self.gate_up, self.down, self.ops = gate_up, down, ops
        self.grouped = _has_grouped_product(gate_up)
        # sorting takes a pass per few bits, so experts are numbered in as few as can be
        self._numbers = torch.arange(len(down), device=down.device, dtype=torch.int16)

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Rows [T, H], their experts [T, k] int64 and weights [T, k] float32, to the weighted sums [T, H]."""
        runs, together = experts.numel(), TOGETHER_OR_GROUPED if self.grouped else TOGETHER.get(x.device.type, 256)
        if len(x) > together or (self.grouped and runs < len(self.down)):
            return self._sorted(x, weights, experts)
        if 3 * runs <= len(self.down):
            return self._gathered(x, weights, experts)
        return self._every(x, weights, experts)

    def add_to(self, hidden: Tensor, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """`hidden + self(x, weights, experts)`, rows [T, H]."""
        return hidden + self(x, weights, experts)

    def _gathered(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        chosen, rows = experts.flatten(), x.repeat_interleave(experts.shape[1], 0)[:, None]
        inner = self.ops.silu_gate(torch.bmm(rows, self.gate_up[chosen].transpose(1, 2))[:, 0])
        return _weighted(torch.bmm(inner[:, None], self.down[chosen]), weights)

    def _every(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        shares = x.new_zeros(len(x), len(self.down)).scatter_(1, experts, weights.to(x.dtype)).view(-1, 1)
        inner = self.ops.silu_gate(F.linear(x, self.gate_up.flatten(0, 1)).view(len(shares), -1)).mul_(shares)
        if x.dtype == torch.float16:
            inner.masked_fill_(shares == 0, 0)  # an expert that was not chosen may have overflown
        return inner.view(len(x), -1) @ self.down.flatten(0, 1)

    def _sorted(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        numbers, order = experts.flatten().to(torch.int16).sort()
        ends = torch.searchsorted(numbers, self._numbers, right=True, out_int32=True)
        product = _grouped_product if self.grouped else _product_by_product
        inner = self.ops.silu_gate(product(x[order // experts.shape[1]], self.gate_up.transpose(1, 2), ends))
        outputs = product(inner, self.down, ends)
        return _weighted(torch.empty_like(outputs).index_copy_(0, order, outputs), weights)


class MoE:
    """Routed experts beside a shared one."""

    def __init__(self, config: MoEConfig, fuse: Fuse, ops: Pointwise):
        bias = fuse.exact("mlp.gate.e_score_correction_bias") if config.scoring == "sigmoid" else None
        router, experts = _kinds(fuse.device)
        self.router = router(config, fuse.exact("mlp.gate.weight"), bias)
        names = [f"mlp.experts.{expert}" for expert in range(config.num_experts)]
        gate_up = fuse(*(f"{name}.{part}_proj.weight" for name in names for part in ("gate", "up")))
        gate_up = gate_up.view(config.num_experts, 2 * config.intermediate_size, -1)
        down = fuse(*(f"{name}.down_proj.weight" for name in names)).view(config.num_experts, -1, gate_up.shape[1] // 2)
        self.experts = experts(gate_up, down.transpose(1, 2).contiguous(), ops)
        self.shared = GatedMLP(fuse, "mlp.shared_experts", ops)

    def add_norm(self, hidden: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`hidden` with what this layer makes of x added, rows [T, H], and the RMS norm of that."""
        return self.shared.add_norm(self.experts.add_to(hidden, x, *self.router(x)), x, weight, eps)

    def linears(self) -> list[Linear]:
        """The linear layers that every token runs."""
        return self.shared.linears()


def _kinds(device: torch.device) -> tuple[type[Router], type[Experts]]:
    """Those for a device: fused where it runs such kernels."""
    if not fusing(device).able:
        return Router, Experts
    from headstock.models.moe_fused import FusedExperts, FusedRouter

    return FusedRouter, FusedExperts


def _weighted(outputs: Tensor, weights: Tensor) -> Tensor:
    """Outputs of each token's experts, [T × k, …, H], summed by weights [T, k]."""
    return torch.bmm(weights.to(outputs.dtype)[:, None], outputs.view(*weights.shape, -1)).squeeze(1)


def _grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows [N, K], sorted by expert, times their matrices [E, K, M]; expert e's rows end at ends[e], int32 [E]."""
    product: Tensor = torch._grouped_mm(x, weights, offs=ends)
    return product


def _product_by_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """The same, an expert at a time."""
    out, start = x.new_empty(len(x), weights.shape[-1]), 0
    for expert, end in enumerate(ends.tolist()):
        if start < end:
            torch.mm(x[start:end], weights[expert], out=out[start:end])
        start = end
    return out


def _has_grouped_product(weights: Tensor) -> bool:
    """Whether the device multiplies groups of rows without asking the host how many: bfloat16, from Hopper on."""
    if weights.device.type != "cuda" or weights.dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    aligned = all(size % 8 == 0 for size in weights.shape[1:])  # 16 bytes
    return aligned and torch.cuda.get_device_capability(weights.device) >= (9, 0)
