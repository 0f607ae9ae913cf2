"""Which batches a captured graph is replayed with: lengths and sharing that grow, shrink and change places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from headstock.testing.draw import Segments


@dataclass(frozen=True, slots=True)
class Replays:
    """Batches of at most `rows` rows (4 or more) with `n` new tokens and at most `context` keys each, in `page`s.

    Iterates over the keys of each row, new ones included, and the runs of rows that share pages, in at most `levels`
    levels; after those that are chosen come `drawn` random ones, the same every time.
    """

    rows: int
    n: int
    page: int
    context: int
    levels: int = 0
    drawn: int = 0

    def __iter__(self) -> Iterator[tuple[list[int], Segments]]:
        if self.levels:
            yield from ((self._lengths(shared), shared) for shared in self._sharing())
        else:
            yield from ((lens, ()) for lens in self._alone())
        draw = Random(self.levels)
        for _ in range(self.drawn):
            rows = draw.randint(1, self.rows)
            shared = self.draw(draw, rows, draw.randint(0, self.levels) if rows > 1 else 0)
            yield [draw.randint(begin + self.n, self.context) for begin in self._begins(shared, rows)], shared

    @property
    def most(self) -> int:
        """The most pages that rows can share: their new tokens are their own."""
        return (self.context - self.n) // self.page

    def draw(self, draw: Random, rows: int, levels: int) -> Segments:
        """Runs of any rows and pages, those of a level within those of the level before."""
        found, parents = [], [(rows, 0)]
        for level in range(levels):
            inside: list[tuple[int, int, int]] = []
            for left, before in parents:
                while left:
                    count = draw.randint(1, left)
                    shares = count > 1 and (before > 0 or level == 0)
                    inside.append((count, before, draw.randint(0, self.most - before) if shares else 0))
                    left -= count
            found.append(tuple((count, pages) for count, _, pages in inside))
            parents = [(count, before + pages) for count, before, pages in inside]
        return tuple(found)

    def _alone(self) -> list[list[int]]:
        """Full and padded, growing and shrinking, at page edges, to the bound and to the least."""
        n, page, longest = self.n, self.page, self.context
        rows = [[n + 1, page + n, n, 2 * page + n], [longest], [n, page + n + 1], [page + n, n, n + 2],
                [longest, longest - 1, n, n], [n]]  # fmt: skip
        return [[min(length, longest) for length in lens] for lens in rows]

    def _sharing(self) -> list[Segments]:
        """By all rows and by none, groups side by side and beside rows that share nothing, runs of one page and as many
        pages as leave a row its new tokens, padded and not, growing and shrinking; in fewer levels than captured too.
        """
        most = self.most
        one: list[Segments] = [
            (((2, 1), (2, most)),), (((4, 0),),), (((4, 2),),), (((2, most), (1, 0)),), (((2, 1),),),
            (((1, 0), (3, 1)),), (), (((2, most), (2, most)),), (((2, most),),),
        ]  # fmt: skip
        two: list[Segments] = [
            (((4, 1),), ((2, 2), (2, 1))), (((2, 2), (1, 0)), ((2, 1), (1, 0))), (((4, most - 1),), ((1, 0), (3, 1))),
            (((1, 0), (2, 1), (1, 0)), ((1, 0), (2, most - 1), (1, 0))), (((3, 1),), ((1, 0), (2, 1))),
        ]  # fmt: skip
        if self.levels == 1:
            return one
        return [each for pair in zip(two, one, strict=False) for each in pair]

    def _lengths(self, shared: Segments) -> list[int]:
        """Keys of rows that share so much: few and many of their own, at page edges."""
        n, page = self.n, self.page
        begins = self._begins(shared, sum(count for count, _ in shared[0]) if shared else self.rows)
        own = (n, page + n, max(page, n), n + 1)
        return [min(begin + more, self.context) for begin, more in zip(begins, own, strict=False)]

    def _begins(self, shared: Segments, rows: int) -> list[int]:
        """Where each row's own keys begin, after those that it shares."""
        pages = [0] * rows
        for level in shared:
            widths = [width for count, width in level for _ in range(count)]
            pages = [before + width for before, width in zip(pages, widths, strict=True)]
        return [count * self.page for count in pages]
