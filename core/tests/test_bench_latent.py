"""Latent attention in `bench`, `diagnose`, `explain --verbose` and `tune`: both forms, checked and told apart."""

from __future__ import annotations

import pytest

from headstock import ModelRunner
from headstock.bench.compare import Comparison
from headstock.bench.diagnose import Diagnosis
from headstock.bench.kernels import kernels
from headstock.bench.machine import Machine
from headstock.bench.profile import Point, Profile, shape_of
from headstock.bench.report import failures, ordered
from headstock.bench.report import kernels as told
from headstock.bench.tune import Tuner, default_grid
from headstock.bench.workload import parse
from headstock.device import Device
from headstock.models.config import ModelConfig
from headstock.negotiate import negotiate
from headstock.offer import Candidate
from headstock.policy import Crossover, Policy
from headstock.runner.latent import expand_from
from headstock.runner.requirements import requirements
from headstock.testing.specimen import OFFER, Specimen

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = Device.open("cpu")
CONFIG = ModelConfig.from_hf({
    "model_type": "deepseek_v2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "moe_intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "first_k_dense_replace": 1,
    "max_position_embeddings": 128, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1,
})  # fmt: skip
NEEDS = requirements(CONFIG, device="cpu", dtype="float32")
CACHED, RAGGED = (
    tuple(each for each in OFFER.capabilities if "cpu" in each.devices and ("mla" in each.attention) == latent)
    for latent in (True, False)
)


def offered(name, records=OFFER.capabilities, backend=Specimen):
    return Candidate.of(OFFER.model_copy(update={"name": name, "backend": backend, "capabilities": records}))


def forms(clock, absorbed, expanded):
    """A sound backend that takes so many seconds per new token in the one form, and per step in the other."""

    class Taking(Specimen):
        def forward(self, q, k, v, layer, batch, *, out, lse=None):
            ragged = self.spec.attention == "ragged"
            clock.sleep(expanded * batch.causal if ragged else absorbed * batch.num_tokens)
            super().forward(q, k, v, layer, batch, out=out, lse=lse)

        def describe(self, batch):
            return {"kernel": f"{self.spec.attention}-{batch.causal}-{batch.num_tokens}"}

    return Taking


def compared(texts, *field, policy=None):
    return Comparison(CONFIG, NEEDS, field, policy or Policy(), CPU, rounds=1, cold_bytes=0).run(parse(texts))


@pytest.mark.parametrize("load", ["extend:1x9", "extend:2x5+16", "extend:3x8+40"])
@pytest.mark.parametrize("chunk", [8192, 11])
def test_both_forms_are_benched_and_right(load, chunk, monkeypatch):
    monkeypatch.setattr("headstock.runner.latent.CHUNK_TOKENS", chunk)
    found = compared(load, offered("both"))
    assert [(each.label, each.failure) for each in found] == [("both", ""), ("both, expanded", "")]
    absorbed, expanded = (each.work for each in found)
    assert absorbed.num_bytes == expanded.num_bytes, "what is cached is read once in either form"
    pair = (20 + 16, 12 + 12)  # numbers of a key and a value that a head reads
    assert absorbed.flops * pair[1] == expanded.flops * pair[0]


def test_who_serves_which_form_and_by_which_kernel_is_told_and_why_others_do_not(clock):
    taking = forms(clock, 1e-4, 3e-3)
    found = compared("extend:1x9+20 decode:1x9", offered("latent", CACHED, taking), offered("plain", RAGGED, taking))
    rows = [(each.workload.name, each.label) for each in ordered(found)]
    assert rows == [("extend:1x9+20", "latent"), ("extend:1x9+20", "plain, expanded"), ("decode:1x9", "latent")]
    assert "plain, expanded: ragged-True-9; page 64 latent, launched eagerly: extend:1x9+20" in told(found)
    refused = failures(found)
    assert any(line.startswith("latent, expanded: extend:1x9+20: attention: needs ragged") for line in refused)
    assert any(line.startswith("plain: extend:1x9+20, decode:1x9: attention: needs mla") for line in refused)
    limits = type("Limits", (), {"share": lambda *_: (0.5, "memory")})()
    assert [each.as_dict(limits)["expanded"] for each in ordered(found)] == [False, True, False]


class Wrong(Specimen):
    """A backend that is wrong about whatever is not causal, which chunks are."""

    def forward(self, q, k, v, layer, batch, *, out, lse=None):
        super().forward(q, k, v, layer, batch, out=out, lse=lse)
        if not batch.causal:
            out *= 1.2


def test_a_form_that_is_wrong_is_not_timed(monkeypatch):
    monkeypatch.setattr("headstock.runner.latent.CHUNK_TOKENS", 8)
    absorbed, expanded = compared("extend:1x9+20", offered("wrong", backend=Wrong))
    assert absorbed.device
    assert expanded.failure.startswith("wrong numbers: token ")


def test_an_expanded_role_is_diagnosed_beside_its_rivals(clock):
    quick, slow = forms(clock, 1e-4, 1e-3), forms(clock, 1e-4, 4e-3)
    field = [offered("latent", CACHED, quick), offered("quick", RAGGED, quick), offered("slow", RAGGED, slow)]
    policy = Policy(backends={"expand": "slow"}, origins={"expand": "here"})
    decision = negotiate(NEEDS, field, policy)
    diagnosis = Diagnosis(CONFIG, decision, field, CPU, rounds=3, cold_bytes=0)
    (finding,) = diagnosis.of_workloads(parse("extend:1x9+20"))
    assert (finding.kind, finding.where, finding.gain) == ("wrong backend", "expand, extend:1x9+20", pytest.approx(4))
    only = negotiate(NEEDS, field, policy.model_copy(update={"unserved": frozenset({"all/extend"})}))
    (finding,) = Diagnosis(CONFIG, only, field, CPU, rounds=3, cold_bytes=0).of_workloads(parse("extend:1x9+20"))
    assert finding.where == "expand, extend:1x9+20"


def test_explain_tells_the_kernel_of_every_role(clock):
    taking = forms(clock, 0.0, 0.0)
    field = [offered("latent", CACHED, taking), offered("plain", RAGGED, taking)]
    lines = list(kernels(negotiate(NEEDS, field), CONFIG, field, CPU))
    assert "extend, extend:1x128: latent: mla-True-128" in lines
    assert "expand, extend:1x128: plain: ragged-True-128" in lines
    assert sum(line.startswith("decode, ") for line in lines) == 2


# ---- where the forms cross


def tuned(clock, field, texts="decode:1x8 extend:1x{8,16,32,64}+40", policy=None):
    tuner = Tuner(CONFIG, NEEDS, field, policy or Policy(page_size=16), CPU, rounds=3, cold_bytes=0)
    return tuner.profile(tuner.run(parse(texts)), Machine("here", ""))


def test_tuning_finds_from_how_many_tokens_on_expanding_pays_and_a_runner_goes_by_it(clock):
    """0.1 ms a token absorbed, and 3 ms a step expanded by one, 6 ms by the other: level at 30 and 60 tokens."""
    field = [
        offered("latent", CACHED, forms(clock, 1e-4, 0.0)), offered("plain", RAGGED, forms(clock, 0.0, 3e-3)),
        offered("slow", RAGGED, forms(clock, 0.0, 6e-3)),
    ]  # fmt: skip
    profile = tuned(clock, field)
    at = (16, "latent")
    assert profile.crossovers() == (
        Crossover("all", "latent", "plain", *at, 32), Crossover("all", "latent", "slow", *at, 64),
    )  # fmt: skip
    policy = Policy(page_size=16, profile=profile.measurements(), crossovers=profile.crossovers(), by_batch=True)
    runner = {"offers": field, "dtype": "float32", "kv_tokens": 256, "max_batch": 2}
    chosen = ModelRunner(CONFIG, policy=policy, **runner)
    assert chosen.roles["all", "expand"].first.candidate.name == "plain", "expanding is ranked by figures too"
    assert chosen.steps.expand_from == 32
    slow = policy.model_copy(update={"backends": {"expand": "slow"}})
    assert ModelRunner(CONFIG, policy=slow, **runner).steps.expand_from == 64
    asked = policy.model_copy(update={"expand_from": 7})
    assert ModelRunner(CONFIG, policy=asked, **runner).steps.expand_from == 7
    default = ModelRunner(CONFIG, policy=Policy(page_size=16), **runner).steps.expand_from
    assert default == expand_from(CONFIG.layers[0])
    elsewhere = policy.model_copy(update={"page_size": 4})
    assert ModelRunner(CONFIG, policy=elsewhere, **runner).steps.expand_from == default, "it was not measured there"


@pytest.mark.parametrize(
    ("absorbed", "expanded", "found"),
    [
        ([1, 2, 3, 4], [9, 9, 9, 9], 128),  # never
        ([9, 9, 9, 9], [1, 2, 3, 4], 8),  # always
        ([9, 1, 9, 9], [2, 2, 2, 2], 32),  # for good
        ([9, 9], [1, 1], 8),
        ([9], [1], None),  # which is not enough to tell
    ],
)
def test_forms_cross_where_expanding_pays_from_then_on(absorbed, expanded, found):
    def points(role, seconds):
        where = {"page_size": 16, "kv_layout": "latent"} if role == "extend" else {"page_size": None, "kv_layout": None}
        return [
            Point(group="all", role=role, backend="one", batch=1, tokens=tokens, context=100, seconds=each, **where)
            for tokens, each in zip((8, 16, 32, 64), seconds, strict=False)
        ]  # fmt: skip

    alone = Point(group="all", role="extend", backend="one", batch=1, tokens=50, context=50, seconds=1e9, page_size=16,
                  kv_layout="latent")  # fmt: skip
    every = (*points("extend", absorbed), *points("expand", expanded), alone)
    profile = Profile(device="", driver="", packages={}, shape=shape_of(NEEDS), points=every)
    assert [each.tokens for each in profile.crossovers()] == ([found] if found else [])


def test_the_default_grid_has_prompts_of_many_lengths_where_there_are_two_forms():
    usual, latent = (default_grid(8, 4096, False, each) for each in (False, True))
    more = [load for load in latent if load not in usual]
    assert [load.tokens for load in more] == [64, 128, 256, 512, 1024, 2048]
    assert {load.context for load in more} == {4096}
    assert {load.context for load in default_grid(8, 100, True, True)} == {100}


def test_a_model_that_is_served_expanded_alone_can_be_tuned(clock):
    decodes = tuple(each.model_copy(update={"phases": frozenset({"decode"})}) for each in CACHED)
    field = [offered("latent", decodes, forms(clock, 1e-4, 0)), offered("plain", RAGGED, forms(clock, 0, 3e-3))]
    profile = tuned(clock, field, "decode:1x8 extend:1x8+8")
    assert {(each.role, each.backend) for each in profile.points} == {("decode", "latent"), ("expand", "plain")}
    assert not profile.crossovers()
