"""What is fixed for one layer: its cache view, its scales, its sinks and slopes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from headstock.kv.layout import KVView


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer as a backend sees it.

    `kv` is the layer's cache, None where nothing is cached (ragged). `k_scale` and `v_scale` are host floats: the cache
    holds x / scale, a reader multiplies by scale; a latent cache has one, `k_scale`. `sinks` [Hq] float32 is one more
    logit per head, neither scaled nor capped. `alibi_slopes` [Hq] float32 adds slope · (key position − query position)
    to a scaled, capped logit.
    """

    index: int
    kv: KVView | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
