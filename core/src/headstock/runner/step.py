"""One step of a runner: which rows make a segment, their batches, and who attends to which tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headstock.backend import AttentionBackend
from headstock.batch import ForwardBatch, SharedLevel, to_device
from headstock.device import Device
from headstock.errors import HeadstockError
from headstock.kv.page_table import PageTable
from headstock.layer import AttentionLayer
from headstock.plugins import Observers
from headstock.runner.instances import Instance
from headstock.runner.levels import Levels, Shared

Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""What a model calls once per layer: its index, q, k, v, and where the output goes."""
Mixed = Literal["extend", "split"]


class Segment(NamedTuple):
    """One backend's share of a step: the batch it planned, and its rows of q, k, v and out (None: all)."""

    backend: AttentionBackend
    batch: ForwardBatch
    rows: slice | None = None


class Part(NamedTuple):
    """The rows of a step that make one segment: their batch for every window, None for layers without one.

    `levels` are the shared levels of the batch without a window, by group.
    """

    batches: Mapping[int | None, ForwardBatch]
    levels: Mapping[str, tuple[SharedLevel, ...]]


@dataclass(frozen=True, slots=True)
class Step:
    """One forward's rows, cut into parts that each group's backends plan.

    `order` has the caller's rows in the order in which they run. ids and positions are int64 [T] on the device, `last`
    the last token of each row, None where all tokens are.
    """

    order: list[int]
    ids: Tensor
    positions: Tensor
    last: Tensor | None
    parts: list[Part]

    def in_order_given(self, logits: Tensor) -> Tensor:
        """Rows [R, …] of this step in the caller's order."""
        if self.order == sorted(self.order):
            return logits
        return logits[torch.tensor(self.order).argsort().to(logits.device)]


class Steps:
    """Makes and plans the steps of one runner.

    Rows of one token are decoding. A step of both kinds is one EXTEND segment, or with `mixed="split"` a DECODE and an
    EXTEND segment. The rows of a DECODE segment run in the order that shared prefixes need, if `levels` finds some.
    Token ids are below `vocab_size`. `groups` are the layers of each group, `layers` what backends are told of each.
    """

    def __init__(
        self,
        pages: PageTable,
        levels: Levels,
        device: Device,
        roles: Mapping[tuple[str, str], Instance],
        groups: Mapping[str, Sequence[int]],
        layers: Mapping[int, AttentionLayer],
        observers: Observers,
        mixed: Mixed,
        vocab_size: int,
    ):
        self.vocab_size = vocab_size
        self.pages, self.levels, self.device = pages, levels, device
        self.roles, self.groups, self.layers = roles, groups, layers
        self.observers, self.mixed = observers, mixed
        self.windows = {group: roles[group, "extend"].spec.window for group in groups}

    def make(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Step:
        """The step of these rows, whose pages are reserved; `tokens` are each row's new ones."""
        order: list[int] = []
        parts: list[Part] = []
        for rows in self._parts([len(each) for each in tokens]):
            shared = Shared(list(range(len(rows))), {})
            if all(len(tokens[row]) == 1 for row in rows):
                shared = self.levels.find([slots[row] for row in rows])
            rows = [rows[place] for place in shared.order]
            query_lens = [len(tokens[row]) for row in rows]
            parts.append(Part(self._batches([slots[row] for row in rows], query_lens), shared.levels))
            order += rows
        device = self.device.torch
        flat = np.array([token for row in order for token in tokens[row]], dtype=np.int64)
        if not 0 <= flat.min() <= flat.max() < self.vocab_size:
            works = f"0…{self.vocab_size - 1}, the model's vocabulary"
            raise HeadstockError("a token is not in the vocabulary", given=f"{flat.min()}…{flat.max()}", works=works)
        ids = to_device(device, flat)
        positions = [part.batches[None].positions for part in parts]
        last = None
        if len(ids) > len(slots):
            last = to_device(device, np.cumsum([len(tokens[row]) for row in order], dtype=np.int64) - 1)
        return Step(order, ids, positions[0] if len(parts) == 1 else torch.cat(positions), last, parts)

    def plan(self, step: Step) -> dict[str, list[Segment]]:
        """Each group's segments of a step, planned. Groups of one window share a table; plans are their own."""
        segments: dict[str, list[Segment]] = {}
        for group in self.groups:
            start, segments[group] = 0, []
            for batches, levels in step.parts:
                batch = batches[self.windows[group]]
                backend = self.roles[group, batch.phase].backend
                assert backend is not None, "backends are started when they are chosen"
                own = replace(batch, shared_levels=levels.get(group, ()), _csr={})
                self.observers.notify("before_forward", batch=own)
                backend.init_forward_metadata(own)
                backend.init_forward_metadata_in_graph(own)
                rows = None if len(step.parts) == 1 else slice(start, start := start + batch.num_tokens)
                segments[group].append(Segment(backend, own, rows))
        return segments

    def attend(self, segments: Mapping[str, list[Segment]]) -> Attend:
        """What the model calls once per layer, for segments that are planned."""
        layers = {index: (self.layers[index], segments[group]) for group, own in self.groups.items() for index in own}

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
            layer, parts = layers[index]
            for backend, batch, rows in parts:
                if rows is None:
                    backend.forward(q, k, v, layer, batch, out=out)
                else:
                    backend.forward(q[rows], k[rows], v[rows], layer, batch, out=out[rows])

        return attend

    def served_by(self, step: Step) -> str:
        """The backends of a step in words, with the packages they come from."""
        phases = {part.batches[None].phase for part in step.parts}
        candidates = [each.candidate for (_, role), each in self.roles.items() if role in phases]
        return " and ".join(dict.fromkeys(f"{each.name} ({each.source})" for each in candidates))

    def _batches(self, slots: Sequence[int], query_lens: Sequence[int]) -> dict[int | None, ForwardBatch]:
        """The batch of these rows in the page table, and as each window's cache has them."""
        device, size = self.device.torch, self.pages.page_size
        seq_lens = [self.pages.lengths[slot] + n for slot, n in zip(slots, query_lens, strict=True)]
        table = self.pages.rows(slots, max(seq_lens))
        whole = ForwardBatch.from_lengths(query_lens, seq_lens, table.to(device, non_blocking=True), size)
        batches: dict[int | None, ForwardBatch] = {None: whole}
        for window, pages in self.pages.windows.items():
            own, lens = pages.rows(slots, table, seq_lens)
            own = own.to(device, non_blocking=True)
            batches[window] = ForwardBatch.from_lengths(query_lens, lens, own, size, positions=whole.positions)
        return batches

    def _parts(self, query_lens: Sequence[int]) -> list[list[int]]:
        """The rows of each segment of a step. Split, a mixed step decodes its single tokens apart from the others."""
        rows = range(len(query_lens))
        if self.mixed == "extend":
            return [list(rows)]
        parts = [[row for row in rows if query_lens[row] == 1], [row for row in rows if query_lens[row] > 1]]
        return [part for part in parts if part]
