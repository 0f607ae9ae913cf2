"""The conformance suite itself: which cases an offer gives rise to, and what it says of one that strays."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel
from torch import Tensor

from headstock import ANY, Capabilities, ForwardBatch, HeadstockError, MultipleOf, Offer
from headstock.backend import BackendSpec, Workspace, WorkspaceBytes
from headstock.capabilities import AXES
from headstock.layer import AttentionLayer
from headstock.requirement import Requirement
from headstock.testing.cases import cases
from headstock.testing.honesty import claims, examine
from headstock.testing.mask_mutants import CausalTopLeft, WindowOneMore
from headstock.testing.math_mutants import SoftcapMissing
from headstock.testing.problem import make_spec
from headstock.testing.report import as_dict, as_html
from headstock.testing.specimen import CAPABILITIES, LATENT, OFFER, Specimen
from headstock.testing.suite import Suite


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """No case of a test depends on what else is installed."""
    monkeypatch.setenv("HEADSTOCK_PLUGINS", "")


def record(**changes: Any) -> Capabilities:
    """A small honest record: paged float32 decode and extend, nothing else, with `changes`."""
    small = {
        "devices": {"cpu"}, "phases": {"extend", "decode"}, "attention": {"paged"}, "dtypes": {"float32"},
        "head_dims": {16, 64}, "page_sizes": MultipleOf(4, max=16), "kv_layouts": {"nhd"}, "gqa_ratios": {1, 2},
    }  # fmt: skip
    return Capabilities(**small | changes)


def offer(backend: type = Specimen, **changes: Any) -> Offer:
    return Offer(name="small", backend=backend, capabilities=(record(**changes),))


def names(of: Offer, **options: Any) -> set[str]:
    return {case.name for case in cases(of, **options)}


def test_every_case_is_covered_by_the_offer_that_it_is_made_from():
    for of in (
        OFFER,
        offer(),
        offer(sliding_window=True, lse=True, query_lens={1, 3}, kv_dtypes={"same", "float8_e5m2"}),
    ):
        for level in ("quick", "full"):
            for case in cases(of, level=level):
                phases = {case.fields["phase"], case.fields.get("reader", case.fields["phase"])}
                for phase in phases:
                    spec = make_spec(
                        {**case.fields, "phase": phase}, case.fields["query_lens"] if len(phases) == 1 else [1]
                    )
                    need = Requirement.of(spec, phase)
                    assert any(not need.unmet(each) for each in of.capabilities), case.name


def test_declaring_more_tests_more_and_never_less():
    base = names(offer())
    for axis, value in [
        ("sliding_window", True), ("softcap", True), ("sinks", True), ("alibi", True), ("lse", True), ("cascade", True),
        ("graph", True), ("batch_invariant", True), ("non_causal", True), ("query_mask", True),
        ("dtypes", {"float32", "bfloat16"}), ("head_dims", {16, 64, 96}), ("gqa_ratios", {1, 2, 3}),
        ("kv_layouts", {"nhd", "hnd"}), ("attention", {"paged", "ragged"}), ("query_lens", {1, 2}),
        ("page_sizes", MultipleOf(4, max=64)), ("kv_dtypes", {"same", "float8_e4m3fn"}), ("v_head_dims", ANY),
    ]:  # fmt: skip
        more = names(offer(**{axis: value}), level="full")
        assert base <= more | {name for name in base if "-of-" in name}, axis
        assert more - names(offer(), level="full"), f"{axis} gave rise to no case"


def test_graphs_read_shared_prefixes_where_one_record_declares_both():
    apart = names(offer(graph=True)) | names(offer(cascade=True))
    assert names(offer(graph=True, cascade=True)) - apart == {"decode-paged-graph-replay-cascade-1"}
    more = names(offer(graph=True, cascade=True, lse=True, softcap=True), level="full")
    assert {f"decode-paged-graph-replay-cascade-2{what}" for what in ("", "-lse", "-softcap-30", "-together")} <= more
    assert {"decode-paged-graph-random", "decode-paged-graph-random-cascade-2"} <= more
    records = (record(graph=True), record(cascade=True))
    assert not {name for name in names(Offer(name="two", backend=Specimen, capabilities=records)) if "graph" in name
                and "cascade" in name}  # fmt: skip


def test_declaring_more_of_latents_tests_more_of_them():
    small = {"attention": {"mla"}, "kv_layouts": {"latent"}, "head_dims": {80}, "v_head_dims": {64}, "gqa_ratios": {16}}
    base = names(offer(**small))
    assert "decode-mla-matches-latent-64-16" in base
    assert {name for name in base if "heads" in name} == {
        f"{phase}-mla-matches-heads-16" for phase in ("decode", "extend")
    }
    for axis, value in [
        ("head_dims", {80, 576}), ("gqa_ratios", ANY), ("lse", True), ("cascade", True), ("graph", True),
        ("query_lens", {1, 2}), ("kv_dtypes", {"same", "float8_e4m3fn"}), ("query_mask", True), ("sinks", True),
    ]:  # fmt: skip
        changed = small | {axis: value} | ({"v_head_dims": {64, 512}} if axis == "head_dims" else {})
        assert names(offer(**changed), level="full") - names(offer(**small), level="full"), axis


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"head_dims": ANY}, "head_dims any, v_head_dims same"),
        ({"head_dims": {64, 80}, "v_head_dims": {80, 96}}, "head_dims {64, 80}, v_head_dims {80, 96}"),
        ({"head_dims": MultipleOf(16, max=64), "v_head_dims": range(64, 80)}, "v_head_dims 64…79"),
        (
            {"head_dims": {80}, "v_head_dims": {64}, "num_heads": {16}, "gqa_ratios": {8}},
            "num_heads {16}, gqa_ratios {8}",
        ),
    ],
)
def test_latents_that_no_model_can_ask_for_are_refused_on_any_device(changes, given):
    latent = {"attention": {"mla"}, "kv_layouts": {"latent"}, "gqa_ratios": ANY, **changes}
    for devices in ({"cpu"}, {"cuda"}):
        records = (record(), record(label="latent", devices=devices, **latent))
        with pytest.raises(HeadstockError, match=r"no model can ask .* 'latent' of two") as caught:
            Suite(Offer(name="two", backend=Specimen, capabilities=records))
        assert given in str(caught.value)


def test_a_latent_of_one_rope_number_is_enough():
    latent = {"attention": {"mla"}, "kv_layouts": {"latent"}, "head_dims": {80, 81}, "v_head_dims": {80, 96}}
    assert Suite(offer(**latent, num_heads=range(8, 17), gqa_ratios=range(16, 33))).cases


def test_a_latent_record_is_tried_at_deepseeks_size_and_at_others():
    of = Offer(name="latents", backend=Specimen, capabilities=(LATENT,))
    found = names(of, level="full")
    for rank, rope in ((16, 8), (64, 16), (128, 64), (256, 32), (512, 64)):
        assert f"decode-mla-matches-latent-{rank}-{rope}" in found
    for heads in (1, 3, 16, 128):
        assert f"extend-mla-matches-heads-{heads}" in found
    [largest] = [case for case in cases(of, level="full") if case.name == "decode-mla-matches-latent-512-64"]
    assert make_spec(largest.fields, [1]).scale == 192**-0.5


def test_cases_run_in_order_of_size_and_have_names_of_their_own():
    found = cases(OFFER, level="full")
    assert [case.cost for case in found] == sorted(case.cost for case in found)
    assert len({case.name for case in found}) == len(found)
    assert names(OFFER) <= {case.name for case in found} | {name for name in names(OFFER) if "page-" in name}


def test_a_device_that_is_not_declared_has_no_cases():
    assert cases(offer(), device="cuda") == []
    assert cases(offer(devices={"cuda"}, compute_capability=range(90, 101)), device="cuda", capability=80) == []
    with pytest.raises(HeadstockError, match="does not run here"):
        Suite(offer(devices={"xpu"}))


def test_the_first_failure_is_small_and_says_how_to_run_it_again():
    suite = Suite(offer(CausalTopLeft))
    first = next(outcome for outcome in suite.run() if not outcome.good)
    assert "query_lens = (1,)" in first.message
    assert "seq_lens = (2,)" in first.message
    assert "head_dim = 16" in first.message
    assert "page_size = 4" in first.message
    assert "dtype = 'float32'" in first.message
    assert f"headstock check small --case {first.name}" in first.message
    assert "should be" in first.message


def test_one_case_can_be_run_alone_and_unknown_ones_are_refused():
    every = Suite(offer())
    name = every.cases[3].name
    assert [case.name for case in Suite(offer(), only=name).cases] == [name]
    assert all(case.name.startswith("decode-") for case in Suite(offer(), phase="decode").cases)
    with pytest.raises(HeadstockError, match="has no such case"):
        Suite(offer(), only="decode-paged-matches-nothing")
    with pytest.raises(HeadstockError, match="no such backend is installed"):
        Suite("nobody")


class Refuses(Specimen):
    """A backend that raises for what its offer does not cover."""

    def __init__(self, spec: BackendSpec, workspace: Workspace):
        super().__init__(spec, workspace)
        offer(Refuses).check(spec)


class Silent(Specimen):
    """A backend that leaves a softcap out without a word, and does not declare it either."""

    def cap(self, logits: Tensor, softcap: float) -> Tensor:
        return logits


def test_what_is_not_declared_is_refused_or_right_or_a_failure():
    assert {examine(Refuses, offer(Refuses), claim) for claim in claims(offer(Refuses))} == {"refused"}
    able = claims(offer())
    assert {examine(Specimen, offer(), claim) for claim in able} == {"could be declared"}
    wrong = [outcome for outcome in Suite(offer(Silent)).run() if not outcome.good]
    assert {outcome.name for outcome in wrong} == {"decode-paged-softcap-on", "extend-paged-softcap-on"}, wrong
    assert "neither raises nor is right" in wrong[0].message


def test_claims_leave_no_axis_out_that_can_be_held_against_a_number():
    asked = {claim.axis for claim in claims(offer())}
    not_asked = AXES.keys() - asked
    # known by what a host does, not by a number; or without an end to go beyond on a laptop
    assert not_asked == {
        "devices", "phases", "cascade", "graph", "batch_invariant", "kv_scales", "compute_capability", "num_heads",
        "max_context", "host_lengths", "extra_inputs",
    }  # fmt: skip


@pytest.mark.parametrize(("mutant", "axis"), [(WindowOneMore, "sliding_window"), (SoftcapMissing, "softcap")])
def test_the_report_tells_what_failed_and_what_was_exercised(mutant, axis):
    suite = Suite(Offer(name="mutant", backend=mutant, capabilities=(CAPABILITIES,)), phase="decode")
    outcomes = list(suite.run())
    document = as_dict(suite, outcomes)
    assert not document["passed"]
    failed = [case for case in document["cases"] if case["status"] == "failed"]
    assert failed
    assert all(case["message"] for case in failed)
    row = next(row for row in document["axes"] if row["axis"] == axis)
    assert row["declared"] == ["True"]
    assert row["exercised"]
    page = as_html(suite, outcomes)
    assert all(case["name"] in page for case in failed)
    assert "<script" not in page


def test_every_declared_axis_of_the_specimen_is_exercised():
    suite = Suite(OFFER, level="full")
    idle = {name for name, values in suite.coverage().items() if not values}
    assert idle == {"compute_capability", "extra_inputs"}, "a CPU has no capability; extra inputs have no host path"


class Raises(Specimen):
    """A backend whose forward raises."""

    def forward(self, q: Tensor, k: Any, v: Any, layer: AttentionLayer, batch: ForwardBatch, *, out: Tensor,
                lse: Tensor | None = None) -> None:  # fmt: skip
        raise RuntimeError("no such kernel")


def test_a_backend_that_raises_fails_its_cases_and_stops_nothing():
    outcomes = list(Suite(offer(Raises)).run())
    assert all(not outcome.good for outcome in outcomes if outcome.law == "matches")
    assert "RuntimeError: no such kernel" in outcomes[0].message


class Options(BaseModel):
    """Options of a backend, all with a default."""

    block: int = 4


class Optioned(Specimen):
    """A backend that reads its options, in planning memory too."""

    @classmethod
    def workspace_bytes(cls, spec: BackendSpec) -> WorkspaceBytes:
        return WorkspaceBytes(spec.options.block)

    def __init__(self, spec: BackendSpec, workspace: Workspace):
        super().__init__(spec, workspace)
        assert spec.options.block == len(workspace.scratch)


@pytest.mark.parametrize("given", [{}, {"block": 7}])
def test_a_backend_has_the_options_that_the_runner_would_give_it(given):
    optioned = Offer(name="optioned", backend=Optioned, capabilities=(record(),), options=Options)
    suite = Suite(optioned, options=given, only="*-matches-*")
    assert all(outcome.good for outcome in suite.run())
    assert suite.backend.__name__ == "Optioned"
