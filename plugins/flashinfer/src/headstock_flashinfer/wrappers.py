"""FlashInfer's wrappers, made for one spec: planned and run with everything of the spec that is fixed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstock import AttentionLayer, BackendSpec, ForwardBatch
from headstock_flashinfer.accessor import Again, Library
from headstock_flashinfer.choice import Choice, Prefill
from headstock_flashinfer.memory import Buffers, LevelBuffers

W = TypeVar("W", bound="Wrapper")
Counts = NDArray[np.int32]
LAYOUT = "NHD"
"""The order of a view's dimensions, which is logical: where the bytes lie is told by strides."""
MASKED, HIDDEN = 5e4, 128.0
"""FlashInfer puts −MASKED in the place of scores that are not to be seen, before it scales them: with a small scale of
keys they would weigh something. The scale goes to the queries instead where less than HIDDEN would be left of it."""


class Staging:
    """Says when a wrapper's pinned memory may be filled again: once the device has read what the last plan left."""

    def __init__(self, device: str):
        self._event = torch.cuda.Event() if torch.device(device).type == "cuda" else None  # type: ignore[no-untyped-call]
        self._used = False

    def wait(self) -> None:
        """Waits for the last plan's copies, if there was one."""
        if self._event is not None and self._used:
            self._event.synchronize()

    def mark(self) -> None:
        """To be called after a plan."""
        if self._event is not None:
            self._event.record()
            self._used = True


class Wrapper:
    """One of FlashInfer's wrappers over an int workspace of its own; `kernel` names what it runs."""

    def __init__(self, maker: Wrappers, inner: Any, ints: Tensor, kernel: str):
        self.maker, self.inner, self.kernel, self.staging = maker, inner, kernel, Staging(maker.spec.device)
        self.again: Again | None = None
        self._kept = False
        inner.reset_workspace_buffer(maker.scratch, ints)

    @property
    def info(self) -> tuple[int, ...] | None:
        """What the last plan fixed, as far as it can be known."""
        return self.maker.library.plan_info(self.inner)

    def holds(self, indptr: Counts, queries: Counts | None = None) -> bool:
        """Whether its last plan is that for rows of these pages, int32 [B+1], and of these queries.

        Kernels of fa2 and on CUDA cores are planned by pages; how full the last one is they read themselves.
        """
        again = self.again
        if again is None or not self._kept or not np.array_equal(indptr, again.indptr):
            return False
        return queries is None or np.array_equal(queries, again.queries)

    def plan_again(self, indptr: Counts, queries: Counts | None = None) -> None:
        """Plans other pages, and other queries where they are given, for as many rows as the last plan had."""
        again = self.again
        assert again is not None, "asked for where it is there"
        self._kept = False
        self.staging.wait()
        again.indptr[:] = indptr
        if queries is not None:
            again.queries[:] = queries
        again()
        self.staging.mark()
        self._kept = True

    def drop(self) -> None:
        """Forgets what the last plan was for, where it cannot be used."""
        self._kept = False

    def run(
        self, q: Tensor, keys: tuple[Tensor, Tensor], layer: AttentionLayer, out: Tensor, lse: Tensor | None
    ) -> None:
        """Attends as planned to the keys and values of pages; `out` and `lse` are contiguous, and lse in base 2."""
        k_scale = layer.k_scale
        if MASKED * self.maker.spec.scale * k_scale < HIDDEN:
            shrink = 2.0 ** math.floor(math.log2(k_scale))  # which rounds nothing that counts
            q, k_scale = q * shrink, k_scale / shrink
        self.inner.run(q, keys, k_scale=k_scale, out=out, lse=lse, return_lse=lse is not None)
        if layer.v_scale != 1.0:
            out.mul_(layer.v_scale)


class Decode(Wrapper):
    """The decode wrapper: rows of `query_len` tokens each, causal among themselves."""

    query_len = 0

    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, query_len: int, graph: bool = False) -> None:
        """Plans rows of pages: indptr int32 [B+1] and last_page_len [B] on the host, indices on the device."""
        maker, rows = self.maker, len(last_page_len)
        self.staging.wait()
        self.inner.plan(
            indptr, indices, last_page_len, **maker.pages, **maker.numbers, **maker.splits, q_len_per_req=query_len,
        )  # fmt: skip
        self.query_len, queries = query_len, torch.arange(rows + 1, dtype=torch.int32) * query_len
        self.again = maker.library.again(
            self.inner, self.kernel, maker.told, queries, indptr, uniform=query_len, graph=graph
        )
        self.staging.mark()
        self._kept = True

    def plan_rows(self, batch: ForwardBatch, part: Literal["all", "own"]) -> None:
        """Plans an eager batch: in full only where there are not as many rows of as many tokens as the last time."""
        csr, query_len, again = batch.csr(part), batch.query_len, self.again
        if again is None or (len(again.indptr), self.query_len) != (len(csr.page_indptr_cpu), query_len):
            self.plan(csr.page_indptr_cpu, csr.page_indices, csr.last_page_len_cpu, query_len)
            return
        again.read(csr.page_indptr, csr.page_indices, csr.last_page_len)
        self.plan_again(csr.page_indptr_cpu.numpy())


class Paged(Wrapper):
    """The paged prefill wrapper: rows of any lengths, all keys in pages."""

    def plan(
        self, query_indptr: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *, causal: bool,
        mask: Tensor | None = None, graph: bool = False,
    ) -> None:  # fmt: skip
        """Plans as `Decode.plan`, with query_indptr int32 [B+1] on the host.

        `mask` has a bool for each query and key of each row, flat, on the device, windows included.
        """
        maker, pages = self.maker, dict(self.maker.pages)
        numbers = maker.numbers if mask is None else maker.numbers | maker.whole_window
        self.staging.wait()
        self.inner.plan(
            query_indptr, indptr, indices, last_page_len, head_dim_qk=pages.pop("head_dim"),
            head_dim_vo=maker.spec.v_head_dim, custom_mask=mask, causal=causal, **pages, **numbers,
        )  # fmt: skip
        if graph:
            self.again = maker.library.again(
                self.inner, self.kernel, maker.told, query_indptr, indptr, uniform=0, graph=True
            )
        self.staging.mark()
        self._kept = True


class Ragged(Wrapper):
    """The ragged prefill wrapper: keys that lie one after the other, in no cache. It ignores scales."""

    def plan(self, query_indptr: Tensor, key_indptr: Tensor, *, causal: bool) -> None:
        """Plans rows of queries and keys, both int32 [B+1] on the host."""
        pages = self.maker.pages
        self.staging.wait()
        self.inner.plan(
            query_indptr, key_indptr, pages["num_qo_heads"], pages["num_kv_heads"], pages["head_dim"],
            head_dim_vo=self.maker.spec.v_head_dim, causal=causal, **self.maker.numbers,
        )  # fmt: skip
        self.staging.mark()

    def run(
        self, q: Tensor, keys: tuple[Tensor, Tensor], layer: AttentionLayer, out: Tensor, lse: Tensor | None
    ) -> None:
        self.inner.run(q, *keys, out=out, lse=lse, return_lse=lse is not None)


class Wrappers:
    """Makes wrappers for one spec over one float workspace, which all of them share: they run one after the other."""

    def __init__(self, spec: BackendSpec, choice: Choice, library: Library, scratch: Tensor, split_pages: int | None):
        self.spec, self.choice, self.library, self.scratch = spec, choice, library, scratch
        self.pages: dict[str, Any] = {
            "num_qo_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "page_size": spec.page_size,
        }
        self.numbers: dict[str, Any] = {
            "sm_scale": spec.scale,
            "window_left": -1 if spec.window is None else spec.window - 1,  # which leaves the position itself out
            "logits_soft_cap": spec.softcap,
            "q_data_type": getattr(torch, spec.dtype),
            "kv_data_type": getattr(torch, spec.kv_dtype),
        }
        # A mask has the window in it, while the module with a window is the one that is compiled.
        self.whole_window: dict[str, Any] = {} if spec.window is None else {"window_left": spec.max_context}
        self.splits: dict[str, Any] = {} if split_pages is None else {"fixed_split_size": split_pages}
        self.told = self.pages | self.numbers | self.splits | {"v_head_dim": spec.v_head_dim}

    def decode(self, ints: Tensor, buffers: Buffers | None = None) -> Decode:
        """A decode wrapper; for a graph with the buffers that it is to read."""
        graph = {} if buffers is None else {
            "use_cuda_graph": True, "paged_kv_indptr_buffer": buffers.page_indptr,
            "paged_kv_indices_buffer": buffers.page_indices, "paged_kv_last_page_len_buffer": buffers.last_page_len,
        }  # fmt: skip
        kernel, make = self.choice.decode, self.library.decode_wrapper
        inner = make(self.scratch, LAYOUT, use_tensor_cores=kernel == "tensor-cores", backend="fa2", **graph)
        return Decode(self, inner, ints, kernel)

    def paged(self, kernel: Prefill, ints: Tensor, buffers: LevelBuffers | None = None) -> Paged:
        """A paged prefill wrapper; for a level of a graph with the buffers that it is to read."""
        graph = {} if buffers is None else {
            "use_cuda_graph": True, "qo_indptr_buf": buffers.row_indptr, "paged_kv_indptr_buf": buffers.page_indptr,
            "paged_kv_indices_buf": buffers.page_indices, "paged_kv_last_page_len_buf": buffers.last_page_len,
        }  # fmt: skip
        return Paged(self, self.library.paged_wrapper(self.scratch, LAYOUT, backend=kernel, **graph), ints, kernel)

    def ragged(self, ints: Tensor) -> Ragged:
        """A ragged prefill wrapper."""
        kernel = self.choice.ragged
        return Ragged(self, self.library.ragged_wrapper(self.scratch, LAYOUT, backend=kernel), ints, kernel)


class Slot:
    """Room for one eager plan: its int workspaces, and the wrappers over them, made when they are first needed."""

    def __init__(self, make: Wrappers, ints: tuple[Tensor, ...]):
        self._make, self._ints = make, ints
        self._wrappers: dict[tuple[str, int], Wrapper] = {}
        self._owner: ref[object] | None = None
        self.taken = 0

    def decode(self) -> Decode:
        return self._kept("decode", 0, self._make.decode)

    def paged(self, kernel: Prefill, place: int = 0) -> Paged:
        return self._kept(kernel, place, lambda ints: self._make.paged(kernel, ints))

    def ragged(self) -> Ragged:
        return self._kept("ragged", 0, self._make.ragged)

    def _kept(self, kind: str, place: int, make: Callable[[Tensor], W]) -> W:
        if (kind, place) not in self._wrappers:
            self._wrappers[kind, place] = make(self._ints[place])
        return cast(W, self._wrappers[kind, place])

    def give(self, owner: object, turn: int) -> None:
        """Makes it `owner`'s until it is given to another."""
        self._owner, self.taken = ref(owner), turn

    def belongs_to(self, owner: object) -> bool:
        return self._owner is not None and self._owner() is owner

    @property
    def free(self) -> bool:
        """Whether the plan that it was given to is gone."""
        return self._owner is None or self._owner() is None


class Pool:
    """As many slots as plans may be alive at once. A new plan takes a free one, or else the one given longest ago."""

    def __init__(self, make: Wrappers, ints: list[tuple[Tensor, ...]]):
        self._slots = [Slot(make, each) for each in ints]
        self._turn = 0

    def take(self, owner: object) -> Slot:
        """A slot for the plan `owner`; it is free again when that is forgotten."""
        self._turn += 1
        slot = min(self._slots, key=lambda slot: (not slot.free, slot.taken))
        slot.give(owner, self._turn)
        return slot
