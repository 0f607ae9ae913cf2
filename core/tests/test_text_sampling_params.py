"""Sampling parameters: every value that cannot be served is refused in one line that says what would work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headstock.engine.sampling import SamplingParams
from headstock.errors import RequestError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", v) for v in (-0.1, NAN, INF, -INF, "0.7", None, True)],
        *[("top_k", v) for v in (-1, 2**31, 1.5, NAN, "5", True)],
        *[("top_p", v) for v in (0.0, -0.5, 1.0001, NAN, INF, "1")],
        *[("min_p", v) for v in (-0.1, 1.1, NAN, INF)],
        *[("seed", v) for v in (-1, 2**63, 0.5, "1")],
        *[("max_tokens", v) for v in (0, -3, 2.5, None)],
        *[("stop", v) for v in ("END", ("",), (1,), ("a\n", ""), None)],
        *[("stop_token_ids", v) for v in ((-1,), ("2",), 3, (1.5,))],
        ("ignore_eos", "yes"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_what_would_work(name, value):
    with pytest.raises(RequestError) as refusal:
        SamplingParams(**{name: value})
    message = str(refusal.value)
    assert message.startswith(name)
    assert f"given: {value!r}" in message
    assert SamplingParams.model_fields[name].description in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "near"), [("temprature", "temperature"), ("max_new_tokens", "max_tokens"), ("self", None)]
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name, near):
    with pytest.raises(RequestError, match=f"given: {name}") as refusal:
        SamplingParams(**{name: 1})
    assert (refusal.value.type if hasattr(refusal.value, "type") else None) == near
    assert "\n" not in str(refusal.value)


@given(
    temperature=st.floats(0, allow_infinity=False),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1)),
)
def test_every_value_in_range_is_kept_as_given(**values):
    params = SamplingParams(**values)
    assert params.model_dump() == SamplingParams().model_dump() | values | {"stop": tuple(values["stop"])}
    assert params.greedy == (values["temperature"] == 0)
    assert hash(params) == hash(SamplingParams(**values))


def test_parameters_read_from_json_are_checked_alike_and_do_not_change():
    params = SamplingParams.model_validate_json('{"temperature": 1, "stop": ["END"], "stop_token_ids": [2]}')
    assert (params.temperature, params.stop, params.stop_token_ids) == (1.0, ("END",), (2,))
    with pytest.raises(RequestError, match="top_p"):
        SamplingParams.model_validate({"top_p": 2})
    with pytest.raises(ValidationError, match="frozen"):
        params.temperature = 0.5
