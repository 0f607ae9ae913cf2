"""The rows of a case: new tokens and keys of each, about the edges of pages, as its fields allow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Fields = dict[str, Any]


class Rows:
    """Rows of one phase: in decoding of `n` new tokens each where nothing else is asked for, 0 in extending."""

    def __init__(self, n: int):
        self.n = n

    def batch(self, fields: Fields, n: int | None = None) -> Fields:
        """Rows of all lengths at once, as these fields allow."""
        n = n or self.n
        if "shared" in fields:
            lens = _shared(fields["shared"], fields["page_size"])
            return {
                "query_lens": tuple([n or 2 for _ in lens]),
                "seq_lens": tuple(length + (n or 2) for length in lens),
            }
        if fields.get("cross") or fields["attention"] == "ragged":
            return {"query_lens": tuple([n or i + 1 for i in range(5)]), "seq_lens": (5, 0, 1, 9, 3)}
        rows = self.pairs(fields, n)
        return {"query_lens": tuple([new for new, _ in rows]), "seq_lens": tuple([length for _, length in rows])}

    def pairs(self, fields: Fields, n: int | None = None) -> list[tuple[int, int]]:
        """(new, keys) of rows whose keys end about the edges of pages."""
        n = n or self.n
        if n:
            return [(n, length) for length in self.lengths(fields, n)]
        page = min(fields.get("page_size") or 4, 64)
        pairs = {
            (1, 0),
            (page - 1, 0),
            (page, 0),
            (page + 1, 0),
            (2, page - 1),
            (page, page),
            (1, 2 * page),
            (3, page + 1),
        }
        return [(new, new + prefix) for new, prefix in sorted(pairs) if new]

    def lengths(self, fields: Fields, n: int) -> list[int]:
        """Lengths of `n` tokens and more about the edges of pages."""
        page = fields.get("page_size") or 4
        return sorted({n, n + 1, page - 1, page, page + 1, 2 * page, 3 * page + 1} - set(range(n)))


def prefixes(depth: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Shared levels of five rows: runs that share, one without rows, and a row that shares nothing anywhere."""
    return (((2, 2), (0, 0), (1, 0), (2, 1)), ((2, 1), (1, 0), (2, 1)))[:depth]


def _shared(shared: Iterable[Iterable[tuple[int, int]]], page: int) -> list[int]:
    """Keys before the new ones: what is shared, and a few of its own."""
    begin: list[int] = [0] * 5
    for level in shared:
        first = 0
        for rows, pages in level:
            for row in range(first, first + rows):
                begin[row] += pages * page
            first += rows
    return [start + own for start, own in zip(begin, (0, 3, 1, page, 2 * page + 1), strict=True)]
