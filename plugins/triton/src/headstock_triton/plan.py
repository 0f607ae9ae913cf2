"""The plan of a batch: its parts, each the same attention over other keys, cut into work items on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstock import BackendSpec, ForwardBatch
from headstock_triton.config import Config, find, power_of_two
from headstock_triton.launch import launch

INVARIANT_SPLITS = 8
"""Most splits of a tile where a row's length alone may decide."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The bounds of a part's work, from what the host knows without lengths, and so the same in every replay.

    A tile has at most `rows` (token, head) pairs; `slots` are the work items that splits may add, or, with `fixed`,
    the most splits of each tile.
    """

    config: Config
    rows: int
    tiles: int
    slots: int
    fixed: int = 0

    @property
    def items(self) -> int:
        return self.tiles * self.fixed if self.fixed else self.tiles + self.slots

    @property
    def split(self) -> bool:
        return self.items > self.tiles

    @classmethod
    def of(cls, spec: BackendSpec, rows: int, tokens: int, longest: int, uniform: bool, shared: bool = False) -> Shape:
        """For `tokens` tokens in `rows` rows, of `longest` each at most, or exactly where uniform.

        Rows that share prefixes may be few of those that there is room for: they are always split.
        """
        group = spec.num_heads // spec.num_kv_heads
        invariant = spec.batch_invariant
        pairs = longest * group if uniform or not invariant else 128
        few = spec.attention == "mla" and rows * pairs <= spec.num_sms  # narrow tiles are more of them
        config = find(spec, pairs, 16 if few else 128, filled=not shared and _filled(spec, rows, pairs))
        block = config.block_m
        tiles = rows * -(-longest * group // block) if uniform else tokens * group // block + rows
        most = min(block, longest * group)
        if invariant:
            return cls(config, most, tiles, 0, INVARIANT_SPLITS if uniform else 0)
        programs = max(spec.num_sms, 8) * config.programs
        slots = -(-programs // spec.num_kv_heads) if uniform or shared or tiles * spec.num_kv_heads < programs else 0
        return cls(config, most, tiles, slots)

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
        shapes = [Shape.of(spec, spec.max_batch, spec.max_batch * n, n, True) for n in spec.query_lens]
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

    queries int32 [R+1] delimits each row's tokens; it sees keys begins … lens, int32 [R]. starts [R] is where key 0
    of a row would be, in `pages` or among the keys given. Once scheduled, `items` has the work (see `schedule`).
    """

    shape: Shape
    shared: bool = False
    queries: Tensor | None = None
    lens: Tensor | None = None
    begins: Tensor | None = None
    starts: Tensor | None = None
    pages: Tensor | None = None
    items: Tensor | None = None


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
        return cls([Part(shape, shared=shape is not shapes[-1]) for shape in shapes])

    def schedule(self, spec: BackendSpec, batch: ForwardBatch) -> None:
        """What the device decides, from lengths alone, so that it can be part of a graph."""
        *levels, own = self.parts
        device, page = batch.seq_lens.device, batch.page_size
        own.queries, own.lens, own.pages = batch.query_indptr, batch.seq_lens, batch.page_table
        own.begins = torch.zeros_like(batch.seq_lens)
        if batch.page_table is not None:
            own.starts = torch.arange(batch.num_reqs, device=device) * batch.page_table.stride(0)
        else:
            own.starts = batch.kv_indptr
        rows = torch.arange(batch.num_reqs, dtype=torch.int32, device=device)
        for part, level in zip(levels, batch.shared_levels, strict=False):
            widths = level.page_indptr.diff() * page
            begins = own.begins[level.row_indptr[:-1].clamp(max=batch.num_reqs - 1)]
            part.queries = batch.query_indptr[level.row_indptr]
            part.begins, part.lens = begins, begins + widths
            part.starts, part.pages = level.page_indptr[:-1] - begins // page, level.page_indices
            own.begins = own.begins + widths[torch.searchsorted(level.row_indptr[1:], rows, right=True)]
        for part in self.parts:
            _schedule(spec, part)


def _schedule(spec: BackendSpec, part: Part) -> None:
    assert part.queries is not None, "the part has its rows"
    shape, rows = part.shape, len(part.queries) - 1
    part.items = torch.empty(shape.items, 4, dtype=torch.int32, device=part.queries.device)
    block = max(min(power_of_two(shape.items), 2048 // power_of_two(rows)), 1)
    launch(
        "schedule",
        (-(-shape.items // block),),
        {"queries": part.queries, "lens": part.lens, "begins": part.begins, "items": part.items},
        {"num_rows": rows, "num_items": shape.items, "slots": shape.slots},
        {
            "GROUP": spec.num_heads // spec.num_kv_heads,
            "WINDOW": 0 if part.shared else spec.window or 0,
            "BLOCK_M": shape.config.block_m,
            "MIN_KEYS": shape.config.keys,
            "FIXED": shape.fixed or (0 if shape.slots else 1),
            "ROWS": power_of_two(rows),
            "BLOCK": block,
        },
    )
