"""Offers and candidates: data that is checked when it is declared, and told in one line when it is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from headstock.capabilities import Capabilities
from headstock.ints import ANY
from headstock.offer import Candidate, Fault, Offer, canonical, describe_validation_error

RECORD = Capabilities(devices={"cpu"}, phases={"extend"}, attention={"ragged"}, dtypes={"float32"}, head_dims=ANY)


def offer(**fields: Any) -> Offer:
    return Offer(**{"name": "mine", "backend": "pkg.module:Class", "capabilities": RECORD} | fields)


def refusal(**fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        offer(**fields)
    line = describe_validation_error(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("name", ["flashinfer-mla", "flashinfer_mla", "FlashInfer.MLA", "flashinfer--_mla"])
def test_spellings_of_a_name_are_one_name(name: str) -> None:
    assert canonical(name) == "flashinfer-mla"
    assert offer(name=name).name == "flashinfer-mla"
    assert Candidate.of(offer(name="flashinfer-mla")).answers_to(name)


def test_aliases_are_answered_to_in_any_spelling() -> None:
    candidate = Candidate.of(offer(name="torch-native", aliases=("Torch", "sdpa_ref")))
    assert all(candidate.answers_to(name) for name in ("torch", "TORCH", "sdpa-ref", "torch_native"))
    assert not candidate.answers_to("tor")


def test_one_record_stands_for_a_tuple_of_one() -> None:
    assert offer().capabilities == (RECORD,)
    assert offer(capabilities=[RECORD, RECORD]).capabilities == (RECORD, RECORD)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"capabilites": RECORD}, "unknown field 'capabilites' in offer 'mine': did you mean 'capabilities'?"),
        ({"backend": "pkg.module.Class"}, "backend: expected \"package.module:Class\", given 'pkg.module.Class'"),
        ({"options": "pkg"}, "options: expected \"package.module:Class\", given 'pkg'"),
        ({"kv_layouts": {"tkv4": "turbo"}}, "tkv4: expected \"package.module:Class\", given 'turbo'"),
        ({"name": "no spaces"}, "name: a backend's name is letters, digits, '-', '_' and '.', given 'no spaces'"),
        ({"api_version": "new"}, "api_version: input should be a valid integer"),
        ({"capabilities": ()}, "capabilities: tuple should have at least 1 item"),
        (
            {"capabilities": [{"label": "decode", "devices": {"cpu"}, "sliding_windw": True}]},
            "capabilities.0: unknown axis 'sliding_windw' in record 'decode': did you mean 'sliding_window'?; "
            "record 'decode' forgets phases, attention, dtypes, head_dims: required",
        ),
    ],
)
def test_a_wrong_offer_is_one_line_that_says_where(fields: dict[str, Any], says: str) -> None:
    assert refusal(**fields).startswith(says)


def test_any_pydantic_model_is_described() -> None:
    class Options(BaseModel, extra="forbid"):
        splits: int

    with pytest.raises(ValidationError) as caught:
        Options(spilts=3)  # type: ignore[call-arg]
    assert describe_validation_error(caught.value) == "splits: required; unknown name 'spilts'"


def test_a_candidate_is_an_offer_a_fault_or_both() -> None:
    candidate = Candidate.of(offer())
    assert candidate.usable
    assert candidate.source == "in this process"
    broken = candidate.failed(Fault(what="probe failed", cure="headstock doctor"))
    assert not broken.usable
    assert str(broken.fault) == "probe failed; headstock doctor"
    assert candidate.usable
    assert Candidate(name="x", fault=Fault(what="gone"), distribution="dist-x", version="1.2").source == "dist-x 1.2"
    with pytest.raises(ValidationError, match="neither an offer nor a fault"):
        Candidate(name="empty")
