"""The laws of negotiation, against a brute force that shares nothing with it: page sizes 1…999 × layouts × records."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from headstock.capabilities import AXES, Capabilities, Feature
from headstock.errors import NegotiationError
from headstock.ints import ANY, MultipleOf
from headstock.negotiate import Decision, Measurement, Policy, Requirement, negotiate
from headstock.offer import Offer

PAGE_SIZES = range(1, 1000)
SIZES: list[tuple[Any, Callable[[int], bool]]] = [
    (ANY, lambda n: True),
    ({1}, lambda n: n == 1),
    ({16}, lambda n: n == 16),
    ({64}, lambda n: n == 64),
    ({16, 64}, lambda n: n in (16, 64)),
    ({7, 48, 320}, lambda n: n in (7, 48, 320)),
    (MultipleOf(16), lambda n: n % 16 == 0),
    (MultipleOf(24), lambda n: n % 24 == 0),
    (MultipleOf(5), lambda n: n % 5 == 0),
    (MultipleOf(64, max=256), lambda n: n % 64 == 0 and n <= 256),
    (range(1, 257), lambda n: n <= 256),
    (range(3, 20), lambda n: 3 <= n < 20),
]
FEATURES = ("sliding_window", "lse", "graph", "cascade")


@dataclass(frozen=True)
class Rec:
    """A record in plain values, for the brute force, and as the Capabilities that negotiation sees."""

    label: str
    phases: frozenset[str]
    attention: frozenset[str]
    dtypes: frozenset[str]
    sizes: int  # index into SIZES
    layouts: frozenset[str]
    kv_dtypes: frozenset[str]
    features: frozenset[str]
    query_lens: frozenset[int]
    max_context: int | None
    extra_inputs: frozenset[str]
    preference: int

    def capabilities(self) -> Capabilities:
        return Capabilities(
            label=self.label, devices={"cpu"}, head_dims=ANY, phases=self.phases, attention=self.attention,
            dtypes=self.dtypes, page_sizes=SIZES[self.sizes][0], kv_layouts=self.layouts, kv_dtypes=self.kv_dtypes,
            query_lens=self.query_lens, max_context=self.max_context or ANY, extra_inputs=self.extra_inputs,
            preference=self.preference, **dict.fromkeys(self.features, True),
        )  # fmt: skip

    def failing(self, need: Requirement, policy: Policy) -> set[str]:
        """The axes that fail by themselves, written out once more."""
        asked = {name for name in FEATURES if getattr(need, name)}
        fails = {
            "phases": need.phase not in self.phases,
            "attention": need.attention not in self.attention,
            "dtypes": need.dtype not in self.dtypes,
            "query_lens": need.query_lens is not None and not need.query_lens <= self.query_lens,
            "max_context": self.max_context is not None and need.max_context > self.max_context,
            "extra_inputs": not self.extra_inputs <= need.extra_inputs,
            **{name: name in asked and name not in self.features for name in FEATURES},
        }
        if need.attention != "ragged":
            same = "same" in self.kv_dtypes and need.kv_dtype == need.dtype
            fails["kv_dtypes"] = not (same or need.kv_dtype in self.kv_dtypes)
            layout = policy.kv_layouts.get(need.group) or policy.kv_layouts.get("all")
            fails["kv_layouts"] = layout is not None and layout not in self.layouts
            fails["page_sizes"] = policy.page_size is not None and not SIZES[self.sizes][1](policy.page_size)
        return {axis for axis, failed in fails.items() if failed}

    def serves(self, need: Requirement, policy: Policy, page_size: int | None, layout: str | None) -> bool:
        if self.failing(need, policy):
            return False
        return need.attention == "ragged" or (SIZES[self.sizes][1](page_size) and layout in self.layouts)


@dataclass(frozen=True)
class Case:
    """A question to negotiation: what is needed, who offers what, what the user fixed."""

    needs: list[Requirement]
    field: dict[str, list[Rec]]
    policy: Policy = field(default_factory=Policy)

    def offers(self) -> list[Offer]:
        return [
            Offer(name=name, backend="a.b:C", capabilities=tuple(rec.capabilities() for rec in records))
            for name, records in self.field.items()
        ]

    def decide(self) -> Decision:
        return negotiate(self.needs, self.offers(), self.policy)

    def within_choice(self, need: Requirement, name: str) -> bool:
        chosen = chosen_for(need, self.policy)
        return chosen is None or chosen == name

    def configurations(self) -> Iterator[tuple[int | None, dict[str, str | None]]]:
        """Every page size × layouts; of page sizes that no record tells apart, the one that ranks best."""
        groups = list(dict.fromkeys(need.group for need in self.needs))
        cached = {need.group for need in self.needs if need.attention != "ragged"}
        layouts = [self.layouts(group) if group in cached else (None,) for group in groups]
        pages: list[int | None] = [None]
        if cached:
            told: dict[tuple[object, ...], int] = {}
            named = {m.page_size for m in self.policy.profile}
            used = sorted({rec.sizes for records in self.field.values() for rec in records})
            for page in PAGE_SIZES if self.policy.page_size is None else [self.policy.page_size]:
                sign = (*(SIZES[i][1](page) for i in used), page if page in named else None)
                told[sign] = min(told.get(sign, page), page, key=lambda p: page_rank(p, self.policy))
            pages = [*told.values()]
        for page, *names in product(pages, *layouts):
            yield page, dict(zip(groups, names, strict=True))

    def layouts(self, group: str) -> tuple[str, ...]:
        fixed = self.policy.kv_layouts.get(group) or self.policy.kv_layouts.get("all")
        return (fixed,) if fixed else ("nhd", "hnd", "latent")

    def able(self, need: Requirement, page: int | None, layout: str | None) -> list[tuple[str, Rec]]:
        return [
            (name, rec)
            for name, records in self.field.items()
            if self.within_choice(need, name)
            for rec in records
            if rec.serves(need, self.policy, page, layout)
        ]

    def strategies(self, need: Requirement, page: int | None, layout: str | None) -> list[Servers]:
        """Ways to serve a role: by one alone or, where the host can and all was measured, by any at each batch size."""
        able = self.able(need, page, layout)
        single = [((None, *each),) for each in able]
        sizes = buckets(need, self.policy)
        if not self.policy.by_batch or len(sizes) == 1:
            return single
        at = (page, layout) if need.attention != "ragged" else (None, None)
        timed = [each for each in able if micros(need, each[0], at, self.policy) is not None]
        mixed = (merged(sizes, picks) for picks in product(timed, repeat=len(sizes)))
        return [*single, *(each for each in mixed if len(each) > 1)]

    def sets(self) -> list[list[Requirement]]:
        """Roles of which one must be served; a role whose own name the user chose for must be served itself."""
        found: dict[tuple[str, str], list[Requirement]] = {}
        for need in self.needs:
            found.setdefault((need.group, need.either or need.role), []).append(need)
        return [*found.values(), *([need] for need in self.needs if self.demanded(need))]

    def demanded(self, need: Requirement) -> bool:
        """Whether the user chose for this very role, and not for its whole phase."""
        given = self.policy.backends
        return f"{need.group}/{need.role}" in given or (need.role != need.phase and need.role in given)

    def feasible(self, page: int | None, layouts: dict[str, str | None], but: Requirement | None = None) -> bool:
        """Whether every set of alternatives has a server, apart from those that hold `but`."""
        return all(
            any(self.able(need, page, layouts[need.group]) for need in alternatives)
            for alternatives in self.sets()
            if but not in alternatives
        )

    def best(self) -> tuple[Any, ...] | None:
        """The optimal joint solution by the documented key, as (key, page, layouts, picks)."""
        best = None
        for page, layouts in self.configurations():
            if not self.feasible(page, layouts):
                continue
            options = [self.strategies(need, page, layouts[need.group]) for need in self.needs]
            options = [[*each, None] if need.either else each for need, each in zip(self.needs, options, strict=True)]
            for picks in product(*options):
                served = {id(need) for need, pick in zip(self.needs, picks, strict=True) if pick}
                if all(any(id(need) in served for need in each) for each in self.sets()):
                    key = self.key(page, layouts, picks)
                    if best is None or key < best[0]:
                        best = (key, page, layouts, picks)
        return best

    def key(self, page: int | None, layouts: dict[str, str | None], picks: tuple[Any, ...]) -> tuple[Any, ...]:
        wishes = list(dict.fromkeys(wish for need in self.needs for wish in need.wishes))
        unserved = unmeasured = seconds = preference = 0
        granted = [0] * len(wishes)
        names: dict[str, list[str]] = {group: [] for group in layouts}
        for need, servers in zip(self.needs, picks, strict=True):
            if servers is None:
                unserved += need.layers
                continue
            names[need.group] += [name for _, name, _ in servers]
            at = (page, layouts[need.group]) if need.attention != "ragged" else (None, None)
            each = spread(buckets(need, self.policy), servers)
            measured = [micros(need, name, at, self.policy) for name, _ in each]
            known = None not in measured
            unmeasured += 0 if known else need.layers
            if known:
                seconds += need.layers * (sum(own[i] for i, own in enumerate(measured)) // len(each))
            preference += need.layers * sum(rec.preference * 10**6 for _, rec in each) // len(each)
            for i, wish in enumerate(wishes):
                everybody = all(wish in need.wishes and wish in rec.features for _, rec in each)
                granted[i] += need.layers if everybody else 0
        ranks = [(layout_rank(layouts[group], self.policy), tuple(names[group])) for group in layouts]
        costs = (unserved, *(-n for n in granted), unmeasured, seconds, -preference)
        return (*costs, page_rank(page, self.policy), ranks)


Servers = tuple[tuple[int | None, str, Rec], ...]


def buckets(need: Requirement, policy: Policy) -> list[int | None]:
    """The batch sizes up to which a role was measured; the last is None, for any."""
    sizes = {m.max_batch for m in policy.profile if (m.group, m.role) == (need.group, need.role)}
    return [*sorted(size for size in sizes if size is not None), None]


def micros(need: Requirement, name: str, at: tuple[Any, Any], policy: Policy) -> list[int] | None:
    """Femtoseconds per token of a layer in each bucket, None where not all were measured."""
    key = (need.group, need.role, name, *at)
    found = {m.max_batch: round(m.seconds / m.tokens * 1e15) for m in policy.profile if m[:5] == key}
    sizes = buckets(need, policy)
    return [found[size] for size in sizes] if set(sizes) <= found.keys() else None


def merged(sizes: list[int | None], picks: tuple[tuple[str, Rec], ...]) -> Servers:
    """Who serves up to which size, where one who serves several in a row is named once."""
    servers: list[tuple[int | None, str, Rec]] = []
    for size, (name, rec) in zip(sizes, picks, strict=True):
        if servers and servers[-1][1:] == (name, rec):
            servers.pop()
        servers.append((size, name, rec))
    return tuple(servers)


def spread(sizes: list[int | None], servers: Servers) -> list[tuple[str, Rec]]:
    """The opposite: who serves each bucket."""
    limits = [10**9 if size is None else size for size in sizes]
    return [next((name, rec) for most, name, rec in servers if most is None or limit <= most) for limit in limits]


def chosen_for(need: Requirement, policy: Policy) -> str | None:
    given = policy.backends
    return given.get(f"{need.group}/{need.role}") or given.get(need.role) or given.get(need.phase) or given.get("all")


def page_rank(page: int | None, policy: Policy) -> tuple[int, int]:
    order = {size: i for i, size in enumerate(policy.page_sizes)}
    return (0, order[page]) if page in order else (1, page or 0)


def layout_rank(layout: str | None, policy: Policy) -> tuple[int, str]:
    order = {name: i for i, name in enumerate(policy.layouts)}
    return (order[layout], "") if layout in order else (len(order), layout or "")


def need(role: str, attention: str = "paged", **fields: Any) -> Requirement:
    phase = "decode" if role in ("decode", "verify") else "extend"
    base = {
        "role": role, "phase": phase, "attention": attention, "device": "cpu", "dtype": "float32",
        "kv_dtype": "float32", "head_dim": 64, "v_head_dim": 64, "num_heads": 8, "num_kv_heads": 2, "max_context": 4096,
    }  # fmt: skip
    return Requirement(**base | fields)


WISHES = ("graph", "cascade")
SCENES: dict[str, list[Requirement]] = {
    "one group": [need("extend"), need("decode", wishes=WISHES, query_lens={1})],
    "two groups": [
        need(role, group=group, layers=layers, sliding_window=window, wishes=wishes)
        for group, layers, window in (("full", 2, None), ("win", 5, 128))
        for role, wishes in (("extend", ()), ("decode", WISHES))
    ],
    "mla": [
        need("extend", "mla", either="prefill", layers=3),
        need("expand", "ragged", either="prefill", layers=3, lse=True),
        need("decode", "mla", layers=3, wishes=WISHES),
    ],
    "verify": [need("extend"), need("decode", query_lens={1}), need("verify", query_lens={4})],
    "ragged only": [need("encode", "ragged", layers=6)],
}

often = st.sampled_from


@st.composite
def records(draw: st.DrawFn, label: str, easy: bool) -> Rec:
    """A record; an easy one covers every need by itself, so that page sizes, layouts and ranks decide."""

    def mostly(common: Any, *rare: Any) -> Any:
        return common if easy else draw(often([common] * 8 + [*rare]))

    return Rec(
        label=label,
        phases=mostly(frozenset({"extend", "decode"}), frozenset({"extend"}), frozenset({"decode"})),
        attention=mostly(frozenset({"paged", "ragged", "mla"}), frozenset({"paged"}), frozenset({"mla", "ragged"})),
        dtypes=mostly(frozenset({"float32"}), frozenset({"bfloat16"})),
        sizes=draw(st.integers(0, len(SIZES) - 1)),
        layouts=draw(st.frozensets(often(["nhd", "hnd", "latent"]), min_size=1)),
        kv_dtypes=mostly(frozenset({"same"}), frozenset({"same", "float8_e4m3fn"}), frozenset({"float8_e4m3fn"})),
        features=draw(st.frozensets(often(FEATURES))) | mostly({"sliding_window", "lse"}, set()),
        query_lens=mostly(frozenset({1, 4}), frozenset({1}), frozenset({1})),
        max_context=mostly(None, 8192, 1024),
        extra_inputs=mostly(frozenset(), frozenset({"topk_indices"})),
        preference=draw(st.integers(0, 3)),
    )


@st.composite
def policies(draw: st.DrawFn, needs: list[Requirement], names: list[str]) -> Policy:
    fixed: dict[str, Any] = {"page_size": draw(often([None] * 6 + [8, 16, 48, 64]))}
    scopes = ["all", *{n.role for n in needs}, *{n.phase for n in needs}, f"{needs[0].group}/{needs[0].role}"]
    choices = often([{scope: name} for scope in scopes for name in names])
    fixed["backends"] = draw(st.just({}) | st.just({}) | choices)
    fixed["kv_layouts"] = draw(often([{}] * 5 + [{"all": "hnd"}, {needs[0].group: "nhd"}]))
    return Policy(**fixed, profile=draw(st.just(()) | profiles(needs, names)), by_batch=draw(st.booleans()))


@st.composite
def profiles(draw: st.DrawFn, needs: list[Requirement], names: list[str]) -> tuple[Measurement, ...]:
    found = {}
    for _ in range(draw(often([1, 4, 16]))):
        role = draw(often(needs))
        at = (draw(often([1, 16, 48, 64])), draw(often(["nhd", "hnd"]))) if role.cached else (None, None)
        found[role.group, role.role, draw(often(names)), *at] = draw(st.integers(1, 9)) * 1e-6
    return tuple(Measurement(*key, seconds) for key, seconds in found.items())


@st.composite
def bucketed(draw: st.DrawFn) -> Case:
    """A case whose decoding was measured by batch size, in times of which no two are equal, on all or most backends."""
    needs = SCENES[draw(often(["one group", "two groups", "verify"]))]
    names = [f"b{i}" for i in range(draw(st.integers(2, 3)))]
    field = {name: [draw(records("r0", True))] for name in names}
    if draw(often([True, True, True, False])):
        same = {"sizes": 0, "layouts": frozenset({"nhd"}), "features": frozenset({"sliding_window", "graph"})}
        field = {name: [replace(rec, **same) for rec in recs] for name, recs in field.items()}
    keys = [
        (group, role, name, 16, "nhd") for group, role in {(n.group, n.role): None for n in needs} for name in names
    ]
    missing = draw(st.sets(often(keys), max_size=1))
    sizes = draw(often([(None,), (4, None), (1, 8, None)]))
    wanted = [(key, size) for key in keys if key not in missing for size in (sizes if key[1] == "decode" else (None,))]
    times = draw(st.permutations(range(1, len(wanted) + 1)))
    profile = tuple(
        Measurement(*key, micros * 1e-6, size, size or 16) for (key, size), micros in zip(wanted, times, strict=True)
    )
    return Case(needs, field, Policy(profile=profile, by_batch=draw(often([True, True, True, False]))))


@st.composite
def cases(draw: st.DrawFn, fixed: bool = True, max_offers: int = 4) -> Case:
    needs = SCENES[draw(often(sorted(SCENES)))]
    names = [f"b{i}" for i in range(draw(st.integers(1, max_offers)))]
    easy = draw(st.booleans())
    field = {name: [draw(records(f"r{i}", easy)) for i in range(draw(st.integers(1, 2)))] for name in names}
    return Case(needs, field, draw(policies(needs, names)) if fixed else Policy())


many = settings(max_examples=200, deadline=None)
some = settings(max_examples=60, deadline=None)


@many
@given(cases(max_offers=3) | bucketed())
def test_finds_the_optimal_joint_solution_whenever_one_exists(case: Case) -> None:
    decision, best = case.decide(), case.best()
    event(f"solved: {decision.solved}")
    assert decision.solved == (best is not None)
    assert bool(decision.conflict) != decision.solved
    if best is None:
        return
    _, page, layouts, picks = best
    assert decision.page_size == page
    for need, choice, pick in zip(case.needs, decision.choices, picks, strict=True):
        servers = [(most, name, rec.label) for most, name, rec in pick or ()]
        assert [(w.max_batch, w.backend, w.record) for w in choice.winners] == servers
        event(f"winners: {len(servers)}")
        expected = (page, layouts[need.group]) if need.attention != "ragged" else (None, None)
        assert (choice.requirement.page_size, choice.requirement.kv_layout) == expected


@some
@given(cases())
def test_every_winner_covers_and_is_the_users_choice_where_there_is_one(case: Case) -> None:
    decision = case.decide()
    for need, choice in zip(case.needs, decision.choices, strict=bool(decision.choices)):
        for winner in choice.winners:
            record = next(rec for rec in case.field[winner.backend] if rec.label == winner.record)
            assert record.serves(need, case.policy, decision.page_size, choice.requirement.kv_layout)
            assert winner.backend == (chosen_for(need, case.policy) or winner.backend)
            assert winner.granted == tuple(wish for wish in need.wishes if wish in record.features)
        if not choice.winners:
            assert need.either
            assert not case.demanded(need)


@some
@given(cases(), st.data())
def test_the_order_of_offers_changes_nothing(case: Case, data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(case.offers()))
    assert negotiate(case.needs, shuffled, case.policy) == case.decide()


@many
@given(cases() | bucketed())
def test_an_offer_that_loses_never_changes_the_winner(case: Case) -> None:
    whole = case.decide()
    winners = {winner.backend for choice in whole.choices for winner in choice.winners}
    asked_for = set(case.policy.backends.values())
    for loser in case.field.keys() - winners - asked_for:
        rest = {name: recs for name, recs in case.field.items() if name != loser}
        if rest and whole.solved:
            assert replace(case, field=rest).decide().outcome == whole.outcome


def joint_failing(case: Case, need: Requirement, record: Rec) -> set[str]:
    """The axes on which a record is at odds with the other roles, from all configurations on which those are served."""
    if need.attention == "ragged":
        return set()
    group, fixed = need.group, case.policy.kv_layouts.get(need.group) or case.policy.kv_layouts.get("all")
    others: dict[str, set[int]] = {}
    for page, layouts in case.configurations():
        if case.feasible(page, layouts, but=need):
            others.setdefault(layouts[group], set()).add(page)  # type: ignore[arg-type]
    layouts_left = {layout for layout in record.layouts if fixed in (None, layout)}
    fits = SIZES[record.sizes][1]
    if any(fits(page) for layout in layouts_left for page in others.get(layout, ())):
        return set()
    common = layouts_left & others.keys()
    pages = {page for layout in common or others for page in others[layout]}
    return {name for name, fails in (("kv_layouts", not common), ("page_sizes", not any(map(fits, pages)))) if fails}


@many
@given(cases(max_offers=3))
def test_every_loser_is_refused_with_all_failing_axes_or_outranked(case: Case) -> None:
    decision = case.decide()
    refused = {(r.group, r.role, r.backend): r for r in decision.refused}
    outranked = {(o.group, o.role, o.backend): o for o in decision.outranked}
    winners = {(c.group, c.role, w.backend) for c in decision.choices for w in c.winners}
    assert len(refused) + len(outranked) + len(winners) == len(case.needs) * len(case.field)
    for need, name in product(case.needs, case.field):
        key = (need.group, need.role, name)
        assert (key in refused) + (key in outranked) + (key in winners) == 1
        own = {rec.label: rec.failing(need, case.policy) for rec in case.field[name]}
        if key in outranked:
            assert not own[outranked[key].record]
        if not decision.solved:
            continue  # who is to blame for a conflict among roles is checked on examples
        axes = {rec.label: own[rec.label] | joint_failing(case, need, rec) for rec in case.field[name]}
        if key not in refused:
            assert not all(axes.values())
            continue
        antichain = {label for label, mine in axes.items() if not any(other < mine for other in axes.values())}
        assert {near.record: {m.axis for m in near.mismatches} for near in refused[key].nearest} == {
            label: axes[label] for label in antichain
        }


@some
@given(cases())
def test_every_mismatch_says_what_was_needed_and_offered_and_helps(case: Case) -> None:
    for refusal in case.decide().refused:
        need = next(need for need in case.needs if (need.group, need.role) == (refusal.group, refusal.role))
        for near in refusal.nearest:
            assert [m.axis for m in near.mismatches] == [
                name for name in AXES if name in {m.axis for m in near.mismatches}
            ]
            for mismatch in near.mismatches:
                assert mismatch.needed
                assert mismatch.offered
                assert mismatch.remedy
                shared = AXES[mismatch.axis].joint and (len(case.needs) > 1 or mismatch.because == "asked for")
                assert bool(mismatch.because) == shared, (need, mismatch)


def rank_of(
    case: Case, need: Requirement, name: str, rec: Rec, page: int | None, layout: str | None
) -> tuple[Any, ...]:
    profile = {m[:5]: round(m.seconds * 1e6) for m in case.policy.profile}
    at = (page, layout) if need.attention != "ragged" else (None, None)
    measured = profile.get((need.group, need.role, name, *at))
    wishes = [wish in need.wishes and wish in rec.features for wish in WISHES]
    return (*(not each for each in wishes), measured is None, measured or 0, -rec.preference, name)


@many
@given(cases())
def test_what_is_said_of_winners_and_outranked_is_true(case: Case) -> None:
    decision = case.decide()
    for out in decision.outranked if decision.solved else ():
        choice, need = (
            decision.choice(out.group, out.role),
            next(need for need in case.needs if (need.group, need.role) == (out.group, out.role)),
        )
        loser = next(rec for rec in case.field[out.backend] if rec.label == out.record)
        settled = (decision.page_size, choice.requirement.kv_layout)
        if chosen := chosen_for(need, case.policy):
            assert out.why.startswith(f"{chosen} was asked for (")
            continue
        event(out.why.split()[0] if out.why.startswith("needs") else out.why.split()[1])
        if not loser.serves(need, case.policy, *settled):
            assert out.why.startswith("needs ")
            page_is_at_odds = not SIZES[loser.sizes][1](decision.page_size)
            assert ("needs page size" in out.why) == page_is_at_odds
            assert f"the whole is best on page size {settled[0]} and layout {settled[1]}" in out.why
            continue
        (winner,) = choice.winners
        record = next(rec for rec in case.field[winner.backend] if rec.label == winner.record)
        check_advantage(case, need, (winner.backend, record), (out.backend, loser), settled, out.why)
    for need, choice in zip(case.needs, decision.choices, strict=bool(decision.choices)):
        for winner in choice.winners:
            settled = (decision.page_size, choice.requirement.kv_layout)
            record = next(rec for rec in case.field[winner.backend] if rec.label == winner.record)
            rivals = [(n, rec) for n, rec in case.able(need, *settled) if n != winner.backend]
            if chosen_for(need, case.policy):
                assert winner.why.startswith("asked for (--") or winner.why.startswith("asked for (the choice for ")
            elif rivals:
                rival = min(rivals, key=lambda rival: rank_of(case, need, *rival, *settled))
                check_advantage(case, need, (winner.backend, record), rival, settled, winner.why)
            else:
                assert winner.why.startswith("the only one")


@some
@given(bucketed())
def test_what_is_said_of_batch_sizes_is_measured(case: Case) -> None:
    decision = case.decide()
    for choice in decision.choices:
        need = next(n for n in case.needs if (n.group, n.role) == (choice.group, choice.role))
        if len(choice.winners) < 2:
            continue
        at = (decision.page_size, choice.requirement.kv_layout)
        for winner in choice.winners:
            assert winner.why.startswith("measured ")
            mine, theirs = (float(each) for each in re.findall(r"([\d.]+) µs", winner.why))
            assert mine < theirs
            size = winner.max_batch
            assert Measurement(need.group, need.role, winner.backend, *at, mine * 1e-6, size, size or 16) in [
                m._replace(seconds=round(m.seconds * 1e6) * 1e-6) for m in case.policy.profile
            ]


def check_advantage(
    case: Case, need: Requirement, winner: tuple[str, Rec], loser: tuple[str, Rec], settled: tuple[Any, Any], why: str
) -> None:
    mine, theirs = (rank_of(case, need, *each, *settled) for each in (winner, loser))
    assert mine < theirs
    column = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
    says = [
        f"grants graph, unlike {loser[0]}",
        f"grants cascade, unlike {loser[0]}",
        f"measured on this machine, unlike {loser[0]}",
        f"measured {mine[3]} µs a layer against {theirs[3]} µs of {loser[0]}",
        f"preference {winner[1].preference} against {loser[1].preference} of {loser[0]}",
        f"level with {loser[0]}, first by name",
    ]
    assert why.endswith(says[column])


FLAGS = {"--attention-backend": "all", "--prefill-attention-backend": "extend", "--decode-attention-backend": "decode"}


@settings(max_examples=200, deadline=None)
@given(cases())
def test_what_a_conflict_says_to_type_works(case: Case) -> None:
    decision = case.decide()
    if decision.solved:
        return
    policy, typed = case.policy, decision.conflict.rpartition("; type: ")[2]
    if match := re.fullmatch(r"--page-size (\d+)", typed):
        assert policy.page_size not in (None, int(match[1]))
        assert negotiate(case.needs, case.offers(), policy.model_copy(update={"page_size": int(match[1])})).solved
        event("another page size")
    elif match := re.fullmatch(r"(--\w+-attention-backend) (\S+), without --attention-backend", typed):
        assert FLAGS[match[1]] not in policy.backends
        backends = {scope: name for scope, name in policy.backends.items() if scope != "all"}
        backends |= {FLAGS[match[1]]: policy.backends["all"]}
        assert match[2] == policy.backends["all"]
        assert negotiate(case.needs, case.offers(), policy.model_copy(update={"backends": backends})).solved
        event("in one phase alone")
    elif match := re.fullmatch(r"(--(?:\w+-)?attention-backend|the choice for \S+) (\S+)", typed):
        scope = FLAGS.get(match[1]) or match[1].removeprefix("the choice for ")
        assert policy.backends[scope] != match[2]
        backends = {**policy.backends, scope: match[2]}
        assert negotiate(case.needs, case.offers(), policy.model_copy(update={"backends": backends})).solved
        event("another backend")
    elif match := re.fullmatch(r"--kv-layout (\S+)", typed):
        layouts = {"all": match[1]}
        assert policy.kv_layouts not in ({}, layouts)
        assert negotiate(case.needs, case.offers(), policy.model_copy(update={"kv_layouts": layouts})).solved
        event("another layout")
    elif typed.startswith("the same without"):
        assert negotiate(case.needs, case.offers()).solved
        event("without choices")
    else:
        assert typed == "the same flags after headstock explain --all"


@some
@given(cases() | bucketed())
def test_a_decision_survives_json_and_its_pin_gives_it_again(case: Case) -> None:
    decision = case.decide()
    assert Decision.model_validate_json(decision.model_dump_json()) == decision
    if decision.solved:
        profiled = Policy(profile=case.policy.profile, by_batch=case.policy.by_batch)
        assert negotiate(case.needs, case.offers(), decision.pin(profiled)).outcome == decision.outcome
        assert decision.pin(case.policy).page_size == decision.page_size


@some
@given(cases(), st.integers(1, 64))
def test_a_pin_of_another_page_size_is_held_to_the_letter_or_refused(case: Case, size: int) -> None:
    """As a decision that was edited has it, which still agrees with itself."""
    decision = case.decide()
    if not decision.solved or decision.page_size is None or any(need.page_size for need in decision.requirements):
        return
    choices = [
        each.model_copy(update={"requirement": each.requirement.model_copy(update={"page_size": size})})
        if each.requirement.cached
        else each
        for each in decision.choices
    ]
    edited = Decision(**dict(decision) | {"page_size": size, "choices": choices})
    try:
        again = negotiate(case.needs, case.offers(), edited.pin(Policy()))
    except NegotiationError as error:
        event(f"refused: {error.what[:40]}")
        return
    assert not again.solved or again.outcome == edited.outcome
    event("given again" if again.solved else "no solution")


@pytest.mark.parametrize("name", [name for name, axis in AXES.items() if axis.kind == "feature"])
def test_a_feature_that_nobody_needs_refuses_nobody(name: str) -> None:
    assert Capabilities.model_fields[name].default is False
    assert not AXES[name].asks(Requirement.model_fields[AXES[name].need].default)


def test_a_new_feature_axis_never_refuses_an_older_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    class NewerRequirement(Requirement):
        hyperbolic: bool = False

    older = Offer(
        name="older",
        backend="a.b:C",
        capabilities=Capabilities(
            devices={"cpu"}, phases={"extend"}, attention={"ragged"}, dtypes={"float32"}, head_dims=ANY
        ),
    )
    monkeypatch.setitem(AXES, "hyperbolic", Feature(need="hyperbolic", doc="a feature of the future"))
    asks_nothing = NewerRequirement(**need("encode", "ragged").model_dump())
    assert negotiate([asks_nothing], [older]).choice("all", "encode").winners[0].backend == "older"
