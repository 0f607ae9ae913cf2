"""The sizes that the suite tries of what a record declares: dims, heads, pages, layouts."""

from __future__ import annotations

from typing import Literal

from headstock.capabilities import Capabilities
from headstock.ints import Ints

Level = Literal["quick", "full"]

PAGE_SIZES = (1, 2, 3, 4, 16, 24, 32, 64, 128, 256)
HEAD_DIMS = (20, 36, 64, 80, 96, 128, 192, 256)
V_HEAD_DIMS = ((24, 16), (64, 32), (192, 128))
GQA_RATIOS = tuple(range(1, 17))
LATENTS = ((16, 8), (64, 16), (128, 64), (256, 32), (512, 64))
"""Ranks and rope dims of latents, DeepSeek's last."""
HEADS = (1, 2, 3, 5, 8, 16, 20, 32, 64, 128)
"""Query heads that share a latent."""
QUERY_LENS = (2, 3, 4, 8)
QUICK = {
    "page_sizes": (1, 3, 4, 16), "head_dims": (20, 64, 80, 96), "gqa": (1, 3, 5, 7, 8), "query_lens": (2, 3),
    "heads": (1, 3, 16, 128),
}  # fmt: skip
"""What the quick level keeps of each sweep; the full level keeps all."""


class Sizes:
    """Of one record and attention kind, those sizes among the ones worth trying that it declares."""

    def __init__(self, record: Capabilities, kind: str, level: Level):
        self.record, self.level = record, level
        self.cached, self.latent = kind != "ragged", kind == "mla"

    def pages(self) -> list[int]:
        if not self.cached:
            return [0]
        assert self.record.page_sizes is not None, "paged records have page sizes"
        return self.keep("page_sizes", PAGE_SIZES, self.record.page_sizes) or [self.record.page_sizes.nearest(4)]

    def dims(self) -> list[tuple[int, int]]:
        """Sizes of a key and a value, the base's first; of a latent all that are tried, as R + P and R."""
        head_dims, v_head_dims = self.record.head_dims, self.record.v_head_dims
        if isinstance(v_head_dims, str) or not self.latent:
            dim = head_dims.nearest(16)
            return [(dim, dim if isinstance(v_head_dims, str) else v_head_dims.nearest(dim))]
        own = [(d, r) for d in head_dims.values or () for r in v_head_dims.values or () if r < d]
        tried = [(rank + rope, rank) for rank, rope in (LATENTS[:2] if self.level == "quick" else LATENTS)]
        found = [(d, r) for d, r in (*tried, *sorted(own)) if d in head_dims and r in v_head_dims]
        return list(dict.fromkeys(found)) or [(head_dims.nearest(576), v_head_dims.nearest(512))]

    def layouts(self) -> list[str]:
        """The layouts of this kind's cache, the base's first."""
        mine = [name for name in sorted(self.record.kv_layouts) if (name == "latent") == self.latent]
        return sorted(mine or self.record.kv_layouts, key=lambda name: (name != "nhd", name))

    def heads(self, ratio: int) -> dict[str, int]:
        """Head counts of a ratio, or of the nearest that is declared; in MLA all heads share one key."""
        if self.latent:
            counts = [n for n in (ratio, *HEADS) if n in self.record.num_heads and n in self.record.gqa_ratios]
            return {"num_kv_heads": 1, "num_heads": counts[0] if counts else self.record.num_heads.nearest(ratio)}
        ratio = self.record.gqa_ratios.nearest(ratio)
        return {"num_kv_heads": self._kv_heads(ratio), "num_heads": self._kv_heads(ratio) * ratio}

    def _kv_heads(self, ratio: int) -> int:
        """Key heads for a ratio: two, where the record's head counts allow, else as many as make one of them."""
        for heads in (2, 1, 3, 4, 8, 16):
            if heads * ratio in self.record.num_heads:
                return heads
        return max(self.record.num_heads.nearest(2 * ratio) // ratio, 1)

    def keep(self, sweep: str, values: tuple[int, ...], declared: Ints) -> list[int]:
        """Which values of a sweep are declared; where they are declared one by one, every one of them."""
        wanted = QUICK[sweep] if self.level == "quick" else values
        return sorted({value for value in wanted if value in declared} | (declared.values or set()))
