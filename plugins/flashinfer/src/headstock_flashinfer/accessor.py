"""FlashInfer as this plugin uses it: imported late, and the one place that touches what is not its public API."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

DISTRIBUTION = "flashinfer-python"
INSIDE = ("_cached_module", "_pin_memory_int_workspace_buffer", "_paged_kv_indptr_buf", "_paged_kv_indices_buf",
          "_paged_kv_last_page_len_buf", "_plan_info")  # fmt: skip
"""What of a wrapper's inside planning again goes by."""


class Again:
    """The planner of a planned wrapper, fa2 or on CUDA cores, with the arguments that its plan gave it.

    FlashInfer's `plan` calls the same function in the end. What it does before takes several times as long: it copies
    to buffers that are written already, finds its module, and looks for the longest row one tensor element at a time.
    `queries` [B+1] and `indptr` [B+1], the offsets of rows in tokens and in pages, are to be written before a call.
    """

    def __init__(
        self, wrapper: Any, kernel: str, told: Mapping[str, Any], queries: Tensor, indptr: Tensor, *, uniform: int,
        graph: bool,
    ):  # fmt: skip
        host = [queries.clone(), indptr.clone(), torch.zeros(len(indptr) - 1, dtype=torch.int32)]
        self.queries, self.indptr, _ = (each.numpy() for each in host)  # fa2 takes lengths too, and plans by pages
        self._wrapper, self._plan = wrapper, wrapper._cached_module.plan
        memory = (
            wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer,
        )  # fmt: skip
        rows, dim, v_dim = len(indptr) - 1, told["head_dim"], told["v_head_dim"]
        shape, window = (told["num_qo_heads"], told["num_kv_heads"], told["page_size"], graph), told["window_left"]
        if kernel == "cuda-cores":
            empty = [torch.empty(0, dtype=told[name]) for name in ("q_data_type", "kv_data_type")]
            cap = told["logits_soft_cap"] or 0.0
            self._arguments = [*memory, host[1], rows, *shape, window, cap, dim, v_dim, *empty]
        else:
            split = told.get("fixed_split_size") or -1
            self._arguments = [
                *memory, *host, int(queries[-1]), rows, *shape, dim, v_dim, uniform > 1, window, split, False, 0,
                uniform if uniform > 1 else 0,
            ]  # fmt: skip

    def __call__(self) -> None:
        """Plans for what `queries` and `indptr` hold now."""
        self._wrapper._plan_info = self._plan(*self._arguments)

    def read(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> None:
        """Lets the wrapper read these pages, int32 on its device."""
        wrapper = self._wrapper
        wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf = indptr, indices
        wrapper._paged_kv_last_page_len_buf = last_page_len


class Library:
    """A FlashInfer module: its wrappers and functions, and what this plugin knows of their inside.

    `plan_info` is what a wrapper's last plan fixed, which a captured graph holds by value; None where this release
    keeps it elsewhere, and then nothing guards a replay against a plan that differs from the captured one. `again`
    plans a wrapper as its last plan did; None where this release's planners take something else.
    """

    def __init__(self, module: ModuleType | Any):
        self.module = module
        self.decode_wrapper = module.BatchDecodeWithPagedKVCacheWrapper
        self.paged_wrapper = module.BatchPrefillWithPagedKVCacheWrapper
        self.ragged_wrapper = module.BatchPrefillWithRaggedKVCacheWrapper
        self.append: Callable[..., None] = module.append_paged_kv_cache
        self.merge: Callable[[Tensor, Tensor, Tensor, Tensor], None] = module.merge_state_in_place

    @staticmethod
    def plan_info(wrapper: Any) -> tuple[int, ...] | None:
        """The numbers that the last plan of `wrapper` fixed, opaque but comparable; None where they are not found."""
        found = getattr(wrapper, "_plan_info", None)
        return None if found is None else tuple(int(number) for number in found)

    @classmethod
    def again(
        cls, wrapper: Any, kernel: str, told: Mapping[str, Any], queries: Tensor, indptr: Tensor, *, uniform: int,
        graph: bool,
    ) -> Again | None:  # fmt: skip
        """How to plan a wrapper again that has just been planned for these, int32 on the host.

        It is tried at once: a planner that takes other arguments, or that fixes other numbers, is none to call.
        """
        planned = cls.plan_info(wrapper)
        try:
            again = Again(wrapper, kernel, told, queries, indptr, uniform=uniform, graph=graph)
            again()
        except (AttributeError, TypeError, RuntimeError):
            return None
        return again if planned is not None and cls.plan_info(wrapper) == planned else None

    @classmethod
    def figures(cls, wrapper: Any) -> dict[str, int | bool]:
        """What of the last plan says something to people: rows of a query tile, blocks, and whether keys are split."""
        info = cls.plan_info(wrapper) or ()
        match len(info):
            case 15:  # fa2
                return {"tile": info[3], "blocks": info[0], "splits": bool(info[14])}
            case 10:  # decode on CUDA cores
                return {"blocks": info[0], "splits": bool(info[9])}
        return {}

    def lacks(self) -> list[str]:
        """What this release does not have where it is looked for, and what follows, in words."""
        source, found = inspect.getsource(self.decode_wrapper), []
        if any(name not in source for name in INSIDE):
            found.append("no planner to call: every batch is planned in full")
        if "_plan_info" not in source:
            found.append("no plan to compare: replays are not guarded against one that is not the captured one")
        return found


@cache
def library() -> Library:
    """The installed FlashInfer. Importing it takes seconds, so this is called when a backend starts and no earlier."""
    import_module("flashinfer.decode")
    return Library(import_module("flashinfer"))


def inside() -> str:
    """What `Library.lacks` says of the installed FlashInfer, or why that cannot be told, in one line."""
    try:
        return "; ".join(library().lacks()) or "as expected"
    except Exception as error:  # whatever an import may raise
        return f"unknown, FlashInfer does not import: {error}".splitlines()[0]


def version() -> str:
    """The installed version of FlashInfer, found without importing it; empty where there is none."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return ""
