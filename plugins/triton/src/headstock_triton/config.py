"""Kernel configurations: measured ones from a table, others by rule, all made to fit the GPU's shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headstock import BackendSpec
from headstock_triton.launch import KERNELS
from headstock_triton.table import table

SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KiB of shared memory that one program can have, by compute capability; the interpreter has no limit."""


@dataclass(frozen=True, slots=True)
class Config:
    """How a tile of `block_m` (token, head) pairs is worked on: keys at a time, warps, loads in flight, and splitting.

    `programs` per multiprocessor is what keys are split for, `keys` the fewest that a split is worth; `resident` are
    the most that one holds at once. Splits of latents are merged `merged` rows at a time. `registers` bounds those of a
    thread, so that two programs fit side by side and one computes while the other takes exponents; 0 is no bound.
    `kernel` names one that is for such tiles alone, faster where it is `able`; the other numbers are those of the
    kernel that does the rest.
    """

    block_m: int
    block_n: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 2
    keys: int = 256
    resident: int = 2
    merged: int = 2
    registers: int = 0
    kernel: str = ""


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

    `filled` tells whether the tiles alone, unsplit, give every multiprocessor something to do; of narrow ones there are
    two to choose from then (see `Shape.narrow`).
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
        for entry in table()["entries"]
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
    return _fit(Config(wanted, warps=8 if wanted >= 128 else 4), spec)


def able(spec: BackendSpec, config: Config) -> bool:
    """Whether the kernel that a configuration names is here, and can serve some of an instance's batches.

    These kernels have loads put keys where products read them: none is converted or padded on its way, and a page is a
    part of a tile or whole tiles. They have no windows, caps and biases. Which of two kernels runs may depend on the
    batch, so that an instance whose bits may not has neither.
    """
    size = (spec.head_dim, spec.v_head_dim)
    if config.kernel not in KERNELS or spec.compute_capability != 90 or spec.batch_invariant:
        return False
    as_is = spec.kv_dtype == spec.dtype != "float32"
    if config.kernel == "latent_hopper":
        return as_is and size == (576, 512) and spec.page_size % 64 == 0
    plain = spec.window is None and spec.softcap is None and not spec.alibi
    return as_is and plain and size == (128, 128) and spec.page_size in (8, 16, 32, 64, 128, 256)


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

    One stage has none in flight, that of their page numbers or the one that is worked on. Products of float32 take each
    operand in two parts; of latents, where a tile of 16 rows was seen to take them in one.
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
