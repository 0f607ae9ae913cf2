"""A GGUF file in Hugging Face's terms: its config, and its tensors by their names there, dequantised."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from headstock.errors import ModelError
from headstock.models.config import RopeConfig
from headstock.models.rope import inverse_frequencies

ARCHITECTURES = ("llama", "qwen2", "qwen3")

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
ROPE_FACTORS = "rope_freqs.weight"  # what Llama 3's scaled frequencies are divided by, [head_dim / 2]


class GGUFFile:
    """An open GGUF file; `metadata` holds its keys. Raises ModelError for what is damaged or not supported."""

    def __init__(self, path: Path):
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        except Exception as error:  # the reader checks little: a short file surfaces as whatever numpy meets first
            raise ModelError(f"{path} is damaged or not a GGUF file: {error}", works="download it again") from None
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            works = ", ".join(ARCHITECTURES)
            raise ModelError(f"{path}: this architecture is not supported", given=self.architecture, works=works)
        for key in ("split.count", f"{self.architecture}.expert_count"):
            if self.metadata.get(key, 0) > 1:
                given = f"{key}={self.metadata[key]}"
                raise ModelError(
                    f"{path}: this kind of GGUF file is not supported", given=given, works="one dense file"
                )

    def config(self) -> dict[str, Any]:
        """The content of the Hugging Face `config.json` of this model."""
        hidden, heads = self._key("embedding_length"), self._key("attention.head_count")
        head_dim = self._key("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._key(key, head_dim) != head_dim:
                given = f"{key}={self._key(key)}, head dimension {head_dim}"
                raise ModelError(f"{self.path}: heads of several sizes are not supported", given=given)
        return {
            "model_type": self.architecture,
            "vocab_size": int(self._tensor("token_embd.weight").shape[1]),
            "hidden_size": hidden,
            "intermediate_size": self._key("feed_forward_length"),
            "num_hidden_layers": self._key("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._key("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._key("context_length"),
            "rms_norm_eps": self._key("attention.layer_norm_rms_epsilon"),
            "attention_bias": self.architecture == "llama" and "blk.0.attn_q.bias" in self.tensors,
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "rope_parameters": self._rope(head_dim),
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._ends(),
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name to shape of every tensor, without reading any."""
        names = [name for name in self.tensors if name != ROPE_FACTORS]
        return {self._hf_name(name): tuple(map(int, reversed(self.tensors[name].shape))) for name in names}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor's Hugging Face name and its float32 values, one at a time."""
        heads = self._key("attention.head_count")
        counts = {"attn_q": heads, "attn_k": self._key("attention.head_count_kv", heads)}
        for name, stored in self.tensors.items():
            if name == ROPE_FACTORS:
                continue
            try:
                values = gguf.quants.dequantize(stored.data, stored.tensor_type).astype(np.float32, copy=False)
            except NotImplementedError:
                given = stored.tensor_type.name
                raise ModelError(f"{self.path}: {name} has a quantisation that is not supported", given=given) from None
            short = name.split(".")[-2]
            if self.architecture == "llama" and short in counts:
                values = _unpermute(values, counts[short])
            yield self._hf_name(name), torch.tensor(values)  # a copy: the file stays read-only

    def _key(self, key: str, default: float | None = None) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{self.path}: the key {self.architecture}.{key} is missing", works="a complete GGUF file")
        if not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"{self.path}: {self.architecture}.{key} must be one positive number", given=repr(value))
        return value

    def _tensor(self, name: str) -> gguf.ReaderTensor:
        if name not in self.tensors:
            raise ModelError(f"{self.path}: the tensor {name} is missing", works="a complete GGUF file")
        return self.tensors[name]

    def _hf_name(self, name: str) -> str:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        layer, short, kind = match.groups() if match else (None, "", "")
        known = OUTER.get(short) if layer is None else INNER.get(short)
        if known is None:
            raise ModelError(
                f"{self.path}: the model has no tensor {name}", works="a GGUF file of a plain llama or qwen"
            )
        return f"{known}.{kind}" if layer is None else f"model.layers.{layer}.{known}.{kind}"

    def _ends(self) -> list[int]:
        """The ids that end a text: end of sequence, and end of turn where a file names one."""
        ids = [self.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot")]
        return list(dict.fromkeys(index for index in ids if index is not None))

    def _rope(self, head_dim: int) -> dict[str, Any]:
        theta = self._key("rope.freq_base", 10_000.0)
        kind = self.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        if ROPE_FACTORS in self.tensors:
            return self._llama3_rope(theta, head_dim)
        if kind == "none":
            return {"rope_type": "default", "rope_theta": theta}
        if kind not in ("linear", "yarn"):
            raise ModelError(f"{self.path}: this rope scaling is not supported", given=kind, works="none, linear, yarn")
        scaled = {"rope_type": kind, "rope_theta": theta, "factor": self._key("rope.scaling.factor")}
        if kind == "yarn":
            scaled["original_max_position_embeddings"] = self._key("rope.scaling.original_context_length")
        return scaled

    def _llama3_rope(self, theta: float, head_dim: int) -> dict[str, Any]:
        """Llama 3's scaling from the factors stored in its place, where the published constants explain them."""
        stored = torch.tensor(self.tensors[ROPE_FACTORS].data, dtype=torch.float32)
        rope = RopeConfig(
            rope_type="llama3",
            rope_theta=theta,
            factor=round(float(stored.max()), 3),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
        plain, _ = inverse_frequencies(RopeConfig(rope_theta=theta), head_dim)
        scaled, _ = inverse_frequencies(rope, head_dim)
        if stored.shape != plain.shape or not torch.allclose(plain / scaled, stored, rtol=1e-3):
            raise ModelError(f"{self.path}: {ROPE_FACTORS} is not Llama 3's", works="the model's Hugging Face folder")
        return rope.model_dump(include=rope.model_fields_set)


def _unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from GGUF's rope order (pairs side by side) to Hugging Face's (halves apart)."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(values.shape)
