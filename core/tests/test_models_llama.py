"""The models against transformers: the same random weights on disk must give the same logits."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor

from headstock.models.config import ModelConfig
from headstock.models.llama import Llama
from headstock.models.registry import model_class
from headstock.models.shapes import weight_bytes, weight_shapes
from headstock.models.weights import WeightSource

SMALL = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
DEEPSEEK_YARN = dict(**YARN, beta_fast=16.0, beta_slow=2.0, mscale=0.8, mscale_all_dim=0.5)

CONFIGS = {"Gemma3": "Gemma3TextConfig"}  # where the family's own name is that of a model for images too
CASES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6}),
    "llama-wide-heads": ("Llama", {"head_dim": 20}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": DEEPSEEK_YARN}),
    "llama-yarn-untruncated": ("Llama", {"rope_parameters": dict(**YARN, truncate=False)}),
    "llama-yarn-attention-factor": ("Llama", {"rope_parameters": dict(**YARN, attention_factor=1.5)}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen2-mixed-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "qwen3-layer-types": (
        "Qwen3",
        {
            "use_sliding_window": True, "sliding_window": 6, "tie_word_embeddings": True, "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3": ("Gemma3", {"num_hidden_layers": 7, "sliding_window": 5}),
    "gemma3-layer-types": (
        "Gemma3",
        {
            "sliding_window": 6, "query_pre_attn_scalar": 24, "attention_bias": True, "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
}  # fmt: skip


class CachedAttention:
    """Plain dense attention in float64 over a growing cache: the reference that stands in for a backend."""

    def __init__(self, config: ModelConfig):
        self.config, self.cache = config, {}

    def __call__(self, index: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        shape = self.config.layers[index]
        if index in self.cache:
            k, v = (torch.cat((old, new)) for old, new in zip(self.cache[index], (k, v), strict=True))
        self.cache[index] = (k.clone(), v.clone())
        group = shape.num_heads // shape.num_kv_heads
        keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * shape.scale
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden = (distance < 0) | (distance >= (shape.window or len(k)))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out.copy_(torch.einsum("hqk,khd->qhd", weights, values))


def random_reference(family: str, overrides: dict, seed: int = 0) -> transformers.PreTrainedModel:
    """A transformers model whose every parameter, norms and biases too, is drawn at random."""
    torch.manual_seed(seed)
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**SMALL | overrides)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    return model


def load(folder, dtype=torch.float32) -> Llama:
    config = ModelConfig.from_folder(folder)
    model = model_class(config)(config, dtype)
    model.load(WeightSource(folder))
    return model


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_in_prefill_and_decode(case, tmp_path):
    reference = random_reference(*CASES[case])
    reference.save_pretrained(tmp_path)
    model = load(tmp_path)
    tokens = torch.randint(0, SMALL["vocab_size"], (24,))
    expected = reference(tokens[None]).logits[0]

    attend = CachedAttention(model.config)
    prefill = model.forward(tokens[:16], torch.arange(16), attend)
    torch.testing.assert_close(prefill, expected[:16], atol=1e-4, rtol=0)
    for position in range(16, 24):
        step = model.forward(tokens[position : position + 1], torch.tensor([position]), attend)
        torch.testing.assert_close(step[0], expected[position], atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.past_key_values.:FutureWarning")  # renamed in the course of transformers 5
def test_decode_equals_transformers_decoding_with_its_own_cache(tmp_path):
    reference = random_reference("Qwen3", {})
    reference.save_pretrained(tmp_path)
    model = load(tmp_path)
    attend = CachedAttention(model.config)
    tokens, cache, start = [3, 1, 4, 1, 5], None, 0
    for _ in range(8):
        new = torch.tensor(tokens[start:])
        answer = reference(new[None], past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        logits = model.forward(new, torch.arange(start, len(tokens)), attend)
        torch.testing.assert_close(logits, answer.logits[0], atol=1e-4, rtol=0)
        start = len(tokens)
        tokens.append(int(logits[-1].argmax()))


@torch.no_grad()
def test_rows_pick_what_goes_through_the_head(tmp_path):
    random_reference("Llama", {}).save_pretrained(tmp_path)
    model = load(tmp_path)
    tokens, positions, rows = torch.arange(9), torch.arange(9), torch.tensor([8, 2])
    every = model.forward(tokens, positions, CachedAttention(model.config))
    some = model.forward(tokens, positions, CachedAttention(model.config), rows)
    torch.testing.assert_close(some, every[rows], atol=1e-5, rtol=0)


@torch.no_grad()
def test_attend_gets_strided_views_of_the_right_shapes(tmp_path):
    random_reference("Llama", {}).save_pretrained(tmp_path)
    model = load(tmp_path)
    seen = []

    def attend(index, q, k, v, out):
        seen.append((index, q.shape, k.shape, v.shape, out.shape))
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == out.stride(-1) == 1
        out.zero_()

    model.forward(torch.arange(5), torch.arange(5), attend)
    assert seen == [(layer, (5, 6, 8), (5, 2, 8), (5, 2, 8), (5, 6, 8)) for layer in range(3)]


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_bfloat16_is_as_near_to_float64_as_transformers_bfloat16(case, tmp_path):
    reference = random_reference(*CASES[case])
    reference.to(torch.bfloat16).save_pretrained(tmp_path)
    model = load(tmp_path, torch.bfloat16)
    tokens = torch.randint(0, SMALL["vocab_size"], (32,))
    ours = model.forward(tokens, torch.arange(32), CachedAttention(model.config))
    theirs = reference(tokens[None]).logits[0]
    exact = reference.double()(tokens[None]).logits[0]
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).pow(2).mean() <= 1.5 * (theirs - exact).pow(2).mean()


@torch.no_grad()
def test_a_sharded_checkpoint_gives_the_same_logits(tmp_path):
    reference = random_reference("Llama", {})
    reference.save_pretrained(tmp_path / "one")
    reference.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    tokens = torch.arange(7)
    logits = [model.forward(tokens, tokens, CachedAttention(model.config)) for model in (one, many)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("case", ["llama", "llama-tied", "llama-biases", "qwen2", "qwen3", "gemma3"])
def test_shapes_and_bytes_are_known_before_loading(case, tmp_path):
    reference = random_reference(*CASES[case])
    reference.save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    assert weight_shapes(config) == {name: tuple(x.shape) for name, x in reference.named_parameters()}
    on_device = weight_bytes(config, torch.bfloat16, "cuda")
    assert on_device == 2 * sum(x.numel() for x in reference.parameters())


@torch.no_grad()
def test_linears_are_all_the_multiplications_of_a_step(tmp_path):
    random_reference("Llama", {}).save_pretrained(tmp_path)
    model = load(tmp_path)
    shapes = [tuple(part.dense().shape) for part in model.linears()]
    assert shapes == [(80, 48), (48, 48), (160, 48), (48, 80)] * 3 + [(97, 48)]
    assert sum(rows * columns for rows, columns in shapes) == sum(
        rows * columns
        for name, (rows, *rest) in weight_shapes(model.config).items()
        for columns in rest
        if "embed" not in name
    )


@torch.no_grad()
@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_random_weights_follow_the_seed(case, tmp_path):
    random_reference(*CASES[case]).save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    tokens, logits = torch.arange(4), []
    for seed in (1, 1, 2):
        model = model_class(config)(config, torch.float32)
        model.init_random(seed)
        logits.append(model.forward(tokens, tokens, CachedAttention(config)))
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert logits[0].isfinite().all()
