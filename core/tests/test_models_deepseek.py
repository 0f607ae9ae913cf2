"""DeepSeek-V2 and V3 against transformers: the same random weights give the same logits, in both forms of attention."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstock.errors import ModelError
from headstock.models.config import ModelConfig
from headstock.models.deepseek import Deepseek
from headstock.models.deepseek_config import MLAConfig, MoEConfig
from headstock.models.mla import UpProjection, merge
from headstock.models.moe import Experts, Router
from headstock.models.pointwise import Pointwise
from headstock.models.registry import model_class
from headstock.models.shapes import weight_bytes, weight_shapes
from headstock.models.weights import WeightSource
from headstock.runner.recording import record

SMALL = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "moe_intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6, "v_head_dim": 12, "first_k_dense_replace": 1, "max_position_embeddings": 128,
    "num_experts_per_tok": 3, "n_routed_experts": 8, "n_shared_experts": 2,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7,
    "mscale_all_dim": 0.7, "beta_fast": 16.0, "beta_slow": 2.0,
}  # fmt: skip
GROUPS = {"n_group": 4, "topk_group": 2}
LITE = {"q_lora_rank": None, "topk_method": "greedy", "rope_parameters": YARN}
CASES = {
    "v2-lite": ("DeepseekV2", LITE),
    "v2": ("DeepseekV2", {"q_lora_rank": 20, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}),
    "v2-plain-rope": ("DeepseekV2", {"q_lora_rank": None, "attention_bias": True, "tie_word_embeddings": True}),
    "v3": ("DeepseekV3", {"q_lora_rank": 20, "rope_parameters": YARN, "attention_bias": True}),
    "v3-lopsided-mscale": ("DeepseekV3", {"q_lora_rank": 20, "rope_parameters": {**YARN, "mscale": 1.2}}),
    "v3-without-mscale": ("DeepseekV3", {"q_lora_rank": None, "rope_parameters": {**YARN, "mscale_all_dim": 0.0}}),
    "v3-halves": ("DeepseekV3", {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False}),
    "v3-one-group": ("DeepseekV3", {"q_lora_rank": 20, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}),
}  # fmt: skip
FORMS = ("absorbed", "expanded")


class LatentAttention:
    """Dense attention in float64 over a growing latent cache, in one of its two forms: stands in for the host."""

    def __init__(self, config: ModelConfig, form: str):
        self.config, self.form, self.cache = config, form, {}

    def __call__(self, index: int, q: Tensor, latent: Tensor, up: UpProjection, out: Tensor) -> None:
        latent = torch.cat((self.cache[index], latent)) if index in self.cache else latent
        self.cache[index] = latent.clone()
        scale = self.config.layers[index].scale
        if self.form == "expanded":
            keys, values = up.expand(latent)
            out.copy_(dense(q, keys, values, scale))
        else:
            values = latent[..., : up.config.kv_rank]
            up.restore(dense(up.absorb(q), latent, values, scale).to(q.dtype), out)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (x.double() for x in (q, k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k.expand(-1, q.shape[1], -1)) * scale
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.expand(-1, q.shape[1], -1))


def random_reference(case: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A transformers model whose every parameter, norms and the router's bias too, is drawn at random."""
    torch.manual_seed(seed)
    family, overrides = CASES[case]
    config = getattr(transformers, f"{family}Config")(**SMALL | GROUPS | overrides)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
        for name, buffer in model.named_buffers():
            if "e_score" in name:
                buffer.normal_(0.0, 0.1)
    return model


def load(folder, dtype=torch.float32) -> Deepseek:
    config = ModelConfig.from_folder(folder)
    model = model_class(config)(config, dtype)
    model.load(WeightSource(folder))
    return model


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_in_prefill_and_decode_in_both_forms(case, tmp_path):
    reference = random_reference(case)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path)
    tokens = torch.randint(0, SMALL["vocab_size"], (52,))
    expected = reference(tokens[None]).logits[0]
    for form in FORMS:
        attend = LatentAttention(model.config, form)
        prefill = model.forward(tokens[:48], torch.arange(48), attend)
        torch.testing.assert_close(prefill, expected[:48], atol=1e-4, rtol=0)
        for position in range(48, 52):
            step = model.forward(tokens[position : position + 1], torch.tensor([position]), attend)
            torch.testing.assert_close(step[0], expected[position], atol=1e-4, rtol=0)


@torch.no_grad()
def test_every_published_part_of_the_scale_is_needed(tmp_path):
    """Logits that would be the same without YaRN's temperature would prove nothing."""
    random_reference("v2-lite").save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    plain, temperature = 14**-0.5, 0.1 * 0.7 * torch.tensor(4.0).log().item() + 1
    assert config.layers[0].scale == pytest.approx(plain * temperature**2)
    assert config.layers[0].latent == (16, 6)
    assert (config.layers[0].head_dim, config.layers[0].v_head_dim) == (14, 12)
    absorbed = config.layers[0].absorbed
    assert (absorbed.num_heads, absorbed.num_kv_heads, absorbed.head_dim, absorbed.v_head_dim) == (4, 1, 22, 16)
    assert absorbed.scale == config.layers[0].scale


@torch.no_grad()
@pytest.mark.parametrize("case", ["v2-lite", "v3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16(case, tmp_path):
    reference = random_reference(case)
    reference.to(torch.bfloat16).save_pretrained(tmp_path)
    reference = type(reference).from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = load(tmp_path, torch.bfloat16)
    tokens = torch.randint(0, SMALL["vocab_size"], (64,))
    theirs = reference(tokens[None]).logits[0]
    exact = type(reference).from_pretrained(tmp_path, dtype=torch.float32)(tokens[None]).logits[0]
    for form in FORMS:
        ours = model.forward(tokens, torch.arange(64), LatentAttention(model.config, form))
        assert ours.dtype == torch.bfloat16
        assert (ours - exact).pow(2).mean() <= 2 * (theirs - exact).pow(2).mean()


@pytest.mark.parametrize("case", CASES)
def test_shapes_and_bytes_are_known_before_loading(case, tmp_path):
    reference = random_reference(case)
    reference.save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert weight_shapes(config) == {name: tuple(x.shape) for name, x in stored.items()}
    exact = sum(x.numel() for name, x in stored.items() if "mlp.gate." in name)
    assert weight_bytes(config, torch.bfloat16, "cuda") == 2 * sum(x.numel() for x in stored.values()) + 2 * exact


@torch.no_grad()
def test_layers_for_speculation_are_left_unread(tmp_path):
    reference = random_reference("v3")
    reference.config.num_nextn_predict_layers = 1
    reference.save_pretrained(tmp_path)
    file, tokens = tmp_path / "model.safetensors", torch.arange(9)
    logits = load(tmp_path).forward(tokens, tokens, LatentAttention(load(tmp_path).config, "absorbed"))
    stored = load_file(file)
    save_file(stored | {"model.layers.3.eh_proj.weight": torch.zeros(48, 96)}, file)
    model = load(tmp_path)
    assert torch.equal(model.forward(tokens, tokens, LatentAttention(model.config, "absorbed")), logits)
    save_file(stored | {"model.layers.4.eh_proj.weight": torch.zeros(48, 96)}, file)
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.4\.eh_proj"):
        load(tmp_path)


@torch.no_grad()
def test_random_weights_follow_the_seed():
    config = ModelConfig.from_hf({"model_type": "deepseek_v3", **SMALL, **GROUPS, "q_lora_rank": 20})
    tokens, logits = torch.arange(4), []
    for seed in (1, 1, 2):
        model = model_class(config)(config, torch.float32)
        model.init_random(seed)
        logits.append(model.forward(tokens, tokens, LatentAttention(config, "absorbed")))
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert logits[0].isfinite().all()
    assert [len(part.dense().shape) for part in model.linears()] == [2] * (3 * 5 + 1)


def raw(**changes) -> dict:
    given = {"model_type": "deepseek_v3", **SMALL, **GROUPS, **changes}
    return {key: value for key, value in given.items() if value is not ...}


def test_the_published_configs_of_v2_lite_v2_and_v3_are_read():
    scaling = {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.707, "mscale_all_dim": 0.707,
    }  # fmt: skip
    lite = ModelConfig.from_hf({
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400,
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1,
        "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "max_position_embeddings": 163840, "rope_theta": 10000, "torch_dtype": "bfloat16",
        "rope_scaling": scaling, "aux_loss_alpha": 0.001, "seq_aux": True, "pretraining_tp": 1, "ep_size": 1,
    })  # fmt: skip
    assert lite.moe == MoEConfig(
        num_experts=64, top_k=6, intermediate_size=1408, shared_size=2816, scoring="softmax", first_layer=1
    )
    assert sum(map(torch.Size.numel, map(torch.Size, weight_shapes(lite).values()))) == 15_706_484_224
    full = ModelConfig.from_hf({
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "num_attention_heads": 128, "max_position_embeddings": 163840,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 1, "rope_theta": 10000,
        "rope_scaling": {**scaling, "mscale": 1.0, "mscale_all_dim": 1.0},
    })  # fmt: skip
    assert full.mla == MLAConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    assert full.moe == MoEConfig(
        num_experts=256, top_k=8, intermediate_size=2048, shared_size=2048, scoring="sigmoid", num_groups=8,
        top_groups=4, normalised=True, scaling=2.5, first_layer=3,
    )  # fmt: skip
    assert full.spare_layers == 1
    assert round(sum(map(torch.Size.numel, map(torch.Size, weight_shapes(full).values()))) / 1e9) == 671


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 2}, ["num_key_value_heads=2"]),
        ({"qk_rope_head_dim": 5}, ["qk_rope_head_dim=5", "even"]),
        ({"topk_method": "greedy"}, ["topk_method='greedy'", "noaux_tc"]),
        ({"scoring_func": "softmax"}, ["softmax", "sigmoid"]),
        ({"model_type": "deepseek_v2", "topk_method": "greedy", "norm_topk_prob": True}, ["norm_topk_prob", "false"]),
        ({"n_group": 3}, ["n_group=3", "equal"]),
        ({"num_experts_per_tok": 5}, ["num_experts_per_tok=5", "topk_group=2"]),
        ({"n_group": 8, "topk_group": 8}, ["n_group=8", "2 or more"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"num_experts_per_tok": None}, ["num_experts_per_tok"]),
    ],
)
def test_what_is_not_supported_is_one_line_that_names_it(changes, words):
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_hf(raw(**changes))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@settings(deadline=None)
@given(st.sampled_from(sorted(raw())), st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3))
def test_any_value_of_any_key_is_taken_or_refused(key, value):
    with suppress(ModelError):
        config = ModelConfig.from_hf(raw(**{key: value}))
        assert config.layers[0].latent == (config.mla.kv_rank, config.mla.rope_dim)


def by_hand(experts: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Every token through each of its experts, one by one, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, (row, own) in enumerate(zip(x.double(), chosen.tolist(), strict=True)):
        for weight, expert in zip(weights[token].double(), own, strict=True):
            gate, up = (experts.gate_up[expert].double() @ row).chunk(2)
            out[token] += weight * (torch.nn.functional.silu(gate) * up @ experts.down[expert].double())
    return out


@torch.no_grad()
@settings(deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**31), st.sampled_from(["_gathered", "_every", "_sorted"])
)
def test_every_form_of_running_experts_is_the_sum_over_a_tokens_own(tokens, top_k, seed, form):
    torch.manual_seed(seed)
    experts = Experts(torch.randn(8, 10, 6) / 3, torch.randn(8, 5, 6) / 3, Pointwise())
    x, weights = torch.randn(tokens, 6), torch.rand(tokens, top_k)
    chosen = torch.rand(tokens, 8).topk(top_k).indices
    expected = by_hand(experts, x, weights, chosen).float()
    for run in (experts, getattr(experts, form)):
        torch.testing.assert_close(run(x, weights, chosen), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_an_expert_nobody_chose_does_no_harm_by_overflowing():
    experts = Experts(torch.full((3, 4, 2), 300.0).half(), torch.ones(3, 2, 2).half(), Pointwise())
    experts.gate_up[1] = 0.5
    x, chosen = torch.ones(2, 2).half(), torch.tensor([[1], [1]])
    assert (300 * x.sum(-1)).square().isinf().all()
    every, gathered = (run(x, torch.ones(2, 1), chosen) for run in (experts._every, experts._gathered))
    torch.testing.assert_close(every, gathered)
    assert every.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 2, 32])
def test_decoding_asks_the_host_for_nothing_and_replays_with_other_tokens(tokens):
    config = ModelConfig.from_hf(raw(n_routed_experts=32, q_lora_rank=20))
    model = model_class(config)(config, torch.float32)
    model.init_random()
    moe, out = model.layers[1].feed_forward, torch.zeros(tokens, 48)
    residual, x = torch.randn(tokens, 48), torch.randn(tokens, 48)
    norm = model.layers[1].post_norm

    def run() -> Tensor:
        return moe.add_norm(residual, x, norm, 1e-6)[1]

    recording = record(lambda: out.copy_(run()))
    x.normal_()
    recording.replay()
    torch.testing.assert_close(out, run())


@settings(deadline=None)
@given(st.integers(0, 2**31))
def test_the_chosen_experts_are_the_best_of_the_best_groups(seed):
    """By brute force, one token at a time."""
    torch.manual_seed(seed)
    config = MoEConfig(
        num_experts=12, top_k=3, intermediate_size=1, shared_size=1, scoring="sigmoid", num_groups=4, top_groups=2,
        normalised=True, scaling=2.5,
    )  # fmt: skip
    router = Router(config, torch.randn(12, 7), torch.randn(12))
    x = torch.randn(5, 7)
    weights, experts = router(x)
    scores = (x @ router.weight.T).sigmoid()
    for token in range(5):
        shifted = (scores[token] + router.bias).tolist()
        groups = sorted(range(4), key=lambda g: -sum(sorted(shifted[3 * g : 3 * g + 3])[1:]))[:2]
        best = sorted((e for g in groups for e in range(3 * g, 3 * g + 3)), key=lambda e: -shifted[e])[:3]
        assert set(experts[token].tolist()) == set(best)
        share = scores[token, experts[token]]
        torch.testing.assert_close(weights[token], 2.5 * share / share.sum())


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 5))
def test_parts_merge_into_attention_over_all_keys(seed, split):
    torch.manual_seed(seed)
    logits, values = torch.randn(3, 2, 5) * 9, torch.randn(5, 4)

    def part(of: slice) -> tuple[Tensor, Tensor]:
        lse = logits[..., of].logsumexp(-1)
        return (logits[..., of] - lse.nan_to_num(neginf=0)[..., None]).exp() @ values[of], lse

    (out, lse), (whole, total) = part(slice(split, 5)), part(slice(0, 5))
    if split == 5:
        (out, lse), other = part(slice(0, 5)), part(slice(0, 0))
    else:
        other = part(slice(0, split))
    merge(out, lse, *other)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, total)
