"""The plan of an eager batch: which wrappers run, in order, planned; and what no wrapper does by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headstock import BackendSpec, ForwardBatch, HeadstockError
from headstock_flashinfer.choice import Choice
from headstock_flashinfer.dispatch import Facts, Serving, own, paged_kernel, serving
from headstock_flashinfer.mask import full_mask
from headstock_flashinfer.wrappers import Ragged, Slot, Wrapper


class Slots(NamedTuple):
    """Where new tokens are cached, as FlashInfer's append takes it: each token is a row of one page.

    pages and offsets int32 [T]; tokens [T] and indptr [T+1] count from 0.
    """

    pages: Tensor
    offsets: Tensor
    tokens: Tensor
    indptr: Tensor

    @classmethod
    def of(cls, batch: ForwardBatch, counting: Tensor) -> Slots | None:
        """Those of a batch, worked out on the device; None where nothing is cached."""
        loc = batch.out_cache_loc
        if loc is None:
            return None
        loc, count = loc.int(), batch.num_tokens
        pages = torch.div(loc, batch.page_size, rounding_mode="floor")
        return cls(pages, torch.remainder(loc, batch.page_size), counting[:count], counting[: count + 1])


@dataclass(slots=True, weakref_slot=True, eq=False)
class Plan:
    """Wrappers in the order they run, own keys first; every later one is merged into what is there. None where no
    token sees a key.

    `blind` int64 has the tokens that see no key, None where there are none. `slots` are worked out on the device, once
    the host has planned. An eager plan lives as long as its slot is not given to another.
    """

    serving: Serving
    wrappers: list[Wrapper]
    blind: Tensor | None = None
    slots: Slots | None = None
    slot: Slot | None = field(default=None, repr=False)

    def check(self) -> None:
        """Raises HeadstockError where more plans were made since than may be alive at once."""
        if self.slot is not None and not self.slot.belongs_to(self):
            raise HeadstockError(
                "this batch's plan was given up for a later one", works="BackendSpec(max_plans=…) as many as are alive"
            )


def make_plan(spec: BackendSpec, choice: Choice, batch: ForwardBatch, plan: Plan, slot: Slot) -> None:
    """Plans an eager batch into `plan`, whose slot is `slot`."""
    facts = Facts.of(batch)
    plan.serving, plan.slot = serving(spec, choice, facts), slot
    causal = batch.causal or spec.window is not None  # a window hides what comes later, too
    plan.blind = _blind(batch, causal and not facts.mask)
    if plan.serving == "ragged" and plan.blind is not None and len(plan.blind) == batch.num_tokens:
        return  # fa3 finds no keys at all to describe to the device, and says so on the console
    if plan.serving == "ragged":
        wrapper = slot.ragged()
        wrapper.plan(_host(batch.query_indptr_cpu), _host(batch.kv_indptr_cpu), causal=causal)
        plan.wrappers = [wrapper]
        return
    plan.wrappers = _own(spec, choice, facts, batch, slot, causal)
    if plan.serving == "cascade":
        for place, level in enumerate(batch.shared_levels, 1):
            shared = slot.paged("fa2", place)
            queries = _host(batch.query_indptr_cpu)[level.row_indptr_cpu.long()]
            last = (level.page_indptr_cpu.diff() > 0).int() * spec.page_size
            shared.plan(queries, level.page_indptr_cpu, level.page_indices, last, causal=False)
            plan.wrappers.append(shared)


def _own(
    spec: BackendSpec, choice: Choice, facts: Facts, batch: ForwardBatch, slot: Slot, causal: bool
) -> list[Wrapper]:
    """The planned wrappers of the rows' own keys, in pages."""
    queries, shared = _host(batch.query_indptr_cpu), serving(spec, choice, facts) == "cascade"
    match own(choice, facts):
        case "decode":
            decode = slot.decode()
            decode.plan_rows(batch, "own" if shared else "all")
            return [decode]
        case "split":
            ragged: Ragged = slot.ragged()
            ragged.plan(queries, queries, causal=True)
            if not facts.prefix:
                return [ragged]
            csr, before = batch.csr("prefix"), slot.paged(choice.prefill, 1)
            before.plan(queries, csr.page_indptr_cpu, csr.page_indices, csr.last_page_len_cpu, causal=False)
            return [ragged, before]
        case _:
            csr = batch.csr("own" if shared else "all")
            paged = slot.paged(paged_kernel(choice, facts, batch.phase))
            mask = full_mask(batch, spec.window) if facts.mask else None
            paged.plan(
                queries, csr.page_indptr_cpu, csr.page_indices, csr.last_page_len_cpu, causal=causal, mask=mask
            )  # fmt: skip
            return [paged]


def _blind(batch: ForwardBatch, causal: bool) -> Tensor | None:
    """The tokens that see no key: all of a row without keys and, right-aligned, those before its first key."""
    lens, indptr = _host(batch.seq_lens_cpu).numpy(), _host(batch.query_indptr_cpu).numpy()
    queries = np.diff(indptr)
    unseeing = np.maximum(queries - lens, 0) if causal else np.where(lens == 0, queries, 0)
    if not unseeing.any():
        return None
    tokens = np.concatenate([np.arange(first, first + n) for first, n in zip(indptr[:-1], unseeing, strict=True)])
    return torch.from_numpy(tokens.astype(np.int64)).to(batch.seq_lens.device, non_blocking=True)


def _host(values: Tensor | None) -> Tensor:
    assert values is not None, "exact host lengths are declared"
    return values
