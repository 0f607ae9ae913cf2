"""Which of FlashInfer's kernels serves what: from a committed table of measurements, or as the options say.

Free of torch and of FlashInfer, so that it can be asked on any machine. FlashInfer's own "auto" is never used: an
upgrade of it could then change the kernel, and with it the speed and the bits, without a word.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from headstock import BackendSpec, HeadstockError
from headstock_flashinfer import CUDA_CORE_GROUPS
from headstock_flashinfer.options import Options

Prefill = Literal["fa2", "fa3"]

FA3_HEAD_DIMS = frozenset({(64, 64), (128, 128), (256, 256), (192, 128)})
"""Sizes of query and value heads that fa3 is instantiated for."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernels of one instance, by use.

    `decode`: on tensor cores it is the fa2 prefill module, on CUDA cores the decode module; fa3 has no decode, and is
    paged extend of a few tokens. `prefill` is paged extend, cross attention included; `ragged` has keys that lie
    together. `extend` tells how new tokens attend to a cached prefix: in one paged call, or split in a ragged and a
    paged one. Levels of shared prefixes are always fa2, for fa3 does not split keys, and a level has few rows and many
    keys. So are decode batches that the decode wrapper cannot serve.
    """

    decode: Literal["tensor-cores", "cuda-cores", "fa3"]
    prefill: Prefill
    ragged: Prefill
    extend: Literal["paged", "split"]


def choose(spec: BackendSpec) -> Choice:
    """The kernels for `spec`, whose options are `Options` or None.

    Raises HeadstockError where the options name a kernel that cannot do what `spec` asks.
    """
    options = spec.options if isinstance(spec.options, Options) else Options()
    return Choice(**{use: _kernel(use, getattr(options, use), spec) for use in Choice.__slots__})


def _kernel(use: str, wanted: str, spec: BackendSpec) -> Any:
    if wanted != "auto":
        if lack := lacks(wanted, spec, use):
            raise HeadstockError(
                f"FlashInfer's {wanted} cannot serve {use} here", given=lack, works="auto",
                type=f"--backend-option flashinfer.{use}=auto",
            )  # fmt: skip
        return wanted
    entries = {entry["kernel"]: lacks(entry["kernel"], spec, use) for entry in _entries(use, spec)}
    for kernel, lack in entries.items():
        if not lack:
            return kernel
    raise HeadstockError(
        f"FlashInfer has no kernel for {use} here",
        given="; ".join(f"{kernel} lacks {lack}" for kernel, lack in entries.items()),
    )


def lacks(kernel: str, spec: BackendSpec, use: str) -> str:
    """What `kernel` cannot do of what `spec` asks of it in this use, in words; empty where it can."""
    heads = (spec.head_dim, spec.v_head_dim)
    if kernel in ("fa2", "tensor-cores"):
        # fa2 rounds the weights of the softmax to 16 bits before it sums them (`compute_sfm_v` in prefill.cuh: vec_cast
        # to DTypeQ, then mma::m16k16_rowsum_f16f16f32), so its log-sum-exp is off by up to 1e-3. fa3 (`reduce_sum` in
        # hopper/attention_updater.cuh) and CUDA cores (`st.d += s[j]` in decode.cuh) sum in float32.
        return _first((_tells_lse(use, spec), "an exact log-sum-exp: it sums weights rounded to 16 bits"))
    if kernel == "cuda-cores":
        group = spec.num_heads // spec.num_kv_heads
        return _first(
            (group not in CUDA_CORE_GROUPS, f"{group} query heads per key head"),
            (spec.query_lens != {1}, f"query lengths {sorted(spec.query_lens)}"),
            (spec.query_mask, "a mask among new tokens"),
            (spec.batch_invariant, "batch invariance"),
        )
    if kernel == "fa3":
        return _first(
            (spec.compute_capability != 90, f"sm_{spec.compute_capability}, it runs on sm_90"),
            (heads not in FA3_HEAD_DIMS, f"heads of {heads[0]} and {heads[1]}"),
            (spec.kv_dtype != spec.dtype, f"a cache of {spec.kv_dtype} with queries of {spec.dtype}"),
            (spec.query_mask, "a mask among new tokens"),
            (spec.batch_invariant, "batch invariance"),
            (use == "decode" and bool(spec.graph_buckets), "device graphs of decode"),
        )
    if kernel == "split":
        return _first(
            (spec.kv_dtype != spec.dtype, "a cache that rounds what it stores"),
            (spec.window is not None, "a sliding window"),
            (spec.query_mask, "a mask among new tokens"),
            (spec.batch_invariant, "batch invariance"),
        )
    return ""


def _tells_lse(use: str, spec: BackendSpec) -> bool:
    """Whether log-sum-exp is asked of what serves this use, and the use at all."""
    phase = {"decode": "decode", "prefill": "extend", "ragged": "extend"}[use]
    return spec.lse and phase in spec.phases and (use == "ragged" or spec.attention == "paged")


def _first(*reasons: tuple[bool, str]) -> str:
    return next((words for holds, words in reasons if holds), "")


def _entries(use: str, spec: BackendSpec) -> Iterator[dict[str, Any]]:
    """The table's entries for a use that are about such a GPU and such heads, in order."""
    for entry in _table()["entries"]:
        capabilities, dims = entry.get("compute_capability"), entry.get("head_dims")
        if (
            entry["use"] == use
            and (capabilities is None or spec.compute_capability in capabilities)
            and (dims is None or spec.head_dim in dims)
        ):
            yield entry


def origin() -> str:
    """Where the table was measured, in words."""
    return f"choice.json, measured on {_table()['hardware']} with FlashInfer {_table()['version']}"


@cache
def _table() -> dict[str, Any]:
    text = resources.files("headstock_flashinfer").joinpath("choice.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
