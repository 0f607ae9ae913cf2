"""One box of capabilities in one phase and attention kind: a base configuration, and the problems around it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from headstock.capabilities import Capabilities
from headstock.ints import Ints
from headstock.testing.features import JOINT, STATES, Features, together
from headstock.testing.rows import Fields, Rows, prefixes
from headstock.testing.sizes import GQA_RATIOS, HEAD_DIMS, HEADS, V_HEAD_DIMS, Level, Sizes

RANDOM = 60
"""Random problems at the full level, for each record, phase and kind."""
REPLAYS = 40
"""Random replays of one captured graph at the full level."""


class Box:
    """The cases of one record, attention kind and phase: a base configuration, and one axis at a time from there."""

    def __init__(self, record: Capabilities, kind: str, phase: str, device: str, level: Level):
        self.record, self.kind, self.phase, self.level = record, kind, phase, level
        self.cached, self.latent = kind != "ragged", kind == "mla"
        self.sizes = Sizes(record, kind, level)
        dtype = next(name for name in ("float32", "float16", "bfloat16", "float64") if name in record.dtypes)
        head_dim, v_head_dim = self.sizes.dims()[0]
        self.base: Fields = {
            "device": device,
            "attention": kind,
            "phases": frozenset({phase}),
            "phase": phase,
            "dtype": dtype,
            **self.sizes.heads(4 if self.latent else 2),
            "head_dim": head_dim,
            "v_head_dim": v_head_dim,
            "host_lengths": "bound" if record.host_lengths == "none" else record.host_lengths,
        }
        if self.cached:
            assert record.page_sizes is not None, "records with a cache have page sizes"
            same = "same" in record.kv_dtypes or dtype in record.kv_dtypes
            self.base |= {
                "page_size": record.page_sizes.nearest(4),
                "kv_layout": self.sizes.layouts()[0],
                "kv_dtype": dtype if same else min(record.kv_dtypes),
            }
        self.n = record.query_lens.nearest(1) if phase == "decode" else 0
        self.rows, self.features = Rows(self.n), Features(record, self.base, self.sizes)

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
        for length in self.rows.lengths(self.base, 1):
            if length > 1:
                yield {**self.base, "query_lens": (length,), "seq_lens": (length,)}

    def _lengths(self) -> Iterator[tuple[str, str, Fields]]:
        """Lengths about the edges of pages: each alone at the base page size, all together at every other."""
        for new, length in self.rows.pairs(self.base):
            yield f"{new}-of-{length}", "matches", {**self.base, "query_lens": (new,), "seq_lens": (length,)}
        for page in self.sizes.pages():
            fields = {**self.base, "page_size": page} if self.cached else self.base
            yield f"page-{page}", "matches", {**fields, **self.rows.batch(fields), **self.features.lse()}

    def _many(self) -> Iterator[tuple[str, Fields]]:
        """Many rows and long ones: what a small problem cannot show of blocks, splits and grids."""
        rows, page = (33, 129) if self.level == "full" else (33,), self.base.get("page_size") or 4
        few = {**self.base, **self.sizes.heads(1)}
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
        """Head dims, head counts, dtypes, scales and caches."""
        record, base = self.record, self.base
        yield from self._latents() if self.latent else self._sizes_of_heads()
        yield "scale-1", {**base, "scale": 1.0}
        yield "scale-0.1", {**base, "scale": 0.1}
        yield "large-logits", {**base, "q_factor": 60.0}
        yield "layer-7", {**base, "layer_index": 7}
        if self.level == "full" and record.max_context.last and self.phase == "decode":
            yield "context", {**base, "max_context": record.max_context.last, "slack": self._slack()}
        for dtype in sorted(record.dtypes):
            kv = dtype if "same" in record.kv_dtypes or dtype in record.kv_dtypes else min(record.kv_dtypes)
            yield dtype, {**base, "dtype": dtype, **({"kv_dtype": kv} if self.cached else {})}
        yield from self._caches()

    def _latents(self) -> Iterator[tuple[str, Fields]]:
        """Ranks with rope dims, and the counts of the query heads that share the one latent."""
        for head_dim, rank in self.sizes.dims():
            yield f"latent-{rank}-{head_dim - rank}", {**self.base, "head_dim": head_dim, "v_head_dim": rank}
        for count in self.sizes.keep("heads", HEADS, self.record.num_heads):
            if count in self.record.gqa_ratios:
                yield f"heads-{count}", {**self.base, "num_heads": count}

    def _sizes_of_heads(self) -> Iterator[tuple[str, Fields]]:
        """Head dims, and query and key heads that share each other in all ways."""
        record, base = self.record, self.base
        dims = [*self.sizes.keep("head_dims", HEAD_DIMS, record.head_dims), record.head_dims.nearest(1)]
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
        for ratio in self.sizes.keep("gqa", GQA_RATIOS, record.gqa_ratios):
            heads = self.sizes.heads(ratio)
            if heads["num_heads"] in record.num_heads:
                yield f"gqa-{ratio}", {**base, **heads}
        for kv_heads, ratio in ((3, record.gqa_ratios.nearest(3)), (8, record.gqa_ratios.nearest(4))):
            if kv_heads * ratio in record.num_heads:
                yield (
                    f"kv-heads-{kv_heads}",
                    {**base, "num_heads": kv_heads * ratio, "num_kv_heads": kv_heads},
                )
        for count in sorted(record.num_heads.values or ()):
            ratio = next(r for r in range(1, count + 1) if count % r == 0 and r in record.gqa_ratios)
            yield f"heads-{count}", {**base, "num_heads": count, "num_kv_heads": count // ratio}

    def _caches(self) -> Iterator[tuple[str, Fields]]:
        if not self.cached:
            return
        record, base = self.record, self.base
        for layout in sorted(self.sizes.layouts()):
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
        yield "pages-in-common", {**base, "shared": prefixes(1), "levels": False}

    def _features(self) -> Iterator[tuple[str, Fields]]:
        """Each feature that is declared, alone and, at the full level, in pairs; then all that go together."""
        settings = list(self.features.settings())
        for what, fields in settings:
            yield what, {**self.base, **fields}
        if self.level == "full":
            for i, (what, fields) in enumerate(settings):
                for other, more in settings[i + 1 :]:
                    if not fields.keys() & more.keys() and together({**fields, **more}):
                        yield f"{what}-{other}", {**self.base, **fields, **more}
        joint = self.features.joint(JOINT)
        if len(joint) > 1:
            yield "together", {**self.base, **joint}

    def _laws(self) -> Iterator[tuple[str, str, Fields]]:
        """The other laws, each on a batch of the base configuration."""
        record, fields = self.record, {**self.base, **self.features.lse()}
        rows = {**fields, **self.rows.batch(fields)}
        scaled: Fields = {}
        if record.kv_scales and self.cached and (kv := sorted(record.kv_dtypes - {"same", fields["dtype"]})):
            scaled = {"kv_dtype": kv[0], "k_scale": 0.04, "v_scale": 0.05}
        special = {name: True for name in ("sinks", "alibi") if getattr(record, name)}
        for law in ("alone", "reuse", "describe"):
            yield "batch", law, rows
        if self.cached:
            for law in ("mean", "cached", "strides"):
                yield "batch", law, rows
            if record.sliding_window:
                yield "window", "cached", {**rows, "window": 3}
            if self.phase == "decode" and (more := self.sizes.keep("query_lens", (2,), record.query_lens)):
                yield f"query-len-{more[0]}", "cached", {**fields, **self.rows.batch(self.base, more[0])}
            if record.lse and self.n == 1:
                yield "parts", "merges", rows
            yield "batch", "plans", {**rows, **scaled, **special}
            if self.latent:
                yield "batch", "absorbs", rows
            yield "far", "offsets", self._far()
            if self.phase == "extend":
                for each in self.chunked():
                    yield f"prompt-{each['query_lens'][0]}", "chunks", each
        elif record.lse and record.non_causal and self.phase == "extend":
            lens = {"query_lens": (1, 2, 3, 4, 5), "seq_lens": (5, 2, 9, 4, 12)}
            yield "prefix", "merges", {**fields, **lens, "non_causal": True}
        if record.batch_invariant:
            yield "invariant", "alone", {**rows, "batch_invariant": True}
        if record.graph and self.phase == "decode" and self.cached:
            yield from self._graphs()

    def _random(self, draw: Random) -> Fields:
        """A shape, a feature or two and any lengths, drawn together: what meets only by chance."""
        shapes = [shape for _, shape in self._shapes() if "shared" not in shape]
        fields = dict(draw.choice(shapes))
        for shape in draw.sample(shapes, 2):
            changed = {name: value for name, value in shape.items() if value != self.base.get(name)}
            if changed.keys() <= {"kv_layout", "order", "poison", "padded_rows"}:
                fields |= changed
        if self.cached:
            fields["page_size"] = draw.choice(self.sizes.pages())
        settings = [more for _, more in self.features.settings() if not more.keys() & {"shared", "cross", "query_len"}]
        for more in draw.sample(settings, min(2, len(settings))):
            if together({**fields, **more}) and not more.keys() & fields.keys():
                fields |= more
        rows, page = range(draw.randint(1, 4)), min(fields.get("page_size") or 4, 32)
        new = [self.n or draw.choice((1, 1, 2, page, draw.randint(1, 20))) for _ in rows]
        prefix = [draw.choice((0, 1, page - 1, page, draw.randint(0, 5 * page))) for _ in rows]
        lens = tuple(n + before for n, before in zip(new, prefix, strict=True))
        return {**fields, "query_lens": tuple(new), "seq_lens": lens, "seed": draw.randint(0, 2**16)}

    def _graphs(self) -> Iterator[tuple[str, str, Fields]]:
        small = {**self.base, "query_lens": (self.n,) * 4, "seq_lens": (32,) * 4}
        group = self.base["num_heads"] // self.base["num_kv_heads"]
        if group in self.record.num_heads:
            small |= {"num_heads": group, "num_kv_heads": 1}
        if "extend" in self.record.phases:
            small["phases"] = frozenset({"extend", "decode"})
        yield "replay", "graph", {**small, "query_len": self.n}
        for what, fields in self.features.settings():
            n = fields.get("query_len", self.n)
            if not fields.keys() & {"shared", "cross", "dropped", "query_mask", "causal"}:
                yield f"replay-{what}", "graph", {**small, **fields, "query_len": n}
        if self.record.cascade:
            yield from self._captured_levels(small)
        if self.level == "full":
            yield "random", "graph", {**small, **self.features.joint(STATES), "query_len": self.n, "replays": REPLAYS}

    def _captured_levels(self, small: Fields) -> Iterator[tuple[str, str, Fields]]:
        """Graphs that read shared prefixes: plain, with all that makes or changes partial states, and with each."""
        small = {**small, "query_len": self.n}
        features = [("", {}), ("-together", self.features.joint(STATES))]
        if self.level == "full":
            features += [
                (f"-{what}", fields) for what, fields in self.features.settings() if fields.keys() & set(STATES)
            ]
        for depth in (1, 2) if self.level == "full" else (1,):
            for what, fields in features:
                if fields or not what:
                    yield f"replay-cascade-{depth}{what}", "graph", {**small, **fields, "max_levels": depth}
        if self.level == "full":
            fields = {**small, **self.features.joint(STATES), "max_levels": 2, "replays": REPLAYS}
            yield "random-cascade-2", "graph", fields

    def _far(self) -> Fields:
        length = 2 * self.base["page_size"]
        new = self.n or min(3, length)
        return {**self.base, "query_lens": (new,), "seq_lens": (max(length, new),)}

    def batched(self, fields: Fields) -> Fields:
        """These fields with rows of all lengths; "query_len" among them is one that decode is asked for."""
        n = fields.get("query_len")
        return {name: value for name, value in fields.items() if name != "query_len"} | self.rows.batch(fields, n)

    def _slack(self) -> int:
        """How far the longest context that is declared lies beyond the longest row of a batch."""
        longest: int = max(self.rows.batch(self.base)["seq_lens"])
        return max((self.record.max_context.last or longest) - longest, 0)
