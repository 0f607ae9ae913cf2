"""The scene of latent attention: cached vectors, and what takes queries, keys and outputs in and out of their space."""

from __future__ import annotations

from typing import Any

import torch

from headstock.backend import AttentionBackend, BackendSpec
from headstock.batch import ForwardBatch
from headstock.bench.scene import Scene
from headstock.bench.workload import Workload
from headstock.kv.layout import KVLayout
from headstock.models.config import LayerShape
from headstock.models.deepseek_config import MLAConfig
from headstock.models.mla import UpProjection
from headstock.runner.latent import AbsorbedSegment, ExpandedSegment, expansion_bytes

TOLERANCES = {torch.float32: 1e-4}
"""How far an output may be from the reference, as a part of the largest number there, by dtype; 0.03 elsewhere."""


class LatentScene(Scene):
    """A scene on which either form of latent attention is run whole: queries and outputs are of all heads.

    `spec` is of the cached vectors, as the absorbed form reads them; `shape` is the layer's. The up-projection has
    random weights.
    """

    def __init__(
        self, spec: BackendSpec, layout: type[KVLayout], workload: Workload, shape: LayerShape, **lies: Any
    ):  # fmt: skip
        super().__init__(spec, layout, workload, **lies)
        assert shape.latent is not None, "asked of layers that cache latent vectors"
        rank, rope = shape.latent
        sizes = {"context": workload.context, "max_batch": workload.rows, "max_tokens": workload.tokens, "least": 1}
        self._check_fits(expansion_bytes(shape, **sizes, size=self.q.dtype.itemsize), "expanded keys and values")
        nope, heads = shape.head_dim - rope, shape.num_heads
        mla = MLAConfig(q_rank=None, kv_rank=rank, nope_dim=nope, rope_dim=rope, v_dim=shape.v_head_dim)
        self.up = UpProjection(mla, self._normal(heads * (nope + shape.v_head_dim), rank) * rank**-0.5)
        self.q = self._normal(workload.tokens, heads, shape.head_dim)
        self.out = self.q.new_empty(workload.tokens, heads, shape.v_head_dim)

    def segment(
        self, backend: AttentionBackend, batch: ForwardBatch, absorbed: bool
    ) -> AbsorbedSegment | ExpandedSegment:
        """This scene's batch, planned for by `batch`, in one form."""
        return AbsorbedSegment(backend, batch) if absorbed else ExpandedSegment.of(backend, batch, None)

    def check(self) -> None:
        """Compares the output of the first layer, in tokens of a few rows, with attention in float64.

        Queries are taken into the latent space there, which is the shorter way.
        """
        rows, tokens, _, lens = self._sampled()
        storage, table = self._part_of_cache(rows, lens)
        mla, size = self.up.config, self.spec.page_size
        weight = self.up.weight.cpu().double().view(self.up.num_heads, -1, mla.kv_rank)
        view = self.layout.view(storage, self.spec, 1.0, 1.0)
        for i, (token, length) in enumerate(zip(tokens, lens, strict=True)):
            keys = torch.arange(length)
            cached = view.gather(table[i].long()[keys // size] * size + keys % size)[0][:, 0].double()
            q = self.q[token].cpu().double()
            q = torch.cat((torch.einsum("hn,hnr->hr", q[:, : mla.nope_dim], weight[:, : mla.nope_dim]),
                           q[:, mla.nope_dim :]), -1)  # fmt: skip
            seen = (q @ cached.T * self.spec.scale).softmax(-1) @ cached[:, : mla.kv_rank]
            expected = torch.einsum("hr,hvr->hv", seen, weight[:, mla.nope_dim :])
            worst = float((self.out[token].cpu().double() - expected).abs().max() / expected.abs().max())
            if not worst <= TOLERANCES.get(self.out.dtype, 0.03):
                raise AssertionError(f"token {token} is wrong by {worst:.3g} of its largest number")
