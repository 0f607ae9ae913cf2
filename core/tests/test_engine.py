"""The engine: whatever the company, chunks, cache and preemptions, a request gets what it gets alone and uncached."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock import ModelRunner
from headstock.engine.async_engine import AsyncEngine
from headstock.engine.engine import Engine
from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer
from headstock.errors import HeadstockError, OutOfPages, PageError, PluginError, RequestError
from headstock.negotiate import Policy
from headstock.runner.sampler import Sampler, SamplingRow
from headstock.testing.specimen import OFFER, Specimen

pytestmark = pytest.mark.usefixtures("one_thread")

POISON = 255
"""The token of the model without finite logits."""


class Watched(Specimen):
    """The specimen, whose `seen` collects its batches and whose step `fail_at` from now fails, in the last layer."""

    def __init__(self, spec, workspace):
        super().__init__(spec, workspace)
        self.seen, self.fail_at = [], 0

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        self.seen.append((batch.phase, batch.num_reqs, batch.num_tokens))
        self.fail_at -= 1

    def forward(self, q, k, v, layer, batch, *, out, lse=None):
        if self.fail_at == 0 and layer.index == 1:
            raise RuntimeError("the device is gone")
        super().forward(q, k, v, layer, batch, out=out, lse=lse)


WATCHED = OFFER.model_copy(update={"backend": Watched})


@pytest.fixture(scope="module")
def make(poisoned_model):
    """Makes engines that check their pages after every step; runners of the same sizes are the same."""
    tokenizer = Tokenizer.from_folder(poisoned_model)

    @cache
    def runner(page_size, **given):
        sizes = {"max_batch": 4, "max_tokens": 16, "kv_tokens": 256, "dtype": "float32"}
        return ModelRunner(poisoned_model, offers=[WATCHED], policy=Policy(page_size=page_size), **sizes | given)

    def engine(page_size=4, prefix_cache=True, **given):
        made = Engine(runner(page_size, **given), tokenizer, prefix_cache=prefix_cache, check=True)
        assert made.stats.free_pages == made.runner.memory.num_pages - 1, "an engine before kept pages"
        return made

    return engine


@pytest.fixture(scope="module")
def alone(poisoned_model):
    """The plain loop: a prompt run at once in a runner of its own, then token by token, with no cache of prefixes."""
    runner = ModelRunner(poisoned_model, offers=[WATCHED], max_batch=1, dtype="float32", max_tokens=64)

    @cache
    def whole(prompt, params):
        slot, tokens, new = runner.pages.open(), [], list(prompt)
        while len(prompt) + len(tokens) < 64 and len(tokens) < 16:
            sampler = Sampler([SamplingRow(params, params.seed or 0, len(tokens))], "cpu")
            new = sampler(runner.forward([slot], [new])).tokens.tolist()
            tokens += new
        runner.pages.close(slot)
        return tokens

    return lambda prompt, params, sample=0: whole(
        tuple(prompt), params.model_copy(update={"seed": (params.seed or 0) + sample, "max_tokens": 1})
    )[: params.max_tokens]


def prompt_of(length, seed=0):
    return torch.randint(0, POISON, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def drain(engine):
    """Steps until nothing is left; {(request, sample): completion}."""
    done = {}
    while engine.busy:
        done |= {(output.request, output.sample): output.completion for output in engine.step() if output.completion}
    return done


GREEDY = SamplingParams(max_tokens=10)
DRAWN = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, seed=7)
BASE = prompt_of(40, 1)

REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 6),  # steps after the one before
        st.sampled_from([0, 8, 9, 12, 30]),  # tokens in common with others
        st.integers(1, 12),  # tokens of its own
        st.integers(0, 3),  # which these are
        st.sampled_from([GREEDY, DRAWN]),
        st.integers(1, 3),  # samples
        st.none() | st.integers(0, 10),  # steps until it is aborted
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(
    requests=REQUESTS,
    page_size=st.sampled_from([1, 4]),
    kv_tokens=st.sampled_from([56, 80, 256]),
    max_tokens=st.sampled_from([5, 16, 64]),
    mixed=st.sampled_from(["extend", "split"]),
    reuse=st.booleans(),
)
def test_any_interleaving_gives_what_each_gets_alone(
    make, alone, requests, page_size, kv_tokens, max_tokens, mixed, reuse
):
    with make(page_size, reuse, kv_tokens=kv_tokens, max_tokens=max_tokens, mixed=mixed) as engine:
        outputs, expected, aborts, steps = defaultdict(list), {}, {}, 0

        def step():
            nonlocal steps
            steps += 1
            for output in engine.step():
                outputs[output.request, output.sample].append(output)
            for number in [number for number, at in aborts.items() if at < steps]:
                engine.abort(number)

        for gap, common, own, seed, params, n, left in requests:
            for _ in range(gap):
                step()
            prompt = [*BASE[:common], *prompt_of(own, seed)]
            number = engine.add_request(prompt, params, n=n)
            expected |= {(number, sample): alone(prompt, params, sample) for sample in range(n)}
            if left is not None:
                aborts[number] = steps + left
        while engine.busy:
            step()
        assert outputs.keys() == expected.keys()
        for key, heard in outputs.items():
            completion = heard[-1].completion
            assert not any(output.completion for output in heard[:-1])
            assert [output.token for output in heard if output.token is not None] == completion.tokens
            assert "".join(output.text for output in heard) == completion.text
            assert completion.text == engine.tokenizer.decode(completion.tokens)
            if completion.finish_reason == "abort":
                assert key[0] in aborts
                assert completion.tokens == expected[key][: len(completion.tokens)]
            else:
                assert (completion.finish_reason, completion.tokens) == ("length", expected[key])
        stats = engine.stats
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.free_pages + stats.cached_pages == engine.runner.memory.num_pages - 1
        assert reuse or stats.cached_pages == stats.cached_tokens == 0


# Preemption


def test_preempted_requests_lose_nothing_drawn_or_greedy(make, alone):
    with make(kv_tokens=56) as engine:
        prompts = [prompt_of(9 + seed, seed) for seed in range(4)]
        params = [GREEDY, DRAWN, DRAWN.model_copy(update={"seed": 2**63 - 1}), GREEDY]
        params = [each.model_copy(update={"max_tokens": 16}) for each in params]
        for prompt, own in zip(prompts, params, strict=True):
            engine.add_request(prompt, own)
        done = drain(engine)
        assert engine.stats.preemptions > 0
        expected = [alone(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        assert [done[number, 0].tokens for number in range(4)] == expected


# The prefix cache


@pytest.mark.parametrize("length", [8, 9, 12, 3, 1])
def test_a_prompt_cached_as_a_whole_runs_at_least_its_last_token_again(make, alone, length):
    prompt = prompt_of(length)
    with make() as engine:
        for _ in range(2):
            engine.add_request(prompt, GREEDY)
            [done] = drain(engine).values()
            assert done.tokens == alone(prompt, GREEDY)
        assert engine.stats.cached_tokens == (length - 1) // 4 * 4
        assert engine.stats.prefill_tokens == 2 * length - engine.stats.cached_tokens


def test_many_samples_of_a_prompt_run_it_once_and_share_its_pages(make, alone):
    prompt = prompt_of(13)
    with make(max_tokens=64) as engine:
        engine.add_request(prompt, DRAWN, n=4)
        engine.step()
        assert engine.stats.prefill_tokens == 13
        engine.step()
        assert (engine.stats.prefill_tokens, engine.stats.cached_tokens) == (13 + 3, 3 * 12)
        pages = engine.runner.pages
        rows = [list(pages.pages(each.slot)) for each in engine.scheduler.running]
        assert len(rows) == 4
        assert len({tuple(row[:3]) for row in rows}) == 1
        done = drain(engine)
        assert [done[0, sample].tokens for sample in range(1, 4)] == [alone(prompt, DRAWN, i) for i in range(1, 4)]
        assert len({tuple(each.tokens) for each in done.values()}) > 1


def test_the_next_turn_of_a_conversation_finds_all_whole_pages_of_the_last(make, alone):
    with make() as engine:
        history = prompt_of(7)
        for turn in range(3):
            engine.add_request(history, GREEDY)
            [done] = drain(engine).values()
            assert done.tokens == alone(history, GREEDY)
            before, engine_cached = len(history) + len(done.tokens) - 1, engine.stats.cached_tokens
            history = [*history, *done.tokens, *prompt_of(3, turn)]
            engine.add_request(history, SamplingParams(max_tokens=1))
            drain(engine)
            assert engine.stats.cached_tokens - engine_cached == before // 4 * 4


def test_namespaces_and_engines_without_a_cache_share_nothing(make, alone):
    prompt = prompt_of(12)
    with make() as engine:
        for namespace in ("a", "b", None, ("a",)):
            engine.add_request(prompt, GREEDY, namespace=namespace)
        assert {tuple(each.tokens) for each in drain(engine).values()} == {tuple(alone(prompt, GREEDY))}
        assert engine.stats.cached_tokens == 0
        engine.add_request(prompt, GREEDY, namespace="b")
        drain(engine)
        assert engine.stats.cached_tokens == 8
    with make(prefix_cache=False) as engine:
        engine.add_request(prompt, GREEDY, n=2)
        drain(engine)
        assert (engine.stats.cached_tokens, engine.stats.cached_pages) == (0, 0)


def test_a_reset_forgets_what_is_cached_and_is_refused_while_it_is_used(make):
    with make() as engine:
        engine.add_request(prompt_of(12), GREEDY)
        engine.step()
        with pytest.raises(PageError, match="in use"):
            engine.reset_cache()
        drain(engine)
        assert engine.stats.cached_pages > 0
        engine.reset_cache()
        assert engine.stats.cached_pages == 0
        engine.add_request(prompt_of(12), GREEDY)
        drain(engine)
        assert engine.stats.cached_tokens == 0


# What a step is


@pytest.mark.parametrize("mixed", ["extend", "split"])
def test_a_step_of_prompts_and_decoding_is_one_pass_in_one_segment_or_two(make, alone, mixed):
    with make(mixed=mixed) as engine:
        seen = engine.runner.instances[0].backend.seen
        prompts = [prompt_of(5, 0), prompt_of(30, 1)]
        engine.add_request(prompts[0], GREEDY)
        engine.step()
        engine.add_request(prompts[1], GREEDY)
        del seen[:]
        engine.step()
        engine.step()
        assert seen == [("extend", 2, 16)] * 2 if mixed == "extend" else [("decode", 1, 1), ("extend", 1, 15)] * 2
        assert engine.stats.steps == 3
        done = drain(engine)
        assert [done[number, 0].tokens for number in (0, 1)] == [alone(prompt, GREEDY) for prompt in prompts]


def test_what_is_counted(make):
    with make() as engine:
        engine.add_request(prompt_of(20), GREEDY)
        engine.add_request(prompt_of(5, 1), GREEDY)
        stats = engine.stats
        assert (stats.waiting, stats.running, stats.steps) == (2, 0, 0)
        engine.step()
        assert (engine.stats.waiting, engine.stats.running, engine.stats.prefill_tokens) == (1, 1, 16)
        drain(engine)
        stats = engine.stats
        assert (stats.prefill_tokens, stats.decode_tokens, stats.preemptions) == (25, 18, 0)
        assert (stats.waiting, stats.running) == (0, 0)
        assert stats.prefill_seconds > 0
        assert stats.decode_seconds > 0
        assert stats.cached_pages == 29 // 4 + 14 // 4


# Refusals and limits


def test_what_can_never_fit_is_refused_at_once_with_sizes_and_the_next_one_runs(make, alone):
    with make(kv_tokens=16) as engine:
        with pytest.raises(RequestError, match=r"the KV cache; given: 20 prompt \+ 10 new tokens, 16 in the cache"):
            engine.add_request(prompt_of(20), GREEDY)
        with pytest.raises(RequestError, match=r"6 prompt \+ 12 new tokens, 16 in the cache.*type: --kv-tokens 17"):
            engine.add_request(prompt_of(6), DRAWN)
        engine.add_request(prompt_of(3), GREEDY)
        engine.add_request(prompt_of(7), GREEDY)  # 16 tokens: the whole cache
        done = drain(engine)
        assert [done[number, 0].tokens for number in (0, 1)] == [alone(prompt_of(n), GREEDY) for n in (3, 7)]


def test_at_the_limit_of_the_context_a_prompt_gets_what_room_there_is(make, alone):
    with make(max_context=16) as engine:
        engine.add_request(prompt_of(4, 5), GREEDY)
        for length in (16, 17):
            with pytest.raises(RequestError, match=f"{length} tokens in a context of 16"):
                engine.add_request(prompt_of(length), GREEDY)
        engine.add_request(prompt_of(15), GREEDY)
        done = drain(engine)
        assert done[0, 0].tokens == alone(prompt_of(4, 5), GREEDY)
        assert (done[1, 0].finish_reason, done[1, 0].tokens) == ("length", alone(prompt_of(15), GREEDY)[:1])


def test_other_refusals_name_what_is_wrong(make):
    engine = make()
    for prompt, options, said in [
        ([], {}, "the prompt is empty"),
        ([256], {}, "outside the vocabulary"),
        ([1], {"params": SamplingParams(stop_token_ids=(3, 256))}, "stop_token_ids has a .* outside the vocabulary; g"),
        ([1, 2.5], {}, "the prompt holds what is no token id; given: 2.5"),
        ([True], {}, "no token id; given: True"),
        (["text"], {}, "no token id; given: 'text'"),
        ([1], {"n": 0}, "n cannot be used; given: 0"),
        ([], {"called": "line 3"}, "line 3 is empty"),
        ("\ud800", {}, "not text"),
        (b"text", {}, "the prompt is neither text nor token ids; given: b'text'"),
        (None, {}, "the prompt is neither text nor token ids; given: None"),
        ([1], {"params": {"max_tokens": 3}}, "params cannot be used; given: {'max_tokens': 3}"),
        ([1], {"n": 1.0}, "n cannot be used; given: 1.0"),
        ([1], {"priority": "high"}, "priority cannot be used; given: 'high'; would work: an integer"),
        ([1], {"namespace": ["a"]}, r"namespace cannot be used; given: \['a'\]"),
        ([1], {"namespace": ("a", {})}, "namespace cannot be used"),
    ]:
        with pytest.raises(RequestError, match=said):
            engine.add_request(prompt, **options)
    assert not engine.busy
    assert engine.step() == []


def test_rows_that_others_hold_are_an_error_and_not_a_wait_without_end(make):
    with make() as engine:
        held = [engine.runner.pages.open() for _ in range(4)]
        engine.add_request([1], GREEDY)
        with pytest.raises(OutOfPages, match="others hold"):
            engine.step()
        for slot in held:
            engine.runner.pages.close(slot)
        assert len(drain(engine)[0, 0].tokens) == 10


# What goes wrong


@pytest.mark.parametrize("params", [GREEDY, DRAWN])
@pytest.mark.parametrize("at", [0, 10, 29])
def test_a_request_without_finite_logits_ends_alone_and_none_of_its_pages_is_found(make, alone, params, at):
    poisoned = prompt_of(30, 5)
    poisoned[at] = POISON
    prompts = [prompt_of(8, 0), poisoned, prompt_of(9, 1)]
    with make() as engine:
        for prompt in prompts:
            engine.add_request(prompt, params)
        done = drain(engine)
        assert (done[1, 0].finish_reason, done[1, 0].tokens) == ("error", [])
        assert "not finite" in done[1, 0].error
        assert [done[number, 0].tokens for number in (0, 2)] == [alone(prompts[number], params) for number in (0, 2)]
        assert engine.scheduler.cache.match(poisoned) is engine.scheduler.cache.root
        engine.add_request(poisoned[:at] or [1], params)
        assert drain(engine)[3, 0].tokens == alone(poisoned[:at] or [1], params)
        engine.add_request(poisoned, params, n=2)
        assert {each.finish_reason for each in drain(engine).values()} == {"error"}


def test_a_step_that_fails_has_lost_nothing_and_runs_again(make, alone):
    prompts = [prompt_of(20, 0), prompt_of(5, 1), prompt_of(9, 2)]
    with make(kv_tokens=56) as engine:
        backend = engine.runner.instances[0].backend
        for prompt in prompts:
            engine.add_request(prompt, DRAWN)
        done, failures = {}, 0
        while engine.busy:
            backend.fail_at = 1 if engine.stats.steps % 3 == failures % 3 else 0
            try:
                done |= {output.request: output.completion for output in engine.step() if output.completion}
            except RuntimeError:
                failures += 1
                engine.scheduler.check()
        backend.fail_at = 0
        assert failures > 5
        assert [done[number].tokens for number in range(3)] == [alone(prompt, DRAWN) for prompt in prompts]


def test_a_failure_told_late_when_tokens_are_read_loses_nothing_either(make, alone, monkeypatch):
    with make() as engine:
        engine.add_request(prompt_of(20), DRAWN)
        calls = 0

        class Late(Sampler):
            def __call__(self, logits):
                nonlocal calls
                calls += 1
                if calls % 2:
                    raise RuntimeError("the device was gone")
                return super().__call__(logits)

        monkeypatch.setattr("headstock.engine.engine.Sampler", Late)
        done = {}
        while engine.busy:
            try:
                done |= {output.request: output.completion for output in engine.step() if output.completion}
            except RuntimeError:
                engine.scheduler.check()
        assert done[0].tokens == alone(prompt_of(20), DRAWN)


def test_a_leak_is_noticed_in_the_step_that_makes_it(make):
    with make() as engine:
        engine.add_request(prompt_of(5), GREEDY)
        engine.step()
        [lost] = engine.runner.pages.allocator.allocate(1)
        with pytest.raises(AssertionError, match="a page is lost"):
            engine.step()
        engine.runner.pages.allocator.free([lost])


@pytest.mark.parametrize("every", [463, 557])
def test_an_interruption_anywhere_leaves_an_engine_that_can_be_closed_and_serves_again(make, alone, every):
    left, ours = 0, ("engine.py", "scheduler.py", "page_table.py", "radix.py", "allocator.py", "runner.py")

    def trace(frame, event, _):
        nonlocal left
        if not frame.f_code.co_filename.endswith(ours):
            return None
        left -= event == "line"
        if left == 0:
            raise KeyboardInterrupt
        return trace

    prompts = [[*prompt_of(8), seed] for seed in range(4)]
    engine, lines, torn, interrupted = make(kv_tokens=48), 0, 0, True
    while interrupted:
        left = lines = lines + every
        sys.settrace(trace)
        try:
            numbers = [engine.add_request(prompt, GREEDY, n=2) for prompt in prompts]
            done = drain(engine)
            interrupted = False
        except KeyboardInterrupt:
            sys.settrace(None)
            if not engine._sound:
                torn += 1
                with pytest.raises(HeadstockError, match=r"interrupted amid its accounts; would work: close\(\)"):
                    engine.add_request([1], GREEDY)
        finally:
            sys.settrace(None)
            engine.close()
        assert engine.stats.free_pages == engine.runner.memory.num_pages - 1
        assert engine.runner.pages.num_free_slots == 4
    assert torn > 3
    assert engine.stats.preemptions > 0
    assert [done[number, 1].tokens for number in numbers] == [alone(prompt, GREEDY) for prompt in prompts]


@pytest.mark.parametrize("lines", [60, 150, 400, 580, 640])
def test_closing_a_torn_engine_leaves_what_another_has_on_the_same_runner(make, alone, lines):
    left = lines

    def trace(frame, event, _):
        nonlocal left
        if not frame.f_code.co_filename.endswith(("scheduler.py", "page_table.py", "radix.py", "allocator.py")):
            return None
        left -= event == "line"
        if left == 0:
            raise KeyboardInterrupt
        return trace

    other = make(kv_tokens=160)
    other.check = False  # all that is held is its own, it would assert
    with other, Engine(other.runner, other.tokenizer) as engine:
        number = other.add_request(prompt_of(17), GREEDY)
        cached = other.add_request(prompt_of(9), SamplingParams(max_tokens=2))
        while not any(output.request == cached and output.completion for output in other.step()):
            pass
        held = other.stats.pages - other.stats.free_pages
        sys.settrace(trace)
        try:
            for seed in range(4):
                engine.add_request([*prompt_of(8), seed], GREEDY)
            drain(engine)
        except KeyboardInterrupt:
            sys.settrace(None)
        finally:
            sys.settrace(None)
        assert not engine._sound
        engine.close()
        assert other.stats.pages - other.stats.free_pages == held
        assert other.runner.pages.num_free_slots == 4 - len(other.scheduler.running)
        done = drain(other)
        assert done[number, 0].tokens == alone(prompt_of(17), GREEDY)
        engine.add_request(prompt_of(8), GREEDY)
        assert drain(engine)
        other.runner.pages.check()
    assert other.runner.pages.allocator.num_free == other.stats.pages
    assert other.runner.pages.num_free_slots == 4


# Streams and aborts


def test_streams_by_turns_beside_plain_requests_each_get_their_own(make, alone):
    with make() as engine:
        number = engine.add_request(prompt_of(6, 9), GREEDY)
        prompts = [prompt_of(8, 0), prompt_of(20, 1)]
        streams = [engine.stream(prompt, DRAWN) for prompt in prompts]
        tokens = [[], []]
        for pair in zip(*streams, strict=True):
            for heard, output in zip(tokens, pair, strict=True):
                heard.append(output.token)
        assert tokens == [alone(prompt, DRAWN) for prompt in prompts]
        assert drain(engine)[number, 0].tokens == alone(prompt_of(6, 9), GREEDY)


def test_a_stream_left_early_aborts_its_request_and_a_text_is_a_prompt(make, alone):
    with make() as engine:
        stream = engine.stream("headstock", GREEDY, n=2)
        assert [next(stream).sample for _ in range(4)] == [0, 0, 1, 0]
        stream.close()
        assert not engine.busy
        assert (engine.stats.running, engine.stats.waiting) == (0, 0)
        ids = engine.tokenizer.encode("headstock")
        assert [output.token for output in engine.stream("headstock", GREEDY)] == alone(ids, GREEDY)


def test_a_stream_that_nobody_reads_can_be_closed_or_runs_to_its_end_and_is_forgotten(make):
    with make() as engine:
        engine.stream([1], GREEDY).close()
        assert not engine.busy
        assert engine.stats.finished == {"abort": 1}
        unread = engine.stream([1], GREEDY)
        assert drain(engine) == {}
        assert engine._streams == {}
        assert len(list(unread)) == 10


def test_an_abort_amid_a_step_waits_for_the_next_one(make, alone, monkeypatch):
    with make() as engine:
        numbers = [engine.add_request(prompt_of(5, seed), GREEDY) for seed in range(2)]
        forward = engine.runner.model.forward

        def leave(*given):
            engine.abort(numbers[0])
            return forward(*given)

        monkeypatch.setattr(engine.runner.model, "forward", leave)
        [one, _] = engine.step()
        assert (one.request, one.completion) == (numbers[0], None)
        done = drain(engine)
        assert (done[numbers[0], 0].finish_reason, len(done[numbers[0], 0].tokens)) == ("abort", 1)
        assert done[numbers[1], 0].tokens == alone(prompt_of(5, 1), GREEDY)


def test_an_abort_ends_one_who_waits_or_runs_with_what_it_has(make, alone):
    with make(max_batch=1) as engine:
        first, second, third = (engine.add_request(prompt_of(6, seed), GREEDY) for seed in range(3))
        for _ in range(3):
            engine.step()
        engine.abort(first)
        engine.abort(second)
        engine.abort(first)
        engine.abort(99)
        done = drain(engine)
        assert [done[number, 0].finish_reason for number in (first, second, third)] == ["abort", "abort", "length"]
        assert [len(done[number, 0].tokens) for number in (first, second)] == [3, 0]
        assert done[first, 0].tokens == alone(prompt_of(6, 0), GREEDY)[:3]
        assert done[third, 0].tokens == alone(prompt_of(6, 2), GREEDY)


def test_closing_gives_everything_back_at_any_time_and_the_engine_serves_again(make, alone):
    engine = make()
    for steps in (0, 1, 3, 30):
        stream = engine.stream(prompt_of(20), GREEDY)
        engine.add_request(prompt_of(9, 1), GREEDY, n=5)
        for _ in range(steps):
            engine.step()
        engine.close()
        assert not engine.busy
        assert engine.stats.free_pages == engine.runner.memory.num_pages - 1
        assert engine.runner.pages.num_free_slots == 4
        assert all(output.completion is None or steps == 30 for output in stream)


# The same for asyncio


def serve(engine, coroutine):
    """Runs a coroutine function of an asynchronous engine; afterwards the engine has nothing left."""

    async def main():
        async with AsyncEngine(engine) as served:
            await asyncio.wait_for(coroutine(served), 30)

    asyncio.run(main())
    assert not engine.busy
    assert engine.stats.free_pages == engine.runner.memory.num_pages - 1
    assert engine.runner.pages.num_free_slots == engine.runner.limits.max_batch


async def tokens_of(engine, prompt, params):
    return [output.token async for output in engine.stream(prompt, params)]


def test_many_asynchronous_streams_get_what_each_gets_alone(make, alone):
    prompts = [prompt_of(length, seed) for seed, length in enumerate((3, 17, 1, 40, 8, 16))]

    async def all_at_once(engine):
        for _ in range(2):  # the second time after the engine has come to rest
            heard = await asyncio.gather(*(tokens_of(engine, prompt, DRAWN) for prompt in prompts))
            assert heard == [alone(prompt, DRAWN) for prompt in prompts]
        assert engine.stats.cached_tokens > 0
        with pytest.raises(RequestError, match="empty"):
            await tokens_of(engine, [], GREEDY)

    serve(make(), all_at_once)


def test_a_consumer_that_is_cancelled_or_stops_aborts_its_request_alone(make, alone):
    async def some_leave(engine):
        long = SamplingParams(max_tokens=45)
        reading = asyncio.create_task(tokens_of(engine, prompt_of(9, 1), long))
        await asyncio.sleep(0)
        reading.cancel()
        stream = engine.stream(prompt_of(8), long, n=2)
        assert (await anext(stream)).token == alone(prompt_of(8), GREEDY)[0]
        await stream.aclose()
        assert await tokens_of(engine, prompt_of(5, 2), GREEDY) == alone(prompt_of(5, 2), GREEDY)
        assert reading.cancelled()
        assert (engine.stats.running, engine.stats.waiting) == (0, 0), "the others wanted four times as many tokens"

    serve(make(), some_leave)


def test_a_step_that_fails_ends_the_streams_with_its_error_and_later_ones_are_served(make, alone):
    engine = make()
    backend = engine.runner.instances[0].backend

    async def fails(served):
        backend.fail_at = 2
        both = [tokens_of(served, prompt_of(20, seed), GREEDY) for seed in range(2)]
        heard = await asyncio.gather(*both, return_exceptions=True)
        assert [str(error) for error in heard] == ["the device is gone"] * 2
        assert await tokens_of(served, prompt_of(20), GREEDY) == alone(prompt_of(20), GREEDY)

    serve(engine, fails)


def test_a_backend_that_asks_to_exit_ends_the_streams_and_not_the_loop(make, alone, monkeypatch):
    engine = make()

    def leave(*_):
        raise SystemExit(3)

    async def exits(served):
        with monkeypatch.context() as patched:
            patched.setattr(engine.runner.model, "forward", leave)
            with pytest.raises(PluginError, match="asked the process to exit; given: a step of specimen"):
                await tokens_of(served, [1], GREEDY)
        assert await tokens_of(served, [1], GREEDY) == alone([1], GREEDY)

    serve(engine, exits)


def test_an_asynchronous_engine_records_and_forgets_its_cache(make, tmp_path):
    engine, path = make(), tmp_path / "trace.jsonl"
    backend = engine.runner.instances[0].backend

    async def record(served):
        await served.record(path)
        assert len(await tokens_of(served, prompt_of(9), GREEDY)) == 10
        assert served.stats.cached_pages > 0
        await served.reset_cache()
        assert served.stats.cached_pages == 0
        backend.fail_at = 1
        with pytest.raises(RuntimeError):
            await tokens_of(served, [1], GREEDY)
        assert len(await tokens_of(served, [1], GREEDY)) == 10
        await served.close()
        with pytest.raises(HeadstockError, match="was closed"):
            await served.record(path)

    serve(engine, record)
    assert len(path.read_text(encoding="utf-8").splitlines()) == 20, "a step that failed did not end it"


def test_closing_works_when_the_loop_has_cancelled_its_steps(make):
    async def cancel(engine):
        reading = asyncio.create_task(tokens_of(engine, prompt_of(5), SamplingParams(max_tokens=50)))
        await asyncio.sleep(0.01)
        engine._steps.cancel()
        await engine.close()
        with pytest.raises(HeadstockError, match="was closed"):
            await reading

    serve(make(), cancel)


def test_closing_ends_streams_with_an_error_and_refuses_new_ones(make):
    async def close(engine):
        reading = asyncio.create_task(tokens_of(engine, prompt_of(5), SamplingParams(max_tokens=50)))
        await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(HeadstockError, match="was closed"):
            await reading
        with pytest.raises(HeadstockError, match="was closed"):
            await tokens_of(engine, [1], GREEDY)

    serve(make(), close)
