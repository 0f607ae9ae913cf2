"""flashinfer: FlashInfer's attention kernels for NVIDIA GPUs, paged and ragged, in the host's lifecycle."""

from __future__ import annotations

from typing import Any

from headstock import ANY, Capabilities, Offer, hookimpl

CUDA_CORE_GROUPS = frozenset({1, 2, 3, 4, 6, 8})
"""Query heads per key head that decode on CUDA cores is compiled for, in every supported version."""

# FlashInfer ignores without a word: sinks in its plain wrappers, scales in the ragged one, windows in the levels of a
# cascade, heads that are no multiple of 64. Sinks are applied from the log-sum-exp, levels of a windowed batch are read
# row by row, and the rest is not declared. Its ALiBi has slopes of its own.
COMMON: dict[str, Any] = {
    "preference": 10.0,
    "devices": {"cuda"},
    "compute_capability": range(80, 130),
    "dtypes": {"float16", "bfloat16"},
    "head_dims": {64, 128, 256},
    "sliding_window": True,
    "softcap": True,
    "sinks": True,
    "non_causal": True,
    "host_lengths": "exact",
}
PAGED: dict[str, Any] = COMMON | {
    "phases": {"extend", "decode"},
    "attention": {"paged"},
    "page_sizes": range(1, 257),
    "kv_layouts": {"nhd", "hnd"},
    "kv_dtypes": {"same", "float8_e4m3fn", "float8_e5m2"},
    "kv_scales": True,
    "query_lens": ANY,
}
RAGGED: dict[str, Any] = COMMON | {"phases": {"extend"}, "attention": {"ragged"}}
EXPANDED: dict[str, Any] = RAGGED | {"head_dims": {192}, "v_head_dims": {128}}
# Log-sum-exp is declared where it is exact: fa2 sums weights that it has rounded, fa3 and CUDA cores do not.
FA3_LSE: dict[str, Any] = {"compute_capability": {90}, "lse": True}
CUDA_CORES: dict[str, Any] = {"phases": {"decode"}, "query_lens": {1}, "gqa_ratios": CUDA_CORE_GROUPS}

CAPABILITIES = (
    Capabilities(**PAGED | {"label": "paged", "cascade": True, "graph": True}),
    Capabilities(**PAGED | {"label": "tree", "query_mask": True}),
    # Extend has tiles by the average length of a batch, and captured graphs have splits by its size.
    Capabilities(**PAGED | {"label": "invariant", "phases": {"decode"}, "batch_invariant": True}),
    Capabilities(**PAGED | CUDA_CORES | {"label": "decode with lse", "lse": True, "graph": True}),
    Capabilities(**PAGED | FA3_LSE | {"label": "paged with lse", "kv_dtypes": {"same"}}),
    Capabilities(**RAGGED | {"label": "ragged"}),
    Capabilities(**RAGGED | FA3_LSE | {"label": "ragged with lse"}),
    Capabilities(**EXPANDED | {"label": "expanded MLA"}),
    Capabilities(**EXPANDED | FA3_LSE | {"label": "expanded MLA with lse"}),
)

OFFER = Offer(
    name="flashinfer",
    backend="headstock_flashinfer.backend:FlashInferAttention",
    capabilities=CAPABILITIES,
    options="headstock_flashinfer.options:Options",
)


@hookimpl
def attention_backends() -> list[Offer]:
    """The one backend of this plugin."""
    return [OFFER]


@hookimpl
def doctor_facts() -> dict[str, str]:
    """The version, the compiled modules, and what could compile more."""
    from headstock_flashinfer.facts import facts

    return facts()
