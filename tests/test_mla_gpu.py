"""Models with latent attention on a GPU: the same logits as on the CPU, and decode steps that are captured."""

from __future__ import annotations

import pytest
import torch

import headstock_torch_native
import headstock_triton
from headstock import ModelRunner
from headstock.models.config import ModelConfig
from headstock.models.moe import Experts
from headstock.models.pointwise import Pointwise, pointwise
from headstock.policy import Policy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CONFIG = ModelConfig.from_hf(
    {
        "model_type": "deepseek_v3", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256,
        "moe_intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "q_lora_rank": 64,
        "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
        "first_k_dense_replace": 1, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4,
        "n_group": 4, "topk_group": 2, "max_position_embeddings": 512,
    }
)  # fmt: skip
OFFERS = [*headstock_torch_native.attention_backends(), *headstock_triton.attention_backends()]


def logits(device: str, **policy: object) -> torch.Tensor:
    """Three requests of different lengths, prefilled together, extended, and then decoded for some steps."""
    runner = ModelRunner(
        CONFIG, device=device, dtype="float32", max_batch=4, kv_tokens=1024, policy=Policy(**policy), offers=OFFERS
    )
    slots = [runner.pages.open() for _ in range(3)]
    steps = [runner.forward(slots, [[(7 * i + j) % 256 for j in range(n)] for i, n in enumerate((5, 33, 70))])]
    steps.append(runner.forward(slots, [[1], [2, 3, 4], list(range(40))]))
    steps += [runner.forward(slots, [[step], [step + 1], [step + 2]]) for step in range(10)]
    return torch.cat(steps).cpu()


@pytest.mark.parametrize("form", [{"expand_from": 4}, {"unserved": {"all/expand"}}])
@pytest.mark.parametrize("name", [offer.name for offer in OFFERS])
def test_logits_are_those_of_the_cpu(name, form):
    ours = logits("cuda", backends={"decode": name}, **form)
    torch.testing.assert_close(ours, logits("cpu"), atol=1e-3, rtol=0)


@pytest.mark.parametrize("tokens", [1, 8, 64, 200])
@torch.inference_mode()
def test_every_form_of_running_experts_agrees_and_is_captured(tokens):
    torch.manual_seed(0)
    gate_up, down = (torch.randn(64, rows, 256, device="cuda").bfloat16() / 16 for rows in (128, 64))
    experts = Experts(gate_up, down, pointwise(torch.device("cuda")))
    x, weights = torch.randn(tokens, 256, device="cuda").bfloat16(), torch.rand(tokens, 6, device="cuda")
    chosen = torch.rand(tokens, 64, device="cuda").topk(6).indices
    exact = Experts(experts.gate_up.double(), experts.down.double(), Pointwise())._every(x.double(), weights, chosen)
    for run in (experts._gathered, experts._every, experts._sorted, experts):
        torch.testing.assert_close(run(x, weights, chosen).double(), exact, atol=0.05, rtol=0.05)
    if experts.grouped:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts(x, weights, chosen)
        x.neg_()
        graph.replay()
        assert torch.equal(out, experts(x, weights, chosen))
