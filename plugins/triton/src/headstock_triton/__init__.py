"""triton: attention in Triton for NVIDIA GPUs, for every kind and axis of the contract but MLA."""

from __future__ import annotations

from typing import Any

from headstock import ANY, Capabilities, Offer, hookimpl

COMMON: dict[str, Any] = {
    "devices": {"cuda"},
    "phases": {"extend", "decode"},
    "attention": {"paged", "ragged"},
    "dtypes": {"float32", "float16", "bfloat16"},
    "head_dims": range(1, 257),
    "v_head_dims": range(1, 257),
    "page_sizes": range(1, 257),
    "kv_layouts": {"nhd", "hnd"},
    "sliding_window": True,
    "softcap": True,
    "sinks": True,
    "alibi": True,
    "non_causal": True,
    "query_mask": True,
    "cascade": True,
    "lse": True,
    "graph": True,
    "batch_invariant": True,
    "kv_scales": True,
    "query_lens": ANY,
}
FP8: dict[str, Any] = {"kv_dtypes": {"same", "float8_e4m3fn", "float8_e5m2"}}

# Triton generates code from sm_80 on, and reads FP8 from sm_89 on.
OFFER = Offer(
    name="triton",
    backend="headstock_triton.backend:TritonAttention",
    capabilities=(
        Capabilities(**COMMON | FP8 | {"label": "from sm_89", "compute_capability": range(89, 130)}),
        Capabilities(**COMMON | {"label": "from sm_80", "compute_capability": range(80, 89)}),
    ),
)

# What the same kernels can do in Triton's interpreter, whose bfloat16 is wrong. It is there to test them without a GPU,
# far too slow to be offered to anybody.
INTERPRETED = Offer(
    name="triton-interpreted",
    backend="headstock_triton.backend:TritonAttention",
    capabilities=(Capabilities(**COMMON | FP8 | {"devices": {"cpu"}, "dtypes": {"float32", "float16"}}),),
)


@hookimpl
def attention_backends() -> list[Offer]:
    """The one backend of this plugin."""
    return [OFFER]
