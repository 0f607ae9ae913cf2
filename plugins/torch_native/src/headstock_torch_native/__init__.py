"""torch-native: attention in plain PyTorch, on any device, for every kind and axis of the contract."""

from __future__ import annotations

from typing import Any

from headstock import ANY, Capabilities, Offer, hookimpl

COMMON: dict[str, Any] = {
    "preference": -0.5,  # who brings kernels of their own is quicker, where nothing was measured
    "devices": {"cpu", "cuda"},
    "attention": {"paged", "ragged"},
    "dtypes": {"float32", "float16", "bfloat16", "float64"},
    "head_dims": ANY,
    "v_head_dims": ANY,
    "page_sizes": ANY,
    "kv_layouts": {"nhd", "hnd"},
    "kv_dtypes": {"same", "float8_e4m3fn", "float8_e5m2"},
    "kv_scales": True,
    "sliding_window": True,
    "softcap": True,
    "sinks": True,
    "alibi": True,
    "non_causal": True,
    "query_mask": True,
    "cascade": True,
    "lse": True,
}


LATENT: dict[str, Any] = {"attention": {"mla"}, "kv_layouts": {"latent"}}
EXTEND: dict[str, Any] = {"phases": {"extend"}, "host_lengths": "exact"}
DECODE: dict[str, Any] = {"phases": {"decode"}, "host_lengths": "bound", "query_lens": ANY}

# Extend walks over requests on the host; decode is batched.
OFFER = Offer(
    name="torch-native",
    aliases=("torch",),
    backend="headstock_torch_native.backend:TorchNative",
    capabilities=(
        Capabilities(**COMMON | EXTEND),
        Capabilities(**COMMON | DECODE),
        Capabilities(**COMMON | LATENT | EXTEND, label="latent extend"),
        Capabilities(**COMMON | LATENT | DECODE, label="latent decode"),
    ),
)


@hookimpl
def attention_backends() -> list[Offer]:
    """The one backend of this plugin."""
    return [OFFER]
