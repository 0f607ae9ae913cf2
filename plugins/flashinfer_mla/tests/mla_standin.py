"""A stand-in for FlashInfer's latent attention on a CPU: it checks what it is told, and computes from nothing else.

Two releases, `V618` and `V70`, as far as they are used: they differ in how a wrapper is planned and run, and in where
it keeps its plan. A plan is worked out as FlashInfer's planner does it, so that a workspace which is too small
overflows here too, and is left in the int workspace, where a run reads it as a kernel does. What FlashInfer gets wrong
is refused or comes out wrong: causal rows of fewer keys than queries, heads that do not divide a tile, the log-sum-exp
of fa2, and expanded rows that see no key.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import Tensor

from headstock import Offer
from headstock_flashinfer_mla import CAPABILITIES
from headstock_flashinfer_mla.accessor import Library
from headstock_flashinfer_mla.backend import FlashInferMLA

SMS, ITEMS = 132, 16384
NOTHING = -50000.0
"""The log-sum-exp that expanded rows without a key are left with."""
HALF = (torch.float16, torch.bfloat16)
calls: list[tuple[str, dict]] = []
"""Every plan, by its kind, with what it was told."""


def ceil(a: int, b: int) -> int:
    return -(-a // b)


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


def aligned(sizes: list[int]) -> list[int]:
    """Offsets of pieces of these sizes, and their end, as FlashInfer's allocator has them."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + ceil(size, 16) * 16)
    return offsets


def mla_plan(
    float_size: int, int_size: int, queries: list[int], lens: list[int], heads: int, rank: int, causal: bool
) -> list[int]:
    """MLAPlan of `scheduler.cuh`: what it takes, and the numbers that it fixes."""
    packed = [(b - a) * heads for a, b in pairwise(queries)]
    assert packed, "FlashInfer divides by the number of rows"
    cluster = 2 if sum(packed) // len(packed) > 64 else 1
    clusters, tile = SMS // cluster, 64 * cluster
    if causal:
        assert tile % heads == 0 or max(packed) <= tile, f"{heads} heads do not divide {tile}: a key would be dropped"

    def seen(row: int, number: int) -> int:
        tiles, new = ceil(packed[row], tile), queries[row + 1] - queries[row]
        if not causal or number + 1 == tiles:
            return lens[row]
        return max(min(lens[row] - new + ceil((number + 1) * tile, heads), lens[row]), 0)

    tiles = [(row, number) for row in range(len(lens)) for number in range(ceil(packed[row], tile))]
    share = max(ceil(sum(seen(*each) for each in tiles), clusters), 1)
    limit = next((size for most, size in ((8, 32), (16, 64), (32, 128), (64, 192)) if share <= most), 0)
    limit = limit or ceil(share, 256) * 256
    items = sum(max(ceil(seen(*each), limit), 1) for each in tiles)
    split = [each for each in tiles if seen(*each) > limit]
    partial = sum(ceil(seen(*each), limit) * min(tile, packed[each[0]] - each[1] * tile) for each in split)
    assert items <= ITEMS, f"{items} work items are written past the end"
    assert partial <= 2 * clusters * tile
    ints = aligned([4 * ITEMS] * 3 + [4 * SMS] * 5 + [4 * ITEMS] * 6)
    floats = aligned([4 * clusters * tile * rank, 8 * clusters * tile])
    assert ints[-1] <= int_size, f"Buffer overflow: {ints[-1]} bytes of ints"
    assert floats[-1] <= float_size, f"Buffer overflow: {floats[-1]} bytes of floats"
    return [cluster, clusters, *ints[:-1], *floats[:-1]]


class Module:
    """A compiled module of one kernel."""

    def __init__(self, kernel: str, q_dtype, kv_dtype, rank: int, rope: int):
        assert q_dtype in HALF
        assert kv_dtype == q_dtype
        assert rank in (256, 512)
        assert rope % 64 == 0
        self.kernel, self.dtype, self.rank, self.rope = kernel, q_dtype, rank, rope

    def plan(self, floats, ints, pinned, qo_indptr, kv_indptr, kv_len, num_heads, head_dim_o, causal):
        for buffer in (floats, ints):
            assert buffer.dtype == torch.uint8
            assert buffer.data_ptr() % 16 == 0
            assert buffer.is_contiguous()
        assert pinned.device.type == "cpu"
        assert len(pinned) >= len(ints)
        assert head_dim_o == self.rank
        queries = rising("qo_indptr", host("qo_indptr", qo_indptr))
        starts = rising("kv_indptr", host("kv_indptr", kv_indptr, len(queries)))
        lens = host("kv_len", kv_len, len(queries) - 1)
        assert all(n >= 0 for n in lens)
        for new, n in zip((b - a for a, b in pairwise(queries)), lens, strict=True):
            assert not causal or n == 0 or n >= new, "fewer keys than queries: the kernel's bounds wrap around"
        info = mla_plan(len(floats), len(ints), queries, lens, num_heads, head_dim_o, causal)
        calls.append(("absorbed", {"queries": queries, "starts": starts, "lens": lens, "causal": causal}))
        told = torch.tensor([len(lens), *queries, *starts, *lens], dtype=torch.int32)
        ints[: 4 * len(told)].view(torch.int32).copy_(told)
        return info

    def run(self, floats, ints, info, q, q_pe, ckv, kpe, indices, out, lse, causal, heads, page, scale):
        for x, dim in ((q, self.rank), (q_pe, self.rope), (ckv, self.rank), (kpe, self.rope), (out, self.rank)):
            assert x.dtype == self.dtype
            assert x.shape[-1] == dim
            assert x.stride(-1) == 1
            assert x.data_ptr() % 16 == 0, "kernels load 16 bytes at a time"
            assert all(stride % 8 == 0 for stride in x.stride()[:-1])
        assert q.shape[:2] == q_pe.shape[:2] == out.shape[:2]
        assert q.shape[1] == heads
        assert ckv.shape[:2] == kpe.shape[:2]
        assert ckv.shape[1] == page
        assert len(info) == 18
        if lse is not None:
            assert lse.shape == q.shape[:2]
            assert lse.dtype == torch.float32
            assert lse.is_contiguous()
        absorbed(q, q_pe, ckv, kpe, indices, ints, out, lse, scale, causal, self.kernel == "fa2")


class Holder:
    """What has a plan: the wrapper itself, or from 0.7 on a backend inside."""

    def __init__(self, floats: Tensor, kernel: str):
        assert kernel in ("fa2", "fa3"), f"the kernel is left to FlashInfer: {kernel}"
        self._float_workspace_buffer, self._backend = floats, kernel
        self._int_workspace_buffer = torch.empty(1 << 20, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(1 << 20, dtype=torch.uint8)

    def _plan(self, queries, indptr, indices, lens, *, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
              sm_scale, q_data_type, kv_data_type):  # fmt: skip
        pages = rising("kv_indptr", host("kv_indptr", indptr))
        assert [b - a for a, b in pairwise(pages)] == [ceil(n, page_size) for n in lens.tolist()]
        assert len(indices) >= pages[-1]
        self._cached_module = Module(self._backend, q_data_type, kv_data_type, head_dim_ckv, head_dim_kpe)
        self._kv_indices_buf, self._causal = indices, causal
        self.heads, self.page, self.scale = num_heads, page_size, sm_scale
        self._plan_info = self._cached_module.plan(
            self._float_workspace_buffer, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer, queries,
            indptr, lens, num_heads, head_dim_ckv, causal,
        )  # fmt: skip

    def _run(self, q, q_pe, ckv, kpe, out, lse):
        self._cached_module.run(
            self._float_workspace_buffer, self._int_workspace_buffer, self._plan_info, q, q_pe, ckv, kpe,
            self._kv_indices_buf, out, lse, self._causal, self.heads, self.page, self.scale,
        )  # fmt: skip


class Wrapper618(Holder):
    def __init__(self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
                 kv_len_arr=None, backend="auto"):  # fmt: skip
        super().__init__(float_workspace_buffer, backend)

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
             causal, sm_scale, q_data_type, kv_data_type):  # fmt: skip
        self._plan(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads=num_heads, head_dim_ckv=head_dim_ckv,
            head_dim_kpe=head_dim_kpe, page_size=page_size, causal=causal, sm_scale=sm_scale, q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )  # fmt: skip

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False):
        assert return_lse == (lse is not None)
        self._run(q_nope, q_pe, ckv_cache, kpe_cache, out, lse)


class Wrapper70:
    def __init__(self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None,
                 kv_len_arr=None, backend="auto"):  # fmt: skip
        self._floats, self._kernel, self._planned_backend = float_workspace_buffer, backend, None

    def plan(self, *, metadata, query_layout="packed", kv_cache_layout="packed", lse_mode="none", **numbers):
        assert (query_layout, kv_cache_layout) == ("split", "split")
        assert lse_mode in ("none", "base2")
        self._lse_mode, self._planned_backend = lse_mode, Holder(self._floats, self._kernel)
        self._planned_backend._plan(*metadata, **numbers)

    def run(self, *, query, kv_cache, out=None, lse=None, return_lse=False):
        assert (lse is not None) == return_lse == (self._lse_mode == "base2"), "MLA planned run argument mismatch"
        self._planned_backend._run(*query, *kv_cache, out, lse)


class RaggedWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD", backend="auto"):
        assert (kv_layout, backend) == ("NHD", "fa3")

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        assert int_workspace_buffer.data_ptr() % 16 == 0
        self._ints = int_workspace_buffer

    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, custom_mask=None,
             packed_custom_mask=None, causal=False, window_left=-1, logits_soft_cap=None, sm_scale=None,
             q_data_type="float16", kv_data_type=None):  # fmt: skip
        queries = rising("qo_indptr", host("qo_indptr", qo_indptr))
        keys = rising("kv_indptr", host("kv_indptr", kv_indptr, len(queries)))
        assert (head_dim_qk, head_dim_vo) == (192, 128)
        assert q_data_type in HALF
        assert kv_data_type == q_data_type
        tiles = sum(ceil(b - a, 128) for a, b in pairwise(queries))
        shared = ceil(queries[-1], 128) + len(queries) - 2 > 4096
        needed = aligned([4 * tiles * (1 if shared else num_qo_heads)] * 7 + [4 * (SMS + 1)])[-1]
        assert needed <= len(self._ints), f"Buffer overflow: {needed} bytes of ints"
        calls.append(("expanded", {"queries": queries, "keys": keys, "causal": causal}))
        told = torch.tensor([len(queries) - 1, *queries, *keys], dtype=torch.int32)
        self._ints[: 4 * len(told)].view(torch.int32).copy_(told)
        self._heads, self._told = (num_qo_heads, num_kv_heads), (sm_scale, causal, q_data_type)

    def run(self, q, k, v, *, out=None, lse=None, return_lse=False):
        assert return_lse == (lse is not None)
        scale, causal, dtype = self._told
        assert q.dtype == k.dtype == v.dtype == out.dtype == dtype
        assert out.is_contiguous()
        assert lse is None or lse.is_contiguous()
        assert (q.shape[1], k.shape[1]) == self._heads
        assert k.shape[:2] == v.shape[:2]
        expanded(q, k, v, self._ints, out, lse, scale, causal)


@torch.library.custom_op("flashinfer_mla_standin::absorbed", mutates_args=("out", "lse"))
def absorbed(
    q: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, indices: Tensor, ints: Tensor, out: Tensor, lse: Tensor | None,
    scale: float, causal: bool, rounded: bool,
) -> None:  # fmt: skip
    """A kernel: one operator, so that a recorded graph runs it again, with the plan that is then in the workspace."""
    rows = int(ints[:4].view(torch.int32))
    told = ints[: 4 * (1 + 2 * (rows + 1) + rows)].view(torch.int32).tolist()
    queries, starts, lens = told[1 : rows + 2], told[rows + 2 : 2 * rows + 3], told[2 * rows + 3 :]
    assert queries[-1] == len(q), "q is not what was planned for: an illegal access"
    page = ckv.shape[1]
    for row, length in enumerate(lens):
        pages = indices[starts[row] : starts[row] + ceil(length, page)].long()
        keys = torch.cat((ckv[pages], kpe[pages]), -1).flatten(0, 1)[:length, None]
        part = slice(queries[row], queries[row + 1])
        state = attend(torch.cat((q[part], q_pe[part]), -1), keys, ckv[pages].flatten(0, 1)[:length, None], scale,
                       causal, rounded)  # fmt: skip
        out[part] = state[0].to(out.dtype)
        if lse is not None:
            lse[part] = state[1]


@torch.library.custom_op("flashinfer_mla_standin::expanded", mutates_args=("out", "lse"))
def expanded(
    q: Tensor, k: Tensor, v: Tensor, ints: Tensor, out: Tensor, lse: Tensor | None, scale: float, causal: bool
) -> None:
    rows = int(ints[:4].view(torch.int32))
    told = ints[: 4 * (1 + 2 * (rows + 1))].view(torch.int32).tolist()
    queries, keys = told[1 : rows + 2], told[rows + 2 :]
    assert (queries[-1], keys[-1]) == (len(q), len(k)), "not what was planned for"
    for (first, stop), (begin, end) in zip(pairwise(queries), pairwise(keys), strict=True):
        part, sum_ = attend(q[first:stop], k[begin:end], v[begin:end], scale, causal, False)
        out[first:stop] = part.to(out.dtype)
        if lse is not None:
            lse[first:stop] = sum_.masked_fill(sum_ == -math.inf, NOTHING)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, rounded: bool) -> tuple[Tensor, Tensor]:
    """Attention of one row in float32, and its log-sum-exp in base 2, of rounded weights where so asked."""
    new, length, dtype = len(q), len(k), q.dtype
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if causal:
        sees = torch.arange(length) <= length - new + torch.arange(new)[:, None]
        logits = logits.masked_fill(~sees, -math.inf)
    most = logits.amax(-1, keepdim=True) if length else logits.new_zeros(*logits.shape[:2], 1)
    weights = torch.exp(logits - most.clamp(min=-1e30))
    total = (weights.to(dtype).float() if rounded else weights).sum(-1)
    out = torch.einsum("hqk,khd->qhd", weights, v) / total.T[..., None].clamp(1e-30)
    return out, ((torch.log(total) + most[..., 0]) / math.log(2)).T.masked_fill(total.T == 0, -math.inf)


PREFILL = SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=RaggedWrapper)
V618 = Library(SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper618), PREFILL)
V70 = Library(
    SimpleNamespace(
        BatchMLAPagedAttentionWrapper=Wrapper70,
        MLAPlanMetadata=SimpleNamespace(csr=lambda *arrays: tuple(arrays)),
    ),
    PREFILL,
)


class StandinMLA(FlashInferMLA):
    """The plugin's backend with this module in the place of FlashInfer, on CPUs that pass for an H200."""

    release = V70

    @classmethod
    def library(cls) -> Library:
        return cls.release

    @classmethod
    def completed(cls, spec):
        return replace(spec, compute_capability=spec.compute_capability or 90, num_sms=spec.num_sms or SMS)


class Older(StandinMLA):
    """The same with 0.6.18."""

    release = V618


def offered(backend: type[StandinMLA], name: str) -> Offer:
    on_cpus = tuple(record.model_copy(update={"devices": frozenset({"cpu"})}) for record in CAPABILITIES)
    offer = Offer(
        name=name, backend=backend, capabilities=on_cpus, options="headstock_flashinfer_mla.choice:Options"
    )  # fmt: skip
    backend.offer = offer
    return offer


OFFER, OLDER = offered(StandinMLA, "flashinfer-mla-standin"), offered(Older, "flashinfer-mla-standin-older")
