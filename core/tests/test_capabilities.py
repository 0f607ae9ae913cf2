"""The axes of a record: each written once, checked when declared, and covering what its kind says."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headstock.capabilities import AXES, PHASES, Capabilities
from headstock.ints import ANY, MultipleOf
from headstock.offer import describe_validation_error
from headstock.requirement import Requirement

PAGED: dict[str, Any] = {
    "label": "decode",
    "devices": {"cuda"},
    "phases": {"decode"},
    "attention": {"paged"},
    "dtypes": {"bfloat16"},
    "head_dims": {64, 128},
    "page_sizes": {16},
    "kv_layouts": {"nhd"},
}
NEED: dict[str, Any] = {
    "role": "decode", "phase": "decode", "attention": "paged", "device": "cuda", "compute_capability": 90,
    "dtype": "bfloat16", "kv_dtype": "bfloat16", "head_dim": 128, "v_head_dim": 128, "num_heads": 32, "num_kv_heads": 8,
    "max_context": 4096,
}  # fmt: skip


def refusal(**changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Capabilities(**PAGED | changes)
    line = describe_validation_error(caught.value)
    assert "\n" not in line
    return line


def covers(axis: str, offered: Any, **need: Any) -> bool:
    record, requirement = Capabilities(**PAGED | {axis: offered}), Requirement(**NEED | need)
    needed = AXES[axis].needed(requirement)
    return not AXES[axis].asks(needed) or AXES[axis].covers(getattr(record, axis), needed, requirement)


def test_every_field_but_label_and_preference_is_an_axis_with_a_need_and_a_doc_line() -> None:
    assert [*AXES] == [name for name in Capabilities.model_fields if name not in ("label", "preference")]
    for name, axis in AXES.items():
        assert axis.doc, name
        assert axis.need in Requirement.model_fields or hasattr(Requirement, axis.need), name


def test_the_kinds_have_the_defaults_that_make_them_safe() -> None:
    fields = Capabilities.model_fields
    for name, axis in AXES.items():
        match axis.kind:
            case "domain":
                assert fields[name].is_required() or axis.joint, name  # joint ones are required with a cache
            case "coupled":
                assert fields[name].default in ("same", {"same"}), name
            case "feature":
                assert fields[name].default is False, name
            case "limit":
                assert fields[name].default is ANY or name == "query_lens", name
            case "need":
                assert not fields[name].default or fields[name].default == "none", name


@pytest.mark.parametrize("name", [name for name, field in Capabilities.model_fields.items() if field.is_required()])
def test_a_forgotten_domain_axis_is_named(name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Capabilities(**{key: value for key, value in PAGED.items() if key != name})
    assert describe_validation_error(caught.value) == f"record 'decode' forgets {name}: required"


@pytest.mark.parametrize("name", ["page_sizes", "kv_layouts"])
def test_a_cache_needs_page_sizes_and_layouts(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name}: required with paged or mla attention"):
        Capabilities(**{key: value for key, value in PAGED.items() if key != name})
    Capabilities(**{k: v for k, v in PAGED.items() if k != name} | {"attention": {"ragged"}})


@pytest.mark.parametrize("name", AXES)
def test_a_misspelt_axis_is_answered_with_the_nearest(name: str) -> None:
    misspelt = name[:-2] + name[-1]
    assert refusal(**{misspelt: True}) == f"unknown axis {misspelt!r} in record 'decode': did you mean {name!r}?"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"phases": {"decoding"}}, "phases: unknown decoding, did you mean 'decode'? known: extend, decode"),
        ({"attention": {"paged", "linear"}}, "attention: unknown linear, known: paged, ragged, mla"),
        (
            {"dtypes": {"bf16"}},
            "dtypes: unknown bf16, did you mean 'bfloat16'? known: bfloat16, float16, float32, float64",
        ),
        (
            {"devices": {"gpu"}},
            "devices: unknown gpu, did you mean 'cuda'? known: cpu, cuda, mps, xpu, hpu, mtia, maia, "
            "xla, vulkan, npu, mlu, musa, privateuseone",
        ),
        ({"devices": "cuda"}, "devices: expected a set of names, given 'cuda'"),
        ({"devices": set()}, "devices: an empty set covers nothing"),
        ({"kv_dtypes": set()}, "kv_dtypes: an empty set covers nothing"),
        (
            {"head_dims": 128},
            "head_dims: expected ANY, MultipleOf(n), a range, or a set of positive integers, given 128",
        ),
        ({"page_sizes": {5000}}, "page_sizes: {5000} holds none of 1…4096"),
        ({"host_lengths": "all"}, "host_lengths: input should be 'none', 'bound' or 'exact', given 'all'"),
        ({"preference": 1e308}, "preference: input should be less than or equal to 1000000, given 1e+308"),
        ({"preference": -1e308}, "preference: input should be greater than or equal to -1000000, given -1e+308"),
        ({"preference": float("nan")}, "preference: input should be a finite number, given nan"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_axis(changes: dict[str, Any], says: str) -> None:
    assert refusal(**changes) == says


def test_several_faults_make_one_line() -> None:
    assert refusal(head_dims=128, sinks="perhaps").count("; ") == 1


@pytest.mark.parametrize(
    ("axis", "offered", "need", "covered"),
    [
        ("devices", {"cuda"}, {"device": "cpu"}, False),
        ("kv_dtypes", {"same"}, {"kv_dtype": "bfloat16"}, True),
        ("kv_dtypes", {"same"}, {"kv_dtype": "float8_e4m3fn"}, False),
        ("kv_dtypes", {"same", "float8_e4m3fn"}, {"kv_dtype": "float8_e4m3fn"}, True),
        ("kv_dtypes", {"float8_e4m3fn"}, {"kv_dtype": "bfloat16"}, False),
        ("v_head_dims", "same", {"v_head_dim": 128}, True),
        ("v_head_dims", "same", {"v_head_dim": 64}, False),
        ("v_head_dims", {64}, {"v_head_dim": 64}, True),
        ("v_head_dims", {64}, {"v_head_dim": 128}, False),
        ("sliding_window", False, {"sliding_window": None}, True),
        ("sliding_window", False, {"sliding_window": 1}, False),
        ("softcap", True, {"softcap": 30.0}, True),
        ("compute_capability", {90}, {"compute_capability": 80}, False),
        ("compute_capability", {90}, {"compute_capability": None}, True),
        ("gqa_ratios", {1, 2}, {"num_heads": 32, "num_kv_heads": 8}, False),
        ("gqa_ratios", MultipleOf(2), {"num_heads": 32, "num_kv_heads": 8}, True),
        ("max_context", 4096, {"max_context": 4096}, True),
        ("max_context", 4096, {"max_context": 4097}, False),
        ("query_lens", {1}, {"query_lens": frozenset({1, 4})}, False),
        ("query_lens", range(1, 9), {"query_lens": frozenset({1, 4})}, True),
        ("query_lens", {1}, {"query_lens": None}, True),
        ("host_lengths", "exact", {"host_lengths": "bound"}, False),
        ("host_lengths", "bound", {"host_lengths": "exact"}, True),
        ("extra_inputs", {"topk_indices"}, {"extra_inputs": frozenset()}, False),
        ("extra_inputs", set(), {"extra_inputs": frozenset({"topk_indices"})}, True),
        ("page_sizes", {16}, {"page_size": None}, True),
        ("page_sizes", {16}, {"page_size": 8}, False),
    ],
)
def test_coverage_by_kind(axis: str, offered: Any, need: dict[str, Any], covered: bool) -> None:
    assert covers(axis, offered, **need) is covered


@pytest.mark.parametrize(
    ("axis", "offered", "need", "remedy"),
    [
        ("page_sizes", {16, 64}, {"page_size": 48}, "--page-size 64"),
        ("page_sizes", MultipleOf(16), {"page_size": 8}, "--page-size 16"),
        ("max_context", 2048, {"max_context": 4096}, "--max-context 2048"),
        ("dtypes", {"float16"}, {}, "--dtype float16"),
        ("kv_dtypes", {"same"}, {"kv_dtype": "float8_e4m3fn"}, "--kv-dtype auto"),
        ("graph", False, {"graph": True}, "--graph auto"),
        ("head_dims", {64}, {}, "another backend"),
    ],
)
def test_a_cure_is_what_to_type(axis: str, offered: Any, need: dict[str, Any], remedy: str) -> None:
    record, requirement = Capabilities(**PAGED | {axis: offered}), Requirement(**NEED | need)
    assert AXES[axis].cure(getattr(record, axis), AXES[axis].needed(requirement)) == remedy


def test_a_record_is_frozen_and_named_by_its_label_or_phases() -> None:
    record = Capabilities(**PAGED)
    assert str(record) == "decode"
    assert str(Capabilities(**PAGED | {"label": "", "phases": set(PHASES)})) == "extend/decode"
    with pytest.raises(ValidationError):
        record.head_dims = ANY  # type: ignore[misc]


def test_a_requirement_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValidationError, match="32 query heads do not share 5 key heads evenly"):
        Requirement(**NEED | {"num_kv_heads": 5})
    with pytest.raises(ValidationError, match="no feature is called 'grahp', known: sliding_window"):
        Requirement(**NEED | {"wishes": ("grahp",)})
    with pytest.raises(ValidationError):
        Requirement(**NEED | {"head_dim": 0})


def test_a_requirement_in_words_holds_what_it_asks_and_no_more() -> None:
    plain = str(Requirement(**NEED))
    assert plain == "decode: paged, 32/8 heads × 128, bfloat16, context 4096, cuda sm_90"
    asking = {"group": "win", "sliding_window": 4096, "softcap": 30.5, "non_causal": True, "kv_dtype": "float8_e4m3fn"}
    assert str(Requirement(**NEED | asking)) == (
        "decode of group win: paged, 32/8 heads × 128, bfloat16, context 4096, cuda sm_90, kv float8_e4m3fn, "
        "sliding window 4096, softcap 30.5, non causal"
    )
