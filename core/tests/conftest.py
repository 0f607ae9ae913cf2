"""What several tests of the host begin with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headstock.models.config import ModelConfig
from headstock.models.shapes import weight_shapes

settings.register_profile("patient", deadline=None)  # a busy machine fails no test
settings.load_profile("patient")


@pytest.fixture(scope="module")
def one_thread():
    """One thread for matrices so small that they only wait for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def byte_vocabulary():
    """A tokenizer of 256 tokens, one for each byte."""
    vocabulary = Tokenizer(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary.train_from_iterator([], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet))
    return vocabulary


@pytest.fixture(scope="session")
def poisoned_model(tmp_path_factory, byte_vocabulary) -> Path:
    """A model folder with random weights and a token per byte, the last of which is poison.

    Its key and value are NaN: whoever attends to it has no finite logits.
    """
    folder = tmp_path_factory.mktemp("poisoned_model")
    byte_vocabulary.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    random = torch.Generator().manual_seed(3)
    drawn = {
        name: torch.randn(shape, generator=random) * 0.3 + float(name.endswith("norm.weight"))
        for name, shape in weight_shapes(ModelConfig.from_hf(config)).items()
    }
    drawn["model.embed_tokens.weight"][255] = torch.nan
    drawn["lm_head.weight"][255] = 0
    save_file(drawn, folder / "model.safetensors")
    return folder


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    """The clock by which everything is timed, so that what backends take is exact: they `sleep`."""
    clock = Clock()
    for module in ("headstock.device", "headstock.bench.timing", "headstock.bench.tune"):
        monkeypatch.setattr(f"{module}.time", clock)
    return clock
