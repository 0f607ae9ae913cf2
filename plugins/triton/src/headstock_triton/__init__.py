"""triton: attention in Triton for NVIDIA GPUs, for every kind and axis of the contract."""

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

# No MLA model has windows, caps or biases.
LATENT: dict[str, Any] = {
    "attention": {"mla"}, "kv_layouts": {"latent"}, "head_dims": range(1, 641), "v_head_dims": range(1, 513),
    "sliding_window": False, "softcap": False, "alibi": False,
}  # fmt: skip
HALF: dict[str, Any] = {"dtypes": {"float16", "bfloat16"}}
FLOAT32: dict[str, Any] = {"dtypes": {"float32"}, "head_dims": range(1, 321), "v_head_dims": range(1, 257)}

# Triton generates code from sm_80 on, and reads FP8 from sm_89 on. Wider float32 latents do not fit the smaller GPUs.
SM_89: dict[str, Any] = FP8 | {"compute_capability": range(89, 130)}
SM_80: dict[str, Any] = {"compute_capability": range(80, 89)}
OFFER = Offer(
    name="triton",
    backend="headstock_triton.backend:TritonAttention",
    capabilities=(
        Capabilities(**COMMON | SM_89, label="from sm_89"),
        Capabilities(**COMMON | SM_80, label="from sm_80"),
        Capabilities(**COMMON | LATENT | FLOAT32 | SM_89, label="float32 latents, from sm_89"),
        Capabilities(**COMMON | LATENT | FLOAT32 | SM_80, label="float32 latents, from sm_80"),
        Capabilities(**COMMON | LATENT | HALF | SM_89, label="latents, from sm_89"),
        Capabilities(**COMMON | LATENT | HALF | SM_80, label="latents, from sm_80"),
    ),
)

INTERPRETER: dict[str, Any] = {"devices": {"cpu"}, "dtypes": {"float32", "float16"}}

# What the same kernels can do in Triton's interpreter, whose bfloat16 is wrong. It is there to test them without a GPU,
# far too slow to be offered to anybody.
INTERPRETED = Offer(
    name="triton-interpreted",
    backend="headstock_triton.backend:TritonAttention",
    capabilities=(Capabilities(**COMMON | FP8 | INTERPRETER), Capabilities(**COMMON | FP8 | LATENT | INTERPRETER)),
)


@hookimpl
def attention_backends() -> list[Offer]:
    """The one backend of this plugin."""
    return [OFFER]
