"""Planted faults: who sees whom: windows, causality, masks and lengths."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headstock.batch import ForwardBatch
from headstock.testing.specimen import Plan, Specimen


class WindowOneMore(Specimen):
    """A window of w shows w + 1 keys."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return _with_window(self, 1).sees(batch, plan, keys, own, first)


class WindowOneLess(Specimen):
    """A window of w shows w − 1 keys, but one at least."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return _with_window(self, -1).sees(batch, plan, keys, own, first)


class WindowIgnoredInDecode(Specimen):
    """Decode reads the whole context of a windowed layer."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        mutant = _with_window(self, 10**6) if batch.phase == "decode" else _plain(self)
        return mutant.sees(batch, plan, keys, own, first)


class WindowIgnoredInExtend(Specimen):
    """Extend reads the whole context of a windowed layer."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        mutant = _with_window(self, 10**6) if batch.phase == "extend" else _plain(self)
        return mutant.sees(batch, plan, keys, own, first)


class WindowByIndex(Specimen):
    """The window is measured on the row's last key, not on each query."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        seen = _with_window(self, 10**6).sees(batch, plan, keys, own, first)
        last = plan.lens[plan.rows][:, None] - 1
        return seen if self.spec.window is None else seen & (last - keys < self.spec.window)


class CausalSeesOneMore(Specimen):
    """A query sees the key after its own."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return super().sees(batch, plan, keys, own + 1, first)


class CausalSeesOneLess(Specimen):
    """A query does not see its own key."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return super().sees(batch, plan, keys, own - 1, first)


class CausalTopLeft(Specimen):
    """Queries are aligned to the first key, not to the last."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return super().sees(batch, plan, keys, own, torch.zeros_like(first))


class CausalIgnored(Specimen):
    """Extend lets every query see every key of its row."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return super().sees(replace(batch, causal=False), plan, keys, own, first)


class NonCausalIgnored(Specimen):
    """Cross attention and encoders are masked as if they were causal."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return super().sees(replace(batch, causal=True), plan, keys, own, first)


class VerifySeesWholeBlock(Specimen):
    """All query tokens of a decode row see all of its keys, those after them too."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return super().sees(batch, plan, keys, own + batch.query_len, first)


class QueryMaskIgnored(Specimen):
    """New tokens see those before them, whatever the mask says."""

    def sees(self, batch: ForwardBatch, plan: Plan, keys: Tensor, own: Tensor, first: Tensor) -> Tensor:
        return super().sees(replace(batch, query_mask=None), plan, keys, own, first)


class QueryMaskTransposed(Specimen):
    """The mask is read by columns."""

    def among_new(self, batch: ForwardBatch, rows: Tensor, own: Tensor, new: Tensor) -> Tensor:
        assert batch.query_mask is not None, "asked only with a mask"
        assert batch.mask_indptr is not None, "a mask comes with its pointers"
        lens = batch.query_indptr.diff()[rows].long()[:, None]
        return batch.query_mask[
            batch.mask_indptr[rows][:, None] + new.clamp(min=0).minimum(lens - 1) * lens + own[:, None]
        ]


class QueryMaskOfFirstRow(Specimen):
    """Every row uses the first row's mask."""

    def among_new(self, batch: ForwardBatch, rows: Tensor, own: Tensor, new: Tensor) -> Tensor:
        assert batch.mask_indptr is not None, "a mask comes with its pointers"
        return super().among_new(replace(batch, mask_indptr=torch.zeros_like(batch.mask_indptr)), rows, own, new)


class ReadsPastLength(Specimen):
    """The last page is read to its end."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        if batch.page_size:
            lens = batch.metadata.lens
            lens.copy_((lens + batch.page_size - 1) // batch.page_size * batch.page_size)


class ForgetsLastKey(Specimen):
    """A row's newest key is not read once there are others."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        plan: Plan = batch.metadata
        keys = torch.arange(plan.seen.shape[1], device=plan.seen.device)  # type: ignore[union-attr]
        plan.seen &= (keys < plan.lens[plan.rows][:, None] - 1) | (keys == 0)  # type: ignore[operator]


def _with_window(backend: Specimen, more: int) -> Specimen:
    """A plain specimen whose window is `more` keys wider."""
    window = backend.spec.window
    spec = replace(backend.spec, window=None if window is None else max(window + more, 1))
    return Specimen(spec, backend.workspace)


def _plain(backend: Specimen) -> Specimen:
    return Specimen(backend.spec, backend.workspace)
