"""Shared prefixes: how rows are ordered and cut into levels, so that the pages they have in common are read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_DEPTH = 16
"""How often prefixes may part before what follows counts as each row's own."""

Chain = Sequence[int]
"""The pages that a row may have in common with others, from its first on."""


class Run(NamedTuple):
    """Consecutive rows of one level, and the pages that they share there; none where they share nothing."""

    rows: int
    pages: tuple[int, ...]


Level = tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class _Branch:
    """Rows that have their chains in common up to page `end`: `rows` of them, from place `first` of the order on."""

    first: int
    rows: int
    end: int
    children: tuple[_Branch, ...]


class _Cut(NamedTuple):
    """One run to be: a branch's rows read the pages from `begin` to the branch's end once, as their level number."""

    level: int
    branch: _Branch
    begin: int


class Sharing:
    """The tree that the prefixes of some rows form.

    `chains` are the rows' pages. A page stands at one place of one tree, so rows that have a page in common have all
    before it in common. `order` has the rows depth-first: those that share lie together, as far as they share.
    """

    def __init__(self, chains: Sequence[Chain]):
        self.chains = chains
        self.order: list[int] = []
        self._branches = self._grow(list(range(len(chains))), 0, MAX_DEPTH)

    def levels(self, most: int, cost: float) -> tuple[Level, ...]:
        """The levels, coarse to fine and at most `most`, that save the most reading over what they cost.

        Every page that k rows read at once saves k − 1 reads, and every level costs as much as `cost` of them: its
        launch, and the merge of its results. Each level partitions all rows in `order`. None where none pays.
        """
        best: tuple[float, list[_Cut]] = (0.0, [])
        for count in range(1, most + 1):
            saved, cuts = _all(self._branches, 0, 0, count)
            if saved - count * cost > best[0]:
                best = saved - count * cost, cuts
        deepest = max((cut.level for cut in best[1]), default=-1)
        return tuple(self._level([cut for cut in best[1] if cut.level == level]) for level in range(deepest + 1))

    def _grow(self, rows: Sequence[int], begin: int, depth: int) -> tuple[_Branch, ...]:
        """The branches of rows that have all pages before `begin` in common; puts the rows in order."""
        parting: dict[int, list[int]] = {}
        for row in rows:
            chain = self.chains[row]
            parting.setdefault(chain[begin] if begin < len(chain) else -1, []).append(row)
        branches, alone = [], list[int]()
        for page, together in parting.items():
            if page < 0 or len(together) == 1 or not depth:
                alone += together  # last, for between two that share they would be a run of their own
                continue
            first, end = len(self.order), self._common(together, begin)
            children = self._grow(together, end, depth - 1)
            branches.append(_Branch(first, len(together), end, children))
        self.order += alone
        return tuple(branches)

    def _common(self, rows: Sequence[int], begin: int) -> int:
        """How many pages rows that share page `begin` have in common, by bisection."""
        low, high = begin + 1, min(len(self.chains[row]) for row in rows)
        while low < high:
            middle = (low + high + 1) // 2
            page = self.chains[rows[0]][middle - 1]
            if all(self.chains[row][middle - 1] == page for row in rows):
                low = middle
            else:
                high = middle - 1
        return low

    def _level(self, cuts: Sequence[_Cut]) -> Level:
        """The runs of one level, those between them without a page."""
        runs, place = [], 0
        for _, branch, begin in sorted(cuts, key=lambda cut: cut.branch.first):
            if branch.first > place:
                runs.append(Run(branch.first - place, ()))
            pages = self.chains[self.order[branch.first]][begin : branch.end]
            runs.append(Run(branch.rows, tuple(pages)))
            place = branch.first + branch.rows
        if place < len(self.order):
            runs.append(Run(len(self.order) - place, ()))
        return tuple(runs)


def _best(branch: _Branch, begin: int, level: int, left: int) -> tuple[int, list[_Cut]]:
    """The most reads that `left` more levels save for a branch whose pages up to `begin` are read, and by which cuts.

    Either its rows read on together to where they part, or each of its branches sees for itself.
    """
    if not left:
        return 0, []
    apart = _all(branch.children, begin, level, left)
    saved, cuts = _all(branch.children, branch.end, level + 1, left - 1)
    saved += (branch.end - begin) * (branch.rows - 1)
    return (saved, [_Cut(level, branch, begin), *cuts]) if saved > apart[0] else apart


def _all(branches: Sequence[_Branch], begin: int, level: int, left: int) -> tuple[int, list[_Cut]]:
    parts = [_best(branch, begin, level, left) for branch in branches]
    return sum(saved for saved, _ in parts), [cut for _, cuts in parts for cut in cuts]
