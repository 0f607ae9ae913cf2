"""The float64 reference against closed forms and torch's own dense attention."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headstock.testing.mla import absorbed_against_expanded
from headstock.testing.problem import Problem, make_problem
from headstock.testing.specimen import Specimen

CLOSE = {"rtol": 0.0, "atol": 1e-12}


def ragged(query_lens: list[int], seq_lens: list[int], **fields: object) -> Problem:
    return make_problem(query_lens, seq_lens, attention="ragged", dtype="float64", **fields)


def dense(problem: Problem, **arguments: object) -> Tensor:
    """torch's own attention for a problem of one row, [T, Hq, Dv]."""
    assert problem.k is not None
    assert problem.v is not None
    q, k, v = (x.transpose(0, 1) for x in (problem.q, problem.k, problem.v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=problem.spec.scale, **arguments).transpose(
        0, 1
    )


@pytest.mark.parametrize(("new", "keys"), [(1, 1), (1, 6), (4, 4), (3, 7)])
def test_causal_is_dense_attention_with_a_right_aligned_triangle(new, keys):
    problem = ragged([new], [keys], num_heads=6, num_kv_heads=2, v_head_dim=8)
    triangle = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    torch.testing.assert_close(problem.expected[0], dense(problem, attn_mask=triangle), **CLOSE)


def test_more_queries_than_keys_leave_the_first_ones_empty():
    out, lse, _ = ragged([5], [2]).expected
    assert (out[:3] == 0).all()
    assert (lse[:3] == -torch.inf).all()
    assert (lse[3:] > -torch.inf).all()


def test_non_causal_is_dense_attention():
    problem = ragged([3], [5], causal=False)
    torch.testing.assert_close(problem.expected[0], dense(problem), **CLOSE)


def test_a_window_shows_so_many_keys_itself_included():
    problem = ragged([5], [5], window=2)
    band = torch.ones(5, 5, dtype=torch.bool).tril().triu(-1)
    torch.testing.assert_close(problem.expected[0], dense(problem, attn_mask=band), **CLOSE)


def test_a_window_is_measured_by_positions_where_the_table_is_local():
    problem = ragged([2], [6], window=3)
    far = replace(problem, batch=replace(problem.batch, positions=problem.batch.positions + 1000))
    torch.testing.assert_close(far.expected[0], problem.expected[0], **CLOSE)


def test_no_query_at_all_gives_the_mean_and_the_logarithm_of_the_count():
    problem = ragged([1], [7], num_heads=2, num_kv_heads=1)
    out, lse, _ = replace(problem, q=torch.zeros_like(problem.q)).expected
    assert problem.v is not None
    torch.testing.assert_close(out[0], problem.v.mean(0).expand(2, -1), **CLOSE)
    torch.testing.assert_close(lse, torch.full((1, 2), math.log(7), dtype=torch.float64), **CLOSE)


def test_a_sink_is_one_more_key_of_no_value():
    problem = ragged([1], [4], num_heads=1, num_kv_heads=1, sinks=True, softcap=0.5)
    plain, lse, _ = replace(problem, sinks=None).expected
    with_sink, total, _ = problem.expected
    assert problem.sinks is not None
    share = torch.exp(lse) / (torch.exp(lse) + torch.exp(problem.sinks.double()))
    torch.testing.assert_close(with_sink, plain * share[..., None], **CLOSE)
    torch.testing.assert_close(total, torch.logaddexp(lse, problem.sinks.double()[None]), **CLOSE)


def test_alibi_is_dense_attention_with_a_linear_bias():
    problem = ragged([3], [5], num_heads=2, num_kv_heads=2, alibi=True)
    assert problem.alibi_slopes is not None
    back = torch.arange(5)[None, :] - torch.arange(2, 5)[:, None]
    bias = problem.alibi_slopes.double()[:, None, None] * back
    bias = bias.masked_fill(back > 0, -torch.inf)
    torch.testing.assert_close(problem.expected[0], dense(problem, attn_mask=bias), **CLOSE)


def test_a_cap_bounds_logits_after_scaling():
    problem = ragged([1], [3], num_heads=1, num_kv_heads=1, softcap=2.0)
    assert problem.k is not None
    assert problem.v is not None
    logits = 2.0 * torch.tanh(problem.k[:, 0] @ problem.q[0, 0] * 0.25 / 2.0)
    torch.testing.assert_close(problem.expected[0][0, 0], logits.softmax(0) @ problem.v[:, 0], **CLOSE)


def test_a_mask_of_ancestors_is_each_path_of_the_tree_on_its_own():
    problem = ragged([3], [5], query_mask=True)
    # two children of one root: token 2 must not see token 1
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    batch = replace(problem.batch, query_mask=mask.flatten(), positions=torch.tensor([2, 3, 3]))
    out = replace(problem, batch=batch).expected[0]
    seen = torch.cat([torch.ones(3, 2, dtype=torch.bool), mask], dim=1)
    torch.testing.assert_close(out, dense(problem, attn_mask=seen), **CLOSE)


def test_the_log_sum_exp_merges_two_halves_into_the_whole():
    whole = ragged([1], [9], causal=False)
    assert whole.k is not None
    assert whole.v is not None
    parts = []
    for part in (slice(0, 4), slice(4, 9)):
        half = ragged([1], [part.stop - part.start], causal=False)
        parts.append(replace(half, q=whole.q, k=whole.k[part], v=whole.v[part]).expected[:2])
    (first, first_lse), (second, second_lse) = parts
    out, lse, _ = whole.expected
    torch.testing.assert_close(torch.logaddexp(first_lse, second_lse), lse, **CLOSE)
    weights = torch.exp(first_lse - lse)[..., None], torch.exp(second_lse - lse)[..., None]
    torch.testing.assert_close(first * weights[0] + second * weights[1], out, **CLOSE)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("kv_layout", ["nhd", "hnd"])
def test_pages_only_say_where_keys_lie(page_size, kv_layout):
    lens = {"query_lens": [1, 2], "seq_lens": [5, 16], "dtype": "float64", "v_head_dim": 8}
    want = make_problem(**lens, page_size=64)
    got = make_problem(**lens, page_size=page_size, kv_layout=kv_layout)
    assert torch.equal(got.expected[0], want.expected[0])
    assert torch.equal(got.expected[1], want.expected[1])


def test_cache_scales_multiply_what_is_read():
    plain = make_problem([2], [6], dtype="float64", causal=False, cross=True)
    scaled = replace(plain, k_scale=2.0, v_scale=3.0)
    sharper = replace(plain, spec=replace(plain.spec, scale=plain.spec.scale * 2.0))
    torch.testing.assert_close(scaled.expected[0], sharper.expected[0] * 3.0, **CLOSE)


def latents(query_lens: list[int], seq_lens: list[int], **fields: object) -> Problem:
    return make_problem(query_lens, seq_lens, attention="mla", dtype="float64", kv_dtype="float64", **fields)


def test_latents_are_keys_of_one_head_whose_first_part_is_their_value():
    problem = latents([3], [7], num_heads=5, head_dim=24, v_head_dim=16)
    out, lse, storage = problem.expected
    assert problem.v is None
    cache = problem.layer(storage).kv.latent
    keys = cache[problem.batch.page_table[0].long()].flatten(0, 1)[:7, None]
    q, k, v = (x.transpose(0, 1) for x in (problem.q, keys, keys[..., :16]))
    triangle = torch.ones(3, 7, dtype=torch.bool).tril(4)
    scores = (q @ k.transpose(-1, -2) * problem.spec.scale).masked_fill(~triangle, -torch.inf)
    torch.testing.assert_close(out, (scores.softmax(-1) @ v).transpose(0, 1), **CLOSE)
    torch.testing.assert_close(lse, scores.logsumexp(-1).T, **CLOSE)
    assert problem.spec.scale == (16 // 4 + 8) ** -0.5, "of a head before it is absorbed"


def test_absorbed_is_expanded_to_float64():
    problem = latents([2, 1], [9, 4], num_heads=3, lse=True)
    absorbed_against_expanded(Specimen, problem)
    assert problem.tolerance()[0] < 1e-11
