"""A random attention problem: a spec, one layer's cache with every unused byte poisoned, a batch, and q, k, v."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstock.backend import AttentionBackend, BackendSpec, HostLengths, Phase
from headstock.batch import ForwardBatch
from headstock.device import torch_dtype, zeroed
from headstock.kv.layout import BUILTIN_LAYOUTS, KVLayout, KVView, LatentView, PagedView, encode
from headstock.layer import AttentionLayer
from headstock.testing.draw import Order, Poison, Segments, page_table, shared_levels, tokens, trees
from headstock.testing.reference import attention

POISON = 0xFF
"""A byte that makes a NaN of every float dtype, FP8 included."""
ROUNDING = torch.finfo(torch.float32).eps
"""What storing a log-sum-exp in float32 may change, relatively."""


class Result(NamedTuple):
    """What a forward left: out [T, Hq, Dv], lse [T, Hq] where it was asked for, and the cache."""

    out: Tensor
    lse: Tensor | None
    storage: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One layer of one forward. `storage` is the layer's cache, uint8 [pages, bytes], None for ragged attention.

    Cached keys are stored already; k and v hold the new tokens (None for cross attention, and v for a latent cache) or,
    where ragged, all keys.
    """

    spec: BackendSpec
    batch: ForwardBatch
    layout: type[KVLayout] | None
    storage: Tensor | None
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    k_scale: float = 1.0
    v_scale: float = 1.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    layer_index: int = 0

    def layer(self, storage: Tensor | None) -> AttentionLayer:
        """The layer over `storage`, this problem's own or a copy."""
        kv = None
        if storage is not None and self.layout is not None:
            kv = self.layout.view(storage, self.spec, self.k_scale, self.v_scale)
        return AttentionLayer(self.layer_index, kv, self.k_scale, self.v_scale, self.sinks, self.alibi_slopes)

    @cached_property
    def expected(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The reference's out and lse (float64), and the cache as it must be afterwards."""
        if self.storage is None:
            return *attention(self.q, self.k, self.v, self.layer(None), self.batch, self.spec), None
        storage = self.storage.clone()
        layer = self.layer(storage)
        if self.k is not None and self.batch.out_cache_loc is not None:
            store(layer, self.k, self.v, self.batch.out_cache_loc, self.spec.page_size)
        return *attention(self.q, None, None, layer, self.batch, self.spec), storage

    def fresh(self) -> tuple[ForwardBatch, Tensor | None]:
        """A batch without a plan, and a copy of the cache."""
        return replace(self.batch, metadata=None), None if self.storage is None else self.storage.clone()

    def check(self, backend: type[AttentionBackend]) -> None:
        """Fails where `backend` strays from the reference: in a value, in what is empty, or in a byte of the cache."""
        from headstock.testing.rig import Rig

        self.compare(Rig(backend, self.spec).run(self))

    def compare(self, result: Result) -> None:
        """Fails where a result strays from the reference.

        Padding may hold anything finite, and so may the null page, which padded rows share.
        """
        (out, lse, storage), (true_out, true_lse, true_storage) = result, self.expected
        real = slice(0, int(self.batch.query_indptr[self.batch.num_real_reqs]))
        out_error, lse_error = self.tolerance()
        assert out.isfinite().all(), "the output holds NaN or inf"
        close(out[real], true_out[real], out_error, what="out [token, head, dim]")
        if lse is not None:
            close(lse[real], true_lse[real], lse_error, ROUNDING, what="lse [token, head]")
        if storage is not None and true_storage is not None:
            wrong = (storage[1:] != true_storage[1:]).any(1).nonzero()[:, 0] + 1
            assert len(wrong) == 0, f"the cache differs in pages {wrong.tolist()}, outside the slots of this batch"

    def tolerance(self) -> tuple[float, float]:
        """Largest absolute errors of out and lse that rounding explains, where float32 at least accumulates.

        Values are normal, so below 5. A logit is off by ε · D · |q|·|k| · scale in float32, which changes a weight by
        as much, relatively, and their sum too; weights and output are rounded to the dtype once, ε/2 · |v| each.
        """
        exact = torch.finfo(torch.promote_types(self.q.dtype, torch.float32)).eps
        logits = exact * self.spec.head_dim * float(self.q.abs().max()) * 5.0 * self.spec.scale
        within = 5.0 * (torch.finfo(self.q.dtype).eps + 2 * logits)
        return within, logits + 16 * ROUNDING


def close(actual: Tensor, expected: Tensor, atol: float, rtol: float = 0.0, *, what: str) -> None:
    """Fails where two tensors differ by more than atol + rtol·|expected|, naming the worst place."""
    actual, expected = actual.detach().cpu().double(), expected.cpu().double()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = torch.where(same, 0.0, (actual - expected).abs()).nan_to_num(nan=math.inf)
    excess = error - atol - rtol * expected.abs().nan_to_num(posinf=0.0)
    if excess.numel() == 0 or float(excess.max()) <= 0:
        return
    place = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    raise AssertionError(
        f"{what} is wrong in {int((excess > 0).sum())} of {excess.numel()} places, worst at {list(place)}: "
        f"{float(actual[place]):.6g}, should be {float(expected[place]):.6g} ± {atol:.1e}"
    )


def make_problem(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    padded_rows: int = 0,
    dropped: int = 0,
    phase: Phase | None = None,
    causal: bool = True,
    cross: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    host_lengths: HostLengths = "exact",
    slack: int = 0,
    order: Order = "random",
    spare: int = 3,
    shared: Segments = (),
    levels: bool = True,
    poison: Poison = "nan",
    heads_first: bool = False,
    zero_queries: bool = False,
    q_factor: float = 1.0,
    layer_index: int = 0,
    layout: type[KVLayout] | None = None,
    seed: int = 0,
    content: int = 0,
    **fields: Any,
) -> Problem:
    """A problem of B rows; `fields` are those of BackendSpec, with small defaults (4/2 heads of 16, pages of 4).

    Padded rows are appended as the host appends them, on the null page, which is poisoned too. `dropped` keys came
    before each row's first one and left the table, so positions start there. `cross` attends to cached keys only and
    writes nothing. spec.query_mask gives every row a random forest of new tokens. `slack` raises the bound on sequence
    lengths above the longest. `order` is how pages are dealt out, with `spare` ones left over; rows of a `shared`
    segment have the same first pages, told to the backend as shared levels unless `levels` is False. `poison` fills
    every slot that holds no key, and `heads_first` gives q, k and v the strides of [heads, tokens, dim]. Another
    `content` draws other numbers for the very same batch, and `q_factor` multiplies q, and so every logit.
    """
    random, shuffle = torch.Generator().manual_seed(seed + content), torch.Generator().manual_seed(seed)
    spec = make_spec(
        {**fields, "phase": phase, "causal": causal, "shared": shared, "levels": levels},
        query_lens,
        total=sum(query_lens) + padded_rows * max(query_lens),
        context=max(*seq_lens, 1) + slack,
    )
    device, ragged = spec.device, spec.attention == "ragged"
    q_lens = [*query_lens, *[query_lens[0]] * padded_rows]
    lens = [*seq_lens, *[query_lens[0]] * padded_rows]
    table, num_pages = None, 0
    if not ragged:
        table, num_pages = page_table(lens, len(seq_lens), spec.page_size, shuffle, order, spare, shared)
    mask, positions = trees(q_lens, lens, shuffle) if spec.query_mask else (None, None)
    batch = ForwardBatch.from_lengths(
        q_lens,
        lens,
        None if table is None else table.to(device),
        spec.page_size,
        phase=phase,
        causal=causal,
        write=not cross,
        positions=None if positions is None else positions.to(device),
        device=device,
        host_lengths=host_lengths,
        max_seq_len=max(lens) + slack,
        num_real_reqs=len(seq_lens),
        query_mask=None if mask is None else mask.to(device),
        shared_levels=shared_levels(table, shared, device) if table is not None and levels else (),
    )
    batch = replace(batch, positions=batch.positions + dropped)
    q, k, v = tokens(spec, sum(q_lens), random, heads_first)
    if ragged:
        _, k, v = tokens(spec, sum(lens), random, heads_first)
    layout = layout or (None if ragged else BUILTIN_LAYOUTS[spec.kv_layout])
    problem = Problem(
        spec=spec,
        batch=batch,
        layout=layout,
        storage=None if layout is None else _storage(layout, spec, num_pages, poison),
        q=q.zero_() if zero_queries else q.mul_(q_factor),
        k=None if cross else k,
        v=None if cross else v,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=torch.randn(spec.num_heads, generator=random).to(device) if spec.sinks else None,
        alibi_slopes=torch.rand(spec.num_heads, generator=random).to(device) if spec.alibi else None,
        layer_index=layer_index,
    )
    if table is not None:
        _fill(problem, table, q_lens, lens, len(seq_lens), cross, random)
    return problem


def make_spec(
    fields: Mapping[str, Any], query_lens: Sequence[int], *, total: int = 64, context: int = 64
) -> BackendSpec:
    """A small spec for a problem: what is a field of BackendSpec, over defaults, with the limits it needs at least."""
    small: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    small |= {"max_batch": 64, "max_tokens": max(total, 64), "max_context": max(context, 64)}
    levels = fields.get("shared", ()) if fields.get("levels", True) else ()
    small |= {"non_causal": not fields.get("causal", True), "max_levels": len(levels)}
    kind = fields.get("attention", "paged")
    if kind == "mla":  # head_dim is the latent's R + P
        small |= {"num_kv_heads": 1, "head_dim": 24, "v_head_dim": 16}
    if kind != "ragged":
        small |= {"page_size": 4, "kv_layout": "latent" if kind == "mla" else "nhd"}
    if fields.get("phase") == "decode":
        small["query_lens"] = frozenset(query_lens)
    known = BackendSpec.__dataclass_fields__.keys() - {"query_lens"}
    given = small | {name: value for name, value in fields.items() if name in known}
    given.setdefault("kv_dtype", given["dtype"])
    given.setdefault("v_head_dim", given["head_dim"])
    given.setdefault("scale", _width(given) ** -0.5)
    return BackendSpec(**given)


def _width(given: Mapping[str, Any]) -> int:
    """The size of the head whose root scales: in MLA one before it is absorbed, with R/4 dimensions and the rope's."""
    head_dim, rank = int(given["head_dim"]), int(given["v_head_dim"])
    return head_dim - rank + max(rank // 4, 1) if given.get("attention") == "mla" else head_dim


def store(layer: AttentionLayer, k: Tensor, v: Tensor | None, loc: Tensor, page_size: int) -> None:
    """Writes tokens into their slots one at a time, byte by byte as the contract says; by the view if it is opaque."""
    assert layer.kv is not None, "there is a cache to store into"
    caches = tensors(layer.kv)
    if not caches:
        layer.kv.write(k, v, loc.to(k.device))
        return
    given = [(k, layer.k_scale), (v, layer.v_scale)][: len(caches)]
    for token, slot in enumerate(loc.tolist()):
        page, offset = divmod(slot, page_size)
        for cache, (x, scale) in zip(caches, given, strict=True):
            assert x is not None, "values beside keys"
            cache[page, offset].copy_(encode(x[token], cache.dtype, scale))


def tensors(view: KVView) -> tuple[Tensor, ...]:
    """What a view shows: keys and values, each [pages, page, Hkv, D], or the latent, of one head; nothing if opaque."""
    if isinstance(view, PagedView):
        return view.k, view.v
    return (view.latent[:, :, None],) if isinstance(view, LatentView) else ()


def _storage(layout: type[KVLayout], spec: BackendSpec, num_pages: int, poison: Poison) -> Tensor:
    """A cache without a key in it."""
    storage = zeroed(num_pages * layout.bytes_per_page(spec), spec.device).view(num_pages, -1)
    caches, dtype = tensors(layout.view(storage, spec, 1.0, 1.0)), torch_dtype(spec.kv_dtype)
    if poison == "nan" or not caches:
        return storage.fill_(POISON)
    value = torch.finfo(dtype).max if poison == "huge" or dtype == torch.float8_e4m3fn else math.inf
    for cache in caches:
        cache.copy_(torch.full(cache.shape[-1:], value, dtype=dtype, device=spec.device).expand(cache.shape))
    return storage


def _fill(
    problem: Problem,
    table: Tensor,
    q_lens: Sequence[int],
    lens: Sequence[int],
    real: int,
    cross: bool,
    random: torch.Generator,
) -> None:
    """Stores what is cached before the step: every key of cross attention, else those before the new tokens."""
    spec, layer = problem.spec, problem.layer(problem.storage)
    for row in range(real):
        count = lens[row] if cross else lens[row] - q_lens[row]
        keys = torch.arange(count)
        loc = table[row, keys // spec.page_size].long() * spec.page_size + keys % spec.page_size
        _, k, v = tokens(spec, count, random)
        store(layer, k, v, loc, spec.page_size)
