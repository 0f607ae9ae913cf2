"""What an instance keeps in its state workspace: int workspaces, and the buffers that captured graphs read."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headstock import BackendSpec, WorkspaceBytes
from headstock_flashinfer.choice import choose
from headstock_flashinfer.workspace import Planner, Sizes, aligned, carve, segments

INT32 = 4


class LevelBuffers(NamedTuple):
    """A shared level as a graph reads it: rows [S+1] and pages [S+1] of its segments, their last pages [S], indices."""

    row_indptr: Tensor
    page_indptr: Tensor
    last_page_len: Tensor
    page_indices: Tensor


class Buffers(NamedTuple):
    """The page table of a bucket's own keys in compressed rows, and its levels; int32 on the device.

    `page_indices` has one entry more than B · W, where entries of the table go that stand for no page. `shared` [B] has
    the keys of each row that are in levels.
    """

    page_indptr: Tensor
    last_page_len: Tensor
    page_indices: Tensor
    shared: Tensor
    levels: tuple[LevelBuffers, ...]


class Memory:
    """The pieces of one instance's state workspace.

    Buckets share their buffers, as prefix slices: each writes them again before it reads them. Int workspaces are never
    shared, a plan lives in them: `plans` has those of eager plans, one for each wrapper of a plan, and `buckets` those
    of captured buckets, in the spec's order.
    """

    def __init__(self, spec: BackendSpec, version: str, state: Tensor | None = None):
        self.spec = spec
        planner = Planner(spec, choose(spec), version)
        sizes = planner.eager()
        for bucket in spec.graph_buckets:
            sizes |= planner.graph(*bucket)
        self.sizes: Sizes = sizes
        self.wrappers = 1 + max(spec.max_levels, 1)  # of one plan: own keys, and levels or a prefix
        self.width = -(-spec.max_context // spec.page_size) if spec.page_size else 0
        tokens = [spec.max_tokens, *(bucket.batch * bucket.query_len for bucket in spec.graph_buckets)]
        self._regions = [INT32 * (max(*tokens, self.width) + 1), *self._buffers()]
        regions = len(self._regions)
        ints = spec.max_plans * self.wrappers + len(spec.graph_buckets) * self.wrappers
        self._regions += [sizes.ints] * ints
        if state is None:
            return
        pieces = carve(state, self._regions)
        self._arrays = [piece.view(torch.int32) for piece in pieces[:regions]]
        self.counting = self._arrays[0].copy_(torch.arange(len(self._arrays[0])))
        chunks = list(zip(*[iter(pieces[regions:])] * self.wrappers, strict=True))
        self.plans, self.buckets = chunks[: spec.max_plans], chunks[spec.max_plans :]

    @property
    def bytes(self) -> WorkspaceBytes:
        """What to ask the host for."""
        return WorkspaceBytes(scratch=self.sizes.floats, state=sum(aligned(size) for size in self._regions))

    def buffers(self, rows: int, segment_counts: tuple[int, ...] = ()) -> Buffers:
        """Prefix slices for a bucket of `rows` rows, with so many segments in each of its levels."""
        page_indptr, last, shared, indices, *levels = self._arrays[1:]
        entries = rows * self.width
        per_level = zip(*[iter(levels)] * 4, strict=True)
        return Buffers(
            page_indptr[: rows + 1],
            last[:rows],
            indices[: entries + 1],
            shared[:rows],
            tuple(
                LevelBuffers(row_indptr[: n + 1], indptr[: n + 1], lens[:n], pages[:entries])
                for n, (row_indptr, indptr, lens, pages) in zip(segment_counts, per_level, strict=False)
            ),
        )

    def _buffers(self) -> list[int]:
        """Bytes of the buffers of the largest bucket: own keys, then four arrays for each level."""
        buckets = self.spec.graph_buckets
        if not buckets:
            return []
        rows, levels = max(b.batch for b in buckets), max(b.levels for b in buckets)
        own = [rows + 1, rows, rows, rows * self.width + 1]
        each = [rows * max(b.query_len for b in buckets) + 1] * 3 + [rows * self.width]
        return [INT32 * count for count in own + each * levels]


def level_segments(spec: BackendSpec, rows: int, query_len: int) -> int:
    """Segments that each level of a captured bucket may have."""
    return segments(rows * query_len, spec.num_heads // spec.num_kv_heads, spec.v_head_dim)
