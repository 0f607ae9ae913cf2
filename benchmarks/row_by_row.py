"""A second backend to choose from where only one is installed: attention row by row, each by torch's fused SDPA.

It wastes nothing on rows of different lengths, and pays for each row with a few calls of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headstock import ANY, AttentionBackend, AttentionLayer, Capabilities, ForwardBatch, Offer


class Row(NamedTuple):
    """A row's tokens, the slots of its keys, and who sees whom among them, where not everybody sees all."""

    tokens: slice
    slots: Tensor
    seen: Tensor | None


class RowByRow(AttentionBackend):
    """Attention with one call of SDPA per row."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        assert batch.query_indptr_cpu is not None, "exact lengths are declared"
        assert batch.seq_lens_cpu is not None, "exact lengths are declared"
        assert batch.page_table is not None, "paged attention alone is declared"
        starts, size, rows = batch.query_indptr_cpu.tolist(), batch.page_size, []
        for row, keys in enumerate(batch.seq_lens_cpu.tolist()):
            at = torch.arange(keys, device=batch.page_table.device)
            slots = batch.page_table[row].index_select(0, at // size).long() * size + at % size
            new = starts[row + 1] - starts[row]
            seen = None if new == 1 else at <= at[keys - new :, None]
            rows.append(Row(slice(starts[row], starts[row + 1]), slots, seen))
        batch.metadata = rows

    def forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: AttentionLayer, batch: ForwardBatch, *,
        out: Tensor, lse: Tensor | None = None,
    ) -> None:  # fmt: skip
        view = layer.kv
        assert view is not None, "paged attention has a cache"
        if k is not None and batch.out_cache_loc is not None:
            view.write(k, v, batch.out_cache_loc)
        group, width = self.spec.num_heads // self.spec.num_kv_heads, self.spec.head_dim
        for row in batch.metadata:
            keys, values = view.gather(row.slots)
            assert values is not None, "and one with values"
            own = q[row.tokens].view(-1, self.spec.num_kv_heads, group, width).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
            keys, values = (x.transpose(0, 1)[:, None] for x in (keys, values))
            if row.seen is None:  # one query: its group is as good as so many queries
                own = own.transpose(1, 2)
            else:
                keys, values = (x.expand(-1, group, -1, -1) for x in (keys, values))
            result = scaled_dot_product_attention(own, keys, values, attn_mask=row.seen, scale=self.spec.scale)
            heads_last = result.permute(1, 0, 2, 3) if row.seen is None else result.permute(2, 0, 1, 3)
            out[row.tokens] = heads_last.flatten(1, 2)

    def describe(self, batch: ForwardBatch) -> Mapping[str, str | int | bool]:
        """How many calls a layer takes."""
        return {"kernel": "sdpa by rows", "calls": len(batch.metadata)}


OFFER = Offer(
    name="row-by-row",
    backend=RowByRow,
    capabilities=Capabilities(
        devices={"cpu", "cuda"}, phases={"extend", "decode"}, attention={"paged"},
        dtypes={"float32", "float16", "bfloat16"}, head_dims=ANY, page_sizes=ANY, kv_layouts={"nhd", "hnd"},
        host_lengths="exact",
    ),
)  # fmt: skip
