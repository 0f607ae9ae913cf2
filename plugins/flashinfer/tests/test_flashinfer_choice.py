"""Which kernel and which wrapper: pure functions of a spec, the options, and a few facts about a batch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import metadata, resources

import pytest

from headstock import BackendSpec, HeadstockError
from headstock.testing.graphs import GraphBucket
from headstock_flashinfer import CAPABILITIES, OFFER
from headstock_flashinfer.choice import Choice, choose
from headstock_flashinfer.dispatch import Facts, paged_kernel, serving
from headstock_flashinfer.options import Options

SPEC = BackendSpec(
    device="cuda", compute_capability=90, num_sms=132, dtype="bfloat16", kv_dtype="bfloat16", num_heads=32,
    num_kv_heads=8, head_dim=128, v_head_dim=128, scale=0.1, page_size=16, kv_layout="nhd", max_batch=64,
    max_tokens=512, max_context=4096,
)  # fmt: skip
DECODE = frozenset({"decode"})
FA3 = Choice("fa3", "fa3", "fa3", "paged")
PAGED, SPLIT = (Choice("tensor-cores", "fa2", "fa2", extend) for extend in ("paged", "split"))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, Choice("tensor-cores", "fa3", "fa3", "paged")),
        ({"compute_capability": 80}, Choice("tensor-cores", "fa2", "fa2", "paged")),
        ({"compute_capability": None}, Choice("tensor-cores", "fa2", "fa2", "paged")),
        ({"kv_dtype": "float8_e4m3fn"}, Choice("tensor-cores", "fa2", "fa2", "paged")),
        ({"query_mask": True}, Choice("tensor-cores", "fa2", "fa2", "paged")),
        ({"batch_invariant": True}, Choice("tensor-cores", "fa2", "fa2", "paged")),
        ({"head_dim": 192}, Choice("tensor-cores", "fa2", "fa3", "paged")),
        ({"options": Options(prefill="fa2")}, Choice("tensor-cores", "fa2", "fa3", "paged")),
        ({"options": Options(decode="cuda-cores")}, Choice("cuda-cores", "fa3", "fa3", "paged")),
        ({"options": Options(extend="split")}, Choice("tensor-cores", "fa3", "fa3", "split")),
        ({"lse": True}, Choice("cuda-cores", "fa3", "fa3", "paged")),
        ({"lse": True, "num_heads": 40}, Choice("fa3", "fa3", "fa3", "paged")),
        ({"lse": True, "query_lens": frozenset({1, 4})}, Choice("fa3", "fa3", "fa3", "paged")),
        ({"lse": True, "phases": DECODE, "compute_capability": 80}, Choice("cuda-cores", "fa2", "fa2", "paged")),
        ({"lse": True, "phases": DECODE, "kv_dtype": "float8_e5m2"}, Choice("cuda-cores", "fa2", "fa2", "paged")),
        ({"lse": True, "attention": "ragged", "phases": frozenset({"extend"}), "head_dim": 192},
         Choice("tensor-cores", "fa2", "fa3", "paged")),
    ],
)  # fmt: skip
def test_kernels_come_from_the_table_or_from_the_options(changed, expected):
    assert choose(replace(SPEC, **changed)) == expected


@pytest.mark.parametrize(
    ("changed", "options", "reason"),
    [
        ({"compute_capability": 80}, {"prefill": "fa3"}, "it runs on sm_90"),
        ({"head_dim": 64}, {"ragged": "fa3"}, "heads of 64 and 128"),
        ({"kv_dtype": "float8_e5m2"}, {"prefill": "fa3"}, "a cache of float8_e5m2"),
        ({"num_heads": 40}, {"decode": "cuda-cores"}, "5 query heads per key head"),
        ({"query_lens": frozenset({1, 4})}, {"decode": "cuda-cores"}, "query lengths"),
        ({"batch_invariant": True}, {"decode": "cuda-cores"}, "batch invariance"),
        ({"window": 64}, {"extend": "split"}, "a sliding window"),
        ({"lse": True}, {"prefill": "fa2"}, "an exact log-sum-exp"),
        ({"lse": True}, {"decode": "tensor-cores"}, "an exact log-sum-exp"),
        ({"lse": True}, {"ragged": "fa2"}, "an exact log-sum-exp"),
        ({"graph_buckets": (GraphBucket(4, 1, 0),)}, {"decode": "fa3"}, "device graphs"),
    ],
)
def test_a_kernel_that_cannot_serve_is_refused_and_never_replaced(changed, options, reason):
    with pytest.raises(HeadstockError, match=reason):
        choose(replace(SPEC, **changed, options=Options(**options)))


@pytest.mark.parametrize("changed", [{"compute_capability": 80}, {"kv_dtype": "float8_e4m3fn"}, {"query_mask": True}])
def test_without_a_kernel_that_tells_an_exact_log_sum_exp_there_is_none(changed):
    spec = replace(SPEC, lse=True, **changed)
    with pytest.raises(HeadstockError, match="no kernel for"):
        choose(spec)
    with pytest.raises(HeadstockError, match="does not offer this"):
        OFFER.check(spec)
    OFFER.check(replace(spec, lse=False))


@pytest.mark.parametrize(
    ("changed", "offered"),
    [
        ({"num_heads": 40}, True),
        ({"compute_capability": 80}, True),
        ({"compute_capability": 80, "num_heads": 40}, False),
        ({"kv_dtype": "float8_e4m3fn"}, True),
        ({"graph_buckets": (GraphBucket(4, 1, 0),)}, True),
        ({"graph_buckets": (GraphBucket(4, 1, 0),), "num_heads": 40}, False),
        ({"max_levels": 1}, False),
    ],
)
def test_decode_offers_log_sum_exp_where_a_kernel_can_be_chosen(changed, offered):
    spec = replace(SPEC, lse=True, phases=DECODE, **changed)
    if not offered:
        with pytest.raises(HeadstockError, match="does not offer this for decode"):
            OFFER.check(spec)
        return
    OFFER.check(spec)
    assert choose(spec).decode in ("cuda-cores", "fa3")


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="prefill"):
        Options(prefill="auto-tuned")


def test_the_table_says_where_it_comes_from_and_has_an_answer_for_every_use_on_any_gpu():
    text = resources.files("headstock_flashinfer").joinpath("choice.json").read_text(encoding="utf-8")
    table = json.loads(text)
    assert table["command"].startswith("python benchmarks/")
    assert table["hardware"]
    last = {entry["use"]: entry for entry in table["entries"]}
    assert set(last) == set(Choice.__slots__)
    assert all(entry.keys() <= {"use", "kernel", "because"} for entry in last.values()), "the last entry is for all"


@pytest.mark.parametrize(
    ("choice", "facts", "expected"),
    [
        (PAGED, Facts(1, True), "decode"),
        (PAGED, Facts(1, False, new=False), "decode"),  # one query sees all keys, causal or not
        (PAGED, Facts(4, True), "decode"),
        (PAGED, Facts(4, False), "paged"),
        (PAGED, Facts(4, True, short=True), "paged"),
        (PAGED, Facts(4, True, mask=True), "paged"),
        (PAGED, Facts(1, True, mask=True), "paged"),
        (PAGED, Facts(0, True), "paged"),
        (PAGED, Facts(0, False, new=False), "paged"),
        (SPLIT, Facts(0, True), "split"),
        (SPLIT, Facts(0, True, prefix=False), "split"),
        (SPLIT, Facts(0, False), "paged"),
        (SPLIT, Facts(0, True, new=False), "paged"),
        (SPLIT, Facts(0, True, mask=True), "paged"),
        (SPLIT, Facts(1, True), "decode"),
        (PAGED, Facts(1, True, levels=1), "cascade"),
        (SPLIT, Facts(0, True, levels=2), "cascade"),
        (PAGED, Facts(1, True, levels=1, mask=True), "paged"),
        (FA3, Facts(1, True), "paged"),
        (FA3, Facts(4, True), "paged"),
    ],
)
def test_a_batch_is_served_by_the_wrappers_for_it(choice, facts, expected):
    assert serving(SPEC, choice, facts) == expected


def test_a_spec_can_rule_wrappers_out():
    shared = Facts(1, True, levels=1)
    assert serving(replace(SPEC, window=100), PAGED, shared) == "decode"
    assert serving(replace(SPEC, batch_invariant=True), PAGED, shared) == "decode"
    assert serving(replace(SPEC, lse=True), PAGED, shared) == "decode"
    assert serving(replace(SPEC, attention="ragged"), PAGED, Facts(0, True)) == "ragged"


@pytest.mark.parametrize(
    ("choice", "facts", "phase", "expected"),
    [
        (FA3, Facts(0, True), "extend", "fa3"),
        (FA3, Facts(4, True), "decode", "fa3"),
        (FA3, Facts(4, True, mask=True), "decode", "fa2"),
        (FA3, Facts(0, True, mask=True), "extend", "fa2"),
        (replace(FA3, decode="tensor-cores"), Facts(4, False), "decode", "fa2"),
        (PAGED, Facts(0, True), "extend", "fa2"),
    ],
)
def test_a_paged_wrapper_has_a_kernel_by_phase_and_mask(choice, facts, phase, expected):
    assert paged_kernel(choice, facts, phase) == expected


def test_nothing_heavy_is_imported_to_list_or_to_choose():
    script = (
        "import sys, headstock_flashinfer, headstock_flashinfer.choice;"
        "headstock_flashinfer.attention_backends(); print({'torch', 'flashinfer', 'numpy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_versions_outside_those_shown_to_work_are_refused_by_the_distribution():
    assert "flashinfer-python<0.8,>=0.6.18" in (metadata.requires("headstock-flashinfer") or [])


def test_no_record_declares_what_flashinfer_ignores():
    for record in CAPABILITIES:
        assert not record.alibi
        assert "float32" not in record.dtypes
        assert not (record.query_mask and record.graph)
        assert not (record.batch_invariant and record.graph)
        if "ragged" in record.attention:
            assert not record.kv_scales
