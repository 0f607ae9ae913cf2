"""The host on a GPU: the same logits as on the CPU, and no host sync in the layers of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headstock import ForwardBatch, ModelRunner
from headstock.models.config import ModelConfig
from headstock.models.shapes import weight_shapes
from headstock.testing import AttentionConformance
from headstock.testing.problem import make_problem
from headstock.testing.specimen import OFFER
from headstock_torch_native import attention_backends
from headstock_torch_native.backend import TorchNative

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():

    class TestSpecimen(AttentionConformance):
        """The sound backend, captured in CUDA graphs: the suite's own stand on this device."""

        backend = OFFER


RAW = {
        "model_type": "qwen2", "vocab_size": 128, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256, "sliding_window": 16,
        "use_sliding_window": True, "max_window_layers": 1,
}  # fmt: skip


def logits(folder: Path, device: str) -> torch.Tensor:
    """Three requests of different lengths, prefilled together and then decoded for some steps, in float32."""
    runner = ModelRunner(
        folder, device=device, dtype="float32", max_batch=4, kv_tokens=1024, offers=attention_backends()
    )
    slots = [runner.pages.open() for _ in range(3)]
    prompts = [[(7 * i + j) % 128 for j in range(n)] for i, n in enumerate((5, 33, 70))]
    steps = [runner.forward(slots, prompts)]
    steps += [runner.forward(slots, [[step], [step + 1], [step + 2]]) for step in range(20)]
    return torch.cat(steps).cpu()


def test_logits_are_those_of_the_cpu(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW), encoding="utf-8")
    shapes = weight_shapes(ModelConfig.from_hf(RAW))
    save_file(
        {name: torch.randn(shape) * 0.05 + float(name.endswith("norm.weight")) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    torch.testing.assert_close(logits(tmp_path, "cuda"), logits(tmp_path, "cpu"), atol=1e-3, rtol=0)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch says so of its own switch
@pytest.mark.parametrize("phase", ["extend", "decode"])
@pytest.mark.parametrize("features", [{}, {"window": 8}, {"softcap": 30.0, "sinks": True, "alibi": True}])
def test_the_layers_of_a_step_never_wait_for_the_device(phase, features):
    lens = [1, 1, 1] if phase == "decode" else [3, 9, 1]
    problem = make_problem(lens, [5, 9, 40], device="cuda", dtype="bfloat16", phase=phase, **features)
    backend = TorchNative(problem.spec, None)
    batch: ForwardBatch = problem.batch
    backend.init_forward_metadata(batch)
    layer, out = problem.layer(problem.storage), torch.empty_like(problem.q)
    backend.forward(problem.q, problem.k, problem.v, layer, batch, out=out)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.forward(problem.q, problem.k, problem.v, layer, batch, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
