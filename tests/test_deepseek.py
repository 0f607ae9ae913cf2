"""DeepSeek through the whole host on the backends that are installed, against transformers in float32."""

from __future__ import annotations

import pytest
import torch
import transformers

from headstock import ModelRunner
from headstock.policy import Policy

SHAPE = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 1, "num_experts_per_tok": 3,
    "n_routed_experts": 16, "n_shared_experts": 2, "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 128,
        "mscale": 0.707, "mscale_all_dim": 0.707,
    },
}  # fmt: skip
FAMILIES = {
    "V2-Lite": ("DeepseekV2", {"q_lora_rank": None, "topk_method": "greedy"}),
    "V3": ("DeepseekV3", {"q_lora_rank": 48, "n_group": 4, "topk_group": 2}),
}
PROMPT, STEPS = 300, 4


@pytest.fixture(scope="module", params=FAMILIES)
def random_model(request, tmp_path_factory):
    """A folder with random weights, tokens, and transformers' logits of them."""
    family, own = FAMILIES[request.param]
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SHAPE | own))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    folder = tmp_path_factory.mktemp("deepseek")
    model.save_pretrained(folder)
    tokens = torch.randint(0, SHAPE["vocab_size"], (PROMPT + STEPS,))
    with torch.no_grad():
        return folder, tokens.tolist(), model(tokens[None]).logits[0]


@pytest.mark.parametrize("form", [{}, {"unserved": {"all/expand"}}, {"unserved": {"all/extend"}}])
def test_random_weights_give_the_logits_of_transformers(random_model, form):
    """In chunks, each in the form that its length and the backends come to, and then token by token."""
    folder, tokens, expected = random_model
    policy = Policy(page_size=16, **form)
    runner = ModelRunner(folder, dtype="float32", max_batch=1, max_tokens=128, max_context=512, policy=policy)
    slot, start, worst = runner.pages.open(), 0, 0.0
    for end in [100, 228, 240, *range(PROMPT, len(tokens) + 1)]:
        [logits] = runner.forward([slot], [tokens[start:end]])
        worst, start = max(worst, float((logits - expected[end - 1]).abs().max())), end
    assert start == len(tokens)
    assert worst < 1e-3
