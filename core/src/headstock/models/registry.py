"""The model classes by architecture, imported only when one is asked for."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

from headstock.errors import ModelError
from headstock.models.config import ModelConfig

if TYPE_CHECKING:
    from headstock.models.decoder import Decoder

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "headstock.models.deepseek:Deepseek",
    "DeepseekV3ForCausalLM": "headstock.models.deepseek:Deepseek",
    "Gemma3ForCausalLM": "headstock.models.gemma:Gemma3",
    "LlamaForCausalLM": "headstock.models.llama:Llama",
    "MistralForCausalLM": "headstock.models.llama:Llama",
    "Qwen2ForCausalLM": "headstock.models.llama:Llama",
    "Qwen3ForCausalLM": "headstock.models.llama:Llama",
}


def model_class(config: ModelConfig) -> type[Decoder[Any]]:
    """The class that runs a config's architecture; raises ModelError where there is none."""
    if config.architecture not in ARCHITECTURES:
        works = ", ".join(ARCHITECTURES)
        raise ModelError("this architecture is not supported", given=config.architecture, works=works)
    found: type[Decoder[Any]] = pkgutil.resolve_name(ARCHITECTURES[config.architecture])
    return found
