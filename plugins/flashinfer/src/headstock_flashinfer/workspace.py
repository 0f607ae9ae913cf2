"""Memory that FlashInfer's planners ask for, worked out from shapes before there is a device.

After PrefillPlan, PrefillSM90Plan and DecodePlan in FlashInfer's `scheduler.cuh`. A planner cuts queries into tiles of
T packed rows (a token's query heads of one key head are rows) and keys into chunks, so that at most two blocks per
multiprocessor run; a graph always has the grid of its largest plan. Split tiles leave float32 states in the float
workspace, indices of the blocks lie in the int workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from packaging.version import Version
from torch import Tensor

from headstock import BackendSpec
from headstock_flashinfer.choice import Choice

ALIGNMENT = 256
MOST_SMS = 192
"""What a GPU is taken to have where the spec does not say: more than any yet."""
BLOCKS_PER_SM = 16
"""The most blocks of the CUDA-core decode kernel that a multiprocessor holds, 2048 threads of at least 128 each."""
MOST_SPLITS = 4
"""Chunks of the longest row where splits may not depend on the batch."""
SHARED_TILES = Version("0.7.4")
"""From this release on, the states of a tile's unused rows take no memory."""


class Sizes(NamedTuple):
    """Bytes of one wrapper's float and int workspace."""

    floats: int = 0
    ints: int = 0

    def __or__(self, other: Sizes) -> Sizes:
        """Room for either."""
        return Sizes(max(self.floats, other.floats), max(self.ints, other.ints))


def tile(packed: int, v_head_dim: int) -> int:
    """T, the rows of a query tile, for `packed` rows per request: their average, or in a graph their bound."""
    if packed > 64 and v_head_dim < 256:
        return 128
    return 64 if packed > 16 else 16


def segments(tokens: int, group: int, v_head_dim: int) -> int:
    """The most segments of a shared level that a graph's wrapper can be made for and still have the largest tiles.

    A graph sizes its tiles for `tokens − segments + 1` tokens in one segment. With fewer rows per tile a shared prefix
    would be read once per tile, which is what sharing is to avoid.
    """
    largest = tile(tokens * group, v_head_dim)
    return next(n for n in range(tokens, 0, -1) if tile((tokens - n + 1) * group, v_head_dim) == largest)


class Planner:
    """The arithmetic for one spec. `version` is FlashInfer's, whose formulas differ; unknown, the larger one holds."""

    def __init__(self, spec: BackendSpec, choice: Choice, version: str):
        self.spec, self.choice = spec, choice
        self.group = spec.num_heads // spec.num_kv_heads
        self.sms = spec.num_sms or MOST_SMS
        self.blocks = 2 * self.sms // spec.num_kv_heads
        self.shared_tiles = bool(version) and Version(version) >= SHARED_TILES

    def eager(self) -> Sizes:
        """Of any eager plan within the spec."""
        spec, sizes = self.spec, Sizes()
        if "decode" in spec.phases:
            for n in spec.query_lens:
                sizes |= self._decode(spec.max_batch, n)
        if spec.phases != {"decode"} or spec.query_lens != {1} or spec.query_mask or spec.max_levels:
            sizes |= self._any(spec.max_tokens, spec.max_batch)
        return sizes

    def graph(self, rows: int, query_len: int, levels: int) -> Sizes:
        """Of a captured bucket's wrappers, each."""
        spec, tokens = self.spec, rows * query_len
        if self.choice.decode == "cuda-cores":
            sizes = self._cuda_cores(rows)
        elif query_len == 1:
            sizes = self._fa2(tile(self.group, spec.v_head_dim), self._padded(tokens, rows, 1), rows, tokens)
        else:
            packed = query_len * self.group
            size = tile(packed, spec.v_head_dim)
            sizes = self._fa2(size, max(self.blocks, rows * -(-packed // size)), rows, tokens)
        if levels:
            count = segments(tokens, self.group, spec.v_head_dim)
            longest = tokens - count + 1
            size = tile(longest * self.group, spec.v_head_dim)
            sizes |= self._fa2(size, self._padded(tokens, count, longest), count, tokens)
        return sizes

    def split_pages(self) -> int | None:
        """Pages per chunk where a row's bits may not depend on its batch."""
        spec = self.spec
        return max(-(-spec.max_context // (MOST_SPLITS * spec.page_size)), 1) if spec.batch_invariant else None

    def _padded(self, tokens: int, rows: int, longest: int) -> int:
        """Blocks of a graph's grid over rows of any lengths, of which the longest has `longest` tokens."""
        size = tile(longest * self.group, self.spec.v_head_dim)
        return max(self.blocks, -(-tokens * self.group // size) + rows - 1)

    def _decode(self, rows: int, n: int) -> Sizes:
        if self.choice.decode == "cuda-cores":
            return self._cuda_cores(rows)
        if self.choice.decode == "fa3":
            return self._fa3(rows * n, rows)
        size = tile(n * self.group, self.spec.v_head_dim)
        tiles = rows * -(-n * self.group // size)
        blocks = tiles * MOST_SPLITS if self.spec.batch_invariant else max(self.blocks, tiles)
        split = blocks if self.spec.batch_invariant else self.blocks
        return self._fa2(size, blocks, rows, rows * n, split=split)

    def _any(self, tokens: int, rows: int) -> Sizes:
        """Rows of any lengths, and so tiles of any size: the smallest have the most blocks, the largest most states."""
        spec = self.spec
        largest = tile(128, spec.v_head_dim)
        tiles = tokens * self.group // largest + 2 * rows
        sizes = self._fa2(largest, max(self.blocks, tiles), rows, tokens, split=self.blocks)
        kernels = (self.choice.prefill, self.choice.ragged, self.choice.decode)
        return sizes | self._fa3(tokens, rows) if "fa3" in kernels else sizes

    def _fa2(self, size: int, blocks: int, rows: int, tokens: int, split: int | None = None) -> Sizes:
        """`blocks` blocks of tiles of `size` rows, of which `split` (all where None) leave a state."""
        states = self.spec.num_heads * (blocks if split is None else split) * size
        if self.shared_tiles:
            states = self.spec.num_heads * -(-(blocks if split is None else split) * size // self.group)
        floats = _aligned(states * self.spec.v_head_dim * 4) + _aligned(states * 4)
        indices = [4 * blocks] * 3 + [4 * (rows + 1), 4, 4, 4 * (tokens + 1), blocks]
        return Sizes(floats, sum(_aligned(n) for n in indices))

    def _fa3(self, tokens: int, rows: int) -> Sizes:
        """The same list of work for all heads where one head has more than 4096 items, else one per head."""
        works = -(-tokens // 128) + rows
        works *= 1 if works > 4096 else self.spec.num_heads
        return Sizes(0, 7 * _aligned(4 * works) + _aligned(4 * (self.sms + 1)))

    def _cuda_cores(self, rows: int) -> Sizes:
        blocks = max(BLOCKS_PER_SM * self.sms // self.spec.num_kv_heads, rows)
        states = self.spec.num_heads * blocks
        indices = [4 * blocks, 4 * blocks, 4 * (blocks + 1), 4, blocks]
        floats = _aligned(states * self.spec.v_head_dim * 4) + _aligned(states * 4)
        return Sizes(floats, sum(_aligned(n) for n in indices))


def carve(memory: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """`memory` uint8 cut into pieces of these sizes, each at a multiple of the alignment."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(memory[start : start + size])
        start += aligned(size)
    return pieces


def aligned(size: int) -> int:
    """`size` rounded up to the alignment of pieces."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _aligned(size: int) -> int:
    """`size` rounded up as FlashInfer's allocator does."""
    return -(-size // 16) * 16
