"""The embedded model through the whole host, against transformers on the same folder, in float32."""

from __future__ import annotations

import pytest
import torch

from headstock import ModelRunner
from headstock.engine.generate import Generator
from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer
from headstock.models.folder import model_folder

PROMPTS = [
    "Explain why the sky is blue to a child.",
    "Write a haiku about the sea.",
    "List three prime numbers larger than ten.",
    "Translate 'good morning' into French.",
    "What does a lathe do?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "Summarise the water cycle in two sentences.",
    "Write a Python function that adds two numbers.",
    "Describe a thunderstorm in the mountains.",
]
NEW_TOKENS = 64
MARGIN = 1e-3


@pytest.fixture(scope="module")
def folder():
    return model_folder(dtype="float32")


@pytest.fixture(scope="module")
def prompts(folder):
    tokenizer = Tokenizer.from_folder(folder)
    return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]


@pytest.fixture(scope="module")
def expected(folder, prompts):
    """The greedy continuation of each prompt by transformers, each step's choice clear by more than MARGIN."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return [greedy(model, prompt) for prompt in prompts]


def greedy(model, prompt):
    ids = torch.tensor([prompt])
    result = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    best = torch.cat(result.logits).topk(2).values
    margin, step = (best[:, 0] - best[:, 1]).min(0)
    assert margin > MARGIN, f"a near-tie at token {step}: choose another prompt"
    return result.sequences[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def generator(folder):
    runner = ModelRunner(folder, dtype="float32", max_batch=len(PROMPTS), max_context=256)
    return Generator(runner, Tokenizer.from_folder(folder))


PARAMS = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


def test_one_batch_gives_the_tokens_of_transformers(generator, prompts, expected):
    completions = generator.generate(prompts, PARAMS)
    assert [completion.tokens for completion in completions] == expected


def test_each_prompt_alone_gives_the_tokens_of_transformers(generator, prompts, expected):
    assert [generator.generate([prompt], PARAMS)[0].tokens for prompt in prompts] == expected
