"""One box of capabilities in one phase and attention kind: a base configuration, and the problems around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random
from typing import Any, Literal

from headstock.capabilities import Capabilities
from headstock.ints import Ints

Level = Literal["quick", "full"]
Fields = dict[str, Any]

PAGE_SIZES = (1, 2, 3, 4, 16, 24, 32, 64, 128, 256)
HEAD_DIMS = (20, 36, 64, 80, 96, 128, 192, 256)
V_HEAD_DIMS = ((24, 16), (64, 32), (192, 128))
GQA_RATIOS = tuple(range(1, 17))
QUERY_LENS = (2, 3, 4, 8)
RANDOM = 60
"""Random problems at the full level, for each record, phase and kind."""
QUICK = {
    "page_sizes": (1, 3, 4, 16), "head_dims": (20, 64, 80, 96), "gqa": (1, 3, 5, 7, 8), "query_lens": (2, 3),
}  # fmt: skip
"""What the quick level keeps of each sweep; the full level keeps all."""


class Box:
    """The cases of one record, attention kind and phase: a base configuration, and one axis at a time from there."""

    def __init__(self, record: Capabilities, kind: str, phase: str, device: str, level: Level):
        self.record, self.kind, self.phase, self.level = record, kind, phase, level
        self.paged = kind == "paged"
        group = record.gqa_ratios.nearest(2)
        dtype = next(name for name in ("float32", "float16", "bfloat16", "float64") if name in record.dtypes)
        head_dim = record.head_dims.nearest(16)
        self.base: Fields = {
            "device": device,
            "attention": kind,
            "phases": frozenset({phase}),
            "phase": phase,
            "dtype": dtype,
            "num_kv_heads": self._kv_heads(group),
            "num_heads": self._kv_heads(group) * group,
            "head_dim": head_dim,
            "v_head_dim": head_dim if record.v_head_dims == "same" else record.v_head_dims.nearest(head_dim),
            "host_lengths": "bound" if record.host_lengths == "none" else record.host_lengths,
        }
        if self.paged:
            assert record.page_sizes is not None, "paged records have page sizes"
            same = "same" in record.kv_dtypes or dtype in record.kv_dtypes
            self.base |= {
                "page_size": record.page_sizes.nearest(4),
                "kv_layout": "nhd" if "nhd" in record.kv_layouts else min(record.kv_layouts),
                "kv_dtype": dtype if same else min(record.kv_dtypes),
            }
        self.n = record.query_lens.nearest(1) if phase == "decode" else 0

    def cases(self) -> Iterator[tuple[str, str, Fields]]:
        """(what, law, fields) of every case."""
        yield from self._lengths()
        for what, fields in [*self._shapes(), *self._features()]:
            yield what, "matches", self.batched(fields)
        for what, fields in self._many():
            yield what, "matches", fields
        yield from self._laws()
        if self.level == "full":
            for seed in range(RANDOM):
                yield f"random-{seed}", "matches", self._random(Random(f"{self.phase} {self.kind} {seed}"))

    def chunked(self) -> Iterator[Fields]:
        """Prompts of one row that are cut in chunks."""
        for length in self._sizes(self.base, 1):
            if length > 1:
                yield {**self.base, "query_lens": (length,), "seq_lens": (length,)}

    def _lengths(self) -> Iterator[tuple[str, str, Fields]]:
        """Lengths about the edges of pages: each alone at the base page size, all together at every other."""
        for new, length in self._rows(self.base):
            yield f"{new}-of-{length}", "matches", {**self.base, "query_lens": (new,), "seq_lens": (length,)}
        for page in self._pages():
            fields = {**self.base, "page_size": page} if self.paged else self.base
            yield f"page-{page}", "matches", {**fields, **self._batch(fields), **self._lse()}

    def _many(self) -> Iterator[tuple[str, Fields]]:
        """Many rows and long ones: what a small problem cannot show of blocks, splits and grids."""
        rows, page = (33, 129) if self.level == "full" else (33,), self.base.get("page_size") or 4
        few = {**self.base, "num_kv_heads": self._kv_heads(self.record.gqa_ratios.nearest(1))}
        few["num_heads"] = few["num_kv_heads"] * self.record.gqa_ratios.nearest(1)
        n = self.n or 1
        for count in rows:
            lens = tuple(n + i * 7 % (3 * page) for i in range(count))
            yield f"rows-{count}", {**self.base, "max_batch": 160, "query_lens": (n,) * count, "seq_lens": lens}
        for length in (1100, 2500) if self.level == "full" else (1100,):
            if length in self.record.max_context:
                new = self.n or 3
                lens = (length, new + 5, length // 3)
                yield f"long-{length}", {**few, "query_lens": (new,) * 3, "seq_lens": lens}
        if self.record.sliding_window and 200 in self.record.max_context:
            for window in (16, 33, 64):
                lens = (window + n, 130 + n, 200)
                yield f"long-window-{window}", {**few, "window": window, "query_lens": (n,) * 3, "seq_lens": lens}

    def _shapes(self) -> Iterator[tuple[str, Fields]]:
        """Head dims, ratios, dtypes, layouts and query lengths."""
        record, base = self.record, self.base
        dims = [*self._keep("head_dims", HEAD_DIMS, record.head_dims), record.head_dims.nearest(1)]
        for dim in dict.fromkeys(dims):
            v_dim = (
                dim if record.v_head_dims == "same" or dim in record.v_head_dims else record.v_head_dims.nearest(dim)
            )
            yield f"head-dim-{dim}", {**base, "head_dim": dim, "v_head_dim": v_dim}
        if isinstance(record.v_head_dims, Ints):
            own = [(base["head_dim"], v_dim) for v_dim in sorted(record.v_head_dims.values or ())]
            for dim, v_dim in (*V_HEAD_DIMS, *own):
                if dim in record.head_dims and v_dim in record.v_head_dims:
                    yield f"v-head-dim-{dim}-{v_dim}", {**base, "head_dim": dim, "v_head_dim": v_dim}
        for ratio in self._keep("gqa", GQA_RATIOS, record.gqa_ratios):
            heads = {"num_kv_heads": self._kv_heads(ratio), "num_heads": self._kv_heads(ratio) * ratio}
            if heads["num_heads"] in record.num_heads:
                yield f"gqa-{ratio}", {**base, **heads}
        for kv_heads, ratio in ((3, record.gqa_ratios.nearest(3)), (8, record.gqa_ratios.nearest(4))):
            if kv_heads * ratio in record.num_heads:
                yield (
                    f"kv-heads-{kv_heads}",
                    {**base, "num_heads": kv_heads * ratio, "num_kv_heads": kv_heads},
                )
        yield "scale-1", {**base, "scale": 1.0}
        yield "scale-0.1", {**base, "scale": 0.1}
        yield "large-logits", {**base, "q_factor": 60.0}
        yield "layer-7", {**base, "layer_index": 7}
        for count in sorted(record.num_heads.values or ()):
            ratio = next(r for r in range(1, count + 1) if count % r == 0 and r in record.gqa_ratios)
            yield f"heads-{count}", {**base, "num_heads": count, "num_kv_heads": count // ratio}
        if self.level == "full" and record.max_context.last and self.phase == "decode":
            yield "context", {**base, "max_context": record.max_context.last, "slack": self._slack()}
        for dtype in sorted(record.dtypes):
            kv = dtype if "same" in record.kv_dtypes or dtype in record.kv_dtypes else min(record.kv_dtypes)
            yield dtype, {**base, "dtype": dtype, **({"kv_dtype": kv} if self.paged else {})}
        yield from self._caches()

    def _caches(self) -> Iterator[tuple[str, Fields]]:
        if not self.paged:
            return
        record, base = self.record, self.base
        for layout in sorted(record.kv_layouts):
            yield f"layout-{layout}", {**base, "kv_layout": layout}
        for kv_dtype in sorted(record.kv_dtypes - {"same", base["dtype"]}):
            yield f"kv-{kv_dtype}", {**base, "kv_dtype": kv_dtype}
            if record.kv_scales:  # the second pair reaches the ends of FP8, where a store must saturate
                for k_scale, v_scale in ((0.04, 0.05), (0.002, 0.003), (1.5, 20.0), (0.5, 0.5)):
                    scales = {"k_scale": k_scale, "v_scale": v_scale}
                    yield f"kv-{kv_dtype}-scales-{k_scale}", {**base, "kv_dtype": kv_dtype, **scales}
            for dtype in sorted(record.dtypes & {"float16", "bfloat16"}):
                yield f"kv-{kv_dtype}-{dtype}", {**base, "dtype": dtype, "kv_dtype": kv_dtype}
        for order in ("ordered", "reversed", "interleaved"):
            yield f"pages-{order}", {**base, "order": order}
        for poison in ("inf", "huge"):
            yield f"unused-slots-{poison}", {**base, "poison": poison, "padded_rows": 2}
        yield "padded-rows", {**base, "padded_rows": 3}
        yield "pages-in-common", {**base, "shared": self._prefixes(1), "levels": False}

    def _features(self) -> Iterator[tuple[str, Fields]]:
        """Each feature that is declared, alone and, at the full level, in pairs; then all that go together."""
        settings = list(self._settings())
        for what, fields in settings:
            yield what, {**self.base, **fields}
        if self.level == "full":
            for i, (what, fields) in enumerate(settings):
                for other, more in settings[i + 1 :]:
                    if not fields.keys() & more.keys() and self._together({**fields, **more}):
                        yield f"{what}-{other}", {**self.base, **fields, **more}
        joint = {name: value for _, fields in settings for name, value in fields.items() if name in JOINT}
        if len(joint) > 1:
            yield "together", {**self.base, **joint}

    def _settings(self) -> Iterator[tuple[str, Fields]]:
        record, base = self.record, self.base
        page = base.get("page_size", 4)
        if record.sliding_window:
            for window in dict.fromkeys((1, 2, min(page, 16), min(page, 16) + 1, 1000)):
                yield f"window-{window}", {"window": window}
            if self.paged:
                yield "window-behind-dropped-pages", {"window": 3, "dropped": 8 * page}
        if record.softcap:
            yield "softcap-0.5", {"softcap": 0.5}
            yield "softcap-30", {"softcap": 30.0}
        if record.sinks:
            yield "sinks", {"sinks": True}
        if record.alibi:
            yield "alibi", {"alibi": True}
        if record.lse:
            yield "lse", {"lse": True}
        if record.query_mask and self.paged:
            yield "query-mask", {"query_mask": True}
        if record.non_causal:
            yield "non-causal", {"causal": False}
            if self.paged:
                yield "cross", {"causal": False, "cross": True}
        if record.cascade and self.paged:
            for depth in (1, 2):
                yield f"cascade-{depth}", {"shared": self._prefixes(depth)}
        if self.phase == "decode":
            for n in self._keep("query_lens", QUERY_LENS, record.query_lens):
                yield f"query-len-{n}", {"query_len": n}

    def _laws(self) -> Iterator[tuple[str, str, Fields]]:
        """The other laws, each on a batch of the base configuration."""
        record, fields = self.record, {**self.base, **self._lse()}
        rows = {**fields, **self._batch(fields)}
        scaled: Fields = {}
        if record.kv_scales and self.paged and (kv := sorted(record.kv_dtypes - {"same", fields["dtype"]})):
            scaled = {"kv_dtype": kv[0], "k_scale": 0.04, "v_scale": 0.05}
        special = {name: True for name in ("sinks", "alibi") if getattr(record, name)}
        for law in ("alone", "reuse", "describe"):
            yield "batch", law, rows
        if self.paged:
            for law in ("mean", "cached", "strides"):
                yield "batch", law, rows
            if record.sliding_window:
                yield "window", "cached", {**rows, "window": 3}
            if self.phase == "decode" and (more := self._keep("query_lens", (2,), record.query_lens)):
                yield f"query-len-{more[0]}", "cached", {**fields, **self._batch(self.base, more[0])}
            if record.lse and self.n == 1:
                yield "parts", "merges", rows
            yield "batch", "plans", {**rows, **scaled, **special}
            yield "far", "offsets", self._far()
            if self.phase == "extend":
                for each in self.chunked():
                    yield f"prompt-{each['query_lens'][0]}", "chunks", each
        if record.batch_invariant:
            yield "invariant", "alone", {**rows, "batch_invariant": True}
        if record.graph and self.phase == "decode" and self.paged:
            yield from self._graphs()

    def _random(self, draw: Random) -> Fields:
        """A shape, a feature or two and any lengths, drawn together: what meets only by chance."""
        shapes = [shape for _, shape in self._shapes() if "shared" not in shape]
        fields = dict(draw.choice(shapes))
        for shape in draw.sample(shapes, 2):
            changed = {name: value for name, value in shape.items() if value != self.base.get(name)}
            if changed.keys() <= {"kv_layout", "order", "poison", "padded_rows"}:
                fields |= changed
        if self.paged:
            fields["page_size"] = draw.choice(self._pages())
        settings = [more for _, more in self._settings() if not more.keys() & {"shared", "cross", "query_len"}]
        for more in draw.sample(settings, min(2, len(settings))):
            if self._together({**fields, **more}) and not more.keys() & fields.keys():
                fields |= more
        rows, page = range(draw.randint(1, 4)), min(fields.get("page_size") or 4, 32)
        new = [self.n or draw.choice((1, 1, 2, page, draw.randint(1, 20))) for _ in rows]
        prefix = [draw.choice((0, 1, page - 1, page, draw.randint(0, 5 * page))) for _ in rows]
        lens = tuple(n + before for n, before in zip(new, prefix, strict=True))
        return {**fields, "query_lens": tuple(new), "seq_lens": lens, "seed": draw.randint(0, 2**16)}

    def _graphs(self) -> Iterator[tuple[str, str, Fields]]:
        small = {**self.base, "query_lens": (self.n,) * 4, "seq_lens": (32,) * 4}
        for name in ("num_heads", "num_kv_heads"):
            small[name] = self.base["num_heads"] // self.base["num_kv_heads"] if name == "num_heads" else 1
        if small["num_heads"] not in self.record.num_heads:
            small |= {name: self.base[name] for name in ("num_heads", "num_kv_heads")}
        if "extend" in self.record.phases:
            small["phases"] = frozenset({"extend", "decode"})
        yield "replay", "graph", {**small, "query_len": self.n}
        for what, fields in self._settings():
            n = fields.get("query_len", self.n)
            if not fields.keys() & {"shared", "cross", "dropped", "query_mask", "causal"}:
                yield f"replay-{what}", "graph", {**small, **fields, "query_len": n}

    def _far(self) -> Fields:
        length = 2 * self.base["page_size"]
        new = self.n or min(3, length)
        return {**self.base, "query_lens": (new,), "seq_lens": (max(length, new),)}

    def batched(self, fields: Fields) -> Fields:
        """These fields with rows of all lengths; "query_len" among them is one that decode is asked for."""
        n = fields.get("query_len")
        return {name: value for name, value in fields.items() if name != "query_len"} | self._batch(fields, n)

    def _batch(self, fields: Fields, n: int | None = None) -> Fields:
        """Rows of all lengths at once, as these fields allow."""
        n = n or self.n
        if "shared" in fields:
            lens = self._shared_lens(fields["shared"], fields["page_size"])
            return {
                "query_lens": tuple([n or 2 for _ in lens]),
                "seq_lens": tuple(length + (n or 2) for length in lens),
            }
        if fields.get("cross") or not self.paged:
            return {"query_lens": tuple([n or i + 1 for i in range(5)]), "seq_lens": (5, 0, 1, 9, 3)}
        rows = self._rows(fields, n)
        return {"query_lens": tuple([new for new, _ in rows]), "seq_lens": tuple([length for _, length in rows])}

    def _rows(self, fields: Fields, n: int | None = None) -> list[tuple[int, int]]:
        """(new, keys) of rows whose keys end about the edges of pages."""
        n = n or self.n
        if n:
            return [(n, length) for length in self._sizes(fields, n)]
        page = min(fields.get("page_size") or 4, 64)
        pairs = {
            (1, 0),
            (page - 1, 0),
            (page, 0),
            (page + 1, 0),
            (2, page - 1),
            (page, page),
            (1, 2 * page),
            (3, page + 1),
        }
        return [(new, new + prefix) for new, prefix in sorted(pairs) if new]

    def _sizes(self, fields: Fields, n: int) -> list[int]:
        page = fields.get("page_size") or 4
        return sorted({n, n + 1, page - 1, page, page + 1, 2 * page, 3 * page + 1} - set(range(n)))

    def _pages(self) -> list[int]:
        if not self.paged:
            return [0]
        assert self.record.page_sizes is not None, "paged records have page sizes"
        return self._keep("page_sizes", PAGE_SIZES, self.record.page_sizes) or [self.record.page_sizes.nearest(4)]

    def _prefixes(self, depth: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Shared levels of five rows: runs that share, one without rows, and a row that shares nothing anywhere."""
        return (((2, 2), (0, 0), (1, 0), (2, 1)), ((2, 1), (1, 0), (2, 1)))[:depth]

    def _shared_lens(self, shared: Iterable[Iterable[tuple[int, int]]], page: int) -> list[int]:
        """Keys before the new ones: what is shared, and a few of its own."""
        begin: list[int] = [0] * 5
        for level in shared:
            first = 0
            for rows, pages in level:
                for row in range(first, first + rows):
                    begin[row] += pages * page
                first += rows
        return [start + own for start, own in zip(begin, (0, 3, 1, page, 2 * page + 1), strict=True)]

    def _slack(self) -> int:
        """How far the longest context that is declared lies beyond the longest row of a batch."""
        longest: int = max(self._batch(self.base)["seq_lens"])
        return max((self.record.max_context.last or longest) - longest, 0)

    def _together(self, fields: Fields) -> bool:
        """Whether these settings have a meaning at once."""
        if "shared" in fields and fields.keys() & {"window", "cross", "causal", "dropped", "query_mask", "alibi"}:
            return False
        return not ("query_mask" in fields and fields.keys() & {"cross", "causal"})

    def _lse(self) -> Fields:
        return {"lse": True} if self.record.lse else {}

    def _kv_heads(self, ratio: int) -> int:
        """Key heads for a ratio: two, where the record's head counts allow, else as many as make one of them."""
        for heads in (2, 1, 3, 4, 8, 16):
            if heads * ratio in self.record.num_heads:
                return heads
        return max(self.record.num_heads.nearest(2 * ratio) // ratio, 1)

    def _keep(self, sweep: str, values: tuple[int, ...], declared: Ints) -> list[int]:
        """Which values of a sweep are declared; where they are declared one by one, every one of them."""
        wanted = QUICK[sweep] if self.level == "quick" else values
        return sorted({value for value in wanted if value in declared} | (declared.values or set()))


JOINT = ("window", "softcap", "sinks", "alibi", "lse")
"""Features that a model may have all at once."""
