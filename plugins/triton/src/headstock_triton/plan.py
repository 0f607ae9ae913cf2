"""The plan of a batch: its parts, each the same attention over other keys, cut into work items on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstock import BackendSpec, ForwardBatch
from headstock_triton.config import Config, able, find, power_of_two
from headstock_triton.launch import INTERPRETING, Grid, Launch

INVARIANT_SPLITS = 8
"""Most splits of a tile where a row's length alone may decide."""
JOINED = 1024
"""Most rows of partial states that one program merges at the end of `attend`; more are left to `merge`.

On an H200, 32/8 heads of 128, µs merged so and by a launch of `merge`: 1 × 1024 keys 7.4 and 8.5, 8 × 1024 14.5 and
16.5, 1 × 4096 11.6 and 13.0, 8 × 4096 39.5 and 42.2, 1 × 32768 41.5 and 43.5, 64 × 1024 70.3 and 73.2, 64 × 4096 252.8
and 256.1, 256 × 1024 256.0 and 263.3.
"""
UNEVEN = 3
"""Splits for each row that narrow tiles may have where rows are not equally long.

On an H200, of 32 rows of 512 to 8192 keys, µs with 1, 2, 3, 4: 158, 142, 132, 134; of 64 rows of 256 to 4096: 151, 144,
140 with 3.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """The bounds of a part's work, from what the host knows without lengths, and so the same in every replay.

    A tile has at most `rows` (token, head) pairs; `slots` are the work items that splits may add, of which rows that
    are equally long share `even` instead, if that is not None; or, with `fixed`, it has the most splits of each tile.
    """

    config: Config
    rows: int
    tiles: int
    slots: int
    fixed: int = 0
    even: int | None = None

    @property
    def items(self) -> int:
        return self.tiles * self.fixed if self.fixed else self.tiles + self.slots

    @property
    def split(self) -> bool:
        return self.items > self.tiles

    def merging(self, spec: BackendSpec) -> tuple[int, int]:
        """Rows and splits that a program merges at a time.

        One that joins a tile takes all rows, and so many splits as 64 registers of a thread hold. A program of `merge`
        takes few rows, and of latents, which are wide, as many splits as a tile may have; there are enough of them.
        """
        rows, joined, width = power_of_two(self.rows), self.joined(spec), power_of_two(spec.v_head_dim, 16)
        if INTERPRETING:
            return rows if joined else min(rows, 16), 4
        if joined:
            return rows, max(2048 * self.config.warps // (rows * width), 1)
        if spec.attention == "mla":
            splits = self.fixed or self.slots // self.tiles + 1
            return min(rows, self.config.merged), min(power_of_two(splits, 8), 32)
        return (min(rows, 4), 8) if self.rows > 16 else (1, 16)

    def joined(self, spec: BackendSpec) -> bool:
        """Whether the last program of a tile merges its splits, instead of a launch of `merge` after `attend`.

        Only narrow tiles: of a wide one, or of latents, that program would do alone what `merge` does with many.
        """
        narrow = self.config.block_m <= 16 and spec.attention != "mla"
        return self.split and narrow and self.rows * (self.fixed or self.slots + 1) <= JOINED

    @classmethod
    def of(cls, spec: BackendSpec, rows: int, tokens: int, longest: int, uniform: bool, shared: bool = False) -> Shape:
        """For `tokens` tokens in `rows` rows, of `longest` each at most, or exactly where uniform.

        Rows that share prefixes may be few of those that there is room for: they are always split.
        """
        group = spec.num_heads // spec.num_kv_heads
        invariant = spec.batch_invariant
        pairs = longest * group if uniform or not invariant else 128
        if uniform and pairs <= 16 and not invariant and spec.attention != "mla":
            return cls.narrow(spec, rows, pairs)
        filled = invariant or (not shared and _filled(spec, rows, pairs))
        config = find(spec, pairs, filled=filled)
        if spec.attention == "mla" and rows * pairs <= spec.num_sms and not invariant and not able(spec, config):
            config = find(spec, pairs, 32, filled=filled)  # narrower tiles are more of them
        block = config.block_m
        tiles = rows * -(-longest * group // block) if uniform else tokens * group // block + rows
        most = min(block, longest * group)
        if invariant:
            return cls(config, most, tiles, 0, INVARIANT_SPLITS if uniform else 0)
        programs = max(spec.num_sms, 8) * config.programs
        slots = -(-programs // spec.num_kv_heads) if uniform or shared or tiles * spec.num_kv_heads < programs else 0
        return cls(config, most, tiles, slots)

    @classmethod
    def narrow(cls, spec: BackendSpec, rows: int, pairs: int) -> Shape:
        """For rows of one tile each, of so many pairs.

        Tiles of which there are no more than multiprocessors are cut in as many programs as `programs` asks for. More
        of them come in waves of all programs that are resident at once: the configuration is taken that leaves the
        fewest places empty in the last wave, and equally long rows are cut in two where that leaves fewer still. On an
        H200, 8 key heads, µs of 24, 32, 64, 72 rows of 8192 keys with 4 warps uncut, cut in two, with 2 warps uncut,
        cut in two: 194, 188, 282, 196; 287, 296, 340, 247; 566, 497, 480, 479; 587, 539, 759, 626.
        """
        few, many = (find(spec, pairs, filled=filled) for filled in (False, True))
        sms, tiles, joined = max(spec.num_sms, 8), rows * spec.num_kv_heads, JOINED // pairs - 1

        def waste(option: tuple[int, Config]) -> float:
            ways, config = option
            places = sms * config.resident
            return -(-ways * tiles // places) * places / (ways * tiles)

        if tiles <= sms:
            ways, config = few.programs * sms // tiles, few
        else:
            options = [(ways, config) for ways in (1, 2) if ways * rows <= max(joined, rows) for config in (few, many)]
            ways, config = min(options, key=waste)
        even = ways * rows if ways > 1 else 0
        return cls(config, pairs, rows, max(even, min(UNEVEN * rows, joined), 0), even=even)

    def within(self, partials: int, kv_heads: int) -> Shape:
        """The same without splits where there is no room for so many partial rows."""
        fits = not self.split or self.items * self.rows * kv_heads <= partials
        return self if fits else Shape(self.config, self.rows, self.tiles, 0)


def _filled(spec: BackendSpec, rows: int, pairs: int) -> bool:
    """Whether tiles alone, unsplit, occupy the multiprocessors; of latents, which take one whole, most of them."""
    if spec.attention == "mla":
        return 4 * rows * max(pairs // 64, 1) >= 3 * spec.num_sms
    return rows * max(pairs // 128, 1) * spec.num_kv_heads >= spec.num_sms


def carried_rows(spec: BackendSpec) -> int:
    """(token, head) pairs whose states can be carried from shared prefixes to the rows' own keys.

    Outputs over latents are so wide that room is kept for a decode step of them, and not for all tokens of an extend.
    """
    if not spec.max_levels or spec.batch_invariant:
        return 0
    decode = spec.max_batch * max(spec.query_lens)
    extends = "extend" in spec.phases and spec.attention != "mla"
    return (max(spec.max_tokens, decode) if extends else decode) * spec.num_heads


def partial_rows(spec: BackendSpec) -> int:
    """The most partial rows, (token, head) pairs of split tiles, that a batch within `spec` has."""
    bounds = [0]
    if "decode" in spec.phases:
        batches = range(1, spec.max_batch + 1)  # fewer rows may have another configuration, with more splits
        shapes = [Shape.of(spec, rows, rows * n, n, True) for rows in batches for n in spec.query_lens]
        bounds += [shape.items * shape.rows for shape in shapes if shape.split]
    if ("extend" in spec.phases or spec.max_levels) and not spec.batch_invariant:
        # tiles of any lengths are split while there are fewer of them than programs, into as many more
        configs = [find(spec, pairs, filled=filled) for pairs in (16, 32, 64, 128) for filled in (True, False)]
        programs = max(spec.num_sms, 8)
        bounds += [2 * -(-programs * c.programs // spec.num_kv_heads) * c.block_m for c in configs]
    if spec.max_levels and not spec.batch_invariant:
        tokens = spec.max_batch * max(spec.query_lens)
        shape = Shape.of(spec, spec.max_batch, tokens, tokens, False, shared=True)
        bounds.append(shape.items * shape.rows)
    return max(bounds) * spec.num_kv_heads


@dataclass(slots=True)
class Part:
    """Rows of queries and the keys they see: the row's own, or a prefix that they share.

    queries int32 [R+1] delimits each row's tokens; it sees keys begins … lens, int32 [R], from 0 on without begins.
    starts [R] is where key 0 of a row would be, in `pages` or among the keys given; without them it is row · width.
    Once scheduled, `items` and `origins` have the work, and where tiles are split `counters` or `leaders` what it takes
    to merge them (see `schedule`). `carried`: earlier parts leave their states to be merged with those of this one.
    `launches` are those of all layers that ask for the same, by what that is.
    """

    shape: Shape
    shared: bool = False
    carried: bool = False
    queries: Tensor | None = None
    lens: Tensor | None = None
    begins: Tensor | None = None
    starts: Tensor | None = None
    width: int = 0
    pages: Tensor | None = None
    items: Tensor | None = None
    origins: Tensor | None = None
    counters: Tensor | None = None
    leaders: Tensor | None = None
    launches: dict[tuple[bool, ...], list[tuple[Grid, Launch]]] = field(default_factory=dict)

    def tree(self, batch: ForwardBatch) -> bool:
        """Whether a mask says which new tokens see each other."""
        return batch.query_mask is not None and not self.shared


@dataclass(slots=True)
class Plan:
    """The parts of a batch in the order they run, shared prefixes first and the rows' own keys last."""

    parts: list[Part]

    @classmethod
    def of(cls, spec: BackendSpec, batch: ForwardBatch, partials: int) -> Plan:
        """What the host decides.

        Without room to carry states, as in a batch-invariant instance, shared prefixes are read row by row.
        """
        rows, tokens, decode = batch.num_reqs, batch.num_tokens, batch.phase == "decode"
        shapes = [Shape.of(spec, rows, tokens, batch.max_query_len, decode)]
        if tokens * spec.num_heads <= carried_rows(spec):
            segments = [len(level.row_indptr) - 1 for level in batch.shared_levels]
            shapes = [*[Shape.of(spec, count, tokens, tokens, False, shared=True) for count in segments], *shapes]
        shapes = [shape.within(partials, spec.num_kv_heads) for shape in shapes]
        last = len(shapes) - 1
        return cls([Part(shape, shared=i < last, carried=i > 0) for i, shape in enumerate(shapes)])

    def schedule(self, spec: BackendSpec, batch: ForwardBatch) -> None:
        """What the device decides, from lengths alone, so that it can be part of a graph."""
        *levels, own = self.parts
        page = batch.page_size
        own.queries, own.lens, own.pages = batch.query_indptr, batch.seq_lens, batch.page_table
        if batch.page_table is not None:
            own.width = batch.page_table.stride(0)
        else:
            own.starts = batch.kv_indptr
        if levels:
            own.begins = torch.zeros_like(batch.seq_lens)
            rows = torch.arange(batch.num_reqs, dtype=torch.int32, device=batch.seq_lens.device)
            for part, level in zip(levels, batch.shared_levels, strict=True):
                widths = level.page_indptr.diff() * page
                begins = own.begins[level.row_indptr[:-1].clamp(max=batch.num_reqs - 1)]
                part.queries = batch.query_indptr[level.row_indptr]
                part.begins, part.lens = begins, begins + widths
                part.starts, part.pages = level.page_indptr[:-1] - begins // page, level.page_indices
                own.begins = own.begins + widths[torch.searchsorted(level.row_indptr[1:], rows, right=True)]
        for part in self.parts:
            schedule(spec, part)


def schedule(spec: BackendSpec, part: Part) -> None:
    """Cuts a part in work items, on the device."""
    assert part.queries is not None, "the part has its rows"
    shape, rows, device = part.shape, len(part.queries) - 1, part.queries.device
    part.items = torch.empty(shape.items, 8, dtype=torch.int32, device=device)
    part.origins = torch.empty(shape.items, dtype=torch.int64, device=device)
    if shape.joined(spec):
        part.counters = torch.empty(shape.items, spec.num_kv_heads, dtype=torch.int32, device=device)
    elif shape.split:
        part.leaders = torch.empty(shape.tiles, dtype=torch.int32, device=device)
    block = max(min(power_of_two(shape.items), 2048 // power_of_two(rows)), 1)
    launch = Launch(
        "schedule",
        {
            "GROUP": spec.num_heads // spec.num_kv_heads,
            "WINDOW": 0 if part.shared else spec.window or 0,
            "BLOCK_M": shape.config.block_m,
            "MIN_KEYS": shape.config.keys,
            "FIXED": shape.fixed or (0 if shape.slots else 1),
            "KV_HEADS": spec.num_kv_heads,
            "ROWS": power_of_two(rows),
            "BLOCK": block,
            "BLOCK_H": power_of_two(spec.num_kv_heads),
        },
    )
    launch(
        (-(-shape.items // block),),
        {
            "queries": part.queries, "lens": part.lens, "begins": part.begins, "starts": part.starts,
            "items": part.items, "origins": part.origins, "counters": part.counters, "leaders": part.leaders,
            "num_rows": rows, "num_items": shape.items, "slots": shape.slots,
            "even": shape.slots if shape.even is None else shape.even, "width": part.width,
        },
    )  # fmt: skip
