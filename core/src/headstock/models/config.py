"""What a model folder says about its model, checked and normalised, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from headstock.errors import ModelError

RopeType = Literal["default", "linear", "llama3", "yarn"]
DType = Literal["float32", "float16", "bfloat16"]
Size = Annotated[int, Field(gt=0, le=2**31)]
Factor = Annotated[float, Field(gt=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RopeConfig(_Record):
    """The rotary position embedding: its base wavelength and how a longer context stretches it.

    Field names follow `rope_parameters` of Hugging Face transformers; which of them count depends on `rope_type`.
    """

    rope_type: RopeType = "default"
    rope_theta: Factor = 10_000.0
    factor: Factor | None = None
    original_max_position_embeddings: Size | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    attention_factor: Factor | None = None
    beta_fast: Factor = 32.0
    beta_slow: Factor = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class LayerShape(_Record):
    """The attention of one layer: what a backend must be able to compute there.

    `window` counts the keys a query sees, itself included (None: all); `softcap` is None where logits are not capped.
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


class ModelConfig(_Record):
    """A causal language model as numbers: enough to plan memory and to negotiate, before any weight is read.

    `max_context` is in tokens; `eos_token_ids` come from `generation_config.json` where a folder has one.
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
    tie_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: DType = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    layers: tuple[LayerShape, ...]

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` (and the end-of-text ids of `generation_config.json`) of a Hugging Face folder.

        Raises ModelError when the folder or a field is missing, malformed or not supported.
        """
        folder = Path(path)
        raw = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        eos = read_json(generation).get("eos_token_id") if generation.exists() else None
        return cls.from_hf(raw if eos is None else {**raw, "eos_token_id": eos})

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> ModelConfig:
        """Translate the content of a Hugging Face `config.json`; raises ModelError for what is not supported."""
        family = _family(raw)
        hf = _parse(_HuggingFaceConfig, raw)
        heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads or hf.num_attention_heads
        head_dim = hf.head_dim or family.head_dim
        if head_dim is None:
            head_dim = _divide(hf.hidden_size, heads, "hidden_size", "num_attention_heads")
        _divide(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
        if head_dim % 2:
            given = f"head_dim={head_dim}, hidden_size={hf.hidden_size}, num_attention_heads={heads}"
            raise ModelError("config.json: rotary embeddings need an even head_dim", given=given)
        if hf.dtype and hf.torch_dtype and hf.dtype != hf.torch_dtype:
            raise ModelError("config.json: dtype and torch_dtype disagree", given=f"{hf.dtype}, {hf.torch_dtype}")
        bias = hf.attention_bias and family.reads_attention_bias
        shape = LayerShape(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim, scale=head_dim**-0.5
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
            rope=_rope(raw, hf),
            tie_embeddings=hf.tie_word_embeddings,
            attention_bias=bias or family.attention_bias,
            output_bias=bias,
            mlp_bias=hf.mlp_bias and family.reads_mlp_bias,
            qk_norm=family.qk_norm,
            dtype=hf.dtype or hf.torch_dtype or "float32",
            bos_token_id=hf.bos_token_id,
            eos_token_ids=hf.eos_token_id,
            layers=tuple(shape.model_copy(update={"window": window}) for window in _windows(family, hf)),
        )


class _Family(NamedTuple):
    """What a `model_type` fixes in its code rather than in its config."""

    architecture: str
    window: Literal["never", "always", "by layer"] = "never"
    attention_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None


FAMILIES = {
    "llama": _Family("LlamaForCausalLM", reads_attention_bias=True, reads_mlp_bias=True),
    "mistral": _Family("MistralForCausalLM", window="always"),
    "qwen2": _Family("Qwen2ForCausalLM", window="by layer", attention_bias=True),
    "qwen3": _Family("Qwen3ForCausalLM", window="by layer", reads_attention_bias=True, qk_norm=True, head_dim=128),
}


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
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Size | None = 4096
    use_sliding_window: bool = False
    max_window_layers: Annotated[int, Field(ge=0)] = 28
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    dtype: Annotated[DType | None, BeforeValidator(_bare)] = None
    torch_dtype: Annotated[DType | None, BeforeValidator(_bare)] = None  # its name before transformers 5
    bos_token_id: int | None = None
    eos_token_id: Annotated[tuple[int, ...], BeforeValidator(_as_ids)] = ()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder; raises ModelError when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        works = "a Hugging Face model folder (config.json, *.safetensors, tokenizer.json) or a .gguf file"
        raise ModelError(f"cannot read {path}: {error.strerror}", works=works) from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}", works="download the file again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object", given=type(content).__name__)
    return content


Record = TypeVar("Record", bound=BaseModel)


def _parse(record: type[Record], raw: dict[str, Any], where: str = "") -> Record:
    """Validate, turning the first fault into one line that names the key."""
    try:
        return record.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([*where.split(), *map(str, first["loc"])])
        given = None if first["type"] == "missing" else f"{key}={first['input']!r}"
        raise ModelError(f"config.json: {key}: {first['msg']}", given=given) from None


def _family(raw: dict[str, Any]) -> _Family:
    """The family of a config, refusing what no field of ModelConfig could express."""
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        given = f"model_type={raw.get('model_type')!r}"
        raise ModelError("config.json: this model_type is not supported", given=given, works=", ".join(FAMILIES))
    named = raw.get("architectures")
    if named and family.architecture not in named:
        given = f"architectures={named!r}"
        raise ModelError("config.json: not a causal language model", given=given, works=family.architecture)
    if raw.get("quantization_config"):
        method = raw["quantization_config"]
        method = method.get("quant_method", method) if isinstance(method, dict) else method
        works = "the model's unquantised weights (float32, float16 or bfloat16)"
        raise ModelError(
            "config.json: quantised weights are not supported", given=f"quant_method={method!r}", works=works
        )
    return family


def _divide(whole: int, part: int, whole_name: str, part_name: str) -> int:
    if whole % part:
        given = f"{whole_name}={whole}, {part_name}={part}"
        raise ModelError(f"config.json: {whole_name} must be a multiple of {part_name}", given=given)
    return whole // part


def _windows(family: _Family, hf: _HuggingFaceConfig) -> list[int | None]:
    """The window of each layer. In transformers as here a window of w shows w keys: `query - w < key <= query`."""
    by_layer = family.window == "by layer"
    window = hf.sliding_window if family.window == "always" or (by_layer and hf.use_sliding_window) else None
    first = hf.max_window_layers if by_layer else 0
    kinds = [
        "full_attention" if window is None or i < first else "sliding_attention" for i in range(hf.num_hidden_layers)
    ]
    if hf.layer_types is not None and hf.layer_types != kinds:
        if (
            not by_layer
            or len(hf.layer_types) != len(kinds)
            or (window is None and "sliding_attention" in hf.layer_types)
        ):
            given = f"layer_types={hf.layer_types}, num_hidden_layers={len(kinds)}, sliding_window={window}"
            raise ModelError("config.json: layer_types contradicts the layers and the window", given=given)
        kinds = list(hf.layer_types)
    return [window if kind == "sliding_attention" else None for kind in kinds]


# What each rope type needs and what it may have besides `rope_theta`.
_ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, set()),
    "yarn": ({"factor"}, {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
}


def _rope(raw: dict[str, Any], hf: _HuggingFaceConfig) -> RopeConfig:
    """One record from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    given: dict[str, Any] = {}
    keys = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    sources = {name: raw.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    sources["the top level"] = {key: raw.get(key) for key in keys}
    for name, entries in sources.items():
        if not isinstance(entries, dict):
            raise ModelError(f"config.json: {name} must be an object", given=repr(entries))
        for key, value in entries.items():
            key = "rope_type" if key == "type" else key
            if value is not None and given.setdefault(key, value) != value:
                raise ModelError(f"config.json: contradictory {key}", given=f"{given[key]!r} and, in {name}, {value!r}")
    if given.pop("partial_rotary_factor", 1) != 1:
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported")
    return _complete_rope(_parse(RopeConfig, given, "rope_parameters"), set(given), hf.max_position_embeddings)


def _complete_rope(rope: RopeConfig, given: set[str], max_context: int) -> RopeConfig:
    """Check the keys against the rope type and fill in what transformers derives from the context length."""
    original = rope.original_max_position_embeddings or max_context
    needed, optional = _ROPE_KEYS[rope.rope_type]
    if rope.rope_type == "yarn" and rope.factor is None:
        rope, given = rope.model_copy(update={"factor": max_context / original}), given | {"factor"}
    if missing := needed - given:
        raise ModelError(f"config.json: rope_type {rope.rope_type!r} needs {', '.join(sorted(missing))}")
    known = needed | optional | {"rope_type", "rope_theta", "original_max_position_embeddings"}
    if unread := given - known:
        raise ModelError(f"config.json: rope_type {rope.rope_type!r} does not read {', '.join(sorted(unread))}")
    if rope.low_freq_factor and rope.high_freq_factor and rope.low_freq_factor >= rope.high_freq_factor:
        factors = f"{rope.low_freq_factor}, {rope.high_freq_factor}"
        raise ModelError("config.json: rope low_freq_factor must be below high_freq_factor", given=factors)
    return rope.model_copy(update={"original_max_position_embeddings": original})
