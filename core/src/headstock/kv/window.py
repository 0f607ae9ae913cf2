"""The pages of one sliding window: what its layers keep of each request, beside the page table."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from headstock.device import Device
from headstock.kv.allocator import PageAllocator
from headstock.kv.mirror import Mirror


class WindowPages:
    """For each page of the page table, a page of a smaller cache that holds the same tokens' keys, or none any more.

    Layers with a window read no more keys than it shows, so each row holds the pages in its window and lets go of those
    behind. They are kept while there is room, since a row that begins with the same tokens may read them again, and
    taken, the longest unread first, when there is none. Numbers here are the page table's; `of` has this cache's own
    for each, 0 where there is none. So what rows share in the table they share here.
    """

    def __init__(self, window: int, num_pages: int, page_size: int, table_pages: int, max_requests: int):
        self.window, self.page_size = window, page_size
        self.allocator = PageAllocator(num_pages)
        self.of = [0] * table_pages
        self._of = torch.zeros(table_pages, dtype=torch.int32)  # the same
        self._mirror: Mirror | None = None
        self._readers = [0] * table_pages  # rows that have the page in their window
        self._idle: OrderedDict[int, None] = OrderedDict()  # held, but in the window of no row
        self._first = [0] * max_requests  # the first page in each row's window

    @staticmethod
    def enough(window: int, page_size: int, max_requests: int, max_tokens: int) -> int:
        """Pages for the windows of so many rows and the new tokens of a step, and as many again to be kept."""
        in_use = max_requests * (-(-window // page_size) + 2) + -(-max_tokens // page_size)
        return 2 * in_use + 1  # and the null page

    @property
    def num_used(self) -> int:
        """Pages that some row can read."""
        return self.allocator.num_pages - 1 - self.allocator.num_free - len(self._idle)

    def first(self, length: int) -> int:
        """The first page that a token at position `length`, or any after it, can see."""
        return max(length - self.window + 1, 0) // self.page_size

    def until(self, slot: int) -> int:
        """How many tokens a row can come to before `slide`, of those it had before, lets go of another page."""
        return (self._first[slot] + 1) * self.page_size + self.window - 1

    def covered(self, pages: Sequence[int]) -> int:
        """The most of a row's first pages after which it can go on: what the next token sees of them is held."""
        covered = held = 0
        for count, page in enumerate(pages, 1):
            held = held + 1 if self.of[page] else 0
            if held >= count - self.first(count * self.page_size):
                covered = count
        return covered

    def open(self, slot: int, pages: Sequence[int]) -> None:
        """A row begins with `pages`, after all of which it can go on."""
        self._first[slot] = self.first(len(pages) * self.page_size)
        self._read(pages[self._first[slot] :])

    def slide(self, slot: int, pages: Sequence[int], length: int) -> None:
        """A row lets go of what its tokens from position `length` on cannot see, in whole though it be interrupted."""
        before, now = self._first[slot], min(self.first(length), len(pages))
        if now > before:
            left = {page: self._readers[page] - 1 for page in pages[before:now]}
            try:
                self._let_go(slot, now, left)
            except BaseException:
                self._let_go(slot, now, left)  # what was done of it comes to the same once more
                raise

    def make_room(self, count: int) -> None:
        """Takes kept pages until `count` are free; raises OutOfPages when rows read too many."""
        for _ in range(min(count - self.allocator.num_free, len(self._idle))):
            oldest, _ = self._idle.popitem(last=False)
            self.allocator.free([self.of[oldest]])
            self._put(oldest, 0)
        self.allocator.require(count)

    def extend(self, pages: Sequence[int]) -> None:
        """A row goes on with fresh `pages`, for which there is room. One that still has a page here keeps it."""
        lacking = [page for page in pages if not self.of[page]]
        for page, own in zip(lacking, self.allocator.allocate(len(lacking)), strict=True):
            self._put(page, own)
        self._read(pages)

    def replace(self, slot: int, place: int, old: int, new: int) -> None:
        """The page at `place` of a row, `old`, becomes `new`, which has the same tokens and may lack their keys."""
        if not self.of[new] and self.of[old]:
            self._put(new, self.of[old])
            self._put(old, 0)
            self._idle.pop(old, None)
            self._idle[new] = None
        if place >= self._first[slot]:
            self._read([new])
            self._leave([old])

    def close(self, slot: int, pages: Sequence[int]) -> None:
        """A row ends."""
        self._leave(pages[self._first[slot] :])
        self._first[slot] = 0

    def keep(self, pages: Iterable[int], rows: Mapping[int, Sequence[int]]) -> None:
        """Forgets all but these pages of the table and these rows, in whatever state an interruption left the rest."""
        kept = {page: own for page in pages if (own := self.of[page])}
        self.allocator.keep(set(kept.values()))
        for page in range(len(self.of)):
            self._put(page, kept.get(page, 0))
        self._first = [first if slot in rows else 0 for slot, first in enumerate(self._first)]
        self._readers = [0] * len(self._readers)
        self._idle = OrderedDict.fromkeys([*(page for page in self._idle if page in kept), *kept])
        for slot, row in rows.items():
            self._read(row[self._first[slot] :])

    def rows(self, slots: Sequence[int], table: Tensor, seq_lens: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Rows of the page table, int32 [B, W], as they are here: from the first page in each window on, int32 [B, W'].

        And how many of each row's `seq_lens` keys they hold.
        """
        firsts = [self._first[slot] for slot in slots]
        lens = [length - first * self.page_size for length, first in zip(seq_lens, firsts, strict=True)]
        columns = torch.tensor(firsts)[:, None] + torch.arange(-(-max(lens) // self.page_size))
        pages = table.gather(1, columns.clamp(max=table.shape[1] - 1)).masked_fill_(columns >= table.shape[1], 0)
        return self._of[pages.long()], lens

    def mirror(self, device: Device) -> Mirror:
        """`of` as `device` has it, int32 [table pages]; made once, and kept up to date from then on."""
        if self._mirror is None:
            self._mirror = Mirror(self._of, device, spare=0)
        return self._mirror

    def check(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Asserts that every page is free, kept or read, by these rows alone. For tests and debugging."""
        held = {page: own for page, own in enumerate(self.of) if own}
        assert len(set(held.values())) == len(held) == self.allocator.num_pages - 1 - self.allocator.num_free
        readers = Counter(page for slot, pages in rows.items() for page in pages[self._first[slot] :])
        assert readers == Counter({page: count for page, count in enumerate(self._readers) if count})
        assert held.keys() == readers.keys() | self._idle.keys(), "what is held is read or kept"
        assert not readers.keys() & self._idle.keys(), "and never both"
        assert self._of.tolist() == self.of, "the tensor is the list"

    def _put(self, page: int, own: int) -> None:
        self.of[page] = own
        self._of[page] = own
        if self._mirror is not None:
            self._mirror.note(page, [own])

    def _let_go(self, slot: int, first: int, readers: Mapping[int, int]) -> None:
        """A row's window begins at its page `first`, and the pages before it have so many readers."""
        for page, count in readers.items():
            self._readers[page] = count
            if not count and self.of[page]:
                self._idle[page] = None
        self._first[slot] = first

    def _read(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._readers[page] += 1
            self._idle.pop(page, None)

    def _leave(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._readers[page] -= 1
            if not self._readers[page] and self.of[page]:
                self._idle[page] = None
