"""Kernel configurations: measured ones from a table, others by rule, all made to fit the GPU's shared memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from headstock import BackendSpec

SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KiB of shared memory that one program can have, by compute capability; the interpreter has no limit."""


@dataclass(frozen=True, slots=True)
class Config:
    """How a tile of `block_m` (token, head) pairs is worked on: keys at a time, warps, loads in flight, and splitting.

    `programs` per multiprocessor is what keys are split for, `keys` the fewest that a split is worth. Splits of latents
    are merged `merged` rows at a time. `registers` bounds those of a thread, so that two programs fit side by side and
    one computes while the other takes exponents; 0 is no bound.
    """

    block_m: int
    block_n: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 2
    keys: int = 256
    merged: int = 2
    registers: int = 0


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and `least`."""
    return max(1 << (n - 1).bit_length(), least)


def padded(spec: BackendSpec) -> int:
    """Elements of a key as it is loaded: a power of two, or of a latent two, for what is value too and for the rope."""
    if spec.attention != "mla":
        return power_of_two(spec.head_dim, 16)
    return power_of_two(spec.v_head_dim, 16) + power_of_two(spec.head_dim - spec.v_head_dim, 16)


def find(spec: BackendSpec, pairs: int, most: int = 128, filled: bool = True) -> Config:
    """The configuration for tiles of up to `pairs` (token, head) pairs, `most` at a time.

    `filled` tells whether the tiles alone, unsplit, give every multiprocessor something to do.
    """
    if spec.device == "cpu":
        return Config(min(power_of_two(pairs, 16), 32), block_n=16, stages=1, programs=1, keys=16)
    latent, itemsize = spec.attention == "mla", _itemsize(spec.kv_dtype)
    if latent and padded(spec) > 256:  # a tile's outputs stay in registers
        most = min(most, 16 if spec.dtype == "float32" else 64)
    wanted = min(power_of_two(pairs, 16), 64 if spec.dtype == "float32" else most)
    width = max(padded(spec), power_of_two(spec.v_head_dim, 16))
    measured = [
        entry
        for entry in _table()
        if (entry["head_dim"], entry["itemsize"], entry["block_m"]) == (width, itemsize, wanted)
        and entry["latent"] == latent
        and entry["compute_capability"] == spec.compute_capability
        and spec.page_size in entry["page_sizes"]
        and entry["filled"] in (filled, None)
    ]
    names = Config.__dataclass_fields__
    if measured:
        return _fit(Config(**{name: measured[0][name] for name in names if name in measured[0]}), spec)
    if latent:
        heavy = wanted * padded(spec) > 128 * 128
        keys = 64 if wanted == 32 else 32  # unless they outnumber rows, warps do the same products
        return _fit(Config(wanted, keys, 8 if heavy else 4, 5, 1 if heavy else 2, 128), spec)
    return _fit(Config(wanted, warps=8 if wanted >= 128 else 4, stages=3 if wanted >= 64 else 5), spec)


def _fit(config: Config, spec: BackendSpec) -> Config:
    """The configuration with as few loads in flight, and then keys at a time, as shared memory asks for."""
    near = max((known for known in SHARED_MEMORY if known <= (spec.compute_capability or 86)), default=86)
    limit = SHARED_MEMORY[near] * 1024
    while shared_bytes(config, spec) > limit:
        if config.stages > 2:
            config = replace(config, stages=config.stages - 1)
        elif config.block_n > 16:
            config = replace(config, block_n=config.block_n // 2)
        elif config.stages > 1:
            config = replace(config, stages=1)
        elif config.block_m > 16:
            config = replace(config, block_m=config.block_m // 2)
        else:
            break
    return config


def shared_bytes(config: Config, spec: BackendSpec) -> int:
    """An upper bound on a program's shared memory: keys and values in flight, and the operands of products.

    A load begins a stage after that of its page number, so one stage of them fewer is in flight. Products of float32
    take each operand in two parts; of latents, where a tile of 16 rows was seen to take them in one.
    """
    d, dv = padded(spec), 0 if spec.attention == "mla" else power_of_two(spec.v_head_dim, 16)
    itemsize, kv_itemsize = _itemsize(spec.dtype), _itemsize(spec.kv_dtype)
    in_flight = max(config.stages - 1, 1)
    if spec.attention == "mla":  # page numbers have half of the stages, and a wide tile is read by products in flight
        in_flight = max((config.stages - 1) // 2 + (config.block_m >= 64), 2 if config.block_m >= 64 else 1)
    loads = in_flight * config.block_n * (d + dv) * kv_itemsize
    converted = config.block_n * (d + dv) * itemsize if kv_itemsize != itemsize or itemsize == 4 else 0
    operands = converted + config.block_m * (d + config.block_n) * itemsize
    parts = 2 if itemsize == 4 and (spec.attention != "mla" or config.block_m > 16) else 1
    return loads + parts * operands + 256  # page numbers


def _itemsize(dtype: str) -> int:
    return {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 1)


@cache
def _table() -> list[dict[str, Any]]:
    text = resources.files("headstock_triton").joinpath("configs.json").read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = json.loads(text)["entries"]
    return entries
