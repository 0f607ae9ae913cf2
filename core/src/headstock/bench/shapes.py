"""Shapes of models to measure with where no model is at hand: layers as numbers, by name. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from headstock.errors import HeadstockError
from headstock.models.config import ModelConfig


def _llama(heads: int, kv_heads: int, head_dim: int, layers: int, context: int, **fields: Any) -> dict[str, Any]:
    sizes = {"hidden_size": heads * head_dim, "intermediate_size": 4 * heads * head_dim, "vocab_size": 128256}
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    whole = {"model_type": "llama", "num_hidden_layers": layers, "max_position_embeddings": context}
    return {"dtype": "bfloat16"} | whole | sizes | shape | fields


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama-8b": _llama(32, 8, 128, 32, 131072),
        "llama-70b": _llama(64, 8, 128, 80, 131072),
        "llama-2-7b": _llama(32, 32, 128, 32, 4096),
        "qwen-32b": _llama(64, 8, 128, 64, 40960, hidden_size=5120),
        "smollm2-135m": _llama(9, 3, 64, 30, 8192),
        "gemma-3-1b": _llama(4, 1, 256, 26, 32768, model_type="gemma3_text", sliding_window=512, hidden_size=1152),
    }
)
"""Attention shapes as config.json has them: heads, head sizes, layers, windows and context are those of the models."""


def preset(name: str) -> ModelConfig:
    """The config of a preset; HeadstockError where there is none of this name."""
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, 1)
        works = f"{near[0]}, perhaps" if near else ", ".join(PRESETS)
        raise HeadstockError("no shape is called so", given=name, works=f"{works}; or --model with a config.json")
    return ModelConfig.from_hf(dict(PRESETS[name]))
