"""Shared prefixes and windows in the engine: read once, freed early, and every request gets what it gets without."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer as Vocabulary
from tokenizers import decoders, models

from headstock import ModelRunner, Offer
from headstock.engine.engine import Engine
from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer
from headstock.errors import NegotiationError
from headstock.models.config import ModelConfig
from headstock.models.shapes import weight_shapes
from headstock.policy import Policy
from headstock.testing.specimen import CAPABILITIES, Specimen

pytestmark = pytest.mark.usefixtures("one_thread")

RAW = {
    "model_type": "qwen2", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
MODELS = {
    "full": RAW,
    "mixed": RAW | WINDOW | {"max_window_layers": 1},
    "windows": RAW | WINDOW | {"max_window_layers": 0},
}
GREEDY = SamplingParams(max_tokens=10)


class Watched(Specimen):
    """The specimen, which keeps the batches it planned."""

    def __init__(self, spec, workspace):
        super().__init__(spec, workspace)
        self.seen = []

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        self.seen.append(batch)


def offer(name="watched", **changes):
    return Offer(name=name, backend=Watched, capabilities=CAPABILITIES.model_copy(update=changes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Model folders with weights large enough that attention, positions and windows all show in the logits."""
    made = {}
    for name, raw in MODELS.items():
        made[name] = folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
        words = Vocabulary(models.WordLevel({str(token): token for token in range(61)}, "0"))
        words.decoder = decoders.ByteLevel()
        words.save(str(folder / "tokenizer.json"))
        random = torch.Generator().manual_seed(5)
        shapes = weight_shapes(ModelConfig.from_hf(raw))
        drawn = {key: torch.randn(shape, generator=random) * 0.3 for key, shape in shapes.items()}
        save_file({k: x + k.endswith("norm.weight") for k, x in drawn.items()}, folder / "model.safetensors")
    return made


@pytest.fixture(scope="module")
def make(folders):
    """Makes engines that check their pages after every step; runners of the same sizes are the same."""

    @cache
    def runner(model, page_size, cascade, **given):
        sizes = {"max_batch": 4, "max_tokens": 16, "kv_tokens": 256, "dtype": "float32"}
        policy = Policy(page_size=page_size, cascade=cascade)
        return ModelRunner(folders[model], offers=[offer()], policy=policy, **sizes | given)

    def engine(model, page_size=4, cascade="on", prefix_cache=True, **given):
        made = runner(model, page_size, cascade, **given)
        for instance in made.instances:
            del instance.backend.seen[:]
        return Engine(made, Tokenizer.from_folder(folders[model]), prefix_cache=prefix_cache, check=True)

    return engine


@pytest.fixture(scope="module")
def alone(make):
    """The plain loop: all tokens so far through the model at each step, in float64, with no cache and no backend."""

    @cache
    def whole(name, prompt):
        runner, tokens = make(name).runner, list(prompt)

        def attend(index, q, k, v, out):
            shape = runner.config.layers[index]
            group = shape.num_heads // shape.num_kv_heads
            keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * shape.scale
            back = torch.arange(len(k))[:, None] - torch.arange(len(k))
            hidden = (back < 0) | (back >= (shape.window or len(k)))
            out.copy_(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))

        for _ in range(GREEDY.max_tokens):
            with torch.inference_mode():
                logits = runner.model.forward(torch.tensor(tokens), torch.arange(len(tokens)), attend)
            tokens.append(int(logits[-1].argmax()))
        return tokens[len(prompt) :]

    return lambda name, prompt: whole(name, tuple(prompt))


def prompt_of(length, seed=0):
    return torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


BASE = prompt_of(40, 1)
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 4),  # steps after the one before
        st.sampled_from([0, 8, 12, 30]),  # tokens in common with others
        st.integers(1, 6),  # tokens of its own
        st.integers(0, 2),  # which these are
        st.integers(1, 3),  # samples
        st.none() | st.integers(0, 10),  # steps until it is aborted
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from(sorted(MODELS)),
    requests=REQUESTS,
    page_size=st.sampled_from([1, 4]),
    kv_tokens=st.sampled_from([48, 80, 256]),
    max_tokens=st.sampled_from([5, 16]),
    mixed=st.sampled_from(["extend", "split"]),
    cascade=st.sampled_from(["on", "on", "off"]),
    reuse=st.sampled_from([True, True, False]),
)
def test_any_interleaving_gives_what_each_gets_without_cache_pages_or_levels(
    make, alone, model, requests, page_size, kv_tokens, max_tokens, mixed, cascade, reuse
):
    sizes = {"kv_tokens": kv_tokens, "max_tokens": max_tokens, "mixed": mixed}
    with make(model, page_size, cascade, reuse, **sizes) as engine:
        done, expected, leaving, steps = {}, {}, {}, 0

        def step():
            nonlocal steps
            steps += 1
            done.update({(each.request, each.sample): each.completion for each in engine.step() if each.completion})
            for number in [number for number, at in leaving.items() if at < steps]:
                engine.abort(number)

        for gap, common, own, seed, n, left in requests:
            for _ in range(gap):
                step()
            prompt = [*BASE[:common], *prompt_of(own, seed)]
            number = engine.add_request(prompt, GREEDY, n=n)
            expected |= {(number, sample): alone(model, prompt) for sample in range(n)}
            if left is not None:
                leaving[number] = steps + left
        while engine.busy:
            step()
        assert done.keys() == expected.keys()
        for key, completion in done.items():
            count = len(completion.tokens) if completion.finish_reason == "abort" else GREEDY.max_tokens
            assert completion.tokens == expected[key][:count]
        pages = engine.runner.pages
        assert pages.allocator.num_free + engine.scheduler.cache.num_pages == engine.runner.memory.num_pages - 1
        assert all(window.num_used == 0 for window in pages.windows.values())


# Levels


def decoded(engine, group):
    """The decode batches that a group's backend was given."""
    return [batch for batch in engine.runner.roles[group, "decode"].first.backend.seen if batch.phase == "decode"]


def test_samples_of_a_prompt_read_it_once_and_groups_with_a_window_do_not(make, alone):
    prompts = [prompt_of(13), prompt_of(3, 9)]
    with make("mixed", max_batch=5) as engine:
        for prompt, n in zip(prompts, (4, 1), strict=True):
            engine.add_request(prompt, GREEDY, n=n)
        while engine.busy:
            for output in engine.step():
                if output.completion:
                    assert output.completion.tokens == alone("mixed", prompts[output.request])
        [full] = [batch for batch in decoded(engine, "full") if batch.num_reqs == 5][:1]
        [level] = full.shared_levels
        assert (level.row_indptr.tolist(), level.page_indptr.tolist()) == ([0, 4, 5], [0, 3, 3])
        assert (full.page_table[:4, :3] == level.page_indices).all()
        assert full.seq_lens[4] < full.seq_lens[:4].min(), "the one that shares nothing comes last"
        windowed = decoded(engine, "window-5")
        assert not any(batch.shared_levels for batch in windowed)
        assert max(batch.page_table.shape[1] for batch in windowed) <= 3
        for batch, other in zip(decoded(engine, "full"), windowed, strict=True):
            assert torch.equal(batch.positions, other.positions)
            assert (batch.seq_lens.clamp(max=5) <= other.seq_lens).all()


def test_levels_are_for_whoever_declares_them_where_they_pay_and_are_wanted(folders):
    plain = offer("plain", cascade=False)

    def max_levels(*offers, cascade="auto", model="mixed"):
        ours = ModelRunner(folders[model], offers=offers, policy=Policy(cascade=cascade), kv_tokens=64, dtype="float32")
        return {group: each.first.spec.max_levels for (group, role), each in ours.roles.items() if role == "decode"}

    assert max_levels(offer()) == {"full": 3, "window-5": 0}
    assert max_levels(offer(), cascade="off") == {"full": 0, "window-5": 0}
    assert max_levels(plain) == {"full": 0, "window-5": 0}
    assert max_levels(plain, offer(preference=-5.0))["full"] == 3, "a wish comes before preference"
    with pytest.raises(NegotiationError, match="cascade"):
        max_levels(plain, cascade="on")
    assert max_levels(plain, cascade="on", model="windows") == {"all": 0}


@pytest.mark.parametrize(("cascade", "has_levels"), [("on", True), ("auto", False), ("off", False)])
def test_where_they_cost_more_than_they_save_there_are_none(make, cascade, has_levels):
    with make("full", cascade=cascade) as engine:
        engine.add_request(prompt_of(13), GREEDY, n=4)
        while engine.busy:
            engine.step()
        assert any(batch.shared_levels for batch in decoded(engine, "all")) == has_levels


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [1, 4, 3, 2, 0]])
def test_logits_come_back_in_the_order_of_the_rows_that_were_given(make, order):
    prompt, own = prompt_of(8), [prompt_of(2, seed) for seed in range(5)]

    def logits(cascade, order):
        with make("full", cascade=cascade, max_batch=6) as engine:
            runner = engine.runner
            first = runner.pages.open()
            runner.forward([first], [prompt])
            runner.pages.share(first, runner.pages.pages(first))
            shared = list(runner.pages.pages(first))
            slots = [runner.pages.open(shared if row % 2 else ()) for row in range(5)]
            for row, slot in enumerate(slots):
                runner.forward([slot], [own[row][:1]])
            result = runner.forward([slots[row] for row in order], [own[row][1:] for row in order])
            seen = decoded(engine, "all")[-1]
            for slot in (first, *slots):
                runner.pages.close(slot)
            runner.pages.allocator.free(shared)
            return result, seen

    given, seen = logits("on", order)
    assert [level.row_indptr.tolist() for level in seen.shared_levels] == [[0, 2, 5]]
    expected, plain = logits("off", list(range(5)))
    assert not plain.shared_levels
    torch.testing.assert_close(given, expected[order], rtol=1e-4, atol=1e-4)


# Windows


def test_a_window_bounds_the_cache_and_the_plan_counts_its_pages(make):
    with make("windows", kv_tokens=None) as engine:
        memory, [window] = engine.runner.memory, engine.runner.pages.windows.values()
        assert (memory.bytes_per_page, memory.num_pages) == (0, 4 * 96 // 4 + 1)
        assert memory.kv_cache == window.allocator.num_pages * 3 * 4 * 2 * 2 * 8 * 4
        assert window.allocator.num_pages < memory.num_pages
        for seed in range(4):
            engine.add_request(prompt_of(5, seed), SamplingParams(max_tokens=90))
        while engine.busy:
            engine.step()
            assert window.num_used <= 4 * 3 + 4


def test_a_conversation_goes_on_from_what_its_windows_still_hold(make, alone):
    with make("mixed") as engine:
        history = prompt_of(30)
        for turn in range(2):
            number = engine.add_request(history, GREEDY)
            while engine.busy:
                done = {each.request: each.completion for each in engine.step() if each.completion}
            assert done[number].tokens == alone("mixed", history)
            assert engine.stats.cached_tokens == turn * 36
            history = [*history, *done[number].tokens]


def test_a_prefix_whose_window_is_gone_is_run_again(make, alone):
    with make("mixed") as engine:
        prompt = prompt_of(20)
        for _ in range(2):
            engine.add_request(prompt, GREEDY)
            while engine.busy:
                done = [each.completion for each in engine.step() if each.completion]
            assert done[0].tokens == alone("mixed", prompt)
            assert engine.stats.cached_tokens == 0
            [window] = engine.runner.pages.windows.values()
            window.make_room(window.allocator.num_pages - 1)
