"""What a model folder says about its model, checked and normalised, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from headstock.models.deepseek_config import MLAConfig, MoEConfig, read_deepseek
from headstock.models.folder import check_folder
from headstock.models.record import Factor, Record, Size, bad_config, parse, read_json
from headstock.models.rope_config import RopeConfig, read_ropes

DType = Literal["float32", "float16", "bfloat16"]


class LayerShape(Record):
    """The attention of one layer: what a backend must be able to compute there.

    `window` counts the keys a query sees, itself included (None: all); `softcap` is None where logits are not capped.
    `latent` is None but for latent attention, where it is (R, P), the parts of the vector that is cached per token in
    place of keys and values: compressed, and rotated. The other fields tell then of attention as it is expanded.
    """

    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    v_head_dim: Size
    scale: float
    window: Size | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    latent: tuple[Size, Size] | None = None

    @property
    def absorbed(self) -> LayerShape:
        """The same attention in the latent space: one key head of R + P numbers, the first R its values as well."""
        assert self.latent is not None, "asked of latent attention"
        dims = {"head_dim": sum(self.latent), "v_head_dim": self.latent[0]}
        return self.model_copy(update={"num_kv_heads": 1, **dims})


class ModelConfig(Record):
    """A causal language model as numbers: enough to plan memory and to negotiate, before any weight is read.

    `max_context` is in tokens; `eos_token_ids` come from `generation_config.json` where a folder has one. Layers with a
    window have a rope of their own where there is a `local_rope`; `output_norms` are those of what attention and the
    feed-forward layer add to the residual. `mla` and `moe` are None but for models with latent attention
    and with experts. `spare_layers` are those that a checkpoint holds behind the model's own, which are not run.
    """

    architecture: str
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_layers: Size
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    max_context: Size
    rms_norm_eps: Factor
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    output_norms: bool = False
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    spare_layers: Annotated[int, Field(ge=0)] = 0
    dtype: DType = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    layers: tuple[LayerShape, ...]

    def has_experts(self, index: int) -> bool:
        """Whether a layer is a mixture of experts."""
        return self.moe is not None and index >= self.moe.first_layer

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` (and the end-of-text ids of `generation_config.json`) of a Hugging Face folder.

        Raises ModelError when the folder or a field is missing, malformed or not supported.
        """
        folder = Path(path)
        check_folder(folder)
        raw = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        eos = read_json(generation).get("eos_token_id") if generation.exists() else None
        return cls.from_hf(raw if eos is None else {**raw, "eos_token_id": eos})

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> ModelConfig:
        """Translate the content of a Hugging Face `config.json`; raises ModelError for what is not supported."""
        family = _family(raw)
        hf = parse(_HuggingFaceConfig, {**family.defaults, **raw})
        heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads or hf.num_attention_heads
        mla, moe = read_deepseek(raw) if family.latent else (None, None)
        if mla is not None:
            head_dim = mla.head_dim
        else:
            head_dim = hf.head_dim or _divide(hf.hidden_size, heads, "hidden_size", "num_attention_heads")
        _divide(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
        if mla is None and head_dim % 2:
            given = f"head_dim={head_dim}, hidden_size={hf.hidden_size}, num_attention_heads={heads}"
            raise bad_config("rotary embeddings need an even head_dim", given=given)
        if hf.dtype and hf.torch_dtype and hf.dtype != hf.torch_dtype:
            raise bad_config("dtype and torch_dtype disagree", f"{hf.dtype}, {hf.torch_dtype}", "one of the two")
        bias = hf.attention_bias and family.reads_attention_bias
        rope, local_rope = read_ropes(raw, hf.max_position_embeddings, family.thetas)
        shape = LayerShape(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=head_dim if mla is None else mla.v_dim,
            scale=(hf.query_pre_attn_scalar or head_dim) ** -0.5 * (1.0 if mla is None else rope.softmax_factor),
            latent=None if mla is None else (mla.kv_rank, mla.rope_dim),
        )
        return cls(
            architecture=family.architecture,
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_context=hf.max_position_embeddings,
            rms_norm_eps=hf.rms_norm_eps,
            rope=rope,
            local_rope=local_rope,
            tie_embeddings=hf.tie_word_embeddings,
            attention_bias=bias or family.attention_bias,
            output_bias=bias,
            mlp_bias=hf.mlp_bias and family.reads_mlp_bias,
            qk_norm=family.qk_norm,
            output_norms=family.output_norms,
            mla=mla,
            moe=moe,
            spare_layers=hf.num_nextn_predict_layers if family.latent else 0,
            dtype=hf.dtype or hf.torch_dtype or "float32",
            bos_token_id=hf.bos_token_id,
            eos_token_ids=hf.eos_token_id,
            layers=tuple(shape.model_copy(update={"window": window}) for window in _windows(family, hf)),
        )


class _Family(NamedTuple):
    """What a `model_type` fixes in its code rather than in its config."""

    architecture: str
    window: Literal["never", "always", "by layer", "by pattern"] = "never"
    attention_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    output_norms: bool = False
    latent: bool = False
    thetas: tuple[float, float] | None = None  # of full and of windowed layers, where these have a rope of their own
    defaults: Mapping[str, Any] = {}  # of keys for which transformers has other defaults than those below


FAMILIES = {
    "llama": _Family("LlamaForCausalLM", reads_attention_bias=True, reads_mlp_bias=True),
    "mistral": _Family("MistralForCausalLM", window="always"),
    "qwen2": _Family("Qwen2ForCausalLM", window="by layer", attention_bias=True),
    "qwen3": _Family("Qwen3ForCausalLM", window="by layer", reads_attention_bias=True, qk_norm=True,
                     defaults={"head_dim": 128}),
    "deepseek_v2": _Family("DeepseekV2ForCausalLM", reads_attention_bias=True, latent=True),
    "deepseek_v3": _Family("DeepseekV3ForCausalLM", reads_attention_bias=True, latent=True),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM", window="by pattern", reads_attention_bias=True, qk_norm=True, output_norms=True,
        thetas=(1e6, 1e4), defaults={"head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True},
    ),
}  # fmt: skip


def _as_ids(value: Any) -> Any:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _bare(name: Any) -> Any:
    return name.removeprefix("torch.") if isinstance(name, str) else name


class _HuggingFaceConfig(BaseModel):
    """The keys read from `config.json`, with the defaults that transformers gives them."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Field(gt=0, le=4096)]
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    max_position_embeddings: Size
    rms_norm_eps: Factor = 1e-6
    hidden_act: Literal["silu"] = "silu"
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"  # Gemma's name for it, and its only one
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Size | None = 4096
    use_sliding_window: bool = False
    max_window_layers: Annotated[int, Field(ge=0)] = 28
    sliding_window_pattern: Size = 6
    query_pre_attn_scalar: Factor | None = None
    attn_logit_softcapping: None = None
    final_logit_softcapping: None = None
    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=4096)] = 0  # for speculation, behind the model's own
    use_bidirectional_attention: Literal[False] | None = None
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    dtype: Annotated[DType | None, BeforeValidator(_bare)] = None
    torch_dtype: Annotated[DType | None, BeforeValidator(_bare)] = None  # its name before transformers 5
    bos_token_id: int | None = None
    eos_token_id: Annotated[tuple[int, ...], BeforeValidator(_as_ids)] = ()


def _family(raw: dict[str, Any]) -> _Family:
    """The family of a config, refusing what no field of ModelConfig could express."""
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        given = f"model_type={raw.get('model_type')!r}"
        raise bad_config("this model_type is not supported", given=given, works=", ".join(FAMILIES))
    named = raw.get("architectures") or []
    if not isinstance(named, list):
        raise bad_config("architectures must be a list", f"{named!r:.80}", f'["{family.architecture}"]')
    if named and family.architecture not in named:
        given = f"architectures={named!r}"
        raise bad_config("not a causal language model", given=given, works=family.architecture)
    if raw.get("quantization_config"):
        method = raw["quantization_config"]
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        works = "the model's unquantised weights (float32, float16 or bfloat16)"
        raise bad_config("quantised weights are not supported", given=f"quant_method={method!r}", works=works)
    return family


def _divide(whole: int, part: int, whole_name: str, part_name: str) -> int:
    if whole % part:
        given = f"{whole_name}={whole}, {part_name}={part}"
        raise bad_config(f"{whole_name} must be a multiple of {part_name}", given=given)
    return whole // part


def _windows(family: _Family, hf: _HuggingFaceConfig) -> list[int | None]:
    """The window of each layer. In transformers as here a window of w shows w keys: `query - w < key <= query`."""
    used = family.window != "never" and (family.window != "by layer" or hf.use_sliding_window)
    window = hf.sliding_window if used else None
    if window is None and family.window == "by pattern":
        raise bad_config("sliding_window is null", works="the window of the model's windowed layers")

    def windowed(index: int) -> bool:
        if family.window == "by pattern":
            return (index + 1) % hf.sliding_window_pattern != 0
        return family.window == "always" or index >= hf.max_window_layers

    kinds = [
        "full_attention" if window is None or not windowed(i) else "sliding_attention"
        for i in range(hf.num_hidden_layers)
    ]
    if hf.layer_types is not None and hf.layer_types != kinds:
        if (
            family.window in ("never", "always")
            or len(hf.layer_types) != len(kinds)
            or (window is None and "sliding_attention" in hf.layer_types)
        ):
            given = f"layer_types={hf.layer_types}, num_hidden_layers={len(kinds)}, sliding_window={window}"
            raise bad_config("layer_types contradicts the layers and the window", given=given)
        kinds = list(hf.layer_types)
    return [window if kind == "sliding_attention" else None for kind in kinds]
