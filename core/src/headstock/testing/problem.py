"""A random attention problem: a spec, one layer's cache with every unused byte poisoned, a batch, and q, k, v."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headstock.backend import AttentionBackend, BackendSpec, HostLengths, Phase, Workspace
from headstock.batch import ForwardBatch
from headstock.device import torch_dtype
from headstock.kv.layout import BUILTIN_LAYOUTS, PagedView, encode
from headstock.layer import AttentionLayer
from headstock.testing.reference import attention

POISON = 0xFF
"""A byte that makes a NaN of every float dtype, FP8 included."""
ROUNDING = torch.finfo(torch.float32).eps
"""What storing a log-sum-exp in float32 may change, relatively."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One layer of one forward. `storage` is the layer's cache, uint8 [pages, bytes], None for ragged attention.

    Cached keys are stored already; k and v hold the new tokens (None for cross attention) or, where ragged, all keys.
    """

    spec: BackendSpec
    batch: ForwardBatch
    storage: Tensor | None
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    k_scale: float = 1.0
    v_scale: float = 1.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None

    def layer(self, storage: Tensor | None) -> AttentionLayer:
        """The layer over `storage`, this problem's own or a copy."""
        kv = None
        if storage is not None:
            kv = BUILTIN_LAYOUTS[self.spec.kv_layout].view(storage, self.spec, self.k_scale, self.v_scale)
        return AttentionLayer(0, kv, self.k_scale, self.v_scale, self.sinks, self.alibi_slopes)

    def expected(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The reference's out and lse (float64), and the cache as it must be afterwards."""
        if self.storage is None:
            return *attention(self.q, self.k, self.v, self.layer(None), self.batch, self.spec), None
        storage = self.storage.clone()
        layer = self.layer(storage)
        if self.k is not None and self.v is not None and self.batch.out_cache_loc is not None:
            store(layer, self.k, self.v, self.batch.out_cache_loc, self.spec.page_size)
        return *attention(self.q, None, None, layer, self.batch, self.spec), storage

    def run(self, backend: type[AttentionBackend]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What `backend` makes of it: out, lse (where the spec wants it), and the cache as it left it."""
        device, heads = self.q.device, self.spec.num_heads
        sizes = backend.workspace_bytes(self.spec)
        scratch = torch.full((sizes.scratch,), POISON, dtype=torch.uint8, device=device)
        instance = backend(self.spec, Workspace(scratch, torch.zeros(sizes.state, dtype=torch.uint8, device=device)))
        storage = None if self.storage is None else self.storage.clone()
        batch = replace(self.batch, metadata=None)
        # views of something wider, poisoned: a backend must honour their strides and write every element
        out = torch.full((batch.num_tokens, heads + 1, self.spec.v_head_dim + 8), torch.nan, device=device)
        out = out.to(self.q.dtype)[:, :heads, : self.spec.v_head_dim]
        lse = torch.full((batch.num_tokens, heads + 1), torch.nan, device=device)[:, :heads] if self.spec.lse else None
        instance.init_forward_metadata(batch)
        instance.init_forward_metadata_in_graph(batch)
        instance.forward(self.q, self.k, self.v, self.layer(storage), batch, out=out, lse=lse)
        return out, lse, storage

    def check(self, backend: type[AttentionBackend]) -> None:
        """Fails where `backend` strays from the reference: in a value, in what is empty, or in a byte of the cache.

        Padding may hold anything finite, and so may the null page, which padded rows share.
        """
        (out, lse, storage), (true_out, true_lse, true_storage) = self.run(backend), self.expected()
        real = slice(0, int(self.batch.query_indptr[self.batch.num_real_reqs]))
        out_error, lse_error = self.tolerance()
        assert out.isfinite().all(), "the output holds NaN or inf"
        torch.testing.assert_close(out[real].cpu().double(), true_out[real], atol=out_error, rtol=0)
        if lse is not None:
            torch.testing.assert_close(lse[real].cpu().double(), true_lse[real], atol=lse_error, rtol=ROUNDING)
        if storage is not None and true_storage is not None:
            assert torch.equal(storage[1:], true_storage[1:]), "the cache differs outside the null page"

    def tolerance(self) -> tuple[float, float]:
        """Largest absolute errors of out and lse that rounding explains, where float32 at least accumulates.

        Values are normal, so below 5. A logit is off by ε · D · |q|·|k| · scale in float32, which changes a weight by
        as much, relatively, and their sum too; weights and output are rounded to the dtype once, ε/2 · |v| each.
        """
        exact = torch.finfo(torch.promote_types(self.q.dtype, torch.float32)).eps
        logits = exact * self.spec.head_dim * float(self.q.abs().max()) * 5.0 * self.spec.scale
        within = 5.0 * (torch.finfo(self.q.dtype).eps + 2 * logits)
        return within, logits + 16 * ROUNDING


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
    seed: int = 0,
    **fields: Any,
) -> Problem:
    """A problem of B rows; `fields` are those of BackendSpec, with small defaults (4/2 heads of 16, pages of 4).

    Padded rows are appended as the host appends them, on the null page, which is poisoned too. `dropped` keys came
    before each row's first one and left the table, so positions start there. `cross` attends to cached keys only and
    writes nothing. spec.query_mask gives every row a random forest of new tokens.
    """
    random, shuffle = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    spec = make_spec(fields, tokens=sum(query_lens) + padded_rows * max(query_lens), context=max(*seq_lens, 1))
    device, ragged = spec.device, spec.attention == "ragged"
    q_lens = [*query_lens, *[query_lens[0]] * padded_rows]
    lens = [*seq_lens, *[query_lens[0]] * padded_rows]
    table, num_pages = (None, 0) if ragged else _page_table(lens, len(seq_lens), spec.page_size, shuffle)
    mask, positions = _trees(q_lens, lens, random) if spec.query_mask else (None, None)
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
        num_real_reqs=len(seq_lens),
        query_mask=None if mask is None else mask.to(device),
    )
    batch = replace(batch, positions=batch.positions + dropped)
    q, k, v = _tokens(spec, sum(q_lens), random)
    if ragged:
        _, k, v = _tokens(spec, sum(lens), random)
    problem = Problem(
        spec=spec,
        batch=batch,
        storage=None if ragged else _storage(spec, num_pages),
        q=q,
        k=None if cross else k,
        v=None if cross else v,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=torch.randn(spec.num_heads, generator=random).to(device) if spec.sinks else None,
        alibi_slopes=torch.rand(spec.num_heads, generator=random).to(device) if spec.alibi else None,
    )
    if table is not None:
        _fill(problem, table, q_lens, lens, len(seq_lens), cross, random)
    return problem


def make_spec(fields: dict[str, Any], *, tokens: int, context: int) -> BackendSpec:
    """A small spec for a problem: `fields` over defaults, with the limits that the problem needs."""
    small: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    if fields.get("attention") != "ragged":
        small |= {"page_size": 4, "kv_layout": "nhd"}
    given = small | fields
    given.setdefault("kv_dtype", given["dtype"])
    given.setdefault("v_head_dim", given["head_dim"])
    given.setdefault("scale", given["head_dim"] ** -0.5)
    return BackendSpec(**given, max_batch=64, max_tokens=max(tokens, 64), max_context=max(context, 64))


def store(layer: AttentionLayer, k: Tensor, v: Tensor, loc: Tensor, page_size: int) -> None:
    """Writes tokens into their slots one at a time, byte by byte as the contract says."""
    assert isinstance(layer.kv, PagedView)
    for token, slot in enumerate(loc.tolist()):
        page, offset = divmod(slot, page_size)
        for cache, x, scale in ((layer.kv.k, k, layer.k_scale), (layer.kv.v, v, layer.v_scale)):
            cache[page, offset].copy_(encode(x[token], cache.dtype, scale))


def _page_table(lens: Sequence[int], real: int, page_size: int, random: torch.Generator) -> tuple[Tensor, int]:
    """Pages in random order, some left over: int32 [B, W], and their number. Padded rows have the null page."""
    pages = [-(-length // page_size) for length in lens]
    free = (torch.randperm(sum(pages[:real]) + 3, generator=random) + 1).tolist()
    num_pages = len(free) + 1
    table = torch.zeros(len(lens), max(*pages, 1), dtype=torch.int32)
    for row in range(real):
        table[row, : pages[row]] = torch.tensor([free.pop() for _ in range(pages[row])], dtype=torch.int32)
    return table, num_pages


def _storage(spec: BackendSpec, num_pages: int) -> Tensor:
    size = BUILTIN_LAYOUTS[spec.kv_layout].bytes_per_page(spec)
    return torch.full((num_pages, size), POISON, dtype=torch.uint8, device=spec.device)


def _tokens(spec: BackendSpec, count: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of `count` tokens, as strided views of one fused projection."""
    widths = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.v_head_dim]
    fused = torch.randn(count, sum(widths), generator=random, dtype=torch.float64)
    q, k, v = torch.split(fused.to(torch_dtype(spec.dtype)).to(spec.device), widths, dim=1)
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    return (
        q.view(count, heads, spec.head_dim),
        k.view(count, kv_heads, spec.head_dim),
        v.view(count, kv_heads, spec.v_head_dim),
    )


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
        _, k, v = _tokens(spec, count, random)
        store(layer, k, v, loc, spec.page_size)


def _trees(q_lens: Sequence[int], lens: Sequence[int], random: torch.Generator) -> tuple[Tensor, Tensor]:
    """A random forest per row: who is whose ancestor or itself, bool [Σ q²], and positions by depth, int64 [T]."""
    masks, positions = [], []
    for new, length in zip(q_lens, lens, strict=True):
        seen, depth = torch.eye(new, dtype=torch.bool), torch.zeros(new, dtype=torch.long)
        for i in range(1, new):
            parent = int(torch.randint(-1, i, (), generator=random))
            if parent >= 0:
                seen[i] |= seen[parent]
                depth[i] = depth[parent] + 1
        masks.append(seen.flatten())
        positions.append(depth + length - new)
    return torch.cat(masks), torch.cat(positions)
