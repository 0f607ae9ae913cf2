"""The sampler against exact probabilities, the processors of `transformers`, and itself alone."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstock.engine.sampling import SamplingParams
from headstock.runner import sampler as module
from headstock.runner.sampler import Sampler, SamplingRow, uniform

NAN, INF = float("nan"), float("inf")
GREEDY = SamplingParams()
COMBINATIONS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in product((0.6, 1.0, 1.7), (0, 1, 5), (1.0, 0.8, 0.3), (0.0, 0.15))
]


def label(p):
    return f"t={p.temperature} k={p.top_k} p={p.top_p} min_p={p.min_p}"


def sample(logits, params, seeds=None, steps=None):
    rows = [
        SamplingRow(p, seeds[i] if seeds else 100 + i, steps[i] if steps else 0)
        for i, p in enumerate([params] * len(logits) if isinstance(params, SamplingParams) else params)
    ]
    return Sampler(rows, "cpu")(logits)


def weights(logits, params):
    return Sampler([SamplingRow(params, 0, 0)] * len(logits), "cpu").weights(logits)


def probabilities(logits: list[float], p: SamplingParams) -> torch.Tensor:
    """The distribution by its definition, in float64, one token at a time."""
    probs = torch.softmax(torch.tensor(logits, dtype=torch.float64) / p.temperature, -1)
    if p.top_k:
        probs = torch.where(probs >= sorted(probs, reverse=True)[min(p.top_k, len(probs)) - 1], probs, 0)
        probs = probs / probs.sum()
    likelier = torch.stack([probs[probs > x].sum() for x in probs])
    if p.top_p < 1:
        probs = torch.where(likelier < p.top_p, probs, 0)
    probs = torch.where(probs >= p.min_p * probs.max(), probs, 0)
    return probs / probs.sum()


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    kept = expected > 0
    assert counts[~kept].sum() == 0, "a filtered token was drawn"
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    return torch.special.gammaincc(torch.tensor((kept.sum().item() - 1) / 2).double(), statistic / 2).item()


@pytest.mark.parametrize("params", [p for p in COMBINATIONS if p.top_k != 1], ids=label)
def test_draws_follow_the_exact_probabilities(params):
    logits = [1.0, -0.5, 2.2, 0.3, -INF, 1.9, -3.0, 0.9]
    draws = 4000
    tokens, failed = sample(torch.tensor([logits]).expand(draws, -1), params, seeds=range(draws))
    assert not failed.any()
    expected = probabilities(logits, params) * draws
    counts = tokens.bincount(minlength=len(logits)).double()
    assert (expected > 0).sum() == 1 or p_value(counts, expected) > 1e-3


def test_the_steps_of_one_request_are_independent():
    draws, logits = 8000, [0.5, 0.0, -0.5]
    params = SamplingParams(temperature=1.0)
    tokens, _ = sample(torch.tensor([logits]).expand(draws, -1), params, seeds=[7] * draws, steps=range(draws))
    pairs = tokens[0::2] * 3 + tokens[1::2]
    probs = probabilities(logits, params)
    expected = torch.outer(probs, probs).flatten() * len(pairs)
    assert p_value(pairs.bincount(minlength=9).double(), expected) > 1e-3


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_the_uniform_number_is_in_range_and_depends_on_both(seed, step):
    assert 0 <= uniform(seed, step) < 1
    assert uniform(seed, step) == uniform(seed, step)
    assert uniform(seed, step) not in (uniform(seed ^ 1, step), uniform(seed, step + 1))


@pytest.mark.parametrize("params", COMBINATIONS, ids=label)
@pytest.mark.parametrize("vocab", [7, 333, 4001])
def test_the_kept_tokens_are_those_of_transformers(params, vocab):
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    steps = [TemperatureLogitsWarper(params.temperature)]
    steps += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    steps += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    steps += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    reference = LogitsProcessorList(steps)(None, logits)
    ours = weights(logits, params)
    assert torch.equal(ours > 0, reference > -INF)
    torch.testing.assert_close(
        ours / ours.sum(-1, keepdim=True), reference.double().softmax(-1), rtol=1e-5, atol=1e-9, check_dtype=False
    )


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [0, 1, 2, 3]),  # ties with the second are all kept
        ({"top_k": 99}, [0, 1, 2, 3, 4]),  # more than there are: every token that can be drawn
        ({"top_p": 0.5}, [0, 1, 2, 3]),  # the first has 0.31; the three that tie are all kept
        ({"top_p": 1e-300}, [0]),
        ({"min_p": 1.0}, [0]),
        ({"min_p": 0.5}, [0, 1, 2, 3]),
        ({"top_k": 1, "top_p": 0.99, "min_p": 0.01}, [0]),
    ],
)
def test_ties_and_edges_of_the_filters(params, kept):
    logits = torch.tensor([[1.5, 1.0, 1.0, 1.0, -1.0, -INF]])
    assert weights(logits, SamplingParams(temperature=1.0, **params))[0].nonzero().flatten().tolist() == kept


def test_top_p_counts_only_what_top_k_kept():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    both = weights(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.55))
    assert (both > 0).tolist() == [[True, False, False, False]]  # 0.4 / 0.7 is already 0.57


@pytest.mark.parametrize("zeros", [[0.0, -0.0], [-0.0, 0.0]])
def test_a_negative_zero_is_a_zero(zeros):
    assert weights(torch.tensor([[*zeros, -9.0]]), SamplingParams(temperature=1.0, top_p=0.3)).count_nonzero() == 2


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30, 1e308])
def test_extreme_temperatures_reach_their_limits(temperature):
    logits = torch.tensor([[3.0, 2.999, -INF, -50.0]])
    params = SamplingParams(temperature=temperature, top_p=0.999999)
    limit = [1, 0, 0, 0] if temperature < 1 else [1, 1, 0, 1]
    assert (weights(logits, params) > 0).int().tolist() == [limit]
    assert not sample(logits, params).failed.any()


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2**-48, 3)])
def test_the_extreme_numbers_draw_the_first_and_the_last_token_kept(monkeypatch, number, token):
    monkeypatch.setattr(module, "uniform", lambda seed, step: number)
    logits = torch.tensor([[-INF, 0.0, 1.0, 0.5, -9.0]])
    assert sample(logits, SamplingParams(temperature=1.0, top_k=3)).tokens.tolist() == [token]


def test_a_neighbour_with_top_p_takes_nothing_from_rows_without():
    """Their total is over 2^53 and has low bits, so float64 rounds it, in some rows up."""
    logits = torch.rand(8, 20_000, generator=torch.Generator().manual_seed(0)) / 9
    logits[:, -1] -= 25
    everything, nucleus = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)
    rows = [SamplingRow(everything, 0, 0)] * 7 + [SamplingRow(nucleus, 0, 0)]
    assert (Sampler(rows, "cpu").weights(logits)[:7] > 0).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_alone_is_the_row_in_a_batch(data):
    """Whatever the neighbours ask for, wherever the row stands, and however the batch is cut into blocks."""
    params = data.draw(st.lists(st.sampled_from([GREEDY, *COMBINATIONS]), min_size=1, max_size=9))
    vocab = data.draw(st.sampled_from([1, 5, 63, 1001]))
    seeds = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=len(params), max_size=len(params)))
    steps = data.draw(st.lists(st.integers(0, 1000), min_size=len(params), max_size=len(params)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    logits = (torch.randn(len(params), vocab, generator=generator) * 3).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CPU_BLOCK", data.draw(st.sampled_from([1, 2 * vocab, 2**22])))
        batch = sample(logits, params, seeds, steps).tokens
    alone = [
        sample(logits[i : i + 1], params[i : i + 1], seeds[i : i + 1], steps[i : i + 1]) for i in range(len(params))
    ]
    assert batch.tolist() == [one.tokens.item() for one in alone]
    assert batch.dtype == torch.int64


def test_a_strided_batch_draws_as_a_contiguous_one():
    logits = torch.randn(333, 16, generator=torch.Generator().manual_seed(0)).T
    params = SamplingParams(temperature=0.9, top_p=0.9)
    assert torch.equal(sample(logits, params).tokens, sample(logits.contiguous(), params).tokens)


def test_greedy_is_the_first_of_the_greatest_beside_sampled_rows():
    logits = torch.tensor([[1.0, -INF, 0.0], [1.0, -INF, 0.0], [-5.0, 2.0, 2.0]])
    sampled = SamplingParams(temperature=0.8)
    tokens, failed = sample(logits, [GREEDY, sampled, GREEDY])
    assert tokens[[0, 2]].tolist() == [0, 1]
    assert tokens[1].item() in (0, 2)
    assert not failed.any()
    filters = SamplingParams(top_k=2, top_p=0.1, min_p=0.5, seed=3)  # temperature 0: all of them change nothing
    assert sample(logits, filters).tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, top_k=3, top_p=0.9, min_p=0.1)], ids=label)
@pytest.mark.parametrize("bad", [[NAN] * 8, [1.0, NAN, *[0.0] * 6], [-INF] * 8, [INF, *[0.0] * 7]], ids=str)
def test_a_row_that_cannot_be_sampled_is_reported_and_changes_no_other(params, bad):
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    clean = sample(logits, params)
    logits[1] = torch.tensor(bad)
    tokens, failed = sample(logits, params)
    assert failed.tolist() == [False, True, False]
    assert tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()
    assert 0 <= tokens[1] < 8


def test_an_empty_batch_has_no_tokens():
    assert sample(torch.empty(0, 5), []).tokens.shape == (0,)


def test_a_large_vocabulary_with_one_overwhelming_token_and_a_flat_tail():
    vocab = 262_144
    logits = torch.full((2, vocab), -8.0)
    logits[0, 70_000] = 12.0
    params = SamplingParams(temperature=1.0, top_p=0.5)
    kept = weights(logits, params) > 0
    assert kept[0].nonzero().tolist() == [[70_000]]
    assert kept[1].all()  # every token ties
    tokens = sample(logits[1:].expand(64, -1), params).tokens
    assert tokens.float().std() > vocab / 8  # spread over the whole vocabulary, not one end of it
