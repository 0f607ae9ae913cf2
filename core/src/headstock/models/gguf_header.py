"""The header of a GGUF file: its metadata and tensor shapes, read without torch and without its weights."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from headstock.errors import ModelError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"  # what Llama 3's scaled frequencies are divided by, float32 [head_dim / 2]

# Value types of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md by their number, as `struct` spells them.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9


class GGUFHeader:
    """What a GGUF file says of its model: `metadata` by key, `shapes` by tensor name, the slowest dimension first.

    Raises ModelError for a file that cannot be read, is damaged, or holds no model that is supported.
    """

    def __init__(self, path: Path):
        self.path = path
        self._rope_factor = 1.0
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

    def config(self) -> dict[str, Any]:
        """The content of the Hugging Face `config.json` of this model."""
        hidden, heads = self._key("embedding_length"), self._key("attention.head_count")
        if "token_embd.weight" not in self.shapes:
            raise ModelError(f"{self.path}: the tensor token_embd.weight is missing", works="a complete GGUF file")
        return {
            "model_type": self.architecture,
            "vocab_size": self.shapes["token_embd.weight"][0],
            "hidden_size": hidden,
            "intermediate_size": self._key("feed_forward_length"),
            "num_hidden_layers": self._key("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._key("attention.head_count_kv", heads),
            "head_dim": self._key("attention.key_length", hidden // heads),
            "max_position_embeddings": self._key("context_length"),
            "rms_norm_eps": self._key("attention.layer_norm_rms_epsilon"),
            "attention_bias": self.architecture == "llama" and "blk.0.attn_q.bias" in self.shapes,
            "tie_word_embeddings": "output.weight" not in self.shapes,
            "rope_parameters": self._rope(),
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._ends(),
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
            _, offsets[name] = reader.take("I"), reader.take("Q")
        if ROPE_FACTORS in offsets:
            alignment = self.metadata.get("general.alignment", 32)
            reader.at = -(-reader.at // alignment) * alignment + offsets[ROPE_FACTORS]
            self._rope_factor = max(reader.many("f", self.shapes[ROPE_FACTORS][0]))

    def _key(self, key: str, default: float | None = None) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{self.path}: the key {self.architecture}.{key} is missing", works="a complete GGUF file")
        return value

    def _ends(self) -> list[int]:
        """The ids that end a text: end of sequence, and end of turn where a file names one."""
        ids = [self.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot")]
        return list(dict.fromkeys(index for index in ids if index is not None))

    def _rope(self) -> dict[str, Any]:
        """The position embedding; factors stored as a tensor are Llama 3's, whose largest is its scale."""
        theta = self._key("rope.freq_base", 10_000.0)
        if ROPE_FACTORS in self.shapes:
            return {
                "rope_type": "llama3",
                "rope_theta": theta,
                "factor": round(self._rope_factor, 3),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        kind = self._key("rope.scaling.type", "none")  # type: ignore[arg-type]
        if kind == "none":
            return {"rope_type": "default", "rope_theta": theta}
        scaled = {"rope_type": kind, "rope_theta": theta, "factor": self._key("rope.scaling.factor")}
        if kind == "yarn":
            scaled["original_max_position_embeddings"] = self._key("rope.scaling.original_context_length")
        return scaled


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

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            kind, count = self.take("I"), self.take("Q")
            if kind in SCALARS:
                return list(self.many(SCALARS[kind], count))
            return [self.value(kind) for _ in range(count)]
        return self.take(SCALARS[kind])
