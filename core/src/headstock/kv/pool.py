"""The memory of the KV cache: one pool per layer group, seen through the group's layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headstock.backend import BackendSpec
from headstock.device import zeroed
from headstock.kv.layout import KVLayout, KVView


class KVPool:
    """Pages for every layer of one group: uint8 [layers, num_pages, bytes_per_page], zeroed, and a view per layer.

    `scales` holds a (k_scale, v_scale) per layer, 1 by default: the cache stores x / scale.
    """

    def __init__(
        self,
        spec: BackendSpec,
        layout: type[KVLayout],
        num_layers: int,
        num_pages: int,
        scales: Sequence[tuple[float, float]] | None = None,
    ):
        shape = (num_layers, num_pages, layout.bytes_per_page(spec))
        self.storage = zeroed(math.prod(shape), spec.device).view(shape)
        scales = scales or [(1.0, 1.0)] * num_layers
        self.views: list[KVView] = [
            layout.view(storage, spec, *scale) for storage, scale in zip(self.storage, scales, strict=True)
        ]
