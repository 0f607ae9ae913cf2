"""FlashInfer as this plugin uses it: imported late, and the one place that touches what is not its public API."""

from __future__ import annotations

from functools import cache
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

from torch import Tensor

from headstock import HeadstockError

INSIDE = (
    "_float_workspace_buffer", "_int_workspace_buffer", "_pin_memory_int_workspace_buffer", "_cached_module",
    "_plan_info", "_kv_indices_buf", "_causal",
)  # fmt: skip
"""What a planned wrapper of latent attention holds, itself or in the backend that it planned."""


class Library:
    """FlashInfer's two wrappers, in the forms that 0.6.18 and 0.7 want, and what is known of the inside of the first.

    Its planner is called directly after the first plan, which loads the kernel. The wrapper's own plan copies page
    numbers, and from 0.7 on waits for checks and allocates device memory each time; its planner does neither.
    """

    def __init__(self, mla: ModuleType | Any, prefill: ModuleType | Any):
        self.absorbed_wrapper = mla.BatchMLAPagedAttentionWrapper
        self.expanded_wrapper = prefill.BatchPrefillWithRaggedKVCacheWrapper
        self._metadata = getattr(mla, "MLAPlanMetadata", None)  # from 0.7 on

    def plan(
        self, wrapper: Any, queries: Tensor, indptr: Tensor, indices: Tensor, lens: Tensor, *, lse: bool, **numbers: Any
    ) -> None:
        """The wrapper's own plan, over pages in compressed rows."""
        if self._metadata is None:
            wrapper.plan(queries, indptr, indices, lens, **numbers)
            return
        wrapper.plan(
            metadata=self._metadata.csr(queries, indptr, indices, lens), query_layout="split", kv_cache_layout="split",
            lse_mode="base2" if lse else "none", **numbers,
        )  # fmt: skip

    def run(
        self, wrapper: Any, q: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], out: Tensor, lse: Tensor | None
    ) -> None:
        """Runs what was planned; from 0.7 on lse has to be given where, and only where, it was announced."""
        if self._metadata is None:
            wrapper.run(*q, *keys, out=out, lse=lse, return_lse=lse is not None)
        else:
            wrapper.run(query=q, kv_cache=keys, out=out, lse=lse, return_lse=lse is not None)

    @staticmethod
    def inside(wrapper: Any, ints: Tensor, pinned: Tensor) -> Any:
        """What holds the plan of `wrapper`, which has planned once, from now on in `ints` by way of `pinned`.

        Raises HeadstockError where this release keeps plans elsewhere.
        """
        holder = getattr(wrapper, "_planned_backend", None) or wrapper
        if missing := [name for name in INSIDE if not hasattr(holder, name)]:
            raise HeadstockError(
                f"FlashInfer {version()} is not as expected inside", given=f"no {', '.join(missing)}",
                works="0.6.18.post1 and 0.7.0", type="pip install flashinfer-python==0.7.0",
            )  # fmt: skip
        for each in (wrapper, holder):  # from 0.7 on both refer to the large buffers of its own
            each._int_workspace_buffer, each._pin_memory_int_workspace_buffer = ints, pinned
        return holder

    @staticmethod
    def plan_inside(
        holder: Any, queries: Tensor, starts: Tensor, indices: Tensor, lens: Tensor, heads: int, rank: int, causal: bool
    ) -> tuple[int, ...]:
        """Plans anew; returns what a captured graph holds of the plan by value.

        Row i reads its pages from indices[starts[i]] on, as many as lens[i] keys fill; arrays are int32 on the host but
        for `indices`.
        """
        buffers = [getattr(holder, name) for name in INSIDE[:3]]
        holder._kv_indices_buf, holder._causal = indices, causal
        holder._plan_info = plan = holder._cached_module.plan(*buffers, queries, starts, lens, heads, rank, causal)
        return tuple(int(number) for number in plan)


@cache
def library() -> Library:
    """The installed FlashInfer. Importing it takes seconds, so this is called when a backend starts and no earlier."""
    return Library(import_module("flashinfer.mla"), import_module("flashinfer.prefill"))


def version() -> str:
    """The installed version of FlashInfer, found without importing it; empty where there is none."""
    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return ""
