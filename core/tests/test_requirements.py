"""Layer groups and requirements: what a model's config comes to, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headstock.models.config import ModelConfig
from headstock.runner.requirements import backend_spec, layer_groups, requirements

RAW = {
    "model_type": "qwen2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
}  # fmt: skip


def config(**changes):
    return ModelConfig.from_hf(RAW | changes)


MIXED = config(use_sliding_window=True, sliding_window=8, max_window_layers=1)


def test_layers_that_agree_are_one_group():
    assert layer_groups(config()) == {"all": (0, 1, 2, 3)}


def test_layers_that_differ_are_groups_named_by_their_window():
    assert layer_groups(MIXED) == {"full": (0,), "window-8": (1, 2, 3)}


def test_groups_of_one_window_and_other_shapes_keep_names_apart():
    layers = list(MIXED.layers)
    layers[3] = layers[3].model_copy(update={"softcap": 30.0})
    groups = layer_groups(MIXED.model_copy(update={"layers": tuple(layers)}))
    assert groups == {"full": (0,), "window-8": (1, 2), "window-8-3": (3,)}


def test_each_group_asks_for_extend_and_decode_with_its_own_features():
    needs = requirements(MIXED, device="cuda", compute_capability=90, dtype="bfloat16", kv_dtype="float8_e4m3fn")
    assert [(need.group, need.role, need.phase, need.layers, need.sliding_window) for need in needs] == [
        ("full", "extend", "extend", 1, None),
        ("full", "decode", "decode", 1, None),
        ("window-8", "extend", "extend", 3, 8),
        ("window-8", "decode", "decode", 3, 8),
    ]
    for need in needs:
        assert (need.device, need.compute_capability, need.dtype, need.kv_dtype) == (
            "cuda", 90, "bfloat16", "float8_e4m3fn",
        )  # fmt: skip
        assert (need.num_heads, need.num_kv_heads, need.head_dim, need.v_head_dim) == (4, 2, 8, 8)
        assert (need.max_context, need.attention) == (96, "paged")
        assert need.query_lens == (frozenset({1}) if need.role == "decode" else None)


@pytest.mark.parametrize(
    ("mode", "wishes", "asked"), [("auto", ("cascade",), False), ("on", (), True), ("off", (), False)]
)
def test_decoding_without_a_window_is_what_cascade_is_for(mode, wishes, asked):
    needs = requirements(MIXED, device="cpu", dtype="float32", cascade=mode)
    for need in needs:
        shares = (need.group, need.role) == ("full", "decode")
        assert (need.wishes, need.cascade) == ((wishes, asked) if shares else ((), False))


def test_the_cache_has_the_models_dtype_and_context_unless_told_otherwise():
    [need, _] = requirements(config(), device="cpu", dtype="float32")
    assert (need.kv_dtype, need.max_context) == ("float32", 96)
    [need, _] = requirements(config(), device="cpu", dtype="float32", max_context=50)
    assert need.max_context == 50


@pytest.mark.parametrize("phases", [("extend",), ("decode",), ("extend", "decode")])
def test_a_spec_is_its_requirements_settled(phases):
    needs = [
        need.model_copy(update={"page_size": 16, "kv_layout": "hnd"})
        for need in requirements(MIXED, device="cpu", dtype="float32", max_context=50)
        if need.group == "window-8" and need.phase in phases
    ]
    spec = backend_spec(needs, MIXED.layers[1], device="cpu", num_sms=7, max_batch=3, max_tokens=11, options="mine")
    assert spec.phases == frozenset(phases)
    assert (spec.group, spec.window, spec.scale) == ("window-8", 8, 8**-0.5)
    assert (spec.page_size, spec.kv_layout, spec.kv_dtype, spec.dtype) == (16, "hnd", "float32", "float32")
    assert (spec.max_batch, spec.max_tokens, spec.max_context, spec.num_sms) == (3, 11, 50, 7)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim) == (4, 2, 8, 8)
    assert spec.options == "mine"


def test_requirements_need_no_torch():
    code = "import sys, headstock.runner.requirements; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
