"""The memory plan: every byte the runner is going to hold, known before any weight is read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headstock.device import Device
from headstock.errors import MemoryPlanError
from headstock.models.config import ModelConfig

HEADROOM = {"cpu": 0.5}
"""The share of what is free after the weights that the cache may take at most, by device type; 0.9 elsewhere."""

GIB = 1 << 30

LAYER_BYTES, LIBRARY_BYTES = 1 << 16, 192 << 20
"""What the driver keeps for the kernels of a layer in a graph, and libraries for the streams that capture and refresh.
On an H200 graphs of up to 128 rows, four sizes with a level and without, took 192 MiB with Llama-3-8B, 103 of them the
libraries', and 232 with DeepSeek-V2-Lite, 100 of them theirs; and 172, nearly all theirs, with a model of three layers
that was the first to use its stream."""
PAGE_BYTES = 64
"""For each page of the longest row, times rows: its number in two tables, in levels, and in what is worked out of them.
At page size 16 and 32768 tokens the buffers take 14, and where torch's operations refresh them their results 44."""


class WindowPlan(NamedTuple):
    """The pages of the layers with one window, the null page included, and the bytes of each over those layers."""

    num_pages: int
    bytes_per_page: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and the number of KV pages they leave room for, the null page included.

    Pages are counted in tokens of whole requests. Layers without a window keep all of them, `bytes_per_page` over those
    layers; `windows` has what layers with one keep, by the window. `expanded_page` is what a page of latent vectors
    would take as keys and values of all heads, 0 where that is what it holds; `expansion` what a step takes to make
    these of some of them, for as long as a layer attends to them.
    """

    weights: int
    scratch: int
    state: int
    bytes_per_page: int
    page_size: int
    num_pages: int
    windows: Mapping[int, WindowPlan] = field(default_factory=dict)
    graphs: int = 0
    expanded_page: int = 0
    expansion: int = 0

    @property
    def kv_cache(self) -> int:
        """Bytes of the KV cache."""
        return _kv_bytes(self.num_pages, self.bytes_per_page, self.windows)

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache holds."""
        return (self.num_pages - 1) * self.page_size

    def lines(self) -> list[str]:
        """The plan for people, a line per purpose."""
        parts = [
            ("weights", self.weights), ("workspaces", self.scratch + self.state), ("graphs", self.graphs),
            ("expansion", self.expansion), ("KV cache", self.kv_cache),
        ]  # fmt: skip
        lines = [f"{name:<11}{size / GIB:8.3f} GiB" for name, size in parts if size]
        lines.append(f"{'':<11}{self.kv_tokens} tokens in {self.num_pages - 1} pages of {self.page_size}")
        if self.expanded_page:
            own, expanded = (size // self.page_size for size in (self.bytes_per_page, self.expanded_page))
            lines.append(f"{'':<11}{own} bytes per token; keys and values of all heads would take {expanded}")
        kept = ((window, plan.num_pages - 1) for window, plan in self.windows.items())
        return [*lines, *(f"{'':<11}window {window}: the last of them in {pages} pages" for window, pages in kept)]


def _kv_bytes(num_pages: int, bytes_per_page: int, windows: Mapping[int, WindowPlan]) -> int:
    """Bytes of a cache of so many pages, of which a window needs no more than it is planned to."""
    own = (min(num_pages, plan.num_pages) * plan.bytes_per_page for plan in windows.values())
    return num_pages * bytes_per_page + sum(own)


def plan_memory(
    device: Device,
    *,
    weights: int,
    scratch: int,
    state: int,
    bytes_per_page: int,
    page_size: int,
    wanted_tokens: int,
    least_tokens: int,
    kv_tokens: int | None = None,
    windows: Mapping[int, WindowPlan] | None = None,
    graphs: int = 0,
    expanded_page: int = 0,
    expansion: int = 0,
) -> MemoryPlan:
    """Sizes the KV cache: `kv_tokens` where the user fixed it, else `wanted_tokens` or what free memory allows.

    `windows` have the most pages that layers with a window can use. `least_tokens` is the smallest cache worth starting
    with. Raises MemoryPlanError, naming the sizes, when that or the weights do not fit.
    """
    fixed = weights + scratch + state + graphs + expansion
    free = device.free_memory()
    if weights >= free:
        raise MemoryPlanError(
            "the weights do not fit into the free memory",
            given=f"{weights / GIB:.2f} GiB, {free / GIB:.2f} GiB free",
            works="a smaller model, a narrower dtype, or a device with more memory",
        )
    share = HEADROOM.get(device.torch.type, 0.9)
    room = int(max(free - fixed, 0) * share)
    windows = windows or {}
    wanted = -(-max(wanted_tokens, kv_tokens or 0) // page_size) + 1
    fitting = bisect_right(range(1, wanted + 1), room, key=lambda pages: _kv_bytes(pages, bytes_per_page, windows))
    pages = fitting if kv_tokens is None else -(-kv_tokens // page_size) + 1
    kept = {w: plan._replace(num_pages=max(min(plan.num_pages, pages), 1)) for w, plan in windows.items()}
    plan = MemoryPlan(weights, scratch, state, bytes_per_page, page_size, pages, kept, graphs, expanded_page, expansion)
    if plan.kv_tokens < least_tokens:
        raise MemoryPlanError(
            "the KV cache is too small to serve a single token" if least_tokens == 1 else "the KV cache is too small",
            given=f"{max(plan.kv_tokens, 0)} tokens; {free / GIB:.2f} GiB free, {fixed / GIB:.2f} GiB for the rest",
            works=f"at least {least_tokens} tokens",
            type=f"--kv-tokens {least_tokens}",
        )
    if plan.kv_cache > free - fixed:
        raise MemoryPlanError(
            "the KV cache does not fit into the free memory",
            given=f"{plan.kv_cache / GIB:.2f} GiB, {max(free - fixed, 0) / GIB:.2f} GiB free beside the weights",
            works=f"at most {max(fitting - 1, 0) * page_size} tokens",
            type="--kv-tokens N",
        )
    return plan


def graph_bytes(config: ModelConfig, itemsize: int, sizes: Sequence[int], pages: int) -> int:
    """Bytes that graphs of these sizes take beside the workspaces, from shapes: an estimate, which captures measure.

    The largest size's activations, whose memory the others use again; its logits, twice; the kernels' arguments; and
    tables of rows of up to so many `pages`.
    """
    if not sizes:
        return 0
    rows = max(sizes)
    heads, mla, moe = config.num_heads + 2 * config.num_kv_heads, config.mla, config.moe
    attention = heads * config.head_dim if mla is None else config.num_heads * (config.head_dim + mla.latent_dim)
    experts = 0 if moe is None else moe.num_experts * moe.intermediate_size
    row = 4 * config.hidden_size + 3 * (attention + max(config.intermediate_size, experts)) + 2 * config.vocab_size
    return rows * (row * itemsize + pages * PAGE_BYTES) + len(sizes) * config.num_layers * LAYER_BYTES + LIBRARY_BYTES
