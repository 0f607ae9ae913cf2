"""The header of a GGUF file as `explain` reads it, against the `gguf` package on files that this package wrote."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from headstock.errors import ModelError
from headstock.models.config import ModelConfig
from headstock.models.gguf_header import GGUFHeader

ROPES = {
    "none": {},
    "linear": {"type": gguf.RopeScalingType.LINEAR, "factor": 4.0},
    "yarn": {"type": gguf.RopeScalingType.YARN, "factor": 8.0, "original": 64},
}


def write(path, architecture="llama", rope="none", factors=None, tied=True, biased=False):
    """A small GGUF file with every kind of value that a header holds."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(80)
    writer.add_block_count(2)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(5e5)
    writer.add_layer_norm_rms_eps(1e-5)
    if scaling := ROPES[rope]:
        writer.add_rope_scaling_type(scaling["type"])
        writer.add_rope_scaling_factor(scaling["factor"])
        if "original" in scaling:
            writer.add_rope_scaling_orig_ctx_len(scaling["original"])
    writer.add_token_list([f"token {i} ✓" for i in range(97)])
    writer.add_token_scores([i / 7 for i in range(97)])
    writer.add_array("test.nested", [["a", "bc"], ["def"]])
    writer.add_bool("test.flag", True)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    writer.add_tensor("token_embd.weight", np.zeros((97, 48), np.float32))
    if not tied:
        writer.add_tensor("output.weight", np.zeros((97, 48), np.float32))
    if biased:
        writer.add_tensor("blk.0.attn_q.bias", np.zeros(48, np.float32))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rope", ROPES)
def test_header_agrees_with_the_gguf_package(tmp_path, architecture, rope):
    path = write(tmp_path / "model.gguf", architecture, rope)
    header, reader = GGUFHeader(path), gguf.GGUFReader(path)
    stored = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    nested = stored.pop("test.nested", None)
    assert nested is not None
    assert header.metadata.pop("test.nested") == [["a", "bc"], ["def"]]
    assert header.metadata == stored
    assert header.shapes == {tensor.name: tuple(tensor.shape.tolist()[::-1]) for tensor in reader.tensors}
    config = ModelConfig.from_hf(header.config())
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (97, 6, 2, 8)
    assert (config.max_context, config.bos_token_id, config.eos_token_ids) == (512, 1, (2, 5))
    assert config.rope.rope_type == {"none": "default"}.get(rope, rope)
    assert config.rope.factor == ROPES[rope].get("factor")
    assert config.rope.rope_theta == 5e5


def test_tied_embeddings_and_biases_are_seen(tmp_path):
    plain = GGUFHeader(write(tmp_path / "plain.gguf")).config()
    other = GGUFHeader(write(tmp_path / "other.gguf", tied=False, biased=True)).config()
    assert (plain["tie_word_embeddings"], plain["attention_bias"]) == (True, False)
    assert (other["tie_word_embeddings"], other["attention_bias"]) == (False, True)


def test_the_scale_of_llama3_factors_is_read(tmp_path):
    path = write(tmp_path / "model.gguf", factors=[1.0, 1.0, 2.6946, 8.0], tied=False)
    rope = ModelConfig.from_hf(GGUFHeader(path).config()).rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("llama3", 8.0, 8192)


def test_a_damaged_file_is_refused_wherever_it_ends(tmp_path):
    whole = write(tmp_path / "model.gguf").read_bytes()
    end_of_header = whole.rindex(b"token_embd.weight") + 17
    cut = tmp_path / "cut.gguf"
    for length in [*range(1, 200), *range(200, end_of_header, 97)]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GGUFHeader(cut)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUX" + bytes(100), b"GGUF\x09\0\0\0" + bytes(100), b"\xff" * 64])
def test_what_is_no_gguf_file_is_refused(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.gguf"):
        GGUFHeader(path)


def test_lengths_beyond_the_file_are_refused_at_once(tmp_path):
    """A count of 2^60 must neither be believed nor allocated."""
    path = write(tmp_path / "model.gguf")
    content = bytearray(path.read_bytes())
    for at in (8, 16, 24):  # number of tensors, number of keys, length of the first key
        damaged = content.copy()
        damaged[at : at + 8] = (2**60).to_bytes(8, "little")
        path.write_bytes(damaged)
        with pytest.raises(ModelError):
            GGUFHeader(path)


def test_another_architecture_and_a_missing_key_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"given: bert; would work: llama"):
        GGUFHeader(write(tmp_path / "bert.gguf", "bert"))
    path = write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.black_count"))
    with pytest.raises(ModelError, match=r"llama\.block_count is missing"):
        GGUFHeader(path).config()
