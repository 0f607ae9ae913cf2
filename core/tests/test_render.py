"""What people read of a decision: everything that matters, short in an error, complete with `all`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from headstock.capabilities import Capabilities
from headstock.errors import NegotiationError
from headstock.ints import ANY
from headstock.negotiate import Candidate, Decision, Fault, Policy, Requirement, negotiate
from headstock.offer import Offer
from headstock.render import error_lines, explain, lacking, raise_unsolved


def need(role: str, **fields: Any) -> Requirement:
    base = {
        "role": role, "phase": role, "attention": "paged", "device": "cpu", "dtype": "float32", "kv_dtype": "float32",
        "head_dim": 128, "v_head_dim": 128, "num_heads": 8, "num_kv_heads": 2, "max_context": 4096,
    }  # fmt: skip
    return Requirement(**base | fields)


def offer(name: str, **fields: Any) -> Offer:
    base = {
        "label": "all", "devices": {"cpu"}, "phases": {"extend", "decode"}, "attention": {"paged"},
        "dtypes": {"float32"}, "head_dims": {64, 128}, "page_sizes": ANY, "kv_layouts": {"nhd"},
    }  # fmt: skip
    return Offer(name=name, backend="a.b:C", capabilities=Capabilities(**base | fields))


BOTH = [need("extend"), need("decode", wishes=("graph",))]
FIELD = [
    offer("best", preference=5),
    offer("second", preference=3.5),
    offer("half", dtypes={"float16"}),
    Candidate(
        name="broken", fault=Fault(what="it imports 'kernels', which is not installed", cure="pip install kernels")
    ),
]
MANY = [offer(f"b{i}", head_dims={64}, **({"dtypes": {"float16"}} if i else {})) for i in range(9)]


def test_a_backend_that_serves_one_phase_is_offered_for_that_phase_alone() -> None:
    field = [offer("decoder", phases={"decode"}, page_sizes={16}), offer("wide"), offer("z", dtypes={"float16"})]
    decision = negotiate(BOTH, field, Policy(backends={"all": "decoder"}))
    assert not decision.solved
    assert decision.conflict.endswith("; type: --decode-attention-backend decoder, without --attention-backend")
    assert negotiate(BOTH, field, Policy(backends={"decode": "decoder"})).solved


@pytest.mark.parametrize("failing", ["extend", "decode"])
def test_what_is_refused_for_the_role_that_fails_comes_first(failing: str) -> None:
    both = {"extend", "decode"}
    asked = offer("asked", phases=both - {failing}, dtypes={"float32", "float16"}, head_dims={128})
    field = [asked, offer("wide"), offer("near", dtypes={"float16"})]
    decision = negotiate(BOTH, field, Policy(backends={"all": "asked"}))
    lines = explain(decision)
    refused = lines[lines.index("Refused") + 1 :]
    roles = [line.split(":")[0].strip() for line in refused if "(all; " in line]
    assert roles == [failing, failing, *(both - {failing})]


def test_a_fault_is_no_reason_where_the_backend_could_not_serve_anyway() -> None:
    missing = Fault(what="it needs the package 'kernels'", cure="pip install kernels")
    elsewhere, here = (Candidate.of(offer(name, devices={device})) for name, device in (("gpu", "cuda"), ("x", "cpu")))
    decision = negotiate(BOTH, [offer("half", dtypes={"float16"}), elsewhere.failed(missing), here.failed(missing)])
    refused = {(each.backend, each.role): each for each in decision.refused}
    for role in ("extend", "decode"):
        assert refused["gpu", role].fault is None
        assert [mismatch.axis for mismatch in refused["gpu", role].nearest[0].mismatches] == ["devices"]
        assert (refused["x", role].fault, refused["x", role].nearest) == (missing, ())
    told = error_lines(negotiate(BOTH, [offer("half", dtypes={"float16"}), elsewhere.failed(missing)]))
    assert "kernels" not in told
    assert "devices: needs cpu, offers {cuda}" in told


def test_an_explanation_tells_need_choice_cache_notices_refusals_and_ranks() -> None:
    assert explain(negotiate(BOTH, FIELD), all=True) == [
        "Needed",
        "  extend: paged, 8/2 heads × 128, float32, context 4096, cpu",
        "  decode: paged, 8/2 heads × 128, float32, context 4096, cpu",
        "Chosen",
        "  extend: best (all; in this process): preference 5 against 3.5 of second",
        "  decode: best (all; in this process): preference 5 against 3.5 of second",
        "KV cache",
        "  page size 16, layout nhd, dtype float32",
        "Notices",
        "  graph is off for decode: best does not declare it",
        "Refused",
        "  extend: broken (in this process): it imports 'kernels', which is not installed; pip install kernels",
        "  extend: half (all; in this process)",
        "    dtypes: needs float32, offers {float16}; try --dtype float16",
        "  decode: broken (in this process): it imports 'kernels', which is not installed; pip install kernels",
        "  decode: half (all; in this process)",
        "    dtypes: needs float32, offers {float16}; try --dtype float16",
        "Outranked",
        "  extend: second (all): best: preference 5 against 3.5 of second",
        "  decode: second (all): best: preference 5 against 3.5 of second",
    ]


def test_a_short_explanation_counts_what_it_leaves_out() -> None:
    short, long = (explain(negotiate(BOTH, FIELD), all=every) for every in (False, True))
    assert short[-1] == "  and 1 more: the same flags after headstock explain --all"
    assert set(short[:-1]) < set(long)
    assert not any("--all" in line for line in long)


def test_an_error_is_the_conflict_the_three_nearest_and_what_all_lack_in_eight_lines() -> None:
    decision = negotiate([need("extend"), need("decode")], MANY)
    lines = error_lines(decision).splitlines()
    assert lines == [
        "no installed backend serves extend: paged, 8/2 heads × 128, float32, context 4096, cpu; "
        "type: the same flags after headstock explain --all",
        "  extend: b0: head_dims: needs 128, offers {64}; try another backend",
        "  decode: b0: head_dims: needs 128, offers {64}; try another backend",
        "  extend: b1: dtypes: needs float32, offers {float16}; head_dims: needs 128, offers {64}; "
        "try --dtype float16, another backend",
        "  every backend lacks head_dims 128 (extend)",
        "  every backend lacks head_dims 128 (decode)",
        "  and 15 more: the same flags after headstock explain --all",
    ]


@pytest.mark.parametrize(
    ("field", "policy"),
    [
        (MANY, Policy()),
        (MANY, Policy(backends={"all": "b3"})),
        (FIELD, Policy(backends={"decode": "broken"})),
        (FIELD, Policy(backends={"decode": "half"})),
        (FIELD, Policy(kv_layouts={"all": "hnd"})),
        ([offer("e", phases={"extend"}, page_sizes={1}), offer("d", phases={"decode"}, page_sizes={64})], Policy()),
        ([], Policy()),
    ],
)
def test_an_error_never_exceeds_eight_lines_and_says_what_to_type(field: list[Any], policy: Policy) -> None:
    decision = negotiate(BOTH, field, policy)
    lines = error_lines(decision).splitlines()
    assert len(lines) <= 8
    assert "; type: " in lines[0]
    assert all(line.strip() for line in lines)
    with pytest.raises(NegotiationError) as caught:
        raise_unsolved(decision)
    assert str(caught.value) == error_lines(decision)
    assert caught.value.decision == decision


def test_the_need_stands_under_a_choice_that_cannot() -> None:
    lines = error_lines(negotiate(BOTH, FIELD, Policy(backends={"decode": "half"}))).splitlines()
    assert lines[0] == (
        "half (--decode-attention-backend) cannot serve decode: dtypes: needs float32, offers {float16}; "
        "try --dtype float16; type: --decode-attention-backend best"
    )
    assert explain(negotiate(BOTH, FIELD, Policy(backends={"decode": "half"})))[3] == "Conflict"


def test_only_axes_that_every_record_fails_are_lacking() -> None:
    assert lacking(negotiate([need("decode")], MANY)) == ["head_dims 128 (decode)"]
    assert lacking(negotiate([need("decode")], FIELD)) == []
    assert lacking(negotiate([need("decode")], [])) == []


def test_groups_have_their_own_line_of_the_cache() -> None:
    needs = [need("decode", group="full"), need("decode", group="win", sliding_window=128)]
    lines = explain(negotiate(needs, [offer("a", kv_layouts={"hnd"}), offer("b", sliding_window=True, preference=-1)]))
    assert "  group full: page size 16, layout hnd, dtype float32" in lines
    assert "  group win: page size 16, layout nhd, dtype float32" in lines


def test_a_model_without_a_cache_says_so() -> None:
    lines = explain(negotiate([need("extend", attention="ragged")], [offer("a", attention={"ragged"})]))
    assert lines[lines.index("KV cache") + 1] == "  none"


def test_a_decision_read_from_json_is_explained_alike() -> None:
    decision = negotiate(BOTH, FIELD)
    assert explain(Decision.model_validate_json(decision.model_dump_json())) == explain(decision)


def test_negotiating_and_rendering_import_no_torch_and_no_rich() -> None:
    check = (
        "import sys, headstock.render, headstock.negotiate; print({'torch', 'rich', 'transformers'} & {*sys.modules})"
    )
    assert subprocess.check_output([sys.executable, "-c", check], text=True).strip() == "set()"
