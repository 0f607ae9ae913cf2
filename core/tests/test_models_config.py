"""What config.json may say, and what is refused with a cure, before torch or any weight is touched."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headstock.errors import ModelError
from headstock.models.config import ModelConfig
from headstock.models.registry import ARCHITECTURES, model_class
from headstock.models.rope import Rope, inverse_frequencies, rotate
from headstock.models.rope_config import RopeConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
QWEN2 = LLAMA | {"model_type": "qwen2"}
SLIDING, FULL = "sliding_attention", "full_attention"


def refused(**changes) -> str:
    """The one line that a config with these changes is refused with; a value of ... takes the key away."""
    raw = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_hf(raw)
    assert "\n" not in str(caught.value)
    assert caught.value.works
    return str(caught.value)


def test_importing_the_config_imports_neither_torch_nor_transformers():
    code = (
        "import sys, headstock.models.config; print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_config_saved_by_transformers_reads_the_same(family, tmp_path):
    config = getattr(transformers, f"{family}Config")(**{k: v for k, v in LLAMA.items() if k != "model_type"})
    config.save_pretrained(tmp_path)
    ours = ModelConfig.from_folder(tmp_path)
    assert ours.architecture in ARCHITECTURES
    assert ours.architecture == f"{family}ForCausalLM"
    assert (ours.hidden_size, ours.num_layers, ours.num_kv_heads) == (64, 4, 2)
    assert ours.head_dim == getattr(config, "head_dim", 16)
    assert ours.rms_norm_eps == config.rms_norm_eps
    assert ours.rope.rope_theta == config.rope_parameters["rope_theta"]
    assert ours.tie_embeddings == config.tie_word_embeddings
    assert [layer.window for layer in ours.layers] == [config.sliding_window if family == "Mistral" else None] * 4
    assert all(layer.scale == ours.head_dim**-0.5 for layer in ours.layers)


def test_both_spellings_of_rope_are_the_same_rope():
    scaling = {"factor": 2.0, "type": "linear"}
    old = ModelConfig.from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling})
    new = ModelConfig.from_hf(LLAMA | {"rope_parameters": {"rope_theta": 5e5, "factor": 2.0, "rope_type": "linear"}})
    both = ModelConfig.from_hf(
        LLAMA
        | {"rope_theta": 5e5, "rope_scaling": scaling}
        | {"rope_parameters": {"rope_theta": 5e5, "factor": 2.0, "rope_type": "linear"}}
    )
    assert old.rope == new.rope == both.rope
    assert ModelConfig.from_hf(LLAMA).rope.rope_theta == 10_000


def test_yarn_takes_its_factor_and_context_from_the_lengths():
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 64}
    assert ModelConfig.from_hf(LLAMA | {"rope_parameters": rope}).rope.factor == 4.0
    rope = {"rope_type": "yarn", "factor": 4.0}
    assert ModelConfig.from_hf(LLAMA | {"rope_parameters": rope}).rope.original_max_position_embeddings == 256


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, [None] * 4),
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, [None] * 4),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, [None, None, None, 8]),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, [None] * 4),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING, FULL]},
            [8, None, 8, None],
        ),
    ],
)
def test_windows_are_per_layer(changes, windows):
    assert [layer.window for layer in ModelConfig.from_hf(QWEN2 | changes).layers] == windows


GEMMA3 = LLAMA | {"model_type": "gemma3_text", "sliding_window": 8}


def test_gemma_keeps_every_sixth_layer_full_unless_it_says_otherwise():
    def windows(**changes):
        return [layer.window for layer in ModelConfig.from_hf(GEMMA3 | changes).layers]

    assert windows(num_hidden_layers=13) == [8, 8, 8, 8, 8, None] * 2 + [8]
    assert windows(sliding_window_pattern=2) == [8, None, 8, None]
    assert windows(layer_types=[FULL, FULL, FULL, SLIDING]) == [None, None, None, 8]


def test_gemma_has_a_rope_for_each_kind_of_layer_in_both_spellings():
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = ModelConfig.from_hf(
        GEMMA3 | {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": scaling, "query_pre_attn_scalar": 168}
    )
    both = {FULL: {"rope_theta": 5e5, **scaling}, SLIDING: {"rope_type": "default", "rope_theta": 2e4}}
    new = ModelConfig.from_hf(GEMMA3 | {"rope_parameters": both, "query_pre_attn_scalar": 168})
    assert old == new
    assert (new.rope.rope_type, new.rope.rope_theta, new.rope.factor) == ("linear", 5e5, 8.0)
    assert (new.local_rope.rope_type, new.local_rope.rope_theta) == ("default", 2e4)
    assert {layer.scale for layer in new.layers} == {168**-0.5}
    bare = ModelConfig.from_hf(GEMMA3)
    assert (bare.rope.rope_theta, bare.local_rope.rope_theta) == (1e6, 1e4)
    assert (bare.head_dim, bare.tie_embeddings, bare.layers[0].scale) == (256, True, 1 / 16)


def test_generation_config_says_what_ends_a_text(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_has_two_names(key):
    assert ModelConfig.from_hf(LLAMA | {key: "bfloat16"}).dtype == "bfloat16"
    assert ModelConfig.from_hf(LLAMA | {key: "torch.float16"}).dtype == "float16"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, ["model_type='mamba'", "llama, mistral, qwen2, qwen3"]),
        ({"model_type": ...}, ["model_type=None", "llama"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForCausalLM"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantised", "gptq"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"hidden_size": ...}, ["hidden_size", "required"]),
        ({"max_position_embeddings": ...}, ["max_position_embeddings"]),
        ({"vocab_size": 0}, ["vocab_size=0; would work: greater than 0"]),
        ({"vocab_size": "many"}, ["vocab_size", "many"]),
        ({"vocab_size": True}, ["vocab_size", "True"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers"]),
        ({"num_attention_heads": -4}, ["num_attention_heads", "-4"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, ["hidden_size=64", "num_attention_heads=5"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3"]),
        ({"head_dim": 15}, ["even head_dim", "15"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype", "bfloat16"]),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, ["disagree", "float16", "bfloat16"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_type", "longrope", "yarn"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "llama3"]),
        ({"rope_scaling": {"type": "linear"}}, ["linear", "factor"]),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, ["factor", "-1"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3.0}}, ["does not read", "beta_fast"]),
        ({"rope_scaling": {"factor": 2.0}}, ["default", "does not read factor"]),
        ({"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}}, ["yarn", "rope_theta above 1"]),
        ({"architectures": 5}, ["architectures must be a list", "5"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures must be a list"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "object"]),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, ["contradictory rope_type"]),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, ["contradictory rope_theta", "500000"]),
        ({"rope_parameters": {FULL: {"rope_theta": 5e5}}}, [FULL]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, ["high_freq_factor"]),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            ["below high_freq_factor"],
        ),
        ({"model_type": "qwen2", "layer_types": [SLIDING] * 4}, ["layer_types", "window"]),
        ({"model_type": "qwen2", "layer_types": [FULL]}, ["layer_types", "num_hidden_layers=4"]),
        ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 4}, ["layer_types", "linear_attention"]),
        ({"layer_types": [SLIDING] * 4}, ["layer_types"]),
        ({"model_type": "gemma3_text", "sliding_window": None}, ["sliding_window is null"]),
        ({"model_type": "gemma3_text", "layer_types": [FULL]}, ["layer_types", "num_hidden_layers=4"]),
        ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, ["hidden_activation", "gelu_pytorch_tanh"]),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, ["final_logit_softcapping", "30"]),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 5e5}}, ["by kind of layer", FULL]),
    ],
)
def test_what_is_not_supported_is_one_line_that_names_it(changes, words):
    message = refused(**changes)
    assert all(word in message for word in words), message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(0) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
ROPE = {key: JSON | st.floats(1e-9, 1e9) for key in RopeConfig.model_fields} | {
    "rope_type": st.sampled_from(["default", "linear", "llama3", "yarn"])
}


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["llama", "qwen2", "gemma3_text"]), st.data())
def test_any_value_of_any_key_is_taken_or_refused(family, data):
    """What is taken can be computed with, too."""
    key = data.draw(st.sampled_from([*LLAMA, "architectures", "quantization_config", "rope_parameters", "layer_types"]))
    value = data.draw(st.fixed_dictionaries({}, optional=ROPE) if key == "rope_parameters" else JSON)
    with suppress(ModelError):
        config = ModelConfig.from_hf(LLAMA | {"model_type": family} | {key: value})
        inverse_frequencies(config.rope, config.head_dim)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["cannot read", "config.json", "Hugging Face"]),
        (b"{", ["not JSON"]),
        (b"\xff\xfe\x00", ["cannot read", "utf-8"]),
        (b"[1]", ["no JSON object", "list", "would work: an object"]),
    ],
)
def test_an_unreadable_config_names_the_file(content, words, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_folder(tmp_path)
    assert all(word in str(caught.value) for word in words)


@settings(max_examples=300)
@given(
    key=st.sampled_from(sorted(LLAMA)),
    value=st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers(), max_size=2)
    ),
)
@example(key="num_attention_heads", value=64)
def test_any_value_is_read_or_refused_but_never_crashes(key, value):
    try:
        ModelConfig.from_hf(LLAMA | {key: value})
    except ModelError as error:
        message = str(error)
    else:
        return
    assert key in message


def test_an_unknown_architecture_has_no_class():
    config = ModelConfig.from_hf(LLAMA)
    with pytest.raises(ModelError, match="LlamaForCausalLM"):
        model_class(config.model_copy(update={"architecture": "MambaForCausalLM"}))


@given(offset=st.integers(0, 1000), shift=st.integers(0, 100_000))
def test_rotation_keeps_length_and_depends_on_distance_alone(offset, shift):
    torch.manual_seed(0)
    rope, q, k = Rope(RopeConfig(), 16), torch.randn(1, 2, 16), torch.randn(1, 2, 16)

    def score(q_position: int, k_position: int) -> torch.Tensor:
        at = [rotate(x, *rope.tables(torch.tensor([p]), torch.float32)) for x, p in ((q, q_position), (k, k_position))]
        torch.testing.assert_close(at[0].norm(dim=-1), q.norm(dim=-1))
        return (at[0] * at[1]).sum(-1)

    torch.testing.assert_close(score(offset + shift, shift), score(offset, 0), atol=0.1, rtol=0)


def test_linear_scaling_is_a_longer_ruler():
    plain, _ = inverse_frequencies(RopeConfig(), 32)
    scaled, factor = inverse_frequencies(RopeConfig(rope_type="linear", factor=4.0), 32)
    torch.testing.assert_close(scaled * 4, plain)
    assert factor == 1.0
