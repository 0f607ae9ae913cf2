"""flashinfer-mla: FlashInfer's latent attention for NVIDIA GPUs, absorbed and expanded, in the host's lifecycle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headstock import ANY, Capabilities, Offer, hookimpl

SM_90: dict[str, Any] = {"compute_capability": {90}, "lse": True}
"""Where fa3 runs, whose log-sum-exp is exact. That of fa2 sums weights rounded to 16 bits."""
SM_80: dict[str, Any] = {"compute_capability": range(80, 130)}

COMMON: dict[str, Any] = {
    "preference": 20.0,
    "devices": {"cuda"},
    "dtypes": {"float16", "bfloat16"},
    "non_causal": True,
    "host_lengths": "exact",
}
ABSORBED: dict[str, Any] = COMMON | {
    "attention": {"mla"}, "page_sizes": range(1, 257), "kv_layouts": {"latent"}, "graph": True,
}  # fmt: skip

# Tiles of 64 or 128 (token, head) pairs drop a key from a causal row where heads do not divide them.
CAUSAL: dict[str, Any] = {
    "phases": {"extend", "decode"}, "query_lens": ANY, "num_heads": {1, 2, 4, 8, 16, 32, 64, 128},
}  # fmt: skip
ONE_TOKEN: dict[str, Any] = {"phases": {"decode"}}

ROPE = 64
"""Dimensions of the rotated part: kernels take multiples, and one more does not fit beside the largest rank."""
RANKS = (512, 256)
"""Ranks that fa2, of multiples of 128, and fa3 have in common; but of 128, fa3 of 0.6.18 reads memory not its own."""


def _records() -> Iterator[Capabilities]:
    for rank in RANKS:
        size = {"head_dims": {rank + ROPE}, "v_head_dims": {rank}}
        for gpu, words in ((SM_90, "sm_90"), (SM_80, "from sm_80")):
            yield Capabilities(**ABSORBED | CAUSAL | size | gpu, label=f"rank {rank}, {words}")
            yield Capabilities(**ABSORBED | ONE_TOKEN | size | gpu, label=f"rank {rank}, one token, {words}")
    expanded = {"phases": {"extend"}, "attention": {"ragged"}, "head_dims": {192}, "v_head_dims": {128}}
    yield Capabilities(**COMMON | expanded | SM_90, label="expanded")


CAPABILITIES = tuple(_records())
OFFER = Offer(
    name="flashinfer-mla",
    backend="headstock_flashinfer_mla.backend:FlashInferMLA",
    capabilities=CAPABILITIES,
    options="headstock_flashinfer_mla.choice:Options",
)


@hookimpl
def attention_backends() -> list[Offer]:
    """The one backend of this plugin."""
    return [OFFER]


@hookimpl
def doctor_facts() -> dict[str, str]:
    """The version, what chose the kernels, and the compiled modules."""
    from headstock_flashinfer_mla.compile import facts

    return facts()
