"""Negotiation by example: faults that users of attention backends reported, and the rules one by one."""

from __future__ import annotations

from typing import Any

import pytest

from headstock.capabilities import AXES, Capabilities
from headstock.errors import NegotiationError
from headstock.ints import ANY, MultipleOf
from headstock.negotiate import Candidate, Decision, Fault, Measurement, Policy, Requirement, check_pin, negotiate
from headstock.offer import Offer


def need(role: str = "decode", attention: str = "paged", **fields: Any) -> Requirement:
    base = {
        "role": role, "phase": "decode" if role in ("decode", "verify") else "extend", "attention": attention,
        "device": "cuda", "compute_capability": 90, "dtype": "bfloat16", "kv_dtype": "bfloat16", "head_dim": 128,
        "v_head_dim": 128, "num_heads": 32, "num_kv_heads": 8, "max_context": 4096,
    }  # fmt: skip
    return Requirement(**base | fields)


def record(**fields: Any) -> Capabilities:
    base = {
        "devices": {"cuda"}, "phases": {"extend", "decode"}, "attention": {"paged"}, "dtypes": {"bfloat16"},
        "head_dims": {64, 128}, "page_sizes": ANY, "kv_layouts": {"nhd"},
    }  # fmt: skip
    return Capabilities(**base | fields)


def offer(name: str, *records: Capabilities, **fields: Any) -> Offer:
    return Offer(name=name, backend="a.b:C", capabilities=records or (record(**fields),))


def served(decision: Decision) -> dict[str, str]:
    """Who serves what, as {"group/role" or "role": backend}."""
    return {
        choice.role if choice.group == "all" else f"{choice.group}/{choice.role}": winner.backend
        for choice in decision.choices
        for winner in choice.winners
    }


BOTH = [need("extend"), need("decode")]
GROUPS = [
    need(role, group=group, sliding_window=window, layers=layers)
    for group, window, layers in (("full", None, 1), ("win", 4096, 10))
    for role in ("extend", "decode")
]

# --- reported faults ------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 8, 17, 128])
def test_cg01_a_page_size_nobody_takes_is_refused_at_start_with_a_reason_per_backend(page_size: int) -> None:
    offers = [offer("a", page_sizes={16, 64}), offer("b", page_sizes=MultipleOf(32, max=96))]
    decision = negotiate(BOTH, offers, Policy(page_size=page_size))
    assert not decision.solved
    for role in ("extend", "decode"):
        reasons = {r.backend: str(r.closest) for r in decision.refused if r.role == role}
        assert reasons.keys() == {"a", "b"}
        assert all(f"page_sizes: needs {page_size} (asked for), offers" in reason for reason in reasons.values())
    assert decision.conflict.endswith("; type: --page-size 16")


def test_cg02_prefill_and_decode_on_different_pages_names_both_backends_and_both_sets() -> None:
    offers = [offer("prefill", phases={"extend"}, page_sizes={64}), offer("decode", phases={"decode"}, page_sizes={1})]
    decision = negotiate(BOTH, offers)
    assert decision.conflict.startswith(
        "no page size and KV layout suit every role: extend: prefill {64} on {nhd}; decode: decode {1} on {nhd}"
    )
    by_role = {(r.role, r.backend): str(r.closest) for r in decision.refused}
    assert by_role["extend", "prefill"].startswith("page_sizes: needs {1} (shared with decode (decode)), offers {64}")
    assert by_role["decode", "decode"].startswith("page_sizes: needs {64} (shared with extend (prefill)), offers {1}")


def test_cg02_a_common_page_is_found_where_there_is_one() -> None:
    offers = [
        offer("prefill", phases={"extend"}, page_sizes={48, 64}, preference=9),
        offer("decode", phases={"decode"}, page_sizes=MultipleOf(24), preference=9),
        offer("slow", page_sizes={16}),
    ]
    decision = negotiate(BOTH, offers)
    assert (decision.page_size, served(decision)) == (48, {"extend": "prefill", "decode": "decode"})


MISSING = Fault(what="the package 'kernels' is missing", cure="pip install kernels")


@pytest.mark.parametrize("scope", ["all", "decode"])
def test_cg03_an_absent_package_is_told_at_start_when_its_backend_was_asked_for(scope: str) -> None:
    broken = Candidate(name="fast", offer=offer("fast", preference=99), fault=MISSING)
    decision = negotiate(BOTH, [broken, offer("slow")], Policy(backends={scope: "fast"}))
    assert not decision.solved
    assert "the package 'kernels' is missing; pip install kernels" in decision.conflict
    assert "-attention-backend" in decision.conflict


def test_cg03_an_absent_package_is_passed_over_with_its_reason_when_nobody_asked() -> None:
    decision = negotiate(BOTH, [Candidate(name="fast", fault=MISSING), offer("slow")])
    assert served(decision) == {"extend": "slow", "decode": "slow"}
    assert {(r.role, r.fault) for r in decision.refused} == {("extend", MISSING), ("decode", MISSING)}


def test_cg05_a_favourite_that_cannot_serve_one_layer_group_gives_way_there_with_a_notice() -> None:
    offers = [offer("fast", preference=50), offer("broad", sliding_window=True)]
    decision = negotiate(GROUPS, offers)
    assert served(decision) == {
        "full/extend": "fast", "full/decode": "fast", "win/extend": "broad", "win/decode": "broad",
    }  # fmt: skip
    assert (
        "broad serves decode of group win: fast, which serves decode of group full, "
        "sliding_window: needs 4096, offers no; try another backend"
    ) in decision.notices


def test_cg05_the_same_backend_asked_for_is_an_error_naming_group_axis_and_flag() -> None:
    offers = [offer("fast", preference=50), offer("broad", sliding_window=True)]
    decision = negotiate(GROUPS, offers, Policy(backends={"all": "fast"}))
    assert not decision.solved
    assert decision.conflict == (
        "fast (--attention-backend) cannot serve extend of group win: sliding_window: needs 4096, offers no; "
        "try another backend; type: the same without --attention-backend"
    )


@pytest.mark.parametrize("wants", ["hnd", "tkv4"])
def test_cg08_a_layout_must_be_declared_and_a_mismatch_is_refused(wants: str) -> None:
    with pytest.raises(ValueError, match="kv_layouts: required with paged or mla attention"):
        record(kv_layouts=set())
    offers = [
        offer("writer", phases={"extend"}, kv_layouts={"nhd"}),
        offer("reader", phases={"decode"}, kv_layouts={wants}),
    ]
    decision = negotiate(BOTH, offers)
    assert not decision.solved
    (reader,) = (r for r in decision.refused if (r.role, r.backend) == ("decode", "reader"))
    assert str(reader.closest).startswith(
        f"kv_layouts: needs {{nhd}} (shared with extend (writer)), offers {{{wants}}}"
    )


@pytest.mark.parametrize(("capability", "winner"), [(75, "old"), (80, "any"), (90, "new"), (110, "any"), (120, "any")])
def test_cg09_a_backend_not_built_for_this_gpu_is_passed_over(capability: int, winner: str) -> None:
    offers = [
        offer("new", preference=3, compute_capability={90, 100}),
        offer("old", preference=2, compute_capability=range(70, 80)),
        offer("any", preference=1),
    ]
    decision = negotiate([need(compute_capability=capability)], offers)
    assert served(decision) == {"decode": winner}
    for refusal in decision.refused:
        assert f"compute_capability: needs {capability}, offers" in str(refusal.closest)


# --- explicit choices -----------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["Slow", "slow", "turtle", "Turtle"])
def test_a_choice_beats_every_preference_in_any_spelling(spelling: str) -> None:
    slow = Offer(name="slow", backend="a.b:C", capabilities=record(), aliases=("turtle",))
    decision = negotiate(BOTH, [offer("fast", preference=99, graph=True), slow], Policy(backends={"all": spelling}))
    assert served(decision) == {"extend": "slow", "decode": "slow"}
    assert decision.choice("all", "decode").winners[0].why == "asked for (--attention-backend)"
    assert all("was asked for (--attention-backend)" in out.why for out in decision.outranked)


def test_a_backends_own_name_comes_before_the_alias_of_another() -> None:
    other = Offer(name="other", backend="a.b:C", capabilities=record(preference=9), aliases=("torch",))
    assert served(negotiate([need()], [other, offer("torch")], Policy(backends={"all": "torch"}))) == {
        "decode": "torch"
    }


def test_the_narrowest_scope_of_a_choice_rules() -> None:
    backends = {"all": "a", "decode": "b", "win/decode": "c"}
    offers = [offer(name, sliding_window=True) for name in "abc"]
    assert served(negotiate(GROUPS, offers, Policy(backends=backends))) == {
        "full/extend": "a", "win/extend": "a", "full/decode": "b", "win/decode": "c",
    }  # fmt: skip


def test_a_choice_at_odds_with_another_role_says_what_would_work() -> None:
    offers = [offer("a", page_sizes={64}), offer("b", page_sizes={1}), offer("c", phases={"decode"}, page_sizes={64})]
    decision = negotiate(BOTH, offers, Policy(backends={"extend": "a", "decode": "b"}))
    assert decision.conflict.endswith("; type: --prefill-attention-backend b")


def test_a_choice_for_a_role_is_not_left_to_its_alternative() -> None:
    needs = [
        need("extend", "mla", either="prefill"), need("expand", "ragged", either="prefill"), need("decode", "mla"),
    ]  # fmt: skip
    offers = [offer("mla", attention={"mla"}), offer("ragged", attention={"ragged"})]
    assert served(negotiate(needs, offers)) == {"extend": "mla", "expand": "ragged", "decode": "mla"}
    assert served(negotiate(needs, offers[:1])) == {"extend": "mla", "decode": "mla"}
    decision = negotiate(needs, offers, Policy(backends={"expand": "mla"}))
    assert not decision.solved
    assert "mla (the choice for expand) cannot serve expand: attention: needs ragged, offers {mla}" in decision.conflict
    by_phase = negotiate(needs, offers, Policy(backends={"extend": "mla"}))
    assert served(by_phase) == {"extend": "mla", "decode": "mla"}


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Policy(backends={"all": "flashinfre"}), "there is no backend called 'flashinfre' (--attention-backend)"),
        (
            Policy(backends={"verify": "a"}),
            "a backend is asked for a role that this model does not have; given: verify",
        ),
        (Policy(backends={"all": "both"}), "the alias 'both' is ambiguous; given: a and flashinfer"),
        (
            Policy(kv_layouts={"win": "nhd"}),
            "a KV layout is asked for a group that this model does not have; given: win",
        ),
        (Policy(unserved={"all/expand"}), "a role is left to its alternatives that this model does not have"),
    ],
)
def test_a_choice_that_means_nothing_is_an_error_and_never_ignored(policy: Policy, says: str) -> None:
    offers = [
        Offer(name=name, backend="a.b:C", capabilities=record(), aliases=("both",)) for name in ("a", "flashinfer")
    ]
    with pytest.raises(NegotiationError) as caught:
        negotiate(BOTH, offers, policy)
    assert str(caught.value).startswith(says)


def test_two_backends_of_one_name_are_refused_unless_one_is_broken() -> None:
    one, other = (
        Candidate(name="x", offer=offer("x"), distribution=name, version="1") for name in ("dist-a", "dist-b")
    )
    with pytest.raises(NegotiationError, match="two backends are called 'x'; given: dist-a 1 and dist-b 1"):
        negotiate(BOTH, [one, other])
    assert served(negotiate(BOTH, [one, other.failed(MISSING)])) == {"extend": "x", "decode": "x"}


@pytest.mark.parametrize(
    ("needs", "policy", "says"),
    [
        ([], Policy(), "there is nothing to negotiate"),
        ([need(), need()], Policy(), "two requirements are for decode"),
        (
            [need("extend"), need(kv_dtype="float16")],
            Policy(),
            "the cache has one KV dtype, and decode asks for another",
        ),
        ([need("extend", page_size=16), need(page_size=8)], Policy(), "the cache has one page size"),
        ([need(page_size=16)], Policy(page_size=8), "the cache has one page size"),
        ([need(kv_layout="nhd")], Policy(kv_layouts={"all": "hnd"}), "the cache has one KV layout"),
    ],
)
def test_requirements_that_contradict_each_other_are_refused(
    needs: list[Requirement], policy: Policy, says: str
) -> None:
    with pytest.raises(NegotiationError, match=says):
        negotiate(needs, [offer("a")], policy)


def test_a_page_size_in_the_requirement_is_kept() -> None:
    assert negotiate([need("extend", page_size=48), need()], [offer("a")]).page_size == 48


def test_nothing_to_choose_from_is_said_as_such() -> None:
    conflict = negotiate(BOTH, []).conflict
    assert conflict.startswith("there is no backend to serve extend: paged, 32/8 heads × 128")
    assert conflict.endswith("; type: headstock plugins")


# --- ranking --------------------------------------------------------------------------------------


def test_serving_both_forms_of_prefill_comes_before_wishes() -> None:
    needs = [
        need("extend", "mla", either="prefill"), need("expand", "ragged", either="prefill"),
        need("decode", "mla", wishes=("graph",)),
    ]  # fmt: skip
    offers = [
        offer("prefill", attention={"mla"}, phases={"extend"}, page_sizes={1}),
        offer("ragged", attention={"ragged"}),
        offer("graphs", attention={"mla"}, phases={"decode"}, page_sizes={64}, graph=True),
        offer("plain", attention={"mla"}, phases={"decode"}),
    ]
    decision = negotiate(needs, offers)
    assert served(decision) == {"extend": "prefill", "expand": "ragged", "decode": "plain"}
    assert decision.ungranted == ("graph is off for decode: plain does not declare it",)
    assert decision.notices == (), "whoever did not ask for it need not hear of it"


def test_a_wish_comes_before_measurements_and_those_before_preference() -> None:
    offers = [
        offer("graphs", graph=True), offer("measured", preference=1), offer("slower", preference=2),
        offer("liked", preference=99),
    ]  # fmt: skip
    seconds = {"graphs": 9e-6, "measured": 1e-6, "slower": 2e-6}
    policy = Policy(profile=tuple(Measurement("all", "decode", name, 16, "nhd", s) for name, s in seconds.items()))

    def winner(*wishes: str, without: tuple[str, ...] = ()) -> str:
        field = [each for each in offers if each.name not in without]
        return served(negotiate([need(wishes=wishes)], field, policy))["decode"]

    assert winner("graph") == "graphs"
    assert winner() == "measured"
    assert winner(without=("measured",)) == "slower"
    assert winner(without=("measured", "slower", "graphs")) == "liked"


def test_layers_weigh_preferences_of_groups_at_odds() -> None:
    offers = [
        offer("for-full", sliding_window=True, page_sizes={1}, preference=0),
        offer("full-only", page_sizes={1}, preference=30),
        offer("for-win", sliding_window=True, page_sizes={64}, preference=10),
    ]
    decision = negotiate(GROUPS, offers)
    assert set(served(decision).values()) == {"for-win"}
    assert decision.page_size == 64
    (out,) = (o for o in decision.outranked if (o.backend, o.group, o.role) == ("full-only", "full", "decode"))
    assert out.why == "needs page size {1}; the whole is best on page size 64 and layout nhd"


def test_a_page_size_in_the_profile_is_weighed_by_itself() -> None:
    profile = (Measurement("all", "decode", "a", 96, "nhd", 1e-6), Measurement("all", "decode", "a", 16, "nhd", 2e-6))
    assert negotiate([need()], [offer("a")], Policy(profile=profile)).page_size == 96


def test_sums_of_preferences_are_exact() -> None:
    def pair(name: str, layout: str, extend: float, decode: float) -> Offer:
        scores = {"extend": extend, "decode": decode}
        return offer(name, *(record(phases={p}, preference=s, kv_layouts={layout}) for p, s in scores.items()))

    assert 0.1 + 0.2 > 0.3 + 0.0  # in floats; the sums are level, and nhd ranks first
    decision = negotiate(BOTH, [pair("a", "hnd", 0.1, 0.2), pair("b", "nhd", 0.3, 0.0)])
    assert served(decision) == {"extend": "b", "decode": "b"}


def test_a_role_that_nobody_serves_does_not_hide_a_conflict_between_others() -> None:
    offers = [offer("e", phases={"extend"}, page_sizes={64}), offer("d", phases={"decode"}, page_sizes={1})]
    decision = negotiate([need("extend"), need("decode"), need("verify", query_lens=frozenset({4}))], offers)
    (refusal,) = (r for r in decision.refused if (r.role, r.backend) == ("extend", "e"))
    assert str(refusal.closest).startswith(
        "page_sizes: needs {1} (shared with decode (d), verify (nobody)), offers {64}"
    )


def test_a_candidate_that_could_serve_while_nothing_serves_another_role_says_so() -> None:
    decision = negotiate(BOTH, [offer("a", phases={"extend"})])
    (out,) = decision.outranked
    assert (out.role, out.why) == ("extend", "could serve this role, but nothing serves decode")


# --- pins -----------------------------------------------------------------------------------------


def test_a_pin_is_refused_when_its_winner_no_longer_covers() -> None:
    decision = negotiate(BOTH, [offer("a"), offer("b", preference=-1)])
    again = negotiate(BOTH, [offer("a", dtypes={"float16"}), offer("b")], decision.pin(Policy()))
    assert not again.solved
    assert again.conflict.startswith(
        "a (the pinned decision) cannot serve extend: dtypes: needs bfloat16, offers {float16}; try --dtype float16"
    )
    with pytest.raises(NegotiationError, match="there is no backend called 'a'"):
        negotiate(BOTH, [offer("b")], decision.pin(Policy()))


def test_a_pin_keeps_a_role_unserved_though_somebody_else_could_serve_it_now() -> None:
    needs = [
        need("extend", "mla", either="prefill"), need("expand", "ragged", either="prefill"), need("decode", "mla"),
    ]  # fmt: skip
    mla = offer("mla", attention={"mla"})
    decision = negotiate(needs, [mla])
    again = negotiate(needs, [mla, offer("ragged", attention={"ragged"})], decision.pin(Policy()))
    assert again.outcome == decision.outcome
    (out,) = again.outranked
    assert out.why == "the role is left to its alternatives, as asked for"


@pytest.mark.parametrize(
    ("policy", "what"),
    [
        (Policy(backends={"decode": "b"}), "another backend for decode"),
        (Policy(page_size=8), "another page size for extend"),
        (Policy(kv_layouts={"all": "hnd"}), "another KV layout for extend"),
    ],
)
def test_a_pin_and_another_choice_exclude_each_other(policy: Policy, what: str) -> None:
    decision = negotiate(BOTH, [offer("a")])
    with pytest.raises(NegotiationError, match=f"the pinned decision has {what}"):
        decision.pin(policy)


def test_a_pin_and_an_alias_of_the_same_backend_agree() -> None:
    native = Offer(name="torch-native", backend="a.b:C", capabilities=record(), aliases=("torch",))
    field = [Candidate.of(native), Candidate.of(offer("b"))]
    decision = negotiate(BOTH, field, Policy(backends={"all": "torch"}))
    for name in ("torch", "Torch", "torch-native", "torch_native"):
        pinned = decision.pin(Policy(backends={"all": name}), field)
        assert negotiate(BOTH, field, pinned).outcome == decision.outcome
    for name, known in (("b", field), ("torch", []), ("torch", [*field, Candidate.of(offer("torch"))])):
        with pytest.raises(NegotiationError, match="the pinned decision has another backend"):
            decision.pin(Policy(backends={"decode": name}), known)


def test_nothing_unsolved_is_pinned() -> None:
    with pytest.raises(NegotiationError, match="the decision has no solution to pin"):
        negotiate(BOTH, []).pin(Policy())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"device": "cpu", "compute_capability": None},
            "device cuda, needed: cpu; compute_capability 90, needed: None",
        ),
        ({"dtype": "float16", "kv_dtype": "float16"}, "dtype bfloat16, needed: float16"),
        ({"head_dim": 64}, "head_dim 128, needed: 64"),
        ({"layers": 3}, "layers 1, needed: 3"),
    ],
)
def test_a_pin_for_other_requirements_is_refused_naming_the_field(changes: dict[str, Any], says: str) -> None:
    decision = negotiate(BOTH, [offer("a")])
    with pytest.raises(NegotiationError) as caught:
        check_pin(decision, [need("extend"), need("decode", **changes)])
    assert f"the pinned decision was made for another decode: {says}" in str(caught.value)


def test_a_pin_suits_the_same_requirements_whatever_is_wished_or_settled() -> None:
    decision = negotiate(BOTH, [offer("a")])
    check_pin(decision, BOTH)
    check_pin(decision, [need("decode", wishes=("graph",), page_size=16), need("extend", kv_layout="nhd")])
    with pytest.raises(NegotiationError, match="for other roles: extend, decode; needed: extend"):
        check_pin(decision, BOTH[:1])


def test_every_joint_axis_of_the_record_is_one_the_refusals_can_explain() -> None:
    assert [name for name, axis in AXES.items() if axis.joint] == ["page_sizes", "kv_layouts", "kv_dtypes"]
