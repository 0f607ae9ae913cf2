"""One step of a runner: which rows make a segment, their batches, and who attends to which tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headstock.backend import AttentionBackend, AttentionKind, Phase
from headstock.batch import ForwardBatch, SharedLevel, to_device
from headstock.device import Device
from headstock.kv.page_table import PageTable
from headstock.layer import AttentionLayer
from headstock.models.decoder import Attend
from headstock.models.mla import UpProjection
from headstock.plugins import Observers
from headstock.runner.instances import Instance, Roles
from headstock.runner.latent import AbsorbedSegment, ExpandedSegment
from headstock.runner.levels import Levels, Shared
from headstock.runner.segment import Segment

Mixed = Literal["extend", "split"]
"""How a step of prompts and decoding rows runs: as one EXTEND segment, or cut into an EXTEND and a DECODE segment."""


AnySegment = Segment | ExpandedSegment


def segment(
    backend: AttentionBackend, batch: ForwardBatch, attention: AttentionKind, rows: slice | None = None
) -> AnySegment:
    """The segment of a backend that reads the cache as it is."""
    return AbsorbedSegment(backend, batch, rows) if attention == "mla" else Segment(backend, batch, rows)


class Part(NamedTuple):
    """The rows of a step that make one segment: their batch for every window, None for layers without one.

    `levels` are the shared levels of the batch without a window, by group. `expanded` rows of models with latent
    attention attend in that form.
    """

    batches: Mapping[int | None, ForwardBatch]
    levels: Mapping[str, tuple[SharedLevel, ...]]
    expanded: bool = False


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

    Rows of one token are decoding; a step of both kinds is one segment, or two, as `mixed` says. The rows of a DECODE
    segment run in the order that shared prefixes need, if `levels` finds some. Rows of `expand_from` new tokens or more
    make a segment of their own, in which latent attention is expanded (None: there are none). A segment's rows are
    counted to tell which of a role's backends serves it. `groups` are the layers of each group, `layers` what backends
    are told of each.
    """

    def __init__(
        self,
        pages: PageTable,
        levels: Levels,
        device: Device,
        roles: Roles,
        groups: Mapping[str, Sequence[int]],
        layers: Mapping[int, AttentionLayer],
        observers: Observers,
        mixed: Mixed,
        expand_from: int | None = None,
    ):
        self.pages, self.levels, self.device = pages, levels, device
        self.roles, self.groups, self.layers = roles, groups, layers
        self.observers, self.mixed, self.expand_from = observers, mixed, expand_from
        self.windows = {group: roles[group, "decode"].first.spec.window for group in groups}

    def make(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Step:
        """The step of these rows, whose pages are reserved; `tokens` are each row's new ones."""
        order: list[int] = []
        parts: list[Part] = []
        for rows, expanded in self._parts([len(each) for each in tokens]):
            shared = Shared(list(range(len(rows))))
            if all(len(tokens[row]) == 1 for row in rows):
                shared = self.levels.find([slots[row] for row in rows])
            rows = [rows[place] for place in shared.order]
            query_lens = [len(tokens[row]) for row in rows]
            batches = self._batches([slots[row] for row in rows], query_lens)
            parts.append(Part(batches, shared.tensors, expanded))
            order += rows
        device = self.device.torch
        ids = to_device(device, np.array([token for row in order for token in tokens[row]], dtype=np.int64))
        positions = [part.batches[None].positions for part in parts]
        last = None
        if len(ids) > len(slots):
            last = to_device(device, np.cumsum([len(tokens[row]) for row in order], dtype=np.int64) - 1)
        return Step(order, ids, positions[0] if len(parts) == 1 else torch.cat(positions), last, parts)

    def plan(self, step: Step) -> dict[str, list[AnySegment]]:
        """Each group's segments of a step, planned. Groups of one window share a table; plans are their own."""
        segments: dict[str, list[AnySegment]] = {}
        for group in self.groups:
            start, segments[group] = 0, []
            for part in step.parts:
                batch = part.batches[self.windows[group]]
                rows = None if len(step.parts) == 1 else slice(start, start := start + batch.num_tokens)
                own = replace(batch, shared_levels=part.levels.get(group, ()), _csr={})
                segments[group].append(self._segment(group, own, rows, part.expanded))
        for each in chain.from_iterable(segments.values()):
            self.observers.notify("before_forward", batch=each.batch)
            each.plan()
        return segments

    def captured(self, batches: Mapping[str, ForwardBatch]) -> dict[str, list[AnySegment]]:
        """Each group's segment of a decode step that a graph holds, whose batches the graph runner plans."""
        return {group: [self._segment(group, batches[group], None, False)] for group in self.groups}

    def attend(self, segments: Mapping[str, Sequence[AnySegment]]) -> Attend:
        """What the model calls once per layer, for segments that are planned."""
        layers = {index: (self.layers[index], segments[group]) for group, own in self.groups.items() for index in own}

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor | UpProjection, out: Tensor) -> None:
            layer, parts = layers[index]
            for part in parts:
                rows = part.rows
                if rows is None:
                    part.run(q, k, v, layer, out)
                else:
                    part.run(q[rows], k[rows], v[rows] if isinstance(v, Tensor) else v, layer, out[rows])

        return attend

    def served_by(self, query_lens: Sequence[int]) -> str:
        """The backends of a step of such rows in words, with the packages they come from."""
        candidates = []
        for rows, expanded in self._parts(query_lens):
            phase: Phase = "decode" if all(query_lens[row] == 1 for row in rows) else "extend"
            serving = (self._serving(group, phase, len(rows), expanded) for group in self.groups)
            candidates += [instance.candidate for instance, _ in serving]
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

    def _segment(self, group: str, batch: ForwardBatch, rows: slice | None, expanded: bool) -> AnySegment:
        instance, expands = self._serving(group, batch.phase, batch.num_reqs, expanded)
        assert instance.backend is not None, "backends are started when they are chosen"
        if expands:
            return ExpandedSegment.of(instance.backend, batch, rows)
        return segment(instance.backend, batch, instance.spec.attention, rows)

    def _serving(self, group: str, phase: Phase, rows: int, expanded: bool) -> tuple[Instance, bool]:
        """The instance that serves a segment of so many rows, and whether it expands latent vectors."""
        expands = expanded and (group, "expand") in self.roles
        return self.roles[group, "expand" if expands else phase].at(rows), expands

    def _parts(self, query_lens: Sequence[int]) -> list[tuple[list[int], bool]]:
        """The rows of each segment of a step, and whether they are expanded.

        Split, a mixed step decodes its single tokens apart from the others.
        """
        kinds: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for row, count in enumerate(query_lens):
            expanded = self.expand_from is not None and count >= self.expand_from
            kinds[2 if expanded else int(self.mixed == "split" and count > 1)].append(row)
        return [(rows, kind == 2) for kind, rows in kinds.items() if rows]
