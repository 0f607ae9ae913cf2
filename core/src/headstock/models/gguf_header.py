"""The header of a GGUF file: its metadata and tensor shapes, read without torch and without its weights."""

from __future__ import annotations

import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

from headstock.errors import ModelError

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
ROPE_FACTORS = "rope_freqs.weight"  # what Llama 3's scaled frequencies are divided by, float32 [head_dim / 2]

# Value types of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md by their number, as `struct` spells them.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
DEEPEST = 8  # arrays within arrays; no known file has any


class Stored(NamedTuple):
    """Where and how a tensor lies in the file: GGML's number for its type, and its first byte."""

    kind: int
    start: int


class GGUFHeader:
    """What a GGUF file says of its model: `metadata` by key, `shapes` by tensor name, the slowest dimension first.

    `stored` says where each tensor lies. Raises ModelError for a file that cannot be read, is damaged, or holds no
    model that is supported.
    """

    def __init__(self, path: Path):
        self.path = path
        self._rope_factors: tuple[float, ...] = ()
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
            raise ModelError(f"cannot read {path}: it is no regular file", works="a .gguf file")
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                self._read(_Reader(content))
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}", works="a .gguf file") from None
        except (ValueError, KeyError, struct.error) as error:
            raise ModelError(f"{path} is damaged or not a GGUF file: {error}", works="download it again") from None
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            works = ", ".join(ARCHITECTURES)
            raise ModelError(f"{path}: this architecture is not supported", given=self.architecture, works=works)
        for key in ("split.count", f"{self.architecture}.expert_count"):
            if (self._whole(key) or 0) > 1:
                given, works = f"{key}={self.metadata[key]}", "one dense file"
                raise ModelError(f"{path}: this kind of GGUF file is not supported", given=given, works=works)

    def config(self) -> dict[str, Any]:
        """The content of the Hugging Face `config.json` of this model."""
        hidden, heads = self._key("embedding_length"), self._key("attention.head_count")
        head_dim = self._key("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._key(key, head_dim) != head_dim:
                given = f"{key}={self._key(key)}, head dimension {head_dim}"
                raise ModelError(f"{self.path}: heads of several sizes are not supported", given=given)
        if "token_embd.weight" not in self.shapes:
            raise ModelError(f"{self.path}: the tensor token_embd.weight is missing", works="a complete GGUF file")
        return {
            "model_type": "gemma3_text" if self.architecture == "gemma3" else self.architecture,
            "vocab_size": self.shapes["token_embd.weight"][0],
            "hidden_size": hidden,
            "intermediate_size": self._key("feed_forward_length"),
            "num_hidden_layers": self._key("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._key("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._key("context_length"),
            "rms_norm_eps": self._key("attention.layer_norm_rms_epsilon"),
            "attention_bias": self.architecture == "llama" and "blk.0.attn_q.bias" in self.shapes,
            "tie_word_embeddings": "output.weight" not in self.shapes,
            "rope_parameters": self._rope(head_dim),
            "bos_token_id": self._whole("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._ends(),
            **(self._gemma(hidden // heads, head_dim) if self.architecture == "gemma3" else {}),
        }

    def _gemma(self, width: int, head_dim: int) -> dict[str, Any]:
        """What Gemma 3 has besides. Its files leave out what llama.cpp knows by heart: the pattern of the windows, the
        rope of the windowed layers, and that the 27B model alone, with 62 layers, scales by the width of a head's share
        of the hidden state."""
        return {
            "sliding_window": self._key("attention.sliding_window"),
            "sliding_window_pattern": self._key("attention.sliding_window_pattern", 6),
            "query_pre_attn_scalar": width if self._key("block_count") == 62 else head_dim,
            "rope_parameters": {
                "full_attention": self._rope(head_dim),
                "sliding_attention": {"rope_type": "default", "rope_theta": self._key("rope.freq_base_swa", 10_000.0)},
            },
            **{
                key: self.metadata.get(f"gemma3.{key}") for key in ("attn_logit_softcapping", "final_logit_softcapping")
            },
        }

    def _read(self, reader: _Reader) -> None:
        if reader.take("4s") != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if (version := reader.take("I")) not in (2, 3):
            raise ValueError(f"version {version} is not 2 or 3")
        tensors, keys = reader.take("Q"), reader.take("Q")
        self.metadata = {reader.text(): reader.value(reader.take("I")) for _ in range(keys)}
        self.shapes: dict[str, tuple[int, ...]] = {}
        offsets = {}
        for _ in range(tensors):
            name = reader.text()
            self.shapes[name] = tuple(reader.take("Q") for _ in range(reader.take("I")))[::-1]
            offsets[name] = Stored(reader.take("I"), reader.take("Q"))
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment % 8:
            raise ValueError(f"general.alignment must be a multiple of 8, given {alignment!r:.80}")
        base = -(-reader.at // alignment) * alignment
        self.stored = {name: Stored(kind, base + offset) for name, (kind, offset) in offsets.items()}
        if ROPE_FACTORS in self.stored:
            if len(self.shapes[ROPE_FACTORS]) != 1 or self.shapes[ROPE_FACTORS] == (0,):
                raise ValueError(f"{ROPE_FACTORS} must be one row")
            reader.at = self.stored[ROPE_FACTORS].start
            self._rope_factors = reader.many("f", *self.shapes[ROPE_FACTORS])

    def _key(self, key: str, default: float | None = None) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{self.path}: the key {self.architecture}.{key} is missing", works="a complete GGUF file")
        if not isinstance(value, int | float) or not value > 0:
            what = f"{self.path}: {self.architecture}.{key} must be one positive number"
            raise ModelError(what, given=f"{value!r:.80}")
        return value

    def _whole(self, key: str) -> int | None:
        """A whole number that may be left out."""
        value = self.metadata.get(key)
        if value is None or (type(value) is int and value >= 0):
            return value
        raise ModelError(f"{self.path}: {key} must be a whole number", given=f"{value!r:.80}")

    def _ends(self) -> list[int]:
        """The ids that end a text: end of sequence, and end of turn where a file names one."""
        ids = [self._whole(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot")]
        return list(dict.fromkeys(index for index in ids if index is not None))

    def _rope(self, head_dim: int) -> dict[str, Any]:
        """The position embedding; factors stored as a tensor must be Llama 3's, whose largest is its scale."""
        theta = self._key("rope.freq_base", 10_000.0)
        kind = self.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        if self._rope_factors:
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
        factor, low, high, original = round(max(self._rope_factors), 3), 1.0, 4.0, 8192

        def explained(index: int) -> float:
            """The factor by which the published rule divides a frequency: 1 where it is high, all where it is low."""
            turns: float = original * theta ** (-2 * index / head_dim) / (2 * math.pi)
            smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
            return 1 / ((1 - smooth) / factor + smooth)

        near = (math.isclose(f, explained(i), rel_tol=1e-3) for i, f in enumerate(self._rope_factors))
        if len(self._rope_factors) != head_dim // 2 or not 0 < factor < math.inf or not all(near):
            raise ModelError(f"{self.path}: {ROPE_FACTORS} is not Llama 3's", works="the model's Hugging Face folder")
        return {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }


class _Reader:
    """A cursor over little-endian values."""

    def __init__(self, content: mmap.mmap):
        self.content, self.at = content, 0

    def take(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self.content, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def many(self, form: str, count: int) -> tuple[Any, ...]:
        size = count * struct.calcsize("<" + form)
        if size > len(self.content) - self.at:
            raise ValueError("it ends early")
        self.at += size
        return struct.unpack_from(f"<{count}{form}", self.content, self.at - size)

    def text(self) -> str:
        length = self.take("Q")
        if length > len(self.content) - self.at:
            raise ValueError("it ends early")
        self.at += length
        return self.content[self.at - length : self.at].decode()

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            if depth == DEEPEST:
                raise ValueError(f"arrays are nested more than {DEEPEST} deep")
            kind, count = self.take("I"), self.take("Q")
            if kind in SCALARS:
                return list(self.many(SCALARS[kind], count))
            return [self.value(kind, depth + 1) for _ in range(count)]
        return self.take(SCALARS[kind])
