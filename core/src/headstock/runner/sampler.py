"""The sampler: the next token of every row of a batch, from its logits and the row's own parameters."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from math import inf, log
from typing import NamedTuple

import torch
from torch import Tensor

from headstock.engine.sampling import SamplingParams
from headstock.fusing import fusing

# The most likely token of a row weighs 2^40. Sums of weights stay under 2^63 up to 2^23 tokens, and what rounds to
# zero was less likely than 10^-12.
ONE = 2.0**40
# Rows are drawn in blocks of about so many logits: on a CPU to stay near its caches (a quarter of the time of one
# block at 32 × 131072), elsewhere to bound the temporaries to some 200 MB.
CPU_BLOCK, DEVICE_BLOCK = 2**19, 2**22
# Parts that a GPU without fused kernels cuts a row of logits into to find its greatest.
COLUMNS = 64


class SamplingRow(NamedTuple):
    """One row of a step: the request's parameters, its seed, and how many tokens it has sampled so far.

    `seed` is `params.seed`, or what the caller drew once for a request that names none; 0 ≤ seed < 2^63.
    """

    params: SamplingParams
    seed: int
    step: int


class Sampled(NamedTuple):
    """The outcome of a step: `tokens` int64 [R] and `failed` bool [R], both on the logits' device.

    A row fails when its logits hold NaN or +inf, or nothing but −inf; its token is a valid id without meaning.
    """

    tokens: Tensor
    failed: Tensor


class Sampler:
    """The sampling of one step: `Sampler(rows, device)`, prepared while the forward runs, is called on its logits.

    Greedy rows take the first of their greatest logits. Every other row is drawn by inverse transform: one uniform
    number per row against the running sum of its weights, in vocabulary order. That number depends on (seed, step)
    alone and the weights are integers, whose sums do not depend on the order of summation, so a row draws the same
    token alone, in any batch, at any position. A filtered token has weight 0 and cannot be drawn.

    With gap = (max − logit) / temperature, in float32, a row keeps the tokens that pass, in this order,
    - top_k: gap ≤ the k-th smallest; ties with it are all kept, as in `transformers`;
    - top_p: the likelier tokens together have less than top_p of what top_k kept; ties are all kept;
    - min_p: probability ≥ min_p × the greatest.
    """

    def __init__(self, rows: Sequence[SamplingRow], device: torch.device | str):
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        self._num_rows, self._num_drawn = len(rows), len(drawn)
        if drawn:
            self._prepare(rows, drawn, device)

    def _prepare(self, rows: Sequence[SamplingRow], drawn: Sequence[int], device: torch.device | str) -> None:
        """Brings the parameters of the rows that are drawn to the device."""
        params = [rows[i].params for i in drawn]
        columns = torch.tensor(
            [
                drawn,
                [uniform(rows[i].seed, rows[i].step) for i in drawn],
                [p.temperature for p in params],
                [p.top_k or inf for p in params],
                [p.top_p for p in params],
                [-log(p.min_p) if p.min_p else inf for p in params],
            ],
            dtype=torch.float64,
        )
        columns = columns.to(device, non_blocking=True).unsqueeze(-1)  # one copy for all of them
        index, self._chance, temperature, self._top_k, self._top_p, max_gap = columns
        self._index = index.squeeze(-1).to(torch.int64)
        limits = torch.finfo(torch.float32)
        self._temperature = temperature.clamp(limits.tiny, limits.max).float()
        self._max_gap = max_gap.float()
        self._max_top_k = max(p.top_k for p in params)
        self._any_top_p = any(p.top_p < 1 for p in params)
        self._any_min_p = any(p.min_p > 0 for p in params)

    def __call__(self, logits: Tensor) -> Sampled:
        """Samples logits [R, vocab], any floating dtype, −inf allowed; row i belongs to `rows[i]`."""
        assert logits.shape[0] == self._num_rows, "one row of logits per sampling row"
        tokens, failed = greedy(logits)
        block = max(1, (CPU_BLOCK if logits.is_cpu else DEVICE_BLOCK) // logits.shape[1])
        for start in range(0, self._num_drawn, block):
            part = slice(start, start + block)
            index = self._index[part]
            running = self.weights(logits, part).cumsum_(-1)
            # The chance has 48 bits and the total at most 63, so the float64 product stays below the total.
            target = (self._chance[part] * running[:, -1:]).to(torch.int64)
            drawn = torch.searchsorted(running, target, right=True).squeeze(-1)
            tokens[index] = torch.where(failed[index], tokens[index], drawn)
        return Sampled(tokens, failed)

    def weights(self, logits: Tensor, part: slice = slice(None)) -> Tensor:
        """The weights int64 [D, vocab] by which the D ≥ 1 rows that are not greedy, or a `part` of them, are drawn."""
        logits = logits[self._index[part]].float()
        gap = (logits.amax(-1, keepdim=True) - logits) / self._temperature[part]
        weight = (torch.exp(-gap) * ONE).to(torch.int64)
        if self._max_top_k:
            weight.masked_fill_(gap > _kth_smallest(gap, self._top_k[part], self._max_top_k), 0)
        if self._any_top_p:
            weight.masked_fill_(gap > _nucleus(gap, weight, self._top_p[part]), 0)
        if self._any_min_p:
            weight.masked_fill_(gap > self._max_gap[part], 0)
        return weight


def greedy(logits: Tensor, kept: Tensor | None = None) -> Sampled:
    """The first of the greatest logits of each row [R, vocab]. It never waits for the device, and can be captured.

    `kept` [R, vocab] takes a copy of the logits on the way.
    """
    if logits.dtype != torch.float64 and logits.stride(-1) == 1 and fusing(logits.device).able:
        from headstock.runner import fused

        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            return Sampled(*fused.greedy(logits, kept))
    if kept is not None:
        kept.copy_(logits)
    rows, size = logits.shape
    if logits.is_cuda and size % COLUMNS == 0:  # a row at a time would leave most of the device idle
        peaks, places = logits.view(rows, COLUMNS, -1).max(-1)
        peak, column = peaks.max(-1, keepdim=True)
        tokens = (column * (size // COLUMNS) + places.gather(-1, column)).squeeze(-1)
        peak = peak.squeeze(-1)
    else:
        peak, tokens = logits.max(-1)
    # max passes NaN on, and inf − inf is NaN; isfinite takes twice the operations
    return Sampled(tokens, (peak - peak).isnan())


def uniform(seed: int, step: int) -> float:
    """The number in [0, 1) that decides token `step` of a request: 48 bits of a hash, the same on every device."""
    digest = blake2b(seed.to_bytes(8, "little") + step.to_bytes(8, "little"), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2**48


def _kth_smallest(gap: Tensor, k: Tensor, max_k: int) -> Tensor:
    """The k-th smallest gap [R, 1] of every row, +inf where k is; k float64 [R, 1], its finite values ≤ max_k."""
    width = min(max_k, gap.shape[1])
    smallest = gap.topk(width, largest=False).values
    kth = smallest.gather(1, (k - 1).clamp(max=width - 1).to(torch.int64))
    return kth.masked_fill(k.isinf(), inf)


def _nucleus(gap: Tensor, weight: Tensor, top_p: Tensor) -> Tensor:
    """The gap [R, 1] up to which the weights of a row first sum to at least top_p of its total.

    A radix select: the bits of a non-negative float32 order as integers do, so three histograms of the weights
    over 11 bits each pin the answer down, exactly. On a CPU that is eight times quicker than sorting the
    vocabulary, and unlike a search among the first few candidates it never waits for the device.
    """
    bins = 2**11
    total = weight.sum(-1, keepdim=True)
    target = (top_p * total).ceil().to(torch.int64).minimum(total)  # float64 may round a large total up
    key = gap.view(torch.int32).to(torch.int64) & 0x7FFFFFFF  # without the sign of −0.0
    prefix = torch.zeros_like(target)
    for shift in (22, 11, 0):
        digit = ((key >> shift) - prefix * bins).clamp_(-1, bins) + 1  # 0: below this prefix, bins + 1: above it
        mass = weight.new_zeros(len(gap), bins + 2).scatter_add_(1, digit, weight).cumsum_(-1)
        prefix = prefix * bins + (mass < target).sum(-1, keepdim=True) - 1
    return prefix.to(torch.int32).view(torch.float32)
