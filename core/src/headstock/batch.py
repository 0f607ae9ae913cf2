"""One forward's batch as a backend sees it: lengths, positions, page table, slots, and what is derived from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstock.backend import HostLengths, Phase
from headstock.errors import HeadstockError

Part = Literal["all", "prefix", "own"]
Lengths = Sequence[int] | Tensor
Ints = NDArray[np.int64]
"""What the host computes with: on arrays this small, a torch operation costs several times as much as numpy's."""


@dataclass(frozen=True, slots=True)
class PagesCSR:
    """A page table in compressed rows, FlashInfer's terms: int32, device tensors with their host copies.

    page_indptr [B+1]; page_indices [sum of pages], device only; last_page_len [B] in 1..page_size, 0 for a row of no
    page. A page shared by several rows stands once for each.
    """

    page_indptr: Tensor
    page_indices: Tensor
    last_page_len: Tensor
    page_indptr_cpu: Tensor
    last_page_len_cpu: Tensor


@dataclass(frozen=True, slots=True)
class SharedLevel:
    """One level of shared prefixes: consecutive runs of rows, each run with the whole pages that it shares.

    row_indptr [S+1] partitions all B rows into S segments, page_indptr [S+1] delimits each segment's pages in
    page_indices; an unshared segment has none. int32, device tensors with their host copies.
    """

    row_indptr: Tensor
    page_indptr: Tensor
    page_indices: Tensor
    row_indptr_cpu: Tensor
    page_indptr_cpu: Tensor

    @classmethod
    def of(cls, runs: Iterable[tuple[int, Sequence[int]]], device: torch.device | str | None = None) -> SharedLevel:
        """The level of these runs, each so many rows and the pages that they share."""
        rows, pages = zip(*runs, strict=True)
        row_indptr, page_indptr = (_int32(_indptr(lens)) for lens in (rows, [len(each) for each in pages]))
        indices = torch.tensor([page for each in pages for page in each], dtype=torch.int32)
        on_device = [each.to(device, non_blocking=True) for each in (row_indptr, page_indptr, indices)]
        return cls(on_device[0], on_device[1], on_device[2], row_indptr, page_indptr)


@dataclass(slots=True, eq=False, kw_only=True)
class ForwardBatch:
    """One step's batch for one layer group and instance; read-only to a backend but for `metadata`.

    B rows (requests) and T tokens, padding included; made by `from_lengths`. Padding follows real rows: a padded row
    has `query_len` tokens, as many keys, the null page 0 and slots inside it.
    """

    phase: Phase
    causal: bool
    graph: Literal["capture", "replay"] | None = None
    num_reqs: int  # B
    num_tokens: int  # T
    num_real_reqs: int  # host planning only
    query_len: int  # uniform query length n in DECODE, else 0
    max_query_len: int  # upper bound, frozen in graphs
    max_seq_len: int  # upper bound, frozen in graphs
    page_size: int  # 0 for ragged
    query_indptr: Tensor  # int32 [B+1]
    seq_lens: Tensor  # int32 [B]: keys in this group's table, new tokens included
    query_indptr_cpu: Tensor | None
    seq_lens_cpu: Tensor | None
    positions: Tensor  # int64 [T], absolute
    page_table: Tensor | None = None  # int32 [B, W], unused entries 0; None for ragged
    out_cache_loc: Tensor | None = None  # int64 [T], page × page_size + offset; None for ragged and cross
    kv_indptr: Tensor | None = None  # int32 [B+1], ragged only
    kv_indptr_cpu: Tensor | None = None
    shared_levels: tuple[SharedLevel, ...] = ()  # coarse to fine
    query_mask: Tensor | None = None  # bool [Σ q²], new × new tokens of each row, row-major
    mask_indptr: Tensor | None = None  # int64 [B+1]
    metadata: Any = None  # the backend's own plan for this batch
    _csr: dict[Part, PagesCSR] = field(default_factory=dict)

    @classmethod
    def from_lengths(
        cls,
        query_lens: Lengths,
        seq_lens: Lengths,
        page_table: Tensor | None,
        page_size: int = 0,
        *,
        phase: Phase | None = None,
        causal: bool = True,
        write: bool = True,
        positions: Tensor | None = None,
        device: torch.device | str | None = None,
        host_lengths: HostLengths = "exact",
        max_seq_len: int | None = None,
        num_real_reqs: int | None = None,
        query_mask: Tensor | None = None,
        shared_levels: tuple[SharedLevel, ...] = (),
    ) -> ForwardBatch:
        """A batch from what the host knows of it; the one public way to make one.

        query_lens [B] new tokens per row, each ≥ 1. seq_lens [B] keys per row in this table, the new ones included (for
        cross attention: the encoder's). page_table int32 [B, W], or None for ragged, where seq_lens are the rows of the
        K and V given. Queries are right-aligned: unless `positions` [T] says otherwise, row b's queries stand at
        seq_lens[b] − query_lens[b] … seq_lens[b] − 1. `write=False` gives no cache slots (cross attention). `phase` is
        "decode" by default when every row has one query token. `host_lengths` below "exact" withholds the host copies.

        Raises HeadstockError when lengths, table and page size do not fit together.
        """
        q_lens, kv_lens = _on_host(query_lens), _on_host(seq_lens)
        _check_lengths(q_lens, kv_lens)
        q_indptr, max_q, max_kv = _indptr(q_lens), int(q_lens.max()), int(kv_lens.max())
        num_reqs, num_tokens = len(q_lens), int(q_indptr[-1])
        if phase is None:
            phase = "decode" if max_q == 1 else "extend"
        if phase == "decode" and num_tokens != num_reqs * max_q:
            raise HeadstockError(
                "a decode batch has one uniform query length", given=q_lens.tolist(), works='phase="extend"'
            )
        if page_table is not None:
            if causal and write:
                _check_aligned(q_lens, kv_lens)
            _check_table(page_table, page_size, num_reqs, max_kv)
        _check_extras(q_lens, max_kv, positions, query_mask, max_seq_len, num_real_reqs)
        if device is None:
            device = page_table.device if page_table is not None else torch.device("cpu")

        # token → its row, and its key index in the row's table
        rows = np.repeat(np.arange(num_reqs), q_lens)
        slots = np.arange(num_tokens) + (kv_lens - q_indptr[1:])[rows]
        if positions is None:
            positions = to_device(device, slots)
        loc = None
        if page_table is not None and write:
            pages = page_table.take(to_device(device, rows * page_table.shape[1] + slots // page_size))
            loc = torch.add(to_device(device, slots % page_size), pages, alpha=page_size)
        exact = host_lengths == "exact"
        q_indptr_cpu, kv_lens_cpu = _int32(q_indptr), _int32(kv_lens)
        kv_indptr_cpu = _int32(_indptr(kv_lens)) if page_table is None else None
        return cls(
            phase=phase,
            causal=causal,
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_real_reqs=num_reqs if num_real_reqs is None else num_real_reqs,
            query_len=max_q if phase == "decode" else 0,
            max_query_len=max_q,
            max_seq_len=max_kv if max_seq_len is None else max_seq_len,
            page_size=page_size if page_table is not None else 0,
            query_indptr=q_indptr_cpu.to(device, non_blocking=True),
            seq_lens=kv_lens_cpu.to(device, non_blocking=True),
            query_indptr_cpu=q_indptr_cpu if exact else None,
            seq_lens_cpu=kv_lens_cpu if exact else None,
            positions=positions,
            page_table=page_table,
            out_cache_loc=loc,
            kv_indptr=None if kv_indptr_cpu is None else kv_indptr_cpu.to(device, non_blocking=True),
            kv_indptr_cpu=kv_indptr_cpu if exact else None,
            shared_levels=shared_levels,
            query_mask=query_mask,
            mask_indptr=None if query_mask is None else to_device(device, _indptr(q_lens * q_lens)),
        )

    @property
    def prefix_lens(self) -> Tensor:
        """Keys cached before this step, int32 [B]; negative where a row has fewer keys than queries."""
        return self.seq_lens - self.query_indptr.diff()

    def csr(self, part: Part = "all") -> PagesCSR:
        """The page table in compressed rows: all keys, the prefix before this step, or what no shared level holds.

        Made once per batch from exact host lengths. "own" leaves out the pages of the shared levels, which come first
        in a row's table.
        """
        if part not in self._csr:
            self._csr[part] = self._make_csr(part)
        return self._csr[part]

    def _make_csr(self, part: Part) -> PagesCSR:
        if self.page_table is None or self.seq_lens_cpu is None or self.query_indptr_cpu is None:
            raise HeadstockError(
                "a page table in compressed rows needs pages and exact host lengths",
                works='capabilities with host_lengths="exact" and a paged or mla batch',
            )
        lens, first = _on_host(self.seq_lens_cpu), np.zeros(self.num_reqs, dtype=np.int64)
        if part == "prefix":
            lens = np.maximum(lens - np.diff(_on_host(self.query_indptr_cpu)), 0)
        elif part == "own":
            for level in self.shared_levels:
                pages, runs = np.diff(_on_host(level.page_indptr_cpu)), np.diff(_on_host(level.row_indptr_cpu))
                first += np.repeat(pages, runs)
            lens = lens - first * self.page_size
        pages = -(-lens // self.page_size)
        indptr = _indptr(pages)
        rows = np.repeat(np.arange(self.num_reqs), pages)
        columns = np.arange(indptr[-1]) + (first - indptr[:-1])[rows]
        device = self.page_table.device
        indptr_cpu = _int32(indptr)
        last_cpu = _int32(np.where(pages > 0, lens - (pages - 1) * self.page_size, 0))
        return PagesCSR(
            page_indptr=indptr_cpu.to(device, non_blocking=True),
            page_indices=self.page_table[to_device(device, rows), to_device(device, columns)],
            last_page_len=last_cpu.to(device, non_blocking=True),
            page_indptr_cpu=indptr_cpu,
            last_page_len_cpu=last_cpu,
        )


def _on_host(lengths: Lengths) -> Ints:
    return np.asarray(lengths.cpu() if isinstance(lengths, Tensor) else lengths, dtype=np.int64)


def to_device(device: torch.device | str, values: Ints) -> Tensor:
    """A host array as a tensor on `device`, copied there without waiting; on a CPU the two share their memory."""
    return torch.from_numpy(values).to(device, non_blocking=True)


def _int32(values: Ints) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


def _indptr(lengths: Ints | Sequence[int]) -> Ints:
    """Lengths [B] → offsets [B+1], starting at 0."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.add.accumulate(lengths, out=offsets[1:])
    return offsets


def _check_lengths(q_lens: Ints, kv_lens: Ints) -> None:
    if len(q_lens) == 0 or len(q_lens) != len(kv_lens) or q_lens.min() < 1 or kv_lens.min() < 0:
        raise HeadstockError(
            "a batch needs one query length ≥ 1 and one key length ≥ 0 per row",
            given=f"{q_lens.tolist()} queries, {kv_lens.tolist()} keys",
        )


def _check_aligned(q_lens: Ints, kv_lens: Ints) -> None:
    if (kv_lens < q_lens).any():
        raise HeadstockError(
            "new tokens are keys too: each row needs at least as many keys as queries",
            given=f"{q_lens.tolist()} queries, {kv_lens.tolist()} keys",
            works="write=False where nothing is cached",
        )


def _check_table(table: Tensor, page_size: int, num_reqs: int, longest: int) -> None:
    if page_size < 1 or table.dtype != torch.int32 or table.shape[0] != num_reqs:
        raise HeadstockError(
            "a page table is int32 [rows, pages] with a page size ≥ 1",
            given=f"{table.dtype} {list(table.shape)}, page size {page_size}, {num_reqs} rows",
        )
    if longest > table.shape[1] * page_size:
        raise HeadstockError(
            "the page table is too narrow",
            given=f"{table.shape[1]} pages of {page_size} per row for {longest} keys",
        )


def _check_extras(
    q_lens: Ints,
    longest: int,
    positions: Tensor | None,
    query_mask: Tensor | None,
    max_seq_len: int | None,
    num_real_reqs: int | None,
) -> None:
    if positions is not None and positions.shape != (tokens := int(q_lens.sum()),):
        raise HeadstockError("positions are one per token", given=list(positions.shape), works=f"[{tokens}]")
    if query_mask is not None and query_mask.shape != (pairs := int((q_lens * q_lens).sum()),):
        raise HeadstockError(
            "a query mask is flat, new × new tokens per row", given=list(query_mask.shape), works=f"[{pairs}]"
        )
    if max_seq_len is not None and max_seq_len < longest:
        raise HeadstockError("max_seq_len is an upper bound", given=f"{max_seq_len} for {longest} keys")
    if num_real_reqs is not None and not 0 <= num_real_reqs <= len(q_lens):
        raise HeadstockError("num_real_reqs counts rows of the batch", given=f"{num_real_reqs} of {len(q_lens)}")
