"""Sets of positive integers as a plugin names them: ANY, MultipleOf(n), a range, or the values themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema


@dataclass(frozen=True, slots=True)
class Ints:
    """Either explicit `values`, or every `step`-th integer from `start` to `last` (None: without end)."""

    values: frozenset[int] | None = None
    start: int = 1
    step: int = 1
    last: int | None = None

    def __contains__(self, n: int) -> bool:
        if self.values is not None:
            return n in self.values
        return n >= self.start and (self.last is None or n <= self.last) and (n - self.start) % self.step == 0

    def nearest(self, n: int) -> int:
        """The member closest to `n`, the smaller of two."""
        if self.values is not None:
            return min(self.values, key=lambda value: (abs(value - n), value))
        steps = max(0, round((n - self.start) / self.step))
        if self.last is not None:
            steps = min(steps, (self.last - self.start) // self.step)
        return self.start + self.step * steps

    def mask(self, limit: int) -> int:
        """The set cut at `limit`, as an integer whose bit n stands for n: intersections are `&`, unions `|`."""
        return _mask(self, limit)

    def __str__(self) -> str:
        if self.values is not None:
            return "{" + ", ".join(str(n) for n in sorted(self.values)) + "}"
        upto = f" up to {self.last}" if self.last is not None else ""
        if self.step > 1 and self.start == self.step:
            return f"multiples of {self.step}{upto}"
        if self.step > 1:
            return f"{self.start}, {self.start + self.step}, …{upto}"
        if self.start > 1:
            return f"{self.start}…{self.last}" if self.last is not None else f"≥ {self.start}"
        return f"≤ {self.last}" if self.last is not None else "any"


ANY = Ints()
"""Every positive integer: no limit."""


def MultipleOf(n: int, max: int | None = None) -> Ints:
    """The multiples of `n`, up to `max` where given: `page_sizes=MultipleOf(16, max=128)`."""
    if n < 1 or (max is not None and max < n):
        raise ValueError(f"MultipleOf needs n ≥ 1 and max ≥ n, given n={n}, max={max}")
    return Ints(start=n, step=n, last=max)


def to_ints(value: Any) -> Ints:
    """Reads what an author may write: Ints, a range, or a collection of positive integers."""
    if isinstance(value, Ints):
        return value
    if isinstance(value, range):
        return _from_range(value)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | dict):
        values = frozenset(value)
        if values and all(type(n) is int and n > 0 for n in values):
            return Ints(values=values)
    raise ValueError(f"expected ANY, MultipleOf(n), a range, or a set of positive integers, given {value!r}")


def _from_range(value: range) -> Ints:
    if not value or value.start < 1 or value.step < 1:
        raise ValueError(f"expected a non-empty rising range of positive integers, given {value!r}")
    return Ints(start=value.start, step=value.step, last=value[-1])


@lru_cache(maxsize=4096)
def _mask(ints: Ints, limit: int) -> int:
    if ints.values is not None:
        return sum(1 << n for n in ints.values if n <= limit)
    last = limit if ints.last is None else min(ints.last, limit)
    return sum(1 << n for n in range(ints.start, last + 1, ints.step))


IntSet = Annotated[
    Ints,
    BeforeValidator(to_ints),
    PlainSerializer(str, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string"}),
]
"""A pydantic field that reads what `to_ints` reads and is written in words."""
