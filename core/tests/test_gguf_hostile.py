"""GGUF files of any content: each is read, or refused by name, whatever types and numbers its keys hold."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstock.errors import ModelError
from headstock.models.config import ModelConfig
from headstock.models.gguf_header import GGUFHeader
from headstock.models.gguf_tokenizer import build_tokenizer, tokenizer_config

TOKENS = ["<unk>", "a", "b", "ab"]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 1, 1, 1], "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.scores": [0.0, 1.0],
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.add_space_prefix": True,
}  # fmt: skip
HEADER = {
    "general.architecture": "llama", "general.alignment": 32, "split.count": 1, "llama.expert_count": 0,
    "llama.embedding_length": 32, "llama.feed_forward_length": 64, "llama.block_count": 1,
    "llama.context_length": 128, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 8, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e4,
    "llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0,
}  # fmt: skip
WHOLE = HEADER | TOKENIZER
SHAPES = {"token_embd.weight": (32, 4)}


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def typed(value):
    """A value as the specification writes it: its type, then itself."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<Iq", 11, value) if value < 0 else struct.pack("<IQ", 10, value)
        case float():
            return struct.pack("<Id", 12, value)
        case str():
            return struct.pack("<I", 8) + text(value)
    parts = [typed(each) for each in value] or [struct.pack("<I", 4)]
    return struct.pack("<I", 9) + parts[0][:4] + struct.pack("<Q", len(value)) + b"".join(part[4:] for part in parts)


def write(path, metadata, shapes=None, data=bytes(4096)):
    """A GGUF file whose tensors all begin at the same byte; of a shape, the fastest dimension comes first."""
    shapes = SHAPES if shapes is None else shapes
    content = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(metadata))
    content += b"".join(text(key) + typed(value) for key, value in metadata.items())
    for name, shape in shapes.items():
        content += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0)
    path.write_bytes(content + data)
    return path


def read(path):
    """All that is read of a file before its weights."""
    header = GGUFHeader(path)
    ModelConfig.from_hf(header.config())
    tokenizer_config(header.metadata)
    build_tokenizer(header.metadata)


def test_the_file_that_the_others_depart_from_is_read(tmp_path):
    read(write(tmp_path / "model.gguf", WHOLE))
    read(write(tmp_path / "model.gguf", WHOLE | {"tokenizer.ggml.model": "llama"}))


ODD = st.one_of(
    st.booleans(), st.integers(-1, 9), st.integers(0, 2**64 - 1), st.floats(), st.text(max_size=4),
    st.lists(st.integers(-1, 2**63)), st.lists(st.text(max_size=2)),
    st.lists(st.lists(st.text(max_size=2), max_size=2)),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(WHOLE)), ODD | st.none(), st.sampled_from(["gpt2", "llama"]))
def test_any_value_of_any_key_is_taken_or_refused(tmp_path_factory, key, value, kind):
    metadata = WHOLE | {"tokenizer.ggml.model": kind} | {key: value}
    path = tmp_path_factory.getbasetemp() / "odd.gguf"
    with suppress(ModelError):
        read(write(path, {name: each for name, each in metadata.items() if each is not None}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general.alignment": 0}, "multiple of 8"),
        ({"general.alignment": 7}, "multiple of 8"),
        ({"general.alignment": 1.5}, "multiple of 8"),
        ({"general.alignment": "x"}, "multiple of 8"),
        ({"split.count": "2"}, "split.count must be a whole number"),
        ({"llama.expert_count": [1]}, "expert_count must be a whole number"),
        ({"tokenizer.ggml.eos_token_id": [1]}, "eos_token_id must be a whole number"),
        ({"tokenizer.ggml.tokens": None}, "it has no tokens"),
        ({"tokenizer.ggml.tokens": []}, "it has no tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "it has no tokens"),
        ({"tokenizer.ggml.bos_token_id": 4}, "bos_token_id is no token; given: 4; would work: 0…3"),
        ({"tokenizer.ggml.eos_token_id": 2**32}, "eos_token_id is no token"),
        ({"tokenizer.ggml.padding_token_id": 99}, "padding_token_id is no token"),
        ({"tokenizer.ggml.unknown_token_id": "<unk>"}, "unknown_token_id is no token"),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, "pre-tokenizer is not supported"),
        ({"tokenizer.chat_template": ["x"]}, "tokenizer.chat_template"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, changes, said):
    metadata = {key: value for key, value in (WHOLE | changes).items() if value is not None}
    with pytest.raises(ModelError) as caught:
        read(write(tmp_path / "model.gguf", metadata))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(), (0,), (2, 2), (2**62,)])
@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_rope_factors_of_any_shape_and_value_are_refused(tmp_path, shape, value):
    shapes, data = SHAPES | {"rope_freqs.weight": shape}, struct.pack("<f", value) * 1024
    with pytest.raises(ModelError, match=r"rope_freqs\.weight|ends early"):
        read(write(tmp_path / "model.gguf", WHOLE, shapes, data))
    with pytest.raises(ModelError, match="is not Llama 3's"):
        read(write(tmp_path / "model.gguf", WHOLE, SHAPES | {"rope_freqs.weight": (4,)}, data))


def test_arrays_nested_without_end_are_refused(tmp_path):
    path = write(tmp_path / "model.gguf", {"general.architecture": "llama", "deep": ["x"]})
    array = struct.pack("<IQ", 9, 1)
    content = path.read_bytes().replace(typed(["x"]), struct.pack("<I", 9) + array * 100_000 + typed(["x"])[4:])
    path.write_bytes(content)
    with pytest.raises(ModelError, match="nested"):
        GGUFHeader(path)
