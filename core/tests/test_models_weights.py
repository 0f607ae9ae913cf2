"""Weight files: what is missing, damaged or unexpected is refused by name, before the model holds anything."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstock.errors import ModelError
from headstock.models.config import ModelConfig
from headstock.models.linear import Linear, PackedLinear, linear, packs
from headstock.models.llama import Llama
from headstock.models.shapes import weight_shapes
from headstock.models.weights import WeightSource

CONFIG = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def tensors():
    shapes = weight_shapes(ModelConfig.from_hf(CONFIG))
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def load(folder, **changes) -> Llama:
    model = Llama(ModelConfig.from_hf(CONFIG | changes), torch.float32)
    model.load(WeightSource(folder))
    return model


def refused(folder, **changes) -> str:
    model = Llama(ModelConfig.from_hf(CONFIG | changes), torch.float32)
    with pytest.raises(ModelError) as caught:
        model.load(WeightSource(folder))
    assert "\n" not in str(caught.value)
    assert model.layers == []
    assert not hasattr(model, "embedding")
    return str(caught.value)


def logits(model):
    def attend(index, q, k, v, out):
        out.copy_(q)

    return model.forward(torch.arange(3), torch.arange(3), attend)


def shard(folder, tensors):
    """Two shards and their index, as transformers writes them."""
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    listed = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return listed


def test_tensors_are_read_as_they_were_saved(tensors, tmp_path):
    shard(tmp_path, tensors)
    source = WeightSource(tmp_path)
    read = source.read(tensors)
    assert list(read) == list(tensors)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_a_file_of_another_dtype_is_converted(tensors, tmp_path):
    half = {name: x.to(torch.bfloat16) for name, x in tensors.items()}
    save_file(half, tmp_path / "model.safetensors")
    (tmp_path / "full").mkdir()
    save_file({name: x.float() for name, x in half.items()}, tmp_path / "full" / "model.safetensors")
    assert torch.equal(logits(load(tmp_path)), logits(load(tmp_path / "full")))


@pytest.mark.parametrize("name", [HEAD, "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named(name, tensors, tmp_path):
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    assert name in refused(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"])
def test_an_unexpected_tensor_is_named(name, tensors, tmp_path):
    save_file(tensors | {name: torch.zeros(8)}, tmp_path / "model.safetensors")
    assert name in refused(tmp_path)


def test_a_buffer_that_old_checkpoints_carry_is_no_weight(tensors, tmp_path):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file(tensors | buffer, tmp_path / "model.safetensors")
    load(tmp_path)


def test_another_shape_is_named_with_both(tensors, tmp_path):
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(8, 13)
    save_file(tensors, tmp_path / "model.safetensors")
    message = refused(tmp_path)
    assert all(word in message for word in ("model.safetensors", "0.mlp.down_proj", "[8, 13]", "[8, 12]"))


def test_quantised_tensors_are_refused_by_their_dtype(tensors, tmp_path):
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(8, 12, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    message = refused(tmp_path)
    assert "I8" in message
    assert "BF16" in message


@pytest.mark.parametrize("keep", [0, 4, 40, 0.5, 0.999])
def test_a_truncated_file_is_named(keep, tensors, tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    content = file.read_bytes()
    file.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    message = refused(tmp_path)
    assert "model.safetensors is damaged" in message
    assert "again" in message


def test_a_pointer_file_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refused(tmp_path)


def test_a_folder_without_weights_says_which_file_it_lacks(tmp_path):
    assert "model.safetensors is missing" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "pytorch_model.bin" in refused(tmp_path)


def test_a_missing_shard_is_named(tensors, tmp_path):
    shard(tmp_path, tensors)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in refused(tmp_path)


def test_an_index_that_is_wrong_is_refused(tensors, tmp_path):
    listed, index = shard(tmp_path, tensors), tmp_path / "model.safetensors.index.json"
    other = {name: file.replace("00001-", "00002-") for name, file in listed.items()}
    for content, word in (
        ({}, "weight_map"),
        ({"weight_map": {}}, "weight_map"),
        ({"weight_map": listed | {HEAD: "../model.safetensors"}}, "../model.safetensors"),
        ({"weight_map": listed | {"a": listed[HEAD]}}, "says a is in"),
        ({"weight_map": other}, "which does not hold it"),
    ):
        index.write_text(json.dumps(content))
        assert word in refused(tmp_path)


def test_a_tied_head_may_be_absent_or_equal_but_not_another(tensors, tmp_path):
    tensors[HEAD] = tensors[EMBEDDING].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    untied = logits(load(tmp_path))
    assert torch.equal(logits(load(tmp_path, tie_word_embeddings=True)), untied)

    save_file({name: x for name, x in tensors.items() if name != HEAD}, tmp_path / "model.safetensors")
    assert torch.equal(logits(load(tmp_path, tie_word_embeddings=True)), untied)

    save_file(tensors | {HEAD: tensors[HEAD] + 1}, tmp_path / "model.safetensors")
    message = refused(tmp_path, tie_word_embeddings=True)
    assert HEAD in message
    assert "tie_word_embeddings" in message


def test_a_tied_head_of_another_shape_is_refused(tensors, tmp_path):
    save_file(tensors | {HEAD: torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    assert HEAD in refused(tmp_path, tie_word_embeddings=True)


def test_loading_leaves_the_files_as_they_are(tensors, tmp_path):
    save_file(tensors, tmp_path / "model.safetensors")
    model = load(tmp_path)
    model.embedding.zero_()
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], tensors[name]) for name in tensors)


def test_progress_counts_to_the_end(tensors, tmp_path):
    save_file(tensors, tmp_path / "model.safetensors")
    seen = []
    Llama(ModelConfig.from_hf(CONFIG), torch.float32).load(WeightSource(tmp_path), lambda *step: seen.append(step))
    assert [done for _, done, _ in seen] == [1, 2, 3]
    assert {total for _, _, total in seen} == {3}


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_gives_the_same_products_packed_and_plain(rows, bias, dtype):
    torch.manual_seed(0)
    weight, x, residual = (torch.randn(shape).to(dtype) for shape in ((48, 40), (rows, 40), (rows, 48)))
    offset = torch.randn(48).to(dtype) if bias else None
    exact = x.double() @ weight.double().T + (offset.double() if bias else 0)
    for layer in (linear(weight, offset), Linear(weight, offset)):
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(layer(x).double(), exact, **tolerance)
        torch.testing.assert_close(layer.add_to(residual, x).double(), residual.double() + exact, **tolerance)
        assert torch.equal(layer.dense(), weight)


def test_what_cannot_be_packed_is_left_plain():
    weight = torch.randn(4, 4, dtype=torch.float64)
    assert not packs(torch.float64, torch.device("cpu"))
    assert not packs(torch.float32, torch.device("cuda"))
    assert type(linear(weight)) is Linear
    assert isinstance(linear(weight.float()), PackedLinear) == packs(torch.float32, torch.device("cpu"))
