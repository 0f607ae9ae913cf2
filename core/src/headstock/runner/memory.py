"""The memory plan: every byte the runner is going to hold, known before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from headstock.device import Device
from headstock.errors import MemoryPlanError

HEADROOM = {"cpu": 0.5}
"""The share of what is free after the weights that the cache may take at most, by device type; 0.9 elsewhere."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and the number of KV pages they leave room for, the null page included."""

    weights: int
    scratch: int
    state: int
    bytes_per_page: int  # over all layers
    page_size: int
    num_pages: int

    @property
    def kv_cache(self) -> int:
        """Bytes of the KV cache."""
        return self.num_pages * self.bytes_per_page

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache holds."""
        return (self.num_pages - 1) * self.page_size

    def lines(self) -> list[str]:
        """The plan for people, a line per purpose."""
        parts = [("weights", self.weights), ("workspaces", self.scratch + self.state), ("KV cache", self.kv_cache)]
        lines = [f"{name:<11}{size / GIB:8.3f} GiB" for name, size in parts if size]
        return [*lines, f"{'':<11}{self.kv_tokens} tokens in {self.num_pages - 1} pages of {self.page_size}"]


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
) -> MemoryPlan:
    """Sizes the KV cache: `kv_tokens` where the user fixed it, else `wanted_tokens` or what free memory allows.

    `least_tokens` is the smallest cache worth starting with. Raises MemoryPlanError, naming the sizes, when that does
    not fit.
    """
    fixed = weights + scratch + state
    free = device.free_memory()
    share = HEADROOM.get(device.torch.type, 0.9)
    room = int(max(free - fixed, 0) * share)
    pages = -(-(wanted_tokens if kv_tokens is None else kv_tokens) // page_size) + 1
    if kv_tokens is None:
        pages = min(pages, room // bytes_per_page)
    plan = MemoryPlan(weights, scratch, state, bytes_per_page, page_size, pages)
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
            works=f"at most {max(room // bytes_per_page - 1, 0) * page_size} tokens",
            type="--kv-tokens N",
        )
    return plan
