"""A recorded workload: the trace of an engine as forwards, and the few that stand for all of them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headstock.bench.workload import Workload
from headstock.errors import HeadstockError
from headstock.files import parse_json, read_text
from headstock.offer import describe_validation_error

WORKS = "what Engine.record writes"
Length = Annotated[int, Field(ge=1)]


class Forward(BaseModel):
    """One line of a trace, see `headstock.engine.trace.Trace`: what a forward was, and the milliseconds it took."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    phase: Literal["decode", "extend", "mixed"]
    query_lens: tuple[Length, ...] = Field(min_length=1)
    kv_lens: tuple[Length, ...]
    page_size: Length = 1
    graph: bool = False
    ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    @model_validator(mode="after")
    def _fits(self) -> Forward:
        if len(self.query_lens) != len(self.kv_lens):
            raise ValueError("query_lens and kv_lens differ in length")
        if any(new > keys for new, keys in zip(self.query_lens, self.kv_lens, strict=True)):
            raise ValueError("a row has more new tokens than keys")
        return self

    def workloads(self) -> Iterator[Workload]:
        """The forward as the segments it ran in."""
        rows = list(zip(self.query_lens, self.kv_lens, strict=True))
        parts = [rows]
        if self.phase == "mixed":
            parts = [[row for row in rows if row[0] == 1], [row for row in rows if row[0] > 1]]
        for number, part in enumerate(parts):
            decode = self.phase == "decode" or (self.phase == "mixed" and number == 0)
            if part:
                new, keys = zip(*part, strict=True)
                yield Workload("decode" if decode else "extend", new, keys)


def read_trace(file: Path) -> list[Forward]:
    """The forwards of a trace; HeadstockError, naming the line, for anything else. A torn last line is left out."""
    lines = read_text(file, f"{WORKS} to a file").split("\n")
    forwards = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            content = parse_json(line, f"{file}:{number}", WORKS)
            forwards.append(Forward.model_validate(content))
        except HeadstockError:
            if number == len(lines):  # whole lines end with a line break
                continue
            raise
        except ValidationError as error:
            reason = describe_validation_error(error)
            raise HeadstockError(f"{file}:{number} is no line of a trace: {reason}", works=WORKS) from None
    if not forwards:
        raise HeadstockError(f"{file} has no forward in it", works=WORKS)
    return forwards


def representatives(forwards: Iterable[Forward], most: int = 12) -> list[Workload]:
    """The workloads that stand for a trace, the most frequent first, at most `most`; each weighs what it stands for.

    Segments are alike that agree in phase and, up to the next power of two, in rows, new tokens and keys; the one in
    the middle by its keys stands for them.
    """
    alike: dict[tuple[object, ...], list[Workload]] = {}
    for forward in forwards:
        for each in forward.workloads():
            sizes = (each.rows, each.tokens, sum(each.seq_lens))
            alike.setdefault((each.kind, *((size - 1).bit_length() for size in sizes)), []).append(each)
    groups = sorted(alike.values(), key=len, reverse=True)[:most]
    return [_middle(group) for group in groups]


def _middle(group: list[Workload]) -> Workload:
    each = sorted(group, key=lambda workload: sum(workload.seq_lens))[len(group) // 2]
    mean = sum(each.seq_lens) // each.rows
    lengths = str(mean) if each.kind == "decode" else f"{each.tokens // each.rows}+{mean - each.tokens // each.rows}"
    name = f"{each.kind}:{each.rows}x{lengths}" + ("" if len(set(each.seq_lens)) == 1 else " on average")
    return Workload(each.kind, each.query_lens, each.seq_lens, weight=len(group), name=name)
