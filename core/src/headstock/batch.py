"""One forward's batch as a backend sees it: lengths, positions, page table, slots, and what is derived from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from headstock.backend import HostLengths, Phase
from headstock.errors import HeadstockError

Part = Literal["all", "prefix", "own"]
Lengths = Sequence[int] | Tensor


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
        q_lens, kv_lens = _int_tensor(query_lens), _int_tensor(seq_lens)
        uniform = len(q_lens) > 0 and bool((q_lens == q_lens[0]).all())
        if phase is None:
            phase = "decode" if uniform and int(q_lens[0]) == 1 else "extend"
        _check(q_lens, kv_lens, page_table, page_size, phase, uniform, causal and write)
        _check_extras(q_lens, kv_lens, positions, query_mask, max_seq_len, num_real_reqs)
        if device is None:
            device = page_table.device if page_table is not None else torch.device("cpu")

        q_indptr = _indptr(q_lens)
        num_tokens, max_q = int(q_indptr[-1]), int(q_lens.max())
        # token → its row, and its key index in the row's table
        rows = torch.repeat_interleave(torch.arange(len(q_lens)), q_lens)
        slots = torch.arange(num_tokens) + (kv_lens - q_indptr[1:])[rows]
        if positions is None:
            positions = slots.to(device, non_blocking=True)
        loc = None
        if page_table is not None and write:
            rows, slots = rows.to(device, non_blocking=True), slots.to(device, non_blocking=True)
            loc = page_table[rows, slots // page_size].long() * page_size + slots % page_size
        exact = host_lengths == "exact"
        q_indptr_cpu, kv_lens_cpu = q_indptr.int(), kv_lens.int()
        kv_indptr_cpu = _indptr(kv_lens).int() if page_table is None else None
        return cls(
            phase=phase,
            causal=causal,
            num_reqs=len(q_lens),
            num_tokens=num_tokens,
            num_real_reqs=len(q_lens) if num_real_reqs is None else num_real_reqs,
            query_len=int(q_lens[0]) if phase == "decode" else 0,
            max_query_len=max_q,
            max_seq_len=int(kv_lens.max()) if max_seq_len is None else max_seq_len,
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
            mask_indptr=None if query_mask is None else _indptr(q_lens * q_lens).to(device),
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
        lens, first = self.seq_lens_cpu.long(), torch.zeros(self.num_reqs, dtype=torch.long)
        if part == "prefix":
            lens = (lens - self.query_indptr_cpu.diff()).clamp(min=0)
        elif part == "own":
            for level in self.shared_levels:
                pages, runs = level.page_indptr_cpu.diff().long(), level.row_indptr_cpu.diff()
                first += torch.repeat_interleave(pages, runs)
            lens = lens - first * self.page_size
        pages = (lens + self.page_size - 1) // self.page_size
        indptr = _indptr(pages)
        rows = torch.repeat_interleave(torch.arange(self.num_reqs), pages)
        columns = torch.arange(int(indptr[-1])) + (first - indptr[:-1])[rows]
        device = self.page_table.device
        indices = self.page_table[rows.to(device, non_blocking=True), columns.to(device, non_blocking=True)]
        last = torch.where(pages > 0, lens - (pages - 1) * self.page_size, 0).int()
        indptr = indptr.int()
        return PagesCSR(
            page_indptr=indptr.to(device, non_blocking=True),
            page_indices=indices,
            last_page_len=last.to(device, non_blocking=True),
            page_indptr_cpu=indptr,
            last_page_len_cpu=last,
        )


def _int_tensor(lengths: Lengths) -> Tensor:
    return torch.as_tensor(lengths, dtype=torch.long, device="cpu")


def _indptr(lengths: Tensor) -> Tensor:
    """Lengths [B] → offsets [B+1], starting at 0."""
    offsets = torch.zeros(len(lengths) + 1, dtype=lengths.dtype)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _check(
    q_lens: Tensor, kv_lens: Tensor, table: Tensor | None, page_size: int, phase: Phase, uniform: bool, aligned: bool
) -> None:
    if len(q_lens) == 0 or len(q_lens) != len(kv_lens) or int(q_lens.min()) < 1 or int(kv_lens.min()) < 0:
        raise HeadstockError(
            "a batch needs one query length ≥ 1 and one key length ≥ 0 per row",
            given=f"{q_lens.tolist()} queries, {kv_lens.tolist()} keys",
        )
    if phase == "decode" and not uniform:
        raise HeadstockError(
            "a decode batch has one uniform query length", given=q_lens.tolist(), works='phase="extend"'
        )
    if table is None:
        return
    if aligned and bool((kv_lens < q_lens).any()):
        raise HeadstockError(
            "new tokens are keys too: each row needs at least as many keys as queries",
            given=f"{q_lens.tolist()} queries, {kv_lens.tolist()} keys",
            works="write=False where nothing is cached",
        )
    if page_size < 1 or table.dtype != torch.int32 or table.shape[0] != len(q_lens):
        raise HeadstockError(
            "a page table is int32 [rows, pages] with a page size ≥ 1",
            given=f"{table.dtype} {list(table.shape)}, page size {page_size}, {len(q_lens)} rows",
        )
    if int(kv_lens.max()) > table.shape[1] * page_size:
        raise HeadstockError(
            "the page table is too narrow",
            given=f"{table.shape[1]} pages of {page_size} per row for {int(kv_lens.max())} keys",
        )


def _check_extras(
    q_lens: Tensor,
    kv_lens: Tensor,
    positions: Tensor | None,
    query_mask: Tensor | None,
    max_seq_len: int | None,
    num_real_reqs: int | None,
) -> None:
    tokens, pairs, longest = int(q_lens.sum()), int((q_lens * q_lens).sum()), int(kv_lens.max())
    if positions is not None and positions.shape != (tokens,):
        raise HeadstockError("positions are one per token", given=list(positions.shape), works=f"[{tokens}]")
    if query_mask is not None and query_mask.shape != (pairs,):
        raise HeadstockError(
            "a query mask is flat, new × new tokens per row", given=list(query_mask.shape), works=f"[{pairs}]"
        )
    if max_seq_len is not None and max_seq_len < longest:
        raise HeadstockError("max_seq_len is an upper bound", given=f"{max_seq_len} for {longest} keys")
    if num_real_reqs is not None and not 0 <= num_real_reqs <= len(q_lens):
        raise HeadstockError("num_real_reqs counts rows of the batch", given=f"{num_real_reqs} of {len(q_lens)}")
