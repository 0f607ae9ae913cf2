"""The backend: caches the new keys and values, runs the planned wrappers, and merges what they leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from headstock import (
    AttentionBackend,
    AttentionLayer,
    BackendSpec,
    ForwardBatch,
    HeadstockError,
    Offer,
    PagedView,
    Progress,
    Workspace,
    WorkspaceBytes,
)  # fmt: skip
from headstock_flashinfer import OFFER, compile
from headstock_flashinfer.accessor import Library, library, version
from headstock_flashinfer.choice import choose
from headstock_flashinfer.graph import Bucket
from headstock_flashinfer.memory import Memory
from headstock_flashinfer.plan import Plan, Slots, make_plan
from headstock_flashinfer.workspace import Planner
from headstock_flashinfer.wrappers import Pool, Ragged, Wrappers

LN2 = math.log(2)


class FlashInferAttention(AttentionBackend):
    """Attention by FlashInfer, planned once per batch on the host for all layers; `forward` only runs.

    Raises HeadstockError for a spec that its offer does not cover, and for options that name a kernel which cannot do
    what the spec asks.
    """

    offer: ClassVar[Offer] = OFFER

    @staticmethod
    def library() -> Library:
        """The FlashInfer that instances use."""
        return library()

    @staticmethod
    def on_its_device(spec: BackendSpec) -> BackendSpec:
        """The spec with what it leaves open of its GPU, where the GPU is here."""
        if not spec.device.startswith("cuda") or not torch.cuda.is_available():
            return spec
        if spec.compute_capability is not None and spec.num_sms:
            return spec
        found = torch.cuda.get_device_properties(torch.device(spec.device))
        return replace(
            spec,
            compute_capability=spec.compute_capability or found.major * 10 + found.minor,
            num_sms=spec.num_sms or found.multi_processor_count,
        )

    def __init__(self, spec: BackendSpec, workspace: Workspace):
        self.offer.check(spec)
        spec = self.on_its_device(spec)
        super().__init__(spec, workspace)
        self.choice = choose(spec)
        self.flashinfer = self.library()
        self.memory = Memory(spec, version(), workspace.state)
        if workspace.scratch.numel() < (needed := self.memory.bytes.scratch):
            raise HeadstockError(
                "the scratch workspace is too small", given=workspace.scratch.numel(), works=f"{needed} bytes"
            )
        splits = Planner(spec, self.choice, version()).split_pages()
        self.make = Wrappers(spec, self.choice, self.flashinfer, workspace.scratch, splits)
        self.pool = Pool(self.make, self.memory.plans)
        self.buckets: dict[tuple[int, int, int], Bucket] = {}

    @classmethod
    def workspace_bytes(cls, spec: BackendSpec) -> WorkspaceBytes:
        """The states of split tiles, shared by all wrappers, and what each of them plans into."""
        return Memory(cls.on_its_device(spec), version()).bytes

    @classmethod
    def prepare(cls, spec: BackendSpec, report: Callable[[Progress], None]) -> None:
        """Compiles the modules that `spec` runs and that are not there yet."""
        compile.prepare(cls.on_its_device(spec), report)

    def init_cuda_graph_state(self, batches: Sequence[ForwardBatch]) -> None:
        for bucket, ints in zip(self.spec.graph_buckets, self.memory.buckets, strict=True):
            self.buckets[bucket] = Bucket(self.make, self.memory, ints, *bucket)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        if batch.graph is not None:
            batch.metadata = self._bucket(batch).prepare(batch)
            return
        plan = Plan("paged", [])
        batch.metadata = plan
        make_plan(self.spec, self.choice, batch, plan, self.pool.take(plan))

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        if batch.graph is not None:
            self._bucket(batch).refresh(batch)
        elif batch.page_table is not None:
            batch.metadata.slots = Slots.of(batch, self.memory.counting)

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, *,
        out: Tensor, lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        plan: Plan = batch.metadata
        plan.check()
        if lse is not None and not self.spec.lse:
            raise HeadstockError("this instance was made without log-sum-exp", works="BackendSpec(lse=True)")
        if not plan.wrappers:
            _finish(plan, layer, out, lse)
            return
        if batch.page_table is None:
            pages = None
        else:
            view = cast(PagedView, layer.kv)  # what nhd and hnd are seen through
            if k is not None and v is not None:
                self._cache(k, v, view, layer, plan, batch)
            pages = (view.k, view.v)
            if isinstance(plan.wrappers[0], Ragged) and (k is None or v is None):
                k, v = _as_given(view, layer, batch)
        given = None if k is None or v is None else (k, v)
        self._attend(plan, q, given, pages, layer, out, lse)

    def describe(self, batch: ForwardBatch) -> Mapping[str, str | int | bool]:
        """The wrappers that run and their kernel, that of the rows' own keys, and the figures of its plan."""
        plan: Plan = batch.metadata
        if not plan.wrappers:
            return {"kernel": "none, no token sees a key"}
        own = plan.wrappers[0]
        told: dict[str, str | int | bool] = {
            "kernel": f"{plan.serving} {own.kernel}",
            "tensor_cores": own.kernel != "cuda-cores",
            "levels": len(plan.wrappers) - 1 if plan.serving == "cascade" else 0,
        }
        if self.spec.kv_dtype != self.spec.dtype:
            told["upcast"] = self.spec.dtype
        return told | self.flashinfer.figures(own.inner)

    def _bucket(self, batch: ForwardBatch) -> Bucket:
        key = (batch.num_reqs, batch.query_len, len(batch.shared_levels))
        if key not in self.buckets:
            raise HeadstockError(
                "no graph was announced for this batch", given=key, works=str([tuple(each) for each in self.buckets])
            )
        return self.buckets[key]

    def _cache(
        self, k: Tensor, v: Tensor, view: PagedView, layer: AttentionLayer, plan: Plan, batch: ForwardBatch
    ) -> None:
        """Leaves the new tokens in the cache: by FlashInfer's append, one launch, where nothing is to be converted."""
        slots = plan.slots
        plain = view.k.dtype == k.dtype and (layer.k_scale, layer.v_scale) == (1.0, 1.0)
        if slots is not None and plain and view.k.stride() == view.v.stride():
            self.flashinfer.append(
                k, v, slots.tokens, slots.offsets, (view.k, view.v), slots.pages, slots.indptr, slots.offsets, "NHD"
            )
        elif batch.out_cache_loc is not None:
            view.write(k, v, batch.out_cache_loc)

    def _attend(
        self, plan: Plan, q: Tensor, given: tuple[Tensor, Tensor] | None, pages: tuple[Tensor, Tensor] | None,
        layer: AttentionLayer, out: Tensor, lse: Tensor | None,
    ) -> None:  # fmt: skip
        """Runs the wrappers into contiguous results, which is all that FlashInfer writes, and finishes them."""
        first, *others = plan.wrappers
        result = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        state = lse
        if (state is None and (others or layer.sinks is not None)) or (state is not None and not state.is_contiguous()):
            state = q.new_empty(q.shape[:2], dtype=torch.float32)
        for wrapper in plan.wrappers:
            keys = given if isinstance(wrapper, Ragged) else pages
            if keys is None:
                raise HeadstockError(
                    "ragged attention has no cache to read from", given="k or v is None", works="both given"
                )
            if wrapper is first:
                wrapper.run(q, keys, layer, result, state)
                continue
            assert state is not None, "states are merged by their log-sum-exp"
            part, its = torch.empty_like(result), torch.empty_like(state)
            wrapper.run(q, keys, layer, part, its)
            self.flashinfer.merge(result, state, part, its)
        _finish(plan, layer, result, state)
        if result is not out:
            out.copy_(result)
        if lse is not None and state is not None and state is not lse:
            lse.copy_(state)


def _as_given(view: PagedView, layer: AttentionLayer, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    """The new tokens' keys and values from the cache."""
    assert batch.out_cache_loc is not None, "a split batch caches its new tokens"
    k, v = view.gather(batch.out_cache_loc)
    assert v is not None, "a paged cache holds values"
    return k if layer.k_scale == 1.0 else k * layer.k_scale, v if layer.v_scale == 1.0 else v * layer.v_scale


def _finish(plan: Plan, layer: AttentionLayer, out: Tensor, lse: Tensor | None) -> None:
    """What no wrapper does: natural logarithms, sinks, and rows that see no key.

    A sink is one more logit: with log-sum-exp l without it, the output shrinks to e^l / (e^l + e^sink) of itself.
    """
    if lse is not None:
        lse.mul_(LN2)
        if layer.sinks is not None:
            out.mul_(torch.sigmoid(lse - layer.sinks)[..., None])
            torch.logaddexp(lse, layer.sinks, out=lse)
    if plan.blind is not None:
        out.index_fill_(0, plan.blind, 0.0)
        if lse is not None:
            lse.index_fill_(0, plan.blind, -math.inf)
