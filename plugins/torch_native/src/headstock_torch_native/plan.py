"""The plan of a batch: blocks of rows that attend together, with the slots of their keys and who sees whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from headstock import BackendSpec, ForwardBatch
from headstock_torch_native.attend import sdpa_bias
from headstock_torch_native.mask import distances, tree_distances, tree_visible, visible

CHUNK_ELEMENTS = 2**22
"""Most elements of an extend block's mask, or of its scores over all heads: 16 MiB of float32."""
BLOCK_BYTES = {"cpu": 1 << 18}
"""What a device reads in the time that one more block of a layer takes, by device type; 256 MiB elsewhere."""


@dataclass(frozen=True, slots=True)
class Block:
    """`rows` rows of `queries` queries each, from token `start` on, or the tokens `apart`, against `keys` keys each.

    loc int64 [rows × keys] says where each key lies, a cache slot or a row of the ragged keys; past a row's end it
    repeats the last key, so that nothing unwritten is read. A `fused` block attends by SDPA, which knows the triangle
    of a prompt as `causal` and takes any other mask as `sdpa_bias` gives it; another attends by matrix products, with
    a bool mask [rows, queries, keys] and, for ALiBi, `distance` of the same shape. No mask: every key is seen.

    Rows that share a prefix attend to it as one row of all their queries, and each to its own keys in another block.
    """

    start: int
    rows: int
    queries: int
    keys: int
    loc: Tensor
    fused: bool
    causal: bool = False
    mask: Tensor | None = None
    distance: Tensor | None = None
    apart: Tensor | None = None  # int64 [rows × queries]

    def part(self, x: Tensor) -> Tensor:
        """This block's part of a tensor over tokens, [T, …] → [rows, queries, …], a view unless they are apart."""
        tokens = self.rows * self.queries
        if self.apart is not None:
            part = x.index_select(0, self.apart)
        else:
            part = x if tokens == len(x) else x[self.start : self.start + tokens]
        return part.view(self.rows, self.queries, *x.shape[1:])

    def put(self, x: Tensor, part: Tensor) -> None:
        """Brings what was written to this block's `part` of x into x."""
        if self.apart is not None:
            x.index_copy_(0, self.apart, part.flatten(0, 1))


def plan(spec: BackendSpec, batch: ForwardBatch, dtype: torch.dtype) -> list[Block]:
    """One block for a decode batch, or several where its lengths differ much; for an extend batch one or more per row.

    Before them comes a block for each run of rows that share a prefix, at every level.
    """
    planner = _Planner(spec, batch, dtype)
    shared = list(planner.shared())
    if batch.phase == "decode":
        return [*shared, *planner.decode()]
    return [*shared, *(planner.extend() if batch.query_mask is None else planner.trees())]


class _Planner:
    """What the blocks of one batch have in common."""

    def __init__(self, spec: BackendSpec, batch: ForwardBatch, dtype: torch.dtype):
        self.spec, self.batch, self.dtype = spec, batch, dtype
        self.ordered = batch.causal or spec.window is not None  # no query sees a key after its own position
        plain = not (spec.softcap or spec.sinks or spec.alibi or spec.lse or batch.shared_levels)
        self.fused = plain and _all_see_keys(batch, self.ordered, spec.window)
        self.lens = batch.seq_lens.long()[:, None]
        self.firsts = self.lens - batch.query_indptr.diff()[:, None]  # the key index of each row's first query

        self.begins = [0] * batch.num_reqs  # where each row's own keys begin, after what `shared` went through

    def shared(self) -> Iterator[Block]:
        """A block for each run of rows that share pages, at every level: all their queries as those of one row."""
        size = self.batch.page_size
        for level in self.batch.shared_levels:
            rows, bounds = pairwise(level.row_indptr_cpu.tolist()), pairwise(level.page_indptr_cpu.tolist())
            for (first, last), (begin, end) in zip(rows, bounds, strict=True):
                if first < last and begin < end:
                    pages = level.page_indices[begin:end, None].long()
                    indices = self.begins[first] + self.arange(0, len(pages) * size)
                    yield self.together(first, last, indices, (pages * size + self.arange(0, size)).flatten())
                    self.begins[first:last] = [self.begins[first] + len(indices)] * (last - first)

    def together(self, first: int, last: int, indices: Tensor, loc: Tensor) -> Block:
        """The queries of rows `first` … `last` against keys of the prefix, of these indices and slots."""
        batch, window = self.batch, self.spec.window
        lens = [batch.query_len] * batch.num_reqs
        if batch.phase == "extend":
            lens = [n for _, _, n, _ in self.rows()]
        start, stop = sum(lens[:first]), sum(lens[:last])
        mask = distance = None
        if self.spec.alibi or window is not None:
            owner = self.lens.new_tensor([row for row in range(first, last) for _ in range(lens[row])])
            begun = batch.positions[batch.query_indptr[owner].long()]
            at = self.firsts[owner, 0] + batch.positions[start:stop] - begun  # the key index of each query
            distance = (at[:, None] - indices)[None]
            mask = None if window is None else distance < window
        return Block(start, 1, stop - start, len(indices), loc, False, False, mask, distance)

    def decode(self) -> list[Block]:
        """All rows at once, or those of like lengths, where the host knows them and padding would cost more."""
        batch, window, n = self.batch, self.spec.window, self.batch.query_len
        host = batch.seq_lens_cpu
        if host is None or batch.shared_levels or batch.query_mask is not None:
            return [self.alike()]
        lens = host.tolist() if window is None else host.clamp(max=window + n - 1).tolist()
        cuts = _cut(lens, self.cost())
        return [self.alike()] if len(cuts) == 1 else [self.alike(rows) for rows in cuts]

    def cost(self) -> float:
        """Keys of a layer that are read in the time that a block takes beside them."""
        spec = self.spec
        size = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * self.dtype.itemsize
        return BLOCK_BYTES.get(self.lens.device.type, 1 << 28) / size

    def alike(self, some: list[int] | None = None) -> Block:
        """Decoding rows at once, all by default, as wide as the longest may be: all that the host must know."""
        batch, window, n = self.batch, self.spec.window, self.batch.query_len
        rows: slice | Tensor = slice(0, batch.num_reqs)
        apart = own = None
        if batch.seq_lens_cpu is not None:
            own = [total - begin for total, begin in zip(batch.seq_lens_cpu.tolist(), self.begins, strict=True)]
        if some is not None and own is not None:
            chosen, own = self.lens.new_tensor(some), [own[row] for row in some]
            rows, apart = chosen, (chosen[:, None] * n + self.arange(0, n)).flatten()
        keys = batch.max_seq_len - min(self.begins) if own is None else max(own)
        begin = self.lens.new_tensor(self.begins)[:, None] if batch.shared_levels else 0
        if window is not None and window + n - 1 < keys:
            keys = window + n - 1
            begin = (self.lens[rows] - keys).clamp_(min=begin)
        indices = begin + self.arange(0, keys)
        full = own is not None and min(own) >= keys
        if full and batch.query_mask is None and (n == 1 or not self.ordered) and not self.spec.alibi:
            return replace(self.block(rows, 0, n, indices), apart=apart)
        seen, distance = self.look(rows, 0, n, indices)
        mask = self.as_mask(seen & (indices < self.lens[rows])[:, None])
        return replace(self.block(rows, 0, n, indices, mask, distance), apart=apart)

    def trees(self) -> Iterator[Block]:
        """A block per row, seeing what its mask among new tokens says."""
        area = 0
        for row, start, n, total in self.rows():
            rows, indices = slice(row, row + 1), self.arange(self.begins[row], total)
            seen, distance = self.look(rows, start, n, indices, area)
            yield self.block(rows, start, n, indices, self.as_mask(seen), distance)
            area += n * n

    def extend(self) -> Iterator[Block]:
        """A block per row, or several where its mask would be large."""
        window, longest = self.spec.window, max(total for *_, total in self.rows())
        size = CHUNK_ELEMENTS // max(longest, 1)
        chunk = max(size if self.fused else size // self.spec.num_heads, 16)
        corner = _Corner(self, min(chunk, self.batch.max_query_len), longest) if self.ordered else None
        for row, start, n, total in self.rows():
            triangle = self.fused and self.ordered and n == total and (window is None or window >= total)
            maskless = triangle or (self.fused and not self.ordered)
            for offset in range(0, n, n if maskless else chunk):
                queries = n if maskless else min(chunk, n - offset)
                first = total - n + offset  # the key that stands where the first query does
                begin = max(self.begins[row], 0 if window is None else first - window + 1)
                indices = self.arange(begin, max(first + queries, begin) if self.ordered else total)
                mask = distance = None
                if corner is not None and not triangle:
                    mask, distance = corner.cut(queries, len(indices))
                elif self.spec.alibi:
                    distance = distances(self.firsts[row : row + 1] + offset, indices[None], queries)
                yield self.block(slice(row, row + 1), start + offset, queries, indices, mask, distance, triangle)

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Each row of the batch: its number, first token, query length, and keys."""
        indptr, lens = self.batch.query_indptr_cpu, self.batch.seq_lens_cpu
        assert indptr is not None, "the extend record declares exact host lengths"
        assert lens is not None, "the extend record declares exact host lengths"
        starts = indptr.tolist()
        for row, total in enumerate(lens.tolist()):
            yield row, starts[row], starts[row + 1] - starts[row], total

    def look(self, rows: slice | Tensor, start: int, n: int, indices: Tensor, area: int = 0) -> tuple[Tensor, Tensor]:
        """Who sees whom, bool, and how far back it is, both [rows, n, keys]; their masks start at `area`."""
        first, window, batch = self.firsts[rows], self.spec.window, self.batch
        indices = indices.expand(len(first), -1)
        if batch.query_mask is None:
            distance = distances(first, indices, n)
            return visible(distance, ordered=self.ordered, window=window), distance
        tokens = len(first) * n
        positions = batch.positions[start : start + tokens].view(-1, n)
        mask = batch.query_mask[area : area + tokens * n].view(-1, n, n)
        distance = tree_distances(first, indices, positions)
        return tree_visible(distance, first, indices, mask, ordered=self.ordered, window=window), distance

    def block(
        self,
        rows: slice | Tensor,
        start: int,
        queries: int,
        indices: Tensor,
        mask: Tensor | None = None,
        distance: Tensor | None = None,
        causal: bool = False,
    ) -> Block:
        """The block of `rows` whose keys are `indices`, [keys] or [rows, keys]."""
        keys, lens = indices.shape[-1], self.lens[rows]
        loc = self.locate(rows, indices.minimum(lens - 1).clamp_(min=0))
        return Block(start, len(lens), queries, keys, loc, self.fused, causal, mask, distance)

    def locate(self, rows: slice | Tensor, indices: Tensor) -> Tensor:
        """Key indices [rows, keys] as cache slots, or as rows of the ragged keys: int64 [rows × keys]."""
        batch = self.batch
        if batch.page_table is not None:
            pages = batch.page_table[rows].gather(1, indices // batch.page_size)
            return (pages.long() * batch.page_size + indices % batch.page_size).flatten()
        assert batch.kv_indptr is not None
        first = batch.kv_indptr[:-1][rows].long()[:, None]
        # rows may have no key, all of them even
        return (first + indices).minimum(batch.kv_indptr[-1:] - 1).clamp_(min=0).flatten()

    def as_mask(self, seen: Tensor) -> Tensor:
        """Visibility in the form that the chosen way to attend takes."""
        return sdpa_bias(seen, self.spec.num_heads // self.spec.num_kv_heads, self.dtype) if self.fused else seen

    def arange(self, begin: int, stop: int) -> Tensor:
        return torch.arange(begin, stop, device=self.lens.device)


class _Corner:
    """The one mask that every ordered extend block is a corner of.

    Such a block is right-aligned, its last query standing at its last key; what is seen depends on how far a query and
    a key are from there, and on nothing else.
    """

    def __init__(self, planner: _Planner, queries: int, keys: int):
        last = planner.lens.new_tensor([[keys - queries]])
        self.distance = distances(last, planner.arange(0, keys)[None], queries)
        self.mask = planner.as_mask(visible(self.distance, ordered=True, window=planner.spec.window))
        self.queries, self.keys = queries, keys

    def cut(self, queries: int, keys: int) -> tuple[Tensor, Tensor]:
        """Mask and distance of the last `queries` queries and `keys` keys."""
        corner = (..., slice(self.queries - queries, None), slice(self.keys - keys, None))
        return self.mask[corner], self.distance[corner]


def _cut(lengths: list[int], cost: float) -> list[list[int]]:
    """Rows in blocks of like lengths, the longest first: one begins where padding would cost more keys than a block."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    blocks, wasted = [[order[0]]], 0
    for row in order[1:]:
        wasted += lengths[blocks[-1][0]] - lengths[row]
        if wasted > cost:
            blocks.append([row])
            wasted = 0
        else:
            blocks[-1].append(row)
    return blocks


def _all_see_keys(batch: ForwardBatch, ordered: bool, window: int | None) -> bool:
    """Whether every query is sure to see a key; of one that sees none, SDPA promises no zero."""
    host, starts = batch.seq_lens_cpu, batch.query_indptr_cpu
    if host is None or starts is None:  # new tokens that are written are keys, and each sees itself
        return batch.causal and batch.out_cache_loc is not None and batch.query_mask is None
    if batch.query_mask is not None:
        return window is None and int((host - starts.diff()).min()) > 0  # whatever the mask, it sees a cached key
    return int((host - starts.diff()).min()) >= 0 if ordered else int(host.min()) > 0
