"""MLA's two forms: absorbed against expanded, and expanded keys in two parts, as its prefill has them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headstock.backend import AttentionBackend
from headstock.batch import ForwardBatch
from headstock.testing.problem import ROUNDING, Problem, Result, close, tensors
from headstock.testing.reference import attention
from headstock.testing.rig import Rig


def absorbed_against_expanded(backend: type[AttentionBackend], given: Problem) -> None:
    """Random W_UK [Hq, N, R] and W_UV [Hq, R, V] fold into the query and out of the output (DeepSeek-V2, appendix C).

    With a latent c, its rope part p, and a query of n and r: n·(W_UK c) + r·p = (nᵀ W_UK)·c + r·p, and
    Σ w · W_UV c = W_UV Σ w · c. The right-hand sides are the backend's, the left-hand ones the reference's, in float64.
    """
    spec, random = given.spec, torch.Generator().manual_seed(1)
    heads, rank, rope = spec.num_heads, spec.v_head_dim, spec.head_dim - spec.v_head_dim
    nope, width, tokens = max(rank // 4, 1), max(rank // 4, 1) + 1, given.batch.num_tokens

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    query, up_k = normal(tokens, heads, nope + rope), normal(heads, nope, rank) / nope**0.5
    up_v = normal(heads, rank, width) / rank**0.5
    exact = torch.cat((torch.einsum("thn,hnr->thr", query[..., :nope], up_k), query[..., nope:]), -1)
    absorbed = replace(given, q=exact.to(given.q))
    out, lse, _ = Rig(backend, spec).run(absorbed)

    assert given.expected[2] is not None, "a problem with a cache"
    latents = _latents(replace(given, storage=given.expected[2]))
    keys = torch.cat(
        (torch.einsum("sr,hnr->shn", latents[:, :rank], up_k), latents[:, None, rank:].expand(-1, heads, -1)), -1
    )
    values = torch.einsum("sr,hrv->shv", latents[:, :rank], up_v)
    ragged = replace(spec, attention="ragged", num_kv_heads=heads, head_dim=nope + rope, v_head_dim=width)
    want, want_lse = attention(query, keys, values, replace(given.layer(None), kv=None), given.batch, ragged)

    # rounding the query moves a logit by half an epsilon of what it sums
    moved = torch.finfo(given.q.dtype).eps / 2 * float(exact.norm(dim=-1).max() * latents.norm(dim=-1).max())
    out_error, lse_error = absorbed.tolerance()
    lost = moved * spec.scale
    real = slice(0, int(given.batch.query_indptr[given.batch.num_real_reqs]))
    raised = torch.einsum("thr,hrv->thv", out.double().cpu(), up_v)
    spread = float(up_v.norm(dim=1).max()) * rank**0.5
    close(raised[real], want[real], spread * (out_error + 10 * lost), what="W_UV · out [token, head, dim]")
    if lse is not None:
        close(lse[real], want_lse[real], lse_error + lost, ROUNDING, what="lse [token, head]")


def _latents(given: Problem) -> Tensor:
    """Every row's cached latents, one after the other, [Σ keys, R + P] float64, scale applied."""
    batch, view = given.batch, given.layer(given.storage).kv
    assert view is not None, "a latent problem has a cache"
    assert batch.page_table is not None, "and a page table"
    (cache,) = tensors(view)
    found = [torch.zeros(0, cache.shape[-1], dtype=torch.float64)]
    for pages, length in zip(batch.page_table.tolist(), batch.seq_lens.tolist(), strict=True):
        for key in range(length):
            slot = cache[pages[key // batch.page_size], key % batch.page_size, 0]
            found.append(slot.double().cpu()[None] * given.k_scale)
    return torch.cat(found)


def given_parts_merge(backend: type[AttentionBackend], whole: Problem) -> None:
    """Ragged keys in two parts: a prefix that all queries see, empty for some rows, and the new tokens, causally."""
    batch, states, rig = whole.batch, [], Rig(backend, whole.spec)
    assert whole.k is not None, "ragged keys are given"
    assert whole.v is not None, "and values"
    lens, new = batch.seq_lens.tolist(), batch.query_indptr.diff().tolist()
    ends = batch.seq_lens.cumsum(0).tolist()
    prefixes = [torch.arange(end - n, end - m) for end, n, m in zip(ends, lens, new, strict=True)]
    own = [torch.arange(end - m, end) for end, m in zip(ends, new, strict=True)]
    for causal, chosen in ((False, prefixes), (True, own)):
        keys = torch.cat(chosen).to(whole.k.device)
        part = ForwardBatch.from_lengths(
            new, [len(each) for each in chosen], None, phase="extend", causal=causal, device=whole.k.device,
            host_lengths="exact" if batch.seq_lens_cpu is not None else "bound",
        )  # fmt: skip
        rig.plan(part)
        states.append(rig.forward(replace(whole, batch=part, k=whole.k[keys], v=whole.v[keys]), part, None))
    compare_merged(whole, *states)


def compare_merged(whole: Problem, one: Result, other: Result) -> None:
    """Two states over disjoint keys, merged by their log-sum-exps, against the reference of the whole."""
    lses = [state.lse.double().cpu() for state in (one, other) if state.lse is not None]
    total = torch.logaddexp(*lses)
    first, second = (state.out.double().cpu() * (lse - total).exp()[..., None]
                     for state, lse in zip((one, other), lses, strict=True))  # fmt: skip
    out_error, lse_error = whole.tolerance()
    close(first + second, whole.expected[0], 2 * out_error, what="merged out [token, head, dim]")
    close(total, whole.expected[1], 2 * lse_error, 1e-6, what="merged lse [token, head]")
