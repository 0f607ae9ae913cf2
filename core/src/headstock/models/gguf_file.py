"""The weights of a GGUF file: its tensors by their Hugging Face names, dequantised."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from headstock.errors import ModelError
from headstock.models.gguf_header import ROPE_FACTORS, GGUFHeader

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA = INNER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GGUFFile(GGUFHeader):
    """A GGUF file with its weights. Raises ModelError for what is damaged or not supported."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        self.names = {name: self._hf_name(name) for name in self.shapes if name != ROPE_FACTORS}

    def hf_shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name to shape of every tensor, without reading any."""
        return {theirs: self.shapes[name] for name, theirs in self.names.items()}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor's Hugging Face name and its float32 values, one at a time."""
        heads = self._key("attention.head_count")
        counts = {"attn_q": heads, "attn_k": self._key("attention.head_count_kv", heads)}
        for name, theirs in self.names.items():
            values = self._values(name)
            short = name.split(".")[-2]
            if self.architecture == "llama" and short in counts:
                values = _unpermute(values, counts[short])
            if self.architecture == "gemma3" and short.endswith("norm"):
                values = values - 1  # which the converter of llama.cpp adds
            yield theirs, torch.tensor(values)  # a copy: the file stays read-only

    def _values(self, name: str) -> np.ndarray:
        """A tensor's values in float32, dequantised a row of blocks at a time."""
        (kind, start), shape = self.stored[name], self.shapes[name]
        try:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
            row = shape[-1] // block * size
            stored = self._bytes[start : start + math.prod(shape[:-1]) * row].reshape(*shape[:-1], row)
            return gguf.quants.dequantize(stored, gguf.GGMLQuantizationType(kind)).astype(np.float32, copy=False)
        except NotImplementedError:
            given = gguf.GGMLQuantizationType(kind).name
            raise ModelError(f"{self.path}: {name} has a quantisation that is not supported", given=given) from None
        except ValueError:  # an unknown type, or fewer bytes than the shape asks for
            works = "download it again"
            raise ModelError(
                f"{self.path} is damaged: {name} is not all there", given=list(shape), works=works
            ) from None

    def _hf_name(self, name: str) -> str:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        layer, short, kind = match.groups() if match else (None, "", "")
        inner = GEMMA if self.architecture == "gemma3" else INNER
        known = OUTER.get(short) if layer is None else inner.get(short)
        if known is None:
            works = "a GGUF file of a plain llama, qwen or gemma"
            raise ModelError(f"{self.path}: the model has no tensor {name}", works=works)
        return f"{known}.{kind}" if layer is None else f"model.layers.{layer}.{known}.{kind}"


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from GGUF's rope order (pairs side by side) to Hugging Face's (halves apart)."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(values.shape)
