"""GGUF files, converted once into an ordinary Hugging Face folder inside a cache."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from headstock.errors import ModelError
from headstock.models.cache import is_complete, writing
from headstock.models.config import DType, ModelConfig
from headstock.models.shapes import weight_shapes
from headstock.models.weights import INDEX, SINGLE

if TYPE_CHECKING:
    from headstock.models.gguf_file import GGUFFile

VERSION = 1  # part of the cache key: raise it when the folder written for the same file changes
SHARD_BYTES = 2 << 30  # so that memory stays bounded whatever the size of the model

Progress = Callable[[str, int, int], None]
"""(what is being done, steps done, steps in all)."""


def convert(
    path: str | Path, cache_dir: str | Path, dtype: DType = "bfloat16", progress: Progress | None = None
) -> Path:
    """The Hugging Face folder of a GGUF file, its weights in `dtype`; written on the first call, found on the next.

    A folder appears under its final name only when complete (several processes may convert at once), is found again
    as long as the file keeps its path, size and time, and is written anew where a part of it is gone. Raises ModelError
    for a file that is missing, damaged, or of an architecture, quantisation or tokenizer that is not supported, and for
    a cache that cannot be written.
    """
    source, cache = Path(os.path.realpath(path)), Path(cache_dir)
    folder = cache / _key(source, dtype)
    if not is_complete(folder):
        with writing(folder) as unfinished:
            _write(source, unfinished, dtype, progress)
    return folder


def _key(source: Path, dtype: DType) -> str:
    try:
        status = source.stat()
    except OSError as error:
        raise ModelError(f"cannot read {source}: {error.strerror}", works="a .gguf file") from None
    identity = f"{source}\n{status.st_size}\n{status.st_mtime_ns}\n{VERSION}"
    return f"{source.stem}-{dtype}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def _write(source: Path, folder: Path, dtype: DType, progress: Progress | None) -> None:
    from headstock.models.gguf_file import GGUFFile  # reading GGUF needs a package that a converted model does not
    from headstock.models.gguf_tokenizer import build_tokenizer, tokenizer_config

    if progress:
        progress("reading GGUF", 0, 1)
    file = GGUFFile(source)
    config = file.config() | {"dtype": dtype}
    _check(file, ModelConfig.from_hf(config))  # what could not be loaded is refused before it is written
    contents = {
        "config.json": config,
        "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id")},
        "tokenizer_config.json": tokenizer_config(file.metadata),
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer.json").write_text(build_tokenizer(file.metadata).to_str(pretty=True), encoding="utf-8")
    _write_weights(folder, _converted(file, getattr(torch, dtype), progress))


def _check(file: GGUFFile, config: ModelConfig) -> None:
    expected, found = weight_shapes(config), file.hf_shapes()
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            given = f"{list(found[name])}" if name in found else "no such tensor"
            works = f"{list(expected[name])}" if name in expected else "none"
            raise ModelError(f"{file.path}: {name} is not what the file's own keys ask for", given=given, works=works)


def _converted(file: GGUFFile, dtype: torch.dtype, progress: Progress | None) -> Iterator[tuple[str, Tensor]]:
    for done, (name, tensor) in enumerate(file.weights(), start=1):
        yield name, tensor.to(dtype)
        if progress:
            progress("converting GGUF", done, len(file.names))


def _write_weights(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """One `model.safetensors`, or shards and their index where the model is larger than a shard."""
    shards: list[list[str]] = []
    for number, shard in enumerate(_shards(tensors), start=1):
        name = f"model-{number:05}.safetensors"
        try:
            save_file(shard, folder / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{name}: {error}") from None  # it is one, of writing
        shards.append(list(shard))
    if len(shards) == 1:
        (folder / "model-00001.safetensors").rename(folder / SINGLE)
        return
    listed = {name: f"model-{number:05}.safetensors" for number, names in enumerate(shards, 1) for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}), encoding="utf-8")


def _shards(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Group tensors into shards of about SHARD_BYTES, holding one shard in memory."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard
