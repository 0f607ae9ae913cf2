"""Generation: what a request gets does not depend on its company, and whatever ends it, all it held is given back."""

from __future__ import annotations

import time

import pytest
import torch

from headstock import ModelRunner
from headstock.engine.generate import Generator
from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer
from headstock.errors import OutOfPages, RequestError
from headstock.negotiate import Policy
from headstock.testing.specimen import OFFER, Specimen

pytestmark = pytest.mark.usefixtures("one_thread")

POISON = 255
"""The token of the model without finite logits."""


@pytest.fixture(scope="module")
def tokenizer(poisoned_model):
    return Tokenizer.from_folder(poisoned_model)


@pytest.fixture
def generator(poisoned_model, tokenizer):
    return make(poisoned_model, tokenizer)


def make(folder, tokenizer, backend=Specimen, **given):
    """A generator whose cache, once the test is over, must be all free again."""
    sizes = {"max_batch": 4, "max_tokens": 16, "kv_tokens": 256, "dtype": "float32", "policy": Policy(page_size=4)}
    offer = OFFER.model_copy(update={"backend": backend})
    return Generator(ModelRunner(folder, offers=[offer], **sizes | given), tokenizer)


def assert_all_free(generator):
    runner = generator.runner
    assert runner.pages.allocator.num_free == runner.memory.num_pages - 1
    assert runner.pages.num_free_slots == runner.limits.max_batch
    assert runner.pages.rows(range(runner.limits.max_batch), runner.max_context).count_nonzero() == 0


def prompt_of(length, seed=0):
    return torch.randint(0, POISON, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy_alone(runner, prompt, count):
    """The plain loop: run the prompt, take the likeliest token, run it, and so on."""
    slot, tokens, step = runner.pages.open(), [], prompt
    for start in range(0, len(prompt), runner.limits.max_tokens):
        logits = runner.forward([slot], [step[start : start + runner.limits.max_tokens]])
    while True:
        tokens.append(int(logits[0].argmax()))
        if len(tokens) == count:
            break
        logits = runner.forward([slot], [tokens[-1:]])
    runner.pages.close(slot)
    return tokens


PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((3, 17, 1, 40, 8, 16, 25, 2, 33))]


@pytest.mark.parametrize("max_batch", [1, 2, 4, 9])
def test_greedy_is_the_plain_loop_for_more_prompts_than_rows(poisoned_model, tokenizer, max_batch):
    generator = make(poisoned_model, tokenizer, max_batch=max_batch, kv_tokens=600)
    done = generator.generate(PROMPTS, SamplingParams(max_tokens=9))
    assert [each.tokens for each in done] == [greedy_alone(generator.runner, prompt, 9) for prompt in PROMPTS]
    assert [each.prompt_tokens for each in done] == [len(prompt) for prompt in PROMPTS]
    assert {each.finish_reason for each in done} == {"length"}
    assert [each.text for each in done] == [tokenizer.decode(each.tokens) for each in done]
    assert_all_free(generator)


def test_a_cache_too_small_for_all_makes_them_wait_in_order(poisoned_model, tokenizer):
    running, most = set(), 0

    def on_text(index, text):
        running.add(index)
        nonlocal most
        most = max(most, len(running))

    generator = make(poisoned_model, tokenizer, max_batch=9, kv_tokens=64)
    finished = []

    def on_done(index, completion):
        finished.append(index)
        running.discard(index)

    prompts = [prompt_of(20, seed) for seed in range(5)]
    done = generator.generate(prompts, SamplingParams(max_tokens=12), on_text, on_done)
    assert [each.tokens for each in done] == [greedy_alone(generator.runner, prompt, 12) for prompt in prompts]
    assert finished == [0, 1, 2, 3, 4]
    assert most == 2, "32 tokens each, 64 in the cache"
    assert_all_free(generator)


def test_a_long_request_at_the_head_is_not_overtaken(poisoned_model, tokenizer):
    generator, finished = make(poisoned_model, tokenizer, kv_tokens=64), []
    prompts = [prompt_of(20, 1), prompt_of(50, 2), prompt_of(2, 3)]
    generator.generate(prompts, SamplingParams(max_tokens=10), on_done=lambda index, done: finished.append(index))
    assert finished == [0, 1, 2]
    assert_all_free(generator)


SAMPLED = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=42, max_tokens=12)


@pytest.mark.parametrize("others", [SamplingParams(max_tokens=7), SamplingParams(temperature=2.0, max_tokens=15)])
def test_a_seed_gives_the_same_text_alone_and_in_any_company(poisoned_model, tokenizer, generator, others):
    alone = generator.generate([PROMPTS[1]], SAMPLED)[0]
    assert generator.generate([PROMPTS[1]], SAMPLED)[0] == alone
    assert generator.generate([PROMPTS[1]], SAMPLED.model_copy(update={"seed": 43}))[0].tokens != alone.tokens
    for place in (0, 3, 5):
        prompts, params = PROMPTS[2:7], [others] * 5
        prompts.insert(place, PROMPTS[1])
        params.insert(place, SAMPLED)
        assert generator.generate(prompts, params)[place] == alone
    assert_all_free(generator)


def test_requests_without_a_seed_draw_one_each(generator):
    params = SamplingParams(temperature=3.0, max_tokens=20)
    first, second = generator.generate([PROMPTS[0]] * 2, params)
    assert first.tokens != second.tokens


# How a request ends


def test_an_end_token_ends_the_text_and_ignore_eos_does_not_see_it(poisoned_model, tokenizer):
    tokens = greedy_alone(make(poisoned_model, tokenizer).runner, PROMPTS[0], 8)
    at = next(i for i in range(2, 8) if tokens[i] not in tokens[:i])
    ending = Tokenizer.from_folder(poisoned_model)
    ending.eos_ids = frozenset({tokens[at]})
    generator = make(poisoned_model, ending)
    params = [SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, ignore_eos=True)]
    stopped, ignored = generator.generate([PROMPTS[0]] * 2, params)
    assert (stopped.finish_reason, stopped.tokens) == ("stop", tokens[: at + 1])
    assert stopped.text == tokenizer.decode(tokens[:at])
    assert (ignored.finish_reason, ignored.tokens) == ("length", tokens)
    own = SamplingParams(max_tokens=8, stop_token_ids=(tokens[at],))
    assert make(poisoned_model, tokenizer).generate([PROMPTS[0]], own)[0] == stopped
    assert_all_free(generator)


def test_a_stop_string_cuts_the_text_and_is_never_streamed_in_part(poisoned_model, tokenizer, generator):
    whole = generator.generate([PROMPTS[0]], SamplingParams(max_tokens=20))[0]
    start = next(i for i in range(4, len(whole.text) - 3) if whole.text.find(whole.text[i : i + 3]) == i)
    stop = whole.text[start : start + 3]
    pieces = []
    done = generator.generate(
        [PROMPTS[0], PROMPTS[1]],
        [SamplingParams(max_tokens=20, stop=(stop, "never in it")), SamplingParams(max_tokens=20)],
        on_text=lambda index, text: pieces.append(text) if index == 0 else None,
    )
    assert (done[0].finish_reason, done[0].text) == ("stop", whole.text[:start])
    assert "".join(pieces) == whole.text[:start]
    assert len(done[0].tokens) < 20
    assert done[1].tokens == greedy_alone(generator.runner, PROMPTS[1], 20)
    assert_all_free(generator)


def test_streamed_pieces_add_up_to_each_text_and_done_comes_last(generator):
    pieces, ended = {}, {}

    def on_text(index, text):
        assert index not in ended
        assert text
        pieces[index] = pieces.get(index, "") + text

    done = generator.generate(PROMPTS, SAMPLED, on_text, lambda index, completion: ended.update({index: completion}))
    assert [ended[index] for index in range(len(PROMPTS))] == done
    assert [pieces.get(index, "") for index in range(len(PROMPTS))] == [each.text for each in done]


def test_one_token_is_one_forward(generator):
    done = generator.generate(PROMPTS[:3], SamplingParams(max_tokens=1))
    assert [each.tokens for each in done] == [greedy_alone(generator.runner, prompt, 1) for prompt in PROMPTS[:3]]
    assert {each.finish_reason for each in done} == {"length"}
    assert generator.timing.decode_tokens == 0
    assert_all_free(generator)


@pytest.mark.parametrize(("context", "length", "tokens"), [(16, 15, 1), (16, 14, 2), (64, 63, 1), (2, 1, 1)])
def test_the_context_bounds_a_text(poisoned_model, tokenizer, context, length, tokens):
    generator = make(poisoned_model, tokenizer, max_context=context)
    prompt = prompt_of(length)
    done, other = generator.generate([prompt, prompt[:1]], SamplingParams(max_tokens=50))
    assert (done.finish_reason, done.tokens) == ("length", greedy_alone(generator.runner, prompt, tokens))
    assert len(other.tokens) == min(50, context - 1)
    assert_all_free(generator)


def test_a_cache_of_one_requests_size_serves_it_to_the_last_token(poisoned_model, tokenizer):
    generator = make(poisoned_model, tokenizer, kv_tokens=16)
    [done] = generator.generate([prompt_of(7)], SamplingParams(max_tokens=10))
    assert len(done.tokens) == 10
    with pytest.raises(RequestError, match="can never fit into the KV cache; given: 8 prompt \\+ 10 new tokens, 16"):
        generator.generate([prompt_of(7), prompt_of(8)], SamplingParams(max_tokens=10))
    assert_all_free(generator)


# What is refused


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "prompt 1 is empty"),
        ([1, 256], "outside the vocabulary; would work: 0…255"),
        ([-1], "outside the vocabulary"),
        (
            [1] * 32,
            "32 tokens in a context of 32; would work: a shorter prompt, or a longer context; type: --max-context 64",
        ),
        ([1] * 70, "70 tokens in a context of 32"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_before_any_runs(poisoned_model, tokenizer, prompt, said):
    generator = make(poisoned_model, tokenizer, max_context=32)
    texts = []
    with pytest.raises(RequestError) as caught:
        generator.generate([[1, 2], prompt], on_text=lambda *piece: texts.append(piece))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert texts == []
    assert_all_free(generator)


def test_at_the_models_own_context_a_longer_one_is_not_offered(generator):
    with pytest.raises(RequestError) as caught:
        generator.generate([[1] * 64])
    assert "64 tokens in a context of 64; would work: a shorter prompt" in str(caught.value)
    assert "--max-context" not in str(caught.value)


def test_no_prompts_are_no_completions(generator):
    assert generator.generate([]) == []


@pytest.mark.parametrize("params", [[], [SamplingParams()] * 3])
def test_parameters_are_one_for_all_or_one_each(generator, params):
    with pytest.raises(RequestError, match=f"{len(params)} for 2 prompts"):
        generator.generate(PROMPTS[:2], params)


def test_rows_that_others_hold_are_an_error_and_not_a_wait_without_end(generator):
    held = [generator.runner.pages.open() for _ in range(4)]
    with pytest.raises(OutOfPages, match="others hold"):
        generator.generate([[1]])
    for slot in held:
        generator.runner.pages.close(slot)
    assert len(generator.generate([[1]], SamplingParams(max_tokens=3))[0].tokens) == 3


# What goes wrong


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=6), SAMPLED])
@pytest.mark.parametrize("length", [1, 30])
def test_a_request_without_finite_logits_ends_alone(generator, params, length):
    poisoned = [*prompt_of(length - 1, 5), POISON]
    prompts = [PROMPTS[0], PROMPTS[1], poisoned, PROMPTS[4], PROMPTS[5], PROMPTS[6]]
    expected = generator.generate([prompt for prompt in prompts if prompt is not poisoned], params)
    ended = []
    done = generator.generate(prompts, params, on_done=lambda index, completion: ended.append(index))
    bad = done.pop(2)
    assert (bad.finish_reason, bad.tokens, bad.text) == ("error", [], "")
    assert "not finite" in bad.error
    assert done == expected
    assert sorted(ended) == list(range(6))
    # Its pages, NaN and all, are used again by others.
    assert [each.tokens for each in generator.generate(PROMPTS[:1])] == [
        greedy_alone(generator.runner, PROMPTS[0], 64 - len(PROMPTS[0]))
    ]
    assert_all_free(generator)


class Failing(Specimen):
    """Fails in the layer and step that a test sets."""

    at = None

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        if Failing.at is not None:
            Failing.at -= 1

    def forward(self, q, k, v, layer, batch, *, out, lse=None):
        if Failing.at is not None and Failing.at <= 0 and layer.index == 1:
            raise RuntimeError("the device is gone")
        super().forward(q, k, v, layer, batch, out=out, lse=lse)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 8])
def test_a_backend_that_fails_in_any_step_leaves_nothing_held(poisoned_model, tokenizer, step):
    Failing.at = None
    generator = make(poisoned_model, tokenizer, Failing, max_batch=3)
    params = SamplingParams(max_tokens=5)
    expected = generator.generate(PROMPTS, params)
    Failing.at = step
    with pytest.raises(RuntimeError, match="the device is gone"):
        generator.generate(PROMPTS, params)
    Failing.at = None
    assert_all_free(generator)
    assert generator.generate(PROMPTS, params) == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
@pytest.mark.parametrize("calls", [1, 2, 5, 20])
@pytest.mark.parametrize("callback", ["on_text", "on_done"])
def test_a_callback_that_raises_leaves_nothing_held(generator, error, calls, callback):
    left = calls if callback == "on_text" else min(calls, 6)

    def count(*arguments):
        nonlocal left
        left -= 1
        if left == 0:
            raise error

    with pytest.raises(error):
        generator.generate(PROMPTS, SamplingParams(max_tokens=6), **{callback: count})
    assert_all_free(generator)


# What is counted


def test_prompt_tokens_and_decoded_tokens_are_counted_by_phase(generator):
    started = time.perf_counter()
    done = generator.generate(PROMPTS, SamplingParams(max_tokens=6))
    elapsed = time.perf_counter() - started
    timing = generator.timing
    assert timing.prefill_tokens == sum(len(prompt) for prompt in PROMPTS)
    assert timing.decode_tokens == sum(len(each.tokens) - 1 for each in done)
    assert 0 < timing.first_token_seconds <= timing.prefill_seconds <= elapsed
    assert timing.prefill_seconds + timing.decode_seconds <= elapsed
