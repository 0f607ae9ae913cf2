"""A stand-in for FlashInfer on a CPU: it checks what its wrappers are told, and computes from nothing else.

Signatures are those of FlashInfer 0.6.18 and 0.7.0, as far as they are used (`python signatures.py` compares them with
an installed one). A plan is worked out as FlashInfer's planner does it, so that a workspace which is too small
overflows here too, and is left in the int workspace; a run reads it there, and refuses to attend with buffers that say
something else than its plan. What FlashInfer leaves undefined comes out as nonsense: rows that see no key, and merged
empty states.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from planner import Allocator, Shape, plan_cuda_cores, plan_fa2, plan_fa3
from torch import Tensor

from headstock import Offer
from headstock_flashinfer import CAPABILITIES
from headstock_flashinfer.accessor import Library
from headstock_flashinfer.backend import FlashInferAttention

NOTHING = -50000.0
"""FlashInfer's log-sum-exp of a row that sees no key, and its score of a key that is not to be seen, before scaling."""
TILE = 128
"""Keys that a kernel takes at a time, at most; what is past the last one is not to be seen."""
NONSENSE = 7.0
HEAD_DIMS = {(64, 64), (128, 128), (256, 256), (192, 128)}
FLOATS = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SMALL = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "compute_capability": 90}
"""A shape for problems that FlashInfer has kernels for."""
calls: list[tuple[str, dict]] = []
"""Every full plan, by its wrapper, with what it was told."""


def host(name: str, x: Tensor, length: int | None = None) -> list[int]:
    assert x.dtype == torch.int32, f"{name} is {x.dtype}, FlashInfer reads int32"
    assert x.dim() == 1, f"{name} has {x.dim()} dimensions"
    assert x.is_contiguous(), f"{name} is strided"
    assert length is None or len(x) == length, f"{name} has {len(x)} entries, not {length}"
    return x.tolist()


def rising(name: str, indptr: list[int]) -> list[int]:
    assert indptr[0] == 0, f"{name} begins with {indptr[0]}"
    assert all(a <= b for a, b in pairwise(indptr)), f"{name} falls: {indptr}"
    return indptr


class Told:
    """What both prefill wrappers and the decode wrapper have in common: workspaces, the plan, and the run."""

    def _start(self, workspace: Tensor, layout: str, graph: bool, backend: str):
        assert layout == "NHD", "views are in logical order"
        assert backend in ("fa2", "fa3"), f"the kernel is left to FlashInfer: {backend}"
        self._float_workspace_buffer, self.device = workspace, workspace.device
        self._int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = self._int_workspace_buffer.clone()
        self._use_cuda_graph, self._backend, self._rows, self._plan_info = graph, backend, None, None
        self._rounds = backend == "fa2"

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        for buffer in (float_workspace_buffer, int_workspace_buffer):
            assert buffer.data_ptr() % 16 == 0
        self._float_workspace_buffer, self._int_workspace_buffer = float_workspace_buffer, int_workspace_buffer
        self._pin_memory_int_workspace_buffer = torch.empty_like(int_workspace_buffer)

    def _numbers(self, heads, kv_heads, dims, page, q_data_type, kv_data_type, window_left, logits_soft_cap, sm_scale):
        assert heads % kv_heads == 0
        assert dims in HEAD_DIMS, f"heads of {dims} were not shown to work"
        assert q_data_type in FLOATS
        assert kv_data_type == q_data_type or (kv_data_type in FP8 and self._backend == "fa2"), kv_data_type
        assert isinstance(window_left, int)
        assert window_left >= -1
        self.heads, self.kv_heads, self.dims, self.page = heads, kv_heads, dims, page
        self.q_dtype, self.kv_dtype = q_data_type, kv_data_type
        self.window, self.cap = window_left, logits_soft_cap or 0.0
        self.scale = sm_scale if sm_scale is not None else dims[0] ** -0.5

    def _schedule(self, queries, indptr, lens, causal, fixed=-1, uniform=0, mask=False):
        """Plans as FlashInfer does in the end: by a function of its module, which is given everything."""
        self.causal = causal
        tokens = int(queries[-1])
        if self._use_cuda_graph:
            self._rows = self._rows or tokens
            assert tokens <= self._rows, "more rows than the graph was planned for"
        arguments = [
            self._float_workspace_buffer, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer, queries,
            indptr, torch.tensor(lens, dtype=torch.int32), self._rows or tokens, len(lens), self.heads, self.kv_heads,
            self.page, self._use_cuda_graph, *self.dims, causal, self.window,
        ]  # fmt: skip
        if self._backend == "fa3":
            assert not mask, "fa3 takes no custom mask"
            assert fixed == -1, "fa3 takes no fixed split"
            self._cached_module = SimpleNamespace(plan=plan_sm90)
        else:
            arguments += [fixed, False, 0, uniform]
            self._cached_module = SimpleNamespace(plan=plan_prefill)
        self._plan_info = self._cached_module.plan(*arguments)

    def _attend(self, q, k, v, indptr, indices, last, queries, out, lse, return_lse, k_scale, mask=None):
        assert self._plan_info is not None, "run before plan"
        assert q.dtype == self.q_dtype
        assert k.dtype == v.dtype == self.kv_dtype, f"{k.dtype} was not planned for"
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert q.shape[1:] == (self.heads, self.dims[0]), q.shape
        assert k.shape[-2:] == (self.kv_heads, self.dims[0])
        assert v.shape[-2:] == (self.kv_heads, self.dims[1])
        assert out.shape == (*q.shape[:2], self.dims[1])
        assert out.dtype == q.dtype
        assert out.is_contiguous(), "fa2 writes as if the output were contiguous"
        assert (lse is not None) == return_lse
        if lse is not None:
            assert lse.shape == q.shape[:2]
            assert lse.dtype == torch.float32
            assert lse.is_contiguous()
        scale = self.scale * (1.0 if k_scale is None else k_scale)
        page = 0 if indices is None else self.page
        assert self._backend == "fa2" or len(q) > 0, "no tensor map of no queries"
        assert self._backend == "fa2" or indices is not None or len(k) > 0, "no tensor map of no keys"
        attend(
            q, k, v, queries, indptr, indices, last, self._int_workspace_buffer, mask, out, lse, page, scale, self.cap,
            self.window, self.causal, self._rounds,
        )  # fmt: skip


class BatchDecodeWithPagedKVCacheWrapper(Told):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False,
        paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend="auto",
        jit_args=None,
    ):  # fmt: skip
        self._start(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self.use_tensor_cores, self._n, self._rounds = use_tensor_cores, None, use_tensor_cores
        if use_cuda_graph:
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, window_left=-1,
        logits_soft_cap=None, q_data_type="float16", kv_data_type=None, sm_scale=None, fixed_split_size=None,
        q_len_per_req=1,
    ):  # fmt: skip
        self._check(indptr, indices, last_page_len, page_size, q_len_per_req)
        if self._use_cuda_graph:
            assert len(last_page_len) == len(self._paged_kv_last_page_len_buf), "the batch size of a graph is fixed"
            self._paged_kv_indptr_buf.copy_(indptr)
            self._paged_kv_last_page_len_buf.copy_(last_page_len)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
        else:
            assert len(indices) >= int(indptr[-1]), "fewer page numbers than pages"
            self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr.clone(), indices
            self._paged_kv_last_page_len_buf = last_page_len.clone()
        self._numbers(
            num_qo_heads, num_kv_heads, (head_dim, head_dim), page_size, q_data_type, kv_data_type, window_left,
            logits_soft_cap, sm_scale,
        )  # fmt: skip
        self._plan(indptr, last_page_len, fixed_split_size, q_len_per_req)

    def _check(self, indptr, indices, last_page_len, page_size, q_len_per_req):
        rows = len(last_page_len)
        pages = rising("indptr", host("indptr", indptr, rows + 1))
        last = host("last_page_len", last_page_len, rows)
        assert indices.dtype == torch.int32
        assert all((n == 0) == (b == a) for n, a, b in zip(last, pages, pages[1:], strict=False)), (last, pages)
        assert max(last) <= page_size
        lens = seq_lens(pages, last, page_size)
        assert q_len_per_req == 1 or min(lens) >= q_len_per_req, "fewer keys than queries"
        assert not self._use_cuda_graph or self._n in (None, q_len_per_req), "another query length than captured"
        if not self.use_tensor_cores:
            assert q_len_per_req == 1

    def _plan(self, indptr, last_page_len, fixed_split_size, n):
        lens, self._n = seq_lens(indptr.tolist(), last_page_len.tolist(), self.page), n
        calls.append(("decode", {"lens": lens, "n": n, "graph": self._use_cuda_graph, "split": fixed_split_size}))
        self._queries = torch.arange(len(lens) + 1, dtype=torch.int32) * n
        if self.use_tensor_cores:
            self._schedule(self._queries, indptr, lens, n > 1, fixed_split_size or -1, n if n > 1 else 0)
            return
        assert fixed_split_size is None, "only tensor cores take a fixed split"
        self.causal, self._cached_module = False, SimpleNamespace(plan=plan_decode)
        self._plan_info = self._cached_module.plan(
            self._float_workspace_buffer, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer, indptr,
            len(lens), self.heads, self.kv_heads, self.page, self._use_cuda_graph, self.window, self.cap, *self.dims,
            torch.empty(0, dtype=self.q_dtype), torch.empty(0, dtype=self.kv_dtype),
        )  # fmt: skip

    def run(self, q, paged_kv_cache, *, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False):
        assert len(q) == (len(self._paged_kv_indptr_buf) - 1) * self._n, "q is not what was planned for"
        k, v = paged_kv_cache
        assert self.use_tensor_cores or k.stride() == v.stride(), "CUDA cores want equal strides"
        pages = (self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf)
        self._attend(q, k, v, *pages, self._queries, out, lse, return_lse, k_scale)


def workspaces(floats, ints, pinned) -> tuple[Allocator, Allocator]:
    assert floats.dtype == ints.dtype == pinned.dtype == torch.uint8
    assert len(ints) == len(pinned)
    return Allocator(ints), Allocator(floats)


def leave(ints: Tensor, queries: list[int], indptr: Tensor) -> None:
    """The rows in the int workspace, by pages, which is what a run finds there."""
    told = torch.tensor([len(queries) - 1, *queries, *indptr.diff().tolist()], dtype=torch.int32)
    ints[: 4 * len(told)].view(torch.int32).copy_(told)


def plan_prefill(
    floats, ints, pinned, qo_indptr, kv_indptr, kv_lens, total, rows, heads, kv_heads, page, graph, dim, v_dim, causal,
    window, fixed, disabled, colocated, uniform,
):  # fmt: skip
    """The planner of fa2, which is given lengths and does not read them."""
    queries = rising("qo_indptr", host("qo_indptr", qo_indptr, rows + 1))
    pages = rising("kv_indptr", host("kv_indptr", kv_indptr, rows + 1))
    assert rows > 0, "FlashInfer divides by the number of rows"
    assert len(host("kv_lens", kv_lens)) == rows
    assert queries[-1] <= total
    assert (causal, disabled, colocated) == (bool(causal), False, 0)
    shape, counts = Shape(heads, kv_heads, v_dim, page, window), [b - a for a, b in pairwise(pages)]
    info = plan_fa2(*workspaces(floats, ints, pinned), shape, queries, counts, total if graph else None, fixed, uniform)
    leave(ints, queries, kv_indptr)
    return info


def plan_sm90(
    floats, ints, pinned, qo_indptr, kv_indptr, kv_lens, total, rows, heads, kv_heads, page, graph, dim, v_dim, causal,
    window,
):  # fmt: skip
    queries = rising("qo_indptr", host("qo_indptr", qo_indptr, rows + 1))
    own, _ = workspaces(floats, ints, pinned)
    info = plan_fa3(own, Shape(heads, kv_heads, v_dim, page, window), queries, total if graph else None)
    leave(ints, queries, kv_indptr)
    return info


def plan_decode(
    floats, ints, pinned, indptr, rows, heads, kv_heads, page, graph, window, cap, dim, v_dim, empty_q, empty_kv
):  # fmt: skip
    """The planner of decode on CUDA cores."""
    assert heads // kv_heads in (1, 2, 3, 4, 6, 8), "Unsupported group_size"
    assert empty_q.dtype in FLOATS
    assert empty_kv.dtype in (*FLOATS, *FP8)
    assert isinstance(cap, float)
    counts = [b - a for a, b in pairwise(rising("indptr", host("indptr", indptr, rows + 1)))]
    shape = Shape(heads, kv_heads, v_dim, page, window)
    info = plan_cuda_cores(*workspaces(floats, ints, pinned), shape, counts, graph)
    leave(ints, list(range(rows + 1)), indptr)
    return info


class BatchPrefillWithPagedKVCacheWrapper(Told):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        self._start(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._queries, self._indptr, self._indices = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf
        self._last = paged_kv_last_page_len_buf
        if use_cuda_graph:
            assert len(qo_indptr_buf) == len(paged_kv_indptr_buf) == len(paged_kv_last_page_len_buf) + 1

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        sm_scale=None, window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
        fixed_split_size=None,
    ):  # fmt: skip
        rows = len(qo_indptr) - 1
        queries = rising("qo_indptr", host("qo_indptr", qo_indptr))
        pages = rising("paged_kv_indptr", host("paged_kv_indptr", paged_kv_indptr, rows + 1))
        last = host("last_page_len", paged_kv_last_page_len, rows)
        assert paged_kv_indices.dtype == torch.int32
        assert len(paged_kv_indices) >= pages[-1], "fewer page numbers than pages"
        assert all((n == 0) == (b == a) for n, a, b in zip(last, pages, pages[1:], strict=False)), (last, pages)
        assert max(last) <= page_size
        lens = seq_lens(pages, last, page_size)
        if self._use_cuda_graph:
            assert rows == len(self._last), "the batch size of a graph is fixed"
            assert custom_mask is None
            self._queries.copy_(qo_indptr)
            self._indptr.copy_(paged_kv_indptr)
            self._last.copy_(paged_kv_last_page_len)
            self._indices[: len(paged_kv_indices)].copy_(paged_kv_indices)
        else:
            self._queries, self._indptr = qo_indptr.clone(), paged_kv_indptr.clone()
            self._indices, self._last = paged_kv_indices, paged_kv_last_page_len.clone()
        if custom_mask is not None:
            pairs = sum((b - a) * n for a, b, n in zip(queries, queries[1:], lens, strict=False))
            assert custom_mask.dtype == torch.bool
            assert custom_mask.shape == (pairs,), "a mask of another size is read out of bounds"
        self._mask = custom_mask
        dims = (head_dim_qk, head_dim_vo or head_dim_qk)
        self._numbers(
            num_qo_heads, num_kv_heads, dims, page_size, q_data_type, kv_data_type, window_left, logits_soft_cap,
            sm_scale,
        )  # fmt: skip
        told = {"queries": queries, "lens": lens, "causal": causal, "kernel": self._backend}
        calls.append(("paged", told | {"mask": custom_mask is not None, "graph": self._use_cuda_graph}))
        self._schedule(qo_indptr, paged_kv_indptr, lens, causal, mask=custom_mask is not None)

    def run(self, q, paged_kv_cache, *, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False):
        k, v = paged_kv_cache
        assert self._backend == "fa2" or k.stride()[:2] == v.stride()[:2], "fa3 wants equal strides"
        pages = (self._indptr, self._indices, self._last)
        self._attend(q, k, v, *pages, self._queries, out, lse, return_lse, k_scale, self._mask)


class BatchPrefillWithRaggedKVCacheWrapper(Told):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None, kv_indptr_buf=None,
        custom_mask_buf=None, mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        self._start(float_workspace_buffer, kv_layout, use_cuda_graph, backend)

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, window_left=-1, logits_soft_cap=None, sm_scale=None,
        q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        queries = rising("qo_indptr", host("qo_indptr", qo_indptr))
        keys = rising("kv_indptr", host("kv_indptr", kv_indptr, len(queries)))
        self._queries, self._indptr = qo_indptr.clone(), kv_indptr.clone()
        dims = (head_dim_qk, head_dim_vo or head_dim_qk)
        self._numbers(
            num_qo_heads, num_kv_heads, dims, 1, q_data_type, kv_data_type, window_left, logits_soft_cap, sm_scale
        )  # fmt: skip
        lens = [b - a for a, b in pairwise(keys)]
        calls.append(("ragged", {"queries": queries, "lens": lens, "causal": causal, "kernel": self._backend}))
        self._schedule(qo_indptr, kv_indptr, lens, causal)

    def run(self, q, k, v, *, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False):
        assert k_scale is None, "ignored without a word up to 0.7"
        assert len(q) == int(self._queries[-1]), "q is not what was planned for"
        assert len(k) == len(v) == int(self._indptr[-1]), "keys are not what was planned for"
        self._attend(q, k, v, self._indptr, None, None, self._queries, out, lse, return_lse, None)


def seq_lens(indptr: list[int], last: list[int], page: int) -> list[int]:
    return [max(b - a - 1, 0) * page + n for a, b, n in zip(indptr, indptr[1:], last, strict=False)]


@torch.library.custom_op("flashinfer_standin::attend", mutates_args=("out", "lse"))
def attend(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, indptr: Tensor, indices: Tensor | None, last: Tensor | None,
    schedule: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor | None, page: int, scale: float, cap: float,
    window: int, causal: bool, rounds: bool,
) -> None:  # fmt: skip
    """A kernel: one operator, so that a recorded graph runs it again, with the plan that is then in the workspace.

    With `rounds`, as fa2 does, the weights of the softmax are 16-bit numbers before they are summed.
    """
    starts, at = queries.tolist(), indptr.tolist()
    rows = len(starts) - 1
    planned = schedule[: 4 * (2 * rows + 2)].view(torch.int32).tolist()
    lens = [b - a for a, b in pairwise(at)] if last is None else seq_lens(at, last.tolist(), page)
    found = [rows, *starts, *(b - a for a, b in pairwise(at))]
    assert planned == found, f"planned for {planned}, run on {found}: a stale plan"
    group, bits = q.shape[1] // k.shape[-2], 0
    for row in range(rows):
        first, stop, length = starts[row], starts[row + 1], lens[row]
        if first == stop:
            continue
        if indices is None:
            keys, values = k[at[row] : at[row + 1]], v[at[row] : at[row + 1]]
        else:
            pages = indices[at[row] : at[row + 1]].long()
            keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
        new = stop - first
        queried, position = torch.arange(new)[:, None], torch.arange(length)
        sees = torch.ones(new, length, dtype=torch.bool)
        if mask is not None:
            sees = mask[bits : bits + new * length].view(new, length).clone()
            bits += new * length
        elif causal:
            sees &= position <= length - new + queried
        if window >= 0:
            sees &= position + window >= length - new + queried
        blind, rest = ~sees.any(1), -length % TILE
        keys, values = (F.pad(x.float().repeat_interleave(group, 1), (0, 0, 0, 0, 0, rest)) for x in (keys, values))
        logits = torch.einsum("qhd,khd->hqk", q[first:stop].float(), keys) * scale
        if cap:
            logits = cap * torch.tanh(logits / cap)
        logits = logits.masked_fill(~F.pad(sees, (0, rest)), NOTHING if cap else NOTHING * scale)
        most = logits.amax(-1, keepdim=True) if length else logits.new_zeros(*logits.shape[:2], 1)
        weights = torch.exp(logits - most)
        weights = weights.to(q.dtype).float() if rounds else weights
        total = weights.sum(-1)
        result = torch.einsum("hqk,khd->qhd", weights / total[..., None], values)
        total = torch.log(total) + most[..., 0]
        out[first:stop] = result.masked_fill(blind[:, None, None], NONSENSE).to(out.dtype)
        if lse is not None:
            lse[first:stop] = (total.T / math.log(2)).masked_fill(blind[:, None], NOTHING)


def merge_state_in_place(v, s, v_other, s_other, mask=None):
    for x, y in ((v, v_other), (s, s_other)):
        assert x.is_contiguous()
        assert y.is_contiguous()
        assert x.shape == y.shape
        assert x.dtype == y.dtype
    assert s.dtype == torch.float32
    assert v.shape[-1] in (64, 128, 256, 512)
    most = torch.maximum(s, s_other)
    mine, its = torch.exp2(s - most), torch.exp2(s_other - most)
    total = mine + its
    v.copy_((v.float() * mine[..., None] + v_other.float() * its[..., None]) / total[..., None])
    s.copy_(most + torch.log2(total))


def append_paged_kv_cache(
    append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len,
    kv_layout="NHD",
):  # fmt: skip
    k, v = paged_kv_cache
    assert kv_layout == "NHD"
    assert k.stride() == v.stride(), "k/v strides must be identical"
    assert append_key.dtype == append_value.dtype == k.dtype, "nothing is converted"
    assert append_key.stride(-1) == append_value.stride(-1) == 1
    assert append_key.shape == append_value.shape == (len(batch_indices), *k.shape[2:])
    for x in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        assert x.dtype == torch.int32
        assert x.is_contiguous()
    assert len(positions) == len(append_key)
    assert len(kv_indptr) == len(kv_last_page_len) + 1
    page = k.shape[1]
    pages = kv_indices[(kv_indptr[batch_indices.long()] + torch.div(positions, page, rounding_mode="floor")).long()]
    k[pages.long(), (positions % page).long()] = append_key
    v[pages.long(), (positions % page).long()] = append_value


class StandinAttention(FlashInferAttention):
    """The plugin's backend with this module in the place of FlashInfer, on CPUs."""

    @staticmethod
    def library() -> Library:
        return Library(sys.modules[__name__])

    @staticmethod
    def on_its_device(spec):
        """A CPU stands for an H200."""
        return replace(spec, compute_capability=spec.compute_capability or 90, num_sms=spec.num_sms or 132)


OFFER = Offer(
    name="flashinfer-standin",
    backend=StandinAttention,
    capabilities=tuple(record.model_copy(update={"devices": frozenset({"cpu"})}) for record in CAPABILITIES),
    options="headstock_flashinfer.options:Options",
)
StandinAttention.offer = OFFER
