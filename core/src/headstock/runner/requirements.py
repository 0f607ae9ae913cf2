"""What a model asks of backends: its layers sorted into groups, and a requirement per group and role. Torch-free."""

from __future__ import annotations

from headstock.backend import AttentionKind, BackendSpec, GraphBucket, Phase
from headstock.models.config import LayerShape, ModelConfig
from headstock.policy import Mode
from headstock.requirement import Requirement, Role
from headstock.vocabulary import CACHED, DEVICES, DTYPES, check_known

ROLES: tuple[tuple[Role, Phase, AttentionKind], ...] = (
    ("extend", "extend", "paged"),
    ("decode", "decode", "paged"),
)
"""The roles of a decoder-only model with a paged cache, with their phases and kinds of attention."""

LATENT_ROLES: tuple[tuple[Role, Phase, AttentionKind], ...] = (
    ("extend", "extend", "mla"),
    ("expand", "extend", "ragged"),
    ("decode", "decode", "mla"),
)
"""Those of one with a latent cache: new tokens may be attended to in either form, one of which is enough."""


def layer_groups(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Layer indices by group, a group being the layers that agree on every axis; "all" where there is one group."""
    shapes: dict[LayerShape, list[int]] = {}
    for index, shape in enumerate(config.layers):
        shapes.setdefault(shape, []).append(index)
    if len(shapes) == 1:
        return {"all": tuple(range(config.num_layers))}
    groups: dict[str, tuple[int, ...]] = {}
    for shape, layers in shapes.items():
        name = f"window-{shape.window}" if shape.window else "full"
        groups[name if name not in groups else f"{name}-{layers[0]}"] = tuple(layers)
    return groups


def requirements(
    config: ModelConfig,
    *,
    device: str,
    compute_capability: int | None = None,
    dtype: str,
    kv_dtype: str | None = None,
    max_context: int | None = None,
    kv_scales: bool = False,
    graph: Mode = "off",
    cascade: Mode = "off",
) -> list[Requirement]:
    """One requirement per (layer group, role).

    `device` is a torch device type ("cpu", "cuda"), `compute_capability` major × 10 + minor where it has one; dtypes
    are torch's names, the cache's being the model's by default. `max_context` is in tokens, the model's own by default.
    Decoding wishes for `graph` where it is "auto", but on a CPU, which has none, and asks for it where it is "on"; so
    does decoding without a window for `cascade`. Raises HeadstockError for a device type or dtype that torch has not.
    """
    check_known("device", device, DEVICES)
    check_known("dtype", dtype, DTYPES)
    check_known("dtype of the KV cache", kv_dtype or dtype, CACHED)
    needs = []
    for group, layers in layer_groups(config).items():
        whole = config.layers[layers[0]]
        for role, phase, attention in LATENT_ROLES if whole.latent else ROLES:
            shape = whole.absorbed if attention == "mla" else whole
            expands = role == "expand"
            decodes = phase == "decode"
            modes = {
                "graph": graph if decodes else "off",
                "cascade": cascade if decodes and not shape.window else "off",
            }
            if device == "cpu" and graph == "auto":
                modes["graph"] = "off"
            needs.append(
                Requirement(
                    group=group,
                    role=role,
                    phase=phase,
                    attention=attention,
                    layers=len(layers),
                    either="extend" if whole.latent and not decodes else None,
                    wishes=tuple(feature for feature, mode in modes.items() if mode == "auto"),
                    device=device,
                    compute_capability=compute_capability,
                    dtype=dtype,
                    head_dim=shape.head_dim,
                    v_head_dim=shape.v_head_dim,
                    num_heads=shape.num_heads,
                    num_kv_heads=shape.num_kv_heads,
                    max_context=max_context or config.max_context,
                    kv_dtype=dtype if expands else kv_dtype or dtype,
                    sliding_window=shape.window,
                    softcap=shape.softcap,
                    sinks=shape.sinks,
                    alibi=shape.alibi,
                    non_causal=expands,  # a chunk of the prefix is seen by all
                    lse=expands,
                    graph=modes["graph"] == "on",
                    cascade=modes["cascade"] == "on",
                    kv_scales=kv_scales and not expands,
                    query_lens=frozenset({1}) if phase == "decode" else None,
                )
            )
    return needs


def backend_spec(
    needs: list[Requirement],
    shape: LayerShape,
    *,
    device: str,
    num_sms: int,
    max_batch: int,
    max_tokens: int,
    max_plans: int = 1,
    max_levels: int = 0,
    graph_buckets: tuple[GraphBucket, ...] = (),
    options: object = None,
) -> BackendSpec:
    """The spec of one instance, which serves all of `needs`: settled requirements of one group and attention kind."""
    need = needs[0]
    return BackendSpec(
        device=device,
        compute_capability=need.compute_capability,
        num_sms=num_sms,
        attention=need.attention,
        phases=frozenset(each.phase for each in needs),
        dtype=need.dtype,
        kv_dtype=need.kv_dtype,
        num_heads=need.num_heads,
        num_kv_heads=need.num_kv_heads,
        head_dim=need.head_dim,
        v_head_dim=need.v_head_dim,
        scale=shape.scale,
        window=need.sliding_window,
        softcap=need.softcap,
        sinks=need.sinks,
        alibi=need.alibi,
        non_causal=need.non_causal,
        lse=need.lse,
        page_size=need.page_size or 0,
        kv_layout=need.kv_layout or "",
        max_batch=max_batch,
        max_tokens=max_tokens,
        max_plans=max_plans,
        max_levels=max_levels,
        graph_buckets=graph_buckets,
        max_context=need.max_context,
        group=need.group,
        options=options,
    )
