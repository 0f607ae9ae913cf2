"""Sets of positive integers, against the Python sets they stand for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.ints import ANY, Ints, MultipleOf, to_ints

LIMIT = 200

written = st.one_of(
    st.just((ANY, set(range(1, LIMIT + 1)))),
    st.builds(lambda n: (MultipleOf(n), set(range(n, LIMIT + 1, n))), st.integers(1, 50)),
    st.builds(
        lambda n, times: (MultipleOf(n, max=n * times + n // 2), set(range(n, n * times + 1, n))),
        st.integers(1, 20),
        st.integers(1, 9),
    ),
    st.builds(lambda a, n, s: (range(a, a + n, s), set(range(a, a + n, s))), *[st.integers(1, 60)] * 3),
    st.builds(lambda values: (values, set(values)), st.sets(st.integers(1, LIMIT), min_size=1)),
)


@given(written)
def test_membership_and_mask_are_those_of_the_set_written(case: tuple[Any, set[int]]) -> None:
    ints, members = to_ints(case[0]), case[1]
    assert {n for n in range(LIMIT + 1) if n in ints} == members
    assert ints.mask(LIMIT) == sum(1 << n for n in members)


@given(written, st.integers(1, LIMIT // 2))
def test_nearest_is_the_closest_member(case: tuple[Any, set[int]], n: int) -> None:
    nearest = to_ints(case[0]).nearest(n)
    assert nearest in case[1]
    assert abs(nearest - n) == min(abs(member - n) for member in case[1])


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (ANY, "any"),
        ({64, 16}, "{16, 64}"),
        (MultipleOf(16), "multiples of 16"),
        (MultipleOf(16, max=128), "multiples of 16 up to 128"),
        (range(8, 65), "8…64"),
        (range(1, 257), "≤ 256"),
        (range(2, 20, 4), "2, 6, … up to 18"),
        (Ints(start=75), "≥ 75"),
    ],
)
def test_a_person_reads_what_was_meant(written: Any, words: str) -> None:
    assert str(to_ints(written)) == words


@pytest.mark.parametrize(
    "wrong", [[], {0}, {-1}, {True}, {1.5}, "16", 16, None, {"a": 1}, range(0, 4), range(4, 1, -1)]
)
def test_what_is_no_set_of_positive_integers_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"positive integers, given"):
        to_ints(wrong)


@pytest.mark.parametrize(("n", "largest"), [(0, None), (-4, None), (16, 8)])
def test_impossible_multiples_are_refused(n: int, largest: int | None) -> None:
    with pytest.raises(ValueError, match=f"given n={n}, max={largest}"):
        MultipleOf(n, max=largest)
